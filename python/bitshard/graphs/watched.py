"""What of a model a graph has inside, compared in each call with the time when it was recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from bitshard import _C
from bitshard.shards import gather
from bitshard.weights import inventory

PEFT = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling", "lora_variant", "merge_aware")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Whose hooks on modules may run while a graph is recorded: what they do belongs to the step, or to no training step.
KNOWN_HOOKS = ("torch.distributed.", "torch.utils.checkpoint", "accelerate.", "peft.", "transformers.", "bitshard.")
KNOWN_HOOKS += ("trl.models.activation_offloading.",)  # keeps what a head saves on the GPU


def seen(modules: list[nn.Module]) -> list[Any]:
    """Parameters and buffers with their addresses, modes, settings, hooks, configs and what peft's layers keep."""
    owned = [module.__dict__ for module in modules]
    with torch._C.DisableTorchFunctionSubclass():  # makes attributes of 4-bit weights as fast as those of other tensors
        found: list[Any] = [_C.module_states(owned)]
    configs: dict[int, Any] = {}
    for module, mine in zip(modules, owned, strict=True):
        if "packed_weight" in mine or "packed_stacks" in mine:
            for held in inventory.held_by(module):
                found += held.captured()
        if "_active_adapter" in mine:
            found += [_copied(mine.get(name)) for name in PEFT]
        if "config" in mine and hasattr(mine["config"], "__dict__"):
            configs[id(mine["config"])] = mine["config"]
    found += [dict(vars(config)) for config in configs.values()]
    return found


def _copied(value: Any) -> Any:
    """A setting as it is now."""
    return value.copy() if isinstance(value, (list, dict)) else value


def unknown_hooks(model: nn.Module) -> str | None:
    """The first hook on a module that nobody knows, in words: it may read activations, which a graph does not show."""
    for name, module in model.named_modules():
        for kind in HOOKS:
            for hook in vars(module)[kind].values():
                origin = getattr(getattr(hook, "__func__", hook), "__module__", None) or type(hook).__module__
                if not f"{origin}.".startswith(KNOWN_HOOKS):
                    return f"a hook of {origin} on {name or type(model).__name__}"
    return None


def trained(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Parameters that require a gradient, once each, and every place that has one."""
    found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                found.setdefault(parameter, []).append((module, name))
    return found


def places(model: nn.Module) -> Iterator[torch.device]:
    """Devices of all parameters and buffers."""
    for tensor in (*model.parameters(), *model.buffers()):
        yield tensor._local_tensor.device if gather.is_dtensor(tensor) else tensor.device


def foreign(model: nn.Module, managed: set[int]) -> str | None:
    """Who else decides how a part of the model is called or kept, in words; `managed`: ids of FSDP2's parameters."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind == "FullyShardedDataParallel":
            return "FSDP1 keeps flat parameters by hooks that a graph can't have inside: use FSDP2 (fsdp_version: 2)"
        if kind == "DataParallel":
            return "DataParallel copies the model in each call: start one process for each GPU (accelerate launch)"
        if kind == "DistributedDataParallel":
            return f"{name or 'it'} is wrapped by DistributedDataParallel: enable the module inside"
        if kind == "OptimizedModule" or (name and _compiled(module)):
            return f"torch.compile compiles {name or 'it'}"
    for name, parameter in model.named_parameters():
        if gather.is_dtensor(parameter) and id(parameter) not in managed:
            return f"{name} is a DTensor that FSDP2 does not manage"
        if hasattr(parameter, "ds_id"):
            return f"DeepSpeed keeps {name}"
    return None


def _compiled(module: nn.Module) -> bool:
    call = vars(module).get("_compiled_call_impl")
    return call is not None and not type(call).__module__.startswith("bitshard.")
