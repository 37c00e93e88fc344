"""gemm_4bit_sm90_wide and its form for stacks with MXFP4 and NVFP4 weights, on the machine of tests/ptx: no GPU needed.

W is multiplied exactly (docs/numerics.md), so errors against fp64 are those of the result's rounding alone.
"""

import functools
import os

import pytest
import torch
from bitshard import ops
from helpers.microscaled import SCALE, VALUE
from ptx import gpu as ptx_gpu
from ptx import products
from ptx.gpu import Gpu
from ptx.products import goes_wrong

pytestmark = pytest.mark.skipif(ptx_gpu.nvcc() is None, reason="nvcc makes the PTX that runs here")

KERNEL, STACKS = "gemm_4bit_sm90_wide", "gemm_4bit_sm90_wide_grouped"
BF16, F16 = torch.bfloat16, torch.float16
E2M1 = 2
BLOCK = {"mxfp4": 32, "nvfp4": 16}
STEM = {"mxfp4": "gemm_wide_mx_", "nvfp4": "gemm_wide_nv_"}
MAP = {"mxfp4": "e8m0", "nvfp4": "e4m3"}
BOUND = 1.02  # error over that of the exact product, rounded once
TYPES = ("mxfp4", "nvfp4")


@pytest.fixture(scope="module", autouse=True)
def compiled():
    ways = ("bf16", "dgrad_bf16")
    names = [f"{stem}{way}_m128" for stem in STEM.values() for way in (*ways, "f16", "dgrad_f16")]
    names += [f"{stem}{way}_{form}" for stem in STEM.values() for way in ways for form in ("m192", "m256")]
    products.compile_kernels(f"{KERNEL}_short", names, 90)
    products.compile_kernels(KERNEL, ["clear_flags"], 90)


def scales_of(kind: str, codes, first: float, experts: int = 1):
    """Scales as the C core has them; the global scale of expert e is first * (1 + e)."""
    blocks = codes.numel() // experts
    count = ops.block_count(blocks, 256)
    globals_ = torch.full((experts,), first) * (1 + torch.arange(experts))
    return (codes.flatten(), ops.table(MAP[kind]), globals_.repeat_interleave(count), torch.zeros(experts))


def given(kind: str, N: int, K: int, first: float = 1.0, narrow: bool = True, experts: int = 1):
    """Packed bytes, scales, W in fp64. narrow: scales that lie near each other, of MXFP4 2^-6 to 2^3."""
    packed = torch.randint(256, (experts * N * K // 2,), dtype=torch.uint8)
    low, high = ((121, 131) if narrow else (0, 253)) if kind == "mxfp4" else (0, 127)
    codes = torch.randint(low, high, (experts * N, K // BLOCK[kind]), dtype=torch.uint8)
    scales = scales_of(kind, codes, first, experts)
    second = scales[2].view(experts, -1)[:, 0]
    parts = zip(packed.view(experts, -1), codes.view(experts, -1), second, strict=True)
    return packed, scales, torch.stack([values(kind, one, its, N, K, scale) for one, its, scale in parts]).view(-1, K)


def values(kind: str, packed, codes, N: int, K: int, global_scale):
    """W of one weight in fp64, by the specification."""
    codes_of = torch.stack((packed >> 4, packed & 15), -1).long().view(N, K)
    of_block = SCALE[kind].double()[codes.long()].view(N, K // BLOCK[kind])
    return VALUE.double()[codes_of] * of_block.repeat_interleave(BLOCK[kind], 1) * global_scale.double()


def multiply(gpu, x, packed, scales, bias, kind, N, K, gradient=False):
    y = products.multiply(KERNEL, gpu, x, packed, scales, bias, BLOCK[kind], E2M1, N, K, gradient)
    assert gpu.launches[-1].startswith(STEM[kind])
    return y


def error_ratio(y, x, w, bias, gradient: bool) -> float:
    exact = x.double() @ (w if gradient else w.T) + (0 if bias is None else bias.double())
    return ((y.double() - exact).norm() / (exact.to(x.dtype).double() - exact).norm()).item()


# dtype, M, N, K, bias, gradient, multiprocessors, seed, tokens of a tile, tiles are shared: as in test_ptx_wide.py
CASES = [
    (BF16, 100, 512, 1280, True, False, 8, 1, 128, True),
    (BF16, 70, 250, 1088, False, False, 8, 2, 128, True),
    (BF16, 40, 1283, 192, True, False, 4, 3, 128, False),
    (BF16, 5, 1270, 896, False, False, 4, 4, 128, True),
    (BF16, 300, 520, 192, True, False, 4, 5, 192, False),
    (BF16, 230, 500, 192, True, False, 4, 5, 256, False),
    (BF16, 250, 300, 64, False, False, 4, 6, 256, False),
    (F16, 30, 300, 320, True, False, 6, 7, 128, False),
    (BF16, 100, 1400, 512, False, True, 8, 8, 128, True),
    (BF16, 33, 712, 1216, False, True, 4, 9, 128, True),
    (BF16, 300, 200, 320, False, True, 4, 10, 192, False),
    (BF16, 250, 200, 320, False, True, 4, 13, 256, False),
    (F16, 70, 264, 320, False, True, 6, 11, 128, False),
]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)).replace("torch.", ""))
def test_products(kind, case):
    dtype, M, N, K, with_bias, gradient, sms, seed, tokens, shared = case
    torch.manual_seed(seed)
    packed, scales, w = given(kind, N, K, 1.0 if kind == "mxfp4" else 0.0123)
    x = torch.randn(M, (N if gradient else K) + 8).to(dtype)[:, :-8]
    bias = torch.randn(N).to(dtype) if with_bias else None
    gpu = Gpu(90, sms, seed)
    y = multiply(gpu, x, packed, scales, bias, kind, N, K, gradient)
    assert gpu.launches[-1].endswith(f"_m{tokens}") and ("clear_flags" in gpu.launches) == shared
    assert error_ratio(y, x, w, bias, gradient) < BOUND


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_every_code_with_every_scale(kind, gradient, dtype):
    """Rows of the unit matrix show W as it is multiplied: that of dequantize_4bit, fp16's overflow and all."""
    N, K = (128, 512) if gradient else (256, 128)
    blocks, largest = N * K // BLOCK[kind], 253 if kind == "mxfp4" else 127
    codes = torch.arange(blocks, dtype=torch.int64).mul(7).remainder(largest).to(torch.uint8)
    assert codes.unique().numel() == largest
    order = torch.stack([torch.randperm(16) for _ in range(N * K // 16)]).view(-1, 2).to(torch.uint8)
    packed = order[:, 0] << 4 | order[:, 1]
    scales = scales_of(kind, codes, 1.0 if kind == "mxfp4" else 0.25)
    w = products.dequantized(packed, scales, BLOCK[kind], E2M1, N, K, dtype)
    x = torch.eye(128, dtype=dtype)
    finite = w.double().abs() < torch.inf
    if not bool(finite.all()):  # 0 times infinity is no number: such rows or columns are alone in x
        assert dtype == F16 and kind == "mxfp4"
        w = torch.where(finite, w, 0)
        codes_of = torch.stack((packed >> 4, packed & 15), -1).view(N, K)
        codes_of = torch.where(finite, codes_of, 0)
        packed = (codes_of.view(-1, 2)[:, 0] << 4 | codes_of.view(-1, 2)[:, 1]).flatten()
    y = multiply(Gpu(90, 4, 1), x, packed, scales, None, kind, N, K, gradient)
    assert torch.equal(y + 0, (w if gradient else w.T) + 0)


def test_a_value_beyond_fp16_is_infinite():
    packed, codes = torch.full((256 * 64,), 0x11, dtype=torch.uint8), torch.full((256, 4), 127 + 17, dtype=torch.uint8)
    x = torch.ones(4, 128, dtype=F16)
    assert bool(
        multiply(Gpu(90, 4, 1), x, packed, scales_of("mxfp4", codes, 1.0), None, "mxfp4", 256, 128).isinf().all()
    )


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("gradient", [False, True])
def test_second_levels_that_are_not_one_number(kind, gradient):
    """Any map, any second level and an offset: nobody makes such weights of E2M1, yet they keep their values."""
    torch.manual_seed(3)
    N, K = 320, 448
    packed, (codes, table, absmax2, offset), _ = given(kind, N, K)
    absmax2 = torch.rand(absmax2.shape) + 0.5
    for first, shift, map_ in ((0.7, 0.0, table), (0.0, 0.0, table), (0.7, 0.25, table), (0.7, 0.0, torch.rand(256))):
        absmax2[0] = first
        scales = (codes, map_, absmax2, torch.full((1,), shift))
        w = products.dequantized(packed, scales, BLOCK[kind], E2M1, N, K, torch.float32).double()
        x = torch.randn(40, N if gradient else K).to(BF16)
        y = multiply(Gpu(90, 4, 2), x, packed, scales, None, kind, N, K, gradient).double()
        exact, norms = x.double() @ (w if gradient else w.T), x.double().abs() @ (w if gradient else w.T).abs()
        assert bool(((y - exact).abs() <= 2**-8 * exact.abs() + 2**-7 * norms).all())


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("gradient", [False, True])
def test_codes_that_are_not_aligned(kind, gradient):
    """They are read one by one: equal bits."""
    torch.manual_seed(4)
    packed, scales, w = given(kind, 264, 320)
    x = torch.randn(33, 264 if gradient else 320).to(BF16)
    apart = torch.empty(scales[0].numel() + 1, dtype=torch.uint8)[1:].copy_(scales[0])
    assert apart.data_ptr() % 2
    results = [
        multiply(Gpu(90, 4, 1), x, packed, (codes, *scales[1:]), None, kind, 264, 320, gradient)
        for codes in (scales[0], apart)
    ]
    assert torch.equal(*results) and error_ratio(results[0], x, w, None, gradient) < BOUND


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("N", "K", "sms"), [(256, 1024, 8), (1280, 896, 4)])
def test_equal_bits(kind, N, K, sms):
    """Whatever the order in which threads run, and where copies come late; tiles scattered and shared."""
    torch.manual_seed(0)
    packed, scales, w = given(kind, N, K, 0.3)
    x = torch.randn(20, K).to(BF16)
    gpus = [Gpu(90, sms, seed) for seed in (0, 1, 2)]
    results = [multiply(gpu, x, packed, scales, None, kind, N, K) for gpu in gpus]
    assert all(torch.equal(one, results[0]) for one in results[1:]) and "clear_flags" in gpus[0].launches
    assert error_ratio(results[0], x, w, None, False) < BOUND


# ---- stacks ----

# dtype, rows of each expert, N, K, tokens of a tile
GROUPED = [
    (BF16, [5, 0, 130], 264, 192, 128),
    (F16, [0, 3], 128, 128, 128),
    (BF16, [1, 0, 129, 193, 257], 264, 64, 256),
    (BF16, [449, 513], 64, 64, 256),
    (BF16, [385, 0, 321], 72, 320, 256),
]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("case", GROUPED, ids=lambda case: "-".join(map(str, case)).replace("torch.", ""))
def test_stacks(kind, case):
    """Each expert has a global scale of its own; rows behind the last one are zero; other GPUs give the same bits."""
    dtype, counts, N, K, tokens = case
    torch.manual_seed(N)
    E, offs = len(counts), torch.tensor(counts).cumsum(0).int()
    packed, scales, w = given(kind, N, K, 0.5, experts=E)
    w = w.view(E, N, K)
    bias = torch.randn(E, N).to(dtype)
    for gradient in (False, True):
        x = torch.randn(int(offs[-1]) + 2, N if gradient else K).to(dtype)
        b = None if gradient else bias
        settings = (BLOCK[kind], E2M1, N, K, STACKS)
        gpus = [Gpu(90, sms, seed) for sms, seed in ((4, 0), (4, 11), (2, 5))]
        y, *others = (gpu.grouped_linear_4bit(x, offs, packed, scales, b, *settings, backward=gradient) for gpu in gpus)
        stem = STEM[kind].replace("wide", "wide_grouped") + "dgrad_" * gradient
        assert gpus[0].launches[-1] == f"{stem}{'bf16' if dtype == BF16 else 'f16'}_m{tokens}"
        assert all(torch.equal(one, y) for one in others) and not y[offs[-1] :].any()
        begin = 0
        for e, end in enumerate(offs.tolist()):
            if end > begin:
                part = slice(begin, end)
                assert error_ratio(y[part], x[part], w[e], None if gradient else bias[e], gradient) < BOUND * 1.01
            begin = end


# ---- faults ----

# What is put in the place of what: the machine must see wrong numbers.
FAULTS = {
    "the global scale is left out": (
        "epilogue_sm90_wide.cuh",
        r"global = global_scale<FORM>\(args, at_tile.expert\)",
        "global = 1.f",
    ),
    "both rows of A get the first one's scale": ("decode_sm90_wide_short.cuh", r"h \? 0x3232 : 0x1010", "0x1010"),
    "both blocks of a group get the first one's scale": (
        "decode_sm90_wide_short.cuh",
        r"scale\[j / 2 % OF_GROUP\]",
        "scale[0]",
    ),
    "scales are not waited for": (
        "gemm_4bit_sm90_wide.cuh",
        r"mbarrier_wait\(barriers\.w_full \+ 8 \* (?:next_)?stage, (?:next_)?parity\);",
        ";",
    ),
    "scales are overwritten before they have been read": (
        "loaders_sm90_wide_short.cuh",
        r"mbarrier_wait\(barriers\.w_empty[^;]*;",
        ";",
    ),
    "codes that shifts do not decode are decoded by them": (
        "loaders_sm90_wide_short.cuh",
        r"ordinary &= are_ordinary[^;]*;",
        ";",
    ),
    "a second level is taken for one number": ("loaders_sm90_wide_short.cuh", r"ordinary &= second[^;]*;", ";"),
    "any map is taken for that of E4M3": ("loaders_sm90_wide_short.cuh", r"ordinary = ordinary_map &&", "ordinary ="),
}


@pytest.mark.parametrize("fault", FAULTS if "BITSHARD_ALL_KERNELS" in os.environ else list(FAULTS)[:3])
def test_faults_show(fault, tmp_path, monkeypatch):
    """BITSHARD_ALL_KERNELS=1: all of them."""
    products.plant(monkeypatch, tmp_path, f"{KERNEL}_short", 90, "SHORT_FORM", ONE_KERNEL, *FAULTS[fault])
    assert any(goes_wrong(functools.partial(check_faulty, seed)) for seed in range(4))


def check_faulty(seed: int) -> None:
    """With some codes that are negative, and another map and second level of some blocks."""
    torch.manual_seed(0)
    packed, (codes, table, absmax2, offset), _ = given("nvfp4", 768, 1344, 0.3)
    if seed == 1:
        codes = codes | (torch.rand(codes.shape) < 0.1).to(torch.uint8) << 7
    if seed == 2:
        absmax2 = torch.where(torch.arange(absmax2.numel()) % 3 == 0, absmax2, 3 * absmax2)
    table = table * 1.25 if seed == 3 else table
    scales = (codes, table, absmax2, offset)
    w = products.dequantized(packed, scales, 16, E2M1, 768, 1344, torch.float32).double()
    x = torch.randn(20, 1344).to(BF16)
    y = multiply(Gpu(90, 4, seed), x, packed, scales, None, "nvfp4", 768, 1344)
    assert error_ratio(y, x, w, None, False) < 1.3  # NaN is not


def test_without_faults_nothing_shows():
    for seed in range(4):
        check_faulty(seed)


ONE_KERNEL = """
NV(__nv_bfloat16, gemm_wide_nv_bf16_m128, 128, false)
extern "C" __global__ void clear_flags(uint32_t *flags, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) flags[i] = 0;
}
"""
