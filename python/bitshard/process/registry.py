"""When transformers' registries get something: as soon as transformers is imported, before or after bitshard.

The method "bitshard_4bit", so that `from_pretrained` reads models with 4-bit experts wherever bitshard was imported;
and, where `bitshard.experts.enable` was called or BITSHARD_EXPERTS=1 is set, the quantizer for experts in the place of
those for BitsAndBytesConfig and for files in MXFP4. Nothing of transformers is imported here. What is entered:
`bitshard.huggingface.entries`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from bitshard.process import switches

QUANT_METHOD = "bitshard_4bit"  # of transformers' config.json, where a model has weights that are not bitsandbytes' own
# transformers' names of BitsAndBytesConfig(load_in_4bit=True), and of the config of gpt-oss
STOCK = ("bitsandbytes_4bit", "mxfp4")
_REGISTRIES = "transformers.quantizers.auto"
_before: dict[str, Any] = {}  # the quantizers that had these names


class Entries(NamedTuple):
    """What stands in the registries of configs and of quantizers, until it is called."""

    config: Any
    quantizer: Callable[..., Any]


_entries: Entries | None = None  # since `watch`, which `import bitshard` calls


def enter(registries: Any = None) -> None:
    """Enter the method, where transformers is imported; again changes nothing."""
    registries = registries or sys.modules.get(_REGISTRIES)
    if registries is None:
        return
    registries.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(QUANT_METHOD, _entries.config)
    registries.AUTO_QUANTIZER_MAPPING.setdefault(QUANT_METHOD, _entries.quantizer)
    if switches.read().experts:
        take_over(registries)


def take_over(registries: Any = None) -> None:
    """Let BitsAndBytesConfig(load_in_4bit=True) take experts, and files in MXFP4 stay so; again changes nothing."""
    mapping = (registries or importlib.import_module(_REGISTRIES)).AUTO_QUANTIZER_MAPPING
    for name in STOCK:
        if mapping.get(name) is not _entries.quantizer:
            _before[name], mapping[name] = mapping[name], _entries.quantizer


def give_back() -> None:
    """Undo `take_over`."""
    if _before:
        sys.modules[_REGISTRIES].AUTO_QUANTIZER_MAPPING.update(_before)
        _before.clear()


def stock(name: str) -> Any:
    """transformers' own quantizer of this name."""
    return _before.get(name) or sys.modules[_REGISTRIES].AUTO_QUANTIZER_MAPPING[name]


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for the import of transformers' registries."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The spec that the other finders give, whose loader enters the method when the module is there."""
        if name != _REGISTRIES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                enter(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def watch(entries: Entries) -> None:
    """Enter the method now, or once transformers is imported."""
    global _entries
    _entries = entries
    if _REGISTRIES in sys.modules:
        enter()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
