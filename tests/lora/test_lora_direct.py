"""Fused LoRA layers in one call of the C core (csrc/python/direct_lora.c): taken where they should be."""

import gc
import itertools
import sys

import pytest
import torch

peft = pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from bitshard import _C, functional, ops  # noqa: E402
from bitshard.lora.layer import FORWARDS, FOUR, chosen  # noqa: E402
from helpers.direct import calls_directly, noting  # noqa: E402
from helpers.lora import DTYPES, error, exact, fused_calls, fused_copy, layers, model, part_of, run  # noqa: E402

NAMES = ("lora_4bit", "lora_4bit_backward")
N, K, RANK, SCALE = 40, 96, 4, 1.5
pytestmark = calls_directly


@pytest.fixture
def taken(monkeypatch):
    """Names of the calls that did not decline, in their order."""
    found = []
    for name in NAMES:
        monkeypatch.setattr(_C, name, noting(found, name, getattr(_C, name)))
    return found


def by_python(monkeypatch, *arguments, seed=None):
    """`run` with the C core declining everything."""
    with monkeypatch.context() as patch:
        for name in NAMES:
            patch.setattr(_C, name, lambda *args: None)
        return run(*arguments, seed=seed)


def same(actual, expected):
    return all(map(torch.equal, actual, expected)) and [t.stride() for t in actual] == [t.stride() for t in expected]


def leaf(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def arguments(dtype=torch.float32, shape=(3,), bias=True):
    """Those of both functions, as dictionaries."""
    packed, state = functional.quantize_4bit(leaf(N, K), compress_statistics=True, quant_type="nf4")
    weight = dict(zip(("packed", "absmax", "map", "absmax2", "offset"), (packed, *state.scales()), strict=True))
    sizes = {"blocksize": state.blocksize, "format": ops.FORMATS["nf4"], "N": N, "K": K}
    x, A, B = leaf(*shape, K, dtype=dtype), leaf(RANK, K, dtype=dtype), leaf(N, RANK, dtype=dtype)
    rest = {"A": A, "B": B}
    forward = {"x": x, **weight, "bias": leaf(N, dtype=dtype) if bias else None, **sizes, **rest, "scale": SCALE}
    xa = leaf(x.numel() // K, RANK, dtype=dtype)
    last = {"x": x, **rest, "xa": xa, "scale": SCALE, "needs_x": True}
    return forward, {"dy": leaf(*shape, N, dtype=dtype), **weight, **sizes, **last}


def forward(given):
    return _C.lora_4bit(*given.values())


def backward(given):
    return _C.lora_4bit_backward(*given.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(128,), (1, 128), (5, 128), (2, 3, 128), (2, 1, 3, 128), (64, 128)])
def test_the_bits_are_those_of_torch(dtype, shape, taken, monkeypatch):
    """Taken forward and backward, in every dtype, and the bits of the products of torch in the same order."""
    dtype = DTYPES[dtype]
    for rank, scale, bias in ((1, 1.0, False), (8, 1.7, True), (17, 1.0, True)):
        wrapped = fused_copy(model(compute=dtype, adapter=dtype, base_dtype=dtype, r=rank, lora_alpha=rank * scale))
        base = layers(wrapped)[0].base_layer
        base.bias = torch.nn.Parameter(base.bias.to(dtype), requires_grad=False) if bias else None
        x, dy = torch.randn(shape).to(dtype), torch.randn(*shape[:-1], 96).to(dtype)
        taken.clear()
        found = run(wrapped, x, dy)
        assert taken == list(NAMES)
        assert same(found, by_python(monkeypatch, wrapped, x, dy)), (rank, scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(128,), (5, 128), (2, 3, 128)])
def test_the_bits_behind_a_dropout(dtype, shape, taken, monkeypatch):
    """Taken forward and backward, and the bits of the products of torch with the same mask."""
    dtype = DTYPES[dtype]
    wrapped = fused_copy(model(compute=dtype, adapter=dtype, lora_dropout=0.3))
    layers(wrapped)[0].base_layer.bias.data = layers(wrapped)[0].base_layer.bias.to(dtype)
    x, dy = torch.randn(shape).to(dtype), torch.randn(*shape[:-1], 96).to(dtype)
    found = run(wrapped, x, dy, seed=3)
    assert taken == list(NAMES)
    assert same(found, by_python(monkeypatch, wrapped, x, dy, seed=3))


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows, rank", [(1, 16), (7, 17), (300, 8), (64, 1)])
def test_errors_against_float64(device, dtype, rows, rank, taken):
    """Taken, and no larger than 1.02 (y) and 1.1 (gradients) times peft's; on a GPU the products are cuBLAS'."""
    theirs = model([(200, 320)], dtype, dtype, r=rank, lora_alpha=1.7 * rank).to(device)
    ours = fused_copy(theirs)
    x, dy = (torch.randn(rows, width).to(device, dtype) for width in (320, 200))
    expected = exact(layers(theirs)[0], x, dy)
    found = [run(wrapped, x, dy) for wrapped in (ours, theirs)]
    assert taken == list(NAMES)
    for i, values in enumerate(zip(*found, expected, strict=True)):
        mine, other = (error(value, values[-1]) for value in values[:2])
        assert mine <= (1.02 if i == 0 else 1.1) * other, (i, mine, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_bias_is_added_before_the_product_with_w_is_rounded(dtype):
    """Seen where B is zero: the sum of a rounded product and the bias is another number in 29 of 100 places."""
    given, _ = arguments(dtype, (64,))
    given["B"] = torch.zeros_like(given["B"])
    w = ops.dequantize_4bit(*list(given.values())[1:6], 64, ops.FORMATS["nf4"], N, K, dtype).double()
    nearest = (given["x"].double() @ w.T + given["bias"].double()).to(dtype)
    assert (forward(given)[0] != nearest).double().mean() <= 0.01


@pytest.mark.parametrize("needs", [n for n in itertools.product([True, False], repeat=3) if any(n)])
def test_only_what_is_needed(needs):
    _, given = arguments()
    given["needs_x"] = needs[0]
    given["x"] = given["x"] if needs[1] else None
    given["xa"] = given["xa"] if needs[2] else None
    whole, found = backward(arguments()[1]), backward(given)
    for needed, mine, one in zip(needs, found, whole, strict=True):
        assert torch.equal(mine, one) if needed else mine is None


def test_gradients_of_a_part_of_what_was_kept(taken):
    """autograd.grad of some inputs asks for no more than those."""
    wrapped = fused_copy(model())
    inputs = [torch.randn(5, 128, requires_grad=True), *(p for p in wrapped.parameters() if p.requires_grad)]
    dy = torch.randn(5, 96)
    whole = torch.autograd.grad(wrapped(inputs[0]), inputs, dy)
    for tensor, expected in zip(inputs, whole, strict=True):
        taken.clear()
        assert torch.equal(torch.autograd.grad(wrapped(inputs[0]), tensor, dy)[0], expected)
        assert taken == list(NAMES)


UNUSUAL = {
    "no rows": lambda x: x[:0],
    "not contiguous": lambda x: torch.cat([x, x], 1)[:, ::2],
    "negated": torch._neg_view,
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_inputs_are_python_s(name, taken):
    """Both calls decline, and the layer gives what peft gives."""
    theirs = model()
    ours = fused_copy(theirs)
    x, dy = UNUSUAL[name](torch.randn(4, 128)), UNUSUAL[name](torch.randn(4, 96))
    with fused_calls() as calls, torch.no_grad():
        mine, other = ours(x), theirs(x)
    assert calls == ["no gradient"] and not taken and torch.allclose(mine, other, atol=1e-5)
    found = []
    for wrapped in (theirs, ours):
        y = wrapped(torch.ones(len(x), 128, requires_grad=True))
        taken.clear()
        found.append(torch.autograd.grad(y, [p for p in wrapped.parameters() if p.requires_grad], dy))
    assert not taken
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*found, strict=True))


def test_factors_that_are_not_contiguous(taken):
    theirs = model()
    for part in ("lora_A", "lora_B"):
        linear = getattr(layers(theirs)[0], part)["default"]
        linear.weight = torch.nn.Parameter(linear.weight.detach().t().contiguous().t())
    x, dy = torch.randn(4, 128), torch.randn(4, 96)
    found, expected = run(fused_copy(theirs), x, dy), run(theirs, x, dy)
    assert not taken and all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, expected, strict=True))


def test_a_profiler_sees_the_products(taken):
    wrapped, x = fused_copy(model()), torch.randn(4, 128)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(wrapped, x, torch.randn(4, 96))
    assert not taken
    assert {"aten::mm", "aten::addmm_", "bitshard::linear_4bit"} <= {event.key for event in profile.key_averages()}


def test_mixed_dtypes_are_python_s(taken):
    wrapped = fused_copy(model(compute=torch.bfloat16))
    with fused_calls() as calls:
        run(wrapped, torch.randn(4, 128).bfloat16(), torch.randn(4, 96).bfloat16())
    assert calls == ["trained"] and not taken


def test_whoever_wants_a_gradient():
    """The C core makes no graph, so that with gradients on it declines tensors that want one."""
    for which, call in zip(arguments(), (forward, backward), strict=True):
        for name in ("x", "A", "B"):
            given = {**which, name: which[name].clone().requires_grad_()}
            assert call(given) is None
            with torch.no_grad():
                assert call(given) is not None


WRONG = [None, 3, "x", -1, 2**80, 1e300, object(), [], torch.zeros(0), torch.zeros(()), torch.zeros(3, 5)]
WRONG += [torch.zeros(3, K, dtype=torch.int64), torch.zeros(3, K, dtype=torch.complex64), torch.zeros(3, K).double()]
WRONG += [torch.zeros(3, K).bfloat16(), torch.zeros(3, K, device="meta"), torch.zeros(RANK, K + 1), torch.zeros(N + 1)]
WRONG += [torch.zeros(N, RANK + 1), torch.zeros(1, 1, N, RANK), torch.zeros(3, K).to_sparse(), torch.zeros(K, 3).t()]


@pytest.mark.parametrize("back", [False, True])
def test_what_does_not_fit_is_declined(back):
    """Any argument in the place of any other: None, or a result where it does fit, and no exception is left."""
    call, given = (backward, arguments()[1]) if back else (forward, arguments()[0])
    expected = call(given)
    assert expected is not None
    may_be_none = {"bias", "x", "xa"} if back else {"bias"}
    for name, wrong in itertools.product(given, WRONG):
        result = call({**given, name: wrong})
        one = isinstance(wrong, torch.Tensor) and wrong.numel() == 1 and name in ("absmax2", "offset")
        fits = one or (wrong is None and name in may_be_none) or name in ("scale", "needs_x")
        assert result is None or fits, (name, wrong)
    for count in range(len(given)):
        assert getattr(_C, NAMES[back])(*list(given.values())[:count]) is None
    assert all(map(torch.equal, call(given), expected))


def test_another_x_for_a():
    """y = W x + bias + s B (A dropped); the two parts of dx apart, which are then those of dx in one."""
    first, second = arguments()
    dropped = first["x"] * 2.5
    (y, xa), (plain, _) = (
        forward({**first, "keep": None, "dropped": dropped}),
        forward({**first, "B": first["B"] * 0}),
    )
    assert torch.equal(xa, dropped @ first["A"].T)
    assert torch.allclose(y, plain + SCALE * xa @ first["B"].T, atol=1e-4)
    *whole, last = backward({**second, "apart": True})
    dx, dA, dB = backward(second)
    assert torch.equal(whole[1], dA) and torch.equal(whole[2], dB)
    assert torch.allclose(last, SCALE * second["dy"] @ second["B"] @ second["A"], atol=1e-4)
    assert torch.allclose(whole[0] + last, dx, atol=1e-4) and not torch.allclose(whole[0], dx, atol=1e-1)
    assert backward({**second, "needs_x": False, "apart": True})[0::3] == (None, None)
    assert len(backward({**second, "apart": False})) == 3


def test_what_does_not_fit_in_the_place_of_x():
    first, _ = arguments()
    expected = forward({**first, "keep": None, "dropped": first["x"]})
    assert torch.equal(expected[0], forward(first)[0])
    for wrong in WRONG[1:]:
        assert forward({**first, "keep": None, "dropped": wrong}) is None, wrong
    assert forward({**first, "keep": None, "dropped": first["x"].clone().requires_grad_()}) is None
    assert forward({**first, "keep": None, "dropped": None, "more": None}) is None
    assert torch.equal(forward({**first, "keep": None, "dropped": None})[0], expected[0])


@pytest.mark.parametrize(
    "name, value", [("N", N + 8), ("K", K + 32), ("N", 1), ("K", 0), ("blocksize", 48), ("format", 9)]
)
def test_sizes_that_the_weight_does_not_have(name, value):
    """Also where x, A and B would fit them."""
    first, second = arguments()
    n, k = (value if name == size else whole for size, whole in (("N", N), ("K", K)))
    tensors = {"x": torch.zeros(3, k), "A": torch.zeros(RANK, k), "B": torch.zeros(n, RANK)}
    assert forward({**first, **tensors, "bias": None, name: value}) is None
    assert backward({**second, **tensors, "dy": torch.zeros(3, n), name: value}) is None


def test_a_freed_weight_is_declined():
    """FSDP2 frees it behind a module's forward."""
    for which, call in zip(arguments(), (forward, backward), strict=True):
        which["packed"].untyped_storage().resize_(0)
        assert call(which) is None


@pytest.mark.parametrize("back", [False, True])
def test_nothing_leaks(back):
    call, given = (backward, arguments()[1]) if back else (forward, arguments()[0])
    tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
    wrong = [{**given, name: torch.zeros(3, 5)} for name in given]
    gc.collect()
    before = [sys.getrefcount(tensor) for tensor in tensors]
    for _ in range(50):
        assert call(given) is not None
        for one in wrong:
            call(one)
    assert [sys.getrefcount(tensor) for tensor in tensors] == before
    results = call(given)
    assert all(sys.getrefcount(result) == 3 for result in results)  # the tuple, the loop and the call
    assert sys.getrefcount(results) == 2


def test_an_exception_is_not_swallowed_by_the_next_call():
    """A call that declines leaves no exception behind, and one that was raised before is still the one that is seen."""
    given = arguments()[0]
    try:
        raise KeyError("first")
    except KeyError:
        assert forward({**given, "scale": "x"}) is None
        assert isinstance(sys.exc_info()[1], KeyError)


def test_plain_modules():
    linear = torch.nn.Linear(2, 2)
    assert _C.plain_modules() and _C.plain_modules(vars(linear), vars(torch.nn.Dropout()))
    for register in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
        handle = getattr(linear, f"register_{register}")(lambda *args: None)
        assert not _C.plain_modules(vars(torch.nn.Identity()), vars(linear))
        handle.remove()
        assert _C.plain_modules(vars(linear))
    for name in FORWARDS:
        assert not _C.plain_modules({**vars(linear), name: None})
    assert not _C.plain_modules({}) and not _C.plain_modules({**vars(linear), "_forward_hooks": None})
    with pytest.raises(TypeError, match="argument 1 is no dictionary"):
        _C.plain_modules({**vars(linear)}, linear)


@pytest.mark.parametrize("role", ["base layer", "A", "B", "dropout"])
def test_the_fast_check_of_modules_and_the_words_agree(role):
    """What the C core finds odd in a module's `__dict__`, and nothing else, has words."""
    wrapped = fused_copy(model())
    (layer,) = layers(wrapped)
    module = part_of(layer, role)
    assert _C.plain_modules(vars(module)) and type(chosen(layer, FOUR.bases)) is tuple
    hooks = [name for name in vars(module) if name.endswith("_hooks") and name.startswith(("_forward", "_backward"))]
    assert len(hooks) == 4
    for name, value in [(name, {1: print}) for name in hooks] + [(name, print) for name in FORWARDS]:
        before = vars(module).pop(name, None)
        vars(module)[name] = value
        said = "hooks on" if name in hooks else "another forward on"
        assert not _C.plain_modules(vars(module)) and chosen(layer, FOUR.bases) == f"{said} its {role}"
        del vars(module)[name]
        vars(module).update({name: before} if name in hooks else {})
    for name in ("_forward_hooks_with_kwargs", "_state_dict_hooks", "_load_state_dict_pre_hooks"):
        vars(module)[name] = {1: print}
        assert _C.plain_modules(vars(module)) and type(chosen(layer, FOUR.bases)) is tuple
