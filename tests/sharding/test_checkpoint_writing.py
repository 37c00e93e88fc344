"""The files of a checkpoint that is written tensor by tensor: as safetensors writes them, whole or not there at all."""

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import time
import traceback
from pathlib import Path

import pytest
import torch
from bitshard import fsdp
from bitshard.sharding.checkpoints import files, owned
from bitshard.sharding.checkpoints.files import CheckpointFiles, Entry, byte_count, split
from bitshard.sharding.checkpoints.reading import Checkpoint
from helpers import tiny
from helpers.bytes import same
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

DTYPES = [*files._DTYPES]


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


def filled(number):
    """Tensors of one save, which all have its number."""
    return {f"layer.{n}": torch.full((40,), number, dtype=torch.int32) for n in range(6)}


def numbers(found):
    """Of the saves that what a reader found comes from."""
    return {int(number) for tensor in found.values() for number in tensor.unique()}


def look(folder):
    """One look of a reader at all tensors: the saves they come from; None where a file went between two steps of it."""
    try:
        return numbers(read(folder))
    except (FileNotFoundError, RuntimeError) as error:
        assert "No such file" in str(error), error  # RuntimeError where torch maps what safetensors has just opened
        return None


def look_of_ours(folder):
    """The same, of `Checkpoint`, which opens files one by one and refuses what is not whole."""
    try:
        files = Checkpoint(folder)
        found = {name: files.read(name).clone() for name in files.files}
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        # an index or a file that a save has just replaced; never one that is there and cannot be read
        assert re.search("absent|No such file|no safetensors|not one checkpoint", str(error)), error
        return None
    assert len(found) == 6, sorted(found)
    return numbers(found)


def forked(action):
    """The id of a process that does `action`; its exit status is 0 where that went well."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def saving_on(folder, first, saves, limits):
    """Save again and again; what is there behind each save is whole, too. Each step that changes a folder is slow."""
    for name in ("replace", "unlink"):
        call = getattr(os, name)
        setattr(os, name, lambda *args, call=call, **kwargs: (time.sleep(0.0005), call(*args, **kwargs))[1])
    for number in range(first, first + saves):
        write(folder, filled(number), limits[number % len(limits)], {"config.json": b"%d" % number})
        found = next(found for found in (look(folder) for _ in range(50)) if found)
        assert len(found) == 1, found


@pytest.mark.parametrize("limits", [["1GB"], [400], ["1GB", 400, 400]], ids=["one", "several", "both"])
def test_two_saves_into_one_folder_and_a_reader(tmp_path, limits):
    """Whole at every look, from one save; and both saves say that all is well. In the end one checkpoint is there."""
    children = [forked(lambda first=first: saving_on(tmp_path, first, 30, limits)) for first in (1, 1001)]
    seen, ours, gone, status = set(), set(), 0, {}
    while len(status) < 2:
        for found, kept in ((look(tmp_path), seen), (look_of_ours(tmp_path), ours)):
            gone += found is None
            assert found is None or len(found) == 1, found
            kept |= found or set()
        for child in (child for child in children if child not in status):
            done, code = os.waitpid(child, os.WNOHANG)
            status |= {child: code} if done else {}
    assert set(status.values()) == {0}
    assert len(seen) > 10 and len(ours) > 5, (len(seen), len(ours), gone)
    assert {max(seen) > 1000, min(seen) > 1000} == {True, False}
    found = read(tmp_path)
    assert len(numbers(found)) == 1 and (tmp_path / "config.json").read_text() == str(*numbers(found))
    write(tmp_path, filled(7), 400)
    names = {path.name for path in tmp_path.iterdir()}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert names == {*index["weight_map"].values(), "model.safetensors.index.json", "config.json"}


@contextlib.contextmanager
def stopped(action):
    """A process that has stopped where `action` calls its argument; gives (its id, a function that lets it go on)."""
    (told, tell), (go, let) = os.pipe(), os.pipe()
    child = forked(lambda: action(lambda: (os.write(tell, b"x"), os.read(go, 1))))
    os.close(tell)  # so that a child that dies before is seen
    try:
        assert os.read(told, 1) == b"x"
        yield child, lambda: os.write(let, b"x")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        for descriptor in (told, go, let):
            os.close(descriptor)


def partials(folder):
    return sorted(path.name for path in folder.iterdir() if "partial" in path.name)


def save_slowly(folder, number, stop):
    """A save that stops when half of its tensors are written."""
    files = CheckpointFiles(folder, entries_of(filled(number)), 400)
    for place, (key, tensor) in enumerate(filled(number).items()):
        if place == 3:
            stop()
        files.write(key, tensor)
    files.finish({}, 5)


def test_a_save_leaves_the_files_of_one_that_lives(tmp_path):
    """Which ends well later, and then its checkpoint is there; its temporary files are nobody's when it is killed."""
    with stopped(lambda stop: save_slowly(tmp_path, 1, stop)) as (child, go_on):
        mine = partials(tmp_path)
        write(tmp_path, filled(2), "1GB")
        assert partials(tmp_path) == mine and len(mine) > 1 and look(tmp_path) == {2}
        CheckpointFiles(tmp_path, entries_of(filled(3)), 400).abort()
        assert partials(tmp_path) == mine
        go_on()
        assert os.waitpid(child, 0)[1] == 0 and look(tmp_path) == {1}
    with stopped(lambda stop: save_slowly(tmp_path, 4, stop)) as (child, _):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert len([name for name in partials(tmp_path) if name not in mine]) > 1
        CheckpointFiles(tmp_path, entries_of(filled(5)), "1GB").abort()
        assert look(tmp_path) == {1} and partials(tmp_path) == []


def test_a_lock_ends_with_its_process(tmp_path, monkeypatch):
    """A save waits for one that gives files their names, says so where that takes too long, and not for a dead one."""
    monkeypatch.setattr(owned, "_PATIENCE_S", 0.1)
    write(tmp_path, filled(1), 400)

    def naming(stop):
        with owned.alone(tmp_path / files._LOCK):
            stop()

    with stopped(naming) as (child, _):
        before = {path.name for path in tmp_path.iterdir()}
        with pytest.raises(OSError, match="another save has not let go .*bitshard-save.lock"):
            write(tmp_path, filled(2), 400)
        assert look(tmp_path) == {1} and {path.name for path in tmp_path.iterdir()} == before
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        write(tmp_path, filled(2), 400)
    assert look(tmp_path) == {2} and not [path.name for path in tmp_path.iterdir() if "bitshard" in path.name]


def test_a_file_that_was_removed_before_it_is_owned_is_made_again(tmp_path, monkeypatch):
    """Its last owner removes it between our opening and our locking it: the next one would lock another file."""
    path, lock, calls = tmp_path / "lock", owned._lock, []

    def removed_before(descriptor):
        calls.append(descriptor)
        if len(calls) == 1:
            path.unlink()
        return lock(descriptor)

    monkeypatch.setattr(owned, "_lock", removed_before)
    descriptor, locked = owned.hold(path)
    assert locked and len(calls) == 2 and os.path.samestat(os.fstat(descriptor), os.stat(path))
    os.close(descriptor)


def test_shards_of_a_killed_save_are_no_checkpoint_and_go(tmp_path):
    """Shards that had their names when a save was killed, without an index: refused, and removed by the next save."""
    write(tmp_path, filled(1), 400)
    (tmp_path / "model.safetensors.index.json").unlink()
    dead = sorted(tmp_path.iterdir())
    assert len(Checkpoint(tmp_path).files) == 6  # all of one checkpoint
    write(tmp_path / "other", filled(5), "1GB")
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path)
    assert look_of_ours(tmp_path) == {5}  # as transformers reads it
    (tmp_path / "model.safetensors").unlink()
    shutil.rmtree(tmp_path / "other")
    dead[0].unlink()
    with pytest.raises(ValueError, match="these 2 files are not one checkpoint"):
        Checkpoint(tmp_path)
    write(tmp_path, filled(2), 400)
    assert look(tmp_path) == {2} and not any(path.exists() for path in dead)
    write(tmp_path, filled(3), "1GB")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"] and look(tmp_path) == {3}


def test_a_reader_of_an_old_index_never_finds_the_files_of_another_save(tmp_path):
    """However many saves came since, of one file or several: those of its own save, or none."""
    write(tmp_path, filled(0), 400)
    indices = []
    for number, limit in enumerate([400, "1GB", 400, 400, "1GB", 400], 1):
        if (tmp_path / "model.safetensors.index.json").is_file():
            indices.append(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"])
        write(tmp_path, filled(number), limit)
        assert look(tmp_path) == {number}
        assert not any((tmp_path / name).exists() for index in indices for name in index.values())


def test_where_a_file_system_has_no_locks_names_are_never_shared(tmp_path, monkeypatch):
    """Nothing is removed that might be somebody's, and no name is used that another save might use."""

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / "x.bitshard-partial").touch()
    monkeypatch.setattr(owned.fcntl, "flock", no_locks)
    for number, limit in enumerate([400, 400, "1GB", 400], 1):
        write(tmp_path, filled(number), limit)
        assert look(tmp_path) == {number} and not list(tmp_path.glob("model-0*"))
    assert partials(tmp_path) == ["x.bitshard-partial"]


@pytest.mark.parametrize("nested", [False, True])
def test_a_folder_in_4_bits_is_saved_with_its_bytes(tmp_path, nested):
    """What reads its entries has no reverse, and needs none."""
    dense, packed, again = (str(tmp_path / name) for name in ("dense", "packed", "again"))
    tiny.llama(dense)
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=nested)
    AutoModelForCausalLM.from_pretrained(dense, quantization_config=settings, device_map="cpu").save_pretrained(packed)
    fsdp.save_pretrained(AutoModelForCausalLM.from_pretrained(packed, device_map="cpu"), again)
    assert any(".absmax" in key for key in read(packed)) and same(read(again), read(packed))
