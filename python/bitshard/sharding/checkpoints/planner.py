"""Reading a torch.distributed.checkpoint into a model that is sharded otherwise than the one that wrote it.

torch loads tensors of equal size only. Packed bytes have another size and dtype in another container: uint8 in a model
that is not sharded, the dtype of the model in one that FSDP shards. And the JSON entry of a sharded weight is padded
with spaces. So bytes are read as bytes here: each rank reads the elements of the file that have its own bytes.

The scales of 8-bit optimizer state have another shape in one process than on shards (`bitshard.optim.shards`), 4 bytes
for 256 elements, or for less where rows are short. They are read whole, as they were saved, in the place of those that
were asked for: `load_state_dict` of the optimizer makes its own of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from bitshard import ops
from bitshard.optim import saved_state
from bitshard.sharding.weights.state_entries import BLOB_PREFIX
from bitshard.shards import gather
from bitshard.shards.shard import PackedShard


class _Part:
    """What this rank reads of one entry of the file.

    Attributes:
        key: of the entry.
        saved: what the file says of it.
        begin: the first element that is read.
        read: what is read, as the file has it.
        outstanding: reads that are still to come.
    """

    def __init__(self, key: str, saved: TensorStorageMetadata, begin: int, size: tuple[int, ...]):
        self.key, self.saved, self.begin = key, saved, begin
        self.read = torch.zeros(size, dtype=saved.properties.dtype)
        self.outstanding = 0

    def items(self) -> list[ReadItem]:
        """The reads."""
        offsets = torch.Size([self.begin] + [0] * (self.read.dim() - 1))
        return create_read_items_for_chunk_list(
            self.key, self.saved, [ChunkStorageMetadata(offsets=offsets, sizes=self.read.size())]
        )

    def put(self, planner: LoadPlanner) -> None:
        """All has been read: put it where it belongs."""
        raise NotImplementedError


class _Rows(_Part):
    """The packed bytes `first` to `first + nbytes` of a weight, for `rows`, this rank's part in its own container."""

    def __init__(self, key: str, saved: TensorStorageMetadata, rows: Tensor, first: int):
        itemsize = saved.properties.dtype.itemsize
        self.rows, last = rows, first + rows.numel() * rows.element_size()
        begin, end = first // itemsize, min(-(-last // itemsize), saved.size[0])
        self.skip = first - begin * itemsize
        super().__init__(key, saved, begin, (max(end - begin, 0), 1))

    def put(self, planner: LoadPlanner) -> None:
        """Copy the bytes; what the container has behind the last one is zero."""
        data = self.read.view(-1).view(torch.uint8)[self.skip :]
        target = torch.zeros(self.rows.numel() * self.rows.element_size(), dtype=torch.uint8)
        length = min(target.numel(), data.numel())
        target[:length] = data[:length]
        self.rows.copy_(target.view(self.rows.dtype).view(self.rows.shape))


class _Text(_Part):
    """A JSON entry: padded with spaces in a sharded state dict, as it is in another."""

    def __init__(self, key: str, saved: TensorStorageMetadata, value: Any):
        super().__init__(key, saved, 0, tuple(saved.size))
        self.value = value

    def put(self, planner: LoadPlanner) -> None:
        """Write it into the entry of a sharded state dict, which stays as long; replace any other."""
        text = bytes(self.read.tolist()).rstrip(b" ")
        if not gather.is_dtensor(self.value):
            return planner.replace(self.key, torch.tensor(list(text), dtype=torch.uint8, device=self.value.device))
        local = self.value.to_local()
        if len(text) > local.numel():
            raise ValueError(f"{self.key}: a JSON entry of {len(text)} bytes, expected at most {local.numel()}")
        local.copy_(torch.tensor(list(text.ljust(local.numel())), dtype=torch.uint8))
        return None


class _Scales(_Part):
    """The scales of 8-bit optimizer state, which one process and shards keep in other shapes."""

    def __init__(self, key: str, saved: TensorStorageMetadata, value: Any):
        super().__init__(key, saved, 0, tuple(saved.size))
        self.device = value.device

    def put(self, planner: LoadPlanner) -> None:
        """In the place of the entry, all of them."""
        planner.replace(self.key, self.read.to(self.device))


def load_checkpoint(state_dict: dict[str, Any], folder: str | os.PathLike, **options: Any) -> None:
    """Fill `state_dict` from a torch.distributed.checkpoint in `folder`, whatever its 4-bit weights were sharded like.

        state = {"model": model.state_dict()}
        bitshard.fsdp.load_checkpoint(state, folder)
        model.load_state_dict(state["model"])

    It is `torch.distributed.checkpoint.load` with a `LoadPlanner`, so what `get_model_state_dict` gives will do, too. A
    collective of the process group, if there is one.

    Args:
        state_dict: what is to be filled, in place. Tensors of any model: whole, or sharded by FSDP2 or FSDP1.
        folder: that `torch.distributed.checkpoint.save` wrote, from any of these, on any number of ranks.
        options: for `LoadPlanner`, for instance `allow_partial_load`.

    ValueError on all ranks that names what is missing, ends early or has another shape.
    """
    reader = _Reader(folder)
    try:
        dcp.load(state_dict, storage_reader=reader, planner=LoadPlanner(**options))
    except CheckpointException as error:  # which is no Exception, so scripts do not see it
        rank, (failure, _) = min(error.failures.items())
        reason = f"{type(failure).__name__}: {failure}"
        if str(failure).startswith("metadata is None"):  # before torch 2.12 that is all it says
            reason = f"its .metadata cannot be read: {reader.unread or failure}"
        raise ValueError(f"{folder}: rank {rank} cannot load it: {reason}") from error


class _Reader(dcp.FileSystemReader):
    """A reader that finds out before it reads whether all files are as long as they were.

    Attributes:
        unread: why this rank has no metadata, or "".
    """

    unread = ""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of all ranks; asked for those of one rank, which torch tries next, it still knows why."""
        try:
            metadata = super().read_metadata(*args, **kwargs)
        except Exception as error:
            self.unread = self.unread or f"{type(error).__name__}: {error}"
            raise
        self.unread = ""
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        needed: dict[str, int] = {}
        for info in metadata.storage_data.values():
            needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
        for name, length in sorted(needed.items()):
            found = os.path.getsize(os.path.join(self.path, name))
            if found < length:
                raise ValueError(f"{name} ends after {found:,} of {length:,} bytes")


class LoadPlanner(DefaultLoadPlanner):
    """Loads 4-bit weights of any container into those of any other, whoever wrote them.

        torch.distributed.checkpoint.load(state, checkpoint_id=folder, planner=bitshard.fsdp.LoadPlanner())

    Between a model that is not sharded, FSDP2 and FSDP1 (`SHARDED_STATE_DICT`), between all numbers of ranks, between
    all storages. Arguments are those of torch's `DefaultLoadPlanner`, which all other tensors are left to.

    ValueError, in torch's CheckpointException on all ranks, for a weight of another shape.
    """

    def create_local_plan(self) -> LoadPlan:
        """torch's plan, and the reading of what has another form in the file."""
        self._pending: dict[tuple[str, int], _Part] = {}
        saved = self.metadata.state_dict_metadata
        plans: list[_Part] = []
        for key, value in self.state_dict.items():
            if not isinstance(saved.get(key), TensorStorageMetadata) or not hasattr(value, "size"):
                continue
            if self._is_packed(key) and _differs(saved[key], value):
                plans.extend(_weight_parts(key, saved[key], value))
            elif f".{BLOB_PREFIX}" in key and saved[key].size != value.size():
                plans.append(_Text(key, saved[key], value))
            elif _in_state(key, "state1", "state2") and saved[key].properties.dtype is not value.dtype:
                raise ValueError(_other_bits(key, saved[key].properties.dtype, value.dtype))
            elif _in_state(key, "absmax1", "absmax2") and saved[key].size != value.size():
                plans.append(_Scales(key, saved[key], value))
        unsaid = {key for key in self.state_dict if _in_state(key, saved_state.BITS) and key not in saved}
        if not plans and not unsaid:
            return super().create_local_plan()
        ours = {part.key for part in plans} | unsaid  # of one process, which does not save the bits
        others = {key: value for key, value in self.state_dict.items() if key not in ours}
        plan = create_default_local_load_plan(others, self.metadata, not self.allow_partial_load)
        items = list(plan.items)
        for part in plans:
            found = part.items()
            self._pending[part.key, part.begin] = part
            part.outstanding = len(found)
            items += found
        return LoadPlan(items)

    def _is_packed(self, key: str) -> bool:
        start = f"{key}.{BLOB_PREFIX}"
        return any(name.startswith(start) for name in self.state_dict)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where to read to."""
        part = self._part(read_item)
        if part is None:
            return super().resolve_tensor(read_item)
        tensor = part.read
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, offset, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """What was asked for has been read."""
        part = self._part(read_item)
        if part is None:
            return super().commit_tensor(read_item, tensor)
        part.outstanding -= 1
        if part.outstanding == 0:
            part.put(self)
        return None

    def _part(self, read_item: ReadItem) -> _Part | None:
        index = read_item.dest_index
        return self._pending.get((index.fqn, index.offset[0] if index.offset else 0))

    def replace(self, key: str, value: Tensor) -> None:
        """Put `value` into the state dict that is being loaded."""
        if not self.flatten_state_dict:
            self.state_dict[key] = value
            return
        place: Any = self.original_state_dict
        *path, last = self.mappings[key]
        for step in path:
            place = place[step]
        place[last] = value


def _in_state(key: str, *names: str) -> bool:
    """Whether this is one of these tensors of a quantized optimizer's state."""
    path, _, name = key.rpartition(".")
    return name in names and path.endswith(f".{saved_state.WRAPPED}")


def _other_bits(key: str, saved: torch.dtype, wanted: torch.dtype) -> str:
    return (
        f"{key}: the checkpoint has {saved}, this optimizer {wanted}: give it the optim_bits and min_8bit_size of the "
        "one that saved it"
    )


def _differs(saved: TensorStorageMetadata, value: Any) -> bool:
    return saved.size != value.size() or saved.properties.dtype is not value.dtype


def _weight_parts(key: str, saved: TensorStorageMetadata, value: Any) -> list[_Part]:
    """The parts of a packed weight that this rank has. ValueError where file and model hold other numbers of bytes."""
    old, new = saved.properties.dtype.itemsize, value.dtype.itemsize
    old_bytes, new_bytes = saved.size.numel() * old, value.size().numel() * new
    # what a container holds may end anywhere in its last element
    fits = max(old_bytes - old, new_bytes - new) < min(old_bytes, new_bytes)
    if not fits or len(saved.size) != 2 or saved.size[1] != 1:
        raise ValueError(
            f"{key}: the checkpoint has a packed weight of {list(saved.size)} {saved.properties.dtype}, the model one "
            f"of {list(value.size())} {value.dtype}: these are weights of different shapes"
        )
    return [_Rows(key, saved, rows, first * new) for first, rows in _local_rows(value) if rows.numel() > 0]


def _local_rows(value: Any) -> Iterator[tuple[int, Tensor]]:
    """(first row, rows) of what this rank has of a packed weight, as plain tensors that may be written."""
    if hasattr(value, "local_shards"):  # of FSDP1
        for shard in value.local_shards():
            yield shard.metadata.shard_offsets[0], shard.tensor
    elif gather.is_dtensor(value):
        if value.device_mesh.get_coordinate() is not None:
            local = value._local_tensor
            begin, _ = ops.rank_slice(value.size(0), *gather.shard_world(value))
            yield begin, local.plain() if isinstance(local, PackedShard) else local
    else:
        yield 0, value.detach().as_subclass(Tensor)
