"""Whether ranks hold the same 4-bit weights: compared once per weight, before FSDP2 gathers it or DDP sends it.

Each rank quantizes or loads by itself. If ranks have different seeds, files or settings, FSDP2 would silently gather
parts of different weights; if their scales have different kinds, the collective itself fails. So the first gather of a
weight compares it, together with all other weights that are not compared yet: one exchange for a model.
DDP sends the packed bytes of rank 0 to all other ranks, which keep their own scales. So weights are compared before.
Replicas (HSDP, FSDP1's HYBRID_SHARD) join nothing, and would silently train adapters on different bases. They compare a
digest of all their weights in the same exchange, and where it differs, all they hold.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
import weakref
from typing import Any, NamedTuple

import torch

from bitshard import ops
from bitshard.formats.kind import kind_of

_waiting: list[weakref.ref] = []  # weights that were sharded and not compared yet, in the order of sharding
_compared: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # models that FSDP1 shards in replicas
_NAMES = ("format", "blocksize", "shape", "nested scales", "second-level blocksize", "values", "container")
_NAMES += ("checksum of the bytes", "checksum of the scales", "checksum of the second-level scales")


def awaits(origin: Any) -> None:
    """A weight was sharded: `origin` (`bitshard.shards.shard.Origin`) is to be compared."""
    _waiting.append(weakref.ref(origin))


def agree(origin: Any, mesh: Any) -> None:
    """Compare the weight of `origin` among the ranks of a mesh of one dimension, and with its replicas (HSDP), once.

    A collective of these ranks. ValueError on all of them, with both descriptions and the ranks, if they hold different
    weights.
    """
    if origin.agreed:
        return
    shards, replicas = mesh.get_group() if mesh.size() > 1 else None, _replicas(origin)
    if shards is None and not replicas:
        origin.agreed = True
        return
    waiting = [other for other in (ref() for ref in _waiting) if other is not None and not other.agreed]
    if all(other is not origin for other in waiting):
        waiting.append(origin)
    place = next(i for i, other in enumerate(waiting) if other is origin)
    own = (place, _descriptions(waiting), _parts(waiting) if replicas else [])
    brought, differ = _exchanged(own, shards, replicas)
    if differ:
        found = [(own[0], _with_parts(own[1], own[2], number % mesh.size(), mesh.size())) for number, own in brought]
    else:
        found = [(place, descriptions) for place, descriptions, _ in brought]
    here = [descriptions[place] for place, descriptions in found]
    if not _alike(here):
        who = "FSDP2 joins or keeps as replicas" if differ else "FSDP2 joins"
        raise ValueError(_told(who, _name_of(origin.attributes.get("module")), here))
    origin.agreed = True
    if len({(place, len(descriptions)) for place, descriptions in found}) == 1:  # in the same order
        for other, same in zip(waiting, zip(*(descriptions for _, descriptions in found), strict=True), strict=True):
            other.agreed = other.agreed or (_alike(same) and _replicas(other) == replicas)
    _waiting[:] = [weakref.ref(other) for other in waiting if not other.agreed]


def _exchanged(own: tuple, shards: Any, replicas: list[Any]) -> tuple[list[Any], bool]:
    """What the ranks of the group `shards` bring, or, where replicas bring something else, what all of these do.

    Replicas are compared by a digest. Whether one differs is known to all ranks, for all take part in what follows.

    Args:
        own: what this rank brings.
        shards: the ranks that join their parts; None: this one alone.
        replicas: of each dimension of replicas the group of the ranks that hold what this one does.

    Returns:
        (own of each rank, or where replicas differ (its number, own)), whether they do.
    """
    digest = hashlib.sha256(repr(own).encode()).digest()
    same = all([len(set(_everyone(digest, group))) == 1 for group in replicas])
    found = [(*own, same)] if shards is None else _everyone((*own, same), shards)
    if all(flag for *_, flag in found):
        return [tuple(rest) for *rest, _ in found], False
    for group in replicas:
        found = [one for replica in _everyone(found, group) for one in replica]
    return [(number, tuple(rest)) for number, (*rest, _) in enumerate(found)], True


def _everyone(value: Any, group: Any) -> list[Any]:
    brought: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(brought, value, group)
    return brought


def _shard_of(origin: Any) -> Any:
    """The DTensor that FSDP2 has registered; None where the layer is somebody else's."""
    module = origin.attributes.get("module")
    return getattr(getattr(module, "packed_weight", None), "shard", None)


def _replicas(origin: Any) -> list[Any]:
    """This rank's group in each dimension of the mesh over which the weight is not sharded."""
    shard = _shard_of(origin)
    if shard is None:
        return []
    mesh = shard.device_mesh
    dims = (dim for dim, placement in enumerate(shard.placements) if not placement.is_shard() and mesh.size(dim) > 1)
    return [mesh.get_group(dim) for dim in dims]


def _parts(origins: list[Any]) -> list[tuple]:
    """Checksums of the rows and of the scales that this rank keeps of each weight; None where it has none."""
    sums = []
    for origin in origins:
        shard, sharded = _shard_of(origin), origin.state.sharded
        rows = None if shard is None or shard._local_tensor.is_meta else ops.checksum(shard._local_tensor.plain())
        sums.append((rows, None if sharded is None else ops.checksum(sharded.own)))
    known = [each for pair in sums for each in pair if each is not None]
    numbers = iter(_numbers(known))
    return [tuple(None if each is None else next(numbers) for each in pair) for pair in sums]


def _with_parts(descriptions: list[tuple], parts: list[tuple], rank: int, world: int) -> list[tuple]:
    """Descriptions with what rank `rank` of `world` keeps, so that `_alike` compares it with that of its replicas."""
    before, behind = (None, None) * rank, (None, None) * (world - 1 - rank)
    return [(*one, *before, *part, *behind) for one, part in zip(descriptions, parts, strict=True)]


def agree_in_replicas(model: torch.nn.Module, held: dict[str, Held], shards: Any, replicas: Any) -> None:
    """Compare all quantized weights of a model that FSDP1 is about to keep in replicas, once. A collective.

    Args:
        model: the outermost module that FSDP1 wraps.
        held: its weights by name.
        shards, replicas: groups of the ranks that join their parts (None: nothing is sharded), and of those that hold
            what this one does.

    ValueError on all ranks if one holds another weight.
    """
    if model in _compared:
        return
    _compared.add(model)
    brought, differ = _exchanged((list(held), _descriptions(list(held.values()))), shards, [replicas])
    if differ:
        named = [dict(zip(names, found, strict=True)) for _, (names, found) in brought]
        _require_alike("FSDP1 joins or keeps as replicas", named)


def agree_on(held: dict[str, Held], group: Any) -> None:
    """Compare all quantized weights of a model, by name, among the ranks of a process group. A collective of these.

    ValueError on all of them if one holds another weight.
    """
    named = _everyone(dict(zip(held, _descriptions(list(held.values())), strict=True)), group)
    _require_alike("DDP sends rank 0's bytes to", named)


def _require_alike(who: str, named: list[dict[str, tuple]]) -> None:
    """ValueError where two ranks have different weights of one name; `named` are their descriptions by rank."""
    for name in named[0]:
        here = [descriptions.get(name, (None,) * len(_NAMES)) for descriptions in named]
        if not _alike(here):
            raise ValueError(_told(who, f" {name}", here))


class Held(NamedTuple):
    """A whole weight, as `bitshard.shards.shard.Origin` describes a sharded one."""

    state: Any
    dtype: torch.dtype
    scales_checksum: torch.Tensor | None = None


def _descriptions(origins: list[Any]) -> list[tuple]:
    """What must be the same on all ranks of each weight, as `_NAMES` lists; an unknown checksum is None."""
    sums = [checksum for origin in origins for checksum in _checksums(origin)]
    numbers = iter(_numbers([checksum for checksum in sums if checksum is not None]))
    found = iter([None if checksum is None else next(numbers) for checksum in sums])
    return [(*_format(origin), next(found), next(found), next(found)) for origin in origins]


def _numbers(checksums: list[torch.Tensor]) -> list[int]:
    """Their values, with one wait for the device."""
    device = next((checksum.device for checksum in checksums if checksum.device.type != "cpu"), torch.device("cpu"))
    return torch.stack([checksum.to(device) for checksum in checksums]).tolist() if checksums else []


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
    second = state.global_scale if state.state2 is None else state.state2.absmax
    second = None if second is None or second.is_meta else ops.checksum(second)
    return state.checksum, scales, second


def _alike(descriptions: Any) -> bool:
    """Whether all are the same; None equals everything."""
    return all(len({value for value in values if value is not None}) <= 1 for values in zip(*descriptions, strict=True))


def _told(who: str, name: str, descriptions: list[tuple]) -> str:
    rank, first_rank = _pair(descriptions)
    names = (*_NAMES, *("checksum of its rows", "checksum of its scales") * len(descriptions))
    differing = [
        f"{name} {_shown(first)} on rank {first_rank} and {_shown(other)} on rank {rank}"
        for name, first, other in zip(names, descriptions[first_rank], descriptions[rank], strict=False)
        if not _alike([(first,), (other,)])
    ]
    word = kind_of(descriptions[first_rank][0]).word
    others = sum(not _alike([descriptions[first_rank], other]) for other in descriptions)
    return (
        f"the ranks that {who} hold different {word} weights{name} of {list(descriptions[0][2] or ())}: "
        f"{'; '.join(differing)} ({others} of these {len(descriptions)} ranks differ from their rank {first_rank}). "
        "Load the same files with the same BitsAndBytesConfig on every rank, and set the same seed before weights that "
        "no file holds are made (transformers.set_seed)."
    )


def _pair(descriptions: list[tuple]) -> tuple[int, int]:
    """Two ranks that differ, the later one first."""
    pairs = itertools.combinations(range(len(descriptions)), 2)
    first, other = next(pair for pair in pairs if not _alike([descriptions[number] for number in pair]))
    return other, first


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
