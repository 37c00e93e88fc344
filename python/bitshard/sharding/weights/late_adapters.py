"""Adapters that are added to a model which FSDP2 has sharded already.

FSDP2 manages the parameters that it found when `fully_shard` was called. What `get_peft_model` adds to a model that was
loaded into shards are plain tensors, whose gradients are those of one rank alone, with no error: the ranks drift
apart, in dense models too. transformers' Trainer averages such gradients; a loop of one's own calls `shard_adapters`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from bitshard.process import foreign
from bitshard.weights import inventory

logger = logging.getLogger("bitshard")

_sharded: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules whose parameters shard_adapters has sharded
_AVERAGES = "_sync_replicated_trainable_parameters"  # of a Trainer of transformers that sees to such parameters


def shard_adapters(model: nn.Module, **options: Any) -> int:
    """Shard the trainable parameters that were added to a sharded model (`get_peft_model`); how many modules have some.

    Call it once on every rank, before the first forward and before the optimizer is made. All ranks start from what
    rank 0 of the mesh holds. The adapters of one unit of the model form one unit, which is gathered when the first
    module around them runs: attention and MLP of a decoder layer, whose adapters `bitshard.lora.fuse` takes then.

    Args:
        model: a model that FSDP2 sharded before the adapters were added.
        options: for `fully_shard`, for instance `mp_policy`, `offload_policy`.

    ValueError where nothing of the model is sharded, or a module has both sharded and plain parameters.
    """
    mesh = next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)
    if mesh is None:
        raise ValueError("shard_adapters: this model has no parameters sharded by FSDP2")
    units = late_modules(model)
    for unit, modules in units:
        late = [p for module in modules for p in module.parameters(recurse=False)]
        for parameter in late:
            values = parameter.data.to(mesh.device_type)  # on the host where peft found offloaded weights there
            for dim in range(mesh.ndim):
                group = mesh.get_group(dim)
                dist.broadcast(values, dist.get_global_rank(group, 0), group=group)
            parameter.data = values
        around = _around(unit, modules)
        others = {p for module in around for p in module.parameters()}.difference(late)
        fully_shard(around, mesh=mesh, ignored_params=others, **options)
        _sharded.update(modules)
    return sum(len(modules) for _, modules in units)


def _around(unit: nn.Module, late: list[nn.Module]) -> list[nn.Module]:
    """The modules right inside `unit` that hold those of `late`, for their forwards to gather and to free them.

    `late` itself where `unit` has units inside: what is right inside of a whole model runs as long as the model.
    """
    if not isinstance(unit, FSDPModule) or any(isinstance(module, FSDPModule) for module in _below(unit)):
        return late
    inside = [child for child in _running(unit) if not set(late).isdisjoint(child.modules())]
    return inside if set(late).issubset(m for child in inside for m in child.modules()) else late


def _below(module: nn.Module) -> Iterator[nn.Module]:
    return (each for child in module.children() for each in child.modules())


def _running(module: nn.Module) -> Iterator[nn.Module]:
    """The children of `module`; in the place of a list or a dict, which has no forward, what it holds."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _running(child)
        else:
            yield child


def late_modules(model: nn.Module) -> list[tuple[nn.Module, list[nn.Module]]]:
    """The modules with plain trainable parameters of their own: (unit of FSDP2, those in it), where there are some."""
    found: dict[int, tuple[nn.Module, list[nn.Module]]] = {}

    def walk(module: nn.Module, unit: nn.Module) -> None:
        unit = module if isinstance(module, FSDPModule) else unit
        own = list(module.parameters(recurse=False))
        if any(p.requires_grad and not isinstance(p, DTensor) for p in own):
            if any(isinstance(p, DTensor) for p in own):
                raise ValueError(f"shard_adapters: {type(module).__name__} has sharded and plain parameters")
            found.setdefault(id(unit), (unit, []))[1].append(module)
        for child in module.children():
            walk(child, unit)

    walk(model, model)
    return list(found.values())


def watch(layer: nn.Module) -> None:
    """`layer`, loaded into shards, is in its first forward with gradients: warn in a backward that trains it wrong.

    That is one which reaches a plain trainable parameter of its model, unless transformers' Trainer, which averages
    such gradients, runs the forward.
    """
    model = inventory.model_of(layer)
    for _, held in inventory.holders(model):
        held.unwatched = held.late = False
    late = (module for module in model.modules() if module not in _sharded)  # while it runs, theirs are plain, too
    own = (p for module in late for p in module.parameters(recurse=False))
    plain = [p for p in own if p.requires_grad and not isinstance(p, DTensor)]
    if not plain or _in_trainer():
        return

    def warn(_: Any) -> None:
        handle.remove()
        logger.warning(
            "%d trainable parameters were added to this model after FSDP2 had sharded it (adapters of peft, say): each "
            "rank trains its own, and nothing averages their gradients. Call bitshard.fsdp.shard_adapters(model) "
            "before the first forward and the optimizer, or average them, as transformers' Trainer does.",
            len(plain),
        )

    handle = plain[-1].register_hook(warn)


def _in_trainer() -> bool:
    return any(hasattr(type(method), _AVERAGES) for method in foreign.running_methods())
