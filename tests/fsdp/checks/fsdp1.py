"""FSDP1: its options and its state dicts."""

import torch.distributed as dist
from bitshard import fsdp
from checks.common import ENTRIES, batch, build, exact, raises
from common import BASE_DTYPE, same_bytes, shard_fsdp1
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy, StateDictType


def check_fsdp1_options(device, args):
    """FSDP1's sharding strategies, activation checkpointing and, with GPUs (torch wants one), CPU offload."""
    world = dist.get_world_size()
    cases = [{"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, {"sharding_strategy": ShardingStrategy.NO_SHARD}]
    if world % 2 == 0:
        mesh = init_device_mesh(device.type, (2, world // 2), mesh_dim_names=("replicate", "shard"))
        cases += [{"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}]
        cases += [{"sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2, "device_mesh": mesh}]
    if device.type == "cuda":
        cases += [{"cpu_offload": CPUOffload(offload_params=True)}]
    for options in cases + [{}]:
        for orig in (False, True):  # accelerate's FSDP1 plugin has use_orig_params on by default
            model = shard_fsdp1(build(device), None, device, use_orig_params=orig, **options)
            exact(model, device, build(device), steps=3)
    model = build(device)
    for i, block in enumerate(model):
        model[i] = checkpoint_wrapper(block)
    exact(shard_fsdp1(model, None, device), device, build(device), steps=3)


def check_fsdp1_shared_weight(device, args):
    """FSDP1 flattens a weight that two layers share for the first of them; the error says so."""
    for orig in (False, True):
        model = nn.Sequential(*(block.base for block in build(device, storage=BASE_DTYPE, shape=(33, 33))))
        model[1].weight = model[0].weight
        raises(
            ValueError,
            "two layers share one 4-bit weight of [33, 33]|FSDP2",
            lambda m=model, orig=orig: FullyShardedDataParallel(m, use_orig_params=orig, device_id=device)(
                batch(device)
            ),
        )


def check_fsdp1_state_dicts(device, args):
    """FSDP1's full and sharded dicts hold the scales and load into other weights, that have run forward or not.

    Ours has the declared storage.
    """
    reference = build(device)
    for orig in (False, True):
        model = shard_fsdp1(build(device), None, device, use_orig_params=orig)
        for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
            for before in (False, True):
                other = shard_fsdp1(build(device, seed=50), None, device, use_orig_params=orig)
                if before:
                    other(batch(device))
                with FullyShardedDataParallel.state_dict_type(model, kind):
                    saved = model.state_dict()
                assert {f"0.base.weight{end}" for end in ENTRIES} <= set(saved)
                with FullyShardedDataParallel.state_dict_type(other, kind):
                    other.load_state_dict(saved)
                exact(other, device, reference)
        full = fsdp.full_state_dict(model)
        if dist.get_rank() == 0:
            for key, value in reference.state_dict().items():
                assert same_bytes(full[key], value), key
