"""Products with MXFP4 and NVFP4 weights by the kernels for few rows and of sm_80 on a GPU: a line for each check.

    python benchmarks/checks/cuda_short_blocks.py [--only WORD] [--seconds 200]
    compute-sanitizer --tool memcheck python benchmarks/checks/cuda_short_blocks.py --only small

Every code with every scale has its exact value. Random products: two runs give equal bits, and the error against fp64
is at most 1.02 of that of the exact product rounded once; gemm_4bit_sm80 rounds W to 16 bits, and is compared to the
product of that. Ends with a count and status 1 where something failed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time

import torch
from bitshard import _C, ops

BF16, F16 = torch.bfloat16, torch.float16
BLOCK, MAP, LARGEST = {"mxfp4": 32, "nvfp4": 16}, {"mxfp4": "e8m0", "nvfp4": "e4m3"}, {"mxfp4": 252, "nvfp4": 126}
E2M1, BOUND = 2, 1.02
GEMV, SM90, SM80 = "gemv_4bit", "gemm_4bit_sm90", "gemm_4bit_sm80"
STACKED = {GEMV: "gemv_4bit_grouped", SM80: "gemm_4bit_sm80_grouped"}
ROUNDS_W = (SM80,)
# M, N, K
SIZES = {
    "small": [(5, 256, 256), (13, 304, 320), (33, 528, 192), (64, 1280, 64), (1, 512, 2880)],
    "ragged": [(1, 4096, 4096), (7, 4112, 4032), (17, 1008, 8256), (31, 4128, 2880), (63, 14352, 1088), (3, 80, 28736)],
    "whole": [(16, 4096, 4096), (32, 14336, 4096), (64, 4096, 14336), (48, 8192, 8192), (8, 28672, 8192)],
}
# rows of experts, N, K
STACKS = {
    "small": [([5, 0, 13], 256, 192), ([0, 3], 128, 128), ([1, 0, 9, 17, 33], 272, 64), ([20, 0, 21], 80, 8256)],
    "ragged": [([0, 70, 3, 0, 64, 65, 10, 0], 1296, 2880), ([4] * 60 + [0] * 30 + [30], 528, 704)],
    "whole": [([16] * 8, 5760, 2880), ([17 * i % 50 for i in range(32)], 2880, 2880)],
}


def given(kind: str, N: int, K: int, experts: int = 1):
    """Packed bytes, scales as the ops have them (the second level differs among 256 blocks) and W in fp32."""
    packed = torch.randint(256, (experts * N * K // 2, 1), dtype=torch.uint8, device="cuda")
    low, high = (122, 132) if kind == "mxfp4" else (0, 127)
    blocks = N * K // BLOCK[kind]
    codes = torch.randint(low, high, (experts * blocks,), dtype=torch.uint8, device="cuda")
    second = (torch.rand(experts * -(-blocks // 256)) + 0.5).cuda() * 0.01
    scales = [codes, ops.table(MAP[kind]).cuda(), second, torch.zeros(experts, device="cuda")]
    return packed, scales


def dequantized(kind, packed, scales, experts, N, K, dtype):
    of_each = zip(*(one.chunk(experts) for one in (packed, scales[0], scales[2], scales[3])), strict=True)
    settings = (BLOCK[kind], E2M1, N, K, dtype)
    return torch.stack(
        [ops.dequantize_4bit(w, codes, scales[1], *second, *settings).view(N, K) for w, codes, *second in of_each]
    )


def product(kind, x, offs, packed, scales, bias, N, K, gradient):
    settings = (BLOCK[kind], E2M1, N, K)
    bias = x.new_empty(0) if bias is None else bias
    if offs is None:
        if gradient:
            return ops.linear_4bit_dgrad(x, packed, *scales, *settings)
        return ops.linear_4bit(x, packed, *scales, bias, *settings)
    if gradient:
        return ops.grouped_linear_4bit_dgrad_fused(x, offs, packed, *scales, *settings)
    return ops.grouped_linear_4bit_fused(x, offs, packed, *scales, bias, *settings)


def check(kernel, kind, counts, N, K, dtype, with_bias, gradient, stack) -> str:
    """ "" or what is wrong. counts: rows of each weight, one of which is no stack."""
    torch.manual_seed(sum(counts) + N)
    E, rows = len(counts), sum(counts)
    offs = torch.tensor(counts).cumsum(0).int()
    packed, scales = given(kind, N, K, E)
    w = dequantized(kind, packed, scales, E, N, K, dtype if kernel in ROUNDS_W else torch.float32).double()
    x = torch.randn(rows + 2 * stack, N if gradient else K, device="cuda").to(dtype)
    bias = torch.randn(E, N, device="cuda").to(dtype) if with_bias and not gradient else None
    given_bias = bias if bias is None or stack else bias[0]
    force(kernel, stack)
    rest = (offs.cuda() if stack else None, packed, scales, given_bias, N, K, gradient)
    y, again = (product(kind, x, *rest) for _ in range(2))
    if not torch.equal(y.view(torch.int16), again.view(torch.int16)):
        return "two runs differ"
    if y[rows:].any():
        return "rows behind the last expert are not 0"
    both, begin = torch.zeros(2, dtype=torch.float64, device="cuda"), 0
    for e, end in enumerate(offs.tolist()):
        exact = x[begin:end].double() @ (w[e] if gradient else w[e].T) + (0 if bias is None else bias[e].double())
        own = y[begin:end].double() - exact, exact.to(dtype).double() - exact
        both += torch.stack([one.square().sum() for one in own])
        begin = end
    ratio = (both[0] / both[1]).sqrt().item()
    return "" if ratio <= BOUND else f"error {ratio:.4f} of that of the exact product rounded"


def every_pair(kernel, kind, dtype) -> str:
    """All codes with all scales, shown by the unit matrix."""
    N, K = 4096, 64
    packed, scales = given(kind, N, K)
    blocks = N * K // BLOCK[kind]
    scales[0] = torch.arange(blocks, device="cuda").remainder(LARGEST[kind] + 1).to(torch.uint8)
    order = torch.rand(N * K // 16, 16, device="cuda").argsort(1).view(-1, 2).to(torch.uint8)
    packed = (order[:, :1] << 4 | order[:, 1:]).contiguous()
    scales[2].fill_(1.0 if kind == "mxfp4" else 0.25)
    w = dequantized(kind, packed, scales, 1, N, K, dtype)[0]
    force(kernel, False)
    y = product(kind, torch.eye(K, device="cuda").to(dtype), None, packed, scales, None, N, K, False)
    wrong = int((y != w.T).sum())
    small = int(((w != 0) & (w.abs() < 2.0**-126)).sum())
    return f"{wrong} of {w.numel()} values differ, {small} are denormal numbers" if wrong else ""


def force(kernel: str, stack: bool) -> None:
    for direction in ("", "_dgrad"):
        if stack:
            _C.force_kernel(f"grouped_linear_4bit{direction}", STACKED[kernel])
        elif not direction or kernel == SM80:
            _C.force_kernel(f"linear_4bit{direction}", kernel)


def cases():
    """(name, check), those that tell most first."""
    takes = [
        (kernel, kind, dtype)
        for kernel, kind, dtype in itertools.product((GEMV, SM90, SM80), BLOCK, (BF16, F16))
        if not (kernel == SM80 and kind == "mxfp4") and not (kind == "mxfp4" and dtype == F16)
    ]
    for facts in takes:
        yield f"small pairs {facts}", lambda f=facts: every_pair(*f)
    for group in SIZES:
        for (kernel, kind, dtype), (M, N, K) in itertools.product(takes, SIZES[group]):
            for gradient in (False, True)[: 1 + (kernel == SM80)]:
                facts = (kernel, kind, [M], N, K, dtype, M % 2 == 1, gradient, False)
                yield f"{group} {facts}", lambda f=facts: check(*f)
        for (kernel, kind, dtype), (counts, N, K) in itertools.product(takes, STACKS[group]):
            for gradient in (False, True)[: 1 + (kernel == SM80)]:
                if kernel in STACKED:
                    facts = (kernel, kind, counts, N, K, dtype, N % 32 == 0, gradient, True)
                    yield f"{group} stack {facts}", lambda f=facts: check(*f)


def main() -> None:
    """Runs them, as many as there is time for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="checks with this in their names")
    parser.add_argument("--seconds", type=float, default=200)
    options = parser.parse_args()
    chosen = [(name, run) for name, run in cases() if options.only in name]
    verdicts, end = [], time.monotonic() + options.seconds
    while len(verdicts) < len(chosen) and time.monotonic() < end:
        name, run = chosen[len(verdicts)]
        verdicts.append(run())
        print("WRONG" if verdicts[-1] else "ok", name, verdicts[-1], flush=True)
    failed = sum(map(bool, verdicts))
    print(f"{len(verdicts)} of {len(chosen)} checks, {failed} wrong, {torch.cuda.get_device_name()}")
    sys.exit(failed > 0 or not verdicts)


if __name__ == "__main__":
    main()
