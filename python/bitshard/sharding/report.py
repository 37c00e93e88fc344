"""What each rank keeps of a model's 4-bit or int8 base: as numbers, and as one line."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from bitshard.shards import gather
from bitshard.weights.inventory import bits, counted, holder_of, quantized


@dataclass
class Share:
    """What this process keeps of a model's packed base, in bytes: `own_packed` of `packed`, `own_scales` of `scales`.

    `scales` counts the first level (`absmax`); the second is 64 times smaller and whole everywhere. While adapters are
    merged into 4-bit weights, `before_merge` bytes of host memory keep what these were, for unmerging.
    """

    weights: int = 0
    packed: int = 0
    own_packed: int = 0
    scales: int = 0
    own_scales: int = 0
    before_merge: int = 0
    fsdp: str = ""
    ranks: int = 1


def measure(model: nn.Module) -> Share:
    """Count what this rank keeps of the 4-bit base between forwards. No communication."""
    share = Share()
    flat = _flat_shares(model)
    for held in quantized(model):
        weight = held.weight if held.shard is None else held.shard
        ranks = 1
        if isinstance(weight, DTensor):
            gather.cut_scales(weight)
            share.fsdp, ranks = "FSDP2", gather.shard_world(weight)[0]
            packed, own = weight.numel() * weight.element_size(), weight._local_tensor.numel() * weight.element_size()
        elif id(held) in flat:
            packed, own, ranks = flat[id(held)]
            share.fsdp = "FSDP1"
        else:
            packed = own = weight.numel() * weight.element_size()
        state = held.state
        if state.part is not None:
            share.fsdp, ranks = "loading", state.part.world
            own = state.part.rows.numel() * weight.element_size()
        kept = state.absmax if state.sharded is None else state.sharded.scales
        share.weights += 1
        share.packed, share.own_packed = share.packed + packed, share.own_packed + own
        share.scales += state.absmax.numel() * state.absmax.element_size()
        share.own_scales += kept.numel() * kept.element_size()
        share.before_merge += 0 if held.kept is None else held.kept.nbytes
        share.ranks = max(share.ranks, ranks)
    return share


def describe(model: nn.Module) -> str:
    """One line that says whether the 4-bit or int8 base of `model` is sharded, and what this rank keeps of it."""
    share = measure(model)
    if share.weights == 0:
        return "no 4-bit or int8 weights in this model"
    found = quantized(model)
    weights, base = counted(found), bits(found)
    before = f"; {share.before_merge:,} bytes from before merging in host memory" if share.before_merge else ""
    if share.ranks == 1:
        return (
            f"{base} base not sharded: {weights}, all {share.packed:,} bytes and {share.scales:,} bytes "
            f"of scales in this process{before}"
        )
    how = "loaded in parts, not sharded yet," if share.fsdp == "loading" else f"sharded by {share.fsdp}"
    scales = "sharded" if share.own_scales < share.scales else "whole"
    return (
        f"{base} base {how} over {share.ranks} ranks: {weights}, "
        f"{share.own_packed:,} of {share.packed:,} bytes (1/{share.packed / max(share.own_packed, 1):.2f}) and "
        f"{share.own_scales:,} of {share.scales:,} bytes of scales ({scales}) on this rank{before}"
    )


def _flat_shares(model: nn.Module) -> dict[int, tuple[int, int, int]]:
    """FSDP1: id(holder) -> (bytes of its packed weight, of which in this rank's flat parameter, ranks)."""
    shares = {}
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        handle = unit._handle
        if handle is None:
            continue
        flat, ranks = handle.flat_param, handle.world_size if handle.uses_sharded_strategy else 1
        for info, numel, own in zip(flat._param_infos, flat._numels, flat._shard_param_infos, strict=True):
            held = holder_of(info.module, info.param_name)
            if held is not None and held.state is not None:
                kept = own.numel_in_shard or 0 if ranks > 1 else numel
                shares[id(held)] = (numel * flat.element_size(), kept * flat.element_size(), ranks)
    return shares
