"""Optimizers on sharded parameters, and under Trainer. Launched by tests/sharding/test_fsdp_optim.py.

    torchrun --nproc-per-node 2 tests/fsdp/optimizers.py --out r.json --dir FOLDER

Each check raises where something is not exact, or where bad input is taken.
"""

import traceback
from copy import deepcopy
from math import prod
from pathlib import Path

import bitsandbytes as bnb
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bitshard.fsdp import load_checkpoint
from common import finish, here, start
from helpers.copies import pickled
from helpers.optim import CLASSES, gradients, make, same_state, values_of
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

# On two ranks: rows of whole blocks, even and uneven; equal shards of whole blocks; an empty shard; then blocks of the
# shards alone; small ones that stay in 32 bits.
ALIGNED = [(6, 256), (5, 512), (64, 64), (1, 4096)]
SHAPES = [*ALIGNED, (41, 100), (5,), ()]
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=False)


class Parameters(nn.Module):
    """Parameters of given shapes on this rank's device; FSDP2 does not take a 0-dim one, which stays as it is."""

    def __init__(self, shapes, dtype=torch.float32):
        super().__init__()
        for index, shape in enumerate(shapes):
            generator = torch.Generator().manual_seed(index)
            value = torch.randn(shape, generator=generator).to(here(), dtype)
            self.register_parameter(f"p{index}", nn.Parameter(value))


def sharded(shapes, dtype=torch.float32):
    module = Parameters(shapes, dtype)
    return fully_shard(module, ignored_params={p for p in module.parameters() if p.dim() == 0})


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def set_gradients(module, step):
    """The same gradients whether the parameters are sharded or not."""
    for p, gradient in zip(module.parameters(), gradients(module.parameters(), step), strict=True):
        in_parts = isinstance(p, DTensor)
        p.grad = distribute_tensor(gradient, p.device_mesh, p.placements) if in_parts else gradient.to(p.device)


def run(module, optimizer, steps):
    """Parameters after some steps."""
    for step in steps:
        set_gradients(module, step)
        optimizer.step()
    return [whole(p).detach().clone() for p in module.parameters()]


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def check_steps(device, args):
    """The steps of one process: exact where blocks are the same, norms that are bounded within rounding.

    Where the blocks are the shard's own, exactly those of a process that has this rank's part alone.
    """
    for name in CLASSES:
        one, many = Parameters(SHAPES), sharded(SHAPES)
        parts = nn.ParameterList(nn.Parameter(local(p).clone()) for p in many.parameters())
        optimizer = make(name, many.parameters())
        left, right = run(one, make(name, one.parameters()), range(3)), run(many, optimizer, range(3))
        alone = make(name, parts, min_8bit_size=1)
        for step in range(3):
            set_gradients(many, step)
            for part, p in zip(parts, many.parameters(), strict=True):
                part.grad = local(p.grad).clone()
            alone.step()
        for index, (shape, p) in enumerate(zip(SHAPES, many.parameters(), strict=True)):
            quantized = optimizer.state[p]["state1"].dtype == torch.uint8
            bounded = name.startswith(("LAMB", "LARS")) and not quantized
            if bounded:
                torch.testing.assert_close(left[index].cpu(), right[index].cpu(), rtol=1e-5, atol=1e-6)
            else:
                same = torch.equal(left[index].cpu(), right[index].cpu())
                assert same or (quantized and shape not in ALIGNED), (name, shape)
            if quantized:
                assert torch.equal(parts[index], local(p)), (name, shape)
    return len(CLASSES)


def local(p):
    return p.to_local().detach() if isinstance(p, DTensor) else p.detach()


def check_size_decides(device, args):
    """8 bits from 4096 elements on, of the whole parameter; an empty shard has empty state."""
    module = sharded([(1, 4096), (2, 2048), (4, 1000)])
    optimizer = bnb.optim.AdamW8bit(module.parameters())
    run(module, optimizer, range(1))
    states = [optimizer.state[p] for p in module.parameters()]
    assert [state["state1"].dtype for state in states] == [torch.uint8, torch.uint8, torch.float32]
    local = (1 if dist.get_rank() == 0 else 0, 4096)
    assert tuple(states[0]["state1"].shape) == local and states[0]["absmax1"].numel() == local[0] * 16
    return "ok"


def check_checkpoints(device, args):
    """torch.distributed.checkpoint, and whole dicts from rank 0: the steps go on as if nothing had been."""
    for name in ("AdamW8bit", "AdEMAMix8bit", "Lion8bit", "AdamW32bit"):
        through = sharded(SHAPES)
        optimizer = make(name, through.parameters())
        run(through, optimizer, range(2))
        saved = get_optimizer_state_dict(through, optimizer)
        folder = f"{args.dir}/{name}"
        dcp.save(saved, checkpoint_id=folder)
        full = get_optimizer_state_dict(through, optimizer, options=WHOLE)
        assert all(tensor.is_contiguous() for tensor in tensors_of(full)), name
        full = deepcopy(full)  # plain tensors share memory
        check_copies(saved, full)
        values = [whole(p).detach().clone() for p in through.parameters()]
        expected = run(through, optimizer, range(2, 4))
        for way in ("dcp", "whole", "broadcast"):
            other = sharded(SHAPES)
            set_values(other, values)
            resumed = make(name, other.parameters())
            options = None
            if way == "dcp":
                taken = get_optimizer_state_dict(other, resumed)
                dcp.load(taken, checkpoint_id=folder)
            elif way == "whole":
                taken, options = full, WHOLE
            else:
                taken = full if dist.get_rank() == 0 else {}
                options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_optimizer_state_dict(other, resumed, taken, options=options)
            assert equal(run(other, resumed, range(2, 4)), expected), (name, way)
    return "ok"


def check_copies(saved, full):
    """A sharded state dict that is copied is gathered as it was; pickled it needs nothing of ours."""
    copied = deepcopy(saved)
    for entry, copy in zip(tensors_of(saved), tensors_of(copied), strict=True):
        assert type(copy) is type(entry) and (
            local(copy).data_ptr() != local(entry).data_ptr() or not local(copy).numel()
        )
        assert type(pickled(entry)) in (torch.Tensor, DTensor)
    gathered = [whole(tensor) for tensor in tensors_of(copied)]
    assert equal(gathered, tensors_of(full)) and all(tensor.is_contiguous() for tensor in gathered)


def tensors_of(value):
    """All tensors in dicts of dicts."""
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in tensors_of(part)]
    return [value] if isinstance(value, torch.Tensor) else []


def check_resharding(device, args):
    """Between N shards and a shard that every rank has whole, both ways, by every way that torch knows."""
    world = dist.get_world_size()
    mesh = init_device_mesh(device.type, (world, 1), mesh_dim_names=("replicate", "shard"))
    for name in ("AdamW8bit", "AdEMAMix8bit", "Lion8bit", "AdamW32bit"):
        models = [sharded(SHAPES), on_mesh(SHAPES, mesh)]
        optimizers = [make(name, model.parameters()) for model in models]
        for source, target in ((0, 1), (1, 0)):
            run(models[source], optimizers[source], range(2))
            for way in WAYS:
                other = (sharded(SHAPES), on_mesh(SHAPES, mesh))[target]
                resumed = make(name, other.parameters())
                folder = f"{args.dir}/resharding-{name}-{source}"
                hand_over(models[source], optimizers[source], other, resumed, way, folder)
                found, expected = states_of(other, resumed), states_of(models[source], optimizers[source])
                same_values(found, expected, f"{name} {way} from {source}")
            states = states_of(models[source], optimizers[source])
            if dist.get_rank() == 0:
                torch.save(states, f"{args.dir}/from-{source}-{name}.pt")
    return "ok"


def check_elsewhere(device, args):
    """What another number of ranks wrote in `check_resharding`: by torch.distributed.checkpoint into these shards."""
    folders = sorted(Path(args.dir).glob("resharding-*-0"))
    for folder in folders:
        name = folder.name.split("-")[1]
        other = sharded(SHAPES)
        resumed = make(name, other.parameters())
        taken = get_optimizer_state_dict(other, resumed)
        dcp.load(taken, checkpoint_id=folder)
        set_optimizer_state_dict(other, resumed, taken)
        rows = [shape for shape in SHAPES if prod(shape[1:]) % 256 == 0]
        expected = torch.load(f"{args.dir}/from-0-{name}.pt", map_location=device)
        same_values(states_of(other, resumed), expected, name, rows)
        assert all(torch.isfinite(p).all() for p in run(other, resumed, range(2, 4))), name
    return len(folders)


def check_other_bits(device, args):
    """State that was saved in 8 bits and is wanted in 32, or the reverse: never codes as values.

    A whole dict may stay in 8 bits, as in one process; else all ranks refuse it.
    """
    for small, way in ((1, "dcp"), (1, "whole"), (1, "broadcast"), (10**6, "dcp")):
        models = [sharded([(6, 256), (41, 100)]) for _ in range(2)]
        sizes = zip(models, (small, 4000), strict=True)
        optimizers = [make("AdamW8bit", model.parameters(), min_8bit_size=size) for model, size in sizes]
        run(models[0], optimizers[0], range(2))
        try:
            hand_over(models[0], optimizers[0], models[1], optimizers[1], way, f"{args.dir}/bits-{small}-{way}")
        except (ValueError, CheckpointException) as error:
            text = "saved in 8 bits, and this optimizer" if small == 1 else "Missing key in checkpoint"
            assert text in str(error), error
            continue
        assert way != "dcp", "not refused"
        found, expected = (states_of(*pair) for pair in zip(models[::-1], optimizers[::-1], strict=True))
        same_values(found, expected, way, [(6, 256), (41, 100)])
    return "ok"


WAYS = ("dcp", "whole", "broadcast")


def on_mesh(shapes, mesh):
    module = Parameters(shapes)
    return fully_shard(module, mesh=mesh, ignored_params={p for p in module.parameters() if p.dim() == 0})


def hand_over(model, optimizer, other, resumed, way, folder):
    """The state of one optimizer to another one, as a training script does it."""
    options = None
    if way == "dcp":
        dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=folder)
        taken = get_optimizer_state_dict(other, resumed)
        dcp.load(taken, checkpoint_id=folder)
    else:
        taken = deepcopy(get_optimizer_state_dict(model, optimizer, options=WHOLE))
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=way == "broadcast")
        taken = taken if way == "whole" or dist.get_rank() == 0 else {}
    set_optimizer_state_dict(other, resumed, taken, options=options)


def states_of(model, optimizer):
    """For each parameter {"step", n: (values, scale of each value's block, scales of 8 bits?)}, whole."""
    found = []
    for p in model.parameters():
        state = optimizer.state[p]
        entry = {"step": state["step"]}
        for n in (1, 2):
            if f"state{n}" not in state:
                continue
            values = values_of(state, n)
            scales = torch.zeros_like(values)
            if f"absmax{n}" in state:
                size = local(p).numel()
                scales = state[f"absmax{n}"].repeat_interleave(256, -1)[..., :size].reshape(values.shape)
            entry[n] = tuple(whole_of(value, p) for value in (values, scales))
        found.append(entry)
    return found


def whole_of(value, p):
    """A local tensor in the shape of this rank's part of `p`, or a pair of them, from all ranks."""
    if not isinstance(p, DTensor):
        return value
    if value.dim() > p.dim():
        return torch.stack([whole_of(part, p) for part in value])
    return DTensor.from_local(value, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()).full_tensor()


def same_values(found, expected, what, exact=ALIGNED):
    """Equal for shapes in `exact`; else each value within half of the map's widest step, times its block's scale.

    The step is 0.9 / 64, near the largest value of a block.
    """
    for left, right in zip(found, expected, strict=True):
        assert left.keys() == right.keys() and left["step"] == right["step"], what
        for n in set(left) - {"step"}:
            values, scales = left[n]
            error = (values - right[n][0]).abs()
            shape = tuple(values.shape[-2:])
            bound = 0.0 if shape in exact else scales * (0.5 * 0.9 / 64) * 1.00001
            assert (error <= bound).all(), (what, shape, n, float((error - bound).max()))


def set_values(module, values):
    with torch.no_grad():
        for p, value in zip(module.parameters(), values, strict=True):
            p.copy_(distribute_tensor(value, p.device_mesh, p.placements) if isinstance(p, DTensor) else value)


def by_index(full, module):
    """A whole state dict with names as one of one process, with numbers."""
    names = [name for name, _ in module.named_parameters()]
    groups = [{**group, "params": [names.index(name) for name in group["params"]]} for group in full["param_groups"]]
    return {"state": {names.index(name): value for name, value in full["state"].items()}, "param_groups": groups}


def check_other_numbers_of_ranks(device, args):
    """From two ranks to one and back: exact where the blocks are the same, else the values within a step of the map."""
    for name in ("AdamW8bit", "AdEMAMix8bit", "AdamW32bit"):
        many, one = sharded(SHAPES), Parameters(SHAPES)
        own, there = make(name, many.parameters()), make(name, one.parameters())
        run(many, own, range(2))
        run(one, there, range(2))
        full = by_index(get_optimizer_state_dict(many, own, options=WHOLE), many)
        alone = make(name, one.parameters())
        alone.load_state_dict(full)
        back = make(name, many.parameters())
        back.load_state_dict(there.state_dict())
        for shape, p, q in zip(SHAPES, one.parameters(), many.parameters(), strict=True):
            exact = shape in ALIGNED or "8bit" not in name
            same_state(alone.state[p], there.state[p], exact, f"{name} {shape} to one")
            same_state(back.state[q], own.state[q], exact, f"{name} {shape} to two")
        again = make(name, many.parameters())
        again.load_state_dict(full)
        for q in many.parameters():
            same_state(again.state[q], own.state[q], True, f"{name} {tuple(q.shape)} whole to two")
    return "ok"


def check_one_process_through_checkpoints(device, args):
    """torch.distributed.checkpoint between shards and a model that is not sharded, both ways, 8 and 32 bits.

    The bytes and scales that were saved where blocks are the same; the values within half a step of the map elsewhere.
    """
    for name in ("AdamW8bit", "AdEMAMix8bit", "Lion8bit", "AdamW32bit"):
        models, others = ([make_one(SHAPES) for make_one in (sharded, Parameters)] for _ in range(2))
        for source, target in ((0, 1), (1, 0)):
            own, resumed = (make(name, model.parameters()) for model in (models[source], others[target]))
            run(models[source], own, range(2))
            folder = f"{args.dir}/one-{name}-{source}"
            dcp.save(get_optimizer_state_dict(models[source], own), checkpoint_id=folder)
            taken = get_optimizer_state_dict(others[target], resumed)
            load_checkpoint(taken, folder)
            set_optimizer_state_dict(others[target], resumed, taken)
            straight = make(name, others[target].parameters())
            straight.load_state_dict(by_index(whole_dict(models[source], own), models[source]))
            found, expected = states_of(others[target], resumed), states_of(models[source], own)
            same_values(found, expected, f"{name} from {source}")
            for shape, p in zip(SHAPES, others[target].parameters(), strict=True):
                same_state(resumed.state[p], straight.state[p], True, f"{name} {shape} from {source}")
            if source == 0:
                same_codes(models[0], own, others[1], resumed, f"{name} {source}")
    return "ok"


def whole_dict(model, optimizer):
    return deepcopy(get_optimizer_state_dict(model, optimizer, options=WHOLE))


def same_codes(model, own, other, resumed, what):
    """Where this rank's shard begins with a block of the whole parameter, and ends with one, bytes and scales agree."""
    for shape, p, q in zip(SHAPES, model.parameters(), other.parameters(), strict=True):
        if shape not in ALIGNED or own.state[p]["state1"].dtype != torch.uint8 or not local(p).numel():
            continue
        begin = -(-shape[0] // dist.get_world_size()) * dist.get_rank() * prod(shape[1:])
        end = begin + local(p).numel()
        for n in (n for n in (1, 2) if f"state{n}" in own.state[p]):
            codes, scales = (resumed.state[q][f"{key}{n}"] for key in ("state", "absmax"))
            lead = codes.numel() // q.numel()
            mine, there = own.state[p][f"state{n}"].reshape(lead, -1), codes.reshape(lead, -1)[:, begin:end]
            assert torch.equal(mine, there), (what, shape, n)
            assert torch.equal(
                own.state[p][f"absmax{n}"].reshape(lead, -1),
                scales.reshape(lead, -1)[:, begin // 256 : -(-end // 256)],
            ), (what, shape, n)


def check_one_process_elsewhere(device, args):
    """What one process and two ranks wrote above, into these shards and into one process."""
    folders = sorted(Path(args.dir).glob("one-*"))
    rows = [shape for shape in SHAPES if prod(shape[1:]) % 256 == 0]
    for folder in folders:
        name, source = folder.name.split("-")[1:]
        alone = Parameters(SHAPES)
        first = make(name, alone.parameters())
        run(alone, first, range(2))
        in_parts = torch.load(f"{args.dir}/from-0-{name}.pt", map_location=device)
        expected = in_parts if source == "0" else states_of(alone, first)
        for make_one in (sharded, Parameters):
            other = make_one(SHAPES)
            resumed = make(name, other.parameters())
            taken = get_optimizer_state_dict(other, resumed)
            load_checkpoint(taken, folder)
            set_optimizer_state_dict(other, resumed, taken)
            exact = SHAPES if source == "1" and make_one is Parameters else rows
            same_values(states_of(other, resumed), expected, folder.name, exact)
            assert all(torch.isfinite(p).all() for p in run(other, resumed, range(2, 4))), name
    return len(folders)


def check_bits_of_one_process(device, args):
    """Codes that a checkpoint holds are never taken for float32 values, nor values for codes, sharded or not."""
    shapes = [(6, 256), (41, 100)]
    for number, (source, target) in enumerate(((sharded, Parameters), (Parameters, sharded), (Parameters, Parameters))):
        for small in (1, 10**6):
            models = [source(shapes), target(shapes)]
            sizes = zip(models, (small, 4000), strict=True)
            optimizers = [make("AdamW8bit", model.parameters(), min_8bit_size=size) for model, size in sizes]
            run(models[0], optimizers[0], range(2))
            folder = f"{args.dir}/bits-of-one-{number}-{small}"
            dcp.save(get_optimizer_state_dict(models[0], optimizers[0]), checkpoint_id=folder)
            taken = get_optimizer_state_dict(models[1], optimizers[1])
            refuses(lambda taken=taken, folder=folder: load_checkpoint(taken, folder), "min_8bit_size")
    return "ok"


def check_other_meshes(device, args):
    """Columns over the ranks; replicas; gradients placed otherwise are refused, and nothing changes."""
    world = dist.get_world_size()
    flat, replicas = init_device_mesh(device.type, (world,)), init_device_mesh(device.type, (world, 1))
    for mesh, placements in ((flat, [Shard(1)]), (replicas, replicas_of(world))):
        value = torch.randn(16, 512, generator=torch.Generator().manual_seed(0))
        p, one = nn.Parameter(distribute_tensor(value, mesh, placements)), nn.Parameter(value.clone().to(device))
        optimizer, alone = make("AdamW8bit", [p]), make("AdamW8bit", [one])
        for step in range(2):
            one.grad = gradients([one], step)[0].to(device)
            p.grad = distribute_tensor(one.grad, mesh, placements)
            optimizer.step()
            alone.step()
        saved = optimizer.state_dict()
        steps_as_a_copy(optimizer, p)
        other = make("AdamW8bit", [p])
        other.load_state_dict(saved)
        same_state(other.state[p], optimizer.state[p], True, str(placements))
        torch.testing.assert_close(p.full_tensor(), one, rtol=1e-3, atol=1e-4)
        if placements != [Shard(1)]:
            assert torch.equal(p.full_tensor(), one)
    p = nn.Parameter(distribute_tensor(value, flat, [Shard(0)]))
    other = nn.Parameter(distribute_tensor(value, flat, [Shard(0)]))
    optimizer = make("AdamW8bit", [other, p])
    other.grad = distribute_tensor(value, flat, [Shard(0)])
    p.grad = distribute_tensor(value, flat, [Shard(1)])
    before = other.to_local().clone()
    refuses(lambda: optimizer.step(), "placed")
    assert torch.equal(before, other.to_local()) and not optimizer.state
    return "ok"


def steps_as_a_copy(optimizer, p):
    """A copied optimizer of a DTensor has parameters of its own, and steps as one that loaded its state."""
    copied = deepcopy(optimizer)
    (q,) = copied.param_groups[0]["params"]
    assert q.placements == p.placements and local(q).data_ptr() != local(p).data_ptr()
    r = nn.Parameter(DTensor.from_local(local(p).clone(), p.device_mesh, p.placements))
    other = make("AdamW8bit", [r])
    other.load_state_dict(optimizer.state_dict())
    q.grad = r.grad = p.grad
    copied.step()
    other.step()
    assert torch.equal(local(q), local(r)) and not torch.equal(local(q), local(p))
    same_state(copied.state[q], other.state[r], True, "copy")


def replicas_of(world):
    from torch.distributed.tensor import Replicate

    return [Replicate(), Shard(0)]


def refuses(call, text):
    try:
        call()
    except (ValueError, TypeError) as error:
        assert text in str(error), error
        return
    raise AssertionError(f"not refused: {text}")


def check_refused(device, args):
    """DTensors where none are wanted, and scales that are of another way of sharding."""
    many, one = sharded([(41, 100)]), Parameters([(41, 100)])
    own, there = make("AdamW8bit", many.parameters()), make("AdamW8bit", one.parameters())
    run(many, own, range(1))
    saved = own.state_dict()
    refuses(lambda: there.load_state_dict(saved), "is a DTensor and its parameter is not")
    hidden = saved["state"][0]["__bnb_optimizer_quant_state__"]
    cut = whole(hidden["absmax1"])[:, :-1]
    hidden["absmax1"] = cut
    before = {key: value for key, value in own.state[next(many.parameters())].items()}
    refuses(lambda: own.load_state_dict(saved), "none of blocks of 256")
    assert own.state[next(many.parameters())] == before
    return "ok"


def check_fsdp1(device, args):
    """FSDP1's dicts, whole and sharded: the steps go on as if nothing had been.

    The whole one stays where it is: with offload_to_cpu, use_orig_params and no GPU torch 2.13 hands out views of one
    buffer that the next entry overwrites (`_allgather_orig_param_states`), for torch.optim.AdamW too.
    """
    ways = ((False, "whole", 1), (True, "whole", 1), (True, "sharded", 1), (True, "whole", 3500))
    for name in CLASSES:
        for orig, kind, size in ways:  # 3500: the first layer's weight is 8 bits on one rank and 32 on the other
            models = [flattened(orig) for _ in range(2)]
            optimizers = [make(name, model.parameters(), min_8bit_size=size) for model in models]
            for model in models:
                set_kind(model, kind)
            steps(models[0], optimizers[0], range(2))
            saved = deepcopy(FullyShardedDataParallel.optim_state_dict(models[0], optimizers[0]))
            expected = steps(models[0], optimizers[0], range(2, 4))
            steps(models[1], optimizers[1], range(2))
            optimizers[1] = make(name, models[1].parameters(), min_8bit_size=size)
            taken = FullyShardedDataParallel.optim_state_dict_to_load(models[1], optimizers[1], saved)
            optimizers[1].load_state_dict(taken)
            assert steps(models[1], optimizers[1], range(2, 4)) == expected, (name, orig, kind, size)
            if kind == "whole" and name in ELSEWHERE:
                into_one_process(name, saved, size)
                if dist.get_rank() == 0:
                    torch.save(saved, f"{args.dir}/fsdp1-{name}-{orig}-{size}.pt")
    return len(CLASSES)


ELSEWHERE = ("AdamW8bit", "AdEMAMix8bit", "Lion8bit", "AdamW32bit")


def into_one_process(name, saved, size):
    """FSDP1's whole dict in an optimizer of a model that is not sharded; its values are the same, or near."""
    torch.manual_seed(0)
    model = layers()
    optimizer = make(name, model.parameters(), min_8bit_size=size)
    optimizer.load_state_dict(by_index(saved, model))
    for key, p in model.named_parameters():
        state = optimizer.state[p]
        for n in (1, 2):
            for index, (values, scales) in enumerate(pairs_of(state, n, n == 1 and "AdEMAMix" in name)):
                near(values, scales, in_flat(saved["state"][key], n, index, name), (name, key, n))


def pairs_of(state, n, paired):
    """(values, scales of their blocks) of a state that is not sharded; two of AdEMAMix's first."""
    if f"state{n}" not in state:
        return []
    values, absmax = values_of(state, n), state.get(f"absmax{n}")
    scales = torch.zeros_like(values)
    if absmax is not None:
        size = values.numel() if absmax.dim() == 1 else values[0].numel()
        scales = absmax.repeat_interleave(256, -1)[..., :size].reshape(values.shape)
    return list(zip(values, scales, strict=True)) if paired else [(values, scales)]


def in_flat(entries, n, index, name):
    """float32 values of what `bitshard.optim.flat` wrote."""
    end = f"{n}_{index}" if n == 1 and name.startswith("AdEMAMix") else f"{n}"
    value, scale = entries[f"state{end}"], entries.get(f"absmax{end}")
    if scale is None:
        return value
    map = bnb.functional.create_dynamic_map(signed=n == 1).to(value.device)
    return torch.where(scale < 0, value, map[value.clamp(0, 255).long()] * scale)


def near(values, scales, expected, what):
    error = (values - expected.view(values.shape)).abs()
    assert (error <= scales * (0.5 * 0.9 / 64) * 1.00001).all(), (what, float(error.max()))


def check_fsdp1_elsewhere(device, args):
    """What another number of ranks wrote in `check_fsdp1`; three steps on, losses near those of one process."""
    files = sorted(Path(args.dir).glob("fsdp1-*.pt"))
    for file in files:
        _, name, orig, size = file.stem.split("-")
        saved, model = torch.load(file, weights_only=True, map_location=device), flattened(orig == "True")
        set_kind(model, "whole")
        steps(model, make(name, model.parameters()), range(1))
        optimizer = make(name, model.parameters(), min_8bit_size=int(size))
        taken = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, deepcopy(saved))
        optimizer.load_state_dict(taken)
        again = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        for key, entries in again["state"].items():
            for n in (1, 2):
                for index in range(2 if n == 1 and "AdEMAMix" in name else 1):
                    if any(entry.startswith(f"state{n}") for entry in entries):
                        found, old = (in_flat(e, n, index, name) for e in (entries, saved["state"][key]))
                        end = f"{n}_{index}" if "AdEMAMix" in name and n == 1 else f"{n}"
                        scales = entries.get(f"absmax{end}", torch.zeros(()))
                        near(found, scales.clamp(min=0), old, (file.stem, key, n))
        assert all(loss < 100 for loss in steps(model, optimizer, range(3)))
    return len(files)


def set_kind(model, kind):
    """What FSDP1's `optim_state_dict` makes: a whole dict, or a sharded one."""
    if kind == "whole":
        options = (StateDictType.FULL_STATE_DICT, None, FullOptimStateDictConfig(offload_to_cpu=False))
    else:
        options = (StateDictType.SHARDED_STATE_DICT, None, ShardedOptimStateDictConfig(offload_to_cpu=False))
    FullyShardedDataParallel.set_state_dict_type(model, *options)


def flattened(orig):
    """Two layers in one flat parameter of 7,303 elements: padded on two ranks, whose parts begin within blocks."""
    torch.manual_seed(0)
    return FullyShardedDataParallel(layers(), device_id=here(), use_orig_params=orig)


def layers():
    return nn.Sequential(nn.Linear(67, 106), nn.Linear(106, 1, bias=False)).to(here())


def steps(model, optimizer, numbers):
    """Losses of some steps."""
    losses = []
    for number in numbers:
        x = torch.randn(8, 67, generator=torch.Generator().manual_seed(number)).to(next(model.parameters()).device)
        loss = (model(x) - x[:, :1]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


CHECKS = (
    check_steps,
    check_size_decides,
    check_checkpoints,
    check_resharding,
    check_elsewhere,
    check_other_bits,
    check_other_numbers_of_ranks,
    check_one_process_through_checkpoints,
    check_one_process_elsewhere,
    check_bits_of_one_process,
    check_other_meshes,
    check_refused,
    check_fsdp1,
    check_fsdp1_elsewhere,
)


def main():
    device, args = start()
    results = {}
    for check in CHECKS:
        name = check.__name__.removeprefix("check_")
        if args.only and name not in args.only.split(","):
            continue
        try:
            results[name] = {"ok": check(device, args)}
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-3000:]}
            print(f"rank {dist.get_rank()} {name} {results[name]['trace']}", flush=True)
            break  # collectives of the ranks may be out of step
    finish(results, args)


if __name__ == "__main__":
    main()
