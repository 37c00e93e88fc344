"""The int8 kernels without a GPU, as tests/gpu/test_ptx.py: exact where the format is, else within a bound of fp64."""

import platform
import shutil

import pytest
import torch
from bitshard import ops
from ptx import gpu as machine

pytestmark = [
    pytest.mark.skipif(machine.nvcc() is None, reason="needs nvcc"),
    pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("gcc") is None, reason="needs gcc on x86-64"),
]
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
EPSILON = {F32: 2.0**-23, F16: 2.0**-10, BF16: 2.0**-7}


def drawn(*shape, dtype=F32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def weight(N, K, seed=1):
    """Codes with both ends of their range, and scales."""
    generator = torch.Generator().manual_seed(seed + N + K)
    codes = torch.randint(-127, 128, (N, K), dtype=torch.int8, generator=generator)
    codes.view(-1)[::37] = -128
    return codes, torch.rand(N, generator=generator) + 0.01


def activations(M, K, dtype, outliers, ld=None):
    """x [M, K], rows `ld` apart, with outlier columns in the last rows."""
    x = drawn(M, ld or K, dtype=dtype)[:, :K]
    x.clamp_(-4, 4)
    for i, column in enumerate(torch.randperm(K, generator=torch.Generator().manual_seed(3))[:outliers].tolist()):
        x[-1 - i % M, column] = 20 + i % 7 if i % 2 else -6.0
    return x


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_quantize(dtype):
    """Codes, scales and flags are the CPU's, byte for byte."""
    gpu = machine.Gpu(90, 2, seed=5)
    cases = [(3, 64, 0.0, None), (5, 1001, 6.0, None), (1, 130, 6.0, None), (4, 9000, 6.0, 9008), (2, 8, 6.0, 9)]
    cases += [(1, 9000, 6.0, None)]  # codes are not cleared behind the kernel
    for M, K, threshold, ld in cases:
        x = activations(M, K, dtype, min(K // 2, 70) if threshold else 0, ld)
        if M > 1:
            x[0, : K // 2] = 0
            x[0] *= 1e-3
        assert all(map(same, gpu.quantize_int8(x, threshold), ops.quantize_int8(x, threshold))), (M, K)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("threshold", [3e-8, 5.999, 6.0, 65503.0, 1e9, float("inf")])
def test_thresholds_and_every_number(dtype, threshold):
    """All numbers of 16 bits, a column each, NaN among them. Thresholds are numbers of the dtype, as in the op."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).view(32, -1)
    threshold = torch.tensor(threshold).to(dtype).item()
    found, expected = machine.Gpu(90, 4).quantize_int8(x, threshold), ops.quantize_int8(x, threshold)
    assert all(map(same, found, expected))
    assert expected[2].any()


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_what_is_no_number(dtype, threshold):
    """NaN, infinities, a row of zeros, the largest and the smallest numbers."""
    x = drawn(6, 64, dtype=dtype)
    x[0, 5], x[1, 9], x[2, 11], x[3] = torch.nan, torch.inf, -torch.inf, 0
    x[4, 3], x[5] = torch.finfo(dtype).max, x[5] * torch.finfo(dtype).tiny
    found, expected = machine.Gpu(90, 2).quantize_int8(x, threshold), ops.quantize_int8(x, threshold)
    assert all(map(same, found, expected))
    assert threshold > 0 or found[1][0].isnan()


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_dequantize(dtype):
    gpu = machine.Gpu(90, 2)
    for N, K in ((5, 64), (3, 33), (40, 272)):
        codes, absmax = weight(N, K)
        expected = (codes.float() * absmax[:, None] * 7.874015718698502e-3).to(dtype)
        assert torch.equal(gpu.dequantize_int8(codes, absmax, dtype), expected)


def off(tensor):
    """The same one byte or element off alignment."""
    flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    flat[1:] = tensor.reshape(-1)
    return flat[1:].view(tensor.shape)


@pytest.mark.parametrize("sm", [75, 80, 90])
def test_product(sm):
    """int32 sums, exactly: whole tiles and ragged ones, one stage and several, aligned or not."""
    for M, N, K in ((130, 65, 400), (3, 5, 7), (17, 129, 129), (1, 1, 1)):
        a, b = weight(M, K)[0], weight(N, K, seed=9)[0]
        expected = (a.double() @ b.double().T).int()
        assert torch.equal(machine.Gpu(sm, 2, seed=3).product_int8(a, b), expected), (M, N, K)
        assert torch.equal(machine.Gpu(sm, 2).product_int8(off(a), b), expected), (M, N, K)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_scale_product(dtype):
    gpu, sums = machine.Gpu(90, 2), torch.randint(-(2**24), 2**24, (7, 33), dtype=torch.int32)
    row, col, bias = torch.rand(7) * 9, torch.rand(33), drawn(33, dtype=dtype)
    product = sums.float() * row[:, None] * col
    for b in (None, bias):
        added = 0.0 if b is None else b.double()
        expected = (product.double() * torch.tensor(6.200012e-05).double() + added).float().to(dtype)
        assert torch.equal(gpu.scale_product_int8(sums, row, col, b, dtype), expected)


def check(y, x, codes, absmax, bias, rounded=None):
    """Against fp64: one rounding of y, and fp32 sums in any order. rounded: x as the kernel takes it."""
    x64 = (x if rounded is None else rounded).double()
    w = codes.double() * absmax.double()[:, None] / 127
    exact = x64 @ w.T + (0 if bias is None else bias.double())
    magnitude = x64.abs() @ w.abs().T + (0 if bias is None else bias.double().abs())
    bound = EPSILON[x.dtype] * exact.abs() / 2 * 1.01 + magnitude * 2.0**-20 + 1e-6
    assert ((y.double() - exact).abs() <= bound).all(), ((y.double() - exact).abs() / bound).max()


# kernel, sm, dtype, M, N, K, bias
FEW = [
    ("gemv_int8", 90, BF16, 1, 64, 1024, False),
    ("gemv_int8", 90, F16, 8, 96, 4160, True),
    ("gemv_int8", 90, F16, 3, 32, 8192 + 64, True),
    ("gemv_int8", 90, BF16, 16, 48, 4160, True),
    ("gemv_int8", 90, F16, 21, 48, 512, True),
    ("gemv_int8", 90, BF16, 32, 32, 4160, True),
    ("gemv_int8", 80, BF16, 5, 64, 704, True),
    ("gemv_int8", 80, F16, 12, 64, 4096, False),
    ("gemv_int8", 75, F16, 16, 32, 512, True),
    ("any", 90, F32, 5, 33, 100, True),
    ("any", 90, BF16, 3, 17, 65, False),
    ("any", 75, BF16, 16, 32, 64, True),
]


@pytest.mark.parametrize("case", FEW, ids=lambda case: "-".join(map(str, case)).replace("torch.", ""))
def test_few_rows(case):
    """x as it is: within one rounding of fp64, outliers too; the same bits on another run of threads; the plan's."""
    kernel, sm, dtype, M, N, K, with_bias = case
    codes, absmax = weight(N, K)
    bias = drawn(N, dtype=dtype) if with_bias else None
    x = activations(M, K, dtype, 5)
    gpu = machine.Gpu(sm, 4, seed=7)
    y = gpu.linear_int8(x, codes, absmax, bias, 6.0, kernel)
    assert gpu.launches[0].startswith("gemv_int8" if kernel == "gemv_int8" else "linear_int8_any")
    check(y, x, codes, absmax, bias)
    assert torch.equal(y, machine.Gpu(sm, 4).linear_int8(x, codes, absmax, bias, 6.0))


# M, N, K, multiprocessors, dtype, bias, the form, blocks of a cluster, of all
MIXED = [
    (40, 300, 400, 2, F16, True, "m64", 2, 2),
    (33, 130, 1696, 20, F16, False, "m64", 8, 8),
    (20, 67, 256, 8, BF16, True, "m64", 2, 2),
    (70, 300, 400, 4, BF16, True, "m128", 2, 4),
    (130, 260, 528, 4, F16, False, "m256", 2, 4),
]


@pytest.mark.parametrize("case", MIXED, ids=lambda case: "-".join(map(str, case)).replace("torch.", ""))
def test_x_as_it_is_on_sm90(case):
    """As few rows, outliers too; ragged sizes, N odd; pairs of blocks that share a tile; rows of x further apart."""
    M, N, K, sms, dtype, with_bias, form, *blocks = case
    codes, absmax = weight(N, K)
    bias = drawn(N, dtype=dtype) if with_bias else None
    x = activations(M, K, dtype, 5, K + 8)
    gpu = machine.Gpu(90, sms, seed=M)
    y = gpu.linear_int8(x, codes, absmax, bias, 6.0, "mixed_int8_sm90")
    check(y, x, codes, absmax, bias)
    assert torch.equal(y, machine.Gpu(90, sms).linear_int8(x, codes, absmax, bias, 0.0, "mixed_int8_sm90"))
    assert gpu.launches == [f"mixed_int8_sm90_{'f16' if dtype is F16 else 'bf16'}_{form}"]
    assert gpu.blocks == [tuple(blocks)]


# kernel, sm, dtype, M, N, K, bias, workspace
MANY = [
    ("gemm_int8", 90, F32, 20, 40, 96, True, 1 << 20),
    ("gemm_int8", 80, F16, 130, 136, 400, True, 1 << 20),
    ("gemm_int8", 80, BF16, 17, 30, 200, False, 1 << 20),
    ("gemm_int8", 75, F16, 20, 40, 320, True, 1 << 20),
    ("gemm_int8", 75, BF16, 20, 40, 320, True, 1 << 20),
    ("gemm_int8_sm90", 90, F16, 40, 200, 272, True, 1 << 20),
    ("gemm_int8_sm90", 90, BF16, 70, 136, 1200, False, 1 << 20),
    ("gemm_int8_sm90", 90, BF16, 20, 67, 256, True, 1 << 20),
]


@pytest.mark.parametrize("outliers", [0, 70, 150])
@pytest.mark.parametrize("case", MANY, ids=lambda case: "-".join(map(str, case)).replace("torch.", ""))
def test_many_rows(case, outliers):
    """Without outliers the bits of the product scaled; with them within one rounding of fp64 products of the codes and,
    for outlier columns, of x. Beyond what the workspace gathers, too."""
    kernel, sm, dtype, M, N, K, with_bias, workspace = case
    if outliers == 150:
        workspace = 2 * (M + N) * 64
    codes, absmax = weight(N, K)
    bias = drawn(N, dtype=dtype) if with_bias else None
    x = activations(M, K, dtype, outliers)
    gpu = machine.Gpu(sm, 4, seed=outliers, workspace_bytes=workspace)
    y = gpu.linear_int8(x, codes, absmax, bias, 6.0, kernel)
    assert gpu.launches[-1].startswith(kernel + "_")
    x_codes, row, flags = gpu.quantize_int8(x, 6.0)
    assert flags.sum() == min(outliers, K)
    if outliers == 0:
        sums = (x_codes.double() @ codes.double().T).int()
        expected = gpu.scale_product_int8(sums, row, absmax, bias, dtype)
        assert torch.equal(y, expected)
        assert torch.equal(gpu.linear_int8(x, codes, absmax, bias, 0.0, kernel), expected)
    else:
        used = x_codes.double() * row.double()[:, None] / 127
        used[:, flags.bool()] = x.double()[:, flags.bool()]
        check(y, x, codes, absmax, bias, used)


# M, N, K, multiprocessors, the form, blocks of a cluster, of all
SM90 = [
    (40, 600, 272, 3, "m64_n64", 1, 3),
    (20, 100, 8208, 20, "m64_n64", 8, 16),
    (70, 40, 8208, 2, "m64_n64_c2", 2, 2),
    (20, 200, 272, 3, "m64_n128", 1, 2),
    (20, 200, 8208, 20, "m64_n128", 7, 14),
    (70, 280, 272, 3, "m64_n128_c2", 2, 2),
    (130, 100, 800, 5, "m64_n128_c3", 3, 3),
    (200, 40, 2064, 3, "m128_n96_c2", 2, 2),
    (100, 1000, 400, 4, "m128_n128", 1, 4),
    (250, 500, 1200, 2, "m128_n256", 2, 2),
    (200, 250, 272, 6, "m128_n128_c2", 2, 4),
]


@pytest.mark.parametrize("outliers", [0, 70])
@pytest.mark.parametrize("case", SM90, ids=lambda case: "-".join(map(str, case)))
def test_each_form_of_sm90(case, outliers):
    """Blocks that take tile after tile, blocks that share a tile, clusters of which one block has few rows or none."""
    M, N, K, sms, form, *blocks = case
    codes, absmax = weight(N, K)
    x = activations(M, K, F16, outliers)
    gpu = machine.Gpu(90, sms, seed=outliers + 1)
    y = gpu.linear_int8(x, codes, absmax, None, 6.0, "gemm_int8_sm90")
    finds = form != "m128_n256" and blocks[0] <= 3  # else the columns are gathered by kernels before
    assert gpu.launches[-1] == f"gemm_int8_sm90_f16_{form}" and gpu.blocks[-1] == tuple(blocks)
    assert len(gpu.launches) == (2 if finds else 4)
    other = machine.Gpu(90, sms).linear_int8(x, codes, absmax, None, 6.0, "gemm_int8")
    if outliers == 0:
        assert torch.equal(y, other)
    else:
        assert ((y.double() - other.double()).abs() <= 2.0**-10 * other.double().abs() + 1e-4).all()


FOUND = [(dtype, outliers, 600, 272) for dtype in (F16, BF16) for outliers in (0, 5, 40, 64, 100)]
FOUND += [(F16, 8, 100, 8192), (BF16, 40, 100, 8192)]  # more claims than x's operand has room for


@pytest.mark.parametrize("dtype, outliers, N, K", FOUND)
def test_columns_that_the_product_finds(dtype, outliers, N, K):
    """Whatever was in memory before, claims of other columns or of all, and whether blocks run at the same time and
    share what they gather of x, or one after the other: the same bits."""
    codes, absmax = weight(N, K)
    x, bias = activations(40, K, dtype, outliers, K + 8), drawn(N, dtype=dtype)
    gpu = machine.Gpu(90, 3, seed=outliers + 1, ones_each=1000000)
    y = gpu.linear_int8(x, codes, absmax, bias, 6.0, "gemm_int8_sm90")
    assert [name[:7] for name in gpu.launches] == ["quantiz", "gemm_in"]
    for settings in ({"ones_each": 0}, {"ones_each": 97}, {"ones_each": 97, "at_once": 1}):
        other = machine.Gpu(90, 3, seed=outliers + 2, **settings)
        assert torch.equal(y, other.linear_int8(x, codes, absmax, bias, 6.0, "gemm_int8_sm90")), settings
    x_codes, row, flags = gpu.quantize_int8(x, 6.0)
    assert flags.sum() == outliers
    if outliers == 0:
        sums = (x_codes.double() @ codes.double().T).int()
        assert torch.equal(y, gpu.scale_product_int8(sums, row, absmax, bias, dtype))
    used = x_codes.double() * row.double()[:, None] / 127
    used[:, flags.bool()] = x.double()[:, flags.bool()]
    check(y, x, codes, absmax, bias, used)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_input_gradient(dtype):
    """By several panels, with W rounded to the dtype, and by the kernel for any sizes."""
    codes, absmax = weight(130, 272)
    dy = drawn(7, 130, dtype=dtype)
    for kernel in ("any",) if dtype is F32 else ("any", "panels"):
        gpu = machine.Gpu(90, 4, workspace_bytes=130 * 2 * 70)
        dx = gpu.linear_int8(dy, codes, absmax, None, 0.0, kernel, dgrad=True)
        w = (codes.float() * absmax[:, None] * 7.874015718698502e-3).double()
        if kernel == "panels":
            w = w.to(dtype).double()
            assert gpu.launches == [f"dequantize_int8_{str(dtype)[6:].replace('loat', '')}"] * 5
        exact, magnitude = dy.double() @ w, dy.double().abs() @ w.abs()
        assert ((dx.double() - exact).abs() <= EPSILON[dtype] * exact.abs() + magnitude * 2.0**-20).all()


# M, N, K, multiprocessors, dtype, the form, blocks of a cluster, of all
DGRAD = [
    (40, 130, 272, 20, F16, "m64", 2, 4),
    (120, 320, 528, 4, BF16, "m128", 2, 4),
    (30, 1100, 144, 132, BF16, "m64", 8, 8),
    (250, 200, 272, 4, F16, "m256", 2, 4),
]


# M, N, K, multiprocessors, dtype, the form, blocks of a cluster, of all
FEW_DGRAD = [
    (1, 2050, 272, 132, F16, "m8", 8, 24),
    (8, 34, 144, 132, BF16, "m8", 1, 2),
    (13, 1100, 256, 4, BF16, "m16", 2, 4),
    (45, 600, 400, 132, F16, "m32", 3, 24),
]


@pytest.mark.parametrize("case", FEW_DGRAD, ids=lambda case: "-".join(map(str, case)).replace("torch.", ""))
def test_input_gradient_of_few_rows(case):
    """dy times scales in 16 bits of mantissa, fp32 sums, one rounding; ragged sizes; the same bits twice."""
    M, N, K, sms, dtype, form, *blocks = case
    codes, absmax = weight(N, K)
    dy = drawn(M, N + 2, dtype=dtype)[:, :N]
    gpu = machine.Gpu(90, sms, seed=M)
    dx = gpu.linear_int8(dy, codes, absmax, None, 0.0, "gemv_int8_dgrad", dgrad=True)
    w = codes.double() * absmax.double()[:, None] / 127
    exact, magnitude = dy.double() @ w, dy.double().abs() @ w.abs()
    assert ((dx.double() - exact).abs() <= EPSILON[dtype] * 0.51 * exact.abs() + magnitude * 2.0**-15).all()
    assert torch.equal(
        dx, machine.Gpu(90, sms).linear_int8(dy, codes, absmax, None, 0.0, "gemv_int8_dgrad", dgrad=True)
    )
    assert gpu.launches == [f"gemv_int8_dgrad_{'f16' if dtype is F16 else 'bf16'}_{form}"]
    assert gpu.blocks == [tuple(blocks)]


@pytest.mark.parametrize("case", DGRAD, ids=lambda case: "-".join(map(str, case)).replace("torch.", ""))
def test_input_gradient_in_one_pass(case):
    """W rounded to the dtype, fp32 sums, one rounding; ragged sizes; pairs that share a tile; the same bits twice."""
    M, N, K, sms, dtype, form, *blocks = case
    codes, absmax = weight(N, K)
    dy = drawn(M, -(-N // 8) * 8, dtype=dtype)[:, :N]
    gpu = machine.Gpu(90, sms, seed=M)
    dx = gpu.linear_int8(dy, codes, absmax, None, 0.0, "dgrad_int8_sm90", dgrad=True)
    w = codes.double() * absmax.double()[:, None] / 127
    exact, magnitude = dy.double() @ w, dy.double().abs() @ w.abs()
    error = (dx.double() - exact).abs()
    assert (error <= EPSILON[dtype] * (0.51 * exact.abs() + 0.51 * magnitude) + magnitude * 2.0**-20).all()
    rounded = dy.double() @ (codes.float() * absmax[:, None] / 127).to(dtype).double()
    assert (dx.double() - exact).norm() <= 1.1 * (rounded.to(dtype).double() - exact).norm()
    other = machine.Gpu(90, sms).linear_int8(dy, codes, absmax, None, 0.0, "dgrad_int8_sm90", dgrad=True)
    assert torch.equal(dx, other)
    assert gpu.launches[1] == f"dgrad_int8_sm90_{'f16' if dtype is F16 else 'bf16'}_{form}"
    assert gpu.blocks[1] == tuple(blocks)


@pytest.mark.parametrize("workspace", [1 << 20, 2 * (20 + 16) * 1088])
def test_more_outlier_columns_than_a_block_lists_at_a_time(workspace):
    """Every column of 1,312 is one: all gathered, or 1,088 of them; codes are zeros."""
    codes, absmax = weight(16, 1312)
    x = drawn(20, 1312, dtype=F16)
    gpu = machine.Gpu(90, 4, seed=2, workspace_bytes=workspace)
    check(gpu.linear_int8(x, codes, absmax, None, 0.01, "gemm_int8"), x, codes, absmax, None)
    assert not gpu.quantize_int8(x, 0.01)[0].any()
