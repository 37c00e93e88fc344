"""Merged bytes that recomputation has made, kept for the input gradient that follows in the same backward.

With gradient checkpointing a layer is computed again and then derived: both need Q(W + s B A). What is kept beside the
newest bytes is no larger than the largest of them; smaller ones stay longer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bitshard.formats.state import QuantState
from bitshard.functions.merge import Adapter, merge_4bit

Key = tuple[int, ...]
Merged = tuple[Tensor, QuantState]

_NO_BACKWARD = -1


class _Kept:
    """Of the backward that runs: {addresses: (merged, x)}, in the order in which they were made."""

    def __init__(self) -> None:
        self.backward = _NO_BACKWARD  # autograd's number of it
        self.of: dict[Key, tuple[Merged, Tensor]] = {}

    def begin(self, backward: int) -> None:
        """Forget what another backward has left, and what this one leaves when it ends."""
        if self.backward != backward:
            self.of.clear()
            self.backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self.of.clear)

    def put(self, key: Key, merged: Merged, x: Tensor) -> None:
        self.of[key] = merged, x
        sizes = {each: _bytes(*made) for each, (made, _) in list(self.of.items())}
        most, older = max(sizes.values()), list(sizes)[:-1]
        while sum(sizes[each] for each in older) > most:
            largest = max(older, key=sizes.__getitem__)
            older.remove(largest)
            self.of.pop(largest, None)  # another thread may have begun a backward


_kept = _Kept()


def for_forward(x: Tensor, packed: Tensor, state: QuantState, adapters: Sequence[Adapter]) -> Merged:
    """`merge_4bit`, kept where it is a recomputation in a backward that computes it."""
    merged = merge_4bit(packed, state, adapters)
    backward = _NO_BACKWARD if torch.compiler.is_compiling() else torch._C._current_graph_task_id()
    if backward != _NO_BACKWARD:
        _kept.begin(backward)
        _kept.put(_key(x, packed, adapters), merged, x)
    return merged


def for_gradient(x: Tensor, packed: Tensor, state: QuantState, adapters: Sequence[Adapter]) -> Merged:
    """`merge_4bit`, or the bytes that `for_forward` has kept of the same tensors, which are kept no longer."""
    found = _kept.of.pop(_key(x, packed, adapters), None)
    return merge_4bit(packed, state, adapters) if found is None else found[0]


def _key(x: Tensor, packed: Tensor, adapters: Sequence[Adapter]) -> Key:
    """x is held as long as what is kept, so that its address is no other tensor's: it tells layers apart whose weights
    FSDP gathers into the same memory."""
    return x.data_ptr(), packed.data_ptr(), *(factor.data_ptr() for A, B, _ in adapters for factor in (A, B))


def _bytes(packed: Tensor, state: QuantState) -> int:
    return packed.nbytes + state.absmax.nbytes
