"""Headers of safetensors files, read without trusting them: what is in a file, and whether it can be true.

The format: 8 bytes of little-endian length, that many bytes of JSON {name: {dtype, shape, data_offsets}}, the data.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

LIMIT = 100 << 20  # bytes of a header that safetensors itself reads
_PAGE = "page instead of the file, as a server gives it that wants a login or lacks the file: download it again"
_OTHER_KINDS = {
    b"version https://git-lfs": "a pointer of Git LFS instead of the file: git lfs pull",
    b"<!doctype html": f"an HTML {_PAGE}", b"<html": f"an HTML {_PAGE}", b"<?xml": f"an XML {_PAGE}",
    b"pk\x03\x04": "an archive as torch.save writes it, not of safetensors: load it in transformers and save it again",
    b"gguf": "a file of GGUF, not of safetensors: load it in transformers with gguf_file=, and save it again",
}  # fmt: skip
_MOST = 2**63  # elements, and bytes
_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "BF16": 16, "F16": 16, "I16": 16,
    "U16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8, "F4": 4, "F6_E2M3": 6,
    "F6_E3M2": 6,
}  # fmt: skip


class Stored(NamedTuple):
    """A tensor of a file: safetensors' name of its dtype, its shape, its first byte in the file and their number."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


def read_header(path: str | Path) -> dict[str, Stored]:
    """{name: tensor} of a file. OSError where it cannot be read; ValueError with the numbers where it is not sound."""
    path = Path(path)
    size = path.stat().st_size
    if not path.is_file():  # to open a pipe would wait for its other end
        raise ValueError(f"{path}: no ordinary file")
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            require_kind(path)
            raise ValueError(f"{path}: {size} bytes, too few for a safetensors file")
        (length,) = struct.unpack("<Q", start)
        if length > min(LIMIT, size - 8):
            require_kind(path)
            raise ValueError(
                f"{path}: a header of {length:,} bytes in a file of {size:,}; at most {LIMIT:,} are allowed"
            )
        text = file.read(length)
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: its header of {length:,} bytes is no JSON ({error})") from None
    if not isinstance(table, dict):
        raise ValueError(f"{path}: its header is no JSON object")
    table.pop("__metadata__", None)
    found = {name: _stored(path, name, entry, 8 + length) for name, entry in table.items()}
    _require_whole(path, found, 8 + length, size)
    return found


def require_kind(path: Path) -> None:
    """ValueError, in which it is named, for a file that begins as one of another kind than those that are read here."""
    with path.open("rb") as file:
        start = file.read(512).lstrip().lower()
    for begin, kind in _OTHER_KINDS.items():
        if start.startswith(begin):
            raise ValueError(f"{path}: {kind}")


def other_weights(folder: Path) -> str:
    """Behind the words that a folder has no safetensors files: which other ones, and how they are converted."""
    kinds = {"*.bin": "", "*.pt": "", "*.pth": "", "*.h5": None, "*.gguf": ", gguf_file={!r}"}
    for pattern, options in kinds.items():
        found = sorted(path.name for path in folder.glob(pattern))
        if not found:
            continue
        if options is None:
            return f", but {found[0]}, which is of another library"
        load = f"from_pretrained({str(folder)!r}{options.format(found[0])}, dtype='auto')"
        made = f"AutoModelForCausalLM.{load}.save_pretrained('converted')"
        return f", but {found[0]}: convert it in transformers with {made}"
    return ""


def read_index(path: Path) -> dict[str, str]:
    """{tensor: name of a file beside `path`} of an index. ValueError where it says something else."""
    require_kind(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if all(isinstance(file, str) and Path(file).name == file for file in found.values()):
            return found
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise ValueError(f"{path} cannot be read as one: it needs a weight_map of tensors to names of files beside it")


def _stored(path: Path, name: str, entry: Any, first: int) -> Stored:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (*shape, begin, end))
        if numbers and max(*shape, begin, end, math.prod(shape)) >= _MOST:
            raise ValueError("beyond what a file can hold")
    except (TypeError, KeyError, ValueError):
        raise ValueError(
            f"{path}: {name!r}: an entry needs dtype, shape and data_offsets below 2^63, it is {entry!r:.120}"
        ) from None
    if not numbers or dtype not in _BITS:
        raise ValueError(f"{path}: {name!r}: dtype {dtype!r:.40}, shape {list(shape)}, offsets {[begin, end]}")
    wanted = math.prod(shape) * _BITS[dtype]
    if wanted % 8 or end - begin != wanted // 8:
        raise ValueError(
            f"{path}: {name!r}: {end - begin} bytes for {list(shape)} of {dtype}, which needs {wanted / 8:g}"
        )
    return Stored(dtype, shape, first + begin, end - begin)


def _require_whole(path: Path, found: dict[str, Stored], first: int, size: int) -> None:
    """The tensors follow one another from the header to the end of the file."""
    place = first
    for name, tensor in sorted(found.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if tensor.begin != place:
            raise ValueError(f"{path}: {name!r} begins at byte {tensor.begin}, expected {place}: holes or overlaps")
        place += tensor.nbytes
    if place != size:
        raise ValueError(
            f"{path}: {size:,} bytes, but its tensors end at {place:,}: the file is truncated or has a tail"
        )
