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

from bitshard.graphs.calls import Refused
from bitshard.graphs.randomness import CHECKPOINTS, checkpoints_replaced
from bitshard.process import foreign

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
    """Memory of the host for one step at a time, as much as the largest one needs; pinned where a GPU copies to it.

    Copies run beside the step, on a stream of their own: the next layer is computed while the input of the last one
    leaves, and while that of the layer before comes back.
    """

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []
        self._piece = self._used = 0
        self._stream: Any = None
        self._kept: list[tuple[Tensor, torch.device]] = []
        self._leaving: list[tuple[Tensor, Any]] = []
        self._ahead: dict[int, tuple[Tensor, Any]] = {}

    def streams(self, device: torch.device) -> list[Any]:
        """The stream of the copies, which what is recorded has to fork and to join."""
        if device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return [self._stream] if self._stream is not None else []

    def place(self, like: Tensor) -> Tensor:
        """Memory for a copy of a contiguous tensor, of its shape and dtype. It holds until the next step."""
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
        than these. A step begins: what is in use is free again."""
        self._piece = self._used = 0
        self.forget()
        with _no_hooks(), checkpoints_replaced(model, self._offloading):
            yield
        self._has_left(0)

    def forget(self) -> None:
        """Hold no tensor of a step, also of a recording that failed."""
        for begun in (self._kept, self._leaving, self._ahead):
            begun.clear()

    def _offloading(self, checkpoint: Callable) -> Callable:
        def layer(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                return checkpoint(*args, **kwargs)

        return layer

    def _pack(self, tensor: Tensor) -> Any:
        """Hidden states alone: what layers share (masks, rotary tables) needs no gradient."""
        if not tensor.requires_grad or tensor.nbytes < SMALLEST or not tensor.is_contiguous():
            return tensor
        host, values = self.place(tensor), tensor.detach()
        self._leaving.append((values, self._copy(host, values)))
        self._has_left(1)
        self._kept.append((host, tensor.device))
        return len(self._kept) - 1

    def _has_left(self, later: int) -> None:
        """Wait for all copies to the host but the last `later`: until then nobody else gets their memory."""
        while len(self._leaving) > later:
            self._wait(self._leaving.pop(0)[1])

    def _unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        self._fetch(kept)
        tensor, event = self._ahead.pop(kept)
        self._wait(event)
        if kept:
            self._fetch(kept - 1)  # that of the layer before, which comes next
        return tensor

    def _fetch(self, number: int) -> None:
        """Begin to bring an input back."""
        if number not in self._ahead:
            host, device = self._kept[number]
            tensor = torch.empty_like(host, device=device, pin_memory=False)
            self._ahead[number] = tensor, self._copy(tensor, host)

    def _copy(self, target: Tensor, source: Tensor) -> Any:
        """Copy between host and GPU; the event that it has ended, where it runs beside."""
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def _wait(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


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
