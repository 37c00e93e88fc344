"""The grouped kernels of stacks without a GPU, on the machine of tests/ptx/: bounds of accesses, results, bits."""

import platform
import shutil

import pytest
import reference
import torch
from bitshard import functional, ops
from cases import LINEAR_BOUND, ROUNDING
from ptx import gpu as machine

pytestmark = [
    pytest.mark.skipif(machine.nvcc() is None, reason="needs nvcc"),
    pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("gcc") is None, reason="needs gcc on x86-64"),
]
GEMV, WIDE = "gemv_4bit_grouped", "gemm_4bit_sm90_wide_grouped"
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
        machine.Gpu(90, sms, seed).grouped_linear_4bit(x, offs, packed, scales, b, *settings)
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
    dx = machine.Gpu(90, 4).grouped_linear_4bit(dy, offs, packed, scales, None, *settings, backward=True)
    norms = reference.grouped_linear_4bit_dgrad(dy.double().square(), offs, weights.double().square())
    check(dx, reference.grouped_linear_4bit_dgrad(dy, offs, weights), norms, dtype)
    assert not dx[offs[-1] :].any()


@pytest.mark.parametrize("kernel", [GEMV, WIDE])
def test_offs_that_do_not_fit_are_clamped(kernel):
    """Nothing is read or written out of bounds, and every row has one expert or none."""
    x, _, _, packed, scales, _, weights = given(torch.bfloat16, [2, 0, 0, 5, 0, 3], 128, 128, 64, "nf4", True, False)
    y = machine.Gpu(90, 2).grouped_linear_4bit(x, OFFS, packed, scales, None, 64, ops.FORMATS["nf4"], 128, 128, kernel)
    offs = OFFS.clamp(0, len(x)).cummax(0).values
    expected = reference.grouped_linear_4bit(x, offs, weights, torch.zeros(6, 128, dtype=x.dtype))
    norms = reference.grouped_linear_4bit(
        x.double().square(), offs, weights.double().square(), torch.zeros(6, 128).double()
    )
    check(y, expected, norms, x.dtype)


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
