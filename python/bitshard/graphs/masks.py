"""What other libraries decide by values while a forward runs: attention masks of transformers, positions of trl.

transformers leaves a mask out where it masks nothing beyond what is causal, which lets attention take its fast kernel.
It looks at the mask's values for that, and does not while a graph is recorded: it makes every mask then. So the answer
of each mask function is noted in the call that goes before, and given again while the graph is recorded. It depends on
two facts about values, which belong to the key of a graph: whether a mask has zeros, and whether positions restart.
A mask of blocks (flex attention) that follows from the shape alone is made once: it takes compiled code and copies from
the host, neither of which can be recorded.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bitshard.graphs.calls import Refused

_CHOICE = "_use_triton"  # of trl.trainer.utils, asked by the forward of its fused head alone
MADE = "made from values"
# Of each call of a mask function: None where it gave no mask, one that follows from the shape alone, or MADE
Noted = list[Any]
_END = object()


def facts(args: tuple, kwargs: dict[str, Any]) -> tuple:
    """What mask functions ask of values: (a mask has no zeros, positions restart) of each argument that may be one.

    Waits for the GPU where there is such an argument, as transformers does without a graph.
    """
    asked = [kwargs[name] for name in ("attention_mask", "position_ids") if name in kwargs]
    asked = [tensor for tensor in (*args[1:], *asked) if _may_be_mask(tensor)]
    if not asked:
        return ()
    found = [value for tensor in asked for value in (tensor.all(), _restarts(tensor))]
    return tuple(torch.stack(found).tolist())


def _restarts(tensor: Tensor) -> Tensor:
    return tensor.all() if tensor.dtype == torch.bool else (tensor.diff(dim=-1) != 1).any()


def _may_be_mask(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.ndim == 2 and not tensor.is_floating_point() and tensor.numel() > 0


def for_any_shape(notes: Noted) -> bool:
    """Whether the notes hold for shorter calls too: a mask of blocks has the size of its call."""
    return all(note is None or note is MADE for note in notes)


def _follows_from_shape(mask: Any) -> bool:
    """Whether this is a `BlockMask` whose function reads no tensor."""
    function = getattr(mask, "mask_mod", None)
    return isinstance(function, FunctionType) and not isinstance(mask, Tensor) and not _reads_tensors(function)


def _reads_tensors(function: FunctionType) -> bool:
    """Whether it, or a function that it closes over, may read a tensor: one holds more than functions and numbers."""
    left, seen = [function], set()
    while left:
        value = left.pop()
        if isinstance(value, (list, tuple)):
            left.extend(value)
        elif not isinstance(value, FunctionType):
            if not (value is None or isinstance(value, (bool, int, float, str))):
                return True
        elif value not in seen:
            seen.add(value)
            named = (value.__globals__.get(name) for name in value.__code__.co_names)
            left += [cell.cell_contents for cell in value.__closure__ or ()]
            left += [*(value.__defaults__ or ()), *(each for each in named if isinstance(each, Tensor))]
    return False


class _NoCopies(TorchFunctionMode):
    """Lets `torch.tensor(0.0, device=...)` fill its tensor on the device: a copy from the host can't be recorded
    (transformers' mask for eager attention before 5.21)."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and len(args) == 1 and isinstance(args[0], float) and "dtype" in kwargs:
            dtype = kwargs.pop("dtype")
            return torch.full((), args[0], dtype=dtype, **kwargs)
        return func(*args, **kwargs)


@contextlib.contextmanager
def noted(notes: Noted) -> Iterator[None]:
    """Note the answers of mask functions within."""

    def noting(function: Callable) -> Callable:
        def mask(*args: Any, **kwargs: Any) -> Any:
            found = function(*args, **kwargs)
            notes.append(found if found is None or _follows_from_shape(found) else MADE)
            return found

        return mask

    with _replaced(noting):
        yield


@contextlib.contextmanager
def given(notes: Noted) -> Iterator[None]:
    """Give what was noted before; Refused where the calls are not those that were noted."""
    left = iter(notes)

    def giving(function: Callable) -> Callable:
        def mask(*args: Any, **kwargs: Any) -> Any:
            note = next(left, _END)
            if note is _END:
                raise Refused("it makes another number of attention masks than in the call before")
            if note is not MADE:
                return note
            with _NoCopies():
                return function(*args, **kwargs)

        return mask

    with _replaced(giving):
        yield
    if next(left, _END) is not _END:
        raise Refused("it makes another number of attention masks than in the call before")


@contextlib.contextmanager
def every_position() -> Iterator[None]:
    """Let trl's fused head score every position, as it does on devices without Triton.

    Elsewhere it takes out those that have a label, for whose number the host would wait. Those without one get zeros
    and no gradient either way.
    """
    utils = sys.modules.get("trl.trainer.utils")
    before = getattr(utils, _CHOICE, None)
    if before is None:
        yield
        return
    setattr(utils, _CHOICE, lambda device: False)
    try:
        yield
    finally:
        setattr(utils, _CHOICE, before)


@contextlib.contextmanager
def _replaced(by: Callable[[Callable], Callable]) -> Iterator[None]:
    """Other mask functions in transformers' registry, within."""
    registry = getattr(sys.modules.get("transformers.masking_utils"), "ALL_MASK_ATTENTION_FUNCTIONS", None)
    if registry is None:
        yield
        return
    before = {name: registry[name] for name in registry}
    for name, function in before.items():
        registry[name] = by(function)
    try:
        yield
    finally:
        for name, function in before.items():
            del registry[name]
            if name not in registry or registry[name] is not function:  # this registry's own, not that of all
                registry[name] = function
