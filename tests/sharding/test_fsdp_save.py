"""Saving from sharded models: checkpoints for everybody, layer by layer; torch's own in every way of sharding; faults.

The workers are in tests/fsdp/saving: streamed.py and checkpoints.py under torchrun, compared with alone.py.
"""

import json
import sys
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from bitshard import fsdp
from bitshard.nn.linear import Linear4bit
from bitshard.nn.parametrize import replace_parameter_4bit
from bitshard.sharding.checkpoints import save
from fsdp.launch import LIMIT, WORKERS, launch, options, passed, results, run
from helpers import tiny, upstream
from helpers.bytes import same_bytes
from safetensors.torch import load_file

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from helpers.versions import transformers_takes_peft  # noqa: E402
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

SAVING = WORKERS / "saving"
WAYS = "whole cut native native_sharded fsdp1 fsdp1_orig parts".split()
KINDS = {
    "whole": "dora bias trained",
    "cut": "dora bias trained",
    "native": "bias",
    "fsdp1": "dora",
    "fsdp1_orig": "bias",
}
STREAMED = [
    *(f"{what}_{way}" for way in WAYS for what in ("base", "merged", "values")),
    *(f"base_{way}_{cell}" for way in ("whole", "native") for cell in ("bf16-plain-fp32", "fp32-nested-bf16")),
    *(f"{what}_{way}_{kind}" for way in KINDS for kind in KINDS[way].split() for what in ("merged", "values")),
    *"values_whole_fp32 values_whole_none rotten_whole rotten_native memory_whole memory_native memory_fsdp1".split(),
    *"adapter_whole_dora adapter_cut_trained adapter_native_sharded_lora adapter_fsdp1".split(),
    *"misuse full_disk no_room unwritable".split(),
    *(f"{fault}_{way}" for fault in ("memory_of_one", "fault_of_one") for way in "whole native fsdp1 parts".split()),
    *"short_shard short_scales".split(),
]
FORMS = {2: ("fsdp2", "fsdp1", "fsdp1_orig"), 1: ("whole", "fsdp2"), 4: ("fsdp2_bytes", "replicas")}
CHECKPOINTS = {
    2: [f"{what}_{form}" for what in ("save", "load", "plain_load", "full", "adapters") for form in FORMS[2]],
    1: [f"{what}_{form}" for what in ("save", "load", "plain_load") for form in FORMS[1]],
    4: [f"{what}_{form}" for what in ("save", "load", "plain_load", "streamed") for form in FORMS[4]],
}
CHECKPOINTS[2] += [
    f"fault_{name}" for name in "without_scales of_another_shape of_another_format truncated without_index".split()
]
CHECKPOINTS[2] += ["default_planner"]
CHECKPOINTS[1] += ["full_whole", "adapters_whole"]
CHECKPOINTS[4] += ["full_fsdp2_bytes", "adapters_fsdp2_bytes", "plain_load_fsdp1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The models of alone.py, and what one process saves."""
    folder = tmp_path_factory.mktemp("saving")
    run([sys.executable, str(SAVING / "alone.py"), *options(folder, "alone")], LIMIT)
    return folder


@pytest.fixture(scope="module")
def streamed2(folder):
    launch(2, "cpu_fsdp.py", str(SAVING / "streamed.py"), *options(folder, "streamed"), timeout=LIMIT)
    return results(folder, "streamed", 2)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """World size -> results. Each launch reads what those before it have written."""
    folder, found = tmp_path_factory.mktemp("checkpoints"), {}
    for world in FORMS:
        out = folder / f"results{world}.json"
        launch(world, "saving/checkpoints.py", "--dir", str(folder), "--out", str(out), timeout=LIMIT)
        found[world] = json.loads(out.read_text())["ranks"]
    return found


@pytest.mark.parametrize("check", STREAMED)
def test_streamed_from_two_ranks(streamed2, check):
    passed(streamed2, check)


@pytest.mark.parametrize("world, check", [(world, check) for world in FORMS for check in CHECKPOINTS[world]])
def test_distributed_checkpoints(checkpoints, world, check):
    passed(checkpoints[world], check)


def test_every_form_was_read_by_every_other(checkpoints):
    """On four ranks what two, one and four wrote, whole and sharded in either way."""
    forms = {f"dcp-{form}-{world}" for world in FORMS for form in FORMS[world]}
    found = checkpoints[4][0]
    for check in ("load_fsdp2_bytes", "load_replicas", "plain_load_fsdp1"):
        assert set(found[check]["ok"]) == forms
    assert len(checkpoints[1][0]["load_whole"]["ok"]) == 5


def test_no_check_is_missing(streamed2, checkpoints):
    assert set(streamed2[0]) == set(STREAMED)
    for world in FORMS:
        assert set(checkpoints[world][0]) == set(CHECKPOINTS[world])


@pytest.mark.parametrize("what", ["streamed", "dcp"])
def test_a_killed_rank_leaves_the_last_good_checkpoint(tmp_path, what):
    """The launch is over before the others' patience is; what was half written is refused by name."""
    began = time.monotonic()
    text = launch(
        2, "saving/checkpoints.py", "--dir", str(tmp_path), "--only", f"killed_{what}", timeout=120, fails=True
    )
    assert "saved without a rank" not in text and "Signal 9 (SIGKILL)" in text, text
    assert time.monotonic() - began < 60
    good = torch.load(tmp_path / "good.pt")
    if what == "streamed":
        index = json.loads((tmp_path / "streamed" / "model.safetensors.index.json").read_text())["weight_map"]
        found = {key: load_file(tmp_path / "streamed" / name)[key] for key, name in index.items()}
        assert len(set(index.values())) > 2
    else:
        found = {key: torch.zeros_like(value) for key, value in good.items()}
        fsdp.load_checkpoint({"model": found}, tmp_path / "step-1")
        with pytest.raises(ValueError, match=r"step-2: rank 0 cannot load it: .*\.metadata"):
            fsdp.load_checkpoint({"model": dict(found)}, tmp_path / "step-2")
    assert found.keys() == good.keys() and all(same_bytes(found[key], good[key]) for key in good)


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_without_an_index_nothing_is_loaded(tmp_path, damage):
    """The message names the file and says what is wrong with it."""
    dcp.save({"w": torch.zeros(4)}, checkpoint_id=tmp_path)
    index = tmp_path / ".metadata"
    index.unlink() if damage == "missing" else index.write_bytes(index.read_bytes()[:9])
    why = {"missing": "FileNotFoundError: ", "cut": "EOFError|UnpicklingError"}[damage]
    with pytest.raises(ValueError, match=rf"rank 0 cannot load it: its \.metadata cannot be read: ({why})"):
        fsdp.load_checkpoint({"w": torch.ones(4)}, tmp_path)


def test_the_original_bitsandbytes_reads_what_shards_wrote(folder, streamed2, tmp_path):
    """Through transformers: the same bytes, scales and settings of every layer as are in the files."""
    passed(streamed2, "base_whole")
    upstream.folder_or_skip()
    saved = folder / "streamed2-whole-uint8-nested-bf16-none-behind"
    upstream.run(SAVING / "read.py", str(saved), str(tmp_path / "theirs"))
    found, theirs = {}, load_file(tmp_path / "theirs")
    for path in saved.glob("*.safetensors"):
        found |= load_file(path)
    assert len([key for key in theirs if key.endswith(".weight")]) == 14
    assert all(same_bytes(theirs[key], found[key]) for key in theirs)


@pytest.mark.parametrize("patience, shown", [(0, True), (60, False)])
def test_a_bar_where_it_takes_longer(tmp_path, monkeypatch, capfd, patience, shown):
    """And in one process without a config: the state dict in one file, nothing else."""
    model = torch.nn.Sequential(Linear4bit(64, 96, quant_type="nf4"), torch.nn.LayerNorm(96)).to("cpu")
    monkeypatch.setattr(save, "_PATIENCE_S", patience)
    fsdp.save_pretrained(model, tmp_path)
    assert ("Saving: 100%" in capfd.readouterr().err) is shown
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    found, expected = load_file(tmp_path / "model.safetensors"), model.state_dict()
    assert found.keys() == expected.keys() and all(same_bytes(found[key], expected[key]) for key in expected)
    monkeypatch.setattr(save, "_PATIENCE_S", 0)
    fsdp.save_pretrained(model, tmp_path, progress=False)
    assert "Saving" not in capfd.readouterr().err


def test_what_is_not_quantized_yet_is_not_saved(tmp_path):
    model = torch.nn.Sequential(Linear4bit(64, 96))
    with pytest.raises(ValueError, match=r"0\.weight: this 4-bit weight is not quantized yet"):
        fsdp.save_pretrained(model, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_two_modules_share_has_both_names(tmp_path):
    """No class says that loading ties them, and `load_state_dict` asks for each."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[1].weight = model[0].weight
    fsdp.save_pretrained(model, tmp_path, dtype=torch.bfloat16)
    found = load_file(tmp_path / "model.safetensors")
    assert {key: value.dtype for key, value in found.items()} == dict.fromkeys(model.state_dict(), torch.bfloat16)
    assert same_bytes(found["0.weight"], found["1.weight"])


SMALL = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_transformers_reads_what_was_saved_over_another_checkpoint(tmp_path):
    """In files of the usual names, then in files of names of one save, then in one file."""
    model = tiny.llama(**SMALL)
    for size, usual in ((4096, True), (8192, False), ("1GB", True), (4096, False)):
        with torch.no_grad():
            model.lm_head.weight.add_(1)
        fsdp.save_pretrained(model, tmp_path, max_shard_size=size)
        names = [path.name for path in tmp_path.glob("*.safetensors")]
        assert (len(names) == 1) is (size == "1GB")
        assert all(name.count(".") == 1 for name in names) is usual, names
        loaded = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
        assert all(same_bytes(loaded[key], value) for key, value in model.state_dict().items())


def test_tied_embeddings(tmp_path):
    """Saved once, as transformers does; twice, and no longer tied, where peft has trained a copy of the head."""
    model = tiny.llama(**SMALL, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "theirs")
    fsdp.save_pretrained(model, tmp_path / "ours")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.add_(1)
    fsdp.save_pretrained(model, tmp_path / "base")
    assert (tmp_path / "base" / "model.safetensors").read_bytes() == (tmp_path / "ours/model.safetensors").read_bytes()
    fsdp.save_pretrained(model, tmp_path / "merged", merge=True)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight + 1)


class Experts(torch.nn.Module):
    """Two stacks of expert weights in one module, as in MoE models of transformers."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (torch.nn.Parameter(torch.randn(3, *shape)) for shape in ((8, 16), (16, 8)))
        self.gate = torch.nn.Linear(16, 3)

    def forward(self, x):
        return torch.einsum("bi,eoi->beo", x, self.up).sum() + self.down.sum() + self.gate(x).sum()


def adapted_experts(parameters, base=None):
    """Experts under LoRA on each of `parameters`."""
    torch.manual_seed(0)
    base = torch.nn.ModuleDict({"experts": Experts()}) if base is None else base
    config = LoraConfig(r=2, target_modules=[], target_parameters=[f"experts.{name}" for name in parameters])
    model = get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("parameters", [["up", "down"], ["down", "up"], ["up"]])
def test_adapters_of_several_parameters_of_one_module_are_merged(tmp_path, group, parameters, sharded):
    """The tensors of peft's `merge_and_unload`; the model stays as it is."""
    model = adapted_experts(parameters)
    expected = adapted_experts(parameters).merge_and_unload().state_dict()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    if sharded:
        torch.distributed.fsdp.fully_shard(model)
    fsdp.save_pretrained(model, tmp_path, merge=True)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
    after = fsdp.full_state_dict(model)
    assert all(torch.equal(after[key], value) for key, value in before.items())
    fsdp.save_pretrained(model, tmp_path)
    base = load_file(tmp_path / "model.safetensors")
    assert [name for name in ("up", "down") if not torch.equal(base[f"experts.{name}"], found[f"experts.{name}"])] == [
        name for name in ("up", "down") if name in parameters
    ]


class MoE(LlamaForCausalLM):
    """A model of transformers with two stacks that `nn.parametrize` has quantized."""

    def __init__(self, config):
        super().__init__(config)
        self.experts = Experts()


def quantized_moe():
    model = MoE(LlamaConfig(**SMALL))
    for name in ("up", "down"):
        replace_parameter_4bit(model.experts, name)
    return model


def test_4bit_stacks_are_not_saved_where_nobody_could_read_them(tmp_path):
    """Neither by us nor by transformers; values, state dicts and modules without a config are saved as ever."""
    model = quantized_moe()
    said = r"experts\.(up|down): from_pretrained cannot read .*dtype=torch.bfloat16"
    with pytest.raises(ValueError, match=said):
        fsdp.save_pretrained(model, tmp_path)
    with pytest.raises(ValueError, match=said):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    fsdp.save_pretrained(model, tmp_path, dtype=torch.float32)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["experts.up"], model.experts.up)
    assert torch.equal(MoE.from_pretrained(tmp_path).experts.up, model.experts.up)
    twin = quantized_moe()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin.experts.down, model.experts.down)
    fsdp.save_pretrained(model.experts, tmp_path / "alone")
    assert "up.absmax" in load_file(tmp_path / "alone" / "model.safetensors")


def test_an_adapter_on_a_4bit_stack_is_not_left_out(tmp_path):
    """Merging it is refused where its values are saved."""
    base = torch.nn.ModuleDict({"experts": Experts()})
    replace_parameter_4bit(base["experts"], "up")
    model = adapted_experts(["up"], base)
    with pytest.raises(ValueError, match="experts.up is parametrized"):
        fsdp.save_pretrained(model, tmp_path, merge=True, dtype=torch.float32)


def tiny_lora(**options):
    """A tiny Llama under LoRA with values that are random."""
    base = tiny.llama(seed=1, **SMALL | {"intermediate_size": 48, "num_hidden_layers": 2})
    for layer in base.model.layers:
        replaced = Linear4bit(32, 48, bias=False, quant_type="nf4", quant_storage=torch.bfloat16)
        replaced.load_state_dict(layer.mlp.up_proj.state_dict())
        layer.mlp.up_proj = replaced.to("cpu")
    base.is_loaded_in_4bit = True
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["up_proj", "q_proj"], **options))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    return model


OPTIONS = {
    "causal": {"task_type": "CAUSAL_LM"},
    "no task": {},
    "dora": {"use_dora": True},
    "head": {"modules_to_save": ["lm_head"]},
}


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", OPTIONS)
def test_adapters_of_a_sharded_model_are_saved_as_peft_saves_them(tmp_path, group, kind, inside):
    """The very files, of several adapters, too; `PeftModel.from_pretrained` reads them."""
    model = tiny_lora(**OPTIONS[kind])
    model.add_adapter("second", LoraConfig(r=3, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "theirs")
    for unit in [*model.base_model.model.model.layers, *([model.base_model.model] if inside else []), model]:
        torch.distributed.fsdp.fully_shard(unit)
    fsdp.save_adapter(model, tmp_path / "ours")
    assert files_of(tmp_path / "ours") == files_of(tmp_path / "theirs")
    assert "second/adapter_model.safetensors" in files_of(tmp_path / "ours")
    loaded = PeftModel.from_pretrained(tiny_lora().unload(), tmp_path / "ours")
    found, expected = loaded.state_dict(), fsdp.full_state_dict(model)
    keys = [key for key in found if "default" in key]
    assert keys and all(torch.equal(found[key], expected[key]) for key in keys)


def test_saving_the_adapter_in_one_process_and_without_one(tmp_path):
    model = tiny_lora()
    for save_it, name in ((model.save_pretrained, "theirs"), (lambda to: fsdp.save_adapter(model, to), "ours")):
        save_it(tmp_path / name)
    assert files_of(tmp_path / "ours") == files_of(tmp_path / "theirs")
    with pytest.raises(ValueError, match="no adapters of peft"):
        fsdp.save_adapter(model.unload(), tmp_path / "none")
    assert not (tmp_path / "none").exists()


@transformers_takes_peft
def test_saving_the_adapter_of_a_model_of_transformers(tmp_path, group):
    """As `bitshard.fsdp.load(adapters=)` and `add_adapter` give one."""
    base = tiny_lora().unload()
    base.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    base.save_pretrained(tmp_path / "theirs")
    torch.distributed.fsdp.fully_shard(base)
    fsdp.save_adapter(base, tmp_path / "ours")
    assert files_of(tmp_path / "ours") == files_of(tmp_path / "theirs")
