"""4-bit weights in sharded models: state dicts, loading, and a line that says what each rank keeps.

Under FSDP2 a registered weight is a DTensor around a `PackedShard`. Its state dict entries are DTensors only: the packed weight and its scales
`Shard(0)`, everything small `Replicate()`. They keep the container's dtype, so that torch can load them back in place; `full_state_dict` writes
whole tensors in the declared `quant_storage`, as a checkpoint on disk has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from bitshard import _C, ops
from bitshard.shard import Origin, PackedShard
from bitshard.state import QuantState

# The JSON entry of a state dict is padded with spaces to a multiple of this, because its length depends on the digits of the offset and
# torch.distributed.checkpoint loads into tensors of the saved size only. JSON ignores the spaces.
_BLOB_BYTES = 512
_TENSOR_ENTRIES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_BLOB_PREFIX = "quant_state.bitsandbytes__"


def save_sharded(module: nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """`_save_to_state_dict` of a 4-bit module whose weight is a DTensor: every entry a DTensor, in the container's dtype.

    Each entry is also set as an attribute of the weight, because torch.distributed resolves "weight.absmax" with getattr.
    """
    nn.Module._save_to_state_dict(module, destination, prefix, keep_vars)
    weight = module.weight
    state = _cut(module)
    weight.quant_state = _StateOfShard(state)
    for name, value in _own_entries(weight, state).items():
        destination[f"{prefix}weight.{name}"] = value
        if name in _TENSOR_ENTRIES:
            setattr(weight, name, value)


class _StateOfShard:
    """What a sharded weight answers for `quant_state`: the JSON entries by name, and the reason why there is nothing else."""

    def __init__(self, state: QuantState):
        self._state = state

    def __getattr__(self, name: str) -> Any:
        if name.startswith("bitsandbytes__"):
            return getattr(self._state, name)
        raise AttributeError(
            f"quant_state.{name}: this 4-bit weight is sharded by FSDP2 and cannot be dequantized or merged as it is. Merge "
            "in one process, with the saved adapter, or after gathering with bitshard.fsdp.full_state_dict(model)."
        )


def load_sharded(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """`_load_from_state_dict` of a 4-bit module whose weight is a DTensor. Entries may be DTensors or whole tensors (every rank takes its part).

    Where only some ranks were given the scales (`set_model_state_dict(broadcast_from_rank0=True)` delivers registered parameters only), those
    ranks send them to the others. Where none was, the old scales stay if the new weight has the old bytes, and otherwise all ranks raise.
    Calls collectives unless all entries are DTensors, so all ranks of the mesh must load together, as they do with torch's functions.
    """
    weight, key = module.weight, f"{prefix}weight"
    state = _cut(module)
    origin = weight._local_tensor.origin
    entries = _take_entries(state_dict, key)
    given = state_dict.get(key)
    if isinstance(given, torch.Tensor) and not isinstance(given, DTensor):
        state_dict = {**state_dict, key: _own_rows(given, weight, state, key)}
    errors = len(error_msgs)
    nn.Module._load_from_state_dict(
        module, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    )
    unexpected_keys[:] = [name for name in unexpected_keys if not name.startswith(f"{key}.")]
    _restore_shard(module.weight, origin, key)
    if len(error_msgs) > errors or (given is None and not entries):
        return
    if not entries or not all(isinstance(value, DTensor) for value in entries.values()):
        entries = _agree(entries, module.weight.device_mesh)
    if entries:
        _put_entries(entries, module.weight, state, origin, key)
    elif given is not None:
        _require_same_bytes(module.weight, state, key)


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole state dict on rank 0's CPU, as a checkpoint file has it: plain tensors, packed weights in the declared `quant_storage`, all scales.

    A collective; the other ranks get an empty dict. `model.save_pretrained(path, state_dict=full_state_dict(model))` writes a checkpoint that
    bitsandbytes loads too. (torch's `get_model_state_dict(full_state_dict=True)` keeps the container's dtype instead: only that can be loaded
    back into a sharded model by torch's own functions.)
    """
    storages = {}
    for name, module in packed_modules(model):
        storages[f"{name}.weight" if name else "weight"] = (module.quant_state, _declared_storage(module))
    keep = not dist.is_initialized() or dist.get_rank() == 0
    full = {}
    for key, value in model.state_dict().items():
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if not keep:
            continue
        if key in storages and isinstance(value, torch.Tensor):
            state, storage = storages[key]
            value = repack(value, state, storage)
        full[key] = value.cpu() if isinstance(value, torch.Tensor) else value
    return full


def load_full_state_dict(
    model: nn.Module, state_dict: dict[str, torch.Tensor], *, broadcast_from_rank0: bool = False, strict: bool = True
) -> None:
    """Load whole tensors, packed in any storage dtype, into a sharded model. Every rank has `state_dict`, or rank 0 alone with `broadcast_from_rank0`."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    state_dict = dict(state_dict)
    for name, module in packed_modules(model):
        key = f"{name}.weight" if name else "weight"
        if key in state_dict:
            state_dict[key] = repack(state_dict[key], module.quant_state, module.weight.dtype)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast_from_rank0, strict=strict)
    set_model_state_dict(model, state_dict, options=options)


def repack(packed: torch.Tensor, state: Any, storage: torch.dtype) -> torch.Tensor:
    """The same packed bytes [n, 1] in another storage dtype: a view where the byte count allows, zero-padded or cut at the end otherwise."""
    n_bytes = -(-state.shape.numel() // 2)
    data = packed.detach().contiguous().view(-1).view(torch.uint8)
    have = -(-n_bytes // packed.element_size()) * packed.element_size()
    if data.numel() != have:
        raise ValueError(
            f"a packed weight of {data.numel()} bytes where shape {tuple(state.shape)} in {packed.dtype} needs {have}"
        )
    want = -(-n_bytes // storage.itemsize) * storage.itemsize
    if want > have:
        data = torch.cat([data, data.new_zeros(want - have)])
    return data[:want].view(storage).view(-1, 1)


def packed_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of every module of `model` with a quantized 4-bit weight, sharded or not."""
    # wrappers of FSDP1 hand on the attributes of what they wrap, so only a module's own attributes count
    return [(name, module) for name, module in model.named_modules() if vars(module).get("quant_state") is not None]


@dataclass
class Share:
    """What this process keeps of a model's 4-bit base, in bytes. `own_*` of `*`; `scales` counts the first level (`absmax`)."""

    weights: int = 0
    packed: int = 0
    own_packed: int = 0
    scales: int = 0
    own_scales: int = 0
    fsdp: str = ""
    ranks: int = 1


def measure(model: nn.Module) -> Share:
    """Count what this rank keeps of the 4-bit base between forwards. No communication."""
    share = Share()
    flat = _flat_shares(model)
    for _, module in packed_modules(model):
        weight, state = module.weight, module.quant_state
        share.weights += 1
        if isinstance(weight, DTensor):
            state = _cut(module)
            origin = state.sharded
            itemsize = state.absmax.element_size()
            share.fsdp, share.ranks = "FSDP2", max(share.ranks, _shard_world(weight)[0])
            share.packed += weight.numel() * weight.element_size()
            share.own_packed += weight._local_tensor.numel() * weight.element_size()
            share.scales += state.absmax.numel() * itemsize
            share.own_scales += (origin.scales.numel() if origin is not None else state.absmax.numel()) * itemsize
            continue
        scales = state.absmax.numel() * state.absmax.element_size()
        share.scales, share.own_scales = share.scales + scales, share.own_scales + scales
        if id(module) in flat:
            whole, own, ranks = flat[id(module)]
            share.fsdp, share.ranks = "FSDP1", max(share.ranks, ranks)
        else:
            whole = own = weight.numel() * weight.element_size()
        share.packed, share.own_packed = share.packed + whole, share.own_packed + own
    return share


def describe(model: nn.Module) -> str:
    """One line that says whether the 4-bit base of `model` is sharded, and what this rank keeps of it."""
    share = measure(model)
    if share.weights == 0:
        return "no 4-bit weights in this model"
    if share.ranks == 1:
        return f"4-bit base not sharded: {share.weights} weights, all {share.packed:,} bytes and {share.scales:,} bytes of scales in this process"
    part = share.packed / max(share.own_packed, 1)
    scales = "sharded" if share.own_scales < share.scales else "whole"
    return (
        f"4-bit base sharded by {share.fsdp} over {share.ranks} ranks: {share.weights} weights, {share.own_packed:,} of {share.packed:,} bytes "
        f"(1/{part:.2f}) and {share.own_scales:,} of {share.scales:,} bytes of scales ({scales}) on this rank"
    )


def _shard_world(weight: DTensor) -> tuple[int, int]:
    """(world, rank) of the mesh dimension over which `weight` is sharded; (1, 0) if none."""
    dims = [i for i, placement in enumerate(weight.placements) if placement.is_shard()]
    if len(dims) > 1:
        raise ValueError(f"packed 4-bit weights are sharded over one mesh dimension, not {weight.placements}")
    if not dims:
        return 1, 0
    return weight.device_mesh.size(dims[0]), weight.device_mesh.get_local_rank(dims[0])


def _cut(module: nn.Module) -> Any:
    """The module's state, its scales cut to this rank's chunk if that has not happened yet."""
    weight, state = module.weight, module.quant_state
    local = weight._local_tensor
    if not isinstance(local, PackedShard):
        raise TypeError(
            f"the 4-bit weight is sharded as {type(local).__name__}, not as PackedShard: it was not quantized when fully_shard was called"
        )
    local.origin.cut(*_shard_world(weight), local.device)
    return state


def _own_entries(weight: DTensor, state: Any) -> dict[str, DTensor]:
    """The scale entries of a sharded weight by name (without "weight."), as DTensors that alias what this rank keeps."""
    mesh, device = weight.device_mesh, weight._local_tensor.device
    origin, own = state.sharded, state.clone()
    if origin is not None:
        own.absmax, own.sharded = origin.own_scales, None
    entries = {}
    for name, value in own.as_dict(packed=True).items():
        if name.startswith(_BLOB_PREFIX):
            value = nn.functional.pad(value, (0, -value.numel() % _BLOB_BYTES), value=ord(" "))
        placements = weight.placements if name == "absmax" else [Replicate()] * mesh.ndim
        size = state.absmax.size() if name == "absmax" else value.size()
        entries[name] = DTensor.from_local(
            value.to(device), mesh, placements, run_check=False, shape=size, stride=_strides(size)
        )
    return entries


def _strides(size: torch.Size) -> tuple[int, ...]:
    return torch.empty(size, device="meta").stride()


def _take_entries(state_dict: dict[str, Any], key: str) -> dict[str, torch.Tensor]:
    start = f"{key}."
    return {name[len(start) :]: value for name, value in state_dict.items() if name.startswith(start)}


def _own_rows(packed: torch.Tensor, weight: DTensor, state: Any, key: str) -> DTensor:
    """This rank's rows of a whole packed tensor of any storage dtype, as a DTensor like `weight`."""
    try:
        whole = repack(packed, state, weight.dtype)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    begin, length = _C.rank_slice(whole.size(0), *_shard_world(weight))
    rows = whole[begin : begin + length].to(weight._local_tensor.device)
    return DTensor.from_local(
        rows, weight.device_mesh, weight.placements, run_check=False, shape=weight.size(), stride=weight.stride()
    )


def _restore_shard(weight: DTensor, origin: Origin, key: str) -> None:
    """After a load that replaced the parameter (`assign=True`): give its local tensor the hooks again."""
    local = weight._local_tensor
    if isinstance(local, PackedShard) and local.origin is origin:
        return
    if weight.size() != origin.size or weight.dtype != origin.dtype:
        raise ValueError(
            f"{key}: loaded {tuple(weight.size())} of {weight.dtype} where the model has {tuple(origin.size)} of {origin.dtype}; "
            f"sharded and full dicts must have the model's container dtype, or use bitshard.fsdp.load_full_state_dict"
        )
    plain = local.plain() if isinstance(local, PackedShard) else local
    weight._local_tensor = PackedShard.wrap(plain, origin)


def _agree(entries: dict[str, torch.Tensor], mesh: Any) -> dict[str, torch.Tensor]:
    """`entries` of a rank that has them, on all ranks of `mesh`; empty if no rank has them. Plain CPU tensors if they were sent."""
    for dim in reversed(range(mesh.ndim)):
        group = mesh.get_group(dim)
        have = [False] * dist.get_world_size(group)
        dist.all_gather_object(have, bool(entries), group)
        if all(have) or not any(have):
            continue
        box = [{name: _whole(value).cpu() for name, value in entries.items()}]
        dist.broadcast_object_list(box, src=dist.get_global_rank(group, have.index(True)), group=group)
        entries = entries or box[0]
    return entries


def _whole(value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, DTensor):
        raise ValueError("scales were given as DTensors on some ranks of a mesh and not at all on others")
    return value


def _put_entries(entries: dict[str, torch.Tensor], weight: DTensor, state: Any, origin: Origin, key: str) -> None:
    """Write loaded scale entries into `state`, checked against what the model has. ValueError where they belong to another weight."""
    scales = entries.get("absmax")
    if scales is None:
        raise ValueError(f"{key}.absmax is missing beside {sorted(entries)}")
    if scales.dtype != state.absmax.dtype or scales.numel() != state.absmax.numel():
        raise ValueError(
            f"{key}.absmax: {scales.numel()} scales of {scales.dtype} where the model has {state.absmax.numel()} of {state.absmax.dtype} "
            f"(bnb_4bit_use_double_quant and the block size of the model and of the state dict must agree)"
        )
    small = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in entries.items()}
    small["absmax"] = torch.empty(scales.shape, dtype=scales.dtype)
    loaded = QuantState.from_dict(small, device=weight._local_tensor.device)
    for name in ("shape", "blocksize", "quant_type", "nested"):
        if getattr(loaded, name) != getattr(state, name):
            raise ValueError(
                f"{key}: {name} is {getattr(loaded, name)} in the state dict and {getattr(state, name)} in the model"
            )
    own = _own_scales(scales, weight)
    (state.absmax if state.sharded is None else origin.own_scales).copy_(own)
    state.code, state.dtype, state.offset, state.state2 = loaded.code, loaded.dtype, loaded.offset, loaded.state2
    state.checksum = None


def _own_scales(scales: torch.Tensor, weight: DTensor) -> torch.Tensor:
    if isinstance(scales, DTensor):
        if scales.placements != weight.placements:
            scales = scales.redistribute(weight.device_mesh, weight.placements)
        return scales.to_local()
    begin, length = _C.rank_slice(scales.numel(), *_shard_world(weight))
    return scales.view(-1)[begin : begin + length]


def _require_same_bytes(weight: DTensor, state: Any, key: str) -> None:
    """A weight came without scales: they still fit only if its bytes did not change. All ranks find the same and raise together."""
    if state.checksum is not None:
        now = ops.checksum(weight.full_tensor())
        if int(now) == int(state.checksum):
            return
    raise ValueError(
        f"{key}: a packed weight was loaded without its scales ({key}.absmax and the entries beside it), and its bytes are not those that the "
        f"model's scales belong to; load the scales from the same state dict"
    )


def _declared_storage(module: nn.Module) -> torch.dtype:
    storage = getattr(module.quant_state, "storage", None) or getattr(module, "quant_storage", None)
    return storage or module.weight.dtype


def _flat_shares(model: nn.Module) -> dict[int, tuple[int, int, int]]:
    """FSDP1: id(module) -> (bytes of its packed weight, of which in this rank's flat parameter, ranks)."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    shares = {}
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        handle = unit._handle
        if handle is None:
            continue
        flat, ranks = handle.flat_param, handle.world_size if handle.uses_sharded_strategy else 1
        for info, numel, own in zip(flat._param_infos, flat._numels, flat._shard_param_infos):
            if info.param_name == "weight" and vars(info.module).get("quant_state") is not None:
                kept = own.numel_in_shard or 0 if ranks > 1 else numel
                shares[id(info.module)] = (numel * flat.element_size(), kept * flat.element_size(), ranks)
    return shares
