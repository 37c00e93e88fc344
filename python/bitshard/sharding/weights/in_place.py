"""Units of one parameter (embeddings, a head) are gathered where the parameter stays while it is whole.

FSDP2 gathers a unit into one buffer and copies the parameters out of it, so a unit takes twice its size for a moment,
in forward until the next one is there. For a unit of one parameter buffer and parameter are the same bytes: 2 GiB less
at the peak of a model with 128,256 x 8192 embeddings.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from bitshard.sharding.weights.record import gathered_output, only_record
from bitshard.shards import gather
from bitshard.shards.shard import PackedShard


def gather_in_place(model: nn.Module) -> int:
    """Let the units of FSDP2 that have one parameter gather it without a second copy; how many such units there are.

    For models whose embeddings or head are a large part of a GPU's memory. Such a gather begins when the work before it
    is done, instead of beside it. Call it after `fully_shard`, or after loading with a `DistributedConfig`; there a
    `fsdp_plan` of {"model.norm": "free_full_weight"} keeps the last norm from sharing the head's unit.
    """
    count, streams = 0, ComputeStreams(model)
    for unit in model.modules():
        record = only_record(unit) if isinstance(unit, FSDPModule) else None
        if record is None or isinstance(record.sharded_param._local_tensor, PackedShard):  # which has scales, too
            continue
        unit.set_custom_all_gather(InPlaceAllGather(record, streams))
        if isinstance(unit, nn.Embedding) and not unit.weight.requires_grad:
            unit.set_unshard_in_backward(False)  # its backward needs no weight
        count += 1
    return count


class ComputeStreams:
    """The streams on which a model computes: those that are current when a unit of FSDP2 begins its forward.

    A backward runs on the streams of its forward. FSDP2 allocates on a stream of its own, where torch does not say
    which one computes, and under `torch.cuda.stream(s)` that is not the default stream.
    """

    KEPT = 4  # the last ones: a step may still read on another stream than the next one computes on

    def __init__(self, model: nn.Module):
        self.seen: list[torch.cuda.Stream] = []
        for unit in model.modules():
            if unit is model or isinstance(unit, FSDPModule):
                unit.register_forward_pre_hook(self.look, prepend=True)

    def look(self, unit: nn.Module, args: tuple) -> None:
        """Note the stream of a forward that begins."""
        if torch.cuda.is_available():
            stream = torch.cuda.current_stream()
            self.seen = [*(other for other in self.seen if other != stream), stream][-self.KEPT :]

    def on(self, device: torch.device) -> list[torch.cuda.Stream]:
        """Those of a device, the last one last; the default stream before the first forward."""
        return [stream for stream in self.seen if stream.device == device] or [torch.cuda.default_stream(device)]


class InPlaceAllGather:
    """An `AllGather` of FSDP2 (see `FSDPModule.set_custom_all_gather`) that writes into the parameter itself.

    Where the unit turns out to have more parameters, or its tensors other sizes, it allocates as ever.
    """

    def __init__(self, record: Any, streams: ComputeStreams):
        self.record, self.streams = record, streams

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the gathered unit."""

        def own() -> Tensor | None:
            return gathered_output(self.record, math.prod(size), dtype, device)

        if device.type == "cuda":
            # FSDP2 allocates, uses and frees a parameter on the compute stream. This one is also written beside it,
            # which must not begin before what compute streams still do with the memory is done.
            gathering, computing = torch.cuda.current_stream(device), self.streams.on(device)
            with torch.cuda.stream(computing[-1]):
                output = own()
            for stream in computing:
                gathering.wait_stream(stream)
        else:
            output = own()
        return torch.empty(*size, dtype=dtype, device=device) if output is None else output

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather."""
        return gather.all_gather(output_tensor, input_tensor, group, async_op)
