"""Turning merge-aware layers on and off, now or after some steps: of `bitshard.lora.aware` and `aware_stack`."""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from bitshard.experts.modules import PackedExperts
from bitshard.functions.merge import check
from bitshard.lora import aware, aware_stack, stack
from bitshard.lora.aware import why_not
from bitshard.lora.layer import FOUR, FusedLinear4bit
from bitshard.nn.linear import Linear4bit
from bitshard.weights.inventory import holders_of


class Way(NamedTuple):
    """Classes of a LoRA layer: peft's on modules of class `base`, bitshard's fused one, the merge-aware one; and peft's
    own forward."""

    base: type
    peft: type
    fused: type
    aware: type
    forward: Any


WAYS = (
    Way(Linear4bit, aware.Peft, FusedLinear4bit, aware.MergeAwareLinear4bit, FOUR.forward),
    Way(PackedExperts, stack.Peft, stack.FusedParamWrapper, aware_stack.MergeAwareParamWrapper, stack.FORWARD),
)


def turn_on(model: nn.Module, layers: dict[str, Any], start_step: int, without: Any) -> int:
    """Make `layers`, LoRA layers of `model`, merge-aware now or after that many optimizer steps; how many there are."""
    able = {name: layer for name, layer in layers.items() if _is_4bit(name, layer)}
    for name, layer in able.items():
        for adapter in layer.lora_A:
            if (words := why_not(layer, adapter)) is not None:
                raise ValueError(f"bitshard.lora.merge_aware: {name}, adapter {adapter!r}: {words}")
    if not able:
        raise ValueError(
            f"bitshard.lora.merge_aware: none of the {len(layers)} LoRA layers of this {type(model).__name__} is on a "
            "4-bit weight: load the model with load_in_4bit=True"
        )
    turn_off(model, layers, without)
    if start_step > 0:
        _count_steps()
        _waiting[model] = _Waiting(list(able.values()), start_step)
    else:
        _switch(able.values())
    return len(able)


def turn_off(model: nn.Module, layers: dict[str, Any], without: Any) -> int:
    """Give these layers peft's forward and `merge` again; how many had another. without: of `bitshard.lora`."""
    _waiting.pop(model, None)
    found = [(layer, way) for layer in layers.values() for way in WAYS if isinstance(layer, way.aware)]
    for layer, way in found:
        layer.__class__ = without(type(layer), way.aware, way.peft)
        del layer.merge_aware
    return len(found)


def _switch(layers: Any) -> None:
    for layer in layers:
        layer.merge_aware = {name: part.weight.dtype for name, part in layer.lora_A.items()}
        layer.__class__ = next(way.aware for way in WAYS if isinstance(layer, way.peft))


def _is_4bit(name: str, layer: Any) -> bool:
    """Whether a LoRA layer can be merge-aware; False on a dense weight. ValueError on another packed one."""
    base = layer.get_base_layer()
    held = next((held for held in holders_of(base) if getattr(layer, "parameter_name", held.name) == held.name), None)
    if held is None:
        return False
    try:
        if held.state is not None:
            check(held.state)
        way = next((way for way in WAYS if isinstance(layer, way.peft) and isinstance(base, way.base)), None)
        if way is None:
            raise ValueError(
                f"a {type(layer).__name__} of peft on a {type(base).__name__}, expected Linear4bit layers and experts"
            )
        if type(layer) not in (way.peft, way.fused, way.aware):
            raise ValueError(
                f"its class is {type(layer).__module__}.{type(layer).__name__}: call merge_aware before FSDP"
            )
        if way.peft.forward is not way.forward:
            raise ValueError("the forward of peft's layer has been replaced, as unsloth does")
    except ValueError as error:
        raise ValueError(f"bitshard.lora.merge_aware: {name}: {error}") from None
    return True


class _Waiting(NamedTuple):
    """Layers that become merge-aware when an optimizer has stepped `left` more times: after a backward."""

    layers: list[Any]
    left: int


_waiting: weakref.WeakKeyDictionary[nn.Module, _Waiting] = weakref.WeakKeyDictionary()


def _stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
    """An optimizer of the process has stepped: of a model that waits?"""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model, (layers, left) in list(_waiting.items()):
        if not any(parameter.requires_grad and id(parameter) in stepped for parameter in model.parameters()):
            continue
        _waiting[model] = _Waiting(layers, left - 1)
        if left <= 1:
            del _waiting[model]
            _switch(layers)


@functools.cache
def _count_steps() -> None:
    register_optimizer_step_post_hook(_stepped)
