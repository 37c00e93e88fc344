"""The state dict entries beside a sharded packed weight: DTensors over what this rank keeps.

The scales are `Shard(0)` as the weight is, everything small is `Replicate()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from bitshard.formats.state import QuantState
from bitshard.shards import gather

BLOB_PREFIX = "quant_state.bitsandbytes__"
# The JSON entry of a state dict is padded with spaces to a multiple of this: its length depends on the digits of the
# offset, and torch.distributed.checkpoint loads into tensors of the saved size only. JSON ignores the spaces.
_BLOB_BYTES = 512


def state_of(weight: DTensor) -> QuantState:
    """The quantization state of a sharded packed weight."""
    return weight._local_tensor.origin.state


def sharded_entries(weight: DTensor) -> dict[str, DTensor]:
    """The scale entries of a sharded packed weight by name ("absmax", "quant_map", ...).

    The scales are cut here if no gather has done it.
    """
    gather.cut_scales(weight)
    state, device = state_of(weight), weight._local_tensor.device
    own = state.clone()
    if state.sharded is not None:
        own.absmax, own.sharded = state.sharded.own, None
    return {
        name: _entry(name, value.to(device), weight, state.absmax.size())
        for name, value in own.as_dict(packed=True).items()
    }


def _entry(name: str, value: torch.Tensor, weight: DTensor, scales: torch.Size) -> DTensor:
    if name == "absmax":
        return gather.like(value, weight, scales)
    if name.startswith(BLOB_PREFIX):
        value = padded_blob(value)
    mesh = weight.device_mesh
    return gather.from_local(value, mesh, [Replicate()] * mesh.ndim)


def padded_blob(blob: torch.Tensor) -> torch.Tensor:
    """The JSON entry in the length that sharded state dicts give it."""
    return nn.functional.pad(blob, (0, -blob.numel() % _BLOB_BYTES), value=ord(" "))


def differences(theirs: QuantState, ours: QuantState) -> Iterator[tuple[str, Any, Any]]:
    """(name, theirs, ours) of what two states must agree in for one's bytes and scales to take the other's place."""
    for name in ours.kind.format:
        if getattr(theirs, name) != getattr(ours, name):
            yield name, getattr(theirs, name), getattr(ours, name)
