"""`bitshard quantize` and `bitshard inspect`: folders of weights made and looked at, a tensor at a time."""

import json
import math
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import weakref
from functools import partial

import pytest
import torch
import transformers
from bitshard import fsdp, functional
from bitshard.convert import output, quantize
from bitshard.convert.headers import read_header
from bitshard.convert.look import look
from bitshard.convert.merge import merge_folder
from bitshard.convert.quantize import quantize_folder
from bitshard.transformers import FourBitConfig
from bitshard_cli import main
from helpers import moe, tiny
from helpers.files import same, tensors
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig


def llama(folder, dtype=torch.bfloat16, shard="60KB", **options):
    tiny.llama(folder, dtype, shard=shard, **options)
    (folder / "tokenizer_config.json").write_text("{}\n")
    return folder


def settings(experts=False, **options):
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16, **options}
    return FourBitConfig(**options) if experts else BitsAndBytesConfig(load_in_4bit=True, **options)


def saved_by_transformers(folder, out, config):
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map="cpu")
    model.save_pretrained(out)
    return model


@pytest.mark.parametrize("options", [
    {}, {"bnb_4bit_use_double_quant": True}, {"bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": torch.bfloat16},
    {"llm_int8_skip_modules": ["q_proj", "lm_head"]},
])  # fmt: skip
@pytest.mark.parametrize("tied", [False, True])
def test_bytes_of_loading_and_saving(tmp_path, options, tied):
    """And what is there can be loaded; several files in, several out; small files come along."""
    dense = llama(tmp_path / "dense", tie_word_embeddings=tied)
    report = quantize_folder(dense, tmp_path / "out", settings(**options), max_shard_size="15KB")
    model = saved_by_transformers(dense, tmp_path / "reference", settings(**options))
    same(tensors(tmp_path / "out"), tensors(tmp_path / "reference"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", device_map="cpu")
    assert torch.equal(again(moe.TOKENS).logits, model(moe.TOKENS).logits)
    assert report.files == len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert report.packed == sum(
        m.weight.quant_state.shape.numel() for m in model.modules() if hasattr(m, "quant_state")
    )
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == "{}\n"
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("experts", [True, False])
@pytest.mark.parametrize("family", moe.FAMILIES)
def test_mixtures(tmp_path, family, experts):
    """Experts in stacks or one by one in the files, over several of them; transformers' names there and back."""
    moe.model(family, 4, dtype=torch.bfloat16).save_pretrained(tmp_path / "dense", max_shard_size="40KB")
    config = settings(experts, bnb_4bit_use_double_quant=True)
    report = quantize_folder(tmp_path / "dense", tmp_path / "out", config, max_shard_size="50KB")
    saved_by_transformers(tmp_path / "dense", tmp_path / "reference", config)
    same(tensors(tmp_path / "out"), tensors(tmp_path / "reference"))
    assert experts is not any("experts" in reason for reason in report.skipped.values()) or family != "gpt_oss"


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_published_formats(tmp_path, family, capfd):
    """MXFP4 and FP8: the model that loading them with dense_config gives."""
    if family == "gpt_oss":
        moe.save_mxfp4(moe.model("gpt_oss", 3, intermediate_size=64), tmp_path / "given")
    else:
        wide = dict.fromkeys(("hidden_size", "moe_intermediate_size", "intermediate_size"), 128)
        moe.save_fp8(moe.model("deepseek_v3", 4, **wide), tmp_path / "given")
    config = settings(experts=True)
    report = quantize_folder(tmp_path / "given", tmp_path / "out", config)
    assert report.skipped["model.embed_tokens.weight"] == "an embedding" and not list(tmp_path.glob("*.partial"))
    weights = look(tmp_path / "out").weights
    assert report.packed == sum(math.prod(weight.shape) for weight in weights if weight.details) > report.dense > 0
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path / "given", config=transformers_dense(tmp_path / "given"), quantization_config=config, device_map="cpu"
    )
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", device_map="cpu")
    assert torch.equal(again(moe.TOKENS).logits, expected(moe.TOKENS).logits)
    with pytest.raises(ValueError, match="none can be consumed"):
        quantize_folder(tmp_path / "given", tmp_path / "other", config, consume=True)
    capfd.readouterr()
    assert main.main(["quantize", str(tmp_path / "given"), str(tmp_path / "other")]) == 1
    said = capfd.readouterr()
    assert said.err.count("\n") == 1 and "tensors do not fit the model: " in said.err and not said.out
    assert "are read with --experts only" in said.err and not list(tmp_path.glob("other*"))


def transformers_dense(folder):
    from bitshard.transformers import dense_config

    return dense_config(folder)


def test_one_tensor_at_a_time(tmp_path, monkeypatch):
    """When the next one is read, nothing of the one before is alive."""
    from bitshard.sharding.loading.skeleton import Skeleton

    alive, most, value = [], [0], Skeleton.value

    def watched(self, place, files, of=None):
        most[0] = max(most[0], sum(ref() is not None for ref in alive))
        found = value(self, place, files, of)
        alive.append(weakref.ref(found))
        return found

    monkeypatch.setattr(Skeleton, "value", watched)
    quantize_folder(llama(tmp_path / "dense"), tmp_path / "out", settings(), max_shard_size="15KB")
    assert len(alive) > 20 and most[0] == 0


class Stopped(Exception):
    pass


def stop_at(monkeypatch, number):
    """Ends a run when its file `number` is about to get its name."""
    replace, left = os.replace, [number]

    def stopping(source, target):
        if str(target).endswith(".safetensors"):
            left[0] -= 1
            if left[0] < 0:
                raise Stopped
        replace(source, target)

    monkeypatch.setattr(output.os, "replace", stopping)


@pytest.mark.parametrize("consume", [False, True])
@pytest.mark.parametrize("number", [0, 1, 4])
def test_an_interrupted_run_goes_on(tmp_path, monkeypatch, consume, number):
    """Also where source files are gone: what is whole is not written again, and the bytes are those of one run."""
    dense, out = llama(tmp_path / "dense"), tmp_path / "out"
    quantize_folder(llama(tmp_path / "other"), tmp_path / "expected", settings(), max_shard_size="15KB")
    with monkeypatch.context() as patch:
        stop_at(patch, number)
        with pytest.raises(Stopped):
            quantize_folder(dense, out, settings(), max_shard_size="15KB", consume=consume)
    assert not out.exists()
    whole = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("out.partial/*.safetensors")}
    assert len(whole) == number and not list(tmp_path.glob("out.partial/*.writing"))
    gone = len(list((tmp_path / "other").glob("*.safetensors"))) - len(list(dense.glob("*.safetensors")))
    assert gone == 0 if not consume or number == 0 else number == 1 or gone > 0
    quantize_folder(dense, out, settings(), max_shard_size="15KB", consume=consume)
    same(tensors(out), tensors(tmp_path / "expected"))
    assert whole.items() <= {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}.items()
    assert {path.name for path in out.iterdir()} == {path.name for path in (tmp_path / "expected").iterdir()}
    assert bool(list(dense.glob("*.safetensors*"))) is not consume


def test_another_run_does_not_go_on(tmp_path, monkeypatch):
    dense = llama(tmp_path / "dense")
    with monkeypatch.context() as patch:
        stop_at(patch, 1)
        with pytest.raises(Stopped):
            quantize_folder(dense, tmp_path / "out", settings(), max_shard_size="15KB")
    with pytest.raises(ValueError, match="what another run has left, with other arguments"):
        quantize_folder(dense, tmp_path / "out", settings(bnb_4bit_quant_type="fp4"), max_shard_size="15KB")
    file = next(dense.glob("*.safetensors"))
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    with pytest.raises(ValueError, match=f"{file.name}: it has changed since the run that was interrupted"):
        quantize_folder(dense, tmp_path / "out", settings(), max_shard_size="15KB")


def test_nothing_is_consumed_before_it_is_read_back(tmp_path, monkeypatch):
    """A disk that does not keep what it was given loses nothing."""
    dense = llama(tmp_path / "dense")
    before = {path.name: path.read_bytes() for path in dense.iterdir()}
    monkeypatch.setattr(output, "checksum", lambda tensor, calls=[]: str(calls.append(1) or len(calls)))  # noqa: B006
    with pytest.raises(OSError, match="read back differ from those written"):
        quantize_folder(dense, tmp_path / "out", settings(), consume=True)
    assert {path.name: path.read_bytes() for path in dense.iterdir()} == before


# ---- the commands ----


def command(*words):
    """Status, lines of stdout and stderr of a command in this process."""
    import contextlib
    import io

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main.main([str(word) for word in words])
    said = [line for line in err.getvalue().splitlines() if line.startswith("bitshard:")]
    return status, out.getvalue().splitlines(), said


def test_the_commands(tmp_path):
    dense = llama(tmp_path / "dense")
    status, said, _ = command("quantize", dense, tmp_path / "out", "--nested", "--type", "fp4", "--storage", "bfloat16")
    assert status == 0 and "in 4 bits" in said[0] and "an embedding" in "\n".join(said[1:])
    config = settings(bnb_4bit_use_double_quant=True, bnb_4bit_quant_type="fp4", bnb_4bit_quant_storage=torch.bfloat16)
    saved_by_transformers(dense, tmp_path / "reference", config)
    same(tensors(tmp_path / "out"), tensors(tmp_path / "reference"))
    status, said, _ = command("inspect", tmp_path / "out")
    assert status == 0 and "fp4 weights, blocks of 64, nested, in BF16: 14 of " in "\n".join(said)
    status, said, _ = command("inspect", tmp_path / "out", "--json", "--sums")
    found = json.loads("\n".join(said))
    weight = next(w for w in found["weights"] if w["name"].endswith("q_proj.weight"))
    assert weight["shape"] == [64, 64] and weight["format"] == "fp4" and len(weight["sum"]) == 32
    assert found["bytes"] == sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))


def test_keys_of_vllms_loader(tmp_path):
    """vLLM tells a 4-bit weight by the name of its JSON, and takes all that is beside it by `<weight>.<end>`."""
    quantize_folder(llama(tmp_path / "dense"), tmp_path / "out", settings(bnb_4bit_use_double_quant=True))
    names, weight = tensors(tmp_path / "out").keys(), "model.layers.0.self_attn.q_proj.weight"
    ends = {name.removeprefix(weight) for name in names if name.startswith(weight)}
    assert ends == {
        "", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".quant_state.bitsandbytes__nf4",
    }  # fmt: skip
    dense = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert dense <= names and not [name for name in names if name.startswith(tuple(f"{key}." for key in dense))]
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "bitsandbytes" and config["load_in_4bit"] and not config["load_in_8bit"]


def test_sums_cover_scales(tmp_path):
    """A change of one byte beside a weight changes that weight's sum, and no other."""
    quantize_folder(llama(tmp_path / "dense"), tmp_path / "out", settings(bnb_4bit_use_double_quant=True))
    good, sums = tensors(tmp_path / "out"), []
    name = "model.layers.0.mlp.up_proj.weight"
    for change in (0, 1):
        good[f"{name}.absmax"][5] ^= change
        save_file(good, tmp_path / "one.safetensors")
        sums.append({weight.name: weight.sum for weight in look(tmp_path / "one.safetensors", sums=True).weights})
    assert [key for key in sums[0] if sums[0][key] != sums[1][key]] == [name] and None not in sums[0].values()


def test_a_bar_counts_tensors(sound, tmp_path):
    """Of what is written and of what is read, also in one file."""
    counted = []

    def bar(steps, total):
        for number, step in enumerate(steps):
            yield step
            counted.append((number + 1, total))

    quantize_folder(sound / "dense", tmp_path / "out", settings(), progress=bar)
    total = len(tensors(tmp_path / "out"))
    assert counted == [(number + 1, total) for number in range(total)]
    counted.clear()
    look(tmp_path / "out", sums=True, progress=bar)
    assert counted[-1] == (total, total)
    counted.clear()
    merge_folder(sound / "dense", sound / "adapter", tmp_path / "merged", torch.bfloat16, progress=bar)
    assert counted[-1] == (21, 21)


def test_inspect_counts_the_bytes(tmp_path):
    """Of experts and dense tensors, too: every byte of data belongs to one weight."""
    moe.model("qwen3_moe", 4, dtype=torch.bfloat16).save_pretrained(tmp_path / "dense")
    quantize_folder(tmp_path / "dense", tmp_path / "out", settings(True, bnb_4bit_use_double_quant=True))
    found = look(tmp_path / "out", sums=True)
    headers = [read_header(path) for path in (tmp_path / "out").glob("*.safetensors")]
    data = sum(stored.nbytes for header in headers for stored in header.values())
    assert not found.complaints and sum(weight.nbytes for weight in found.weights) == data
    stacks = [weight for weight in found.weights if weight.details.get("experts")]
    assert sorted(weight.shape for weight in stacks) == sorted([(4, 96, 64), (4, 64, 48)] * 2)


def raw(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


HOSTILE = {
    "empty": (b"", None, "too few"),
    "a header of 2^60 bytes": ({}, 2**60, "a header of 1,152,921,504,606,846,976 bytes"),
    "no JSON": (b"{]", None, "no JSON"),
    "a list": (b"[]", None, "no JSON object"),
    "deep": (b"[" * 100_000, None, "no JSON"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [1]}}, None, "an entry needs"),
    "negative": ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, None, "shape"),
    "another dtype": ({"a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}, None, "F33"),
    "truncated": ({"a": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}, None, "truncated"),
    "too small": ({"a": {"dtype": "F32", "shape": [64], "data_offsets": [0, 4]}}, None, "needs 256"),
    "huge": ({"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 4]}}, None, "needs"),
    "a hole": ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [3, 4]}}, None, "holes or overlaps"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files(tmp_path, kind):
    """Found by inspect, refused by quantize, one line each, and nothing is made."""
    header, length, said = HOSTILE[kind]
    path = (
        raw(tmp_path / "model.safetensors", header, length=length)
        if kind != "empty"
        else tmp_path / "model.safetensors"
    )
    path.touch()
    status, lines, err = command("inspect", tmp_path)
    assert status == 1 and any(line.startswith("wrong: ") and said in line for line in lines), lines
    LlamaConfig(**tiny.LLAMA).save_pretrained(tmp_path)
    status, lines, err = command("quantize", tmp_path, tmp_path / "out")
    assert status == 1 and len(err) == 1 and not lines and not list(tmp_path.glob("out*")), err


def spoilt(path, config=b"", **changes):
    """A copy of a folder's config.json with other bytes, or with other values."""
    file = path / "config.json"
    file.write_bytes(config or json.dumps(json.loads(file.read_text()) | changes).encode())


def index(path, text):
    (path / "model.safetensors.index.json").write_bytes(text)


def other_kind(path, make):
    (path / "model-00001-of-00003.safetensors").unlink()
    make(path / "model-00001-of-00003.safetensors")


SPOILT = {
    "config: no JSON": (lambda path: spoilt(path, b"{"), "config.json: no JSON"),
    "config: not UTF-8": (lambda path: spoilt(path, b"\xff\xfe{}"), "config.json: no JSON ('utf-8'"),
    "config: deep": (lambda path: spoilt(path, b"[" * 100_000), "config.json: no JSON (maximum recursion"),
    "config: a list": (lambda path: spoilt(path, b"[]"), "expected a JSON object, found list"),
    "config: null": (lambda path: spoilt(path, b"null"), "expected a JSON object, found NoneType"),
    "config: no model_type": (lambda path: spoilt(path, b"{}"), "config.json: "),
    "config: unknown": (lambda path: spoilt(path, model_type="strange"), "strange"),
    "config: a list of types": (lambda path: spoilt(path, model_type=["llama"]), "config.json: "),
    "config: a negative size": (lambda path: spoilt(path, hidden_size=-64), "config.json: "),
    "config: a word as size": (lambda path: spoilt(path, hidden_size="many"), "expected int, got str"),
    "config: no dtype": (lambda path: spoilt(path, dtype="float99"), "config.json: "),
    "config: settings": (lambda path: spoilt(path, quantization_config=[1]), "quantization_config is no JSON object"),
    "config: another model's": (lambda path: spoilt(path, intermediate_size=128), "do not fit"),
    "config: of images": (lambda path: spoilt(path, b'{"model_type": "vit"}'), "config.json: Unrecognized"),
    "index: a list": (lambda path: index(path, b"[1]"), "index.json cannot be read as one"),
    "index: not UTF-8": (lambda path: index(path, b"\xff{"), "index.json cannot be read as one"),
    "index: numbers": (lambda path: index(path, b'{"weight_map": {"a": 3}}'), "index.json cannot be read as one"),
    "index: elsewhere": (
        lambda path: index(path, b'{"weight_map": {"a": "../a"}}'),
        "index.json cannot be read as one",
    ),
    "index: absent": (lambda path: index(path, b'{"weight_map": {"a": "b"}}'), "absent: b"),
    "a folder as file": (lambda path: other_kind(path, os.mkdir), "model-00001-of-00003.safetensors"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A folder of three files, an adapter on it."""
    folder = tmp_path_factory.mktemp("sound")
    llama(folder / "dense")
    adapted(folder / "dense", folder / "adapter", None)
    return folder


@pytest.mark.parametrize("kind", SPOILT)
def test_spoilt_folders(sound, tmp_path, kind):
    """As source and as base: one line that names the file, in plain words, and nothing is made."""
    spoil, said = SPOILT[kind]
    shutil.copytree(sound / "dense", tmp_path / "spoilt")
    spoil(tmp_path / "spoilt")
    for words in (["quantize", tmp_path / "spoilt"], ["merge", tmp_path / "spoilt", sound / "adapter"]):
        status, lines, err = command(*words, tmp_path / "out")
        assert status == 1 and len(err) == 1 and not lines and said in err[0], err
        assert main.console.TRACEBACK not in err[0] and len(err[0]) < 700
        assert [path.name for path in tmp_path.iterdir()] == ["spoilt"]
    if "index" in kind:
        status, lines, _ = command("inspect", tmp_path / "spoilt")
        assert status == 1 and any(line.startswith("wrong: ") and "index.json" in line for line in lines)


def test_inspect_waits_for_no_pipe(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    status, lines, _ = command("inspect", tmp_path)
    assert status == 1 and lines[-1].endswith("model.safetensors: no ordinary file")


ADAPTERS = {
    "no JSON": (b"{", "adapter_config.json: no JSON"),
    "not UTF-8": (b"\xff", "adapter_config.json: no JSON"),
    "a list": (b"[]", "expected a JSON object, found list"),
    "of no kind": (b"{}", "its adapters are None, expected 'LORA'"),
    "of another kind": (b'{"peft_type": "IA3"}', "its adapters are 'IA3', expected 'LORA'"),
    "a kind that is none": (b'{"peft_type": [1]}', "its adapters are [1]"),
    "of another rank": ({"r": 8}, "8 tensors do not fit the base: "),
    "of a negative rank": ({"r": -4}, "peft cannot load the adapter: "),
    "with a word as rank": ({"r": "4"}, "peft cannot load the adapter: "),
    "with a broken pattern": ({"target_modules": "("}, "peft cannot load the adapter: "),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_spoilt_adapters(sound, tmp_path, kind):
    content, said = ADAPTERS[kind]
    shutil.copytree(sound / "adapter", tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    if isinstance(content, dict):
        content = json.dumps(json.loads(config.read_text()) | content).encode()
    config.write_bytes(content)
    status, lines, err = command("merge", sound / "dense", tmp_path / "adapter", tmp_path / "out")
    assert status == 1 and len(err) == 1 and not lines and said in err[0], err
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.parametrize("length", [2**60, None])
def test_hostile_files_of_adapters(sound, tmp_path, length):
    """And those of a model of other sizes, all of which are found before anything is written."""
    shutil.copytree(sound / "adapter", tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    if length is None:
        save_file({name: torch.zeros(4, 4) for name in load_file(file)}, file)
    else:
        raw(file, {}, length=length)
    status, _, err = command("merge", sound / "dense", tmp_path / "adapter", tmp_path / "out")
    said = "8 tensors do not fit the base: " if length is None else "a header of 1,152,921,504,606,846,976 bytes"
    assert status == 1 and len(err) == 1 and said in err[0] and not list(tmp_path.glob("out*")), err


def test_random_damage_is_found_or_harmless(tmp_path):
    """Any bytes in a header: inspect ends with a result, and reads nothing outside the file."""
    quantize_folder(llama(tmp_path / "dense"), tmp_path / "out", settings())
    whole = (tmp_path / "out" / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    random.seed(0)
    complained = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(random.choice((1, 4))):
            damaged[random.randrange(8 + length)] = random.randrange(256)
        path = tmp_path / "damaged.safetensors"
        path.write_bytes(damaged[: random.choice((len(damaged), len(damaged) - 1, 9))])
        complained += bool(look(path).complaints)
    assert complained > 200


def test_contradictions_are_found(tmp_path):
    """Scales or packed bytes of another size, a JSON entry that lies, an index that names what is not there."""
    quantize_folder(llama(tmp_path / "dense"), tmp_path / "out", settings(bnb_4bit_use_double_quant=True))
    good = tensors(tmp_path / "out")
    name = "model.layers.0.mlp.up_proj.weight"
    blob = f"{name}.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(good[blob].tolist()))
    for change, said in (
        ({f"{name}.absmax": torch.zeros(3, dtype=torch.uint8)}, "3 bytes, expected 96"),
        ({name: torch.zeros(7, 1, dtype=torch.uint8)}, "7 bytes, expected 3,072"),
        ({blob: torch.tensor([1, 2, 3], dtype=torch.uint8)}, "does not describe"),
        (
            {blob: torch.tensor(list(json.dumps(state | {"shape": [2**40, 2**40]}).encode()), dtype=torch.uint8)},
            "expected",
        ),
        ({blob: torch.tensor(list(json.dumps(state | {"blocksize": 0}).encode()), dtype=torch.uint8)}, "blocksize 0"),
    ):
        save_file(good | change, tmp_path / "wrong.safetensors")
        found = look(tmp_path / "wrong.safetensors")
        assert any(said in line for line in found.complaints), (said, found.complaints)
    dense = tmp_path / "dense"
    (dense / "model-00001-of-00004.safetensors").exists()
    first = sorted(dense.glob("*.safetensors"))[0]
    first.unlink()
    assert any("is absent" in line for line in look(dense).complaints)
    status, _, err = command("quantize", dense, tmp_path / "other")
    assert status == 1 and "absent" in err[0] and len(err) == 1


def test_mistakes_are_one_line(tmp_path, monkeypatch):
    dense = llama(tmp_path / "dense")
    (tmp_path / "there").mkdir()
    empty = tmp_path / "empty"
    empty.mkdir()
    LlamaConfig(**tiny.LLAMA).save_pretrained(empty)
    quantize_folder(dense, tmp_path / "packed", settings())
    mixture = tmp_path / "mixture"
    moe.model("qwen3_moe", 4, dtype=torch.bfloat16).save_pretrained(mixture)
    cases = [
        (("quantize", tmp_path / "absent", tmp_path / "out"), "config.json: No such file"),
        (("quantize", tmp_path / "there", tmp_path / "out"), "config.json: No such file"),
        (("quantize", empty, tmp_path / "out"), "no safetensors files there"),
        (("quantize", dense, tmp_path / "there"), "there: exists already"),
        (("quantize", tmp_path / "packed", tmp_path / "out"), "quantized already"),
        (("quantize", dense, tmp_path / "out", "--storage", "uint99"), "--storage uint99: no dtype"),
        (("quantize", dense, tmp_path / "out", "--max-shard-size", "five"), "max_shard_size"),
        (("quantize", dense, tmp_path / "out", "--blocksize", "128"), "--experts"),
        (
            ("quantize", dense, tmp_path / "out", "--bits", "8", "--nested"),
            "--nested is of 4-bit weights: leave it out",
        ),
        (
            ("quantize", dense, tmp_path / "out", "--bits", "8", "--calibrate", "text"),
            "--calibrate is of 4-bit weights",
        ),
        (
            ("quantize", mixture, tmp_path / "out", "--experts", "--blocksize", "63"),
            "--blocksize 63: expected one of 32",
        ),
        (("quantize", dense, tmp_path / "out", "--device", "nowhere"), "device nowhere: "),
        (("quantize", dense, tmp_path / "out", "--device", "meta"), "device meta: "),
        (("inspect", tmp_path / "absent"), "No such file or folder"),
        (("inspect", tmp_path / "there"), "No safetensors files there"),
    ]
    for words, said in cases:
        status, lines, err = command(*words)
        wrong_argument = any(str(word).startswith("--") for word in words)
        assert status == 1 + wrong_argument and len(err) == 1 and said in err[0], (words, err)
        assert not (tmp_path / "out").exists()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(output.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    status, _, err = command("quantize", dense, tmp_path / "out")
    assert status == 1 and "do not fit on the disk, which has 1,000" in err[0]

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(output.TensorFile, "_put", full)
    for more in ((), ("--consume",)):
        status, _, err = command("quantize", dense, tmp_path / "full", *more)
        path = tmp_path / "full.partial" / "model.safetensors"
        assert status == 1 and err[0].startswith(f"bitshard: {path}: No space left on device: the file has "), err
        assert f", and {usage.free:,} are free" in err[0] and not list(tmp_path.glob("full*"))


@pytest.mark.parametrize("words", [
    ("quantize", "dense", "out"), ("merge", "dense", "adapter", "out"), ("inspect", "dense"), ("plan", "dense"),
])  # fmt: skip
def test_no_torch(sound, tmp_path, words):
    code = "import sys; sys.modules['torch'] = None; from bitshard_cli import main; sys.exit(main.main(sys.argv[1:]))"
    paths = [str((tmp_path if word == "out" else sound) / word) for word in words[1:]]
    ran = subprocess.run([sys.executable, "-c", code, words[0], *paths], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1 and ran.stderr.count("\n") == 1 and "torch" in ran.stderr, ran.stderr
    assert not ran.stdout and not list(tmp_path.iterdir())


def begun(tmp_path, *words):
    """A process with a command, and the line that it has printed."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "first"), os.environ.get("PYTHONPATH", "")])}
    code = "import slow; import sys; from bitshard_cli import main; sys.exit(main.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *map(str, words)]
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # which a shell ignores for what is in its background
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, preexec_fn=heeds
    )
    assert process.stdout.readline() == "now\n"
    return process


@pytest.mark.parametrize("name", ["quantize", "merge", "inspect", "plan", "report"])
def test_ctrl_c_while_torch_is_imported(tmp_path, name):
    """A torch whose import calls Python from C++, as torch's does: an exception there would be its end."""
    torch = tmp_path / "first" / "torch.py"
    torch.parent.mkdir()
    catch = "try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    os.abort()\n"
    torch.write_text(f"import os, time\nprint('now', flush=True)\n{catch}")
    (tmp_path / "first" / "slow.py").touch()
    words = {"quantize": ("a", "b"), "merge": ("a", "b", "c"), "inspect": ("a",), "plan": ("a",), "report": ()}
    process = begun(tmp_path, name, *words[name])
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == "bitshard: interrupted\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_process_that_is_ended_goes_on(sound, tmp_path, number):
    """In the middle of real work, source files consumed: what is whole stays, nothing half-written has its name."""
    shutil.copytree(sound / "dense", tmp_path / "dense")
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "slow.py").write_text(
        "import os, time\nfrom bitshard.convert import output\nreplace = os.replace\n"
        "def slow(source, target):\n    replace(source, target)\n"
        "    if str(target).endswith('00002-of-00005.safetensors'):\n        print('now', flush=True)\n"
        "        time.sleep(60)\n"
        "output.os.replace = slow\n"
    )
    words = ("quantize", tmp_path / "dense", tmp_path / "out", "--max-shard-size", "15KB", "--consume")
    process = begun(tmp_path, *words)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == ((130, "bitshard: interrupted\n") if number == signal.SIGINT else (-9, ""))
    left = sorted(path.name for path in (tmp_path / "out.partial").iterdir() if path.suffix != "")
    assert left == ["bitshard-journal.json", *(f"model-0000{n}-of-00005.safetensors" for n in (1, 2))]
    status, _, err = command(*words)
    assert status == 0 and not err and not list((tmp_path / "dense").glob("*.safetensors*"))
    quantize_folder(sound / "dense", tmp_path / "expected", settings(), max_shard_size="15KB")
    same(tensors(tmp_path / "out"), tensors(tmp_path / "expected"))


def test_a_run_that_only_has_to_end(tmp_path, monkeypatch):
    """Ended behind the last file: the next run consumes what is left, and names the folder."""
    dense = llama(tmp_path / "dense")

    def stop(*arguments):
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(quantize, "_consume", stop)
        with pytest.raises(Stopped):
            quantize_folder(dense, tmp_path / "out", settings(), consume=True)
    assert list(dense.glob("*.safetensors"))
    quantize_folder(dense, tmp_path / "out", settings(), consume=True)
    assert not list(dense.glob("*.safetensors*")) and {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json",
    }  # fmt: skip


def test_nothing_is_lost_by_consuming(sound, tmp_path):
    """Tensors that the model has no place for are named, and not deleted; links are not, as that frees nothing."""
    shutil.copytree(sound / "dense", tmp_path / "dense")
    spoilt(tmp_path / "dense", num_hidden_layers=1)
    status, _, err = command("quantize", tmp_path / "dense", tmp_path / "out", "--consume")
    assert status == 1 and "no place for 9 tensors, which would be lost: model.layers.1." in err[0]
    status, said, _ = command("quantize", tmp_path / "dense", tmp_path / "out")
    assert status == 0 and said[-1].startswith("left out, as the model has no place for them: model.layers.1.")
    assert len(tensors(tmp_path / "dense")) == 21
    (tmp_path / "linked").mkdir()
    for path in (sound / "dense").iterdir():
        (tmp_path / "linked" / path.name).symlink_to(path)
    status, _, err = command("quantize", tmp_path / "linked", tmp_path / "other", "--consume")
    assert status == 1 and "nothing is freed by deleting links" in err[0] and not list(tmp_path.glob("other*"))


def test_a_partial_folder_of_somebody_else(sound, tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine.txt").touch()
    for words in (["quantize", sound / "dense"], ["merge", sound / "dense", sound / "adapter"]):
        status, _, err = command(*words, tmp_path / "out")
        assert status == 1 and "out.partial: exists already, and no interrupted run has left it" in err[0]
    assert [path.name for path in tmp_path.rglob("*")] == ["out.partial", "mine.txt"]


@pytest.mark.parametrize(
    "words", [("quantize", "dense"), ("merge", "dense", "adapter"), ("quantize", "mxfp4", "--experts")]
)
def test_a_full_disk(sound, tmp_path, words):
    """A real write that fails, of the first file: one line, and nothing is left. So where no folder can be made."""
    if "mxfp4" in words and not (sound / "mxfp4").exists():
        moe.save_mxfp4(moe.model("gpt_oss", 3, intermediate_size=64), sound / "mxfp4")
    name, *rest = words
    paths = [sound / word for word in rest if not word.startswith("-")]
    more = [word for word in rest if word.startswith("-")]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, limits[1]))
    try:
        status, lines, err = command(name, *paths, tmp_path / "out", *more)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 1 and len(err) == 1 and err[0].endswith(": File too large") and not lines, err
    assert err[0].startswith(f"bitshard: {tmp_path}/out"), err
    assert not list(tmp_path.iterdir())
    status, _, err = command(name, *paths, "/sys/out", *more)
    assert status == 1 and len(err) == 1 and "/sys/out.partial: " in err[0]


def test_the_other_way(tmp_path):
    """What a quantized folder holds is what quantizing its weights one by one gives."""
    dense = llama(tmp_path / "dense", dtype=torch.float32)
    quantize_folder(dense, tmp_path / "out", settings())
    before, after = tensors(dense), tensors(tmp_path / "out")
    name = "model.layers.1.self_attn.k_proj.weight"
    packed, state = functional.quantize_4bit(before[name], quant_type="nf4")
    assert torch.equal(after[name].view(-1), packed.view(-1)) and torch.equal(after[f"{name}.absmax"], state.absmax)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").quantization_config["bnb_4bit_quant_type"] == "nf4"


# ---- merging ----


def adapted(base, folder, config, family="llama", **options):
    """An adapter of peft on a model of `base`, saved; and the model, whose weights nobody has changed."""
    kinds = {} if config is None else {"quantization_config": config}
    model = AutoModelForCausalLM.from_pretrained(base, device_map="cpu", **kinds)
    torch.manual_seed(1)
    stacks = family not in ("llama", "nemotron_h")
    parameters = {"target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]} if stacks else {}
    settings = {"r": 4, "target_modules": ["o_proj", "q_proj"], "init_lora_weights": False, **parameters, **options}
    tuned = get_peft_model(model, LoraConfig(**settings), autocast_adapter_dtype=False)
    tuned.save_pretrained(folder)
    return tuned


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}])
@pytest.mark.parametrize("to", ["dense", torch.bfloat16, None])
def test_merged_as_peft_does(tmp_path, options, to):
    """A dense base, a 4-bit base into 16 bits and into 4: the bytes of peft's merge_and_unload in one process."""
    dense, config = llama(tmp_path / "dense"), settings(bnb_4bit_use_double_quant=True)
    quantize_folder(dense, tmp_path / "packed", config)
    tuned = adapted(dense, tmp_path / "adapter", None if to == "dense" else config, **options)
    base, dtype = ("dense", torch.bfloat16) if to == "dense" else ("packed", to)
    count = merge_folder(tmp_path / base, tmp_path / "adapter", tmp_path / "out", dtype, max_shard_size="15KB")
    assert count == 4 + ("modules_to_save" in options)
    if base == "packed" and dtype is not None:
        fsdp.save_pretrained(tuned, tmp_path / "reference", dtype=dtype, merge=True)
    else:
        tuned.merge_and_unload().save_pretrained(tmp_path / "reference")
    same(tensors(tmp_path / "out"), tensors(tmp_path / "reference"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", device_map="cpu")
    assert again.dtype is torch.bfloat16 and again(moe.TOKENS).logits.isfinite().all()


@pytest.mark.parametrize("base", ["dense", "packed"])
@pytest.mark.parametrize("family", moe.FAMILIES)
def test_mixtures_are_merged(tmp_path, family, base):
    """Adapters on stacks of experts; the names of the checkpoint that the base was made of."""
    moe.model(family, 4, dtype=torch.bfloat16).save_pretrained(tmp_path / "dense")
    config = settings(True)
    quantize_folder(tmp_path / "dense", tmp_path / "packed", config)
    tuned = adapted(tmp_path / "dense", tmp_path / "adapter", config if base == "packed" else None, family)
    to = None if base == "packed" else torch.bfloat16
    merge_folder(tmp_path / base, tmp_path / "adapter", tmp_path / "out", to)
    tuned.merge_and_unload().save_pretrained(tmp_path / "reference")
    same(tensors(tmp_path / "out"), tensors(tmp_path / "reference"))
    if base == "packed":
        merge_folder(tmp_path / base, tmp_path / "adapter", tmp_path / "wide", torch.bfloat16)
        assert tensors(tmp_path / "wide").keys() == tensors(tmp_path / "dense").keys()


def test_one_module_at_a_time(sound, tmp_path, monkeypatch):
    """When the next module is read, nothing of the one before is alive."""
    from bitshard.sharding.loading.skeleton import Skeleton

    alive, most, value = [], [0], Skeleton.value

    def watched(self, place, files, of=None):
        most[0] = max(most[0], sum(ref() is not None for ref, module in alive if module is not place[1]))
        found = value(self, place, files, of)
        alive.append((weakref.ref(found), place[1]))
        return found

    monkeypatch.setattr(Skeleton, "value", watched)
    merge_folder(sound / "dense", sound / "adapter", tmp_path / "out", torch.bfloat16, max_shard_size="15KB")
    assert len(alive) > 20 and most[0] == 0


def test_mistakes_in_merging(tmp_path):
    """One line each, and nothing is made; a run that was interrupted goes on."""
    dense = llama(tmp_path / "dense")
    quantize_folder(dense, tmp_path / "packed", settings())
    adapted(dense, tmp_path / "adapter", None)
    moe.model("qwen3_moe", 4).save_pretrained(tmp_path / "other")
    adapted(tmp_path / "other", tmp_path / "alien", None, "qwen3_moe")
    (tmp_path / "empty").mkdir()
    shutil.copytree(tmp_path / "adapter", tmp_path / "half")
    (tmp_path / "half" / "adapter_model.safetensors").unlink()
    shutil.copytree(tmp_path / "adapter", tmp_path / "torn")
    torn = tmp_path / "torn" / "adapter_model.safetensors"
    torn.write_bytes(torn.read_bytes()[:200])
    adapter, out = tmp_path / "adapter", tmp_path / "out"
    for words, said in [
        ((tmp_path / "absent", adapter, out), "config.json: No such file"),
        ((dense, tmp_path / "empty", out), "adapter_config.json: No such file"),
        ((dense, tmp_path / "half", out), "adapter_model.safetensors: No such file"),
        ((dense, tmp_path / "torn", out), ""),
        ((dense, tmp_path / "alien", out), "fit no module of the base"),
        ((dense, adapter, tmp_path / "empty"), "exists already"),
        ((dense, adapter, out, "--to", "4bit"), "merge into bfloat16, then quantize"),
        ((tmp_path / "packed", adapter, out, "--to", "fp4"), "its weights are nf4, and stay nf4"),
    ]:
        status, lines, err = command("merge", *words)
        assert status == 1 and len(err) == 1 and said in err[0] and not lines, (words, err)
        assert not out.exists()
    status, said, _ = command("merge", tmp_path / "packed", adapter, out, "--to", "nf4", "--json")
    assert status == 0 and json.loads("\n".join(said))["modules"] == 4 and out.is_dir()
