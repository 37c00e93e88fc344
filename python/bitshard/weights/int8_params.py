"""Int8Params: a parameter that holds a weight in int8 [N, K] with a scale for each row, quantized when it first moves.

`__dict__` holds constructor keywords only, because transformers, accelerate and peft rebuild a weight by
`Int8Params(data, requires_grad=False, **old.__dict__)`. The scales go where the codes go: what `Module.to` and others
assign to `.data` brings its own, or has them moved to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitshard import ops
from bitshard.formats.container import repack, shardable_dtype
from bitshard.formats.state import QuantState, dtype_name, int8_state
from bitshard.functions import int8
from bitshard.process import foreign, launch
from bitshard.shards import agreement
from bitshard.weights.guards import IN_PLACE, PackedData, arithmetic_error, plain
from bitshard.weights.packed import PackedParameter, before_detach, method_to
from bitshard.weights.tensor import Params4bit


def _class_asked(weight: Int8Params) -> type:
    """The class. accelerate asks for it before FSDP2 shards: a weight that was loaded before it was known that FSDP
    shards becomes a column now, which answers to the name of a 4-bit one.
    """
    if weight.dtype is torch.int8 and not torch.compiler.is_compiling() and launch.sharding_begins():
        if weight.row_state is not None and foreign.asked_by(foreign.FSDP2_PREPARES):
            weight.enter(None, torch.float32)
    return type(weight)


def _state_of(scales: Tensor, shape: torch.Size) -> QuantState:
    """The state of codes with `scales`; codes that are no matrix, which no layer takes, count as one row."""
    return int8_state(scales, shape if len(shape) == 2 else torch.Size((1, shape.numel())), torch.float32)


class Int8Params(PackedParameter):
    """A linear layer's weight, quantized to int8 when it first moves to a device.

    Before: float data [N, K]. `.to(device)`, `.cuda()` or `.cpu()` then quantize in place and return self, unless
    `has_fp16_weights`, with which it stays a float weight that can be trained.
    After: int8 [N, K] and `row_state`, whose scales are `SCB`.

    Args:
        data: float32, float16 or bfloat16 [N, K], or int8 codes together with `SCB`.
        requires_grad: of a float weight.
        has_fp16_weights: never quantize; the layer does, in each forward.
        CB: ignored, for the codes are the data.
        SCB: scales float32 [N] of int8 data.

    Other keywords are ignored, for foreign code passes whatever it finds in `__dict__`; `row_state` among them is the
    state of int8 data where no `SCB` is given.
    """

    __module__ = "bitshard.int8_params"  # as pickles name it

    # what a weight has that foreign code made with `torch.Tensor._make_subclass`; by `quant_state`, which is not among
    # it, foreign code tells a 4-bit weight
    word = "int8"
    state_name = "row_state"
    row_state: QuantState | None = None
    has_fp16_weights: bool = False

    def __new__(
        cls,
        data: Tensor | None = None,
        requires_grad: bool = True,
        has_fp16_weights: bool = False,
        CB: Tensor | None = None,
        SCB: Tensor | None = None,
        **kwargs: Any,
    ) -> Int8Params:
        data = torch.empty(0, dtype=torch.float32) if data is None else data
        quantized = data.dtype is torch.int8
        with plain():
            self = torch.Tensor._make_subclass(cls, data.detach(), requires_grad and not quantized)
        row_state = kwargs.get("row_state")
        if SCB is not None:
            row_state = _state_of(SCB, data.shape) if quantized else None
        self.__dict__.update(row_state=row_state if quantized else None, has_fp16_weights=has_fp16_weights)
        return self

    __class__ = property(_class_asked, object.__dict__["__class__"].__set__)  # for Dynamo, see PackedMeta

    @property
    def bnb_quantized(self) -> bool:
        """Whether the data are int8 codes."""
        return self.dtype is torch.int8

    @property
    def CB(self) -> Tensor | None:
        """The codes int8 [N, K] as a plain tensor; None before the weight is quantized."""
        return self.plain_data() if self.bnb_quantized else None

    @CB.setter
    def CB(self, value: Any) -> None:
        """Nothing: the codes are the data. Others set this to None, or to the same codes on another device."""

    @property
    def SCB(self) -> Tensor | None:
        """Scales float32 [N]: those of `row_state`."""
        return None if self.row_state is None else self.row_state.absmax

    @SCB.setter
    def SCB(self, scales: Tensor | None) -> None:
        self.row_state = None if scales is None else _state_of(scales, self.shape)

    def described(self) -> agreement.Held | None:
        """See `PackedParameter.described`."""
        if self.row_state is None:
            return None
        state = self.row_state.clone()
        state.checksum = ops.checksum(self.plain_data())
        return agreement.Held(state, self.dtype)

    def dequantize(self) -> Tensor:
        """float32 values [N, K]. ValueError before the weight is quantized."""
        if not self.bnb_quantized or self.row_state is None:
            raise ValueError(f"this weight {list(self.shape)} of {dtype_name(self.dtype)} is not quantized")
        return int8.int8_vectorwise_dequant(self.plain_data(), self.SCB)

    # -- making one --

    def _quantize(self, device: torch.device | str | int) -> Int8Params:
        """Quantize the float data in place, on `device`."""
        if self.requires_grad:
            raise RuntimeError(
                f"an int8 weight has no gradient, and this one {list(self.shape)} requires it: make it with "
                "requires_grad=False, or with has_fp16_weights=True to train it"
            )
        codes, scales, _ = int8.quantize(self.plain_data().to(device).contiguous())
        with plain():
            self.data = codes
        self.SCB = scales
        return self

    def column(self, module: Any, dtype: torch.dtype) -> Params4bit:
        """This quantized weight in the form that FSDP shards: one column of a container that is `dtype`, or bytes.

        It becomes that of the layer `module`, or of each rank its part (`launch.keeps_parts`).
        """
        state = int8_state(self.SCB, self.shape, dtype)
        codes = self.plain_data().reshape(-1, 1)
        new = Params4bit.of_state(codes, state, torch.int8, module)
        new._install(repack(codes, shardable_dtype(dtype, torch.int8, state.kind), state), state)
        if self.__dict__.get("_is_hf_initialized"):  # or transformers initializes it
            new._is_hf_initialized = True
        return new

    def enter(self, module: Any, dtype: torch.dtype) -> None:
        """Become that column, in place: who has the parameter, finds the column."""
        new = self.column(module, dtype)
        with plain():
            self.data = new.data
        self.__class__ = new.__class__
        self.__dict__.clear()
        self.__dict__.update(new.__dict__)

    # -- pickles --

    def __reduce_ex__(self, protocol: int) -> tuple:
        beside = {name: value for name, value in self.__dict__.items() if name != "row_state"}
        return _rebuild, (self.plain_data(), self.requires_grad), {**beside, "SCB": self.SCB}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read a pickle, which has the scales alone."""
        self.__dict__.update({name: value for name, value in state.items() if name != "SCB"})
        self.SCB = state.get("SCB")

    # -- moves --

    def _float_to(self, device: torch.device | None, dtype: torch.dtype | None, non_blocking: bool) -> Int8Params:
        stays = device is None or device.type == "meta" or self.has_fp16_weights
        return self._plain_to(device, dtype, non_blocking) if stays else self._quantize(device)

    def _cast_error(self, dtype: torch.dtype) -> TypeError:
        return TypeError(
            f"to({dtype_name(dtype)}): this weight holds int8 codes of {list(self.shape)}, which a cast would rob of "
            "their scales; for numbers use weight.dequantize()"
        )


def _rebuild(data: Tensor, requires_grad: bool) -> Int8Params:
    return Int8Params(data, requires_grad)


class Int8Data(PackedData):
    """What `.data` of a quantized weight gives: its codes, which may be read as numbers, and written with codes only.

    `module.weight.data.copy_(w)` and `.clamp_(...)` are how code writes into weights; torch would round the values to
    codes, or compute with the codes.
    """

    word = "int8"


# ---- what torch functions do with it; called with the class's own __torch_function__ off ----


def _get_data(func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    data = func(*args, **kwargs)
    if type(data) is not Tensor or data.dtype is not torch.int8 or torch.compiler.is_dynamo_compiling():
        return data
    return data.as_subclass(Int8Data)


def _set_data(func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """weight.data = data: the scales of codes come along, or go where the codes are."""
    weight, data = args
    if isinstance(weight, Int8Params) and weight.bnb_quantized and data.dtype is not torch.int8:
        raise TypeError(
            f".data = {dtype_name(data.dtype)} {list(data.shape)}: this weight holds int8 codes and keeps its scales; "
            "assign a new Int8Params to the layer instead"
        )
    func(weight, data)
    if not isinstance(weight, Int8Params) or not weight.bnb_quantized:
        return
    if isinstance(data, Int8Params) and data.row_state is not None:
        weight.row_state = data.row_state
    elif weight.SCB is not None and not data.is_meta and weight.SCB.device != data.device:
        weight.row_state = weight.row_state.moved(data.device)


def _copy(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """copy_ and w[...] = value: into codes only codes, for torch would round values to them."""
    target, source = args[0], kwargs.get("src", args[-1])
    codes = isinstance(target, (Int8Params, Int8Data)) and target.dtype is torch.int8
    if codes and isinstance(source, Tensor) and source.dtype is not torch.int8:
        raise TypeError(
            f"copy of {dtype_name(source.dtype)} {list(source.shape)} into int8 codes {list(target.shape)}: assign a "
            "new Int8Params to the layer, or load a state dict with SCB beside the codes"
        )
    return func(*args, **kwargs)


def _detach(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    before_detach(args[0] if args else kwargs.get("input", kwargs.get("self")))
    return func(*args, **kwargs)


_SHARDING = (
    "an int8 weight {shape} would be sharded by its codes alone, without its scales. Load the model after "
    "TrainingArguments(fsdp=...) or `accelerate launch` have told this process that FSDP shards, or call "
    "bitshard.fsdp.shardable(model) before it is sharded"
)


def _new_zeros(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What FSDP2 makes its shards with: ValueError, unless it is for another dtype."""
    weight, out = args[0], func(*args, **kwargs)
    if isinstance(weight, Int8Params) and weight.bnb_quantized and out.dtype is torch.int8:
        raise ValueError("FSDP2: " + _SHARDING.format(shape=list(weight.shape)))
    return out


def _is_floating_point(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """ValueError where FSDP1 asks, before it flattens."""
    weight = args[0]
    if isinstance(weight, Int8Params) and weight.bnb_quantized and not torch.compiler.is_compiling():
        if foreign.asked_by(foreign.FSDP1_FLATTENS):
            raise ValueError("FSDP1: " + _SHARDING.format(shape=list(weight.shape)))
    return func(*args, **kwargs)


def _compute(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Functions that write into their first argument: ValueError where that is codes, for numbers mean values."""
    target = args[0] if args else next(iter(kwargs.values()), None)
    for each in target if isinstance(target, (list, tuple)) else (target,):
        if isinstance(each, (Int8Params, Int8Data)) and each.dtype is torch.int8:
            raise arithmetic_error(func, each)
    return func(*args, **kwargs)


_ZERO = (Tensor.zero_, torch.zero_, torch._foreach_zero_)  # the code of the value 0 is 0
WRITES = {func: _compute for func in IN_PLACE if func not in _ZERO}
WRITES.update({Tensor.copy_: _copy, Tensor.__setitem__: _copy, torch._foreach_copy_: IN_PLACE[torch._foreach_copy_]})
Int8Data.writes = WRITES
Int8Params.handlers = {
    **WRITES,
    Tensor.data.__get__: _get_data,
    Tensor.data.__set__: _set_data,
    Tensor.to: method_to,
    Tensor.detach: _detach,
    torch.detach: _detach,
    Tensor.new_zeros: _new_zeros,
    Tensor.is_floating_point: _is_floating_point,
    torch.is_floating_point: _is_floating_point,
}
_rebuild.__module__ = "bitshard.int8_params"  # as pickles name it
torch.serialization.add_safe_globals([Int8Params, _rebuild])
