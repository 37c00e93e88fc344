"""Files in a layout of others (`bitshard.formats.layouts`): which weights of a model they have packed, and what else.

What a model has no place for, and servers need, stays beside it from loading to saving: scales of a KV cache, layers
for drafting, a file of ModelOpt. Small tensors are kept; large ones are read again when they are written.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bitshard.formats.layouts import QUANTIZATION, Layout, Stacks
from bitshard.sharding.checkpoints.files import Entry
from bitshard.sharding.checkpoints.names import Loading
from bitshard.sharding.checkpoints.reading import some

logger = logging.getLogger("bitshard")
_FEW_BITS = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "U8", "I8", "I32")  # safetensors' names of what codes are in
_SMALL = 1 << 16  # bytes of a tensor that is kept
_ATTRIBUTE = "_bitshard_beside"  # of a model
_STACKING = (["MergeModulelist"], ["MergeModulelist", "Concatenate"])  # transformers' names of what makes a stack

Packed = dict[str, "tuple[type[Layout] | Stacks, str]"]  # key in the model -> layout, key in the files (of Layout)


def packed_weights(model: nn.Module, names: Collection[str], layout: type[Layout]) -> Packed:
    """The weights of a model that files have packed in a layout, linear layers of experts as the stacks that they are.

    Args:
        model: of transformers.
        names: of all tensors of the files.

    ValueError where transformers makes something else of them than a stack, where experts are not all packed, and for
    entries under which products are others.
    """
    from transformers.core_model_loading import dot_natural_key

    loading, keys = Loading(model), dict.fromkeys(model.state_dict(), True)
    found: Packed = {}
    stacks: dict[str, dict[str, list[str]]] = {}  # key in the model -> pattern -> keys in the files, an expert each
    for own in sorted(layout.packed_in(names).values(), key=dot_natural_key):
        made, pattern = loading.made_of(own, keys)
        if made[0] not in keys:
            continue
        stem = own.removesuffix(layout.end)
        if alien := [stem + end for end in layout.refused if stem + end in names]:
            raise ValueError(
                f"{own}: the files have {alien}, with which products are not those of its codes and scales"
            )
        if pattern is None:
            found[made[0]] = layout, own
        else:
            stacks.setdefault(made[0], {}).setdefault(pattern, []).append(own)
    for key, parts in stacks.items():
        found[key] = _stack(key, parts, loading.of_pattern[next(iter(parts))], layout), key
    return found


def _stack(key: str, parts: dict[str, list[str]], made_by: Any, layout: type[Layout]) -> Stacks:
    how = [type(each).__name__ for each in made_by.operations]
    dims = [each.dim for each in made_by.operations if hasattr(each, "dim")]
    if how not in _STACKING or dims != list(range(len(how))) or layout.kind.stack is None:
        raise ValueError(f"{key}: transformers makes it of packed weights by {how} along {dims}, which keeps no bytes")
    missing = [pattern for pattern in made_by.source_patterns if pattern not in parts]
    counts = {pattern: len(own) for pattern, own in parts.items()}
    if missing or len(set(counts.values())) > 1:
        raise ValueError(f"{key}: packed experts are {counts}, expected as many of {made_by.source_patterns}")
    rows = zip(*(parts[pattern] for pattern in made_by.source_patterns), strict=True)
    return Stacks(layout, [tuple(own.removesuffix(layout.end) for own in row) for row in rows])


class Beside:
    """What files have and a model has no place for.

    Args:
        model: of transformers, which keeps this.
        where: name of a tensor -> its file, of all tensors.
        packed: of `packed_weights`.

    ValueError where the model's other weights have fewer than 16 bits in the files: their scales are no part of it.
    """

    def __init__(self, model: nn.Module, where: dict[str, Path], packed: Packed):
        loading, keys = Loading(model), dict.fromkeys(model.state_dict(), True)
        self.method = next((getattr(layout, "one", layout).method for layout, _ in packed.values()), "")
        own = {name for layout, key in packed.values() for name in layout.names(key)}
        others = sorted(where.keys() - own - keys.keys())
        unknown = [name for name in others if keys.keys().isdisjoint(loading.made_of(name, keys)[0])]
        _require_dense({name: where[name] for name in where.keys() - own - set(unknown)})
        self.tensors: dict[str, Tensor] = {}
        self.entries: dict[str, Entry] = {}
        self._large: dict[str, tuple[Path, tuple[int, int]]] = {}
        for name, tensor in _read({name: where[name] for name in unknown}):
            self.entries[name] = Entry(tensor.dtype, tuple(tensor.shape))
            if tensor.nbytes <= _SMALL:
                self.tensors[name] = tensor.clone()
            else:
                self._large[name] = where[name], _stamp(where[name])
        folders = sorted({path.parent for path in where.values()})
        files = [path for folder in folders if (path := folder / QUANTIZATION).is_file()]
        self.files = {path.name: path.read_bytes() for path in files}
        vars(model)[_ATTRIBUTE] = self

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of all. ValueError where a file of one has gone or changed since the model was loaded."""
        changed = sorted({str(path) for path, stamp in self._large.values() if _stamp(path) != stamp})
        if changed:
            raise ValueError(
                f"{len(self._large)} tensors that the model has no place for are read again from the files that it was "
                f"loaded from, which are not there as they were any more: {some(changed)}"
            )
        yield from self.tensors.items()
        yield from _read({name: path for name, (path, _) in self._large.items()})

    def log_left_out(self, folder: Any) -> None:
        """A line of the log about what files of 16 or 32 bits do not get, for it is of packed weights."""
        if self.entries:
            logger.warning(
                f"{folder}: left out are {len(self.entries)} tensors of the {self.method} files, for which the model "
                f"has no place: {some(list(self.entries))}"
            )


def beside(model: Any) -> Beside | None:
    """What the files of a model have beside it; None where they are not in a layout of others."""
    return vars(model).get(_ATTRIBUTE)


def _require_dense(where: dict[str, Path]) -> None:
    """ValueError for tensors that are neither floats of 16 bits or more nor integers of a buffer."""
    from safetensors import safe_open

    wrong = []
    for path in sorted(set(where.values())):
        with safe_open(str(path), "pt") as opened:
            for name in sorted(name for name, own in where.items() if own == path):
                found = opened.get_slice(name)
                if found.get_dtype() in _FEW_BITS and len(found.get_shape()) > 1:
                    wrong.append(f"{name} is {found.get_dtype()} {found.get_shape()}")
    if wrong:
        raise ValueError(
            f"{len(wrong)} weights of the model are no floats of 16 or 32 bits, nor packed as the others: {some(wrong)}"
        )


def _read(where: dict[str, Path]) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for path in sorted(set(where.values())):
        with safe_open(str(path), "pt") as opened:
            yield from ((name, opened.get_tensor(name)) for name, own in where.items() if own == path)


def _stamp(path: Path) -> tuple[int, int]:
    """What tells a file from one that was written later; zeros where there is none."""
    if not path.is_file():
        return 0, 0
    found = path.stat()
    return found.st_size, found.st_mtime_ns
