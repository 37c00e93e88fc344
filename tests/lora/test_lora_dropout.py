"""Dropout in fused LoRA layers: the draws of peft's dropout, and the numbers of a dense layer with the same mask."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

peft = pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from bitshard import lora  # noqa: E402
from bitshard.lora import dropout as module  # noqa: E402
from bitshard.lora.dropout import Dropout  # noqa: E402
from bitshard.lora.layer import dropped_dtype  # noqa: E402
from helpers.lora import (  # noqa: E402
    DTYPES,
    Checkpointed,
    error,
    exact,
    fused_calls,
    fused_copy,
    layers,
    model,
    noise_of,
    randomize,
    run,
    saved,
)
from torch.utils.checkpoint import set_checkpoint_early_stop  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
# dtype of x, of the product with W, of A and B, of autocast
MIXES = [
    *((name, name, name, None) for name in DTYPES),
    ("bf16", "bf16", "fp32", None),
    ("fp32", "bf16", "fp32", None),
    ("fp32", "bf16", "bf16", None),
    ("bf16", "bf16", "fp32", "bf16"),
    ("fp32", "bf16", "fp32", "bf16"),
    ("fp32", "bf16", "bf16", "bf16"),
]
SEED = 11
ROUNDINGS = 1e-7  # relative errors that the order of float32 sums explains


def layer_and_data(mix, p, rows=(3, 11), **options):
    """peft's model of one layer [200, 320] with dropout p, x, dy and autocast's dtype."""
    dtype, compute, adapter, autocast = (DTYPES.get(name) for name in mix)
    options = {"r": 8, "lora_alpha": 13.6, "lora_dropout": p, **options}
    theirs = model([(200, 320)], compute, adapter, **options)
    return theirs, torch.randn(*rows, 320).to(dtype), torch.randn(*rows, 200).to(dtype), autocast


def errors(mix, p):
    """([peft's errors], [the fused layer's]) of y, dx, dA and dB against a dense layer in float64 with that mask."""
    theirs, x, dy, autocast = layer_and_data(mix, p)
    noise = noise_of(layers(theirs)[0], x, SEED).double()
    assert 0.3 * p < (noise == 0).double().mean() < 1.7 * p
    expected, found, after = exact(layers(theirs)[0], x, dy, noise), [], []
    with fused_calls() as calls:
        for wrapped in (theirs, fused_copy(theirs)):
            found.append(run(wrapped, x, dy, autocast, SEED))
            after.append(torch.get_rng_state())
    assert calls == ["trained"] and torch.equal(*after)
    for mine, other in zip(*found, strict=True):
        assert mine.dtype is other.dtype and mine.shape == other.shape
    return [[error(*pair) for pair in zip(values, expected, strict=True)] for values in found]


def within(theirs, ours):
    """Whether errors are within the bounds that they have without dropout (tests/lora/test_lora.py)."""
    bounds = (1.02, 1.1, 1.1, 1.1)
    return all(mine <= bound * other + ROUNDINGS for mine, other, bound in zip(ours, theirs, bounds, strict=True))


def same(found, expected):
    return len(found) == len(expected) > 1 and all(map(torch.equal, found, expected))


# ---- numbers ----


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("p", [0.05, 0.5])
def test_errors_against_float64(mix, p):
    """One mask of torch's default generator, which is then where peft leaves it, and no larger errors than peft's."""
    theirs, ours = errors(mix, p)
    assert within(theirs, ours), (theirs, ours)


FAULTS = {
    "dx without the mask": ("add_gradient", lambda real: lambda self, dx, dropped, mask: dx.add_(dropped), {1}),
    "another mask in dx": ("add_gradient", lambda real: lambda *args: real(*args[:3], args[3].roll(1, 0)), {1}),
    "dA of x that is not dropped": ("again", lambda real: lambda self, x, mask: x.to(self.dtype), {2}),
    "another mask in dA": ("again", lambda real: lambda self, x, mask: real(self, x, mask.roll(1, 0)), {2}),
    "y of x that is not dropped": ("drop", lambda real: lambda self, x: (x.to(self.dtype), real(self, x)[1]), {0, 3}),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("mix", [MIXES[0], MIXES[1], MIXES[3]])
def test_a_planted_fault_is_seen(monkeypatch, mix, fault):
    """In the results that it spoils, and in no other."""
    name, planted, spoiled = FAULTS[fault]
    monkeypatch.setattr(Dropout, name, planted(getattr(Dropout, name)))
    theirs, ours = errors(mix, 0.3)
    wrong = {i for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)) if mine > 1.1 * other + ROUNDINGS}
    assert wrong == spoiled, (theirs, ours)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("p", [0.05, 0.1, 1 / 3, 0.9])
def test_the_bits_are_those_of_torchs_dropout(device, dtype, p):
    """x dropped, x dropped once more from the mask, gradients, and how far the generator goes; in every layout."""
    one = Dropout(p, dtype)
    whole = torch.randn(6, 50, 66, device=device).to(dtype)
    for x in (whole, whole[0].t(), whole[:, ::2, 1::3], whole[:1].expand(4, 50, 66), whole[0, 0, :1]):
        leaf = x.detach().requires_grad_()
        dy = torch.randn(x.shape, device=device).to(dtype)
        torch.manual_seed(SEED)
        expected = F.dropout(leaf, p, True)
        after = torch.rand(3, device=device)
        expected.backward(dy)
        torch.manual_seed(SEED)
        found, mask = one.drop(x)
        assert mask.dtype is torch.bool and torch.equal(torch.rand(3, device=device), after)
        assert torch.equal(found, expected) and torch.equal(one.again(x, mask), expected)
        dx = torch.zeros_like(x, memory_format=torch.contiguous_format)
        one.add_gradient(dx, dy, mask)
        assert torch.equal(dx, leaf.grad)


@pytest.fixture
def one_kernel(monkeypatch):
    """CUDA's ops, which a CPU has as well; there 1 / (1 - p) is not rounded to the dtype of x."""
    monkeypatch.setattr(module, "in_one_kernel", lambda x: True)


@pytest.mark.parametrize("mix", MIXES)
def test_the_ops_that_cuda_takes(mix, one_kernel):
    """Errors no larger than those of peft's layer whose dropout is made by the same ops."""
    p = 0.1
    theirs, x, dy, autocast = layer_and_data(mix, p)
    ours = fused_copy(theirs)
    layers(theirs)[0].lora_dropout["default"].forward = lambda x: torch.native_dropout(x, p, True)[0]
    noise = (noise_of(layers(theirs)[0], x, SEED) != 0).double() / (1 - p)
    expected = exact(layers(theirs)[0], x, dy, noise)
    with fused_calls() as calls:
        found = [run(wrapped, x, dy, autocast, SEED) for wrapped in (theirs, ours)]
    assert calls == ["trained"]
    theirs, ours = ([error(*pair) for pair in zip(values, expected, strict=True)] for values in found)
    assert within(theirs, ours), (theirs, ours)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_on_a_gpu(adapter, autocast):
    """Draws and numbers of peft's layer, with and without autocast, and a graph that draws anew in each replay."""
    theirs = model([(256, 320)], torch.bfloat16, adapter, lora_dropout=0.1).to("cuda")
    x, dy = torch.randn(64, 320, device="cuda").bfloat16(), torch.randn(64, 256, device="cuda").bfloat16()
    found, ours = [], fused_copy(theirs)
    for wrapped in (theirs, ours):
        torch.manual_seed(SEED)
        leaf = x.clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            y = wrapped(leaf)
        after = torch.rand(3, device="cuda")
        y.backward(dy)
        found.append([after, y.detach(), leaf.grad, *(p.grad for p in wrapped.parameters() if p.requires_grad)])
    assert torch.equal(found[0][0], found[1][0])
    assert all(error(mine, other) < 0.01 for mine, other in zip(*reversed(found), strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = ours(x)
    graph.replay()
    before = y.clone()
    graph.replay()
    assert not torch.equal(y, before)


def test_the_dtype_that_is_dropped(monkeypatch):
    """peft casts x before its dropout, unless CUDA's autocast is on or casts are turned off."""
    (layer,) = layers(fused_copy(model(adapter=torch.bfloat16, lora_dropout=0.1)))
    x, A = torch.randn(3, 128), layer.lora_A["default"].weight
    assert dropped_dtype(layer, x, A) is torch.bfloat16
    with peft.helpers.disable_input_dtype_casting(layer):
        assert dropped_dtype(layer, x, A) is torch.float32
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda: True)
    assert dropped_dtype(layer, x, A) is torch.float32


@pytest.mark.parametrize("trained", ["A", "B", "x", "A and B"])
@pytest.mark.parametrize("mix", [MIXES[0], MIXES[1], MIXES[3], MIXES[6]])
def test_gradients_of_a_part(mix, trained):
    """The bits that come with all of them."""
    theirs, x, dy, autocast = layer_and_data(mix, 0.2)
    ours = fused_copy(theirs)
    _, *expected = run(ours, x, dy, autocast, SEED)
    A, B = (part["default"].weight for part in (layers(ours)[0].lora_A, layers(ours)[0].lora_B))
    ours.zero_grad()
    A.requires_grad_("A" in trained), B.requires_grad_("B" in trained)
    x = x.clone().requires_grad_("x" in trained)
    torch.manual_seed(SEED)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        y = ours(x)
    y.backward(dy)
    for name, tensor, wanted in zip(("x", "A", "B"), (x, A, B), expected, strict=True):
        assert torch.equal(tensor.grad, wanted) if name in trained else tensor.grad is None


def test_higher_derivatives():
    """Gradient penalties and their gradients; not where x was cast and dropped, and only that is kept."""
    theirs, x, _, _ = layer_and_data(MIXES[0], 0.2)

    def derivatives(wrapped):
        leaf = x.clone().requires_grad_()
        inputs = (leaf, *(p for p in wrapped.parameters() if p.requires_grad))
        torch.manual_seed(SEED)
        first = torch.autograd.grad(wrapped(leaf).pow(4).mean(), inputs, create_graph=True)
        return [*(g.detach() for g in first), *torch.autograd.grad(sum(g.square().mean() for g in first), inputs)]

    with fused_calls() as calls:
        found = derivatives(fused_copy(theirs))
    assert calls == ["trained"]
    assert all(error(mine, other) < 1e-4 for mine, other in zip(found, derivatives(theirs), strict=True))
    theirs, x, _, _ = layer_and_data(MIXES[5], 0.2)
    with pytest.raises(RuntimeError, match="no second derivatives .*unfuse"):
        derivatives(fused_copy(theirs))


# ---- memory and launches ----


@pytest.mark.parametrize("trained", ["both", "A", "B"])
@pytest.mark.parametrize("mix", MIXES)
def test_no_more_is_saved_than_peft_saves(mix, trained):
    """In one dtype x, one byte an element, and x A^T; behind a cast to fewer bytes x dropped stands for x.

    Where x wants no gradient, x dropped and no mask; A, which is a parameter, is kept there, too.
    """
    theirs, x, _, autocast = layer_and_data(mix, 0.1)
    (layer,) = layers(theirs)
    layer.lora_A["default"].weight.requires_grad_(trained != "B")
    layer.lora_B["default"].weight.requires_grad_(trained != "A")
    ours, inner = fused_copy(theirs), 33 * 8 * x.element_size()
    if mix[0] == mix[2] and autocast is None and trained == "both":
        assert saved(ours, x)[1] == saved(theirs, x)[1] == x.nbytes + inner
    x.requires_grad_()
    mine, other = saved(ours, x, autocast), saved(theirs, x, autocast)
    assert mine[0] <= other[0] and mine[1] <= other[1] and mine[0] > 0, (mine, other)
    if mix[0] == mix[2] and autocast is None and trained == "both":
        assert mine[1] == x.nbytes + x.numel() + inner


COMPUTING = """linear_4bit linear_4bit_dgrad native_dropout native_dropout_backward mm addmm addmm_ mul add add_
addcmul_ clone""".split()


def computing(work):
    """Names of the ops that `work` calls to compute or to copy: on a GPU each is at least one launch."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()

    def names(event):
        name = event.name.split("::")[-1]
        return [name] if name in COMPUTING else [each for child in event.cpu_children for each in names(child)]

    return [each for event in profile.events() if event.cpu_parent is None for each in names(event)]


def test_launches_of_a_layer(one_kernel):
    """With CUDA's ops for dropout, bf16 and bf16 adapters: the numbers that docs/lora.md gives."""
    page = (Path(__file__).parents[2] / "docs/lora.md").read_text()
    for p, words in ((0.0, "without dropout"), (0.05, "with dropout")):
        theirs = model([(96, 128)], torch.bfloat16, torch.bfloat16, lora_dropout=p)
        ours, counts = fused_copy(theirs), []
        if p:
            layers(theirs)[0].lora_dropout["default"].forward = lambda x: torch.native_dropout(x, 0.05, True)[0]
        for wrapped in (theirs, ours):
            x, dy = torch.randn(5, 128).bfloat16().requires_grad_(), torch.randn(5, 96).bfloat16()
            found = []
            counts.append(len(computing(lambda x=x, wrapped=wrapped, found=found: found.append(wrapped(x)))))
            counts.append(len(computing(lambda dy=dy, found=found: found[0].backward(dy))))
        assert f"| {words} | {' | '.join(map(str, counts))} |" in page, counts
        assert counts[2] < counts[0] and counts[3] < counts[1]


# ---- when ----


@pytest.mark.parametrize("mix", [MIXES[0], MIXES[1], MIXES[3], MIXES[6]])
@pytest.mark.parametrize("form", ["reentrant", "early stop", "no early stop"])
@pytest.mark.parametrize("trained", ["both", "A", "B"])
def test_gradient_checkpointing(mix, form, trained):
    """The second forward draws the mask of the first: the bits that come without checkpointing."""
    dtype, compute, adapter, autocast = (DTYPES.get(name) for name in mix)
    wrapped = fused_copy(model([(128, 128)] * 2, compute, adapter, lora_dropout=0.05))
    for layer in layers(wrapped):
        layer.lora_A["default"].weight.requires_grad_(trained != "B")
        layer.lora_B["default"].weight.requires_grad_(trained != "A")
    x, dy = torch.randn(5, 128).to(dtype), torch.randn(5, 128).to(dtype)
    expected = run(wrapped, x, dy, autocast, SEED)
    region = Checkpointed(wrapped, use_reentrant=form == "reentrant")
    with set_checkpoint_early_stop(form == "early stop"), fused_calls() as calls:
        assert same(run(region, x, dy, autocast, SEED), expected) and len(calls) == 4
    region = Checkpointed(wrapped, use_reentrant=form == "reentrant", preserve_rng_state=False)
    assert not same(run(region, x, dy, autocast, SEED), expected), "another mask must be seen"


def test_training_and_evaluation():
    """Each step in training has a mask of its own; eval() has none, and without a graph training has one as well."""
    theirs, x, _, _ = layer_and_data(MIXES[0], 0.3)
    ours = fused_copy(theirs)
    assert str(lora.report(ours)) == "1 LoRA layers: 1 fused"
    with fused_calls() as calls:
        first, second = ours(x), ours(x)
        assert not torch.equal(first, second) and calls == ["trained"] * 2
        for wrapped in (theirs.eval(), ours.eval()):
            wrapped.dropped = wrapped(x).detach()
        assert torch.equal(ours(x).detach(), ours.dropped) and error(ours.dropped, theirs.dropped) < 1e-6
        ours.train(), theirs.train()
        del calls[:]
        with torch.no_grad():
            torch.manual_seed(SEED)
            expected = theirs(x)
            torch.manual_seed(SEED)
            found = ours(x)
        assert calls == ["no gradient"]
    assert error(found, expected) < 1e-6 < 1e-2 < error(found, ours.dropped)
    torch.manual_seed(SEED)
    assert torch.equal(ours(x).detach(), found)


def test_adapters_with_several_rates():
    """Each adapter drops by its own rate, whichever is active."""
    theirs, x, dy, _ = layer_and_data(MIXES[0], 0.5)
    for name, p in (("less", 0.1), ("none", 0.0)):
        theirs.add_adapter(name, peft.LoraConfig(r=4, target_modules=["0"], lora_dropout=p))
    randomize(theirs)
    ours = fused_copy(theirs)
    for name in ("less", "none", "default", "less"):
        found = []
        with fused_calls() as calls:
            for wrapped in (theirs, ours):
                wrapped.set_adapter(name)
                found.append([*run(wrapped, x, dy, seed=SEED), torch.get_rng_state().double()])
        assert calls == ["trained"] and all(error(a, b) < 1e-5 for a, b in zip(*found, strict=True)), name


@pytest.mark.parametrize("shape", [(0, 320), (2, 0, 320), (1, 320), (320,), (2, 1, 3, 320)])
def test_shapes(shape):
    """Of no rows nothing is drawn, as by torch."""
    theirs, _, _, _ = layer_and_data(MIXES[0], 0.5)
    x, dy = torch.randn(shape), torch.randn(*shape[:-1], 200)
    found = [[*run(wrapped, x, dy, seed=SEED), torch.rand(2)] for wrapped in (theirs, fused_copy(theirs))]
    for mine, other in zip(*reversed(found), strict=True):
        assert mine.shape == other.shape and torch.allclose(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16])
def test_layouts(layout, adapter):
    """torch draws in the order of memory, which is not that of the elements where x is transposed."""
    theirs = model(adapter=adapter, lora_dropout=0.5)
    x, dy = {
        "transposed": lambda: (torch.randn(128, 6).t(), torch.randn(96, 6).t()),
        "strided": lambda: (torch.randn(4, 2, 128)[:, 1], torch.randn(4, 192)[:, ::2]),
        "expanded": lambda: (torch.randn(128).expand(2, 3, 128), torch.ones(()).expand(2, 3, 96)),
    }[layout]()
    found = []
    for wrapped in (theirs, fused_copy(theirs)):
        torch.manual_seed(SEED)
        given = x.detach().requires_grad_()
        y = wrapped(given)
        trained = [given, *(p for p in wrapped.parameters() if p.requires_grad)]
        found.append([y.detach(), *torch.autograd.grad(y, trained, dy)])
    bound = 1e-5 if adapter is torch.float32 else 1e-2
    assert all(error(mine, other) < bound for mine, other in zip(*reversed(found), strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_come_through(value):
    """Where an element is dropped, too, as by torch: 0 times infinity is NaN."""
    theirs, x, dy, _ = layer_and_data(MIXES[0], 0.5)
    for target in (x, dy):
        target[0, 1, :4] = value
    found = [run(wrapped, x, dy, seed=SEED) for wrapped in (fused_copy(theirs), theirs)]
    for mine, other in zip(*found, strict=True):
        assert torch.equal(mine.isnan(), other.isnan()) and torch.equal(mine.isinf(), other.isinf())
        assert not mine.isfinite().all()


# ---- peft's way ----


def of_a_subclass(drops, monkeypatch):
    drops.__class__ = type("Dropout", (torch.nn.Dropout,), {"forward": lambda self, x: F.dropout(x, 0.9)})


def in_place(drops, monkeypatch):
    drops.inplace = True


def rate(p):
    def prepare(drops, monkeypatch):
        drops.p = p

    return prepare


def replaced_forward(drops, monkeypatch):
    monkeypatch.setattr(torch.nn.Dropout, "forward", lambda self, x: 2 * x)


def replaced_function(drops, monkeypatch):
    monkeypatch.setattr(F, "dropout", lambda x, p, training, inplace: 2 * x)


def hooked(drops, monkeypatch):
    drops.register_forward_hook(lambda module, args, y: 2 * y)


CHANGES = {
    "subclass": (of_a_subclass, "its dropout is a Dropout"),
    "in place": (in_place, "its dropout is made in place"),
    "1": (rate(1.0), "its dropout has p = 1.0"),
    "an integer": (rate(1), "its dropout has p = 1"),
    "above 1": (rate(1.5), "its dropout has p = 1.5"),
    "NaN": (rate(float("nan")), "its dropout has p = nan"),
    "a tensor": (rate(torch.tensor(0.25)), "its dropout has p = 0.25"),
    "forward of the class": (replaced_forward, "torch's dropout has been replaced"),
    "torch's function": (replaced_function, "torch's dropout has been replaced"),
    "hook": (hooked, "hooks on its dropout"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_dropouts_that_are_left_to_peft(name, monkeypatch):
    """peft's bits or peft's error, and the report says why; in eval(), where nothing is dropped, the layer is fused."""
    prepare, said = CHANGES[name]
    theirs = model(lora_dropout=0.3)
    ours, results = fused_copy(theirs), []
    for wrapped in (theirs, ours):
        prepare(layers(wrapped)[0].lora_dropout["default"], monkeypatch)
        torch.manual_seed(SEED)
        x = torch.randn(5, 128)
        with fused_calls() as calls, torch.no_grad():
            try:
                results.append([wrapped(x), x])
            except (ValueError, RuntimeError) as error:
                results.append(str(error))
        assert not calls
    ours_result, theirs_result = reversed(results)
    assert ours_result == theirs_result if type(ours_result) is str else same(ours_result, theirs_result)
    assert lora.report(ours).reasons == {said: 1}
    with fused_calls() as calls, torch.no_grad():
        ours.eval()(torch.randn(5, 128))
    assert calls == ([] if name in ("subclass", "hook") else ["no gradient"])
