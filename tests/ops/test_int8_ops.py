"""quantize_int8, its products and layers: against references, on every instruction set, with whatever input."""

import copy
import math

import pytest
import reference
import torch
from bitshard import ops
from cases import DTYPES, LINEAR, STORAGES, largest_error
from helpers.alike import agree, by_isa, by_threads

NONE = torch.empty(0)
FEW = 4  # rows that the CPU multiplies as they are: BSH_INT8_FEW
THRESHOLDS = (0.0, 1.0, 3.0)


def weight_of(N, K, device, seed=0):
    """Codes, absmax, and the decoded weight in float32."""
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(seed + N + K))
    codes, absmax, _ = ops.quantize_int8(w, 0.0)
    decoded = reference.dequantize_int8(codes, absmax, N, K, torch.float32)
    return codes.to(device), absmax.to(device), decoded


def rows(M, K, dtype, seed=1):
    """x [M, K] with some outliers in a few columns."""
    generator = torch.Generator().manual_seed(seed + M + K)
    x = torch.randn(M, K, generator=generator)
    x[:, :: max(1, K // 3)] *= 3
    return x.to(dtype)


# ---- codes ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("M, K", [(1, 1), (1, 130), (5, 33), (40, 257)])
def test_codes(device, dtype, threshold, M, K):
    """The reference's bits. fp16: a GPU's approximate quotient may round a code that lies between two otherwise."""
    x = rows(M, K, dtype)
    codes, absmax, outliers = (t.cpu() for t in ops.quantize_int8(x.to(device), threshold))
    expected, expected_absmax, expected_outliers = reference.quantize_int8(x, threshold)
    assert codes.dtype == torch.int8 and absmax.dtype == torch.float32 and outliers.dtype == torch.uint8
    assert torch.equal(absmax, expected_absmax)
    assert torch.equal(outliers.bool(), expected_outliers) if threshold else outliers.shape == (0,)
    wrong = codes != expected
    if dtype == torch.float16:
        product = x.float() * (127 / absmax)[:, None]
        assert ((product - product.floor() - 0.5).abs()[wrong] < 1e-4).all()
    else:
        assert not wrong.any()


def test_codes_of_fp16_are_those_of_a_gpu():
    """127 / absmax with the reciprocals that an H200 gave (BSH_RCP_WORDS), every mantissa; half of 127 lies between."""
    mantissas = torch.arange(1024, 2048)
    absmax = mantissas.half()  # in [1024, 2048): 11 bits, exact
    x = torch.stack([absmax, absmax / 2, -absmax / 2], 1)
    codes, found, _ = ops.quantize_int8(x, 0.0)
    assert torch.equal(found, absmax.float())
    exact = ops.quantize_int8(x.float(), 0.0)[0]
    differs = (codes != exact).any(1)
    assert (codes[:, 0] == 127).all() and set(codes[:, 1].tolist()) == {63, 64}
    assert 0 < differs.sum() < 512 and torch.equal(codes[:, 1], -codes[:, 2])


def test_leading_dimensions_are_kept(device):
    x = rows(6, 20, torch.bfloat16).view(2, 3, 20).to(device)
    codes, absmax, outliers = ops.quantize_int8(x, 2.0)
    flat, flat_absmax, flat_outliers = ops.quantize_int8(x.view(6, 20), 2.0)
    assert codes.shape == (2, 3, 20) and torch.equal(codes.view(6, 20), flat)
    assert torch.equal(absmax, flat_absmax) and torch.equal(outliers, flat_outliers)


def test_x_stays_as_it_is(device):
    """Upstream's CPU build writes zeros into x and restores them."""
    x = rows(9, 33, torch.float16).to(device)
    before = x.clone()
    ops.quantize_int8(x, 1.0)
    assert torch.equal(x, before)


def test_a_threshold_compares_as_torch_does(device, assert_equal):
    """|x| >= threshold in the dtype of x: 0.1 is not the fp16 number nearest to it."""
    for dtype in DTYPES:
        at = torch.tensor(0.1).to(dtype)
        for x in (
            torch.stack([at, -at, at / 2, at * 2])[None],
            torch.stack([at, at / 2, at / 4])[:, None].expand(3, 4),
        ):
            _, absmax, outliers = ops.quantize_int8(x.to(device), 0.1)
            assert torch.equal(outliers.cpu().bool(), (x.abs() >= 0.1).any(0))
            assert_equal(absmax.cpu(), x.abs().masked_fill(x.abs() >= 0.1, 0).amax(1).float())


@pytest.mark.parametrize("M", [1, 3])
def test_what_is_no_number(device, assert_equal, M):
    """A row with a NaN has absmax NaN and codes 0, one with an infinity absmax infinity: its products are NaN, and no
    other row's are. Upstream's CUDA kernel passes over a NaN. Beyond a threshold an infinity is an outlier."""
    x = rows(M, 40, torch.float16)
    x[0, 3], clean = float("nan"), ops.quantize_int8(x[1:], 0.0)
    codes, absmax, _ = (t.cpu() for t in ops.quantize_int8(x.to(device), 0.0))
    assert not codes[0].any() and absmax.view(torch.int32)[0] == 0x7FFFFFFF
    assert torch.equal(codes[1:], clean[0]) and torch.equal(absmax[1:], clean[1])
    x[0, 3] = float("-inf")
    codes, absmax, _ = (t.cpu() for t in ops.quantize_int8(x.to(device), 0.0))
    assert not codes[0].any() and absmax[0] == math.inf
    codes, absmax, outliers = (t.cpu() for t in ops.quantize_int8(x.to(device), 100.0))
    assert outliers.nonzero().tolist() == [[3]] and not codes[:, 3].any()
    assert absmax[0] == x[0].abs().masked_fill(x[0].isinf(), 0).max()


def test_rows_of_zeros_and_tiny_rows(device):
    """Codes are 0 where 127 / absmax is no number, or a denormal x would matter."""
    for tiny in (0.0, 2.0**-133, 2.0**-120):
        x = torch.full((3, 40), tiny, dtype=torch.bfloat16)
        codes, absmax, _ = ops.quantize_int8(x.to(device), 0.0)
        assert not codes.any() and (absmax == tiny).all()
        sums = torch.ones(3, 2, dtype=torch.int32, device=device)
        y = ops.scale_product_int8(sums, absmax, absmax[:2], NONE.to(device), torch.float32)
        assert y.isfinite().all()
    codes, absmax, _ = ops.quantize_int8(torch.tensor([[2.0**-118, -(2.0**-119)]], device=device), 0.0)
    assert codes.tolist() == [[127, -64]]
    codes, _, _ = ops.quantize_int8(torch.tensor([[3e38, -3e38, 1.5e38]], device=device), 0.0)
    assert codes.tolist() == [[127, -127, 64]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("storage", STORAGES)
def test_decoded_weights(device, assert_equal, dtype, storage):
    """Any storage, also where it is filled up; a container that begins at any byte."""
    for N, K in ((1, 1), (5, 24), (17, 33)):
        codes, absmax, _ = weight_of(N, K, "cpu")
        padded = torch.nn.functional.pad(codes.flatten(), (0, -N * K % storage.itemsize))
        packed = padded.view(storage)[:, None].to(device)
        expected = reference.dequantize_int8(codes, absmax, N, K, dtype)
        assert_equal(ops.dequantize_int8(packed, absmax.to(device), N, K, dtype).cpu(), expected)
    shifted = torch.cat([codes.flatten()[:1], codes.flatten()]).to(device)[1:]
    assert_equal(ops.dequantize_int8(shifted, absmax.to(device), N, K, dtype).cpu(), expected)


def test_decoded_as_upstream(assert_equal):
    """Its int8_vectorwise_dequant: code * absmax * 7.874015718698502e-3 by torch, in float32."""
    codes = torch.arange(-128, 128).to(torch.int8).expand(50, 256).contiguous()
    absmax = torch.rand(50, generator=torch.Generator().manual_seed(0)) * 10
    expected = codes * absmax.view(-1, 1) * 7.874015718698502e-3
    assert_equal(ops.dequantize_int8(codes, absmax, 50, 256, torch.float32), expected)


# ---- products of codes ----


@pytest.mark.parametrize("M, N, K", [*LINEAR, (3, 300, 4100)])
def test_products_are_exact(device, M, N, K):
    """Any codes, -128 too, which a foreign checkpoint may hold: no instruction may saturate."""
    generator = torch.Generator().manual_seed(K)
    for a, b in (
        (torch.randint(-128, 128, size, generator=generator, dtype=torch.int8) for size in ((M, K), (N, K))),
        (torch.full(size, -128, dtype=torch.int8) for size in ((M, K), (N, K))),
    ):
        sums = ops.product_int8(a.to(device), b.to(device)).cpu()
        assert sums.dtype == torch.int32 and torch.equal(sums.long(), reference.product_int8(a, b))


def test_product_keeps_leading_dimensions(device):
    a, b = torch.ones(2, 3, 5, dtype=torch.int8, device=device), torch.ones(4, 5, dtype=torch.int8, device=device)
    assert ops.product_int8(a, b).shape == (2, 3, 4) and (ops.product_int8(a, b) == 5).all()
    assert ops.product_int8(a[0, 0], b).shape == (4,)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_scaled_products(device, assert_equal, dtype, with_bias):
    """fma(float(sum) * row * column, 6.200012e-05, bias), one rounding; upstream's CPU build has 6.200124e-05."""
    generator = torch.Generator().manual_seed(3)
    sums = torch.randint(-(2**31), 2**31 - 1, (7, 50), generator=generator, dtype=torch.int32)
    sums[:, ::2] //= 2**12
    row, column = torch.rand(7, generator=generator), torch.rand(50, generator=generator)
    bias = torch.randn(50, generator=generator).to(dtype) if with_bias else NONE
    y = ops.scale_product_int8(*(t.to(device) for t in (sums, row, column, bias)), dtype)
    assert_equal(y.cpu(), reference.scale_product_int8(sums, row, column, bias if with_bias else None, dtype))
    ones = torch.ones(1)
    one = ops.scale_product_int8(torch.full((1, 1), 127 * 127, dtype=torch.int32), ones, ones, NONE, torch.float32)
    assert (one.double() - 1).abs() < 2e-7


def test_bf16_results_do_not_pass_fp16(device):
    """Upstream rounds every result to fp16 first: infinity from 65,520 on."""
    sums = torch.full((1, 1), 127 * 127 * 1000, dtype=torch.int32, device=device)
    hundred = torch.full((1,), 100.0, device=device)
    y = ops.scale_product_int8(sums, hundred, hundred, NONE.to(device), torch.bfloat16)
    assert abs(y.item() - 1e7) < 1e7 / 256
    x = torch.full((20, 64), 3e5, dtype=torch.bfloat16, device=device)  # infinite in fp16
    codes, absmax, decoded = weight_of(16, 64, device)
    y = ops.linear_int8(x, codes, absmax, NONE.to(device), 0.0, 16, 64).cpu()
    assert torch.allclose(y.float(), x.float().cpu() @ decoded.T, rtol=2e-2, atol=3e5)


# ---- layers ----


def check_linear(device, M, N, K, dtype, threshold, with_bias):
    x, (codes, absmax, decoded) = rows(M, K, dtype), weight_of(N, K, device)
    bias = torch.randn(N, generator=torch.Generator().manual_seed(N)).to(dtype) if with_bias else NONE
    y = ops.linear_int8(x.to(device), codes, absmax, bias.to(device), threshold, N, K)
    assert y.shape == (M, N) and y.dtype == dtype
    few = reference.linear_int8(x, decoded, bias if with_bias else None, threshold, False)
    coded = reference.linear_int8(x, decoded, bias if with_bias else None, threshold, True)
    magnitude = x.double().abs() @ decoded.double().abs().T + (bias.double().abs() if with_bias else 0)
    one, other = ((y.cpu().double() - exact).abs() for exact in (few, coded))
    # between two codes a GPU rounds an fp16 number otherwise than float64 does: some terms are off by a code
    off = magnitude.new_zeros(()) if dtype != torch.float16 else x.double().abs().amax(1, keepdim=True) / 127
    bounds = [largest_error(exact, magnitude, K + 8, dtype, False) for exact in (few, coded)]
    assert (one <= bounds[0]).all() if M <= FEW else (other <= bounds[1] + 2 * off * decoded.abs().max()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M, N, K", LINEAR)
def test_linear(device, dtype, M, N, K):
    if device.type == "cuda":
        pytest.skip("which rows are coded differs there: tests/gpu/test_cuda_int8.py")
    for i, threshold in enumerate(THRESHOLDS):
        check_linear(device, M, N, K, dtype, threshold, with_bias=i % 2 == 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_are_the_three_ops(device, assert_equal, dtype):
    """Bit for bit without outliers: so fp16 layers equal upstream's on CUDA, whose ops these are."""
    M, N, K = 300, 70, 130
    x, (codes, absmax, _) = rows(M, K, dtype).to(device), weight_of(N, K, device)
    bias = torch.randn(N).to(device, dtype)
    a, rows_absmax, _ = ops.quantize_int8(x, 0.0)
    expected = ops.scale_product_int8(ops.product_int8(a, codes), rows_absmax, absmax, bias, dtype)
    assert_equal(ops.linear_int8(x, codes, absmax, bias, 0.0, N, K), expected)


def upstreams_linear(x, codes, absmax, bias, threshold):
    """What bitsandbytes' CUDA build computes: x and results in fp16, outliers by addmm in the dtype of x."""
    a, row_absmax, outliers = reference.quantize_int8(x.half(), threshold)
    sums = reference.product_int8(a, codes)
    y = reference.scale_product_int8(sums, row_absmax, absmax, bias.half(), torch.float16).to(x.dtype)
    columns = (codes[:, outliers].float() * absmax[:, None] * torch.tensor(1 / 127)).to(x.dtype)
    return torch.addmm(y, x[:, outliers], columns.T) if outliers.any() else y


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("M", [1, 8, 60])
def test_errors_are_no_larger_than_upstreams(device, dtype, M):
    """Against float64 products of x as it is."""
    N, K = 300, 512
    x, (codes, absmax, decoded) = rows(M, K, dtype), weight_of(N, K, "cpu")
    bias = torch.randn(N, generator=torch.Generator().manual_seed(2)).to(dtype)
    for threshold in (0.0, 6.0):
        exact = reference.linear_int8(x, decoded, bias, threshold, False)
        y = ops.linear_int8(*(t.to(device) for t in (x, codes, absmax, bias)), threshold, N, K).cpu()
        theirs = upstreams_linear(x, codes, absmax, bias, threshold)
        ours, error = ((found.double() - exact).norm() for found in (y, theirs))
        assert ours <= 1.002 * error, (ours, error, threshold)


def test_scales_of_a_weight_that_are_no_numbers(device):
    """Spoil their own columns of y and no others."""
    codes, absmax, _ = weight_of(33, 70, "cpu")
    absmax[2], absmax[3], absmax[4] = math.nan, math.inf, -1.0
    for M in (2, 20):
        x = rows(M, 70, torch.bfloat16)
        y = ops.linear_int8(*(t.to(device) for t in (x, codes, absmax, NONE)), 2.0, 33, 70).cpu()
        assert not y[:, 2:4].isfinite().any() and y[:, :2].isfinite().all() and y[:, 4:].isfinite().all()


def test_all_columns_may_be_outliers(device):
    """A threshold that makes every column one: slow, and as exact as x is."""
    x, (codes, absmax, decoded) = rows(20, 65, torch.float32), weight_of(33, 65, device)
    y = ops.linear_int8(x.to(device), codes, absmax, NONE.to(device), 1e-6, 33, 65).cpu()
    assert torch.allclose(y, x @ decoded.T, rtol=1e-4, atol=1e-4)
    infinite = ops.linear_int8(x.to(device), codes, absmax, NONE.to(device), math.inf, 33, 65)
    assert torch.equal(infinite, ops.linear_int8(x.to(device), codes, absmax, NONE.to(device), 0.0, 33, 65))


@pytest.mark.parametrize("M", [1, 20])
def test_a_row_that_is_no_number_spoils_no_other(device, M):
    codes, absmax, _ = weight_of(33, 70, device)
    for value in (math.nan, math.inf):
        for threshold in (0.0, 6.0):
            x = rows(M, 70, torch.bfloat16)
            x[0, 5] = value
            y = ops.linear_int8(x.to(device), codes, absmax, NONE.to(device), threshold, 33, 70).cpu()
            assert not y[0].isfinite().any() and y[1:].isfinite().all()


def test_the_order_of_x_does_not_matter(device, assert_equal):
    """Strided x, a weight in a container of another dtype or at an odd address: the same bits."""
    codes, absmax, _ = weight_of(64, 96, device)
    for M in (3, 40):
        x = rows(M, 96, torch.float16).to(device)
        expected = ops.linear_int8(x, codes, absmax, NONE.to(device), 3.0, 64, 96)
        strided, turned = torch.stack([x, x], -1)[..., 0], x.t().contiguous().t()
        shifted = torch.cat([codes.flatten()[:1], codes.flatten()])[1:]
        for given in (strided, turned):
            assert_equal(ops.linear_int8(given, codes, absmax, NONE.to(device), 3.0, 64, 96), expected)
        for packed in (shifted, codes.view(torch.bfloat16).reshape(-1, 1), codes.view(torch.float32)):
            assert_equal(ops.linear_int8(x, packed, absmax, NONE.to(device), 3.0, 64, 96), expected)
        dy = rows(M, 64, torch.float16).to(device)
        for packed in (shifted, codes.view(torch.float32)):
            found = ops.linear_int8_dgrad(dy, packed, absmax, 64, 96)
            assert_equal(found, ops.linear_int8_dgrad(dy, codes, absmax, 64, 96))
        flat = x.view(-1, 1, 96) if M == 3 else x.view(2, 20, 96)
        assert_equal(ops.linear_int8(flat, codes, absmax, NONE.to(device), 3.0, 64, 96).view(M, 64), expected)


def test_empty(device):
    none = NONE.to(device)
    for M, N, K in ((0, 5, 7), (3, 0, 7), (3, 5, 0), (0, 0, 0), (30, 5, 0)):
        x, codes = torch.ones(M, K, device=device), torch.zeros(N, K, dtype=torch.int8, device=device)
        absmax, bias = torch.ones(N, device=device), torch.arange(1.0, N + 1, device=device)
        found, scale, outliers = ops.quantize_int8(x, 6.0)
        assert found.shape == (M, K) and torch.equal(scale, torch.full_like(scale, float(K > 0))) and len(scale) == M
        assert outliers.shape == (K,) and not outliers.any()
        assert ops.product_int8(found, codes).shape == (M, N) and not ops.product_int8(found, codes).any()
        assert ops.dequantize_int8(codes, absmax, N, K, torch.float16).shape == (N, K)
        y = ops.linear_int8(x, codes, absmax, bias, 0.0, N, K)
        assert torch.equal(y, torch.nn.functional.linear(x, codes.float(), bias))
        assert not ops.linear_int8(x, codes, absmax, none, 6.0, N, K).any()
        dx = ops.linear_int8_dgrad(torch.ones(M, N, device=device), codes, absmax, N, K)
        assert dx.shape == (M, K) and not dx.any()
        sums = torch.ones(M, N, dtype=torch.int32, device=device)
        assert ops.scale_product_int8(sums, scale, absmax, none, torch.float32).shape == (M, N)


def test_every_instruction_set_gives_the_same_bits():
    """What is exact: codes, decoded weights, sums, scaled sums, and so layers of many rows without outliers."""
    codes, absmax, _ = weight_of(70, 130, "cpu")
    for dtype in DTYPES:
        x, bias = rows(40, 130, dtype), torch.randn(70).to(dtype)
        x[3, 5], x[4, 6], x[5] = math.nan, math.inf, 0.0

        def call(x=x, bias=bias, dtype=dtype):
            found = (*ops.quantize_int8(x, 2.0), ops.dequantize_int8(codes, absmax, 70, 130, dtype))
            return *found, ops.linear_int8(x, codes, absmax, bias, 0.0, 70, 130)

        agree(by_isa(call))


def test_threads_do_not_change_bits():
    codes, absmax, _ = weight_of(300, 256, "cpu")
    x = rows(130, 256, torch.bfloat16)

    def call():
        y = ops.linear_int8(x, codes, absmax, NONE, 2.0, 300, 256)
        dx = [ops.linear_int8_dgrad(y[:M], codes, absmax, 300, 256) for M in (2, 130)]
        few = ops.linear_int8(x[:5], codes, absmax, NONE, 2.0, 300, 256)
        return *ops.quantize_int8(x, 2.0), ops.product_int8(codes, codes), y, few, *dx

    agree(by_threads(call, 1, 3))


# ---- errors ----

X, C, A = torch.ones(4, 8), torch.ones(6, 8, dtype=torch.int8), torch.ones(6)
S = torch.ones(4, 6, dtype=torch.int32)
FLOAT = torch.float32
WRONG = [
    (lambda: ops.quantize_int8(X.double(), 0.0), "x must be float32, float16 or bfloat16, got ScalarType 7"),
    (lambda: ops.quantize_int8(X, -1.0), "threshold -1, expected a number from 0"),
    (lambda: ops.quantize_int8(X, math.nan), "threshold nan"),
    (lambda: ops.quantize_int8(torch.ones(()), 0.0), "x has no dimension"),
    (
        lambda: ops.dequantize_int8(C, A, 6, 9, FLOAT),
        r"packed has 48 bytes, a weight \[6, 9\] in .* 1-byte items needs 54",
    ),
    (lambda: ops.dequantize_int8(C[:3], A, 6, 8, FLOAT), "packed has 24 bytes.*a sharded or foreign weight"),
    (lambda: ops.dequantize_int8(C.bool(), A, 6, 8, FLOAT), "packed has ScalarType 11, which is no storage"),
    (lambda: ops.dequantize_int8(C, A[:5], 6, 8, FLOAT), "absmax has 5 elements, expected 6"),
    (lambda: ops.dequantize_int8(C, A.half(), 6, 8, FLOAT), "absmax has ScalarType 5, expected 6"),
    (lambda: ops.dequantize_int8(C, A, 6, 8, torch.float64), "dtype must be float32"),
    (lambda: ops.dequantize_int8(C, A, -6, -8, FLOAT), r"\[-6, -8\] is not a tensor shape"),
    (lambda: ops.dequantize_int8(C, A, 2**40, 2**40, FLOAT), "is not a tensor shape"),
    (lambda: ops.product_int8(X, C), "a has ScalarType 6, expected 1"),
    (lambda: ops.product_int8(C, X), "b has ScalarType 6, expected 1"),
    (lambda: ops.product_int8(C, C[:, :7]), "last dimension of a is 8, b has 7 columns"),
    (lambda: ops.product_int8(C, C[None]), "b has 3 dimensions, expected 2"),
    (
        lambda: ops.product_int8(C.new_ones(1, 131072), C.new_ones(1, 131072)),
        "131072 columns, the sum of at most 131071",
    ),
    (lambda: ops.scale_product_int8(S.long(), A[:4], A, NONE, FLOAT), "sums has ScalarType 4, expected 3"),
    (lambda: ops.scale_product_int8(S, A, A, NONE, FLOAT), "row_absmax has 6 elements, expected 4"),
    (lambda: ops.scale_product_int8(S, A[:4], A[:4], NONE, FLOAT), "col_absmax has 4 elements, expected 6"),
    (lambda: ops.scale_product_int8(S, A[:4], A, A.half(), FLOAT), "bias has ScalarType 5, expected 6"),
    (lambda: ops.scale_product_int8(S, A[:4], A, A[:5], FLOAT), "bias has 5 elements, expected 6"),
    (lambda: ops.scale_product_int8(S, A[:4], A, NONE, torch.int8), "dtype must be float32"),
    (lambda: ops.linear_int8(X[:, :7], C, A, NONE, 0.0, 6, 8), "last dimension of x is 7, the weight needs 8"),
    (lambda: ops.linear_int8(X, C, A, NONE, -0.5, 6, 8), "threshold -0.5"),
    (lambda: ops.linear_int8(X, C, A, A[:3], 0.0, 6, 8), "bias has 3 elements, expected 6"),
    (lambda: ops.linear_int8(X, C, A.double(), NONE, 0.0, 6, 8), "absmax has ScalarType 7, expected 6"),
    (lambda: ops.linear_int8(X, C[:5], A, NONE, 0.0, 6, 8), "packed has 40 bytes"),
    (lambda: ops.linear_int8(X, C.expand(2, 6, 8), A, NONE, 0.0, 6, 8), "packed has 96 bytes"),
    (lambda: ops.linear_int8_dgrad(X, C, A, 6, 8), "last dimension of dy is 8, the weight needs 6"),
    (lambda: ops.linear_int8_dgrad(X[:, :6], C, NONE, 6, 8), "absmax has 0 elements, expected 6"),
]


@pytest.mark.parametrize("call, words", WRONG)
def test_what_does_not_fit_raises(call, words):
    with pytest.raises(RuntimeError, match=words):
        call()


def test_freed_memory_is_not_read():
    """FSDP2 frees a gathered tensor by resizing its storage."""
    codes = copy.deepcopy(C)
    codes.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="it was freed"):
        ops.linear_int8(X, codes, A, NONE, 0.0, 6, 8)


def test_fakes_say_what_comes():
    calls = [
        lambda t: ops.quantize_int8(t(X.view(2, 2, 8)), 6.0),
        lambda t: ops.quantize_int8(t(X), 0.0),
        lambda t: [ops.dequantize_int8(t(C), t(A), 6, 8, torch.bfloat16)],
        lambda t: [ops.product_int8(t(C.view(2, 3, 8)), t(C))],
        lambda t: [ops.scale_product_int8(t(S), t(A[:4]), t(A), t(NONE), torch.float16)],
        lambda t: [ops.linear_int8(t(X), t(C), t(A), t(NONE), 6.0, 6, 8)],
        lambda t: [ops.linear_int8_dgrad(t(X[:, :6]), t(C), t(A), 6, 8)],
    ]
    for call in calls:
        for fake, real in zip(call(lambda t: t.to("meta")), call(lambda t: t), strict=True):
            assert fake.is_meta and (fake.shape, fake.dtype) == (real.shape, real.dtype)
    for wrong in (
        lambda: ops.linear_int8(X.to("meta"), C, A, NONE, 0.0, 6, 8),
        lambda: ops.product_int8(C.to("meta"), C[:, :7].to("meta")),
    ):
        with pytest.raises(RuntimeError, match="meta|columns"):
            wrong()
