"""Fused models through what peft, accelerate and transformers do with a model: switch, merge, save, copy, train."""

import copy
import functools
import pickle
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

peft = pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

import bitsandbytes as bnb  # noqa: E402
import datasets  # noqa: E402
from bitshard import functional, lora  # noqa: E402
from bitshard.lora.layer import FusedLinear4bit, Peft  # noqa: E402
from helpers.bytes import same_bytes  # noqa: E402
from helpers.copies import pickled, saved  # noqa: E402
from helpers.llama import TOKENS, load_4bit  # noqa: E402
from helpers.lora import fused_calls, fused_copy, layers, model, randomize, run  # noqa: E402
from helpers.versions import transformers_takes_peft  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

LINEARS = 7  # of the decoder layer of helpers/llama.py


def adapted(folder, fuse=False, **options):
    transformers.set_seed(3)
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    found = peft.get_peft_model(load_4bit(folder), peft.LoraConfig(**options))
    assert not fuse or len(lora.fuse(found).fused) == LINEARS
    return found


def tokens(rows=2, length=12):
    return torch.randint(0, TOKENS, (rows, length), generator=torch.Generator().manual_seed(1))


def outputs(wrapped):
    """Logits, and whether any layer was fused."""
    with fused_calls() as calls, torch.no_grad():
        return wrapped(input_ids=tokens()).logits, len(calls)


def assert_alike(theirs, ours, calls=LINEARS):
    """The logits of peft's model, by `calls` fused calls."""
    expected, none = outputs(theirs)
    found, seen = outputs(ours)
    assert (none, seen) == (0, calls)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def assert_same_state(theirs, ours):
    states = theirs.state_dict(), ours.state_dict()
    assert list(states[0]) == list(states[1])
    for key, value in states[0].items():
        assert same_bytes(value, states[1][key]), key


# ---- what peft does ----


def add(wrapped):
    torch.manual_seed(4)
    wrapped.add_adapter(
        "other", peft.LoraConfig(r=2, lora_alpha=3, use_rslora=True, target_modules=["q_proj", "up_proj"])
    )
    randomize(wrapped)


def each(method, *args):
    def step(wrapped):
        for layer in layers(wrapped):
            getattr(layer, method)(*args)

    return step


# what is done, one after the other, to a fused model and to peft's, and how many of the 7 calls are fused behind it
STEPS = [
    ("an adapter is added", add, 7),
    ("it is switched to", lambda m: m.set_adapter("other"), 2),
    ("and back", lambda m: m.set_adapter("default"), 7),
    ("both at once", lambda m: m.base_model.set_adapter(["default", "other"]), 0),
    ("one", lambda m: m.base_model.set_adapter(["default"]), 7),
    ("scaled", each("scale_layer", 3.0), 7),
    ("unscaled", each("unscale_layer"), 7),
    ("set", each("set_scale", "default", 0.25), 7),
    ("to an integer", lambda m: [layer.scaling.update(default=2) for layer in layers(m)], 7),
    ("off", lambda m: m.base_model.disable_adapter_layers(), 0),
    ("on", lambda m: m.base_model.enable_adapter_layers(), 7),
    ("merged", lambda m: m.merge_adapter(), 0),
    ("unmerged", lambda m: m.unmerge_adapter(), 7),
    ("weighted", lambda m: m.add_weighted_adapter(["default"], [0.5], "weaker", combination_type="linear"), 7),
    ("of half the weight", lambda m: m.set_adapter("weaker"), 7),
    ("deleted", lambda m: m.delete_adapter("weaker"), 7),
    ("frozen", lambda m: m.set_adapter("other", inference_mode=True), 2),
    ("renewed", lambda m: (m.delete_adapter("default"), m.set_adapter("other")), 2),
    ("in bf16 weights", lambda m: m.to(torch.bfloat16), 2),
    ("in fp32 again", lambda m: m.to(torch.float32), 2),
    ("merged and unloaded", lambda m: m.merge_and_unload(), 0),
]


@pytest.mark.filterwarnings("ignore")
def test_everything_peft_does_to_a_model(folder):
    """After each step the logits are peft's, the state dict is peft's byte for byte, and so many calls are fused."""
    theirs = adapted(folder)
    randomize(theirs)
    ours = fused_copy(theirs)
    for name, step, calls in STEPS:
        pair = [step(wrapped) for wrapped in (theirs, ours)]
        if name == "merged and unloaded":
            theirs, ours = pair
            assert not layers(ours) and type(ours) is transformers.LlamaForCausalLM
        try:
            bound = 2e-2 if name == "in bf16 weights" else 1e-5
            (expected, none), (found, seen) = outputs(theirs), outputs(ours)
            assert (none, seen) == (0, calls)
            assert (found - expected).abs().max() <= bound * expected.abs().max()
            assert_same_state(theirs, ours)
        except AssertionError as error:
            raise AssertionError(f"after: {name}") from error


@pytest.mark.filterwarnings("ignore")
def test_layers_that_are_added_later(folder):
    """A new adapter on modules without one makes layers of peft; `fuse` again fuses them too."""
    wrapped = adapted(folder, target_modules=["q_proj"])
    assert str(lora.fuse(wrapped)) == "1 LoRA layers: 1 fused"
    wrapped.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"]))
    wrapped.set_adapter("other")
    assert outputs(wrapped)[1] == 1
    assert str(lora.report(wrapped)) == "2 LoRA layers: 1 fused, 1 left to peft (1: fuse has not been called)"
    assert str(lora.fuse(wrapped)) == "2 LoRA layers: 2 fused" and outputs(wrapped)[1] == 2


@transformers_takes_peft
def test_adapters_of_transformers(folder):
    """`model.add_adapter` of transformers, without a model of peft around."""
    wrapped = load_4bit(folder)
    wrapped.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    assert str(lora.fuse(wrapped)) == "2 LoRA layers: 2 fused" and outputs(wrapped)[1] == 2
    wrapped.disable_adapters()
    assert outputs(wrapped)[1] == 0


def test_the_classes_and_names_are_those_of_peft(folder):
    theirs, ours = adapted(folder), adapted(folder, fuse=True)
    assert repr(theirs) == repr(ours)
    assert [*theirs.state_dict()] == [*ours.state_dict()]
    assert all(isinstance(layer, Peft) for layer in layers(ours))
    assert theirs.get_layer_status() == ours.get_layer_status() and theirs.get_model_status() == ours.get_model_status()
    before = [dict(vars(layer)) for layer in layers(theirs)]
    lora.fuse(theirs)
    assert lora.unfuse(theirs) == LINEARS and lora.unfuse(theirs) == 0
    for layer, attributes in zip(layers(theirs), before, strict=True):
        assert type(layer) is Peft and vars(layer).keys() == attributes.keys()
        assert all(vars(layer)[name] is value for name, value in attributes.items())


def test_fuse_twice_and_unfuse(folder):
    theirs = adapted(folder)
    randomize(theirs)
    ours = fused_copy(theirs)
    first, second = lora.fuse(ours), lora.fuse(ours)
    assert first == second and len(first.fused) == LINEARS and not first.left and first.reasons == {}
    assert str(first) == "7 LoRA layers: 7 fused"
    assert_alike(theirs, ours)
    lora.unfuse(ours)
    (expected, _), (found, calls) = outputs(theirs), outputs(ours)
    assert torch.equal(expected, found) and calls == 0


def test_a_head_and_embeddings_are_left(folder):
    """LoRA on what is not 4-bit stays peft's, and the report says so."""
    wrapped = adapted(folder, target_modules=["q_proj", "lm_head", "embed_tokens"])
    report = lora.fuse(wrapped)
    assert str(report) == "3 LoRA layers: 1 fused, 2 left to peft (2: its weight is not quantized)"
    assert report.reasons == {"its weight is not quantized": 2}
    assert outputs(wrapped)[1] == 1


def casts_of_adapters(wrapped, again):
    """Casts of A and B and of their gradients in a step under autocast to bfloat16; `again`: with checkpointing."""
    x = torch.randn(3, 128, dtype=torch.bfloat16, requires_grad=True)

    def step():
        wrapped.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = checkpoint(wrapped, x, use_reentrant=False) if again else wrapped(x)
        y.sum().backward()

    step()
    with fused_calls() as calls, profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        step()
    assert calls == ["trained"] * (2 + 2 * again)
    shapes = {tuple(p.shape) for p in wrapped.parameters() if p.requires_grad}
    cast = [event for event in seen.events() if event.name == "aten::_to_copy"]
    return sum(tuple(event.input_shapes[0]) in shapes for event in cast)


@pytest.mark.parametrize("threshold", [None, 6.0], ids=["4-bit", "int8"])
def test_what_float32_adapters_cost(threshold):
    """The report counts the casts that a step makes; with adapters of the products' dtype there are none to count."""
    wrapped = model([(96, 128), (64, 96)], torch.bfloat16, threshold=threshold)
    for layer in layers(wrapped) if threshold else ():
        layer.base_layer.packed_weight.dtype = torch.bfloat16  # as of a model that is loaded in it
    report = lora.fuse(wrapped)
    assert report.float32 == {"bfloat16": 2}
    found = [casts_of_adapters(wrapped, again) for again in (False, True)]
    assert [report.casts, report.casts_checkpointed] == found == [8, 12]
    assert "2 float32 adapters on bfloat16 products: under autocast 8 casts a step, 12 with" in str(report)
    assert "autocast_adapter_dtype=False" in str(report) and "p.data = p.data.to(torch.bfloat16)" in str(report)
    for p in wrapped.parameters():
        if p.requires_grad:
            p.data = p.data.to(torch.bfloat16)
    assert [casts_of_adapters(wrapped, again) for again in (False, True)] == [0, 0]
    report = lora.report(wrapped)
    assert report.float32 == {} and report.casts == 0 and str(report) == "2 LoRA layers: 2 fused"


def test_adapters_that_had_better_stay_in_float32():
    """float16 ones, which torch's GradScaler refuses, are not advised; float32 products cast nothing."""
    report = lora.fuse(model([(96, 128), (64, 96)], torch.float16))
    assert report.float32 == {"float16": 2} and report.casts == 8
    assert str(report).endswith("8 casts a step, 12 with gradient checkpointing")
    assert lora.fuse(model()).float32 == {}
    lora.unfuse(wrapped := fused_copy(model(compute=torch.bfloat16)))
    assert lora.report(wrapped).float32 == {}, "peft's own layers"


def test_the_line_that_changes_it():
    """What the report names: autocast_adapter_dtype=False gives adapters of 4-bit layers their compute dtype."""
    base = torch.nn.Sequential(bnb.nn.Linear4bit(128, 96, compute_dtype=torch.bfloat16, quant_type="nf4")).to("cpu")
    base.is_loaded_in_4bit = True
    config = peft.LoraConfig(target_modules=["0"])
    wrapped = peft.get_peft_model(base.requires_grad_(False), config, autocast_adapter_dtype=False)
    assert lora.fuse(wrapped).float32 == {}


@pytest.mark.filterwarnings("ignore")
def test_other_tuners_are_left(folder):
    adalora = peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="its class is SVDLinear4bit"):
        lora.fuse(peft.get_peft_model(load_4bit(folder), adalora))
    with pytest.raises(ValueError, match="no LoRA layers"):
        lora.fuse(peft.get_peft_model(load_4bit(folder), peft.IA3Config(task_type="CAUSAL_LM")))


def test_what_cannot_be_fused_is_an_error(folder):
    with pytest.raises(TypeError, match="model is a str, expected a torch module"):
        lora.fuse("model")
    for model_of in (lambda: load_4bit(folder), lambda: torch.nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="has no LoRA layers; call it behind"):
            lora.fuse(model_of())
    dense = transformers.AutoModelForCausalLM.from_pretrained(folder)
    dense = peft.get_peft_model(dense, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(
        ValueError, match=r"none of the 1 LoRA layers .*its weight is not quantized.*load_in_4bit=True.*work"
    ):
        lora.fuse(dense)
    assert lora.unfuse(dense) == 0 and lora.unfuse(torch.nn.Linear(2, 2)) == 0


def test_int8_layers(folder):
    """Of a model that is loaded with load_in_8bit all are fused; the loss is peft's."""
    eight = transformers.BitsAndBytesConfig(load_in_8bit=True)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=eight, device_map="cpu")
    wrapped = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    randomize(wrapped)
    ids = torch.arange(24).view(2, 12)
    expected = wrapped(ids, labels=ids).loss
    assert str(lora.fuse(wrapped)) == "2 LoRA layers: 2 fused"
    assert torch.allclose(wrapped(ids, labels=ids).loss, expected, rtol=1e-4)


def test_a_4bit_weight_of_another_library(folder, monkeypatch):
    wrapped = adapted(folder, target_modules=["q_proj"])
    (layer,) = layers(wrapped)
    layer.base_layer = torch.nn.Linear(48, 48)
    with pytest.raises(ValueError, match="its quantized weight is of another library"):
        lora.fuse(wrapped)


def test_another_peft_is_left(folder):
    """A release whose layers lack what is read here is not fused, and the report says what is missing."""
    wrapped = adapted(folder, target_modules=["q_proj"])
    (layer,) = layers(wrapped)
    del layer.lora_variant
    with pytest.raises(ValueError, match="this release of peft has no lora_variant"):
        lora.fuse(wrapped)


def test_what_replaced_peft_before_the_import_is_called():
    """A forward of peft's class that somebody replaced earlier stays the one that is called."""
    code = (
        "import torch, functools, warnings; warnings.simplefilter('ignore'); from helpers.lora import *\n"
        "from peft.tuners.lora import bnb; before = bnb.Linear4bit.forward\n"
        "bnb.Linear4bit.forward = functools.wraps(before)(lambda self, x: before(self, x) + 100)\n"
        "ours = model(); report = lora.fuse(ours); print(float(ours(torch.randn(3, 128)).min()) > 50, report)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    said = "1 LoRA layers: 0 fused, 1 left to peft (1: the forward of Linear4bit has been replaced)"
    assert done.stdout.strip() == f"True {said}", done.stdout + done.stderr


def test_without_peft():
    """bitshard and bitshard.lora import without peft and do not import it; `fuse` says that it is missing."""
    code = (
        "import sys, bitshard.lora, torch; assert not [name for name in sys.modules if name.startswith('peft')]\n"
        "sys.modules['peft'] = None\n"
        "try: bitshard.lora.fuse(torch.nn.Linear(2, 2))\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "bitshard.lora.fuse is for models of peft, which is not installed", done.stderr


# ---- copies and files ----


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
def test_copies_are_fused(copied):
    """Each is a model of its own: what one is trained to is not seen by the other."""
    wrapped = model()
    lora.fuse(wrapped)
    other = copied(wrapped)
    x, dy = torch.randn(5, 128), torch.randn(5, 96)
    with fused_calls() as calls:
        first, second = run(wrapped, x, dy), run(other, x, dy)
    assert len(calls) == 2 and all(map(torch.equal, first, second))
    assert_same_state(wrapped, other)
    with torch.no_grad():
        layers(other)[0].lora_B["default"].weight.mul_(2)
    assert torch.equal(wrapped(x), first[0]) and not torch.allclose(other(x), first[0])
    assert lora.unfuse(other) == 1 and type(layers(wrapped)[0]) is FusedLinear4bit


def test_pickles_and_prints_name_the_layer_as_ever():
    wrapped = fused_copy(model())
    assert b"FusedLinear4bit" not in pickle.dumps(wrapped) and "lora.Linear4bit(" in repr(wrapped)


def test_a_shallow_copy_is_fused():
    wrapped = model()
    lora.fuse(wrapped)
    (layer,) = layers(wrapped)
    x = torch.randn(5, 128)
    with fused_calls() as calls:
        assert torch.equal(copy.copy(layer)(x), layer(x))
    assert len(calls) == 2


def test_adapters_saved_and_loaded(folder, tmp_path):
    """The files are peft's byte for byte, and are loaded into fused models as into others."""
    theirs, ours = adapted(folder), adapted(folder, fuse=True)
    for wrapped, name in ((theirs, "theirs"), (ours, "ours")):
        torch.manual_seed(8)
        randomize(wrapped)
        wrapped.save_pretrained(tmp_path / name)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "theirs" / file).read_bytes() == (tmp_path / "ours" / file).read_bytes()
    loaded = peft.PeftModel.from_pretrained(load_4bit(folder), tmp_path / "ours")
    assert len(lora.fuse(loaded).fused) == LINEARS
    assert_alike(theirs, loaded)
    other = adapted(folder, fuse=True)
    other.load_adapter(tmp_path / "theirs", "again")
    other.set_adapter("again")
    assert_alike(theirs, other)
    third = adapted(folder, fuse=True)
    peft.set_peft_model_state_dict(third, peft.get_peft_model_state_dict(theirs))
    assert_alike(theirs, third)


# ---- who else replaces a forward ----


@pytest.mark.parametrize("order", ["hook first", "fuse first"])
def test_hooks_of_accelerate_on_the_layer(order):
    """They replace `forward` of the instance: what they do is done, around a fused call; and they come off."""
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    class Doubles(ModelHook):
        def post_forward(self, module, output):
            return 2 * output

    theirs = model()
    ours = copy.deepcopy(theirs)
    (layer,) = layers(ours)
    steps = [lambda: add_hook_to_module(layer, Doubles()), lambda: lora.fuse(ours)]
    for step in steps if order == "hook first" else reversed(steps):
        step()
    x = torch.randn(5, 128)
    expected = theirs(x)
    with fused_calls() as calls:
        found = ours(x)
    # a hook that was there first holds peft's forward
    assert len(calls) == (order == "fuse first")
    assert torch.allclose(found, 2 * expected, rtol=1e-5, atol=1e-5)
    lora.unfuse(ours)
    with fused_calls() as calls:
        assert torch.equal(ours(x), 2 * expected)
        remove_hook_from_module(layer)
        assert torch.equal(ours(x), expected)
    assert not calls


def test_another_forward_on_the_layer():
    """A forward that foreign code puts on the instance is called, fused or not, as peft's would be."""
    wrapped = fused_copy(model())
    (layer,) = layers(wrapped)
    layer.forward = lambda x: x + 1
    x = torch.randn(5, 128)
    with fused_calls() as calls:
        assert torch.equal(wrapped(x), x + 1)
    assert not calls
    assert lora.report(wrapped).left == {"base_model.model.0": "another forward on the layer"}


def test_hooks_on_the_layer_see_what_they_saw():
    wrapped = fused_copy(model())
    (layer,) = layers(wrapped)
    seen = []
    layer.register_forward_hook(lambda module, args, y: seen.append("y"))
    layer.register_full_backward_hook(lambda module, dx, dy: seen.append("dx"))
    with fused_calls() as calls:
        run(wrapped, torch.randn(5, 128), torch.randn(5, 96))
    assert seen == ["y", "dx"] and calls == ["trained"]


# ---- unsloth, played by stand-ins that do to a model what its get_peft_model does ----


def read_around(layer, x):
    """y of a LoRA layer out of its weights, without calling it or one of its modules."""
    base, scale = layer.base_layer.weight, layer.scaling["default"]
    dense = functional.dequantize_4bit(base.data, base.quant_state).to(x.dtype)
    A, B = (part["default"].weight.to(x.dtype) for part in (layer.lora_A, layer.lora_B))
    return x @ dense.t() + scale * (x @ A.t()) @ B.t()


def of_unsloth(function):
    """`function`, as unsloth.kernels.fast_lora would have it."""
    function.__module__ = "unsloth.kernels.fast_lora"
    return function


@of_unsloth
def apply_lora_mlp_swiglu(self, x, inplace=True):
    up = torch.nn.functional.silu(read_around(self.gate_proj, x)) * read_around(self.up_proj, x)
    return read_around(self.down_proj, up)


@of_unsloth
def apply_lora_qkv(self, x, inplace=True):
    return tuple(read_around(layer, x) for layer in (self.q_proj, self.k_proj, self.v_proj))


@of_unsloth
def apply_lora_o(self, x):
    return read_around(self.o_proj, x)


def patched_by_unsloth(wrapped, mlp=apply_lora_mlp_swiglu):
    """The blocks' functions in the places where unsloth puts them."""
    (decoder,) = wrapped.base_model.model.model.layers
    decoder.mlp.forward = types.MethodType(mlp, decoder.mlp)
    decoder.self_attn.apply_qkv, decoder.self_attn.apply_o = apply_lora_qkv, apply_lora_o
    return wrapped


ITS_OWN = "unsloth's own kernels, which never call them"


def test_what_unsloth_computes_is_said(folder):
    """fuse and report: no layer is fused, none is peft's, and whose kernels are used."""
    expected, _ = outputs(adapted(folder))
    wrapped = patched_by_unsloth(adapted(folder))
    report = lora.fuse(wrapped)
    assert str(report) == str(lora.report(wrapped)) == f"7 LoRA layers: 0 fused, 7 computed by {ITS_OWN}"
    assert len(report.elsewhere) == LINEARS and not report.left and not report.fused
    found, calls = outputs(wrapped)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert calls == 4  # transformers' attention, which unsloth replaces by one that asks for apply_qkv and apply_o
    assert lora.unfuse(wrapped) == LINEARS


@pytest.mark.parametrize("mlp", [functools.partial(apply_lora_mlp_swiglu, inplace=False), lambda self, x: x])
def test_a_forward_of_a_block_is_unsloth_s_or_somebody_s(folder, mlp):
    """Of Cohere it is a partial; another's forward of an MLP is no business of the report."""
    wrapped = adapted(folder)
    (decoder,) = wrapped.base_model.model.model.layers
    decoder.mlp.forward = types.MethodType(mlp, decoder.mlp)
    unsloths = isinstance(mlp, functools.partial)
    assert len(lora.fuse(wrapped).elsewhere) == 3 * unsloths and len(lora.report(wrapped).fused) == 7 - 3 * unsloths


@pytest.mark.parametrize("cls", [Peft, bnb.nn.Linear4bit], ids=["of peft", "of bitsandbytes"])
def test_a_class_s_forward_that_unsloth_replaced(folder, monkeypatch, cls):
    """Importing unsloth replaces that of bitsandbytes' layer, FastModel that of peft's."""
    wrapped = adapted(folder, target_modules=["q_proj"])
    forward = cls.forward
    replaced = lambda self, *args, **kwargs: forward(self, *args, **kwargs)  # noqa: E731
    replaced.__module__ = "unsloth_compiled_module_peft" if cls is Peft else "unsloth_zoo.temporary_patches"
    monkeypatch.setattr(cls, "forward", replaced)
    assert lora.fuse(wrapped).reasons == {"the forward of Linear4bit has been replaced by unsloth": 1}
    assert outputs(wrapped)[1] == 0


# ---- training ----


def rows():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, TOKENS, (2, 16), generator=generator).tolist() * 8
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": ids})


def trained(wrapped, folder, **options):
    """(losses, gradient norms, adapter, fused calls) of transformers' Trainer with clipped gradients."""
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=5,
        use_cpu=True,
        **options,
    )
    trainer = transformers.Trainer(model=wrapped, args=settings, train_dataset=rows())
    with fused_calls() as calls:
        trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [entry["loss"] for entry in log], [entry["grad_norm"] for entry in log], len(calls)


KINDS = {
    "fp32": {},
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "accumulation": {"gradient_accumulation_steps": 2},
    "autocast": {"bf16": True},
    "kbit": {"gradient_checkpointing": True},
}
# relative, of each loss and gradient norm; with a scale wrong by a fiftieth they are further apart
BOUNDS = {"autocast": 4e-3}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_trainer(folder, tmp_path, kind, planted):
    """The losses and gradient norms of peft's layers; a wrong scale in B is seen."""
    results = {}
    for name in ("peft", "fused", "planted"):
        wrapped = load_4bit(folder)
        if kind == "kbit":
            wrapped = peft.prepare_model_for_kbit_training(wrapped)
        transformers.set_seed(3)
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        wrapped = peft.get_peft_model(wrapped, config)
        torch.manual_seed(8)
        randomize(wrapped)
        if name != "peft":
            lora.fuse(wrapped)
        if name == "planted":
            planted()
        results[name] = trained(wrapped, tmp_path, **KINDS[kind])
    (losses, norms, none), (ours, our_norms, calls), (wrong, wrong_norms, _) = results.values()
    assert len(losses) == 4 and losses[-1] < losses[0] and none == 0 and calls >= 4 * LINEARS
    bound = BOUNDS.get(kind, 1e-5)
    assert ours == pytest.approx(losses, rel=bound) and our_norms == pytest.approx(norms, rel=10 * bound)
    assert wrong != pytest.approx(losses, rel=bound) or wrong_norms != pytest.approx(norms, rel=10 * bound)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prepared_for_kbit_training(folder, dtype):
    """fp32 norms over a model that computes in `dtype`, adapters in fp32 and as trl casts them: gradients alike."""
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=True
    )
    for adapters in (torch.float32, torch.bfloat16):
        base = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, quantization_config=config, device_map={"": "cpu"}
        )
        base = peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
        theirs = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
        randomize(theirs, adapters)
        ours = fused_copy(theirs)
        gradients = []
        for wrapped in (theirs, ours):
            with fused_calls() as calls:
                wrapped(input_ids=tokens(), labels=tokens()).loss.backward()
            gradients.append([p.grad.float() for p in wrapped.parameters() if p.requires_grad])
            assert len(calls) == (LINEARS if wrapped is ours else 0)
        bound = 1e-4 if dtype is adapters is torch.float32 else 0.1
        for mine, other in zip(*gradients, strict=True):
            assert (mine - other).norm() <= bound * other.norm()
