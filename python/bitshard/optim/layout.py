"""State of a sharded parameter: each rank has that of its own shard, and a state dict holds it as DTensors.

What a state dict has for a parameter of global shape S, n elements, blocks of 256 along the flattened shard:

    state1, state2   S, or (2, *S) for AdEMAMix        placed as the parameter is
    absmax           one process, as in bitsandbytes   [blocks]
                     rows of whole blocks              [rows, blocks of a row]          placed as the parameter is
                     equal shards of whole blocks      [blocks of all shards]           Shard(0)
                     other shards of rows              [shards, blocks of the largest]  a row a rank, padded with zeros
    shards that are not rows          [shards, blocks of the largest, 1]

In the first three the scales are those of the whole parameter in order, so they fit every number of ranks; the others
fit the ranks that wrote them. AdEMAMix's absmax1 has a leading 2 in each.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from bitshard import ops
from bitshard.gather import is_dtensor

BLOCKSIZE = 256


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, any other tensor itself; without its gradient."""
    return tensor._local_tensor.detach() if is_dtensor(tensor) else tensor.detach()


def is_split(tensor: Tensor) -> bool:
    """Whether other ranks hold other parts of this parameter."""
    return is_dtensor(tensor) and any(
        placement.is_shard() and tensor.device_mesh.size(dim) > 1 for dim, placement in enumerate(tensor.placements)
    )


def shard_dims(p: Tensor) -> list[int]:
    """Dimensions of the mesh over which a DTensor is sharded."""
    return [dim for dim, placement in enumerate(p.placements) if placement.is_shard()]


def rows_per_shard(p: Tensor) -> int | None:
    """Rows of a full shard where a DTensor is sharded along rows by one dimension of its mesh, else None."""
    dims = shard_dims(p)
    if len(dims) != 1 or p.placements[dims[0]].dim != 0 or type(p.placements[dims[0]]).__name__ != "Shard":
        return None
    return -(-p.shape[0] // p.device_mesh.size(dims[0]))


def largest_shard(p: Tensor) -> int:
    """Elements of the largest shard of a DTensor."""
    shape = list(p.shape)
    for dim in shard_dims(p):
        place = p.placements[dim].dim
        shape[place] = -(-shape[place] // p.device_mesh.size(dim))
    return prod(shape)


def scale_shape(p: Tensor) -> tuple[int, ...]:
    """Shape of a scale tensor in a state dict, without AdEMAMix's leading 2; see the module's table."""
    if not is_dtensor(p) or not shard_dims(p):
        return (ops.block_count(p.numel(), BLOCKSIZE),)
    rows, row = rows_per_shard(p), prod(p.shape[1:])
    shards = prod(p.device_mesh.size(dim) for dim in shard_dims(p))
    largest = ops.block_count(largest_shard(p), BLOCKSIZE)
    if rows is None:
        return (shards, largest, 1)
    if row > 0 and row % BLOCKSIZE == 0:
        return (p.shape[0], row // BLOCKSIZE)
    if rows * shards == p.shape[0] and rows * row % BLOCKSIZE == 0:
        return (p.numel() // BLOCKSIZE,)
    return (shards, largest)


def blocks_are_global(p: Tensor) -> bool:
    """Whether the blocks of all shards are those of the whole parameter: each shard begins with a block."""
    shape = scale_shape(p)
    return len(shape) == 1 or (len(shape) == 2 and prod(p.shape[1:]) % BLOCKSIZE == 0 and shape[0] == p.shape[0])


def placed(value: Tensor, p: Tensor, shape: tuple[int, ...], lead: int, along_rows: bool) -> Tensor:
    """A local part of a tensor of global `shape` as a DTensor on the mesh of `p`; `lead` dimensions come first."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements = []
    for placement in p.placements:
        if not placement.is_shard():
            placements.append(Replicate())
        elif along_rows:
            placements.append(Shard(lead))
        elif lead == 0:
            placements.append(placement)
        else:
            placements.append(_shifted(placement, lead))
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(value, p.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _shifted(placement, lead: int):
    """The placement of dimension d as one of dimension d + lead."""
    from torch.distributed.tensor import Shard

    if type(placement) is Shard:
        return Shard(placement.dim + lead)
    return type(placement)(placement.dim + lead, split_factor=placement.split_factor)


def values_to_entry(value: Tensor, p: Tensor, lead: int) -> Tensor:
    """state1 or state2 of this rank as an entry of a state dict; `lead` is 1 for AdEMAMix's pair, else 0."""
    if not is_dtensor(p):
        return value
    return placed(value, p, (*value.shape[:lead], *p.shape), lead, along_rows=False)


def scales_to_entry(absmax: Tensor, p: Tensor) -> Tensor:
    """absmax1 or absmax2 of this rank, [blocks] or [2, blocks], as an entry of a state dict."""
    if not is_dtensor(p):
        return absmax
    lead, shape = absmax.dim() - 1, scale_shape(p)
    front = tuple(absmax.shape[:lead])
    if not blocks_are_global(p):
        absmax = torch.nn.functional.pad(absmax, (0, shape[1] - absmax.shape[-1])).view(*front, 1, *shape[1:])
    elif len(shape) == 2:
        absmax = absmax.view(*front, -1, shape[1])
    return placed(absmax, p, (*front, *shape), lead, along_rows=True)


def own_part(value: Tensor, p: Tensor, lead: int, name: str) -> Tensor:
    """This rank's part of an entry for values: of a DTensor placed as `p` is, or of a whole tensor.

    ValueError where the shape is another, or the placement.
    """
    expected = (*value.shape[:lead], *p.shape)
    if tuple(value.shape) != expected or (lead and value.shape[0] != 2):
        want = (2, *p.shape) if lead else tuple(p.shape)
        raise ValueError(f"{name} has shape {tuple(value.shape)}, the parameter needs {want}")
    if is_dtensor(value):
        return _of_same_mesh(value, values_to_entry(value._local_tensor, p, lead) if is_dtensor(p) else p, name)
    return value[(slice(None),) * lead + own_slices(p)]


def _of_same_mesh(value: Tensor, like: Tensor, name: str) -> Tensor:
    """The local part of a DTensor that is placed as `like` is; else ValueError."""
    if not is_dtensor(like):
        raise ValueError(f"{name} is a DTensor and its parameter is not: load a full state dict")
    if value.device_mesh != like.device_mesh or tuple(value.placements) != tuple(like.placements):
        raise ValueError(
            f"{name} is placed {tuple(value.placements)} on {value.device_mesh}, its parameter's state "
            f"{tuple(like.placements)} on {like.device_mesh}"
        )
    return value._local_tensor


def own_slices(p: Tensor) -> tuple[slice, ...]:
    """Where this rank's part lies in the whole parameter."""
    if not is_dtensor(p):
        return (slice(None),) * p.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    return tuple(slice(start, start + size) for size, start in zip(shape, offset, strict=True))


def own_codes(codes: Tensor, absmax: Tensor, qmap: Tensor, p: Tensor, lead: int, name: str) -> tuple[Tensor, Tensor]:
    """This rank's (codes, scales) of 8-bit entries: exact where the blocks are the same, else quantized again.

    Entries are DTensors of this mesh, or whole tensors that any number of ranks wrote. ValueError where the scales
    are not those of blocks of 256.
    """
    part = own_part(codes, p, lead, name)
    blocks = ops.block_count(part[0].numel() if lead else part.numel(), BLOCKSIZE)
    if is_dtensor(absmax):
        return part, _own_scales(absmax, p, lead, blocks, name)
    front = (2,) * lead
    if tuple(absmax.shape[:lead]) != front or absmax.dim() - lead not in (1, 2):
        raise ValueError(f"{name}: scales of shape {tuple(absmax.shape)} are none of blocks of {BLOCKSIZE}")
    if not lead:
        return _own_codes(codes, absmax, qmap, p, part, blocks, name)
    pairs = [_own_codes(codes[i], absmax[i], qmap, p, part[i], blocks, name) for i in range(2)]
    return torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])


def _own_scales(absmax: Tensor, p: Tensor, lead: int, blocks: int, name: str) -> Tensor:
    """Scales from a DTensor that `scales_to_entry` made for the same parameter."""
    shape = (*(2,) * lead, *scale_shape(p))
    if tuple(absmax.shape) != shape:
        raise ValueError(f"{name}: scales of shape {tuple(absmax.shape)}, the parameter's have {shape}")
    zeros = absmax._local_tensor.new_zeros((*shape[:lead], blocks))
    like = scales_to_entry(zeros, p) if is_dtensor(p) else p
    found = _of_same_mesh(absmax, like, name)
    return found.reshape(*shape[:lead], -1)[..., :blocks].contiguous()


def _own_codes(codes, absmax, qmap, p, part, blocks: int, name: str) -> tuple[Tensor, Tensor]:
    """(codes, scales) of this rank from whole tensors."""
    n = codes.numel()
    row = n // codes.shape[0] if codes.dim() and codes.shape[0] else 0
    total = ops.block_count(n, BLOCKSIZE)
    whole_rows = row > 0 and row % BLOCKSIZE == 0 and tuple(absmax.shape) == (codes.shape[0], row // BLOCKSIZE)
    if absmax.dim() == 1 or whole_rows:
        if absmax.numel() != total:
            raise ValueError(f"{name}: {absmax.numel()} scales, {total} blocks of {BLOCKSIZE}")
        sizes, scales = [n], [absmax.reshape(-1)]
    else:
        sizes, scales = _parts(codes, absmax, row, name)
    start = _start(p)
    if start is not None and len(sizes) == 1 and start % BLOCKSIZE == 0:
        return part, scales[0][start // BLOCKSIZE :][:blocks].clone()
    if not is_split(p) and all(size % BLOCKSIZE == 0 for size in sizes[:-1]):
        return part, torch.cat(scales)
    if start is not None and (index := _same_part(sizes, start, part.numel())) is not None:
        return part, scales[index].clone()
    values = _dequantize(codes, sizes, scales, qmap)[own_slices(p)]
    return ops.quantize_blockwise(values.contiguous(), qmap, ops.empty(qmap.device), BLOCKSIZE)


def _parts(codes: Tensor, absmax: Tensor, row: int, name: str) -> tuple[list[int], list[Tensor]]:
    """(elements, scales) of each shard that wrote a padded row of scales."""
    shards = absmax.shape[0]
    rows = -(-codes.shape[0] // max(shards, 1)) if codes.dim() else 0
    left, sizes = codes.numel(), []
    for _ in range(shards):
        sizes.append(min(left, rows * row))
        left -= sizes[-1]
    if left or absmax.shape[1] != ops.block_count(rows * row, BLOCKSIZE):
        raise ValueError(
            f"{name}: scales of shape {tuple(absmax.shape)} are none of blocks of {BLOCKSIZE} of a parameter of shape "
            f"{tuple(codes.shape)}"
        )
    return sizes, [absmax[i, : ops.block_count(size, BLOCKSIZE)] for i, size in enumerate(sizes)]


def _start(p: Tensor) -> int | None:
    """Where this rank's elements begin in the flattened parameter; None where they are not one stretch of it."""
    if not is_split(p):
        return 0
    return own_slices(p)[0].start * prod(p.shape[1:]) if rows_per_shard(p) is not None else None


def _same_part(sizes: list[int], start: int, size: int) -> int | None:
    """Which of the shards that wrote the entries is this rank's."""
    begin = 0
    for index, other in enumerate(sizes):
        if (begin, other) == (start, size):
            return index
        begin += other
    return None


def _dequantize(codes: Tensor, sizes: list[int], scales: list[Tensor], qmap: Tensor) -> Tensor:
    """float32 values of whole codes whose shards had blocks of their own."""
    none, parts = ops.empty(qmap.device), codes.reshape(-1).split(sizes)
    values = [
        ops.dequantize_blockwise(part.contiguous(), scale.contiguous(), qmap, none, BLOCKSIZE, torch.float32)
        for part, scale in zip(parts, scales, strict=True)
    ]
    return torch.cat(values).view(codes.shape)


def global_norm(square: Tensor, p: Tensor) -> Tensor:
    """The root of a sum of squares, [1] or 0-dim, over all shards of `p`. Every rank must call it."""
    if not is_split(p):
        return square.sqrt()
    import torch.distributed as dist

    total = square.clone()
    for dim in shard_dims(p):
        dist.all_reduce(total, group=p.device_mesh.get_group(dim))
    return total.sqrt()


def describe(p: Tensor) -> dict[str, Any]:
    """Shape, dtype and device, for messages."""
    return {"shape": tuple(p.shape), "dtype": p.dtype, "device": str(p.device)}
