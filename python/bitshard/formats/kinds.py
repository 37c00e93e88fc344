"""Kinds of packed weights: what holder, shard, loading and saving ask of bytes with scales, whatever the bytes hold.

A weight is a column of bytes in a container dtype, its scales, and a `QuantState` that names its kind. How many there
are of each, what must agree for one weight's bytes to take another's place, and what is computed with them, is here and
nowhere above. A further kind is one more object.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bitshard import ops


class Kind:
    """One kind of packed weight.

    Attributes:
        word: for messages: a "4-bit" or an "int8" weight.
        name: of the layout of the bytes in checkpoints; None for bitsandbytes' own.
        format: names of a state's attributes that must be equal for its bytes and scales to be of one format.
        quantize: (values, with keywords the settings of `functional.quantize_4bit`) -> (packed, state).
        dequantize: (packed, state, out=None) -> values of state.shape and state.dtype, of a weight that is whole here.
        product: (x [..., K], packed, state, bias or None, offs, threshold) -> x W^T + bias [..., N]; no gradient
            (`bitshard.products` has it). offs: where the rows of each expert of a stack end, else None.
        gradient: (dy [..., N], packed, state, offs) -> dy W [..., K]; no gradient.
    """

    word: str
    name: str | None
    format: tuple[str, ...]
    quantize: Callable[..., Any]
    dequantize: Callable[..., Tensor]
    product: Callable[..., Tensor]
    gradient: Callable[..., Tensor]

    def elements(self, state: Any, itemsize: int) -> int:
        """Elements of `itemsize` bytes that hold the packed bytes of a state's tensor."""
        raise NotImplementedError

    def scale_count(self, state: Any) -> int:
        """Scales of a state's tensor."""
        raise NotImplementedError

    def parts(self, state: Any) -> int:
        """Into how many parts of equal size the tensor falls, each with a second level of scales of its own."""
        return 1

    def bias_gradient(self, dy: Tensor, state: Any, offs: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Sums of the rows of dy [..., N], of a stack of each expert's: [N] or [E, N] of `dtype`."""
        return dy.reshape(dy.shape[:-1].numel(), dy.shape[-1]).sum(0, dtype=dtype)

    def stored_shape(self, state: Any, itemsize: int) -> tuple[int, ...]:
        """Shape of the packed bytes in a checkpoint file, in a storage dtype of `itemsize` bytes."""
        return self.elements(state, itemsize), 1

    def beside(self, key: str, state: Any) -> dict[str, Tensor]:
        """The entries of a checkpoint file beside the weight `key`, by their whole keys; of a state with all scales."""
        return {f"{key}.{name}": value for name, value in state.as_dict(packed=True).items()}

    def unfiled(self, key: str, entries: dict[str, Any], state: Any) -> dict[str, Any]:
        """Entries of a state dict with those of the weight `key` as `QuantState.as_dict` names them."""
        return entries

    def __reduce__(self) -> tuple:
        return kind_named, (self.name,)  # copies and pickles are the same object


class FourBit(Kind):
    """NF4 and FP4: two codes to a byte in flattened order, one scale for `blocksize` elements; docs/formats.md."""

    word = "4-bit"
    name = None
    format = ("shape", "blocksize", "quant_type", "nested", "kind")

    def elements(self, state: Any, itemsize: int) -> int:
        return ops.storage_elements(state.shape.numel(), itemsize)

    def scale_count(self, state: Any) -> int:
        return ops.block_count(state.shape.numel(), state.blocksize)


class ExpertStack(FourBit):
    """E weights [N, K] of a mixture of experts, each quantized by itself, one after the other: shape [E, N, K].

    N K is a multiple of the blocksize, so the bytes and the first level of scales are those of the flattened stack. Of
    nested scales each expert has its own second level, ceil(N K / blocksize / 256) scales, and its own offset.
    """

    name = "experts"

    def parts(self, state: Any) -> int:
        return state.shape[0]

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
    format = ("shape", "kind")

    def elements(self, state: Any, itemsize: int) -> int:
        return -(-state.shape.numel() // itemsize)

    def scale_count(self, state: Any) -> int:
        return state.shape[0]

    def stored_shape(self, state: Any, itemsize: int) -> tuple[int, ...]:
        return tuple(state.shape)

    def beside(self, key: str, state: Any) -> dict[str, Tensor]:
        layer = key.removesuffix("weight")
        return {f"{layer}SCB": state.absmax, f"{layer}weight_format": torch.zeros((), dtype=torch.uint8)}

    def unfiled(self, key: str, entries: dict[str, Any], state: Any) -> dict[str, Any]:
        layer = key.removesuffix("weight")
        if f"{layer}SCB" not in entries:
            return entries
        rest = {name: value for name, value in entries.items() if name not in (f"{layer}SCB", f"{layer}weight_format")}
        own = state.clone()
        own.absmax, own.sharded, own.part = entries[f"{layer}SCB"], None, None
        return {**rest, **super().beside(key, own)}


EXPERTS = ExpertStack()
INT8 = Int8()
FOUR_BIT = FourBit()  # `bitshard.functional` gives it what it computes
KINDS: dict[str | None, Kind] = {kind.name: kind for kind in (FOUR_BIT, EXPERTS, INT8)}  # by their names in checkpoints


def kind_named(name: str | None) -> Kind:
    """The kind with this name in checkpoints."""
    return KINDS[name]


kind_named.__module__ = "bitshard.kinds"  # as pickles name it
