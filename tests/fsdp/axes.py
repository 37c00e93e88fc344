"""What the matrix leaves out, one thing at a time: offload, checkpointing, state dicts, resume, loss curves, misuse.

    torchrun --nproc-per-node 2 tests/fsdp/axes.py --out result.json [--only NAME,NAME] [--dir SHARED_FOLDER]

Every check raises where something is not exact; its error text becomes the result. NCCL with GPUs, else gloo.
"""

import copy
import functools
import io
import os
import traceback

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bitshard import _C, fsdp, gather
from bitshard.functional import dequantize_4bit
from bitshard.linear import Linear4bit
from bitshard.shard import PackedShard
from bitshard.sharding import entries
from bitshard.tensor import Params4bit
from common import STORAGES, Block, Spy, as_bytes, finish, gathered_dtypes, hostile_values, plant, start
from matrix import BASE_DTYPE, shard_fsdp1
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

SHAPE = (35, 33)
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def build(device, seed=0, storage=torch.uint8, dtype=BASE_DTYPE, shape=SHAPE):
    n, k = shape
    return nn.Sequential(Block(n, k, dtype, storage, device, seed), Block(k, n, dtype, storage, device, seed + 7))


def shard(model, **options):
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def layers(model):
    return [module for module in model.modules() if isinstance(module, Linear4bit)]


def batch(device, dtype=BASE_DTYPE, rows=4, seed=3):
    return torch.randn(rows, SHAPE[1], generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def exact(model, device, like=None, steps=2, backward=True):
    """Run `model`, which must see the bytes and scales of `like`, an unsharded model."""
    spies = [Spy(layer) for layer in layers(like)] if like is not None else model.spies
    for spy, layer in zip(spies, layers(model), strict=True):
        spy.seen.clear()
        layer.register_forward_hook(spy.look)
    for _ in range(steps):
        y = model(batch(device))
        if backward:
            y.float().sum().backward()
    for spy in spies:
        assert len(spy.seen) >= steps and spy.wrong() == [0, 0], spy.seen


def raises(kind, text, function):
    """`function` must raise `kind` with every word of `text` in it, on this rank."""
    try:
        function()
    except kind as error:
        missing = [word for word in text.split("|") if word not in str(error)]
        assert not missing, f"{missing} not in: {error}"
        return
    raise AssertionError(f"{kind} was not raised")


def check_offload(device, args):
    for pin in (False, True) if device.type == "cuda" else (False,):
        model = shard(build(device), offload_policy=CPUOffloadPolicy(pin_memory=pin))
        exact(model, device, build(device), steps=3)
        for layer in layers(model):
            assert layer.weight._local_tensor.device.type == "cpu"
            assert dist.get_world_size() == 1 or layer.quant_state.sharded.scales.device.type == "cpu"


def check_checkpointing(device, args):
    plain, wrapped = shard(build(device)), build(device)
    for i, block in enumerate(wrapped):
        wrapped[i] = checkpoint_wrapper(block)
    wrapped = shard(wrapped)
    exact(plain, device, build(device), steps=1)
    exact(wrapped, device, build(device), steps=1)
    for a, b in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad.to_local(), b.grad.to_local())


def check_no_reshard(device, args):
    model = shard(build(device), reshard_after_forward=False)
    exact(model, device, build(device), steps=3)


def check_freed_after_use(device, args):
    """Between forwards the gathered bytes and scales hold no memory, and the layer says that it is sharded."""
    model = shard(build(device))
    model(batch(device)).float().sum().backward()
    for layer in layers(model):
        assert layer.quant_state.absmax.untyped_storage().nbytes() == 0
        assert isinstance(layer.weight, DTensor)
        raises(ValueError, "sharded", functools.partial(Linear4bit.forward, layer, batch(device)))
        raises(ValueError, "full_state_dict", layer.quant_state.as_dict)


def check_single_layers(device, args):
    """`fully_shard` of the 4-bit layers themselves, whose units then hold nothing else."""
    model, alone = build(device), build(device)
    for layer in layers(model):
        fully_shard(layer)
    fully_shard(model)
    for _ in range(2):
        y = model(batch(device))
        assert torch.equal(y, alone(batch(device)))
        y.float().sum().backward()
    assert all(isinstance(layer.weight, DTensor) for layer in layers(model))


def check_inference_mode(device, args):
    """A first forward under inference_mode, where composite ops reach the shards whole."""
    model, alone = shard(build(device)), build(device)
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(model(batch(device)), alone(batch(device)))


def check_assign(device, args):
    """`layer.weight = new`, as peft's merging does it, replaces the shards of every rank and nothing else.

    Sharded or gathered at the moment, before and after the first forward, offloaded; new values as a DTensor too.
    """
    sizes = [layer.quant_state.shape for layer in layers(build(device))]
    wanted = [hostile_values(n, k, BASE_DTYPE, 50 + 7 * i) for i, (n, k) in enumerate(sizes)]
    for forwards, unshard, options in (
        (0, False, {}),
        (1, False, {}),
        (1, True, {}),
        (1, False, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    ):
        model = shard(build(device), **options)
        for _ in range(forwards):
            model(batch(device)).float().sum().backward()
        for block in model:
            if unshard:
                block.unshard()
        for layer, values in zip(layers(model), wanted, strict=True):
            weight = layer.weight
            assert type(weight).__name__ == "Params4bit" and isinstance(weight, DTensor) != unshard
            if not unshard:
                mesh = weight.device_mesh
                values = distribute_tensor(values.to(mesh.device_type), mesh, [Shard(0)] * mesh.ndim)
            new = Params4bit(values, **{**weight.__dict__, "bnb_quantized": False}).to(weight.device)
            layer.weight = new
            assert layer.weight is weight, "FSDP2 would drop any other weight with its next gather"
        # the mean of the scales differs in its last place between CPU and GPU: quantize where the new weights were
        like = build(weight.device, seed=50).to(device)
        for layer, other in zip(layers(model), layers(like), strict=True):
            state, wanted_state = layer.quant_state, other.quant_state
            assert float(state.offset) == float(wanted_state.offset)
            assert torch.equal(state.state2.absmax.cpu(), wanted_state.state2.absmax.cpu())
            assert int(state.checksum) == int(other.quant_state.checksum)
        exact(model, device, like, steps=3)


def check_assign_misfits(device, args):
    """A new weight of another shape or format, one not quantized yet, a dense tensor: all raise, nothing changes."""
    model = shard(build(device))
    layer = layers(model)[0]
    n, k = layer.quant_state.shape
    for shape, options, text in (
        ((k, n), {}, "shape"),
        ((n, k), {"blocksize": 128}, "blocksize 128|64"),
        ((n, k), {"quant_type": "fp4"}, "fp4|nf4"),
        ((n, k), {"compress_statistics": False}, "nested"),
    ):
        keywords = {**layer.weight.__dict__, "bnb_quantized": False, **options}
        new = Params4bit(torch.ones(shape, dtype=BASE_DTYPE, device=device), **keywords).to(device)
        raises(ValueError, text, functools.partial(setattr, layer, "weight", new))
    for new in (Params4bit(torch.ones(n, k), quant_type="nf4"), nn.Parameter(torch.ones(n, k)), torch.ones(n, k)):
        raises(ValueError, "sharded by FSDP2", functools.partial(setattr, layer, "weight", new))
    exact(model, device, build(device))


def check_dequantize(device, args):
    """A sharded weight dequantizes to what the whole one does, on every rank, before any forward and after."""
    for storage in (torch.uint8, torch.float32):
        model, reference = shard(build(device, storage=storage)), build(device, storage=storage)
        for _ in range(2):
            for layer, alone in zip(layers(model), layers(reference), strict=True):
                values = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
                expected = dequantize_4bit(alone.weight.data, alone.quant_state)
                assert torch.equal(values.to_local(), expected) and values.size() == expected.size()
            model(batch(device)).float().sum().backward()


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


def check_hsdp(device, args):
    world = dist.get_world_size()
    shapes = [(2, world // 2)] if world % 2 == 0 else []
    for shape in [*shapes, (1, world)]:
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        model = shard(build(device), mesh=mesh)
        other = shard(build(device, seed=50), mesh=mesh)
        exact(model, device, build(device))
        other.load_state_dict(model.state_dict())
        exact(other, device, build(device))
        third = shard(build(device, seed=60), mesh=mesh)
        full = fsdp.full_state_dict(model)
        fsdp.load_full_state_dict(third, full, broadcast_from_rank0=True)
        exact(third, device, build(device))


def check_eval_modes(device, args):
    """A first forward without gradients, in inference mode too, then training."""
    model = shard(build(device))
    with torch.no_grad():
        exact(model, device, build(device), backward=False)
    exact(model, device, build(device))
    with torch.inference_mode():
        exact(model, device, build(device), backward=False)


def check_sharded_state_dict(device, args):
    """Entries are DTensors only; loaded in place and by assignment into models of other weights that never ran."""
    for run_first in (False, True):
        model = shard(build(device))
        if run_first:
            model(batch(device))
        saved = model.state_dict()
        assert all(isinstance(value, DTensor) for value in saved.values()), {k: type(v) for k, v in saved.items()}
        assert {f"0.base.weight{end}" for end in ENTRIES} <= set(saved)
        for assign in (False, True):
            other = shard(build(device, seed=50))
            other.load_state_dict(saved, assign=assign)
            assert all(isinstance(layer.weight._local_tensor, PackedShard) for layer in layers(other))
            exact(other, device, build(device))
            saved = {key: value.clone() for key, value in saved.items()}


ENTRIES = ("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".quant_state.bitsandbytes__nf4")


def check_torch_save(device, args):
    """A sharded state dict survives torch.save and torch.load(weights_only=True), DTensors and local tensors alike.

    Copies of it and parameters made of its entries still hold shards, apart from those of the model.
    """
    model, other = shard(build(device)), shard(build(device, seed=50))
    saved = model.state_dict()
    for copied in (copy.deepcopy(saved), {key: nn.Parameter(value.clone(), False) for key, value in saved.items()}):
        key = "0.base.weight"
        assert isinstance(copied[key]._local_tensor, PackedShard) and type(copied[key]) is type(saved[key])
        assert copied[key]._local_tensor.data_ptr() != saved[key]._local_tensor.data_ptr()
        other.load_state_dict(copied)
        exact(other, device, build(device))
        other = shard(build(device, seed=50))
    file = io.BytesIO()
    torch.save([saved, {key: value.to_local() for key, value in saved.items()}], file)
    file.seek(0)
    sharded, local = torch.load(file, weights_only=True)
    assert all(type(value) is torch.Tensor for value in local.values())
    other.load_state_dict(sharded)
    exact(other, device, build(device))


def check_full_state_dict(device, args):
    """Ours: on rank 0, what an unsharded model of the declared storage saves. Loads into unsharded and sharded ones."""
    for storage in (torch.uint8, torch.float32):
        full = fsdp.full_state_dict(shard(build(device, storage=storage)))
        reference = {key: value.cpu() for key, value in build(device, storage=storage).state_dict().items()}
        other = shard(build(device, seed=50, storage=storage))
        other.load_state_dict({**other.state_dict(), **only_base(reference)})
        exact(other, device, build(device, storage=storage))
        other = shard(build(device, seed=60, storage=storage))
        fsdp.load_full_state_dict(other, reference)
        exact(other, device, build(device, storage=storage))
        if dist.get_rank() != 0:
            assert full == {}
            continue
        assert set(full) == set(reference), set(full) ^ set(reference)
        for key, value in full.items():
            found, expected = (bytes(as_bytes(data).tolist()).rstrip() for data in (value, reference[key]))
            assert type(value) is torch.Tensor and value.dtype == reference[key].dtype, (key, value.dtype)
            assert found == expected.rstrip(), key
        whole = build(device, seed=50, storage=storage)
        whole.load_state_dict(full)
        for layer, original in zip(layers(whole), layers(build(device, storage=storage)), strict=True):
            assert torch.equal(as_bytes(layer.weight), as_bytes(original.weight))


def only_base(state_dict):
    return {key: value for key, value in state_dict.items() if ".base.weight" in key}


def check_torch_full_state_dict(device, args):
    """torch's: whole tensors in the declared storage, on every rank, which torch loads back into a sharded model."""
    reference = build(device).state_dict()
    assert reference["0.base.weight"].dtype == torch.uint8
    for run_first in (False, True):
        model = shard(build(device))
        if run_first:
            model(batch(device))
        gathered = {key: value.full_tensor() for key, value in model.state_dict().items()}
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert set(full) == set(gathered) == set(reference)
        for key, value in padded(reference).items():
            for found in (full[key], gathered[key]):
                assert found.dtype == value.dtype and torch.equal(as_bytes(found), as_bytes(value)), key
                assert found.shape == value.shape, key
        other = shard(build(device, seed=50))
        set_model_state_dict(other, dict(full), options=StateDictOptions(full_state_dict=True))
        exact(other, device, build(device))


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
        assert layers(other)[0].weight._local_tensor.origin.load is None
        weight = layers(other)[0].weight  # and as some versions of torch hand it over: parts that state another size
        begin, length = _C.rank_slice(578, *gather.shard_world(weight))
        part = declared["0.base.weight"][begin : begin + length].to(device)
        other = shard(build(device, seed=50))
        saved = shard(build(device)).state_dict()
        other.load_state_dict({**saved, "0.base.weight": gather.like(part, weight, weight.size())})
        exact(other, device, build(device))
        short = {**padded(declared), "0.base.weight": declared["0.base.weight"][:-1]}
        load = functools.partial(set_model_state_dict, options=how)
        raises((ValueError, RuntimeError), "0.base.weight|578", functools.partial(load, other, short))


def padded(state_dict):
    """JSON entries in the length that a sharded model gives them."""
    return {key: entries.padded_blob(value) if "bitsandbytes__" in key else value for key, value in state_dict.items()}


def check_contradictions(device, args):
    """Entries of another weight, format or size raise and name the key, on every rank."""
    model = shard(build(device))
    saved = model.state_dict()
    plain = {key: value.full_tensor() for key, value in saved.items()}
    key = "0.base.weight"
    for change, text in (
        ({f"{key}.absmax": plain[f"{key}.absmax"][:-1]}, "absmax|18|19"),
        ({f"{key}.absmax": plain[f"{key}.absmax"].float()}, "float32|uint8"),
        ({key: plain[key][:-1]}, "0.base.weight"),
        ({name: plain[name.replace("0.", "1.", 1)] for name in plain if name.startswith(f"{key}.")}, "shape"),
    ):
        raises(
            (ValueError, RuntimeError, TypeError),
            text,
            lambda change=change: model.load_state_dict({**saved, **change}),
        )
    missing = {name: value for name, value in saved.items() if name != f"{key}.absmax"}
    raises((ValueError, RuntimeError), "absmax", lambda: model.load_state_dict(missing))


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


def train(model, device, dtype, steps, optimizer=None, rank=0, world=1, first=0):
    """Losses of `steps` steps, averaged over ranks; each rank takes its part of the same batch of 6 rows."""
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(first, first + steps):
        x = batch(device, dtype, rows=6 * max(world, 1), seed=100 + step % 4).chunk(world)[rank]
        target = batch(device, torch.float32, rows=6 * max(world, 1), seed=500 + step % 4).chunk(world)[rank]
        loss = (model(x).float() - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if world > 1:
            dist.all_reduce(mean)
        losses.append(float(mean) / world)
    return losses


class Curve(nn.Sequential):
    """The two blocks at a scale where the base makes most of the loss."""

    def forward(self, x):
        return super().forward(x * 0.3)


def curve_model(device, dtype, fault=False):
    n, k = SHAPE
    storage = dtype
    model = Curve(Block(n, k, dtype, storage, device, 0), Block(k, n, dtype, storage, device, 7))
    if fault:
        plant(model[0].base.weight.data.as_subclass(torch.Tensor))
    return model


BOUNDS = {
    torch.float32: 1e-5,
    torch.bfloat16: 5e-3,
}  # relative; in bf16 the ranks' gradients are rounded before they are added


def difference(a, b):
    return max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))


def check_loss_curves(device, args):
    """One process, FSDP1 and FSDP2 give one curve; a fault in one word of 1,000 does not."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {}
    for dtype, bound in BOUNDS.items():
        alone = train_whole(curve_model(device, dtype), device, dtype, 12, world)
        two = train(shard(curve_model(device, dtype)), device, dtype, 12, rank=rank, world=world)
        one = train(shard_fsdp1(curve_model(device, dtype), None, device), device, dtype, 12, rank=rank, world=world)
        assert sum(alone[-4:]) < 0.95 * sum(alone[:4]), alone
        gaps = difference(alone, two), difference(alone, one)
        assert max(gaps) <= bound, (dtype, gaps, alone, two, one)
        broken = train(shard(curve_model(device, dtype, fault=True)), device, dtype, 12, rank=rank, world=world)
        assert difference(alone, broken) > bound, (dtype, difference(alone, broken))
        found[str(dtype)] = [*gaps, difference(alone, broken)]
    return found


def train_whole(model, device, dtype, steps, world):
    """`train` of one process on the batch that `world` ranks share."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(steps):
        x = batch(device, dtype, rows=6 * world, seed=100 + step % 4)
        target = batch(device, torch.float32, rows=6 * world, seed=500 + step % 4)
        loss = (model(x).float() - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


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


def check_casts_raise(device, args):
    """Casts and arithmetic on a shard raise; dtype moves of the module leave it alone."""
    model = shard(build(device, storage=BASE_DTYPE))
    weight = layers(model)[0].weight
    local = weight._local_tensor
    for change in (
        lambda: local.float(),
        lambda: local.to(torch.float16),
        lambda: local + 1,
        lambda: local.mul_(2),
        lambda: local.zero_(),
        lambda: weight.data.mul_(0.9),
        lambda: nn.init.zeros_(weight),
        lambda: torch.empty(local.shape, dtype=torch.float32, device=device).copy_(local),
        lambda: local.copy_(torch.zeros(local.shape, dtype=torch.float32, device=device)),
        lambda: weight.float(),
    ):
        raises((TypeError, ValueError), "packed 4-bit", change)
    for move in (
        model.half,
        model.float,
        model.bfloat16,
        lambda: model.to(torch.float16),
        lambda: model.to(BASE_DTYPE),
    ):
        move()
        assert layers(model)[0].weight.dtype == BASE_DTYPE
        assert isinstance(layers(model)[0].weight._local_tensor, PackedShard)
    exact(model, device, build(device, storage=BASE_DTYPE))


def check_fp16(device, args):
    """fp16 mixed precision over a base in any storage, with gradients in fp16."""
    for storage in (torch.uint8, torch.float32):
        policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
        model = shard(build(device, storage=storage), mp_policy=policy)
        with gathered_dtypes() as dtypes:
            exact(model, device, build(device, storage=storage))
        assert dtypes == {torch.uint8}


def check_describe(device, args):
    """The line that proves sharding, before and after the first forward, and for a model that is not sharded."""
    world = dist.get_world_size()
    assert "not sharded" in fsdp.describe(build(device))
    assert fsdp.describe(nn.Linear(2, 2)) == "no 4-bit weights in this model"
    model = shard(build(device, shape=(96, 64)))
    line = fsdp.describe(model)
    assert f"FSDP2 over {world} ranks" in line and f"(1/{world}.00)" in line and "(sharded)" in line, line
    model(torch.ones(2, 64, device=device, dtype=BASE_DTYPE)).float().sum().backward()
    assert fsdp.describe(model) == line
    flat = fsdp.describe(shard_fsdp1(build(device, shape=(96, 64)), None, device))
    assert f"FSDP1 over {world} ranks" in flat and "(whole)" in flat, flat
    return line


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
                assert full[key].dtype == value.dtype and torch.equal(as_bytes(full[key]), as_bytes(value)), key


CHECKS = {name.removeprefix("check_"): function for name, function in globals().items() if name.startswith("check_")}


def main():
    device, args = start()
    wanted = args.only.split(",") if args.only else list(CHECKS)
    results = {}
    for name in wanted:
        try:
            results[name] = {"ok": CHECKS[name](device, args)}
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-3000:]}
        if dist.get_rank() == 0 or "error" in results[name]:
            print(
                f"rank {dist.get_rank()} {name:24s} {results[name].get('trace', results[name].get('ok'))}", flush=True
            )
        if "error" in results[name]:
            break  # collectives of the ranks may be out of step
    finish(results, args)


if __name__ == "__main__":
    main()
