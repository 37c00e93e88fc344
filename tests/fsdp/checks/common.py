"""What the checks share: a model of two small blocks, sharded; what it must see; how it is trained."""

import torch
import torch.distributed as dist
from bitshard.nn.linear import Linear4bit
from common import BASE_DTYPE, Block, Spy
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import fully_shard

SHAPE = (35, 33)
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
ENTRIES = ("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".quant_state.bitsandbytes__nf4")


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


def exact(model, device, like, steps=2, backward=True):
    """Run `model`, which must see the bytes and scales of `like`, an unsharded model."""
    spies = [Spy(layer) for layer in layers(like)]
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


def padded(state_dict):
    """JSON entries in the length that a sharded model gives them."""
    return {key: with_spaces(value) if "bitsandbytes__" in key else value for key, value in state_dict.items()}


def with_spaces(blob):
    """The bytes of a JSON text [n] with spaces up to a multiple of 512: as long for any digits of its numbers."""
    return nn.functional.pad(blob, (0, -blob.numel() % 512), value=ord(" "))


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
