"""gemm_4bit_sm75 and its form for stacks on a GPU that is no T4: forced, checked against the CPU, timed beside panels.

    BITSHARD_CUDA_ARCHS=compute_75 python setup.py build_ext --inplace   # the driver compiles it for any later GPU
    python benchmarks/gemm_sm75.py --check [--small] [--seconds 100]
    python benchmarks/gemm_sm75.py --out sm75.json          # times; --kernel gemm_4bit_sm80 with another build
    python benchmarks/gemm_sm75.py --table sm75.json sm80.json     # with what the plan's model says of a T4; no GPU

Says nothing certain about a T4: another GPU has other tensor cores, memory and waiting times. NF4, nested scales, fp16;
microseconds of calls in CUDA graphs that take turns with panels, weights larger than L2.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

import torch
import turns
from bitshard import _C, functional, ops

SHAPES, ROWS = ((4096, 4096), (14336, 4096), (4096, 14336)), (64, 128, 256, 512, 1024, 2048)
STACK, STACK_ROWS = (32, 2880, 2880), (16, 64, 256)  # of an expert, on average
KERNEL, F16 = "gemm_4bit_sm75", torch.float16
PACKED_BYTES = 120 << 20
T4 = (75, 40)
# Rows, N, K, format, blocksize, nested, bias: ragged ones, tiles shared by 2 and 4 blocks and by all, whole ones
DENSE = [
    (1, 256, 256, 0, 64, True, True), (5, 4096, 4096, 0, 64, True, False), (65, 300, 320, 1, 64, True, True),
    (100, 643, 192, 0, 32, True, True), (130, 520, 192, 0, 128, False, False), (200, 4100, 4032, 1, 64, True, True),
    (256, 4096, 4096, 0, 64, True, True), (257, 1000, 8256, 0, 4096, False, False),
    (513, 4104, 4160, 0, 64, True, True),
    (300, 1283, 64, 0, 64, True, True), (777, 2048, 1088, 1, 32, False, True), (1000, 3072, 2048, 0, 64, True, False),
    (2048, 1024, 1024, 0, 256, True, True), (64, 14336, 4096, 0, 64, True, False),
    (384, 4096, 14336, 0, 64, True, False),
]  # fmt: skip
# Rows of each expert, N, K, format, blocksize, nested, bias
STACKS = [
    ([5, 0, 130], 264, 192, 0, 64, True, True), ([0, 0, 0], 128, 128, 0, 64, True, False),
    ([300, 1, 0, 257, 64], 1536, 2048, 0, 64, True, True), ([3, 70, 0, 512], 128, 320, 1, 128, False, False),
    ([1] * 70 + [0] * 30 + [200, 3], 704, 1024, 0, 32, True, True), ([40, 0, 33], 136, 192, 2, 32, False, True),
]  # fmt: skip


def weight(shape: tuple, fmt: int, blocksize: int, nested: bool):
    """On the CPU: packed bytes, scales, W as dequantize_4bit has it in fp16, [.., N, K]."""
    blocks = -(-torch.Size(shape).numel() // blocksize)
    packed = torch.randint(0, 256, (torch.Size(shape).numel() // 2,), dtype=torch.uint8)
    none, experts = torch.empty(0), shape[0] if len(shape) == 3 else 1
    scales = [torch.rand(blocks) * 0.2 + 0.01, none, none, none]
    if nested:
        each = -(-blocks // experts // 256)
        scales = [torch.randint(0, 256, (blocks,), dtype=torch.uint8), torch.linspace(-1, 1, 256)]
        scales += [torch.rand(experts * each) * 0.1 + 0.02, torch.full((experts,), 0.07)]
    values = []
    for e in range(experts):
        own = [part if i == 1 or part.numel() == 0 else part.view(experts, -1)[e] for i, part in enumerate(scales)]
        codes = packed.view(experts, -1)[e]
        values.append(ops.dequantize_4bit(codes, *own, blocksize, fmt, *shape[-2:], F16).reshape(shape[-2:]))
    return packed, scales, torch.stack(values).reshape(shape)


def wrong(y: torch.Tensor, x, w, bias) -> str:
    """y [M, N] of x [M, depth] and w [depth, N], both on the CPU: "" or by how much it is beyond rounding and sums."""
    exact = x.double() @ w.double() + (0 if bias is None else bias.double())
    allowed = exact.abs() * 2.0**-11 + (x.double().abs() @ w.double().abs()) * 2.0**-19 + 1e-30
    worst = ((y.double().cpu() - exact).abs() / allowed).nan_to_num(torch.inf).max().item() if y.numel() else 0.0
    return "" if worst <= 1 else f"{worst:.2f} times what is allowed"


def check_dense(case: tuple, gradient: bool) -> str:
    M, N, K, fmt, blocksize, nested, with_bias = case
    if gradient and N % 8:
        return "skip"
    packed, scales, w = weight((N, K), fmt, blocksize, nested)
    x = torch.randn(M, (N if gradient else K) + 8).to(F16)
    bias = torch.randn(N).to(F16) if with_bias and not gradient else None
    on = [packed.cuda(), *(one.cuda() for one in scales)]

    def product():
        rows = x.cuda()[:, :-8]
        if gradient:
            return ops.linear_4bit_dgrad(rows, *on, blocksize, fmt, N, K)
        return ops.linear_4bit(rows, *on, rows.new_empty(0) if bias is None else bias.cuda(), blocksize, fmt, N, K)

    y = product()
    if not all(torch.equal(y, product()) for _ in range(3)):
        return "runs differ"
    return wrong(y, x[:, :-8], w if gradient else w.T, bias)


def check_stack(case: tuple, gradient: bool) -> str:
    counts, N, K, fmt, blocksize, nested, with_bias = case
    packed, scales, w = weight((len(counts), N, K), fmt, blocksize, nested)
    offs = torch.tensor(counts).cumsum(0).int()
    x = torch.randn(int(offs[-1]) + 3, N if gradient else K).to(F16)
    bias = torch.randn(len(counts), N).to(F16) if with_bias and not gradient else None
    on = [packed.cuda(), *(one.cuda() for one in scales)]

    def product():
        if gradient:
            return ops.grouped_linear_4bit_dgrad_fused(x.cuda(), offs.cuda(), *on, blocksize, fmt, N, K)
        given = x.new_empty(0) if bias is None else bias
        return ops.grouped_linear_4bit_fused(x.cuda(), offs.cuda(), *on, given.cuda(), blocksize, fmt, N, K)

    y = product()
    if not all(torch.equal(y, product()) for _ in range(3)):
        return "runs differ"
    if y[offs[-1] :].any():
        return "rows of no expert are not zero"
    for e, (begin, end) in enumerate(itertools.pairwise([0, *offs.tolist()])):
        found = wrong(y[begin:end], x[begin:end], w[e] if gradient else w[e].T, None if bias is None else bias[e])
        if found:
            return f"expert {e}: {found}"
    return ""


def force(kernel: str | None) -> None:
    for op in ("linear_4bit", "linear_4bit_dgrad"):
        _C.force_kernel(op, kernel)
        _C.force_kernel(f"grouped_{op}", f"{kernel}_grouped" if kernel and kernel != "panels" else kernel)


def check(small: bool, seconds: float) -> int:
    begin, done, failed = time.monotonic(), 0, 0
    cases = [(check_dense, case) for case in DENSE] + [(check_stack, case) for case in STACKS]
    for (run, case), gradient in itertools.product(cases, (False, True)):
        rows = case[0] if isinstance(case[0], int) else sum(case[0])
        if small and rows * case[1] * case[2] > 2e8 or time.monotonic() - begin > seconds:
            continue
        torch.manual_seed(0)
        found = run(case, gradient)
        torch.cuda.synchronize()
        if found != "skip":
            done, failed = done + 1, failed + bool(found)
            print(f"{'WRONG' if found else 'ok':5} {run.__name__} {case} gradient {gradient} {found}", flush=True)
    print(f"{done} checks, {failed} wrong, {time.monotonic() - begin:.0f} s, {torch.cuda.get_device_name()}")
    return int(failed > 0 or done == 0)


# ---- times ----


def timed_dense(kernel: str, N: int, K: int):
    w = torch.randn(N, K, device="cuda", dtype=F16)
    packed, state = functional.quantize_4bit(w, quant_type="nf4", compress_statistics=True)
    scales = (state.absmax, state.state2.code, state.state2.absmax, state.offset)
    codes = [packed.clone() for _ in range(-(-PACKED_BYTES // packed.numel()))]
    for M, gradient in itertools.product(ROWS, (False, True)):
        x = torch.randn(M, N if gradient else K, device="cuda", dtype=F16)

        def call(i: int, x=x, gradient=gradient):
            one = (codes[i % len(codes)], *scales)
            if gradient:
                return ops.linear_4bit_dgrad(x, *one, 64, 0, N, K)
            return ops.linear_4bit(x, *one, x.new_empty(0), 64, 0, N, K)

        yield f"{N} x {K}", M, gradient, turns.microseconds({kernel: call, "panels": call}, prepare=force)


def timed_stack(kernel: str, E: int, N: int, K: int):
    packed, state = functional.quantize_experts_4bit(torch.randn(E, N, K), 64, True, "nf4")
    on = (packed.cuda(), *(one.cuda() for one in state.scales()))
    for each, gradient in itertools.product(STACK_ROWS, (False, True)):
        counts = torch.bincount(
            torch.randint(0, E, (each * E,), generator=torch.Generator().manual_seed(0)), minlength=E
        )
        offs = counts.cumsum(0).int().cuda()
        x = torch.randn(each * E, N if gradient else K, device="cuda", dtype=F16)

        def call(i: int, x=x, gradient=gradient, offs=offs):
            if gradient:
                return ops.grouped_linear_4bit_dgrad(x, offs, *on, 64, 0, N, K)
            return ops.grouped_linear_4bit(x, offs, *on, x.new_empty(0), 64, 0, N, K)

        yield (
            f"{E} experts, {N} x {K}",
            each * E,
            gradient,
            turns.microseconds({kernel: call, "panels": call}, prepare=force),
        )


def times(kernel: str, out: Path) -> None:
    found = []
    for rows in [*(timed_dense(kernel, *shape) for shape in SHAPES), timed_stack(kernel, *STACK)]:
        for what, M, gradient, us in rows:
            found.append((what, M, gradient, us[kernel], us["panels"]))
            print(what, M, gradient, us, flush=True)
            out.write_text(json.dumps(found))


def predicted(what: str, M: int, gradient: bool) -> list[str]:
    """The model's microseconds of a T4: one pass, panels; and which the plan takes."""
    if "experts" in what:
        return ["", "", ""]
    N, K = map(int, what.split(" x "))
    settings = {"gradient": gradient, "architectures": "75"}
    ns = [_C.plan_linear_4bit(M, N, K, 1, *T4, kernel=kernel, **settings)["ns"] for kernel in (KERNEL, "panels")]
    return [*(f"{one / 1000:.0f}" for one in ns), _C.plan_linear_4bit(M, N, K, 1, *T4, **settings)["kernel"]]


def table(files: list[Path]) -> None:
    sm75, sm80 = ({tuple(row[:3]): row[3:] for row in json.loads(file.read_text())} for file in files)
    head = ("N x K", "rows", "", "gemm_4bit_sm75", "panels", "gemm_4bit_sm80", "panels, its build", "sm80 / sm75")
    head += ("model of a T4: one pass", "panels", "plan")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for (what, M, gradient), (one, panels) in sm75.items():
        other, others_panels = sm80.get((what, M, gradient), (float("nan"),) * 2)
        cells = [what, M, "gradient" if gradient else "forward", *(f"{us:.1f}" for us in (one, panels, other))]
        cells += [f"{others_panels:.1f}", f"{other / one:.2f}", *predicted(what, M, gradient)]
        print(f"| {' | '.join(map(str, cells))} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", default=KERNEL, choices=(KERNEL, "gemm_4bit_sm80"))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--small", action="store_true", help="checks that are fast under a sanitizer")
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, nargs=2)
    options = parser.parse_args()
    force(options.kernel)
    status = check(options.small, options.seconds) if options.check else 0
    if options.out:
        times(options.kernel, options.out)
    if options.table:
        table(options.table)
    return status


if __name__ == "__main__":
    sys.exit(main())
