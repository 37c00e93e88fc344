"""Dtypes: casts of a shard raise, mixed precision in fp16 leaves it alone."""

import torch
from bitshard.shards.shard import PackedShard
from checks.common import build, exact, layers, raises, shard
from common import BASE_DTYPE, gathered_dtypes
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy


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
