"""One dtype for what is trained around 4-bit layers, where accelerate hands a model to FSDP2.

FSDP2 wants one dtype among the trainable parameters of a unit. accelerate upcasts those of every other model, in mixed
precision, but passes over a model with 4-bit weights; and trl casts adapters of a 4-bit base to bfloat16 but keeps
DoRA's magnitudes in float32, which bfloat16 would freeze. The first forward would raise.

Nobody is patched: accelerate asks each packed weight whether it is of a float dtype, and the answer looks at who asks.
In another release, where nobody asks so, nothing is cast and torch raises.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import nn

from bitshard import gather
from bitshard.guards import Packed, asker
from bitshard.state import dtype_name

logger = logging.getLogger(__name__)


def before_fsdp2() -> None:
    """Called while foreign code asks about a packed weight.

    Where that is accelerate, looking through a model before FSDP2 shards it, and the adapter around this weight has
    several dtypes, the trainable parameters of that model get one. The module around a 4-bit layer is its adapter where
    it holds no other; it lies within one unit of FSDP2, so that torch would have raised.
    """
    frame = asker()
    if frame is None or frame.f_code.co_name != "fsdp2_prepare_model":
        return
    model, name = frame.f_locals.get("model"), frame.f_locals.get("name")
    if not isinstance(model, nn.Module) or not isinstance(name, str):
        return
    adapter = model.get_submodule(".".join(name.split(".")[:-2]))
    if sum(isinstance(p, Packed) for p in adapter.parameters()) == 1 and len(dtypes(trainable(adapter))) > 1:
        unify(model)


def unify(model: nn.Module) -> None:
    """Cast the trainable parameters of `model` to the widest of their dtypes, in place, and say so on rank 0."""
    parameters = trainable(model)
    if any(gather.is_dtensor(parameter) for parameter in parameters):
        return
    found = dtypes(parameters)
    widest = functools.reduce(torch.promote_types, found)
    for parameter in parameters:
        parameter.data = parameter.data.to(widest)
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0:
        logger.warning(
            "FSDP2 wants one dtype among the trainable parameters of a unit and found %s: they are now %s, all %d, "
            "and so is the adapter that is saved.",
            " and ".join(sorted(map(dtype_name, found))),
            dtype_name(widest),
            len(parameters),
        )


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of `module` that are trained, of a float dtype."""
    return [p for p in module.parameters() if p.requires_grad and p.dtype.is_floating_point]


def dtypes(parameters: list[nn.Parameter]) -> set[torch.dtype]:
    return {parameter.dtype for parameter in parameters}
