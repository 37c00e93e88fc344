"""gemm_4bit_sm80_grouped beside the fastest products of the same instructions, one an expert, and beside panels.

    python benchmarks/experts_sm80.py [--seconds 200] [--shapes 128x1536x2048 ...] [--rows 16 ...] [--check]

First every form against a product of the W of dequantize_4bit in fp64, --check: no more than that. Then a table in
microseconds, nested NF4, bf16; all of it is larger than L2. On a Hopper card, too, as gemm_sm80.py says.

vendor: cuBLASLt's fastest kernel of sm_80 for so many rows, launched for one expert after the other, which all have as
many. wgmma: torch's grouped_mm. panels: what bitshard does without the kernel, a few experts at a time decoded and
multiplied by grouped_mm. decoding: of these the first part; with the vendor's time, panels on a card without wgmma. one
pass: the kernel, forced. uneven: the same with as many rows in all, each of which has chosen among the experts alike.
"""

from __future__ import annotations

import argparse
import itertools
import time

import torch
from bitshard import _C, functional, ops
from bitshard.functions import grouped
from experts import PANEL, Stack, by, routing
from gemm_sm80 import Lt, card, fastest, timed

KERNEL = "gemm_4bit_sm80_grouped"
SHAPES = ("128x1536x2048", "128x2048x768", "128x5760x2880", "8x4096x14336")  # experts, N, K
ROWS = (16, 64, 128, 256, 512)
SCALES = ((64, True), (64, False), (128, True), (32, True), (32, False), (4096, False))  # blocksize, nested
COUNTS = ([5, 0, 40, 127, 64, 1], [300, 0, 1, 255, 129, 513])  # rows of experts: tiles of 128, of 256


def forced(x: torch.Tensor, offs: torch.Tensor, weight: tuple, bias: torch.Tensor | None, numbers: tuple):
    """dx where there is no bias, else y."""
    if bias is None:
        return by(KERNEL, ops.grouped_linear_4bit_dgrad_fused, x, offs, *weight, *numbers)
    return by(KERNEL, ops.grouped_linear_4bit_fused, x, offs, *weight, bias, *numbers)


def wrong(dtype: torch.dtype, fmt: str, blocksize: int, nested: bool, counts: list[int], gradient: bool) -> str:
    """What is wrong with a product; "" for nothing."""
    N, K, E, end = 256 if blocksize == 4096 else 264, 320, len(counts), sum(counts)
    w = torch.randn(E, N, K, device="cuda").to(dtype)
    packed, state = functional.quantize_experts_4bit(w, blocksize, nested, fmt)
    weights = functional.dequantize_4bit(packed, state).double()
    weights = weights if gradient else weights.transpose(1, 2)
    bias = None if gradient else torch.randn(E, N, device="cuda", dtype=dtype)
    x = torch.randn(end + 9, weights.shape[1], device="cuda", dtype=dtype)
    offs = torch.tensor(counts, device="cuda").cumsum(0).int()
    numbers = (blocksize, ops.FORMATS[fmt], N, K)
    y, again = (forced(x, offs, (packed, *state.scales()), bias, numbers) for _ in range(2))
    expert = torch.searchsorted(offs, torch.arange(end, device="cuda"), right=True)
    rows = x[:end].double().unsqueeze(1)
    exact, size = ((part @ of[expert]).squeeze(1) for part, of in ((rows, weights), (rows.abs(), weights.abs())))
    if bias is not None:
        exact, size = exact + bias[expert].double(), size + bias[expert].double().abs()
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    found = (
        (((y[:end] - exact).abs() > exact.abs() * unit + size * 2.0**-20).any(), "beyond rounding"),
        (y[end:].any(), "rows of no expert"),
        (not torch.equal(y, again), "other bits"),
    )
    return ", ".join(text for is_wrong, text in found if is_wrong)


def check() -> int:
    """Of all forms; how many are wrong."""
    axes = ((torch.bfloat16, torch.float16), ("nf4", "fp4"), SCALES, COUNTS, (False, True))
    failed = n = 0
    for dtype, fmt, (blocksize, nested), counts, gradient in itertools.product(*axes):
        n += 1
        if said := wrong(dtype, fmt, blocksize, nested, counts, gradient):
            failed += 1
            print(f"WRONG {dtype} {fmt} {blocksize} nested {nested} {counts} gradient {gradient}: {said}")
    print(f"{n} checks, {failed} wrong")
    return failed


def vendors(lt: Lt, stack: Stack, rows: int, gradient: bool) -> dict:
    """The three fastest kernels of sm_80, each launched for all experts."""
    inner, outer = (stack.N, stack.K) if gradient else (stack.K, stack.N)
    x, y = (torch.randn(rows, n, device="cuda", dtype=torch.bfloat16) for n in (inner, outer))
    product = lt.product(rows, stack.N, stack.K, gradient)
    old = fastest(lt, product, stack.dense[0], x, y)[:3]

    def every(algorithm, _: int) -> None:
        for w in stack.dense:
            lt.run(product, algorithm, w, x, y)

    return {f"vendor {i}": lambda i, a=a: every(a, i) for i, a in enumerate(old)}


def decode(stack: Stack) -> None:
    panel, scales = max(1, PANEL // (2 * stack.N * stack.K)), stack.state.scales()
    for first in range(0, stack.E, panel):
        last = min(first + panel, stack.E)
        grouped._decoded(stack.packed, scales, first, last, (stack.E, 64, 0, stack.N, stack.K), torch.bfloat16)


def measure(lt: Lt, stack: Stack, rows: int, gradient: bool) -> dict[str, float]:
    x = torch.randn(stack.E * rows, stack.N if gradient else stack.K, device="cuda", dtype=torch.bfloat16)
    even = torch.arange(rows, (stack.E + 1) * rows, rows, dtype=torch.int32)[: stack.E]
    uneven = routing(stack.E, 1, stack.E * rows, False, 0)
    ways, other = (stack.ways(x, [ends], gradient) for ends in (even, uneven))
    for one in (ways, other):
        error = (one["sm80"](0).float() - (wanted := one["grouped_mm"](0).float())).norm() / wanted.norm()
        assert error < 0.01, error.item()
    calls = vendors(lt, stack, rows, gradient) | {"wgmma": ways["grouped_mm"], "panels": ways["panels"]}
    calls |= {"one pass": ways["sm80"], "uneven": other["sm80"], "decoding": lambda i: decode(stack)}
    found = timed({name: lambda i, call=call: call(0) for name, call in calls.items()}, dict.fromkeys(calls, 1))
    found["vendor"] = min(us for name, us in found.items() if name.startswith("vendor"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--shapes", nargs="*", default=SHAPES)
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    begin = time.monotonic()
    if check() or options.check:
        return int(not options.check)
    lt = Lt()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {_C.cuda_state()['architectures']}")
    head = ("experts x N x K", "rows", "", "wgmma", "vendor sm_80", "decoding", "panels", "one pass", "uneven", "tile")
    head += ("vendor / one pass", "(decoding + vendor) / one pass")
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for shape in options.shapes:
        E, N, K = map(int, shape.split("x"))
        stack = Stack(E, N, K)
        for rows, gradient in itertools.product(options.rows, (False, True)):
            if time.monotonic() - begin > options.seconds:
                print(f"stopped after {options.seconds:.0f} s")
                return 0
            us = measure(lt, stack, rows, gradient)
            settings = {"gradient": gradient, "kernel": KERNEL}
            (part,) = _C.plan_grouped_linear_4bit(E, E * rows, N, K, 2, *card(), **settings)["slices"]
            cells = [shape, rows, "gradient" if gradient else "forward"]
            cells += [f"{us[name]:.0f}" for name in ("wgmma", "vendor", "decoding", "panels", "one pass", "uneven")]
            cells += [part["launches"][0]["entry"].rpartition("_")[2]]
            cells += [f"{of / us['one pass']:.2f}" for of in (us["vendor"], us["decoding"] + us["vendor"])]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
        del stack
        torch.cuda.empty_cache()
    print(f"{time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
