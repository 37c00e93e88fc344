"""LLM.int8 where others use it: transformers, accelerate, peft and the original's checkpoints, unpatched, on a CPU."""

import copy
import json
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from bitshard import fsdp
from bitshard.convert.look import look
from bitshard.int8_params import Int8Params
from bitshard.tensor import Params4bit
from bitshard_cli import main
from helpers.bytes import same_bytes
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

from helpers import tiny, upstream  # noqa: E402
from original import upstream_int8 as cases  # noqa: E402
from peft.utils.integrations import dequantize_module_weight  # noqa: E402

SCRIPT = Path(cases.__file__)
SKIPPED = ("lm_head",)  # as transformers has it


@pytest.fixture(scope="module")
def dense_path(tmp_path_factory):
    """Folder of a two-layer Llama with random bf16 weights."""
    path = tmp_path_factory.mktemp("dense")
    sizes = {"vocab_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 64}
    tiny.llama(path, torch.bfloat16, initializer_range=0.2, pad_token_id=0, **sizes)
    return path


@pytest.fixture
def model(dense_path):
    return cases.load_model(dense_path, True)


def layers(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, bnb.nn.Linear8bitLt)}


@torch.no_grad()
def logits(model):
    torch.manual_seed(1)
    return model(torch.randint(1, 128, (2, 12))).logits


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def lora(model, **options):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(model, config)


# ---- transformers ----


def test_loaded_from_16_bits(dense_path, model):
    """Codes and scales are those of the dense weights, which bfloat16 does not round; the model does what those do."""
    dense = transformers.AutoModelForCausalLM.from_pretrained(dense_path, dtype=torch.bfloat16)
    found = layers(model)
    assert len(found) == 14 and not found.keys() & set(SKIPPED)
    for name, module in found.items():
        weight = dense.get_submodule(name).weight
        codes, scales, _ = bnb.functional.int8_vectorwise_quant(weight)
        assert type(module.weight) is Int8Params and not module.weight.requires_grad
        assert torch.equal(module.weight.data, codes) and torch.equal(module.state.SCB, scales)
        assert module.state.threshold == 6.0 and not module.state.has_fp16_weights
    assert 0 < relative(logits(model), logits(dense)) < 0.05
    assert model.num_parameters() == dense.num_parameters()
    assert model.get_memory_footprint() < 0.7 * dense.get_memory_footprint()


def test_saved_and_loaded_twice(model, tmp_path):
    expected = logits(model)
    model.save_pretrained(tmp_path / "first")
    stored = load_file(tmp_path / "first" / "model.safetensors")
    key = "model.layers.0.mlp.up_proj"
    dtypes = [stored[f"{key}.{name}"].dtype for name in ("weight", "SCB", "weight_format")]
    assert dtypes == [torch.int8, torch.float32, torch.uint8]
    assert json.loads((tmp_path / "first" / "config.json").read_text())["quantization_config"]["load_in_8bit"] is True
    again = cases.load_model(tmp_path / "first", False)
    again.save_pretrained(tmp_path / "second", save_original_format=False)
    for other in (again, cases.load_model(tmp_path / "second", False), copy.deepcopy(model)):
        assert same_bytes(logits(other), expected)


def test_dequantize(model):
    expected = {name: dequantize_module_weight(module) for name, module in layers(model).items()}
    before = logits(model)
    dense = model.dequantize()
    assert not layers(dense)
    for name, weight in expected.items():
        assert same_bytes(dense.get_submodule(name).weight.data, weight.to(torch.bfloat16))
    assert relative(logits(dense), before) < 0.05


def test_moves_of_a_model(model):
    """transformers moves 8-bit models where bitsandbytes is new enough; a dtype move it refuses."""
    expected = logits(model)
    assert same_bytes(logits(model.to("cpu")), expected)
    with pytest.raises(ValueError):
        model.half()


def test_offloaded_by_accelerate(model):
    """Weights that leave after each forward, and their scales, come back: twice."""
    expected = logits(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    for _ in range(2):
        assert same_bytes(logits(model), expected)
        assert all(module.weight.is_meta and module.state.CB.is_meta for module in layers(model).values())


def test_as_columns(model, tmp_path):
    """In the form that FSDP shards, but in one process: the same logits, files, values, copies, and merging."""
    expected = logits(model)
    model.save_pretrained(tmp_path / "whole")
    assert fsdp.shardable(model) == 14 and same_bytes(logits(model), expected)
    assert "int8 base not sharded" in fsdp.describe(model) and same_bytes(logits(copy.deepcopy(model)), expected)
    model.save_pretrained(tmp_path / "columns")
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "columns")]
    assert files[0].keys() == files[1].keys() and all(same_bytes(files[0][key], files[1][key]) for key in files[0])
    layer = model.model.layers[0].mlp.up_proj
    assert type(layer.weight) is Params4bit and torch.equal(
        layer.state.CB, files[0]["model.layers.0.mlp.up_proj.weight"]
    )
    assert (
        relative(
            dequantize_module_weight(layer), bnb.functional.int8_vectorwise_dequant(layer.state.CB, layer.state.SCB)
        )
        < 0.01
    )
    tuned = lora(model)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.05)
    expected = logits(tuned)
    tuned.merge_adapter()
    assert 0 < relative(logits(tuned), expected) < 0.05 and type(layer.weight) is Params4bit
    tuned.unmerge_adapter()
    assert relative(logits(tuned), expected) < 0.05


# ---- peft ----

TARGETS = ["q_proj", "up_proj"]
TUNERS = {
    "LoRA": lambda: peft.LoraConfig(r=4, target_modules=TARGETS, lora_bias=False),
    "DoRA": lambda: peft.LoraConfig(r=4, target_modules=TARGETS, use_dora=True),
    "AdaLoRA": lambda: peft.AdaLoraConfig(init_r=6, target_r=4, total_step=10, target_modules=TARGETS),
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "RandLoRA": lambda: peft.RandLoraConfig(r=4, target_modules=["q_proj"]),
    "RoAd": lambda: peft.RoadConfig(target_modules=TARGETS, group_size=32),
    "HiRA": lambda: peft.HiraConfig(r=4, target_modules=TARGETS),
    "PVeRA": lambda: peft.PveraConfig(r=4, target_modules=["q_proj"]),
    "VeRA": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"]),
    "OFT": lambda: peft.OFTConfig(oft_block_size=8, target_modules=TARGETS),
}
# peft merges none of them into 8-bit weights: of RandLoRA it adds another matrix, beside the original, too (0.21)
UNMERGED = ("AdaLoRA", "IA3", "RandLoRA")


@pytest.mark.parametrize("name", [name for name in TUNERS if hasattr(peft, type(TUNERS[name]()).__name__)])
def test_tuners(model, name):
    """Every tuner of peft with a layer for int8 trains, leaves the base alone, merges into it, and is taken out."""
    torch.manual_seed(0)
    codes = {key: module.weight.data.clone() for key, module in layers(model).items()}
    config = TUNERS[name]()
    config.task_type = "CAUSAL_LM"
    tuned = peft.get_peft_model(peft.prepare_model_for_kbit_training(model), config)
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=2e-2)
    ids = torch.randint(1, 128, (4, 16))
    losses = []
    for _ in range(4):
        loss = tuned(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    for key, module in layers(model).items():
        assert torch.equal(module.weight.data, codes[key.replace(".base_layer", "")]), key
    tuned.eval()
    expected = logits(tuned)
    if name in UNMERGED:
        return
    tuned.merge_adapter()
    assert relative(logits(tuned), expected) < 0.1
    assert any(not torch.equal(m.weight.data, codes[k.replace(".base_layer", "")]) for k, m in layers(model).items())
    tuned.unmerge_adapter()
    assert relative(logits(tuned), expected) < 0.1
    for module in layers(model).values():
        assert module.state.SCB is module.weight.SCB and module.state.CB.data_ptr() == module.weight.data_ptr()


def test_lora_gradients_are_those_of_the_dequantized_model(dense_path, model):
    """Few rows, so x is multiplied as it is: the adapters' gradients equal those over the decoded weights."""
    plain = cases.load_model(dense_path, True).dequantize().float()
    ids = torch.randint(1, 128, (1, 6), generator=torch.Generator().manual_seed(0))
    gradients = []
    for each in (model, plain):
        tuned = lora(each)
        torch.manual_seed(2)
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.data.copy_(torch.randn_like(parameter) * 0.05)
        tuned(input_ids=ids, labels=ids).loss.backward()
        gradients.append({n: p.grad for n, p in tuned.named_parameters() if p.requires_grad})
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) == 28
    for name, gradient in gradients[0].items():
        assert relative(gradient, gradients[1][name]) < 0.1, name


def test_trainer(dense_path, model, tmp_path):
    """`Trainer` trains adapters and saves them; loaded into a new int8 model they do the same."""
    tuned = lora(model)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(1, 128, (8, 12)).tolist()]
    arguments = transformers.TrainingArguments(
        tmp_path / "out", max_steps=4, per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True, report_to=[],
        save_strategy="no", logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(tuned, arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 4 and losses[-1] < losses[0], losses
    tuned.save_pretrained(tmp_path / "adapter")
    tuned.eval()
    again = peft.PeftModel.from_pretrained(cases.load_model(dense_path, True), tmp_path / "adapter").eval()
    assert same_bytes(logits(again), logits(tuned))


# ---- the original's files ----


@pytest.fixture(scope="module")
def folders(tmp_path_factory, dense_path):
    """Files by writer: "theirs" and "ours" from scratch, "theirs_from_ours" after loading."""
    upstream.folder_or_skip()
    place = {name: tmp_path_factory.mktemp(name) for name in ("theirs", "ours", "theirs_from_ours", "ours_from_theirs")}
    cases.write(place["ours"], dense_path)
    upstream.run(SCRIPT, *(str(place[name]) for name in ("theirs", "ours", "theirs_from_ours")), str(dense_path))
    cases.read(place["theirs"], place["ours_from_theirs"])
    return place


@pytest.mark.parametrize("other", ["ours", "theirs_from_ours", "ours_from_theirs"])
def test_files_of_the_original(folders, other):
    """The same entries, dtypes and bytes, whoever has quantized them and whoever has read them in between."""
    for file in ("layer.safetensors", "model/model.safetensors"):
        expected, found = load_file(folders["theirs"] / file), load_file(folders[other] / file)
        computed = (expected.pop("y", None), found.pop("y", None))
        assert expected.keys() == found.keys()
        assert all(same_bytes(expected[key], found[key]) for key in expected), file
        if computed[0] is not None:
            assert torch.allclose(*map(torch.Tensor.float, computed), atol=0.02)
    expected, found = (load_file(folders[name] / "logits.safetensors")["logits"] for name in ("theirs", other))
    assert relative(found, expected) < 0.05


@pytest.mark.parametrize("file", ["layer.pt", "used.pt"])
def test_pickles_of_the_original(folders, file):
    """A pickled layer arrives with a plain parameter; after a forward its scales are in `state` alone."""
    layer = torch.load(folders["theirs"] / file, weights_only=False)
    stored = load_file(folders["theirs"] / "layer.safetensors")
    assert type(layer.weight) is Int8Params and torch.equal(layer.weight.SCB, stored["SCB"])
    assert same_bytes(layer(stored["x"]), load_file(folders["ours"] / "layer.safetensors")["y"])


# ---- folders ----


def tensors(folder):
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


@pytest.mark.parametrize("skip", [None, ["q_proj", "lm_head"]])
def test_quantized_folder(dense_path, tmp_path, capsys, skip):
    """`bitshard quantize --bits 8`: the bytes of loading and saving, in several files; `inspect` knows them."""
    config = transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skip)
    command = ["quantize", str(dense_path), str(tmp_path / "out"), "--bits", "8", "--max-shard-size", "15KB"]
    assert main.main([*command, *(["--skip", *skip] if skip else [])]) == 0
    said = capsys.readouterr().out
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(dense_path, quantization_config=config, device_map="cpu")
    model.save_pretrained(tmp_path / "reference")
    ours, theirs = tensors(tmp_path / "out"), tensors(tmp_path / "reference")
    assert ours.keys() == theirs.keys() and all(same_bytes(ours[name], theirs[name]) for name in ours)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "reference")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    again = load(tmp_path / "out", device_map="cpu")
    assert same_bytes(logits(again), logits(model)) and len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    packed = sum(layer.weight.numel() for layer in layers(model).values())
    assert len(layers(model)) == (12 if skip else 14) and f"{packed:,} of " in said and "in 8 bits" in said
    assert "not in 8 bits: model.embed_tokens.weight: an embedding" in said
    looked = look(tmp_path / "out", sums=True)
    found = {weight.name: weight for weight in looked.weights if weight.format == "int8"}
    assert not looked.complaints and found.keys() == {f"{name}.weight" for name in layers(model)}
    up = found["model.layers.1.mlp.up_proj.weight"]
    assert (up.shape, up.nbytes) == ((96, 64), 96 * 64 + 96 * 4 + 1) and "of them in 8 bits" in looked.summary()
    assert any(line.startswith("int8 weights, a scale for each row, in I8: ") for line in looked.kinds())


def test_scales_in_files_are_looked_at(tmp_path):
    """Of another length or dtype, and of codes that are no matrix; sums cover them."""
    entries = {"a.weight": torch.zeros(4, 8, dtype=torch.int8), "a.SCB": torch.ones(4)}
    entries |= {"b.weight": torch.zeros(4, dtype=torch.int8), "c.SCB": torch.ones(4), "c.bias": torch.ones(3)}
    save_file(entries, tmp_path / "sound.safetensors")
    sound = look(tmp_path / "sound.safetensors", sums=True)
    formats = {"a.weight": "int8", "b.weight": "I8", "c.SCB": "F32", "c.bias": "F32"}
    assert not sound.complaints and {w.name: w.format for w in sound.weights} == formats
    (weight,) = (w for w in sound.weights if w.name == "a.weight")
    assert "48 bytes, in I8, a scale for each row" in weight.line()
    save_file({**entries, "a.SCB": torch.ones(4) * 2}, tmp_path / "other.safetensors")
    others = {w.name: w.sum for w in look(tmp_path / "other.safetensors", sums=True).weights}
    assert [w.name for w in sound.weights if others[w.name] != w.sum] == ["a.weight"]
    for scales in (torch.ones(3), torch.ones(4).half()):
        save_file({**entries, "a.SCB": scales}, tmp_path / "wrong.safetensors")
        (complaint,) = look(tmp_path / "wrong.safetensors").complaints
        assert complaint.startswith("a.SCB: F") and "expected F32, one for each row of [4, 8]" in complaint
