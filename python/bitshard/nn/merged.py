"""What a layer's weight was before adapters were merged into it: unmerging gives exactly that back.

peft merges into a 4-bit weight by dequantizing it, adding the adapter and quantizing the sum, and unmerges by
subtracting likewise. Both ways round, so that each round would leave another weight. Nothing of peft is replaced: a
layer that is given a packed weight looks who gives it. In `merge` of peft's layer around it, it keeps what it has; in
`unmerge` it takes that, whatever peft has computed.

What is kept, the packed bytes and scales as this rank has them, is in host memory. It belongs to the layer that peft
put around: it goes when that goes (`merge_and_unload`, `unload`), and no copy, pickle or state dict has it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitshard import foreign, ops
from bitshard.guards import plain
from bitshard.state import QuantState
from bitshard.tensor import Params4bit


@dataclass
class Writer:
    """Who gives a layer its new weight: `tuner`, peft's layer around it, in its `merge` or its `unmerge`.

    Attributes:
        adapter: which adapter is being merged or unmerged.
        unmerges: it is `unmerge`, which has taken the adapter off the tuner's list already.
        chooses: the function takes names, so it may leave adapters merged.
    """

    tuner: Any
    adapter: str
    unmerges: bool
    chooses: bool

    @classmethod
    def of(cls, owner: torch.nn.Module) -> Writer | None:
        """Who is giving `owner` a weight now; None where that is somebody else."""
        frame = foreign.asker()
        while frame is not None:
            unmerges = foreign.is_of(frame, foreign.PEFT_UNMERGES)
            known = unmerges or foreign.is_of(frame, foreign.PEFT_MERGES)
            if known and _base_of(frame.f_locals.get("self")) is owner:
                tuner, adapter = frame.f_locals["self"], frame.f_locals.get("active_adapter")
                return cls(tuner, adapter, unmerges, frame.f_code.co_argcount > 1)
            frame = frame.f_back
        return None

    def merged(self) -> list[str]:
        """The adapters that peft has on its list."""
        return list(self.tuner.merged_adapters)


class Kept:
    """The weight from before the first merge, in host memory.

    Attributes:
        packed: packed bytes, whole [n, 1] or this rank's rows of a shard.
        state: their state; of rows `absmax` is this rank's chunk of the scales.
        of_rows: whether these are rows.
        scales_checksum: what the ranks compare gathered scales with, where they have cut them.
        merged: (peft's layer, adapter) of all that is in the weight now.
        left: checksum of the weight as peft's last assignment has left it, None where it is unknown.
    """

    def __init__(self, held: Any):
        weight, self.of_rows = held.weight if held.shard is None else held.shard, held.shard is not None
        self.merged: list[tuple[weakref.ref, str]] = []
        self.left: int | None = None
        self.scales_checksum = None
        if self.of_rows:
            packed, state = weight._local_tensor.plain(), held.state.clone()
            if state.sharded is not None:
                state.absmax, self.scales_checksum = state.sharded.own, state.sharded.checksum
        elif weight.quant_state.part is not None:
            packed, state = weight.quant_state.part.gathered()
        else:
            packed, state = weight.detach().as_subclass(Tensor), weight.quant_state.clone()
        self.packed = packed.to("cpu", copy=True)
        self.state = _copied(state, torch.device("cpu"))

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that this takes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.packed, self.state.absmax))

    def into(self, weight: Params4bit) -> None:
        """Give `weight`, a new one for the whole layer, these bytes and scales."""
        with plain():
            weight.data = self.packed.to(weight.device, copy=True)
        weight._set_state(_copied(self.state, weight.device))


def _base_of(tuner: Any) -> Any:
    """What `tuner` is around, where it is a layer of peft."""
    is_layer = isinstance(getattr(tuner, "merged_adapters", None), list) and hasattr(tuner, "get_base_layer")
    return tuner.get_base_layer() if is_layer else None


def _copied(state: QuantState, device: torch.device) -> QuantState:
    """A state on `device` whose scales are its own."""
    state = state.clone()
    state.sharded, state.absmax = None, state.absmax.clone()
    return state.to(device)


@contextlib.contextmanager
def replacing(held: Any, new: Params4bit) -> Iterator[Kept | None]:
    """While the quantized weight `new` takes the place of the one that the layer has.

    Gives what is to be put back instead of `new`, or None. ValueError, with the layer as it was and peft's list of
    merged adapters saying so, where the weight from before the merge is not known.
    """
    if _is_move(held, new):
        yield None
        return
    writer = Writer.of(held.owner)
    if writer is None:
        yield None
        held.kept = None
        return
    kept = held.kept if held.kept is not None and held.kept.left == _checksum(held) else None
    try:
        kept = _unmerging(held, writer, kept) if writer.unmerges else _merging(held, writer, kept)
        yield kept if writer.unmerges else None
    except BaseException:
        _undo(held, writer)
        raise
    if kept is not None:
        kept.left = int(held.state.checksum if held.shard is not None else ops.checksum(_bytes(new)))
        kept.merged = [] if writer.unmerges else [*kept.merged, (_tied(held, writer.tuner), writer.adapter)]
    held.kept = None if writer.unmerges and not writer.merged() else kept


def _is_move(held: Any, new: Params4bit) -> bool:
    """Whether the same weight is assigned again or on another device, as peft does to dequantize one.

    What is another weight after all, unmerging knows by its checksum.
    """
    weight = held.weight
    return held.shard is None and (new.quant_state is weight.quant_state or new.device != weight.device)


def _merging(held: Any, writer: Writer, kept: Kept | None) -> Kept | None:
    """What is kept while one more adapter is merged; None where the weight from before is not known any more."""
    listed = writer.merged()
    if kept is None:
        return None if listed else Kept(held)
    inside = [name for tuner, name in kept.merged if tuner() is writer.tuner]
    if inside != listed:
        writer.tuner.merged_adapters[:] = inside
        raise ValueError(
            f"merging {writer.adapter!r} into the {kept.state.kind.word} weight of {list(kept.state.shape)}: it still "
            f"holds the adapters {inside}, but peft lists {listed}: an unmerge failed halfway. The list is restored; "
            "call unmerge_adapter(), which puts the weight from before back, then merge."
        )
    return kept


def _unmerging(held: Any, writer: Writer, kept: Kept | None) -> Kept:
    """What is put back. ValueError where that would not be what peft's list will say."""
    what = f"unmerging {writer.adapter!r} from the {held.state.kind.word} weight of {list(held.state.shape)}"
    if kept is None:
        raise ValueError(
            f"{what}: the weight from before it was merged is not here, and subtracting would not give it back: it "
            "would round twice. Copies and pickles do not have it, and a weight that was loaded or assigned since has "
            "taken its place. Unmerge before copying or loading, or load the base model again."
        )
    others = [name for tuner, name in kept.merged if tuner() is not writer.tuner]
    if others or (writer.chooses and writer.merged()):
        raise ValueError(
            f"{what}: {others or writer.merged()} would stay in it, and only the weight from before all of them is "
            "kept; unmerge all adapters together, or load the base model again."
        )
    return kept


def _undo(held: Any, writer: Writer) -> None:
    """The assignment has failed: the weight that the layer has stays, and an adapter in it stays on peft's list."""
    if writer.unmerges and writer.adapter is not None:
        writer.tuner.merged_adapters.append(writer.adapter)
    weight = held.weight if held.shard is None else held.shard
    weight.__dict__["bnb_quantized"] = True  # peft clears it in the attributes that it rebuilds a weight from
    held.known(weight.quant_state)


def _tied(held: Any, tuner: torch.nn.Module) -> weakref.ref:
    """A reference to peft's layer; what is kept goes with that layer."""
    holder = weakref.ref(held)

    def forget(gone: weakref.ref) -> None:
        held = holder()
        if held is not None and held.kept is not None and any(tuner is gone for tuner, _ in held.kept.merged):
            held.kept = None

    return weakref.ref(tuner, forget)


def _checksum(held: Any) -> int | None:
    """Of the weight that the layer has, None where it is unknown."""
    weight = held.weight if held.shard is None else held.shard
    if held.shard is None and weight.quant_state.part is None:
        return int(ops.checksum(_bytes(weight)))
    checksum = weight.quant_state.checksum
    return None if checksum is None else int(checksum)


def _bytes(weight: Tensor) -> Tensor:
    return weight.detach().as_subclass(Tensor)
