"""gemm_4bit_sm90_wide beside panels and bf16: nested NF4 weights, forward and input gradient, forced kernels.

    python benchmarks/bench_wide.py [--only 28672x8192,...] [--rows 128,256] [--ways wide,panels] [--seconds 500]
                                    [--directions forward,dgrad] [--dtype bfloat16] [--bursts]

A row is printed as soon as it is measured and the run ends in good order after --seconds, since GPU time is scarce; the
shapes that matter most come first. Microseconds a call, then bf16's time over it and the error. Way auto: what the
plan takes by itself. Sustained: graphs of about 6 ms over weights that rotate through more than 230 MB, ways taking
turns, median of 5. --bursts: 1 ms of calls, then 30 ms of nothing, so that the clock is not limited by power. Error:
|y - y64| / |y64| over that of W rounded to the dtype, first 64 rows.
"""

from __future__ import annotations

import argparse
import time

import torch
from bitshard import _C, functional, ops
from turns import microseconds

SHAPES = ("28672x8192", "14336x4096", "4096x14336", "8192x8192", "4096x4096")
ROTATION_BYTES = 230e6
OPS = {"forward": "linear_4bit", "dgrad": "linear_4bit_dgrad"}
KERNELS = {"wide": "gemm_4bit_sm90_wide", "panels": "panels", "gemm": "gemm_4bit_sm90"}


class Layer:
    """Weights of one shape, packed and dense, as many as rotate through L2."""

    def __init__(self, N: int, K: int, dtype: torch.dtype):
        self.N, self.K, self.dtype = N, K, dtype
        packed = max(2, -(-int(ROTATION_BYTES) // (N * K // 2 + N * K // 64)))
        dense = max(1, -(-int(ROTATION_BYTES) // (N * K * 2)))
        self.packed = [self.quantized() for _ in range(packed)]
        self.dense = [torch.randn(N, K, device="cuda", dtype=dtype) * 0.02 for _ in range(dense)]

    def quantized(self):
        w = torch.randn(self.N, self.K, device="cuda", dtype=self.dtype) * 0.02
        packed, state = functional.quantize_4bit(w, quant_type="nf4", compress_statistics=True)
        return packed, (state.absmax, state.state2.code, state.state2.absmax, state.offset)

    def ours(self, direction: str, x: torch.Tensor, i: int) -> torch.Tensor:
        packed, scales = self.packed[i % len(self.packed)]
        if direction == "dgrad":
            return ops.linear_4bit_dgrad(x, packed, *scales, 64, 0, self.N, self.K)
        return ops.linear_4bit(x, packed, *scales, x.new_empty(0), 64, 0, self.N, self.K)

    def bf16(self, direction: str, x: torch.Tensor, i: int) -> torch.Tensor:
        w = self.dense[i % len(self.dense)]
        return x @ w if direction == "dgrad" else torch.nn.functional.linear(x, w)

    def error(self, direction: str, x: torch.Tensor, y: torch.Tensor) -> float:
        """Of y = ours(direction, x, 0), over that of W rounded to the dtype."""
        packed, scales = self.packed[0]
        w = ops.dequantize_4bit(packed, *scales, 64, 0, self.N, self.K, torch.float32).reshape(self.N, self.K)
        turn = (lambda one: one) if direction == "dgrad" else (lambda one: one.T)
        exact = x.double() @ turn(w).double()
        rounded = (x.double() @ turn(w.to(self.dtype)).double()).to(self.dtype)
        return ((y.double() - exact).norm() / (rounded.double() - exact).norm()).item()


def measure(layer: Layer, direction: str, M: int, ways: list[str], bursts: bool) -> str:
    x = torch.randn(M, layer.N if direction == "dgrad" else layer.K, device="cuda", dtype=layer.dtype)

    def prepare(name: str) -> None:
        _C.force_kernel(OPS[direction], KERNELS.get(name))

    calls = {"bf16": lambda i: layer.bf16(direction, x, i)}
    cells = [f"{layer.N}x{layer.K}", direction, str(M)]
    errors = {}
    for name in ways:
        prepare(name)
        try:
            y = layer.ours(direction, x, 0)[:64]
        except RuntimeError as refused:
            if "cannot multiply" not in str(refused):
                raise
            continue
        errors[name] = layer.error(direction, x[:64], y)
        calls[name] = lambda i: layer.ours(direction, x, i)
    times = microseconds(calls, bursts, prepare)
    prepare("")
    cells.append(f"{times['bf16']:.1f}")
    for name in ways:
        found = name in times
        cells.append(f"{times[name]:.1f} ({times['bf16'] / times[name]:.2f}, {errors[name]:.3f})" if found else "-")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SHAPES))
    parser.add_argument("--rows", default="128,256,512,1024,2048")
    parser.add_argument("--directions", default="forward,dgrad")
    parser.add_argument("--ways", default="wide,panels")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--bursts", action="store_true")
    options = parser.parse_args()
    begin, ways = time.monotonic(), options.ways.split(",")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.dtype}, {'bursts' * options.bursts}")
    print("| N x K | direction | M | dense us | " + " | ".join(f"{way} us" for way in ways) + " |")
    print("|" + " --- |" * (4 + len(ways)), flush=True)
    for shape in options.only.split(","):
        layer = Layer(*map(int, shape.split("x")), getattr(torch, options.dtype))
        for direction in options.directions.split(","):
            for M in map(int, options.rows.split(",")):
                if time.monotonic() - begin > options.seconds:
                    print(f"stopped after {options.seconds:.0f} s, before {shape} {direction} M = {M}")
                    return
                print(measure(layer, direction, M, ways, options.bursts), flush=True)


if __name__ == "__main__":
    main()
