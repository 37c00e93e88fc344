"""What can fail on one rank when a layer is gathered, tried before the ranks enter the collective.

A rank that fails on the way into a collective leaves the others waiting in it. So each looks at its shards and asks for
the memory first; the ranks agree that all is well, and only then they gather.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from bitshard import ops
from bitshard.sharding.checkpoints import merging
from bitshard.sharding.checkpoints.contents import Piece
from bitshard.shards import gather
from bitshard.shards.shard import PackedShard


def piece(found: Piece) -> None:
    """ValueError unless this rank's shards of a piece are what its layout says; OutOfMemoryError without the room."""
    needed: dict[torch.device, int] = {}

    def add(tensor: Any, name: str) -> None:
        if gather.is_dtensor(tensor):
            device = torch.device(tensor.device_mesh.device_type)
            needed[device] = needed.get(device, 0) + _checked(tensor, name)

    for name in found.names:
        held = found.held.get(name)
        if held is not None and held.state.part is not None:
            device = held.state.part.rows.device
            needed[device] = needed.get(device, 0) + _checked_part(held.state.part, found.name_of(name))
        if held is None or held.shard is None:
            add(found.tensor(name), found.name_of(name))
        else:
            add(held.shard, found.name_of(name))
            gather.cut_scales(held.shard)
            _check_scales(held.state.sharded, found.name_of(name))
    if found.tuner is not None:
        for tensor in merging.adapter_tensors(found.tuner):
            add(tensor, f"{found.key}adapter")
    for device, count in needed.items():
        _room(count, device)


def unit(found: Any) -> None:
    """OutOfMemoryError unless there is room for the whole flat parameter of a unit of FSDP1."""
    handle = getattr(found, "_handle", None)
    flat = getattr(handle, "flat_param", None)
    size = getattr(flat, "_padded_unsharded_size", None)
    if size is not None:
        _room(math.prod(size) * flat.element_size(), handle.device)


def _room(count: int, device: torch.device) -> None:
    """OutOfMemoryError unless `device` has `count` bytes; it keeps them at hand where torch caches what is freed."""
    torch.empty(count, dtype=torch.uint8, device=device)


def _checked(tensor: Any, name: str) -> int:
    """Bytes of the whole of a DTensor. ValueError unless this rank's shard is of the length that its layout says."""
    from torch.distributed.tensor import _utils

    local, whole = tensor._local_tensor, tensor._spec.tensor_meta.shape
    local = local.plain() if isinstance(local, PackedShard) else local
    shape = getattr(_utils, "compute_local_shape_and_global_offset", None)
    if shape is not None:
        expected = tuple(shape(whole, tensor.device_mesh, tensor.placements)[0])
        if tuple(local.shape) != expected and local.numel() + math.prod(expected) > 0:
            raise ValueError(f"{name}: this rank's shard is {list(local.shape)}, expected {list(expected)}")
    there = local.untyped_storage().nbytes()
    if there < local.numel() * local.element_size():
        raise ValueError(f"{name}: {there} bytes of this rank's shard are there, expected {local.nbytes}")
    return whole.numel() * local.element_size()


def _checked_part(part: Any, name: str) -> int:
    """Bytes of the whole of a weight that was loaded in parts. ValueError unless this rank's rows are all there."""
    _, length = ops.rank_slice(part.size[0], part.world, part.rank)
    if part.rows.numel() != length * math.prod(part.size[1:]):
        raise ValueError(f"{name}: this rank has {part.rows.numel()} of the packed rows, expected {length}")
    _check_scales(part.state.sharded, name)
    return part.size.numel() * part.rows.element_size()


def _check_scales(scales: Any, name: str) -> None:
    """ValueError unless this rank's chunk of the block scales has all its entries."""
    if scales is not None and scales.own.numel() != scales.length:
        raise ValueError(f"{name}: this rank has {scales.own.numel()} block scales, expected {scales.length}")
