"""QuantState: scales and format of a quantized tensor, and how they are read from checkpoints.

Layout of a checkpoint entry X.weight (bitsandbytes' keys): X.weight packed codes, X.weight.absmax scales,
X.weight.quant_map the 16 values, X.weight.nested_absmax and X.weight.nested_quant_map where the scales are quantized
themselves, and X.weight.quant_state.bitsandbytes__nf4 (or __fp4): the rest as JSON text in a uint8 tensor.
Checkpoints are not trusted: no size in them decides an allocation, and a contradiction is an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitshard import ops
from bitshard.formats import entries, maps
from bitshard.formats.entries import (
    BLOB_PREFIX,
    BLOCKSIZES,
    LAYOUT_KEY,
    NESTED_BLOCKSIZE,
    TENSOR_KEYS,
    VALUE_DTYPES,
    VALUE_KEYS,
    check_scales,
    dtype_name,
    pack_dict_to_tensor,
    unpack_tensor_to_dict,
)
from bitshard.formats.kind import Kind, kind_of_entries, quant_types
from bitshard.formats.kinds import FOUR_BIT, INT8

__all__ = ["BLOCKSIZES", "BLOCKSIZES_8BIT", "NESTED_BLOCKSIZE", "STORAGE_DTYPES", "VALUE_DTYPES", "QuantState"]
__all__ += ["check_scales", "dtype_name", "int8_state", "pack_dict_to_tensor", "unpack_tensor_to_dict"]

STORAGE_DTYPES = (torch.uint8, torch.int8, torch.bfloat16, torch.float16, torch.float32, torch.float64)
BLOCKSIZES_8BIT = (*BLOCKSIZES, 8192, 16384)


class QuantState:
    """Scales and format of one quantized tensor.

    Attributes:
        absmax: float32 [n_blocks], or uint8 [n_blocks] when nested: one scale per block of `blocksize` elements.
        shape: shape of the tensor that was quantized (4-bit only).
        code: float32 value of each code, [16] for 4-bit and [256] for 8-bit.
        dtype: dtype of the tensor that was quantized, and of what dequantizing gives.
        blocksize: elements per scale.
        quant_type: "nf4", "fp4", "mxfp4", "nvfp4", "int8" for a weight of LLM.int8 (`kinds.INT8`), or None for 8-bit
            codes in blocks.
        offset: float32 [], subtracted from the scales before they were quantized (nested only); [E] of a stack.
        state2: QuantState of the scales: absmax float32 [ceil(n_blocks / 256)], code float32 [256] (nested only).
        global_scale: of kinds that have one, factors of all scales: float32 [1], or as many as the kind says.
        checksum: int64 [], checksum of the packed bytes, or None where unknown. Never saved.
        sharded: the rank's part of the scales if FSDP2 has sharded them, else None. Then `absmax` is real only while
            gathered.
        kind: what the bytes are: one weight (`kinds.FOUR_BIT`), a stack of experts (`kinds.EXPERTS`), or `kinds.INT8`.
        part: the rank's part of the packed bytes of a weight that was loaded in parts and is not sharded yet
            (`bitshard.shards.kept_part.KeptPart`), else None.
        in_int8: who multiplies with the weight in 8-bit arithmetic (`bitshard.arithmetic.InInt8`), else None. Never
            saved.
    """

    __module__ = "bitshard.state"  # as pickles name it
    valid_quant_types = ("fp4", "nf4")
    valid_qs_type_keys = [f"{BLOB_PREFIX}{name}" for name in valid_quant_types]
    valid_qs_keys = ["quant_state", *TENSOR_KEYS, *VALUE_KEYS]

    kind: Kind = FOUR_BIT
    global_scale: Tensor | None = None
    checksum: Tensor | None = None
    sharded: Any = None
    part: Any = None
    in_int8: Any = None
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
        if name.startswith(BLOB_PREFIX) and name == f"{BLOB_PREFIX}{self.__dict__.get('quant_type')}":
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
        tensors = ("absmax", "code", "offset", "global_scale")
        return all(_same(getattr(self, name), getattr(other, name)) for name in tensors) and self.state2 == other.state2

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        self._check_whole("copied or pickled")
        private = (
            "_code",
            "shared_code",
            "shared_name",
            "in_int8",
        )  # files hold the plain attribute, as bitsandbytes' own do
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
        for name in ("_code", "shared_code", "offset", "global_scale", "checksum"):
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
        if self.nested and self.kind.nests:
            values["nested_blocksize"] = self.state2.blocksize
            values["nested_dtype"] = dtype_name(self.state2.dtype)
            values["nested_offset"] = self.offset.tolist()
        if self.kind.name is not None:
            values[LAYOUT_KEY] = self.kind.name
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
        tensors = self.kind.tensors(self)
        if not packed or self.quant_type is None:
            return {**tensors, **self._values()}
        return {**tensors, f"quant_state.{BLOB_PREFIX}{self.quant_type}": pack_dict_to_tensor(self._values())}

    @classmethod
    def from_dict(cls, qs_dict: dict[str, Any], device: torch.device | str | int) -> QuantState:
        """Read a state from checkpoint entries, with or without prefixes, packed or not. `qs_dict` is not changed.

        TypeError or ValueError, with the numbers, for anything missing, unknown, contradictory or out of range.
        """
        given = entries.read_all(qs_dict, quant_types())
        if given.get("quant_type") is None:
            entries.check_entries(given, ())
            return _read_8bit(cls, given, device)
        kind = kind_of_entries(given)
        entries.check_entries(given, kind.own_keys)
        return kind.read(cls, given).to(device)


def _copy_of(table: Tensor) -> Tensor:
    if torch.compiler.is_dynamo_compiling():
        return table.clone()
    with torch.inference_mode(False):
        return table.clone()


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a.float(), b.float(), atol=1e-6, equal_nan=True)


def int8_state(scales: Tensor, shape: torch.Size, dtype: torch.dtype) -> QuantState:
    """The state of a weight [N, K] of LLM.int8 with `scales` float32 [N], which dequantizes to `dtype`."""
    return INT8.state(QuantState, scales, shape, dtype)


def _read_8bit(cls: type[QuantState], given: dict[str, Any], device: torch.device | str | int) -> QuantState:
    """The state of 8-bit codes (`quantize_blockwise`), which names no shape: sizes are checked when it is used."""
    blocksize = entries.integer(given, "blocksize")
    if blocksize not in BLOCKSIZES_8BIT:
        raise ValueError(
            f"quantization state: blocksize is {entries.short(blocksize)}, expected one of {BLOCKSIZES_8BIT}"
        )
    if given.get("shape") is not None:
        raise ValueError(f"quantization state: shape {entries.short(given['shape'])} without a quant_type")
    nested = entries.has_nested(given)
    absmax = entries.vector(given, "absmax", (torch.uint8 if nested else torch.float32,), None, "8-bit scales")
    check_scales(absmax, "absmax")
    offset, state2 = entries.read_nested(cls, given, absmax.numel(), BLOCKSIZES_8BIT) if nested else (None, None)
    code = entries.vector(given, "quant_map", (torch.float32,), 256, "a map of 256 values")
    state = cls(absmax, None, code, blocksize, None, entries.value_dtype(given, "dtype"), offset, state2)
    return state.to(device)
