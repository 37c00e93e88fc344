"""The weight of a sharded layer, read and replaced: dequantized on every rank, assigned as peft's merging does it."""

import functools

import torch
from bitshard import fsdp
from bitshard.functional import dequantize_4bit
from bitshard.tensor import Params4bit
from checks.common import batch, build, exact, layers, raises, shard
from common import BASE_DTYPE, hostile_values
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


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


def check_later_gathers(device, args):
    """What a shard keeps from one gather for the next follows each way to change weights that were gathered before."""
    reference = build(device, seed=50).state_dict()
    sharded = shard(build(device, seed=50)).state_dict()
    whole = {key: value.full_tensor() for key, value in sharded.items()}
    everything = StateDictOptions(full_state_dict=True)

    def copies():
        return {key: value.clone() for key, value in sharded.items()}

    for options, changes in (
        (
            {},
            (
                lambda model: model.load_state_dict(copies()),
                lambda model: model.load_state_dict(copies(), assign=True),
                lambda model: fsdp.load_full_state_dict(model, reference),
                lambda model: set_model_state_dict(model, whole, options=everything),
            ),
        ),
        (
            {"offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")},
            (lambda model: fsdp.load_full_state_dict(model, reference),),
        ),
    ):
        for change in changes:
            model = shard(build(device), **options)
            for like in (build(device), build(device, seed=50)):
                exact(model, device, like)
                kept = [layer.packed_weight.shard._local_tensor.handed for layer in layers(model)]
                model(batch(device)).float().sum().backward()
                again = [layer.packed_weight.shard._local_tensor.handed for layer in layers(model)]
                assert all(a is b for a, b in zip(kept, again, strict=True))
                assert (None in kept) == (bool(options) and device.type != "cpu")
                change(model)
