"""State of a sharded parameter: each rank has that of its own shard, and a state dict holds it as DTensors.

What a state dict has for a parameter of global shape S, n elements, blocks of 256 along the flattened shard:

    state1, state2   S, or (2, *S) for AdEMAMix             placed as the parameter is
    absmax           one process, as in bitsandbytes        [blocks]
                     shards of rows, rows of whole blocks   [rows, blocks of a row]      placed as the parameter is
                     shards of other rows                   [rows, 1 + blocks that a row can touch], the same;
                                                            first how far into its block a row begins (`by_rows`)
                     shards that are not rows               [shards, blocks of the largest, 1], a row a rank

AdEMAMix's absmax1 has a leading 2 in each. But for the last the form does not depend on the number of ranks, so that
torch.distributed.checkpoint hands each of another number what belongs to its rows. The state arrives exactly where its
blocks begin at the same elements: float32 always; 8 bits on the same number of ranks, with rows of whole blocks (a
multiple of 256 elements), and wherever the new shards and the old ones begin at multiples of 256. Else 8-bit values
are quantized again in blocks of the new shard: each is off by at most half a step of its map, 0.9 / 128 of the largest
value in its block. No rank asks another one.
"""

from __future__ import annotations

from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from bitshard import ops
from bitshard.shards.gather import is_dtensor, without_gaps

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
    if rows_per_shard(p) is None:
        shards = prod(p.device_mesh.size(dim) for dim in shard_dims(p))
        return (shards, ops.block_count(largest_shard(p), BLOCKSIZE), 1)
    row = prod(p.shape[1:])
    return (p.shape[0], row // BLOCKSIZE if row % BLOCKSIZE == 0 else 1 + touched(row))


def touched(row: int) -> int:
    """How many blocks a row of this many elements can touch, in a shard that begins with a row."""
    return (BLOCKSIZE - gcd(row, BLOCKSIZE) + row - 1) // BLOCKSIZE + 1


def by_rows(absmax: Tensor, rows: int, row: int) -> Tensor:
    """Scales [..., blocks] of a shard of `rows` rows as [..., rows, 1 + touched(row)].

    A row has the place of its first element in its block, 0 to 255, and the scales of the blocks that it touches,
    zeros behind them.
    """
    first = torch.arange(rows, dtype=torch.int64, device=absmax.device) * row
    index = first.div(BLOCKSIZE, rounding_mode="floor")[:, None] + torch.arange(
        touched(row), dtype=torch.int64, device=absmax.device
    )
    used = index <= (first + row - 1).div(BLOCKSIZE, rounding_mode="floor")[:, None]
    scales = (
        absmax[..., index.where(used, torch.zeros_like(index))] * used
        if rows
        else absmax.new_zeros((*absmax.shape[:-1], *index.shape))
    )
    phase = (first % BLOCKSIZE).to(absmax.dtype)[:, None].expand(*absmax.shape[:-1], rows, 1)
    return torch.cat([phase, scales], -1)


def of_rows(codes: Tensor, table: Tensor, qmap: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """(codes, scales) of a shard from its codes, rows first, and what `by_rows` made of the scales of these rows.

    The codes themselves where rows begin at the same places in blocks as they do here, else quantized again.
    ValueError where a place is none.
    """
    rows, blocks = table.shape[0], ops.block_count(codes.numel(), BLOCKSIZE)
    if blocks == 0:
        return codes, table.new_zeros((0,))
    row = codes.numel() // rows
    place, scales = table[:, 0], table[:, 1:]
    if not ((place >= 0) & (place <= scales.shape[1] * BLOCKSIZE - row) & (place == place.floor())).all():
        raise ValueError(f"{name}: the places of rows in blocks are no whole numbers from 0 to {BLOCKSIZE - 1}")
    first = torch.arange(rows, dtype=torch.int64, device=table.device) * row
    if not torch.equal(place.long(), first % BLOCKSIZE):
        return _quantize(_of_places(codes.reshape(rows, row), place.long(), scales, qmap), qmap, codes.shape)
    index = first.div(BLOCKSIZE, rounding_mode="floor")[:, None] + torch.arange(
        scales.shape[1], dtype=torch.int64, device=table.device
    )
    used = index <= (first + row - 1).div(BLOCKSIZE, rounding_mode="floor")[:, None]
    return codes, table.new_zeros((blocks,)).index_put((index[used],), scales[used])


def _of_places(codes: Tensor, place: Tensor, scales: Tensor, qmap: Tensor) -> Tensor:
    """float32 values of codes [rows, row]; some rows at a time, for the place of each element takes eight bytes."""
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    step = torch.arange(codes.shape[1], dtype=torch.int64, device=codes.device)
    some = max(1, 2**22 // codes.shape[1])
    for begin in range(0, codes.shape[0], some):
        part = slice(begin, begin + some)
        block = (place[part, None] + step).div(BLOCKSIZE, rounding_mode="floor")
        values[part] = qmap[codes[part].int()] * scales[part].gather(1, block)
    return values


def _quantize(values: Tensor, qmap: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    codes, scales = ops.quantize_blockwise(values.contiguous(), qmap, ops.empty(qmap.device), BLOCKSIZE)
    return codes.view(shape), scales


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
    mesh, size = p.device_mesh, torch.Size(shape)
    entry = DTensor.from_local(value, mesh, placements, run_check=False, shape=size, stride=stride)
    return without_gaps(entry) if any(where.is_shard() and where.dim > 0 for where in placements) else entry


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
    front, shape, part = tuple(absmax.shape[:-1]), scale_shape(p), local(p)
    if len(shape) == 3:
        absmax = torch.nn.functional.pad(absmax, (0, shape[1] - absmax.shape[-1])).view(*front, 1, *shape[1:])
    elif len(shape) == 2 and prod(p.shape[1:]) % BLOCKSIZE == 0:
        absmax = absmax.view(*front, part.shape[0], shape[1])
    elif len(shape) == 2:
        absmax = by_rows(absmax, part.shape[0], prod(p.shape[1:]))
    return placed(absmax, p, (*front, *shape), len(front), along_rows=True)


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
    part, split = own_part(codes, p, lead, name), is_dtensor(absmax)
    if split:
        absmax = _own_scales(absmax, p, lead, name)
    elif absmax.dim() not in (lead + 1, lead + 2) or tuple(absmax.shape[:lead]) != (2,) * lead:
        raise ValueError(f"{name}: scales of shape {tuple(absmax.shape)} are none of blocks of {BLOCKSIZE}")
    if not lead:
        return _of_shard(part, absmax, qmap, p, name) if split else _of_whole(codes, absmax, qmap, p, part, name)
    pairs = [
        _of_shard(part[i], absmax[i], qmap, p, name)
        if split
        else _of_whole(codes[i], absmax[i], qmap, p, part[i], name)
        for i in range(2)
    ]
    return torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])


def _own_scales(absmax: Tensor, p: Tensor, lead: int, name: str) -> Tensor:
    """The local part of a DTensor that `scales_to_entry` made for a parameter of this shape."""
    shape = (*(2,) * lead, *scale_shape(p))
    if tuple(absmax.shape) != shape:
        raise ValueError(f"{name}: scales of shape {tuple(absmax.shape)}, the parameter's have {shape}")
    zeros = absmax._local_tensor.new_zeros((*shape[:lead], ops.block_count(local(p).numel(), BLOCKSIZE)))
    like = scales_to_entry(zeros, p) if is_dtensor(p) else p
    found = _of_same_mesh(absmax, like, name)
    if found.shape != like._local_tensor.shape:
        raise ValueError(
            f"{name}: this rank's scales have shape {tuple(found.shape)}, expected {tuple(like._local_tensor.shape)}"
        )
    return found


def _of_shard(part: Tensor, absmax: Tensor, qmap: Tensor, p: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """(codes, scales) of this rank from its parts of both."""
    if absmax.dim() == 2 and prod(p.shape[1:]) % BLOCKSIZE:
        return of_rows(part, absmax, qmap, name)
    return part, absmax.reshape(-1)[: ops.block_count(part.numel(), BLOCKSIZE)]


def _of_whole(codes: Tensor, absmax: Tensor, qmap: Tensor, p: Tensor, part: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """(codes, scales) of this rank from whole tensors."""
    n, rows = codes.numel(), codes.shape[0] if codes.dim() else 1
    row = n // max(rows, 1)
    start, slices = _start(p), own_slices(p)
    if absmax.dim() == 2 and row % BLOCKSIZE:
        if tuple(absmax.shape) != (rows, 1 + touched(row)):
            raise ValueError(_not_of(absmax, codes, name))
        if start is not None:
            return of_rows(part, absmax[slices[0]], qmap, name)
        codes, absmax = of_rows(_whole(codes, name), absmax, qmap, name)
    elif absmax.dim() == 2 and tuple(absmax.shape) != (rows, row // BLOCKSIZE):
        raise ValueError(_not_of(absmax, codes, name))
    absmax, blocks = absmax.reshape(-1), ops.block_count(n, BLOCKSIZE)
    if absmax.numel() != blocks:
        raise ValueError(f"{name}: {absmax.numel()} scales, {blocks} blocks of {BLOCKSIZE}")
    if start is None:
        return _quantize(_dequantize(_whole(codes, name), absmax, qmap).view(codes.shape)[slices], qmap, part.shape)
    first, shift = divmod(start, BLOCKSIZE)
    absmax = absmax[first : ops.block_count(start + part.numel(), BLOCKSIZE)]
    if shift == 0 or part.numel() == 0:
        return part, absmax[: ops.block_count(part.numel(), BLOCKSIZE)]
    codes = torch.nn.functional.pad(part.reshape(-1), (shift, 0))  # the block's first ones are another rank's
    return _quantize(_dequantize(codes, absmax, qmap)[shift:], qmap, part.shape)


def _whole(codes: Tensor, name: str) -> Tensor:
    if is_dtensor(codes):
        raise ValueError(f"{name} is a DTensor and its scales are none: codes of other ranks are needed")
    return codes


def _not_of(absmax: Tensor, codes: Tensor, name: str) -> str:
    return (
        f"{name}: scales of shape {tuple(absmax.shape)} are none of blocks of {BLOCKSIZE} of a parameter of shape "
        f"{tuple(codes.shape)}"
    )


def _start(p: Tensor) -> int | None:
    """Where this rank's elements begin in the flattened parameter; None where they are not one stretch of it."""
    if not is_split(p):
        return 0
    return own_slices(p)[0].start * prod(p.shape[1:]) if rows_per_shard(p) is not None else None


def _dequantize(codes: Tensor, scales: Tensor, qmap: Tensor) -> Tensor:
    """float32 values of codes, flat."""
    codes, none = codes.reshape(-1).contiguous(), ops.empty(qmap.device)
    return ops.dequantize_blockwise(codes, scales.contiguous(), qmap, none, BLOCKSIZE, torch.float32)


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
