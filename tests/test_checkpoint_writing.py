"""The files of a checkpoint that is written tensor by tensor: as safetensors writes them, whole or not there at all."""

import errno
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from bitshard.sharding import writing
from bitshard.sharding.writing import CheckpointFiles, Entry, byte_count, split
from helpers.bytes import same_bytes
from safetensors.torch import load_file, save_file

DTYPES = [*writing._DTYPES]


def tensors(seed=0, count=12):
    """{key: tensor} of all dtypes and of sizes 0 to 500."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for number in range(count):
        dtype = DTYPES[number % len(DTYPES)]
        shape = [(), (7,), (0,), (5, 1), (3, 5, 2), (31,)][number % 6]
        values = torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)
        found[f"model.{(number * 5) % 7}.ä{number}"] = values
    return found


def entries_of(found):
    return {key: Entry(value.dtype, tuple(value.shape)) for key, value in found.items()}


def write(folder, found, limit="1GB", others=None, late=()):
    """All of `found`, in reverse order."""
    entries = entries_of(found)
    for key in late:
        entries[key] = Entry(torch.uint8, (1,), late=True)
    files = CheckpointFiles(folder, entries, limit)
    try:
        for key in reversed(found):
            files.write(key, found[key])
        files.finish(others or {}, 5)
    except BaseException:
        files.abort()
        raise


def read(folder):
    """The checkpoint in a folder as readers find it: the single file first, else what the index leads to."""
    folder = Path(folder)
    if (folder / "model.safetensors").is_file():
        return load_file(folder / "model.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    weights = index["weight_map"]
    found = {name: load_file(folder / name) for name in set(weights.values())}
    assert {key for file in found.values() for key in file} == set(weights)
    return {key: found[name][key] for key, name in weights.items()}


def same(found, expected):
    return found.keys() == expected.keys() and all(same_bytes(found[key], expected[key]) for key in expected)


def test_a_file_is_that_of_safetensors(tmp_path):
    found = tensors(count=40)
    write(tmp_path / "new", found)
    save_file(found, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "new" / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.safetensors"]


def test_several_files_and_their_index(tmp_path):
    found = tensors(count=40)
    write(tmp_path, found, 300)
    groups = split(entries_of(found), 300)
    assert len(groups) > 3 and [key for group in groups for key in group] == list(found)
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file({key: found[key] for key in group}, tmp_path / "theirs", {"format": "pt"})
        assert (tmp_path / name).read_bytes() == (tmp_path / "theirs").read_bytes()
    assert same(read(tmp_path), found)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    size = sum(value.numel() * value.itemsize for value in found.values())
    assert index["metadata"] == {"total_parameters": 5, "total_size": size}


@pytest.mark.parametrize("limit", [300, "1GB"])
def test_lengths_that_are_known_late(tmp_path, limit):
    found = tensors(count=40)
    late = {f"late.{n}": torch.arange(n, dtype=torch.uint8) for n in (0, 1, 99, 255)}
    write(tmp_path, {**found, **late}, limit, late=late)
    assert same(read(tmp_path), {**found, **late})


def test_what_does_not_fit_the_layout_raises(tmp_path):
    found = {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.uint8)}
    for change, text in (
        ({"a": torch.zeros(4)}, "expected \\[3\\]"),
        ({"a": torch.zeros(3, dtype=torch.float64)}, "float64"),
    ):
        checkpoint = CheckpointFiles(tmp_path, entries_of(found), 100)
        with pytest.raises(ValueError, match=text):
            checkpoint.write("a", change["a"])
        checkpoint.write("b", found["b"])
        with pytest.raises(ValueError, match="b: "):
            checkpoint.write("b", found["b"])
        with pytest.raises(ValueError, match="never written: \\['a'\\]"):
            checkpoint.finish({}, 0)
        checkpoint.abort()
    checkpoint = CheckpointFiles(tmp_path, {"a": Entry(torch.uint8, (1,), late=True)}, 100)
    checkpoint.write("a", torch.zeros(5000, dtype=torch.uint8))
    with pytest.raises(ValueError, match="5000 bytes"):
        checkpoint.finish({}, 0)
    checkpoint.abort()
    with pytest.raises(ValueError, match="complex64"):
        CheckpointFiles(tmp_path, {"a": Entry(torch.complex64, (1,))}, 100)
    with pytest.raises(ValueError, match="nothing to save"):
        CheckpointFiles(tmp_path, {}, 100)
    assert list(tmp_path.iterdir()) == []


def test_sizes():
    assert [byte_count(size) for size in (5, "5GB", "1.5 kb", "2MiB")] == [5, 5 * 10**9, 1500, 2 << 20]
    for size in (0, -1, True, "GB", "0GB", "5 apples", None, 2.5):
        with pytest.raises(ValueError, match="max_shard_size"):
            byte_count(size)


CALLS = ("pwrite", "replace", "fsync", "unlink", "open")


def counting(monkeypatch, action):
    """Let each of these calls of `os` first call `action`."""

    def patched(call):
        def run(*args, **kwargs):
            action()
            return call(*args, **kwargs)

        return run

    for name in CALLS:
        monkeypatch.setattr(os, name, patched(getattr(os, name)))


def dying(kill):
    """A function that kills the process when it is called for that time."""
    left = [kill]

    def die():
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return die


KINDS = {"one": "1GB", "several": 300}


@pytest.mark.parametrize("after", KINDS)
@pytest.mark.parametrize("before", KINDS)
def test_killed_anywhere_a_checkpoint_is_readable(tmp_path, monkeypatch, before, after):
    """A process that saves over a checkpoint is killed before each of its calls in turn: old or new, never a mixture.

    And a save that follows is as good as any, and leaves nothing of the killed one.
    """
    old, new = tensors(1, 20), tensors(2, 20)
    calls = [0]
    with monkeypatch.context() as patch:
        counting(patch, lambda: calls.__setitem__(0, calls[0] + 1))
        write(tmp_path / "count", old, KINDS[before])
        first = calls[0]
        write(tmp_path / "count", new, KINDS[after])
    total = calls[0] - first
    assert total > 20
    kept = []
    for kill in range(1, total + 1):
        folder = tmp_path / str(kill)
        write(folder, old, KINDS[before], {"config.json": b"{}"})
        child = os.fork()
        if child == 0:
            counting(monkeypatch, dying(kill))
            write(folder, new, KINDS[after], {"config.json": b"{}"})
            os._exit(1)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        found = read(folder)
        assert same(found, old) or same(found, new), kill
        kept.append(same(found, old))
        write(folder, new, KINDS[after], {"config.json": b"{}"})
        assert same(read(folder), new)
        assert not [path.name for path in folder.iterdir() if "partial" in path.name]
    assert kept == sorted(kept, reverse=True) and kept[0]  # the old one up to some call, the new one from there on


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("name", ["pwrite", "replace", "fsync", "open"])
def test_an_error_of_the_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch, name, nth):
    """The first or the second call of a kind fails."""
    old, new = tensors(1, 20), tensors(2, 20)
    write(tmp_path, old, 300)
    before = {path.name for path in tmp_path.iterdir()}
    call, left = getattr(os, name), [nth]

    def fails(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return call(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fails)
        with pytest.raises(OSError, match="No space left"):
            write(tmp_path, new, 300)
    assert same(read(tmp_path), old) and {path.name for path in tmp_path.iterdir()} == before
