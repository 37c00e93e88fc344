"""The tensors of a checkpoint that is made out of another one, each by itself: what it will be, and then its values.

A model of transformers on the meta device says which tensors there are and which are quantized; the files' own tensors
are put together and named by transformers' conversions, there and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bitshard.inventory import holder_of
from bitshard.kinds import INT8
from bitshard.sharding.checkpoints import contents
from bitshard.sharding.checkpoints.files import Entry
from bitshard.sharding.checkpoints.names import conversions, reverted
from bitshard.sharding.checkpoints.reading import Checkpoint
from bitshard.sharding.loading.skeleton import Skeleton
from bitshard.state import QuantState, int8_state
from bitshard.tensor import Params4bit

_JSON_BYTES, _EXPERT_BYTES = 256, 24  # of a weight's JSON entry, and of each expert's number in it


Chosen = Callable[[str], "tuple[Tensor, QuantState] | None"]


class Item(NamedTuple):
    """One parameter or buffer of the model.

    Attributes:
        place: its key in the model, its module and its name there.
        entries: what the new checkpoint has of it, by the names there.
        sources: names of the tensors in the files that it is made of.
        elements: numbers in it.
        packed: whether it becomes a 4-bit or int8 weight.
    """

    place: tuple[str, nn.Module, str]
    entries: dict[str, Entry]
    sources: list[str]
    elements: int
    packed: bool


class Tensors:
    """All of them, in the model's order.

    Args:
        skeleton: with the settings of 4-bit or int8 weights.
        files: dense ones, which the skeleton has checked.
        chosen: key -> packed bytes and state of a 4-bit weight that is not quantized here; None: it is.
    """

    def __init__(self, skeleton: Skeleton, files: Checkpoint, chosen: Chosen = lambda key: None):
        self.skeleton, self.files, self.chosen = skeleton, files, chosen
        use_conversions(skeleton)
        ignored = set(getattr(skeleton.model, "_keys_to_ignore_on_save", None) or ())
        self.items = [self._item(place) for place in skeleton.places() if place[0] not in ignored]

    def _item(self, place: tuple[str, nn.Module, str]) -> Item:
        key, module, name = place
        tensor, held = contents.tensor_of(module, name), holder_of(module, name)
        if held is None:
            made, late = {key: tensor.detach()}, ""
        else:
            made, late = packed_like(key, held, tensor)
        entries = {
            saved: Entry(value.dtype, tuple(value.shape), late=bool(late) and saved.endswith(late))
            for saved, value in reverted(self.skeleton.model, made).items()
        }
        return Item(place, entries, self.skeleton.sources(place, self.files), tensor.numel(), held is not None)

    def read(self, item: Item) -> dict[str, Tensor]:
        """Its tensors for the new checkpoint; nothing of them is kept here."""
        key, module, name = item.place
        given = self.chosen(key) if item.packed else None
        if given is not None:
            storage = module._parameters[name].quant_storage
            return reverted(self.skeleton.model, contents.packed_tensors(key, *given, storage))
        value = self.skeleton.value(item.place, self.files)
        if not isinstance(value, Params4bit):
            return reverted(self.skeleton.model, {key: value.detach()})
        storage = value.quant_storage
        return reverted(
            self.skeleton.model, contents.packed_tensors(key, value.saved_data(), value.quant_state, storage)
        )

    def of(self, names: set[str]) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) for each of these names of the new checkpoint."""
        for item in self.items:
            if not names.isdisjoint(item.entries):
                yield from ((name, tensor) for name, tensor in self.read(item).items() if name in names)


def packed_like(key: str, held: Any, weight: Any) -> tuple[dict[str, Tensor], str]:
    """Tensors of the meta device as a quantized weight's, and how the name of its JSON ends, whose length varies."""
    shape = held.shape if held.shape is not None else weight.shape
    if held.kind is INT8:
        state = int8_state(torch.empty(shape[0], dtype=torch.float32, device="meta"), shape, torch.bfloat16)
        return {key: torch.empty(shape, dtype=torch.int8, device="meta"), **INT8.beside(key, state)}, ""
    packed, state = held.kind.quantize(
        torch.empty(shape, dtype=torch.bfloat16, device="meta"),
        blocksize=weight.blocksize,
        compress_statistics=weight.compress_statistics,
        quant_type=weight.quant_type,
        quant_storage=weight.quant_storage,
    )
    found = {"": packed, ".absmax": state.absmax, ".quant_map": state.code}
    if state.nested:
        found |= {".nested_absmax": state.state2.absmax, ".nested_quant_map": state.state2.code}
    json = f".quant_state.bitsandbytes__{weight.quant_type}"
    size = _JSON_BYTES + _EXPERT_BYTES * held.kind.parts(state)
    found[json] = torch.empty(size, dtype=torch.uint8, device="meta")
    return {key + name: value for name, value in found.items()}, json


def use_conversions(skeleton: Skeleton, packed: bool = True) -> None:
    """Let a model know what transformers would reverse if it had loaded it; `packed`: and keeps its 4-bit weights."""
    model, quantizer = skeleton.model, skeleton.quantizer
    known = conversions(model)
    model._weight_conversions = quantizer.reversible(known) if packed and hasattr(quantizer, "reversible") else known
