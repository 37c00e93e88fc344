"""What a layer's weight was before adapters were merged into it: unmerging gives exactly that back.

peft merges into a 4-bit or int8 weight by dequantizing it, adding the adapter and quantizing the sum, and unmerges by
subtracting likewise. Both ways round, so that each round would leave another weight. Nothing of peft is replaced: a
layer that is given a packed weight looks who gives it. In `merge` of peft's layer around it, it keeps what it has; in
`unmerge` it takes that, whatever peft has computed. Both ask the layer whether it is the innermost one (`asked`): what
cannot be done raises then. `unmerge` takes an adapter off peft's list before it computes: the list (`Listed`) has it
until the weight is back, so that whatever fails in peft's arithmetic leaves a list that says what is in the weight.

For their time the tensors of an adapter that FSDP2 has sharded are whole in all they are used for (`_Whole`): peft
combines them with plain tensors, and reshapes them where ranks do not divide them evenly.

What is kept, the packed bytes and scales as this rank has them, is in host memory. It belongs to the layer that peft
put around: it goes when that goes (`merge_and_unload`, `unload`), and no copy, pickle or state dict has it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bitshard import ops
from bitshard.formats.checks import check_there
from bitshard.formats.container import repack
from bitshard.formats.place import Place
from bitshard.formats.state import QuantState
from bitshard.process import foreign
from bitshard.shards import gather
from bitshard.weights.guards import plain
from bitshard.weights.int8_params import Int8Params
from bitshard.weights.inventory import held_by
from bitshard.weights.tensor import Params4bit


@dataclass
class Writer:
    """Who gives a layer its new weight: `tuner`, peft's layer around it, in its `merge` or its `unmerge`.

    Attributes:
        adapter: which adapter is being merged or unmerged.
        unmerges: it is `unmerge`, which has taken the adapter off the tuner's list already.
        safe: its `safe_merge`.
        chooses: the function takes names, so it may leave adapters merged.
    """

    tuner: Any
    adapter: str
    unmerges: bool
    safe: bool
    chooses: bool

    @classmethod
    def of(cls, owner: nn.Module) -> Writer | None:
        """Who is giving `owner` a weight now; None where that is somebody else."""
        if _own.writer is not None and _base_of(_own.writer.tuner) is owner:
            return _own.writer
        frame = foreign.asker()
        while frame is not None:
            found = cls.at(frame)
            if found is not None and _base_of(found.tuner) is owner:
                return found
            frame = frame.f_back
        return None

    @classmethod
    def at(cls, frame: FrameType | None) -> Writer | None:
        """Whose `merge` or `unmerge` a frame is; None for another function."""
        if frame is None:
            return None
        unmerges = foreign.is_of(frame, foreign.PEFT_UNMERGES)
        if not unmerges and not foreign.is_of(frame, foreign.PEFT_MERGES):
            return None
        tuner = frame.f_locals.get("self")
        if not _is_tuner(tuner):
            return None
        local = frame.f_locals
        adapter, safe = local.get("active_adapter"), bool(local.get("safe_merge"))
        return cls(tuner, adapter, unmerges, safe, frame.f_code.co_argcount > 1)

    @property
    def name(self) -> tuple[int, str]:
        """Which adapter of which layer of peft."""
        return id(self.tuner), self.adapter

    def merged(self) -> list[str]:
        """The adapters that peft has on its list, without the one that `unmerge` is taking out."""
        listed = list(self.tuner.merged_adapters)
        if self.unmerges and self.adapter in listed:
            listed.remove(self.adapter)
        return listed

    def lists(self) -> None:
        """Put the adapter that `unmerge` has taken off peft's list on it again, if it is not."""
        if self.unmerges and self.adapter is not None and self.adapter not in self.tuner.merged_adapters:
            self.tuner.merged_adapters.append(self.adapter)

    def unlists(self) -> None:
        """The adapter is out of the weight."""
        if self.adapter in self.tuner.merged_adapters:
            self.tuner.merged_adapters.remove(self.adapter)


class _Own(threading.local):
    writer: Writer | None = None


_own = _Own()  # `merges` is open


@contextlib.contextmanager
def merges(held: Any, tuner: Any, names: list[str], safe: bool) -> Iterator[None]:
    """While it is open, bitshard's own `merge` of peft's layer `tuner` assigns a weight with adapters `names` in it.

    ValueError where FSDP1 has the weight, or adapters are in it already: they are merged together, in one assignment.
    """
    if tuner.merged_adapters:
        raise ValueError(
            f"cannot merge {names} into the {held.kind.word} weight of {list(held.shape)}: {tuner.merged_adapters} are "
            "in it, and merge-aware layers merge all adapters at once. Call unmerge_adapter(), then merge."
        )
    writer = Writer(tuner, names[0], False, safe, True)
    _require_there(held, writer)
    _own.writer = writer
    try:
        yield
    finally:
        _own.writer = None
    if held.kept is not None:
        held.kept.merged += [(_tied(held, tuner), name) for name in names[1:]]
    tuner.merged_adapters.extend(names)


class Kept:
    """The weight from before the first merge, in host memory.

    Attributes:
        packed: packed bytes, or int8 codes, as a column: whole [n, 1] or this rank's rows of a shard.
        state: their state; of rows `absmax` is this rank's chunk of the scales.
        of_rows: whether these are rows.
        scales_checksum: what the ranks compare gathered scales with, where they have cut them.
        merged: (peft's layer, adapter) of all that is in the weight now.
        left: checksums of the weight as peft's last assignment has left it (`Checksums`).
    """

    def __init__(self, held: Any):
        weight, self.of_rows = held.weight if held.shard is None else held.shard, held.shard is not None
        self.merged: list[tuple[weakref.ref, str]] = []
        self.left: Checksums | None = None
        self.scales_checksum = None
        if self.of_rows:
            packed, state = weight._local_tensor.plain(), held.state.clone()
            if state.sharded is not None:
                state.absmax, self.scales_checksum = state.sharded.own, state.sharded.checksum
        elif isinstance(weight, Int8Params):
            packed, state = weight.plain_data().reshape(-1, 1), held.quantized().state
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

    def has(self, writer: Writer) -> bool:
        """Whether the adapter that is being unmerged is in the weight."""
        return any(tuner() is writer.tuner and name == writer.adapter for tuner, name in self.merged)

    def into(self, weight: Params4bit | Int8Params) -> None:
        """Give `weight`, a new one for the whole layer, these bytes and scales."""
        if isinstance(weight, Int8Params):
            with plain():
                weight.data = (
                    repack(self.packed, torch.int8, self.state).view(weight.shape).to(weight.device, copy=True)
                )
            weight.SCB = self.state.absmax.to(weight.device, copy=True)
            return
        with plain():
            weight.data = self.packed.to(weight.device, copy=True)
        weight._set_state(_copied(self.state, weight.device))


def _is_tuner(module: Any) -> bool:
    return isinstance(getattr(module, "merged_adapters", None), list) and hasattr(module, "get_base_layer")


def _base_of(tuner: Any) -> Any:
    """What `tuner`, a layer of peft, is around."""
    return tuner.get_base_layer()


def _copied(state: QuantState, device: torch.device) -> QuantState:
    """A state on `device` whose scales are its own."""
    state = state.clone()
    state.sharded, state.absmax = None, state.absmax.clone()
    return state.to(device)


# ---- before peft computes ----


class Listed(list):
    """peft's list of the adapters that are in a layer's weight. `unmerge` pops a name: it stays until it is out."""

    def __init__(self, held: Any, tuner: nn.Module):
        super().__init__(tuner.merged_adapters)
        self.held, self.tuner = weakref.ref(held), weakref.ref(tuner)

    def pop(self, index: int = -1) -> str:
        """The name at `index`. ValueError, with the list as it is, where its adapter cannot be taken out."""
        writer, held, name = Writer.at(foreign.asker()), self.held(), self[index]
        if held is None or writer is None or not writer.unmerges or writer.tuner is not self.tuner():
            return super().pop(index)
        if _written(_base_of(writer.tuner), writer) is not held:  # around another layer by now
            return super().pop(index)
        writer.adapter = name
        _require_there(held, writer)
        _require_bias(held, writer)
        kept = _unmerging(held, writer, _known(held))
        if not _has_weights(writer) or not kept.has(writer):  # deleted, or out already with another one
            return super().pop(index)
        held.restored = None
        _make_whole(writer.tuner)
        return name

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return list, (list(self),)  # of copies and pickles, which have nothing kept


def _has_weights(writer: Writer) -> bool:
    """Whether peft's layer has the adapter still; `unmerge` passes over another."""
    tables = (nn.ModuleDict, nn.ParameterDict)
    return any(isinstance(child, tables) and writer.adapter in child for child in writer.tuner.children())


def asked(owner: nn.Module) -> None:
    """Somebody looks whether `owner` is the innermost layer. Where that is a `merge` or `unmerge` of peft, raise what
    it cannot do, and prepare what it computes with.

    ValueError with the weight and peft's list of merged adapters as they were before the call.
    """
    looks = foreign.asked_by(foreign.PEFT_LOOKS)
    writer = None if looks is None else Writer.at(looks.f_back)
    held = None if writer is None else _written(owner, writer)
    if held is None or (writer.unmerges and held.restored == writer.name):
        return
    try:
        _require_there(held, writer)
        _require_bias(held, writer)
        if writer.unmerges:
            _takes_out(held, writer)
    except BaseException:
        writer.lists()
        raise
    if not writer.unmerges:
        held.restored = None
    _make_whole(writer.tuner)


def _written(owner: nn.Module, writer: Writer) -> Any:
    """The holder of the quantized weight that is about to be written, None if there is none."""
    name = getattr(writer.tuner, "parameter_name", None)
    found = [held for held in held_by(owner) if held.owner is owner and name in (None, held.name)]
    return found[0] if found and found[0].quantized() is not None else None


def _require_there(held: Any, writer: Writer) -> None:
    """ValueError where FSDP1 has freed the weight, or left this rank its piece of the flat parameter."""
    if held.place is Place.VIEW or held.flat:
        weight = held.weight.detach().as_subclass(Tensor)
        whole = weight if weight.dim() == 2 else weight[:0]
        check_there(whole, held.state, f"{'un' if writer.unmerges else ''}merging {writer.adapter!r}")


def _require_bias(held: Any, writer: Writer) -> None:
    """ValueError where peft would change the layer's bias wrongly, or fail once the weight has been replaced."""
    tuner, bias = writer.tuner, getattr(held.owner, "bias", None)
    trained = getattr(tuner, "lora_bias", {}).get(writer.adapter, False)
    rotated = hasattr(tuner, "road_theta") and bias is not None
    verb, into = ("unmerging", "from") if writer.unmerges else ("merging", "into")
    what = f"{verb} {writer.adapter!r} {into} the {held.kind.word} weight of {list(held.shape)}"
    way = "Write the merged model with bitshard.fsdp.save_pretrained(model, folder, merge=True), or keep the adapter."
    if (trained or rotated) and held.shard is not None:
        raise ValueError(
            f"{what}: it changes the bias, too. That is sharded by FSDP2, and peft would change what FSDP2 does not "
            f"keep. {'Unmerge before fully_shard.' if writer.unmerges else way}"
        )
    if not trained or writer.unmerges:
        return
    scale = tuner.scaling[writer.adapter]
    what = f"{what}: it has a bias (lora_bias=True)"
    if bias is None:
        raise ValueError(f"{what}, and the layer has no bias to add it to. Keep the adapter.")
    if scale != 1:
        raise ValueError(
            f"{what} and the scale {scale:g}, which peft leaves out of the bias of a quantized layer. {way}"
        )
    if writer.safe:
        raise ValueError(f"{what}, with which peft's safe_merge fails too late. Merge with safe_merge=False.")


def _takes_out(held: Any, writer: Writer) -> None:
    """An `unmerge` begins with one adapter. It stays on peft's list while it is in the weight."""
    if writer.adapter is None or writer.adapter in writer.tuner.merged_adapters:
        return
    if _unmerging(held, writer, _known(held)).has(writer):
        writer.lists()


def _make_whole(tuner: nn.Module) -> None:
    """Until the weight has been replaced: DTensors of an adapter are whole, and so is what it has kept of a merge."""
    for tensor in _own_tensors(tuner):
        if gather.is_dtensor(tensor) and not isinstance(tensor, _whole_class()):
            tensor.__class__ = _whole_class()
    cache = getattr(tuner, "_caches", {})  # the norm of DoRA, which was a DTensor where the layer was sharded then
    for key, value in cache.items():
        if isinstance(value, Tensor) and gather.is_dtensor(value):
            cache[key] = gather.whole(value)


def _own_tensors(module: nn.Module) -> Iterator[Any]:
    """Parameters and buffers of peft's layer, those of what it is around left out."""
    for table in (module._parameters, module._buffers):
        yield from (tensor for tensor in table.values() if tensor is not None)
    for name, child in module._modules.items():
        if name != "base_layer" and child is not None:
            yield from _own_tensors(child)


@functools.cache
def _whole_class() -> type:
    from torch.distributed.tensor import DTensor

    class Whole(DTensor):
        """A tensor of an adapter while peft merges: what uses it gets all of it, gathered once, as a plain tensor.

        Outside of `merge` and `unmerge`, as after an error in one, it is FSDP2's DTensor again.
        """

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            use = _gathered_once if _in_merge() else _as_it_was
            return func(*map(use, args), **{name: use(value) for name, value in (kwargs or {}).items()})

    return Whole


def _gathered_once(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_gathered_once, value))
    if not isinstance(value, _whole_class()):
        return value
    if "_whole" not in vars(value):
        with plain():
            value._whole = gather.whole(gather.plain(value)).detach()
    return value._whole


def _as_it_was(value: Any) -> Any:
    from torch.distributed.tensor import DTensor

    if isinstance(value, (list, tuple)):
        return type(value)(map(_as_it_was, value))
    if isinstance(value, _whole_class()):
        vars(value).pop("_whole", None)
        value.__class__ = DTensor
    return value


def _in_merge() -> bool:
    """Whether this is called in a `merge` or `unmerge` of peft."""
    frame = sys._getframe(1)
    while frame is not None:
        if Writer.at(frame) is not None:
            return True
        frame = frame.f_back
    return False


# ---- while a weight is replaced ----


@contextlib.contextmanager
def replacing(held: Any, new: Params4bit | Int8Params) -> Iterator[Kept | None]:
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
    kept = _known(held)
    try:
        kept = _unmerging(held, writer, kept) if writer.unmerges else _merging(held, writer, kept)
        yield kept if writer.unmerges else None
    except BaseException:
        _undo(held, writer)
        raise
    if kept is not None:
        kept.left = Checksums.of(held, new)
        kept.merged = [] if writer.unmerges else [*kept.merged, (_tied(held, writer.tuner), writer.adapter)]
    held.kept, held.restored = kept, None
    if kept is not None and getattr(writer.tuner.merged_adapters, "held", lambda: None)() is not held:
        writer.tuner.merged_adapters = Listed(held, writer.tuner)
    if writer.unmerges:
        writer.unlists()
        held.kept, held.restored = kept if writer.merged() else None, writer.name
    for tensor in _own_tensors(writer.tuner):
        _as_it_was(tensor)


def _known(held: Any) -> Kept | None:
    """What is kept of the weight from before merging; None where the weight was written since."""
    kept = held.kept
    same = kept is not None and kept.left is not None and kept.left.fits(Checksums.of(held, held.weight))
    return kept if same else None


def _is_move(held: Any, new: Params4bit) -> bool:
    """Whether the same weight is assigned again or on another device, as peft does to dequantize one.

    What is another weight after all, unmerging knows by its checksum.
    """
    weight = held.weight
    if held.shard is not None or new.device != weight.device:
        return held.shard is None
    return isinstance(new, type(weight)) and _scales_of(new) is _scales_of(weight)


def _scales_of(weight: Params4bit | Int8Params) -> Any:
    return weight.SCB if isinstance(weight, Int8Params) else weight.quant_state


def _merging(held: Any, writer: Writer, kept: Kept | None) -> Kept | None:
    """What is kept while one more adapter is merged; None where the weight from before is not known any more."""
    listed = writer.merged()
    if kept is None:
        return None if listed else Kept(held)
    inside = [name for tuner, name in kept.merged if tuner() is writer.tuner]
    if inside != listed:
        writer.tuner.merged_adapters[:] = inside
        raise ValueError(
            f"cannot merge {writer.adapter!r} into the {kept.state.kind.word} weight of {list(kept.state.shape)}: it "
            f"still holds the adapters {inside}, but peft lists {listed}: an unmerge failed halfway. The list is "
            "restored. Call unmerge_adapter(), then merge."
        )
    return kept


def _unmerging(held: Any, writer: Writer, kept: Kept | None) -> Kept:
    """What is put back. ValueError where that would not be what peft's list will say."""
    what = f"cannot unmerge {writer.adapter!r} from the {held.kind.word} weight of {list(held.shape)}"
    if kept is None:
        raise ValueError(
            f"{what}: the weight from before the merge is gone, and subtracting the adapter would round twice. Copies, "
            "pickles and weights that were loaded or assigned later do not have it. Unmerge before copying or "
            "loading, or load the base model again."
        )
    others = [name for tuner, name in kept.merged if tuner() is not writer.tuner]
    if others or (writer.chooses and writer.merged()):
        raise ValueError(
            f"{what}: {others or writer.merged()} would stay in it, and only the weight from before all merges is "
            "kept. Unmerge all adapters together, or load the base model again."
        )
    return kept


def _undo(held: Any, writer: Writer) -> None:
    """The assignment has failed: the weight that the layer has stays, and an adapter in it stays on peft's list."""
    writer.lists()
    weight = held.weight if held.shard is None else held.shard
    if not isinstance(weight, Int8Params):
        weight.__dict__["bnb_quantized"] = True  # peft clears it in the attributes that it rebuilds a weight from
        held.known(weight.quant_state)


def _tied(held: Any, tuner: nn.Module) -> weakref.ref:
    """A reference to peft's layer; what is kept goes with that layer."""
    holder = weakref.ref(held)

    def forget(gone: weakref.ref) -> None:
        held = holder()
        if held is not None and held.kept is not None and any(tuner is gone for tuner, _ in held.kept.merged):
            held.kept = None

    return weakref.ref(tuner, forget)


class Checksums(NamedTuple):
    """What tells a weight from another: of its bytes, scales, and second-level scales; None where one is not known."""

    packed: int | None
    scales: int | None
    second: int | None

    @classmethod
    def of(cls, held: Any, weight: Any) -> Checksums:
        """Checksums of a layer's own weight, or, where that is not sharded, of `weight`, which the layer gets."""
        if isinstance(weight, Int8Params):
            scales = held.owner.state.SCB if weight.SCB is None else weight.SCB
            return cls(_number(weight.plain_data()), _number(scales), None)
        state = weight.quant_state if held.shard is None else held.shard.quant_state
        whole = held.shard is None and state.part is None
        packed = ops.checksum(_bytes(weight)) if whole else state.checksum
        second = None if state.state2 is None else _number(state.state2.absmax)
        return cls(
            None if packed is None else int(packed),
            None if state.sharded is not None else _number(state.absmax),
            second,
        )

    def fits(self, other: Checksums) -> bool:
        """Whether both can be of one weight: the bytes are known, and the same, and no scales are known to differ."""
        known = (pair for pair in zip(self, other, strict=True) if None not in pair)
        return None not in (self.packed, other.packed) and all(one == two for one, two in known)


def _number(tensor: Tensor | None) -> int | None:
    return None if tensor is None or tensor.is_meta else int(ops.checksum(tensor))


def _bytes(weight: Tensor) -> Tensor:
    return weight.detach().as_subclass(Tensor)
