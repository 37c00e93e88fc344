"""A base folder and a folder of peft's adapters made into a folder of merged weights, a module at a time.

peft itself merges, in a copy of its layer that has the real weight (`sharding.checkpoints.merging`), so the values are
those that it gives in one process: with a 4-bit base those of its dequantized weights, which training saw.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bitshard.convert.folder import (
    blamed_on,
    device_of,
    format_of,
    json_object,
    others,
    quantization_of,
    skeleton_of,
    small_files,
    tensors_alone,
)
from bitshard.convert.headers import read_header
from bitshard.convert.output import Output, require_new
from bitshard.convert.source import Source
from bitshard.convert.tensors import packed_like, reverted, use_conversions
from bitshard.convert.values import Progress, buffers, require_finite, require_numbers
from bitshard.inventory import holder_of, holders_of
from bitshard.kinds import QUANT_METHOD
from bitshard.sharding.checkpoints import contents, gathering, merging
from bitshard.sharding.checkpoints.files import Entry, byte_count
from bitshard.sharding.checkpoints.reading import some
from bitshard.sharding.loading.skeleton import Skeleton
from bitshard.state import dtype_name

_FOUR_BIT = ("bitsandbytes", QUANT_METHOD)
_NONE = "No such file: a folder of adapters has one"
_PREFIX = "base_model.model."


def merge_folder(
    base: str | os.PathLike,
    adapter: str | os.PathLike,
    out: str | os.PathLike,
    dtype: torch.dtype | None,
    *,
    device: str | torch.device = "cpu",
    max_shard_size: int | str = "5GB",
    quant_type: str | None = None,
    progress: Progress = lambda steps, total: steps,
    check_progress: Progress = lambda steps, total: steps,
) -> int:
    """Write the model of `base` with the adapters of `adapter` in its weights to `out`.

    At most one module is in memory beside the adapters. Files are written as `quantize_folder` writes them, and an
    interrupted run goes on.

    Args:
        base: of 16- or 32-bit weights, or of 4-bit ones, which are dequantized.
        adapter: that peft's save_pretrained has written: LoRA, rsLoRA, DoRA.
        out: must not exist.
        dtype: of what is written; None: 4-bit weights of a 4-bit base, quantized again as peft does.
        device: that merges.
        max_shard_size, progress, check_progress: as of `quantize_folder`.
        quant_type: with dtype=None: which one the base must have.

    Returns how many modules have got an adapter. OSError: a folder or file cannot be read or written, `out` exists.
    ValueError: files that are not sound, a base that is not 4-bit with dtype=None, adapters that fit no module, values
    that are not finite, before or after merging.
    """
    base, adapter, out = Path(base), Path(adapter), Path(out)
    require_new(out)
    device = device_of(device)
    found = format_of(base)
    if found and found not in _FOUR_BIT:
        raise ValueError(f"{base}: its weights are {found}; expected 4-bit ones of bitsandbytes, or 16 or 32 bits")
    if dtype is None and not found:
        raise ValueError(f"{base}: its weights are not 4-bit: merge into bfloat16, then quantize that folder")
    if quant_type is not None and (own := quantization_of(base).get("bnb_4bit_quant_type")) != quant_type:
        raise ValueError(f"{base}: its weights are {own}, and stay {own} when they are merged in 4 bits")
    source = Source(base)
    skeleton = skeleton_of(base, source, None, device)
    merged = _Merged(skeleton, source, adapter, dtype)
    small_files(base)  # links are refused before anything is written
    require_finite(skeleton, source, check_progress)
    made_by = {"base": str(base.resolve()), "adapter": _settings(adapter), "dtype": str(dtype), "size": max_shard_size}
    output = Output(out, made_by, source.table(), merged.entries, byte_count(max_shard_size), buffers(skeleton))
    try:
        for number, made in output.steps(merged.of, progress):
            output.write(number, made)
        quantized = skeleton.quantizer.quantization_config if dtype is None else None
        name = None if dtype is None else dtype_name(dtype)
        output.finish(others(base, quantized, name), sum(module.elements for module in merged.modules))
    finally:
        output.close()
        source.close()
    return sum(bool(module.adapter) for module in merged.modules)


class _Module(NamedTuple):
    """A module with tensors of its own.

    Attributes:
        path: its name in the model.
        module: on the meta device.
        places: of its tensors, as of `Skeleton.places`.
        adapter: the adapter's tensors for it, by peft's names; empty: there is none.
        entries: what the new checkpoint has of it.
        elements: numbers in it.
    """

    path: str
    module: nn.Module
    places: list[tuple[str, nn.Module, str]]
    adapter: dict[str, Tensor]
    entries: dict[str, Entry]
    elements: int


class _Merged:
    """All modules, each made when it is asked for."""

    def __init__(self, skeleton: Skeleton, files: Source, adapter: Path, dtype: torch.dtype | None):
        self.skeleton, self.files, self.dtype = skeleton, files, dtype
        use_conversions(skeleton, packed=dtype is None)
        self.config, tensors = _read_adapter(adapter)
        ignored = set(getattr(skeleton.model, "_keys_to_ignore_on_save", None) or ())
        groups: dict[int, list[tuple[str, nn.Module, str]]] = {}
        for place in skeleton.places():
            if place[0] not in ignored:
                groups.setdefault(id(place[1]), []).append(place)
        paths = {id(module): path for path, module in skeleton.model.named_modules()}
        owned = _by_owner(tensors, {paths[key] for key in groups})
        self.modules = [self._module(paths[key], places, owned[paths[key]]) for key, places in groups.items()]
        left = tensors.keys() - {name for module in self.modules for name in module.adapter}
        if left:
            count = f"{len(left)} of {len(tensors)}"
            raise ValueError(f"{adapter}: {count} tensors fit no module of the base: {some(sorted(left))}")
        wrong = [line for module in self.modules for line in _misfits(module)]
        if wrong:
            raise ValueError(f"{adapter}: {len(wrong)} tensors do not fit the base: {some(wrong)}")
        self.entries = {name: entry for module in self.modules for name, entry in module.entries.items()}

    def _module(self, path: str, places: list, adapter: dict[str, Tensor]) -> _Module:
        module, made, late, elements = places[0][1], {}, "", 0
        for key, _, name in places:
            tensor, held = contents.tensor_of(module, name), holder_of(module, name)
            shown = tensor.shape if held is None else held.shown or tensor.shape
            elements += shown.numel()
            if held is not None and self.dtype is None:
                packed, late = packed_like(key, held, tensor)
                made |= packed
            else:
                dtype = self._dtype_of(tensor) if held is None else self.dtype
                made[key] = torch.empty(shown, dtype=dtype, device="meta")
        entries = {
            name: Entry(value.dtype, tuple(value.shape), late=bool(late) and name.endswith(late))
            for name, value in reverted(self.skeleton.model, made).items()
        }
        return _Module(path, module, places, adapter, entries, elements)

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        cast = self.dtype is not None and tensor.dtype is self.skeleton.dtype  # what its model wants in fp32 stays
        return self.dtype if cast else tensor.dtype

    def of(self, names: set[str]) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) for each of these names of the new checkpoint."""
        for module in self.modules:
            if not names.isdisjoint(module.entries):
                yield from ((name, tensor) for name, tensor in self._read(module).items() if name in names)

    @torch.no_grad()
    def _read(self, module: _Module) -> dict[str, Tensor]:
        dtypes = {
            key: self._dtype_of(contents.tensor_of(module.module, name))
            for key, _, name in module.places
            if holder_of(module.module, name) is None
        }
        trained = {key: module.adapter.get(_PREFIX + key) for key, _, _ in module.places}  # modules_to_save
        adapter = {name: tensor for name, tensor in module.adapter.items() if name.removeprefix(_PREFIX) not in trained}
        with self._filled(module):
            root = _adapted(_alone(module), self.config, adapter) if adapter else _alone(module)
            made: dict[str, Tensor] = {}
            for piece in contents.pieces(root, merge=bool(adapter)):
                if self.dtype is None and piece.tuner is not None:  # codes would hide what is not finite
                    values = gathering.converted(piece, gathering.whole(piece), self.skeleton.dtype)
                    require_numbers(values, "with the adapters merged")
                made |= gathering.converted(piece, gathering.whole(piece), self.dtype)
            made |= {key: tensor for key, tensor in trained.items() if tensor is not None}
            made = {name: tensor.to(dtypes.get(name, tensor.dtype)) for name, tensor in made.items()}
            return reverted(self.skeleton.model, made)

    @contextmanager
    def _filled(self, module: _Module) -> Iterator[None]:
        """While this is open the module has its weights."""
        before = {name: contents.tensor_of(module.module, name) for _, _, name in module.places}
        holders = [(held, vars(held).copy()) for held in holders_of(module.module)]
        try:
            values = [(place, self.skeleton.value(place, self.files)) for place in module.places]
            for (_, owner, name), value in values:
                self.skeleton.put(owner, name, value)
            yield
        finally:
            for held, known in holders:
                vars(held).clear()
                vars(held).update(known)
            for name, tensor in before.items():
                owner = module.module
                (owner._parameters if name in owner._parameters else owner._buffers)[name] = tensor


def _by_owner(tensors: dict[str, Tensor], paths: set[str]) -> dict[str, dict[str, Tensor]]:
    """{path of a module: the adapter's tensors for it}: of modules around one another for the inner one."""
    found: dict[str, dict[str, Tensor]] = {path: {} for path in paths}
    for name, tensor in tensors.items():
        parts = name.removeprefix(_PREFIX).split(".")
        path = next((p for n in range(len(parts), 0, -1) if (p := ".".join(parts[:n])) in paths), None)
        if path is not None and name.startswith(_PREFIX):
            found[path][name] = tensor
    return found


def _misfits(module: _Module) -> Iterator[str]:
    """Matrices of LoRA that do not fit the linear layer: A [r, in features], B [out features, r]."""
    if not isinstance(module.module, nn.Linear):
        return
    for name, tensor in module.adapter.items():
        for end, place, wanted in ((".lora_A.weight", 1, "in_features"), (".lora_B.weight", 0, "out_features")):
            size = getattr(module.module, wanted)
            if name.endswith(end) and (tensor.dim() != 2 or tensor.shape[place] != size):
                yield f"{name} is {list(tensor.shape)}, of a layer with {size} {wanted.replace('_', ' ')}"


def _alone(module: _Module) -> nn.Module:
    """A tree of modules that has only this one, where the model has it."""
    root = node = nn.Module()
    *parents, last = module.path.split(".")
    for name in parents:
        node._modules[name] = nn.Module()
        node = node._modules[name]
    alone = module.module
    if alone._modules and not holders_of(alone) and not module.adapter:  # its children are modules of their own here
        alone = merging.shallow(alone)
        alone._modules = {}
    node._modules[last] = alone
    root.is_loaded_in_4bit = bool(holders_of(module.module))  # peft asks the model that it is given
    root.is_gradient_checkpointing = False
    return root


def _adapted(root: nn.Module, config: Any, tensors: dict[str, Tensor]) -> nn.Module:
    """peft's model around it, with these tensors in its adapter. ValueError where they do not fit."""
    from peft import PeftModel, set_peft_model_state_dict

    with warnings.catch_warnings(), blamed_on("peft cannot load the adapter"):
        warnings.simplefilter("ignore")  # that names of other modules are not in this one
        model = PeftModel(root, copy.deepcopy(config), autocast_adapter_dtype=False)
        found = set_peft_model_state_dict(model, dict(tensors))
    if found.unexpected_keys:
        raise ValueError(f"the adapter has tensors that peft does not know here: {some(sorted(found.unexpected_keys))}")
    return model.eval()


def _read_adapter(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """peft's config and tensors of an adapter. FileNotFoundError where there is none; ValueError for one that is not
    sound, or of another kind than LoRA."""
    from peft import PeftConfig
    from peft.utils import load_peft_weights

    path = folder / "adapter_config.json"
    if not path.is_file():
        raise FileNotFoundError(2, _NONE, str(path))
    files = sorted(folder.glob("adapter_model.*"))
    if not files:
        raise FileNotFoundError(2, _NONE, str(folder / "adapter_model.safetensors"))
    kind = json_object(path).get("peft_type")
    if kind != "LORA":
        raise ValueError(f"{path}: its adapters are {kind!r}, expected 'LORA'")
    for file in files:
        if file.suffix == ".safetensors":
            read_header(file)
    with blamed_on(path):
        config = PeftConfig.from_pretrained(str(folder))
    config.inference_mode = True
    with blamed_on(files[0]), tensors_alone(files[0]):
        tensors = load_peft_weights(str(folder), device="cpu")
    require_numbers(tensors, folder)
    return config, tensors


def _settings(adapter: Path) -> dict[str, Any]:
    """What says whether another run had the same adapters."""
    sizes = {path.name: path.stat().st_size for path in sorted(adapter.glob("adapter_model*"))}
    config = json_object(adapter / "adapter_config.json")
    return {"folder": str(adapter.resolve()), "sizes": sizes, "config": config}
