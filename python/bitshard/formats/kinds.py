"""The kinds of packed weights: 4-bit ones, stacks of them, and int8. What each is asked: `bitshard.formats.kind`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bitshard import ops
from bitshard.formats import entries
from bitshard.formats.kind import KINDS, Kind, kind_named, kind_of, register

__all__ = ["EXPERTS", "FOUR_BIT", "INT8", "KINDS", "ExpertStack", "FourBit", "Int8", "Kind"]
__all__ += ["kind_named", "kind_of", "register"]


class FourBit(Kind):
    """NF4 and FP4: two codes to a byte in flattened order, one scale for `blocksize` elements; docs/formats.md."""

    word = "4-bit"
    name = None
    bits = 4
    quant_types = tuple(ops.FORMATS)
    nests = fuses_lora = True

    def check_state(self, packed: Tensor, state: Any, where: str) -> None:
        if state.shape is None or state.quant_type not in self.quant_types:
            raise ValueError(
                f"{where}: quant_state is of type {state.quant_type!r} and shape {state.shape}, not a 4-bit state"
            )
        self.check(state.quant_type, state.blocksize)
        if state.reordered:
            raise ValueError(
                f"{where}: the weight of shape {list(state.shape)} is in the form of _convert_weight_packed_for_cpu, "
                "which functions take and layers do not: turn it back with _convert_weight_packed_for_cpu_inverse"
            )
        wanted = torch.uint8 if state.nested else torch.float32
        if state.absmax.dtype is not wanted:
            raise TypeError(f"{where}: absmax is {state.absmax.dtype}, expected {entries.dtype_name(wanted)}")
        if state.nested and state.state2.blocksize != entries.NESTED_BLOCKSIZE:
            raise ValueError(
                f"{where}: nested blocksize {state.state2.blocksize} is not supported, only {entries.NESTED_BLOCKSIZE}"
            )

    def tensors(self, state: Any) -> dict[str, Tensor]:
        if not state.nested:
            return super().tensors(state)
        code = state.state2.code.clone()  # safetensors drops tensors that share storage
        return {**super().tensors(state), "nested_absmax": state.state2.absmax, "nested_quant_map": code}

    def read(self, cls: Any, given: dict[str, Any]) -> Any:
        blocksize = entries.integer(given, "blocksize")
        if blocksize not in self.blocksizes:
            raise ValueError(
                f"quantization state: blocksize is {entries.short(blocksize)}, expected one of {self.blocksizes}"
            )
        shape = entries.read_shape(given)
        self.check_shape(shape, blocksize)
        n_blocks = ops.block_count(math.prod(shape), blocksize)
        nested = entries.has_nested(given)
        why = f"{'nested' if nested else 'plain'} scales of shape {list(shape)} with blocksize {blocksize}"
        absmax = entries.vector(given, "absmax", (torch.uint8 if nested else torch.float32,), n_blocks, why)
        entries.check_scales(absmax, "absmax")
        offset = state2 = None
        if nested:
            experts = shape[0] if self.stacked else None
            offset, state2 = entries.read_nested(cls, given, n_blocks, (entries.NESTED_BLOCKSIZE,), experts)
        state = cls(
            absmax=absmax.contiguous(),
            shape=shape,
            code=entries.code_map(given, "quant_map", ops.table(given["quant_type"])),
            blocksize=blocksize,
            quant_type=given["quant_type"],
            dtype=entries.value_dtype(given, "dtype"),
            offset=offset,
            state2=state2,
        )
        if self is not cls.kind:
            state.kind = self
        return state

    def check_shape(self, shape: torch.Size, blocksize: int) -> None:
        """ValueError unless there are such weights."""


class ExpertStack(FourBit):
    """E weights [N, K] of a mixture of experts, each quantized by itself, one after the other: shape [E, N, K].

    N K is a multiple of the blocksize, so the bytes and the first level of scales are those of the flattened stack. Of
    nested scales each expert has its own second level, ceil(N K / blocksize / 256) scales, and its own offset.
    """

    name = "experts"
    stacked = True
    fuses_lora = False

    def check_shape(self, shape: torch.Size, blocksize: int) -> None:
        if len(shape) != 3 or 0 in shape or shape[1:].numel() % blocksize:
            raise ValueError(
                f"quantization state: layout {self.name!r} needs a shape [E, N, K] with N K a multiple of the "
                f"blocksize {blocksize}, got {list(shape)}"
            )

    def bias_gradient(self, dy: Tensor, state: Any, offs: Tensor | None, dtype: torch.dtype) -> Tensor:
        rows = torch.arange(dy.shape[0], device=dy.device, dtype=offs.dtype)
        expert = torch.searchsorted(offs, rows, right=True)  # in float32, an expert's rows in their order
        sums = dy.new_zeros(offs.numel() + 1, dy.shape[1], dtype=torch.float32)
        return sums.index_add(0, expert, dy.float())[:-1].to(dtype)


class Int8(Kind):
    """LLM.int8: a weight [N, K], a byte for each element by rows, one float32 scale for each row (`bitshard.int8`).

    The blocksize of its state is K. A checkpoint file has the codes as int8 [N, K], and beside them, of the layer, SCB,
    the scales, and weight_format, which is 0.
    """

    word = name = "int8"
    bits = 8
    quant_types = ("int8",)
    format = ("shape", "kind")
    attributes = ("SCB", "has_fp16_weights")

    def scale_count(self, state: Any) -> int:
        return state.shape[0]

    def check(self, quant_type: str, blocksize: int) -> None:
        """Nothing: a block is a row."""

    def stored_shape(self, state: Any, itemsize: int) -> tuple[int, ...]:
        return tuple(state.shape)

    def tensors(self, state: Any) -> dict[str, Tensor]:
        return {"absmax": state.absmax}

    def read(self, cls: Any, given: dict[str, Any]) -> Any:
        shape, layout = entries.read_shape(given), given.get(entries.LAYOUT_KEY)
        if len(shape) != 2 or layout != self.name or entries.has_nested(given):
            raise ValueError(f"quantization state: int8 of shape {list(shape)}, layout {entries.short(layout)}")
        absmax = entries.vector(given, "absmax", (torch.float32,), shape[0], f"scales of the rows of {list(shape)}")
        entries.check_scales(absmax, "absmax", signed=False)
        return self.state(cls, absmax.contiguous(), shape, entries.value_dtype(given, "dtype"))

    def state(self, cls: Any, scales: Tensor, shape: torch.Size, dtype: torch.dtype) -> Any:
        """The state, made by `cls`, of a weight [N, K] with `scales` float32 [N], which dequantizes to `dtype`."""
        state = cls(scales, torch.Size(shape), scales.new_empty(0), shape[1], self.name, dtype)
        state.kind = self
        return state

    def keys_beside(self, key: str) -> tuple[str, str]:
        """Keys of the entries beside the weight `key`, which are its layer's."""
        layer = key.removesuffix("weight")
        return f"{layer}SCB", f"{layer}weight_format"

    def beside(self, key: str, state: Any) -> dict[str, Tensor]:
        return dict(zip(self.keys_beside(key), (state.absmax, torch.zeros((), dtype=torch.uint8)), strict=True))

    def names_beside(self, key: str, files: Any) -> list[str]:
        name = self.keys_beside(key)[0]
        return [name] if name in files else []

    def empty_beside(self, key: str, state: Any, json_bytes: int) -> tuple[dict[str, Tensor], str | None]:
        return self.beside(key, state), None

    def unfiled(self, key: str, given: dict[str, Any], state: Any) -> dict[str, Any]:
        beside = self.keys_beside(key)
        if beside[0] not in given:
            return given
        rest = {name: value for name, value in given.items() if name not in beside}
        own = state.clone()
        own.absmax, own.sharded, own.part = given[beside[0]], None, None
        return {**rest, **super().beside(key, own)}

    def filed(self, key: str, given: dict[str, Any], state: Any) -> dict[str, Any]:
        if key not in given:
            return given
        codes = given[key].reshape(-1).view(torch.int8)[: state.shape.numel()].view(state.shape)
        if f"{key}.absmax" not in given:  # a whole weight, with its scales in SCB already
            return {**given, key: codes}
        own = self.state(type(state), given[f"{key}.absmax"], state.shape, state.dtype)
        rest = {name: value for name, value in given.items() if name != key and not name.startswith(f"{key}.")}
        return {**rest, key: codes, **self.beside(key, own)}


EXPERTS = ExpertStack()
INT8 = Int8()
FOUR_BIT = FourBit()  # `bitshard.functional` gives it what it computes
FOUR_BIT.stack = EXPERTS
register(FOUR_BIT, EXPERTS, INT8)
