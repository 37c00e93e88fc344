"""peft's adapter on a 4-bit stack of experts (`target_parameters`), whose forward goes around peft's parametrization.

For each forward peft makes a class with the stack as a property, and takes it away again. A fused wrapper notes in the
context of the call what is added to it instead (`bitshard.experts.adapted.of_call`), `bitshard.experts.lora` multiplies
with both, and a cast of A and B is part of copies that it makes anyway. As with layers (`bitshard.lora.layer`), each
call decides, and is peft's where the result would not be that of one plain adapter.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from peft.tuners.lora import layer as peft_layer
from torch import Tensor, nn

from bitshard.experts.adapted import LowRank, begin_call, end_call
from bitshard.experts.modules import PackedExperts, PackedStack
from bitshard.formats.state import dtype_name
from bitshard.lora.layer import DTYPES, LINEARS, own_forward, weight_of

Peft = peft_layer.ParamWrapper
FORWARD, ACTIVATE = own_forward(Peft), Peft._activate_lora


class FusedParamWrapper(Peft):
    """peft's `lora.ParamWrapper`, which leaves the stack as it is in a forward."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if "adapter_names" in kwargs or torch.compiler.is_dynamo_compiling():
            return Peft.forward(self, x, *args, **kwargs)
        # accelerate's hooks keep this forward when the wrapper is peft's again
        found = chosen(self) if isinstance(self, FusedParamWrapper) else ""
        if type(found) is str:
            return Peft.forward(self, x, *args, **kwargs)
        begun = begin_call(found[0], added_by(*found))
        try:
            return self.base_layer(x, *args, **kwargs)
        finally:
            end_call(begun)


FusedParamWrapper.__name__ = FusedParamWrapper.__qualname__ = "ParamWrapper"  # as peft prints its layers
ParamWrapper = FusedParamWrapper  # pickles of fused wrappers name it so
Fused = FusedParamWrapper


def never(layer: nn.Module) -> str | None:
    """Why `layer`, one of peft's on a parameter, can't be fused whatever its state."""
    base = layer.get_base_layer()
    if not isinstance(base, PackedExperts) or layer.parameter_name not in base.packed_stacks:
        return "its parameter is not 4-bit"
    if "merge_aware" in vars(layer):
        return "it is merge-aware"
    return None if type(layer) is Peft or isinstance(layer, FusedParamWrapper) else f"its class is {type(layer)}"


def why(layer: nn.Module) -> str | None:
    """Why the next call of `layer` would be peft's; None where it would be fused."""
    forward = vars(layer).get("_old_forward", vars(layer).get("forward"))  # the former where accelerate has hooked it
    if (words := never(layer)) is not None:
        return words
    if forward is not None and getattr(forward, "__func__", None) is not FusedParamWrapper.forward:
        return "another forward on the layer"
    found = chosen(layer, in_training=True)
    if type(found) is str:
        return found
    return None if isinstance(layer, FusedParamWrapper) else "fuse has not been called"


def cast_to(layer: nn.Module) -> None:
    """See `bitshard.lora.layer.Family`: a cast of A and B is part of copies that are made anyway."""


def chosen(layer: nn.Module, in_training: bool = False) -> tuple[PackedStack, Tensor, Tensor, int, float] | str:
    """(holder of the stack, A, B, rank, scale) of the one plain adapter that is active, or why the call is peft's.

    in_training: of the next call in training, before which FSDP2 gathers A and B.
    """
    if Peft.forward is not FORWARD or Peft._activate_lora is not ACTIVATE:
        return "the forward of ParamWrapper has been replaced"
    if layer.disable_adapters:
        return "its adapters are disabled"
    if layer.merged:
        return "its adapter is merged"
    base, name = layer.get_base_layer(), layer.parameter_name
    if name in getattr(base, "parametrizations", ()):
        return "somebody has parametrized the stack"
    active = [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]
    if len(active) != 1:
        return f"{len(active)} adapters are active"
    A, B, scale = layer.lora_A[active[0]], layer.lora_B[active[0]], layer.scaling[active[0]]
    if type(A) not in LINEARS or type(B) not in LINEARS:
        return f"A is a {type(A).__name__} and B a {type(B).__name__}"
    if (type(scale) is not float and type(scale) is not int) or not -inf < scale < inf:
        return "its scale is infinite or no number"
    a, b = weight_of(vars(A), in_training), weight_of(vars(B), in_training)
    if a is None or b is None or A.bias is not None or B.bias is not None:
        return "A or B has a bias, or is no plain tensor"
    if a.dtype is not b.dtype or a.dtype not in DTYPES:
        return f"A is {dtype_name(a.dtype)} and B {dtype_name(b.dtype)}"
    return base.packed_stacks[name], a, b, layer.r[active[0]], scale


def added_by(held: PackedStack, A: Tensor, B: Tensor, rank: int, scale: float) -> LowRank:
    """What an adapter adds to a stack; peft's A is [E r, K], and its B [N, r E] with the experts innermost."""
    experts, N, K = held.shape
    A, B = A.view(experts, rank, K), B.view(N, rank, experts).permute(2, 0, 1)
    return LowRank(A.transpose(1, 2), B.transpose(1, 2), scale) if held.transposed else LowRank(B, A, scale)
