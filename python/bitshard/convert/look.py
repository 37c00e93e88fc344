"""What a checkpoint's files hold: from their headers, the few bytes that describe 4-bit weights, and all float values.

An int8 weight has no description: it is int8 [N, K] with a float32 [N] beside it that is called SCB.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bitshard.convert import values
from bitshard.convert.headers import Stored, other_weights, read_header, read_index
from bitshard.formats import kind as kinds
from bitshard.formats import layouts
from bitshard.sharding.checkpoints.reading import INDEX, SINGLE

_JSON = ".quant_state.bitsandbytes__"
INT8 = "int8"
_BESIDE_INT8 = ("SCB", "weight_format")
_BESIDE = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_JSON_LIMIT = 1 << 20
_CHUNK = 1 << 24
_DTYPES = {"U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}  # of packed codes and their scales


class Weight(NamedTuple):
    """One tensor of the model.

    Attributes:
        name: its key.
        format: nf4, fp4, mxfp4, nvfp4, int8, or safetensors' name of a dense dtype.
        shape: of the values, also where they are packed.
        storage: safetensors' name of the dtype of the bytes in the file.
        nbytes: with all that is beside it.
        details: of a 4-bit or int8 weight: blocksize, nested, dtype, experts.
        sum: of its bytes and of all that is beside it, where these were read.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    storage: str
    nbytes: int
    details: dict[str, Any]
    sum: str | None = None

    def line(self) -> str:
        """For people."""
        words = [self.name, self.format, "x".join(map(str, self.shape)) or "scalar", f"{self.nbytes:,} bytes"]
        if self.details:
            words += [f"in {self.storage}", *self.scaled()]
        return ", ".join([*words, *filter(None, [self.sum])])

    def scaled(self) -> list[str]:
        """Its scales in words."""
        if self.format == INT8:
            return ["a scale for each row"]
        return [f"blocks of {self.details['blocksize']}", f"{'nested' if self.details['nested'] else 'plain'} scales"]


class Looked(NamedTuple):
    """All of it: where, files, weights, and what is wrong."""

    path: Path
    files: int
    nbytes: int
    weights: list[Weight]
    complaints: list[str]

    def summary(self) -> str:
        """One line."""
        elements = sum(math.prod(weight.shape) for weight in self.weights)
        packed = Counter()
        for weight in self.weights:
            packed[8 if weight.format == INT8 else 4] += math.prod(weight.shape) if weight.details else 0
        bits = [4] if not packed[8] else [8] if not packed[4] else [4, 8]
        shares = " and ".join(f"{packed[each] / max(elements, 1):.1%} of them in {each} bits" for each in bits)
        files = f"{self.files} file{'' if self.files == 1 else 's'}"
        return (
            f"{self.path}: {files}, {self.nbytes:,} bytes, {len(self.weights):,} tensors of {elements:,} elements, "
            f"{shares}"
        )

    def kinds(self) -> Iterator[str]:
        """A line for each kind of tensor."""
        groups: dict[str, Counter] = {}
        for weight in self.weights:
            kind = weight.format
            if weight.details:
                what = "stacks of experts" if weight.details["experts"] else "weights"
                scaled = ", ".join(weight.scaled()).removesuffix(" scales")
                kind = f"{weight.format} {what}, {scaled}, in {weight.storage}"
            elements = math.prod(weight.shape)
            groups.setdefault(kind, Counter()).update(tensors=1, elements=elements, nbytes=weight.nbytes)
        for kind, found in sorted(groups.items(), key=lambda item: -item[1]["nbytes"]):
            bits = f", {found['nbytes'] * 8 / found['elements']:.2f} bits each" if found["elements"] else ""
            yield f"{kind}: {found['tensors']:,} of {found['elements']:,} elements, {found['nbytes']:,} bytes{bits}"

    def data(self) -> dict[str, Any]:
        """For programs."""
        weights = [weight._asdict() | {"shape": list(weight.shape)} for weight in self.weights]
        return {
            "path": str(self.path), "files": self.files, "bytes": self.nbytes, "weights": weights,
            "complaints": self.complaints,
        }  # fmt: skip


def look(
    path: str | Path, sums: bool = False, progress: Callable[[Iterable, int], Iterable] = lambda steps, total: steps,
    check_values: bool = True,
) -> Looked:  # fmt: skip
    """What `path`, a folder or a file, holds.

    Args:
        sums: read all bytes, and give each weight a checksum.
        progress: wraps the names of the files' tensors, (names, how many).
        check_values: read all floats, scales among them, and complain about those that are not finite.

    FileNotFoundError where it is not there or has no safetensors files. What is wrong in files is in `complaints`.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(2, "No such file or folder", str(path))
    files, complaints = ([path], []) if path.is_file() else _files(path)
    if not files and not complaints:
        raise FileNotFoundError(2, f"No safetensors files there{other_weights(path)}", str(path))
    stored: dict[str, tuple[Path, Stored]] = {}
    for file in files:
        try:
            for name, entry in read_header(file).items():
                if name in stored:
                    complaints.append(f"{name} is in {stored[name][0].name} and in {file.name}")
                stored[name] = (file, entry)
        except OSError as error:
            complaints.append(f"{file}: {error.strerror or error}")
        except ValueError as error:
            complaints.append(str(error))
    complaints += _against_index(path, stored)
    names = progress(stored, len(stored))
    weights = list(_weights(stored, names, complaints, sums, check_values))
    return Looked(path, len(files), sum(file.stat().st_size for file in files), weights, complaints)


def _files(folder: Path) -> tuple[list[Path], list[str]]:
    """The files of a folder, those that its index names and lacks as complaints."""
    named = _index(folder)
    if isinstance(named, str):
        return [], [named]
    if not named:
        return sorted(folder.glob("*.safetensors")), []
    files = [folder / name for name in sorted(set(named.values()))]
    absent = [f"{INDEX} names {file.name}, which is absent" for file in files if not file.is_file()]
    return [file for file in files if file.is_file()], absent


def _index(folder: Path) -> dict[str, str] | str:
    """{tensor: file} of an index; empty without one, a complaint for one that cannot be read."""
    path = folder / INDEX
    if not path.is_file() or (folder / SINGLE).is_file():
        return {}
    try:
        return read_index(path)
    except (OSError, ValueError) as error:
        return str(error)


def _against_index(path: Path, stored: dict[str, tuple[Path, Stored]]) -> list[str]:
    named = _index(path) if path.is_dir() else {}
    if isinstance(named, str) or not named:
        return []
    wrong = [name for name, file in named.items() if name in stored and stored[name][0].name != file]
    absent = [name for name, file in named.items() if name not in stored and (path / file).is_file()]
    lines = [f"{len(absent)} tensors that {INDEX} names are in no file: {absent[:3]}"] if absent else []
    return lines + ([f"{len(wrong)} tensors are in other files than {INDEX} says: {wrong[:3]}"] if wrong else [])


def _weights(
    stored: dict, names: Iterable[str], complaints: list[str], sums: bool, check_values: bool
) -> Iterator[Weight]:
    """Dense tensors, and packed ones with what is beside them."""
    packed = {name.partition(_JSON)[0]: name for name in stored if _JSON in name}
    by_others = layouts.layout_of(stored)
    laid_out = {} if by_others is None else by_others.packed_in(stored)
    int8 = {name for name, (_, entry) in stored.items() if entry.dtype == "I8" and _scales_of(name) in stored}
    beside = {f"{key}.{end}" for key in packed for end in _BESIDE} | set(packed.values())
    beside |= {name.removesuffix("weight") + end for name in int8 for end in _BESIDE_INT8}
    beside |= {part for name, key in laid_out.items() for part in by_others.names(key) if part != name}
    for name in names:
        if name in beside:
            continue
        if name in laid_out:
            key = laid_out[name]
            parts = [part for part in by_others.names(key) if part in stored]
            complaints += _faults(parts[1:], stored) if check_values else ()
            try:
                weight = _laid_out(by_others, key, [stored[part][1] for part in parts])
            except ValueError as error:
                complaints.append(str(error))
                continue
            yield weight._replace(sum=_sum([stored[part] for part in parts]) if sums else None)
            continue
        _, entry = stored[name]
        parts = [name]
        if name in packed:
            parts += [*(f"{name}.{end}" for end in _BESIDE), packed[name]]
        elif name in int8:
            parts += [name.removesuffix("weight") + end for end in _BESIDE_INT8]
        total = _sum([stored[part] for part in parts if part in stored]) if sums else None
        if check_values:
            complaints += _faults(parts[1:] if name in packed else parts, stored)
        if name in int8:
            weight, wrong = _int8(name, [stored[part][1] for part in parts if part in stored])
            complaints += wrong
            yield weight._replace(sum=total)
            continue
        if name not in packed:
            yield Weight(name, entry.dtype, entry.shape, entry.dtype, entry.nbytes, {}, total)
            continue
        weight, wrong = _packed(name, packed[name], stored)
        complaints += wrong
        if weight is not None:
            yield weight._replace(sum=total)
    complaints += [f"{name}: its packed weight is absent" for name in packed if name not in stored]


def _faults(names: list[str], stored: dict) -> Iterator[str]:
    """Values that are not finite."""
    for name in names:
        file, entry = stored.get(name, (None, None))
        if entry is None or not entry.nbytes or values.is_packed(name, stored):
            continue
        fault = values.fault_in_file(file, entry, values.dtype_in(name, entry.dtype, stored))
        if fault is not None:
            yield f"{name}: {fault}"


def _scales_of(name: str) -> str | None:
    """Name of the scales of an int8 weight; None where the name is not that of one."""
    return name.removesuffix("weight") + _BESIDE_INT8[0] if name.endswith("weight") else None


def _int8(name: str, parts: list[Stored]) -> tuple[Weight, list[str]]:
    """An int8 weight, its scales and the mark of its order, and where the scales contradict it."""
    codes, scales = parts[0], parts[1]
    wrong = []
    if len(codes.shape) != 2 or scales.dtype != "F32" or math.prod(scales.shape) != codes.shape[0]:
        found = f"{scales.dtype} {list(scales.shape)}"
        wrong.append(f"{_scales_of(name)}: {found}, expected F32, one for each row of {list(codes.shape)}")
    details = {"blocksize": codes.shape[-1] if codes.shape else 0, "nested": False, "dtype": None, "experts": False}
    nbytes = sum(part.nbytes for part in parts)
    return Weight(name, INT8, tuple(codes.shape), codes.dtype, nbytes, details), wrong


def _laid_out(layout: Any, key: str, parts: list[Stored]) -> Weight:
    """A weight in a layout of others; ValueError where its entries contradict each other."""
    empty = [torch.empty(part.shape, dtype=_DTYPES.get(part.dtype, torch.int64), device="meta") for part in parts[:2]]
    shape, kind = layout.shape(key, *empty), layout.kind
    details = {"blocksize": kind.blocksize, "nested": True, "dtype": None, "experts": kind.stacked}
    return Weight(key, kind.name_of_type, tuple(shape), parts[0].dtype, sum(part.nbytes for part in parts), details)


def _packed(name: str, described: str, stored: dict) -> tuple[Weight | None, list[str]]:
    """A 4-bit weight as its JSON describes it, and where the tensors beside it contradict that."""
    file, entry = stored[described]
    try:
        state = _json(file, entry)
        shape, blocksize = tuple(int(n) for n in state["shape"]), int(state["blocksize"])
        format, experts = str(state["quant_type"]), str(state.get("layout", "")).endswith("experts")
        if max(*shape, blocksize, math.prod(shape)) >= 2**63:
            raise ValueError("its shape or blocksize is beyond what a file can hold: expected numbers below 2^63")
        if min((*shape, blocksize)) < 1 or format not in kinds.quant_types():
            raise ValueError(f"shape {list(shape)}, blocksize {blocksize}, quant_type {format}")
        offset = state.get("nested_offset", 0.0)
        for number in offset if isinstance(offset, list) else [offset]:  # of experts one each
            if not math.isfinite(number):
                raise ValueError(f"nested_offset {number} is not finite")
    except (ValueError, KeyError, TypeError, OSError, RecursionError, OverflowError) as error:
        return None, [f"{described} does not describe a 4-bit weight: {error!r:.200}"]
    nested, elements = "nested_blocksize" in state, math.prod(shape)
    blocks = -(-elements // blocksize)
    parts = shape[0] if experts else 1
    second = {"nested_absmax": 4 * parts * -(-(blocks // parts) // 256)}
    wanted = {"": (elements + 1) // 2, "absmax": blocks * (1 if nested else 4), "quant_map": 64}
    if nested:
        wanted |= second | {"nested_quant_map": 1024}
    if not kinds.kind_of(format).nests:  # codes of a table of their own, scales that are 8-bit floats
        wanted = {"": wanted[""], "absmax": blocks} | (second if kinds.kind_of(format).has_global else {})
    wrong, nbytes = [], entry.nbytes
    for end, size in wanted.items():
        key = f"{name}.{end}" if end else name
        found = stored[key][1].nbytes if key in stored else None
        nbytes += found or 0
        slack = 3 if not end else 0  # packed bytes are whole elements of their storage
        if found is None or not size <= found <= size + slack:
            wrong.append(
                f"{key}: {'absent' if found is None else f'{found:,} bytes'}, expected {size:,} for {list(shape)}"
            )
    details = {"blocksize": blocksize, "nested": nested, "dtype": state.get("dtype"), "experts": experts}
    return Weight(name, format, shape, stored[name][1].dtype if name in stored else "", nbytes, details), wrong


def _json(file: Path, entry: Stored) -> dict[str, Any]:
    if entry.nbytes > _JSON_LIMIT:
        raise ValueError(f"{entry.nbytes:,} bytes of JSON, at most {_JSON_LIMIT:,} are allowed")
    with file.open("rb") as opened:
        opened.seek(entry.begin)
        found = json.loads(opened.read(entry.nbytes))
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    return found


def _sum(parts: list[tuple[Path, Stored]]) -> str:
    """blake2b of the bytes of tensors, one behind the other."""
    found = hashlib.blake2b(digest_size=16)
    for file, entry in parts:
        with file.open("rb") as opened:
            opened.seek(entry.begin)
            left = entry.nbytes
            while left > 0:
                chunk = opened.read(min(left, _CHUNK))
                if not chunk:
                    raise OSError(f"{file}: the file ends inside a tensor")
                found.update(chunk)
                left -= len(chunk)
    return found.hexdigest()
