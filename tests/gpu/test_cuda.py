"""The CUDA backend: bits of upstream, accuracy of the products, and how it behaves as a guest of torch.

Needs a GPU. A build for PTX only (BITSHARD_CUDA_ARCHS=compute_80 or compute_75) runs the forms of the fused kernels
that older GPUs take, on any newer one. BITSHARD_UPSTREAM=<folder holding upstream's bitsandbytes> also compares large
random tensors with it.
Everything goes through bitshard.ops, the ops of the C core.
"""

import contextlib
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from bitshard import _C, ops
from bitshard.functions import card
from bitshard.nn.linear import Linear4bit
from helpers import upstream
from helpers.bytes import same_bytes
from helpers.direct import alone
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)
if not _C.cuda_state()["built"]:
    pytest.skip("bitshard was built without nvcc", allow_module_level=True)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
INTEGERS = {4: np.int32, 2: np.int16, 1: np.uint8}
GOLDEN = Path(__file__).parents[1] / "golden" / "golden.npz"
EPSILON = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}  # of one product, relative to its norm
LLAMA = (28672, 8192)
# Of 4-bit products; from the fourth on of both directions.
KERNELS = (
    "gemv_4bit",
    "gemv_4bit_simt",
    "gemm_4bit_sm90",
    "gemm_4bit_sm90_wide",
    "gemm_4bit_sm80",
    "gemm_4bit_sm75",
    "panels",
)


def empty() -> Tensor:
    return ops.empty(torch.device("cuda", torch.cuda.current_device()))


class Weight:
    """A random W [N, K], quantized; `scales` are the op arguments after `packed`."""

    def __init__(
        self, N: int, K: int, dtype=torch.bfloat16, nested=True, quant_type="nf4", blocksize=64, device="cuda"
    ):
        self.N, self.K, self.dtype, self.blocksize, self.format = N, K, dtype, blocksize, ops.FORMATS[quant_type]
        w = torch.randn(N, K, device=device, dtype=dtype) * 0.02
        self.packed, absmax = ops.quantize_4bit(w, blocksize, self.format, torch.uint8)
        none = torch.empty(0, device=device)
        self.scales = [absmax, none, none, none]
        if nested:
            offset, map = absmax.mean(), ops.table("dynamic").to(device)
            code, absmax2 = ops.quantize_blockwise(absmax, map, offset, 256)
            self.scales = [code, map, absmax2, offset]

    def dequantize(self, dtype=None) -> Tensor:
        arguments = (self.blocksize, self.format, self.N, self.K, dtype or self.dtype)
        return ops.dequantize_4bit(self.packed, *self.scales, *arguments)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        bias = torch.empty(0, dtype=x.dtype, device=x.device) if bias is None else bias
        return ops.linear_4bit(x, self.packed, *self.scales, bias, self.blocksize, self.format, self.N, self.K)

    def dgrad(self, dy: Tensor) -> Tensor:
        return ops.linear_4bit_dgrad(dy, self.packed, *self.scales, self.blocksize, self.format, self.N, self.K)

    def direct_linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor | None:
        return alone.linear_4bit(x, self.packed, *self.scales, bias, self.blocksize, self.format, self.N, self.K)

    def direct_dgrad(self, dy: Tensor) -> Tensor | None:
        return alone.linear_4bit_dgrad(dy, self.packed, *self.scales, self.blocksize, self.format, self.N, self.K)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


# ---- bits -----------------------------------------------------------------------------------------------------------


class Golden:
    """golden.npz as CUDA tensors, and a list of what differed."""

    def __init__(self):
        self.arrays, self.wrong, self.compared = np.load(GOLDEN), [], 0

    def tensor(self, key: str, dtype: torch.dtype) -> Tensor:
        array = self.arrays[key]
        return torch.from_numpy(array.view(INTEGERS[array.itemsize])).cuda().view(dtype)

    def compare(self, actual: Tensor, key: str) -> None:
        expected = self.tensor(key, actual.dtype)
        self.compared += 1
        if not same_bytes(actual.flatten(), expected.flatten()):
            self.wrong.append(key)


def check_golden_4bit(golden: Golden, key: str) -> None:
    _, dtype_name, name, quant_type, blocksize = key.split("/")[:5]
    base, nested_base = key.removesuffix("/packed"), key.removesuffix("/packed").replace("4bit/", "nested/", 1)
    dtype, format, blocksize = DTYPES[dtype_name], ops.FORMATS[quant_type], int(blocksize)
    x = golden.tensor(f"x/{dtype_name}/{name}", dtype)
    packed, absmax = ops.quantize_4bit(x, blocksize, format, torch.uint8)
    decode = partial(ops.dequantize_4bit, packed)
    shape = (blocksize, format, 1, x.numel(), dtype)
    golden.compare(packed, key)
    golden.compare(absmax, f"{base}/absmax")
    golden.compare(decode(absmax, empty(), empty(), empty(), *shape), f"{base}/out")
    map, offset = golden.tensor("map/dynamic", torch.float32), golden.tensor(f"{nested_base}/offset", torch.float32)
    code, absmax2 = ops.quantize_blockwise(absmax, map, offset, 256)
    golden.compare(code, f"{nested_base}/code")
    golden.compare(absmax2, f"{nested_base}/absmax2")
    golden.compare(decode(code, map, absmax2, offset, *shape), f"{nested_base}/out")


def check_golden_8bit(golden: Golden, key: str) -> None:
    _, dtype_name, name, blocksize = key.split("/")[:4]
    base, dtype, map = key.removesuffix("/code"), DTYPES[dtype_name], golden.tensor("map/dynamic", torch.float32)
    x = golden.tensor(f"x/{dtype_name}/{name}", dtype)
    code, absmax = ops.quantize_blockwise(x, map, empty(), int(blocksize))
    golden.compare(code, key)
    golden.compare(absmax, f"{base}/absmax")
    golden.compare(ops.dequantize_blockwise(code, absmax, map, empty(), int(blocksize), dtype), f"{base}/out")


def test_golden_bytes():
    golden = Golden()
    for key in golden.arrays.files:
        if key.startswith("4bit/") and key.endswith("/packed"):
            check_golden_4bit(golden, key)
        if key.startswith("8bit/") and key.endswith("/code"):
            check_golden_8bit(golden, key)
    assert golden.compared > 4000 and not golden.wrong, golden.wrong[:10]


@pytest.mark.skipif("BITSHARD_UPSTREAM" not in os.environ, reason="BITSHARD_UPSTREAM names no upstream to compare with")
@pytest.mark.parametrize("seed", [0, 1])
def test_large_tensors_equal_upstream(seed):
    path = os.pathsep.join([os.environ["BITSHARD_UPSTREAM"], *(p for p in sys.path if p)])
    command = [sys.executable, str(upstream.SCRIPTS / "cuda_upstream.py"), str(seed)]
    environment = {**os.environ, "PYTHONPATH": path}
    out = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert out.stdout.strip().endswith("results: 0 wrong"), out.stdout[-2000:] + out.stderr[-2000:]


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_beyond_two_to_the_31_elements(quant_type):
    n, piece, format = 2**31 + 3 * 4096 + 5, 1 << 20, ops.FORMATS[quant_type]
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of GPU memory")
    x = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    packed, absmax = ops.quantize_4bit(x, 64, format, torch.uint8)
    out = ops.dequantize_4bit(packed, absmax, empty(), empty(), empty(), 64, format, 1, n, torch.bfloat16).flatten()
    code, absmax8 = ops.quantize_blockwise(x, ops.table("dynamic").cuda(), empty(), 256)
    back = ops.dequantize_blockwise(code, absmax8, ops.table("dynamic").cuda(), empty(), 256, torch.bfloat16)
    for begin in (0, 2**31 - piece // 2, n - n % 4096 - piece):
        part = slice(begin, min(begin + piece + 4096, n))
        small, small_absmax = ops.quantize_4bit(x[part].clone(), 64, format, torch.uint8)
        length = part.stop - begin
        assert same_bytes(small, packed[begin // 2 : begin // 2 + small.numel()])
        assert same_bytes(small_absmax, absmax[begin // 64 : begin // 64 + small_absmax.numel()])
        decoded = ops.dequantize_4bit(
            small, small_absmax, empty(), empty(), empty(), 64, format, 1, length, torch.bfloat16
        )
        assert same_bytes(decoded.flatten(), out[part])
        small, small_absmax = ops.quantize_blockwise(x[part].clone(), ops.table("dynamic").cuda(), empty(), 256)
        assert same_bytes(small, code[part])
        assert same_bytes(
            ops.dequantize_blockwise(small, small_absmax, ops.table("dynamic").cuda(), empty(), 256, torch.bfloat16),
            back[part],
        )
    assert int(ops.checksum(packed)) == int(ops.checksum(packed.cpu()))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("n", [1, 7, 63, 256, 1000, 1024, 8191, 100_003])
def test_equals_the_cpu(dtype, n):
    """Same bytes as the CPU kernels; for float32 the reciprocal may differ in the last place (docs/numerics.md)."""
    x = torch.randn(n, dtype=torch.bfloat16).to(dtype)
    for format in (0, 1):
        for blocksize in (32, 64, 1024, 4096):
            host = ops.quantize_4bit(x, blocksize, format, torch.uint8)
            device = ops.quantize_4bit(x.cuda(), blocksize, format, torch.uint8)
            assert same_bytes(host[0], device[0].cpu()) and same_bytes(host[1], device[1].cpu())
            none = torch.empty(0)
            decoded = ops.dequantize_4bit(*host, none, none, none, blocksize, format, 1, n, dtype)
            again = ops.dequantize_4bit(*device, empty(), empty(), empty(), blocksize, format, 1, n, dtype)
            assert same_bytes(decoded, again.cpu())
    storage = ops.quantize_4bit(x.cuda(), 64, 0, torch.bfloat16)[0]
    assert int(ops.checksum(storage)) == int(ops.checksum(storage.cpu()))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_misaligned_views(dtype):
    """Views that start at odd addresses give the bytes of an aligned copy."""
    buffer = torch.randn(70_001, device="cuda").to(dtype)
    for start in (1, 3):
        view = buffer[start : start + 66_000]
        aligned, absmax = ops.quantize_4bit(view.clone(), 64, 0, torch.uint8)
        packed, absmax_view = ops.quantize_4bit(view, 64, 0, torch.uint8)
        assert same_bytes(aligned, packed) and same_bytes(absmax, absmax_view)
        shifted = torch.empty(aligned.numel() + 8, dtype=torch.uint8, device="cuda")[start:][: aligned.numel()]
        shifted.copy_(aligned.flatten())
        arguments = (absmax, empty(), empty(), empty(), 64, 0, 1, 66_000, dtype)
        assert same_bytes(ops.dequantize_4bit(shifted, *arguments), ops.dequantize_4bit(aligned, *arguments))
        assert int(ops.checksum(shifted)) == int(ops.checksum(aligned))
        map = ops.table("dynamic").cuda()
        code, scale = ops.quantize_blockwise(view, map, empty(), 256)
        moved = torch.empty(code.numel() + 8, dtype=torch.uint8, device="cuda")[start:][: code.numel()].copy_(code)
        decoded = ops.dequantize_blockwise(moved, scale, map, empty(), 256, dtype)
        assert same_bytes(decoded, ops.dequantize_blockwise(code, scale, map, empty(), 256, dtype))


# ---- products -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "N, K, blocksize", [(256, 512, 64), (1000, 1216, 64), (98, 130, 64), (7, 33, 32), (384, 4096, 128)]
)
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
def test_products_against_fp64(dtype, N, K, blocksize, nested):
    for quant_type in ("nf4", "fp4"):
        weight = Weight(N, K, dtype, nested, quant_type, blocksize)
        exact = weight.dequantize().double()
        for M in (1, 2, 5, 8, 16, 17, 33, 64, 100, 300):
            x = torch.randn(M, K, device="cuda", dtype=dtype)
            dy = torch.randn(M, N, device="cuda", dtype=dtype)
            bias = torch.randn(N, device="cuda", dtype=dtype)
            assert relative_error(weight.linear(x), x.double() @ exact.T) < EPSILON[dtype], M
            assert relative_error(weight.linear(x, bias), x.double() @ exact.T + bias.double()) < EPSILON[dtype], M
            assert relative_error(weight.dgrad(dy), dy.double() @ exact) < EPSILON[dtype], M


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize(
    "N, K", [(4112, 2560), (2560, 8256), (6144, 6912), (8560, 2304), (16912, 4096), (20480, 4096), (48, 29440)]
)
def test_products_of_large_weights_with_few_rows(dtype, N, K, nested):
    """Sizes that between them take every fused form: groups of tokens, rows or K shared by blocks, two parts of K."""
    weight = Weight(N, K, dtype, nested, "nf4")
    exact = weight.dequantize(torch.float32).double()
    for M in (3, 8, 11, 16, 17, 32, 33, 47, 64, 65, 128):  # two launches of gemm_4bit_sm90 from 40 M weights on
        x, bias = (torch.randn(*shape, device="cuda", dtype=dtype) for shape in ((M, K), (N,)))
        expected = x.double() @ exact.T + bias.double()
        y = weight.linear(x, bias)
        assert relative_error(y, expected) < EPSILON[dtype] / 2, M
        assert torch.equal(y, weight.linear(x, bias)), M


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("N", [1024, 8192])
def test_rows_do_not_depend_on_how_many_there_are(dtype, N):
    """Whatever kernel M selects, one row's result stays within rounding of itself; two runs give equal bits."""
    weight = Weight(N, 4096, dtype)
    x = torch.randn(512, 4096, device="cuda", dtype=dtype)
    whole = weight.linear(x).double()
    for M in (1, 2, 3, 4, 8, 9, 16, 32, 48, 64, 65, 128, 256, 511):
        y = weight.linear(x[:M])
        assert relative_error(y, whole[:M]) < EPSILON[dtype] / 2, M
        assert torch.equal(y, weight.linear(x[:M])), M


@pytest.fixture
def force():
    """_C.force_kernel; what it forced ends with the test."""
    yield _C.force_kernel
    for op in ("linear_4bit", "linear_4bit_dgrad"):
        _C.force_kernel(op, None)


@pytest.fixture
def panels(force):
    """Every product by panels, whatever else would take it."""
    for op in ("linear_4bit", "linear_4bit_dgrad"):
        force(op, "panels")


@pytest.mark.parametrize("kernel", [None, "panels"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_never_holds_a_whole_dequantized_weight(dtype, kernel, force):
    """28672 x 8192 forward and backward: at most 64 MiB beside the result, and the numbers of the whole product."""
    for op in ("linear_4bit", "linear_4bit_dgrad"):
        force(op, kernel)
    N, K = LLAMA
    weight = Weight(N, K, dtype)
    M = 384  # panels, or one pass on Hopper
    x, dy = (torch.randn(M, width, device="cuda", dtype=dtype) for width in (K, N))
    weight.linear(x), weight.dgrad(dy)  # the vendor library allocates its own workspace once
    torch.cuda.synchronize()
    y_bytes, dx_bytes = M * N * dtype.itemsize, M * K * dtype.itemsize
    products = [(weight.linear, x, y_bytes), (weight.dgrad, dy, dx_bytes)]
    if dtype is torch.bfloat16:
        products += [(weight.direct_linear, x, y_bytes), (weight.direct_dgrad, dy, dx_bytes)]
    for product, argument, result_bytes in products:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = product(argument)
        assert y is not None
        assert torch.cuda.max_memory_allocated() - before <= (64 << 20) + result_bytes + (1 << 20)
        del y
    whole = weight.dequantize()
    assert relative_error(weight.linear(x), (x @ whole.T).double()) < EPSILON[dtype]
    assert relative_error(weight.dgrad(dy), (dy @ whole).double()) < EPSILON[dtype]


def plan_here(M: int, weight: Weight, **facts) -> dict:
    properties = torch.cuda.get_device_properties(0)
    gpu = (10 * properties.major + properties.minor, properties.multi_processor_count)
    number = list(DTYPES.values()).index(weight.dtype)
    return _C.plan_linear_4bit(M, weight.N, weight.K, number, *gpu, blocksize=weight.blocksize, **facts)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_forced_kernels(kernel, dtype, force):
    """Each of them, for more rows than one launch takes too: slices and what is left over."""
    weight = Weight(1040, 4096, dtype)
    exact = weight.dequantize(torch.float32).double()
    try:
        plan_here(1, weight, kernel=kernel)
    except ValueError as refused:
        pytest.skip(str(refused))
    force("linear_4bit", kernel)
    for M in (1, 9, 33, 64, 65, 200):
        x, bias = (torch.randn(*shape, device="cuda", dtype=dtype) for shape in ((M, 4096), (1040,)))
        expected = x.double() @ exact.T + bias.double()
        assert relative_error(weight.linear(x, bias), expected) < EPSILON[dtype], M
        assert relative_error(weight.direct_linear(x, bias), expected) < EPSILON[dtype], M


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_biased_product_is_rounded_once(kernel, dtype, force):
    """By every kernel, and panels by torch's product and by cuBLAS: another number than the rounded product plus the
    bias in some 29 of 100 places, where adding the bias to what was rounded would give that number."""
    weight = Weight(1040, 4096, dtype)
    try:
        plan_here(1, weight, kernel=kernel)
    except ValueError as refused:
        pytest.skip(str(refused))
    force("linear_4bit", kernel)
    for M in (1, 17, 64, 65, 200):
        x, bias = (torch.randn(*shape, device="cuda", dtype=dtype) for shape in ((M, 4096), (1040,)))
        for linear in (weight.linear, weight.direct_linear):
            twice = (linear(x).float() + bias.float()).to(dtype)
            assert (linear(x, bias) != twice).float().mean() > 0.1, (M, linear)


@pytest.mark.parametrize("kernel", KERNELS[3:])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_forced_kernels_of_the_input_gradient(kernel, dtype, force):
    weight = Weight(1040, 4096, dtype)
    exact = weight.dequantize(torch.float32).double()
    try:
        plan_here(1, weight, kernel=kernel, gradient=True)
    except ValueError as refused:
        pytest.skip(str(refused))
    force("linear_4bit_dgrad", kernel)
    for M in (1, 65, 150, 200, 300):
        dy = torch.randn(M, 1040, device="cuda", dtype=dtype)
        assert relative_error(weight.dgrad(dy), dy.double() @ exact) < EPSILON[dtype], M
        assert same_bytes(weight.dgrad(dy), weight.dgrad(dy)), M
        assert relative_error(weight.direct_dgrad(dy), dy.double() @ exact) < EPSILON[dtype], M


def test_a_forced_kernel_that_cannot(force):
    weight, x = Weight(98, 192), torch.randn(3, 192, device="cuda", dtype=torch.bfloat16)
    y = weight.linear(x)
    force("linear_4bit", "gemv_4bit")
    with pytest.raises(
        RuntimeError, match="cannot multiply M = 3, N = 98, K = 192 of bfloat16.*N is no multiple of 16"
    ):
        weight.linear(x)
    assert weight.direct_linear(x) is None
    force("linear_4bit", None)
    assert same_bytes(weight.linear(x), y)


def test_direct_products_that_nothing_fuses_are_planned_once():
    """Few rows by panels: around the dispatcher too, and nothing is allocated where they are declined."""
    weight = Weight(100, 130)
    exact = weight.dequantize(torch.float32).double()
    x = torch.randn(5, 130, device="cuda", dtype=torch.bfloat16)
    assert plan_here(5, weight)["kernel"] == "panels"
    assert relative_error(weight.direct_linear(x), x.double() @ exact.T) < EPSILON[x.dtype]
    odd_bias = torch.randn(101, device="cuda", dtype=x.dtype)[1:]
    torch.use_deterministic_algorithms(True)
    try:
        for bias in (None, odd_bias):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            assert weight.direct_linear(x, bias) is None
            assert torch.cuda.max_memory_allocated() == before
    finally:
        torch.use_deterministic_algorithms(False)
    assert weight.direct_linear(x, odd_bias) is None
    assert relative_error(weight.linear(x, odd_bias), x.double() @ exact.T + odd_bias.double()) < EPSILON[x.dtype]


# ---- a guest of torch -----------------------------------------------------------------------------------------------


def every_op(weight: Weight, x: Tensor, dy: Tensor) -> list[Tensor]:
    w = weight.dequantize()
    map = weight.scales[1]
    code, absmax = ops.quantize_blockwise(w, map, torch.empty(0, device=x.device), 256)
    back = ops.dequantize_blockwise(code, absmax, map, torch.empty(0, device=x.device), 256, x.dtype)
    packed, scale = ops.quantize_4bit(w, 64, 0, torch.uint8)
    small = weight.linear(x[:1])
    return [w, code, absmax, back, packed, scale, small, weight.linear(x), weight.dgrad(dy), ops.checksum(packed)]


def problem(device="cuda") -> tuple[Weight, Tensor, Tensor]:
    weight = Weight(512, 1024, device=device)
    x = torch.randn(300, 1024, device=device, dtype=torch.bfloat16)
    return weight, x, torch.randn(300, 512, device=device, dtype=torch.bfloat16)


FIRST_CALL_IN_A_THREAD = """
import threading, torch
from bitshard import ops
x = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
results = []
thread = threading.Thread(target=lambda: results.append(ops.quantize_4bit(x, 64, 0, torch.uint8)[0]))
thread.start(); thread.join()
assert torch.equal(results[0], ops.quantize_4bit(x, 64, 0, torch.uint8)[0])
print("done")
"""


def test_first_call_from_a_fresh_thread():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", FIRST_CALL_IN_A_THREAD]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert out.stdout.strip() == "done", out.stderr[-2000:]


def test_many_threads_at_once():
    arguments = problem()
    expected, results, errors = every_op(*arguments), [], []

    def work():
        try:
            for _ in range(20):
                results.append(every_op(*arguments))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert not errors and len(results) == 160
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, expected, strict=True))


def test_autograd_thread():
    weight, x, dy = problem()

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return weight.linear(x)

        @staticmethod
        def backward(ctx, dy):
            return weight.dgrad(dy)

    x.requires_grad_()
    Product.apply(x).backward(dy)
    assert torch.equal(x.grad, weight.dgrad(dy))


def test_graph_capture():
    weight, x, dy = problem()
    every_op(weight, x, dy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = every_op(weight, x, dy)
    x.copy_(torch.randn_like(x)), dy.copy_(torch.randn_like(dy))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, every_op(weight, x, dy), strict=True))


def test_work_goes_to_the_current_stream():
    """A long wait and a write precede the op on a second stream; the op must come after both."""
    weight, x, dy = problem()
    new_x, new_dy = torch.randn_like(x), torch.randn_like(dy)
    expected = every_op(weight, new_x, new_dy)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        x.copy_(new_x), dy.copy_(new_dy)
        results = every_op(weight, x, dy)
    assert not stream.query(), "the ops waited for the GPU"
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_streams_side_by_side():
    """Several streams at once, each with its own workspace."""
    arguments = problem()
    expected = every_op(*arguments)
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(4)], []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(every_op(*arguments))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, expected, strict=True))


def test_products_side_by_side():
    """Products whose blocks of threads wait for each other's sums, in streams that share the multiprocessors."""
    cases = []
    for N, K, M in ((9984, 4160, 64), (20480, 4096, 16), (11008, 4096, 64), (20480, 4096, 32)):
        weight, x = Weight(N, K), torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
        cases.append((weight, x, weight.linear(x)))
    torch.cuda.synchronize()
    streams, wrong = [torch.cuda.Stream() for _ in cases], []
    for turn in range(20):
        for i, stream in enumerate(streams):
            weight, x, expected = cases[(i + turn) % len(cases)]
            with torch.cuda.stream(stream):
                wrong.append((weight.linear(x) != expected).any())
    torch.cuda.synchronize()
    assert not torch.stack(wrong).any()


def test_dependent_launches_see_what_came_before():
    """Overlapping launches wait for the kernel that writes their input: chains of quantize and dequantize."""
    x = torch.randn(1 << 22, device="cuda", dtype=torch.bfloat16)
    packed, absmax = ops.quantize_4bit(x, 64, 0, torch.uint8)
    arguments = (empty(), empty(), empty(), 64, 0, 1, x.numel(), torch.bfloat16)
    expected = ops.dequantize_4bit(packed, absmax, *arguments)
    torch.cuda.synchronize()
    for _ in range(50):
        packed, absmax = ops.quantize_4bit(expected, 64, 0, torch.uint8)
        assert same_bytes(ops.dequantize_4bit(packed, absmax, *arguments), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_direct_calls(dtype):
    """_C's functions around the dispatcher: the bits of the ops, on the current stream, in graphs, nothing kept."""
    weight = Weight(512, 1024, dtype)
    bias = torch.randn(512, device="cuda", dtype=dtype)
    numbers = (weight.blocksize, weight.format, weight.N, weight.K)
    for M in (16, 8, 3, 2, 1):
        x = torch.randn(M, 1024, device="cuda", dtype=dtype)
        for b in (None, bias):
            y = alone.linear_4bit(x, weight.packed, *weight.scales, b, *numbers)
            if dtype is torch.float32 and M > 2:
                assert y is None, "products by panels are the op's"
            else:
                assert same_bytes(y, weight.linear(x, b))
    for out in DTYPES.values():
        assert same_bytes(alone.dequantize_4bit(weight.packed, *weight.scales, *numbers, out), weight.dequantize(out))
    cpu = torch.randn(2, 1024, dtype=dtype)
    for unfit in (cpu, cpu.cuda().t()):
        assert weight.direct_linear(unfit) is None

    new_x = torch.randn_like(x)
    expected = weight.linear(new_x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        x.copy_(new_x)
        y = alone.linear_4bit(x, weight.packed, *weight.scales, None, *numbers)
    assert not stream.query(), "the call waited for the GPU"
    stream.synchronize()
    assert same_bytes(y, expected)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = alone.linear_4bit(x, weight.packed, *weight.scales, None, *numbers)
    x.neg_()
    graph.replay()
    assert same_bytes(y, weight.linear(x))

    before = torch.cuda.memory_allocated()
    for _ in range(200):
        alone.linear_4bit(x, weight.packed, *weight.scales, bias, *numbers)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("N, K", [(512, 1024), (100, 96), (1024, 4096), (14336, 4096)])
def test_direct_products_by_panels(dtype, N, K, panels):
    """cuBLAS without torch's product: within the same bound, with and without bias, also where pointers are odd."""
    weight = Weight(N, K, dtype)
    w, bias = weight.dequantize(torch.float32).double(), torch.randn(N, device="cuda", dtype=dtype)
    for M in (65, 300, 1000):
        x, dy = (torch.randn(M, width, device="cuda", dtype=dtype) for width in (K, N))
        odd = torch.randn(M * K + 1, device="cuda", dtype=dtype)[1:].view(M, K)
        for argument in (x, odd):
            for b in (None, bias):
                expected = argument.double() @ w.T + (0 if b is None else b.double())
                assert relative_error(weight.direct_linear(argument, b), expected) < EPSILON[dtype]
        assert relative_error(weight.direct_dgrad(dy), dy.double() @ w) < EPSILON[dtype]
    odd_bias = torch.randn(N + 1, device="cuda", dtype=dtype)[1:]
    assert weight.direct_linear(x, odd_bias) is None
    _C.force_kernel("linear_4bit", None)
    y = weight.direct_linear(x, odd_bias)
    assert y is None or relative_error(y, x.double() @ w.T + odd_bias.double()) < EPSILON[dtype]


def test_direct_products_of_more_shapes_than_are_kept(panels):
    """Every row count has an algorithm of its own; later ones take the places of earlier ones, from many threads."""
    weight = Weight(512, 1024)
    w, wrong = weight.dequantize(torch.float32).double(), []

    def work(seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for M in [*range(65, 265), *range(65, 265, 7)]:
                x = torch.randn(M, 1024, device="cuda", dtype=torch.bfloat16, generator=generator)
                if not relative_error(weight.direct_linear(x), x.double() @ w.T) < EPSILON[x.dtype]:
                    wrong.append((seed, M))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@contextlib.contextmanager
def switched(name, value):
    """`torch.backends.cuda.matmul.<name>` is `value` inside: no attribute that could be deleted, so no monkeypatch."""
    matmul = torch.backends.cuda.matmul
    before = getattr(matmul, name)
    setattr(matmul, name, value)
    try:
        yield
    finally:
        setattr(matmul, name, before)


def test_direct_products_keep_to_torchs_settings(panels):
    """What cuBLAS is called with are the defaults; under any other setting the op asks torch."""
    weight, x, dy = problem()
    half = Weight(512, 1024, torch.float16)
    assert weight.direct_linear(x) is not None and weight.direct_dgrad(dy) is not None
    assert half.direct_linear(x.half()) is not None
    with switched("allow_bf16_reduced_precision_reduction", False):
        assert weight.direct_linear(x) is None and weight.direct_dgrad(dy) is None
        assert half.direct_linear(x.half()) is not None
    for name, value in (("allow_fp16_reduced_precision_reduction", False), ("allow_fp16_accumulation", True)):
        with switched(name, value):
            assert half.direct_linear(x.half()) is None and half.direct_dgrad(dy.half()) is None
            assert weight.direct_linear(x) is not None
    torch.use_deterministic_algorithms(True)
    try:
        assert weight.direct_linear(x) is None
    finally:
        torch.use_deterministic_algorithms(False)
    assert weight.direct_linear(x) is not None and half.direct_linear(x.half()) is not None
    fp32 = Weight(512, 1024, torch.float32)
    assert fp32.direct_linear(x.float()) is None and fp32.direct_dgrad(dy.float()) is None


def test_direct_products_in_graphs_and_on_streams():
    weight, x, dy = problem()
    expected, gradient = weight.direct_linear(x), weight.direct_dgrad(dy)
    stream = torch.cuda.Stream()
    late = torch.empty_like(x)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.copy_(x)
        y = weight.direct_linear(late)
    assert not stream.query(), "the call waited for the GPU"
    stream.synchronize()
    assert same_bytes(y, expected)
    graph = torch.cuda.CUDAGraph()
    late, later = torch.zeros_like(x), torch.zeros_like(dy)
    with torch.cuda.graph(graph):
        y, dx = weight.direct_linear(late), weight.direct_dgrad(later)
    late.copy_(x), later.copy_(dy)
    graph.replay()
    assert same_bytes(y, expected) and same_bytes(dx, gradient)
    before = torch.cuda.memory_allocated()
    for _ in range(100):
        weight.direct_linear(x), weight.direct_dgrad(dy)
    assert torch.cuda.memory_allocated() == before


def test_tensor_on_another_device_than_its_weight():
    weight, x, dy = problem()
    with pytest.raises(RuntimeError, match="device"):
        weight.linear(x.cpu())
    with pytest.raises(RuntimeError, match="device"):
        ops.dequantize_4bit(weight.packed, *(s.cpu() for s in weight.scales), 64, 0, 512, 1024, torch.bfloat16)
    every_op(weight, x, dy)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here")
def test_second_device_while_the_first_is_current():
    weight, x, dy = problem("cuda:1")
    results = every_op(weight, x, dy)
    assert all(r.device.index == 1 for r in results) and torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        assert all(torch.equal(a, b) for a, b in zip(results, every_op(weight, x, dy), strict=True))


def test_out_of_memory_and_the_call_after():
    weight, x, dy = problem()
    big = Weight(8192, 8192)
    x_big = torch.randn(600, 8192, device="cuda", dtype=torch.bfloat16)
    expected = big.linear(x_big)
    torch.cuda.synchronize(), torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1])
    filler = []
    try:
        with pytest.raises(torch.OutOfMemoryError):  # uses up what lies free in torch's pool
            while True:
                filler.append(torch.empty(2 << 20, dtype=torch.uint8, device="cuda"))
        said = r"^CUDA out of memory\. Tried to allocate .* MiB\. {}: no memory for .* bytes on cuda:0"
        with pytest.raises(torch.OutOfMemoryError, match=said.format("linear_4bit")):
            big.linear(x_big)
        with pytest.raises(torch.OutOfMemoryError, match=said.format("dequantize_4bit")):
            big.dequantize()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    filler.clear()
    assert torch.equal(big.linear(x_big), expected)
    every_op(weight, x, dy)


def test_no_memory_is_kept():
    arguments = problem()
    every_op(*arguments)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        every_op(*arguments)
    assert torch.cuda.memory_allocated() == before


def test_empty_inputs():
    weight, x, dy = problem()
    assert weight.linear(x[:0]).shape == (0, 512) and weight.dgrad(dy[:0]).shape == (0, 1024)
    packed, absmax = ops.quantize_4bit(x[:0], 64, 0, torch.uint8)
    assert packed.numel() == 0 and absmax.numel() == 0 and int(ops.checksum(packed)) == 0


def test_state():
    state = _C.cuda_state()
    assert state["built"] and state["driver"] and not state["error"], state


def test_a_gpu_is_measured_at_the_first_forward(monkeypatch, tmp_path):
    """Rates in a file, of which the plan knows; random numbers, forced kernels and memory stay as they were."""
    device = torch.device("cuda", torch.cuda.current_device())
    sm = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    if sm < 80:
        pytest.skip("gemm_4bit_sm80 needs sm_80")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(card.VARIABLE, "1")
    monkeypatch.setattr(card, "_seen", set())
    counted = _C.card_rates(sm)
    layer = Linear4bit(256, 128, compute_dtype=torch.bfloat16, quant_type="nf4").to(device)
    x = torch.randn(2, 256, device=device, dtype=torch.bfloat16)
    before, kernels = torch.cuda.get_rng_state(), [_C.plan_linear_4bit(512, 4096, 4096, 2, 90, 132)["kernel"]]
    try:
        _C.set_card_rates(sm, *(counted[name] for name in card.KEPT))  # also a Hopper is measured then
        layer(x)
        found = _C.card_rates(sm)
        assert found["chosen"] and found != counted and torch.equal(torch.cuda.get_rng_state(), before)
        assert (tmp_path / "bitshard/cards.json").exists()
        _C.set_card_rates(sm)
        kernels.append(_C.plan_linear_4bit(512, 4096, 4096, 2, 90, 132)["kernel"])
        assert kernels[0] == kernels[1]
    finally:
        _C.set_card_rates(sm)
