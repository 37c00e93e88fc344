"""`bitshard merge` of folders that others have packed in MXFP4 or NVFP4: in their layout again, and into 16 bits."""

import json

import pytest
import torch
from bitshard import fsdp, lora
from bitshard.convert.merge import merge_folder
from bitshard.formats.layouts import QUANTIZATION
from bitshard.transformers import FourBitConfig, dense_config
from helpers import moe, tiny
from helpers.bytes import same_bytes
from helpers.files import tensors
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_convert import command
from transformers import AutoModelForCausalLM

LAYOUTS = ("mxfp4", "modelopt", "compressed-tensors", "modelopt qwen3_moe", "compressed-tensors mixtral")


def made(folder, what, **sizes):
    layout, _, family = what.partition(" ")
    wide = {"intermediate_size" if family == "mixtral" else "moe_intermediate_size": 64}
    if what == "mxfp4":
        moe.save_mxfp4(moe.model("gpt_oss", 3, intermediate_size=64), folder)
    else:
        moe.save_nvfp4(moe.model(family, 4, **wide) if family else tiny.llama(**sizes), folder, layout)
    return folder


def adapted(base, what, folder):
    """The model of a base with an adapter, which is saved."""
    config = FourBitConfig(bnb_4bit_quant_type="mxfp4" if what == "mxfp4" else "nvfp4")
    model = AutoModelForCausalLM.from_pretrained(base, config=dense_config(base), quantization_config=config)
    one = what in ("modelopt", "compressed-tensors")
    stacks = {} if one else {"target_parameters": ["mlp.experts.down_proj"]}
    torch.manual_seed(1)
    settings = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, **stacks)
    tuned = get_peft_model(model, settings, autocast_adapter_dtype=False)
    tuned.save_pretrained(folder)
    return tuned


@pytest.fixture(scope="module", params=LAYOUTS)
def given(request, tmp_path_factory):
    """(name of the layout, folder, model with an adapter, folder of that)"""
    folder = tmp_path_factory.mktemp("vendor")
    made(folder / "base", request.param)
    return (
        request.param,
        folder / "base",
        adapted(folder / "base", request.param, folder / "adapter"),
        folder / "adapter",
    )


def config_of(folder):
    return json.loads((folder / "config.json").read_text()).get("quantization_config")


def test_in_the_same_layout(given, tmp_path):
    """The bytes of merging the loaded model; what has no adapter, and what servers need, byte for byte."""
    what, base, tuned, adapter = given
    status, said, err = command("merge", base, adapter, tmp_path / "out", "--to", "4bit", "--max-shard-size", "20KB")
    assert (status, err) == (0, []) and "adapters merged into" in said[0]
    fsdp.save_pretrained(tuned, tmp_path / "reference", merge=True, progress=False)
    before, after, wanted = (tensors(each) for each in (base, tmp_path / "out", tmp_path / "reference"))
    assert before.keys() == after.keys() == wanted.keys()
    assert [name for name in wanted if not same_bytes(after[name], wanted[name])] == []
    changed = {name for name in before if not same_bytes(before[name], after[name])}
    merged = ("q_proj.weight", "down_proj_", "down_proj.weight", "w2.weight")
    assert changed and all(any(each in name for each in merged) for name in changed), changed
    assert config_of(tmp_path / "out") == config_of(base)
    assert (tmp_path / "out" / QUANTIZATION).exists() == ("modelopt" in what)
    status, _, err = command("inspect", tmp_path / "out")
    assert status == 0 and not err


@torch.no_grad()
def test_merge_aware_files_are_what_training_has_seen(given, tmp_path):
    """The logits of the merge-aware forward, bit for bit: global scales too, of which some files have a divisor."""
    what, base, _, adapter = given
    words = ("merge", base, adapter, tmp_path / "out", "--to", "4bit", "--merge-aware")
    tuned = adapted(base, what, tmp_path / "again").eval()
    assert lora.merge_aware(tuned) > 0
    rows = torch.arange(24).view(2, 12)
    tuned = tuned.merge_and_unload() if what == "mxfp4" else tuned  # q_proj is dense there, and rounds when merged
    wanted = tuned(input_ids=rows).logits
    assert command(*words)[0] == 0
    before, after = tensors(base), tensors(tmp_path / "out")
    changed = [name for name in before if not same_bytes(before[name], after[name])]
    assert what == "mxfp4" or any(name.endswith(("weight_scale_2", "global_scale")) for name in changed), changed
    config = FourBitConfig(bnb_4bit_quant_type="mxfp4" if what == "mxfp4" else "nvfp4")
    served = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", config=dense_config(tmp_path / "out"), quantization_config=config
    )
    assert torch.equal(served(input_ids=rows).logits, wanted)


def test_into_16_bits(given, tmp_path):
    what, base, tuned, adapter = given
    merge_folder(base, adapter, tmp_path / "out", torch.bfloat16)
    fsdp.save_pretrained(tuned, tmp_path / "reference", merge=True, dtype=torch.bfloat16, progress=False)
    after, wanted = (load_file(each / "model.safetensors") for each in (tmp_path / "out", tmp_path / "reference"))
    assert after.keys() == wanted.keys() and {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert [name for name in wanted if not same_bytes(after[name], wanted[name])] == []
    assert config_of(tmp_path / "out") is None and not (tmp_path / "out" / QUANTIZATION).exists()
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(map(len, info.values())) and model(moe.TOKENS).logits.isfinite().all()


def test_experts_of_a_layer_in_16_bits(tmp_path):
    """They are merged in 16 bits, and all tensors have the names of the files."""
    base = made(tmp_path / "base", "modelopt qwen3_moe")
    files = load_file(base / "model.safetensors")
    for name in [name for name in files if "layers.0.mlp.experts" in name and name.endswith("proj.weight")]:
        files[name] = torch.randn(files[name].shape[0], files[name].shape[1] * 2)
        for end in ("_scale", "_scale_2"):
            del files[f"{name}{end}"]
    save_file(files, base / "model.safetensors", metadata={"format": "pt"})
    tuned = adapted(base, "modelopt qwen3_moe", tmp_path / "adapter")
    merge_folder(base, tmp_path / "adapter", tmp_path / "out", None)
    fsdp.save_pretrained(tuned, tmp_path / "reference", merge=True, progress=False)
    after, wanted = (tensors(tmp_path / each) for each in ("out", "reference"))
    assert after.keys() == wanted.keys() == files.keys()
    assert [name for name in wanted if not same_bytes(after[name], wanted[name])] == []
    changed = {name for name in files if not same_bytes(files[name], after[name])}
    assert len([name for name in changed if "layers.0.mlp.experts" in name and "down_proj" in name]) == 4
    assert all("down_proj.weight" in name or "q_proj.weight" in name for name in changed)


def test_what_cannot_be_merged(tmp_path):
    """One line each, and nothing is made."""
    base = made(tmp_path / "base", "modelopt", vocab_size=moe.VOCABULARY)
    adapted(base, "modelopt", tmp_path / "adapter")
    status, _, err = command("merge", base, tmp_path / "adapter", tmp_path / "out", "--to", "nf4")
    assert status == 1 and "its weights are nvfp4, and stay nvfp4" in err[0]
    files = load_file(base / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    files[name].view(torch.uint8)[3, 1] = 127
    save_file(files, base / "model.safetensors", metadata={"format": "pt"})
    status, _, err = command("merge", base, tmp_path / "adapter", tmp_path / "out")
    assert status == 1 and f"{name}: 1 of its" in err[0] and "NaN" in err[0]
    for each in [each for each in files if each.endswith("weight_scale")]:
        del files[each]
    save_file(files, base / "model.safetensors", metadata={"format": "pt"})
    status, _, err = command("merge", base, tmp_path / "adapter", tmp_path / "out")
    assert status == 1 and "its config says modelopt, and its files have no weights" in err[0]
    assert not (tmp_path / "out").exists()
