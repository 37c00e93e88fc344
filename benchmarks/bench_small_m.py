"""Products with few rows on a GPU: 4-bit weights against the bytes that must move and against bf16 `F.linear`.

    python benchmarks/bench_small_m.py [--rows 1,2,4,8,16,32,64] [--shapes 4096x4096,14336x4096,...]

Time: one CUDA graph of calls over weights that rotate through more than 400 MB, median of replays, gaps included.
floor: (packed codes + 8-bit scales + second-level scales + x + y) / 4.27 TB/s, the copy bandwidth of an H200.
error: |y - ref| / |ref| with ref in fp64 from the exactly dequantized weight; rounded: the same for one rounding of W
and of y to bf16, which is what a kernel that decodes W to bf16 gives at best.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from bitshard import _C, autograd, functional

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from cases import MODEL_LINEAR  # noqa: E402

COPY_BANDWIDTH = 4.27e12
ROTATION_BYTES = 400e6


def graph_microseconds(call: Callable[[int], object], calls: int, replays: int = 9) -> float:
    """GPU microseconds per call of `call(0) .. call(calls - 1)`, captured in one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    for _ in range(replays + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times[2:])


def errors(x: torch.Tensor, packed: torch.Tensor, state: functional.QuantState) -> tuple[float, float]:
    """Relative errors of our product and of one rounding of W and y to x's dtype."""
    state32 = functional.QuantState.from_dict(state.as_dict(packed=False), device=x.device)
    state32.dtype = torch.float32
    exact = functional.dequantize_4bit(packed, state32).double()
    reference = x.double() @ exact.T
    rounded = (x.double() @ exact.to(x.dtype).double().T).to(x.dtype)
    ours = autograd.matmul_4bit(x, packed, state)
    return tuple(((y.double() - reference).norm() / reference.norm()).item() for y in (ours, rounded))


def measure(N: int, K: int, rows: list[int]) -> None:
    weight_bytes = N * K / 2 + N * K / 64 + 4 * N * K / 64 / 256
    copies = max(2, int(ROTATION_BYTES / weight_bytes) + 1)
    weights = [
        functional.quantize_4bit(torch.randn(N, K, device="cuda", dtype=torch.bfloat16), quant_type="nf4",
                                 compress_statistics=True)
        for _ in range(copies)
    ]  # fmt: skip
    dense = [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) for _ in range(max(2, int(4e8 / (2 * N * K)) + 1))]
    for M in rows:
        x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
        calls = max(copies, min(96, 2 * copies))
        ours = graph_microseconds(lambda i, x=x: autograd.matmul_4bit(x, *weights[i % copies]), calls)
        linear = graph_microseconds(lambda i, x=x: torch.nn.functional.linear(x, dense[i % len(dense)]), 24)
        floor = (weight_bytes + 2 * M * (N + K)) / COPY_BANDWIDTH * 1e6
        properties = torch.cuda.get_device_properties(0)
        sm, sms = 10 * properties.major + properties.minor, properties.multi_processor_count
        kernel = _C.plan_linear_4bit(M, N, K, 2, sm, sms)["kernel"]
        error, rounded = errors(x, *weights[0])
        print(
            f"| {N}x{K} | {M} | {kernel} | {floor:.2f} | {ours:.2f} | {floor / ours:.2f} | {linear:.1f} "
            f"| {linear / ours:.2f} | {error:.2e} | {rounded:.2e} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64")
    parser.add_argument("--shapes", default=",".join(f"{N}x{K}" for N, K in MODEL_LINEAR.values()))
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, kernels for {_C.cuda_state()['architectures']}")
    print("| N x K | M | kernel | floor us | us | share | bf16 F.linear us | times faster | error | rounded |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    torch.manual_seed(0)
    with torch.no_grad():
        for shape in arguments.shapes.split(","):
            N, K = map(int, shape.split("x"))
            measure(N, K, [int(M) for M in arguments.rows.split(",")])


if __name__ == "__main__":
    main()
