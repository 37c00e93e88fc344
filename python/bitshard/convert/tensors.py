"""The tensors of a checkpoint that is made out of another one, each by itself: what it will be, and then its values.

A model of transformers on the meta device says which tensors there are and which are quantized; the files' own tensors
are put together and named by transformers' conversions, there and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitshard.formats.state import QuantState
from bitshard.sharding.checkpoints import contents
from bitshard.sharding.checkpoints.expected import Expected, expected, require_fitting
from bitshard.sharding.checkpoints.files import Entry
from bitshard.sharding.checkpoints.names import Names, unsaved
from bitshard.sharding.checkpoints.reading import Checkpoint
from bitshard.sharding.loading.skeleton import Skeleton
from bitshard.weights.inventory import holder_of
from bitshard.weights.tensor import Params4bit

_SETTINGS = ("blocksize", "compress_statistics", "quant_type")  # of a weight, where it has them
_JSON_BYTES, _EXPERT_BYTES = 256, 24  # of a weight's JSON entry, and of each expert's number in it


Place = tuple[str, Any, str]  # key in the model, module, name in it
Chosen = Callable[[str], "tuple[Tensor, QuantState] | None"]


class Item(NamedTuple):
    """One parameter or buffer of the model, or several that are one tensor of the files.

    Attributes:
        places: of each its key in the model, its module and its name there.
        entries: what the new checkpoint has of it, by the names there.
        sources: names of the tensors in the files that it is made of.
        elements: numbers in it.
        packed: whether it becomes a 4-bit or int8 weight.
    """

    places: list[Place]
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

    ValueError where they are not what `from_pretrained` of the model's class asks for.
    """

    def __init__(self, skeleton: Skeleton, files: Checkpoint, chosen: Chosen = lambda key: None):
        self.skeleton, self.files, self.chosen = skeleton, files, chosen
        wanted = expected(skeleton.model, skeleton.model.config)
        places = {place[0]: place for place in _written(skeleton, wanted)}
        made = {key: _entries(place) for key, place in places.items()}
        packed = [key for key, place in places.items() if holder_of(*place[1:]) is not None]
        self.names = Names(skeleton.model, skeleton.used, [key for each in made.values() for key in each], packed)
        groups = [self.names.together(key) for key in places]
        self.items = [
            self._item([places[key] for key in group], made) for key, group in zip(places, groups, strict=True)
            if group[0] == key
        ]  # fmt: skip
        if wanted is not None:
            facts = {key: (_in_files(place), _is_float(place)) for key, place in places.items()}
            files_names = self.names.entries({key: made[key][key] for key in places})
            require_fitting(wanted, facts, files_names, "quantize")

    def _item(self, places: list[Place], made: dict[str, dict[str, Entry]]) -> Item:
        entries = self.names.entries({name: entry for key, *_ in places for name, entry in made[key].items()})
        sources = [name for place in places for name in self.skeleton.sources(place, self.files)]
        elements = sum(contents.tensor_of(module, name).numel() for _, module, name in places)
        return Item(places, entries, sources, elements, holder_of(*places[0][1:]) is not None)

    def read(self, item: Item) -> dict[str, Tensor]:
        """Its tensors for the new checkpoint; nothing of them is kept here."""
        collector = self.names.collector()
        found: dict[str, Tensor] = {}
        for place in item.places:
            found |= collector.add(self._tensors(place, item.packed))
        return found

    def _tensors(self, place: Place, packed: bool) -> dict[str, Tensor]:
        key, module, name = place
        given = self.chosen(key) if packed else None
        if given is not None:
            return contents.packed_tensors(key, *given, module._parameters[name].quant_storage)
        value = self.skeleton.value(place, self.files)
        if not isinstance(value, Params4bit):
            return {key: value.detach()}
        return contents.packed_tensors(key, value.saved_data(), value.quant_state, value.quant_storage)

    def of(self, names: set[str]) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) for each of these names of the new checkpoint."""
        for item in self.items:
            if not names.isdisjoint(item.entries):
                yield from ((name, tensor) for name, tensor in self.read(item).items() if name in names)


def _written(skeleton: Skeleton, wanted: Expected | None) -> Iterator[Place]:
    """The places whose tensors are written: each that loading does not tie to another one."""
    ignored = unsaved(skeleton.model)
    if wanted is None:
        yield from (place for place in skeleton.places() if place[0] not in ignored)
        return
    places = {place[0]: place for place in skeleton.all_places()}
    for key, place in places.items():
        if key not in ignored and wanted.tied.get(key) not in places:
            yield place


def _entries(place: Place) -> dict[str, Entry]:
    """What a checkpoint has of one parameter or buffer, by the model's names."""
    key, held, tensor = place[0], holder_of(*place[1:]), contents.tensor_of(*place[1:])
    if held is not None:
        return packed_entries(key, held, tensor)
    return {key: Entry(tensor.dtype, tuple(tensor.shape))}


def _in_files(place: Place) -> tuple[int, ...]:
    """Shape of the values in files of dense weights."""
    tensor, held = contents.tensor_of(*place[1:]), holder_of(*place[1:])
    return tuple(tensor.shape)[::-1] if held is not None and held.of_conv1d else tuple(tensor.shape)


def _is_float(place: Place) -> bool:
    return holder_of(*place[1:]) is not None or contents.tensor_of(*place[1:]).is_floating_point()


def packed_entries(key: str, held: Any, weight: Any) -> dict[str, Entry]:
    """What a checkpoint has of a packed weight: it, and what is beside it, by the model's names.

    Args:
        key: of the weight.
        held: its holder.
        weight: of the meta device, not quantized.
    """
    packed, state = empty_weight(held, weight)
    kind = held.kind
    beside, late = kind.empty_beside(key, state, _JSON_BYTES + _EXPERT_BYTES * kind.parts(state))
    made = {key: packed.view(kind.stored_shape(state, packed.element_size())), **beside}
    return {name: Entry(value.dtype, tuple(value.shape), late=name == late) for name, value in made.items()}


def empty_weight(held: Any, weight: Any) -> tuple[Tensor, QuantState]:
    """Packed bytes and state of a quantized weight, on the meta device; `held`, `weight` as of `packed_entries`."""
    shape = held.shape if held.shape is not None else weight.shape
    return held.kind.quantize(
        torch.empty(shape, dtype=torch.bfloat16, device="meta"),
        quant_storage=held.storage,
        **{name: getattr(weight, name) for name in _SETTINGS if hasattr(weight, name)},
    )
