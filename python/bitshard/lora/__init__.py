"""LoRA on quantized weights in few launches: `fuse(model)` behind peft's `get_peft_model`, `unfuse(model)` to undo it.

    model = get_peft_model(model, LoraConfig(target_modules="all-linear", lora_dropout=0.05))
    print(bitshard.lora.fuse(model))        # 224 LoRA layers: 224 fused

A fused layer computes y = W x + bias + s B (A dropout(x)) and its gradients as one autograd function
(`bitshard.lora.product`), with the draws of peft's own dropout (`bitshard.lora.dropout`). So do peft's adapters on
4-bit stacks of experts (`bitshard.lora.stack`). Parameters, names, files, `isinstance` and all functions of peft stay
as they are. What a call cannot do as peft does, goes peft's way: several active adapters, DoRA and other variants,
dropout in place or of 1, merged or disabled adapters, `adapter_names`, a trained bias, hooks on the modules inside, a
replaced forward, torch.compile, functorch, forward-mode derivatives, dispatch and function modes. That is
decided in each call, so adapters may be added, switched, merged and deleted as before.

The A's of layers that share their input (q, k, v) are not multiplied together: they are parameters of their own, so
that one product needs a copy of them and a split of its result, which cost the host more than the products it saves.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from bitshard.formats.state import dtype_name
from bitshard.lora import unsloth

# For bfloat16 alone: torch's GradScaler, which float16 needs, refuses gradients in float16.
_ADVICE = (
    ". For none, before the optimizer is made: get_peft_model(..., autocast_adapter_dtype=False) for 4-bit layers, or "
    "p.data = p.data.to(torch.bfloat16) for each p that is trained; its updates are rounded to bfloat16 then"
)


@dataclass(frozen=True)
class Report:
    """What `fuse` found; prints as one line.

    Attributes:
        fused: names of the layers whose next call is fused.
        left: {name: why its next call in training is peft's} of the other LoRA layers.
        elsewhere: names of those that unsloth's own kernels compute: neither peft's code nor bitshard's is called.
        float32: {dtype of 16 bits: how many fused layers multiply in it, with A and B that are float32}.
    """

    fused: tuple[str, ...] = ()
    left: dict[str, str] = field(default_factory=dict)
    elsewhere: tuple[str, ...] = ()
    float32: dict[str, int] = field(default_factory=dict)

    @property
    def reasons(self) -> dict[str, int]:
        """How many layers are left to peft for each reason, most first."""
        return dict(Counter(self.left.values()).most_common())

    @property
    def casts(self) -> int:
        """Casts of float32 A's and B's, and of their gradients, in a forward and backward under autocast."""
        return 4 * sum(self.float32.values())

    @property
    def casts_checkpointed(self) -> int:
        """The same with gradient checkpointing, which runs the forward twice."""
        return 6 * sum(self.float32.values())

    def __str__(self) -> str:
        line = f"{len(self.fused) + len(self.left) + len(self.elsewhere)} LoRA layers: {len(self.fused)} fused"
        if self.elsewhere:
            line += f", {len(self.elsewhere)} computed by {unsloth.WORDS}, which never call them"
        if self.left:
            line += f", {len(self.left)} left to peft ({'; '.join(f'{n}: {why}' for why, n in self.reasons.items())})"
        if self.float32:
            each = " and ".join(f"{n} float32 adapters on {dtype} products" for dtype, n in self.float32.items())
            line += f"; {each}: under autocast {self.casts:,} casts a step, {self.casts_checkpointed:,} with gradient"
            line += " checkpointing"
        return line + _ADVICE if "bfloat16" in self.float32 else line


def fuse(model: nn.Module) -> Report:
    """Let the LoRA layers of `model` on quantized weights compute their output and gradients as one autograd function.

    Args:
        model: one of peft's, or any module with LoRA layers of peft inside, before or after FSDP has sharded it. Call
            it again for layers that were added since.

    Returns:
        the Report.

    TypeError where `model` is no module; ValueError where it has no LoRA layers, or none on quantized weights.
    """
    found = _layers(model, "fuse")
    able = [layer for layer in found.values() if _ways(layer).never(layer) is None]
    if not able:
        why = "; ".join(sorted({_ways(layer).never(layer) for layer in found.values()}))
        raise ValueError(
            f"bitshard.lora.fuse: none of the {len(found)} LoRA layers of this {type(model).__name__} can be fused "
            f"({why}). Only those of models that are loaded with load_in_4bit=True or load_in_8bit=True, and "
            "bitshard's bitsandbytes installed, can; all others work without it."
        )
    for layer in able:
        ways = _ways(layer)
        if type(layer) is ways.Peft:
            layer.__class__ = ways.Fused
    return report(model)


def unfuse(model: nn.Module) -> int:
    """Undo `fuse`: every layer is peft's own again. The number of layers that were fused; 0 is no error."""
    found = _layers(model, "unfuse", False)
    layers = [layer for layer in found.values() if isinstance(layer, _ways(layer).Fused)]
    for layer in layers:
        ways = _ways(layer)
        layer.__class__ = _without(type(layer), ways.Fused, ways.Peft)
    return len(layers)


def merge_aware(model: nn.Module, start_step: int | None = 0) -> int:
    """Let the LoRA layers of `model` on 4-bit weights and stacks multiply with what merging will give, Q(W + s B A).

    Gradients go straight through the quantizer. Such a layer merges by the same bytes (`merge_and_unload`,
    `bitshard.fsdp.save_pretrained(merge=True)`, `bitshard merge --to 4bit --merge-aware`): docs/merging.md.

    Args:
        model: one of peft's, or any module with LoRA layers of peft inside. Before FSDP1, before or after FSDP2.
        start_step: how many optimizer steps are ordinary ones, counted from this call; None: all, the layers are peft's
            again.

    Returns:
        how many layers are merge-aware, or will be. With start_step=None, how many were.

    TypeError where `model` is no module; ValueError where it has no such layers, or one that cannot be: DoRA, a bias or
    dropout of the adapter, 8-bit weights. Layers on dense weights stay as they are.
    """
    found = _layers(model, "merge_aware")
    if start_step is not None and (not isinstance(start_step, int) or start_step < 0):
        raise ValueError(f"bitshard.lora.merge_aware: start_step is {start_step!r}, expected 0 or more, or None")
    from bitshard.lora import aware_switch

    if start_step is None:
        return aware_switch.turn_off(model, found, _without)
    return aware_switch.turn_on(model, found, start_step, _without)


def report(model: nn.Module) -> Report:
    """Which LoRA layers of `model` are fused now, and why the others' next call in training would be peft's."""
    found = _layers(model, "report")
    elsewhere = tuple(name for name in unsloth.computed(model) if name in found)
    called = {name: _ways(layer).why(layer) for name, layer in found.items() if name not in elsewhere}
    left = {name: words for name, words in called.items() if words is not None}
    fused = tuple(name for name in called if name not in left)
    cast = Counter(
        dtype_name(dtype) for name in fused if (dtype := _ways(found[name]).cast_to(found[name])) is not None
    )
    return Report(fused, left, elsewhere, dict(cast.most_common()))


def first_layer(model: nn.Module) -> nn.Module | None:
    """The first LoRA layer of `model`, None without one. Does not import peft: a model with such layers has."""
    layers = sys.modules.get("peft.tuners.lora")
    return layers and next((module for module in model.modules() if isinstance(module, layers.LoraLayer)), None)


def _layers(model: nn.Module, caller: str, needed: bool = True) -> dict[str, nn.Module]:
    """The LoRA layers of `model` by name; raises where they are `needed` and there are none."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"bitshard.lora.{caller}: model is a {type(model).__name__}, expected a torch module")
    try:
        from peft.tuners.lora import LoraLayer
    except ImportError as error:
        raise ImportError(f"bitshard.lora.{caller} is for models of peft, which is not installed") from error
    found = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    if needed and not found:
        raise ValueError(
            f"bitshard.lora.{caller}: this {type(model).__name__} has no LoRA layers; call it behind "
            "peft.get_peft_model(model, LoraConfig(...)) or PeftModel.from_pretrained"
        )
    return found


def _ways(layer: nn.Module) -> Any:
    """What has the class that a LoRA layer of peft is fused by: of 4-bit layers, int8 layers or stacks of experts."""
    from bitshard.lora import layer as layers
    from bitshard.lora import stack

    return stack if isinstance(layer, stack.Peft) else layers.family(layer)


def _without(cls: type, old: type, new: type) -> type:
    """`cls` with `new` in the place of its base `old`; classes that FSDP2 has derived are derived anew."""
    if cls is old:
        return new
    bases = tuple(_without(base, old, new) if issubclass(base, old) else base for base in cls.__bases__)
    return type(cls.__name__, bases, {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")})
