"""What the parameters of quantized weights share, whatever their kind: devices, plain data, and what DDP is told.

`Params4bit` (a column of packed bytes of any kind) and `Int8Params` (int8 codes [N, K]) derive from it. They may hold
floats, too, before they are quantized (`bnb_quantized`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitshard.process import foreign
from bitshard.shards import agreement
from bitshard.weights.guards import Packed, plain


def class_of(weight: Tensor) -> type:
    return type(weight)


class PackedMeta(type(torch.nn.Parameter)):
    """Lets Dynamo trace `weight.__class__`, which peft reads in every forward of DoRA, and `isinstance(weight, ...)`.

    Of a class with `__torch_function__` it traces no `__class__` but one that is a property, whose getter it then looks
    up as `Params4bit.__class__.fget`, and `Params4bit.__class__` is this class. And from torch 2.15 on it traces no
    `isinstance` of a class that answers otherwise than `type` does; the hook of nn.Parameter's metaclass answers
    otherwise for nn.Parameter only.
    """

    fget = staticmethod(class_of)
    __instancecheck__ = type.__instancecheck__


class PackedParameter(Packed, torch.nn.Parameter, metaclass=PackedMeta):
    """A parameter that is, or will be, the bytes of a quantized weight."""

    __class__ = property(class_of, object.__dict__["__class__"].__set__)  # for Dynamo, see PackedMeta

    def described(self) -> agreement.Held | None:
        """A quantized weight as ranks compare it; None without its scales."""
        raise NotImplementedError

    def plain_data(self) -> Tensor:
        """`data` as a plain tensor, without its guard."""
        with plain():
            return self.data

    def cpu(self) -> PackedParameter:
        """`to("cpu")`."""
        return self.to("cpu")

    def cuda(self, device: torch.device | str | int | None = None, non_blocking: bool = False) -> PackedParameter:
        """`to("cuda")`, or to the given CUDA device."""
        return self.to("cuda" if device is None else device, non_blocking=non_blocking)

    def xpu(self, device: torch.device | str | int | None = None, non_blocking: bool = False) -> PackedParameter:
        """`to("xpu")`, which has no kernels: packed weights can only be kept there."""
        return self.to("xpu" if device is None else device, non_blocking=non_blocking)


def described_in(module: Any) -> dict[str, agreement.Held]:
    """The quantized weights of a module by name, as ranks compare them."""
    named = module.named_parameters() if isinstance(module, torch.nn.Module) else ()
    packed = ((name, p) for name, p in named if isinstance(p, PackedParameter) and p.bnb_quantized)
    return {name: held for name, p in packed if (held := p.described()) is not None}


# ---- what torch functions do with it; called with the class's own __torch_function__ off ----


def method_to(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """torch.Tensor.to(weight, ...), which does not find the method of the class."""
    return args[0].to(*args[1:], **kwargs) if isinstance(args[0], PackedParameter) else func(*args, **kwargs)


def before_detach(weight: Any) -> None:
    """Compare all quantized weights among the ranks where DDP takes the first of them.

    detach() is how DDP takes what it then sends from rank 0 to all others: bytes without their scales.
    """
    if torch.compiler.is_compiling() or not isinstance(weight, PackedParameter) or not weight.bnb_quantized:
        return
    frame = foreign.asked_by(foreign.DDP_SENDS)
    module = None if frame is None else frame.f_locals.get("module")
    if isinstance(module, torch.nn.Module):
        first = next((p for p in module.parameters() if isinstance(p, PackedParameter) and p.bnb_quantized), None)
        if first is weight:
            agreement.agree_on(described_in(module), frame.f_locals.get("process_group"))
