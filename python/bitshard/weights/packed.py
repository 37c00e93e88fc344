"""What the parameters of quantized weights share, whatever their kind: moves, copies, and what DDP and FSDP are told.

`Params4bit` (a column of packed bytes of any kind) and `Int8Params` (int8 codes [N, K]) derive from it. They may hold
floats, too, before they are quantized (`bnb_quantized`).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from bitshard.formats.state import QuantState, dtype_name
from bitshard.process import foreign
from bitshard.shards import agreement
from bitshard.weights.guards import Packed, cast_error, in_module_move, plain


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

    state_name: str  # of the attribute, and keyword of the constructor, that has the state

    __class__ = property(class_of, object.__dict__["__class__"].__set__)  # for Dynamo, see PackedMeta

    @property
    def own_state(self) -> QuantState | None:
        """The state of the bytes; None before they are quantized, and where their scales are elsewhere."""
        return self.__dict__.get(self.state_name)

    def described(self) -> agreement.Held | None:
        """A quantized weight as ranks compare it; None without its scales."""
        return None if self.own_state is None else agreement.Held(self.own_state, self.dtype)

    def plain_data(self) -> Tensor:
        """`data` as a plain tensor, without its guard."""
        with plain():
            return self.data

    def _like(self, data: Tensor) -> Any:
        """Another piece or view of this weight, with the same attributes."""
        new = torch.Tensor._make_subclass(type(self), data, False)
        new.__dict__.update(self.__dict__)
        return new

    # -- copies --

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with plain():
            new = torch.Tensor._make_subclass(type(self), self.data.clone(), self.requires_grad)
        memo[id(self)] = new
        for name, value in self.__dict__.items():
            new.__dict__[name] = memo.get(id(value)) if name == "module" else copy.deepcopy(value, memo)
        return new

    def __copy__(self) -> Any:
        return self._like(self.plain_data()).requires_grad_(self.requires_grad)

    # -- moves --

    def _float_to(self, device: torch.device | None, dtype: torch.dtype | None, non_blocking: bool) -> Any:
        """`to` of a weight that is not quantized: its first move to a real device quantizes it."""
        raise NotImplementedError

    def _cast_error(self, dtype: torch.dtype) -> TypeError:
        return cast_error(self, f"to({dtype_name(dtype)})")

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Quantize in place (first move to a real device), or move bytes and state. See the class.

        TypeError for a cast of bytes. Rows of a weight that FSDP2 has sharded already give this rank's `PackedShard`.
        """
        if torch.compiler.is_dynamo_compiling() and self.bnb_quantized and _is_device(self.device, args, kwargs):
            return self
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if not self.bnb_quantized:
            return self._float_to(device, dtype, non_blocking)
        if dtype is not None and dtype is not self.dtype and not in_module_move():
            raise self._cast_error(dtype)
        if device is None or device == self.device:
            return self
        state = self.own_state
        with plain():
            new = self._like(torch.Tensor.to(self.data, device=device, non_blocking=non_blocking))
        new.__dict__[self.state_name] = None if state is None else state.moved(new.device)
        return new.requires_grad_(self.requires_grad)

    def _plain_to(self, device: torch.device | None, dtype: torch.dtype | None, non_blocking: bool) -> Any:
        """`to` of a weight that stays a float."""
        data = self.plain_data()
        with plain():
            moved = data.to(device=device, dtype=dtype, non_blocking=non_blocking)
        return self if moved is data else self._like(moved).requires_grad_(self.requires_grad)

    def cpu(self) -> PackedParameter:
        """`to("cpu")`."""
        return self.to("cpu")

    def cuda(self, device: torch.device | str | int | None = None, non_blocking: bool = False) -> PackedParameter:
        """`to("cuda")`, or to the given CUDA device."""
        return self.to("cuda" if device is None else device, non_blocking=non_blocking)

    def xpu(self, device: torch.device | str | int | None = None, non_blocking: bool = False) -> PackedParameter:
        """`to("xpu")`, which has no kernels: packed weights can only be kept there."""
        return self.to("xpu" if device is None else device, non_blocking=non_blocking)


def _is_device(device: torch.device, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether the arguments of `to` are `device`, as in peft's DoRA: Dynamo of torch 2.10 cannot trace the parser."""
    return len(args) == 1 and not kwargs and isinstance(args[0], torch.device) and args[0] == device


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
