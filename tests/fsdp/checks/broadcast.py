"""`set_model_state_dict(broadcast_from_rank0=True)`: only rank 0 has what is loaded."""

import functools

import torch
import torch.distributed as dist
from bitshard import _C, fsdp
from checks.common import FULL, build, exact, layers, padded, raises, shard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict


def check_broadcast(device, args):
    """`broadcast_from_rank0` delivers registered parameters only; the scales follow, or every rank raises."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    rank = dist.get_rank()
    full = get_model_state_dict(shard(build(device)), options=FULL)
    other = shard(build(device, seed=50))
    set_model_state_dict(other, dict(full) if rank == 0 else {}, options=options)
    exact(other, device, build(device))

    bare = {key: value for key, value in full.items() if ".base.weight." not in key}
    other = shard(build(device, seed=50))
    raises(
        (ValueError, RuntimeError),
        "without its scales|absmax",
        lambda: set_model_state_dict(other, dict(bare) if rank == 0 else {}, options=options),
    )
    dist.barrier()
    same = shard(build(device))
    set_model_state_dict(same, dict(bare) if rank == 0 else {}, options=options)
    exact(same, device, build(device))

    adapters = {key: value for key, value in full.items() if ".base." not in key}
    lenient = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    same = shard(build(device))
    set_model_state_dict(same, dict(adapters) if rank == 0 else {}, options=lenient)
    exact(same, device, build(device))

    # as accelerate saves an adapter with FULL_STATE_DICT: no frozen weights, but their scales; of this or another base
    offload = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False, cpu_offload=True)
    trainable = get_model_state_dict(
        shard(build(device)),
        options=StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True),
    )
    if rank == 0:
        assert "0.base.weight" not in trainable and "0.base.weight.absmax" in trainable
    same = shard(build(device))
    set_model_state_dict(same, dict(trainable) if rank == 0 else {}, options=offload)
    exact(same, device, build(device))
    other = shard(build(device, seed=50))
    raises(
        (ValueError, RuntimeError),
        "other scales",
        lambda: set_model_state_dict(other, dict(trainable) if rank == 0 else {}, options=offload),
    )
    # weights without scales in a lenient load
    other = shard(build(device, seed=50))
    raises(
        (ValueError, RuntimeError),
        "without its scales",
        lambda: set_model_state_dict(other, dict(bare) if rank == 0 else {}, options=lenient),
    )

    # what an unsharded model of the declared storage saves: its bytes are cut elsewhere than the container's words
    declared = {key: value.cpu() for key, value in build(device).state_dict().items()}
    assert declared["0.base.weight"].dtype == torch.uint8
    for how in (StateDictOptions(full_state_dict=True), options):
        other = shard(build(device, seed=50))
        set_model_state_dict(other, padded(declared) if rank == 0 or how is not options else {}, options=how)
        exact(other, device, build(device))
        assert layers(other)[0].weight._local_tensor.origin.loaded is None
        weight = layers(other)[0].weight  # and as some versions of torch hand it over: parts that state another size
        begin, length = _C.rank_slice(578, *fsdp._shard_world(weight))
        part = declared["0.base.weight"][begin : begin + length].to(device)
        other = shard(build(device, seed=50))
        saved = shard(build(device)).state_dict()
        other.load_state_dict({**saved, "0.base.weight": fsdp._like(part, weight, weight.size())})
        exact(other, device, build(device))
        short = {**padded(declared), "0.base.weight": declared["0.base.weight"][:-1]}
        load = functools.partial(set_model_state_dict, options=how)
        raises((ValueError, RuntimeError), "0.base.weight|578", functools.partial(load, other, short))
