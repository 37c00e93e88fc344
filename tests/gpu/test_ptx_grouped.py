"""The grouped kernels of stacks without a GPU, on the machine of tests/ptx/: bounds of accesses, results, bits."""

import os
import platform
import shutil

import pytest
import reference
import torch
from bitshard import functional, ops
from cases import LINEAR_BOUND, ROUNDING
from ptx import gpu as machine
from ptx import products

pytestmark = [
    pytest.mark.skipif(machine.nvcc() is None, reason="needs nvcc"),
    pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("gcc") is None, reason="needs gcc on x86-64"),
]
GEMV, WIDE, SM80 = "gemv_4bit_grouped", "gemm_4bit_sm90_wide_grouped", "gemm_4bit_sm80_grouped"
GPU = {GEMV: 90, WIDE: 90, SM80: 80}
# kernel, dtype, rows of each expert, N, K, blocksize, format, nested, bias: none, one group, several; K in parts, of
# more tiles than wait at a time; tiles that end inside an expert, and behind the last one
CASES = [
    (GEMV, torch.bfloat16, [1, 0, 9, 0], 48, 256, 64, "nf4", True, True),
    (GEMV, torch.float16, [3, 20, 0], 32, 320, 128, "fp4", False, False),
    (GEMV, torch.bfloat16, [40, 0, 33], 32, 192, 64, "nf4", True, False),
    (GEMV, torch.bfloat16, [2, 1], 16, 8256, 64, "nf4", True, True),
    (GEMV, torch.bfloat16, [40, 0, 3], 640, 4160, 64, "nf4", True, True),
    (WIDE, torch.bfloat16, [5, 0, 130], 264, 192, 64, "nf4", True, True),
    (WIDE, torch.float16, [0, 3], 128, 128, 128, "fp4", False, False),
    # tiles of 256 tokens, and of what is left of an expert: 128; 192; 256; 192 + 128, 192 * 2, 256 + 192, 256 * 2 ...;
    # rows of A that leave warpgroups without any
    (WIDE, torch.bfloat16, [1, 0, 129, 193, 257], 264, 64, 64, "nf4", True, True),
    (WIDE, torch.float16, [385, 0, 321], 72, 320, 64, "nf4", False, False),
    (WIDE, torch.bfloat16, [449, 513], 64, 64, 64, "fp4", True, False),
    # tiles of 128 and 256 rows, with fewer; second-level scales of their own; dy whose last stage is short; more
    # experts than are looked up at once, with tiles of one stage
    (SM80, torch.bfloat16, [5, 0, 130], 264, 192, 64, "nf4", True, True),
    (SM80, torch.float16, [3, 70, 0], 128, 320, 128, "fp4", False, False),
    (SM80, torch.bfloat16, [40, 0, 33, 257], 136, 192, 32, "nf4", True, True),
    (SM80, torch.float16, [260, 0, 140], 64, 128, 4096, "nf4", False, True),
    (SM80, torch.bfloat16, [1] * 40 + [0] * 30 + [200, 3], 64, 64, 64, "fp4", True, True),
    # tiles of which warps have all rows, in the gradient, too
    (SM80, torch.bfloat16, [130, 0, 200], 192, 128, 64, "nf4", True, False),
]
OFFS = torch.tensor([5, -3, 4000, 2**31 - 1, -(2**31), 1], dtype=torch.int32)  # clamped, none goes back


def given(dtype, counts, N, K, blocksize, quant_type, nested, bias, beyond=2):
    generator = torch.Generator().manual_seed(N + K)
    E, offs = len(counts), torch.tensor(counts).cumsum(0).int()
    w = torch.randn(E, N, K, generator=generator)
    packed, state = functional.quantize_experts_4bit(w, blocksize, nested, quant_type)
    rows = int(offs[-1]) + beyond
    x, dy = (torch.randn(rows, width, generator=generator).to(dtype) for width in (K, N))
    b = torch.randn(E, N, generator=generator).to(dtype) if bias else None
    scales = [one if one.numel() else None for one in state.scales()]
    return x, dy, offs, packed.view(-1), scales, b, functional.dequantize_4bit(packed, state)


def check(found, expected, norms, dtype):
    allowed = LINEAR_BOUND[dtype] * norms.sqrt() + ROUNDING[dtype] * expected.abs()
    assert ((found.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)).replace("torch.", ""))
def test_products(case):
    """Threads in order, and in an order drawn from a seed; another number of multiprocessors gives the same bits."""
    kernel, dtype, counts, N, K, blocksize, quant_type, nested, bias = case
    x, dy, offs, packed, scales, b, weights = given(*case[1:])
    settings = (blocksize, ops.FORMATS[quant_type], N, K, kernel)
    results = [
        machine.Gpu(GPU[kernel], sms, seed).grouped_linear_4bit(x, offs, packed, scales, b, *settings)
        for sms, seed in ((4, 0), (4, 11), (2, 5))
    ]
    assert all(torch.equal(y.view(torch.uint8), results[0].view(torch.uint8)) for y in results)
    none = torch.zeros(len(counts), N, dtype=dtype) if b is None else b
    expected = reference.grouped_linear_4bit(x, offs, weights, none)
    norms = reference.grouped_linear_4bit(x.double().square(), offs, weights.double().square(), none.double().square())
    check(results[0], expected, norms, dtype)
    assert not results[0][offs[-1] :].any()
    if kernel == GEMV:
        return
    dx = machine.Gpu(GPU[kernel], 4).grouped_linear_4bit(dy, offs, packed, scales, None, *settings, backward=True)
    norms = reference.grouped_linear_4bit_dgrad(dy.double().square(), offs, weights.double().square())
    check(dx, reference.grouped_linear_4bit_dgrad(dy, offs, weights), norms, dtype)
    assert not dx[offs[-1] :].any()


@pytest.mark.parametrize("kernel", [GEMV, WIDE, SM80])
def test_offs_that_do_not_fit_are_clamped(kernel):
    """Nothing is read or written out of bounds, and every row has one expert or none."""
    x, _, _, packed, scales, _, weights = given(torch.bfloat16, [2, 0, 0, 5, 0, 3], 128, 128, 64, "nf4", True, False)
    gpu, settings = machine.Gpu(GPU[kernel], 2), (64, ops.FORMATS["nf4"], 128, 128, kernel)
    y = gpu.grouped_linear_4bit(x, OFFS, packed, scales, None, *settings)
    offs = OFFS.clamp(0, len(x)).cummax(0).values
    expected = reference.grouped_linear_4bit(x, offs, weights, torch.zeros(6, 128, dtype=x.dtype))
    norms = reference.grouped_linear_4bit(
        x.double().square(), offs, weights.double().square(), torch.zeros(6, 128).double()
    )
    check(y, expected, norms, x.dtype)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("rows, blocksize", [(90, 64), (200, 32)])
def test_sm80_has_the_bits_of_one_weight(rows, blocksize, gradient):
    """Those of gemm_4bit_sm80 without scratch memory, whose tiles have one block each, too: W is dequantize_4bit's."""
    case = (torch.bfloat16, [rows, 3, rows], 136, 192, blocksize, "nf4", True, True)
    x, dy, offs, packed, scales, b, _ = given(*case)
    settings, x, b = (blocksize, 0, 136, 192), dy if gradient else x, None if gradient else b
    gpu = machine.Gpu(80, 3, workspace_bytes=0)
    y = gpu.grouped_linear_4bit(x, offs, packed, scales, b, *settings, SM80, backward=gradient)
    assert gpu.launches[0].endswith("m256" if blocksize == 32 else "m128_few" if gradient else "m128")
    for e, (begin, end) in enumerate(zip([0, *offs.tolist()], offs.tolist(), strict=False)):
        codes, absmax, absmax2, offset = (one.view(3, -1)[e] for one in (packed, scales[0], scales[2], scales[3]))
        weight = (codes, (absmax, scales[1], absmax2, offset))
        if gradient:
            expected, _ = gpu.linear_4bit_dgrad(x[begin:end], *weight, *settings, "gemm_4bit_sm80")
        else:
            expected, _ = gpu.linear_4bit(x[begin:end], *weight, b[e], *settings, "gemm_4bit_sm80")
        assert torch.equal(y[begin:end], expected)


# File, what is there, and what takes its place: results are wrong, or accesses out of bounds.
FAULTS = {
    "rows of the next expert are stored": ("epilogue_sm80.cuh", r"if \(row < piece.left\)", ""),
    "all experts have the first one's bias": ("epilogue_sm80.cuh", r" \+ piece.expert \* args.N(?=, args.N)", ""),
    "a window knows nothing of those before it": ("scheduler_sm80.cuh", r"(?<=sum = )tiles \+ ", ""),
    "all experts have the first one's scales": ("loaders_sm80.cuh", r"\(uint32_t\)piece.expert", "0"),
    "all experts have the first one's offset": ("loaders_sm80.cuh", r"(?<=args.offset) \+ expert", ""),
    "a row group too few": ("gemm_4bit_sm80.cuh", r" \+ apart - 1(?=\))", ""),
    "rows of no expert stay": ("gemm_4bit_sm80.cuh", r"clear_rows<[^;]*;", ";"),
}
TWO_KERNELS = """
BSH_GEMM_SM80_ENTRY(gemm_sm80_grouped_bf16_m128, __nv_bfloat16, 128, false, true)
BSH_GEMM_SM80_ENTRY(gemm_sm80_grouped_dgrad_bf16_m128_few, __nv_bfloat16, 128, true, true, false, true)
"""


@pytest.mark.parametrize("fault", FAULTS if "BITSHARD_ALL_KERNELS" in os.environ else list(FAULTS)[:1])
def test_faults_of_sm80_show(fault, tmp_path, monkeypatch):
    """BITSHARD_ALL_KERNELS=1: all of them."""
    products.plant(monkeypatch, tmp_path, SM80, 80, "GROUPED", TWO_KERNELS, *FAULTS[fault])
    case = (SM80, torch.bfloat16, [5, 40, *[0] * 30, 9, 130], 136, 192, 64, "nf4", True, True)
    assert products.goes_wrong(lambda: test_products(case))


@pytest.mark.parametrize("tokens, k, E", [(0, 4, 8), (1, 8, 128), (7, 3, 5), (64, 8, 256), (40, 1, 2000), (300, 6, 64)])
@pytest.mark.parametrize("sm", [75, 90])
def test_sort_by_expert(tokens, k, E, sm):
    """Warps in order, and in an order drawn from a seed; numbers that are no expert's."""
    chosen = torch.randint(-2, E + 2, (tokens, k), generator=torch.Generator().manual_seed(E))
    chosen = torch.where(chosen == -2, -(2**40), torch.where(chosen == E + 1, 2**40, chosen))
    for seed, elsewhere in ((0, False), (3, True)):
        found = machine.Gpu(sm, 1, seed).sort_by_expert(chosen, E, elsewhere)
        expected = reference.sort_by_expert(chosen, E, elsewhere)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("tokens, k, H", [(5, 8, 96), (3, 11, 1), (4, 4, 1100), (2, 9, 1001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sum_by_token(tokens, k, H, dtype):
    """The bits of the reference; rows that y does not have are not read, and make a token NaN."""
    generator = torch.Generator().manual_seed(H)
    y, back = torch.randn(tokens * k, H, generator=generator).to(dtype), torch.randperm(tokens * k, generator=generator)
    counts = torch.rand(tokens, k, generator=generator)
    for given in (counts, counts.to(dtype)):
        found = machine.Gpu(75, 2).sum_by_token(y, back, given)
        assert torch.equal(found, reference.sum_by_token(y, back, given))
    expected = reference.sum_by_token(y, back, counts)
    back[0], back[2 * k - 1] = back[0] - tokens * k, 2**40
    counts[0, 0] = counts[1, -1] = 0
    found = machine.Gpu(90, 2).sum_by_token(y, back, counts)
    assert found[:2].isnan().all() and torch.equal(found[2:], expected[2:])


def test_more_experts_than_sort_by_expert_counts():
    chosen = torch.zeros(2, 2, dtype=torch.int64)
    assert machine.Gpu(90, 1).sort_by_expert(chosen, 6143, False)[3][0] == 4
    with pytest.raises(RuntimeError, match="4 pairs of 6144 experts, at most 1073741823 of 6143"):
        machine.Gpu(90, 1).sort_by_expert(chosen, 6144, False)


def test_what_a_kernel_cannot_take_is_said():
    x, _, offs, packed, scales, _, _ = given(torch.bfloat16, [2, 3], 16, 96, 32, "nf4", False, False)
    with pytest.raises(
        RuntimeError, match=r"M = 7, N = 16, K = 96 of bfloat16 in blocks of 32, 2 experts on sm_90: gemv_4bit_grouped"
    ):
        machine.Gpu(90, 2).grouped_linear_4bit(x, offs, packed, scales, None, 32, 0, 16, 96, GEMV)
    with pytest.raises(RuntimeError, match="panels of a stack are multiplied by torch"):
        machine.Gpu(90, 2).grouped_linear_4bit(x, offs, packed, scales, None, 32, 0, 16, 96, "panels")
    with pytest.raises(RuntimeError, match="needs code for sm_90"):
        machine.Gpu(80, 2).grouped_linear_4bit(x, offs, packed, scales, None, 32, 0, 16, 96, GEMV)
