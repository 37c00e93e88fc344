"""What commands do with a model's folder besides its weights: small files, links, code of its own, and what they print
of strange ones."""

import builtins
import json
import os
import re
import shutil
import time
import tracemalloc

import pytest
import torch
from bitshard import fsdp
from bitshard.calibration.samples import _of_dataset
from bitshard.convert.quantize import quantize_folder
from helpers import moe
from helpers.files import tensors
from safetensors.torch import load_file, save_file
from test_convert import adapted, command, llama, raw, settings


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A dense folder of several files, and an adapter on it."""
    folder = tmp_path_factory.mktemp("sound")
    llama(folder / "dense")
    adapted(folder / "dense", folder / "adapter", None)
    return folder


@pytest.fixture
def dense(sound, tmp_path):
    """A copy that may be spoilt."""
    return shutil.copytree(sound / "dense", tmp_path / "dense")


def both(sound, dense, out, *more):
    """The words of both commands that copy small files."""
    return [("quantize", dense, out, *more), ("merge", dense, sound / "adapter", out)]


# ---- small files ----


@pytest.mark.parametrize("given", ["dense", "mxfp4"])
def test_small_files_are_copied_by_the_system(dense, tmp_path, given):
    """Not through memory, however large they are; and from files that are decoded as a whole."""
    if given == "mxfp4":
        moe.save_mxfp4(moe.model("gpt_oss", 3, intermediate_size=64), tmp_path / given)
        quantize_folder(tmp_path / given, tmp_path / "first", settings(True))  # which imports
    large = 48 << 20
    with (tmp_path / given / "model.onnx").open("wb") as file:
        file.write(b"begin")
        file.truncate(large)
    tracemalloc.start()
    try:
        quantize_folder(tmp_path / given, tmp_path / "out", settings(given == "mxfp4"))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    copy = tmp_path / "out" / "model.onnx"
    assert copy.stat().st_size == large and copy.open("rb").read(8) == b"begin\0\0\0"
    assert most < large // 3, most


def test_a_full_disk_names_what_is_copied(dense, tmp_path, monkeypatch):
    def full(source, target, **options):
        raise OSError(28, "No space left on device", str(source), None, str(target))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full)
        status, _, err = command("quantize", dense, tmp_path / "out", "--consume")
    assert status == 1 and err == [f"bitshard: {tmp_path}/out.partial/generation_config.json: No space left on device"]
    assert command("quantize", dense, tmp_path / "out", "--consume")[0] == 0  # and goes on
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == "{}\n"


@pytest.mark.parametrize("target", ["absolute", "up", "by another link", "nowhere", "hub without snapshots"])
def test_links_that_leave_the_folder(sound, dense, tmp_path, target):
    secret = tmp_path / "secret"
    secret.write_text("root:x:0:0")
    link = dense / "tokenizer.json"
    if target == "absolute":
        link.symlink_to(secret)
    elif target == "up":
        link.symlink_to("../secret")
    elif target == "by another link":
        (dense / ".hidden").symlink_to(tmp_path)
        link.symlink_to(".hidden/secret")
    elif target == "nowhere":
        link.symlink_to("gone")
    else:
        (tmp_path / "blobs").mkdir()
        (tmp_path / "blobs" / "1").write_text("no cache")
        link.symlink_to("../blobs/1")
    before = sorted(tmp_path.iterdir())
    for words in both(sound, dense, tmp_path / "out"):
        status, lines, err = command(*words)
        assert status == 1 and len(err) == 1 and not lines, err
        assert (
            f"{link}: " in err[0] and ("nowhere" if target == "nowhere" else "outside of the model's folder") in err[0]
        )
        assert sorted(tmp_path.iterdir()) == before


def test_links_inside_of_a_cache(sound, tmp_path):
    """Hugging Face's: a snapshot whose files are links to blobs, reached by a link; and links within a folder."""
    cache = tmp_path / "models--some--model"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted((sound / "dense").iterdir())):
        shutil.copy(path, cache / "blobs" / f"{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    (snapshot / "chat_template.jinja").symlink_to("tokenizer_config.json")
    (tmp_path / "by-link").symlink_to(snapshot)
    for number, words in enumerate(both(sound, tmp_path / "by-link", tmp_path / "out")):
        out = tmp_path / f"out{number}"
        status, _, err = command(*words[:-1], out)
        assert status == 0 and not err, err
        assert (out / "chat_template.jinja").read_text() == "{}\n" and not (out / "chat_template.jinja").is_symlink()
        assert not [path for path in out.iterdir() if path.is_symlink()]
    (cache / "blobs" / "secret").symlink_to("/etc/passwd")
    (snapshot / "vocab.txt").symlink_to("../../blobs/secret")
    status, _, err = command("quantize", snapshot, tmp_path / "other")
    assert status == 1 and "vocab.txt: a link to /etc/passwd, outside of the model's folder" in err[0]


# ---- code of its own ----


@pytest.fixture
def asked(monkeypatch):
    """Questions that were asked: there are none."""
    found = []

    def answer(prompt=""):
        found.append(prompt)
        return "y"

    monkeypatch.setattr(builtins, "input", answer)
    return found


def with_code(folder, file, **auto_map):
    """Code beside the weights that a library would run, and which says that it ran."""
    path = folder / file
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"auto_map": auto_map}))
    (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")


def test_code_of_a_model_is_never_run(sound, dense, tmp_path, asked):
    """Nor is anybody asked: one line that names auto_map."""
    with_code(dense, "config.json", AutoConfig="code.Config", AutoModelForCausalLM="code.Model")
    config = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps(config | {"model_type": "strange"}))
    for words in (*both(sound, dense, tmp_path / "out"), ("plan", dense), ("plan", dense / "config.json")):
        status, lines, err = command(*words)
        assert status == 1 and len(err) == 1 and not lines, err
        assert "config.json: its auto_map names code of the model's own (code.Config, code.Model)" in err[0]
        assert "'strange'" in err[0] and "trust_remote_code=True" in err[0]
    with pytest.raises(ValueError, match="its auto_map names code of the model's own"):
        fsdp_config(dense)
    assert not asked and not (dense / "ran").exists() and not list(tmp_path.glob("out*"))


def fsdp_config(folder):
    from bitshard.sharding.loading.units import _config

    assert callable(fsdp.load)
    return _config(folder)


def test_a_model_that_transformers_has_needs_no_code(dense, tmp_path, asked):
    """Whose class is transformers' own; what the config says stays in it."""
    with_code(dense, "config.json", AutoConfig="code.Config", AutoModelForCausalLM="code.Model")
    assert command("quantize", dense, tmp_path / "out")[0] == 0 and command("plan", dense)[0] == 0
    assert "auto_map" in json.loads((tmp_path / "out" / "config.json").read_text())
    assert len(tensors(tmp_path / "out")) > 21 and not asked and not (dense / "ran").exists()


def test_a_class_that_only_the_code_has(dense, tmp_path, asked):
    """A type that transformers knows, but not as a language model."""
    (dense / "config.json").write_text(json.dumps({"model_type": "vit", "hidden_size": 64, "num_attention_heads": 4}))
    with_code(dense, "config.json", AutoModelForCausalLM="code.Model")
    for words in (("quantize", dense, tmp_path / "out"), ("plan", dense)):
        status, _, err = command(*words)
        assert status == 1 and len(err) == 1 and "its auto_map names code of the model's own (code.Model)" in err[0], (
            err
        )
    assert not asked and not (dense / "ran").exists()


def test_a_tokenizer_with_code(dense, tmp_path, asked):
    (tmp_path / "text.txt").write_text("words " * 100)
    with_code(dense, "tokenizer_config.json", AutoTokenizer=["code.Tokenizer", None])
    status, _, err = command("quantize", dense, tmp_path / "out", "--calibrate", tmp_path / "text.txt")
    assert (
        status == 1 and "tokenizer_config.json: its auto_map names code of the model's own (code.Tokenizer)" in err[0]
    )
    assert not asked and not (dense / "ran").exists()


def test_a_dataset_with_code(dense, tmp_path, monkeypatch):
    """Versions of datasets that know such code get False; later ones run none."""
    import datasets

    given = []

    def load_dataset(name, split, streaming, trust_remote_code=None):
        given.append(trust_remote_code)
        return iter([{"text": "words"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(_of_dataset("some/texts", "text")) == ["words"] and given == [False]


# ---- what commands print of strange folders ----


STARTS = {
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n", "a pointer of Git LFS"),
    "html": (b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n" * 9, "an HTML page"),
    "html, small": (b"\n <html lang='en'></html>", "an HTML page"),
    "zip": (b"PK\x03\x04" + bytes(400), "an archive as torch.save writes it"),
    "gguf": (b"GGUF\x03\x00\x00\x00" + bytes(400), "a file of GGUF"),
    "xml": (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "an XML page"),
}


@pytest.mark.parametrize("kind", STARTS)
def test_files_that_are_something_else(sound, dense, tmp_path, kind):
    """Named for what they are, wherever one is read."""
    start, said = STARTS[kind]
    adapter = shutil.copytree(sound / "adapter", tmp_path / "adapter")
    (adapter / "adapter_model.safetensors").write_bytes(start)
    status, _, err = command("merge", dense, adapter, tmp_path / "out")
    assert status == 1 and f"adapter_model.safetensors: {said}" in err[0], err
    first = sorted(dense.glob("*.safetensors"))[0]
    first.write_bytes(start)
    status, lines, _ = command("inspect", dense)
    assert status == 1 and any(line.startswith(f"wrong: {first}: {said}") for line in lines), lines
    for words in both(sound, dense, tmp_path / "out"):
        status, _, err = command(*words)
        assert status == 1 and len(err) == 1 and f"{first}: {said}" in err[0], err
    (dense / "model.safetensors.index.json").unlink()
    for path in dense.glob("*.safetensors"):
        path.rename(dense / "model.safetensors") if path == first else path.unlink()
    status, _, err = command("quantize", dense, tmp_path / "out")
    assert status == 1 and len(err) == 1 and f"model.safetensors: {said}" in err[0], err
    (dense / "config.json").write_bytes(start)
    for words in (*both(sound, dense, tmp_path / "out"), ("plan", dense)):
        status, _, err = command(*words)
        assert status == 1 and len(err) == 1 and f"config.json: {said}" in err[0], err


@pytest.mark.parametrize("name, said", [
    ("pytorch_model.bin", ".save_pretrained("), ("pytorch_model-00001-of-00002.bin", ".save_pretrained("),
    ("model-q4.gguf", "gguf_file="), ("tf_model.h5", "afetensors files there, but"),
])  # fmt: skip
def test_other_files_of_weights(dense, tmp_path, name, said):
    """What to do with those that no command reads."""
    for path in dense.glob("*.safetensors*"):
        path.unlink()
    (dense / name).write_bytes(b"weights")
    for words in (("quantize", dense, tmp_path / "out"), ("inspect", dense)):
        status, _, err = command(*words)
        assert status == 1 and len(err) == 1 and name in err[0] and said in err[0], err


def test_an_adapter_that_holds_code(sound, tmp_path):
    """torch's advice to load it all the same is no advice."""
    adapter = shutil.copytree(sound / "adapter", tmp_path / "adapter")
    (adapter / "adapter_model.safetensors").unlink()
    torch.save({"a": test_an_adapter_that_holds_code}, adapter / "adapter_model.bin")
    status, _, err = command("merge", sound / "dense", adapter, tmp_path / "out")
    assert status == 1 and len(err) == 1 and "weights_only" not in err[0], err
    assert "adapter_model.bin: it holds more than tensors" in err[0] and "safetensors" in err[0]


HUGE = [10**4000], [10**4000, 10**400], [10**30, 0], [2**64]


@pytest.mark.parametrize("shape", HUGE, ids=["large", "larger", "empty", "64 bits"])
def test_shapes_that_no_machine_has(tmp_path, shape):
    """In a header, and in the description of a 4-bit weight."""
    raw(tmp_path / "model.safetensors", {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}, bytes(4))
    status, lines, err = command("inspect", tmp_path)
    assert status == 1 and not err and lines[-1].startswith("wrong: ") and len(lines[-1]) < 400, err
    text = json.dumps({"shape": shape, "blocksize": 64, "quant_type": "nf4", "dtype": "float32"}).encode()
    entries = {"a.weight": ("U8", [2], [0, 2]),
               "a.weight.quant_state.bitsandbytes__nf4": ("U8", [len(text)], [2, 2 + len(text)])}  # fmt: skip
    header = {name: dict(zip(("dtype", "shape", "data_offsets"), each, strict=True)) for name, each in entries.items()}
    raw(tmp_path / "model.safetensors", header, b"ab" + text)
    status, lines, err = command("inspect", tmp_path)
    assert status == 1 and not err and all(len(line) < 600 for line in lines), (err, lines)


def test_escape_sequences_stay_in_files(tmp_path):
    """Names are printed without those that move a cursor, change a title or forge a line."""
    names = ["\x1b[2J\x1b]0;title\x07.weight", "a\nwrong: forged", "b\r\x9b31m", "\u202egnp.exe"]
    save_file({name: torch.full((2,), float("nan")) for name in names}, tmp_path / "model.safetensors")
    status, lines, err = command("inspect", tmp_path, "--tensors")
    assert status == 1 and not err and all(line.isprintable() for line in lines), lines
    assert not [line for line in lines if line.startswith("wrong: forged")] and "\\x1b[2J" in "\n".join(lines)
    assert len([line for line in lines if line.startswith("wrong: ")]) == len(names)
    raw(tmp_path / "model.safetensors", {"\x1b[2J": {"dtype": "\x1b[31m", "shape": [], "data_offsets": []}})
    for words in (("inspect", tmp_path), ("quantize", tmp_path, tmp_path / "out")):
        status, lines, err = command(*words)
        assert status == 1 and all(line.isprintable() for line in (*lines, *err)), (lines, err)


def test_left_out_names_are_printed_plainly(dense, tmp_path):
    path = sorted(dense.glob("*.safetensors"))[0]
    save_file(load_file(path) | {"\x1b[2Jextra": torch.zeros(2)}, path, {"format": "pt"})
    (dense / "model.safetensors.index.json").unlink()
    for number, path in enumerate(sorted(dense.glob("*.safetensors"))):
        path.rename(dense / f"part-{number}.safetensors")
    status, lines, err = command("quantize", dense, tmp_path / "out")
    assert status == 0 and all(line.isprintable() for line in lines) and "\\x1b[2Jextra" in lines[-1]


def test_runs_into_one_folder(sound, tmp_path):
    """The second one names the folder and the run, at once."""
    from bitshard.convert import output

    made_by = {"some": "run"}
    lock = output.claimed(tmp_path / "out.partial", made_by)
    try:
        for words in both(sound, sound / "dense", tmp_path / "out"):
            begin = time.monotonic()
            status, _, err = command(*words)
            assert status == 1 and err == [
                f"bitshard: {tmp_path}/out: another run, process {os.getpid()}, is writing it: wait for that, or end it"
            ]
            assert time.monotonic() - begin < 20
    finally:
        os.close(lock)


@pytest.mark.parametrize("given", ["dense", "mxfp4"])
def test_a_folder_that_another_run_has_just_made(dense, tmp_path, monkeypatch, given):
    """Between the first look and the lock: named, and nothing is written or left."""
    from bitshard.convert import quantize

    if given == "mxfp4":
        moe.save_mxfp4(moe.model("gpt_oss", 3, intermediate_size=64), tmp_path / given)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").touch()
    monkeypatch.setattr(quantize, "require_new", lambda folder: None)
    with pytest.raises(FileExistsError) as error:
        quantize_folder(tmp_path / given, tmp_path / "out", settings(given == "mxfp4"), consume=given == "dense")
    assert error.value.filename == str(tmp_path / "out") and len(list(dense.glob("*.safetensors"))) == 3
    assert not list(tmp_path.glob("out.*"))


def test_sizes_of_small_folders(dense, tmp_path):
    status, lines, _ = command("quantize", dense, tmp_path / "out")
    said = float(re.search(r"out: (\d+\.\d) kB in 1 file", lines[0])[1])
    size = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert status == 0 and said == pytest.approx(size / 1e3, rel=0.1)  # without headers


@pytest.mark.parametrize("words", [
    ["plan", "llama-3-8b", "--gpus", "0x24"], ["plan", "llama-3-8b", "--gpus", "two"], ["run"], ["run", "-m"],
    ["plan", "llama-3-8b", "--gpus", "2x0"], ["plan", "llama-3-8b", "--seq", "0"],
    ["plan", "llama-3-8b", "--offload", "x"],
    ["plan", "llama-3-8b", "--optimizer", "strange"], ["plan", "llama-3-8b", "--load-in-8bit", "--nested"],
    ["quantize", "a", "b", "--storage", "x"], ["quantize", "a", "b", "--blocksize", "128"],
    ["quantize", "a", "b", "--max-shard-size", "five"], ["merge", "a", "b", "c", "--max-shard-size", "five"],
    ["quantize", "a", "b", "--rank", "3"], ["quantize", "a", "b", "--bits", "8", "--nested"],
    ["quantize", "a", "b", "--device", "nowhere"], ["merge", "a", "b", "c", "--device", "meta"],
])  # fmt: skip
def test_wrong_arguments_have_status_2(words):
    status, lines, err = command(*words)
    assert status == 2 and len(err) == 1 and not lines, err
