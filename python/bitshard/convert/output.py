"""An output folder that is there whole or not at all, and that an interrupted run goes on with.

Until all is done the files are in a folder beside it, OUT.partial, with a journal of what they are made of: which
arguments, which source files, which tensors go into which file. A run that finds it goes on behind the last whole file.
The source is never needed again for a file that is whole: so `consume` may delete source files one by one, each once
everything that was made of it is on the disk and was read back. Where no file is whole yet, an error leaves nothing.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitshard.convert import values
from bitshard.formats.state import dtype_name
from bitshard.sharding.checkpoints import owned
from bitshard.sharding.checkpoints.files import Entry, TensorFile, split
from bitshard.sharding.checkpoints.reading import INDEX, SINGLE, Checkpoint

PARTIAL = ".partial"
_JOURNAL = "bitshard-journal.json"
_LOCK = "bitshard-lock"  # with the number of the process
_PATIENCE_S = 1


class Output:
    """The files of a checkpoint that is being made.

    Args:
        folder: where it will be. OSError where the partial folder beside it is nothing that a run has left.
        made_by: the arguments of this run. ValueError where the partial folder is that of another one.
        source: what the source's files hold, for a run that goes on when some of them are gone.
        entries: what each tensor will be, in the order in which they come.
        max_bytes: the most bytes of a file.
        infinite: names of tensors that may hold infinities.
    """

    def __init__(
        self, folder: Path, made_by: dict[str, Any], source: dict, entries: dict[str, Entry], max_bytes: int,
        infinite: Container[str] = (),
    ):  # fmt: skip
        self.folder, self.partial = folder, folder.with_name(folder.name + PARTIAL)
        self.entries, self.infinite = entries, infinite
        self.names = split(entries, max_bytes)
        self.made_by = plain(made_by)
        self._lock = claimed(self.partial, self.made_by)
        try:
            require_new(folder)  # another run may have made it since somebody looked
            begin(self.partial, self.made_by, source)
            self._require_room()
        except BaseException:
            self.close()
            raise

    def _require_room(self) -> None:
        needed = sum(self.entries[name].nbytes for number in self.missing() for name in self.names[number])
        free = shutil.disk_usage(self.partial).free
        if free < needed and not self.made_by.get("consume"):
            raise OSError(
                errno.ENOSPC, f"{needed:,} bytes do not fit on the disk, which has {free:,}", str(self.folder)
            )

    def path(self, number: int) -> Path:
        """A file's place until all is done, with the name that it keeps."""
        count = len(self.names)
        return self.partial / (SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors")

    def missing(self) -> list[int]:
        """Numbers of the files that are not whole yet."""
        return [number for number in range(len(self.names)) if not self.path(number).exists()]

    def steps(
        self, made: Callable[[set[str]], Iterable], progress: Callable[[Iterable, int], Iterable]
    ) -> Iterator[tuple[int, Iterator]]:
        """(number, tensors) of each file that is not whole, for `write`: of its names' set `made` gives the tensors.
        `progress` wraps numbers, one of which is taken for each tensor."""
        missing = self.missing()
        total = sum(len(self.names[number]) for number in missing)
        ticks = iter(progress(range(total), total))
        for number in missing:
            yield number, (tensor for tensor in made(set(self.names[number])) if next(ticks, 0) is not None)
        next(ticks, None)

    def write(self, number: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """One file, of all its tensors in whatever order: written, flushed, read back, and only then named.

        ValueError for values that are not finite: what is made of finite ones overflows.
        """
        with naming(self.path(number), sum(self.entries[name].nbytes for name in self.names[number])):
            self._write(number, tensors)
        flush(self.partial)

    def _write(self, number: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        partial = self.path(number).with_suffix(".writing")
        partial.unlink(missing_ok=True)
        file = TensorFile(partial, {name: self.entries[name] for name in self.names[number]})
        try:
            sums = {}
            for name, tensor in tensors:
                tensor = tensor.detach().as_subclass(Tensor).cpu().contiguous()
                self._require_finite(name, tensor)
                file.write(name, tensor)
                sums[name] = checksum(tensor)
            file.finish()
            _require_same(partial, sums)
            os.replace(partial, self.path(number))
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        finally:
            file.close()

    def _require_finite(self, name: str, tensor: Tensor) -> None:
        if values.is_packed(name, self.entries):
            return
        fault = values.fault_in(tensor, infinite=name in self.infinite)
        if fault is not None:
            raise ValueError(
                f"{self.folder}: {name}: {fault}, though those that it is made of are: they overflow "
                f"{dtype_name(tensor.dtype)} on the way. A wider dtype may hold them: of the config, or of merge --to"
            )

    def finish(self, others: dict[str, bytes | Path], parameters: int) -> None:
        """The index and `others`, contents or files to copy, then the folder gets its name."""
        files = [self.path(number).name for number in range(len(self.names))]
        if len(files) > 1:
            weights = {name: file for file, names in zip(files, self.names, strict=True) for name in names}
            size = sum(entry.nbytes for entry in self.entries.values())
            metadata = {"total_parameters": parameters, "total_size": size}
            write_json(self.partial / INDEX, {"metadata": metadata, "weight_map": dict(sorted(weights.items()))})
        for name, content in others.items():
            if isinstance(content, Path):
                copy(content, self.partial / name)
            else:
                write_whole(self.partial / name, content)
        _name(self.partial, self.folder)
        self.close()

    def close(self) -> None:
        """Let another process go on with the folder, which goes where no file in it is whole."""
        if self._lock >= 0:
            if self.partial.exists() and len(self.missing()) == len(self.names):
                shutil.rmtree(self.partial, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


@contextmanager
def naming(path: Path, nbytes: int | None = None) -> Iterator[None]:
    """While it lasts, an OSError without a path gets this one; of a full disk also the `nbytes` to be written."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        words = error.strerror
        if nbytes is not None and error.errno in (errno.ENOSPC, errno.EDQUOT):
            words += f": the file has {nbytes:,} bytes, and {shutil.disk_usage(path.parent).free:,} are free"
        raise OSError(error.errno, words, str(path)) from None


@contextmanager
def anew(folder: Path, made_by: dict[str, Any]) -> Iterator[Path]:
    """An empty partial folder, for a run that cannot go on: it gets its name at the end, and goes where that fails.

    OSError and ValueError where the partial folder is another run's, or nothing that a run has left.
    """
    partial, made_by = folder.with_name(folder.name + PARTIAL), plain(made_by)
    lock = claimed(partial, made_by)
    try:
        require_new(folder)
        for path in partial.iterdir():
            if path.name != _LOCK:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        begin(partial, made_by)
        with naming(partial):
            yield partial
        _name(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def remembered(folder: Path) -> dict[str, Any] | None:
    """The journal of an interrupted run for this folder: made_by and source; None: there is none."""
    return _journal_of(folder.with_name(folder.name + PARTIAL))


def _journal_of(work: Path) -> dict[str, Any] | None:
    journal = work / _JOURNAL
    try:
        found = json.loads(journal.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(found.get(name), dict) for name in ("made_by", "source")):
        raise ValueError(f"{journal} cannot be read: delete {journal.parent} and begin again")
    return found


def claimed(
    work: Path, made_by: dict[str, Any], left: str = "another run has left, with other arguments or files"
) -> int:
    """Make the folder that a run works in, or take over that of the same run: the lock on it, which is closed to let
    go. OSError where it is nothing that a run has left; ValueError, in which `left` says whose it is, where it is that
    of another one."""
    found = _journal_of(work)
    own = {_LOCK, _JOURNAL, Path(_JOURNAL).with_suffix(".writing").name}
    if found is None and os.path.lexists(work) and not (work.is_dir() and own.issuperset(os.listdir(work))):
        raise OSError(errno.EEXIST, "exists already, and no interrupted run has left it: remove it", str(work))
    _require_same_run(work, found, made_by, left)
    work.mkdir(parents=True, exist_ok=True)
    lock = _held(work)
    try:
        _require_same_run(work, _journal_of(work), made_by, left)  # which another one may have begun meanwhile
        os.truncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _require_same_run(work: Path, journal: dict[str, Any] | None, made_by: dict[str, Any], left: str) -> None:
    if journal is not None and journal["made_by"] != made_by:
        raise ValueError(f"{work} is what {left}: delete it, or repeat that run")


def _held(work: Path) -> int:
    """The lock on a run's folder. OSError that names the folder and the run that has it."""
    try:
        return owned.hold(work / _LOCK, _PATIENCE_S)[0]
    except FileNotFoundError:  # a run has just given the folder its name
        raise OSError(errno.EBUSY, "another run was writing it, and has ended", str(_target(work))) from None
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
    try:
        who = f", process {int((work / _LOCK).read_text())},"
    except (OSError, ValueError):
        who = ""
    words = f"another run{who} is writing it: wait for that, or end it"
    raise OSError(errno.EBUSY, words, str(_target(work)))


def _target(work: Path) -> Path:
    """The folder that a run in `work` makes."""
    return work.with_suffix("") if work.suffix == PARTIAL else work


def begin(work: Path, made_by: dict[str, Any], source: dict[str, Any] | None = None) -> None:
    """The journal of a run in a folder that it has claimed; that of an interrupted one stays."""
    if _journal_of(work) is None:
        write_json(work / _JOURNAL, {"made_by": made_by, "source": source or {}}, indent=None)  # of every tensor


def _name(partial: Path, folder: Path) -> None:
    """Give a folder in which all is done its name. The journal is there until then: an interrupted run knows it."""
    flush(partial)
    os.rename(partial, folder)
    for name in (_JOURNAL, _LOCK):
        (folder / name).unlink()
    flush(folder.parent)


def plain(made_by: dict[str, Any]) -> dict[str, Any]:
    """As the journal gives it back."""
    return json.loads(json.dumps(made_by, default=str))


def require_new(folder: Path) -> None:
    """OSError where an output folder exists."""
    if os.path.lexists(folder):
        raise OSError(errno.EEXIST, "exists already: name another folder, or remove it", str(folder))


def checksum(tensor: Tensor) -> str:
    """Hexadecimal digest (BLAKE2b, 128 bits) of the bytes of a tensor on the CPU."""
    return hashlib.blake2b(tensor.reshape(-1).view(torch.uint8).numpy(), digest_size=16).hexdigest()


def _require_same(path: Path, sums: dict[str, str]) -> None:
    """OSError unless the file holds these tensors."""
    reader = Checkpoint([path])
    try:
        wrong = [name for name, known in sums.items() if checksum(reader.read(name).contiguous()) != known]
    finally:
        reader.close()
    if wrong:
        raise OSError(errno.EIO, f"{len(wrong)} tensors read back differ from those written: {wrong[:3]}", str(path))


def copy(source: Path, target: Path) -> None:
    """A file's content, by the system. OSError, which names `target` where that cannot be written."""
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        name = error.filename if error.filename2 is None else target
        raise OSError(error.errno, error.strerror, str(name)) from None


def flush(folder: Path) -> None:
    """Wait until the disk knows the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: dict[str, Any], indent: int | None = 2) -> None:
    """A small file, whole or not at all."""
    write_whole(path, (json.dumps(content, indent=indent) + "\n").encode())


def write_whole(path: Path, data: bytes) -> None:
    """A file that has its name once it is on the disk. OSError, which names it, where that is full."""
    partial = path.with_suffix(".writing")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
