"""The container of packed bytes: which dtype it has in memory, and the same bytes in another one."""

from __future__ import annotations

import torch
from torch import Tensor

from bitshard.formats.kinds import FOUR_BIT, Kind
from bitshard.formats.state import VALUE_DTYPES, QuantState
from bitshard.process import launch


def container_dtype(weight_dtype: torch.dtype, quant_storage: torch.dtype, kind: Kind = FOUR_BIT) -> torch.dtype:
    """The dtype in which packed bytes are kept in memory, for a weight of `weight_dtype` and a declared storage dtype.

    This is the declared one, with one exception: if FSDP shards, an integer storage (the default, uint8) becomes the
    dtype of the weight. accelerate leaves integer parameters unsharded, and FSDP1 refuses them. Files keep the declared
    dtype. Stacks of experts are always kept in the dtype of their values, to which peft casts what it adds to them.
    """
    shards = launch.fsdp_launch() or launch.keeps_parts() or kind.stacked
    return shardable_dtype(weight_dtype, quant_storage, kind) if shards else quant_storage


def shardable_dtype(weight_dtype: torch.dtype, container: torch.dtype, kind: Kind = FOUR_BIT) -> torch.dtype:
    """The container that FSDP can shard: a float one unchanged, else the dtype of the weight if it can hold bytes."""
    unchanged = container.is_floating_point and not kind.stacked
    if unchanged or weight_dtype not in VALUE_DTYPES.values():
        return container
    return weight_dtype


def repack(packed: Tensor, dtype: torch.dtype, state: QuantState) -> Tensor:
    """The same packed bytes as a column of another storage dtype, zero-padded to whole elements of it."""
    if packed.dtype is dtype:
        return packed.reshape(-1, 1)
    data = packed.detach().contiguous().flatten().view(torch.uint8)
    n_bytes = state.packed_elements(dtype.itemsize) * dtype.itemsize
    if n_bytes > data.numel():
        data = torch.cat([data, data.new_zeros(n_bytes - data.numel())])
    elif n_bytes < data.numel():
        data = data[:n_bytes].clone()
    return data.view(dtype).view(-1, 1)


def repack_whole(packed: Tensor, state: QuantState, dtype: torch.dtype, key: str) -> Tensor:
    """`repack` of a whole weight [n, 1]; ValueError that names `key` unless its size is that of `state`."""
    expected = state.packed_elements(packed.element_size())
    if packed.numel() != expected:
        raise ValueError(
            f"{key}: {packed.numel()} elements of {packed.dtype} where shape {list(state.shape)} packs into {expected}"
        )
    return repack(packed, dtype, state)
