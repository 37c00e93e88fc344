"""Products with MXFP4 and NVFP4 weights by gemm_4bit_sm90_wide, and of stacks, on a GPU: a line for each check.

    python benchmarks/checks/cuda_microscaled.py [--only WORD] [--seconds 200]
    compute-sanitizer --tool memcheck python benchmarks/checks/cuda_microscaled.py --only small

Every code with every scale has the value of dequantize_4bit. Random products: two runs give equal bits, and the error
against fp64 is at most 1.02 of that of the exact product rounded once. Ends with a count and status 1 where something
failed.
"""

from __future__ import annotations

import itertools
import sys

import lines
import torch
from bitshard import _C, ops

BF16, F16 = torch.bfloat16, torch.float16
BLOCK, MAP, LARGEST = {"mxfp4": 32, "nvfp4": 16}, {"mxfp4": "e8m0", "nvfp4": "e4m3"}, {"mxfp4": 252, "nvfp4": 126}
E2M1, BOUND = 2, 1.02
# M, N, K
SIZES = {
    "small": [(5, 256, 256), (100, 304, 320), (130, 520, 192), (300, 1283, 64), (230, 504, 192)],
    "ragged": [(1, 4096, 4096), (77, 4100, 4032), (129, 1000, 8256), (513, 4104, 4160), (1000, 14344, 1088)],
    "whole": [(128, 4096, 4096), (256, 4096, 14336), (512, 4096, 4096), (2048, 14336, 4096), (200, 8192, 8192)],
}
# rows of experts, N, K
STACKS = {
    "small": [([5, 0, 130], 264, 192), ([0, 3], 128, 128), ([1, 0, 129, 193, 257], 264, 64), ([385, 0, 321], 72, 320)],
    "ragged": [([0, 700, 3, 0, 64, 65, 1000, 0], 1288, 2880), ([40] * 60 + [0] * 30 + [300], 520, 704)],
    "whole": [([512] * 8, 5760, 2880), ([17 * i % 500 for i in range(32)], 2880, 2880)],
}


def given(kind: str, N: int, K: int, experts: int = 1, span: int = 10):
    """Packed bytes, scales as the ops have them, W in fp32. span: of MXFP4's scales, in powers of two."""
    packed = torch.randint(256, (experts * N * K // 2, 1), dtype=torch.uint8, device="cuda")
    low, high = (127 - span // 2, 127 + span // 2) if kind == "mxfp4" else (0, 127)
    blocks = N * K // BLOCK[kind]
    codes = torch.randint(low, high, (experts * blocks,), dtype=torch.uint8, device="cuda")
    own = torch.ones(experts) if kind == "mxfp4" else 0.013 * (1 + torch.arange(experts))
    second = own.repeat_interleave(-(-blocks // 256)).cuda()
    scales = [codes, ops.table(MAP[kind]).cuda(), second, torch.zeros(experts, device="cuda")]
    return packed, scales, dequantized(kind, packed, scales, experts, N, K, torch.float32)


def dequantized(kind, packed, scales, experts, N, K, dtype):
    made, blocks, per = [], N * K // BLOCK[kind], scales[2].numel() // experts
    for e in range(experts):
        codes, second = scales[0][e * blocks :][:blocks], scales[2][e * per :][:per]
        own = (codes, scales[1], second, scales[3][e : e + 1])
        bytes_ = packed[e * N * K // 2 :][: N * K // 2]
        made.append(ops.dequantize_4bit(bytes_, *own, BLOCK[kind], E2M1, N, K, dtype).view(N, K))
    return made[0] if experts == 1 else torch.stack(made)


def product(kind, x, packed, scales, bias, N, K, gradient):
    settings = (BLOCK[kind], E2M1, N, K)
    if gradient:
        return ops.linear_4bit_dgrad(x, packed, *scales, *settings)
    return ops.linear_4bit(x, packed, *scales, x.new_empty(0) if bias is None else bias, *settings)


def grouped(kind, x, offs, packed, scales, bias, N, K, gradient):
    settings = (BLOCK[kind], E2M1, N, K)
    if gradient:
        return ops.grouped_linear_4bit_dgrad_fused(x, offs, packed, *scales, *settings)
    return ops.grouped_linear_4bit_fused(x, offs, packed, *scales, bias, *settings)


def errors(y, x, w, bias, gradient):
    """Squares of the error of y, and of the exact product rounded once."""
    exact = x.double() @ (w.double() if gradient else w.double().T) + (0 if bias is None else bias.double())
    return torch.stack([(y.double() - exact).square().sum(), (exact.to(y.dtype).double() - exact).square().sum()])


def verdict(both) -> str:
    ratio = (both[0] / both[1]).sqrt().item()
    return "" if ratio <= BOUND else f"error {ratio:.4f} of that of the exact product rounded"


def check(kind, M, N, K, dtype, with_bias, gradient) -> str:
    """ "" or what is wrong."""
    if gradient and N % 8:
        return ""
    torch.manual_seed(M + N)
    packed, scales, w = given(kind, N, K)
    x = torch.randn(M, N if gradient else K, device="cuda", dtype=dtype)
    bias = torch.randn(N, device="cuda", dtype=dtype) if with_bias and not gradient else None
    y, again = (product(kind, x, packed, scales, bias, N, K, gradient) for _ in range(2))
    if not torch.equal(y.view(torch.int16), again.view(torch.int16)):
        return "two runs differ"
    take = slice(None, None, max(1, M // 64))
    return verdict(errors(y[take], x[take], w, bias, gradient))


def check_stack(kind, counts, N, K, dtype, gradient) -> str:
    torch.manual_seed(N + K)
    E, offs = len(counts), torch.tensor(counts).cumsum(0).int()
    packed, scales, w = given(kind, N, K, E)
    x = torch.randn(int(offs[-1]) + 2, N if gradient else K, device="cuda", dtype=dtype)
    bias = None if gradient else torch.randn(E, N, device="cuda", dtype=dtype)
    y, again = (grouped(kind, x, offs.cuda(), packed, scales, bias, N, K, gradient) for _ in range(2))
    if not torch.equal(y.view(torch.int16), again.view(torch.int16)):
        return "two runs differ"
    if y[offs[-1] :].any():
        return "rows behind the last expert are not 0"
    both, begin = torch.zeros(2, dtype=torch.float64, device="cuda"), 0
    for e, end in enumerate(offs.tolist()):
        part = slice(begin, end)
        own = errors(y[part], x[part], w[e], None if bias is None else bias[e], gradient)
        if end > begin and own[0] > 1.3 * own[1] * BOUND:
            return f"expert {e}: {verdict(own)}"
        both, begin = both + own, end
    return verdict(both)


def every_pair(kind, M, dtype, gradient) -> str:
    """All codes with all scales where the unit matrix shows them: fp16's zeros and denormals, too."""
    torch.manual_seed(0)
    N, K = (128, 512) if gradient else (512, 128)
    packed, scales, _ = given(kind, N, K)
    blocks = N * K // BLOCK[kind]
    scales[0] = torch.arange(blocks, device="cuda").remainder(LARGEST[kind] + 1).to(torch.uint8)
    order = torch.rand(N * K // 16, 16, device="cuda").argsort(1).view(-1, 2).to(torch.uint8)
    packed = (order[:, :1] << 4 | order[:, 1:]).contiguous()
    scales[2].fill_(1.0 if kind == "mxfp4" else 0.25)
    if kind == "mxfp4" and dtype == F16:  # above it 0 times infinity is no number
        scales[0].clamp_(max=127 + 13)
    w = dequantized(kind, packed, scales, 1, N, K, dtype)
    x = torch.zeros(M, 128, device="cuda", dtype=dtype)
    x[:128] = torch.eye(128)
    y = product(kind, x, packed, scales, None, N, K, gradient)[:128]
    wrong = int((y != (w if gradient else w.T)).sum())
    return f"{wrong} of {w.numel()} values differ" if wrong else ""


def unlike(kind, gradient) -> str:
    """A second level that is not one number, and an offset."""
    torch.manual_seed(1)
    packed, scales, _ = given(kind, 520, 704)
    scales[2] = torch.rand_like(scales[2]) + 0.5
    scales[3].fill_(0.25)
    w = dequantized(kind, packed, scales, 1, 520, 704, torch.float32).double()
    x = torch.randn(140, 520 if gradient else 704, device="cuda", dtype=BF16)
    y = product(kind, x, packed, scales, None, 520, 704, gradient).double()
    w = w if gradient else w.T
    allowed = 2**-8 * (x.double() @ w).abs() + 2**-7 * (x.double().abs() @ w.abs())
    return "" if bool(((y - x.double() @ w).abs() <= allowed).all()) else "beyond the bound"


def cases():
    """(name, check), those that tell most first."""
    both = list(itertools.product(BLOCK, (BF16, F16), (False, True)))
    for (kind, dtype, gradient), M in itertools.product(both, (128, 192, 256, 600)):
        facts = (kind, M, dtype, gradient)
        yield f"small pairs {kind} {dtype} gradient {gradient} M {M}", lambda f=facts: every_pair(*f)
    for kind, gradient in itertools.product(BLOCK, (False, True)):
        yield f"small unlike {kind} gradient {gradient}", lambda k=kind, g=gradient: unlike(k, g)
    for group in SIZES:
        for (kind, dtype, gradient), size in itertools.product(both, SIZES[group]):
            facts = (kind, *size, dtype, True, gradient)
            yield f"{group} {kind} {size} {dtype} gradient {gradient}", lambda f=facts: check(*f)
        for (kind, dtype, gradient), stack in itertools.product(both, STACKS[group]):
            facts = (kind, *stack, dtype, gradient)
            yield f"{group} stack {kind} {stack} {dtype} gradient {gradient}", lambda f=facts: check_stack(*f)


def main() -> int:
    options = lines.parser(__doc__, 200).parse_args()
    for direction in ("", "_dgrad"):
        _C.force_kernel(f"linear_4bit{direction}", "gemm_4bit_sm90_wide")
        _C.force_kernel(f"grouped_linear_4bit{direction}", "gemm_4bit_sm90_wide_grouped")
    return lines.run(cases(), options)


if __name__ == "__main__":
    sys.exit(main())
