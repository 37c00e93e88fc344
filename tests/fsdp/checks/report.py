"""What `bitshard.fsdp.describe` says of sharded models and of models that are whole on every rank."""

import functools

import torch
import torch.distributed as dist
from bitshard import fsdp
from checks.common import build, exact, layers, shard
from common import BASE_DTYPE, STORAGES, shard_fsdp1
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel


def check_describe(device, args):
    """The line that proves sharding, before and after the first forward, and for a model that is not sharded."""
    world = dist.get_world_size()
    assert "not sharded" in fsdp.describe(build(device))
    assert fsdp.describe(nn.Linear(2, 2)) == "no 4-bit or int8 weights in this model"
    model = shard(build(device, shape=(96, 64)))
    line = fsdp.describe(model)
    assert f"FSDP2 over {world} ranks" in line and f"(1/{world}.00)" in line and "(sharded)" in line, line
    model(torch.ones(2, 64, device=device, dtype=BASE_DTYPE)).float().sum().backward()
    assert fsdp.describe(model) == line
    flat = fsdp.describe(shard_fsdp1(build(device, shape=(96, 64)), None, device))
    assert f"FSDP1 over {world} ranks" in flat and "(whole)" in flat, flat
    return line


def check_replicated(device, args):
    """DDP, and weights that fully_shard or FSDP1 is told to ignore, are whole and exact on every rank."""

    def ignoring(wrap, name):
        model = build(device)
        return wrap(model, **{name: {layer.weight for layer in layers(model)}})

    wholes = [DistributedDataParallel(build(device, storage=storage)) for storage in STORAGES.values()]
    wholes.append(ignoring(fully_shard, "ignored_params"))
    wholes.append(ignoring(functools.partial(FullyShardedDataParallel, device_id=device), "ignored_states"))
    for i, model in enumerate(wholes):
        exact(model, device, build(device, storage=[*STORAGES.values(), torch.uint8, torch.uint8][i]))
        assert "not sharded" in fsdp.describe(model)
