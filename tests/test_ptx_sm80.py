"""gemm_4bit_sm80 as nvcc compiles it, on the machine of tests/ptx: no GPU needed.

W has the bits of dequantize_4bit: y is compared to a product of those, exact but for the order of fp32 sums.
"""

import functools
import itertools
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from bitshard import functional as F
from bitshard import ops
from ptx import gpu as ptx_gpu
from ptx.gpu import Gpu

pytestmark = pytest.mark.skipif(ptx_gpu.nvcc() is None, reason="nvcc makes the PTX that runs here")

KERNEL = "gemm_4bit_sm80"
FORMATS = ("nf4", "fp4")
BF16, F16 = torch.bfloat16, torch.float16
NONE = ops.empty(torch.device("cpu"))


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All kernels that run here, on all cores."""
    ptx_gpu.ptx_of(KERNEL, 80)
    names = [f"gemm_sm80_{way}_{m}" for way in ("bf16", "f16", "dgrad_bf16", "dgrad_f16") for m in ("m128", "m256")]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(ptx_gpu.kernel_of, itertools.repeat(KERNEL), names, itertools.repeat(80)))


def weight(N: int, K: int, dtype: torch.dtype, fmt: int, blocksize: int, nested: bool):
    """Packed bytes, scales, and W of them in dtype, with the bits of dequantize_4bit."""
    w = torch.randn(N, K).to(dtype) * 0.1
    packed, state = F.quantize_4bit(w, blocksize=blocksize, compress_statistics=nested, quant_type=FORMATS[fmt])
    scales = (state.absmax, None, None, None)
    if nested:
        scales = (state.absmax, state.state2.code, state.state2.absmax, state.offset.reshape(1))
    return packed.flatten(), scales, dequantized(packed, scales, blocksize, fmt, N, K, dtype)


def dequantized(packed, scales, blocksize: int, fmt: int, N: int, K: int, dtype: torch.dtype):
    filled = [NONE if one is None else one for one in scales]
    return ops.dequantize_4bit(packed.view(-1, 1), *filled, blocksize, fmt, N, K, dtype).reshape(N, K)


def multiply(gpu: Gpu, x, packed, scales, bias, blocksize: int, fmt: int, N: int, K: int, gradient: bool):
    if gradient:
        return gpu.linear_4bit_dgrad(x, packed, scales, blocksize, fmt, N, K, KERNEL)[0]
    return gpu.linear_4bit(x, packed, scales, bias, blocksize, fmt, N, K, KERNEL)[0]


def assert_product(y, x, w, bias, gradient: bool):
    """Within the rounding of y, and fp32 sums of at most 2,048 products."""
    exact = x.double() @ (w.double() if gradient else w.double().T) + (0 if bias is None else bias.double())
    size = x.double().abs() @ (w.double() if gradient else w.double().T).abs() + 1e-30
    unit = 2.0**-8 if y.dtype == BF16 else 2.0**-11
    assert ((y.double() - exact).abs() <= exact.abs() * unit + size * 2.0**-20).all()


# dtype, M, N, K, format, blocksize, nested, bias, gradient, multiprocessors, seed, rows of a tile, how tiles are shared
CASES = [
    (BF16, 100, 256, 640, 0, 64, True, True, False, 8, 1, 128, "scattered"),
    (BF16, 70, 250, 512, 0, 64, True, False, False, 4, 2, 128, "scattered"),  # N ragged
    (F16, 40, 643, 192, 1, 64, True, True, False, 4, 3, 128, ""),  # y of odd width
    (BF16, 5, 640, 896, 0, 256, False, False, False, 4, 4, 128, "in order"),  # plain scales, blocks beyond a row
    (BF16, 300, 264, 192, 1, 128, True, True, False, 4, 5, 256, ""),
    (BF16, 250, 130, 64, 0, 4096, True, False, False, 4, 6, 256, ""),  # one stage
    (F16, 250, 250, 1024, 0, 64, True, True, False, 4, 7, 256, "scattered"),
    (BF16, 700, 128, 1280, 0, 64, True, True, False, 4, 8, 256, "in order"),
    (BF16, 180, 256, 320, 0, 32, True, True, False, 4, 9, 256, ""),
    (F16, 180, 256, 320, 1, 32, False, True, False, 4, 9, 256, ""),
    (BF16, 100, 640, 256, 0, 64, True, False, True, 8, 10, 128, "scattered"),
    (BF16, 33, 712, 384, 0, 64, True, False, True, 4, 11, 128, ""),  # a last stage of 8 rows of W
    (BF16, 300, 200, 320, 1, 128, False, False, True, 4, 12, 256, ""),
    (F16, 250, 1000, 128, 0, 64, True, False, True, 4, 13, 256, "scattered"),
    (BF16, 600, 1288, 128, 1, 64, True, False, True, 4, 14, 256, "in order"),
    (F16, 70, 264, 192, 0, 64, True, False, True, 6, 15, 128, ""),
    (BF16, 150, 136, 192, 0, 32, True, False, True, 6, 16, 256, ""),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)).replace("torch.", ""))
def test_sm80_multiplies_what_dequantize_gives(case):
    dtype, M, N, K, fmt, blocksize, nested, with_bias, gradient, sms, seed, rows, shared = case
    torch.manual_seed(seed)
    packed, scales, w = weight(N, K, dtype, fmt, blocksize, nested)
    x = torch.randn(M, (N if gradient else K) + 8).to(dtype)[:, :-8]
    bias = torch.randn(N).to(dtype) if with_bias else None
    gpu = Gpu(80, sms, seed)
    y = multiply(gpu, x, packed, scales, bias, blocksize, fmt, N, K, gradient)
    print(gpu.launches, gpu.blocks)
    assert_product(y, x, w, bias, gradient)
