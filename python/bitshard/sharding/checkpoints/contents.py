"""What a checkpoint of a model holds, module by module, wherever FSDP and peft have put its tensors.

A `Piece` is one module with tensors of its own. Its key is the one of the model without wrappers: of FSDP1, of
activation checkpointing, of torch.compile, of peft. An adapter is no part of a checkpoint; with `merge` its layer is
part of the piece of the layer that it adapts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from bitshard.formats.container import repack
from bitshard.formats.place import Place
from bitshard.formats.state import QuantState
from bitshard.sharding.checkpoints.files import Entry
from bitshard.sharding.checkpoints.names import unsaved
from bitshard.sharding.weights.state_entries import BLOB_PREFIX
from bitshard.weights.inventory import holders_of

WRAPPED = (
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_orig_mod",
)  # names under which wrappers keep a module
_PEFT = {"AuxiliaryTrainingWrapper", "BaseTunerLayer"}  # base classes of peft's layers and wrappers
_FLAT = "_flat_param"  # under which FSDP1 registers its flat parameter
_PARAMETRIZED = re.compile(r"(^|\.)parametrizations\.(\w+)\.original$")  # saved under the parameter's own name


@dataclass
class Piece:
    """One module and its tensors.

    Attributes:
        key: of the module in the checkpoint, with a dot behind it.
        module: the module.
        names: its parameters and saved buffers; those of FSDP1's flat parameter, too.
        held: name -> holder of its 4-bit weights (`bitshard.nn.holder.PackedWeight`).
        tuner: peft's layer around it whose adapters are to be merged, of several the outermost; else None.
        unit: FSDP1's unit that has its tensors, else None.
        flat: of FSDP1: name -> what an unsharded parameter would be.
        shared: of FSDP1: name -> which place in its flat parameter that is.
    """

    key: str
    module: nn.Module
    names: list[str]
    held: dict[str, Any] = field(default_factory=dict)
    tuner: nn.Module | None = None
    unit: Any = None
    flat: dict[str, Entry] = field(default_factory=dict)
    shared: dict[str, tuple] = field(default_factory=dict)

    def name_of(self, name: str) -> str:
        """Key of one of its tensors."""
        return _PARAMETRIZED.sub(r"\1\2", self.key + name)

    def entries(self, dtype: torch.dtype | None) -> dict[str, Entry]:
        """What the checkpoint has of it: 4-bit as it is, or with `dtype` every float tensor in that."""
        found = {}
        for name in self.names:
            held = self.held.get(name)
            if held is not None and dtype is None:
                found[self.name_of(name)] = _packed_entry(held)
            elif held is not None:
                found[self.name_of(name)] = Entry(dtype, self.dense_shape(name))
            else:
                entry = self.flat.get(name) or _entry(self.tensor(name))
                cast = dtype is not None and entry.dtype.is_floating_point
                found[self.name_of(name)] = Entry(dtype, entry.shape) if cast else entry
        if dtype is None:
            for held in self.held.values():
                found.update(self._scale_entries(held))
        return found

    def _scale_entries(self, held: Any) -> dict[str, Entry]:
        """Scales and what is beside them. Merging changes the length of the JSON entry."""
        state = held.state.clone()
        state.sharded = state.part = None
        key = self.name_of(held.name)
        found = {name: _entry(value) for name, value in state.kind.beside(key, state).items()}
        for name, entry in found.items():
            entry.late = self.tuner is not None and BLOB_PREFIX in name
        return found

    def dense_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a 4-bit weight's values as files of dense weights have them."""
        shape = self.shape(name)
        return shape[::-1] if self.held[name].of_conv1d else shape

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the values that a tensor stands for, as the model has them."""
        held = self.held.get(name)
        if held is not None:
            return tuple(held.shown or held.state.shape)
        return tuple((self.flat.get(name) or _entry(self.tensor(name))).shape)

    def identity(self, name: str) -> tuple:
        """What two places have in common whose tensors get the same values."""
        held = self.shared.get(name) or (id(self.tensor(name)),)
        if self.tuner is None or (_adapts_parameter(self.tuner) and name not in _adapted_names(self.tuner)):
            return held
        deltas = self.tuner._modules.get("trainable_tokens_delta")  # of a tied head it is that of the embedding
        return (*held, id(self.tuner if deltas is None else deltas))

    def tensor(self, name: str) -> Any:
        """Parameter or buffer `name`, as it is now: whole, a DTensor, or FSDP1's view."""
        return tensor_of(self.module, name)


def tensor_of(module: nn.Module, name: str) -> Any:
    """Parameter or buffer `name` of a module, as it is now."""
    for table in (module._parameters, module._buffers):
        if table.get(name) is not None:
            return table[name]
    return getattr(module, name)


def _entry(tensor: Tensor) -> Entry:
    return Entry(tensor.dtype, tuple(tensor.shape))


def _packed_entry(held: Any) -> Entry:
    return Entry(held.storage, held.state.kind.stored_shape(held.state, held.storage.itemsize))


def packed_tensors(key: str, packed: Tensor, state: QuantState, storage: torch.dtype) -> dict[str, Tensor]:
    """The entries of a whole packed weight as a checkpoint file has them."""
    stored = repack(packed, storage, state).view(state.kind.stored_shape(state, storage.itemsize))
    return {key: stored, **state.kind.beside(key, state)}


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of wrappers: of FSDP1, DDP, activation checkpointing, torch.compile, and peft's model."""
    while True:
        inner = next((module._modules[name] for name in WRAPPED if name in module._modules), None)
        if inner is None and isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = module.module
        if inner is None and hasattr(module, "get_base_model"):
            inner = module.get_base_model()
        if inner is None:
            return module
        module = inner


def is_tuner(module: nn.Module) -> bool:
    """Whether this is a layer of peft around a layer of the model."""
    return "base_layer" in module._modules and hasattr(module, "merged_adapters")


def is_adapted(module: nn.Module) -> bool:
    """Whether this is a layer or wrapper of peft."""
    return is_tuner(module) or not _PEFT.isdisjoint(kind.__name__ for kind in type(module).__mro__)


def is_adapted_by_peft(module: nn.Module) -> bool:
    """Whether this is a layer, wrapper or model of peft."""
    return is_adapted(module) or hasattr(module, "get_base_model")


def pieces(model: nn.Module, merge: bool) -> list[Piece]:
    """All pieces of `model` in the order of its state dict, a tensor in each of its places.

    ValueError with `merge` for a model without adapters that could be merged; for a wrapper of peft that is not known;
    for weights that are not quantized yet.
    """
    if merge:
        _require_weights(model)
    walk = _Walk(model, merge)
    found = list(walk.below(model, "", None))
    if merge and not walk.tuners:
        raise ValueError("merge=True: this model has no adapters of peft")
    return found


def _require_weights(model: nn.Module) -> None:
    """ValueError where the active adapter is a prompt, which no weight can hold."""
    for module in model.modules():
        config = getattr(module, "active_peft_config", None) if hasattr(module, "get_base_model") else None
        if getattr(config, "is_prompt_learning", False):
            kind = getattr(config.peft_type, "value", config.peft_type)
            raise ValueError(f"merge=True: the adapter is a prompt ({kind}), which cannot be merged into weights")


def require_readable(found: list[Piece]) -> None:
    """ValueError for 4-bit weights that `from_pretrained` does not find: those that `nn.parametrize` has made."""
    for piece in found:
        for name in piece.held:
            if _PARAMETRIZED.search(piece.key + name):
                raise parametrized_error(piece.name_of(name))


def parametrized_error(key: str) -> ValueError:
    """The error for saving the 4-bit weight `key` of `nn.parametrize` for transformers."""
    return ValueError(
        f"{key}: from_pretrained cannot read a 4-bit weight made by bitsandbytes.nn.parametrize, for its files have no "
        "format for it. Save the values with bitshard.fsdp.save_pretrained(model, folder, dtype=torch.bfloat16) and "
        "quantize behind loading, or save model.state_dict(), which a model with the same parametrizations loads."
    )


class _Walk:
    """One walk through the modules of a model."""

    def __init__(self, model: nn.Module, merge: bool):
        self.merge = merge
        self.flat = _flat_parameters(model)
        self.ignored = unsaved(unwrapped(model))
        self.tuners = 0

    def below(self, module: nn.Module, key: str, tuner: nn.Module | None) -> Iterator[Piece]:
        """The pieces of `module`, whose key is `key`, and of all in it; `tuner` is peft's layer around it."""
        module = unwrapped(module)
        if is_tuner(module):
            if tuner is not None and not (_adapts_parameter(tuner) and _adapts_parameter(module)):
                raise ValueError(f"{key}: one layer of peft around another cannot be saved")
            self.tuners += 1
            adds = self.merge and _adds(module)
            yield from self.below(module._modules["base_layer"], key, (tuner or module) if adds else tuner)
            return
        if is_adapted(module):
            self.tuners += 1
            yield from self.below(_inside(module, self.merge, key), key, None)
            return
        piece = self._piece(module, key, tuner)
        if tuner is not None and _adapts_parameter(tuner):
            _require_there(tuner, [] if piece is None else piece.names, key)
        if piece is not None:
            yield piece
        for name, child in module._modules.items():
            if child is not None:
                yield from self.below(child, f"{key}{name}.", None)

    def _piece(self, module: nn.Module, key: str, tuner: nn.Module | None) -> Piece | None:
        unit, entries, shared = self.flat.get(id(module), (None, {}, {}))
        names = [name for name, tensor in module._parameters.items() if tensor is not None and name != _FLAT]
        names += [name for name in entries if name not in names]
        unsaved = module._non_persistent_buffers_set
        names += [name for name, tensor in module._buffers.items() if tensor is not None and name not in unsaved]
        names = [name for name in names if f"{key}{name}" not in self.ignored]
        stored = (held.stored() for held in holders_of(module) if held.name in names)
        held = {one.name: one for one in stored if one is not None}
        for name, one in held.items():
            if one.state is None or one.place in (Place.FLOAT, Place.AWAITED):
                raise ValueError(
                    f"{key}{name}: this {one.kind.word} weight is not quantized yet, so it cannot be saved"
                )
        return Piece(key, module, names, held, tuner, unit, entries, shared) if names else None


def _adds(tuner: nn.Module) -> bool:
    """Whether this layer of peft has an active adapter that its layer does not contain yet."""
    if getattr(tuner, "disable_adapters", False):
        return False
    dicts = [unwrapped(getattr(tuner, name)) for name in getattr(tuner, "adapter_layer_names", ())]
    there = {name for each in dicts if hasattr(each, "keys") for name in each.keys()}  # noqa: SIM118
    return any(name not in tuner.merged_adapters and (name in there or not there) for name in tuner.active_adapters)


def _inside(wrapper: nn.Module, merge: bool, key: str) -> nn.Module:
    """What the model has in the place of a wrapper of peft. ValueError for one that is not known."""
    if {"original_module", "modules_to_save"} <= set(wrapper._modules):
        return _chosen(wrapper, merge)
    if "token_adapter" in wrapper._modules:
        return wrapper._modules["token_adapter"]
    raise ValueError(
        f"{key.removesuffix('.')}: {type(wrapper).__name__} of peft is not known to bitshard, so what it trains would "
        "be lost: save the adapter with bitshard.fsdp.save_adapter, and the base from a model without adapters"
    )


def _adapts_parameter(tuner: nn.Module) -> bool:
    """Whether this layer of peft adapts one named parameter of a module (`target_parameters`)."""
    return hasattr(tuner, "parameter_name")


def _adapted_names(tuner: nn.Module) -> list[str]:
    """Names of the parameters that this layer of peft, and those inside of it, adapt."""
    inner = unwrapped(tuner._modules["base_layer"])
    return [tuner.parameter_name, *(_adapted_names(inner) if is_tuner(inner) else [])]


def _require_there(tuner: nn.Module, names: list[str], key: str) -> None:
    """ValueError where a layer of peft adapts a parameter that its module does not have as a tensor of its own."""
    while is_tuner(tuner):
        if tuner.parameter_name not in names:
            raise ValueError(
                f"merge=True: {key}{tuner.parameter_name} is parametrized (4-bit by replace_parameter_4bit, say), and "
                "an adapter cannot be merged into it; save without merge, and the adapter by itself"
            )
        tuner = unwrapped(tuner._modules["base_layer"])


def _chosen(wrapper: nn.Module, merge: bool) -> nn.Module:
    """The trained copy in a module that peft trains whole, or without `merge` the original."""
    copies = wrapper._modules["modules_to_save"]
    off = getattr(wrapper, "disable_adapters", False)
    active = [name for name in getattr(wrapper, "active_adapters", ()) if name in copies and not off]
    return copies[active[0]] if merge and active else wrapper._modules["original_module"]


def _flat_parameters(model: nn.Module) -> dict[int, tuple[Any, dict[str, Entry], dict[str, tuple]]]:
    """FSDP1: id(module) -> (unit, what its parameters are when they are whole, which place each has in the unit)."""
    found: dict[int, tuple[Any, dict[str, Entry], dict[str, tuple]]] = {}
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        if unit._handle is None:
            continue
        flat, places = unit._handle.flat_param, {}

        def put(module: nn.Module, name: str, entry: Entry, place: tuple, unit: Any = unit) -> None:
            _, entries, shared = found.setdefault(id(module), (unit, {}, {}))
            entries[name], shared[name] = entry, place

        for number, (info, shape) in enumerate(zip(flat._param_infos, flat._shapes, strict=True)):
            place, entry = (id(flat), number), Entry(flat.dtype, tuple(shape))
            places[id(info.module), info.param_name] = place, entry
            put(info.module, info.param_name, entry, place)
        for info in flat._shared_param_infos:
            place, entry = places[id(info.prim_module), info.prim_param_name]
            put(info.module, info.param_name, entry, place)
    return found
