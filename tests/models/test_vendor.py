"""Models whose files others have packed in MXFP4 or NVFP4: the values of the specification, training, and their bytes.

The files are made here from the documents of the layouts, with random codes and scales (`helpers.moe`).
"""

import json
import re

import pytest
import torch
import transformers
from bitshard import experts, fsdp, functional
from bitshard.convert.look import look
from bitshard.formats import layouts
from bitshard.formats.state import QuantState
from bitshard.kinds import kind_of
from bitshard.nn.linear import Linear4bit
from bitshard.transformers import FourBitConfig, dense_config
from bitshard_cli.main import main
from helpers import moe, tiny
from helpers.bytes import same_bytes
from helpers.microscaled import SCALE, VALUE
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

NVFP4 = ("modelopt", "compressed-tensors")
EXPERTS = ("modelopt qwen3_moe", "compressed-tensors mixtral", "modelopt deepseek_v3")
FILES = ("mxfp4", *NVFP4, *EXPERTS)
LAYER = re.compile(r"(.*\.)(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(\w+)\.weight")


def dense_of(what):
    """The model whose files are made."""
    if what == "mxfp4":
        return moe.model("gpt_oss", 3, intermediate_size=64)
    layout, _, family = what.partition(" ")
    sizes = {"intermediate_size": 64} | ({} if family == "mixtral" else {"moe_intermediate_size": 64})
    return moe.model(family, 4, **sizes) if family else tiny.llama()


def made(folder, what):
    """Files in a layout."""
    if what == "mxfp4":
        moe.save_mxfp4(dense_of(what), folder)
    else:
        moe.save_nvfp4(dense_of(what), folder, what.partition(" ")[0])
    return folder


@pytest.fixture(scope="module", params=FILES)
def given(request, tmp_path_factory):
    """(name of the layout, folder in it)"""
    return request.param, made(tmp_path_factory.mktemp("vendor") / request.param, request.param)


def load(folder, quant_type, **options):
    config = FourBitConfig(bnb_4bit_quant_type=quant_type, bnb_4bit_compute_dtype=torch.float32)
    options = {"dtype": torch.float32, "device_map": "cpu", "config": dense_config(folder), **options}
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **options).eval()


def type_of(what):
    return "mxfp4" if what == "mxfp4" else "nvfp4"


def decoded(what, files):
    """{key of a weight: values}, of experts in stacks."""
    return stacked(layers_of(what, files))


def layers_of(what, files):
    """{key of a weight: values} by the layout's own document: the first code of a byte is its low half."""
    found = {}
    for name, packed in files.items():
        if packed.dtype is not torch.uint8 or name.endswith("_scales"):
            continue
        layout = what.partition(" ")[0]
        codes = VALUE[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()]
        if what == "mxfp4":
            key = name.removesuffix("_blocks")
            scales = SCALE["mxfp4"][files[f"{key}_scales"].long()]
            found[key] = (codes * scales.unsqueeze(-1)).flatten(-2)
            continue
        layer = name.removesuffix("_packed").removesuffix(".weight")
        scales = SCALE["nvfp4"][files[f"{layer}.weight_scale"].view(torch.uint8).long()]
        if layout == "modelopt":
            scales = scales * files[f"{layer}.weight_scale_2"]
        else:
            scales = scales * (1 / files[f"{layer}.weight_global_scale"])
        found[f"{layer}.weight"] = codes * scales.repeat_interleave(16, -1)
    return found


def stacked(layers):
    """{key: values} with those of experts in stacks, as transformers' modules have them."""
    found, stacks = {}, {}
    for key, values in layers.items():
        of = LAYER.fullmatch(key)
        if of is None:
            found[key] = values
            continue
        name = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(of[3], of[3])
        stacks.setdefault(f"{of[1]}mlp.experts", {}).setdefault(int(of[2]), {})[name] = values
    for path, numbered in stacks.items():
        each = [numbered[number] for number in range(len(numbered))]
        found[f"{path}.gate_up_proj"] = torch.stack([torch.cat([e["gate_proj"], e["up_proj"]]) for e in each])
        found[f"{path}.down_proj"] = torch.stack([e["down_proj"] for e in each])
    return found


def weights_of(model):
    """{key: (packed, state)} of all packed weights."""
    found = {
        f"{n}.weight": (m.weight.data, m.quant_state) for n, m in model.named_modules() if isinstance(m, Linear4bit)
    }
    for name, module in model.named_modules():
        for stack, held in getattr(module, "packed_stacks", {}).items():
            found[f"{name}.{stack}"] = module._parameters[stack].data, held.state
    return found


def equal_files(folder, other):
    found, wanted = load_file(folder / "model.safetensors"), load_file(other / "model.safetensors")
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    assert [name for name in wanted if not same_bytes(found[name], wanted[name])] == []
    assert [name for name in wanted if found[name].shape != wanted[name].shape] == []
    configs = [json.loads((each / "config.json").read_text())["quantization_config"] for each in (folder, other)]
    assert configs[0] == configs[1]
    small = [each / "hf_quant_config.json" for each in (folder, other)]
    assert small[0].exists() == small[1].exists()
    assert not small[1].exists() or small[0].read_bytes() == small[1].read_bytes()


def test_values_are_those_of_the_specification(given):
    what, folder = given
    model = load(folder, type_of(what))
    files = load_file(folder / "model.safetensors")
    wanted, found = decoded(what, files), weights_of(model)
    assert wanted.keys() == found.keys() and found
    for key, (packed, state) in found.items():
        assert torch.equal(functional.dequantize_4bit(packed, state), wanted[key]), key
        kind = kind_of(type_of(what))
        assert state.kind is (kind.stack if "experts" in key and "shared" not in key else kind)
    left = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    assert "lm_head" in left and ("model.layers.0.self_attn.q_proj" in left) == (what == "mxfp4")
    for name in left:
        assert torch.equal(model.get_submodule(name).weight, files[f"{name}.weight"])
    if " " in what:  # global scales of gate and up differ, and are both there
        second = next(state for key, (_, state) in found.items() if "gate_up" in key).state2.absmax
        assert len(second.unique()) == 2 * 4


def test_logits_are_those_of_the_decoded_model(given):
    what, folder = given
    model = load(folder, type_of(what))
    files = load_file(folder / "model.safetensors")
    dense = dense_of(what)
    named = {name.replace("block_sparse_moe", "mlp"): value for name, value in files.items()}
    state = {name: value for name, value in named.items() if name in dense.state_dict()}
    values = decoded(what, files)
    turned = what == "mxfp4"
    state |= {key: value.transpose(1, 2) if value.dim() == 3 and turned else value for key, value in values.items()}
    dense.load_state_dict(state)
    with torch.no_grad():
        found, wanted = (each.eval()(input_ids=moe.TOKENS).logits for each in (model, dense))
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_saved_files_are_the_files(given, tmp_path):
    """By transformers and by bitshard, also after a forward, a backward and steps of adapters."""
    what, folder = given
    model = load(folder, type_of(what))
    model.save_pretrained(tmp_path / "theirs")
    equal_files(tmp_path / "theirs", folder)
    targets = {"target_modules": ["kv_b_proj" if "deepseek" in what else "q_proj", "o_proj"]}
    adapted = get_peft_model(model, LoraConfig(r=4, **targets))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        loss = adapted(input_ids=moe.TOKENS, labels=moe.TOKENS).loss
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    fsdp.save_pretrained(adapted, tmp_path / "ours", progress=False)
    equal_files(tmp_path / "ours", folder)
    again = load(tmp_path / "ours", type_of(what))
    assert all(
        same_bytes(a[0], b[0]) for a, b in zip(weights_of(again).values(), weights_of(model).values(), strict=True)
    )


@pytest.mark.parametrize("what", NVFP4)
def test_merged_into_nvfp4_again(what, tmp_path):
    """To the nearest, in the layout of the files, what servers need kept; other layers keep their bytes."""
    folder = made(tmp_path / "given", what)
    model = get_peft_model(load(folder, "nvfp4"), LoraConfig(r=4, target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    before = load_file(folder / "model.safetensors")
    fsdp.save_pretrained(model, tmp_path / "merged", merge=True, progress=False)
    after = load_file(tmp_path / "merged/model.safetensors")
    assert after.keys() == before.keys()
    changed = {name for name in before if not same_bytes(before[name], after[name])}
    assert changed and all("q_proj.weight" in name for name in changed), changed
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    delta = layer.get_delta_weight("default")
    wanted = functional.dequantize_4bit(layer.base_layer.weight.data, layer.base_layer.quant_state) + delta
    found = decoded(what, after)["model.layers.0.self_attn.q_proj.weight"]
    packed, state = functional.quantize_nvfp4(wanted.detach())
    assert torch.allclose(found, functional.dequantize_4bit(packed, state), rtol=1e-5)


def test_mxfp4_by_its_own_config_where_experts_are_enabled(tmp_path):
    """transformers itself knows no ModelOpt, and leaves compressed-tensors to its package."""
    folder = made(tmp_path / "given", "mxfp4")
    experts.enable()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        decoded_one = transformers.Mxfp4Config(dequantize=True)
        dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=decoded_one)
    finally:
        experts.disable()
    theirs = load(folder, "mxfp4")
    assert {state.kind.name for _, state in weights_of(model).values()} == {"mxfp4_experts"}
    with torch.no_grad():
        found, wanted, of_dense = (each(input_ids=moe.TOKENS).logits for each in (model, theirs, dense.eval()))
    assert torch.equal(found, wanted) and not weights_of(dense)
    assert (of_dense - wanted).abs().max() < 0.05  # transformers 5.17 decodes to bfloat16
    model.save_pretrained(tmp_path / "saved")
    equal_files(tmp_path / "saved", folder)


def spoilt(folder, out, name, change):
    files = load_file(folder / "model.safetensors")
    key = next(each for each in files if each.endswith(name))
    value = change(files.pop(key))
    files |= {} if value is None else {key: value}
    out.mkdir()
    save_file(files, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_bytes((folder / "config.json").read_bytes())
    return out


def filled(value):
    return lambda tensor: tensor.view(torch.uint8).index_fill(-1, torch.tensor([0]), value).view(tensor.dtype)


BAD = [
    ("mxfp4", "down_proj_scales", filled(255), "scales of mxfp4 are NaN"),
    ("mxfp4", "down_proj_scales", filled(253), "byte 253, expected at most 252"),
    ("mxfp4", "down_proj_scales", lambda t: t[:, :-1].contiguous(), r"\[E, N, K / 32\]"),
    ("mxfp4", "down_proj_scales", lambda t: t.float(), "expected uint8"),
    ("mxfp4", "down_proj_blocks", lambda t: t.flatten(-2), "16"),
    ("mxfp4", "down_proj_scales", lambda t: None, "down_proj"),
    ("modelopt", "q_proj.weight_scale_2", lambda t: t * 0, "global scale is 0"),
    ("modelopt", "q_proj.weight_scale_2", lambda t: t * float("nan"), "global scale is nan"),
    ("modelopt", "q_proj.weight_scale_2", lambda t: torch.ones(2), "expected one float32"),
    ("modelopt", "q_proj.weight_scale", filled(127), "scales of nvfp4 are NaN"),
    ("modelopt", "q_proj.weight_scale", lambda t: t.view(torch.uint8), "float8_e4m3fn"),
    ("modelopt", "q_proj.weight_scale", lambda t: t[:, :-1].contiguous(), r"\[N, K / 16\]"),
    ("compressed-tensors", "q_proj.weight_global_scale", lambda t: t * 0, "global scale is 0"),
    ("compressed-tensors", "q_proj.weight_global_scale", lambda t: t / 0, "global scale is inf"),
    ("compressed-tensors", "q_proj.weight_packed", lambda t: t[:, :-8].contiguous(), "packed codes are uint8"),
]


def changed(folder, change, settings=None, name="model.safetensors"):
    """Change tensors, and what the config says of them."""
    files = load_file(folder / name)
    change(files)
    save_file(files, folder / name, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings or {}
    (folder / "config.json").write_text(json.dumps(config))


def dense_experts(files):
    """The experts of the first layer in 16 bits, as where a config excludes a layer."""
    for name in [name for name in files if LAYER.fullmatch(name) and "layers.0." in name]:
        layer = name.removesuffix(".weight")
        files[name] = torch.randn(files[name].shape[0], files[name].shape[1] * 2)
        for end in ("weight_scale", "weight_scale_2", "input_scale"):
            del files[f"{layer}.{end}"]


def test_experts_of_a_layer_in_16_bits(tmp_path):
    """They stay so, under the names of the files; those of the other layer keep their bytes."""
    folder = made(tmp_path / "given", "modelopt qwen3_moe")
    changed(folder, dense_experts)
    model = load(folder, "nvfp4")
    assert {key.split(".")[2] for key in weights_of(model) if "experts" in key} == {"1"}
    files = load_file(folder / "model.safetensors")
    stack = model.model.layers[0].mlp.experts.gate_up_proj
    assert torch.equal(stack[3, 64:], files["model.layers.0.mlp.experts.3.up_proj.weight"])
    model.save_pretrained(tmp_path / "theirs")
    fsdp.save_pretrained(model, tmp_path / "ours", progress=False)
    equal_files(tmp_path / "theirs", folder)
    equal_files(tmp_path / "ours", folder)


def without_an_expert(files):
    for name in [name for name in files if "layers.0.mlp.experts.2.up_proj" in name]:
        del files[name]


def in_fp8(files):
    layer = "model.layers.0.self_attn.q_proj"
    rows, half = files[f"{layer}.weight"].shape
    files[f"{layer}.weight"] = torch.randn(rows, 2 * half).to(torch.float8_e4m3fn)
    files[f"{layer}.weight_scale"] = torch.ones(())
    del files[f"{layer}.weight_scale_2"]


AWQ = {"model.layers.0.self_attn.q_proj.pre_quant_scale": torch.ones(64)}
MEANT_OTHERWISE = [
    ("modelopt qwen3_moe", without_an_expert, {}, "packed experts are {.*: 4, .*: 3}"),
    ("modelopt", lambda files: files.update(AWQ), {}, r"\['model.layers.0.self_attn.q_proj.pre_quant_scale'\]"),
    ("modelopt", in_fp8, {}, "1 weights .*self_attn.q_proj.weight is F8_E4M3"),
    ("compressed-tensors", lambda files: None, {"transform_config": {"config_groups": {"u": 1}}}, "transform_config"),
]


@pytest.mark.parametrize("what, change, settings, words", MEANT_OTHERWISE)
def test_what_is_meant_otherwise(what, change, settings, words, tmp_path, capfd, caplog):
    folder = made(tmp_path / "given", what)
    changed(folder, change, settings)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        load(folder, "nvfp4")
    assert re.search(words, "".join([str(caught.value), caplog.text, *capfd.readouterr()]))


def test_global_scales_that_no_blocks_divide(tmp_path, capfd, caplog):
    """gate and up of 48 rows of 64 have 192 blocks each: their global scales cannot be told apart."""
    moe.save_nvfp4(moe.model("qwen3_moe", 4), tmp_path / "given", "modelopt")
    with pytest.raises(RuntimeError):
        load(tmp_path / "given", "nvfp4")
    words = r"gate_proj.*up_proj.* have \[192, 192\] blocks of 16 .* expected multiples of 256"
    assert re.search(words, "".join([caplog.text, *capfd.readouterr()]))


def test_what_the_model_has_no_place_for(tmp_path, caplog):
    """It is written again, large tensors from the files; where these have gone that is an error, in 16 bits a line."""
    folder = made(tmp_path / "given", "modelopt")
    model = load(folder, "nvfp4")
    caplog.set_level("WARNING", "bitshard")
    fsdp.save_pretrained(model, tmp_path / "dense", dtype=torch.bfloat16, progress=False)
    assert "left out are 6 tensors of the modelopt files" in caplog.text and "mtp.layers.0.enorm.weight" in caplog.text
    assert not (tmp_path / "dense/hf_quant_config.json").exists()
    assert not [name for name in load_file(tmp_path / "dense/model.safetensors") if "scale" in name or "mtp" in name]
    fsdp.save_pretrained(model, folder, progress=False)  # over the files themselves
    equal_files(folder, made(tmp_path / "again", "modelopt"))
    for save in (model.save_pretrained, lambda out: fsdp.save_pretrained(model, out, progress=False)):
        with pytest.raises(ValueError, match="1 tensors that the model has no place for .* not there as they were"):
            save(tmp_path / "out")


def test_saved_by_transformers_over_its_own_files(tmp_path):
    folder = made(tmp_path / "given", "compressed-tensors mixtral")
    load(folder, "nvfp4").save_pretrained(folder)
    equal_files(folder, made(tmp_path / "again", "compressed-tensors mixtral"))


def test_files_whose_config_does_not_say_it(tmp_path):
    """ModelOpt's first ones: hf_quant_config.json alone. What is saved says so in both."""
    folder = made(tmp_path / "given", "modelopt")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    model = load(folder, "nvfp4")
    model.save_pretrained(tmp_path / "saved")
    found = json.loads((tmp_path / "saved/config.json").read_text())["quantization_config"]
    assert found == {"quant_method": "modelopt", **moe.MODELOPT["quantization"]}
    assert json.loads((tmp_path / "saved/hf_quant_config.json").read_text()) == moe.MODELOPT
    assert weights_of(load(tmp_path / "saved", "nvfp4")).keys() == weights_of(model).keys()


@pytest.mark.parametrize("what", FILES)
def test_every_entry_is_needed(what, tmp_path):
    """Without one `read` names it: none counts as 1."""
    files = load_file(made(tmp_path / "given", what) / "model.safetensors")
    layout = layouts.layout_of(files)
    key = sorted(layout.packed_in(files).values())[0]
    for end in layout.needed():
        absent = f"{key.removesuffix(layout.end)}{end}"
        get = {name: value for name, value in files.items() if name != absent}.get
        with pytest.raises(ValueError, match=f"{re.escape(key)}: {re.escape(absent)} missing"):
            layout.read(key, get, torch.float32, QuantState)
    assert layout.needed() == [end for end in layout.ends() if end not in layout.others] and len(files) > 9


@pytest.mark.parametrize("what, name, change, words", BAD)
def test_bad_files(what, name, change, words, tmp_path, capfd, caplog):
    """An error, with the numbers in transformers' report; nothing is half loaded."""
    folder = spoilt(made(tmp_path / "given", what), tmp_path / "bad", name, change)
    with pytest.raises((ValueError, RuntimeError, TypeError)) as caught:
        load(folder, type_of(what))
    assert re.search(words, "".join([str(caught.value), caplog.text, *capfd.readouterr()]))


def test_other_formats_are_named(tmp_path):
    folder = made(tmp_path / "given", "modelopt")
    with pytest.raises(ValueError, match="bnb_4bit_quant_type='nvfp4'"):
        load(folder, "nf4")
    assert layouts.layout_of(load_file(folder / "model.safetensors")) is layouts.ModelOpt
    with pytest.raises(ValueError, match="bnb_4bit_quant_type='nvfp4'"):
        transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=FourBitConfig())


@pytest.mark.parametrize("what", FILES)
def test_entries_of_a_weight_in_two_files(what, tmp_path):
    """They are found together: read in their format, and named where another one is wanted."""
    folder = made(tmp_path / "given", what)
    files = load_file(folder / "model.safetensors")
    parts = [{}, {}]
    for name, value in files.items():
        parts["scale" in name][name] = value
    (folder / "model.safetensors").unlink()
    index = {}
    for number, part in enumerate(parts):
        save_file(part, folder / f"model-0000{number + 1}-of-00002.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(part, f"model-0000{number + 1}-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    kept = weights_of(load(folder, type_of(what)))
    assert {state.quant_type for _, state in kept.values()} == {type_of(what)}
    if what == "mxfp4":
        assert {state.quant_type for _, state in weights_of(load(folder, "nf4")).values()} == {"nf4"}
    else:
        with pytest.raises(ValueError, match="bnb_4bit_quant_type='nvfp4'"):
            load(folder, "nf4")


def test_a_quantized_embedding_is_refused(given):
    what, folder = given
    config = FourBitConfig(bnb_4bit_quant_type=type_of(what), bnb_4bit_embedding_bits=8)
    with pytest.raises(ValueError, match="bnb_4bit_embedding_bits=8: the files are in a layout of"):
        AutoModelForCausalLM.from_pretrained(folder, config=dense_config(folder), quantization_config=config)


def test_settings_of_other_files_are_left_out(given):
    what, folder = given
    model = load(folder, type_of(what))
    config = model.config.quantization_config
    again = FourBitConfig.of(config)
    assert config.files and again.files is None and not hasattr(config, "kwargs")
    assert again.bnb_4bit_quant_type == type_of(what) and again.to_dict()["quant_method"] == "bitshard_4bit"


@pytest.mark.parametrize("quant_type", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_quantized_while_loading_and_saved(family, quant_type, tmp_path):
    """Files in 16 bits, linear layers and stacks; what is saved in bitshard's own layout is read again."""
    model = tiny.llama() if family == "llama" else moe.model(family, 4)
    model.save_pretrained(tmp_path / "dense")
    config = FourBitConfig(bnb_4bit_quant_type=quant_type, bnb_4bit_compute_dtype=torch.float32)
    options = {"dtype": torch.float32, "device_map": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config, **options)
    kinds = {state.kind.name for _, state in weights_of(model).values()}
    assert kinds == ({quant_type} if family == "llama" else {quant_type, f"{quant_type}_experts"})
    model.save_pretrained(tmp_path / "theirs")
    fsdp.save_pretrained(model, tmp_path / "ours", progress=False)
    equal_files(tmp_path / "ours", tmp_path / "theirs")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", **options)
    with torch.no_grad():
        assert torch.equal(*(each.eval()(input_ids=moe.TOKENS).logits for each in (model, again)))


@pytest.mark.parametrize("quant_type", ["mxfp4", "nvfp4"])
def test_stacks_are_merged_to_the_nearest(quant_type, tmp_path):
    """peft's merge of an adapter on a stack: each expert is what its sum is quantized to; unmerged the bytes before."""
    moe.model("qwen3_moe", 4).save_pretrained(tmp_path / "dense")
    config = FourBitConfig(bnb_4bit_quant_type=quant_type, bnb_4bit_compute_dtype=torch.float32)
    options = {"dtype": torch.float32, "device_map": "cpu", "quantization_config": config}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", **options)
    settings = LoraConfig(r=4, target_modules=[], target_parameters=["experts.down_proj"], init_lora_weights=False)
    tuned = get_peft_model(model, settings)
    module = model.model.layers[0].mlp.experts.base_layer
    before = module._parameters["down_proj"].data.clone()
    values = functional.dequantize_4bit(before, module.packed_stacks["down_proj"].state)
    delta = model.model.layers[0].mlp.experts.get_delta_weight("default")
    tuned.merge_adapter()
    held = module.packed_stacks["down_proj"]
    for e, wanted in enumerate(values + delta):
        packed, state = kind_of(quant_type).quantize(wanted.detach(), quant_storage=torch.uint8)
        found, own = functional.expert_of(module._parameters["down_proj"].data, held.state, e)
        assert same_bytes(found, packed) and own == state, e
    assert not same_bytes(module._parameters["down_proj"].data, before)
    tuned.unmerge_adapter()
    assert same_bytes(module._parameters["down_proj"].data, before)


def test_inspected(given):
    """Each weight with its shape and format, and what does not fit together."""
    what, folder = given
    found = look(folder)
    packed = {weight.name: weight for weight in found.weights if weight.details}
    assert not found.complaints and packed.keys() == layers_of(what, load_file(folder / "model.safetensors")).keys()
    for weight in packed.values():
        assert weight.format == type_of(what) and weight.details["experts"] == (what == "mxfp4")
    stored = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert sum(weight.nbytes for weight in found.weights) == stored


def test_inspecting_entries_that_contradict_each_other(tmp_path):
    given = made(tmp_path / "given", "modelopt")
    folder = spoilt(given, tmp_path / "bad", "q_proj.weight_scale", lambda t: t[:, :-1].clone())
    assert "q_proj.weight: packed codes are" in look(folder).complaints[0]


@pytest.mark.parametrize("quant_type", ["mxfp4", "nvfp4"])
def test_quantized_by_the_command(quant_type, tmp_path):
    """A folder, a tensor at a time: the files of loading it quantized and saving it; inspected."""
    moe.model("qwen3_moe", 4).save_pretrained(tmp_path / "dense")
    config = FourBitConfig(bnb_4bit_quant_type=quant_type, bnb_4bit_compute_dtype=torch.bfloat16)
    options = {"dtype": torch.float32, "device_map": "cpu", "quantization_config": config}
    AutoModelForCausalLM.from_pretrained(tmp_path / "dense", **options).save_pretrained(tmp_path / "loaded")
    assert main(["quantize", str(tmp_path / "dense"), str(tmp_path / "made"), "--type", quant_type]) == 0
    equal_files(tmp_path / "made", tmp_path / "loaded")
    found = look(tmp_path / "made")
    assert not found.complaints and {w.format for w in found.weights if w.details} == {quant_type}
