"""Fused LoRA layers on int8 weights against peft's; every way back to peft that 4-bit layers have not."""

import copy

import pytest
import torch

peft = pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from bitshard import lora  # noqa: E402
from helpers.copies import pickled  # noqa: E402
from helpers.lora import error, fused_calls, fused_copy, layers, model, noise_of, run  # noqa: E402

MIXES = [(x, adapter) for x in (torch.float32, torch.bfloat16, torch.float16) for adapter in (torch.float32, x)]


def inputs(rows, K, N, dtype, outliers=True):
    """x [rows, K] with two outlier columns, and dy [rows, N]."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, K, generator=generator)
    if outliers:
        x[::3, 7], x[1, 90] = 9.0, -20.0
    return x.to(dtype), torch.randn(rows, N, generator=generator).to(dtype)


def exact(layer, x, dy, noise=1.0):
    """What `run` gives for one layer, in float64: of a product of codes, from what it multiplies. noise: of dropout."""
    base, (name,) = layer.base_layer, layer.active_adapters
    y = base(x).double().detach()
    W = base.weight.data.double() * base.state.SCB.double()[:, None] / 127
    x, A, B = (t.detach().double().requires_grad_() for t in (x, layer.lora_A[name].weight, layer.lora_B[name].weight))
    added = layer.scaling[name] * (x * noise @ A.t()) @ B.t()
    (added + x @ W.t()).backward(dy.double())
    return [y + added.detach(), x.grad, A.grad, B.grad]


@pytest.mark.parametrize("dtype, adapter", MIXES)
@pytest.mark.parametrize("rows, threshold", [(2, 6.0), (40, 6.0), (40, 0.0)])
def test_errors(dtype, adapter, rows, threshold):
    """No larger than 1.02 (y) and 1.1 (gradients) times peft's, of few rows and many, in every mix of dtypes."""
    theirs = model([(200, 320)], adapter=adapter, threshold=threshold)
    x, dy = inputs(rows, 320, 200, dtype)
    theirs(x)  # the bias takes its dtype
    expected = exact(layers(theirs)[0], x, dy)
    with fused_calls() as calls:
        found = [run(wrapped, x, dy) for wrapped in (theirs, fused_copy(theirs))]
    assert calls == ["trained"]
    for mine, other, right, bound in zip(*reversed(found), expected, (1.02, 1.1, 1.1, 1.1), strict=True):
        assert mine.dtype is other.dtype and mine.shape == other.shape
        assert error(mine, right) <= bound * error(other, right) + 4e-7


@pytest.mark.parametrize("dtype, adapter", MIXES)
@pytest.mark.parametrize("p", [0.05, 0.5])
def test_dropout(dtype, adapter, p):
    """Peft's mask, by which codes and outliers are not touched, and no larger errors."""
    theirs = model([(200, 320)], adapter=adapter, threshold=6.0, lora_dropout=p)
    x, dy = inputs(40, 320, 200, dtype)
    with torch.no_grad():
        theirs(x)
    expected = exact(layers(theirs)[0], x, dy, noise_of(layers(theirs)[0], x, 5).double())
    with fused_calls() as calls:
        found = [run(wrapped, x, dy, seed=5) for wrapped in (theirs, fused_copy(theirs))]
    assert calls == ["trained"]
    for mine, other, right, bound in zip(*reversed(found), expected, (1.02, 1.1, 1.1, 1.1), strict=True):
        assert mine.dtype is other.dtype and mine.shape == other.shape
        assert error(mine, right) <= bound * error(other, right) + 4e-7


@pytest.mark.parametrize("bias", [False, True])
def test_float32_is_what_peft_gives(bias):
    """Nothing is rounded to 16 bits: but for the order of two sums the same, with a graph and without, in eval, too."""
    theirs = model([(96, 128), (64, 96)], bias=bias, threshold=6.0)
    ours = fused_copy(theirs)
    x, dy = inputs(9, 128, 64, torch.float32)
    for mine, other in zip(run(ours, x, dy), run(theirs, x, dy), strict=True):
        assert torch.allclose(mine, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))
    with torch.no_grad(), fused_calls() as calls:
        assert torch.allclose(ours.eval()(x), theirs.eval()(x), rtol=1e-4, atol=1e-4)
    assert calls == ["no gradient"] * 2


def test_a_wrong_scale_is_seen(monkeypatch):
    """The tests above are able to fail."""
    from bitshard.lora import product

    scaled = product.scaled
    monkeypatch.setattr(product, "scaled", lambda left, right, scale: scaled(left, right, 1.02 * scale))
    theirs = model([(200, 320)], threshold=6.0)
    x, dy = inputs(40, 320, 200, torch.float32)
    expected = exact(layers(theirs)[0], x, dy)
    assert error(run(fused_copy(theirs), x, dy)[1], expected[1]) > 100 * error(run(theirs, x, dy)[1], expected[1])


def test_second_derivatives():
    wrapped = model(threshold=0.0)
    found = []
    for one in (wrapped, fused_copy(wrapped)):
        x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()
        (dx,) = torch.autograd.grad(one(x).pow(3).sum(), x, create_graph=True)
        dx.square().sum().backward()
        found.append([x.grad, *[p.grad for p in one.parameters() if p.grad is not None]])
    for mine, other in zip(*found, strict=True):
        assert torch.allclose(mine, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


def test_the_column_that_fsdp_shards():
    """A weight in the form that FSDP shards gives the bits of one that is whole."""
    wrapped = fused_copy(model(threshold=6.0))
    x, dy = inputs(9, 128, 96, torch.bfloat16)
    before = run(wrapped, x, dy)
    assert layers(wrapped)[0].base_layer.packed_weight.enter()
    with fused_calls() as calls:
        found = run(wrapped, x, dy)
    assert calls == ["trained"] and all(map(torch.equal, found, before))


def test_fused_and_back():
    """The report, names and pickles; state dicts stay peft's; 4-bit and int8 layers in one model."""
    wrapped = model([(96, 128), (64, 96)], threshold=6.0)
    before = wrapped.state_dict()
    assert str(lora.fuse(wrapped)) == "2 LoRA layers: 2 fused"
    assert wrapped.state_dict().keys() == before.keys() and "lora.Linear8bitLt(" in repr(wrapped)
    x = torch.randn(3, 128)
    y = wrapped(x)
    for twin in (copy.deepcopy(wrapped), pickled(wrapped)):
        assert len(lora.report(twin).fused) == 2 and torch.equal(twin(x), y)
    assert lora.unfuse(wrapped) == 2
    assert lora.report(wrapped).reasons == {"fuse has not been called": 2}
    assert all(type(layer) is peft.tuners.lora.bnb.Linear8bitLt for layer in layers(wrapped))


def test_what_is_left_to_peft(monkeypatch):
    """A float weight, dropout of everything, a replaced forward: peft's bits."""
    from bitshard.nn.linear8bit import Linear8bitLt

    theirs, plain = model(threshold=6.0), Linear8bitLt.forward
    x, _ = inputs(5, 128, 96, torch.float32)
    for change in ("float", "dropout", "forward"):
        ours = fused_copy(theirs)
        (layer,) = layers(ours)
        if change == "float":
            layer.base_layer = Linear8bitLt(128, 96, has_fp16_weights=True, threshold=6.0).requires_grad_(False)
        elif change == "dropout":
            layer.lora_dropout["default"] = torch.nn.Dropout(1.0)
        else:
            monkeypatch.setattr(Linear8bitLt, "forward", lambda self, x: plain(self, x))
            assert lora.report(ours).reasons == {"the forward of Linear8bitLt has been replaced": 1}
        with fused_calls() as calls:
            torch.manual_seed(0)
            y = ours(x)
        assert not calls, change
        lora.unfuse(ours)
        torch.manual_seed(0)
        assert torch.equal(ours(x), y)
