"""A base folder and a folder of peft's adapters made into a folder of merged weights, a module at a time.

peft itself merges, in a copy of its layer that has the real weight (`sharding.checkpoints.merging`), so the values are
those that it gives in one process: with a 4-bit base those of its dequantized weights, which training saw.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from bitshard import lora
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
from bitshard.convert.tensors import empty_weight, packed_entries
from bitshard.convert.values import Progress, buffers, require_finite, require_numbers, to_check
from bitshard.formats import layouts
from bitshard.formats.layouts import QUANTIZATION
from bitshard.formats.state import dtype_name
from bitshard.process.registry import QUANT_METHOD
from bitshard.sharding.checkpoints import gathering
from bitshard.sharding.checkpoints.contents import Piece
from bitshard.sharding.checkpoints.files import Entry, byte_count
from bitshard.sharding.checkpoints.reading import some
from bitshard.sharding.checkpoints.written import written
from bitshard.sharding.loading.skeleton import Skeleton
from bitshard.weights.inventory import holder_of, holders_of
from bitshard.weights.tensor import Params4bit

_FOUR_BIT = ("bitsandbytes", QUANT_METHOD)
_ADAPTER = "default"  # peft's name for the adapter
_NONE = "No such file: a folder of adapters has one"


def merge_folder(
    base: str | os.PathLike,
    adapter: str | os.PathLike,
    out: str | os.PathLike,
    dtype: torch.dtype | None,
    *,
    device: str | torch.device = "cpu",
    max_shard_size: int | str = "5GB",
    quant_type: str | None = None,
    merge_aware: bool = False,
    progress: Progress = lambda steps, total: steps,
    check_progress: Progress = lambda steps, total: steps,
) -> int:
    """Write the model of `base` with the adapters of `adapter` in its weights to `out`.

    At most one module is in memory beside the adapters. What the base ties and the adapter changes in one place only is
    written twice, and the config says that nothing is tied. Files are written as `quantize_folder` writes them, and an
    interrupted run goes on.

    Args:
        base: of 16- or 32-bit weights, or of 4-bit ones, which are dequantized; MXFP4 and NVFP4 in a layout of others
            among them (`bitshard.formats.layouts`).
        adapter: that peft's save_pretrained has written: LoRA, rsLoRA, DoRA.
        out: must not exist.
        dtype: of what is written; None: 4-bit weights of a 4-bit base, quantized again as peft does; those in a layout
            of others in that, to the nearest, with all other entries as they are.
        device: that merges.
        max_shard_size, progress, check_progress: as of `quantize_folder`.
        quant_type: with dtype=None: which one the base must have.
        merge_aware: with dtype=None: the bytes of `bitshard.lora.merge_aware`, not peft's.

    Returns how many modules have got an adapter. OSError: a folder or file cannot be read or written, `out` exists.
    ValueError: files that are not sound, a base that is not 4-bit with dtype=None, adapters that fit no module, values
    that are not finite, before or after merging.
    """
    base, adapter, out = Path(base), Path(adapter), Path(out)
    require_new(out)
    device = device_of(device)
    found = format_of(base)
    if found and found not in {*_FOUR_BIT, *layouts.METHODS}:
        raise ValueError(f"{base}: its weights are {found}; expected 4-bit ones of bitsandbytes, or 16 or 32 bits")
    source = Source(base)
    layout = layouts.layout_of(source.files)
    if layout is None and found in layouts.METHODS:
        raise ValueError(f"{base}: its config says {found}, and its files have no weights in MXFP4 or NVFP4 of that")
    if dtype is None and not found and layout is None:
        raise ValueError(f"{base}: its weights are not 4-bit: merge into bfloat16, then quantize that folder")
    own = quantization_of(base).get("bnb_4bit_quant_type") if layout is None else layout.kind.name_of_type
    if quant_type is not None and own != quant_type:
        raise ValueError(f"{base}: its weights are {own}, and stay {own} when they are merged in 4 bits")
    settings = None if layout is None else _settings_of(layout)
    skeleton = skeleton_of(base, source, settings, device, packed=layout is not None)
    wanted = to_check(skeleton, source)
    merged = _Merged(skeleton, source, adapter, dtype, merge_aware)
    small_files(base)  # links are refused before anything is written
    require_finite(source, wanted, check_progress)
    made_by = {"base": str(base.resolve()), "adapter": _settings(adapter), "dtype": str(dtype), "size": max_shard_size}
    made_by |= {"merge_aware": True} if merge_aware else {}
    output = Output(out, made_by, source.table(), merged.entries, byte_count(max_shard_size), merged.buffers)
    try:
        for number, made in output.steps(merged.of, progress):
            output.write(number, made)
        quantized = skeleton.quantizer.quantization_config if dtype is None else None
        name = None if dtype is None else dtype_name(dtype)
        small = others(base, quantized, name, merged.untied, merged.changes)
        if dtype is not None:
            small.pop(QUANTIZATION, None)  # it says how files in 4 bits are read
            if merged.found.beside is not None:
                merged.found.beside.log_left_out(out)
        output.finish(small, merged.elements)
    finally:
        output.close()
        source.close()
    return merged.adapted


def _settings_of(layout: type[layouts.Layout]) -> Any:
    """The quantization_config under which files in this layout are kept."""
    from bitshard.huggingface.transformers import FourBitConfig

    return FourBitConfig(bnb_4bit_quant_type=layout.kind.name_of_type)


class _Merged:
    """All modules of the base with tensors of their own, each made when it is asked for.

    peft's model around the empty base says which adapters are where; the modules get their weights one after the other.
    """

    def __init__(self, skeleton: Skeleton, files: Source, adapter: Path, dtype: torch.dtype | None, aware: bool):
        self.skeleton, self.files, self.dtype = skeleton, files, dtype
        model = skeleton.model
        for key, module, name in skeleton.places():
            if (held := holder_of(module, name)) is not None:
                held.layout = files.layout(skeleton.sources((key, module, name), files)[0])
        pairs = list(_give_states(model))
        self._empty = {id(new): (new, old) for new, old in pairs}  # what was in the places of packed weights
        model._weight_conversions = skeleton.used
        model.is_loaded_in_4bit = bool(self._empty)  # peft asks the model
        config, tensors = _read_adapter(adapter)
        self._replicated = bool(config.layer_replication)
        self.tuned = _adapted(model, config, tensors, adapter)
        if aware:
            lora.merge_aware(self.tuned)
        self.found = written(self.tuned, True, dtype, "merge", self._entries)
        self.pieces = self.found.pieces
        own = [self._entries(piece) for piece in self.pieces]
        self._made = {key: entry for entries in own for key, entry in entries.items()}
        self._names_of = [set(self._files_names(entries)) for entries in own]
        self.adapted = sum(piece.tuner is not None or not self._is_of_base(piece) for piece in self.pieces)
        self.elements = sum(math.prod(piece.shape(name)) for piece in self.pieces for name in piece.names)

    @property
    def entries(self) -> dict[str, Entry]:
        """What the new checkpoint has."""
        return self.found.entries

    @property
    def buffers(self) -> set[str]:
        """Names of those that are buffers."""
        return buffers(self.skeleton, self.found.names)

    @property
    def untied(self) -> bool:
        """Whether the base ties weights, and the new checkpoint does not."""
        return self.skeleton.untied or self.found.untied

    @property
    def changes(self) -> dict[str, Any]:
        """What its config says otherwise than that of the base: how many layers there are, if peft replicates some."""
        return {"num_hidden_layers": self.found.config.num_hidden_layers} if self._replicated else {}

    def _entries(self, piece: Piece) -> dict[str, Entry]:
        """By the model's keys. What the model wants in fp32 stays."""
        found: dict[str, Entry] = {}
        for name in piece.names:
            key, held = piece.name_of(name), piece.held.get(name)
            if held is not None and self.dtype is None:
                found |= packed_entries(key, held, self._old(piece.tensor(name)))
            elif held is not None:
                found[key] = Entry(self.dtype, piece.dense_shape(name))
            else:
                dtype = piece.tensor(name).dtype if self._is_empty(piece, name) else self.skeleton.dtype
                cast = self.dtype is not None and dtype is self.skeleton.dtype
                found[key] = Entry(self.dtype if cast else dtype, piece.shape(name))
        return found

    def of(self, names: set[str]) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) for each of these names of the new checkpoint."""
        collector = self.found.names.collector()
        for piece, own in zip(self.pieces, self._names_of, strict=True):
            if not names.isdisjoint(own):
                made = collector.add(self._read(piece))
                yield from ((name, tensor) for name, tensor in made.items() if name in names)
        beside = self.found.beside
        if beside is not None and self.dtype is None and not names.isdisjoint(beside.entries):
            yield from ((name, tensor) for name, tensor in beside.read() if name in names)

    def _files_names(self, entries: dict[str, Entry]) -> Iterable[str]:
        """Names in files of what these entries are, or are a part of."""
        together = self.found.names.together
        keys = {each for key in entries for each in together(key)}
        return self.found.names.entries({key: self._made[key] for key in sorted(keys)})

    @torch.no_grad()
    def _read(self, piece: Piece) -> dict[str, Tensor]:
        with self._filled(piece):
            if self.dtype is None and piece.tuner is not None:  # codes would hide what is not finite
                values = gathering.converted(piece, gathering.whole(piece), self.skeleton.dtype)
                require_numbers(values, "with the adapters merged")
            made = gathering.converted(piece, gathering.whole(piece), self.dtype)
            return {key: self._cast(tensor, self._made[key]) for key, tensor in made.items()}

    @staticmethod
    def _cast(tensor: Tensor, entry: Entry) -> Tensor:
        floats = entry.dtype.is_floating_point and tensor.is_floating_point() and not entry.late
        return tensor.to(entry.dtype) if floats else tensor

    @contextmanager
    def _filled(self, piece: Piece) -> Iterator[None]:
        """While this is open the module has its weights."""
        module = piece.module
        names = [name for name in piece.names if self._is_empty(piece, name)]
        before = {name: piece.tensor(name) for name in names}
        holders = [(held, vars(held).copy()) for held in holders_of(module)]
        try:
            place = {name: (piece.name_of(name), module, name) for name in names}
            values = {name: self.skeleton.value(place[name], self.files, self._old(before[name])) for name in names}
            for name, value in values.items():
                self.skeleton.put(module, name, value)
            yield
        finally:
            for held, known in holders:
                vars(held).clear()
                vars(held).update(known)
            for name, tensor in before.items():
                (module._parameters if name in module._parameters else module._buffers)[name] = tensor

    def _old(self, tensor: Tensor) -> Tensor:
        return self._empty.get(id(tensor), (None, tensor))[1]

    def _is_empty(self, piece: Piece, name: str) -> bool:
        """Whether a tensor comes from the files of the base: not those of a copy that peft has trained."""
        return self.skeleton.has(self._old(piece.tensor(name)))

    def _is_of_base(self, piece: Piece) -> bool:
        return any(self._is_empty(piece, name) for name in piece.names)


def _give_states(model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Give all packed weights of an empty model the states of empty ones: of each (the new weight, the old one).

    peft reads the weights of layers with DoRA while it adds its own to them.
    """
    for module in list(model.modules()):
        for held in holders_of(module):
            old = module._parameters[held.name]
            packed, state = empty_weight(held, old)
            state.offset = state.offset if state.offset is None else torch.zeros_like(state.offset, device="cpu")
            held.take(Params4bit.of_state(packed, state, old.quant_storage, held.layer))
            yield module._parameters[held.name], old


def _adapted(model: nn.Module, config: Any, tensors: dict[str, Tensor], adapter: Path) -> nn.Module:
    """peft's model around an empty one, with these tensors in its adapter. ValueError where they do not fit."""
    from peft import PeftModel, set_peft_model_state_dict

    with warnings.catch_warnings(), blamed_on("peft cannot load the adapter"):
        warnings.simplefilter("ignore")
        shares = bool(config.layer_replication)  # parameters, which peft's saving of memory would make anew
        tuned = PeftModel(model, config, autocast_adapter_dtype=False, low_cpu_mem_usage=not shares)
        own = {**dict(tuned.named_parameters(remove_duplicate=False)), **dict(tuned.named_buffers())}
        named: dict[str, Tensor] = {}

        def load_state_dict(given: dict[str, Tensor], **others: Any) -> Any:
            named.update(given)
            return _IncompatibleKeys([], [])

        tuned.__dict__["load_state_dict"] = load_state_dict  # peft names them; it would move them to the base's device
        set_peft_model_state_dict(tuned, dict(tensors), low_cpu_mem_usage=True)
        del tuned.__dict__["load_state_dict"]
    _require_fitting(own, named, adapter)
    for name, tensor in named.items():
        path, _, leaf = name.rpartition(".")
        module = tuned.get_submodule(path)
        is_buffer = leaf in module._buffers
        (module._buffers if is_buffer else module._parameters)[leaf] = (
            tensor if is_buffer else nn.Parameter(tensor, requires_grad=False)
        )
    own = dict(tuned.named_parameters(remove_duplicate=False))  # a tied adapter has other names for the same ones
    absent = [name for name, parameter in own.items() if _ADAPTER in name.split(".") and parameter.is_meta]
    if absent:
        raise ValueError(f"{adapter}: {len(absent)} tensors of the adapter are missing: {some(sorted(absent))}")
    return tuned.eval()


def _require_fitting(own: dict[str, Tensor], named: dict[str, Tensor], adapter: Path) -> None:
    """ValueError where peft's model has no place, or one of another shape, for tensors of the adapter."""
    alien = sorted(named.keys() - own.keys())
    if alien:
        count = f"{len(alien)} of {len(named)}"
        raise ValueError(f"{adapter}: {count} tensors fit no module of the base: {some(alien)}")
    wrong = [
        f"{name} is {list(tensor.shape)}, expected {list(own[name].shape)}"
        for name, tensor in named.items()
        if tensor.shape != own[name].shape
    ]
    if wrong:
        raise ValueError(f"{adapter}: {len(wrong)} tensors do not fit the base: {some(wrong)}")


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
