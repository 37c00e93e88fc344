"""torch.distributed.checkpoint: models, optimizers, and what another number of ranks wrote."""

import functools
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checks.common import build, exact, shard, train
from common import BASE_DTYPE
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)


def check_dcp(device, args):
    """torch.distributed.checkpoint, into a model of other weights that never ran; and what another world size wrote."""
    new = functools.partial(build, device, storage=BASE_DTYPE)  # one container on every number of ranks
    model, folder = shard(new()), os.path.join(args.dir, f"dcp{dist.get_world_size()}")
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    folders = [os.path.join(args.dir, name) for name in sorted(os.listdir(args.dir)) if name.startswith("dcp")]
    for folder in folders:
        other = shard(new(seed=50))
        loaded = {"model": other.state_dict()}
        dcp.load(loaded, checkpoint_id=folder)
        other.load_state_dict(loaded["model"])
        exact(other, device, new())
    return len(folders)


def check_resume(device, args):
    """Model and optimizer saved after 3 steps and loaded into new ones go on as if nothing had happened."""
    rank, world = dist.get_rank(), dist.get_world_size()
    run = functools.partial(train, device=device, dtype=torch.float32, rank=rank, world=world)

    def new(seed):
        model = shard(build(device, seed=seed, storage=torch.float32, dtype=torch.float32))
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    model, optimizer = new(0)
    run(model, steps=3, optimizer=optimizer)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    folder = os.path.join(args.dir, f"resume{world}")
    dcp.save(state, checkpoint_id=folder)
    expected = run(model, steps=3, optimizer=optimizer, first=3)
    model, optimizer = new(50)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert run(model, steps=3, optimizer=optimizer, first=3) == expected
