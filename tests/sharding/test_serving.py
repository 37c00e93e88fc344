"""`fsdp.dense_weights`: what a server is sent, against peft's merging in one process; TRL's GRPO with it.

More ranks and families of experts: tests/fsdp/parts/moe.py.
"""

import inspect
import json
import sys
import weakref
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from bitshard import fsdp
from bitshard.sharding.checkpoints import dense, gathering
from bitshard.transformers import FourBitConfig
from fsdp.launch import WORKERS, accelerate_launch, run
from helpers import moe, tiny
from helpers.bytes import same_bytes
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files in 16 bits: a Llama with biases, one with tied embeddings, the five families of experts."""
    folder = tmp_path_factory.mktemp("dense")
    tiny.llama(folder / "llama", torch.bfloat16, attention_bias=True)
    tiny.llama(folder / "tied", torch.bfloat16, tie_word_embeddings=True)
    for family in moe.FAMILIES:
        moe.model(family, 4, dtype=torch.bfloat16).save_pretrained(folder / family)
    return folder


def load(path, **options):
    options = {"bnb_4bit_quant_type": "nf4", **options}
    config = FourBitConfig(bnb_4bit_blocksize=32, **options)
    if not path.name.startswith(tuple(moe.FAMILIES)):
        config = BitsAndBytesConfig(load_in_4bit=True, **options)
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=config, device_map="cpu")


def decoded(path, **options):
    """The same model in 16 bits with the values that the 4-bit weights stand for."""
    return moe.decoded(AutoModelForCausalLM.from_pretrained(path, dtype="auto"), load(path, **options))


def lora(kind, path):
    settings = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "lora_alpha": 6}
    if kind == "dora":
        settings |= {"use_dora": True}
    elif kind == "rslora":
        settings |= {"use_rslora": True}
    elif kind == "saved":
        settings |= {"modules_to_save": ["lm_head"]}
    elif kind == "experts":
        down = {"nemotron_h": "up_proj"}.get(path.name, "gate_up_proj")
        settings |= {"target_modules": ["o_proj"], "target_parameters": [f"experts.{down}", "experts.down_proj"]}
    return LoraConfig(**settings)


def both(path, kind, dtype, **settings):
    """A 4-bit model and the one in 16 bits that it stands for, with the same adapters of one dtype."""
    model, plain = (get_peft_model(each(path, **settings), lora(kind, path)) for each in (load, decoded))
    own = model.state_dict()
    for name, parameter in plain.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data = own[name].to(dtype)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data = parameter.data.to(dtype)
    return model, plain


def check_same(got, expected, dtype):
    """Equal bytes; with adapters in 16 bits peft's 4-bit layers round their product once more on a CPU."""
    for name, tensor in got.items():
        other = expected[name].bfloat16()
        if dtype is torch.float32:
            assert same_bytes(tensor, other), name
        else:
            torch.testing.assert_close(tensor, other, rtol=2**-7, atol=2**-8, msg=name)


def saved(model, out):
    """What transformers writes of a model: {name: tensor}."""
    model.save_pretrained(out)
    return {name: value for file in sorted(out.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.mark.parametrize("kind", ["plain", "dora", "rslora", "saved"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True}])
def test_merged_as_peft_does(folder, tmp_path, kind, settings, dtype):
    """The bytes of merge_and_unload on the dequantized model, under the names of its files; the base is untouched."""
    torch.manual_seed(1)
    model, plain = both(folder / "llama", kind, dtype, **settings)
    expected = saved(plain.merge_and_unload(), tmp_path / "merged")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights = fsdp.dense_weights(model)
    got = {}
    for name, tensor in weights:
        assert not tensor.requires_grad and type(tensor) is torch.Tensor
        got[name] = tensor
    assert got.keys() == expected.keys(), got.keys() ^ expected.keys()
    check_same(got, expected, dtype)
    assert [(n, str(t.dtype)[6:], list(t.shape)) for n, t in got.items()] == weights.metadata()
    after = model.state_dict()
    assert all(same_bytes(value, after[name]) for name, value in before.items())


def test_the_base_alone(folder, tmp_path):
    """Without adapters, and with merge=False; a tied head comes once."""
    expected = saved(decoded(folder / "tied"), tmp_path / "out")
    model = load(folder / "tied")
    for found in (dict(fsdp.dense_weights(model)), dict(fsdp.dense_weights(adapted(model), merge=False))):
        assert found.keys() == expected.keys() and "lm_head.weight" not in found
        assert all(same_bytes(found[name], expected[name]) for name in found)


def adapted(model):
    return get_peft_model(model, lora("plain", None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", sorted(moe.FAMILIES))
def test_experts_by_the_names_of_the_files(folder, tmp_path, family, dtype):
    torch.manual_seed(1)
    path = folder / family
    model, plain = both(path, "experts", dtype)
    expected = saved(plain.merge_and_unload(), tmp_path / "merged")
    weights = fsdp.dense_weights(model)
    got = dict(weights)
    assert got.keys() == expected.keys() and any(".experts." in name for name in got)
    check_same(got, expected, dtype)
    assert [(n, str(t.dtype)[6:], list(t.shape)) for n, t in got.items()] == weights.metadata()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dtypes(folder, dtype):
    found = dict(fsdp.dense_weights(load(folder / "llama"), dtype=dtype))
    assert {tensor.dtype for tensor in found.values()} == {dtype}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64, None])
def test_dtypes_that_are_none(folder, dtype):
    with pytest.raises(ValueError, match=f"dense_weights: dtype={dtype}, expected one of"):
        fsdp.dense_weights(nn.Linear(2, 2), dtype=dtype)


def test_modules_without_transformers():
    model = nn.Sequential(bnb.nn.Linear4bit(64, 32, bias=True, quant_type="nf4"), nn.BatchNorm1d(32)).to("cpu")
    found = dict(fsdp.dense_weights(model))
    weight = bnb.functional.dequantize_4bit(model[0].weight.data, model[0].weight.quant_state)
    assert same_bytes(found["0.weight"], weight.bfloat16())
    assert found["1.num_batches_tracked"].dtype is torch.int64


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_model_that_was_not_loaded(kind):
    """Made from its config, with names that files have and with others: every tensor that is announced comes."""
    model = tiny.llama() if kind == "llama" else moe.model(kind, 4)
    weights = fsdp.dense_weights(model, dtype=torch.float32)
    found = dict(weights)
    assert list(found) == [name for name, _, _ in weights.metadata()] and len(found) > 10
    assert torch.equal(found["lm_head.weight"], model.lm_head.weight)


def test_one_tensor_at_a_time(folder):
    """What was handed out is not kept; stacks of experts are decoded one after the other."""
    model = load(folder / "qwen3_moe")
    seen, alive = [], []
    for _, tensor in fsdp.dense_weights(model):
        alive.append(sum(ref() is not None for ref in seen))
        seen.append(weakref.ref(tensor.untyped_storage()))
        del tensor
    assert max(alive) <= 2 * 4  # gate and up of four experts are cut from one stack


def test_nothing_is_gathered_for_metadata(folder, monkeypatch):
    model = load(folder / "qwen3_moe")
    monkeypatch.setattr(gathering, "whole", None)
    assert len(fsdp.dense_weights(model).metadata()) > 20


def test_the_callers_gradient_mode(folder):
    """Inside of the loop it is the caller's own, and a loop that is left early leaves nothing behind."""
    model = load(folder / "llama")
    for _ in fsdp.dense_weights(model):
        assert torch.is_grad_enabled()
        break
    walk = iter(fsdp.dense_weights(model))
    next(walk)
    walk.close()
    assert torch.is_grad_enabled()
    with torch.no_grad():
        for _ in fsdp.dense_weights(model):
            assert not torch.is_grad_enabled()


def test_a_model_that_comes_later(folder):
    """A function gives the model when it is walked; weights are those of that time."""
    box = []
    weights = fsdp.dense_weights(lambda: box[0])
    box.append(load(folder / "llama"))
    first = dict(weights)
    box[0].model.norm.weight.data.mul_(2)
    second = dict(weights)
    changed = [name for name in first if not torch.equal(first[name], second[name])]
    assert changed == ["model.norm.weight"]


def test_weights_that_are_not_quantized_yet():
    model = nn.Sequential(bnb.nn.Linear4bit(64, 32, quant_type="nf4"))
    with pytest.raises(ValueError, match=r"0\.weight: this 4-bit weight is not quantized yet"):
        list(fsdp.dense_weights(model))


# ---- TRL ------------------------------------------------------------------------------------------------------------


def test_what_trl_calls():
    """TRL has no public hook. This fails where a new version walks the weights in another way: docs/serving.md."""
    generation = pytest.importorskip("trl.generation.vllm_generation").VLLMGeneration
    assert list(inspect.signature(generation._iter_named_params).parameters) == ["self"]
    walks = inspect.getsource(generation.sync_weights)
    assert walks.count("self._iter_named_params()") == 4 and "if self._weight_metadata is None" in walks
    assert "update_named_params(self._weight_metadata, self._iter_named_params())" in walks
    assert "self._weight_metadata = None" in inspect.getsource(generation.__init__)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A model of bytes and its tokenizer, prompts and answers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("grpo")
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {"<end>": 256}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.save_pretrained(folder / "model")
    tiny.llama(folder / "model", torch.bfloat16, vocab_size=257, num_key_value_heads=2)
    lines = [json.dumps({"prompt": f"{i} and {i}", "answer": str(2 * i)}) for i in range(8)]
    (folder / "data.jsonl").write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize("how", ["one", "fsdp2", "fsdp1"])
def test_grpo(job, how):
    """Three steps: after each the server has what peft merges in one process, to the bit, and generates with it."""
    arguments = [str(job / how), str(job / "model"), str(job / "data.jsonl")]
    if how == "one":
        run([sys.executable, str(WORKERS / "grpo_trainer.py"), *arguments], 240)
    else:
        accelerate_launch(f"{how}.yaml", "grpo_trainer.py", *arguments)
    report = json.loads(Path(f"{job / how}.0").read_text())
    assert report["sent"] == 3 and report["wrong"] == [] and report["changed"] == 14
    assert ("sharded by FSDP" in report["sharded"]) is (how != "one")
    assert report["ratios"] == pytest.approx([1, 1, 1], abs=5e-3)  # of what is trained to what generates


def test_the_page_has_the_lines_of_the_example():
    root = Path(__file__).parents[2]
    page = (root / "docs" / "serving.md").read_text(encoding="utf-8")
    example = (root / "examples" / "grpo.py").read_text(encoding="utf-8")
    lines = [line.strip() for line in inspect.cleandoc(example.partition("def send_dense_weights")[2]).splitlines()]
    hook = [line for line in lines if line.startswith(("weights =", "trainer.vllm_generation"))]
    assert len(hook) == 3 and all(line in page for line in hook)
    assert dense.DenseWeights.metadata.__doc__
