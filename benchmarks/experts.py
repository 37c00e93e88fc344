"""Grouped products of 4-bit experts on a GPU against torch's `grouped_mm` and against one vendor product per expert.

    python benchmarks/experts.py [--shapes Qwen3-30B-A3B,...] [--tokens 1,64,4096] [--with gemv,wide,sm80,panels]
                                 [--forward] [--out FILE]

Products: gate and up [2 I, H], down [H, I], and their input gradients. The 16-bit contestants multiply with bf16
stacks and the same routing. Time: CUDA graphs of about 6 ms of calls, each with another routing, contestants taking
turns, median of 20, gaps included. skewed: the number of tokens of an expert falls as 1 / rank. each: `torch.mm` for
each expert that has rows. bitshard: what the plan takes; --with: also a kernel, or decoded panels, alone. speed: of
`grouped_mm`, 2 means half the time. error: |y - ref| / |ref|, ref in fp64 from the decoded weights, largest of a few
experts; `grouped_mm`'s is of those weights rounded to bf16.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from bitshard import _C, functional, ops
from bitshard.functions import grouped
from timing import commit, markdown_table
from turns import microseconds

KERNELS = {"gemv": "gemv_4bit_grouped", "wide": "gemm_4bit_sm90_wide_grouped", "sm80": "gemm_4bit_sm80_grouped"}
PANEL = 64 << 20  # bytes of decoded experts
SHAPES = {  # experts, chosen, hidden, intermediate
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "Mixtral-8x7B": (8, 2, 4096, 14336),
    "DeepSeek-V3": (256, 8, 7168, 2048),
}
CONTESTANTS = ("grouped_mm", "each", "bitshard")
TURNS = 24
DEVICE, DTYPE = "cuda", torch.bfloat16


def by(kernel: str, op: Callable, *arguments) -> torch.Tensor:
    """A product by a kernel that is forced."""
    name = op.name().split("::")[1].removesuffix("_fused")
    _C.force_kernel(name, kernel)
    try:
        return op(*arguments)
    finally:
        _C.force_kernel(name, None)


def routing(experts: int, chosen: int, tokens: int, skewed: bool, seed: int) -> torch.Tensor:
    """int32 [E] on the host: where the rows of each expert end."""
    generator = torch.Generator().manual_seed(seed)
    weights = 1 / torch.arange(1, experts + 1).float() if skewed else torch.ones(experts)
    weights = weights[torch.randperm(experts, generator=generator)]
    picked = torch.multinomial(weights.expand(tokens, -1), chosen, generator=generator)
    return torch.bincount(picked.flatten(), minlength=experts).cumsum(0).int()


class Stack:
    """One stack in bf16 and in nested NF4."""

    def __init__(self, experts: int, N: int, K: int):
        self.E, self.N, self.K = experts, N, K
        self.dense = torch.empty(experts, N, K, device=DEVICE, dtype=DTYPE)
        for expert in range(experts):
            self.dense[expert].normal_(0, 0.02)
        self.packed, self.state = functional.quantize_experts_4bit(
            self.dense, compress_statistics=True, quant_type="nf4"
        )
        for expert in range(experts):
            self.dense[expert] = functional.dequantize_4bit(*functional.expert_of(self.packed, self.state, expert))

    def arguments(self, bias: bool) -> tuple:
        """Those of the op behind x and offs."""
        none = [ops.empty(self.packed.device)] if bias else []
        return self.packed, *self.state.scales(), *none, 64, 0, self.N, self.K

    def ways(self, x: torch.Tensor, routings: list, gradient: bool) -> dict:
        """{contestant: call(i)}."""
        offs = [r.to(DEVICE) for r in routings]
        ends = [[0, *r.tolist()] for r in routings]
        weights = self.dense if gradient else self.dense.transpose(1, 2)
        numbers = (self.E, 64, 0, self.N, self.K)
        panel = max(1, PANEL // (self.N * self.K * DTYPE.itemsize))
        scales = self.state.scales()

        def each(i: int) -> None:
            for expert in range(self.E):
                begin, end = ends[i][expert : expert + 2]
                if end > begin:
                    torch.mm(x[begin:end], weights[expert])

        def ours(i: int) -> torch.Tensor:
            if gradient:
                return ops.grouped_linear_4bit_dgrad(x, offs[i], *self.arguments(False))
            return ops.grouped_linear_4bit(x, offs[i], *self.arguments(True))

        found = {
            "grouped_mm": lambda i: torch.nn.functional.grouped_mm(x, weights, offs=offs[i]),
            "each": each,
            "bitshard": ours,
            "panels": lambda i: grouped.by_panels(x, offs[i], self.packed, scales, numbers, gradient, panel),
        }
        op = ops.grouped_linear_4bit_dgrad_fused if gradient else ops.grouped_linear_4bit_fused
        for name, kernel in list(KERNELS.items())[gradient:]:
            found[name] = lambda i, kernel=kernel: by(kernel, op, x, offs[i], *self.arguments(not gradient))
        return found

    def errors(self, x: torch.Tensor, ends: torch.Tensor, ways: dict, gradient: bool) -> tuple[float, float]:
        """(of bitshard, of grouped_mm) with the first routing."""
        ours, theirs = ways["bitshard"](0).double(), ways["grouped_mm"](0).double()
        found, begin = [], 0
        state = functional.QuantState.from_dict(self.state.as_dict(packed=False), device=DEVICE)
        state.dtype = torch.float32
        for expert, end in enumerate(ends.tolist()):
            if end > begin and len(found) < 4:
                weight = functional.dequantize_4bit(*functional.expert_of(self.packed, state, expert)).double()
                exact = x[begin:end].double() @ (weight if gradient else weight.T)
                found.append([((y[begin:end] - exact).norm() / exact.norm()).item() for y in (ours, theirs)])
            begin = end
        return tuple(map(max, zip(*found, strict=True)))


def measure(stack: Stack, chosen: int, tokens: int, skewed: bool, gradient: bool, contestants: list) -> list[str]:
    """Cells of a row of the table; nan where a contestant cannot multiply."""
    calls = 8 if tokens * chosen <= 4096 else 2
    routings = [routing(stack.E, chosen, tokens, skewed, seed) for seed in range(calls)]
    x = torch.randn(tokens * chosen, stack.N if gradient else stack.K, device=DEVICE, dtype=DTYPE)
    ways = stack.ways(x, routings, gradient)
    timed = {}
    for name in contestants:
        try:
            ways[name](0)
            timed[name] = lambda i, call=ways[name]: call(i % calls)
        except (KeyError, RuntimeError, ValueError) as error:
            print(f"{name}: {error}", file=sys.stderr)
    times = microseconds(timed, routine=calls, turns=TURNS)
    errors = stack.errors(x, routings[0], ways, gradient)
    base = times["grouped_mm"]
    cells = [f"{times.get(name, float('nan')):.1f}" for name in contestants]
    cells += [f"{base / times['bitshard']:.2f}", f"{times['each'] / times['bitshard']:.2f}"]
    gpu = torch.cuda.get_device_properties(DEVICE)
    card = (10 * gpu.major + gpu.minor, gpu.multi_processor_count)
    kernel = _C.plan_grouped_linear_4bit(stack.E, len(x), stack.N, stack.K, 2, *card, gradient=gradient)["kernel"]
    return [*cells, kernel, *(f"{error:.2e}" for error in errors)]


def main() -> None:
    """Print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="1,64,4096")
    parser.add_argument("--with", default="", dest="more", help="gemv, wide, sm80, panels")
    parser.add_argument("--forward", action="store_true", help="no gradients")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    contestants = [*CONTESTANTS, *filter(None, options.more.split(","))]
    header = ["shape", "product", "tokens", "routing", *(f"{name} us" for name in contestants)]
    header += ["speed", "speed of each", "kernel", "error", "error of grouped_mm"]
    rows = []
    for name in options.shapes.split(","):
        experts, chosen, hidden, intermediate = SHAPES[name]
        for product, N, K in (("gate_up", 2 * intermediate, hidden), ("down", hidden, intermediate)):
            stack = Stack(experts, N, K)
            for gradient in (False,) if options.forward else (False, True):
                for tokens in map(int, options.tokens.split(",")):
                    for skewed in (False, True) if tokens > 1 else (False,):
                        cells = measure(stack, chosen, tokens, skewed, gradient, contestants)
                        how = "skewed" if skewed else "uniform"
                        rows.append([name, f"{product}{' dx' * gradient}", str(tokens), how, *cells])
                        print(" | ".join(rows[-1]), flush=True)
            del stack
            torch.cuda.empty_cache()
    write(header, rows, options.out)


def write(header: list[str], rows: list[list[str]], out: Path | None) -> None:
    """Print the table behind what it was measured on; also into the file `out`."""
    versions = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, kernels {_C.cuda_state()['architectures']}"
    text = f"{versions}, commit {commit('python', 'csrc', 'cuda')}\n\n{markdown_table(header, rows)}\n"
    print(text)
    if out:
        out.write_text(text)


if __name__ == "__main__":
    main()
