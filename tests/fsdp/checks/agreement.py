"""Ranks that hold different 4-bit weights: all raise before their parts are joined, and say in what they differ."""

import torch
import torch.distributed as dist
from bitshard import agreement, fsdp
from bitshard.nn.linear import Linear4bit
from bitshard.tensor import Params4bit
from checks.common import batch, build, exact, layers, raises, shard
from common import hostile_values
from torch import nn
from torch.distributed.fsdp import fully_shard


def last_rank():
    return dist.get_rank() == dist.get_world_size() - 1 > 0


def one_layer(device, **settings):
    """A layer whose weight is made with `settings` on the last rank and with those of a QLoRA on all others."""
    values = hostile_values(64, 32, torch.bfloat16, settings.pop("seed", 0) if last_rank() else 0)
    settings = {"compress_statistics": True, "quant_type": "nf4", "blocksize": 64, **(settings if last_rank() else {})}
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
