"""A checkpoint of safetensors files that is written tensor by tensor, in any order, and is there whole or not at all.

The files are laid out before the first byte is known, from names, dtypes and shapes, as safetensors lays them out:
by dtype, then by name. Each tensor is written at its place as it comes, into files with temporary names. When all are
there and on the disk they get their own names, and the index, which says what belongs together, comes last.

A file that exists is never written into. Where a folder has a checkpoint already, several new files get names that no
other save has had or will have, so whatever index a reader has seen leads to the files of that one save, or to none.

Several processes may save into one folder. Each has temporary names of its own and owns these files while it lives
(`owned`), so that only what dead ones have left is removed; files get their names under a lock, one save at a time.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import re
import secrets
import shutil
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bitshard.sharding.checkpoints import owned
from bitshard.sharding.checkpoints.reading import INDEX, SHARD, SINGLE

_PARTIAL = ".bitshard-partial"
_LOCK = ".bitshard-save.lock"  # there while files get their names
# safetensors' names, from the first in a file to the last
_DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_RANKS = {dtype: rank for rank, dtype in enumerate(_DTYPES)}
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_LATE_BYTES = 4096  # what a tensor of yet unknown length may have at least; a weight's JSON has about 200
_LATE_GROWTH = 8  # times the length that it was thought to have: a stack's JSON has a number for each expert


@dataclass
class Entry:
    """One tensor of a checkpoint: `dtype` and `shape`; `late` where its length is known only when it is written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    late: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def most_bytes(self) -> int:
        """The most that it may have."""
        return max(_LATE_BYTES, _LATE_GROWTH * self.nbytes) if self.late else self.nbytes


def byte_count(size: int | str) -> int:
    """Bytes of a size such as 5000000 or "5GB". ValueError for anything else."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B)\s*", size.upper()) if isinstance(size, str) else None
    if found is None or found[2] not in _UNITS or not float(found[1]) > 0:
        raise ValueError(f"max_shard_size={size!r}: expected a number of bytes or a text such as '5GB'")
    return int(float(found[1]) * _UNITS[found[2]])


def split(entries: dict[str, Entry], limit: int) -> list[list[str]]:
    """The names of each file, filled in the order of `entries` up to `limit` bytes; a larger tensor has its own."""
    full, open_names, open_bytes = [], [], 0
    for name, entry in entries.items():
        if entry.nbytes > limit:
            full.append([name])
            continue
        if open_bytes + entry.nbytes > limit:
            full.append(open_names)
            open_names, open_bytes = [], 0
        open_names.append(name)
        open_bytes += entry.nbytes
    return [*full, open_names] if open_names else full


class TensorFile:
    """One safetensors file under its temporary name: a header of fixed length, and each tensor's place."""

    def __init__(self, path: Path, entries: dict[str, Entry]):
        self.path = path
        self.places: dict[str, tuple[int, Entry]] = {}
        self.late: dict[str, Tensor] = {}
        self.missing = set(entries)
        self.entries = entries
        ordered = sorted(entries, key=lambda name: (entries[name].late, _RANKS[entries[name].dtype], name))
        self.end = 0
        for key in ordered:
            if not entries[key].late:
                self.places[key] = (self.end, entries[key])
                self.end += entries[key].nbytes
        reserved, end = {}, self.end  # digits of the largest offsets that these may get
        for key in ordered:
            if entries[key].late:
                reserved[key] = (end, Entry(torch.uint8, (entries[key].most_bytes,)))
                end += entries[key].most_bytes
        self.header_bytes = len(_header({**self.places, **reserved}))
        self.descriptor, _ = owned.hold(path)

    def write(self, key: str, tensor: Tensor) -> None:
        """Write one tensor of the CPU. ValueError unless it is what the layout says."""
        entry = self.entries[key]
        shape = tuple(tensor.shape)
        if tensor.dtype is not entry.dtype or (shape != entry.shape and not entry.late) or key not in self.missing:
            raise ValueError(f"{key}: {list(shape)} of {tensor.dtype}, expected {list(entry.shape)} of {entry.dtype}")
        self.missing.discard(key)
        if entry.late:
            self.late[key] = tensor
        else:
            self._put(tensor, self.places[key][0])

    def _put(self, tensor: Tensor, offset: int) -> None:
        if tensor.numel() > 0:
            tensor = tensor.detach().contiguous()
            # not by numpy(), after which FSDP1 cannot free the storage
            data = (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
            _write_all(self.descriptor, memoryview(data).cast("B"), 8 + self.header_bytes + offset)

    def finish(self) -> None:
        """Write what came late and the header, and wait until the disk has all of it."""
        if self.missing:
            raise ValueError(f"{self.path.name}: never written: {sorted(self.missing)[:4]}")
        for key, tensor in self.late.items():
            if tensor.numel() > self.entries[key].most_bytes:
                raise ValueError(f"{key}: {tensor.numel()} bytes, expected at most {self.entries[key].most_bytes}")
            self.places[key] = (self.end, Entry(tensor.dtype, tuple(tensor.shape)))
            self._put(tensor, self.end)
            self.end += tensor.numel()
        header = _header(self.places).ljust(self.header_bytes)
        _write_all(self.descriptor, memoryview(struct.pack("<Q", len(header)) + header), 0)
        os.fsync(self.descriptor)

    def close(self) -> None:
        """Close the file, which nobody owns then."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _header(places: dict[str, tuple[int, Entry]]) -> bytes:
    """safetensors' header: JSON, filled with spaces so that the data begins at a multiple of 8 bytes."""
    table = {
        key: {
            "dtype": _DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, begin + entry.nbytes],
        }
        for key, (begin, entry) in places.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **table}, separators=(",", ":"), ensure_ascii=False)
    data = text.encode("utf-8")
    return data.ljust(-(-len(data) // 8) * 8)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


class CheckpointFiles:
    """The files of one checkpoint in `folder`, which is made if need be: model.safetensors, or several and an index.

    Args:
        folder: where they go.
        entries: what each tensor will be, in the order in which files are filled.
        max_shard_size: the most bytes of a file, as a number or "5GB".

    OSError where the disk has less room than the tensors need; ValueError for a dtype that safetensors does not have.
    """

    def __init__(self, folder: str | os.PathLike, entries: dict[str, Entry], max_shard_size: int | str):
        unknown = [f"{key}: {entry.dtype}" for key, entry in entries.items() if entry.dtype not in _DTYPES]
        if unknown or not entries:
            raise ValueError(f"safetensors files hold no {unknown[:3]}" if unknown else "there is nothing to save")
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        owned.remove_dead(self.folder.glob(f"*{_PARTIAL}"))  # of saves that were killed
        self._require_room(sum(entry.nbytes for entry in entries.values()))
        names = split(entries, byte_count(max_shard_size))
        self._own = secrets.token_hex(8)  # in names that no other save has
        self._small: list[tuple[Path, int]] = []  # temporary files of index and config, with their descriptors
        self.files: list[TensorFile] = []
        try:
            for number, keys in enumerate(names, 1):
                self.files.append(TensorFile(self._partial(f"model-{number:05d}"), {key: entries[key] for key in keys}))
        except BaseException:
            self.abort()
            raise
        self.file_of = {key: file for file in self.files for key in file.entries}

    def _partial(self, name: str) -> Path:
        return self.folder / f"{name}.{self._own}{_PARTIAL}"

    def _require_room(self, needed: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise OSError(
                errno.ENOSPC, f"{needed:,} bytes do not fit on the disk, which has {free:,}", os.fspath(self.folder)
            )

    def _names(self, locked: bool) -> list[str]:
        """The usual name of a single file, which is replaced in one step; the usual ones of several in a new folder.

        Else names of this save alone: a reader may still follow an index that it has read before, whatever came then.
        """
        count = len(self.files)
        if count == 1:
            return [SINGLE]
        new = locked and not any(name in (SINGLE, INDEX) or SHARD.fullmatch(name) for name in os.listdir(self.folder))
        stem = "model" if new else f"model.{self._own}"
        return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]

    def write(self, key: str, tensor: Tensor) -> None:
        """Write one tensor of the CPU at its place."""
        self.file_of[key].write(key, tensor)

    def finish(self, others: dict[str, bytes], parameters: int) -> None:
        """Give all files their names: first those of the tensors, then `others` (config.json), the index last.

        `parameters` is their number, for the index. What an earlier checkpoint in the folder had is removed then.
        """
        for file in self.files:
            file.finish()
        with owned.alone(self.folder / _LOCK) as locked:
            before = self._earlier(locked)
            files = dict(zip(self._names(locked), (file.path for file in self.files), strict=True))
            small = {name: data for name, data in others.items() if not self._holds(name, data)}
            if len(files) > 1:
                small[INDEX] = self._index([*files], parameters)
            self._name(files, small)
            self._remove(self.folder / name for name in before if name not in files and name not in small)
        self.abort()

    def _name(self, files: dict[str, Path], small: dict[str, bytes]) -> None:
        """Give `files`, {name: temporary file}, and `small`, {name: content}, their names; where that fails, none."""
        places = dict(files)
        for name, data in small.items():
            places[name] = self._partial(name)
            self._put(places[name], data)
        last = INDEX if INDEX in small else SINGLE
        try:
            for name, path in places.items():
                if name != last:
                    os.replace(path, self.folder / name)
            self._flush()
            os.replace(places[last], self.folder / last)
        except BaseException:
            if last == INDEX and not self._holds(INDEX, small[INDEX]):
                self._remove(self.folder / name for name in files)
            raise
        self._flush()

    def _put(self, path: Path, data: bytes) -> None:
        descriptor, _ = owned.hold(path)
        self._small.append((path, descriptor))
        _write_all(descriptor, memoryview(data), 0)
        os.fsync(descriptor)

    def _index(self, names: list[str], parameters: int) -> bytes:
        size = sum(entry.nbytes for file in self.files for _, entry in file.places.values())
        weights = {key: name for name, file in zip(names, self.files, strict=True) for key in file.entries}
        index = {"metadata": {"total_parameters": parameters, "total_size": size}, "weight_map": weights}
        return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode("utf-8")

    def _earlier(self, locked: bool) -> list[str]:
        """Files of the checkpoint that the folder has now. Of two, as readers do, the one in a single file first.

        With the lock nobody else gives files their names, so shards that no index names are those of dead saves.
        """
        names = [name for name in (SINGLE, INDEX) if (self.folder / name).is_file()]
        if INDEX in names:
            try:
                listed = json.loads((self.folder / INDEX).read_bytes())["weight_map"].values()
                names += sorted({name for name in listed if re.fullmatch(r"model[\w.-]*\.safetensors", name)})
            except (ValueError, KeyError, AttributeError, TypeError):
                pass  # no index that anybody can read, so nothing is known to belong to it
        if locked:
            names += sorted(name for name in os.listdir(self.folder) if SHARD.fullmatch(name) and name not in names)
        return names

    def _holds(self, name: str, data: bytes) -> bool:
        path = self.folder / name
        return path.is_file() and path.read_bytes() == data

    def _flush(self) -> None:
        """Wait until the disk knows the names."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def abort(self) -> None:
        """Remove what no reader finds, of this save alone; an earlier checkpoint stays. Nothing is left behind one."""
        self._remove([*(file.path for file in self.files), *(path for path, _ in self._small)])
        for file in self.files:
            file.close()
        while self._small:
            os.close(self._small.pop()[1])

    @staticmethod
    def _remove(paths: Iterable[Path]) -> None:
        for path in list(paths):
            path.unlink(missing_ok=True)
