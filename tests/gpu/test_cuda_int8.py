"""LLM.int8 on a GPU: the CPU's bytes, products to the bit or within a bound, CUDA graphs, and no wait for the GPU."""

import pytest
import torch
from bitshard import _C, ops
from helpers.bytes import same_bytes

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)
if not _C.cuda_state()["built"]:
    pytest.skip("bitshard was built without nvcc", allow_module_level=True)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (F32, F16, BF16)
EPSILON = {F32: 2.0**-23, F16: 2.0**-10, BF16: 2.0**-7}
FORWARD = ("gemv_int8", "any", "mixed_int8_sm90", "gemm_int8", "gemm_int8_sm90")


@pytest.fixture(autouse=True)
def chosen_by_the_plan():
    torch.manual_seed(0)
    yield
    for op in ("linear_int8", "linear_int8_dgrad"):
        _C.force_kernel(op, None)


def weight(N, K):
    codes = torch.randint(-127, 128, (N, K), dtype=torch.int8, device="cuda")
    return codes, torch.rand(N, device="cuda") + 0.01


def activations(M, K, dtype, columns=0):
    x = torch.randn(M, K, device="cuda").clamp_(-5, 5)
    x[:, torch.randperm(K, device="cuda")[:columns]] *= 20
    return x.to(dtype)


def linear(x, codes, absmax, bias, threshold, kernel=None):
    _C.force_kernel("linear_int8", kernel)
    bias = x.new_empty(0) if bias is None else bias
    return ops.linear_int8(x, codes, absmax, bias, threshold, *codes.shape)


def as_coded(x, threshold):
    """fp64 x as a product of many rows takes it."""
    codes, absmax, outliers = ops.quantize_int8(x, threshold)
    used = codes.double() * absmax.double()[:, None] / 127
    columns = outliers.nonzero().flatten()
    used[:, columns] = x.double()[:, columns]
    return used


def check(y, x64, codes, absmax, bias=None):
    w = codes.double() * absmax.double()[:, None] / 127
    exact, magnitude = x64 @ w.T, x64.abs() @ w.abs().T
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    bound = 0.51 * EPSILON[y.dtype] * exact.abs() + magnitude * 2.0**-18 + 1e-6
    assert ((y.double() - exact).abs() <= bound).all(), ((y.double() - exact).abs() / bound).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threshold", [0.0, 3.0])
def test_quantize_gives_the_cpu_bytes(dtype, threshold):
    for M, K in ((1, 1), (3, 7), (5, 4096), (300, 1001), (2, 30000)):
        x = torch.randn(M, K).to(dtype)
        x[0, 0] = torch.nan
        for found, expected in zip(
            ops.quantize_int8(x.cuda(), threshold), ops.quantize_int8(x, threshold), strict=True
        ):
            assert same_bytes(found.cpu(), expected), (M, K)


def test_every_fp16_absmax():
    top = torch.arange(1, 0x7C00, dtype=torch.int16).view(F16)
    x = torch.cat([top[:, None], (torch.rand(top.numel(), 63) * top[:, None].float()).half()], 1).contiguous()
    assert all(
        same_bytes(a.cpu(), b) for a, b in zip(ops.quantize_int8(x.cuda(), 0.0), ops.quantize_int8(x, 0.0), strict=True)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_and_scale_give_the_cpu_bytes(dtype):
    for N, K in ((5, 64), (33, 1001), (300, 4096)):
        codes, absmax = weight(N, K)
        found = ops.dequantize_int8(codes, absmax, N, K, dtype)
        assert same_bytes(found.cpu(), ops.dequantize_int8(codes.cpu(), absmax.cpu(), N, K, dtype))
        sums = torch.randint(-(2**24), 2**24, (N, K), dtype=torch.int32, device="cuda")
        col, bias = torch.rand(K, device="cuda"), torch.randn(K, device="cuda").to(dtype)
        arguments = (sums, absmax, col, bias)
        found = ops.scale_product_int8(*arguments, dtype)
        assert same_bytes(found.cpu(), ops.scale_product_int8(*(one.cpu() for one in arguments), dtype))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 5, 7), (130, 65, 400), (257, 300, 4096), (1000, 1000, 1000)])
def test_product(sizes):
    M, N, K = sizes
    a, b = weight(M, K)[0], weight(N, K)[0]
    assert torch.equal(ops.product_int8(a, b), (a.double() @ b.double().T).int())


@pytest.mark.parametrize("kernel", FORWARD)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [0, 8, 64, 300])
def test_products_of_layers(kernel, dtype, columns):
    """Each kernel for what it takes: the same bits twice; without outliers of many rows those of the scaled product."""
    tried = 0
    for M, N, K in (
        (1, 4096, 4096),
        (16, 48, 8192),
        (30, 96, 4160),
        (64, 4096, 4096),
        (300, 1040, 1056),
        (700, 77, 512),
    ):
        codes, absmax = weight(N, K)
        bias, x = torch.randn(N, device="cuda").to(dtype), activations(M, K, dtype, columns)
        threshold = 6.0 if columns else 0.0
        try:
            y = linear(x, codes, absmax, bias, threshold, kernel)
        except RuntimeError as refused:
            assert "cannot multiply" in str(refused)
            continue
        tried += 1
        assert same_bytes(y, linear(x, codes, absmax, bias, threshold, kernel))
        if kernel in ("gemv_int8", "any", "mixed_int8_sm90"):
            check(y, x.double(), codes, absmax, bias)
        elif columns:
            check(y, as_coded(x, threshold), codes, absmax, bias)
        else:
            rows, row_absmax, _ = ops.quantize_int8(x, 0.0)
            expected = ops.scale_product_int8(ops.product_int8(rows, codes), row_absmax, absmax, bias, dtype)
            assert same_bytes(y, expected), (M, N, K)
            assert same_bytes(linear(x, codes, absmax, bias, 6.0, kernel), expected), (M, N, K)
    assert tried or dtype is F32 or torch.cuda.get_device_capability()[0] != 9


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("rows", [33, 70, 128, 160, 192, 250, 384, 500, 1000])
def test_forms_and_columns(dtype, rows):
    """Each form that the plan takes; K beyond what shared memory has for claims; columns that are found or gathered."""
    for N, K, columns in ((4096, 4096, 5), (4096, 4096, 64), (1096, 8192, 8), (14336, 4096, 20), (1000, 8192, 150)):
        codes, absmax = weight(N, K)
        bias, x = torch.randn(N, device="cuda").to(dtype), activations(rows, K, dtype, columns)
        y = linear(x, codes, absmax, bias, 6.0, "gemm_int8_sm90")
        assert same_bytes(y, linear(x, codes, absmax, bias, 6.0, "gemm_int8_sm90"))
        check(y, as_coded(x, 6.0), codes, absmax, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 33, 500])
def test_input_gradient(dtype, rows):
    codes, absmax = weight(1040, 4096)
    dy = torch.randn(rows, 1040, device="cuda").to(dtype)
    w = codes.double() * absmax.double()[:, None] / 127
    exact, magnitude = dy.double() @ w, dy.double().abs() @ w.abs()
    for kernel in (None, "any", "panels", "dgrad_int8_sm90", "gemv_int8_dgrad"):
        _C.force_kernel("linear_int8_dgrad", kernel)
        try:
            dx = ops.linear_int8_dgrad(dy, codes, absmax, 1040, 4096)
        except RuntimeError as refused:
            assert "cannot multiply" in str(refused) and kernel is not None
            continue
        assert same_bytes(dx, ops.linear_int8_dgrad(dy, codes, absmax, 1040, 4096))
        bound = EPSILON[dtype] * (exact.abs() + magnitude) + magnitude * 2.0**-18
        assert ((dx.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("rows", [1, 24, 64, 300])
@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_a_graph_and_no_wait(rows, threshold):
    """Captured, replayed on other outlier columns; nothing waits for the GPU."""
    codes, absmax = weight(4096, 4096)
    xs = [activations(rows, 4096, F16, columns) for columns in (3, 0, 100, 700)]
    expected = [linear(x, codes, absmax, None, threshold) for x in xs]
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear(xs[0], codes, absmax, None, threshold)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    x, graph = xs[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(x, codes, absmax, None, threshold)
    for one, right in zip(xs, expected, strict=True):
        x.copy_(one)
        graph.replay()
        assert same_bytes(y, right)


def test_streams_side_by_side():
    codes, absmax = weight(4096, 4096)
    xs = [activations(200, 4096, BF16, 5 * i) for i in range(6)]
    expected = [linear(x, codes, absmax, None, 6.0) for x in xs]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in xs], []
    for _ in range(5):
        for x, stream in zip(xs, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(linear(x, codes, absmax, None, 6.0))
    torch.cuda.synchronize()
    assert all(same_bytes(y, expected[i % len(xs)]) for i, y in enumerate(found))
