"""Adapters that are added to a model which FSDP2 has sharded already.

FSDP2 manages the parameters that it found when `fully_shard` was called. What `get_peft_model` adds to a model that was
loaded into shards are plain tensors, whose gradients are those of one rank alone, with no error: the ranks drift
apart, in dense models too. transformers' Trainer averages such gradients; a loop of one's own calls `shard_adapters`.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from bitshard import inventory

logger = logging.getLogger("bitshard")

_AVERAGES = "_sync_replicated_trainable_parameters"  # of a Trainer of transformers that sees to such parameters


def shard_adapters(model: nn.Module, **options: Any) -> int:
    """Shard the trainable parameters that were added to a sharded model (`get_peft_model`); how many modules have some.

    Call it once on every rank, before the first forward and before the optimizer is made. All ranks start from what
    rank 0 of the mesh holds. The adapters of one unit of the model form one unit.

    Args:
        model: a model that FSDP2 sharded before the adapters were added.
        options: for `fully_shard`, for instance `mp_policy`, `offload_policy`.

    ValueError where nothing of the model is sharded, or a module has both sharded and plain parameters.
    """
    mesh = next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)
    if mesh is None:
        raise ValueError("shard_adapters: this model has no parameters sharded by FSDP2")
    units = late_modules(model)
    for modules in units:
        for parameter in (p for module in modules for p in module.parameters(recurse=False)):
            values = parameter.data.to(mesh.device_type)  # on the host where peft found offloaded weights there
            for dim in range(mesh.ndim):
                group = mesh.get_group(dim)
                dist.broadcast(values, dist.get_global_rank(group, 0), group=group)
            parameter.data = values
        fully_shard(modules, mesh=mesh, **options)
    return sum(map(len, units))


def late_modules(model: nn.Module) -> list[list[nn.Module]]:
    """The modules with plain trainable parameters of their own, in one list for each unit of FSDP2 that has some."""
    found: dict[int, list[nn.Module]] = {}

    def walk(module: nn.Module, unit: nn.Module) -> None:
        unit = module if isinstance(module, FSDPModule) else unit
        own = list(module.parameters(recurse=False))
        if any(p.requires_grad and not isinstance(p, DTensor) for p in own):
            if any(isinstance(p, DTensor) for p in own):
                raise ValueError(f"shard_adapters: {type(module).__name__} has sharded and plain parameters")
            found.setdefault(id(unit), []).append(module)
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
        held.unwatched = False
    plain = [p for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor)]
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
    frame = sys._getframe(1)
    while frame is not None:
        if hasattr(type(frame.f_locals.get("self")), _AVERAGES):
            return True
        frame = frame.f_back
    return False
