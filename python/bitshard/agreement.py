"""Whether ranks hold the same 4-bit weights: compared once per weight, before FSDP2 gathers it or DDP sends it.

Each rank quantizes or loads by itself. If ranks have different seeds, files or settings, FSDP2 would silently gather
parts of different weights; if their scales have different kinds, the collective itself fails. So the first gather of a
weight compares it, together with all other weights that are not compared yet: one exchange for a model.
DDP sends the packed bytes of rank 0 to all other ranks, which keep their own scales. So weights are compared before.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, NamedTuple

import torch

from bitshard import ops

_waiting: list[weakref.ref] = []  # weights that were sharded and not compared yet, in the order of sharding
_NAMES = ("format", "blocksize", "shape", "nested scales", "second-level blocksize", "values", "container")
_NAMES += ("checksum of the bytes", "checksum of the scales", "checksum of the second-level scales")


def awaits(origin: Any) -> None:
    """A weight was sharded: `origin` (`bitshard.shard.Origin`) is to be compared."""
    _waiting.append(weakref.ref(origin))


def agree(origin: Any, mesh: Any) -> None:
    """Compare the weight of `origin` among the ranks of a mesh of one dimension, once. A collective of these ranks.

    ValueError on all of them, with both descriptions and the ranks, if they hold different weights.
    """
    if origin.agreed:
        return
    waiting = [other for other in (ref() for ref in _waiting) if other is not None and not other.agreed]
    if all(other is not origin for other in waiting):
        waiting.append(origin)
    own = (next(i for i, other in enumerate(waiting) if other is origin), _descriptions(waiting))
    brought: list[Any] = [None] * mesh.size()
    torch.distributed.all_gather_object(brought, own, mesh.get_group())
    here = [descriptions[place] for place, descriptions in brought]
    if not _alike(here):
        raise ValueError(_told("FSDP2 joins", _name_of(origin.attributes.get("module")), here))
    origin.agreed = True
    if len({(place, len(descriptions)) for place, descriptions in brought}) == 1:  # in the same order
        for other, found in zip(waiting, zip(*(descriptions for _, descriptions in brought), strict=True), strict=True):
            other.agreed = other.agreed or _alike(found)
    _waiting[:] = [weakref.ref(other) for other in waiting if not other.agreed]


def agree_on(weights: dict[str, Any], group: Any) -> None:
    """Compare all quantized weights of a model, by name, among the ranks of a process group. A collective of these.

    ValueError on all of them if one holds another weight.
    """
    held = [Held(weight.quant_state, weight.dtype) for weight in weights.values()]
    brought: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(brought, dict(zip(weights, _descriptions(held), strict=True)), group)
    for name in brought[0]:
        here = [descriptions.get(name, (None,) * len(_NAMES)) for descriptions in brought]
        if not _alike(here):
            raise ValueError(_told("DDP sends rank 0's bytes to", f" {name}", here))


class Held(NamedTuple):
    """A whole weight, as `bitshard.shard.Origin` describes a sharded one."""

    state: Any
    dtype: torch.dtype
    scales_checksum: torch.Tensor | None = None


def _descriptions(origins: list[Any]) -> list[tuple]:
    """What must be the same on all ranks of each weight, as `_NAMES` lists; an unknown checksum is None."""
    sums = [checksum for origin in origins for checksum in _checksums(origin)]
    known = [checksum for checksum in sums if checksum is not None]
    device = next((checksum.device for checksum in known if checksum.device.type != "cpu"), torch.device("cpu"))
    numbers = iter(torch.stack([checksum.to(device) for checksum in known]).tolist() if known else ())
    found = iter([None if checksum is None else next(numbers) for checksum in sums])
    return [(*_format(origin), next(found), next(found), next(found)) for origin in origins]


def _format(origin: Any) -> tuple:
    state = origin.state
    second = None if state.state2 is None else state.state2.blocksize
    names = (str(state.dtype).removeprefix("torch."), str(origin.dtype).removeprefix("torch."))
    return (state.quant_type, state.blocksize, tuple(state.shape), state.nested, second, *names)


def _checksums(origin: Any) -> tuple:
    """Checksums of bytes, scales and second-level scales of a whole weight: tensors, or None if unknown."""
    state, sharded = origin.state, origin.state.sharded
    scales = origin.scales_checksum if sharded is None or sharded.checksum is None else sharded.checksum
    if scales is None and sharded is None and not state.absmax.is_meta:
        scales = ops.checksum(state.absmax)
    second = None if state.state2 is None or state.state2.absmax.is_meta else ops.checksum(state.state2.absmax)
    return state.checksum, scales, second


def _alike(descriptions: Any) -> bool:
    """Whether all are the same; None equals everything."""
    return all(len({value for value in values if value is not None}) <= 1 for values in zip(*descriptions, strict=True))


def _told(who: str, name: str, descriptions: list[tuple]) -> str:
    rank = next(rank for rank, other in enumerate(descriptions) if not _alike([descriptions[0], other]))
    differing = [
        f"{name} {_shown(first)} on rank 0 and {_shown(other)} on rank {rank}"
        for name, first, other in zip(_NAMES, descriptions[0], descriptions[rank], strict=True)
        if not _alike([(first,), (other,)])
    ]
    word = "int8" if descriptions[0][0] == "int8" else "4-bit"
    others = sum(not _alike([descriptions[0], other]) for other in descriptions)
    return (
        f"the ranks that {who} hold different {word} weights{name} of {list(descriptions[0][2] or ())}: "
        f"{'; '.join(differing)} ({others} of these {len(descriptions)} ranks differ from their rank 0). "
        "Load the same files with the same BitsAndBytesConfig on every rank, and set the same seed before weights that "
        "no file holds are made (transformers.set_seed)."
    )


def _shown(value: Any) -> str:
    return f"{value:#x}" if isinstance(value, int) and abs(value) > 1 << 20 else str(value)


def _name_of(module: Any) -> str:
    """The name of a layer's weight in the outermost module whose forward is running, with a blank; "" if unknown."""
    name, frame = "", sys._getframe(1)
    while module is not None and frame is not None:
        outer = frame.f_locals.get("self")
        if isinstance(outer, torch.nn.Module):
            name = next(
                (f" {path}.weight".replace(" .", " ") for path, m in outer.named_modules() if m is module), name
            )
        frame = frame.f_back
    return name
