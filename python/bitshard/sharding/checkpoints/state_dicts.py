"""Whole state dicts of sharded models: written and read as a checkpoint file has them."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor

from bitshard.formats.container import repack_whole
from bitshard.sharding.checkpoints import gathering
from bitshard.sharding.weights.state_entries import BLOB_PREFIX, padded_blob
from bitshard.shards import gather
from bitshard.weights.inventory import holders

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")  # in module names, not in state dicts

_PARAMETRIZED = re.compile(r"(^|\.)parametrizations\.(\w+)\.original$")  # saved under the parameter's own name


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The whole state dict on rank 0's CPU, as a checkpoint file has it: plain tensors, packed weights in the declared
    `quant_storage`, all scales. The other ranks get an empty dict. A collective.

    `bitshard.fsdp.save_pretrained` writes the same into files without ever holding all of it.
    (torch's `get_model_state_dict(full_state_dict=True)` gives the same under FSDP2, with padded JSON entries.)
    """
    storages = {key: (held.state, held.storage) for key, held in _keys(model).items()}
    keep = not dist.is_initialized() or dist.get_rank() == 0
    full = {}
    with _full_context(model):
        state_dict = model.state_dict()
    for key, value in state_dict.items():
        if isinstance(value, DTensor):
            value = gather.whole(value)
        if keep and isinstance(value, torch.Tensor):
            value = value.cpu()
            full[key] = repack_whole(value, *storages[key], key) if key in storages else value
        elif keep:
            full[key] = value
    for key, (state, _) in storages.items():
        full = state.kind.filed(key, full, state)
    return full


def load_full_state_dict(
    model: nn.Module, state_dict: dict[str, Any], *, broadcast_from_rank0: bool = False, strict: bool = True
) -> None:
    """Load whole tensors, packed in any storage dtype, into a model sharded by FSDP2 or FSDP1. A collective.

    Every rank has `state_dict`, or under FSDP2 with `broadcast_from_rank0` rank 0 alone. ValueError for sizes that do
    not fit.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    gathering.reshard(model)  # a forward alone leaves the root whole
    state_dict = dict(state_dict)
    for key, held in _keys(model).items():
        state_dict = held.kind.unfiled(key, state_dict, held.state)
        if key in state_dict:
            state_dict[key] = repack_whole(state_dict[key], held.state, held.weight.dtype, key)
        for name in [name for name in state_dict if name.startswith(f"{key}.{BLOB_PREFIX}")]:
            state_dict[name] = padded_blob(state_dict[name])
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast_from_rank0, strict=strict)
    set_model_state_dict(model, state_dict, options=options)


def _keys(model: nn.Module) -> dict[str, Any]:
    """State dict key of the weight -> holder, for every packed weight of `model`."""
    keys = {}
    for name, held in holders(model):
        key = f"{name}.{held.name}" if name else held.name
        for wrapper in _WRAPPERS:
            key = key.replace(wrapper, "")
        keys[_PARAMETRIZED.sub(r"\1\2", key)] = held
    return keys


def _full_context(model: nn.Module) -> Any:
    """FSDP1 shows whole tensors in a context only; FSDP2 and plain models need none."""
    if not FullyShardedDataParallel.fsdp_modules(model):
        return contextlib.nullcontext()
    config = FullStateDictConfig(rank0_only=False, offload_to_cpu=False)
    return FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config)
