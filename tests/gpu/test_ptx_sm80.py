"""gemm_4bit_sm80 as nvcc compiles it, on the machine of tests/ptx: no GPU needed.

W has the bits of dequantize_4bit: y is compared to a product of those, exact but for the order of fp32 sums.
"""

import functools
import itertools
import os

import pytest
import torch
from bitshard import _C
from bitshard import functional as F
from ptx import gpu as ptx_gpu
from ptx import products
from ptx.gpu import Gpu
from ptx.products import assert_product, dequantized, goes_wrong, hostile_scales, weight

pytestmark = pytest.mark.skipif(ptx_gpu.nvcc() is None, reason="nvcc makes the PTX that runs here")

KERNEL = "gemm_4bit_sm80"
BF16, F16 = torch.bfloat16, torch.float16
multiply = functools.partial(products.multiply, KERNEL)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    names = [f"gemm_sm80_{way}_{m}" for way in ("bf16", "f16", "dgrad_bf16", "dgrad_f16") for m in ("m128", "m256")]
    products.compile_kernels(KERNEL, names, 80)


def way_of(gpu: Gpu) -> str:
    """Of the last launch: form, and blocks a tile where tiles are shared ("whole" where they are not)."""
    M, N, K, dtype, gradient, blocksize, nested = gpu.product_of
    settings = {"gradient": gradient, "blocksize": blocksize, "nested": nested, "kernel": KERNEL, "architectures": "80"}
    (part,) = _C.plan_linear_4bit(M, N, K, ptx_gpu.DTYPES[dtype], 80, gpu.sms, **settings)["slices"]
    (launch,) = part["launches"]
    assert gpu.launches == [launch["entry"]] and gpu.blocks == [(1, launch["grid"][0])]
    form = launch["entry"].rpartition("_")[2]
    tiles = -(-M // int(form[1:])) * -(-(K if gradient else N) // 128)
    return f"{form} " + (f"{launch['grid'][0]}/{tiles}" if part["scratch_bytes"] else "whole")


# dtype, M, N, K, format, blocksize, nested, bias, gradient, multiprocessors, seed; blocks / tiles that they share
CASES = [
    (BF16, 100, 256, 640, 0, 64, True, True, False, 8, 1, "m128 8/2"),
    (BF16, 500, 120, 1280, 0, 64, True, False, False, 4, 2, "m256 4/2"),  # N ragged
    (F16, 40, 643, 192, 1, 64, True, True, False, 4, 3, "m128 whole"),  # y of odd width
    (BF16, 5, 640, 896, 0, 256, False, False, False, 2, 4, "m128 4/5"),  # plain scales, blocks beyond a row
    (BF16, 300, 264, 192, 1, 128, True, True, False, 5, 5, "m128 whole"),
    (BF16, 400, 384, 64, 0, 4096, True, False, False, 3, 6, "m256 whole"),  # tiles of one stage
    (F16, 250, 128, 2048, 0, 64, True, True, False, 4, 7, "m256 4/1"),
    (BF16, 700, 128, 1728, 0, 64, True, True, False, 4, 8, "m256 4/3"),
    (BF16, 180, 256, 320, 0, 32, True, True, False, 4, 9, "m256 whole"),
    (F16, 180, 256, 320, 1, 32, False, True, False, 4, 9, "m256 whole"),
    (BF16, 100, 640, 256, 0, 64, True, False, True, 8, 10, "m128 8/2"),
    (BF16, 33, 712, 384, 0, 64, True, False, True, 4, 11, "m128 whole"),  # a last stage of 8 rows of W
    (BF16, 300, 200, 320, 1, 128, False, False, True, 5, 12, "m128 whole"),
    (F16, 250, 2000, 128, 0, 64, True, False, True, 4, 13, "m256 4/1"),
    (BF16, 700, 1672, 128, 1, 64, True, False, True, 4, 14, "m256 4/3"),
    (F16, 70, 264, 192, 0, 64, True, False, True, 6, 15, "m128 whole"),
    (BF16, 150, 136, 192, 0, 32, True, False, True, 6, 16, "m256 whole"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)).replace("torch.", ""))
def test_sm80_multiplies_what_dequantize_gives(case):
    dtype, M, N, K, fmt, blocksize, nested, with_bias, gradient, sms, seed, way = case
    torch.manual_seed(seed)
    packed, scales, w = weight(N, K, dtype, fmt, blocksize, nested)
    x = torch.randn(M, (N if gradient else K) + 8).to(dtype)[:, :-8]
    bias = torch.randn(N).to(dtype) if with_bias else None
    gpu = Gpu(80, sms, seed)
    gpu.product_of = (M, N, K, dtype, gradient, blocksize, nested)
    y = multiply(gpu, x, packed, scales, bias, blocksize, fmt, N, K, gradient)
    assert way_of(gpu) == way
    assert_product(y, x, w, bias, gradient)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("fmt", [0, 1])
@pytest.mark.parametrize(("rows", "blocksize", "nested"), [(60, 64, True), (250, 64, False), (250, 32, True)])
def test_sm80_decodes_the_bits_of_dequantize(gradient, dtype, fmt, rows, blocksize, nested):
    """Rows of the unit matrix show W: all bytes, scales of both signs from 2^-20 to 2^7, some 0, fp16 beyond it."""
    torch.manual_seed(0)
    N, K = (128, 320) if gradient else (320, 128)
    packed = torch.arange(N * K // 2, dtype=torch.int32).mul(193).add(torch.arange(N * K // 2) // 256).to(torch.uint8)
    blocks = N * K // blocksize
    scales = (torch.exp2(torch.randint(-20, 8, (blocks,)).float()) * torch.randn(blocks), None, None, None)
    if nested:
        _, state = F.quantize_4bit(torch.randn(N, K), blocksize=blocksize, compress_statistics=True, quant_type="nf4")
        scales = hostile_scales((state.absmax, state.state2.code, state.state2.absmax, None), 0.0173)
    if dtype == F16 and not nested:
        scales[0][::5] *= 2.0**12
    w = dequantized(packed, scales, blocksize, fmt, N, K, dtype)
    one = torch.eye(128, dtype=dtype).repeat(2, 1)[:rows]
    gpu = Gpu(80, 1, 1)
    y = multiply(gpu, one, packed, scales, None, blocksize, fmt, N, K, gradient)
    assert gpu.launches[0].endswith("m128" if rows == 60 else "m256")
    wanted = (w if gradient else w.T).repeat(2, 1)[:rows]
    finite = torch.isfinite(wanted).all(dim=0)  # an infinite W makes NaN of the other rows
    assert (
        torch.equal(y[:, finite], wanted[:, finite])
        and bool(finite.any())
        and finite.all() == (dtype == BF16 or nested)
    )


# M, N, K, gradient, multiprocessors; how tiles are shared
SHARED = [
    (100, 256, 640, False, 8, "m128 8/2"),
    (500, 120, 1280, False, 4, "m256 4/2"),
    (5, 640, 896, False, 2, "m128 4/5"),
    (100, 640, 256, True, 8, "m128 8/2"),
    (700, 1672, 128, True, 4, "m256 4/3"),
]


@pytest.mark.parametrize("case", SHARED, ids=lambda case: "-".join(map(str, case)))
def test_sm80_gives_equal_bits_and_waits_for_nobody_who_does_not_run(case):
    """Whatever the order of threads, and where other work holds most of the GPU: who shares a tile in equal parts gives
    up waiting, and the last to come joins for it."""
    M, N, K, gradient, sms, way = case
    gpu = products.check_equal_bits(KERNEL, 80, sms, M, N, K, gradient, BF16)
    gpu.product_of = (M, N, K, BF16, gradient, 64, True)
    assert way_of(gpu) == way


def test_sm80_keeps_columns_of_y_apart():
    products.check_columns_apart(KERNEL, 80, BF16)


# What is left out, and of which file. Without it the machine must see wrong results, or threads that wait for ever.
FAULTS = {
    "a stage is read before it is complete": (
        "loaders_sm80.cuh",
        r"cp_async_wait<0>\(\);",
    ),
    "a stage is overwritten before it has been read": (
        "gemm_4bit_sm80.cuh",
        r"__syncthreads\(\);(?=\s*stage = stage.other)",
    ),
    "sums are joined before they have been left": (
        "epilogue_sm80.cuh",
        r"if \(thread_index\(\) == 0\)\s*while \(!load_acquire[^}]*}",
    ),
    "sums are left behind the flag": (
        "epilogue_sm80.cuh",
        r"leave_groups<FORM>\(args, sum, groups\);\s*__syncthreads\(\);",
    ),
    "rows of W beyond the last one count": ("loaders_sm80.cuh", r"beyond = true, at = begin;"),
    "columns of dy beyond the last one count": ("loaders_sm80.cuh", r"rows = 0;"),
    "who times out leaves nothing": ("epilogue_sm80.cuh", r"groups = groups_of\(me\);"),
}


@pytest.mark.parametrize("fault", FAULTS if "BITSHARD_ALL_KERNELS" in os.environ else list(FAULTS)[:2])
def test_faults_show(fault, tmp_path, monkeypatch):
    """BITSHARD_ALL_KERNELS=1: all of them."""
    products.plant(monkeypatch, tmp_path, KERNEL, 80, "GEMM_SM80", TWO_KERNELS, *FAULTS[fault])
    cases = itertools.product(FAULTY, (0, 1), (1, 2))
    assert any(goes_wrong(functools.partial(check_faulty, *case)) for case in cases)


# Blocks that scatter a tile, and share tiles in order; a gradient whose last stage is short; five tiles of a stage;
# three tiles in order, so deep that a block waits.
FAULTY = [(100, 256, 640, False, 8), (5, 640, 896, False, 2), (33, 712, 384, True, 4), (40, 640, 64, False, 1)]
FAULTY += [(5, 384, 2048, False, 1)]


def check_faulty(case, at_once: int, seed: int) -> None:
    M, N, K, gradient, sms = case
    torch.manual_seed(0)
    packed, scales, w = weight(N, K, BF16, 0, 64, True)
    wide = torch.full((M, (N if gradient else K) + 64), torch.inf, dtype=BF16)  # what lies behind a row is no number
    x = wide[:, :-64]
    x.copy_(torch.randn(x.shape))
    if gradient:
        scales[0][-K // 64 :] = 255  # the last row, of large values
        w = dequantized(packed, scales, 64, 0, N, K, BF16)
    y = multiply(Gpu(80, sms, seed, at_once=at_once), x, packed, scales, None, 64, 0, N, K, gradient)
    assert_product(y, x, w, None, gradient)


TWO_KERNELS = """
BSH_GEMM_SM80_ENTRY(gemm_sm80_bf16_m128, __nv_bfloat16, 128, false, false)
BSH_GEMM_SM80_ENTRY(gemm_sm80_dgrad_bf16_m128, __nv_bfloat16, 128, true, false)
"""
