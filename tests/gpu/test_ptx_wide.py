"""gemm_4bit_sm90_wide as nvcc compiles it, on the machine of tests/ptx: no GPU needed.

Errors against fp64 stay below those of W rounded to x's dtype and multiplied exactly, times what docs/numerics.md
allows.
"""

import functools
import itertools
import os

import pytest
import torch
from ptx import gpu as ptx_gpu
from ptx import products
from ptx.gpu import Gpu
from ptx.products import dequantized, goes_wrong, hostile_scales

pytestmark = pytest.mark.skipif(ptx_gpu.nvcc() is None, reason="nvcc makes the PTX that runs here")

KERNEL = "gemm_4bit_sm90_wide"
BF16, F16 = torch.bfloat16, torch.float16
multiply = functools.partial(products.multiply, KERNEL)
weight = functools.partial(products.weight, decoded=torch.float32)
FORWARD_BOUND, GRADIENT_BOUND = 1.02, 1.1
UNSCALED_BOUND = 0.85  # forward, tiles of 128 rows: W itself is not rounded, only its 16 values
SAMPLING = 1.03  # a ratio of errors of a few thousand elements


@pytest.fixture(scope="module", autouse=True)
def compiled():
    names = [f"gemm_wide_{way}_m128" for way in ("bf16", "f16", "dgrad_bf16", "dgrad_f16")]
    names += [f"gemm_wide_{way}_{form}" for way in ("bf16", "dgrad_bf16") for form in ("m192", "m256")]
    names += ["clear_flags"]
    products.compile_kernels(KERNEL, names, 90)


def error_ratio(y, x, w, bias, gradient: bool) -> float:
    """Error of y over that of W rounded to x's dtype, multiplied exactly and rounded once; both against fp64."""

    def product(values):
        return x.double() @ (values.double() if gradient else values.double().T) + (
            0 if bias is None else bias.double()
        )

    exact, rounded = product(w), product(w.to(x.dtype)).to(x.dtype)
    return ((y.double() - exact).norm() / (rounded.double() - exact).norm()).item()


# dtype, M, N, K, format, blocksize, nested, bias, gradient, multiprocessors, seed, tokens of a tile, tiles are shared
CASES = [
    (BF16, 100, 512, 1280, 0, 64, True, True, False, 8, 1, 128, True),  # two pairs a tile scatter its tokens
    (BF16, 70, 250, 1088, 0, 64, True, False, False, 8, 2, 128, True),  # four; N and K ragged
    (BF16, 40, 1283, 192, 1, 64, True, True, False, 4, 3, 128, False),  # y of odd width
    (BF16, 5, 1270, 896, 0, 256, False, False, False, 4, 4, 128, True),  # in order; plain scales, blocks beyond a row
    (BF16, 300, 520, 192, 1, 128, True, True, False, 4, 5, 192, False),  # ragged M
    (BF16, 150, 250, 1536, 0, 64, True, True, False, 4, 12, 192, True),
    (BF16, 230, 500, 192, 1, 128, True, True, False, 4, 5, 256, False),
    (BF16, 250, 300, 64, 0, 64, True, False, False, 4, 6, 256, False),  # less than a piece of depth
    (F16, 30, 300, 320, 0, 64, True, True, False, 6, 7, 128, False),
    (BF16, 100, 1400, 512, 0, 64, True, False, True, 8, 8, 128, True),
    (BF16, 33, 712, 1216, 0, 64, True, False, True, 4, 9, 128, True),
    (BF16, 300, 200, 320, 1, 128, False, False, True, 4, 10, 192, False),
    (BF16, 250, 200, 320, 1, 64, True, False, True, 4, 13, 256, False),
    (F16, 70, 264, 320, 0, 64, True, False, True, 6, 11, 128, False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)).replace("torch.", ""))
def test_wide_keeps_the_error_rule(case):
    dtype, M, N, K, fmt, blocksize, nested, with_bias, gradient, sms, seed, tokens, shared = case
    torch.manual_seed(seed)
    packed, scales, w = weight(N, K, dtype, fmt, blocksize, nested)
    x = torch.randn(M, (N if gradient else K) + 8).to(dtype)[:, :-8]
    bias = torch.randn(N).to(dtype) if with_bias else None
    gpu = Gpu(90, sms, seed)
    y = multiply(gpu, x, packed, scales, bias, blocksize, fmt, N, K, gradient)
    assert gpu.launches[-1].startswith("gemm_wide") and gpu.launches[-1].endswith(f"_m{tokens}")
    assert ("clear_flags" in gpu.launches) == shared
    bound = GRADIENT_BOUND if gradient else UNSCALED_BOUND if tokens == 128 else FORWARD_BOUND
    assert error_ratio(y, x, w, bias, gradient) < bound * SAMPLING


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("small", [0, 110])
def test_wide_with_hostile_scales(gradient, small):
    """small: times 2^-small, scales down to 2^-130; x as much larger."""
    torch.manual_seed(0)
    N, K = 512, 384
    packed, scales, _ = weight(N, K, BF16, 0, 64, True)
    scales = hostile_scales(scales)
    scales[2].mul_(2.0**-small)
    w = dequantized(packed, scales, 64, 0, N, K, torch.float32)
    x = (torch.randn(100, N if gradient else K) * 2.0**small).to(BF16)
    y = multiply(Gpu(90, 6, 5), x, packed, scales, None, 64, 0, N, K, gradient)
    assert error_ratio(y, x, w, None, gradient) < (GRADIENT_BOUND if gradient else FORWARD_BOUND) * SAMPLING


@pytest.mark.parametrize(("gradient", "dtype"), [(False, BF16), (False, F16), (True, BF16), (True, F16)])
@pytest.mark.parametrize("fmt", [0, 1])
def test_wide_decodes_alike_everywhere(gradient, dtype, fmt):
    """A byte gives the same numbers wherever it lies: some are looked up in the table, some by byte permutations.

    Rows of the unit matrix show W as it is multiplied. Gradient: a row of W has all bytes; forward: each row has one.
    """
    N, K = (128, 512) if gradient else (256, 128)
    packed = torch.arange(256, dtype=torch.uint8)
    packed = packed.repeat(N) if gradient else packed.repeat_interleave(K // 2)
    scales = (torch.full((N * K // 64,), 0.0173), None, None, None)
    w = dequantized(packed, scales, 64, fmt, N, K, torch.float32)
    y = multiply(Gpu(90, 4, 1), torch.eye(128, dtype=dtype), packed, scales, None, 64, fmt, N, K, gradient)
    assert torch.equal(y, y[: 1 if gradient else 2].repeat(128 if gradient else 64, 1))
    torch.testing.assert_close(y.float(), w if gradient else w.T, rtol=2**-6, atol=0)


@pytest.mark.parametrize(("N", "K", "sms"), [(256, 1024, 8), (1280, 896, 4), (768, 1920, 10)])
def test_wide_gives_equal_bits(N, K, sms):
    """Whatever the order in which threads run, and where copies come late; tiles scattered, shared, and shared by more.

    Three tiles on five pairs: the second is joined of the parts of three pairs.
    """
    torch.manual_seed(0)
    packed, scales, w = weight(N, K, BF16, 0, 64, True)
    x = torch.randn(20, K).to(BF16)
    gpus = [Gpu(90, sms, seed) for seed in (0, 1, 2)]
    results = [multiply(gpu, x, packed, scales, None, 64, 0, N, K, False) for gpu in gpus]
    assert all(torch.equal(one, results[0]) for one in results[1:])
    assert error_ratio(results[0], x, w, None, False) < FORWARD_BOUND * SAMPLING
    assert "clear_flags" in gpus[0].launches  # tiles are shared


@pytest.mark.parametrize(("N", "K", "sms"), [(256, 1024, 8), (1280, 896, 4)])
@pytest.mark.parametrize("at_once", [2, 6])
def test_wide_waits_for_nobody_who_does_not_run(N, K, sms, at_once):
    """Other work holds most of the GPU: who shares a tile gives up waiting, and the last to come joins for it."""
    torch.manual_seed(0)
    packed, scales, _ = weight(N, K, BF16, 0, 64, True)
    x = torch.randn(20, K).to(BF16)
    gpus = [Gpu(90, sms, seed, at_once=blocks) for seed, blocks in ((0, 0), (0, at_once), (1, at_once))]
    alone, *others = (multiply(gpu, x, packed, scales, None, 64, 0, N, K, False) for gpu in gpus)
    assert all(torch.equal(one, alone) for one in others)
    assert "clear_flags" in gpus[0].launches


def test_wide_keeps_columns_of_y_apart():
    """Rows of y further apart than N: what lies between stays."""
    torch.manual_seed(0)
    packed, scales, w = weight(250, 128, BF16, 0, 64, True)
    x, wide = torch.randn(9, 128).to(BF16), torch.full((9, 256), 7.0, dtype=BF16)
    y = wide[:, :250]
    products.multiply_into(KERNEL, Gpu(90, 4, 1), x, packed, scales, y)
    assert error_ratio(y, x, w, None, False) < 1.1
    assert bool((wide[:, 250:] == 7).all())


# What is left out, and of which file. Without it the machine must see wrong results, or threads that wait for ever.
FAULTS = {
    "W is read while an earlier kernel may write it": (
        "gemm_4bit_sm90_wide.cuh",
        r"wait_for_earlier_kernels\(\);(?=\s*load_w<)",
    ),
    "W is read before its copy has come": (
        "gemm_4bit_sm90_wide.cuh",
        r"mbarrier_wait\(barriers\.w_full \+ 8 \* (?:next_)?stage, (?:next_)?parity\);",
    ),
    "sums are joined before they have been left": ("epilogue_sm90_wide.cuh", r"while \(!__all_sync[^}]*}"),
    "scales are read while an earlier kernel may write them": (
        "gemm_4bit_sm90_wide.cuh",
        r"wait_for_earlier_kernels\(\);(?=\s*load_scales<)",
    ),
    "x is read before its copy has come": ("gemm_4bit_sm90_wide.cuh", r"mbarrier_wait\(barriers\.x_full[^;]*;"),
    "x is overwritten before it has been read": ("loaders_sm90_wide.cuh", r"mbarrier_wait\(barriers\.x_empty[^;]*;"),
    "W is overwritten before it has been read": ("loaders_sm90_wide.cuh", r"mbarrier_wait\(barriers\.w_empty[^;]*;"),
}


@pytest.mark.parametrize("fault", FAULTS if "BITSHARD_ALL_KERNELS" in os.environ else list(FAULTS)[:2])
def test_faults_show(fault, tmp_path, monkeypatch):
    """BITSHARD_ALL_KERNELS=1: all of them."""
    products.plant(monkeypatch, tmp_path, KERNEL, 90, "GEMM_WIDE_FORM", ONE_KERNEL, *FAULTS[fault])
    assert any(goes_wrong(functools.partial(check_faulty, *case)) for case in itertools.product((768, 256), (0, 1, 2)))


def check_faulty(N: int, seed: int) -> None:
    """768: tiles shared by two pairs one after the other; 256: one that both scatter at the same time."""
    torch.manual_seed(0)
    packed, scales, w = weight(N, 1280, BF16, 0, 64, True)
    x = torch.randn(20, 1280).to(BF16)
    y = multiply(Gpu(90, 4, seed), x, packed, scales, None, 64, 0, N, 1280, False)
    assert error_ratio(y, x, w, None, False) < 1.1  # NaN is not


ONE_KERNEL = """
GEMM_WIDE(__nv_bfloat16, gemm_wide_bf16_m128, 128, false)
extern "C" __global__ void clear_flags(uint32_t *flags, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) flags[i] = 0;
}
"""
