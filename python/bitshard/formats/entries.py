"""Entries of checkpoints beside a quantized weight: what they may hold, read one by one. Nothing in them is trusted.

No size in an entry decides an allocation, a contradiction is an error, and the length of a message does not depend on a
file. What the entries of a kind of weight are is the kind's (`bitshard.kinds`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bitshard import ops

VALUE_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
NESTED_BLOCKSIZE = 256  # scales per second-level scale

BLOB_PREFIX = "bitsandbytes__"
LAYOUT_KEY = "layout"  # the name of a kind of bytes that is not bitsandbytes' own
TENSOR_KEYS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
VALUE_KEYS = ("quant_type", "blocksize", "dtype", "shape", "nested_blocksize", "nested_dtype", "nested_offset")
_MAX_BLOB_BYTES = 65536  # a real blob has about 200
_MAX_ELEMENTS = 2**48


def dtype_name(dtype: torch.dtype | None) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


# ---- the JSON blob ----


def pack_dict_to_tensor(source_dict: dict[str, Any]) -> Tensor:
    """A dict as JSON text in a uint8 tensor [bytes], as checkpoints hold it."""
    return torch.tensor(list(json.dumps(source_dict).encode("utf-8")), dtype=torch.uint8, device="cpu")


def unpack_tensor_to_dict(tensor_data: Tensor) -> dict[str, Any]:
    """The dict in a uint8 tensor [bytes] of JSON text. TypeError or ValueError if it is none."""
    if not isinstance(tensor_data, Tensor):
        raise TypeError(f"the quant_state blob must be a uint8 tensor, got {type(tensor_data).__name__}")
    if tensor_data.dtype is not torch.uint8 or tensor_data.is_meta:
        raise TypeError(f"the quant_state blob must be uint8 bytes, got {tensor_data.dtype} on {tensor_data.device}")
    if not 0 < tensor_data.numel() <= _MAX_BLOB_BYTES:
        raise ValueError(f"the quant_state blob has {tensor_data.numel()} bytes, expected 1 to {_MAX_BLOB_BYTES}")
    text = bytes(tensor_data.detach().cpu().flatten().tolist())
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the quant_state blob of {len(text)} bytes is no JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"the quant_state blob holds a JSON {type(value).__name__}, expected an object")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError(f"a key occurs twice among {_names(key for key, _ in pairs)}")
    return result


# ---- reading ----


def read_all(qs_dict: dict[str, Any], quant_types: Iterable[str]) -> dict[str, Any]:
    """Entries by bare name, the blob of one of `quant_types` unpacked. Which names a kind has is checked later."""
    if not isinstance(qs_dict, dict):
        raise TypeError(f"quantization state: expected a dict, got {type(qs_dict).__name__}")
    entries: dict[str, Any] = {}
    blobs: dict[str, Any] = {}
    for key, value in qs_dict.items():
        if not isinstance(key, str):
            raise TypeError(f"quantization state: key {short(key)} is no string")
        name = key.split(".")[-1]
        target = blobs if name.startswith(BLOB_PREFIX) else entries
        if name in target:
            raise ValueError(f"quantization state: two entries are named {name[:60]}: {_names(qs_dict)}")
        target[name] = value
    if len(blobs) > 1:
        raise ValueError(f"quantization state: expected one quant_state entry, got {_names(blobs)}")
    known = [f"{BLOB_PREFIX}{quant_type}" for quant_type in quant_types]
    for name, blob in blobs.items():
        if name not in known:
            raise ValueError(f"quantization state: {_names([name])} is none of {known}")
        values = unpack_tensor_to_dict(blob)
        check_names("its JSON entry", values)
        twice = sorted(set(values) & set(entries))
        if twice:
            raise ValueError(f"quantization state: {twice} given both as entries and in {name}")
        if values.get("quant_type") != name.removeprefix(BLOB_PREFIX):
            raise ValueError(f"quantization state: {name} contradicts its quant_type {short(values.get('quant_type'))}")
        entries.update(values)
    if not blobs and "quant_type" not in entries:
        raise ValueError(f"quantization state: neither quant_type nor a quant_state entry among {_names(entries)}")
    return entries


def check_entries(entries: dict[str, Any], own_keys: tuple[str, ...]) -> None:
    """TypeError or ValueError for unknown entries and for what is no tensor; `own_keys`: of a kind's own tensors."""
    check_names("the entries", entries, *TENSOR_KEYS, *own_keys)
    for name in (*TENSOR_KEYS, *own_keys):
        if name in entries and not isinstance(entries[name], Tensor):
            raise TypeError(f"quantization state: {name} must be a tensor, got {type(entries[name]).__name__}")


def check_names(where: str, entries: dict[str, Any], *tensors: str) -> None:
    """ValueError unless every entry is one of `tensors` or a value that the JSON entry has."""
    allowed = (*tensors, *VALUE_KEYS, LAYOUT_KEY)
    unknown = [name for name in entries if name not in allowed]
    if unknown:
        raise ValueError(f"quantization state: {where} hold unknown {_names(unknown)}, known are {sorted(allowed)}")


def entry(entries: dict[str, Any], name: str) -> Any:
    if name not in entries:
        raise ValueError(f"quantization state: {name} is missing, there are {sorted(entries)}")
    return entries[name]


def integer(entries: dict[str, Any], name: str) -> int:
    value = entry(entries, name)
    if type(value) is not int:
        raise TypeError(f"quantization state: {name} must be an integer, got {short(value)}")
    return value


def _names(keys: Iterable[Any]) -> list[str]:
    """The first few of the keys, shortened: the length of a message must not depend on a file."""
    return sorted(str(key)[:60] for key in keys)[:8]


def short(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:60]}"


def value_dtype(entries: dict[str, Any], name: str) -> torch.dtype:
    value = entry(entries, name)
    if not isinstance(value, str):
        raise TypeError(f"quantization state: {name} must be a string, got {short(value)}")
    if value not in VALUE_DTYPES:
        raise ValueError(f"quantization state: {name} is {value[:60]!r}, expected one of {sorted(VALUE_DTYPES)}")
    return VALUE_DTYPES[value]


def read_shape(entries: dict[str, Any]) -> torch.Size:
    value = entry(entries, "shape")
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"quantization state: shape must be a list of sizes, got {short(value)}")
    if len(value) > 8:
        raise ValueError(f"quantization state: shape has {len(value)} dimensions, at most 8 are allowed")
    total = 1
    for size in value:
        if type(size) is not int:
            raise TypeError(f"quantization state: shape holds {short(size)}, expected integers")
        if not 0 <= size <= _MAX_ELEMENTS:
            raise ValueError(f"quantization state: shape holds {short(size)}, expected 0 to {_MAX_ELEMENTS}")
        total *= size
    if total > _MAX_ELEMENTS:
        raise ValueError(f"quantization state: shape {list(value)} has {total} elements, at most {_MAX_ELEMENTS}")
    return torch.Size(value)


def vector(entries: dict[str, Any], name: str, dtypes: tuple[torch.dtype, ...], numel: int | None, why: str) -> Tensor:
    tensor = entry(entries, name)
    if tensor.dtype not in dtypes:
        raise TypeError(
            f"quantization state: {name} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))} ({why})"
        )
    if numel is not None and tensor.numel() != numel:
        raise ValueError(f"quantization state: {name} has {tensor.numel()} entries, expected {numel} ({why})")
    if tensor.layout is not torch.strided:
        raise TypeError(f"quantization state: {name} has layout {tensor.layout}, expected a dense tensor")
    if tensor.is_meta:
        raise ValueError(f"quantization state: {name} is on the meta device and holds no values")
    return tensor.detach().reshape(-1)


def check_scales(scales: Tensor, name: str, signed: bool = True) -> None:
    """ValueError unless float32 `scales` are finite, and none below zero unless `signed`; codes may be any."""
    if scales.dtype is not torch.float32:
        return
    wrong = ~torch.isfinite(scales) if signed else ~(torch.isfinite(scales) & (scales >= 0))
    if bool(wrong.any()):
        first = int(torch.nonzero(wrong.flatten())[0])
        raise ValueError(
            f"quantization state: {int(wrong.sum())} of the {scales.numel()} scales in {name} are not finite"
            f"{'' if signed else ' or below zero'}, the first at {first}: {float(scales.flatten()[first])!r}"
        )


def code_map(entries: dict[str, Any], name: str, table: Tensor) -> Tensor:
    """The values of the codes, which must be those of the format within the rounding of their dtype; float32."""
    given = vector(entries, name, tuple(VALUE_DTYPES.values()), table.numel(), f"a map of {table.numel()} values")
    error = (given.cpu().float() - table).abs()
    allowed = 2 * torch.finfo(given.dtype).eps
    wrong = torch.nonzero(~(error <= allowed)).flatten()
    if wrong.numel():
        first = int(wrong[0])
        raise ValueError(
            f"quantization state: {name} is not the table of {entries.get('quant_type')!r}: {wrong.numel()} of "
            f"{table.numel()} values differ, the first at {first}: {float(given[first])!r}, expected "
            f"{float(table[first])!r}. Weights quantized with other values cannot be used."
        )
    return table.to(given.device)


def _check_offset(offset: Any) -> None:
    if type(offset) not in (int, float):
        raise TypeError(f"quantization state: nested_offset must be a number, got {short(offset)}")
    try:
        finite = math.isfinite(offset) and abs(offset) <= torch.finfo(torch.float32).max
    except OverflowError:
        finite = False
    if not finite:
        raise ValueError(f"quantization state: nested_offset is {short(offset)}, expected a finite float32")


def _read_offsets(entries: dict[str, Any], experts: int | None) -> Tensor:
    """The offset of nested scales, float32 []; of a stack of `experts` weights a list of as many, float32 [E]."""
    given = entry(entries, "nested_offset")
    if experts is None:
        _check_offset(given)
        return torch.tensor(float(given), dtype=torch.float32, device="cpu")
    if not isinstance(given, list) or len(given) != experts:
        found = f"{len(given)} numbers" if isinstance(given, list) else short(given)
        raise ValueError(f"quantization state: nested_offset is {found}, expected a list of one for {experts} experts")
    for offset in given:
        _check_offset(offset)
    return torch.tensor(given, dtype=torch.float32, device="cpu")


def read_nested(
    cls: Any,
    entries: dict[str, Any],
    n_blocks: int,
    blocksizes: tuple[int, ...],
    experts: int | None = None,
) -> tuple[Tensor, Any]:
    """(offset, state2) of `n_blocks` quantized scales."""
    blocksize = integer(entries, "nested_blocksize")
    if blocksize not in blocksizes:
        raise ValueError(f"quantization state: nested_blocksize is {short(blocksize)}, supported: {blocksizes}")
    offset, parts = _read_offsets(entries, experts), 1 if experts is None else experts
    n_blocks2 = parts * ops.block_count(n_blocks // parts, blocksize)
    why = f"one per {blocksize} of {n_blocks // parts} scales"
    absmax = vector(entries, "nested_absmax", (torch.float32,), n_blocks2, why)
    check_scales(absmax, "nested_absmax", signed=False)
    code = vector(entries, "nested_quant_map", (torch.float32,), 256, "a map of 256 values")
    if not bool(torch.isfinite(code).all()):
        raise ValueError("quantization state: nested_quant_map holds values that are not finite")
    dtype = value_dtype(entries, "nested_dtype")
    state2 = cls(absmax=absmax.contiguous(), code=code.contiguous(), blocksize=blocksize, dtype=dtype)
    return offset, state2


def has_nested(entries: dict[str, Any]) -> bool:
    """Whether the scales are nested: either all nested entries exist, or none."""
    names = [name for name in (*TENSOR_KEYS, *VALUE_KEYS) if name.startswith("nested_")]
    given = [name for name in names if name in entries]
    if given and len(given) != len(names):
        raise ValueError(f"quantization state: {sorted(set(names) - set(given))} missing beside {given}")
    return bool(given)
