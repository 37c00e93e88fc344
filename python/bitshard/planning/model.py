"""A model on the meta device: its units, and what of each is quantized, stays in 16 bits, and gets adapters."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from bitshard.convert.folder import blamed_on, json_object
from bitshard.experts import modules as experts
from bitshard.planning.job import Job
from bitshard.planning.shapes import KNOWN, known
from bitshard.sharding.loading.skeleton import causal, own_code


class Matrix(NamedTuple):
    """A quantized weight [rows, columns], or a stack of them: how many numbers, and rows of them."""

    elements: int
    rows: int


class Unit(NamedTuple):
    """What FSDP gathers at once. Elements are counted, not bytes, where the job decides the bytes.

    Attributes:
        name: of the module.
        packed: each quantized weight.
        dense: bytes of everything else.
        adapters: elements of each matrix that is trained.
        experts: whether some of the quantized weights are stacks of experts.
        kind: equal for units that compute the same.
    """

    name: str
    packed: tuple[Matrix, ...]
    dense: int
    adapters: tuple[int, ...]
    experts: bool
    kind: tuple


class Parts(NamedTuple):
    """Units of a model.

    Attributes:
        layers: the decoder layers.
        embeddings, head: bytes; a head that is tied to the embeddings has none.
        packed_head: a quantized head, or None.
        rest: bytes of everything else, such as the last norm; packed and adapted weights outside layers with them.
        tied: whether the head is the embeddings.
        hidden, vocabulary: sizes.
    """

    layers: tuple[Unit, ...]
    embeddings: int
    head: int
    packed_head: Matrix | None
    rest: Unit
    tied: bool
    hidden: int
    vocabulary: int


def config_of(source: str | os.PathLike | dict) -> Any:
    """transformers' config of a config.json, a folder with one, a dictionary, or a known name."""
    if isinstance(source, dict):
        return _of_dictionary(source, "the dictionary")
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _of_dictionary(json_object(path), str(path))
    found = known(str(source))
    if found is None:
        raise FileNotFoundError(2, f"No config.json here, and no known name ({', '.join(KNOWN)})", str(source))
    return _of_dictionary(found, str(source))


def _of_dictionary(values: dict, where: str) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    values = {key: value for key, value in values.items() if key != "quantization_config"}
    kind = values.pop("model_type", None)
    if not kind:
        raise ValueError(f"{where}: it has no model_type")
    if "auto_map" in values and kind not in CONFIG_MAPPING:
        raise own_code(where, values["auto_map"], kind)
    with blamed_on(where):
        return AutoConfig.for_model(kind, **values)


def _auto_class(name: str, config: Any) -> Any:
    """What makes the model: a causal language model, or one of images and text. ValueError where transformers has none,
    or where it is only a part of the model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{name}: an encoder-decoder model, of which a plan would leave out the encoder and what reads it: only "
            "language models that are decoders alone can be planned"
        )
    if type(config) in AutoModelForCausalLM._model_mapping or getattr(config, "auto_map", None):
        return AutoModelForCausalLM
    if type(config) in AutoModelForImageTextToText._model_mapping:
        return AutoModelForImageTextToText
    raise ValueError(f"{name}: no language model of transformers: it has none of type {config.model_type!r}")


class Model:
    """A model of transformers on the meta device.

    Args:
        source: as of `config_of`.

    Attributes:
        model, config, name.
    """

    def __init__(self, source: str | os.PathLike | dict):
        self.name = Path(source).name if not isinstance(source, dict) else source.get("model_type", "model")
        self.config = config_of(source)
        self.config.use_cache = False
        if getattr(self.config, "dtype", None) in (None, torch.float32):
            self.config.dtype = torch.bfloat16  # quantized weights are trained beside 16-bit ones
        auto = _auto_class(self.name, self.config)
        with blamed_on(f"{self.name}: no language model of transformers"), torch.device("meta"):
            self.model = causal(self.config, self.config.dtype, auto)
        self.model.requires_grad_(False).train()
        self.head = self.model.get_output_embeddings()
        self.embedding = self.model.get_input_embeddings()
        self._layers = list(_outermost(self.model))
        self._parts: dict[tuple, Parts] = {}
        if not self._layers:
            raise ValueError(f"{self.name}: {type(self.model).__name__} names no layers (_no_split_modules)")

    @property
    def notes(self) -> list[str]:
        """What of it is not planned as the config may have it, a sentence each."""
        found, kind = [], type(self.model).__name__
        named = (getattr(self.config, "architectures", None) or [kind])[0]
        if named != kind:
            found.append(f"The config names {named}; planned is {kind}, a language model.")
        written = self.config.get_text_config()
        own = {name: getattr(self.config, name, None) for name in self.config.sub_configs}
        parts = [name for name, part in own.items() if part is not None and part is not written]
        if parts:
            names = " and ".join(name.removesuffix("_config") for name in parts)
            found.append(
                f"Planned for text: activations of its parts for {names} are left out. Count their tokens in --seq."
            )
        return found

    def layers(self) -> list[tuple[str, nn.Module]]:
        """The decoder layers with their names."""
        return self._layers

    def is_packed(self, name: str, module: nn.Module, job: Job) -> bool:
        """Whether a module's weight is quantized in `job`."""
        if any(part in name for part in job.skip):
            return False
        if module is self.head:
            return job.head_4bit and not self.tied
        if experts.is_experts(module):
            return job.experts_4bit and job.library == "bitshard"
        return type(module) is nn.Linear and name not in self._kept()

    def require(self, job: Job) -> None:
        """ValueError where the job names layers that the model has not."""
        names = [name for name, _ in self.model.named_modules()]
        targets = () if job.targets == "all-linear" else job.targets
        modules = ((name, each) for name, each in self.model.named_modules() if each is not self.head)
        linear = {name.rpartition(".")[2] for name, each in modules if type(each) is nn.Linear}
        for target in targets:
            if target not in linear:
                known = ", ".join(sorted(linear))
                raise ValueError(f"targets: adapters on {target!r} cannot be planned for {self.name}, but on {known}")
        for part in job.skip:
            if not part or not any(part in name for name in names):
                raise ValueError(f"skip: no module of {self.name} has {part!r} in its name")

    def _kept(self) -> set[str]:
        """What transformers leaves in 16 bits: the head, what is tied to something, the last module."""
        from transformers.quantizers.base import get_keys_to_not_convert

        if not hasattr(self, "_kept_names"):
            self._kept_names = set(get_keys_to_not_convert(self.model))
        return self._kept_names

    @property
    def fused_attention(self) -> bool:
        """Whether transformers computes attention in one kernel, as it chooses for this model."""
        return getattr(self.config, "_attn_implementation", None) not in (None, "eager")

    @property
    def tied(self) -> bool:
        """Whether the head is the embeddings."""
        return self.head is None or self.head.weight is self.embedding.weight

    def adapted(self, name: str, module: nn.Module, job: Job) -> list[int]:
        """Elements of the matrices that LoRA adds to a module."""
        if module is self.head:
            return []
        if experts.is_experts(module):
            if not job.lora_experts:
                return []
            stacks = [module._parameters[stack] for stack in experts.stack_names(module)]
            return [size * stack.shape[0] * job.rank for stack in stacks for size in stack.shape[1:]]
        if type(module) is not nn.Linear:
            return []
        if job.targets != "all-linear" and name.rpartition(".")[2] not in job.targets:
            return []
        return [job.rank * module.in_features, job.rank * module.out_features]

    def parts(self, job: Job) -> Parts:
        """What there is to be held; counted once for jobs that differ in other things only."""
        settings = (job.skip, job.head_4bit, job.experts_4bit, job.library, job.targets, job.lora_experts, job.rank)
        if settings not in self._parts:
            self._parts[settings] = self._counted(job)
        return self._parts[settings]

    def _counted(self, job: Job) -> Parts:
        inside = {id(module) for _, layer in self._layers for module in layer.modules()}
        layers = tuple(self._unit(name, layer, layer.named_modules(prefix=name), job) for name, layer in self._layers)
        others = [
            (name, module)
            for name, module in self.model.named_modules()
            if id(module) not in inside and module not in (self.head, self.embedding)
        ]
        packed_head = self.is_packed("lm_head", self.head, job) if self.head is not None else False
        return Parts(
            layers,
            _nbytes(self.embedding.weight),
            0 if packed_head or self.tied else _nbytes(self.head.weight),
            _matrix(self.head.weight) if packed_head else None,
            self._unit("", self.model, iter(others), job),
            self.tied,
            self.embedding.weight.shape[1],
            self.embedding.weight.shape[0],
        )

    def _unit(self, name: str, unit: nn.Module, members: Iterator[tuple[str, nn.Module]], job: Job) -> Unit:
        packed, dense, adapters, shapes, has_experts = [], 0, [], [], False
        seen: set[int] = set()
        for path, module in members:
            is_packed = self.is_packed(path, module, job)
            adapters += self.adapted(path, module, job)
            stacked = is_packed and experts.is_experts(module)
            has_experts |= stacked
            stacks = experts.stack_names(module) if stacked else ("weight",)
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None or id(tensor) in seen or key in module._non_persistent_buffers_set:
                    continue
                seen.add(id(tensor))
                shapes.append((path.removeprefix(name), key, tuple(tensor.shape)))
                if is_packed and key in stacks:
                    packed.append(_matrix(tensor))
                else:
                    dense += _nbytes(tensor)
        own = tuple(
            (key, value)
            for key, value in sorted(vars(unit).items())
            if isinstance(value, (bool, str)) and key != "training"
        )
        return Unit(name, tuple(packed), dense, tuple(adapters), has_experts, (type(unit).__name__, own, tuple(shapes)))


def _matrix(weight: torch.Tensor) -> Matrix:
    return Matrix(weight.numel(), weight.numel() // weight.shape[-1])


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _outermost(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that neither transformers nor FSDP splits, without those inside another one.

    Where a model names none, those of its longest list of modules.
    """
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    lists = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.ModuleList) and len(each)]
    longest = max(lists, key=lambda named: len(named[1]), default=("", ()))
    inside: set[int] = set()
    named = [(name, each) for name, each in model.named_modules() if type(each).__name__ in kinds]
    for name, module in named or [(f"{longest[0]}.{number}", each) for number, each in enumerate(longest[1])]:
        if id(module) not in inside:
            inside.update(map(id, module.modules()))
            yield name, module
