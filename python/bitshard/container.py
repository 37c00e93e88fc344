"""The container of packed bytes: which dtype it has in memory, and the same bytes in another one."""

from __future__ import annotations

import functools
import logging
import os

import torch
from torch import Tensor

from bitshard import _C
from bitshard.state import VALUE_DTYPES, QuantState, dtype_name

logger = logging.getLogger(__name__)


def accelerate_fsdp() -> bool:
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true", "yes", "y", "on", "t")


def fsdp_launch() -> bool:
    """Whether this process may be one that shards: accelerate's FSDP switch, torchrun's environment, a process group.

    One rank counts too: torch before 2.12 shards no integers there either.
    """
    if accelerate_fsdp() or ("RANK" in os.environ and "WORLD_SIZE" in os.environ):
        return True
    return process_group()


def process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def container_dtype(weight_dtype: torch.dtype, quant_storage: torch.dtype) -> torch.dtype:
    """The dtype in which packed bytes are kept in memory, for a weight of `weight_dtype` and a declared storage dtype.

    It is the declared one, except that an integer storage (the default, uint8) becomes the dtype of the weight in a
    process that shards: accelerate leaves integer parameters unsharded and FSDP1 refuses them. Files keep the declared
    dtype.
    """
    if quant_storage.is_floating_point or weight_dtype not in VALUE_DTYPES.values() or not fsdp_launch():
        return quant_storage
    return weight_dtype


@functools.cache
def warn_unsharded(container: torch.dtype) -> None:
    """Once per process."""
    logger.warning(
        "These 4-bit weights are kept as %s, because they were loaded before this process was known to shard, and "
        "accelerate leaves integer weights whole on every rank: nothing of them will be sharded. Load the model in the "
        "launched process (accelerate launch, torchrun), or set bnb_4bit_quant_storage to the dtype of the model.",
        dtype_name(container),
    )


def repack(packed: Tensor, dtype: torch.dtype, n: int) -> Tensor:
    """The same packed bytes of n codes as a column of another storage dtype, zero-padded to whole elements of it."""
    if packed.dtype is dtype:
        return packed.reshape(-1, 1)
    data = packed.detach().contiguous().flatten().view(torch.uint8)
    n_bytes = _C.storage_elements(n, dtype.itemsize) * dtype.itemsize
    if n_bytes > data.numel():
        data = torch.cat([data, data.new_zeros(n_bytes - data.numel())])
    elif n_bytes < data.numel():
        data = data[:n_bytes].clone()
    return data.view(dtype).view(-1, 1)


def repack_whole(packed: Tensor, state: QuantState, dtype: torch.dtype, key: str) -> Tensor:
    """`repack` of a whole weight [n, 1]; ValueError that names `key` unless its size is that of `state`."""
    n = state.shape.numel()
    expected = _C.storage_elements(n, packed.element_size())
    if packed.numel() != expected:
        raise ValueError(
            f"{key}: {packed.numel()} elements of {packed.dtype} where shape {list(state.shape)} packs into {expected}"
        )
    return repack(packed, dtype, n)
