"""Products with MXFP4 and NVFP4 weights on a GPU beside those of NF4 and of bf16: microseconds.

    python benchmarks/microscaled.py [--only mxfp4] [--rows 128 256] [--each 128]

NF4 has blocks of 64 and nested scales. A time is the median of five replays of a CUDA graph of 20 calls (of stacks 4);
weights rotate through 120 MB of packed bytes. BITSHARD_LINEAR_4BIT and its like force a kernel.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable

import torch
from bitshard.kinds import kind_of

TYPES = ("nf4", "mxfp4", "nvfp4")
SHAPES, ROWS = ((4096, 4096), (14336, 4096), (4096, 14336)), (1, 4, 16, 64, 128, 256, 512, 2048)
STACKS, EACH = ((32, 5760, 2880), (32, 2880, 2880)), (4, 16, 64, 128, 512)
ROTATED = 120e6  # bytes


def microseconds(call: Callable[[], object], count: int) -> float:
    """Of one of `count` calls in a graph."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(), graph.replay(), end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / count)
    return statistics.median(found[1:])


def quantized(values: torch.Tensor, quant_type: str) -> tuple:
    """Packed bytes and state of a weight or a stack."""
    kind = kind_of(quant_type)
    kind = kind if values.dim() == 2 else kind.stack
    settings = {"blocksize": kind.blocksize, "compress_statistics": True, "quant_type": quant_type}
    return kind.quantize(values, quant_storage=torch.uint8, **settings)


def product(x: torch.Tensor, made: list, offs: torch.Tensor | None, forward: bool) -> Callable[[], object]:
    """A call with the next of some equal weights."""
    weights = itertools.cycle(made)

    def call() -> object:
        packed, state = next(weights)
        if forward:
            return state.kind.product(x, packed, state, None, offs, 0.0)
        return state.kind.gradient(x, packed, state, offs)

    return call


def dense(options: argparse.Namespace) -> None:
    """Linear layers."""
    print("| weight | rows | | NF4 | MXFP4 | NVFP4 | bf16 |\n|---|---|---|---|---|---|---|")
    for N, K in SHAPES:
        w = torch.randn(N, K, device="cuda", dtype=torch.bfloat16) * 0.02
        made = {each: [quantized(w, each)] for each in options.types}
        copies = max(1, int(ROTATED / (N * K / 2)))
        made = {each: [(packed.clone(), state) for _ in range(copies)] for each, ((packed, state),) in made.items()}
        plain = itertools.cycle([w.clone() for _ in range(max(1, copies // 4))])
        for M, forward in itertools.product(options.rows, (True, False)):
            x = torch.randn(M, K if forward else N, device="cuda", dtype=torch.bfloat16)
            times = {each: microseconds(product(x, made[each], None, forward), 20) for each in options.types}
            bf16 = microseconds(lambda x=x, f=forward, p=plain: x @ (next(p).T if f else next(p)), 20)
            cells = [f"{times[each]:.1f}" if each in times else "" for each in TYPES] + [f"{bf16:.1f}"]
            print(f"| {N} x {K} | {M} | {'forward' if forward else 'gradient'} | {' | '.join(cells)} |", flush=True)


def stacks(options: argparse.Namespace) -> None:
    """Experts that all have as many rows."""
    print("\n| stack | rows an expert | | NF4 | MXFP4 | NVFP4 |\n|---|---|---|---|---|---|")
    for E, N, K in STACKS:
        w = torch.randn(E, N, K, device="cuda", dtype=torch.bfloat16) * 0.02
        made = {each: [quantized(w, each)] for each in options.types}
        del w
        for each_has, forward in itertools.product(options.each, (True, False)):
            offs = torch.arange(1, E + 1, device="cuda", dtype=torch.int32) * each_has
            x = torch.randn(E * each_has, K if forward else N, device="cuda", dtype=torch.bfloat16)
            times = {each: microseconds(product(x, made[each], offs, forward), 4) for each in options.types}
            cells = [f"{times[each]:.1f}" if each in times else "" for each in TYPES]
            way = "forward" if forward else "gradient"
            print(f"| {E} x {N} x {K} | {each_has} | {way} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", dest="types", nargs="+", choices=TYPES, default=TYPES, help="(default: all)")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help="of x, of a linear layer")
    parser.add_argument("--each", type=int, nargs="*", default=EACH, help="of x, of an expert")
    options = parser.parse_args()
    dense(options), stacks(options)


if __name__ == "__main__":
    main()
