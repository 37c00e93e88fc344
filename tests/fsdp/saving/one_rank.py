"""Saving where one rank fails while a layer is gathered: all raise its error, in time, and can go on together.

The checks run in streamed.py's launch.
"""

import contextlib
import functools
import time
from pathlib import Path

import torch
import torch.distributed as dist
from bitshard import fsdp
from bitshard.sharding.checkpoints import gathering, ready
from models import CELLS, LIMIT, reference
from shared import linears, logits, rank, refused, world
from ways import WAYS, assert_same, target_of, whole


@contextlib.contextmanager
def failing(module, name, nth, error, behind=False):
    """On the last rank, a function that fails when it is called for that time, before it does its work or behind it."""
    call, left = getattr(module, name), [nth]

    def fails(*arguments):
        left[0] -= 1
        found = call(*arguments) if behind or left[0] != 0 else None
        if left[0] == 0:
            raise error
        return found

    if rank() == world() - 1:
        setattr(module, name, fails)
    try:
        yield
    finally:
        setattr(module, name, call)


def all_raise(model, target, *words):
    """Every rank raises within seconds, with all `words`, the rank among them, and no file is left."""
    began = time.monotonic()
    last = rank() == world() - 1
    said = () if last else (f"rank {world() - 1} of {world()}",)
    refused(lambda: fsdp.save_pretrained(model, target, max_shard_size=LIMIT), *said, *words)
    assert time.monotonic() - began < 10
    dist.barrier()
    assert list(Path(target).iterdir()) == []
    dist.barrier()


def check_memory_of_one(way, folder):
    """No room for what is gathered: the rank itself raises torch's error, the others name it. Then a save is good."""
    model = WAYS[way](folder, CELLS[0], lambda model: model)
    target = target_of(folder, f"{way}-memory-of-one")
    for nth in (1, 2):
        error = torch.OutOfMemoryError("played: out of memory")
        with failing(ready, "_room", nth, error):
            all_raise(model, target, "played: out of memory")
    if way != "parts":
        fsdp.save_pretrained(model, target, max_shard_size=LIMIT)
        assert_same(target, reference(folder, CELLS[0]))


def check_fault_of_one(way, folder):
    """A fault behind the collectives of a layer, where the next one would meet another collective of the others."""
    model = WAYS[way](folder, CELLS[0], lambda model: model)
    target = target_of(folder, f"{way}-fault-of-one")
    for nth in (1, 5):
        with failing(gathering, "whole", nth, TypeError("played: a fault"), behind=True):
            all_raise(model, target, "played: a fault")


def check_short_shard(folder):
    """A shard that is too short on one rank, of a dense weight."""
    model = whole(folder, CELLS[0], lambda model: model)
    weight = model.model.norm.weight
    if rank() == world() - 1:
        weight._local_tensor = weight._local_tensor[:-1].clone()
    all_raise(model, target_of(folder, "short-shard"), "norm.weight", "expected [")


def check_short_scales(folder):
    """Scales that one rank lacks."""
    model = whole(folder, CELLS[0], lambda model: model)
    logits(model)  # by which scales are cut
    name, layer = list(linears(model).items())[2]
    if rank() == world() - 1:
        scales = layer.weight._local_tensor.origin.state.sharded
        scales.scales = scales.scales[:1]
    all_raise(model, target_of(folder, "short-scales"), f"{name}.weight", "block scales")


WAYS_TRIED = "whole native fsdp1 parts".split()
CHECKS = {f"memory_of_one_{way}": functools.partial(check_memory_of_one, way) for way in WAYS_TRIED}
CHECKS |= {f"fault_of_one_{way}": functools.partial(check_fault_of_one, way) for way in WAYS_TRIED}
CHECKS |= {"short_shard": check_short_shard, "short_scales": check_short_scales}
