"""Fused LoRA layers against peft's and float64; every way back to peft; what peft does with them; training.

Files and copies are in test_lora_models.py, FSDP and DDP in test_fsdp_lora.py.
"""

import functools
import itertools

import pytest
import torch

peft = pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from bitshard import lora  # noqa: E402
from helpers.direct import noting  # noqa: E402
from helpers.lora import (  # noqa: E402
    DTYPES,
    Checkpointed,
    error,
    exact,
    fused_calls,
    fused_copy,
    layers,
    model,
    part_of,
    randomize,
    run,
    saved,
)
from torch.autograd import forward_ad  # noqa: E402
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop  # noqa: E402

# dtype of x, of the product with W, of A and B, of autocast
SAME = [(name, name, name, None) for name in DTYPES]
MIXED = [
    ("bf16", "bf16", "fp32", None),  # adapters as peft makes them
    ("fp16", "fp16", "fp32", None),
    ("fp32", "bf16", "fp32", None),  # behind prepare_model_for_kbit_training
    ("fp32", "bf16", "bf16", None),  # the same with the adapters as trl casts them
    ("fp32", "fp16", "fp16", None),
    ("bf16", "fp32", "bf16", None),
    ("bf16", "fp16", "bf16", None),
    ("bf16", "bf16", "fp16", None),
]
AUTOCAST = [
    ("fp32", "bf16", "fp32", "bf16"),
    ("bf16", "bf16", "fp32", "bf16"),
    ("bf16", "bf16", "bf16", "bf16"),
    ("fp32", "bf16", "bf16", "bf16"),
    ("fp32", "fp32", "fp32", "bf16"),
    ("fp32", "fp16", "fp32", "fp16"),
]
# of peft's error against float64
FORWARD, GRADIENT = 1.02, 1.1


def errors(mix, scale=1.7, seed=0):
    """([peft's errors], [the fused layer's]) of y, dx, dA and dB for one mix of dtypes."""
    dtype, compute, adapter, autocast = (DTYPES.get(name) for name in mix)
    theirs = model([(200, 320)], compute, adapter, r=8, lora_alpha=8 * scale, seed=seed)
    ours = fused_copy(theirs)
    x, dy = torch.randn(3, 11, 320).to(dtype), torch.randn(3, 11, 200).to(dtype)
    expected = exact(layers(theirs)[0], x, dy)
    with fused_calls() as calls:
        found = [run(wrapped, x, dy, autocast) for wrapped in (theirs, ours)]
    assert calls == ["trained"]
    for mine, other in zip(*found, strict=True):
        assert mine.dtype is other.dtype and mine.shape == other.shape
    return [[error(*pair) for pair in zip(values, expected, strict=True)] for values in found]


def within(theirs, ours):
    """Whether the fused layer's errors are within their bounds of peft's."""
    bounds = [FORWARD, *[GRADIENT] * (len(theirs) - 1)]
    return all(mine <= bound * other for mine, other, bound in zip(ours, theirs, bounds, strict=True))


def close(actual, expected, bound=1e-5):
    """Whether all tensors of two lists agree to `bound` of the largest magnitude of each."""
    return all(
        a.dtype is b.dtype
        and a.shape == b.shape
        and (not b.numel() or (a.float() - b.float()).abs().max() <= bound * b.float().abs().max())
        for a, b in zip(actual, expected, strict=True)
    )


# ---- numbers ----


@pytest.mark.parametrize("mix", SAME + MIXED + AUTOCAST)
@pytest.mark.parametrize("scale", [0.5, 1.0, 1.7])
def test_errors_against_float64(mix, scale):
    """No larger than 1.02 (y) and 1.1 (gradients) times peft's, in every mix of dtypes."""
    theirs, ours = errors(mix, scale)
    assert within(theirs, ours), (theirs, ours)


@pytest.mark.parametrize("mix", SAME + MIXED + AUTOCAST)
def test_a_wrong_scale_is_seen(planted, mix):
    planted()
    theirs, ours = errors(mix)
    assert all(mine > GRADIENT * other for mine, other in zip(ours, theirs, strict=True)), (theirs, ours)


@pytest.mark.parametrize(
    "rank, rslora, bias", [(1, False, True), (4, True, False), (17, False, False), (64, True, True)]
)
@pytest.mark.parametrize("shape", [(130,), (1, 130), (5, 130), (2, 3, 130), (2, 1, 3, 130), (0, 130), (2, 0, 130)])
def test_shapes_and_ranks(rank, rslora, bias, shape):
    """x of one to four dimensions and without rows, LoRA and rsLoRA, odd sizes: what peft gives."""
    theirs = model([(97, 130)], bias=bias, r=rank, use_rslora=rslora)
    x, dy = torch.randn(shape), torch.randn(*shape[:-1], 97)
    with fused_calls() as calls:
        assert close(run(fused_copy(theirs), x, dy), run(theirs, x, dy))
    assert calls == ["trained"]


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
def test_layouts(layout):
    """x and dy that are not contiguous, dtypes mixed and not."""
    for adapter in (torch.float32, torch.bfloat16):
        theirs = model(adapter=adapter)
        if layout == "transposed":
            x, dy = torch.randn(128, 6).t(), torch.randn(96, 6).t()
        elif layout == "strided":
            x, dy = torch.randn(4, 2, 128)[:, 1], torch.randn(4, 192)[:, ::2]
        else:
            x, dy = torch.randn(128).expand(2, 3, 128), torch.ones(()).expand(2, 3, 96)
        with fused_calls() as calls:
            found = run(fused_copy(theirs), x, dy)
        assert calls and close(found, run(theirs, x, dy), 1e-5 if adapter is torch.float32 else 2e-2)


@pytest.mark.parametrize("needs", [n for n in itertools.product([True, False], repeat=3)])
def test_only_what_is_needed(needs):
    """Gradients of any of x, A and B, or none, with and without a graph."""
    results = []
    theirs = model()
    for wrapped in (theirs, fused_copy(theirs)):
        (layer,) = layers(wrapped)
        x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).requires_grad_(needs[0])
        A, B = layer.lora_A["default"].weight.requires_grad_(needs[1]), layer.lora_B["default"].weight
        B.requires_grad_(needs[2])
        with fused_calls() as calls:
            y = wrapped(x)
        assert calls == ([] if wrapped is theirs else ["trained" if any(needs) else "no gradient"])
        assert y.requires_grad is any(needs)
        if any(needs):
            y.square().sum().backward()
        assert [tensor.grad is not None for tensor in (x, A, B)] == list(needs)
        results.append([y.detach(), *(tensor.grad for tensor in (x, A, B) if tensor.grad is not None)])
    assert close(*results)


@pytest.mark.filterwarnings("ignore:Input #")
@pytest.mark.parametrize("scale", [1.0, 0.75])
def test_gradcheck(scale):
    """y is linear in each element of x, A and B, so that a finite difference of any length is its derivative."""
    wrapped = model([(8, 64)], r=2, lora_alpha=2 * scale)
    lora.fuse(wrapped)
    (layer,) = layers(wrapped)
    A, B = (part["default"].weight for part in (layer.lora_A, layer.lora_B))
    x = torch.randn(3, 64, requires_grad=True)
    with fused_calls() as calls:
        torch.autograd.gradcheck(lambda x, A, B: layer(x), (x, A, B), eps=1.0, atol=2e-3, rtol=1e-3)
    assert len(calls) > 100


def test_higher_derivatives():
    """Gradient penalties and their gradients, to the third derivative."""
    theirs = model()

    def derivatives(wrapped):
        x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1), requires_grad=True)
        inputs = (x, *(p for p in wrapped.parameters() if p.requires_grad))
        first = torch.autograd.grad(wrapped(x).pow(4).mean(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.square().mean() for g in first), inputs, create_graph=True)
        return [*first, *second, *torch.autograd.grad(sum(g.square().mean() for g in second), inputs)]

    with fused_calls() as calls:
        found = derivatives(fused_copy(theirs))
    assert calls == ["trained"] and close(found, derivatives(theirs), 1e-4)


@pytest.mark.parametrize("adapter, frozen", [(torch.bfloat16, False), (torch.float32, True)])
def test_second_derivatives_that_are_not_there_raise(adapter, frozen):
    """Where casts stand between the parameters and the products, and where x is not kept because A is frozen."""
    wrapped = fused_copy(model(adapter=adapter))
    layers(wrapped)[0].lora_A["default"].weight.requires_grad_(not frozen)
    x = torch.randn(5, 128, requires_grad=True)
    y = wrapped(x).square().sum()
    with pytest.raises(RuntimeError, match="no second derivatives .*unfuse"):
        torch.autograd.grad(y, x, create_graph=True)
    lora.unfuse(wrapped)
    torch.autograd.grad(wrapped(x).square().sum(), x, create_graph=True)


@pytest.mark.parametrize("where", ["x", "A", "B", "dy"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("mix", [("fp32", "fp32", "fp32", None), ("bf16", "bf16", "bf16", None), MIXED[0]])
def test_nan_and_infinity(where, value, mix):
    """They come out where peft's come out, and as what they are."""
    dtype, compute, adapter, _ = (DTYPES.get(name) for name in mix)
    theirs = model(compute=compute, adapter=adapter)
    x, dy = torch.randn(5, 128).to(dtype), torch.randn(5, 96).to(dtype)
    (layer,) = layers(theirs)
    target = {"x": x, "dy": dy, "A": layer.lora_A["default"].weight, "B": layer.lora_B["default"].weight}[where]
    target.data[1, 2] = value
    with fused_calls() as calls:
        found = run(fused_copy(theirs), x, dy)
    assert calls
    for mine, other in zip(found, run(theirs, x, dy), strict=True):
        assert torch.equal(mine.isnan(), other.isnan()) and torch.equal(mine.isinf(), other.isinf())
        assert torch.equal(mine[mine.isinf()], other[other.isinf()])


@pytest.mark.parametrize("trained", ["both", "A", "B"])
@pytest.mark.parametrize("mix", SAME + MIXED + AUTOCAST)
def test_no_more_is_saved_than_peft_saves(mix, trained):
    dtype, compute, adapter, autocast = (DTYPES.get(name) for name in mix)
    theirs = model(compute=compute, adapter=adapter)
    (layer,) = layers(theirs)
    layer.lora_A["default"].weight.requires_grad_(trained != "B")
    layer.lora_B["default"].weight.requires_grad_(trained != "A")
    x = torch.randn(2, 50, 128, dtype=dtype, requires_grad=True)
    mine, other = saved(fused_copy(theirs), x, autocast), saved(theirs, x, autocast)
    assert mine[0] <= other[0] and mine[1] <= other[1] and mine[0] > 0, (mine, other)
    if mix in SAME:
        assert mine == other
    elif mix[0] != "fp32" and mix[2] == "fp32" and not autocast and trained != "B":
        assert mine[0] == other[0] - x.nbytes  # x is kept, not its cast copy


@pytest.fixture
def products(monkeypatch):
    """Names of the products with W that fused layers made, in their order."""
    from bitshard import _C
    from bitshard.kinds import FOUR_BIT

    made = []
    for where, name in ((_C, "lora_4bit"), (FOUR_BIT, "product")):
        monkeypatch.setattr(where, name, noting(made, name, getattr(where, name)))
    return made


@pytest.mark.parametrize("words", ["CUDA out of memory. Tried to allocate 2.00 GiB", "can't allocate memory: 2 bytes"])
def test_what_failed_for_want_of_memory_is_not_tried_again(words, monkeypatch):
    """It raises what torch raises; other failures are computed and explained by the layer's own product."""
    from bitshard import _C
    from bitshard.kinds import FOUR_BIT

    layer, calls = fused_copy(model([(128, 128)], torch.float32, torch.float32)), []
    monkeypatch.setattr(FOUR_BIT, "product", noting(calls, "product", FOUR_BIT.product))

    def fails(*_):
        raise RuntimeError(given)

    monkeypatch.setattr(_C, "lora_4bit", fails)
    given = words
    with pytest.raises(torch.OutOfMemoryError if "CUDA" in words else RuntimeError, match=words[:18]):
        layer(torch.randn(5, 128))
    assert not calls
    given = "another failure"
    assert layer(torch.randn(5, 128)).shape == (5, 128) and calls == ["product"]


@pytest.mark.parametrize("mix", [SAME[0], SAME[1], MIXED[0], AUTOCAST[0]])
@pytest.mark.parametrize("trained", ["both", "A", "B"])
@pytest.mark.parametrize("form", ["reentrant", "early stop", "no early stop"])
def test_gradient_checkpointing(mix, form, trained, products):
    """Both forms give the bits that come without it; the first call of a layer included. Where torch ends the second
    forward with what was saved last, the last product, which nobody needs, is not made."""
    dtype, compute, adapter, autocast = (DTYPES.get(name) for name in mix)
    wrapped = model([(128, 128)] * 2, compute, adapter)
    for layer in layers(wrapped):
        layer.lora_A["default"].weight.requires_grad_(trained != "B")
        layer.lora_B["default"].weight.requires_grad_(trained != "A")
    x, dy = torch.randn(5, 128).to(dtype), torch.randn(5, 128).to(dtype)
    region = Checkpointed(fused_copy(wrapped), use_reentrant=form == "reentrant")
    with set_checkpoint_early_stop(form == "early stop"), fused_calls() as calls:
        found = run(region, x, dy, autocast)
    assert len(calls) == 4 and len(products) == (3 if form == "early stop" else 4)
    for mine, other in zip(found, run(fused_copy(wrapped), x, dy, autocast), strict=True):
        assert torch.equal(mine, other)


class Differentiated(torch.nn.Module):
    """The gradient of a layer as a part of the forward, whose second run is in a backward."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        y = self.inner(x)
        (dx,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
        return y * dx.detach()


@pytest.mark.parametrize("early", [True, False])
def test_backward_inside_a_checkpointed_region(early):
    theirs = model([(128, 128)])
    x, dy = torch.randn(5, 128), torch.randn(5, 128)
    found = []
    for wrapped in (fused_copy(theirs), theirs):
        with set_checkpoint_early_stop(early), fused_calls() as calls:
            found.append(run(Checkpointed(Differentiated(wrapped), use_reentrant=False), x, dy))
    assert not calls and close(*found)


@pytest.mark.parametrize("error", [RuntimeError, KeyError])
@pytest.mark.parametrize("mix", [SAME[0], MIXED[0]])
def test_a_hook_that_raises_in_a_second_forward(mix, error):
    """Its exception is seen, it is asked once, and the next step is that of peft."""
    dtype, compute, adapter, _ = (DTYPES.get(name) for name in mix)
    theirs = model([(128, 96)], compute, adapter)
    ours, asked = fused_copy(theirs), []

    def pack(tensor):
        asked.append(tensor.shape)
        raise error("the hook's")

    def hooked(x):
        if torch._C._current_graph_task_id() == -1:
            return ours(x)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return ours(x)

    x, dy = torch.randn(5, 96).to(dtype), torch.randn(5, 128).to(dtype)
    y = checkpoint(hooked, x.clone().requires_grad_(), use_reentrant=False)
    with pytest.raises(error, match="the hook's"):
        y.backward(dy)
    assert len(asked) == 1
    assert close(run(ours, x, dy), run(theirs, x, dy), 2e-2)


def test_selective_checkpointing():
    """Its dispatch modes keep or compute again what they see: peft's way, in forward and again in backward."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(context, op, *args, **kwargs):
        keep = op in (torch.ops.aten.mm.default, torch.ops.bitshard.linear_4bit.default)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    theirs = model([(128, 128)] * 2)
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    x, dy = torch.randn(5, 128), torch.randn(5, 128)
    with fused_calls() as calls:
        region = Checkpointed(fused_copy(theirs), use_reentrant=False, context_fn=contexts)
        assert all(map(torch.equal, run(region, x, dy), run(theirs, x, dy)))
    assert not calls


def test_backward_under_autocast():
    """A graph made outside autocast whose backward runs inside computes in its own dtypes."""
    theirs = model()
    x, dy = torch.randn(5, 128), torch.randn(5, 96)
    ours = fused_copy(theirs)
    expected = run(theirs, x, dy)
    x = x.requires_grad_()
    y = ours(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y.backward(dy)
    assert close([y.detach(), x.grad, *(p.grad for p in ours.parameters() if p.requires_grad)], expected)


def test_the_packed_weight_is_not_saved():
    """FSDP2 frees and refills it: no hook on saved tensors sees it."""
    wrapped = fused_copy(model())
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t.data_ptr()), t)[1], lambda t: t):
        wrapped(torch.randn(5, 128, requires_grad=True))
    assert len(seen) == 4 and layers(wrapped)[0].base_layer.weight.data_ptr() not in seen


def test_saved_tensors_on_the_host():
    """torch's offloading of what is saved: x, A, B and x A^T come back, the packed weight was never gone."""
    theirs = model()
    x, dy = torch.randn(5, 128), torch.randn(5, 96)
    with torch.autograd.graph.save_on_cpu(), fused_calls() as calls:
        found = run(fused_copy(theirs), x, dy)
    assert calls == ["trained"] and close(found, run(theirs, x, dy))


def test_results_may_be_changed_in_place():
    """y is no view of anything, so that `y += residual` works, as behind peft's layer."""
    wrapped = fused_copy(model())
    x = torch.randn(2, 5, 128, requires_grad=True)
    y = wrapped(x)
    y += 1
    y.mul_(2).sum().backward()
    assert x.grad is not None


def test_an_exception_in_the_middle_of_backward():
    """The next step is that of peft again."""
    theirs = model()
    ours, x, dy = fused_copy(theirs), torch.randn(5, 128), torch.randn(5, 96)
    y = ours(x.clone().requires_grad_())
    layers(ours)[0].lora_A["default"].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.backward(dy)
    layers(ours)[0].lora_A["default"].weight._backward_hooks.clear()
    assert close(run(ours, x, dy), run(theirs, x, dy))


def test_parameters_changed_before_backward_raise():
    """As behind peft's layer: an optimizer's step between forward and backward is an error, not another gradient."""
    wrapped = fused_copy(model())
    y = wrapped(torch.randn(5, 128, requires_grad=True))
    with torch.no_grad():
        layers(wrapped)[0].lora_B["default"].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_shapes_that_do_not_fit_raise():
    wrapped = fused_copy(model())
    (layer,) = layers(wrapped)
    with pytest.raises(ValueError, match="does not fit a weight"):
        wrapped(torch.randn(5, 96))
    with pytest.raises(ValueError, match="does not fit a weight"):
        wrapped(torch.tensor(1.0))
    with pytest.raises(TypeError, match="floating-point"):
        wrapped(torch.zeros(5, 128, dtype=torch.int64))
    for part, shape in (("lora_A", (8, 130)), ("lora_A", (7, 128)), ("lora_B", (95, 8)), ("lora_B", (1, 8))):
        linear = getattr(layer, part)["default"]
        before, linear.weight = linear.weight, torch.nn.Parameter(torch.randn(shape))
        with pytest.raises(RuntimeError):
            wrapped(torch.randn(5, 128))
        linear.weight = before
    wrapped(torch.randn(5, 128))


# ---- peft's way ----


def layer_of(wrapped):
    return layers(wrapped)[0]


def second_adapter(wrapped):
    wrapped.add_adapter("other", peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0"]))
    randomize(wrapped)


def hook(part, kind):
    """A hook of one kind on one of the four modules inside."""

    def prepare(wrapped):
        module = part_of(layer_of(wrapped), part)
        return getattr(module, f"register_{kind}")(lambda *args: None)

    return prepare


def another_forward(part):
    def prepare(wrapped):
        module = part_of(layer_of(wrapped), part)
        before = module.forward
        module.forward = lambda x: 2 * before(x)

    return prepare


def several(wrapped):
    second_adapter(wrapped)
    wrapped.base_model.set_adapter(["default", "other"])


def other_dropout(wrapped):
    layer_of(wrapped).lora_dropout["default"] = torch.nn.AlphaDropout(0.0)


def of_a_subclass(wrapped):
    linear = layer_of(wrapped).lora_A["default"]
    linear.__class__ = type(
        "Linear", (torch.nn.Linear,), {"forward": lambda self, x: 2 * torch.nn.Linear.forward(self, x)}
    )


def parametrized(wrapped):
    class Twice(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    torch.nn.utils.parametrize.register_parametrization(layer_of(wrapped).lora_A["default"], "weight", Twice())


def weight_norm(wrapped):
    torch.nn.utils.weight_norm(layer_of(wrapped).lora_B["default"])


def quantized(wrapped):
    import bitsandbytes as bnb

    linear = layer_of(wrapped).lora_A["default"]
    new = bnb.nn.LinearNF4(128, 8, bias=False, quant_storage=torch.float32)  # peft casts x to the storage
    new.load_state_dict(linear.state_dict())
    layer_of(wrapped).lora_A["default"] = new.to("cpu")


def tensor_subclass(wrapped):
    class Parameter(torch.nn.Parameter):
        pass

    linear = layer_of(wrapped).lora_B["default"]
    linear.weight = Parameter(linear.weight.data)


def bias_on_a(wrapped):
    layer_of(wrapped).lora_A["default"].bias = torch.nn.Parameter(torch.randn(8))


def scale(value):
    def prepare(wrapped):
        layer_of(wrapped).scaling["default"] = value

    return prepare


def trained_bias(wrapped):
    layer_of(wrapped).base_layer.bias.requires_grad_()


# name: (options of LoraConfig, what makes the layer one for peft, what the report says of it)
STATES = {
    "adapters disabled": ({}, lambda wrapped: wrapped.base_model.disable_adapter_layers(), "its adapters are disabled"),
    "merged": ({}, lambda wrapped: wrapped.merge_adapter(), "its adapter is merged"),
    "several adapters": ({}, several, "2 adapters are active"),
    "no adapter": ({}, lambda wrapped: layer_of(wrapped).set_adapter("nobody"), "it has no weights of the active"),
    "DoRA": ({"use_dora": True}, None, "Dora"),
    "lora_bias": ({"lora_bias": True}, None, "A or B has a bias"),
    "dropout of everything": ({"lora_dropout": 1.0}, None, "its dropout has p = 1.0"),
    "another dropout": ({}, other_dropout, "its dropout is a AlphaDropout"),
    "scale 0": ({}, scale(0.0), "its scale is 0, infinite or no number"),
    "scale inf": ({}, scale(float("inf")), "its scale is 0, infinite or no number"),
    "scale NaN": ({}, scale(float("nan")), "its scale is 0, infinite or no number"),
    "scale a tensor": ({}, scale(torch.tensor(1.5)), "its scale is 0, infinite or no number"),
    "trained bias": ({}, trained_bias, "the bias of its base layer is trained"),
    "subclass": ({}, of_a_subclass, "its A is a Linear"),
    "parametrized": ({}, parametrized, "its A is a ParametrizedLinear"),
    "weight norm": ({}, weight_norm, "hooks on its B"),
    "quantized A": ({}, quantized, "its A is a LinearNF4"),
    "parameter of another class": ({}, tensor_subclass, "A or B is no plain tensor"),
    "bias on A": ({}, bias_on_a, "A or B has a bias"),
    "compiled inside": (
        {},
        lambda wrapped: layer_of(wrapped).base_layer.compile(backend="eager"),
        "another forward on",
    ),
    **{
        f"{kind} on {part}": ({}, hook(part, kind), f"hooks on its {part}")
        for part in ("base layer", "A", "B", "dropout")
        for kind in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")
    },
    **{
        f"forward of {part}": ({}, another_forward(part), f"another forward on its {part}")
        for part in ("base layer", "A")
    },
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STATES)
def test_what_a_fused_layer_leaves_to_peft(name):
    """Bit for bit peft's, by peft's calls, and the report says why."""
    options, prepare, said = STATES[name]
    theirs = model(**options)
    ours = fused_copy(theirs)
    if prepare is not None:
        with fused_calls() as calls:
            ours(torch.randn(3, 128))
        assert calls == ["trained"], "the layer must be one that is fused before"
        for wrapped in (theirs, ours):
            torch.manual_seed(5)
            prepare(wrapped)
    results = []
    for wrapped in (theirs, ours):
        torch.manual_seed(6)
        x, dy = torch.randn(5, 128), torch.randn(5, 96)
        with fused_calls() as calls:
            results.append(run(wrapped, x, dy))
        assert not calls
    for mine, other in zip(*reversed(results), strict=True):
        assert torch.equal(mine, other) or (name in ("scale NaN", "scale inf") and mine.isnan().any())
    report = lora.report(ours)
    assert not report.fused and next(iter(report.left.values())).startswith(said), report
    assert said in str(report) and "\n" not in str(report)


def test_what_a_state_undone_gives_back():
    """The next call after each is fused again."""
    wrapped = fused_copy(model(lora_dropout=0.3))
    (layer,) = layers(wrapped)
    x = torch.randn(3, 128)

    def fuses():
        with fused_calls() as calls, torch.no_grad():
            wrapped(x)
        return calls == ["no gradient"]

    assert fuses()
    layer.lora_dropout["default"].p = 1.0
    assert not fuses()
    wrapped.eval()
    assert fuses() and lora.report(wrapped).reasons == {"its dropout has p = 1.0": 1}
    layer.lora_dropout["default"].p = 0.3
    assert fuses() and not lora.report(wrapped).left
    with wrapped.disable_adapter():
        assert not fuses()
    assert fuses()
    with pytest.warns(UserWarning, match="Merge"):
        wrapped.merge_adapter()
    assert not fuses()
    with pytest.warns(UserWarning, match="Unmerge"):
        wrapped.unmerge_adapter()
    assert fuses()
    handle = layer.lora_A["default"].register_forward_hook(lambda *args: None)
    assert not fuses()
    handle.remove()
    assert fuses()
    wrapped.base_model.set_adapter(["default", "default"])
    assert not fuses()
    wrapped.set_adapter("default")
    assert fuses()


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class DispatchMode(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def replaced(place, name):
    """The call while somebody has put a forward of their own at `place.name`."""

    def call(wrapped, x, monkeypatch):
        before = getattr(place(), name)
        monkeypatch.setattr(place(), name, functools.wraps(before)(lambda *args, **kwargs: before(*args, **kwargs)))
        return wrapped(x)

    return call


def under(mode):
    def call(wrapped, x, monkeypatch):
        with mode():
            return wrapped(x)

    return call


def with_global_hook(register):
    def call(wrapped, x, monkeypatch):
        handle = register(lambda *args: None)
        try:
            return wrapped(x)
        finally:
            handle.remove()

    return call


def forward_mode(wrapped, x, monkeypatch):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(wrapped(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def other_autocast(wrapped, x, monkeypatch):
    """CUDA's, about which peft asks for tensors on any device; `torch.autocast` would not turn it on without a GPU."""
    torch.set_autocast_enabled("cuda", True)
    try:
        return wrapped(x)
    finally:
        torch.set_autocast_enabled("cuda", False)


def peft_layer():
    return peft.tuners.lora.bnb.Linear4bit


def base_layer():
    import bitshard

    return bitshard.nn.linear.Linear4bit


global_hooks = torch.nn.modules.module
CALLS = {
    "keyword arguments": lambda wrapped, x, _: wrapped.base_model.model[0](x, adapter_names=None),
    "mixed batch": lambda wrapped, x, _: wrapped.base_model.model[0](x, adapter_names=["default", "__base__"] * 2),
    "function mode": under(Mode),
    "dispatch mode": under(DispatchMode),
    "subclass of Tensor": lambda wrapped, x, _: wrapped(x.as_subclass(Subclass)).as_subclass(torch.Tensor),
    "forward mode": forward_mode,
    "peft's forward": replaced(peft_layer, "forward"),
    "bitshard's forward": replaced(base_layer, "forward"),
    "torch's forward": replaced(lambda: torch.nn.Linear, "forward"),
    "torch's linear": replaced(lambda: torch.nn.functional, "linear"),
    "forward hook": with_global_hook(global_hooks.register_module_forward_hook),
    "forward pre-hook": with_global_hook(global_hooks.register_module_forward_pre_hook),
    "backward hook": with_global_hook(global_hooks.register_module_full_backward_hook),
    "backward pre-hook": with_global_hook(global_hooks.register_module_full_backward_pre_hook),
    "trace": lambda wrapped, x, _: torch.jit.trace(wrapped, x, check_trace=False)(x),
    "compile": lambda wrapped, x, _: torch.compile(wrapped, backend="eager", fullgraph=True)(x),
    "export": lambda wrapped, x, _: torch.export.export(wrapped, (x,)).module()(x),
    "autocast of another device": other_autocast,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_calls_that_are_left_to_peft(name, monkeypatch):
    """By what is around the call; the next one is fused again."""
    theirs = model()
    ours = fused_copy(theirs)
    x = torch.randn(4, 128)
    ours(x)  # not the first call of the layer
    with fused_calls() as calls, monkeypatch.context() as patch:
        found = CALLS[name](ours, x, patch)
    assert not calls
    with monkeypatch.context() as patch:
        assert torch.equal(found, CALLS[name](theirs, x, patch))
    with fused_calls() as calls:
        ours(x)
    assert calls == ["trained"]


def test_functorch():
    """Under functorch a fused layer goes peft's way, and gives the gradient of an ordinary backward."""
    theirs = model()
    ours = fused_copy(theirs)
    x = torch.randn(4, 128, requires_grad=True)
    (wanted,) = torch.autograd.grad(theirs(x).square().sum(), x)
    for wrapped in (theirs, ours):
        with fused_calls() as calls:
            found = torch.func.grad(lambda x, wrapped=wrapped: wrapped(x).square().sum())(x.detach())
        assert not calls and close([found], [wanted])
    x = x.detach()
    with torch.no_grad():
        parameters = {n: 2 * p for n, p in ours.named_parameters() if "lora_A" in n}
        doubled = [torch.func.functional_call(wrapped, parameters, (x,)) for wrapped in (theirs, ours)]
        assert close(*([y] for y in doubled)) and not torch.allclose(doubled[1], ours(x))


@pytest.mark.parametrize("mix", [("fp32", "fp32", "bf16", "fp16"), ("fp16", "fp16", "fp16", "bf16")])
def test_autocast_to_a_third_dtype(mix):
    dtype, compute, adapter, autocast = (DTYPES[name] for name in mix)
    theirs = model(compute=compute, adapter=adapter)
    x, dy = torch.randn(5, 128).to(dtype), torch.randn(5, 96).to(dtype)
    with fused_calls() as calls:
        found = run(fused_copy(theirs), x, dy, autocast)
    assert not calls and all(map(torch.equal, found, run(theirs, x, dy, autocast)))


def test_factors_of_two_dtypes():
    """peft's under autocast; an error without, as from peft."""
    theirs = model()
    layer_of(theirs).lora_B["default"].to(torch.bfloat16)
    ours, x, dy = fused_copy(theirs), torch.randn(5, 128), torch.randn(5, 96)
    with fused_calls() as calls:
        assert all(map(torch.equal, run(ours, x, dy, torch.bfloat16), run(theirs, x, dy, torch.bfloat16)))
        for wrapped in (theirs, ours):
            with pytest.raises(RuntimeError, match="dtype"):
                wrapped(x)
    assert not calls and lora.report(ours).reasons == {"A is float32 and B bfloat16": 1}


def test_casts_of_the_input_turned_off():
    """peft.helpers.disable_input_dtype_casting: peft raises where dtypes differ, and so does the fused layer."""
    theirs = model(adapter=torch.bfloat16)
    ours, same = fused_copy(theirs), fused_copy(model())
    x = torch.randn(5, 128)
    with peft.helpers.disable_input_dtype_casting(theirs), peft.helpers.disable_input_dtype_casting(ours):
        for wrapped in (theirs, ours):
            with pytest.raises(RuntimeError, match="dtype"):
                wrapped(x)
    with peft.helpers.disable_input_dtype_casting(same), fused_calls() as calls:
        same(x)
    assert calls == ["trained"]
