"""A 4-bit weight of which a rank keeps only its part, from loading until `fully_shard`.

Each rank quantizes the whole weight, one at a time, and keeps the chunk of bytes and of scales that `fully_shard` over
all processes will leave it. Until then `bitshard.weights.placeholder` has the size, dtype and device of the weight,
and a storage of 0 bytes. This needs no communication and no private part of torch: FSDP2 calls `chunk(world)` of a
parameter and takes its own chunk, then `new_zeros`, which returns the `PackedShard`.
"""

from __future__ import annotations

import datetime
import itertools
import os
from typing import Any

import torch
from torch import Tensor

from bitshard import ops
from bitshard.formats.state import QuantState
from bitshard.shards import gather
from bitshard.shards.shard import Origin, ShardedScales

_ADVICE = (
    "Prepare the model first (Trainer.train, accelerator.prepare: FSDP2 gathers it then), or set BITSHARD_CUT=0, with "
    "which every rank loads whole weights, as it does for models that are loaded after the first one was sharded"
)
_TIMEOUT_S = 30

# These read bytes without an operator of torch. All other reads and writes are detected by their operator.
_READERS = (
    "numpy __array__ __dlpack__ __dlpack_device__ tolist apply_ map_ map2_ storage _typed_storage __repr__ __format__ "
    "__bool__ __float__ __int__ __index__ __complex__ __contains__ __iter__ __reversed__ share_memory_ new_tensor"
).split()
_VIEWS = "T H mT mH real imag __cuda_array_interface__".split()


def _readers() -> frozenset[Any]:
    found = {getattr(Tensor, name) for name in _READERS if hasattr(Tensor, name)}
    for name in _VIEWS:
        attribute = vars(Tensor).get(name) or getattr(Tensor, name, None)
        found |= {getattr(attribute, form) for form in ("__get__", "__set__") if hasattr(attribute, form)}
    return frozenset(found)


READERS = _readers()
# Operators that return metadata of a tensor, or the same memory without reading it.
QUESTIONS = frozenset(getattr(torch.ops.aten, name) for name in ("detach", "is_pinned", "is_same_size", "is_complex"))
stand_in: Any = None  # class of the placeholder; `bitshard.weights.placeholder` sets it


def unreadable(what: str, state: QuantState) -> ValueError:
    """The error for reading a weight of which this rank has only its part."""
    return ValueError(
        f"{what}: this rank keeps only its part of this {state.kind.word} weight of {list(state.shape)}, because "
        f"FSDP2 is active, and cannot read the weight here. {_ADVICE}."
    )


def hollow(like: Tensor, device: torch.device | str) -> Tensor:
    """A plain tensor of the size and dtype of `like` on `device` that has no memory behind it."""
    out = torch.empty(like.size(), dtype=like.dtype, device=device)
    out.untyped_storage().resize_(0)
    return out


class KeptPart:
    """This rank's part of a packed weight [n, 1]. The whole weight existed only while it was quantized.

    Attributes:
        state: the `QuantState` of the whole weight, whose `part` this is and whose scales are cut.
        size: size of the whole packed weight, [n, 1].
        dtype: of the container.
        rows: this rank's ceil(n / world) or fewer rows.
        number: how many parts this rank kept before this one; the same on all ranks.
        world, rank: of the default process group.
    """

    __slots__ = ("dtype", "number", "rank", "rows", "size", "state", "world")

    def __init__(self, packed: Tensor, state: QuantState):
        distributed = torch.distributed
        self.state, self.size, self.dtype = state, packed.size(), packed.dtype
        self.number = next(_numbers)
        self.world, self.rank = distributed.get_world_size(), distributed.get_rank()
        begin, length = ops.rank_slice(packed.size(0), self.world, self.rank)
        self.rows = packed[begin : begin + length].clone()
        sharded = ShardedScales.of_whole(state.absmax, self.world, self.rank)
        sharded.checksum = ops.checksum(state.absmax)
        state.absmax = torch.empty_like(state.absmax, device="meta")
        state.sharded, state.part = sharded, self

    def chunks(self, count: int) -> tuple[Tensor, ...]:
        """What torch.chunk(weight, count) gives FSDP2: this rank's rows, and tensors without data for the others."""
        if count != self.world:
            raise ValueError(
                f"this {self.state.kind.word} weight of {list(self.state.shape)} was loaded in parts for {self.world} "
                f"ranks and is sharded over {count}: for FSDP2 over a part of the ranks (hybrid sharding) set "
                "BITSHARD_CUT=0"
            )
        chunks = torch.empty(self.size, dtype=self.dtype, device="meta").chunk(count)
        return tuple(self.rows if rank == self.rank else chunk for rank, chunk in enumerate(chunks))

    def hand_over(self, parameter: type, attributes: dict[str, Any]) -> Origin:
        """FSDP2 makes its shard: return its origin. This object then no longer keeps the part."""
        origin = Origin(self.state, self.size, self.dtype, parameter, attributes)
        self.state.part = None
        return origin

    def move(self, device: torch.device | str) -> None:
        """Move the part with its scales."""
        self.rows = self.rows.to(device)
        self.state.to(device)

    def gathered(self) -> tuple[Tensor, QuantState]:
        """Packed bytes and state, whole on every rank. Waits for all processes; then a collective of all of them."""
        self._meet()
        device = self._collective_device()
        itemsize, world = self.rows.element_size(), self.world
        own = torch.zeros(-(-self.size[0] // world) * itemsize, dtype=torch.uint8, device=device)
        own[: self.rows.numel() * itemsize] = self.rows.view(-1).view(torch.uint8).to(device)
        chunk = self.state.sharded.scales.to(device)
        packed, scales = own.new_empty(world * own.numel()), chunk.new_empty(world * chunk.numel())
        gather.all_gather(packed, own)
        gather.all_gather(scales, chunk)
        state = self.state.clone()
        state.absmax, state.sharded, state.part = scales[: self.state.sharded.total], None, None
        return packed.view(self.dtype)[: self.size[0]].view(self.size).to(self.rows.device), state.to(self.rows.device)

    def _collective_device(self) -> torch.device:
        """The device whose tensors the process group can send."""
        if self.rows.device.type == "cpu" and "gloo" not in torch.distributed.get_backend():
            return torch.device("cuda", torch.cuda.current_device())
        return self.rows.device

    def _meet(self) -> None:
        """Wait at the process group's store until all ranks are about to gather this weight.

        If not all arrive in time, ValueError on those that did: alone they would hang in the collective. The first rank
        to write the outcome, complete or failed, decides it for all. The next call starts a new round.
        """
        from torch.distributed.distributed_c10d import _get_default_store

        store, meeting = _get_default_store(), 0
        while store.check([self._key(meeting, "end")]):
            meeting += 1
        end = self._key(meeting, "end")
        if store.add(self._key(meeting, "here"), 1) == self.world:
            store.compare_set(end, "", "met")
        seconds = float(os.environ.get("BITSHARD_CUT_TIMEOUT", _TIMEOUT_S))
        try:
            store.wait([end], datetime.timedelta(seconds=seconds))
        except RuntimeError:  # DistStoreError
            store.compare_set(end, "", "failed")
        if store.get(end) != b"met":
            what = f"only some of the {self.world} ranks came to gather it in {seconds:g} s"
            raise unreadable(what, self.state)

    def _key(self, meeting: int, what: str) -> str:
        return f"bitshard/parts/{self.number}/{meeting}/{what}"


_numbers = itertools.count()
