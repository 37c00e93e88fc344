"""Adapters of peft merged into 4-bit and int8 layers and taken out again: the bytes and scales from before, every time.

Two ranks of FSDP2 are in fsdp/train.py (test_fsdp_train.py); checkpoints with merged adapters in test_fsdp_save.py.
"""

import copy
import functools
import gc

import pytest
import torch

peft = pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import bitsandbytes as bnb  # noqa: E402
from bitshard import experts, fsdp, lora  # noqa: E402
from bitshard.experts import modules  # noqa: E402
from helpers import moe  # noqa: E402
from helpers.copies import pickled, saved  # noqa: E402
from helpers.lora import layers, model, randomize  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def base_layers(wrapped):
    return [m for m in wrapped.modules() if isinstance(m, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt))]


def picture(wrapped):
    """Everything of each 4-bit weight that its numbers depend on: equal pictures, equal bits."""
    found = []
    for layer in base_layers(wrapped):
        full = fsdp.full_state_dict(layer)
        entries = {name: bytes(value.view(-1).view(torch.uint8).tolist()).rstrip() for name, value in full.items()}
        state = layer.quant_state  # None of int8 weights that are no columns
        found.append((entries, state and int(state.checksum), state and state.dtype, layer.weight.dtype))
    return found


def adapted(kind="lora", adapters=1, nested=True, fused=False, bias=False, threshold=None):
    """Two 4-bit layers, or with a `threshold` int8 ones, under adapters whose values are random, in eval()."""
    if kind in ("lora", "dora"):
        wrapped = model([(96, 128), (64, 96)], bias=bias, use_dora=kind == "dora", threshold=threshold)
    else:
        wrapped = other_tuner(kind, threshold)
    for i in range(1, adapters):
        config = peft.LoraConfig(r=4, target_modules=["0", "1"], use_dora=kind == "dora" and i % 2)
        wrapped.add_adapter(f"more{i}", config)
        randomize(wrapped)
    names = ["default", *(f"more{i}" for i in range(1, adapters))]
    if adapters > 1:
        wrapped.base_model.set_adapter(names)
    for layer in base_layers(wrapped) if not nested else ():
        values = bnb.functional.dequantize_4bit(layer.weight.data, layer.quant_state)
        layer.weight = bnb.nn.Params4bit(values, compress_statistics=False, quant_type="nf4", module=layer).to("cpu")
    if fused:
        lora.fuse(wrapped)
    return wrapped.eval()


TUNERS = {
    "hira": lambda: peft.HiraConfig(r=4, target_modules=["0", "1"]),
    "road": lambda: peft.RoadConfig(group_size=32, target_modules=["0", "1"]),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=32, target_modules=["0", "1"]),
    "randlora": lambda: peft.RandLoraConfig(r=4, target_modules=["0", "1"]),
    "pvera": lambda: peft.PveraConfig(r=4, target_modules=["0", "1"]),
}


def linear(threshold, bias):
    if threshold is None:
        return bnb.nn.Linear4bit(64, 64, bias=bias, quant_type="nf4")
    return bnb.nn.Linear8bitLt(64, 64, bias=bias, has_fp16_weights=False, threshold=threshold)


def other_tuner(kind, threshold=None, bias=False):
    torch.manual_seed(3)
    base = torch.nn.Sequential(*[linear(threshold, bias) for _ in range(2)]).to("cpu")
    base.is_loaded_in_4bit, base.is_loaded_in_8bit = threshold is None, threshold is not None
    wrapped = peft.get_peft_model(base.requires_grad_(False), TUNERS[kind]())
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data + 0.1 * torch.randn_like(parameter)
    return wrapped


def rounds(wrapped, count=3, safe=False):
    for _ in range(count):
        wrapped.merge_adapter(safe_merge=safe)
        wrapped.unmerge_adapter()


FORMS = {
    "lora": {},
    "plain scales": {"nested": False},
    "dora": {"kind": "dora"},
    "fused": {"fused": True},
    "three adapters": {"adapters": 3},
    "three of dora": {"kind": "dora", "adapters": 3},
    **{kind: {"kind": kind} for kind in TUNERS},
}
INT8 = {f"int8, {form}": {**FORMS[form], "threshold": 6.0} for form in FORMS if form != "plain scales"}
INT8["int8, no threshold"] = {"threshold": 0.0}
FORMS |= INT8


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_unmerging_gives_the_weight_from_before_the_first_merge(form, safe):
    wrapped = adapted(**FORMS[form])
    x = torch.randn(3, base_layers(wrapped)[0].in_features)
    before, y = picture(wrapped), wrapped(x)
    wrapped.merge_adapter(safe_merge=safe)
    merged = picture(wrapped)
    assert all(one != other for one, other in zip(before, merged, strict=True)), "nothing was merged"
    assert not torch.equal(wrapped(x), y)
    wrapped.merge_adapter(safe_merge=safe)  # all are merged already
    assert picture(wrapped) == merged
    wrapped.unmerge_adapter()
    rounds(wrapped, safe=safe)
    assert picture(wrapped) == before and torch.equal(wrapped(x), y)
    wrapped.merge_adapter(safe_merge=safe)
    assert picture(wrapped) == merged


@pytest.mark.parametrize("threshold", [None, 6.0])
def test_adapters_merged_one_after_the_other(threshold):
    wrapped = adapted(adapters=2, threshold=threshold)
    before = picture(wrapped)
    for _ in range(2):
        for name in ("more1", "default"):
            wrapped.merge_adapter([name])
        wrapped.unmerge_adapter()
        assert picture(wrapped) == before


@pytest.mark.parametrize("threshold", [None, 6.0])
def test_a_disabled_adapter_is_unmerged(threshold):
    """peft unmerges in the forward where adapters are disabled."""
    wrapped = adapted(fused=True, threshold=threshold)
    before, x = picture(wrapped), torch.randn(3, 128)
    with wrapped.disable_adapter():
        y = wrapped(x)
    wrapped.merge_adapter()
    with wrapped.disable_adapter():
        assert torch.equal(wrapped(x), y)
    assert picture(wrapped) == before


@pytest.mark.parametrize("threshold", [None, 6.0])
def test_an_adapter_that_was_deleted_while_merged(threshold):
    """peft's unmerge passes over it; the weight from before both comes back."""
    wrapped = adapted(adapters=2, threshold=threshold)
    before = picture(wrapped)
    wrapped.merge_adapter()
    for layer in layers(wrapped):
        for table in (layer.lora_A, layer.lora_B):
            del table["more1"]
        del layer.lora_dropout["more1"]
    wrapped.unmerge_adapter()
    assert picture(wrapped) == before and merged_lists(wrapped) == [[], []]


def test_the_list_of_an_adapter_that_is_around_another_layer_now():
    wrapped = adapted()
    wrapped.merge_adapter()
    tuner, other = layers(wrapped)[0], layers(adapted())[0].base_layer
    tuner.base_layer, old = other, tuner.base_layer
    with pytest.raises(ValueError, match="loaded or assigned later"):
        tuner.unmerge()
    assert tuner.merged_adapters == ["default"]
    tuner.base_layer = old
    wrapped.unmerge_adapter()
    assert merged_lists(wrapped) == [[], []]


# ---- what is kept ----


def kept(wrapped):
    return fsdp.measure(wrapped).before_merge


@pytest.mark.parametrize("threshold", [None, 6.0])
def test_what_is_kept_is_counted_and_goes_with_the_last_adapter(threshold):
    wrapped = adapted(adapters=2, threshold=threshold)
    assert kept(wrapped) == 0 and "before merging" not in fsdp.describe(wrapped)
    share = fsdp.measure(wrapped)
    wrapped.merge_adapter()
    assert kept(wrapped) == share.packed + share.scales
    assert f"; {kept(wrapped):,} bytes from before merging in host memory" in fsdp.describe(wrapped)
    assert all(layer.packed_weight.kept.packed.device.type == "cpu" for layer in base_layers(wrapped))
    wrapped.unmerge_adapter()
    assert kept(wrapped) == 0


@pytest.mark.parametrize("threshold", [None, 6.0])
@pytest.mark.parametrize("how", ["merge_and_unload", "merged before", "unload"])
def test_nothing_is_kept_without_the_adapter(how, threshold):
    wrapped = adapted(adapters=2, threshold=threshold)
    if how != "merge_and_unload":
        wrapped.merge_adapter()
    plain = wrapped.unload() if how == "unload" else wrapped.merge_and_unload()
    assert len(base_layers(plain)) == 2 and kept(plain) == 0


def test_what_is_kept_goes_with_the_layer_of_peft():
    """Also where nobody assigns the weight again."""
    wrapped = adapted()
    wrapped.merge_adapter()
    bases = torch.nn.ModuleList(base_layers(wrapped))
    assert kept(bases) > 0
    del wrapped
    gc.collect()
    assert kept(bases) == 0


@pytest.mark.parametrize("threshold", [None, 6.0])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
def test_a_copy_has_nothing_kept_and_does_not_unmerge(copied, threshold):
    """Its unmerging raises and leaves it merged, in peft's books too; the original is unmerged as ever."""
    wrapped = adapted(threshold=threshold)
    before = picture(wrapped)
    keys = list(wrapped.state_dict())
    wrapped.merge_adapter()
    assert list(wrapped.state_dict()) == keys
    twin = copied(wrapped)
    merged, x = picture(twin), torch.randn(3, 128)
    assert kept(twin) == 0 and merged == picture(wrapped)
    for _ in range(2):
        with pytest.raises(ValueError, match="'default' from the (4-bit|int8) weight .*Unmerge before copying"):
            twin.unmerge_adapter()
        assert picture(twin) == merged and layers(twin)[0].merged_adapters == ["default"]
        assert torch.equal(twin(x), wrapped(x))
    wrapped.unmerge_adapter()
    assert picture(wrapped) == before


# ---- what else happens to a merged layer ----


def assigned(wrapped):
    for layer in base_layers(wrapped):
        values = torch.randn(layer.out_features, layer.in_features)
        if isinstance(layer, bnb.nn.Linear8bitLt):
            layer.weight = bnb.nn.Int8Params(values, requires_grad=False).to("cpu")
        else:
            layer.weight = bnb.nn.Params4bit(values, quant_type="nf4", module=layer).to("cpu")


def loaded(wrapped):
    other = adapted(threshold=6.0 if isinstance(base_layers(wrapped)[0], bnb.nn.Linear8bitLt) else None)
    assigned(other)
    wrapped.load_state_dict(other.state_dict())


def rescaled(wrapped):
    """The same codes with other scales."""
    state = {name: value.clone() for name, value in wrapped.state_dict().items()}
    for name in state:
        if name.endswith((".SCB", ".weight.absmax", ".nested_absmax")):
            state[name] = state[name] if state[name].dtype is torch.uint8 else state[name] * 2
    wrapped.load_state_dict(state)


def written(wrapped):
    for layer in base_layers(wrapped):
        layer.weight.data = layer.weight.data.clone().fill_(7)


@pytest.mark.parametrize("threshold", [None, 6.0])
@pytest.mark.parametrize("write", [assigned, loaded, rescaled, written])
def test_another_weight_while_merged_is_not_taken_back(write, threshold):
    wrapped = adapted(threshold=threshold)
    wrapped.merge_adapter()
    write(wrapped)
    found = [layer.weight.data.clone() for layer in base_layers(wrapped)]
    for _ in range(2):
        with pytest.raises(ValueError, match="loaded or assigned later"):
            wrapped.unmerge_adapter()
        assert merged_lists(wrapped) == [["default"]] * 2
    assert all(torch.equal(layer.weight.data, data) for layer, data in zip(base_layers(wrapped), found, strict=True))


@pytest.mark.parametrize("threshold", [None, 6.0])
def test_the_same_weight_loaded_while_merged(threshold):
    wrapped = adapted(threshold=threshold)
    before = picture(wrapped)
    wrapped.merge_adapter()
    wrapped.load_state_dict(wrapped.state_dict())
    wrapped.unmerge_adapter()
    assert picture(wrapped) == before


@pytest.mark.parametrize("threshold", [None, 6.0])
def test_another_base_loaded_when_nothing_is_merged_starts_anew(threshold):
    wrapped = adapted(threshold=threshold)
    rounds(wrapped, 1)
    loaded(wrapped)
    before = picture(wrapped)
    rounds(wrapped, 2)
    assert picture(wrapped) == before


@pytest.mark.parametrize("move", [lambda m: m.to("cpu"), lambda m: m.bfloat16(), lambda m: m.double()])
def test_moved_while_merged(move):
    wrapped = adapted()
    before = picture(wrapped)
    wrapped.merge_adapter()
    move(wrapped)
    wrapped.bfloat16()  # peft computes in the dtype of the adapter, and nothing is quantized from float64
    wrapped.unmerge_adapter()
    assert picture(wrapped) == before


def test_a_merge_that_finds_nan_loses_nothing():
    wrapped = adapted(adapters=2)
    before = picture(wrapped)
    layers(wrapped)[1].lora_B["more1"].weight.data[0, 0] = float("nan")
    for merge in (wrapped.merge_adapter, wrapped.merge_and_unload):
        with pytest.raises(ValueError, match="NaNs detected"):
            merge(safe_merge=True)
        for layer in layers(wrapped):
            if layer.merged:
                layer.unmerge()
        assert picture(wrapped)[-1] == before[-1]


class Full(Exception):
    """No memory."""


@pytest.mark.parametrize("unmerging", [False, True])
def test_a_failure_while_quantizing_loses_nothing(monkeypatch, unmerging):
    wrapped = adapted()
    before = picture(wrapped)
    if unmerging:
        wrapped.merge_adapter()
    at_failure = picture(wrapped)

    def fails(*args, **kwargs):
        raise Full

    with monkeypatch.context() as patch:
        patch.setattr("bitshard.functional.quantize_4bit", fails)
        with pytest.raises(Full):
            wrapped.unmerge_adapter() if unmerging else wrapped.merge_adapter()
    assert picture(wrapped) == at_failure
    assert all(layer.weight.bnb_quantized for layer in base_layers(wrapped))
    with pytest.raises(TypeError, match="packed bytes"):
        base_layers(wrapped)[0].weight.half()
    assert all(layer.merged for layer in layers(wrapped)) or not unmerging
    for layer in layers(wrapped):
        if layer.merged:
            layer.unmerge()
    assert picture(wrapped) == before and merged_lists(wrapped) == [[], []]
    rounds(wrapped, 1)
    assert picture(wrapped) == before


def test_an_unmerge_that_would_leave_an_adapter_raises():
    """No layer of peft 0.21 does so; another tuner around the same layer may."""
    wrapped = adapted(adapters=2)
    (first, second) = layers(wrapped)
    wrapped.merge_adapter()
    merged = picture(wrapped)

    def unmerge(self, names):
        for active_adapter in names:
            self.merged_adapters.remove(active_adapter)
            weight = self.get_base_layer().weight
            values = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
            new = bnb.nn.Params4bit(values, **{**weight.__dict__, "bnb_quantized": False}).to("cpu")
            self.get_base_layer().weight = new

    with pytest.raises(ValueError, match="'more1' from .*'default'.* would stay in it"):
        unmerge(first, ["more1"])
    assert sorted(first.merged_adapters) == ["default", "more1"] and picture(wrapped) == merged


# ---- biases of adapters (lora_bias) ----


def biased(bias=True, threshold=None, alpha=8):
    wrapped = model([(96, 128), (64, 96)], bias=bias, lora_bias=True, lora_alpha=alpha, threshold=threshold)
    for layer in layers(wrapped):
        layer.lora_B["default"].bias.data.normal_()
    return wrapped.eval()


REFUSED = {
    "no bias": ({"bias": False}, False, "no bias"),
    "scale": ({"alpha": 12}, False, "scale 1.5"),
    "safe": ({}, True, "safe_merge=False"),
}


@pytest.mark.parametrize("threshold", [None, 6.0])
@pytest.mark.parametrize("case", REFUSED)
def test_a_bias_that_peft_would_merge_wrongly_is_refused(case, threshold):
    """It raises behind the weight (no bias, safe_merge), or leaves the scale out: nothing has changed here."""
    settings, safe, words = REFUSED[case]
    wrapped = biased(threshold=threshold, **settings)
    before, x = picture(wrapped), torch.randn(3, 128)
    y = wrapped(x)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"(?s)merging 'default' into the (4-bit|int8) weight of .*{words}"):
            wrapped.merge_adapter(safe_merge=safe)
        assert picture(wrapped) == before and merged_lists(wrapped) == [[], []] and torch.equal(wrapped(x), y)


@pytest.mark.parametrize("threshold", [None, 6.0])
def test_a_bias_of_scale_1_is_merged(threshold):
    wrapped = biased(threshold=threshold)
    biases = [layer.bias.data.clone() for layer in base_layers(wrapped)]
    wrapped.merge_adapter()
    for layer, tuner, bias in zip(base_layers(wrapped), layers(wrapped), biases, strict=True):
        assert torch.equal(layer.bias.data, bias + tuner.lora_B["default"].bias.data)
    wrapped.unmerge_adapter()
    assert all(
        torch.allclose(layer.bias, bias, atol=1e-6) for layer, bias in zip(base_layers(wrapped), biases, strict=True)
    )


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("threshold", [None, 6.0])
def test_a_bias_is_written_with_its_scale(tmp_path, threshold, dtype):
    wrapped = biased(threshold=threshold, alpha=12)
    expected = [layer.base_layer.bias + 1.5 * layer.lora_B["default"].bias for layer in layers(wrapped)]
    fsdp.save_pretrained(wrapped, tmp_path, merge=True, dtype=dtype)
    files = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(files[f"{i}.bias"], bias.detach()) for i, bias in enumerate(expected)), list(files)


@pytest.mark.parametrize("when", ["sharded", "gathered", "merged first"])
@pytest.mark.parametrize("kind", ["lora_bias", "road"])
def test_a_sharded_bias_is_not_merged(group, kind, when):
    """peft assigns `.data` of a DTensor, or of what FSDP2 frees: without effect, and without an error."""
    if kind == "lora_bias":
        wrapped = biased()
    else:
        wrapped = other_tuner(kind, bias=True).eval()
    x = torch.randn(3, base_layers(wrapped)[0].in_features)
    if when == "merged first":
        wrapped.merge_adapter()
    wrapped = sharded(wrapped, reshard_after_forward=when != "gathered")
    y, names = wrapped(x), merged_lists(wrapped)
    for _ in range(2):
        with pytest.raises(ValueError, match="bias, too. That is sharded by FSDP2"):
            wrapped.unmerge_adapter() if when == "merged first" else wrapped.merge_adapter()
        assert merged_lists(wrapped) == names and torch.equal(wrapped(x), y)


# ---- FSDP2 in one process; two ranks are in fsdp/train.py ----


@pytest.fixture
def group(monkeypatch):
    """A process group of this process alone, in a process that FSDP shards."""
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def sharded(wrapped, **options):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(wrapped, mesh=init_device_mesh("cpu", (1,)), **options)
    gc.collect()  # torch leaves a circle of references to all modules behind
    return wrapped


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("form", ["lora", "plain scales", "dora", "three of dora", "fused"])
def test_unmerging_a_sharded_weight(group, form, gathered):
    wrapped = sharded(adapted(**FORMS[form]), reshard_after_forward=not gathered)
    x = torch.randn(3, 128)
    before = picture(wrapped)
    y = wrapped(x)
    for _ in range(2):
        wrapped.merge_adapter()
        assert picture(wrapped) != before and kept(wrapped) > 0
        assert not torch.equal(wrapped(x), y)
        wrapped.unmerge_adapter()
        assert torch.equal(wrapped(x), y) and kept(wrapped) == 0
    wrapped.reshard()
    assert [entries for entries, *_ in picture(wrapped)] == [entries for entries, *_ in before]
    assert torch.equal(wrapped(x), y)
    merged = wrapped.merge_and_unload()
    assert kept(merged) == 0


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("form", ["lora", "plain scales", "dora", "three of dora", "fused", *TUNERS])
def test_sharded_while_merged(group, form, gathered):
    wrapped = adapted(**FORMS[form])
    before, x = picture(wrapped), torch.randn(3, base_layers(wrapped)[0].in_features)
    y = wrapped(x)
    wrapped.merge_adapter()
    wrapped = sharded(wrapped, reshard_after_forward=not gathered)
    if gathered:
        wrapped(x)
    wrapped.unmerge_adapter()
    wrapped.reshard()
    assert [entries for entries, *_ in picture(wrapped)] == [entries for entries, *_ in before]
    assert torch.equal(wrapped(x), y)


@pytest.mark.parametrize("gathered", [False, True])
def test_merged_in_one_place_and_unmerged_in_the_other(group, gathered):
    """DoRA keeps a norm from merging to unmerging: a DTensor or a plain tensor, by where the layer is."""
    wrapped = sharded(adapted("dora"), reshard_after_forward=False)
    before, x = picture(wrapped), torch.randn(3, 128)
    for forward_first in (gathered, not gathered):
        wrapped(x) if forward_first else wrapped.reshard()
        wrapped.unmerge_adapter() if layers(wrapped)[0].merged else wrapped.merge_adapter()
    wrapped.reshard()
    assert [entries for entries, *_ in picture(wrapped)] == [entries for entries, *_ in before]


# ---- stacks of experts ----


def experts_model(family="qwen3_moe", count=4, **settings):
    """4-bit experts under an adapter on each stack, which is random, in eval()."""
    base = moe.model(family, count)
    experts.quantize(base)
    names = sorted({name for _, module in modules.found(base) for name in module.packed_stacks})
    settings = {"r": 4, "target_modules": [], "target_parameters": [f"experts.{name}" for name in names]} | settings
    torch.manual_seed(1)
    return peft.get_peft_model(base, peft.LoraConfig(**settings, init_lora_weights=False)).eval()


def stacks(wrapped):
    """Bytes of every stack and its scales: equal, and the stacks are equal bit for bit."""
    found = {}
    for path, module in modules.found(wrapped):
        for name, value in fsdp.full_state_dict(module).items():
            found[f"{path}.{name}"] = bytes(value.view(-1).view(torch.uint8).tolist()).rstrip()
    return found


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_stacks_are_merged_and_unmerged(family, safe):
    wrapped = experts_model(family)
    before, y = stacks(wrapped), moe.logits(wrapped)
    wrapped.merge_adapter(safe_merge=safe)
    merged = stacks(wrapped)
    assert merged != before and not torch.equal(moe.logits(wrapped), y)
    wrapped.unmerge_adapter()
    assert stacks(wrapped) == before and torch.equal(moe.logits(wrapped), y)
    wrapped.merge_adapter(safe_merge=not safe)
    assert stacks(wrapped) == merged


def test_a_safe_merge_of_a_stack_finds_nan():
    wrapped = experts_model()
    before = stacks(wrapped)
    tuner = next(module for module in wrapped.modules() if hasattr(module, "parameter_name"))
    tuner.lora_B["default"].weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaNs detected"):
        wrapped.merge_adapter(safe_merge=True)
    wrapped.unmerge_adapter()
    assert stacks(wrapped) == before


@pytest.mark.parametrize("when", ["sharded first", "gathered", "merged first", "merged first, gathered"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_sharded_stacks_are_merged_and_unmerged(group, family, when):
    reference, wrapped = experts_model(family), experts_model(family)
    before, y = stacks(wrapped), moe.logits(wrapped)
    reference.merge_adapter()
    if "merged" in when:
        wrapped.merge_adapter()
    wrapped = sharded(wrapped, reshard_after_forward="gathered" not in when)
    for _ in range(2):
        if "gathered" in when:
            moe.logits(wrapped)
        wrapped.merge_adapter()  # nothing where it is merged
        assert torch.equal(moe.logits(wrapped), moe.logits(reference)) and stacks(wrapped) == stacks(reference)
        wrapped.unmerge_adapter()
        wrapped.reshard()
        assert stacks(wrapped) == before and torch.equal(moe.logits(wrapped), y) and kept(wrapped) == 0


# ---- what fails in peft's arithmetic ----


def merged_lists(wrapped):
    return [list(module.merged_adapters) for module in wrapped.modules() if hasattr(module, "merged_adapters")]


MADE = {form: functools.partial(adapted, **FORMS[form]) for form in ("lora", "dora", "oft", "int8, lora")} | {
    "experts": experts_model
}


@pytest.mark.parametrize("made", MADE)
def test_an_unmerge_that_fails_in_pefts_arithmetic_changes_nothing(monkeypatch, made):
    """peft takes an adapter off its list before it computes; it stays there until the weight has been put back."""
    wrapped = MADE[made]()
    tuner = next(module for module in wrapped.modules() if getattr(module, "merged_adapters", None) is not None)
    before = stacks(wrapped) or picture(wrapped)
    wrapped.merge_adapter()
    at_failure, names = stacks(wrapped) or picture(wrapped), merged_lists(wrapped)

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(type(tuner), "get_delta_weight", full)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                wrapped.unmerge_adapter()
            assert merged_lists(wrapped) == names and (stacks(wrapped) or picture(wrapped)) == at_failure
    wrapped.unmerge_adapter()
    assert (stacks(wrapped) or picture(wrapped)) == before


def test_a_sharded_weight_that_was_loaded_while_merged(group):
    wrapped = sharded(adapted())
    wrapped.merge_adapter()
    other = adapted()
    assigned(other)
    fsdp.load_full_state_dict(wrapped, other.state_dict())
    with pytest.raises(ValueError, match="loaded or assigned later"):
        wrapped.unmerge_adapter()
    assert layers(wrapped)[0].merged_adapters == ["default"]


def test_sharded_int8_weights_stay_merged(group):
    """Their scales are sharded, so peft cannot read them: that raises, and changes nothing."""
    wrapped = adapted(threshold=6.0)
    before = picture(wrapped)
    wrapped.merge_adapter()
    fsdp.shardable(wrapped)
    wrapped.unmerge_adapter()  # kept of the form that it had
    assert [entries for entries, *_ in picture(wrapped)] == [entries for entries, *_ in before]
    wrapped.merge_adapter()
    wrapped = sharded(wrapped)
    merged = picture(wrapped)
    for _ in range(2):
        with pytest.raises(ValueError, match="is sharded, its scales too"):
            wrapped.unmerge_adapter()
        assert picture(wrapped) == merged and merged_lists(wrapped) == [["default"]] * 2


def test_another_function_called_merge_is_no_merge():
    """A weight that is assigned in one, of something that is no layer of peft, is a weight like any other."""

    class Other:
        merged_adapters = ()

        def merge(self, wrapped):
            assigned(wrapped)

    wrapped = adapted()
    Other().merge(wrapped)
    assert kept(wrapped) == 0
    wrapped.merge_adapter()
    Other().merge(wrapped)
    assert kept(wrapped) == 0
