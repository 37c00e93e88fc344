"""Settings of optimizers: those of one optimizer, and those that one parameter has for itself."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from bitshard.process.instance import OneInstance


class MockArgs:
    """The entries of a dict as attributes."""

    def __init__(self, initial_data: dict[str, Any]):
        vars(self).update(initial_data)


class GlobalOptimManager(OneInstance):
    """Settings of single parameters, which go before those of the optimizer and its groups; one instance a process.

    A setting is a key of `Optimizer8bit.get_config`: "lr", "betas", "eps", "weight_decay", "optim_bits", ...
    `pid2config` has them by the id of the parameter, and forgets them with it.
    """

    def initialize(self) -> None:
        """Forget all settings."""
        self.pid2config: dict[int, dict[str, Any]] = {}
        self._living: dict[int, weakref.ref] = {}
        self.index2config: dict[tuple[int, int], dict[str, Any]] = {}
        self.optimizer = None
        self.uses_config_override = False
        self.module_weight_config_triple: list[tuple[torch.nn.Module, str, dict[str, Any]]] = []

    begin = initialize

    def register_parameters(self, params: Iterable) -> None:
        """Settings of parameters are also found by (group, place in the group), so that they outlive the tensors.

        `params` as an optimizer takes them: tensors or groups. Only parameters that have settings are kept.
        """
        groups = list(params)
        if groups and not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        for gindex, group in enumerate(groups):
            for pindex, p in enumerate(group["params"]):
                if id(p) in self.pid2config:
                    self.index2config[(gindex, pindex)] = self.pid2config[id(p)]

    def override_config(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        key: str | None = None,
        value: Any = None,
        key_value_dict: dict[str, Any] | None = None,
    ) -> None:
        """Set `key` to `value`, or all of `key_value_dict`, for one parameter or several.

        ValueError where both forms are given.
        """
        if key is not None and value is not None:
            if key_value_dict is not None:
                raise ValueError("override_config takes a key and a value, or key_value_dict, not both")
            key_value_dict = {key: value}
        self.uses_config_override = True
        if key_value_dict is None:
            return
        for p in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
            self.set_config(p, self.pid2config.get(id(p), {}) | key_value_dict)

    def set_config(self, p: torch.Tensor, config: dict[str, Any]) -> None:
        """Settings of one parameter, in the place of those that it had."""
        key, configs, living = id(p), self.pid2config, self._living

        def forget(gone: weakref.ref) -> None:
            if living.get(key) is gone:
                del living[key]
                configs.pop(key, None)

        configs[key], living[key] = config, weakref.ref(p, forget)

    def register_module_override(self, module: torch.nn.Module, param_name: str, config: dict[str, Any]) -> None:
        """Settings for `module.<param_name>`, looked up at the first step of an optimizer that holds it."""
        self.module_weight_config_triple.append((module, param_name, config))
