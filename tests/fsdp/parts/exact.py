"""One layer at a time through the steps of transformers' loader: what each rank keeps of rows that arrive.

A meta layer, `fully_shard`, then this rank's rows. Compared with the whole weight quantized in this process: the bytes
and scales that this rank keeps, the second level, and what forward sees.
"""

import functools
import itertools

import bitsandbytes as bnb
import torch
from bitshard import functional, ops
from shared import rank, same_bytes, world, wrong_bytes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

# even, rows that the ranks do not divide, blocks that rows cut, fewer rows than ranks, odd numbers of codes
SHAPES = [(256, 256), (128, 256), (98, 256), (97, 100), (5, 64), (2, 96), (512, 688), (96, 688), (96, 720), (1, 64)]
SHAPES += [(6, 33), (768, 1536)]
STORAGES = [torch.uint8, torch.bfloat16, torch.float32]
FORMATS = [("nf4", 64), ("nf4", 256), ("fp4", 64)]
COLUMNS = list(itertools.product((torch.float32, torch.bfloat16), STORAGES, (False, True), FORMATS))


@functools.cache
def mesh():
    return init_device_mesh("cpu", (world(),))


def rows_of(whole):
    """This rank's rows, as transformers reads them from a file."""
    chunk = -(-whole.size(0) // world())
    return whole[rank() * chunk : (rank() + 1) * chunk].contiguous()


def like(local, parameter):
    """`local` as this rank's part of a DTensor that is laid out like `parameter`."""
    return DTensor.from_local(
        local.contiguous(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def sharded_meta_layer(n, k, dtype, storage, nested, quant_type, blocksize):
    with torch.device("meta"):
        model = nn.Sequential(bnb.nn.Linear4bit(k, n, True, torch.float32, nested, quant_type, storage))
    model.requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model[0].weight.blocksize = blocksize
    return fully_shard(model, mesh=mesh())


def load_rows(model, whole):
    """As transformers' quantizer and then its `set_param_for_module` do."""
    layer = model[0]
    old = layer.weight
    new = bnb.nn.Params4bit(rows_of(whole), requires_grad=False, **old.__dict__).to("cpu")
    layer.weight = nn.Parameter(like(new, layer.weight), requires_grad=False)
    bias = torch.zeros(layer.bias._local_tensor.shape, dtype=layer.bias.dtype)
    layer.bias = nn.Parameter(like(bias, layer.bias), requires_grad=False)


def values(n, k, dtype):
    generator = torch.Generator().manual_seed(n * k)
    return torch.randn(n, k, generator=generator).to(dtype) * 0.02


def wrong(shape, dtype, storage, nested, form, plant=False):
    """Names of what differs in one cell. `plant`: the last rank that keeps any changes one bit of its bytes."""
    whole = values(*shape, dtype)
    model = sharded_meta_layer(*shape, dtype, storage, nested, *form)
    load_rows(model, whole)
    layer = model[0]
    container = layer.weight.dtype
    assert container is storage or (storage is torch.uint8 and container is dtype), container
    packed, state = functional.quantize_4bit(whole, None, None, form[1], nested, form[0], container)
    owners = [r for r in range(world()) if ops.rank_slice(packed.size(0), world(), r)[1]]
    if plant and rank() == owners[-1]:
        layer.weight._local_tensor.plain().view(-1).view(torch.uint8)[-1] ^= 0x10
    found = [*wrong_at_rest(layer, packed, state), *wrong_in_forward(model, packed, state, dtype)]
    return found if not plant or rank() == owners[-1] else [name for name in found if name != "bytes"]


def wrong_at_rest(layer, packed, state):
    begin, length = ops.rank_slice(packed.size(0), world(), rank())
    if not same_bytes(layer.weight._local_tensor.plain(), packed[begin : begin + length]):
        yield "bytes"
    own = layer.quant_state
    if world() > 1:
        begin, length = ops.rank_slice(state.absmax.numel(), world(), rank())
        if not same_bytes(own.sharded.own, state.absmax[begin : begin + length]) or not own.absmax.is_meta:
            yield "scales"
    elif not same_bytes(own.absmax, state.absmax):
        yield "scales"
    if own.nested is not state.nested:
        yield "nested"
    if state.nested and not same_bytes(own.offset, state.offset):
        yield "offset"
    if state.nested and not same_bytes(own.state2.absmax, state.state2.absmax):
        yield "second level"


def wrong_in_forward(model, packed, state, dtype):
    """Twice: gathered, freed, and gathered again."""
    seen = []

    def look(layer, args, output):
        seen.append((wrong_bytes(layer.weight, packed), wrong_bytes(layer.quant_state.absmax, state.absmax)))

    model[0].register_forward_hook(look)
    x = torch.ones(3, model[0].in_features, dtype=dtype)
    with torch.no_grad():
        same = same_bytes(model(x), model(x))
    assert len(seen) == 2
    if any(counts != (0, 0) for counts in seen) or not same:
        yield f"forward saw {seen}"


def check_shape(shape, folder):
    """All columns of one shape; of a large one and on 3 ranks every fifth, with each value of each option; how many."""
    columns = COLUMNS[:: 5 if world() > 2 or shape[0] * shape[1] > 100_000 else 1]
    for column in columns:
        found = wrong(shape, *column)
        assert not found, (shape, column, found)
    return len(columns)


def check_planted(folder):
    """One changed bit on one rank: that rank's bytes and every rank's forward differ."""
    for shape in ((128, 256), (97, 100), (1, 64)):
        found = wrong(shape, torch.bfloat16, torch.uint8, True, ("nf4", 64), plant=True)
        assert any(name.startswith("forward saw [(1, 0)") for name in found), (shape, found)
    return found


CHECKS = {f"exact_{n}x{k}": functools.partial(check_shape, (n, k)) for n, k in SHAPES}
CHECKS["exact_planted"] = check_planted
