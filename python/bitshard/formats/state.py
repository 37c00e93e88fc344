"""QuantState: scales and format of a quantized tensor, and how they are read from checkpoints.

Layout of a checkpoint entry X.weight (bitsandbytes' keys): X.weight packed codes, X.weight.absmax scales,
X.weight.quant_map the 16 values, X.weight.nested_absmax and X.weight.nested_quant_map where the scales are quantized
themselves, and X.weight.quant_state.bitsandbytes__nf4 (or __fp4): the rest as JSON text in a uint8 tensor.
Checkpoints are not trusted: no size in them decides an allocation, and a contradiction is an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bitshard import ops
from bitshard.formats import maps
from bitshard.formats.kinds import FOUR_BIT, INT8, KINDS, Kind

STORAGE_DTYPES = (torch.uint8, torch.int8, torch.bfloat16, torch.float16, torch.float32, torch.float64)
VALUE_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
BLOCKSIZES_8BIT = (*BLOCKSIZES, 8192, 16384)
NESTED_BLOCKSIZE = 256  # scales per second-level scale

_MAX_BLOB_BYTES = 65536  # a real blob has about 200
_MAX_ELEMENTS = 2**48
_BLOB_PREFIX = "bitsandbytes__"
_TENSOR_KEYS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_VALUE_KEYS = ("quant_type", "blocksize", "dtype", "shape", "nested_blocksize", "nested_dtype", "nested_offset")
_LAYOUT_KEY = "layout"  # the name of a kind of bytes that is not bitsandbytes' own


def dtype_name(dtype: torch.dtype | None) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


class QuantState:
    """Scales and format of one quantized tensor.

    Attributes:
        absmax: float32 [n_blocks], or uint8 [n_blocks] when nested: one scale per block of `blocksize` elements.
        shape: shape of the tensor that was quantized (4-bit only).
        code: float32 value of each code, [16] for 4-bit and [256] for 8-bit.
        dtype: dtype of the tensor that was quantized, and of what dequantizing gives.
        blocksize: elements per scale.
        quant_type: "nf4", "fp4", "int8" for a weight of LLM.int8 (`kinds.INT8`), or None for 8-bit codes in blocks.
        offset: float32 [], subtracted from the scales before they were quantized (nested only); [E] of a stack.
        state2: QuantState of the scales: absmax float32 [ceil(n_blocks / 256)], code float32 [256] (nested only).
        checksum: int64 [], checksum of the packed bytes, or None where unknown. Never saved.
        sharded: the rank's part of the scales if FSDP2 has sharded them, else None. Then `absmax` is real only while
            gathered.
        kind: what the bytes are: one weight (`kinds.FOUR_BIT`), a stack of experts (`kinds.EXPERTS`), or `kinds.INT8`.
        part: the rank's part of the packed bytes of a weight that was loaded in parts and is not sharded yet
            (`bitshard.shards.kept_part.KeptPart`), else None.
    """

    __module__ = "bitshard.state"  # as pickles name it
    valid_quant_types = ("fp4", "nf4")
    valid_qs_type_keys = [f"{_BLOB_PREFIX}{name}" for name in valid_quant_types]
    valid_qs_keys = ["quant_state", *_TENSOR_KEYS, *_VALUE_KEYS]

    kind: Kind = FOUR_BIT
    checksum: Tensor | None = None
    sharded: Any = None
    part: Any = None
    shared_code: Tensor | None = None  # a table shared by all states; `code` becomes a copy of it when it is first read
    shared_name: str | None = None  # its name in the C core, by which Dynamo finds it: one input for all states
    _code: Tensor | None = None

    def __init__(
        self,
        absmax: Tensor,
        shape: torch.Size | None = None,
        code: Tensor | None = None,
        blocksize: int | None = None,
        quant_type: str | None = None,
        dtype: torch.dtype | None = None,
        offset: Tensor | None = None,
        state2: QuantState | None = None,
    ):
        self.absmax = absmax
        self.shape = shape
        self.code = code
        self.dtype = dtype
        self.blocksize = blocksize
        self.quant_type = quant_type
        self.offset = offset
        self.state2 = state2
        self.nested = state2 is not None

    @property
    def code(self) -> Tensor | None:
        """float32 value of each code. Copied from `shared_code` when first read, so that quantizing copies nothing."""
        if self._code is None and self.shared_code is not None:
            # not by the setter, which Dynamo of older torch (2.10) does not call
            self._code, self.shared_code, self.shared_name = _copy_of(self.shared_code), None, None
        return self._code

    @code.setter
    def code(self, value: Tensor | None) -> None:
        self._code = value
        self.shared_code = self.shared_name = None

    def share(self, name: str) -> None:
        """Use the table `name` of the C core, on the device of the scales, until `code` is read."""
        self._code, self.shared_name, self.shared_code = None, name, maps.table(name, self.absmax.device)

    def __getattr__(self, name: str) -> Any:
        # torch's state-dict code resolves the key "X.weight.quant_state.bitsandbytes__nf4" by attribute access.
        if name.startswith(_BLOB_PREFIX) and name == f"{_BLOB_PREFIX}{self.__dict__.get('quant_type')}":
            return pack_dict_to_tensor(self._values())
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __getitem__(self, index: int) -> Any:
        """The list form of old releases: [absmax, shape, dtype, blocksize, [offset, state2] or None, quant_type]."""
        nested = [self.offset, self.state2] if self.nested else None
        return [self.absmax, self.shape, self.dtype, self.blocksize, nested, self.quant_type][index]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, QuantState):
            return False
        plain = ("shape", "dtype", "blocksize", "quant_type")
        if any(getattr(self, name) != getattr(other, name) for name in plain):
            return False
        tensors = ("absmax", "code", "offset")
        return all(_same(getattr(self, name), getattr(other, name)) for name in tensors) and self.state2 == other.state2

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        self._check_whole("copied or pickled")
        private = ("_code", "shared_code", "shared_name")  # files hold the plain attribute, as bitsandbytes' own do
        return {"code": self.code, **{name: value for name, value in self.__dict__.items() if name not in private}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({name: value for name, value in state.items() if name != "code"})
        self.code = state.get("code")

    def __copy__(self) -> QuantState:
        return self.clone()

    def _check_whole(self, what: str) -> None:
        if self.sharded is not None:
            raise ValueError(
                f"this quantization state cannot be {what}: FSDP2 cut its scales among the ranks. "
                "Gather it first with bitshard.fsdp.full_state_dict(model)."
            )

    @property
    def reordered(self) -> bool:
        """Whether this is a state of bitsandbytes' second form for the CPU (`bitshard.functions.reordered`)."""
        return self.absmax.dtype is torch.bfloat16 and self.absmax.dim() == 2

    def packed_elements(self, itemsize: int) -> int:
        """Elements of a container dtype of `itemsize` bytes that hold the packed bytes."""
        return self.kind.elements(self, itemsize)

    @property
    def scale_count(self) -> int:
        """Scales of the whole tensor, also where a rank has some of them."""
        return self.kind.scale_count(self)

    def scales(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The op arguments (absmax, absmax_map, absmax2, offset); the last three are empty for plain scales."""
        absmax = self.absmax
        state2 = self.state2
        if state2 is None:
            none = ops.empty(absmax.device)
            return absmax, none, none, none
        if torch.compiler.is_dynamo_compiling():
            code = state2.code if state2.shared_name is None else maps.table(state2.shared_name, absmax.device)
        else:
            code = state2.code if state2.shared_code is None else state2.shared_code
        offset = self.offset
        return absmax, code, state2.absmax, offset if offset.dtype is torch.float32 else offset.float()

    def to(self, device: torch.device | str | int) -> QuantState:
        """Move every tensor to `device`, in place, and return self. On the meta device the statistics stay real."""
        device = torch.device(device)
        if device.type == "meta":
            return self
        if self.sharded is not None:
            self.sharded.to(device)
        else:
            self.absmax = self.absmax.to(device)
        for name in ("_code", "shared_code", "offset", "checksum"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.to(device))
        if self.state2 is not None:
            self.state2.to(device)
        return self

    def moved(self, device: torch.device) -> QuantState:
        """This state on `device`: itself if it is there already (or if `device` is meta), else a copy."""
        if device.type == "meta" or self.sharded is not None or self.absmax.device == device:
            return self
        copy = self.clone()
        return copy.to(device)

    def clone(self) -> QuantState:
        """A new state that shares this one's tensors."""
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)
        if self.state2 is not None:
            copy.state2 = self.state2.clone()
        return copy

    def _values(self) -> dict[str, Any]:
        values = {
            "quant_type": self.quant_type,
            "blocksize": self.blocksize,
            "dtype": dtype_name(self.dtype),
            "shape": None if self.shape is None else tuple(self.shape),
        }
        if self.nested:
            values["nested_blocksize"] = self.state2.blocksize
            values["nested_dtype"] = dtype_name(self.state2.dtype)
            values["nested_offset"] = self.offset.tolist()
        if self.kind.name is not None:
            values[_LAYOUT_KEY] = self.kind.name
        return values

    def as_dict(self, packed: bool = False) -> dict[str, Any]:
        """The state as checkpoint entries, keys without prefix.

        With `packed` (4-bit only) every value is a tensor: what is not a tensor is put as JSON into
        "quant_state.bitsandbytes__nf4" (or __fp4). ValueError if FSDP2 has sharded the scales.
        """
        self._check_whole("saved from here")
        if self.reordered:
            raise ValueError(
                f"a weight of shape {list(self.shape)} cannot be saved as _convert_weight_packed_for_cpu made it: no "
                "checkpoint has that form. Turn it back first, with _convert_weight_packed_for_cpu_inverse."
            )
        tensors = {"absmax": self.absmax} if self.kind is INT8 else {"absmax": self.absmax, "quant_map": self.code}
        if self.nested:
            tensors["nested_absmax"] = self.state2.absmax
            tensors["nested_quant_map"] = self.state2.code.clone()  # safetensors drops tensors that share storage
        if not packed or self.quant_type is None:
            return {**tensors, **self._values()}
        return {**tensors, f"quant_state.{_BLOB_PREFIX}{self.quant_type}": pack_dict_to_tensor(self._values())}

    @classmethod
    def from_dict(cls, qs_dict: dict[str, Any], device: torch.device | str | int) -> QuantState:
        """Read a state from checkpoint entries, with or without prefixes, packed or not. `qs_dict` is not changed.

        TypeError or ValueError, with the numbers, for anything missing, unknown, contradictory or out of range.
        """
        entries = _read_entries(qs_dict)
        if entries.get("quant_type") is None:
            return _read_8bit(cls, entries, device)
        state = _read_int8(cls, entries) if entries["quant_type"] == INT8.name else _read_4bit(cls, entries)
        return state.to(device)


def _copy_of(table: Tensor) -> Tensor:
    if torch.compiler.is_dynamo_compiling():
        return table.clone()
    with torch.inference_mode(False):
        return table.clone()


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a.float(), b.float(), atol=1e-6, equal_nan=True)


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


def _read_entries(qs_dict: dict[str, Any]) -> dict[str, Any]:
    """Entries by bare name, the blob unpacked, of the right kind each."""
    if not isinstance(qs_dict, dict):
        raise TypeError(f"quantization state: expected a dict, got {type(qs_dict).__name__}")
    entries: dict[str, Any] = {}
    blobs: dict[str, Any] = {}
    for key, value in qs_dict.items():
        if not isinstance(key, str):
            raise TypeError(f"quantization state: key {_short(key)} is no string")
        name = key.split(".")[-1]
        target = blobs if name.startswith(_BLOB_PREFIX) else entries
        if name in target:
            raise ValueError(f"quantization state: two entries are named {name[:60]}: {_names(qs_dict)}")
        target[name] = value
    if len(blobs) > 1:
        raise ValueError(f"quantization state: expected one quant_state entry, got {_names(blobs)}")
    for name, blob in blobs.items():
        if name not in (*QuantState.valid_qs_type_keys, f"{_BLOB_PREFIX}{INT8.name}"):
            raise ValueError(f"quantization state: {_names([name])} is none of {QuantState.valid_qs_type_keys}")
        values = unpack_tensor_to_dict(blob)
        _check_names("its JSON entry", values, (*_VALUE_KEYS, _LAYOUT_KEY))
        twice = sorted(set(values) & set(entries))
        if twice:
            raise ValueError(f"quantization state: {twice} given both as entries and in {name}")
        if values.get("quant_type") != name.removeprefix(_BLOB_PREFIX):
            raise ValueError(
                f"quantization state: {name} contradicts its quant_type {_short(values.get('quant_type'))}"
            )
        entries.update(values)
    if not blobs and "quant_type" not in entries:
        raise ValueError(f"quantization state: neither quant_type nor a quant_state entry among {_names(entries)}")
    _check_names("the entries", entries, (*_TENSOR_KEYS, *_VALUE_KEYS, _LAYOUT_KEY))
    for name in _TENSOR_KEYS:
        if name in entries and not isinstance(entries[name], Tensor):
            raise TypeError(f"quantization state: {name} must be a tensor, got {type(entries[name]).__name__}")
    return entries


def _check_names(where: str, entries: dict[str, Any], allowed: tuple[str, ...]) -> None:
    unknown = [name for name in entries if name not in allowed]
    if unknown:
        raise ValueError(f"quantization state: {where} hold unknown {_names(unknown)}, known are {sorted(allowed)}")


def _entry(entries: dict[str, Any], name: str) -> Any:
    if name not in entries:
        raise ValueError(f"quantization state: {name} is missing, there are {sorted(entries)}")
    return entries[name]


def _integer(entries: dict[str, Any], name: str) -> int:
    value = _entry(entries, name)
    if type(value) is not int:
        raise TypeError(f"quantization state: {name} must be an integer, got {_short(value)}")
    return value


def _names(keys: Iterable[Any]) -> list[str]:
    """The first few of the keys, shortened: the length of a message must not depend on a file."""
    return sorted(str(key)[:60] for key in keys)[:8]


def _short(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:60]}"


def _value_dtype(entries: dict[str, Any], name: str) -> torch.dtype:
    value = _entry(entries, name)
    if not isinstance(value, str):
        raise TypeError(f"quantization state: {name} must be a string, got {_short(value)}")
    if value not in VALUE_DTYPES:
        raise ValueError(f"quantization state: {name} is {value[:60]!r}, expected one of {sorted(VALUE_DTYPES)}")
    return VALUE_DTYPES[value]


def _shape(entries: dict[str, Any]) -> torch.Size:
    value = _entry(entries, "shape")
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"quantization state: shape must be a list of sizes, got {_short(value)}")
    if len(value) > 8:
        raise ValueError(f"quantization state: shape has {len(value)} dimensions, at most 8 are allowed")
    total = 1
    for size in value:
        if type(size) is not int:
            raise TypeError(f"quantization state: shape holds {_short(size)}, expected integers")
        if not 0 <= size <= _MAX_ELEMENTS:
            raise ValueError(f"quantization state: shape holds {_short(size)}, expected 0 to {_MAX_ELEMENTS}")
        total *= size
    if total > _MAX_ELEMENTS:
        raise ValueError(f"quantization state: shape {list(value)} has {total} elements, at most {_MAX_ELEMENTS}")
    return torch.Size(value)


def _vector(entries: dict[str, Any], name: str, dtypes: tuple[torch.dtype, ...], numel: int | None, why: str) -> Tensor:
    tensor = _entry(entries, name)
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


def _code_map(entries: dict[str, Any], name: str, table: Tensor) -> Tensor:
    """The values of the codes, which must be those of the format within the rounding of their dtype; float32."""
    given = _vector(entries, name, tuple(VALUE_DTYPES.values()), table.numel(), f"a map of {table.numel()} values")
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
        raise TypeError(f"quantization state: nested_offset must be a number, got {_short(offset)}")
    try:
        finite = math.isfinite(offset) and abs(offset) <= torch.finfo(torch.float32).max
    except OverflowError:
        finite = False
    if not finite:
        raise ValueError(f"quantization state: nested_offset is {_short(offset)}, expected a finite float32")


def _read_offsets(entries: dict[str, Any], experts: int | None) -> Tensor:
    """The offset of nested scales, float32 []; of a stack of `experts` weights a list of as many, float32 [E]."""
    given = _entry(entries, "nested_offset")
    if experts is None:
        _check_offset(given)
        return torch.tensor(float(given), dtype=torch.float32, device="cpu")
    if not isinstance(given, list) or len(given) != experts:
        found = f"{len(given)} numbers" if isinstance(given, list) else _short(given)
        raise ValueError(f"quantization state: nested_offset is {found}, expected a list of one for {experts} experts")
    for offset in given:
        _check_offset(offset)
    return torch.tensor(given, dtype=torch.float32, device="cpu")


def _read_nested(
    cls: type[QuantState],
    entries: dict[str, Any],
    n_blocks: int,
    blocksizes: tuple[int, ...],
    experts: int | None = None,
) -> tuple[Tensor, QuantState]:
    """(offset, state2) of `n_blocks` quantized scales."""
    blocksize = _integer(entries, "nested_blocksize")
    if blocksize not in blocksizes:
        raise ValueError(f"quantization state: nested_blocksize is {_short(blocksize)}, supported: {blocksizes}")
    offset, parts = _read_offsets(entries, experts), 1 if experts is None else experts
    n_blocks2 = parts * ops.block_count(n_blocks // parts, blocksize)
    why = f"one per {blocksize} of {n_blocks // parts} scales"
    absmax = _vector(entries, "nested_absmax", (torch.float32,), n_blocks2, why)
    check_scales(absmax, "nested_absmax", signed=False)
    code = _vector(entries, "nested_quant_map", (torch.float32,), 256, "a map of 256 values")
    if not bool(torch.isfinite(code).all()):
        raise ValueError("quantization state: nested_quant_map holds values that are not finite")
    dtype = _value_dtype(entries, "nested_dtype")
    state2 = cls(absmax=absmax.contiguous(), code=code.contiguous(), blocksize=blocksize, dtype=dtype)
    return offset, state2


def _read_layout(entries: dict[str, Any], shape: torch.Size, blocksize: int) -> Kind:
    """The kind of the bytes; bitsandbytes' own where no entry names another. ValueError where it does not fit."""
    name = entries.get(_LAYOUT_KEY)
    if name is None:
        return FOUR_BIT
    if not isinstance(name, str) or name not in KINDS or name == INT8.name:
        raise ValueError(f"quantization state: layout is {_short(name)}, known are {[name for name in KINDS if name]}")
    if len(shape) != 3 or 0 in shape or shape[1:].numel() % blocksize:
        raise ValueError(
            f"quantization state: layout {name!r} needs a shape [E, N, K] with N K a multiple of the blocksize "
            f"{blocksize}, got {list(shape)}"
        )
    return KINDS[name]


def _check_nested_names(entries: dict[str, Any]) -> bool:
    """Whether the scales are nested: either all nested entries exist, or none."""
    names = [name for name in (*_TENSOR_KEYS, *_VALUE_KEYS) if name.startswith("nested_")]
    given = [name for name in names if name in entries]
    if given and len(given) != len(names):
        raise ValueError(f"quantization state: {sorted(set(names) - set(given))} missing beside {given}")
    return bool(given)


def _read_4bit(cls: type[QuantState], entries: dict[str, Any]) -> QuantState:
    quant_type = entries["quant_type"]
    if not isinstance(quant_type, str) or quant_type not in ops.FORMATS:
        raise ValueError(
            f"quantization state: quant_type is {_short(quant_type)}, expected one of {sorted(ops.FORMATS)}"
        )
    blocksize = _integer(entries, "blocksize")
    if blocksize not in BLOCKSIZES:
        raise ValueError(f"quantization state: blocksize is {_short(blocksize)}, expected one of {BLOCKSIZES}")
    shape = _shape(entries)
    kind = _read_layout(entries, shape, blocksize)
    n_blocks = ops.block_count(math.prod(shape), blocksize)
    nested = _check_nested_names(entries)
    absmax_dtype = torch.uint8 if nested else torch.float32
    why = f"{'nested' if nested else 'plain'} scales of shape {list(shape)} with blocksize {blocksize}"
    absmax = _vector(entries, "absmax", (absmax_dtype,), n_blocks, why)
    check_scales(absmax, "absmax")
    offset = state2 = None
    if nested:
        experts = None if kind is FOUR_BIT else shape[0]
        offset, state2 = _read_nested(cls, entries, n_blocks, (NESTED_BLOCKSIZE,), experts)
    state = cls(
        absmax=absmax.contiguous(),
        shape=shape,
        code=_code_map(entries, "quant_map", ops.table(quant_type)),
        blocksize=blocksize,
        quant_type=quant_type,
        dtype=_value_dtype(entries, "dtype"),
        offset=offset,
        state2=state2,
    )
    if kind is not FOUR_BIT:
        state.kind = kind
    return state


def _read_int8(cls: type[QuantState], entries: dict[str, Any]) -> QuantState:
    """The state of a weight [N, K] of LLM.int8."""
    shape = _shape(entries)
    if len(shape) != 2 or entries.get(_LAYOUT_KEY) != INT8.name or _check_nested_names(entries):
        raise ValueError(f"quantization state: int8 of shape {list(shape)}, layout {_short(entries.get(_LAYOUT_KEY))}")
    absmax = _vector(entries, "absmax", (torch.float32,), shape[0], f"scales of the rows of {list(shape)}")
    check_scales(absmax, "absmax", signed=False)
    return int8_state(absmax.contiguous(), shape, _value_dtype(entries, "dtype"))


def int8_state(scales: Tensor, shape: torch.Size, dtype: torch.dtype) -> QuantState:
    """The state of a weight [N, K] of LLM.int8 with `scales` float32 [N], which dequantizes to `dtype`."""
    none = scales.new_empty(0)
    state = QuantState(scales, torch.Size(shape), none, shape[1], INT8.name, dtype)
    state.kind = INT8
    return state


def _read_8bit(cls: type[QuantState], entries: dict[str, Any], device: torch.device | str | int) -> QuantState:
    """The state of 8-bit codes (`quantize_blockwise`), which names no shape: sizes are checked when it is used."""
    blocksize = _integer(entries, "blocksize")
    if blocksize not in BLOCKSIZES_8BIT:
        raise ValueError(f"quantization state: blocksize is {_short(blocksize)}, expected one of {BLOCKSIZES_8BIT}")
    if entries.get("shape") is not None:
        raise ValueError(f"quantization state: shape {_short(entries['shape'])} without a quant_type")
    nested = _check_nested_names(entries)
    absmax = _vector(entries, "absmax", (torch.uint8 if nested else torch.float32,), None, "8-bit scales")
    check_scales(absmax, "absmax")
    offset, state2 = _read_nested(cls, entries, absmax.numel(), BLOCKSIZES_8BIT) if nested else (None, None)
    code = _vector(entries, "quant_map", (torch.float32,), 256, "a map of 256 values")
    state = cls(absmax, None, code, blocksize, None, _value_dtype(entries, "dtype"), offset, state2)
    return state.to(device)
