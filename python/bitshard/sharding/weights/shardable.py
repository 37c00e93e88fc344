"""int8 weights in the form that FSDP shards, for models that were loaded before FSDP was known of."""

from __future__ import annotations

from torch import nn

from bitshard.weights.inventory import held_by


def shardable(model: nn.Module) -> int:
    """Make every quantized int8 weight of `model` a column of packed bytes, which FSDP can shard; how many were none.

    A model that is loaded in a process where FSDP shards needs no call: its weights are columns already. Call it on
    every rank, before `fully_shard` or FSDP1 wraps the model. What a forward computes stays the same, bit for bit.
    """
    return sum(held.enter() for module in model.modules() for held in held_by(module))
