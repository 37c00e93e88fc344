"""peft's LoRA layer on a 4-bit weight with a forward that goes around it; imports peft.

A fused layer is peft's layer with the class below in the place of its own: the same attributes, name and state dict,
so that copies, pickles, wrappers, hooks and every function of peft meet what they know. Each call looks whether the
layer is one that `LoraLinear4Bit` computes as peft would, and is peft's call where it is not. `reasons.why` says in
words what is asked here; `tests/test_lora.py` holds the two together.

Attributes are read from `__dict__`, for nn.Module's `__getattr__` costs more than the rest.
"""

from __future__ import annotations

import sys
from math import inf
from typing import Any

import torch
from peft.tuners.lora import bnb
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as modules

from bitshard import _C, inventory
from bitshard.lora.product import LoraLinear4Bit, product
from bitshard.nn.linear import Linear4bit as Base
from bitshard.nn.linear import LinearFP4, LinearNF4
from bitshard.state import VALUE_DTYPES, QuantState
from bitshard.tensor import Params4bit

Peft = bnb.Linear4bit


def _own(cls: type) -> Any:
    """The forward of `cls`, None where it is not from the file of `cls`: somebody has replaced it already."""
    code = getattr(cls.forward, "__code__", None)
    return cls.forward if code and code.co_filename == sys.modules[cls.__module__].__file__ else None


# What is gone around. Where somebody replaces one of these, the replacement is called.
FORWARD, BASE_FORWARD, LINEAR_FORWARD, LINEAR = _own(Peft), _own(Base), _own(nn.Linear), torch._C._nn.linear
BASES = frozenset((Base, LinearNF4, LinearFP4))
DROPOUTS = frozenset((nn.Identity, nn.Dropout))
TENSORS = frozenset((Tensor, nn.Parameter))
DTYPES = frozenset(VALUE_DTYPES.values())

_before, _after = modules._global_forward_pre_hooks, modules._global_forward_hooks
_backward_before, _backward_after = modules._global_backward_pre_hooks, modules._global_backward_hooks
_function_modes, _dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_transforms, _tracing = torch._C._are_functorch_transforms_active, torch._C._get_tracing_state
_autocast = torch._C._is_any_autocast_enabled
_apply = super(torch.autograd.Function, LoraLinear4Bit).apply  # see bitshard.autograd
_unwrap = torch._C._functorch.unwrap_if_dead
_plain_modules = _C.plain_modules


class Linear4bit(Peft):
    """peft's `lora.Linear4bit`, whose forward is one autograd function where that gives what peft would."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or torch.compiler.is_dynamo_compiling() or type(x) not in TENSORS or watched():
            return Peft.forward(self, x, *args, **kwargs)
        chosen = choose(self)
        if chosen is None:
            return Peft.forward(self, x)
        A, B, base, scale = chosen
        dtype = x.dtype
        factor = dtype
        if A.dtype is not dtype or B.dtype is not dtype or dtype not in DTYPES or _autocast():
            factor = factor_dtype(self, x, A, B)
            if factor is None:
                return Peft.forward(self, x)
        packed, state, bias, compute = of_base(base, x)
        if bias is not None:
            if bias.requires_grad:
                return Peft.forward(self, x)
            if bias.dtype is not compute:
                bias = bias.to(compute)
        if torch.is_grad_enabled() and (x.requires_grad or A.requires_grad or B.requires_grad):
            return _apply(_unwrap(x), _unwrap(A), _unwrap(B), packed, state, bias, scale, compute, factor)
        return product(x, A, B, packed, state, bias, scale, compute, factor)[0]


def watched() -> bool:
    """Whether somebody watches or replaces the calls that a fused layer does not make."""
    return bool(
        _before
        or _after
        or _backward_before
        or _backward_after
        or _function_modes()
        or _dispatch_modes()
        or _transforms()
        or _tracing() is not None
        or forward_ad._current_level >= 0
        or Peft.forward is not FORWARD
        or Base.forward is not BASE_FORWARD
        or nn.Linear.forward is not LINEAR_FORWARD
        or nn.functional.linear is not LINEAR
    )


def choose(layer: nn.Module) -> tuple[Tensor, Tensor, Base, float] | None:
    """(A [r, K], B [N, r], base layer, scale) of the one plain adapter that is active in `layer`; None: peft's way."""
    mine = layer.__dict__
    name = mine["_active_adapter"]
    if type(name) is not str:
        if len(name) != 1:
            return None
        name = name[0]
    scale = mine["scaling"].get(name)
    if (
        not isinstance(layer, Linear4bit)  # accelerate's hooks keep this forward when the layer is peft's again
        or mine["_disable_adapters"]
        or mine["merged_adapters"]
        or name in mine["lora_variant"]
        or (type(scale) is not float and type(scale) is not int)
        or not -inf < scale < inf
        or scale == 0
    ):
        return None
    children = mine["_modules"]
    base = children["base_layer"]
    A = children["lora_A"].__dict__["_modules"].get(name)
    B = children["lora_B"].__dict__["_modules"].get(name)
    dropout = children["lora_dropout"].__dict__["_modules"].get(name)
    if type(A) is not nn.Linear or type(B) is not nn.Linear or type(base) not in BASES or type(dropout) not in DROPOUTS:
        return None
    ours, theirs, drops = A.__dict__, B.__dict__, dropout.__dict__
    if not _plain_modules(ours, theirs, base.__dict__, drops):
        return None
    if type(dropout) is nn.Dropout and drops["p"] != 0.0 and drops["training"]:
        return None
    A, B = weight_of(ours), weight_of(theirs)
    return None if A is None or B is None else (A, B, base, scale)


def weight_of(linear: dict[str, Any]) -> Tensor | None:
    """The plain weight of an nn.Linear without bias, by its `__dict__`; FSDP1 puts a view beside the parameters."""
    parameters = linear["_parameters"]
    weight = parameters.get("weight")
    if weight is None:
        weight = linear.get("weight")
    return weight if type(weight) in TENSORS and parameters.get("bias", linear) is None else None


def factor_dtype(layer: nn.Module, x: Tensor, A: Tensor, B: Tensor) -> torch.dtype | None:
    """The dtype in which peft multiplies with A and B, where dtypes differ or under autocast; None: peft's way."""
    if A.dtype is not B.dtype or not {x.dtype, A.dtype} <= DTYPES:
        return None
    device = x.device.type
    casts = torch.is_autocast_enabled(device)
    if torch.is_autocast_enabled() and not casts:  # peft asks CUDA's autocast, wherever x is, and casts nothing then
        return None
    if not casts:
        return A.dtype if A.dtype is x.dtype or layer.__dict__["cast_input_dtype_enabled"] else None
    chosen = torch.get_autocast_dtype(device)
    return chosen if chosen in DTYPES and {x.dtype, A.dtype} <= {chosen, torch.float32} else None


def of_base(base: Base, x: Tensor) -> tuple[Tensor, QuantState, Tensor | None, torch.dtype]:
    """(packed weight, its state, bias, dtype of the product) for x: what `Base.forward` does before it multiplies."""
    mine = base.__dict__
    parameters, held = mine["_parameters"], mine["packed_weight"]
    weight = parameters["weight"] if "weight" in parameters else base.weight
    state = held.state
    if (
        state is None
        or type(weight) is not Params4bit
        or weight.quant_state is not state
        or (held.foreign and held.checked is not state)
    ):
        weight, state = held.ready(weight)
    if not held.reported:
        inventory.report(base)
    if held.unwatched and torch.is_grad_enabled():
        held.watch()
    if not mine["compute_type_is_set"]:
        base.set_compute_type(x)
        base.compute_type_is_set = True
    bias = parameters["bias"] if "bias" in parameters else base.bias
    return weight, state, bias, mine["compute_dtype"] or x.dtype
