"""All ways in which gemm_4bit_sm80 can share out its tiles, timed, and how far the plan's is from the fastest.

    python benchmarks/sm80_cuts.py --out CUTS.jsonl [--seconds 170] [--shapes 4096x4096 ...]
    python benchmarks/sm80_cuts.py --table CUTS.jsonl      # no GPU: what the plan of this build takes for that GPU

Needs nvcc: gemm_sm80.cu is compiled for this card, and started with each cut. bf16, nested NF4, weights larger than L2;
medians of graph replays that take turns, with the zeroing of flags where tiles are shared. A line of the file is a
case, N x K by M rows in a direction, with a way; the table has the cases in which the plan loses most.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path

from bitshard import _C
from timing import markdown_table

SHAPES = "14336x4096 4096x14336 4096x4096 28672x8192 1024x4096 8192x8192 6144x2048 2048x6144".split()
ROWS = ((128, 256, 512, 1024), (65, 192, 384, 768, 2048), (16, 96, 320, 640, 1536, 4096))  # the most telling first
SHOWN = 12
CASE, WAY = ("N", "K", "M", "gradient"), ("rows", "resident", "splits", "shared")


def measure(shapes: list[str], seconds: float, out: Path) -> None:
    import torch
    from gemm_sm80 import Case, Slow, card, cuts, timed

    begin, kernel, (sm, sms) = time.monotonic(), Slow(1), card()
    with out.open("w") as file:
        file.write(json.dumps({"device": torch.cuda.get_device_name(), "sm": sm, "sms": sms}) + "\n")
        for rows, shape in itertools.product(ROWS, shapes):
            N, K = map(int, shape.split("x"))
            case = Case(N, K)
            for gradient, M in itertools.product((False, True), rows):
                if time.monotonic() - begin > seconds:
                    print(f"stopped at {shape}, {rows}")
                    return
                width, depth = (K, N) if gradient else (N, K)
                x = torch.randn(M, depth, device="cuda", dtype=torch.bfloat16)
                y = torch.empty(M, width, device="cuda", dtype=torch.bfloat16)
                ways = list(cuts(sms, M, width, depth))
                calls = {}
                for k, (_, blocks, cut) in enumerate(ways):
                    calls[k] = lambda i, b=blocks, c=cut, x=x, y=y, g=gradient, w=case: kernel.call(w, x, y, i, g, b, c)
                found = timed(calls, dict.fromkeys(calls, len(case.codes)), rounds=2)
                for k, (resident, _, cut) in enumerate(ways):
                    line = {"N": N, "K": K, "M": M, "gradient": gradient, "resident": resident, **cut, "us": found[k]}
                    file.write(json.dumps(line) + "\n")
            print(f"{time.monotonic() - begin:4.0f} s {shape}, rows {rows}", file=sys.stderr, flush=True)
            del case
            torch.cuda.empty_cache()


def planned(case: tuple, sm: int, sms: int) -> tuple:
    """The way that the plan takes, as WAY has it."""
    N, K, M, gradient = case
    plan = _C.plan_linear_4bit(M, N, K, 2, sm, sms, gradient=gradient, kernel="gemm_4bit_sm80")
    (part,) = plan["slices"]
    (blocks, _, _), rows = part["launches"][0]["grid"], part["launches"][0]["block"]
    return rows, 1 if blocks <= sms else 2, part["splits"], part["shared_tiles"]


def said(way: tuple) -> str:
    rows, resident, splits, shared = way
    of = f"by {splits} blocks" if splits else f"{shared} in order" if shared else "whole"
    return f"{rows} rows, {of}, {resident} a multiprocessor"


def table(file: Path) -> str:
    head, *lines = [json.loads(line) for line in file.read_text().splitlines()]
    cases: dict[tuple, dict[tuple, float]] = {}
    for line in lines:
        case = cases.setdefault(tuple(line[name] for name in CASE), {})
        case[tuple(line.get(name, 0) for name in WAY)] = line["us"]
    rows, losses = [], []
    for case, ways in cases.items():
        way, best = planned(case, head["sm"], head["sms"]), min(ways, key=ways.get)
        losses.append(ways[way] / ways[best])
        N, K, M, gradient = case
        what = [f"{N} x {K}", M, "gradient" if gradient else "forward"]
        times = [said(way), f"{ways[way]:.1f}", said(best), f"{ways[best]:.1f}", f"{losses[-1]:.3f}"]
        rows.append([*map(str, what), *times])
    rows.sort(key=lambda row: -float(row[-1]))
    names = ["N x K", "rows", "", "the plan's", "us", "fastest", "us", "times"]
    text = f"{head['device']}, {len(cases)} cases, {len(lines)} ways: the plan's takes {statistics.mean(losses):.4f}"
    text += f" times as long as the fastest on average, {max(losses):.3f} at most\n\n"
    return text + markdown_table(names, rows[:SHOWN])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--seconds", type=float, default=170)
    parser.add_argument("--shapes", nargs="*", default=SHAPES)
    options = parser.parse_args()
    if options.out:
        measure(options.shapes, options.seconds, options.out)
    if options.out or options.table:
        print(table(options.table or options.out))


if __name__ == "__main__":
    main()
