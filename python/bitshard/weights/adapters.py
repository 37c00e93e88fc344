"""One dtype for what is trained around 4-bit layers, where accelerate hands a model to FSDP2.

FSDP2 wants one dtype among the trainable parameters of a unit. accelerate upcasts those of every other model, in mixed
precision, but passes over a model with 4-bit weights; and trl casts adapters of a 4-bit base to bfloat16 but keeps
DoRA's magnitudes in float32, which bfloat16 would freeze. The first forward would raise.

FSDP1 of torch 2.10 takes several dtypes but clips gradients of one dtype only, so there it is the same.

Nobody is patched: accelerate asks each packed weight whether it is of a float dtype, FSDP1 how large it is
(`bitshard.process.foreign`). In another release, where nobody asks so, nothing is cast and torch raises.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import nn

from bitshard.formats.state import dtype_name
from bitshard.process import foreign, launch
from bitshard.shards import gather
from bitshard.weights.guards import Packed

logger = logging.getLogger(__name__)


def before_fsdp2() -> None:
    """Called while foreign code asks about a packed weight.

    Where that is accelerate, looking through a model before FSDP2 shards it, and the adapter around this weight has
    several dtypes, the trainable parameters of that model get one. The module around a 4-bit layer is its adapter where
    it holds no other; it lies within one unit of FSDP2, so that torch would have raised.
    """
    frame = foreign.asked_by(foreign.FSDP2_PREPARES)
    if frame is None:
        return
    model, name = frame.f_locals.get("model"), frame.f_locals.get("name")
    if isinstance(model, nn.Module) and isinstance(name, str) and mixes(model, name):
        unify(model, "FSDP2 wants one dtype among the trainable parameters of a unit")


def before_fsdp1(weight: torch.Tensor) -> None:
    """Called while foreign code asks for the size of a packed weight.

    Where that is FSDP1 looking through a model before it wraps a part of it, and an adapter in it has several dtypes,
    the trainable parameters of that model get one.
    """
    frame = foreign.asked_by(foreign.FSDP1_WRAPS)
    if frame is None:
        return
    model = frame.f_locals.get("module")
    packed = [name for name, p in model.named_parameters() if isinstance(p, Packed)] if _first(model, weight) else []
    if any(mixes(model, name) for name in packed):
        unify(model, f"FSDP1 of torch {torch.__version__} clips gradients of one dtype only")


def _first(model: object, weight: torch.Tensor) -> bool:
    """Whether `weight` is the first packed one of a module. FSDP1 asks each; one look through the module is enough."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    return next((p for p in parameters if isinstance(p, Packed)), None) is weight


def mixes(model: nn.Module, name: str) -> bool:
    """Whether the adapter around the 4-bit weight `name` is trained in several dtypes."""
    adapter = model.get_submodule(".".join(name.split(".")[:-2]))
    return sum(isinstance(p, Packed) for p in adapter.parameters()) == 1 and len(dtypes(trainable(adapter))) > 1


def unify(model: nn.Module, why: str) -> None:
    """Cast the trainable parameters of `model` to the widest of their dtypes, in place, and say so on rank 0."""
    parameters = trainable(model)
    if any(gather.is_dtensor(parameter) for parameter in parameters):
        return
    found = dtypes(parameters)
    widest = functools.reduce(torch.promote_types, found)
    for parameter in parameters:
        parameter.data = parameter.data.to(widest)
    if launch.first_rank():
        logger.warning(
            "%s, and those of this model have %s: they are now %s, all %d, and so is the adapter that is saved.",
            why,
            " and ".join(sorted(map(dtype_name, found))),
            dtype_name(widest),
            len(parameters),
        )


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of `module` that are trained, of a float dtype."""
    return [p for p in module.parameters() if p.requires_grad and p.dtype.is_floating_point]


def dtypes(parameters: list[nn.Parameter]) -> set[torch.dtype]:
    return {parameter.dtype for parameter in parameters}
