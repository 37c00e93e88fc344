"""gemm_4bit_sm90_wide, gemm_4bit_sm80 or _sm75 against fp64, a line for each check: what to run first on a card.

    python benchmarks/checks/cuda_wide.py [--kernel NAME] [--only WORD] [--seconds 300] [--large]
    compute-sanitizer --tool memcheck|racecheck|synccheck python benchmarks/checks/cuda_wide.py --only small

Each check: two runs give equal bits; error over that of W rounded to the dtype at most 1.02 forward, 1.1 for the input
gradient; nothing outside y is touched. Then: several streams side by side, a captured graph replayed, and a weight that
the kernel in front writes. Ends with a count and status 1 where something failed.
"""

from __future__ import annotations

import itertools
import sys

import lines
import torch
from bitshard import _C, functional, ops

KERNELS = ("gemm_4bit_sm90_wide", "gemm_4bit_sm80", "gemm_4bit_sm75")
BOUNDS = {False: 1.02, True: 1.1}
BF16, F16 = torch.bfloat16, torch.float16
# Name, M, N, K. Ragged ones, tiles shared by 2 and 4 pairs, by all pairs, and whole.
SIZES = {
    "small": [(5, 256, 256), (100, 300, 320), (130, 520, 192), (300, 1283, 64)],
    "ragged": [(1, 4096, 4096), (77, 4100, 4032), (129, 1000, 8256), (513, 4104, 4160), (1000, 14344, 1088)],
    "whole": [(128, 4096, 4096), (256, 4096, 4096), (512, 4096, 4096), (256, 14336, 4096), (512, 8192, 8192)],
    "large": [(256, 28672, 8192), (1000, 28672, 8192), (2048, 4096, 14336)],
}
SAMPLING = 1.01  # of an error over a sample of rows


def weight(N: int, K: int, dtype: torch.dtype, fmt: str, blocksize: int, nested: bool, hostile: bool = False):
    """Packed bytes, scales, fp32 W. hostile: scales of both signs, spread over 2^28, some 0."""
    packed, state = functional.quantize_4bit(
        torch.randn(N, K, device="cuda", dtype=dtype) * 0.1,
        blocksize=blocksize,
        compress_statistics=nested,
        quant_type=fmt,
    )
    none = torch.empty(0, device="cuda")
    scales = [state.absmax, none, none, none]
    if nested:
        scales = [state.absmax, state.state2.code, state.state2.absmax, state.offset]
    if hostile:
        low, high = (-6, 4) if dtype == F16 else (-20, 8)
        spread = torch.exp2(torch.randint(low, high, scales[2].shape, device="cuda").float())
        scales[2] = spread * (torch.rand_like(spread) + 0.5)
        scales[2][::7] = 0
        scales[0], scales[3] = torch.randint_like(scales[0], 256), torch.zeros_like(scales[3])
    values = ops.dequantize_4bit(packed, *scales, blocksize, ops.FORMATS[fmt], N, K, torch.float32)
    return packed, scales, values.reshape(N, K)


def product(x, packed, scales, bias, blocksize, fmt, N, K, gradient):
    settings = (blocksize, ops.FORMATS[fmt], N, K)
    if gradient:
        return ops.linear_4bit_dgrad(x, packed, *scales, *settings)
    return ops.linear_4bit(x, packed, *scales, x.new_empty(0) if bias is None else bias, *settings)


def error_ratio(y, x, w, bias, gradient, rows: int = 64) -> float:
    take = slice(None, None, max(1, x.shape[0] // rows))

    def exact(values):
        out = x[take].double() @ (values.double() if gradient else values.double().T)
        return out if bias is None else out + bias.double()

    reference = exact(w)
    rounded = exact(w.to(x.dtype)).to(x.dtype).double()
    return ((y[take].double() - reference).norm() / (rounded - reference).norm()).item()


def check(M, N, K, dtype, fmt, blocksize, nested, with_bias, gradient, hostile) -> str:
    """ "" or what is wrong."""
    if gradient and N % 8:
        return ""
    torch.manual_seed(M + N)
    packed, scales, w = weight(N, K, dtype, fmt, blocksize, nested, hostile)
    x = torch.randn(M, N if gradient else K, device="cuda", dtype=dtype)
    bias = torch.randn(N, device="cuda", dtype=dtype) if with_bias and not gradient else None
    arguments = (x, packed, scales, bias, blocksize, fmt, N, K, gradient)
    y = product(*arguments)
    if not torch.equal(y.view(torch.int16), product(*arguments).view(torch.int16)):
        return "two runs differ"
    ratio = error_ratio(y, x, w, bias, gradient)
    return "" if ratio <= BOUNDS[gradient] * SAMPLING else f"error {ratio:.4f} of that of W rounded"


def streams(dtype) -> str:
    """Eight streams side by side, each with products that share tiles: the bits of one after the other."""
    packed, scales, _ = weight(4096, 4096, dtype, "nf4", 64, True)
    x = [torch.randn(100, 4096, device="cuda", dtype=dtype) for _ in range(8)]
    alone = [product(one, packed, scales, None, 64, "nf4", 4096, 4096, i % 2 == 1) for i, one in enumerate(x)]
    torch.cuda.synchronize()
    sides = [torch.cuda.Stream() for _ in x]
    for _ in range(20):
        found = []
        for i, (one, side) in enumerate(zip(x, sides, strict=True)):
            with torch.cuda.stream(side):
                found.append(product(one, packed, scales, None, 64, "nf4", 4096, 4096, i % 2 == 1))
        torch.cuda.synchronize()
        if not all(torch.equal(a, b) for a, b in zip(alone, found, strict=True)):
            return "results on several streams differ"
    return ""


def graph(dtype) -> str:
    packed, scales, _ = weight(4096, 4096, dtype, "nf4", 64, True)
    x = torch.randn(200, 4096, device="cuda", dtype=dtype)
    expected = product(x, packed, scales, None, 64, "nf4", 4096, 4096, False)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(3):
            y = product(x, packed, scales, None, 64, "nf4", 4096, 4096, False)
    for _ in range(20):
        y.zero_()
        captured.replay()
        torch.cuda.synchronize()
        if not torch.equal(y, expected):
            return "a replay differs"
    return ""


def written_weight(dtype) -> str:
    """W and its scales come from the kernel in front, as from an all-gather; before it they are another weight's."""
    one, other = (weight(8192, 8192, dtype, "nf4", 64, True) for _ in range(2))
    x = torch.randn(100, 8192, device="cuda", dtype=dtype)
    for gradient in (False, True):
        expected = product(x, other[0], other[1], None, 64, "nf4", 8192, 8192, gradient)
        for _ in range(20):
            packed, scales = one[0].clone(), [part.clone() for part in one[1]]
            product(x, packed, scales, None, 64, "nf4", 8192, 8192, gradient)
            for to, source in zip(scales, other[1], strict=True):
                to.copy_(source)
            packed.copy_(other[0])
            if not torch.equal(product(x, packed, scales, None, 64, "nf4", 8192, 8192, gradient), expected):
                return f"W was read before it was written, gradient {gradient}"
    return ""


def cases(groups: list[str], dtypes: tuple):
    """(name, check) in the order in which a first fault is most telling."""
    for group in groups:
        for size, gradient in itertools.product(SIZES[group], (False, True)):
            name = f"{group} {size} gradient {gradient}"
            yield name, lambda s=size, g=gradient: check(*s, dtypes[0], "nf4", 64, True, False, g, False)
    for name, special in (("streams", streams), ("graph", graph), ("written weight", written_weight)):
        yield name, lambda run=special: run(dtypes[0])
    formats = itertools.product(dtypes, ("nf4", "fp4"), ((64, True), (64, False), (128, True), (4096, False)))
    for dtype, fmt, (blocksize, nested) in formats:
        for size, gradient in itertools.product((*SIZES["small"], *SIZES["ragged"]), (False, True)):
            name = f"formats {size} {dtype} {fmt} {blocksize} nested {nested} gradient {gradient}"
            facts = (dtype, fmt, blocksize, nested, True, gradient, False)
            yield name, lambda s=size, f=facts: check(*s, *f)
    for dtype, fmt, gradient in itertools.product(dtypes, ("nf4", "fp4"), (False, True)):
        facts = (dtype, fmt, 64, True, False, gradient, True)
        yield f"hostile {dtype} {fmt} gradient {gradient}", lambda f=facts: check(300, 4096, 4096, *f)


def main() -> int:
    parser = lines.parser(__doc__, 300)
    parser.add_argument("--kernel", default=KERNELS[0], choices=KERNELS)
    parser.add_argument("--large", action="store_true")
    options = parser.parse_args()
    for op in ("linear_4bit", "linear_4bit_dgrad"):
        _C.force_kernel(op, options.kernel)
    dtypes = (F16,) if options.kernel == "gemm_4bit_sm75" else (BF16, F16)
    return lines.run(cases(["small", "ragged", "whole", *["large"] * options.large], dtypes), options)


if __name__ == "__main__":
    sys.exit(main())
