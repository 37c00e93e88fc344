"""LLM.int8: state dicts and checkpoints of sharded int8 weights, options of FSDP2, float weights, what raises."""

import copy
import os

import int8_cells
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bitshard import fsdp
from bitshard.int8_params import Int8Params
from bitshard.nn.linear8bit import Linear8bitLt
from bitshard.shards.shard import PackedShard
from common import BASE_DTYPE, UNEVEN, no_launch, same_bytes
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def build(device, seed=0):
    n, k = UNEVEN
    blocks = [int8_cells.Block(n, k, BASE_DTYPE, device, seed), int8_cells.Block(k, n, BASE_DTYPE, device, seed + 1)]
    return nn.Sequential(*blocks)


def shard(model, **options):
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def rows(device):
    return torch.ones(2, UNEVEN[1], dtype=BASE_DTYPE, device=device)


@torch.no_grad()
def output(model, device):
    return model(rows(device)).clone()


def whole(device, seed):
    """Output of the unsharded model."""
    return output(build(device, seed), device)


def check_int8_dcp(device, args):
    """torch.distributed.checkpoint into a model of other weights; also what another number of ranks wrote."""
    model, folder = shard(build(device)), os.path.join(args.dir, f"int8dcp{dist.get_world_size()}")
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    found = [os.path.join(args.dir, name) for name in sorted(os.listdir(args.dir)) if name.startswith("int8dcp")]
    for folder in found:
        other = shard(build(device, seed=50))
        assert not torch.equal(output(other, device), whole(device, 0))
        loaded = {"model": other.state_dict()}
        dcp.load(loaded, checkpoint_id=folder)
        other.load_state_dict(loaded["model"])
        assert same_bytes(output(other, device), whole(device, 0))
    return len(found)


def check_int8_full_state_dict(device, args):
    """Whole entries are those of a file, bit for bit; loaded from rank 0 into a model of other weights."""
    model = shard(build(device))
    full = fsdp.full_state_dict(model)
    if dist.get_rank() == 0:
        expected = build(device).state_dict()
        assert full.keys() == expected.keys()
        for key, value in expected.items():
            assert same_bytes(full[key], value.cpu()), key
    other = shard(build(device, seed=50))
    fsdp.load_full_state_dict(other, full, broadcast_from_rank0=True)
    assert same_bytes(output(other, device), whole(device, 0))


def check_int8_entries_of_files(device, args):
    """load_state_dict of a file's entries, whole on every rank, into a whole model and into shards."""
    entries = build(device).state_dict()
    assert entries["0.base.weight"].shape == UNEVEN and entries["0.base.SCB"].shape == UNEVEN[:1]
    for other in (build(device, seed=50), shard(build(device, seed=50))):
        other.load_state_dict({key: value for key, value in entries.items() if ".base." in key}, strict=False)
        found = fsdp.full_state_dict(other)
        wrong = [key for key in found if ".base." in key and not same_bytes(found[key], entries[key].cpu())]
        assert not wrong, wrong


def check_int8_torch_state_dicts(device, args):
    """torch's own functions: a sharded state dict, and a whole one, out of one model and into another."""
    for full in (False, True):
        options = StateDictOptions(full_state_dict=full)
        state = get_model_state_dict(shard(build(device)), options=options)
        other = shard(build(device, seed=50))
        set_model_state_dict(other, state, options=options)
        assert same_bytes(output(other, device), whole(device, 0)), full


def check_int8_misfits(device, args):
    """Codes without scales, scales without codes, and another shape raise on every rank; nothing changes."""
    model = shard(build(device))
    entries, before = build(device, seed=50).state_dict(), whole(device, 0)
    base = {key: value for key, value in entries.items() if key.startswith("0.base.")}
    for spoil in (
        lambda e: e.pop("0.base.SCB"),
        lambda e: e.update({"0.base.SCB": e["0.base.SCB"][1:]}),
        lambda e: e.update({"0.base.weight": e["0.base.weight"][1:]}),
    ):
        given = dict(base)
        spoil(given)
        try:
            model.load_state_dict(given, strict=False)
        except (RuntimeError, ValueError):
            pass
        else:
            raise AssertionError("loaded")
    other = shard(build(device))
    assert same_bytes(output(other, device), before)


def check_int8_offload(device, args):
    """CPU offloading, mixed precision, no resharding, and a copy of the model."""
    expected = whole(device, 0)
    for options in (
        {"offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")},
        {"reshard_after_forward": False},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=BASE_DTYPE)},
    ):
        model = shard(build(device), **options)
        for _ in range(2):
            model(rows(device)).float().sum().backward()
            assert same_bytes(output(model, device), expected), options
    model = build(device)
    other = copy.deepcopy(model)
    assert same_bytes(output(shard(other), device), expected) and same_bytes(output(model, device), expected)


def check_int8_loaded_before(device, args):
    """A model that was loaded before it was known that FSDP shards: an error that names the way, and that way."""
    with no_launch():
        for wrap in (lambda model: shard(model), lambda model: FullyShardedDataParallel(model, device_id=device)):
            model = nn.Sequential(Linear8bitLt(40, 24, bias=False, has_fp16_weights=False).to(device))
            try:
                wrap(model)
            except (ValueError, RuntimeError) as error:
                assert "int8" in str(error) and "shardable" in str(error), error
            else:
                raise AssertionError("codes were sharded alone")
        torch.manual_seed(0)
        model = nn.Sequential(Linear8bitLt(40, 24, bias=False, has_fp16_weights=False, threshold=6.0)).to(device)
        assert type(model[0].weight) is Int8Params
        x = torch.randn(33, 40, device=device)
        x[0, 3] = 9.0
        expected = model(x)
        assert fsdp.shardable(model) == 1 and fsdp.shardable(model) == 0
        assert same_bytes(model(x), expected)
        model = fully_shard(model)
        assert same_bytes(model(x), expected)
        assert isinstance(model[0].packed_weight.shard._local_tensor, PackedShard) and "int8" in fsdp.describe(model)


def check_int8_float_weights(device, args):
    """has_fp16_weights: a dense weight like others, quantized in each forward: the steps of one process."""

    def steps(wrap):
        torch.manual_seed(0)
        model = wrap(nn.Sequential(Linear8bitLt(40, 24, threshold=6.0).to(device), Linear8bitLt(24, 40).to(device)))
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(1)).to(device)
        for _ in range(3):
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    alone = steps(lambda model: model)
    for wrap in (fully_shard, lambda model: FullyShardedDataParallel(model, device_id=device, use_orig_params=True)):
        sharded = steps(wrap)
        assert all(abs(a - b) < 1e-5 * a for a, b in zip(alone, sharded, strict=True)), (alone, sharded)
    assert alone[2] < alone[0]


def check_int8_refusals(device, args):
    """Rows or columns of codes are no shards of a weight: a float layer that is sharded first, tensor parallelism."""
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    calls = {
        "sharded before it is quantized": lambda: fully_shard(
            nn.Sequential(Linear8bitLt(40, 24, bias=False, has_fp16_weights=False, device="meta"))
        ),
        "tensor parallelism": lambda: setattr(
            layer, "weight", nn.Parameter(distribute_tensor(torch.zeros(24, 40), mesh, [Shard(0)]), requires_grad=False)
        ),
    }
    layer = Linear8bitLt(40, 24, bias=False, has_fp16_weights=False)
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            assert "quantize" in str(error) and "4-bit" not in str(error), (name, error)
        else:
            raise AssertionError(name)
    assert not isinstance(layer.weight, DTensor)


def check_int8_words(device, args):
    """Errors about a shard, and about a weight that is put in its place, say that it is int8."""
    block = fully_shard(build(device)[0])
    layer = block.base
    calls = {
        "arithmetic": lambda: layer.weight + 1,
        "cast": lambda: layer.weight.to(torch.float64),
        "gradient": lambda: layer.weight.requires_grad_(),
        "dense": lambda: setattr(layer, "weight", nn.Parameter(torch.zeros(24, 40, device=device))),
    }
    for name, call in calls.items():
        try:
            call()
        except (RuntimeError, TypeError, ValueError) as error:
            assert "int8" in str(error) and "4-bit" not in str(error).replace("of 4-bit ones", ""), (name, error)
        else:
            raise AssertionError(name)


def check_int8_ddp(device, args):
    """DDP sends codes from rank 0 without their scales: ranks with other weights raise, on all of them."""
    for seed, differs in ((0, False), (dist.get_rank(), dist.get_world_size() > 1)):
        torch.manual_seed(seed)
        with no_launch():
            layer = Linear8bitLt(40, 24, has_fp16_weights=False).to(device)
        assert type(layer.weight) is Int8Params
        try:
            nn.parallel.DistributedDataParallel(nn.Sequential(layer, nn.Linear(24, 2).to(device)))
        except ValueError as error:
            assert differs and "hold different int8 weights" in str(error), error
        else:
            assert not differs, "sent"
