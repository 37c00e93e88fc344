"""`set_model_state_dict(broadcast_from_rank0=True)`, where only rank 0 has what is loaded.

torch delivers registered parameters only. The scales follow, or every rank raises.
"""

import functools

import torch
import torch.distributed as dist
from checks.common import FULL, build, exact, layers, padded, raises, shard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

EVERY_RANK = StateDictOptions(full_state_dict=True)
RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
LENIENT = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
LENIENT_OFFLOAD = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False, cpu_offload=True)


def broadcast(state_dict, model, options=RANK_0):
    """Load into `model`, on all ranks, what rank 0 has."""
    set_model_state_dict(model, dict(state_dict) if dist.get_rank() == 0 else {}, options=options)


def full_state_dict(device):
    return get_model_state_dict(shard(build(device)), options=FULL)


def without_scales(state_dict):
    return {key: value for key, value in state_dict.items() if ".base.weight." not in key}


def declared_state_dict(device):
    """What an unsharded model of uint8 storage saves: its bytes are cut elsewhere than the words of a container."""
    declared = {key: value.cpu() for key, value in build(device).state_dict().items()}
    assert declared["0.base.weight"].dtype == torch.uint8
    return declared


def check_broadcast_whole(device, args):
    """A whole state dict, scales included, replaces other weights on every rank."""
    other = shard(build(device, seed=50))
    broadcast(full_state_dict(device), other)
    exact(other, device, build(device))


def check_broadcast_without_scales(device, args):
    """Other weights without their scales raise, in a lenient load too; the weights that are there already do not."""
    bare = without_scales(full_state_dict(device))
    for options, text in ((RANK_0, "without its scales|absmax"), (LENIENT, "without its scales")):
        other = shard(build(device, seed=50))
        raises((ValueError, RuntimeError), text, functools.partial(broadcast, bare, other, options))
        dist.barrier()
    same = shard(build(device))
    broadcast(bare, same)
    exact(same, device, build(device))


def check_broadcast_adapters(device, args):
    """Adapters alone leave the base as it is."""
    adapters = {key: value for key, value in full_state_dict(device).items() if ".base." not in key}
    same = shard(build(device))
    broadcast(adapters, same, LENIENT)
    exact(same, device, build(device))


def check_broadcast_scales_of_a_base(device, args):
    """As accelerate saves an adapter with FULL_STATE_DICT: no frozen weights, but their scales, of this base or not."""
    trainable = get_model_state_dict(
        shard(build(device)),
        options=StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True),
    )
    if dist.get_rank() == 0:
        assert "0.base.weight" not in trainable and "0.base.weight.absmax" in trainable
    same = shard(build(device))
    broadcast(trainable, same, LENIENT_OFFLOAD)
    exact(same, device, build(device))
    other = shard(build(device, seed=50))
    load = functools.partial(broadcast, trainable, other, LENIENT_OFFLOAD)
    raises((ValueError, RuntimeError), "other scales", load)


def check_broadcast_declared(device, args):
    """The bytes of an unsharded model, from every rank or from rank 0; afterwards nothing of them is left behind."""
    declared, third = padded(declared_state_dict(device)), shard(build(device, seed=60))
    for options in (EVERY_RANK, RANK_0):
        other = shard(build(device, seed=50))
        given = declared if dist.get_rank() == 0 or options is EVERY_RANK else {}
        set_model_state_dict(other, dict(given), options=options)
        exact(other, device, build(device))
        local = layers(other)[0].weight._local_tensor
        part = torch.zeros(local.shape, dtype=torch.uint8, device=device)
        raises(TypeError, "packed 4-bit", functools.partial(local.copy_, part))  # while it is loaded a shard takes it
        other.load_state_dict(third.state_dict())
        exact(other, device, build(device, seed=60))


def check_broadcast_parts(device, args):
    """As some versions of torch hand over declared bytes: each rank's part, with the size of the container stated."""
    model = shard(build(device))
    weight = layers(model)[0].weight
    mesh = weight.device_mesh
    part = declared_state_dict(device)["0.base.weight"].to(device).chunk(mesh.size())[mesh.get_local_rank()]
    parts = DTensor.from_local(
        part, mesh, weight.placements, run_check=False, shape=weight.size(), stride=weight.stride()
    )
    other = shard(build(device, seed=50))
    other.load_state_dict({**model.state_dict(), "0.base.weight": parts})
    exact(other, device, build(device))


def check_broadcast_short(device, args):
    """Declared bytes of which one is missing raise, and name the weight and what it takes."""
    declared = declared_state_dict(device)
    short = {**padded(declared), "0.base.weight": declared["0.base.weight"][:-1]}
    for options in (EVERY_RANK, RANK_0):
        load = functools.partial(set_model_state_dict, shard(build(device, seed=50)), dict(short), options=options)
        raises((ValueError, RuntimeError), "0.base.weight|578", load)
