"""peft's adapters on 4-bit stacks (`target_parameters`): multiplied apart in a forward, merged expert by expert.

For the time of each forward peft parametrizes the stack: reading it then gives `torch.baddbmm(W, lhs, rhs, alpha=s)`
for one active adapter, W + delta for several. Of a 4-bit W both answer with an `AdaptedStack`: W as it is, and beside
it what was added, which `bitshard.experts.forward` multiplies apart. Only the sum of several adapters is a dense stack.
peft's `merge` says `param.data += delta`, `unmerge` `param.data -= delta`: a new 4-bit weight takes the place of W.
Of a stack that FSDP2 has sharded the packed bytes are gathered for that, and every rank adds the same delta.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitshard import ops
from bitshard.formats.kind import kind_of
from bitshard.functions import functional
from bitshard.process import foreign
from bitshard.shards import gather
from bitshard.weights import guards
from bitshard.weights.guards import IN_PLACE
from bitshard.weights.tensor import Params4bit

ALIGNED = 16  # bytes: rows and columns of what torch multiplies by groups begin at multiples of it


class LowRank(NamedTuple):
    """scale * lhs rhs of one adapter, of the shape that the module shows: lhs [E, a, r], rhs [E, r, b]."""

    lhs: Tensor
    rhs: Tensor
    scale: float

    def factors(self, transposed: bool) -> tuple[Tensor, Tensor]:
        """A [E, r, K] and B [E, N, r]: scale B A is what is added to a weight [N, K]."""
        return (self.lhs.transpose(1, 2), self.rhs.transpose(1, 2)) if transposed else (self.rhs, self.lhs)

    def product(self, x: Tensor, offs: Tensor, transposed: bool) -> Tensor:
        """[S, N]: rows of x [S, K] times what is added to their expert's weight; see `grouped_mm`."""
        for factor in self.factors(transposed):
            x = grouped_mm(x, factor.transpose(1, 2).to(x.dtype), offs)
        return x * self.scale


class Dense(NamedTuple):
    """The sum of several adapters, of the shape that the module shows."""

    delta: Tensor

    def product(self, x: Tensor, offs: Tensor, transposed: bool) -> Tensor:
        """As of `LowRank`."""
        delta = self.delta if transposed else self.delta.transpose(1, 2)
        return grouped_mm(x, delta.to(x.dtype), offs)


class Merged(NamedTuple):
    """Adapters that are in the stack before it multiplies (`bitshard.lora.aware_stack`), in their order."""

    adapters: tuple[LowRank, ...]


# What fused adapters add in the forwards that are running: (holder of the stack, what). Of a call, not of the module,
# which other threads call and which may be copied.
of_call: ContextVar[tuple[tuple[Any, LowRank | Merged], ...]] = ContextVar("of_call", default=())


_running: list[None] = []  # one for each such forward of all threads: Dynamo reads no context variable


def begin_call(held: Any, added: LowRank | Merged) -> Token:
    """In the forward that begins `added` is added to the stack of `held`; what `end_call` wants."""
    _running.append(None)
    return of_call.set((*of_call.get(), (held, added)))


def end_call(begun: Token) -> None:
    """The forward ends, also in an error."""
    of_call.reset(begun)
    _running.pop()


def added_in_call(held: Any) -> tuple[LowRank | Merged, ...]:
    """What fused adapters add to the stack of `held` in the forward that is running."""
    return tuple(added for stack, added in of_call.get() if stack is held) if _running else ()


class AdaptedStack(Params4bit):
    """A stack as peft's parametrization gives it: `base`, the weight itself, and what is `added` to it."""

    base: Params4bit
    added: tuple[LowRank | Dense, ...] = ()
    bnb_quantized = True

    @staticmethod
    def of(weight: Params4bit, more: LowRank | Dense) -> AdaptedStack:
        """`weight`, perhaps adapted already, with more added to it."""
        before = (weight.base, weight.added) if isinstance(weight, AdaptedStack) else (weight, ())
        made = torch.Tensor._make_subclass(AdaptedStack, before[0].data, False)
        made.__dict__.update(quant_state=before[0].quant_state, base=before[0], added=(*before[1], more))
        return made


def grouped_mm(x: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
    """[S, b]: rows of x [S, a] times those of weights [E, a, b] that are their experts', differentiable in both.

    torch asks for rows and columns of whole 16 bytes: a and b are padded with zeros. Rows of no expert are undefined.
    """
    unit = ALIGNED // x.element_size()
    a, b = weights.shape[1:]
    pad_a, pad_b = -a % unit, -b % unit
    if pad_a or pad_b:
        x = torch.nn.functional.pad(x, (0, pad_a))
        weights = torch.nn.functional.pad(weights, (0, pad_b, 0, pad_a))
    return torch.nn.functional.grouped_mm(x.contiguous(), weights.contiguous(), offs=offs)[:, :b]


# ---- what torch functions do with a stack; called with the class's own __torch_function__ off ----


def _is_stack(value: Any) -> bool:
    state = getattr(value, "quant_state", None)
    return isinstance(value, Params4bit) and state is not None and state.kind.stacked


def _fits(delta: Any, weight: Params4bit) -> bool:
    """Whether this is a tensor of the shape that the module of a stack shows."""
    return isinstance(delta, Tensor) and list(delta.shape) == list(weight.ds_shape)


def _baddbmm(func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    if not (len(args) == 3 and _is_stack(args[0]) and set(kwargs) <= {"alpha"}):
        return guards.arithmetic(func, args, kwargs)
    return AdaptedStack.of(args[0], LowRank(args[1], args[2], kwargs.get("alpha", 1)))


def _add(func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    if kwargs or len(args) != 2 or not _is_stack(args[0]) or not _fits(args[1], args[0]):
        return guards.arithmetic(func, args, kwargs)
    return AdaptedStack.of(args[0], Dense(args[1]))


class StackValues:
    """What peft adds to of a stack: not the packed bytes, but the weight that takes its place once something is added.

    Attributes:
        weight: the stack, whole or sharded by FSDP2 (`bitshard.sharding.weights.parameter.ShardedWeight`).
        dtype: of its values, to which peft casts what it adds.
        replacement: the 4-bit weight with the sum; None before.
        finite: whether all values of the sum are finite, as `torch.isfinite` is asked by `safe_merge`.
    """

    def __init__(self, weight: Any):
        self.weight, self.dtype = weight, weight.quant_state.dtype
        self.replacement: Params4bit | None = None
        self.finite = True

    def __iadd__(self, delta: Tensor) -> StackValues:
        return self._added(delta, 1)

    def __isub__(self, delta: Tensor) -> StackValues:
        return self._added(delta, -1)

    def _added(self, delta: Tensor, sign: int) -> StackValues:
        if not _fits(delta, self.weight):
            found = list(delta.shape) if isinstance(delta, Tensor) else type(delta).__name__
            raise ValueError(f"{found} added to a 4-bit stack of {list(self.weight.ds_shape)}: expected that shape")
        self.replacement, self.finite = merged(self.weight, delta, sign)
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.isfinite and type(args[0]) is cls:
            return torch.tensor(args[0].finite, dtype=torch.bool)
        raise ValueError(
            f"{getattr(func, '__name__', func)}: of a 4-bit stack that is being merged there are no numbers"
        )


def _merging(sign: int) -> Any:
    def merge(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        weight = getattr(args[0], "of_stack", None) if args else None
        if weight is None or kwargs or len(args) != 2 or not _fits(args[1], weight):
            return guards.arithmetic(func, args, kwargs)
        return StackValues(weight)._added(args[1], sign)

    return merge


def _clone(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A copy of the bytes; of a stack that peft merges with safe_merge what takes the sum."""
    weight = getattr(args[0], "of_stack", None) if args else None
    if weight is None or torch.compiler.is_compiling() or foreign.asked_by(foreign.PEFT_MERGES_STACKS) is None:
        return func(*args, **kwargs)
    return StackValues(weight)


@torch.no_grad()
def merged(weight: Any, delta: Tensor, sign: int = 1) -> tuple[Params4bit, bool]:
    """A 4-bit weight of W + sign * delta, quantized as W was, and whether all of the sum is finite.

    No more than one expert of W is dense at a time. Of a sharded weight a collective.

    Args:
        weight: a stack that is whole, or sharded by FSDP2.
        delta: of the shape that the module shows.
    """
    held = weight.module
    if gather.is_dtensor(weight):
        packed, state = gather.gathered(weight, weight.quant_state)
    else:
        packed, state = weight.data.as_subclass(Tensor), weight.quant_state
    delta = held.oriented(gather.whole(delta) if gather.is_dtensor(delta) else delta)
    one, finite = kind_of(state.quant_type), True
    made, states = torch.zeros_like(packed), []
    codes = made.view(-1).view(torch.uint8)[: state.shape.numel() // 2].view(state.shape[0], -1)
    for expert, added in enumerate(delta):
        dense = functional.dequantize_4bit(*functional.expert_of(packed, state, expert))
        dense = (dense.float() + sign * added.to(dense.device).float()).to(state.dtype)
        finite = finite and bool(torch.isfinite(dense).all())
        own, of = one.quantize(dense, blocksize=state.blocksize, quant_type=state.quant_type, quant_storage=torch.uint8)
        codes[expert].copy_(own.view(-1))
        states.append(of)
    new = state.clone()
    new.absmax = torch.cat([of.absmax for of in states])
    if one.nests:
        new.offset, new.state2, new.nested = None, None, False
    else:
        new.state2.absmax = torch.cat([of.state2.absmax for of in states])
    if state.nested and one.nests:
        functional.nest(new)
    new.checksum = ops.checksum(made)
    return Params4bit.of_state(made, new, weight.quant_storage, held), finite


for _function in (torch.baddbmm, Tensor.baddbmm):
    Params4bit.handlers[_function] = _baddbmm
for _function in (torch.add, Tensor.add, Tensor.__add__):
    Params4bit.handlers[_function] = _add
for _name, _sign in (("add_", 1), ("__iadd__", 1), ("sub_", -1), ("__isub__", -1)):
    IN_PLACE[getattr(Tensor, _name)] = _merging(_sign)
IN_PLACE[Tensor.clone] = _clone
Params4bit.summed = StackValues
