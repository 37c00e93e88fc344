"""What `from_pretrained` of a model's class will ask a checkpoint for, known before the first byte is written.

An empty model of the class, made from the config that the checkpoint gets, says which tensors there must be, of which
shapes, and which of them are tied.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from bitshard.sharding.checkpoints.names import Loading, unsaved
from bitshard.sharding.checkpoints.reading import some

logger = logging.getLogger("bitshard")


class Expected:
    """The tensors of a model of transformers, as its class has them.

    Args:
        model: an empty one, of the config of the checkpoint.

    Attributes:
        model: the same.
        shapes: key -> shape of each tensor of its state dict.
        tied: key -> key of the tensor that it is, of those that are tied.
        needed: keys that a checkpoint has to have: those which are not tied, and not computed or left out by the class.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        state = model.state_dict()
        self.shapes = {key: tuple(value.shape) for key, value in state.items()}
        self._floats = {key: value.is_floating_point() for key, value in state.items()}
        tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
        self.tied = {key: source for key, source in tied.items() if {key, source} <= state.keys()}
        patterns = [*(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())]
        self.needed = {
            key
            for key in self.shapes.keys() - self.tied.keys() - unsaved(model)
            if not any(re.search(pattern, key) for pattern in patterns)
        }

    def misfits(self, entries: dict[str, tuple[tuple[int, ...], bool]]) -> list[str]:
        """What is wrong with tensors of these (shape, whether float) for the model, in words."""
        wrong = [f"{key} is missing" for key in sorted(self.needed - entries.keys())]
        for key, (shape, is_float) in entries.items():
            wanted = self.shapes.get(key, shape)
            if shape != wanted:
                wrong.append(f"{key} is {list(shape)}, expected {list(wanted)}")
            elif is_float is not self._floats.get(key, is_float):
                wrong.append(f"{key} is {'float' if is_float else 'integer'}, which the class has otherwise")
        return wrong

    def found_by_loading(self, names: Iterable[str]) -> set[str]:
        """Keys of the tensors for which `from_pretrained` takes the files' tensors of these names."""
        from transformers.core_model_loading import dot_natural_key

        loading, keys = Loading(self.model), dict.fromkeys(self.shapes, True)
        found: set[str] = set()
        for name in sorted(names, key=dot_natural_key):
            made, _ = loading.made_of(name, keys)
            found.update([loading.unrenamed(name, keys)] if made[0] not in keys and name in keys else made)
        return found


def class_of(model: nn.Module) -> type:
    """The class of a model, without what FSDP2 makes of it."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def is_of_transformers(model: nn.Module) -> bool:
    """Whether the checkpoint gets a config.json, for transformers to read."""
    return hasattr(getattr(model, "config", None), "save_pretrained")


def expected(model: nn.Module, config: Any) -> Expected | None:
    """What the class of `model` asks for with `config`; None where a model of it cannot be made of a config alone."""
    kind = class_of(model)
    if "PreTrainedModel" not in (each.__name__ for each in kind.__mro__):
        return None
    return _expected(kind, _Config(config))


class _Config:
    """A config by what is in it."""

    def __init__(self, config: Any):
        self.config, self.text = config, config.to_json_string(use_diff=False)

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Config) and (type(self.config), self.text) == (type(other.config), other.text)


@functools.lru_cache(maxsize=8)
def _expected(kind: type, held: _Config) -> Expected | None:
    config = copy.deepcopy(held.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return Expected(kind(config))
    except Exception as error:  # whatever a class of the user's own needs
        logger.warning("%s cannot be made of its config, so what is written is not compared: %s", kind.__name__, error)
        return None


def untied(config: Any) -> Any:
    """A config like this one under which no weights are tied."""
    config = copy.deepcopy(config)
    for each in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        if getattr(each, "tie_word_embeddings", False):
            each.tie_word_embeddings = False
    return config


def require_untieable(model: nn.Module, pairs: list[str]) -> None:
    """ValueError for a class whose forward computes otherwise where its weights are not tied."""
    for kind in {class_of(module) for module in model.modules()}:
        forward = kind.__dict__.get("forward")
        with_source = inspect.isfunction(forward) and kind.__module__.startswith("transformers.")
        if with_source and "tie_word_embeddings" in inspect.getsource(forward):
            raise ValueError(
                f"{some(pairs)} are tied in the model, but not any longer with the adapters merged, and the forward of "
                f"{kind.__name__} depends on tie_word_embeddings: leave the adapter unmerged, or train both alike"
            )


def require_fitting(
    wanted: Expected, entries: dict[str, tuple[tuple[int, ...], bool]], names: Iterable[str], what: str
) -> None:
    """ValueError unless `from_pretrained` finds all that it will ask for.

    Args:
        entries: key -> (shape, whether float) of all tensors that are written, of packed ones those of their values.
        names: of the files' tensors, without entries beside packed ones.
        what: is written, in words.
    """
    wrong = wanted.misfits(entries)
    found = wanted.found_by_loading(names)
    wrong += [f"{key} would not be found" for key in sorted((wanted.needed & entries.keys()) - found)]
    if wrong:
        raise ValueError(
            f"{what}: {len(wrong)} tensors are not what from_pretrained of {class_of(wanted.model).__name__} asks for, "
            f"so nothing is written: {some(wrong)}"
        )
