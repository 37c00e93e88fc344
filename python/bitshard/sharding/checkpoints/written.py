"""What a checkpoint of a model gets: which tensors, names and config. All is decided before the first byte.

All writers ask here. A tensor that has several places in the model is written once where `from_pretrained` ties these
places, and in each of them where it does not; where an adapter is merged into one of them only, the config says that
they are not tied any longer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from bitshard.sharding.checkpoints import contents
from bitshard.sharding.checkpoints.contents import Piece
from bitshard.sharding.checkpoints.expected import (
    Expected,
    expected,
    is_of_transformers,
    require_fitting,
    require_untieable,
    untied,
)
from bitshard.sharding.checkpoints.files import Entry
from bitshard.sharding.checkpoints.laid_out import Beside, beside
from bitshard.sharding.checkpoints.names import Names
from bitshard.sharding.checkpoints.reading import some


@dataclass
class Written:
    """The tensors of a checkpoint.

    Attributes:
        pieces: of the model, with the tensors that are written.
        config: of the checkpoint; None: the model has none.
        untied: whether weights that the model ties are not tied in the checkpoint.
        names: of the tensors in the files.
        entries: file's name -> what is there.
        beside: what the model has no place for and its files had; `entries` have it where weights stay packed.
    """

    pieces: list[Piece]
    config: Any
    untied: bool
    names: Names
    entries: dict[str, Entry]
    beside: Beside | None = None


def written(
    model: nn.Module,
    merge: bool,
    dtype: torch.dtype | None,
    what: str,
    entries_of: Callable[[Piece], dict[str, Entry]] | None = None,
) -> Written:
    """What a checkpoint of `model` gets.

    Args:
        merge: with the active adapters in the weights.
        dtype: None: 4-bit weights as they are; else of all float tensors.
        what: is written, in words for errors.
        entries_of: what is there of a piece, by the model's keys; None: `Piece.entries`.

    ValueError for what cannot be written so that it is read again: unknown wrappers, weights that are not quantized,
    and tensors that are not those which `from_pretrained` asks for.
    """
    entries_of = entries_of or (lambda piece: piece.entries(dtype))
    found = contents.pieces(model, merge)
    inner = contents.unwrapped(model)
    if not is_of_transformers(inner):
        entries = {key: entry for piece in found for key, entry in entries_of(piece).items()}
        return Written(found, None, False, Names(None, None, entries), entries)
    config = copy.deepcopy(inner.config)
    wanted = expected(inner, config)
    broken = _broken(found, wanted)
    if broken:
        require_untieable(inner, broken)
        config = untied(config)
        wanted = expected(inner, config)
        if still := _broken(found, wanted):
            raise ValueError(f"{what}: {still} are tied by {type(inner).__name__}, but have different values now")
    found = _kept(found, wanted)
    entries = {key: entry for piece in found for key, entry in entries_of(piece).items()}
    held = {piece.name_of(name): one for piece in found for name, one in piece.held.items()}
    stacks = [key for key, one in held.items() if one.kind.stacked]
    names = Names(
        wanted.model if wanted is not None else inner,
        getattr(inner, "_weight_conversions", None),
        entries,
        held if dtype is None else (),
        stacks,
        {key: one for key, one in held.items() if one.layout is not None} if dtype is None else None,
    )
    if wanted is not None:
        require_fitting(wanted, _facts(found, entries), _files(names, entries, found), what)
    made, others = names.entries(entries), beside(inner)
    if others is not None and dtype is None:
        if both := sorted(made.keys() & others.entries.keys()):
            raise ValueError(f"{what}: {some(both)} are of the model now, and were not when it was loaded")
        made = {**made, **others.entries}
    return Written(found, config, bool(broken), names, made, others)


def _places(found: Iterable[Piece]) -> dict[str, tuple]:
    return {piece.name_of(name): piece.identity(name) for piece in found for name in piece.names}


def _broken(found: list[Piece], wanted: Expected | None) -> list[str]:
    """Pairs that the class ties and that have different values here, in words."""
    if wanted is None or not wanted.tied:
        return []
    places = _places(found)
    return [
        f"{key} and {source}"
        for key, source in wanted.tied.items()
        if key in places and source in places and places[key] != places[source]
    ]


def _kept(found: list[Piece], wanted: Expected | None) -> list[Piece]:
    """The pieces without what loading ties to another tensor of the files; without a class to ask, each tensor once."""
    places, seen, kept = _places(found), set(), []
    for piece in found:
        names = []
        for name in piece.names:
            key = piece.name_of(name)
            if wanted is not None:
                is_other = wanted.tied.get(key) in places
            else:
                is_other = places[key] in seen
                seen.add(places[key])
            if not is_other:
                names.append(name)
        if names:
            held = {name: one for name, one in piece.held.items() if name in names}
            kept.append(replace(piece, names=names, held=held))
    return kept


def _facts(found: list[Piece], entries: dict[str, Entry]) -> dict[str, tuple[tuple[int, ...], bool]]:
    """(shape, whether float) of each tensor; for packed ones as files of dense weights have it."""
    facts = {}
    for piece in found:
        for name in piece.names:
            key = piece.name_of(name)
            packed = name in piece.held
            shape = piece.dense_shape(name) if packed else piece.shape(name)
            facts[key] = tuple(shape), packed or entries[key].dtype.is_floating_point
    return facts


def _files(names: Names, entries: dict[str, Entry], found: list[Piece]) -> list[str]:
    """The files' names of all tensors, without the entries beside packed ones."""
    keys = {piece.name_of(name) for piece in found for name in piece.names}
    laid_out = {key: name for name, (key, _) in names.laid_out.items()}
    others = {key: entry for key, entry in entries.items() if key in keys and key not in laid_out}
    return [*names.entries(others), *(name for key, name in laid_out.items() if key in keys)]
