"""Ranks that hold different 4-bit weights: all raise before their parts are joined, and say in what they differ."""

import torch
import torch.distributed as dist
from bitshard import fsdp
from bitshard.nn.linear import Linear4bit
from bitshard.shards import agreement, gather
from bitshard.tensor import Params4bit
from checks.common import batch, build, exact, layers, raises, shard
from common import hostile_values, shard_fsdp1
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, fully_shard


def last_rank():
    return dist.get_rank() == dist.get_world_size() - 1 > 0


def one_layer(device, planted=None, **settings):
    """A layer whose weight is made with `settings` where they are `planted`, on the last rank unless that says
    otherwise, and with those of a QLoRA elsewhere."""
    planted = last_rank() if planted is None else planted
    values = hostile_values(64, 32, torch.bfloat16, settings.pop("seed", 0) if planted else 0)
    settings = {"compress_statistics": True, "quant_type": "nf4", "blocksize": 64, **(settings if planted else {})}
    layer = Linear4bit(32, 64, bias=False, compute_dtype=torch.bfloat16, quant_storage=torch.bfloat16)
    layer.weight = Params4bit(values, quant_storage=torch.bfloat16, module=layer, **settings)
    return nn.Sequential(layer).to(device)


def check_ranks_that_differ(device, args):
    """By seed, format, kind of scales, block size and the numbers that were quantized: an error on every rank."""
    if dist.get_world_size() == 1:
        return None
    kinds = {
        "checksum of the bytes": {"seed": 5},
        "format nf4 on rank 0 and fp4 on rank": {"quant_type": "fp4"},
        "nested scales True on rank 0 and False on rank": {"compress_statistics": False},
        "blocksize 64 on rank 0 and 128 on rank": {"blocksize": 128},
    }
    for words, settings in kinds.items():
        model = one_layer(device, **settings)
        fully_shard(model[0])
        fully_shard(model)
        x = torch.randn(2, 32, device=device, dtype=torch.bfloat16)
        raises(
            ValueError, f"hold different 4-bit weights 0.weight of [64, 32]|{words}|(1 of ", lambda m=model, x=x: m(x)
        )
    return list(kinds)


def check_ranks_that_differ_in_scales(device, args):
    """Equal bytes beside other scales, cut before the first gather, as a report or a state dict does."""
    if dist.get_world_size() == 1:
        return None
    model = one_layer(device)
    if last_rank():
        model[0].quant_state.state2.absmax.mul_(1.02)
    fully_shard(model[0])
    fsdp.describe(model)
    raises(ValueError, "checksum of the second-level scales", lambda: model(torch.zeros(2, 32, device=device)))
    return True


def check_ranks_agree_once(device, args):
    """One exchange for all weights of a model, none later, and none that keeps a model alive."""
    exchanges, exchange = [], dist.all_gather_object

    def counted(*arguments):
        exchanges.append(len(arguments[1][1]))
        return exchange(*arguments)

    agreement._waiting.clear()  # models of other checks
    model = shard(build(device))
    agreement.torch.distributed.all_gather_object = counted
    try:
        exact(model, device, build(device), steps=2)
    finally:
        agreement.torch.distributed.all_gather_object = exchange
    several = dist.get_world_size() > 1
    assert exchanges == [len(layers(model))] * several, exchanges
    assert all(ref() is None or not ref().agreed for ref in agreement._waiting) or not several
    model(batch(device))
    return exchanges


def replicas(device):
    """A mesh of two replicas, and whether this rank is in the second; (None, False) where there are none."""
    world = dist.get_world_size()
    if world % 2:
        return None, False
    mesh = init_device_mesh(device.type, (2, world // 2), mesh_dim_names=("replicate", "shard"))
    return mesh, dist.get_rank() >= world // 2


def check_replicas_that_differ(device, args):
    """HSDP: whole replicas of another seed or other scales, and one changed byte of one rank's rows."""
    mesh, second = replicas(device)
    if mesh is None:
        return None
    world, x = dist.get_world_size(), torch.randn(2, 32, device=device, dtype=torch.bfloat16)
    told = f"keeps as replicas hold different 4-bit weights 0.weight of [64, 32]|of these {world} ranks"
    for words, settings in (("checksum of the bytes", {"seed": 5}), ("nested scales", {"compress_statistics": False})):
        model = shard_of(one_layer(device, second, **settings), mesh)
        raises(ValueError, f"{told}|{words}|({world // 2} of ", lambda m=model: m(x))
    model = shard_of(one_layer(device), mesh)
    if last_rank():
        model[0].packed_weight.shard._local_tensor.plain().view(torch.uint8)[3] ^= 1
    raises(ValueError, f"{told}|checksum of its rows|(1 of ", lambda: model(x))
    return True


def shard_of(model, mesh):
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def check_replicas_agree_once(device, args):
    """Equal replicas: two exchanges for a model, a digest between replicas and one within each, none later."""
    mesh, _ = replicas(device)
    if mesh is None:
        return None
    exchanges, exchange = [], dist.all_gather_object

    def counted(*arguments):
        exchanges.append(type(arguments[1]).__name__)
        return exchange(*arguments)

    agreement._waiting.clear()
    model = shard(build(device), mesh=mesh)
    agreement.torch.distributed.all_gather_object = counted
    try:
        exact(model, device, build(device), steps=2)
    finally:
        agreement.torch.distributed.all_gather_object = exchange
    assert exchanges == ["bytes"] + ["tuple"] * (dist.get_world_size() > 2), exchanges
    return exchanges


def check_replicas_of_fsdp1_that_differ(device, args):
    """HYBRID_SHARD, and NO_SHARD, where every rank is a replica: all raise before anything is flattened."""
    mesh, second = replicas(device)
    if mesh is None:
        return None
    cases = [{"sharding_strategy": ShardingStrategy.NO_SHARD}]
    if dist.get_world_size() > 2:
        cases.append({"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh})
    for options in cases:
        for orig in (False, True):
            model = one_layer(device, second, seed=5)
            raises(
                ValueError,
                "FSDP1 joins or keeps as replicas hold different 4-bit weights 0.weight of [64, 32]|checksum of the b",
                lambda m=model, o=orig, s=options: shard_fsdp1(m, None, device, use_orig_params=o, **s),
            )
            shard_fsdp1(one_layer(device, False), None, device, use_orig_params=orig, **options)
    return True


def check_ddp_of_ranks_that_differ(device, args):
    """Its broadcast would leave the other ranks with rank 0's bytes beside scales of their own."""
    if dist.get_world_size() == 1:
        return None
    for settings, words in (({"seed": 5}, "checksum of the scales"), ({"compress_statistics": False}, "nested scales")):
        model = one_layer(device, **settings)
        model.append(nn.Linear(64, 4, device=device, dtype=torch.bfloat16))
        raises(
            ValueError,
            f"DDP sends rank 0's bytes to|0.weight of [64, 32]|{words}|(1 of ",
            lambda m=model: nn.parallel.DistributedDataParallel(m),
        )
    return True


def check_ddp_of_equal_ranks(device, args):
    """The bytes stay, and each rank computes what the others do."""
    model = one_layer(device)
    weight, state = model[0].weight, model[0].quant_state
    model.append(nn.Linear(64, 4, device=device, dtype=torch.bfloat16))
    x = torch.randn(2, 32, device=device, dtype=torch.bfloat16)
    before = model[0](x)
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert model[0].weight is weight and model[0].quant_state is state
    assert torch.equal(model[0](x), before)
    wrapped(x).sum().backward()
    return True


def check_what_ranks_bring(device, args):
    """Values and rows of all ranks on each of them, with the longest piece on any rank, and with none on some."""
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()

    def piece(of, dtype, columns, rows):
        values = torch.arange(rows * columns).view(rows, columns) + 10 * of
        return values.to(dtype).view(rows, *([columns] if columns > 1 else []))

    for lengths in ([of % 3 + 1 for of in range(world)], [of for of in range(world)], [0] * world):
        made = [
            {"rows": piece(of, torch.bfloat16, 3, n), "few": piece(of, torch.float32, 1, of)}
            for of, n in enumerate(lengths)
        ]
        found, numbers = gather.joined({name: each.to(device) for name, each in made[rank].items()}, group, [rank, 7])
        assert numbers == [[of, 7] for of in range(world)], numbers
        for name, whole in found.items():
            expected = torch.cat([pieces[name] for pieces in made])
            assert whole.dtype is expected.dtype and torch.equal(whole, expected), (name, lengths, whole)
    assert gather.everyone(("the same", 3), group) == [("the same", 3)] * world
    assert gather.everyone({"rank": rank}, group) == [{"rank": of} for of in range(world)]
    assert gather.everyone(rank == world - 1) == [of == world - 1 for of in range(world)]
    return True
