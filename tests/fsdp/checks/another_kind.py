"""A kind of weight that bitshard does not know (`helpers.another_kind`) under FSDP2: bytes, products, state dicts."""

import torch
import torch.distributed as dist
from bitshard import fsdp
from bitshard.nn.linear import Linear4bit
from checks.common import raises
from common import Spy, as_bytes
from helpers.another_kind import TENTHS
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

SHAPES = ((24, 48), (37, 16))  # 18 and 37 blocks: even on two ranks, and not


def build(shape, device, seed=0):
    """A layer that is trained, and one in 4 bits."""
    return build_float(shape, device, seed).to(device)


def build_float(shape, device, seed=0):
    """The same, its weight a float still; rows grow, so that parts of it have other scales than the whole."""
    torch.manual_seed(seed)
    n, k = shape
    made = Linear4bit(k, n, compute_dtype=torch.bfloat16, quant_type="tenths").to(torch.bfloat16)
    made.weight.data.mul_(torch.linspace(0.5, 2 + seed, n).unsqueeze(1))
    made.bias.requires_grad_(False)
    return nn.Sequential(nn.Linear(k, k, dtype=torch.bfloat16), made)


def sharded(model):
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)  # which would cast what is no packed byte
    return fully_shard(model, mp_policy=policy)


def check_another_kind(device, args):
    """Forward sees the bytes and scales of the whole weight, and gradients pass through it."""
    for shape in SHAPES:
        model, like = sharded(build(shape, device)), build(shape, device)
        spy = Spy(like[1])
        model[1].register_forward_hook(spy.look)
        x = torch.randn(3, shape[1], device=device, dtype=torch.float16)
        for _ in range(2):
            model(x).float().sum().backward()
        assert len(spy.seen) == 2 and spy.wrong() == [0, 0] and model[0].weight.grad is not None
        assert model[1].quant_state.kind is TENTHS


def check_another_kind_in_files(device, args):
    """The whole state dict is that of an unsharded model, and loads into another sharded one."""
    for shape in SHAPES:
        reference = {key: value.cpu() for key, value in build(shape, device).state_dict().items()}
        full = fsdp.full_state_dict(sharded(build(shape, device)))
        if dist.get_rank() == 0:
            assert set(full) == set(reference), set(full) ^ set(reference)
            for key, value in reference.items():
                found, expected = (bytes(as_bytes(data).tolist()).rstrip() for data in (full[key], value))
                assert found == expected, key
        other, spy = sharded(build(shape, device, seed=1)), Spy(build(shape, device)[1])
        fsdp.load_full_state_dict(other, reference)
        assert torch.equal(other[1].quant_state.global_scale, build(shape, device)[1].quant_state.global_scale)
        other[1].register_forward_hook(spy.look)
        other(torch.randn(3, shape[1], device=device, dtype=torch.float16))
        assert spy.wrong() == [0, 0]


def check_another_kind_quantized_after_sharding(device, args):
    """Rows of a float weight: the whole is gathered, for its scale is that of all rows."""
    for shape in SHAPES:
        like = build(shape, device)
        model = build_float(shape, device)
        fully_shard(model)
        fsdp.quantize(model)
        assert torch.equal(model[1].quant_state.global_scale, like[1].quant_state.global_scale)
        spy = Spy(like[1])
        model[1].register_forward_hook(spy.look)
        model(torch.randn(3, shape[1], device=device, dtype=torch.bfloat16))
        assert spy.wrong() == [0, 0]


def check_another_kind_differs(device, args):
    """Ranks with other scales of all blocks are told."""
    model = build(SHAPES[0], device)
    if dist.get_rank() == 1:
        model[1].quant_state.global_scale *= 2
    model = sharded(model)
    if dist.get_world_size() > 1:
        x = torch.randn(3, SHAPES[0][1], device=device, dtype=torch.float16)
        raises(ValueError, "different 4-bit weights|second-level scales", lambda: model(x))
