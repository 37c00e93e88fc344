"""The names under which, and the pieces in which, files have the tensors of a model of transformers.

transformers renames and regroups the tensors of some architectures while it loads them. Here that is reversed, tensor
by tensor, for what loading has used: a name that no file had before is never written.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bitshard.sharding.checkpoints.files import Entry


def defaults(model: nn.Module, legacy: bool = False) -> list[Any]:
    """What transformers does to a checkpoint's tensors of this kind of model while it loads them, dense ones."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return get_model_conversion_mapping(model, add_legacy=legacy)


class Loading:
    """Which tensors of a model `from_pretrained` makes of those of the files, by transformers' conversions.

    Args:
        model: of transformers, without wrappers, on whatever device.

    Attributes:
        known: the conversions.
        renamings: those that only rename.
        of_pattern: pattern in the files' names -> the converter that it belongs to.
    """

    def __init__(self, model: nn.Module):
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self.known = defaults(model, legacy=True)
        self._prefix = getattr(model, "base_model_prefix", "")
        self.renamings = [each for each in self.known if isinstance(each, WeightRenaming)]
        self._converters = [each for each in self.known if isinstance(each, WeightConverter)]
        self.of_pattern = {pattern: each for each in self._converters for pattern in each.source_patterns}

    def made_of(self, name: str, keys: dict[str, Any]) -> tuple[list[str], str | None]:
        """What the files' tensor `name` becomes, or a part of: (keys in the model, the first of which names them all in
        transformers' conversion; its pattern, None where it is only renamed).

        Args:
            keys: those of the model.
        """
        from transformers.core_model_loading import rename_source_key

        first, pattern = rename_source_key(name, self.renamings, self._converters, self._prefix, keys)
        if pattern is None:
            return [first], None
        target, *others = self.of_pattern[pattern].target_patterns
        return [first, *(first.replace(target, other) for other in others)], pattern

    def unrenamed(self, name: str, keys: dict[str, Any]) -> str:
        """The key of a name that the model has itself, but for the prefix of its class."""
        from transformers.core_model_loading import rename_source_key

        return rename_source_key(name, [], [], self._prefix, keys)[0]


def unsaved(model: nn.Module) -> set[str]:
    """Keys of what transformers computes and does not save, sinusoidal positions for instance."""
    return set(getattr(model, "_keys_to_ignore_on_save", None) or ())


class Names:
    """The files' names of a model's tensors, and what puts these into the files' pieces.

    Args:
        model: of transformers, without wrappers, on whatever device; None: any other, whose names stay.
        used: the conversions that loading has used; None: it was not loaded, and gets the names that transformers
            gives it then.
        keys: of all tensors that are written, entries beside packed weights included.
        packed: those of weights that are written packed. No conversion can put packed bytes together or apart.
        stacks: those of experts' stacks that are 4-bit in the model. Loading packed ones uses no conversion of them.
        laid_out: key -> holder of the packed weights that the files have in a layout of others.
    """

    def __init__(
        self,
        model: nn.Module | None,
        used: list[Any] | None,
        keys: Iterable[str],
        packed: Iterable[str] = (),
        stacks: Iterable[str] = (),
        laid_out: dict[str, Any] | None = None,
    ):
        self.keys, laid_out = list(keys), laid_out or {}
        packed, stacks = [key for key in packed if key not in laid_out], list(stacks)
        self._plain: dict[str, str] = {key: key for key in self.keys}
        self._group_of: dict[str, str] = {}
        self._groups: dict[str, list[str]] = {}
        self._model: Any = None
        if model is not None:
            found = [each for each in _conversions(model, used, stacks) if not _reads_packed(each)]
            kept = [each for each in found if not _touches(each, packed)]
            self._model = _Reversed(model, kept)
            if kept:
                self._find(kept, [f"{key}." for key in laid_out if key in stacks])
        self.laid_out: dict[str, Any] = {}  # file's name of such a weight -> (its key, its holder)
        for key, held in laid_out.items():
            group = self._groups[self._plain[key]] = [each for each in self.keys if f"{each}.".startswith(f"{key}.")]
            self.laid_out[self._plain[key]] = key, held
            for each in group:
                self._group_of[each] = self._plain[key]
            for each in group:
                del self._plain[each]

    def _find(self, conversions: list[Any], kept: list[str]) -> None:
        """Name all keys in one pass, in transformers' order, on which some of its renamings depend; but for those of
        stacks that are kept as others have packed them, by their beginnings."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        reverse = [each.reverse_transform() for each in conversions[::-1]]
        renamings = [each for each in reverse if isinstance(each, WeightRenaming)]
        converters = [each for each in reverse if isinstance(each, WeightConverter)]
        for key in sorted((key for key in self.keys if not f"{key}.".startswith(tuple(kept))), key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, reverse=True)
            if pattern is None:
                self._plain[key] = name
            else:
                del self._plain[key]
                self._group_of[key] = name
                self._groups.setdefault(name, []).append(key)

    def together(self, key: str) -> list[str]:
        """The keys of the tensors that the files have in one piece, or in pieces of one, with that of `key`."""
        return self._groups[self._group_of[key]] if key in self._group_of else [key]

    def entries(self, entries: dict[str, Entry]) -> dict[str, Entry]:
        """{file's name: entry} of {key: entry}, complete groups of them, in their order."""
        found: dict[str, Entry] = {}
        for key, entry in entries.items():
            if key in self._plain:
                found[self._plain[key]] = entry
            elif self.together(key)[0] == key:
                group = {each: _empty(entries[each]) for each in self.together(key)}
                made = self.made(self._group_of[key], group)
                found |= {name: Entry(value.dtype, tuple(value.shape)) for name, value in made.items()}
        return found

    def made(self, group: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """{file's name: tensor} of the tensors of a complete group, by the model's keys."""
        if group not in self.laid_out:
            return self._model.reverted(tensors)
        key, held = self.laid_out[group]
        state = held.state.clone()
        state.absmax = tensors[f"{key}.absmax"]
        if f"{key}.nested_absmax" in tensors:
            state.state2.absmax = tensors[f"{key}.nested_absmax"]
        return held.layout.written(group, tensors[key], state)

    def collector(self) -> Collector:
        """What takes the tensors one after the other and gives those of the files."""
        return Collector(self)


class Collector:
    """Tensors that wait until all of those are there that the files have in one piece with them."""

    def __init__(self, names: Names):
        self._names = names
        self._waiting: dict[str, dict[str, Tensor]] = {}

    def add(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """{file's name: tensor} of what is complete with these; the dict that is given is emptied."""
        found: dict[str, Tensor] = {}
        names = self._names
        for key in list(tensors):
            tensor = tensors.pop(key)
            if key in names._plain:
                found[names._plain[key]] = tensor
                continue
            group = names._group_of[key]
            waiting = self._waiting.setdefault(group, {})
            waiting[key] = tensor
            if len(waiting) == len(names._groups[group]):
                found.update(names.made(group, self._waiting.pop(group)))
        return found


class _Reversed:
    """A model as transformers' saving asks it for its conversions."""

    def __init__(self, model: nn.Module, conversions: list[Any]):
        self._model, self._weight_conversions = model, conversions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def reverted(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self, tensors))


def _conversions(model: nn.Module, used: list[Any] | None, stacks: list[str]) -> list[Any]:
    """Those that saving reverses."""
    from transformers.core_model_loading import PrefixChange

    if used is None:  # nothing was loaded: whether files would have a prefix is not known
        return [each for each in defaults(model) if not isinstance(each, PrefixChange)]
    known = {_pattern(each) for each in used}
    missing = [each for each in defaults(model) if _touches(each, stacks) and _pattern(each) not in known]
    return [*used, *missing]


def _pattern(conversion: Any) -> tuple:
    return type(conversion), tuple(conversion.source_patterns), tuple(conversion.target_patterns)


def _reads_packed(conversion: Any) -> bool:
    """Whether it makes a packed weight of a file's entries, which has no reverse: a quantizer's own."""
    return any(hasattr(operation, "hf_quantizer") for operation in getattr(conversion, "operations", ()))


def _touches(conversion: Any, keys: Iterable[str]) -> bool:
    """Whether this puts one of these tensors of the model together or apart."""
    from transformers.core_model_loading import WeightConverter

    if not isinstance(conversion, WeightConverter):
        return False
    reverse = conversion.reverse_transform()
    return any(reverse.rename_source_key(key)[1] is not None for key in keys)


def _empty(entry: Entry) -> Tensor:
    return torch.empty(entry.shape, dtype=entry.dtype, device="meta")
