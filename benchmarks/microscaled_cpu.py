"""Products with MXFP4 and NVFP4 weights on a CPU beside those of NF4: milliseconds, and NF4's time / theirs.

    python benchmarks/microscaled_cpu.py [--out benchmarks/results/FILE.md] [--rows 1 16] [--isas avx2] [--seconds 2]

bf16; NF4 has blocks of 64 and nested scales. The formats take turns, and the least time of each counts: other work on
the machine only adds. Packed weights rotate through 32 MB, more than the second-level cache.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from bitshard import _C
from microscaled import TYPES, product, quantized
from quality import processor
from timing import commit

SHAPES, ROWS = ((4096, 4096), (14336, 4096)), (1, 4, 16, 64, 256)
STACKS, EACH = ((8, 2880, 2880),), (1, 4, 16, 64)
ROTATED = 32e6  # bytes


def milliseconds(ways: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Least of each, taking turns for about `seconds`; at least three turns after one that counts for nothing."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + seconds
    for turn in itertools.count():
        for name, call in ways.items():
            begin = time.perf_counter()
            call()
            found[name].append(1e3 * (time.perf_counter() - begin))
        if turn >= 3 and time.perf_counter() > end:
            return {name: min(times[1:]) for name, times in found.items()}


def rows_of_table(title: str, made: dict, x: torch.Tensor, dy: torch.Tensor, offs, options) -> None:
    """Forward and gradient on each instruction set."""
    before = _C.isa()
    for isa, forward in itertools.product(options.isas, (True, False)):
        _C.set_isa(isa)
        ways = {each: product(x if forward else dy, made[each], offs, forward) for each in TYPES}
        times = milliseconds(ways, options.seconds)
        cells = [f"{times[each]:.2f}" for each in TYPES] + [f"{times['nf4'] / times[each]:.2f}" for each in TYPES[1:]]
        way = "forward" if forward else "gradient"
        print(f"| {title} | {way} | {isa} | {' | '.join(cells)} |", file=options.out, flush=True)
    _C.set_isa(before)


def copies(packed: torch.Tensor, state: object) -> list:
    return [(packed.clone(), state) for _ in range(max(1, int(ROTATED / packed.nbytes)))]


def table(options: argparse.Namespace) -> None:
    print("| weight | rows | | | NF4 | MXFP4 | NVFP4 | NF4 / MXFP4 | NF4 / NVFP4 |", file=options.out)
    print("|---" * 9 + "|", file=options.out)
    for N, K in SHAPES:
        w = torch.randn(N, K, dtype=torch.bfloat16) * 0.02
        made = {each: copies(*quantized(w, each)) for each in TYPES}
        for M in options.rows:
            x, dy = (torch.randn(M, size, dtype=torch.bfloat16) for size in (K, N))
            rows_of_table(f"{N} x {K} | {M}", made, x, dy, None, options)
    for E, N, K in STACKS:
        w = torch.randn(E, N, K, dtype=torch.bfloat16) * 0.02
        made = {each: copies(*quantized(w, each)) for each in TYPES}
        for M in options.each:
            offs = torch.arange(1, E + 1, dtype=torch.int32) * M
            x, dy = (torch.randn(E * M, size, dtype=torch.bfloat16) for size in (K, N))
            rows_of_table(f"{E} x {N} x {K} | {M} each", made, x, dy, offs, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="append the table to this file (default: print it)")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help="of x, of a linear layer")
    parser.add_argument("--each", type=int, nargs="*", default=EACH, help="of x, of an expert")
    parser.add_argument("--isas", nargs="+", choices=_C.isas(), default=[i for i in _C.isas() if i != "scalar"])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each line")
    options = parser.parse_args()
    options.out = options.out.open("a") if options.out else sys.stdout
    torch.manual_seed(0)
    words = (f"{date.today()}, {processor()}, {torch.get_num_threads()} threads", f"torch {torch.__version__}")
    print(f"{'; '.join(words)}; commit {commit('csrc', 'python')}.\n", file=options.out)
    table(options)


if __name__ == "__main__":
    main()
