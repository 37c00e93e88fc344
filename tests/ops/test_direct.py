"""Calls around the dispatcher (csrc/python/direct.c) give the op's bits, and step aside for whoever watches there."""

import subprocess
import sys
import threading

import bitsandbytes as bnb
import cases
import pytest
import torch
from bitshard import _C, autograd, functional, int8, ops
from bitshard.tensor import Params4bit
from helpers.bytes import same_bytes
from helpers.direct import HAS_TABLE, alone, at_low_address, calls_directly, noting

N, K = 48, 96


def made(nested=True, quant_type="nf4", storage=torch.uint8, blocksize=64):
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(1))
    return functional.quantize_4bit(
        w, blocksize=blocksize, compress_statistics=nested, quant_type=quant_type, quant_storage=storage
    )


def direct(x, packed, state, bias=None):
    n, k = state.shape
    return alone.linear_4bit(x, packed, *state.scales(), bias, state.blocksize, ops.FORMATS[state.quant_type], n, k)


def direct_values(packed, state, dtype=torch.float32):
    n, k = state.shape
    return alone.dequantize_4bit(packed, *state.scales(), state.blocksize, ops.FORMATS[state.quant_type], n, k, dtype)


def direct_dgrad(dy, packed, state):
    n, k = state.shape
    return alone.linear_4bit_dgrad(dy, packed, *state.scales(), state.blocksize, ops.FORMATS[state.quant_type], n, k)


def op(x, packed, state, bias=None):
    n, k = state.shape
    bias = ops.empty(x.device) if bias is None else bias
    return ops.linear_4bit(
        x, packed, *state.scales(), bias, state.blocksize, ops.FORMATS[state.quant_type], n, k
    )  # fmt: skip


def same(a, b):
    return same_bytes(a, b) and a.stride() == b.stride()


@pytest.mark.skipif(not HAS_TABLE and torch.__version__ < "2.13", reason="this torch has no exchange table")
def test_direct_calls_are_possible():
    """With every torch that has the table."""
    packed, state = made(nested=False)
    x = torch.randn(3, K)
    y, values = direct(x, packed, state), direct_values(packed, state)
    assert y is not None and same(y, op(x, packed, state))
    assert values is not None and same(values, functional.dequantize_4bit(packed, state))


@calls_directly
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("storage", cases.STORAGES)
@pytest.mark.parametrize("quant_type", cases.FORMATS)
@pytest.mark.parametrize("nested", [False, True])
def test_same_bits(dtype, storage, quant_type, nested):
    packed, state = made(nested, quant_type, storage)
    bias = torch.randn(N).to(dtype)
    for shape in ((K,), (1, K), (5, K), (2, 3, K), (2, 1, 2, K), (64, K), (2, 50, K)):
        x = torch.randn(shape).to(dtype)
        assert same(direct(x, packed, state), op(x, packed, state))
        assert same(direct(x, packed, state, bias), op(x, packed, state, bias))
    weight = Params4bit(packed, quant_state=state, bnb_quantized=True)
    assert same(direct(x, weight, state), op(x, packed, state))
    arguments = (*state.scales(), state.blocksize, ops.FORMATS[quant_type], N, K)
    assert same(direct_values(weight, state, dtype), ops.dequantize_4bit(packed, *arguments, dtype))
    for shape in ((N,), (3, N), (2, 50, N)):
        dy = torch.randn(shape).to(dtype)
        assert same(direct_dgrad(dy, weight, state), ops.linear_4bit_dgrad(dy, packed, *arguments))


@calls_directly
def test_is_taken(monkeypatch):
    """The public functions use it, for a product also under autograd."""
    packed, state = made()
    x, dy = torch.randn(3, K), torch.randn(3, N)
    y, values = functional.linear_4bit(x, packed, state), functional.dequantize_4bit(packed, state)
    dx = functional.linear_4bit_dgrad(dy, packed, state)

    taken = []
    for name in ("linear_4bit", "dequantize_4bit", "linear_4bit_dgrad"):
        monkeypatch.setattr(_C, name, noting(taken, name, getattr(_C, name)))
    assert same(autograd.matmul_4bit(x, packed, state), y)
    product = autograd.matmul_4bit(x.requires_grad_(), packed, state)
    assert same(product.detach(), y)
    product.backward(dy)
    assert same(x.grad, dx)
    assert same(functional.dequantize_4bit(packed, state), values)
    x = x.detach()
    with torch.inference_mode():
        assert functional.linear_4bit(x, packed, state).is_inference()
    assert taken == ["linear_4bit", "linear_4bit", "linear_4bit_dgrad", "dequantize_4bit", "linear_4bit"]


class Mode(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class FunctionMode(torch.overrides.TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_watchers_see_the_ops():
    packed, state = made()
    x = torch.randn(2, K)
    y = functional.linear_4bit(x, packed, state)
    with Mode() as mode:
        assert same(functional.linear_4bit(x, packed, state), y)
        functional.dequantize_4bit(packed, state)
    assert ops.linear_4bit in mode.seen and ops.dequantize_4bit in mode.seen
    with FunctionMode() as function_mode:
        functional.linear_4bit(x, packed, state)
    assert any("linear_4bit" in str(func) for func in function_mode.seen)
    with torch.profiler.profile() as profile:
        functional.linear_4bit(x, packed, state)
        functional.linear_4bit_dgrad(y, packed, state)
    names = {event.key for event in profile.key_averages()}
    assert {"bitshard::linear_4bit", "bitshard::linear_4bit_dgrad"} <= names
    traced = torch.jit.trace(lambda x: functional.linear_4bit(x, packed, state), (x,), check_trace=False)
    assert "bitshard::linear_4bit" in str(traced.graph)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as fake:
        assert isinstance(functional.linear_4bit(fake.from_tensor(x), packed, state), torch._subclasses.FakeTensor)


@calls_directly
def test_gradients_are_not_cut():
    """Without autograd.py the op warns in backward; a result that just has no gradient would say nothing."""
    packed, state = made()
    for x, bias in (
        (torch.randn(2, K, requires_grad=True), None),
        (torch.randn(2, K), torch.zeros(N).requires_grad_()),
    ):
        assert direct(x, packed, state, bias) is None
        assert functional.linear_4bit(x, packed, state, bias).requires_grad
        with torch.no_grad():
            assert direct(x, packed, state, bias) is not None
    dy = torch.randn(2, N, requires_grad=True)
    assert direct_dgrad(dy, packed, state) is None
    assert functional.linear_4bit_dgrad(dy, packed, state).requires_grad


def test_functorch():
    packed, state = made()
    x = torch.randn(3, 2, K)
    seen = []

    def call(x):
        seen.append(direct(x, packed, state))
        return x

    torch.vmap(call)(x)
    assert seen == [None], "a batched tensor has no memory of its own"


def negated(x):
    return torch._neg_view(x)


DECLINED = {
    "a transposed x": lambda x, packed, state: (torch.randn(K, 3).t(), packed, state),
    "a negated view": lambda x, packed, state: (negated(x), packed, state),
    "no rows": lambda x, packed, state: (torch.randn(0, K), packed, state),
    "float64": lambda x, packed, state: (x.double(), packed, state),
    "another width": lambda x, packed, state: (torch.randn(2, K + 1), packed, state),
    "no dimensions": lambda x, packed, state: (torch.tensor(1.0), packed, state),
    "a subclass": lambda x, packed, state: (x.as_subclass(torch.nn.Buffer), packed, state),
    "a short weight": lambda x, packed, state: (x, packed[:-1], state),
    "a weight in int32": lambda x, packed, state: (x, packed.flatten().view(torch.int32), state),
    "no tensor": lambda x, packed, state: (None, packed, state),
    "x on the meta device": lambda x, packed, state: (x.to("meta"), packed, state),
    "a sparse x": lambda x, packed, state: (x.to_sparse(), packed, state),
}


@pytest.mark.parametrize("name", DECLINED)
def test_declined(name):
    """None, no exception and nothing left of one: what to say is the op's business."""
    packed, state = made()
    assert direct(*DECLINED[name](torch.randn(2, K), packed, state)) is None
    state.shape = (K, N)  # of the transposed weight: what was x is dy
    assert direct_dgrad(*DECLINED[name](torch.randn(2, K), packed, state)) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda state: setattr(state, "absmax", state.absmax[:-1]),
        lambda state: setattr(state, "absmax", state.absmax.to(torch.int16)),
        lambda state: setattr(state, "absmax", state.absmax.to("meta")),
        lambda state: setattr(state, "offset", state.offset.repeat(2)),
        lambda state: setattr(state.state2, "code", state.state2.code[:255]),
        lambda state: setattr(state.state2, "absmax", state.state2.absmax.repeat(2)),
        lambda state: setattr(state, "blocksize", 48),
        lambda state: setattr(state, "blocksize", 128),
        lambda state: setattr(state, "shape", torch.Size([N, K + 2])),
        lambda state: setattr(state, "shape", (-N, -K)),
        lambda state: setattr(state, "shape", (2**62, 8)),
        lambda state: setattr(state, "shape", (2.5, K)),
    ],
)
def test_damaged_states_are_declined(change):
    packed, state = made()
    change(state)
    assert direct(torch.randn(2, K), packed, state) is None
    assert direct_dgrad(torch.randn(2, N), packed, state) is None
    assert direct_values(packed, state) is None


@calls_directly
@pytest.mark.parametrize("offset", [0, 4096, 1 << 32])
@pytest.mark.parametrize("plain", [True, False])
def test_freed_storage_is_declined(plain, offset):
    """FSDP frees storages that Python still holds; the address of a view is then its offset alone."""
    packed, state = made()
    x = torch.randn(2, K)
    flat = torch.empty(offset + packed.numel(), dtype=torch.uint8)  # only what is written takes memory
    flat[offset:] = packed.flatten()
    view = flat[offset:].view(-1, 1)
    weight = view if plain else Params4bit(view, quant_state=state, bnb_quantized=True)
    assert direct(x, weight, state) is not None and direct_values(weight, state) is not None
    flat.untyped_storage().resize_(0)
    assert weight.data_ptr() == offset
    assert direct(x, weight, state) is None and direct_values(weight, state) is None
    with pytest.raises(ValueError, match="freed"):
        functional.linear_4bit(x, view, state)


SHRUNK = """
import torch
from bitshard import _C, functional, ops
from bitshard.tensor import Params4bit

packed, state = functional.quantize_4bit(torch.randn(512, 512))
x = torch.randn(2, 512)
expected = functional.linear_4bit(x, packed, state)
behind = _C.fall_back(None)
part = torch.empty(1 << 20)[:4]
part.untyped_storage().resize_(64)  # still holds it
for weight in (packed, Params4bit(packed, quant_state=state, bnb_quantized=True)):
    for tensor in (packed, state.absmax):
        kept, size = tensor.clone(), tensor.untyped_storage().nbytes()
        assert _C.linear_4bit(x, weight, *state.scales(), None, 64, 0, 512, 512) is not None
        tensor.untyped_storage().resize_(64)
        assert _C.linear_4bit(x, weight, *state.scales(), None, 64, 0, 512, 512) is None
        _C.fall_back(behind)
        for call in (functional.linear_4bit, functional.linear_4bit_dgrad):
            try:
                call(x, weight, state)
            except RuntimeError as error:
                assert "only 64 bytes of storage" in str(error), error
            else:
                raise AssertionError("read beyond a storage")
        tensor.untyped_storage().resize_(size)
        tensor.copy_(kept)
        assert torch.equal(functional.linear_4bit(x, weight, state), expected)
        _C.fall_back(None)
print("declined")
"""


@calls_directly
def test_shrunk_storages_are_declined():
    """A storage that was made smaller keeps its address. In a process of its own: the old way ended it."""
    done = subprocess.run([sys.executable, "-c", SHRUNK], capture_output=True, text=True, check=False)
    assert done.stdout == "declined\n", (done.returncode, done.stderr)


@calls_directly
@pytest.mark.parametrize("plain", [True, False])
def test_low_addresses_are_memory_too(plain):
    """They are told from those of freed storages, with a view's offset and without."""
    packed, state = made(nested=False)
    x, dy, bias = torch.randn(3, K), torch.randn(3, N), torch.randn(N)
    y, values = op(x, packed, state, bias), functional.dequantize_4bit(packed, state)
    dx = functional.linear_4bit_dgrad(dy, packed, state)
    for skipped in (0, 64):
        flat = at_low_address(torch.cat([torch.zeros(skipped, dtype=torch.uint8), packed.flatten()]))
        view = flat[skipped:].view(-1, 1)
        weight = view if plain else Params4bit(view, quant_state=state, bnb_quantized=True)
        state.absmax = at_low_address(state.absmax)
        assert weight.data_ptr() >> 40 == 0 and weight.storage_offset() == skipped
        assert same(direct(at_low_address(x), weight, state, at_low_address(bias)), y)
        assert same(direct_values(weight, state), values) and same(direct_dgrad(at_low_address(dy), weight, state), dx)


@calls_directly
def test_a_row_of_codes_is_transposed():
    packed, state = made()
    assert same(direct_values(packed.t(), state), direct_values(packed, state)), "as from the op"
    assert torch.equal(functional.dequantize_4bit(packed.t(), state), functional.dequantize_4bit(packed, state).t())


def test_negated_view_has_the_right_sign():
    packed, state = made()
    x = torch.randn(2, K)
    assert torch.equal(functional.linear_4bit(negated(x), packed, state), functional.linear_4bit(-x, packed, state))


def test_nothing_leaks():
    packed, state = made()
    x, bias = torch.randn(2, K), torch.randn(N)
    sys_refs = [sys.getrefcount(t) for t in (x, bias, packed, state.absmax)]
    for _ in range(100):
        direct(x, packed, state, bias), direct(x, packed[:-1], state), direct_values(packed, state)
        direct_dgrad(bias, packed, state), direct_dgrad(bias, packed[:-1], state)
    assert [sys.getrefcount(t) for t in (x, bias, packed, state.absmax)] == sys_refs


@pytest.mark.parametrize("nested", [False, True])
def test_lazily_negated_tensors_take_the_op(nested):
    """Their memory holds other numbers than they stand for; whichever argument it is, the op's result comes out."""
    packed, state = made(nested)
    x, bias = torch.randn(3, K), torch.randn(N)
    assert direct(torch._neg_view(x), packed, state) is None
    assert direct(x, packed, state, torch._neg_view(bias)) is None
    wanted = functional.linear_4bit(x, packed, state, -bias)
    assert same(functional.linear_4bit(x, packed, state, torch._neg_view(bias)), wanted)
    if not nested:
        state.absmax = torch._neg_view(state.absmax)
        assert direct(x, packed, state) is None and direct_values(packed, state) is None


@calls_directly
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_only_exceptions_are_forgotten(monkeypatch, error):
    """A call declines where a question to Python fails. Ctrl-C in the middle of one is no failure, and ends it."""
    packed, state = made()
    x = torch.randn(3, 64)

    def asked(name):
        raise error(name)

    monkeypatch.delattr(torch.autograd.profiler, "_is_profiler_enabled")
    monkeypatch.setattr(torch.autograd.profiler, "__getattr__", asked, raising=False)
    for call in (
        lambda: direct(x, packed, state),
        lambda: direct_values(packed, state),
        lambda: direct_dgrad(torch.randn(3, state.shape[0]), packed, state),
    ):
        if error is ValueError:
            assert call() is None
            continue
        with pytest.raises(error, match="_is_profiler_enabled"):
            call()


@calls_directly
def test_threads_without_the_fallback_put_it_back():
    """The helper of these tests: of calls in several threads the last one puts the ops back."""
    packed, state = made()
    x = torch.randn(2, K)
    y = functional.linear_4bit(x, packed, state)
    threads = [threading.Thread(target=lambda: [direct(x, packed, state) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Mode():  # direct calls decline
        assert same(functional.linear_4bit(x, packed, state), y)


# ---- int8 weights ----


def made_int8():
    """A layer of LLM.int8, its codes and scales."""
    torch.manual_seed(2)
    layer = bnb.nn.Linear8bitLt(K, N, has_fp16_weights=False, threshold=6.0).to("cpu").requires_grad_(False)
    return layer, layer.weight.CB, layer.weight.SCB


def direct_int8(x, weight, absmax, bias=None, threshold=6.0, shape=(N, K)):
    return alone.linear_int8(x, weight, absmax, bias, threshold, *shape)


def op_int8(x, codes, absmax, bias=None, threshold=6.0, shape=(N, K)):
    return ops.linear_int8(x, codes, absmax, ops.empty(x.device) if bias is None else bias, threshold, *shape)


@calls_directly
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_same_bits_int8(dtype):
    """Of few rows and many with outliers; the weight as a parameter, as codes, and as the column that FSDP shards."""
    layer, codes, absmax = made_int8()
    column, bias = layer.weight.column(None, torch.bfloat16), torch.randn(N).to(dtype)
    for shape in ((K,), (1, K), (2, 3, K), (40, K)):
        x = torch.randn(shape)
        x[..., 5] = 9.0
        x = x.to(dtype)
        for weight in (layer.weight, codes, column):
            for threshold in (0, 0.0, 6.0):
                y = direct_int8(x, weight, absmax, bias, threshold)
                assert same(y, op_int8(x, codes, absmax, bias, threshold)) and y.shape == (*shape[:-1], N)
            assert same(direct_int8(x, weight, absmax), op_int8(x, codes, absmax))
        dy = torch.randn(*shape[:-1], N).to(dtype)
        dx = alone.linear_int8_dgrad(dy, layer.weight, absmax, N, K)
        assert same(dx, ops.linear_int8_dgrad(dy, codes, absmax, N, K))


@calls_directly
def test_int8_layers_take_it(monkeypatch):
    """Without and with autograd; who watches sees the ops, and dtypes, modes and gradients are those of the op."""
    layer, codes, absmax = made_int8()
    x, dy = torch.randn(3, K), torch.randn(3, N)
    y, taken = layer(x), []
    for name in ("linear_int8", "linear_int8_dgrad"):
        monkeypatch.setattr(_C, name, noting(taken, name, getattr(_C, name)))
    assert same(layer(x), y)
    product = layer(x.requires_grad_())
    product.backward(dy)
    assert same(product.detach(), y) and same(x.grad, ops.linear_int8_dgrad(dy, codes, absmax, N, K))
    assert taken == ["linear_int8", "linear_int8", "linear_int8_dgrad"]
    x = x.detach()
    with Mode() as mode:
        assert same(layer(x), y)
    assert ops.linear_int8 in mode.seen and len(taken) == 3
    with torch.profiler.profile() as profile:
        layer(x)
    assert "bitshard::linear_int8" in {event.key for event in profile.key_averages()}
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as fake:
        y = int8.linear(fake.from_tensor(x), codes, absmax, N, K)  # of the layer's own class torch 2.10 makes no fake
        assert isinstance(y, torch._subclasses.FakeTensor)
    assert direct_int8(torch.randn(2, K, requires_grad=True), codes, absmax) is None
    assert direct_int8(x, codes, absmax, torch.zeros(N).requires_grad_()) is None


INT8_DECLINED = {
    "a short weight": lambda x, codes, absmax: (x, codes[:-1], absmax),
    "short scales": lambda x, codes, absmax: (x, codes, absmax[:-1]),
    "scales in float64": lambda x, codes, absmax: (x, codes, absmax.double()),
    "another width": lambda x, codes, absmax: (x[:, 1:].contiguous(), codes, absmax),
    "float64": lambda x, codes, absmax: (x.double(), codes, absmax),
    "no rows": lambda x, codes, absmax: (x[:0], codes, absmax),
    "a negated view": lambda x, codes, absmax: (negated(x), codes, absmax),
    "a short bias": lambda x, codes, absmax: (x, codes, absmax, torch.zeros(N - 1)),
    "a bias of another dtype": lambda x, codes, absmax: (x, codes, absmax, torch.zeros(N).half()),
    "a threshold below 0": lambda x, codes, absmax: (x, codes, absmax, None, -1.0),
    "no number": lambda x, codes, absmax: (x, codes, absmax, None, torch.nan),
    "a word": lambda x, codes, absmax: (x, codes, absmax, None, "six"),
    "other sizes": lambda x, codes, absmax: (x, codes, absmax, None, 6.0, (N, K + 1)),
    "sizes that are no numbers": lambda x, codes, absmax: (x, codes, absmax, None, 6.0, (2.5, K)),
}


@pytest.mark.parametrize("name", INT8_DECLINED)
def test_int8_declined(name):
    """None, no exception; and as often as one likes."""
    _, codes, absmax = made_int8()
    given = INT8_DECLINED[name](torch.randn(2, K), codes, absmax)
    refs = [sys.getrefcount(t) for t in (codes, absmax)]
    assert all(direct_int8(*given) is None for _ in range(20))
    assert [sys.getrefcount(t) for t in (codes, absmax)] == refs


def test_int8_nothing_leaks():
    layer, codes, absmax = made_int8()
    x, dy, bias = torch.randn(2, K), torch.randn(2, N), torch.randn(N)
    refs = [sys.getrefcount(t) for t in (x, dy, bias, codes, absmax)]
    for _ in range(100):
        direct_int8(x, codes, absmax, bias), alone.linear_int8_dgrad(dy, codes, absmax, N, K)
        alone.linear_int8_dgrad(dy, codes[:-1], absmax, N, K)
    assert [sys.getrefcount(t) for t in (x, dy, bias, codes, absmax)] == refs
