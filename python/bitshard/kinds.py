"""Kinds of packed weights: what holder, shard, loading and saving ask of bytes with scales, whatever the bytes hold.

A weight is a column of bytes in a container dtype, its scales, and a `QuantState` that names its kind. How many there
are of each, what must agree for one weight's bytes to take another's place, and what is computed with them, is here and
nowhere above. A further kind is one more object.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from bitshard import ops


class Kind:
    """One kind of packed weight.

    Attributes:
        format: names of a state's attributes that must be equal for its bytes and scales to be of one format.
        dequantize: (packed, state) -> values of state.shape and state.dtype.
        linear: (x [..., K], packed, state, bias or None) -> x W^T + bias [..., N]; no gradient.
    """

    format: tuple[str, ...]
    dequantize: Callable[..., Tensor]
    linear: Callable[..., Tensor]

    def elements(self, state: Any, itemsize: int) -> int:
        """Elements of `itemsize` bytes that hold the packed bytes of a state's tensor."""
        raise NotImplementedError

    def scale_count(self, state: Any) -> int:
        """Scales of a state's tensor."""
        raise NotImplementedError


class FourBit(Kind):
    """NF4 and FP4: two codes to a byte in flattened order, one scale for `blocksize` elements; docs/formats.md."""

    format = ("shape", "blocksize", "quant_type", "nested")

    def elements(self, state: Any, itemsize: int) -> int:
        return ops.storage_elements(state.shape.numel(), itemsize)

    def scale_count(self, state: Any) -> int:
        return ops.block_count(state.shape.numel(), state.blocksize)


FOUR_BIT = FourBit()  # `bitshard.functional` gives it what it computes
