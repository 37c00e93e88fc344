"""A model of transformers on the meta device, and how its parts are filled from files.

A unit is what is filled at once: a decoder layer, the embeddings, what is left. Dense weights of 4-bit layers are
quantized as they come, packed ones taken over; the packed bytes are kept in a container of the model's dtype, which
both versions of FSDP shard.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitshard import ops
from bitshard.formats import layouts
from bitshard.formats.container import repack
from bitshard.formats.state import VALUE_DTYPES, dtype_name
from bitshard.sharding.checkpoints.names import Loading
from bitshard.sharding.checkpoints.reading import Checkpoint, some
from bitshard.weights.guards import plain
from bitshard.weights.inventory import holder_of, holders_of
from bitshard.weights.tensor import Params4bit

_CONVERT = (
    "load them once with from_pretrained(path, config=bitshard.transformers.dense_config(path), "
    "quantization_config=bitshard.transformers.FourBitConfig(...)), and save_pretrained"
)
Slot = tuple[nn.Module, str, str]  # module, name of a parameter or buffer in it, key in the state dict


class Skeleton:
    """A model without weights, and what fills it.

    Args:
        config: of transformers; it is copied. With a `quantization_config` inside, the files hold packed weights.
        quantization_config: a `BitsAndBytesConfig` for files of 16 or 32 bits; None leaves the model dense.
        dtype: of everything that is not packed; None: what the config says, else float32.
        build: makes the model from the config and dtype; None: the causal language model of the config.
        own_dtypes: whether what the model itself wants in another dtype gets that, as from_pretrained does. FSDP wants
            one dtype.
        files: the folder of the files, or they; for weights that others have packed in the wanted format.
        runs: whether the model is to be run, for which buffers that no file has are computed.

    Attributes:
        model: on the meta device, but for the buffers that no file has.
        dtype, device: what is filled gets them.
        untied: whether the config ties weights that are not tied here.
    """

    untied = False

    def __init__(
        self,
        config: Any,
        quantization_config: Any,
        dtype: torch.dtype | None,
        device: torch.device,
        build: Callable[..., nn.Module] | None = None,
        own_dtypes: bool = False,
        runs: bool = True,
        files: Any = None,
    ):
        config = copy.deepcopy(config)
        self.dtype = dtype or getattr(config, "dtype", None) or torch.float32
        if self.dtype not in VALUE_DTYPES.values():
            raise TypeError(f"load: dtype={dtype_name(self.dtype)}, expected float32, float16 or bfloat16")
        self.device = device
        self.quantizer = _quantizer(config, quantization_config)
        with torch.device("meta"):
            self.model = (build or causal)(config, dtype=self.dtype)
        wanted = _own_dtypes(self.model, self.dtype) if own_dtypes else {}
        if self.quantizer is not None:
            _preprocess(self.quantizer, self.model, self.dtype, _safetensors(files))
        for module, name, key in _slots(self.model):  # the biases of the new 4-bit layers are of torch's default dtype
            tensor = _get((module, name, ""))
            if tensor.is_floating_point() and not _is_4bit(module, name):
                tensor.data = tensor.data.to(wanted.get(key, self.dtype))
        if runs:
            _compute_buffers(self.model, device)
        self._conversions = Conversions(self.model)
        # id of a tensor on the meta device -> itself, so that the id stays its own, and every place that it has
        self._places: dict[int, tuple[Tensor, list[Slot]]] = {}
        for slot in _slots(self.model):
            self._places.setdefault(id(_get(slot)), (_get(slot), []))[1].append(slot)

    # -- what there is to fill --

    def units(self) -> list[nn.Module]:
        """The embeddings, then each layer that transformers would not split. Tied embeddings are no unit."""
        kinds = set(getattr(self.model, "_no_split_modules", None) or ())
        found: list[nn.Module] = []
        embedding, head = (getattr(self.model, f"get_{end}put_embeddings", lambda: None)() for end in ("in", "out"))
        tied = embedding is not None and getattr(head, "weight", None) is embedding.weight
        if embedding is not None and not tied and all(len(self._places[id(p)][1]) == 1 for p in embedding.parameters()):
            found.append(embedding)
        inside: set[nn.Module] = set()
        for module in self.model.modules():
            if type(module).__name__ in kinds and module not in inside:
                found.append(module)
                inside.update(module.modules())
        return found

    def check(self, files: Checkpoint, unsaved: Collection[str] = ()) -> None:
        """ValueError that names those which the files lack, but for those `unsaved`, or have otherwise."""
        complaints = []
        vendor = getattr(self.quantizer, "vendor", None)
        if vendor is not None:
            files.show(vendor.packed, self.dtype)
        self._conversions.look(files, {key for _, slots in self._places.values() for _, _, key in slots})
        for tensor, slots in self._places.values():
            key = next(filter(None, (self._name_in(files, key) for _, _, key in slots)), None)
            if key is None and any(key in unsaved for _, _, key in slots):
                continue
            if key is None and not any(key in self._conversions for _, _, key in slots):
                complaints.append(f"{slots[0][2]} is missing")
            elif key is None:
                continue
            elif not files.entries(key) and files.shape(key) != _shape_in_files(tensor, *slots[0][:2]):
                wanted = _shape_in_files(tensor, *slots[0][:2])
                complaints.append(f"{key} is {files.shape(key)}, expected {wanted}")
            elif files.entries(key) and not _is_4bit(*slots[0][:2]):
                complaints.append(f"{key} is packed, for a layer that is not quantized so")
        if complaints:
            raise ValueError(
                f"{len(complaints)} of {len(self._places)} tensors of {files.where} do not fit: {some(complaints)}"
            )

    # -- filling it --

    @torch.no_grad()
    def fill(self, unit: nn.Module, files: Checkpoint) -> list[Params4bit]:
        """Give `unit` its weights, those that it shares with others to them, too; the 4-bit ones.

        What is filled already, or was added by others, stays as it is.
        """
        packed = []
        for module, name, _ in list(_slots(unit)):
            old = _get((module, name, ""))
            known, slots = self._places.get(id(old), (None, []))
            if known is not old:
                continue
            key = self._key_in_files((slots[0][2], module, name), files)
            new = self._read(old, module, name, key, files)
            for module, name, _ in slots:
                _put(module, name, new)
            if isinstance(new, Params4bit):
                packed.append(new)
        return packed

    def _read(self, old: Tensor, module: nn.Module, name: str, key: str, files: Checkpoint) -> Tensor:
        try:
            values = files.read(key) if key in files else self._conversions.read(key, files)
            if not files.entries(key):
                if list(values.shape) != _shape_in_files(old, module, name):
                    raise ValueError(
                        f"is {list(values.shape)} in the files, expected {_shape_in_files(old, module, name)}"
                    )
                values = values.t() if _is_transposed(module, name) else values
            if _is_4bit(module, name):
                return self._packed(old, values, holder_of(module, name).layer, key, files)
            if values.is_floating_point() and values.element_size() < 2:
                raise TypeError(
                    f"values of {dtype_name(values.dtype)}, whose scales are tensors of their own: {_CONVERT}"
                )
            dtype = old.dtype if values.is_floating_point() else values.dtype
            values = values.to(self.device, dtype, copy=True)
            return nn.Parameter(values, old.requires_grad) if isinstance(old, nn.Parameter) else values
        except (TypeError, ValueError, RuntimeError) as error:
            if ops.is_out_of_memory(error):
                raise
            raise ValueError(f"{key}: {error}") from error

    def _packed(self, old: Tensor, values: Tensor, layer: Any, key: str, files: Checkpoint) -> Params4bit:
        """A packed weight of `layer` from its float values, or from packed bytes and the entries beside them."""
        held = layer.packed_weight
        beside = {name: files.read(name) for name in held.kind.names_beside(key, files)}
        if beside:
            weight = held.of_codes(values.to(self.device), beside, key, self.dtype)
            held.layout = files.layout(key)
        elif values.dtype in VALUE_DTYPES.values():
            weight = held.of_values(values.to(self.device, self.dtype), vars(old))
        else:
            raise TypeError(f"weights of {dtype_name(values.dtype)}, expected float32, float16 or bfloat16; {_CONVERT}")
        return contained(weight, self.dtype)

    # -- or its tensors, one by one, without keeping them --

    def places(self) -> Iterator[tuple[str, nn.Module, str]]:
        """(key, module, name) of every parameter and saved buffer, one that is shared in its first place."""
        return ((slots[0][2], *slots[0][:2]) for _, slots in self._places.values())

    def all_places(self) -> Iterator[tuple[str, nn.Module, str]]:
        """The same in the order of the state dict, one that is shared in each of its places."""
        return ((key, module, name) for module, name, key in _slots(self.model))

    @property
    def used(self) -> list[Any]:
        """transformers' conversions that the names of the files need; `check` finds them."""
        return self._conversions.used

    def sources(self, place: tuple[str, nn.Module, str], files: Checkpoint) -> list[str]:
        """Names of the tensors in the files that one is made of."""
        key = self._key_in_files(place, files)
        return [key] if key in files else self._conversions.sources(key)

    def value(self, place: tuple[str, nn.Module, str], files: Checkpoint, of: Tensor | None = None) -> Tensor:
        """One as it would be filled in: a `Params4bit` that is quantized, or a dense tensor. `of`: the empty tensor of
        this model that it is, where something else has its place now."""
        _, module, name = place
        old = _get((module, name, "")) if of is None else of
        return self._read(old, module, name, self._key_in_files(place, files, old), files)

    def has(self, tensor: Tensor) -> bool:
        """Whether this is one of the empty tensors."""
        known, _ = self._places.get(id(tensor), (None, []))
        return known is tensor

    @staticmethod
    def put(module: nn.Module, name: str, value: Tensor) -> None:
        """Give a module one of its tensors."""
        _put(module, name, value)

    def _key_in_files(self, place: tuple[str, nn.Module, str], files: Checkpoint, of: Tensor | None = None) -> str:
        _, module, name = place
        slots = self._places[id(_get((module, name, "")) if of is None else of)][1]
        found = [(key, self._name_in(files, key)) for _, _, key in slots]
        return next(name or key for key, name in found if name or key in self._conversions)

    def _name_in(self, files: Checkpoint, key: str) -> str | None:
        """The name under which the files have `key` as one tensor, packed or not; None where they do not."""
        return key if key in files else self._conversions.renamed(key)

    def done(self) -> nn.Module:
        """The model, all of whose units are filled."""
        if self.quantizer is not None:
            self.quantizer.postprocess_model(self.model)
        return self.model


class Conversions:
    """Parameters that files have in other pieces than the model (one tensor per expert), by transformers' conversions.

    Args:
        model: of transformers, whose conversions these are.
    """

    def __init__(self, model: nn.Module):
        self._model, self._loading = model, Loading(model)
        self._sources: dict[str, list[tuple[str, str | None]]] = {}  # key -> (name in the files, its pattern)
        self._first: dict[str, str] = {}  # key -> the first of the keys that are made of the same tensors

    def look(self, files: Checkpoint, keys: set[str]) -> None:
        """Find out which of the model's `keys` are made of other tensors of the files."""
        from transformers.core_model_loading import dot_natural_key

        meta = dict.fromkeys(keys, True)
        for name in sorted(set(files.files) - keys, key=dot_natural_key):
            made, pattern = self._loading.made_of(name, meta)
            for key in made:
                if key in keys and key not in files:
                    self._sources.setdefault(key, []).append((name, pattern))
                    self._first[key] = made[0]

    @property
    def used(self) -> list[Any]:
        """Those that some name of the files has needed."""
        return [each for each in self._loading.known if each.was_used()]

    def __contains__(self, key: str) -> bool:
        return key in self._sources

    def renamed(self, key: str) -> str | None:
        """The only tensor of the files that `key` is made of, without a change; None: there is no such one."""
        sources = self._sources.get(key, [])
        return sources[0][0] if len(sources) == 1 and sources[0][1] is None else None

    def sources(self, key: str) -> list[str]:
        """Names of the files' tensors that `key` is made of."""
        return [name for name, _ in self._sources[key]]

    def read(self, key: str, files: Checkpoint) -> Tensor:
        """The values of `key`, made of the files' tensors, which are there until then."""
        from transformers.core_model_loading import WeightRenaming

        sources = self._sources[key]
        pattern = sources[0][1]
        made = (
            WeightRenaming(sources[0][0], key) if pattern is None else copy.deepcopy(self._loading.of_pattern[pattern])
        )
        first = self._first[key]
        for name, pattern in sources:
            made.add_tensor(first, name, pattern or name, files.read(name))
        values = made.convert(first, model=self._model, config=self._model.config)[key]
        return values[0] if isinstance(values, list) else values


def contained(weight: Params4bit, dtype: torch.dtype) -> Params4bit:
    """`weight` with its packed bytes in a container of `dtype`; files keep the declared storage."""
    if weight.quant_state.part is None:  # of which this rank has kept its part already
        with plain():
            weight.data = repack(weight.data, dtype, weight.quant_state)
    return weight


def packed_weights(module: nn.Module) -> Iterator[Any]:
    """The holders of all weights of `module` that are 4-bit or will be."""
    return (held for layer in module.modules() for held in holders_of(layer))


def _slots(model: nn.Module) -> Iterator[Slot]:
    """The parameters and saved buffers of `model`, one that is shared in each of its places."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in [*module._parameters.items(), *module._buffers.items()]:
            if value is not None and name not in module._non_persistent_buffers_set:
                yield module, name, f"{path}.{name}" if path else name


def _safetensors(files: Any) -> list[str]:
    """The safetensors files of a folder, or of a list."""
    if files is None:
        return []
    paths = Path(files).glob("*.safetensors") if isinstance(files, (str, Path)) else files
    return sorted(map(str, paths))


def _preprocess(quantizer: Any, model: nn.Module, dtype: torch.dtype, files: list[str]) -> None:
    """What from_pretrained does to a model that nothing ties yet: which layers stay in 16 bits may depend on that."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for key in tied:
        path, _, name = key.rpartition(".")
        module = model.get_submodule(path)
        table = module._parameters if name in module._parameters else module._buffers
        table[name] = type(table[name])(torch.empty_like(table[name]))
    quantizer.preprocess_model(model=model, dtype=dtype, device_map=None, checkpoint_files=files)
    if tied:
        model.tie_weights()


def _own_dtypes(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtypes that a new model of transformers has its tensors in, or keeps when it is loaded in `dtype`."""
    from transformers.core_model_loading import build_glob_alternation

    found = {key: _get((module, name, key)).dtype for module, name, key in _slots(model)}
    plan = model._get_dtype_plan(dtype)
    if plan:
        pattern, groups, _ = build_glob_alternation(list(plan))
        for key in found:
            match = pattern.search(key)
            if match is not None:
                found[key] = plan[groups[match.lastgroup]]
    return found


def _get(slot: Slot) -> Tensor:
    module, name, _ = slot
    return module._parameters[name] if name in module._parameters else module._buffers[name]


def _put(module: nn.Module, name: str, value: Tensor) -> None:
    if isinstance(value, Params4bit):
        holder_of(module, name).take(value)
        return
    (module._parameters if name in module._parameters else module._buffers)[name] = value


def _is_4bit(module: nn.Module, name: str) -> bool:
    return holder_of(module, name) is not None


def _is_transposed(module: nn.Module, name: str) -> bool:
    held = holder_of(module, name)
    return held is not None and held.of_conv1d


def _shape_in_files(tensor: Tensor, module: nn.Module, name: str) -> list[int]:
    """Shape that a tensor has in files of 16 or 32 bits."""
    shape = list(tensor.shape)
    return shape[::-1] if _is_transposed(module, name) else shape


class OwnCode(ValueError):
    """transformers would make a model or tokenizer by running code that comes with the files; bitshard does not."""


def own_code(where: str | Path, auto_map: Any, kind: Any) -> OwnCode:
    """The error for a file that names code in its auto_map; `kind`: the model's type."""
    from transformers import __version__

    names = [str(each[0] if isinstance(each, list) else each) for each in dict(auto_map).values()]
    return OwnCode(
        f"{where}: its auto_map names code of the model's own ({', '.join(names)}), which bitshard never runs, and "
        f"transformers {__version__} has no such class of its own for {kind!r}. Who trusts that code loads the model "
        "in Python with trust_remote_code=True and a quantization_config, and calls save_pretrained"
    )


def causal(config: Any, dtype: torch.dtype, auto: Any = None) -> nn.Module:
    """The causal language model of a config, of transformers' own class; `auto`: the one that such a class chooses."""
    from transformers import AutoModelForCausalLM

    try:
        return (auto or AutoModelForCausalLM).from_config(config, dtype=dtype, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        where = Path(getattr(config, "_name_or_path", "") or ".") / "config.json"
        raise own_code(where, config.auto_map, config.model_type) from error


def config_of(folder: str | Path) -> Any:
    """The config of a folder, of transformers' own class."""
    from transformers import AutoConfig

    with refusing_code(folder):
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


@contextmanager
def refusing_code(folder: str | Path, *files: str) -> Iterator[None]:
    """OwnCode where transformers lacks a class and would ask whether to run code that comes with a folder.

    What is called inside has trust_remote_code=False: it takes a class of transformers where there is one. `files` have
    an auto_map, besides config.json.
    """
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        found = {}
        for path in (Path(folder) / file for file in (*files, "config.json")):
            if path.is_file():
                found[path] = json.loads(path.read_text(encoding="utf-8"))
        for path, values in found.items():
            if values.get("auto_map"):
                raise own_code(path, values["auto_map"], values.get("model_type", "it")) from error
        raise


def _quantizer(config: Any, quantization_config: Any) -> Any:
    """The quantizer of transformers that makes 4-bit layers; None for a dense model. The config loses its own."""
    from transformers.quantizers import AutoHfQuantizer

    own = getattr(config, "quantization_config", None)
    by_others = own is not None and layouts.method_of(own) in layouts.METHODS
    if own is not None and quantization_config is not None and not by_others:
        raise ValueError("load: the files are quantized already, so quantization_config must be None")
    if own is not None:
        del config.quantization_config
    if quantization_config is not None:
        own = None
    settings = own if own is not None else quantization_config
    if settings is None:
        return None
    quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=own is not None)
    loads = quantizer.quantization_config
    if not (getattr(loads, "load_in_4bit", False) or getattr(loads, "load_in_8bit", False)):
        raise ValueError(
            f"load: expected files with 4-bit or int8 weights, or dense ones, these are {layouts.method_of(loads)}: "
            f"{_CONVERT}"
        )
    return quantizer


def _compute_buffers(model: nn.Module, device: torch.device) -> None:
    """Give the buffers that no file has (frequencies of rotary embeddings) the values that their model computes."""
    owners: dict[str, nn.Module] = {}  # path -> the model of transformers whose part it is, a model inside of one first
    for path, module in model.named_modules():
        owners[path] = module if hasattr(module, "_init_weights") else owners[path.rpartition(".")[0]]
        names = [name for name in module._non_persistent_buffers_set if module._buffers[name] is not None]
        if not names:
            continue
        for name in names:
            empty = torch.empty_like(module._buffers[name], device=device)
            module._buffers[name] = empty.fill_(torch.nan) if empty.is_floating_point() else empty
        with torch.no_grad():
            owners[path]._init_weights(module)
        for name in names:
            if module._buffers[name].isnan().any():
                raise ValueError(f"load: {type(model).__name__} does not compute its buffer {path}.{name}")
