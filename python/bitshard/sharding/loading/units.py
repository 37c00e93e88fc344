"""Models that are loaded unit by unit: read, quantized, adapted and sharded, before the next unit is read (FSDP2)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from bitshard import ops
from bitshard.sharding.checkpoints.reading import Checkpoint
from bitshard.sharding.loading.skeleton import Skeleton, config_of, packed_weights
from bitshard.sharding.together import together
from bitshard.shards import gather


def load(
    source: Any,
    files: str | Path | Iterable[str | Path] | None = None,
    *,
    quantization_config: Any = None,
    dtype: torch.dtype | None = None,
    adapters: Any = None,
    units: Callable[[nn.Module], list[nn.Module]] | None = None,
    build: Callable[..., nn.Module] | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    **options: Any,
) -> nn.Module:
    """A model of transformers, sharded by FSDP2 while it is loaded: no rank ever holds more than its shard and a unit.

    Units are the embeddings, each decoder layer, and the rest. Every rank reads each weight of a unit, quantizes it or
    takes it packed, and keeps its part once `fully_shard` has cut the unit; then the next one is read.

    Args:
        source: a folder (or hub name) with config.json, or a config of transformers.
        files: folder or list of safetensors files whose tensors have the names of the model's; default: `source`.
        quantization_config: a `BitsAndBytesConfig` that makes 4-bit or int8 weights of dense files. None: packed files
            say so themselves, other models stay dense.
        dtype: of everything that is not packed, and of the container of what is; None: what the config says.
        adapters: a config of peft, or a function that is called with each unit of `units` before it is sharded. All
            that was loaded is then frozen. After a config the model is what `model.add_adapter(config)` makes of it,
            with adapters of the model's dtype.
        units: the modules of a model on the meta device that are sharded by themselves; default: as above. One inside
            another is sharded first, and loaded with it.
        build: makes the model from the config and `dtype`; default: `AutoModelForCausalLM.from_config`.
        device: where the model computes; default: the current GPU, or the CPU.
        progress: show a bar on rank 0.
        options: for `fully_shard`: `mesh`, `mp_policy`, `offload_policy`, `reshard_after_forward`.

    ValueError or OSError on all ranks, with the names, where one of them cannot read its files, or tensors are missing
    or of other shapes. A collective: all ranks call it.
    """
    if not dist.is_initialized():
        raise ValueError("load: there is no process group; start the script with torchrun and call init_process_group")
    skeleton, reader = together("load", lambda: begin(source, files, quantization_config, dtype, build, device))
    found = skeleton.units() if units is None else units(skeleton.model)
    adapt = _adapter(adapters, found, skeleton.dtype)
    together("load: adapters", lambda: (None, _settings("adapters", adapters)))
    for unit in shown(outermost(found), progress):
        together(f"load: {unit_name(skeleton.model, unit)}", lambda unit=unit: _fill(skeleton, unit, reader, adapt))
        for inner in _inside_out(unit, found):
            _shard(inner, options)
    together("load: what is in no unit", lambda: _fill(skeleton, skeleton.model, reader, adapt and _freeze))
    _shard(skeleton.model, options)
    reader.close()
    model = skeleton.done()
    if adapters is not None and not callable(adapters):
        model.peft_config, model._hf_peft_config_loaded = {"default": adapt.config}, True
    return model


def begin(
    source: Any, files: Any, quantization_config: Any, dtype: Any, build: Any, device: Any, reads: bool = True
) -> tuple[tuple[Skeleton, Checkpoint | None], Any]:
    """The model on the meta device and its files, once their names and shapes fit; facts that all ranks must share."""
    config, folder = _config(source)
    where = folder if files is None else files
    skeleton = Skeleton(config, quantization_config, dtype, compute_device(device), build, files=where)
    reader = Checkpoint(where) if reads else None
    if reader is not None:
        skeleton.check(reader)
    facts = {"parameters": len(list(skeleton.model.parameters())), "dtype": str(skeleton.dtype)}
    return (skeleton, reader), facts | _settings("quantization_config", quantization_config)


def compute_device(device: torch.device | str | None) -> torch.device:
    """`device`, or the current GPU, or the CPU."""
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _config(source: Any) -> tuple[Any, Any]:
    """The config and the folder of its files, None where `source` is a config."""
    if not isinstance(source, (str, Path)):
        return source, getattr(source, "_name_or_path", "") or "."
    if not Path(source).is_dir():
        from huggingface_hub import snapshot_download

        source = snapshot_download(str(source), allow_patterns=["*.json", "*.safetensors"])
    return config_of(source), source


# ---- one unit ----


def _fill(skeleton: Skeleton, unit: nn.Module, reader: Checkpoint, adapt: Any) -> tuple[None, Any]:
    """Fill and adapt a unit; a checksum of its packed weights and their scales is what the ranks compare."""
    packed = skeleton.fill(unit, reader)
    if adapt is not None:
        bits = {held.kind.bits for held in packed_weights(unit)}  # peft asks the module that it is given
        unit.is_loaded_in_4bit, unit.is_loaded_in_8bit = 4 in bits, 8 in bits
        adapt(unit)
    sums = [int(weight.quant_state.checksum) for weight in packed]
    sums += [int(ops.checksum(w.quant_state.absmax)) for w in packed if w.quant_state.part is None]
    return None, sum(sums)


def _shard(unit: nn.Module, options: dict[str, Any]) -> None:
    """`fully_shard`, and the scales cut at once, where FSDP2's first gather would."""
    fully_shard(unit, **options)
    for held in packed_weights(unit):
        weight = held.owner._parameters.get(held.name)
        if isinstance(weight, DTensor):
            gather.cut_scales(weight)


def _freeze(unit: nn.Module) -> None:
    for parameter in unit.parameters():
        if not isinstance(parameter, DTensor):
            parameter.requires_grad_(False)


def outermost(units: list[nn.Module]) -> list[nn.Module]:
    inner = {part for unit in units for part in unit.modules() if part is not unit}
    return [unit for unit in units if unit not in inner]


def _inside_out(unit: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """The units in `unit`, itself included, each after those inside it."""
    chosen = set(units)
    return [module for module in reversed(list(unit.modules())) if module in chosen]


def unit_name(model: nn.Module, unit: nn.Module) -> str:
    """Where `unit` is in the model."""
    return next((name for name, module in model.named_modules() if module is unit), "")


def shown(units: list[nn.Module], progress: bool) -> Iterable[nn.Module]:
    """`units`, with a progress bar on rank 0."""
    if not progress or dist.get_rank() > 0:
        return units
    from tqdm import tqdm

    return tqdm(units, desc="loading and sharding", unit="unit")


# ---- adapters ----


def _adapter(adapters: Any, units: list[nn.Module], dtype: torch.dtype) -> Any:
    if adapters is None:
        return None
    if not callable(adapters):
        return _Peft(adapters, units, dtype)

    def adapt(unit: nn.Module) -> None:
        _freeze(unit)
        adapters(unit)

    return adapt


def _settings(name: str, config: Any) -> dict[str, str]:
    """What all ranks must ask for alike, by name: entries of a config of transformers or peft; a function's name."""
    if not hasattr(config, "to_dict"):
        return {name: str(getattr(config, "__qualname__", type(config).__name__))}
    return {f"{name}.{key}": _sorted(value) for key, value in config.to_dict().items()}


def _sorted(value: Any) -> str:
    return str(sorted(value, key=str) if isinstance(value, (set, frozenset)) else value)


class _Peft:
    """Injects the adapters of a config of peft into one unit after another.

    Attributes:
        config: a copy; "all-linear", which peft understands for whole models only, is the names of all linear layers
            inside units.
    """

    def __init__(self, config: Any, units: list[nn.Module], dtype: torch.dtype):
        self.config, self.dtype = copy.copy(config), dtype
        if config.target_modules == "all-linear":
            names = {name for unit in units for name, part in unit.named_modules() if isinstance(part, nn.Linear)}
            self.config.target_modules = {name.rpartition(".")[2] for name in names}

    def __call__(self, unit: nn.Module) -> None:
        from peft import inject_adapter_in_model

        _freeze(unit)
        if any(isinstance(module, nn.Linear) for module in unit.modules()):
            inject_adapter_in_model(copy.copy(self.config), unit)
            for parameter in unit.parameters():
                if parameter.requires_grad:  # of another dtype where the files were quantized in another
                    parameter.data = parameter.data.to(self.dtype)
