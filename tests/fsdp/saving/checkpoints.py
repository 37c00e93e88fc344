"""torch.distributed.checkpoint between models that are whole, sharded by FSDP2 and by FSDP1, on any number of ranks.

    torchrun --nproc-per-node 2 tests/fsdp/saving/checkpoints.py --dir DIR --out DIR/checkpoints

DIR is shared by launches on 2, 1 and 4 ranks, in this order: each trains, saves, and goes on from what all have saved.
What is whole keeps its bytes in the declared storage, uint8; what is sharded in that of the model, or on 4 ranks in
uint8 too (in bfloat16 where torch shards no uint8). `--only killed_streamed` and `killed_dcp` end with a rank that is
killed while it saves.
"""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).parents[1]))
from bitshard import fsdp  # noqa: E402
from bitshard.sharding.checkpoints import gathering  # noqa: E402
from checks.common import ENTRIES, build, raises, shard  # noqa: E402
from common import BYTES, as_bytes, finish, no_launch, same_bytes, shard_fsdp1, start  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

DTYPE = torch.float32
BOUND = 1e-5  # relative, of each loss
CPU = torch.device("cpu")


def new(seed=50, storage=torch.uint8):
    return build(CPU, seed=seed, storage=storage, dtype=DTYPE)


def whole():
    """Not sharded."""
    with no_launch():
        return new()


def fsdp2():
    """Bytes in float32."""
    return shard(new())


def fsdp2_bytes():
    """Bytes in uint8, or bfloat16."""
    with no_launch():
        return shard(new(storage=BYTES))


def replicas():
    """Two replicas of two shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return shard(new(), mesh=mesh)


def fsdp1():
    return shard_fsdp1(new(), None, CPU)


def fsdp1_orig():
    return shard_fsdp1(new(), None, CPU, use_orig_params=True)


FORMS = {1: (whole, fsdp2), 2: (fsdp2, fsdp1, fsdp1_orig), 4: (fsdp2_bytes, replicas)}


def batches(step):
    """This rank's part of 12 rows, the same ones on any number of ranks."""
    generator = torch.Generator().manual_seed(100 + step)
    x, y = torch.randn(12, 33, generator=generator), torch.randn(12, 33, generator=generator)
    world, rank = dist.get_world_size(), dist.get_rank()
    return x.chunk(world)[rank], y.chunk(world)[rank]


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def losses(model, optimizer, first):
    """Of three steps, the means of all ranks."""
    found = []
    for step in range(first, first + 3):
        x, y = batches(step)
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found.append(float(mean) / dist.get_world_size())
    return found


def state_of(model, optimizer, **options):
    options = StateDictOptions(**options)
    return {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def put(model, optimizer, state, **options):
    options = StateDictOptions(**options)
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def start_of(form):
    """A model of the base that all share, from which every form starts."""
    model = form()
    full = new(seed=0).state_dict()
    if form is whole:
        model.load_state_dict(full)
    elif "fsdp1" in form.__name__:
        with no_launch() if form is fsdp2_bytes else contextlib.nullcontext():
            model = shard_fsdp1(new(seed=0), None, CPU, use_orig_params=form is fsdp1_orig)
    else:
        fsdp.load_full_state_dict(model, full)
    return model


def name_of(form):
    return f"{form.__name__}-{dist.get_world_size()}"


def empty(folder):
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    return folder


def check_save(form, folder):
    """Three steps, everything saved, and the losses of three more. All forms have the same ones."""
    model = start_of(form)
    optimizer = optimizer_of(model)
    first = losses(model, optimizer, 0)
    dcp.save(state_of(model, optimizer), checkpoint_id=empty(f"{folder}/dcp-{name_of(form)}"))
    adapters = state_of(model, optimizer, ignore_frozen_params=True)
    if "fsdp1" not in form.__name__:
        # torch takes the scales of the base for what is trained
        assert not [key for key in adapters["model"] if not re.search(r"\.(down|up|base\.weight\..+)$", key)]
        dcp.save(adapters, checkpoint_id=empty(f"{folder}/adapters-{name_of(form)}"))
        full = state_of(model, optimizer, full_state_dict=True, cpu_offload=True)
        if dist.get_rank() == 0:
            torch.save(full, f"{folder}/full-{name_of(form)}.pt")
    found = first + losses(model, optimizer, 3)
    path = Path(folder) / "losses.json"
    if dist.get_rank() == 0 and not path.exists():
        path.write_text(json.dumps(found))
    dist.barrier()
    return near(found, folder, 0)


def near(found, folder, first):
    expected = json.loads((Path(folder) / "losses.json").read_text())[first : first + len(found)]
    gap = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    assert gap <= BOUND, (gap, found, expected)
    return gap


def written(folder, kind):
    """Checkpoints of a kind that launches have left."""
    return sorted(path for path in Path(folder).glob(f"{kind}-*"))


def check_load(form, folder):
    """All that every launch before and this one saved, into another base that has never run."""
    found = {}
    for path in written(folder, "dcp"):
        model = form()
        optimizer = optimizer_of(model)
        state = state_of(model, optimizer)
        fsdp.load_checkpoint(state, path)
        put(model, optimizer, state)
        found[path.name] = near(losses(model, optimizer, 3), folder, 3)
        assert_base(model, form)
    return found


def check_plain_load(form, folder):
    """By `state_dict` and `load_state_dict` of the model."""
    found = []
    for path in written(folder, "dcp"):
        model = form()
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=path, planner=fsdp.LoadPlanner())
        model.load_state_dict(state["model"])
        assert_base(model, form)
        found.append(path.name)
    return found


def assert_base(model, form):
    """Bytes and scales of the base that all share."""
    full = fsdp.full_state_dict(model)
    with no_launch():
        expected = new(seed=0).state_dict()
    if dist.get_rank() == 0:
        for key in (f"{block}.base.weight{end}" for block in (0, 1) for end in ENTRIES):
            found, good = (bytes(as_bytes(values).tolist()).rstrip() for values in (full[key], expected[key]))
            assert found == good, key
    dist.barrier()


def check_full(form, folder):
    """Whole state dicts: rank 0 has them and sends the others theirs; under FSDP1 every rank reads them."""
    found = {}
    everywhere = "fsdp1" in form.__name__ or dist.get_world_size() == 1
    for path in written(folder, "full"):
        model = form()
        optimizer = optimizer_of(model)
        state = {"model": {}, "optimizer": {}}
        if everywhere or dist.get_rank() == 0:
            state = torch.load(path, weights_only=False)
        fsdp.load_full_state_dict(model, state["model"], broadcast_from_rank0=not everywhere)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=not everywhere)
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
        found[path.name] = near(losses(model, optimizer, 3), folder, 3)
    return found


def check_adapters(form, folder):
    """Adapters and their optimizer, beside a base that was loaded otherwise."""
    found = {}
    for path in written(folder, "adapters"):
        model = start_of(form)
        optimizer = optimizer_of(model)
        state = state_of(model, optimizer, ignore_frozen_params=True)
        dcp.load(state, checkpoint_id=path, planner=fsdp.LoadPlanner())
        put(model, optimizer, state, ignore_frozen_params=True, strict=False)
        found[path.name] = near(losses(model, optimizer, 3), folder, 3)
    return found


KEY = "1.base.weight"


def without_scales(folder):
    """A checkpoint whose one weight has no scales."""
    state = {"model": fsdp2().state_dict()}
    del state["model"][f"{KEY}.absmax"]
    dcp.save(state, checkpoint_id=folder)
    return f"{KEY}.absmax", "Missing key"


def of_another_shape(folder):
    """One weight has fewer rows."""
    model = new()
    model[1] = build(CPU, seed=50, dtype=DTYPE, shape=(33, 34))[0]
    dcp.save({"model": shard(model).state_dict()}, checkpoint_id=folder)
    return KEY, "different shapes"


def of_another_format(folder):
    """One weight has as many bytes but other scales."""
    state = {"model": fsdp2().state_dict()}
    state["model"][f"{KEY}.absmax"] = torch.zeros(7, dtype=torch.uint8)
    dcp.save(state, checkpoint_id=folder)
    return f"{KEY}.absmax", "Size mismatch"


def truncated(folder):
    """The file that the last rank wrote ends early."""
    dcp.save({"model": fsdp2().state_dict()}, checkpoint_id=folder)
    if dist.get_rank() == 0:
        path = sorted(Path(folder).glob("*.distcp"))[-1]
        os.truncate(path, path.stat().st_size // 2)
    dist.barrier()
    return "__1_0.distcp", "ends after"


def without_index(folder):
    """As a save that was killed leaves it."""
    dcp.save({"model": fsdp2().state_dict()}, checkpoint_id=folder)
    if dist.get_rank() == 0:
        os.remove(f"{folder}/.metadata")
    dist.barrier()
    return ("metadata",)


FAULTS = (without_scales, of_another_shape, of_another_format, truncated, without_index)


def check_fault(fault, folder):
    """Every rank raises in time, with what is wrong."""
    place = empty(f"{folder}/fault-{fault.__name__}")
    words = fault(place)
    for form in (fsdp2, fsdp1, fsdp2_bytes):
        state = {"model": get_model_state_dict(form())}
        began = time.monotonic()
        raises(ValueError, "|".join((place, *words)), lambda state=state: fsdp.load_checkpoint(state, place))
        assert time.monotonic() - began < 10


def check_default_planner(folder):
    """Without our planner another container is refused, on all ranks and by name, and never cast."""
    state = {"model": fsdp2_bytes().state_dict()}
    try:
        dcp.load(state, checkpoint_id=f"{folder}/dcp-fsdp2-2")
    except BaseException as error:
        assert "Size mismatch" in str(error) and "base.weight" in str(error), error
    else:
        raise AssertionError("loaded")


def check_killed(what, folder):
    """Rank 1 is killed while a second checkpoint is written: beside the first one, or over it."""
    with no_launch():
        torch.save(dict(new(seed=0).state_dict()), f"{folder}/good.pt")
    if what == "streamed":
        fsdp.save_pretrained(start_of(fsdp2), f"{folder}/streamed", max_shard_size=2000)
        place, name = gathering, "whole"
    else:
        dcp.save({"model": start_of(fsdp2).state_dict()}, checkpoint_id=f"{folder}/step-1")
        place, name = dcp.FileSystemWriter, "write_data"
    call = getattr(place, name)

    def dies(*arguments):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments)

    setattr(place, name, dies)
    if what == "streamed":
        fsdp.save_pretrained(fsdp2(), f"{folder}/streamed", max_shard_size=2000)
    else:
        dcp.save({"model": fsdp2().state_dict()}, checkpoint_id=f"{folder}/step-2")
    print("saved without a rank", flush=True)


def check_streamed(form, folder):
    """Files of a model that no ranks divide evenly, and whose shards are replicated: those of one process."""
    target = empty(f"{folder}/streamed-{name_of(form)}")
    fsdp.save_pretrained(start_of(form), target)
    with no_launch():
        expected = new(seed=0, storage=BYTES if form is fsdp2_bytes else torch.uint8).state_dict()
    found = load_file(f"{target}/model.safetensors")
    assert found.keys() == expected.keys() and all(same_bytes(found[key], expected[key]) for key in expected)


def checks():
    """All of one number of ranks; whole state dicts and adapters with the first form."""
    world = dist.get_world_size()
    forms = FORMS[world]
    found = {f"save_{form.__name__}": functools.partial(check_save, form) for form in forms}
    for form in forms:
        for check in (check_load, check_plain_load):
            found[f"{check.__name__.removeprefix('check_')}_{form.__name__}"] = functools.partial(check, form)
    for form in forms if world == 2 else forms[:1]:
        found[f"full_{form.__name__}"] = functools.partial(check_full, form)
        found[f"adapters_{form.__name__}"] = functools.partial(check_adapters, form)
    if world == 4:
        # torch cannot load the optimizer of FSDP1 where a rank has nothing of a unit
        found["plain_load_fsdp1"] = functools.partial(check_plain_load, fsdp1)
        found |= {f"streamed_{form.__name__}": functools.partial(check_streamed, form) for form in forms}
    if world == 2:
        found |= {f"fault_{fault.__name__}": functools.partial(check_fault, fault) for fault in FAULTS}
        found["default_planner"] = check_default_planner
    return found


def main():
    _, args = start()
    if args.only:
        check_killed(args.only.removeprefix("killed_"), args.dir)
    results = {}
    for name, check in checks().items():
        try:
            results[name] = {"ok": check(args.dir)}
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-3000:]}
            break  # collectives of the ranks may be out of step
    finish(results, args)


if __name__ == "__main__":
    main()
