"""gemm_4bit_sm75 and its form for stacks as nvcc compiles them, on the machine of tests/ptx: no GPU needed.

W has the bits of dequantize_4bit: y is compared to a product of those, exact but for the order of fp32 sums.
"""

import functools
import itertools
import os

import pytest
import reference
import torch
from bitshard import _C, functional
from bitshard import functional as F
from ptx import gpu as ptx_gpu
from ptx import products
from ptx.gpu import Gpu
from ptx.products import assert_product, dequantized, goes_wrong, hostile_scales, weight

pytestmark = pytest.mark.skipif(ptx_gpu.nvcc() is None, reason="nvcc makes the PTX that runs here")

KERNEL, GROUPED = "gemm_4bit_sm75", "gemm_4bit_sm75_grouped"
F16 = torch.float16
multiply = functools.partial(products.multiply, KERNEL)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    products.compile_kernels(KERNEL, ["gemm_sm75_f16_m256", "gemm_sm75_dgrad_f16_m256"], 75)
    products.compile_kernels(GROUPED, ["gemm_sm75_grouped_f16_m256", "gemm_sm75_grouped_dgrad_f16_m256"], 75)


def way_of(gpu: Gpu, M, N, K, gradient, blocksize, nested) -> str:
    """Of the last launch: blocks / tiles where tiles are shared, else "whole"."""
    settings = {"gradient": gradient, "blocksize": blocksize, "nested": nested, "kernel": KERNEL, "architectures": "75"}
    (part,) = _C.plan_linear_4bit(M, N, K, ptx_gpu.DTYPES[F16], 75, gpu.sms, **settings)["slices"]
    (launch,) = part["launches"]
    assert gpu.launches == [launch["entry"]] and gpu.blocks == [(1, launch["grid"][0])]
    assert launch["block"] == 256 and launch["shared_bytes"] <= 64 << 10
    tiles = -(-M // 256) * -(-(K if gradient else N) // 128)
    return f"{launch['grid'][0]}/{tiles}" if part["scratch_bytes"] else "whole"


# M, N, K, format, blocksize, nested, bias, gradient, multiprocessors, seed; blocks / tiles that they share
CASES = [
    (100, 256, 640, 0, 64, True, True, False, 8, 1, "8/2"),
    (500, 120, 1280, 0, 64, True, False, False, 4, 2, "4/2"),  # N ragged
    (40, 643, 192, 1, 64, True, True, False, 4, 3, "whole"),  # y of odd width
    (5, 640, 896, 0, 256, False, False, False, 2, 4, "2/5"),  # plain scales, blocks beyond a row
    (300, 264, 192, 1, 128, True, True, False, 4, 5, "whole"),
    (65, 384, 64, 0, 4096, True, False, False, 3, 6, "whole"),  # tiles of two stages
    (250, 128, 2048, 0, 64, True, True, False, 4, 7, "4/1"),
    (700, 128, 1280, 0, 64, True, True, False, 4, 8, "4/3"),
    (180, 256, 320, 0, 32, True, True, False, 4, 9, "4/2"),
    (180, 256, 320, 1, 32, False, True, False, 2, 9, "whole"),
    (100, 640, 256, 0, 64, True, False, True, 8, 10, "8/2"),
    (33, 1128, 384, 0, 64, True, False, True, 4, 11, "4/3"),  # a last stage of 8 rows of W
    (300, 200, 320, 1, 128, False, False, True, 6, 12, "whole"),
    (250, 2000, 128, 0, 64, True, False, True, 4, 13, "4/1"),
    (700, 1288, 128, 1, 64, True, False, True, 4, 14, "4/3"),
    (192, 24, 192, 0, 64, True, False, True, 2, 15, "whole"),  # one stage, and short
    (150, 136, 192, 0, 32, True, False, True, 6, 16, "whole"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_sm75_multiplies_what_dequantize_gives(case):
    M, N, K, fmt, blocksize, nested, with_bias, gradient, sms, seed, way = case
    torch.manual_seed(seed)
    packed, scales, w = weight(N, K, F16, fmt, blocksize, nested)
    x = torch.randn(M, (N if gradient else K) + 8).to(F16)[:, :-8]
    bias = torch.randn(N).to(F16) if with_bias else None
    gpu = Gpu(75, sms, seed)
    y = multiply(gpu, x, packed, scales, bias, blocksize, fmt, N, K, gradient)
    assert_product(y, x, w, bias, gradient)
    assert way_of(gpu, M, N, K, gradient, blocksize, nested) == way


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("fmt", [0, 1])
@pytest.mark.parametrize(("rows", "blocksize", "nested"), [(60, 64, True), (250, 64, False), (250, 32, True)])
def test_sm75_decodes_the_bits_of_dequantize(gradient, fmt, rows, blocksize, nested):
    """Rows of the unit matrix show W: all bytes, scales of both signs from 2^-20 to 2^7, some 0, fp16 beyond it."""
    torch.manual_seed(0)
    N, K = (128, 320) if gradient else (320, 128)
    packed = torch.arange(N * K // 2, dtype=torch.int32).mul(193).add(torch.arange(N * K // 2) // 256).to(torch.uint8)
    blocks = N * K // blocksize
    scales = (torch.exp2(torch.randint(-20, 8, (blocks,)).float()) * torch.randn(blocks), None, None, None)
    if nested:
        _, state = F.quantize_4bit(torch.randn(N, K), blocksize=blocksize, compress_statistics=True, quant_type="nf4")
        scales = hostile_scales((state.absmax, state.state2.code, state.state2.absmax, None), 0.0173)
    else:
        scales[0][::5] *= 2.0**12
    w = dequantized(packed, scales, blocksize, fmt, N, K, F16)
    one = torch.eye(128, dtype=F16).repeat(2, 1)[:rows]
    y = multiply(Gpu(75, 1, 1), one, packed, scales, None, blocksize, fmt, N, K, gradient)
    wanted = (w if gradient else w.T).repeat(2, 1)[:rows]
    finite = torch.isfinite(wanted).all(dim=0)  # an infinite W makes NaN of the other rows
    assert torch.equal(y[:, finite], wanted[:, finite]) and bool(finite.any()) and bool(finite.all()) == nested


@pytest.mark.parametrize("case", [CASES[i] for i in (0, 1, 3, 10, 14)], ids=lambda case: "-".join(map(str, case)))
def test_sm75_gives_equal_bits_and_waits_for_nobody_who_does_not_run(case):
    """Whatever the order of threads, and where other work holds most of the GPU."""
    M, N, K, _, _, _, _, gradient, sms, _, _ = case
    products.check_equal_bits(KERNEL, 75, sms, M, N, K, gradient, F16)


def test_sm75_keeps_columns_of_y_apart():
    products.check_columns_apart(KERNEL, 75, F16)


# ---- stacks ----

# rows of each expert, N, K, blocksize, format, nested, bias: fewer and more than a tile has; second-level scales of
# their own; dy whose last stage is short; MXFP4; more experts than are looked up at once, with tiles of two stages
STACKS = [
    ([5, 0, 130], 264, 192, 64, "nf4", True, True),
    ([3, 70, 0], 128, 320, 128, "fp4", False, False),
    ([40, 0, 33, 257], 136, 192, 32, "nf4", True, True),
    ([260, 0, 140], 64, 128, 4096, "nf4", False, True),
    ([1] * 40 + [0] * 30 + [200, 3], 64, 64, 64, "fp4", True, True),
    ([], 64, 64, 64, "nf4", True, False),
]


def stack_of(counts, N, K, blocksize, quant_type, nested, with_bias):
    torch.manual_seed(N + K)
    counts = counts or [0, 0]
    packed, state = functional.quantize_experts_4bit(torch.randn(len(counts), N, K), blocksize, nested, quant_type)
    offs = torch.tensor(counts).cumsum(0).int()
    scales = [one if one.numel() else None for one in state.scales()]
    bias = torch.randn(len(counts), N).to(F16) if with_bias else None
    rows = int(offs[-1]) + 2  # two of no expert
    x, dy = (torch.randn(rows, width).to(F16) for width in (K, N))
    return x, dy, offs, packed.view(-1), scales, bias, functional.dequantize_4bit(packed, state).to(F16)


@pytest.mark.parametrize("case", STACKS, ids=lambda case: "-".join(map(str, case)))
def test_sm75_multiplies_stacks(case):
    """Rows of each expert by its weight, zeros behind the last; the same bits on more multiprocessors, in any order."""
    _, N, K, blocksize, quant_type, _, _ = case
    x, dy, offs, packed, scales, bias, weights = stack_of(*case)
    settings = (blocksize, {"nf4": 0, "fp4": 1}[quant_type], N, K, GROUPED)
    for gradient, rows, b in ((False, x, bias), (True, dy, None)):
        run = [
            Gpu(75, sms, seed).grouped_linear_4bit(rows, offs, packed, scales, b, *settings, backward=gradient)
            for sms, seed in ((4, 0), (3, 11))
        ]
        assert torch.equal(run[0], run[1]) and not run[0][offs[-1] :].any()
        for e, (begin, end) in enumerate(itertools.pairwise([0, *offs.tolist()])):
            assert_product(run[0][begin:end], rows[begin:end], weights[e], None if b is None else b[e], gradient)


def test_sm75_takes_offs_that_are_not_sorted():
    """Nothing is read or written out of bounds, and every row has one expert or none."""
    x, _, _, packed, scales, _, weights = stack_of([2, 0, 0, 5, 0, 3], 128, 128, 64, "nf4", True, False)
    wild = torch.tensor([5, -3, 4000, 2**31 - 1, -(2**31), 1], dtype=torch.int32)
    y = Gpu(75, 2).grouped_linear_4bit(x, wild, packed, scales, None, 64, 0, 128, 128, GROUPED)
    expected = reference.grouped_linear_4bit(
        x, wild.clamp(0, len(x)).cummax(0).values, weights, torch.zeros(6, 128).to(F16)
    )
    torch.testing.assert_close(y.double(), expected.double(), rtol=2e-3, atol=2e-2)


# ---- faults ----

# File, what is left out or changed, and what takes its place. Then results must be wrong, or accesses out of bounds.
FAULTS = {
    "x is not stored": ("gemm_4bit_sm75.cuh", r"if \(slot < 4\) x.store\(slot, to\);", ";"),
    "a stage is overwritten before it has been read": (
        "gemm_4bit_sm80.cuh",
        r"__syncthreads\(\);(?=\s*stage = stage.other)",
        ";",
    ),
    "half of a step's depth twice": ("gemm_4bit_sm75.cuh", r"this->a\[i\] \+ 2 \* half", "this->a[i]"),
    "a row group too few": ("gemm_4bit_sm80.cuh", r" \+ apart - 1(?=\))", ""),
    "rows of x beyond the last one are read": ("loaders_sm75.cuh", r"chunk \* STEP < this->rows", "true"),
    "columns of dy beyond the last one count": ("loaders_sm80.cuh", r"rows = 0;", ";"),
    "rows of W beyond the last one count": ("loaders_sm80.cuh", r"beyond = true, at = begin;", ";"),
    "both halves of 32 weights are the first": ("loaders_sm80.cuh", r" \+ \(part\(thread_index\(\)\) & 1\)", ""),
    "x comes from the same piece again": ("loaders_sm75.cuh", r"this->pass\(args, pieces, 1\);", "this->left--;"),
    "words come before the last are decoded": ("gemm_4bit_sm75.cuh", r"W_SLOT = 3", "W_SLOT = 0"),
    "who times out leaves nothing": ("epilogue_sm80.cuh", r"groups = groups_of\(me\);", ";"),
}
FAULTY = [(100, 256, 640, False, 8), (33, 712, 384, True, 4), (70, 640, 64, False, 1), (5, 384, 2048, False, 1)]
FAULTY += [(70, 24, 640, True, 1)]  # pieces of one stage


@pytest.mark.parametrize("fault", FAULTS if "BITSHARD_ALL_KERNELS" in os.environ else list(FAULTS)[:2])
def test_faults_show(fault, tmp_path, monkeypatch):
    """BITSHARD_ALL_KERNELS=1: all of them."""
    products.plant(monkeypatch, tmp_path, KERNEL, 75, "NONE", "", *FAULTS[fault])  # two kernels: all of them
    assert any(goes_wrong(functools.partial(check_faulty, *case)) for case in itertools.product(FAULTY, (0, 1), (1, 2)))


def check_faulty(case, at_once: int, seed: int) -> None:
    M, N, K, gradient, sms = case
    torch.manual_seed(0)
    packed, scales, w = weight(N, K, F16, 0, 64, True)
    wide = torch.full((M, (N if gradient else K) + 64), torch.inf, dtype=F16)  # what lies behind a row is no number
    x = wide[:, :-64]
    x.copy_(torch.randn(x.shape))
    if gradient:
        scales[0][-K // 64 :] = 255  # the last row, of large values
        w = dequantized(packed, scales, 64, 0, N, K, F16)
    y = multiply(Gpu(75, sms, seed, at_once=at_once), x, packed, scales, None, 64, 0, N, K, gradient)
    assert_product(y, x, w, None, gradient)
