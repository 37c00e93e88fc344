"""What the plan takes a GPU to do, by data sheet and as measured at its first use, beside products that are timed.

    python benchmarks/card_rates.py [--shapes 4096x4096 ...] [--rows 128 ...] [--out FILE]

`bitshard.functions.card` measures the GPU, as BITSHARD_MEASURE_CARD=1 does, and says in how many milliseconds. Then
every product is timed in one pass (gemm_4bit_sm80) and by panels, and both are compared with the plan's estimates.
Nothing is read from its file or written there. `bench.py --report` has the same table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import turns
from bitshard import _C, functional
from bitshard.functions import card

SHAPES, ROWS = ("4096x4096", "14336x4096", "4096x14336"), (64, 128, 256, 512, 1024, 2048, 4096)
HEAD = ("N x K", "rows", "", "one pass", "panels", "counted", "measured", "faster", "by data sheet", "by measuring")


def timed(x: torch.Tensor, packed: torch.Tensor, state, gradient: bool) -> list[float]:
    """Microseconds of a product in one pass and by panels, which take turns."""
    call = functional.linear_4bit_dgrad if gradient else functional.linear_4bit
    op = "linear_4bit_dgrad" if gradient else "linear_4bit"
    ways = {kernel: lambda i: call(x, packed, state) for kernel in (card.ONE_PASS, card.PANELS)}
    try:
        return list(turns.microseconds(ways, prepare=lambda kernel: _C.force_kernel(op, kernel)).values())
    finally:
        _C.force_kernel(op, None)


def estimates(rates: dict, sm: int, sms: int, sizes: tuple, gradient: bool) -> list[float]:
    """Microseconds of one pass and of panels by such rates."""
    _C.set_card_rates(sm, *(rates[name] for name in card.KEPT))
    try:
        plans = [
            _C.plan_linear_4bit(*sizes, 2, sm, sms, gradient=gradient, kernel=kernel)
            for kernel in (card.ONE_PASS, card.PANELS)
        ]
    finally:
        _C.set_card_rates(sm)
    return [plan["ns"] / 1000 for plan in plans]


def rows_of(counted: dict, measured: dict, shapes, rows, device) -> Iterator[list[str]]:
    """A line of the table for each product."""
    properties = torch.cuda.get_device_properties(device)
    sm, sms = 10 * properties.major + properties.minor, properties.multi_processor_count
    for N, K in shapes:
        weight = torch.randn(N, K, device=device, dtype=torch.bfloat16)
        packed, state = functional.quantize_nf4(weight, compress_statistics=True)
        del weight
        for M in rows:
            for gradient in (False, True):
                x = torch.randn(M, N if gradient else K, device=device, dtype=torch.bfloat16)
                times = timed(x, packed, state, gradient)
                found = [estimates(rates, sm, sms, (M, N, K), gradient) for rates in (counted, measured)]
                lost = [times[each.index(min(each))] / min(times) for each in found]
                yield [
                    f"{N} x {K}", str(M), "gradient" if gradient else "forward", *(f"{time:.1f}" for time in times),
                    *(f"{one:.1f} / {panels:.1f}" for one, panels in found),
                    "one pass" if times[0] <= times[1] else "panels", *(f"{ratio:.2f}" for ratio in lost),
                ]  # fmt: skip


def text(shapes, rows, device: torch.device) -> str:
    """Rates and table in Markdown."""
    properties = torch.cuda.get_device_properties(device)
    sm = 10 * properties.major + properties.minor
    card.measured(device)  # the first call loads kernels
    begin = time.perf_counter()
    counted, measured = _C.card_rates(sm), card.measured(device)
    lines = [f"Measured in {1000 * (time.perf_counter() - begin):.0f} ms.", "", "| rate | counted | measured |"]
    lines += ["|---|---|---|"]
    for name in card.KEPT:
        lines.append(f"| {name} | {_shown(counted[name])} | {_shown(measured[name])} |")
    table = list(rows_of(counted, measured, shapes, rows, device))
    lines += ["", f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}", *(f"| {' | '.join(row)} |" for row in table)]
    worst = [max(float(row[column]) for row in table) for column in (8, 9)]
    wrong = [sum(float(row[column]) > 1 for row in table) for column in (8, 9)]
    lines += [
        "",
        f"Of {len(table)} products the slower way: {wrong[0]} by the data sheet, at worst {worst[0]:.2f} times",
    ]
    lines[-1] += f" as long; {wrong[1]} by measuring, at worst {worst[1]:.2f}."
    return "\n".join(lines)


def _shown(value) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(_shown(each) for each in value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def sizes(name: str) -> tuple[int, ...]:
    return tuple(map(int, name.split("x")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="*", default=SHAPES, help="N x K")
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    found = text([sizes(shape) for shape in options.shapes], options.rows, device)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n\n{found}")
    if options.out:
        options.out.write_text(found + "\n")


if __name__ == "__main__":
    main()
