"""Guards around packed bytes: the functions of torch that would cast them, compute with them or overwrite them raise.

A packed weight answers torch's functions through two tables of handlers: the one here, of what raises for any tensor of
packed bytes, and the parameter's own (`bitshard.tensor`), of what gives a packed weight again.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from bitshard.formats.state import dtype_name

plain = torch._C.DisableTorchFunctionSubclass
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


class _Moves(threading.local):
    """How many modules this thread is moving, one within another."""

    depth = 0


_moves = _Moves()


@contextlib.contextmanager
def module_move() -> Iterator[None]:
    """While this thread moves a module's parameters (`Module._apply`), dtype changes do not concern packed weights."""
    _moves.depth += 1
    try:
        yield
    finally:
        _moves.depth -= 1


def in_module_move() -> bool:
    """Whether this thread is moving a module's parameters now."""
    return _moves.depth > 0


class Packed:
    """Marks tensor classes that may hold packed bytes, and guards them; an object of them does where `bnb_quantized`.

    `__torch_function__` is here and not in `Params4bit` because unsloth deletes the one that it finds there.
    """

    word = "4-bit"  # without a state
    bnb_quantized: bool = False
    handlers: dict[Any, Any]  # what answers the functions of torch

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        return guarded(cls.handlers, func, args, kwargs or {})


class PackedData(Tensor):
    """What `.data` of a packed weight gives: its bytes as a plain tensor, but in-place functions of it raise.

    `for p in model.parameters(): p.data.mul_(decay)` and `module.weight.data.normal_()` are how training code writes
    into weights. Copies of the same dtype may be written; results, copies, pickles and views are plain tensors.
    """

    word = "4-bit"
    writes: dict[Any, Any]  # what answers functions that write

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = guarded(cls.writes, func, args, kwargs or {})
        return out.as_subclass(cls) if func is Tensor.detach else out  # nn.Parameter(data) asks for the same class

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: int) -> tuple:
        with plain():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)


# ---- what torch functions do with packed bytes; called with the class's own __torch_function__ off ----


def word_of(weight: Tensor) -> str:
    """What a weight, or its data, is, for messages: "4-bit" or "int8"."""
    state = getattr(weight, "quant_state", None)
    return weight.word if state is None else state.kind.word


# What helps where it is the model that takes packed bytes for numbers
SKIP = (
    "Where the model reads this weight itself, name its layer in llm_int8_skip_modules when the model is loaded, and "
    "the head, which transformers' own list has: the argument replaces it."
)


def cast_error(weight: Tensor, what: str) -> TypeError:
    word = word_of(weight)
    container = "the dtype" if word == "int8" else "bnb_4bit_quant_storage"
    return TypeError(
        f"{what}: this {word} weight holds packed bytes in a {dtype_name(weight.dtype)} container; a cast would "
        f"destroy them. Choose the container with {container} when the model is loaded; for numbers use "
        f"{_values(weight)}. {SKIP}"
    )


def _values(weight: Tensor) -> str:
    """What gives the values of a packed weight, in words."""
    whole_int8 = getattr(weight, "quant_state", None) is None and word_of(weight) == "int8"
    return "weight.dequantize()" if whole_int8 else "dequantize_4bit(weight.data, weight.quant_state)"


def grad_error(word: str) -> RuntimeError:
    """The error for a gradient of a weight that is `word`: "4-bit" or "int8"."""
    return RuntimeError(
        f"requires_grad: packed {word} weights are bytes and have no gradient. To train such a layer in full leave it "
        "unquantized: name it in llm_int8_skip_modules of BitsAndBytesConfig when the model is loaded, above all where "
        "peft's modules_to_save names it (as it does by itself for the classifiers of SEQ_CLS and TOKEN_CLS)"
    )


def packed_among(values: Any) -> Tensor | None:
    for value in values:
        # the attribute of a PackedData is not asked, for Dynamo cannot
        if isinstance(value, PackedData) or (isinstance(value, Packed) and value.bnb_quantized):
            return value
    return None


def guarded(handlers: dict[Any, Any], func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """`func` on plain tensors, by its handler where it has one."""
    handler = handlers.get(func)
    with plain():
        if handler is not None:
            return handler(func, args, kwargs)
        if isinstance(func, FunctionType) and func.__name__ in _INIT:  # in the place of torch.nn.init's (transformers)
            return arithmetic(func, args, kwargs)
        if isinstance(func, _OPERATORS) and not torch.compiler.is_dynamo_compiling():
            _check_operator(func, args, kwargs)
        if kwargs:
            _check_options(func, args, kwargs)
        return func(*args, **kwargs)


def _check_options(func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """ValueError where `out=` is a packed weight, or `inplace=True` means one (torch.nn.functional)."""
    out = kwargs.get("out")
    if out is not None:
        _arithmetic_error(func, packed_among(out if isinstance(out, (tuple, list)) else (out,)))
    if kwargs.get("inplace"):
        _arithmetic_error(func, packed_among((*args, *kwargs.values())))


def _cast(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """half(), float(), type(dtype) and their like."""
    weight = args[0]
    if isinstance(weight, Packed) and weight.bnb_quantized:
        if in_module_move():
            return weight
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and out.dtype is not weight.dtype:
            raise cast_error(weight, getattr(func, "__name__", "cast"))
        return weight if isinstance(out, Tensor) else out
    return func(*args, **kwargs)


def arithmetic(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """ValueError where an argument is packed bytes."""
    _arithmetic_error(func, packed_among((*args, *kwargs.values())))
    return func(*args, **kwargs)


def arithmetic_error(func: Any, weight: Tensor) -> ValueError:
    """The error for a function that takes packed bytes for numbers."""
    word = word_of(weight)
    product = "the layer" if word == "int8" else "matmul_4bit"
    return ValueError(
        f"{getattr(func, '__name__', func)}: {'an' if word == 'int8' else 'a'} {word} weight of container dtype "
        f"{dtype_name(weight.dtype)} holds packed bytes, not numbers. Use {_values(weight)}, or {product}. {SKIP}"
    )


def _arithmetic_error(func: Any, weight: Tensor | None) -> None:
    if weight is not None:  # a TypeError would reach the user as "unsupported operand"
        raise arithmetic_error(func, weight)


def _copy(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """copy_ and w[...] = value: into packed bytes only bytes of the same dtype."""
    weight, value = packed_among(args[:1]), kwargs.get("src", args[-1])
    if weight is not None and (not isinstance(value, Tensor) or value.dtype is not weight.dtype):
        raise cast_error(weight, func.__name__)
    return func(*args, **kwargs)


def _write(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Functions that write into an argument, lists of tensors among them: torch._foreach_add_, torch._fused_adamw_."""
    for value in (*args, *kwargs.values()):
        _arithmetic_error(func, packed_among(value if isinstance(value, (list, tuple)) else (value,)))
    return func(*args, **kwargs)


def _foreach_copy(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """torch._foreach_copy_(targets, sources): as `copy_` of each."""
    targets = args[0] if args else kwargs["self"]
    sources = args[1] if len(args) > 1 else kwargs["src"]
    for target, source in zip(targets, sources, strict=False):
        if packed_among((target,)) is not None and source.dtype is not target.dtype:
            raise cast_error(target, "_foreach_copy_")
    return func(*args, **kwargs)


def _check_operator(func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """ValueError where an operator, called as `torch.ops.space.name(...)`, writes into a packed argument."""
    overload = getattr(func, "_schema", None)  # of an overload; a packet, which has several, is asked for each
    for schema in [overload] if overload is not None else func._schemas.values():
        for place, argument in enumerate(schema.arguments if schema.is_mutable else ()):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            packed = packed_among(value if isinstance(value, (list, tuple)) else (value,))
            if packed is not None and not _copies_bytes(schema.name, packed, args):
                _arithmetic_error(schema.name, packed)


def _copies_bytes(operator: str, target: Tensor, args: tuple) -> bool:
    """Whether an operator writes bytes of the same dtype: aten.copy_, or what changes no byte."""
    name = operator.rpartition("::")[2]
    return name in _IN_PLACE or (name == "copy_" and len(args) > 1 and args[1].dtype is target.dtype)


_CASTS = ("half", "float", "double", "bfloat16", "char", "short", "int", "long", "bool", "type", "type_as")
_ARITHMETIC = (
    "add sub rsub mul div true_divide floor_divide remainder pow neg abs sqrt rsqrt exp log round clamp lerp addcmul "
    "addcdiv matmul mm mv bmm addmm addmv baddbmm einsum tensordot dot outer linear softmax relu "
    "sigmoid tanh normal uniform exponential bernoulli erfinv zero fill"
).split()
_REDUCTIONS = "sum mean std var norm isnan".split()  # asked by code that watches parameters, not by code that uses them


# In-place functions of a tensor that change no byte. Those that do raise, but for copies of the same dtype.
_IN_PLACE = frozenset(
    "_coalesced_ as_strided_ detach_ rename_ requires_grad_ resize_ resize_as_ set_ share_memory_ squeeze_ swapaxes_ "
    "swapdims_ t_ transpose_ unsqueeze_".split()
)

# Functions of torch.nn.init, by name too: while transformers makes a model it puts its own in their places.
_INIT = frozenset(name for name in vars(torch.nn.init) if re.match(r"[a-z].*_$", name))

# Functions that write into an argument though their names do not end in "_".
_WRITERS = (
    "_cudnn_attention_forward_no_dropout_inplace _cummax_helper _cummin_helper _fused_moving_avg_obs_fq_helper "
    "_flash_attention_forward_no_dropout_inplace "
    "_native_batch_norm_legit fbgemm_linear_fp16_weight fbgemm_linear_fp16_weight_fp32_activation "
    "fused_moving_avg_obs_fake_quant rrelu_with_noise"
).split()


def _functions(name: str) -> Iterator[Any]:
    for space in (torch, torch.Tensor, torch.nn.functional):
        for form in (name, f"{name}_", f"__{name}__", f"__r{name}__", f"__i{name}__"):
            func = getattr(space, form, None)
            if func is not None:
                yield func


def _in_place_handlers() -> dict[Any, Any]:
    table: dict[Any, Any] = {}
    for name in dir(torch.Tensor):
        if re.match(r"[a-z]\w*_$", name) and name not in _IN_PLACE:
            table.update({getattr(space, name): arithmetic for space in (Tensor, torch) if hasattr(space, name)})
        elif re.match(r"__i[a-z]+__$", name) and hasattr(Tensor, f"{name[:2]}{name[3:]}"):  # __iadd__, not __init__
            table[getattr(Tensor, name)] = arithmetic
    table.update({getattr(torch.nn.init, name): arithmetic for name in _INIT})
    for space in (torch, torch.nn.functional, torch._C._nn, Tensor):
        for name in (*filter(re.compile(r"(?!__)\w+_$").match, dir(space)), *_WRITERS):
            if hasattr(space, name) and name not in _IN_PLACE:
                table.setdefault(getattr(space, name), _write)
    table[Tensor.copy_] = table[Tensor.__setitem__] = _copy
    table[torch._foreach_copy_] = _foreach_copy
    return table


def casts() -> list[Any]:
    """Functions of a tensor that give it another dtype, `to` apart."""
    return [getattr(torch.Tensor, name) for name in _CASTS]


def reductions() -> list[Any]:
    """Functions of torch that tell of a tensor's values in a few numbers."""
    spaces = (torch, torch.Tensor)
    found = [getattr(space, name) for name in _REDUCTIONS for space in spaces if hasattr(space, name)]
    return [*found, torch.linalg.norm, torch.linalg.vector_norm]


def _handlers() -> dict[Any, Any]:
    table: dict[Any, Any] = {}
    for name in _ARITHMETIC:
        table.update(dict.fromkeys(_functions(name), arithmetic))
    table.update(dict.fromkeys((torch.Tensor.__truediv__, torch.Tensor.__rtruediv__), arithmetic))
    table.update(IN_PLACE)
    table.update(dict.fromkeys(casts(), _cast))
    return table


IN_PLACE = PackedData.writes = _in_place_handlers()
HANDLERS = _handlers()
