"""Counts the bytes of tensors that live at a time, on the meta device as on any other."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GRAIN = 512  # bytes: the caching allocator rounds each size up to a multiple
# CUDA's gradient of softmax makes a product of gradient and result first: a tensor of the result's size for a moment.
MOMENTARY = (torch.ops.aten._softmax_backward_data.default,)
# What code that asks a tensor of the meta device for its value gets: masks are full.
ONE = {(True, False): 1.0, (False, False): 1, (False, True): True}


class Noted(NamedTuple):
    """A product that a stand-in computes nothing of.

    Attributes:
        kind: "product" (sizes: rows, N, K), "stack" (experts, rows of all, N, K) or "attention" (batch, heads, tokens,
            size of a head of keys, of values).
        sizes: as the kind has them.
        gradient: whether it is the input gradient.
    """

    kind: str
    sizes: tuple[int, ...]
    gradient: bool


_listeners: list[Callable[[Noted], None]] = []


def noted(kind: str, *sizes: int, gradient: bool = False) -> None:
    """Tell who listens what a stand-in would compute here."""
    for listener in _listeners:
        listener(Noted(kind, sizes, gradient))


@contextmanager
def listening(listener: Callable[[Noted], None]) -> Iterator[None]:
    """While it lasts, `listener` hears of products of stand-ins."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class Meter(TorchDispatchMode):
    """While entered: `live` bytes of storages that operators have made since, and the `peak` of that.

    Args:
        known: tensors that were there before and are not counted, however they are viewed.
    """

    def __init__(self, known: Iterable[Tensor] = ()):
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, Any] = {}
        for tensor in known:
            storage = tensor.untyped_storage()
            self._known[id(storage)] = storage

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return ONE[args[0].dtype.is_floating_point, args[0].dtype is torch.bool]
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self._count(value.untyped_storage())
        if func in MOMENTARY:
            self.peak = max(self.peak, self.live + out.numel() * out.element_size())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._known:
            return
        size = -(-storage.nbytes() // GRAIN) * GRAIN
        self.live += size
        self.peak = max(self.peak, self.live)
        self._known[key] = weakref.ref(storage, lambda _: self._gone(key, size))

    def _gone(self, key: int, size: int) -> None:
        del self._known[key]
        self.live -= size

    def since(self) -> None:
        """Let the peak begin anew, at what lives now."""
        self.peak = self.live
