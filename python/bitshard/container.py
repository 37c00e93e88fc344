"""The container of packed bytes: which dtype it has in memory, and the same bytes in another one."""

from __future__ import annotations

import torch
from torch import Tensor

from bitshard import launch, ops
from bitshard.state import VALUE_DTYPES, QuantState


def container_dtype(weight_dtype: torch.dtype, quant_storage: torch.dtype) -> torch.dtype:
    """The dtype in which packed bytes are kept in memory, for a weight of `weight_dtype` and a declared storage dtype.

    It is the declared one, except that an integer storage (the default, uint8) becomes the dtype of the weight where
    FSDP shards: accelerate leaves integer parameters unsharded and FSDP1 refuses them. Files keep the declared dtype.
    """
    shards = launch.fsdp_launch() or launch.keeps_parts()
    return shardable_dtype(weight_dtype, quant_storage) if shards else quant_storage


def shardable_dtype(weight_dtype: torch.dtype, container: torch.dtype) -> torch.dtype:
    """The container that FSDP can shard: a float one as it is, else the dtype of the weight, where that can be one."""
    if container.is_floating_point or weight_dtype not in VALUE_DTYPES.values():
        return container
    return weight_dtype


def repack(packed: Tensor, dtype: torch.dtype, n: int) -> Tensor:
    """The same packed bytes of n codes as a column of another storage dtype, zero-padded to whole elements of it."""
    if packed.dtype is dtype:
        return packed.reshape(-1, 1)
    data = packed.detach().contiguous().flatten().view(torch.uint8)
    n_bytes = ops.storage_elements(n, dtype.itemsize) * dtype.itemsize
    if n_bytes > data.numel():
        data = torch.cat([data, data.new_zeros(n_bytes - data.numel())])
    elif n_bytes < data.numel():
        data = data[:n_bytes].clone()
    return data.view(dtype).view(-1, 1)


def repack_whole(packed: Tensor, state: QuantState, dtype: torch.dtype, key: str) -> Tensor:
    """`repack` of a whole weight [n, 1]; ValueError that names `key` unless its size is that of `state`."""
    n = state.shape.numel()
    expected = ops.storage_elements(n, packed.element_size())
    if packed.numel() != expected:
        raise ValueError(
            f"{key}: {packed.numel()} elements of {packed.dtype} where shape {list(state.shape)} packs into {expected}"
        )
    return repack(packed, dtype, n)
