"""Packed weights and scales in torch.distributed: parts as DTensors, gathering, flags that ranks agree on.

torch.distributed is imported only when a DTensor appears: a process that shards nothing does not need it.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import pickle
from typing import Any

import torch
from torch import Tensor

from bitshard import ops
from bitshard.formats.state import QuantState
from bitshard.shards.shard import PackedShard


def is_dtensor(value: Any) -> bool:
    """Whether `value` is a DTensor."""
    return hasattr(value, "device_mesh")


def plain(weight: Any) -> Any:
    """A DTensor over the same shard, without what a subclass adds (`sharding.weights.parameter.ShardedWeight`)."""
    from torch.distributed.tensor import DTensor

    return DTensor(weight._local_tensor, weight._spec, requires_grad=weight.requires_grad)


def from_local(local: Tensor, mesh: Any, placements: Any, **size: Any) -> Any:
    """DTensor.from_local, which takes a tensor to the devices of the mesh: this one stays where it is, offloaded."""
    from torch.distributed.tensor import DTensor

    if local.device.type == mesh.device_type or local.is_meta:
        return DTensor.from_local(local, mesh, placements, run_check=False, **size)
    spec = DTensor.from_local(local.to("meta"), mesh, placements, run_check=False, **size)._spec
    return DTensor(local, spec, requires_grad=False)


def like(local: Tensor, weight: Any, size: torch.Size) -> Any:
    """This rank's part of a column or vector of `size` as a DTensor, placed as the DTensor `weight` is."""
    return from_local(local, weight.device_mesh, weight.placements, shape=size, stride=(1,) * len(size))


def replicated(values: Tensor, mesh: Any) -> Any:
    """`values`, the same on every rank of `mesh`, as a DTensor that can be combined with plain tensors."""
    from torch.distributed.tensor import DTensor, Replicate

    out = DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)
    out.__class__ = _numbers_class()
    return out


@functools.cache
def _numbers_class() -> type:
    from torch.distributed.tensor import DTensor, Replicate

    class Numbers(DTensor):
        """The result of dequantizing a sharded weight: whole on every rank, as are plain tensors that it is combined
        with.

        peft adds the product of its adapter's matrices to it. These are DTensors if the adapter is sharded, and plain
        tensors if every rank has all of it. The results, too, can be combined with plain tensors.
        """

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            mesh = next((value.device_mesh for value in args if isinstance(value, Numbers)), None)

            def beside(value: Any) -> Any:
                if mesh is None or not isinstance(value, Tensor) or is_dtensor(value):
                    return value
                return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)

            with torch._C.DisableTorchFunctionSubclass():
                out = func(*map(beside, args), **(kwargs or {}))
            if type(out) is DTensor:
                out.__class__ = cls
            return out

    return Numbers


def without_gaps(tensor: Any) -> Any:
    """`tensor`, a DTensor, changed so that gathering it gives a contiguous tensor.

    Before torch 2.13 a DTensor that is sharded unevenly, and not along its first dimension, keeps the gaps of its
    padding when gathered. `set_optimizer_state_dict` with broadcast_from_rank0 then sends the gaps to ranks that expect
    none. With gloo this is silent.
    """
    tensor.__class__ = _without_gaps_class()
    return tensor


@functools.cache
def _without_gaps_class() -> type:
    from torch.distributed.tensor import DTensor

    class WithoutGaps(DTensor):
        """A DTensor that is redistributed into contiguous memory."""

        def redistribute(self, device_mesh: Any = None, placements: Any = None, **options: Any) -> DTensor:
            """As of any DTensor."""
            out = plain(self).redistribute(device_mesh, placements, **options)
            return DTensor(out._local_tensor.contiguous(), out._spec, requires_grad=False)

        def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
            return without_gaps(copy.deepcopy(plain(self), memo))

        def __reduce_ex__(self, protocol: Any) -> Any:
            return plain(self).__reduce_ex__(protocol)

    return WithoutGaps


def shard_world(weight: Any) -> tuple[int, int]:
    """(world, rank) of the mesh dimension over which `weight` is sharded; (1, 0) if none."""
    dims = [i for i, placement in enumerate(weight.placements) if placement.is_shard()]
    if len(dims) > 1:
        raise ValueError(f"packed weights are sharded over one mesh dimension, not over {weight.placements}")
    if not dims:
        return 1, 0
    return weight.device_mesh.size(dims[0]), weight.device_mesh.get_local_rank(dims[0])


def own_rows(packed: Tensor, weight: Any) -> Tensor:
    """The rows of a whole packed weight [n, 1] that this rank keeps, sharded as `weight` is."""
    begin, length = ops.rank_slice(packed.size(0), *shard_world(weight))
    return packed[begin : begin + length]


def anywhere(flag: bool, weight: Any) -> bool:
    """Whether `flag` holds on any rank of the mesh of `weight`. A collective."""
    mesh = weight.device_mesh
    found = torch.tensor(int(flag), dtype=torch.int64, device=mesh.device_type)
    for dim in range(mesh.ndim):
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=mesh.get_group(dim))
    return bool(found)


def everyone(value: Any, group: Any = None) -> list[Any]:
    """The values of all ranks of `group`, or of the default one, by rank; without a process group [value].

    A collective. Any object that can be pickled. Ranks mostly bring the same: then digests are compared, and no rank
    unpickles what the others have.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return [value]
    world = distributed.get_world_size(group)
    digest = hashlib.sha256(pickle.dumps(value)).digest()
    words = torch.frombuffer(bytearray(digest), dtype=torch.int32).to(torch.int64)
    found = torch.cat([words, -words]).to(_device_of(group))
    distributed.all_reduce(found, distributed.ReduceOp.MAX, group=group)
    if not found.view(2, -1).sum(0).any():  # the largest of each word is the smallest
        return [value] * world
    brought: list[Any] = [None] * world
    distributed.all_gather_object(brought, value, group)
    return brought


def _device_of(group: Any) -> torch.device:
    """Where the tensors of a group's collectives are."""
    devices = getattr(group or torch.distributed.group.WORLD, "_device_types", None)  # not a public name
    if devices is None:
        return torch.device("cuda" if torch.distributed.get_backend(group) == "nccl" else "cpu")
    return torch.device("cpu") if any(device.type == "cpu" for device in devices) else torch.device(devices[0].type)


def joined(pieces: dict[str, Tensor], group: Any, numbers: list[int]) -> tuple[dict[str, Tensor], list[list[int]]]:
    """Tensors [n, ...] of all ranks joined by rank, on the CPU, and the `numbers` of each rank. A collective.

    All ranks have the same names, dtypes and sizes behind the first. Lengths may differ: bytes are padded to the
    longest. The work in Python does not grow with the ranks.
    """
    device = _device_of(group)
    flat = {name: piece.cpu().contiguous().view(-1).view(torch.uint8) for name, piece in pieces.items()}
    own = torch.tensor([*numbers, *(each.numel() for each in flat.values())], dtype=torch.int64, device=device)
    world = 1 if group is None else torch.distributed.get_world_size(group)
    table = own.new_empty(world * own.numel())
    all_gather(table, own, group)
    table = table.cpu().view(world, -1)
    lengths = table[:, len(numbers) :]
    longest = lengths.amax(0).tolist()
    padded = torch.zeros(sum(longest), dtype=torch.uint8)
    for part, each in zip(padded.split(longest), flat.values(), strict=True):
        part[: each.numel()] = each
    if not padded.numel():
        return dict(pieces), table[:, : len(numbers)].tolist()
    every = torch.empty(world * padded.numel(), dtype=torch.uint8, device=device)
    all_gather(every, padded.to(device), group)
    columns = every.cpu().view(world, -1).split(longest, dim=1)
    found = {}
    for (name, piece), column, length in zip(pieces.items(), columns, lengths.T, strict=True):
        there = torch.arange(column.size(1), dtype=torch.int64) < length.unsqueeze(1)
        found[name] = column[there].view(piece.dtype).view(-1, *piece.shape[1:])
    return found, table[:, : len(numbers)].tolist()


def all_gather(out: Tensor, own: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Fill `out` [world * n] with every rank's `own` [n]; the work to wait for with `async_op`."""
    distributed = torch.distributed
    function = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor  # its older name
    return function(out, own, group=group, async_op=async_op)


def whole(tensor: Any) -> Tensor:
    """A DTensor gathered to a plain tensor on every rank, on the device of its mesh. A collective unless replicated."""
    device = tensor.device_mesh.device_type
    gathered = (tensor if tensor.device.type == device else tensor.to(device)).full_tensor()
    return gathered.plain() if isinstance(gathered, PackedShard) else gathered  # nothing was gathered on one rank


def cut_scales(weight: Any) -> None:
    """Keep only this rank's chunk of the scales of a sharded packed weight, if that has not happened yet."""
    local = weight._local_tensor
    if not isinstance(local, PackedShard):
        raise TypeError(
            f"the packed weight is sharded as {type(local).__name__}, not as PackedShard: was it quantized when "
            "fully_shard was called?"
        )
    local.origin.cut_scales(*shard_world(weight), local.device)


def gathered(weight: Any, state: QuantState) -> tuple[Tensor, QuantState]:
    """Bytes and state of one sharded packed weight, whole on every rank. A collective."""
    cut_scales(weight)
    own = state.clone()
    if state.sharded is not None:
        own.absmax, own.sharded = like(state.sharded.own, weight, state.absmax.size()).full_tensor(), None
    packed = whole(plain(weight))
    return packed, own.to(packed.device)
