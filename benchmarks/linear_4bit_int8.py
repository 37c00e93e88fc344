"""linear_4bit_int8 beside linear_4bit: by turns, milliseconds on a CPU, microseconds on a GPU, and the distance of y.

    python benchmarks/linear_4bit_int8.py [--out benchmarks/results/FILE.md]

NF4 with nested scales. The distance is Frobenius, of y in float64 with the decoded W; x has columns of different size.
On a GPU gemm_4bit_sm80, which is forced, and a product with W in 16 bits stand beside them, and bits of y are compared
with the CPU's. Packed weights rotate through 120 MB, W in 16 bits through 160 MB.
"""

import argparse
import sys
import time
from datetime import date
from pathlib import Path

import torch
from bitshard import _C, functional
from quality import processor
from turns import microseconds

SIZES = ((4096, 4096), (14336, 4096))
ROWS = (64, 128, 512, 2048)
GPU_SIZES, GPU_ROWS = (*SIZES, (4096, 14336), (28672, 8192)), (128, 512, 1024, 2048, 4096)
TURNS = 5


def milliseconds(ways: dict) -> dict[str, float]:
    """Least of each, taking turns: other work on the machine only adds."""
    found = {name: [] for name in ways}
    for turn in range(TURNS + 1):
        for name, call in ways.items():
            begin = time.perf_counter()
            call()
            if turn:
                found[name].append(1e3 * (time.perf_counter() - begin))
    return {name: min(times) for name, times in found.items()}


def make_x(M: int, K: int, dtype: torch.dtype) -> torch.Tensor:
    """Columns of different size."""
    return (torch.randn(M, K) * (0.5 * torch.randn(K)).exp()).to(dtype)


def row(isa: str, dtype: torch.dtype, M: int, packed: torch.Tensor, state: functional.QuantState) -> str:
    x = make_x(M, state.shape[1], dtype)
    both = {name: getattr(functional, name) for name in ("linear_4bit", "linear_4bit_int8")}
    times = milliseconds({name: lambda f=f: f(x, packed, state) for name, f in both.items()})
    few = x[:64].double()
    exact = few @ functional.dequantize_4bit(packed, state).double().T
    off = [(f(x, packed, state)[:64].double() - exact).norm() / exact.norm() for f in both.values()]
    plain, ours = times.values()
    N, K = state.shape
    return (
        f"| {isa} | {str(dtype).removeprefix('torch.')} | {N:,} x {K:,} | {M:,} | {plain:.1f} | {ours:.1f} | "
        f"{plain / ours:.2f} | {off[0]:.4f} | {off[1]:.4f} |"
    )


def differing(N: int, K: int, M: int, dtype: torch.dtype, nested: bool, quant_type: str) -> int:
    """Elements of y whose bits on the GPU are not those on the CPU; bias included."""
    w, x, bias = torch.randn(N, K) / K**0.5, make_x(M, K, dtype), torch.randn(N).to(dtype)
    packed, state = functional.quantize_4bit(w, compress_statistics=nested, quant_type=quant_type)
    here = functional.linear_4bit_int8(x, packed, state, bias)
    there = functional.linear_4bit_int8(x.cuda(), packed.cuda(), state.to("cuda"), bias.cuda()).cpu()
    return int((here.view(torch.uint8) != there.view(torch.uint8)).sum())


def compare() -> None:
    """A line for each product of some sizes: how many elements differ between GPU and CPU."""
    sizes = ((128, 128, 128), (256, 512, 64), (1000, 1088, 77), (384, 64, 1), (4096, 4096, 257), (130, 192, 300))
    for N, K, M in sizes:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for nested, quant_type in ((True, "nf4"), (False, "nf4"), (False, "fp4")):
                found = differing(N, K, M, dtype, nested, quant_type)
                print(f"{N} x {K}, {M} rows, {dtype}, {quant_type}, nested {nested}: {found} differ", flush=True)


def force(name: str) -> None:
    """The kernel of linear_4bit from now on: the plan's, or the forced one."""
    _C.force_kernel("linear_4bit", "gemm_4bit_sm80" if name == "sm80" else None)


def gpu_row(M: int, dtype: torch.dtype, made: list, dense: list) -> str:
    """Microseconds of one product by each way."""
    state = made[0][1]
    x = make_x(M, state.shape[1], dtype).cuda()

    def by(function):
        return lambda i: function(x, *made[i % len(made)])

    ways = {"plan": by(functional.linear_4bit), "sm80": by(functional.linear_4bit)}
    ways |= {"int8": by(functional.linear_4bit_int8), "dense": lambda i: x @ dense[i % len(dense)].T}
    times = microseconds(ways, prepare=force)
    N, K = state.shape
    cells = " | ".join(f"{times[name]:.1f}" for name in ways)
    ratios = " | ".join(f"{times[name] / times['int8']:.2f}" for name in ("dense", "plan", "sm80"))
    return f"| {str(dtype).removeprefix('torch.')} | {N:,} x {K:,} | {M:,} | {cells} | {ratios} |"


def on_gpu() -> list[str]:
    """The table of a GPU."""
    lines = [
        "| x | W | rows | linear_4bit, us | gemm_4bit_sm80 | linear_4bit_int8 | W in 16 bits | its time over int8's | "
        "linear_4bit's | gemm_4bit_sm80's |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for N, K in GPU_SIZES:
        packed, state = functional.quantize_nf4(torch.randn(N, K, device="cuda") / K**0.5, compress_statistics=True)
        made = [(packed.clone(), state) for _ in range(max(2, int(240e6 / (N * K))))]
        for dtype in (torch.bfloat16, torch.float16):
            w = functional.dequantize_4bit(packed, state).to(dtype)
            dense = [w.clone() for _ in range(max(2, int(80e6 / (N * K))))]
            for M in GPU_ROWS:
                lines.append(gpu_row(M, dtype, made, dense))
                print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Measure; print the table and, with --out, write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--times", action="store_true", help="on a GPU no comparison of bits")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    lines = [
        f"torch {torch.__version__}, {torch.cuda.get_device_name() if gpu else processor()}, {date.today()}",
        f"`python benchmarks/linear_4bit_int8.py {' '.join(sys.argv[1:])}`",
        "",
    ]
    if gpu:
        if not options.times:
            compare()
        lines += on_gpu()
    else:
        lines += on_cpu()
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def on_cpu() -> list[str]:
    """The table of a CPU."""
    lines = [
        "| instructions | x | W | rows | linear_4bit, ms | linear_4bit_int8, ms | times as fast | off | off, int8 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for N, K in SIZES:
        packed, state = functional.quantize_nf4(torch.randn(N, K) / K**0.5, compress_statistics=True)
        for isa in _C.isas()[:0:-1]:
            _C.set_isa(isa)
            for dtype in (torch.float32, torch.bfloat16):
                for M in ROWS:
                    lines.append(row(isa, dtype, M, packed, state))
                    print(lines[-1], flush=True)
    return lines


if __name__ == "__main__":
    main()
