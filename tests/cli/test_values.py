"""Values of files that are not finite: no command makes codes of them, merges them or deletes them, and inspect finds
them."""

import json
import shutil

import pytest
import torch
from bitshard.convert import output
from bitshard.convert.look import look
from bitshard.convert.merge import merge_folder
from bitshard.convert.quantize import quantize_folder
from helpers import moe, tiny
from helpers.files import tensors
from safetensors.torch import load_file, save_file
from test_convert import adapted, command, llama, settings
from transformers import AutoConfig, BitsAndBytesConfig, Gemma4Config

Q = "model.layers.1.self_attn.q_proj.weight"
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A dense folder of several files, the same in 4 bits, and an adapter."""
    folder = tmp_path_factory.mktemp("sound")
    llama(folder / "dense")
    quantize_folder(folder / "dense", folder / "packed", settings(bnb_4bit_use_double_quant=True))
    adapted(folder / "dense", folder / "adapter", None)
    return folder


def spoil(folder, name, value, place=(3, 17)):
    """Write `value` into a tensor of a folder's files; its file."""
    for path in sorted(folder.glob("*.safetensors")):
        found = load_file(path)
        if name in found:
            found[name][place] = value
            save_file(found, path, {"format": "pt"})
            return path
    raise AssertionError(name)


def copied(folder, to):
    return shutil.copytree(folder, to)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


FP4 = {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True}


@pytest.mark.parametrize("value, options, name", [
    (NAN, {}, Q), (INF, {}, Q), (-INF, FP4, Q), (NAN, FP4, Q), (NAN, {"load_in_8bit": True}, Q),
    (INF, {"load_in_8bit": True}, Q), (INF, {}, "model.embed_tokens.weight"), (NAN, {}, "model.norm.weight"),
])  # fmt: skip
def test_nothing_is_made_or_consumed(sound, tmp_path, value, options, name):
    """Of weights that become codes, and of tensors that stay dense."""
    dense, place = copied(sound / "dense", tmp_path / "dense"), (3, 17) if name != "model.norm.weight" else (3,)
    spoil(dense, name, value, place)
    before = content(dense)
    config = BitsAndBytesConfig(load_in_8bit=True) if "load_in_8bit" in options else settings(**options)
    kind = "1 NaN" if value != value else "1 infinite"
    said = rf"{name}: 1 of its [\d,]+ values are not finite \({kind}\), the first at \[{', '.join(map(str, place))}\]"
    with pytest.raises(ValueError, match=said):
        quantize_folder(dense, tmp_path / "out", config, consume=True, max_shard_size="15KB")
    assert content(dense) == before and [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_the_command_names_all_tensors(sound, tmp_path):
    """One line; and inspect finds them in the source."""
    dense = copied(sound / "dense", tmp_path / "dense")
    spoil(dense, Q, NAN)
    spoil(dense, Q, INF, (4, 1))
    spoil(dense, "lm_head.weight", -INF)
    status, lines, err = command("quantize", dense, tmp_path / "out", "--consume")
    assert status == 1 and len(err) == 1 and not lines, err
    assert "nothing was written, as values in 2 of 21 tensors cannot be used: " in err[0]
    assert f"{Q}: 2 of its 4,096 values are not finite (1 NaN, 1 infinite), the first at [3, 17]" in err[0]
    status, lines, _ = command("inspect", dense)
    wrong = [line for line in lines if line.startswith("wrong: ")]
    assert status == 1 and len(wrong) == 2 and any("lm_head.weight: 1 of its 6,144 values" in line for line in wrong)
    assert command("inspect", dense, "--headers")[0] == 0


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts(tmp_path, family):
    """In stacks, or one by one in the files, of which the stacks are made."""
    moe.model(family, 4, dtype=torch.bfloat16).save_pretrained(tmp_path / "dense", max_shard_size="40KB")
    name = next(name for name in sorted(tensors(tmp_path / "dense")) if "experts" in name and "down_proj" in name
                and "bias" not in name)  # fmt: skip
    place = (1, 2) if family == "qwen3_moe" else (1, 2, 3)
    spoil(tmp_path / "dense", name, NAN, place)
    before = content(tmp_path / "dense")
    with pytest.raises(ValueError, match=f"{name}: 1 of its .* NaN.*, the first at ".replace("(", "\\(")):
        quantize_folder(tmp_path / "dense", tmp_path / "out", settings(True), consume=True)
    assert content(tmp_path / "dense") == before


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_published_formats(tmp_path, family):
    """Scales of FP8, and of MXFP4, whose exponent 255 is no number."""
    if family == "gpt_oss":
        moe.save_mxfp4(moe.model("gpt_oss", 3, intermediate_size=64), tmp_path / "given")
        name, value = next(name for name in sorted(tensors(tmp_path / "given")) if name.endswith("_scales")), 255
    else:
        wide = dict.fromkeys(("hidden_size", "moe_intermediate_size", "intermediate_size"), 128)
        moe.save_fp8(moe.model("deepseek_v3", 4, **wide), tmp_path / "given")
        name, value = next(name for name in sorted(tensors(tmp_path / "given")) if name.endswith("scale_inv")), INF
    spoil(tmp_path / "given", name, value, 0)
    with pytest.raises(ValueError, match=f"{name}: .* are not finite"):
        quantize_folder(tmp_path / "given", tmp_path / "out", settings(True))
    assert [path.name for path in tmp_path.iterdir()] == ["given"]
    assert any(line.startswith(f"{name}: ") for line in look(tmp_path / "given").complaints)


@pytest.mark.parametrize("name", [Q, "model.norm.weight"])
def test_values_that_the_models_dtype_does_not_hold(tmp_path, name):
    """Finite in the files, infinite in the dtype of the config."""
    tiny.llama(tmp_path / "dense")
    config = json.loads((tmp_path / "dense" / "config.json").read_text()) | {"dtype": "float16"}
    (tmp_path / "dense" / "config.json").write_text(json.dumps(config))
    spoil(tmp_path / "dense", name, 70000.0, (3, 17) if name == Q else (3,))
    with pytest.raises(ValueError, match=rf"{name}: 1 of its .* values do not fit float16, the first, 70000, at \[3"):
        quantize_folder(tmp_path / "dense", tmp_path / "out", settings(), consume=True)
    config["dtype"] = "float32"
    (tmp_path / "dense" / "config.json").write_text(json.dumps(config))
    quantize_folder(tmp_path / "dense", tmp_path / "out", settings())
    assert not look(tmp_path / "out").complaints


def test_infinite_buffers_are_right(tmp_path):
    """Those of Gemma 4 say that there is no bound; a NaN is none."""
    from transformers import AutoModelForImageTextToText

    text = {
        **tiny.LLAMA, "vocab_size": 96, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "num_kv_shared_layers": 0,
        "layer_types": ["full_attention"] * 2,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 16, "use_clipped_linears": True,
    }  # fmt: skip
    config = Gemma4Config(text_config=text, vision_config=vision, audio_config=None)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "dense")
    bounds = [name for name, each in tensors(tmp_path / "dense").items() if each.numel() == 1 and each.isinf().all()]
    assert bounds
    quantize_folder(tmp_path / "dense", tmp_path / "out", settings())
    made = tensors(tmp_path / "out")
    assert all(made[name].isinf().all() for name in bounds)
    assert not look(tmp_path / "dense").complaints and not look(tmp_path / "out").complaints
    spoil(tmp_path / "dense", bounds[0], NAN, ())
    with pytest.raises(ValueError, match=f"{bounds[0]}: 1 of its 1 values"):
        quantize_folder(tmp_path / "dense", tmp_path / "other", settings())


@pytest.mark.parametrize("base, what", [
    ("dense", "adapter"), ("dense", "base"), ("packed", "saved"), ("packed", "base"), ("packed", "scales"),
])  # fmt: skip
def test_merging(sound, tmp_path, base, what):
    """A base, its scales, an adapter and modules that it saves."""
    copied(sound / base, tmp_path / base)
    name = "model.norm.weight"
    if what in ("adapter", "saved"):
        more = {"modules_to_save": ["lm_head"]} if what == "saved" else {}
        adapted(sound / "dense", tmp_path / "adapter", None, **more)
        path, end = tmp_path / "adapter" / "adapter_model.safetensors", "lm_head.weight" if more else "lora_B.weight"
        found = load_file(path)
        name = next(name for name in sorted(found) if name.endswith(end))
        found[name][1, 2] = NAN
        save_file(found, path)
    else:
        copied(sound / "adapter", tmp_path / "adapter")
        name = name if what == "base" else f"{Q}.nested_absmax"
        spoil(tmp_path / base, name, INF, (0,))
    with pytest.raises(ValueError, match=f"{name}: 1 of its .* values are not finite"):
        merge_folder(tmp_path / base, tmp_path / "adapter", tmp_path / "out", torch.bfloat16)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("to, options", [
    ("dense", {}), ("packed", {}), ("packed", {"use_dora": True}), (torch.float16, {}),
])  # fmt: skip
def test_merging_overflows(sound, tmp_path, to, options):
    """Finite factors whose product is not: nothing is made, of codes either, which would hide NaN."""
    base = "packed" if to == "packed" else "dense"
    adapted(sound / base, tmp_path / "adapter", None, **options)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    found = load_file(path)
    size = 300.0 if to is torch.float16 else 1e30
    for name in [name for name in found if "layers.1.self_attn.q_proj.lora_" in name and name.endswith("weight")]:
        found[name][2 if "lora_B" in name else 0] = size
    save_file(found, path)
    dtype = {"dense": torch.bfloat16, "packed": None}.get(to, to)
    with pytest.raises(ValueError, match=rf"{Q}: .*values are not finite"):
        merge_folder(sound / base, tmp_path / "adapter", tmp_path / "out", dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.parametrize("end, value", [("absmax", INF), ("nested_absmax", NAN), ("nested_quant_map", INF)])
def test_inspect_finds_them_in_an_output(sound, tmp_path, end, value):
    """Scales of either level."""
    packed = copied(sound / "packed", tmp_path / "packed")
    if end == "absmax":
        quantize_folder(sound / "dense", tmp_path / "plain", settings())
        packed = tmp_path / "plain"
    assert command("inspect", packed)[0] == 0
    spoil(packed, f"{Q}.{end}", value, (0,))
    status, lines, _ = command("inspect", packed)
    assert status == 1 and [line for line in lines if line.startswith("wrong: ")] == [
        f"wrong: {Q}.{end}: 1 of its {tensors(packed)[f'{Q}.{end}'].numel()} values are not finite "
        f"({'1 NaN' if value != value else '1 infinite'}), the first at [0]"
    ]


def test_inspect_reads_offsets_and_int8_scales(sound, tmp_path):
    """And packed bytes in a float dtype are codes, which may look like NaN."""
    state = tensors(sound / "packed")
    blob = f"{Q}.quant_state.bitsandbytes__nf4"
    said = json.loads(bytes(state[blob].tolist())) | {"nested_offset": NAN}
    text = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    save_file(state | {blob: text}, tmp_path / "one.safetensors")
    assert any("nested_offset nan is not finite" in line for line in look(tmp_path / "one.safetensors").complaints)
    quantize_folder(sound / "dense", tmp_path / "int8", BitsAndBytesConfig(load_in_8bit=True))
    assert not look(tmp_path / "int8").complaints
    spoil(tmp_path / "int8", Q.removesuffix("weight") + "SCB", INF, (5,))
    assert any("SCB: 1 of its 64 values" in line for line in look(tmp_path / "int8").complaints)
    quantize_folder(sound / "dense", tmp_path / "stored", settings(bnb_4bit_quant_storage=torch.bfloat16))
    spoil(tmp_path / "stored", Q, NAN, (5, 0))
    assert not look(tmp_path / "stored").complaints
    merge_folder(tmp_path / "stored", sound / "adapter", tmp_path / "merged", torch.bfloat16)


def test_what_is_written_is_looked_at(sound, tmp_path, monkeypatch):
    """A device that computes NaN: the file is not written, and no file that it needs is consumed."""
    from bitshard.convert.tensors import Tensors

    read = Tensors.read

    def broken(self, item):
        found = read(self, item)
        for name in found:
            if name == f"{Q}.absmax":
                found[name][1] = NAN
        return found

    monkeypatch.setattr(Tensors, "read", broken)
    dense = copied(sound / "dense", tmp_path / "dense")
    before = content(dense)
    with pytest.raises(ValueError, match=f"{Q}.absmax: 1 of its 64 values are not finite"):
        quantize_folder(dense, tmp_path / "out", settings(), consume=True)
    assert content(dense) == before and [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_calibration_looks_first(sound, tmp_path, monkeypatch):
    """Before the first layer is calibrated."""
    from bitshard.calibration import folder as calibration

    dense = copied(sound / "dense", tmp_path / "dense")
    spoil(dense, Q, INF)
    monkeypatch.setattr(calibration, "calibrate_layers", None)
    with pytest.raises(ValueError, match=f"{Q}: 1 of its 4,096 values are not finite"):
        calibration.calibrate_folder(dense, tmp_path / "out", settings(), moe.TOKENS, consume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_an_interrupted_run_looks_at_what_is_there(sound, tmp_path, monkeypatch):
    """Files that are consumed already were looked at before."""
    dense, replace = copied(sound / "dense", tmp_path / "dense"), output.os.replace
    left = [2]

    def stopping(source, target):
        left[0] -= str(target).endswith(".safetensors")
        if left[0] < 0:
            raise InterruptedError
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(output.os, "replace", stopping)
        with pytest.raises(InterruptedError):
            quantize_folder(dense, tmp_path / "out", settings(), max_shard_size="15KB", consume=True)
    quantize_folder(dense, tmp_path / "out", settings(), max_shard_size="15KB", consume=True)
    assert not list(dense.glob("*.safetensors")) and AutoConfig.from_pretrained(tmp_path / "out")
