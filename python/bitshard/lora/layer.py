"""peft's LoRA layer on a 4-bit or int8 weight with a forward that goes around it; imports peft.

A fused layer is peft's layer with the class below in the place of its own: the same attributes, name and state dict,
so that copies, pickles, wrappers, hooks and every function of peft meet what they know. Each call looks whether the
layer is one that `LoraLinear` computes as peft would, and is peft's call where it is not. What is looked at and how
it is called stands once: `chosen` and `watched` give a fused layer's operands or the words why not, for calls and for
`bitshard.lora.report` alike.

Attributes are read from `__dict__`, for nn.Module's `__getattr__` costs more than the rest.
"""

from __future__ import annotations

import sys
from math import inf
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import bnb
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as modules

from bitshard import _C
from bitshard.formats.state import VALUE_DTYPES, dtype_name
from bitshard.lora import unsloth
from bitshard.lora.dropout import Dropout
from bitshard.lora.product import LoraLinear, product
from bitshard.nn.linear import Linear4bit as Base
from bitshard.nn.linear import LinearFP4, LinearNF4
from bitshard.nn.linear8bit import Linear8bitLt as Base8
from bitshard.shards import gather

Peft, Peft8 = bnb.Linear4bit, bnb.Linear8bitLt


def own_forward(cls: type) -> Any:
    """The forward of `cls`, None where it is not from the file of `cls`: somebody has replaced it already."""
    code = getattr(cls.forward, "__code__", None)
    return cls.forward if code and code.co_filename == sys.modules[cls.__module__].__file__ else None


def own_function(module: Any, name: str) -> Any:
    """The same of a function of a module."""
    function = getattr(module, name)
    code = getattr(function, "__code__", None)
    return function if code and code.co_filename == module.__file__ else None


# What is gone around. Where somebody replaces one of these, the replacement is called.
LINEAR_FORWARD, LINEAR = own_forward(nn.Linear), torch._C._nn.linear
DROPOUT_FORWARD, DROPOUT = own_forward(nn.Dropout), own_function(nn.functional, "dropout")
DROPOUTS = frozenset((nn.Identity, nn.Dropout))
LINEARS = frozenset((nn.Linear,))
TENSORS = frozenset((Tensor, nn.Parameter))
FORWARDS = ("forward", "_compiled_call_impl")  # which a module has in its `__dict__` where somebody has set them
DTYPES = frozenset(VALUE_DTYPES.values())
FSDP1 = "FullyShardedDataParallel"  # the class of a unit of FSDP1
OWN_UNITS = (
    "FSDP1 has its A and B in units of their own, as peft's wrap policy and Trainer make them, and gathers these only "
    "by calling them: take FSDP2 (fsdp_version: 2), or use_orig_params with a policy that wraps decoder layers only"
)
# What peft's layer keeps in its `__dict__`, and is read there.
ATTRIBUTES = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling", "lora_variant")
ATTRIBUTES += ("cast_input_dtype_enabled",)

_before, _after = modules._global_forward_pre_hooks, modules._global_forward_hooks
_backward_before, _backward_after = modules._global_backward_pre_hooks, modules._global_backward_hooks
_function_modes, _dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_transforms, _tracing = torch._C._are_functorch_transforms_active, torch._C._get_tracing_state
_autocast = torch._C._is_any_autocast_enabled
_apply = super(torch.autograd.Function, LoraLinear).apply  # see bitshard.autograd
_unwrap = torch._C._functorch.unwrap_if_dead
_plain_modules = _C.plain_modules


class Family(NamedTuple):
    """LoRA layers on one kind of weight: peft's class, the fused one, the base layer's, and the forwards that are gone
    around: of peft's class and of the base layer's."""

    Peft: type
    Fused: type
    Base: type
    bases: frozenset[type]
    forward: Any
    base_forward: Any

    def never(self, layer: nn.Module) -> str | None:
        """Why `layer`, one of peft's, can't be fused whatever its state."""
        if not isinstance(layer.get_base_layer(), self.Base):
            another = isinstance(layer, (Peft, Peft8))
            return "its quantized weight is of another library" if another else "its weight is not quantized"
        if "merge_aware" in vars(layer):
            return "it is merge-aware"
        if type(layer) is not self.Peft and not isinstance(layer, self.Fused):
            return f"its class is {type(layer).__name__}"
        missing = [name for name in ATTRIBUTES if name not in vars(layer)]
        return f"this release of peft has no {missing[0]}" if missing else None

    def why(self, layer: nn.Module) -> str | None:
        """Why the next call of `layer`, in training, would be peft's; None where it would be fused."""
        forward = vars(layer).get("_old_forward", vars(layer).get("forward"))  # the former where accelerate hooked it
        if (words := self.never(layer)) is not None:
            return words
        if forward is not None and getattr(forward, "__func__", None) is not self.Fused.forward:
            return "another forward on the layer"
        found = chosen(layer, self.bases, in_training=True)
        if type(found) is str:
            return found
        return watched(self) if isinstance(layer, self.Fused) else watched(self) or "fuse has not been called"

    def cast_to(self, layer: nn.Module) -> torch.dtype | None:
        """The dtype of 16 bits that autocast gives the float32 A and B of `layer` in each forward; None: there is none.

        None also where FSDP2 has sharded them, for its mixed precision casts what it gathers.
        """
        found = chosen(layer, self.bases, in_training=True)
        if type(found) is str or found[0].dtype is not torch.float32 or gather.is_dtensor(found[0]):
            return None
        base = found[2]
        held = base.packed_weight
        dtype = held.dtype if self.Base is Base8 else base.compute_dtype or getattr(held.state, "dtype", None)
        return dtype if dtype in (torch.float16, torch.bfloat16) else None


class FusedLinear4bit(Peft):
    """peft's `lora.Linear4bit`, whose forward is one autograd function where that gives what peft would."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return forward(FOUR, self, x, args, kwargs)


class FusedLinear8bitLt(Peft8):
    """The same of `lora.Linear8bitLt`."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return forward(EIGHT, self, x, args, kwargs)


FusedLinear4bit.__name__ = FusedLinear4bit.__qualname__ = "Linear4bit"  # as peft prints its layers
FusedLinear8bitLt.__name__ = FusedLinear8bitLt.__qualname__ = "Linear8bitLt"
Linear4bit, Linear8bitLt = FusedLinear4bit, FusedLinear8bitLt  # pickles of fused layers name them so
FOUR = Family(
    Peft, FusedLinear4bit, Base, frozenset((Base, LinearNF4, LinearFP4)), own_forward(Peft), own_forward(Base)
)
EIGHT = Family(Peft8, FusedLinear8bitLt, Base8, frozenset((Base8,)), own_forward(Peft8), own_forward(Base8))


def family(layer: nn.Module) -> Family:
    """Whose `layer` is, one of peft's; `Family.never` says it where it is none's."""
    return EIGHT if isinstance(layer, Peft8) else FOUR


def forward(of: Family, layer: nn.Module, x: Tensor, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """The forward of a fused layer: in one function, or peft's."""
    if args or kwargs or torch.compiler.is_dynamo_compiling() or type(x) not in TENSORS or watched(of) is not None:
        return of.Peft.forward(layer, x, *args, **kwargs)
    # accelerate's hooks keep this forward when the layer is peft's again
    found = chosen(layer, of.bases) if isinstance(layer, of.Fused) else ""
    if type(found) is str:
        return of.Peft.forward(layer, x)
    A, B, base, scale, p = found
    factor = dropped = x.dtype
    if A.dtype is not factor or _autocast():
        factor, dropped = factor_dtype(layer, x, A), dropped_dtype(layer, x, A)
        if factor is None:
            return of.Peft.forward(layer, x)
    packed, state, bias, compute, threshold = (*base.operands(x), 0.0) if of is FOUR else operands_of_int8(base, x)
    if state is None:  # a weight in floats
        return of.Peft.forward(layer, x)
    dropout = Dropout(p, dropped) if p and x.numel() else None  # of nothing torch draws nothing
    if torch.is_grad_enabled() and (x.requires_grad or A.requires_grad or B.requires_grad):
        x, A, B = _unwrap(x), _unwrap(A), _unwrap(B)
        return _apply(x, A, B, packed, state, bias, scale, compute, factor, dropout, threshold)
    return product(x, A, B, packed, state, bias, scale, compute, factor, dropout, threshold)[0]


def operands_of_int8(base: Base8, x: Tensor) -> tuple[Tensor, Any, Tensor | None, torch.dtype, float]:
    """`Linear4bit.operands` of an int8 layer, which multiplies x in its own dtype, and its threshold; without a state
    for a float W."""
    return *base.operands(x), x.dtype, base.state.threshold


# ---- what is fused, and in words what is not ----


def watched(of: Family) -> str | None:
    """Who replaces or watches the calls that a fused layer does not make; None: nobody."""
    if of.Peft.forward is not of.forward or of.Base.forward is not of.base_forward:
        replaced = of.Peft.forward if of.Peft.forward is not of.forward else of.Base.forward
        return f"the forward of {of.Base.__name__} has been replaced{unsloth.by(replaced)}"
    if nn.Linear.forward is not LINEAR_FORWARD or nn.functional.linear is not LINEAR:
        return "torch's linear has been replaced"
    if (
        _before
        or _after
        or _backward_before
        or _backward_after
        or _function_modes()
        or _dispatch_modes()
        or _transforms()
        or _tracing() is not None
        or forward_ad._current_level >= 0
    ):
        return "hooks of the whole process, modes or transforms of torch"
    return None


def chosen(
    layer: nn.Module, bases: frozenset[type], in_training: bool = False
) -> tuple[Tensor, Tensor, nn.Module, float, float] | str:
    """(A [r, K], B [N, r], base layer, scale, p) of the one plain adapter that is active in `layer`, or why it is
    peft's. p: of its dropout, 0.0 where none is made.

    bases: classes of base layers that are gone around.
    in_training: of the next call in training, before which FSDP2 gathers A and B.
    """
    mine = layer.__dict__
    name = mine["_active_adapter"]
    if mine["_disable_adapters"]:
        return "its adapters are disabled"
    if mine["merged_adapters"]:
        return "its adapter is merged"
    if type(name) is not str:
        if len(name) != 1:
            return f"{len(name)} adapters are active"
        name = name[0]
    children = mine["_modules"]
    base = children["base_layer"]
    A = children["lora_A"].__dict__["_modules"].get(name)
    B = children["lora_B"].__dict__["_modules"].get(name)
    dropout = children["lora_dropout"].__dict__["_modules"].get(name)
    if A is None:
        return "it has no weights of the active adapter"
    if name in mine["lora_variant"]:
        return type(mine["lora_variant"][name]).__name__.removesuffix("LinearVariant")
    scale = mine["scaling"].get(name)
    if (type(scale) is not float and type(scale) is not int) or not -inf < scale < inf or scale == 0:
        return "its scale is 0, infinite or no number"
    if type(A) is not nn.Linear or type(B) is not nn.Linear or type(base) not in bases or type(dropout) not in DROPOUTS:
        return _unlike(A, B, base, dropout, bases)
    ours, theirs, basis, drops = A.__dict__, B.__dict__, base.__dict__, dropout.__dict__
    if not _plain_modules(ours, theirs, basis, drops):
        return _unlike(A, B, base, dropout, bases)
    p = 0.0
    if type(dropout) is nn.Dropout and drops["p"] != 0.0 and (in_training or drops["training"]):
        p = drops["p"]
        if (words := _unlike_dropout(p, drops["inplace"])) is not None:
            return words
    a, b = weight_of(ours, in_training), weight_of(theirs, in_training)
    if ours["_parameters"].get("bias", ours) is not None or theirs["_parameters"].get("bias", theirs) is not None:
        return "A or B has a bias"
    if a is None or b is None:
        return "A or B is no plain tensor"
    if a.dtype is not b.dtype or a.dtype not in DTYPES:
        return f"A is {dtype_name(a.dtype)} and B {dtype_name(b.dtype)}"
    parameters = basis["_parameters"]
    bias = parameters["bias"] if "bias" in parameters else base.bias
    if bias is not None and bias.requires_grad:
        return "the bias of its base layer is trained"
    return a, b, base, scale, p


def _unlike_dropout(p: Any, in_place: bool) -> str | None:
    """Why a dropout that is made is not `bitshard.lora.dropout`'s; None where it is."""
    if not isinstance(p, float) or not 0.0 < p < 1.0:
        return f"its dropout has p = {p}"
    if in_place:
        return "its dropout is made in place"
    if nn.Dropout.forward is not DROPOUT_FORWARD or nn.functional.dropout is not DROPOUT:
        return "torch's dropout has been replaced"
    return None


def _unlike(A: nn.Module, B: nn.Module, base: nn.Module, dropout: nn.Module, bases: frozenset[type]) -> str:
    """What is around or in the place of one of four modules that are not all plain ones of their classes."""
    plain = {"base layer": (base, bases), "A": (A, LINEARS), "B": (B, LINEARS), "dropout": (dropout, DROPOUTS)}
    for role, (part, classes) in plain.items():
        if role in ("A", "B") and type(part).__name__ == FSDP1:
            return OWN_UNITS
        if type(part) not in classes:
            return f"its {role} is a {type(part).__name__}"
        own = dict(vars(part))
        if not _plain_modules({key: value for key, value in own.items() if key not in FORWARDS}):
            return f"hooks on its {role}"
        if not _plain_modules(own):
            return f"another forward on its {role}"
    return "another forward on one of its modules"


def weight_of(linear: dict[str, Any], gathers: bool = False) -> Tensor | None:
    """The plain weight of an nn.Linear by its `__dict__`; FSDP1 puts a view beside the parameters.

    gathers: or what FSDP2 will have gathered by the next forward.
    """
    weight = linear["_parameters"].get("weight")
    if weight is None:
        weight = linear.get("weight")
    return weight if type(weight) in TENSORS or (gathers and gather.is_dtensor(weight)) else None


def dropped_dtype(layer: nn.Module, x: Tensor, A: Tensor) -> torch.dtype:
    """The dtype in which peft drops elements of x: it casts x before, unless CUDA's autocast is on, and A's product
    casts it behind."""
    casts = layer.__dict__["cast_input_dtype_enabled"] and not torch.is_autocast_enabled()
    return A.dtype if casts else x.dtype


def factor_dtype(layer: nn.Module, x: Tensor, A: Tensor) -> torch.dtype | None:
    """The dtype in which peft multiplies with A and B, where that of x differs or under autocast; None: peft's way."""
    if x.dtype not in DTYPES:
        return None
    device = x.device.type
    casts = torch.is_autocast_enabled(device)
    if torch.is_autocast_enabled() and not casts:  # peft asks CUDA's autocast, wherever x is, and casts nothing then
        return None
    if not casts:
        return A.dtype if A.dtype is x.dtype or layer.__dict__["cast_input_dtype_enabled"] else None
    chosen = torch.get_autocast_dtype(device)
    return chosen if chosen in DTYPES and {x.dtype, A.dtype} <= {chosen, torch.float32} else None
