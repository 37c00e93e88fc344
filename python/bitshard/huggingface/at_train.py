"""What the switches of the environment do to a model (`bitshard.process.switches`), and when: at its `train()`.

A quantized layer is told by the `train(True)` of the model that it is in. The outermost module whose `train` runs is
the model, and what a script would do by hand is done to it: `bitshard.lora.merge_aware(model)`,
`bitshard.lora.fuse(model)`, `bitshard.graphs.enable(model)`, `bitshard.arithmetic.enable(model)`. transformers' Trainer
calls `model.train()` in each step, other loops before the first one or in each epoch.

This happens once for each outermost module, so that layers are fused before a first forward, and never between a
forward and its backward: gradient checkpointing would run another forward there than the first one. A new module
around it (peft's model around the base, FSDP1's around both) is acted on in its turn. A part of one that was acted on
is not, and DDP and torch.compile stand for what they wrap. A model without LoRA layers may get some later, and is
looked at again. What is known of a model is known here, by weak references: copies and pickles of it have nothing of
it.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

from torch import nn

from bitshard.process import foreign, launch, switches
from bitshard.weights import inventory

logger = logging.getLogger("bitshard")

_TRAIN = nn.Module.train.__code__  # whose variables end with it: see `foreign.running_methods`
_DONE = None
# outermost module -> its first quantized layer, for the model has no LoRA layers yet: they may come; or _DONE
_known: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
_captured: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # given to graphs.enable
_in_int8: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # given to arithmetic.enable
_said: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()  # first LoRA layer -> the last line
_missed = False


def trains(layer: nn.Module) -> None:
    """`train(True)` of `layer`, which has packed weights, runs: act on the model that it is called for, if it is new.

    Called for each quantized layer in each step, so that only new models cost more than a look at the call stack.
    """
    frame = foreign.outermost(foreign.TORCH_TRAINS, _TRAIN)
    model = None if frame is None else frame.f_locals.get("self")
    if model is None or not _is_new(model, layer):
        return
    inside = _unwrapped(model)
    if inside is model or _is_new(inside, layer):
        part = any(inside is module for whole in list(_known) for module in whole.modules() if whole is not inside)
        _known[inside] = _DONE if part or _act(inside) else weakref.ref(layer)
    _known[model] = _known[inside]


def _is_new(model: nn.Module, layer: nn.Module) -> bool:
    """Whether there is something to do to `model`, whose `train` has come to `layer`."""
    first = _known.get(model, layer)
    return first is layer or (first is not _DONE and first() is layer)


def _unwrapped(model: nn.Module) -> nn.Module:
    """What DDP and torch.compile wrap."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model._modules["_orig_mod"]
        else:
            return model


def _act(model: nn.Module) -> bool:
    """Do to `model` what the switches say; whether nothing is left to do, for it has the LoRA layers to be fused."""
    if switches.on.graphs and model not in _captured:
        _captured.add(model)
        _enable_graphs(model)
    if switches.on.arithmetic and model not in _in_int8:
        _in_int8.add(model)
        _enable_int8(model)
    if not (switches.on.fuse or switches.on.merge_aware):
        return True
    from bitshard import lora

    first = lora.first_layer(model)
    if first is not None and switches.on.merge_aware:
        _merge_aware(model)
    if first is not None and switches.on.fuse:
        _fuse(model, first)
    return first is not None


def _merge_aware(model: nn.Module) -> None:
    from bitshard import lora

    name = switches.on.merge_aware
    try:
        count = lora.merge_aware(model)
    except ValueError as error:
        _log(f"{name}=1: this {type(model).__name__} does NOT train merge-aware. {error}", False)
    else:
        _log(f"{name}=1: {count} LoRA layers train on the weights that merging will give", True)


def _fuse(model: nn.Module, first: nn.Module) -> None:
    """Fuse the LoRA layers of `model`, of which `first` is one, and log what came of it, unless that is known."""
    from bitshard import lora

    try:
        report = lora.fuse(model)
        line, effect = f"{switches.on.fuse}=1: {report}", bool(report.fused) or not report.left
    except ValueError as error:
        line, effect = f"{switches.on.fuse}=1 fuses nothing. {error}", False
    if _said.get(first) != line:
        _said[first] = line
        _log(line, effect)


def _enable_int8(model: nn.Module) -> None:
    from bitshard import arithmetic

    found = arithmetic.enable(model)
    _log(f"{switches.on.arithmetic}=int8: {found} (bitshard.arithmetic.enable)", bool(found.layers))


def _enable_graphs(model: nn.Module) -> None:
    from bitshard import graphs

    what, name = type(model).__name__, switches.on.graphs
    try:
        graphs.enable(model)
    except ValueError as error:
        _log(f"{name}=1: no CUDA graphs of this {what}. {error}", False)
    else:
        _log(f"{name}=1: CUDA graphs of this {what} (bitshard.graphs.enable)", True)


def forwards(layer: nn.Module) -> None:
    """`layer` is in its first forward with gradients: one line if nobody has called the `train` of its model."""
    global _missed
    model = inventory.model_of(layer)
    for module in model.modules():
        for held in inventory.holders_of(module):
            held.unwatched = held.late
    if _missed or not any(parameter.requires_grad for parameter in model.parameters()):
        return
    running = [module for module in foreign.running_methods() if isinstance(module, nn.Module) and module in _known]
    names = {f"{name}={value}" for name, value in _for_any_model() if name and not running}
    of_layers = {f"{name}=1" for name in (switches.on.fuse, switches.on.merge_aware) if name}
    if of_layers and all(_known[module] is not _DONE for module in running):
        from bitshard import lora

        names |= of_layers if lora.first_layer(model) is not None else set()
    if names:
        _missed = True
        _log(
            f"{' and '.join(sorted(names))}: no effect on this {type(model).__name__}, for its "
            "train() was not called since it was made; call model.train() before the first step",
            False,
        )


def launches() -> None:
    """A step is launched as graphs: the Trainer whose step it is waits for its loss no longer.

    Trainer looks at each loss on the host, so that what is not finite stays out of its log: the GPU has nothing to do
    then until the next launch, and the host had nothing to do before. What is logged is the same where all losses are
    finite.
    """
    if not switches.on.no_loss_wait:
        return
    frame = foreign.running(foreign.TRAINER_STEPS)
    trainer = None if frame is None else frame.f_locals.get("self")
    arguments = getattr(trainer, "args", None)
    if getattr(arguments, "logging_nan_inf_filter", False):
        arguments.logging_nan_inf_filter = False
        what = (
            f"this {type(trainer).__name__} has logging_nan_inf_filter=False from now on, so that it does not wait for"
        )
        _log(f"{switches.on.no_loss_wait}=1: {what} each loss; one that is not finite shows in its log", True)


def _for_any_model() -> list[tuple[str, str]]:
    """(variable, value) of the switches that act on models with or without LoRA layers."""
    return [(switches.on.graphs, "1"), (switches.on.arithmetic, "int8")]


def _log(line: str, effect: bool) -> None:
    """A line on rank 0; a warning where a switch has no effect."""
    if launch.first_rank():
        logger.log(logging.INFO if effect else logging.WARNING, "%s", line)


ACTS = switches.Acts(trains, forwards, launches)
