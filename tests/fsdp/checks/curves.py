"""Loss curves of one process, FSDP1 and FSDP2 beside each other."""

import torch
import torch.distributed as dist
from checks.common import SHAPE, batch, shard, train
from common import Block, plant, shard_fsdp1
from torch import nn


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
