"""4-bit weights in sharded models: state dicts, loading, and a line that says what each rank keeps.

Under FSDP2 a registered weight is a DTensor around a `PackedShard`. Its state dict entries are DTensors only: the
packed weight and its scales `Shard(0)`, everything small `Replicate()`. They keep the container's dtype, so that torch
can load them back in place; `full_state_dict` writes whole tensors in the declared `quant_storage`, as a checkpoint
file has them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor, Replicate

from bitshard import _C, functional, ops, tensor
from bitshard.shard import Origin, PackedShard
from bitshard.state import QuantState
from bitshard.tensor import Params4bit

# The JSON entry of a state dict is padded with spaces to a multiple of this: its length depends on the digits of the
# offset, and torch.distributed.checkpoint loads into tensors of the saved size only. JSON ignores the spaces.
_BLOB_BYTES = 512
_BLOB_PREFIX = "quant_state.bitsandbytes__"
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")  # in module names, not in state dicts


def _keeping_class(name: str) -> Callable[..., DTensor]:
    """A method of DTensor whose result, still a packed shard, answers as `ShardedWeight` too.

    (`__torch_dispatch__` cannot see to that: torch 2.10 and 2.11 pass over it in subclasses of DTensor.)
    """
    method = getattr(DTensor, name)

    @functools.wraps(method)
    def call(weight: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        return state_dict_entry(method(weight, *args, **kwargs))

    return call


def _entry(name: str) -> property:
    """An entry of the state dict as an attribute: torch.distributed resolves the key "weight.absmax" with getattr."""
    return property(lambda weight: sharded_entries(weight, state_of(weight))[name])


class ShardedWeight(DTensor):
    """The registered weight of a layer that FSDP2 sharded, to foreign code a Params4bit that answers for all ranks.

    It is FSDP2's own DTensor around a `PackedShard`; the layer gives it this class when FSDP2 registers it, and the
    attributes of the Params4bit it was cut from. peft and transformers ask for the name of the class, dequantize by
    `dequantize_4bit(weight.data, weight.quant_state)`, and rebuild a weight from `weight.__dict__`.

    Gathered (`full_tensor`, torch's full state dicts) it is a plain tensor in the declared `quant_storage`.
    """

    detach = _keeping_class("detach")
    clone = _keeping_class("clone")
    to = _keeping_class("to")
    cpu = _keeping_class("cpu")

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **options: Any) -> DTensor:
        """As of any DTensor; made whole on every rank, in the declared storage: that is what files get."""
        out = _as_dtensor(self).redistribute(device_mesh, placements, **options)
        origin = self._local_tensor.origin
        storage = origin.attributes.get("quant_storage", origin.dtype)
        if storage is origin.dtype or not all(placement.is_replicate() for placement in out.placements):
            return out
        packed = tensor.repack(whole(out), storage, origin.state.shape.numel())
        return DTensor.from_local(packed, out.device_mesh, out.placements, run_check=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        """The bytes are copied; state, scales and layer stay those of this weight."""
        copy = self.detach().clone()
        return nn.Parameter(copy, requires_grad=False) if isinstance(self, nn.Parameter) else copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _as_dtensor(self).__reduce_ex__(protocol)

    @property
    def quant_state(self) -> QuantState:
        """The state of the whole weight; its `absmax` is real only while the weight is gathered."""
        return state_of(self)

    absmax = _entry("absmax")
    quant_map = _entry("quant_map")
    nested_absmax = _entry("nested_absmax")
    nested_quant_map = _entry("nested_quant_map")


ShardedWeight.__name__ = "Params4bit"


def _as_dtensor(value: Any) -> Any:
    if type(value) is not ShardedWeight:
        return value
    return DTensor(value._local_tensor, value._spec, requires_grad=value.requires_grad)


def state_of(weight: DTensor) -> QuantState:
    """The quantization state of a sharded packed weight."""
    return weight._local_tensor.origin.state


def adopt_shard(module: nn.Module, weight: DTensor) -> None:
    """FSDP2 registers `weight` as the sharded weight of a 4-bit module: make it answer as a Params4bit does."""
    local = weight._local_tensor
    if not isinstance(local, PackedShard):
        return  # being loaded (`load_sharded`), or sharded before it was quantized
    attributes = {name: value for name, value in local.origin.attributes.items() if name != "quant_state"}
    weight.__class__ = ShardedWeight
    weight.__dict__.update(attributes, module=module)
    module.__dict__["sharded_weight"] = weight


def dequantize(weight: DTensor, state: QuantState) -> DTensor:
    """Numbers [N, K] of a sharded packed weight, whole on every rank (`Replicate()`). A collective.

    It gathers this one weight and its scales; the result is no parameter and holds what every rank computed alike.
    """
    _cut(weight)
    mesh = weight.device_mesh
    own = state.clone()
    if state.sharded is not None:
        own.absmax, own.sharded = _like(state.sharded.own_scales, weight, state.absmax.size()).full_tensor(), None
    packed = whole(_as_dtensor(weight))
    values = functional.dequantize_4bit(packed, own.to(packed.device))
    return DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)


def whole(tensor: DTensor) -> torch.Tensor:
    """All of a DTensor as a plain tensor on every rank, on the device of its mesh. A collective unless replicated."""
    device = tensor.device_mesh.device_type
    gathered = (tensor if tensor.device.type == device else tensor.to(device)).full_tensor()
    return gathered.plain() if isinstance(gathered, PackedShard) else gathered  # nothing was gathered on one rank


def write(module: nn.Module, new: Params4bit) -> None:
    """`module.weight = new` for a sharded module: every rank keeps its part of the packed bytes and of the scales.

    All ranks must bring the same weight, quantized as the old one was (ValueError otherwise). FSDP2's parameters and
    the state stay the objects they are; what is gathered at the moment is overwritten too.
    """
    weight = module.sharded_weight
    _cut(weight)
    state, theirs = state_of(weight), new.quant_state
    module.quant_state = state  # quantizing `new` has put its own here
    weight.__dict__["bnb_quantized"] = True  # peft clears it in the attributes that it rebuilds a weight from
    if theirs is None or not new.bnb_quantized:
        raise ValueError(
            f"weight = {list(new.shape)}: a 4-bit layer that is sharded by FSDP2 takes a quantized weight only; move "
            "the new one to a device first"
        )
    for name, found, expected in _differences(theirs, state):
        raise ValueError(
            f"weight with {name} {found} for a 4-bit layer that is sharded by FSDP2 with {name} {expected}: only a "
            "weight that was quantized in the same way can take the place of a sharded one"
        )
    packed = tensor.repack(new.saved_data(), weight.dtype, state.shape.numel())
    begin, length = _C.rank_slice(packed.size(0), *_shard_world(weight))
    weight._local_tensor.plain().copy_(packed[begin : begin + length])
    gathered = module._parameters["weight"]
    if type(gathered) is Params4bit:
        gathered.bnb_quantized = True
        gathered.data.as_subclass(torch.Tensor).copy_(packed)
    if state.sharded is None or type(gathered) is Params4bit:
        state.absmax.copy_(theirs.absmax)
    if state.sharded is not None:
        begin, length = state.sharded.begin, state.sharded.length
        state.sharded.own_scales.copy_(theirs.absmax[begin : begin + length])
    device = state.code.device
    state.dtype, state.checksum = theirs.dtype, ops.checksum(packed).to(device)
    if state.nested:
        state.offset, state.state2 = theirs.offset.to(device), theirs.state2.to(device)


def _differences(theirs: QuantState, ours: QuantState) -> Iterator[tuple[str, Any, Any]]:
    """(name, theirs, ours) of what two states must agree in for one's bytes and scales to take the other's place."""
    for name in ("shape", "blocksize", "quant_type", "nested"):
        if getattr(theirs, name) != getattr(ours, name):
            yield name, getattr(theirs, name), getattr(ours, name)


def save_sharded(module: nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """`_save_to_state_dict` of a 4-bit module whose weight is a DTensor: DTensor entries in the container's dtype.

    The entry of the weight is a `ShardedWeight`, which gathers into the declared storage.
    """
    nn.Module._save_to_state_dict(module, destination, prefix, keep_vars)
    origin = module.weight._local_tensor.origin
    origin.before = origin.loaded = None  # torch asks for what it could load before it saves, too
    for name, value in sharded_entries(module.weight, module.quant_state).items():
        destination[f"{prefix}weight.{name}"] = value


def state_dict_entry(weight: DTensor) -> DTensor:
    """`weight` as a state dict holds it: it gathers into the declared storage."""
    if isinstance(weight._local_tensor, PackedShard):
        weight.__class__ = ShardedWeight
    return weight


def sharded_entries(weight: DTensor, state: QuantState) -> dict[str, DTensor]:
    """The scale entries of a sharded packed weight by name (without "weight."): DTensors over what this rank keeps.

    The scales are cut here if no gather has done it.
    """
    _cut(weight)
    mesh, device = weight.device_mesh, weight._local_tensor.device
    own = state.clone()
    if state.sharded is not None:
        own.absmax, own.sharded = state.sharded.own_scales, None
    entries = {}
    for name, value in own.as_dict(packed=True).items():
        placements, size = [Replicate()] * mesh.ndim, value.size()
        if name == "absmax":
            placements, size = weight.placements, state.absmax.size()
        elif name.startswith(_BLOB_PREFIX):
            value = _padded_blob(value)
            size = value.size()
        entries[name] = DTensor.from_local(
            value.to(device), mesh, placements, run_check=False, shape=size, stride=value.stride()
        )
    return entries


def unfilled_entries(weight: DTensor, state: QuantState) -> dict[str, DTensor]:
    """Zeroed copies of `sharded_entries`, which torch.distributed's `set_model_state_dict` fills with what it loads.

    torch finds what it can load by walking `named_buffers` and `named_parameters` of each module. What it does not fill
    stays zero, the JSON entry included, and is known by that. The checksum of the shard is noted, for torch writes into
    the weight itself before `load_sharded` sees anything.
    """
    entries = {name: torch.zeros_like(value) for name, value in sharded_entries(weight, state).items()}
    local = weight._local_tensor
    local.origin.before = ops.checksum(local.plain())
    return entries


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
    """`_load_from_state_dict` of a 4-bit module whose weight is a DTensor.

    Entries may be DTensors, or whole tensors of which every rank takes its part. Where only some ranks were given the
    scales (`set_model_state_dict(broadcast_from_rank0=True)` delivers registered parameters only), those ranks send
    them to the others. Where none was, the old scales stay if the loaded bytes are the old ones; else all ranks raise.

    Unless all entries are DTensors this is a collective: the ranks of the mesh must load together, as they do with
    torch's functions. ValueError for entries that belong to another weight.
    """
    weight, state, key = module.weight, module.quant_state, f"{prefix}weight"
    _cut(weight)
    origin = weight._local_tensor.origin
    start = f"{key}."
    entries = {name.removeprefix(start): value for name, value in state_dict.items() if name.startswith(start)}
    given = state_dict.get(key)
    if origin.loaded is not None:
        elements = _C.storage_elements(state.shape.numel(), origin.loaded.element_size())
        given, origin.loaded = _like(origin.loaded, weight, torch.Size((elements, 1))), None
    if isinstance(given, torch.Tensor):
        state_dict = {**state_dict, key: _own_rows(given, weight, state, key)}
    if _unfilled(entries):
        entries = {}
    errors = len(error_msgs)
    nn.Module._load_from_state_dict(
        module, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    )
    unexpected_keys[:] = [name for name in unexpected_keys if not name.startswith(start)]
    weight = module.weight
    _restore_shard(module, origin, key)
    if len(error_msgs) > errors or (given is None and not entries):
        return
    if not entries or not all(isinstance(value, DTensor) for value in entries.values()):
        entries = _agree(entries, weight.device_mesh)
    if entries:
        _put_entries(entries, weight, state, key)
    elif given is not None:
        _require_same_bytes(weight, state, key)
    origin.before = None


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The whole state dict on rank 0's CPU, as a checkpoint file has it: plain tensors, packed weights in the declared
    `quant_storage`, all scales. The other ranks get an empty dict. A collective.

    A model that is not sharded writes a checkpoint of it that bitsandbytes loads too: `load_state_dict(full)`, then
    `save_pretrained(path)`, whose own `state_dict=` transformers ignores for quantized models.
    (torch's `get_model_state_dict(full_state_dict=True)` gives the same under FSDP2, with padded JSON entries.)
    """
    storages = {key: (module.quant_state, module.quant_storage) for key, module in _packed_keys(model)}
    keep = not dist.is_initialized() or dist.get_rank() == 0
    full = {}
    with _full_context(model):
        state_dict = model.state_dict()
    for key, value in state_dict.items():
        if isinstance(value, DTensor):
            value = whole(value)
        if keep and isinstance(value, torch.Tensor):
            value = value.cpu()
            full[key] = _repack(value, *storages[key], key) if key in storages else value
        elif keep:
            full[key] = value
    return full


def load_full_state_dict(
    model: nn.Module, state_dict: dict[str, Any], *, broadcast_from_rank0: bool = False, strict: bool = True
) -> None:
    """Load whole tensors, packed in any storage dtype, into a model sharded by FSDP2. A collective.

    Every rank has `state_dict`, or with `broadcast_from_rank0` rank 0 alone. ValueError for sizes that do not fit.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    state_dict = dict(state_dict)
    for key, module in _packed_keys(model):
        if key in state_dict:
            state_dict[key] = _repack(state_dict[key], module.quant_state, module.weight.dtype, key)
        for name in [name for name in state_dict if name.startswith(f"{key}.{_BLOB_PREFIX}")]:
            state_dict[name] = _padded_blob(state_dict[name])
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast_from_rank0, strict=strict)
    set_model_state_dict(model, state_dict, options=options)


def packed_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of every layer of `model` with a quantized 4-bit weight, sharded or not."""
    # wrappers of FSDP1 hand on the attributes of what they wrap, so only a module's own attributes count
    own = [(name, module) for name, module in model.named_modules() if vars(module).get("quant_state") is not None]
    return [(name, module) for name, module in own if hasattr(module, "weight")]


@dataclass
class Share:
    """What this process keeps of a model's 4-bit base, in bytes: `own_packed` of `packed`, `own_scales` of `scales`.

    `scales` counts the first level (`absmax`); the second is 64 times smaller and whole everywhere.
    """

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
        weight, state = getattr(module, "sharded_weight", None), module.quant_state
        weight = module.weight if weight is None else weight
        ranks = 1
        if isinstance(weight, DTensor):
            _cut(weight)
            share.fsdp, ranks = "FSDP2", _shard_world(weight)[0]
            packed, own = weight.numel() * weight.element_size(), weight._local_tensor.numel() * weight.element_size()
        elif id(module) in flat:
            packed, own, ranks = flat[id(module)]
            share.fsdp = "FSDP1"
        else:
            packed = own = weight.numel() * weight.element_size()
        kept = state.absmax if state.sharded is None else state.sharded.scales
        share.weights += 1
        share.packed, share.own_packed = share.packed + packed, share.own_packed + own
        share.scales += state.absmax.numel() * state.absmax.element_size()
        share.own_scales += kept.numel() * kept.element_size()
        share.ranks = max(share.ranks, ranks)
    return share


def describe(model: nn.Module) -> str:
    """One line that says whether the 4-bit base of `model` is sharded, and what this rank keeps of it."""
    share = measure(model)
    if share.weights == 0:
        return "no 4-bit weights in this model"
    if share.ranks == 1:
        return (
            f"4-bit base not sharded: {share.weights} weights, all {share.packed:,} bytes and {share.scales:,} bytes "
            "of scales in this process"
        )
    scales = "sharded" if share.own_scales < share.scales else "whole"
    return (
        f"4-bit base sharded by {share.fsdp} over {share.ranks} ranks: {share.weights} weights, "
        f"{share.own_packed:,} of {share.packed:,} bytes (1/{share.packed / max(share.own_packed, 1):.2f}) and "
        f"{share.own_scales:,} of {share.scales:,} bytes of scales ({scales}) on this rank"
    )


def _packed_keys(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(state dict key of the weight, module) of every packed layer."""
    keys = []
    for name, module in packed_modules(model):
        key = f"{name}.weight" if name else "weight"
        for wrapper in _WRAPPERS:
            key = key.replace(wrapper, "")
        keys.append((key, module))
    return keys


def _full_context(model: nn.Module) -> Any:
    """FSDP1 shows whole tensors in a context only; FSDP2 and plain models need none."""
    if not FullyShardedDataParallel.fsdp_modules(model):
        return contextlib.nullcontext()
    config = FullStateDictConfig(rank0_only=False, offload_to_cpu=False)
    return FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config)


def _padded_blob(blob: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(blob, (0, -blob.numel() % _BLOB_BYTES), value=ord(" "))


def _repack(packed: torch.Tensor, state: QuantState, storage: torch.dtype, key: str) -> torch.Tensor:
    """A whole packed weight [n, 1] in another storage dtype; ValueError unless its size is that of `state`."""
    n = state.shape.numel()
    expected = _C.storage_elements(n, packed.element_size())
    if packed.numel() != expected:
        raise ValueError(
            f"{key}: {packed.numel()} elements of {packed.dtype} where shape {list(state.shape)} packs into {expected}"
        )
    return tensor.repack(packed, storage, n)


def _shard_world(weight: DTensor) -> tuple[int, int]:
    """(world, rank) of the mesh dimension over which `weight` is sharded; (1, 0) if none."""
    dims = [i for i, placement in enumerate(weight.placements) if placement.is_shard()]
    if len(dims) > 1:
        raise ValueError(f"packed 4-bit weights are sharded over one mesh dimension, not over {weight.placements}")
    if not dims:
        return 1, 0
    return weight.device_mesh.size(dims[0]), weight.device_mesh.get_local_rank(dims[0])


def _cut(weight: DTensor) -> None:
    """Cut the scales to this rank's chunk if that has not happened yet."""
    local = weight._local_tensor
    if not isinstance(local, PackedShard):
        raise TypeError(
            f"the 4-bit weight is sharded as {type(local).__name__}, not as PackedShard: was it quantized when "
            "fully_shard was called?"
        )
    local.origin.cut(*_shard_world(weight), local.device)


def _own_rows(packed: torch.Tensor, weight: DTensor, state: QuantState, key: str) -> DTensor:
    """This rank's rows of a packed tensor of any storage dtype, as a DTensor like `weight`.

    A DTensor of another storage is cut at other bytes, so it is gathered first.
    """
    if isinstance(packed, DTensor):
        packed = _as_dtensor(packed)
        if packed.dtype is weight.dtype:
            return packed
        packed = (
            whole(packed) if packed.placements != weight.placements else _whole_of_parts(packed, weight, state, key)
        )
    packed = _repack(packed, state, weight.dtype, key)
    begin, length = _C.rank_slice(packed.size(0), *_shard_world(weight))
    return _like(packed[begin : begin + length].to(weight._local_tensor.device), weight, weight.size())


def _whole_of_parts(packed: DTensor, weight: DTensor, state: QuantState, key: str) -> torch.Tensor:
    """Every rank's part of a packed tensor of another storage than the container's, gathered. A collective.

    The size that `packed` states does not count: torch may state that of the model's weight. ValueError on all ranks
    where any part is not what this model's weight would be cut into.
    """
    elements = _C.storage_elements(state.shape.numel(), packed.element_size())
    local, (_, length) = packed.to_local(), _C.rank_slice(elements, *_shard_world(weight))
    if _anywhere(local.size(0) != length, weight):
        raise ValueError(
            f"{key}: {local.size(0)} elements of {packed.dtype} for this rank, where shape {list(state.shape)} packs "
            f"into {elements}, of which {length} for this rank"
        )
    return whole(_like(local, weight, torch.Size((elements, 1))))


def _like(local: torch.Tensor, weight: DTensor, size: torch.Size) -> DTensor:
    """This rank's part of a column or vector of `size`, placed as `weight` is."""
    stride = (1,) * len(size)
    return DTensor.from_local(local, weight.device_mesh, weight.placements, run_check=False, shape=size, stride=stride)


def _restore_shard(module: nn.Module, origin: Origin, key: str) -> None:
    """After a load that replaced the parameter (`assign=True`): give its local tensor the hooks again."""
    weight = module.weight
    local = weight._local_tensor
    if isinstance(local, PackedShard) and local.origin is origin:
        return
    if weight.size() != origin.size or weight.dtype != origin.dtype:
        raise ValueError(
            f"{key}: loaded {list(weight.size())} of {weight.dtype} where the model has {list(origin.size)} of "
            f"{origin.dtype}; use bitshard.fsdp.load_full_state_dict for another storage dtype"
        )
    plain = local.plain() if isinstance(local, PackedShard) else local
    weight._local_tensor = PackedShard.wrap(plain, origin)
    adopt_shard(module, weight)


def _agree(entries: dict[str, torch.Tensor], mesh: Any) -> dict[str, torch.Tensor]:
    """The entries of a rank that has some, on all ranks of `mesh`; empty if no rank has any."""
    for dim in reversed(range(mesh.ndim)):
        group = mesh.get_group(dim)
        have = [False] * dist.get_world_size(group)
        dist.all_gather_object(have, bool(entries), group)
        if all(have) or not any(have):
            continue
        box = [{name: value.cpu() for name, value in entries.items() if not isinstance(value, DTensor)}]
        dist.broadcast_object_list(box, src=dist.get_global_rank(group, have.index(True)), group=group)
        entries = entries or box[0]
    return entries


def _unfilled(entries: dict[str, torch.Tensor]) -> bool:
    """Whether these are `unfilled_entries` that nothing was loaded into."""
    blobs = [value for name, value in entries.items() if name.startswith(_BLOB_PREFIX)]
    return any(isinstance(blob, DTensor) and not bool(blob.to_local().any()) for blob in blobs)


def _put_entries(entries: dict[str, torch.Tensor], weight: DTensor, state: QuantState, key: str) -> None:
    """Write loaded scale entries into `state`. ValueError where they belong to another weight or format."""
    scales = entries.get("absmax")
    if scales is None:
        raise ValueError(f"{key}.absmax is missing beside {sorted(entries)}")
    if scales.dtype != state.absmax.dtype or scales.numel() != state.absmax.numel():
        raise ValueError(
            f"{key}.absmax: {scales.numel()} scales of {scales.dtype} where the model has {state.absmax.numel()} of "
            f"{state.absmax.dtype}; bnb_4bit_use_double_quant and the block size must agree"
        )
    small = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in entries.items()}
    small["absmax"] = torch.empty(scales.shape, dtype=scales.dtype)
    loaded = QuantState.from_dict(small, device=weight._local_tensor.device)
    for name, theirs, ours in _differences(loaded, state):
        raise ValueError(f"{key}: {name} is {theirs} in the state dict and {ours} in the model")
    own, given = state.absmax if state.sharded is None else state.sharded.own_scales, _own_scales(scales, weight)
    prepared = weight._local_tensor.origin.before is not None
    if prepared and given.untyped_storage().data_ptr() != own.untyped_storage().data_ptr():
        same = (
            torch.equal(own, given.to(own.device)) and loaded.offset == state.offset and loaded.state2 == state.state2
        )
        if not _changed(weight) and _anywhere(not same, weight):
            raise ValueError(
                f"{key}: the state dict brings other scales but the weight stays (an adapter of another base?): "
                "load both or neither"
            )
    own.copy_(given)
    state.code, state.dtype, state.offset, state.state2 = loaded.code, loaded.dtype, loaded.offset, loaded.state2
    state.checksum = None  # of the loaded bytes; the next gather computes it


def _changed(weight: DTensor) -> bool:
    """Whether any rank's shard has other bytes than when `unfilled_entries` noted its checksum. A collective."""
    local = weight._local_tensor
    return _anywhere(int(ops.checksum(local.plain())) != int(local.origin.before), weight)


def _anywhere(flag: bool, weight: DTensor) -> bool:
    """Whether `flag` holds on any rank of the mesh of `weight`. A collective."""
    mesh = weight.device_mesh
    found = torch.tensor(int(flag), device=mesh.device_type)
    for dim in range(mesh.ndim):
        dist.all_reduce(found, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return bool(found)


def _own_scales(scales: torch.Tensor, weight: DTensor) -> torch.Tensor:
    """This rank's part [length] of loaded scales [S]."""
    if isinstance(scales, DTensor):
        return scales.redistribute(weight.device_mesh, weight.placements).to_local()
    begin, length = _C.rank_slice(scales.numel(), *_shard_world(weight))
    return scales.view(-1)[begin : begin + length]


def _require_same_bytes(weight: DTensor, state: QuantState, key: str) -> None:
    """A weight came without scales: they still fit only if its bytes are the old ones. All ranks find the same."""
    if weight._local_tensor.origin.before is not None:
        if not _changed(weight):
            return
    elif state.checksum is not None and int(ops.checksum(whole(_as_dtensor(weight)))) == int(state.checksum):
        return
    raise ValueError(
        f"{key}: a packed weight was loaded without its scales ({key}.absmax and the entries beside it), and its bytes "
        "are not those that the model's scales belong to; load the scales from the same state dict"
    )


def _flat_shares(model: nn.Module) -> dict[int, tuple[int, int, int]]:
    """FSDP1: id(module) -> (bytes of its packed weight, of which in this rank's flat parameter, ranks)."""
    shares = {}
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        handle = unit._handle
        if handle is None:
            continue
        flat, ranks = handle.flat_param, handle.world_size if handle.uses_sharded_strategy else 1
        for info, numel, own in zip(flat._param_infos, flat._numels, flat._shard_param_infos, strict=True):
            if info.param_name == "weight" and vars(info.module).get("quant_state") is not None:
                kept = own.numel_in_shard or 0 if ranks > 1 else numel
                shares[id(info.module)] = (numel * flat.element_size(), kept * flat.element_size(), ranks)
    return shares
