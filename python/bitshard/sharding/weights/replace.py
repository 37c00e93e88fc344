"""A new weight in place of a sharded one, as peft's merging assigns it."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from bitshard import ops
from bitshard.formats.container import repack
from bitshard.formats.state import QuantState
from bitshard.sharding.weights.state_entries import differences, state_of
from bitshard.shards import gather
from bitshard.weights.tensor import Params4bit


def write(weight: DTensor, gathered: Params4bit | None, new: Params4bit) -> None:
    """Every rank keeps its part of the packed bytes and of the scales of `new`, which all ranks bring alike.

    FSDP2's `weight` and its state stay the objects they are; `gathered`, where FSDP2 has made the weight whole at the
    moment, is overwritten too. ValueError unless `new` was quantized as the old weight was.
    """
    gather.cut_scales(weight)
    state, theirs = state_of(weight), new.quant_state
    weight.__dict__["bnb_quantized"] = True  # peft clears it in the attributes that it rebuilds a weight from
    _check_fits(new, state)
    packed = repack(new.saved_data(), weight.dtype, state)
    weight._local_tensor.plain().copy_(gather.own_rows(packed, weight))
    if gathered is not None:
        gathered.bnb_quantized = True
        gathered.data.as_subclass(torch.Tensor).copy_(packed)
    if state.sharded is None or gathered is not None:
        state.absmax.copy_(theirs.absmax)
    if state.sharded is not None:
        state.sharded.own.copy_(state.sharded.part(theirs.absmax))
        state.sharded.checksum = None
    device = state.code.device
    state.dtype, state.checksum = theirs.dtype, ops.checksum(packed).to(device)
    if state.nested:
        state.offset, state.state2 = theirs.offset.to(device), theirs.state2.to(device)


def put_back(weight: DTensor, gathered: Params4bit | None, before: Any) -> None:
    """Every rank writes the rows and scales that it has kept (`bitshard.nn.merged.Kept`) into its shard again.

    A collective where the weight is `gathered`, which is overwritten, too.
    """
    state, kept = state_of(weight), before.state
    weight.__dict__["bnb_quantized"] = True
    weight._local_tensor.plain().copy_(before.packed)
    if state.sharded is None:
        state.absmax.copy_(kept.absmax)
    else:
        state.sharded.own.copy_(kept.absmax)
        state.sharded.checksum = before.scales_checksum
    state.dtype, device = kept.dtype, state.code.device
    for name in ("checksum", "offset", "state2"):
        value = getattr(kept, name)
        setattr(state, name, None if value is None else value.clone().to(device))
    if gathered is not None:
        packed, whole = gather.gathered(weight, state)
        gathered.bnb_quantized = True
        gathered.data.as_subclass(torch.Tensor).copy_(packed)
        state.absmax.copy_(whole.absmax)


def _check_fits(new: Params4bit, state: QuantState) -> None:
    if new.quant_state is None or not new.bnb_quantized:
        raise ValueError(
            f"weight = {list(new.shape)}: the {state.kind.word} layer is sharded by FSDP2 and takes a quantized weight "
            "only; move the new one to a device first"
        )
    for name, found, expected in differences(new.quant_state, state):
        raise ValueError(
            f"weight with {name} {found} for the {state.kind.word} layer that is sharded by FSDP2 with {name} "
            f"{expected}: only a weight that was quantized in the same way can take the place of a sharded one"
        )
