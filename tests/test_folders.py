"""What commands do with a model's folder besides its weights: small files, links, code of its own, and what they print
of strange ones."""

import builtins
import json
import shutil
import tracemalloc

import pytest
from bitshard import fsdp
from bitshard.convert.quantize import quantize_folder
from helpers import moe
from test_convert import adapted, command, llama, settings, tensors


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
