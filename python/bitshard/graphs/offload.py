"""Activations on the host in a step of graphs: what saves memory between layers, as a graph can repeat it.

torch's `save_on_cpu` and trl's `activation_offloading` bring what autograd keeps to the host, by hooks that a graph
does not call. So while a graph is recorded under such hooks, the inputs of checkpointed layers are copied to memory of
our own, and back where a layer is computed again. The copies are part of the graph. What else these hooks would bring
to the host (the head's, which they need again at once) stays on the GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bitshard import foreign
from bitshard.graphs.calls import Refused
from bitshard.graphs.randomness import CHECKPOINTS, checkpoints_replaced

SMALLEST = 1 << 16  # bytes of a tensor that goes to the host
PIECE = 64 << 20  # bytes that are pinned at once


def asked(model: nn.Module) -> bool:
    """Whether hooks of the caller offload activations. Refused where hooks do something else, or nothing is
    checkpointed, so that a graph would keep on the GPU what they bring to the host."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return False
    if not any(foreign.made_in(hooks[0], known) for known in (foreign.TORCH_OFFLOADS, foreign.TRL_OFFLOADS)):
        raise Refused("hooks on saved tensors that nobody knows")
    if not any(name in vars(module) for module in model.modules() for name in CHECKPOINTS):
        raise Refused("activations are offloaded without gradient checkpointing")
    return True


class HostMemory:
    """Memory of the host for one step at a time, as much as the largest one needs; pinned where a GPU copies to it."""

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []
        self._piece = self._used = 0

    def begin(self) -> None:
        """A step begins: nothing is in use."""
        self._piece = self._used = 0

    def place(self, like: Tensor) -> Tensor:
        """Memory for a copy of a contiguous tensor, of its shape and dtype. It holds until the next `begin`."""
        size = -(-like.nbytes // 256) * 256
        while self._piece < len(self._pieces) and self._used + size > self._pieces[self._piece].numel():
            self._piece, self._used = self._piece + 1, 0
        if self._piece == len(self._pieces):
            self._pieces.append(torch.empty(max(size, PIECE), dtype=torch.uint8, pin_memory=like.is_cuda))
        found = self._pieces[self._piece][self._used : self._used + like.nbytes]
        self._used += size
        return found.view(like.dtype).view(like.shape)

    @contextlib.contextmanager
    def layers(self, model: nn.Module) -> Iterator[None]:
        """Let inputs of the checkpointed layers that are called within wait here for the backward, by no other hooks
        than these."""
        self.begin()
        with _no_hooks(), checkpoints_replaced(model, self._offloading):
            yield

    def _offloading(self, checkpoint: Callable) -> Callable:
        def layer(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                return checkpoint(*args, **kwargs)

        return layer

    def _pack(self, tensor: Tensor) -> Any:
        """Hidden states alone: what layers share (masks, rotary tables) needs no gradient."""
        if not tensor.requires_grad or tensor.nbytes < SMALLEST or not tensor.is_contiguous():
            return tensor
        return self.place(tensor).copy_(tensor.detach(), non_blocking=True), tensor.device


@contextlib.contextmanager
def _no_hooks() -> Iterator[None]:
    """Without hooks on saved tensors."""
    autograd, taken = torch._C._autograd, []
    while (hooks := autograd._top_saved_tensors_default_hooks(True)) is not None:
        taken.append(hooks)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for hooks in reversed(taken):
            autograd._push_saved_tensors_default_hooks(*hooks)


def _unpack(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    host, device = kept
    return host.clone() if device.type == "cpu" else host.to(device, non_blocking=True)
