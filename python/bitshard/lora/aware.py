"""LoRA layers on 4-bit weights that multiply with what merging will give: Q(W + s B A), made anew in each call.

The merged bytes have one definition (`bitshard.functions.merge`), which the forward, its recomputation, the input
gradient, `merge` and writers of files call. Gradients go through the quantizer as if it were not there: A and B get
those of W + s B A, x that of the merged codes. docs/merging.md says when to use it.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import bnb
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from bitshard import _C
from bitshard.formats.state import QuantState, dtype_name
from bitshard.functions import merge_again
from bitshard.functions.merge import Adapter, merge_4bit, require_numbers
from bitshard.lora.layer import FSDP1, LINEARS, OWN_UNITS, factor_dtype, weight_of
from bitshard.lora.product import rows_of, scaled
from bitshard.nn import merged
from bitshard.shards import gather
from bitshard.weights.inventory import holders_of
from bitshard.weights.tensor import Params4bit

Peft = bnb.Linear4bit
_plain_modules = _C.plain_modules


class MergedLinear(torch.autograd.Function):
    """y = x Q(W + the sum of s B A)^T + bias; gradients of A and B as of W + s B A, of x with the merged codes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        packed: Tensor,
        state: QuantState,
        bias: Tensor | None,
        compute: torch.dtype,
        factor: torch.dtype,
        scales: tuple[float, ...],
        *factors: Tensor,
    ) -> Tensor:
        ctx.rest = packed, state, compute, factor, scales, x.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(x, *factors)
        codes, new = merge_again.for_forward(x, packed, state, _pairs(factors, scales))
        return new.kind.product(x.to(compute), codes, new, bias, None, 0.0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("a merge-aware layer has no second derivatives (create_graph=True)")
        with torch.autocast(dy.device.type, enabled=False):
            return _gradients(ctx, dy)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    packed, state, compute, factor, scales, dtype, bias_dtype = ctx.rest
    x, *factors = ctx.saved_tensors
    needs, pairs = ctx.needs_input_grad, _pairs(factors, scales)
    dx = dbias = None
    if needs[0]:
        codes, new = merge_again.for_gradient(x, packed, state, pairs)
        dx = new.kind.gradient(dy.to(compute), codes, new, None).to(dtype)
    if needs[3]:
        dbias = state.kind.bias_gradient(dy, state, None, bias_dtype)
    found: list[Tensor | None] = []
    rows, inputs = rows_of(dy).to(factor), rows_of(x).to(factor)
    for i, (A, B, s) in enumerate(pairs):
        needs_a, needs_b = needs[7 + 2 * i : 9 + 2 * i]
        dA = torch.mm(scaled(rows, B.to(factor), s).t(), inputs).to(A.dtype) if needs_a else None
        dB = scaled(rows.t(), torch.mm(inputs, A.to(factor).t()), s).to(B.dtype) if needs_b else None
        found += [dA, dB]
    return dx, None, None, dbias, None, None, None, *found


def _pairs(factors: Any, scales: tuple[float, ...]) -> list[Adapter]:
    return list(zip(factors[::2], factors[1::2], scales, strict=True))


class MergeAwareLinear4bit(Peft):
    """peft's `lora.Linear4bit`, whose forward and `merge` take the merged bytes."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters or self.merged:
            return Peft.forward(self, x, *args, **kwargs)
        if args or kwargs:
            raise ValueError(
                f"a merge-aware layer takes x alone, not {sorted(kwargs) or 'more'}: its adapters are in W"
            )
        base, adapters = self.get_base_layer(), adapters_of(self)
        if not adapters:
            return base(x)
        packed, state, bias, compute = base.operands(x)
        factors = [tensor for A, B, _ in adapters for tensor in (A, B)]
        factor = factor_dtype(self, x, factors[0]) or factors[0].dtype
        scales = tuple(s for _, _, s in adapters)
        return MergedLinear.apply(x, packed, state, bias, compute, factor, scales, *factors)

    def merged_4bit(self, packed: Tensor, state: QuantState, names: list[str]) -> tuple[Tensor, QuantState]:
        """(packed codes, state) of a whole weight with these adapters in it, in the order of their names."""
        return merged_whole(packed, state, adapters_of(self, names))

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """As peft's, with the bytes of the forward; all adapters at once."""
        merge_into(self, "weight", safe_merge, adapter_names)


MergeAwareLinear4bit.__name__ = MergeAwareLinear4bit.__qualname__ = "Linear4bit"  # as peft prints its layers
Linear4bit = MergeAwareLinear4bit  # pickles name it so


@torch.no_grad()
def merge_into(layer: Any, name: str, safe_merge: bool, adapter_names: list[str] | None) -> None:
    """`merge` of a merge-aware layer of peft around the weight `name`: all adapters in one assignment."""
    chosen = check_adapters_to_merge(layer, adapter_names)
    names = sorted(adapter for adapter in chosen if adapter in layer.lora_A)
    if not names:
        return
    base = layer.get_base_layer()
    weight, held = getattr(base, name), next((held for held in holders_of(base) if held.name == name), None)
    if held is None:  # what stands for the layer while its weight is written elsewhere
        codes, state = layer.merged_4bit(weight.detach().as_subclass(Tensor), weight.quant_state, names)
        setattr(base, name, Params4bit.of_state(codes, state, weight.quant_storage, None))
        layer.merged_adapters.extend(names)
        return
    with merged.merges(held, layer, names, safe_merge):
        codes, state = layer.merged_4bit(*_whole(held, weight), names)
        if safe_merge and not torch.isfinite(state.absmax.float()).all():
            raise ValueError(f"NaNs detected in the merged weights. The adapters {names} seem to be broken")
        setattr(base, name, Params4bit.of_state(codes, state, held.storage, held.layer))


def merged_whole(packed: Tensor, state: QuantState, adapters: list[Adapter]) -> tuple[Tensor, QuantState]:
    """`merge_4bit` of a whole weight with adapters that ranks may have parts of; ValueError unless all is finite."""
    codes, new = merge_4bit(packed, state, [(gathered(A), gathered(B), s) for A, B, s in adapters])
    require_numbers(new)
    return codes, new


def gathered(tensor: Tensor) -> Tensor:
    """A or B, whole also where FSDP2 has sharded it; then a collective."""
    return gather.whole(tensor) if gather.is_dtensor(tensor) else tensor


def _whole(held: Any, weight: Any) -> tuple[Tensor, QuantState]:
    """Packed bytes and state of a layer's weight, gathered where ranks have parts of it."""
    if held.shard is not None:
        return gather.gathered(held.shard, held.state)
    if held.state.part is not None:
        return held.state.part.gathered()
    return weight.detach().as_subclass(Tensor), held.state


def adapters_of(layer: Any, names: list[str] | None = None) -> list[Adapter]:
    """A, B and s of the active adapters of a layer of peft (of `names`), by name. ValueError, in a line, where one of
    them cannot be merged so, or is not here as it will be merged."""
    found = []
    for name in sorted(layer.active_adapters if names is None else names):
        if name not in layer.lora_A:
            continue
        if (words := why_not(layer, name)) is not None:
            raise ValueError(f"merge-aware: adapter {name!r}: {words}")
        a, b = layer.lora_A[name].__dict__, layer.lora_B[name].__dict__
        A, B = weight_of(a, names is not None), weight_of(b, names is not None)
        if A is None or B is None or (names is None and not _plain_modules(a, b, layer.get_base_layer().__dict__)):
            raise ValueError(
                f"merge-aware: adapter {name!r}: A, B and the weight are read together. Here A or B is not gathered, "
                "or one of the three has hooks or another forward: shard decoder layers, not parts of LoRA layers"
            )
        if names is None and (seen := layer.merge_aware.setdefault(name, A.dtype)) is not A.dtype:
            raise ValueError(
                f"merge-aware: adapter {name!r} was {dtype_name(seen)} when bitshard.lora.merge_aware was called and "
                f"is {dtype_name(A.dtype)} in the forward, as with FSDP's mixed precision: merging would give other "
                f"bytes. Make the adapters {dtype_name(A.dtype)} before, or turn mixed precision off for them"
            )
        found.append((A, B, layer.scaling[name]))
    return found


def why_not(layer: Any, name: str) -> str | None:
    """Why adapter `name` of a layer of peft cannot be merged with these bytes, in words; None where it can."""
    if name in layer.lora_variant:
        kind = type(layer.lora_variant[name]).__name__.removesuffix("LinearVariant")
        return f"{kind} scales or selects rows of W + s B A, which is not merged here: train plain LoRA or rsLoRA"
    if layer.lora_bias.get(name):
        return "it has a bias (lora_bias=True), which is not part of the weight: set lora_bias=False"
    dropout = layer.lora_dropout[name]
    if isinstance(dropout, nn.Dropout) and dropout.training and dropout.p > 0:
        return f"it has lora_dropout={dropout.p:g}, and a merged weight has none: set lora_dropout=0"
    for part in (layer.lora_A[name], layer.lora_B[name]):
        if type(part).__name__ == FSDP1:
            return OWN_UNITS
        if type(part) not in LINEARS:
            return f"its A or B is a {type(part).__name__}, expected torch's Linear"
        if weight_of(vars(part), True) is None:
            return "its A or B is no plain tensor"
    return None
