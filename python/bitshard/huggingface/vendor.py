"""Files with 4-bit weights in a layout of others (`bitshard.formats.layouts`), loaded and saved with their bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.quantizers_utils import get_module_from_name

from bitshard.experts import modules
from bitshard.experts.sources import files_of
from bitshard.formats.container import repack
from bitshard.formats.layouts import QUANTIZATION, Layout, Stacks, layout_of
from bitshard.formats.state import QuantState
from bitshard.nn.holder import PackedWeight
from bitshard.process import foreign
from bitshard.sharding.checkpoints.laid_out import Beside, beside, packed_weights
from bitshard.sharding.checkpoints.names import Loading
from bitshard.weights.inventory import held_by, holder_of
from bitshard.weights.tensor import Params4bit


class Vendor:
    """The files of a checkpoint in such a layout.

    Args:
        layout: theirs.
        where: name of each tensor -> its file.
        model: of transformers, still with float weights, that gets theirs, and keeps what it has no place for.

    Attributes:
        layout: theirs.
        packed: the weights that they have packed: key in the model -> its layout, and its key there.
        config: what they say of it beside the weights, to be written again.

    ValueError where their weights are meant otherwise than their codes and scales say.
    """

    def __init__(self, layout: type[Layout], where: dict[str, Path], model: nn.Module):
        self.layout = layout
        self.config = _config_beside(sorted({path.parent for path in where.values()}), layout)
        if found := self.config.get("transform_config"):
            raise ValueError(f"transform_config {str(found):.120}: activations are transformed, which is not done here")
        self.packed = packed_weights(model, where, layout)
        self._names = set(where)
        Beside(model, where, self.packed)

    def left_alone(self, model: nn.Module) -> list[str]:
        """Names of the linear layers, and of the experts, of which the files have 16 bits.

        ValueError where they have packed one stack of experts and not another.
        """
        linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
        found = [name for name in linear if f"{name}.weight" not in self.packed]
        for path, module in modules.found(model):
            stacks = [f"{path}.{name}" for name in modules.stack_names(module)]
            there = [key for key in stacks if key in self.packed]
            if there and there != stacks:
                raise ValueError(f"{path}: the files have packed {there} of {stacks}: expected all stacks or none")
            found += [] if there else [path]
        return found

    def converters(self, stacks: list[str], quantizer: Any, others: list) -> list:
        """transformers' conversions of these files.

        Args:
            stacks: last parts of the names of experts' stacks.
            others: transformers' own conversions.
        """
        own = [] if not self.layout.kind.stacked else [self._converter(name, quantizer) for name in stacks]
        for each in others:
            if any(isinstance(layout, Stacks) and _gives(each, key) for key, (layout, _) in self.packed.items()):
                operation = KeepStacks(self, each, quantizer)
                own.append(_with(each, operation))
            else:
                own.append(each)
        return own if self.layout.kind.stacked else [*own, self._converter("weight", quantizer)]

    def _converter(self, name: str, quantizer: Any) -> WeightConverter:
        stem = name.removesuffix(self.layout.end.lstrip("."))
        patterns = [f"{stem}{end.lstrip('.') if self.layout.end else end}$" for end in self.layout.ends()[::-1]]
        return WeightConverter(patterns, name, [KeepPacked(self.layout, quantizer)])

    def __contains__(self, name: str) -> bool:
        return name in self._names


class KeepPacked(ConversionOps):
    """Makes a packed weight of its entries in the files; what is in 16 bits there stays so."""

    def __init__(self, layout: type[Layout], quantizer: Any):
        self.layout = layout
        self.hf_quantizer = quantizer  # with which transformers casts nothing before it is here

    def __deepcopy__(self, memo: dict[int, Any]) -> KeepPacked:
        return self  # transformers copies a conversion for each tensor that is one of its sources

    def convert(self, input_dict: dict, model: Any = None, full_layer_name: Any = None, **others: Any) -> dict:
        given = {  # of a scalar a rank that shards may have got nothing
            name.rstrip("$"): value[0] if isinstance(value, list) else value
            for name, value in input_dict.items()
            if not isinstance(value, list) or value
        }
        module, leaf = get_module_from_name(model, full_layer_name)
        held = holder_of(module, leaf)
        if held is None:
            return {full_layer_name: given[leaf].to(getattr(module, leaf).dtype)}
        found = {end: value for name, value in given.items() for end in self.layout.ends() if _ends(name, end)}
        stem = full_layer_name.removesuffix(self.layout.end)
        old = module._parameters[leaf]
        weight = take(held, self.layout, full_layer_name, lambda name: found.get(name.removeprefix(stem)), old)
        module._is_hf_initialized = True
        return {full_layer_name: weight}


class KeepStacks(ConversionOps):
    """The same of a stack of experts, whose layers the files have one by one; of 16 bits what transformers makes.

    Args:
        files: theirs.
        dense: transformers' conversion of float ones.

    Attributes:
        patterns: of all entries -> which of an expert's layers, and how the name of the entry ends.
        used: whether some stack was of 16 bits.
    """

    def __init__(self, files: Vendor, dense: Any, quantizer: Any):
        self.files, self.dense, self.hf_quantizer = files, dense, quantizer
        stems = [pattern.removesuffix(".weight") for pattern in dense.source_patterns]
        ends = dict.fromkeys((*files.layout.ends(), ".weight"))
        self.patterns = {f"{stem}{end}$": (part, end) for part, stem in enumerate(stems) for end in ends}
        self.used = False

    def __deepcopy__(self, memo: dict[int, Any]) -> KeepStacks:
        return self  # transformers copies a conversion for each tensor that is one of its sources

    def convert(self, input_dict: dict, model: Any = None, full_layer_name: Any = None, **others: Any) -> dict:
        module, leaf = get_module_from_name(model, full_layer_name)
        held, old = holder_of(module, leaf), getattr(module, leaf)
        if held is not None:
            layout = self.files.packed[full_layer_name][0]
            weight = take(held, layout, full_layer_name, self._entries(layout, input_dict).get, old)
            module._is_hf_initialized = True
            return {full_layer_name: weight}
        self.used = True
        patterns = self.dense.source_patterns
        made = {patterns[part]: input_dict[each] for each, (part, end) in self.patterns.items()
                if end == ".weight" and each in input_dict}  # fmt: skip
        names = {"source_patterns": patterns, "target_patterns": self.dense.target_patterns}
        for operation in self.dense.operations:
            made = operation.convert(made, **{**others, **names}, model=model, full_layer_name=full_layer_name)
        (value,) = made.values()
        return {full_layer_name: (value[0] if isinstance(value, list) else value).to(old.dtype)}

    def _entries(self, layout: Stacks, given: dict[str, list]) -> dict[str, Any]:
        """{name in the files: tensor} of what transformers has collected, by pattern in the order of experts."""
        found: dict[str, Any] = {}
        for pattern, tensors in given.items():
            part, end = self.patterns[pattern]
            names = (f"{stems[part]}{end}" for stems in layout.stems)
            found |= zip((name for name in names if name in self.files), tensors, strict=True)
        return found


def _gives(conversion: Any, key: str) -> bool:
    """Whether a conversion of transformers makes the tensor `key` of others."""
    targets = conversion.target_patterns if hasattr(conversion, "operations") else ()
    return any(key.endswith(target.rstrip("$")) for target in targets)


def _ends(name: str, end: str) -> bool:
    return name.endswith(end) or name == end.lstrip(".")


def take(held: PackedWeight, layout: type[Layout] | Stacks, key: str, get: Any, old: Any) -> Params4bit:
    """The packed weight of a layer out of its entries (`Layout.read`), of the dtype of the empty weight `old`."""
    if held.awaited is not None:
        shard, held.layout = held.awaited.take_rows(layout, key, get, old.dtype)
        return shard
    packed, state, own = layout.read(key, get, old.dtype, QuantState)
    if not packed.is_meta:
        packed = repack(packed, held.storage, state)
    weight = Params4bit.from_prequantized(packed, state.as_dict(packed=True), device=packed.device, module=held.layer)
    held.layout = own
    return weight


def vendor_of(files: Iterable[str], quant_type: str, model: nn.Module) -> Vendor | None:
    """What these files are where their weights are packed in this format; None else."""
    where = files_of(files)
    layout = layout_of(where)
    if layout is None or quant_type not in layout.kind.quant_types:
        return None
    return Vendor(layout, where, model)


def _config_beside(folders: list[Path], layout: type[Layout]) -> dict[str, Any]:
    """The quantization_config of the config.json beside files; where there is none, what a file of ModelOpt says."""
    folder = folders[0]
    found = _json(folder / "config.json").get("quantization_config")
    return found or {"quant_method": layout.method, **_json(folder / QUANTIZATION).get("quantization", {})}


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def filed(model: nn.Module, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A whole state dict of a model, with packed weights in the layouts of the files that they came from, and what
    these have besides; by names that transformers makes those of the files."""
    found = dict(state_dict)
    made: dict[str, Any] = {}
    for path, module in model.named_modules():
        for held in held_by(module):
            key = f"{path}.{held.name}" if path else held.name
            if held.layout is None or key not in state_dict:
                continue
            own = held.layout.written(key, state_dict[key], held.state)
            (made if isinstance(held.layout, Stacks) else found).update(own)
            names = [key, *(f"{key}.{entry}" for entry in held.kind.entry_names())]
            for name in names:
                if name not in own:
                    found.pop(name, None)
    others = beside(model)
    if others is not None:
        made |= {name: tensor.clone() for name, tensor in others.read()}
    return found | _unreversed(model, made)


def _with(converter: WeightConverter, operation: KeepStacks) -> WeightConverter:
    """A converter like this one with another operation; transformers' own `copy` is newer than 5.17."""
    patterns = [*operation.patterns], [*converter.target_patterns]
    if hasattr(converter, "copy"):
        return converter.copy(*patterns, operations=[operation])
    new = WeightConverter(*patterns, [operation], converter.force_cpu)
    for name in ("scope_prefix", "base_model_prefix"):
        setattr(new, name, getattr(converter, name, None))
    return new


def write_small_files(model: nn.Module) -> None:
    """Write what files have beside the weights into the folder that transformers is saving a model to.

    ValueError where it is not transformers that saves, or has other names for it.
    """
    others = beside(model)
    if others is None or not others.files:
        return
    frame = foreign.asked_by(foreign.TRANSFORMERS_WRITES)
    known = {} if frame is None else frame.f_locals
    if not {"save_directory", "is_main_process"} <= known.keys() or not hasattr(model, "should_save_on_this_rank"):
        raise ValueError(f"{sorted(others.files)} would be lost: call bitshard.fsdp.save_pretrained(model, folder)")
    for name, data in others.files.items() if model.should_save_on_this_rank(known["is_main_process"]) else ():
        (Path(known["save_directory"]) / name).write_bytes(data)


def _unreversed(model: nn.Module, tensors: dict[str, Any]) -> dict[str, Any]:
    """The same with names of which transformers' saving, which reverses the renamings of loading, makes those given.

    ValueError where there are none.
    """
    used = getattr(model, "_weight_conversions", None) or []
    reverse = [each.reverse_transform() for each in used[::-1] if isinstance(each, WeightRenaming)]
    loading, found = Loading(model), {}
    for name, tensor in tensors.items():
        known = (name, rename_source_key(name, loading.renamings, [])[0])
        given = next((each for each in known if rename_source_key(each, reverse, [])[0] == name), None)
        if given is None:
            raise ValueError(
                f"{name}: transformers would save it by another name; bitshard.fsdp.save_pretrained does not"
            )
        found[given] = tensor
    return found


__all__ = ["Vendor", "filed", "take", "vendor_of", "write_small_files"]
