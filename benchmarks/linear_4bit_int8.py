"""linear_4bit_int8 beside linear_4bit on the CPU: milliseconds, by turns, and the distance of y.

    python benchmarks/linear_4bit_int8.py [--out benchmarks/results/FILE.md]

NF4 with nested scales. The distance is Frobenius, of y in float64 with the decoded W; x has columns of different size.
"""

import argparse
import sys
import time
from datetime import date
from pathlib import Path

import torch
from bitshard import _C, functional
from quality import processor

SIZES = ((4096, 4096), (14336, 4096))
ROWS = (64, 128, 512, 2048)
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


def row(isa: str, dtype: torch.dtype, M: int, packed: torch.Tensor, state: functional.QuantState) -> str:
    x = torch.randn(M, state.shape[1]) * (0.5 * torch.randn(state.shape[1])).exp()
    x = x.to(dtype)
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


def main() -> None:
    """Measure; print the table and, with --out, write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = [
        f"torch {torch.__version__}, {processor()}, {date.today()}",
        f"`python benchmarks/linear_4bit_int8.py {' '.join(sys.argv[1:])}`",
        "",
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
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
