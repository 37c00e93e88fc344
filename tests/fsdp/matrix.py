"""The full product FSDP version x quant_storage x param_dtype x even or uneven on one world size, in one launch.

    torchrun --nproc-per-node 2 tests/fsdp/matrix.py --out result.json

Each cell quantizes two blocks, shards them, runs forward and backward twice, and counts the bytes of the weights and of
the scales that differ from those quantized; stack_cells.py does so with stacks of experts. Then it changes words of
what the ranks keep, which must be seen. NCCL with GPUs, else gloo.
"""

import functools
import sys
import traceback

import int8_cells
import stack_cells
import torch
import torch.distributed as dist
from bitshard import fsdp
from bitshard.nn.linear import Linear4bit
from bitshard.nn.linear8bit import Linear8bitLt
from common import (
    BASE_DTYPE,
    EVEN,
    PARAM_DTYPES,
    STORAGES,
    UNEVEN,
    Block,
    Spy,
    finish,
    gathered_dtypes,
    kept_scales,
    no_launch,
    plant,
    shard_fsdp1,
    start,
)
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

LAYERS = (Linear4bit, Linear8bitLt)


def build(shape, storage, device, quant_type="nf4"):
    """Two blocks of opposite shapes, so that the second takes what the first gives."""
    (n, k), given = shape, (BASE_DTYPE, storage, device)
    return nn.Sequential(Block(n, k, *given, 0, quant_type), Block(k, n, *given, 1, quant_type))


def shard_fsdp2(model, param_dtype):
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    for block in model:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def check_shares(model, version, world):
    """Every rank keeps its Nth of the packed bytes and (FSDP2) of the scales, and together they keep all."""
    share = fsdp.measure(model)
    assert share.weights == 2 and share.packed > 0, share
    assert share.ranks == world, share
    own = torch.tensor([share.own_packed, share.own_scales])
    counts = [torch.zeros_like(own) for _ in range(world)]
    if torch.cuda.is_available():
        own, counts = own.cuda(), [count.cuda() for count in counts]
    dist.all_gather(counts, own)
    assert sum(int(count[0]) for count in counts) == share.packed, (counts, share)
    largest = max(int(count[0]) for count in counts)
    if version == 2:
        assert share.fsdp == "FSDP2"
        assert largest <= -(-share.packed // world) + 2 * 4, (counts, share)  # two weights, padded to whole elements
        size = max(m.quant_state.absmax.element_size() for m in model.modules() if isinstance(m, LAYERS))
        assert share.own_scales <= -(-share.scales // world) + 2 * size, (counts, share)
        for module in model.modules():
            if isinstance(module, LAYERS):
                assert isinstance(module.weight, DTensor)
                rows = -(-module.weight.size(0) // world)
                assert module.weight._local_tensor.size(0) <= rows
                assert kept_scales(module).numel() == -(-module.quant_state.absmax.numel() // world)
    else:
        assert share.fsdp == "FSDP1"
        assert largest <= -(-share.packed // world) + 2 * 4 * world, (counts, share)


def run_cell(version, storage, param_dtype, shape, device, world, fault=None, make=build):
    """[wrong weight bytes, wrong scale bytes] of one cell; `fault` is where to plant one, if anywhere.

    Without a fault followed by what `planted_later` finds: three comparisons of this very cell, seen to fail.
    """
    model = make(shape, storage, device)
    spies = [Spy(block.base) for block in model]
    for block, spy in zip(model, spies, strict=True):
        assert (
            len(spy.scales.unique()) > 4
            and block.base.weight.data.as_subclass(torch.Tensor).isnan().any()
            or (storage in (torch.uint8, torch.float32))
        )
    reference = [
        block.base.forward(torch.ones(2, block.base.in_features, dtype=BASE_DTYPE, device=device)) for block in model
    ]
    [spy.seen.clear() for spy in spies]
    if fault == "weight" and version == 1:
        plant(model[0].base.weight.data.as_subclass(torch.Tensor))
    if fault == "scales":
        plant(model[0].base.quant_state.absmax)
    model = shard_fsdp2(model, param_dtype) if version == 2 else shard_fsdp1(model, param_dtype, device)
    if fault == "weight" and version == 2:
        plant(model[0].base.weight._local_tensor.plain())
    outputs = []
    hooked = [m for m in model.modules() if isinstance(m, LAYERS)]
    for module, expected in zip(hooked, reference, strict=True):
        module.register_forward_hook(functools.partial(compare_output, outputs, expected))
    with gathered_dtypes() as dtypes:
        for _ in range(2):
            x = torch.ones(2, shape[1], dtype=BASE_DTYPE, device=device)
            model(x).float().sum().backward()
    if version == 2:
        assert dtypes == {torch.uint8}, f"the hook handed {dtypes} to the collective"
        check_shares(model, version, world)
    elif not fault:
        check_shares(model, version, world)
    counts = [max(spy.wrong()[i] for spy in spies) for i in (0, 1)]
    if fault:
        return counts
    assert all(outputs), "a forward on the same bytes gave another result"
    return counts + planted_later(model, hooked[0], version, spies[0], outputs, shape)


def planted_later(model, layer, version, spy, outputs, shape):
    """[wrong weight bytes, wrong scale bytes, equal outputs] of a layer after faults in what each rank keeps of it."""
    if version == 2:
        plant(layer.weight._local_tensor.plain())
    else:
        unit = next(unit for unit in FullyShardedDataParallel.fsdp_modules(model) if unit.module is layer)
        plant(unit._flat_param.data)
    plant(kept_scales(layer))
    spy.seen.clear()
    outputs.clear()
    with torch.no_grad():
        model(torch.ones(2, shape[1], dtype=BASE_DTYPE, device=layer.quant_state.code.device))
    return [*spy.wrong(), int(outputs[0])]


def compare_output(outputs, expected, module, args, output):
    """The sharded layer on the reference input, while it is gathered, gives the very bits of the unsharded layer."""
    x = torch.ones(2, module.in_features, dtype=BASE_DTYPE, device=output.device)
    with torch.no_grad():
        outputs.append(torch.equal(type(module).forward(module, x), expected))


def cell_name(version, storage, param_dtype, even):
    return f"fsdp{version} {storage} {param_dtype} {even}"


def attempt(function):
    """The counts of a cell, or its error as text."""
    try:
        return function()
    except Exception as error:
        if not isinstance(error, (ValueError, TypeError, RuntimeError)):
            traceback.print_exc(file=sys.stderr)
        return f"{type(error).__name__}: {error}"


def main():
    device, args = start()
    world, rank = dist.get_world_size(), dist.get_rank()
    results = {}
    for version in (2, 1):
        for even, shape in (("even", EVEN), ("uneven", UNEVEN)):
            for storage_name, storage in STORAGES.items():
                for param_name, param_dtype in PARAM_DTYPES.items():
                    cell = functools.partial(run_cell, version, storage, param_dtype, shape, device, world)
                    results[cell_name(version, storage_name, param_name, even)] = attempt(cell)
        for count_name, count in stack_cells.COUNTS.items():
            for storage_name, storage in STORAGES.items():
                for param_name, param_dtype in PARAM_DTYPES.items():
                    cell = functools.partial(stack_cells.run_cell, version, storage, param_dtype, count, device, world)
                    results[cell_name(version, storage_name, param_name, count_name)] = attempt(cell)
        for even, shape in (("even", EVEN), ("uneven", UNEVEN)):
            for name in ("bf16", "fp16", "fp32"):
                for param_name, param_dtype in PARAM_DTYPES.items():
                    numbers = (version, STORAGES[name], param_dtype, shape, device, world)
                    cell = functools.partial(run_cell, *numbers, make=int8_cells.build)
                    results[cell_name(version, f"int8-{name}", param_name, even)] = attempt(cell)
        for quant_type in ("mxfp4", "nvfp4"):
            for param_name, param_dtype in PARAM_DTYPES.items():
                numbers = (version, torch.bfloat16, param_dtype)
                make = functools.partial(build, quant_type=quant_type)
                for even, shape in (("even", EVEN), ("uneven", UNEVEN)):
                    cell = functools.partial(run_cell, *numbers, shape, device, world, make=make)
                    results[cell_name(version, quant_type, param_name, even)] = attempt(cell)
                for name, count in stack_cells.COUNTS.items():
                    cell = functools.partial(stack_cells.run_cell, *numbers, count, device, world, quant_type)
                    results[cell_name(version, quant_type, param_name, name)] = attempt(cell)
        for fault in ("weight", "scales"):
            cell = functools.partial(run_cell, version, torch.bfloat16, None, EVEN, device, world, fault)
            results[f"fsdp{version} planted {fault}"] = attempt(cell)
    with no_launch():
        for param_name, param_dtype in PARAM_DTYPES.items():
            for even, shape in (("even", EVEN), ("uneven", UNEVEN)):
                for version in (2, 1):
                    cell = functools.partial(run_cell, version, torch.uint8, param_dtype, shape, device, world)
                    results[cell_name(version, "true-uint8", param_name, even)] = attempt(cell)
    if rank == 0:
        for name, value in results.items():
            print(f"{name:36s} {'exact' if value[:2] == [0, 0] else value}", flush=True)
    finish(results, args)


if __name__ == "__main__":
    main()
