"""Files with 4-bit weights in a layout of others (`bitshard.formats.layouts`), loaded and saved with their bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.quantizers_utils import get_module_from_name

from bitshard.experts.sources import names_of
from bitshard.formats.container import repack
from bitshard.formats.layouts import QUANTIZATION, Layout, layout_of
from bitshard.formats.state import QuantState
from bitshard.nn.holder import PackedWeight
from bitshard.weights.inventory import held_by, holder_of
from bitshard.weights.tensor import Params4bit


class Vendor:
    """The files of a checkpoint in such a layout.

    Attributes:
        layout: theirs.
        keys: of the weights that they have packed.
        config: what they say of it beside the weights, to be written again.
    """

    def __init__(self, layout: type[Layout], names: set[str], files: Iterable[str]):
        self.layout = layout
        self.keys = set(layout.packed_in(names).values())
        self.config = _config_beside(files, layout)

    def left_alone(self, model: nn.Module) -> list[str]:
        """Names of the linear layers of which the files have 16 bits."""
        linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
        return [name for name in linear if f"{name}.weight" not in self.keys]

    def converters(self, stacks: list[str], quantizer: Any) -> list[WeightConverter]:
        """What makes packed weights of the files' entries; `stacks`: last parts of the names of experts' stacks."""
        names = stacks if self.layout.kind.stacked else ["weight"]
        found = []
        for name in names:
            stem = name.removesuffix(self.layout.end.lstrip("."))
            patterns = [f"{stem}{end.lstrip('.') if self.layout.end else end}$" for end in self.layout.ends()[::-1]]
            found.append(WeightConverter(patterns, name, [KeepPacked(self.layout, quantizer)]))
        return found


class KeepPacked(ConversionOps):
    """Makes a packed weight of its entries in the files; what is in 16 bits there stays so."""

    def __init__(self, layout: type[Layout], quantizer: Any):
        self.layout = layout
        self.hf_quantizer = quantizer  # with which transformers casts nothing before it is here

    def convert(self, input_dict: dict, model: Any = None, full_layer_name: Any = None, **others: Any) -> dict:
        given = {  # of a scalar a rank that shards may have got nothing
            name.rstrip("$"): value[0] if isinstance(value, list) else value
            for name, value in input_dict.items()
            if not isinstance(value, list) or value
        }
        module, leaf = get_module_from_name(model, full_layer_name)
        held = holder_of(module, leaf)
        if held is None:
            value, old = next(iter(given.values())), getattr(module, leaf)
            return {full_layer_name: value.to(old.dtype) if value.is_floating_point() else value}
        found = {end: value for name, value in given.items() for end in self.layout.ends() if _ends(name, end)}
        stem = full_layer_name.removesuffix(self.layout.end)
        old = module._parameters[leaf]
        weight = take(held, self.layout, full_layer_name, lambda name: found.get(name.removeprefix(stem)), old)
        module._is_hf_initialized = True
        return {full_layer_name: weight}


def _ends(name: str, end: str) -> bool:
    return name.endswith(end) or name == end.lstrip(".")


def take(held: PackedWeight, layout: type[Layout], key: str, get: Any, old: Any) -> Params4bit:
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


def vendor_of(files: Iterable[str], quant_type: str) -> Vendor | None:
    """What these files are where their weights are packed in this format; None else."""
    files = [file for file in files if str(file).endswith(".safetensors")]
    names = names_of(files)
    layout = layout_of(names)
    if layout is None or quant_type not in layout.kind.quant_types:
        return None
    return Vendor(layout, names, files)


def _config_beside(files: list[str], layout: type[Layout]) -> dict[str, Any]:
    """The quantization_config of the config.json beside files; where there is none, what a file of ModelOpt says."""
    folder = Path(files[0]).parent
    found = _json(folder / "config.json").get("quantization_config")
    return found or {"quant_method": layout.method, **_json(folder / QUANTIZATION).get("quantization", {})}


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def filed(model: nn.Module, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A whole state dict of a model, with packed weights in the layouts of the files that they came from."""
    for path, module in model.named_modules():
        for held in held_by(module):
            key = f"{path}.{held.name}" if path else held.name
            if held.layout is None or key not in state_dict:
                continue
            made = held.layout.written(key, state_dict[key], held.state)
            state_dict = {k: v for k, v in state_dict.items() if k != key and not k.startswith(f"{key}.")} | made
    return state_dict


__all__ = ["Vendor", "filed", "take", "vendor_of"]
