"""Random numbers of a step: the same in a graph as without one, and in a recomputation as in its forward.

A GPU's generator is a seed and an offset, which each random kernel moves on. A graph takes the default generator's
offset when it is launched, so its forward draws what the same call would draw without it. Gradient checkpointing
computes parts of the forward ("regions") again in the backward, where torch sets the generator back
(preserve_rng_state); that needs the host. So the call before a graph is recorded notes at which offset each region
begins, and a region that draws gets a generator of its own in the backward graph, put to that offset before each
launch.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from bitshard.graphs.calls import Refused

_OTHER_LAYERS = "gradient checkpointing takes other layers than in the call before"
_ON_HOST = "its forward draws random numbers on the CPU"
CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")  # transformers' layers; torch's CheckpointWrapper


class Draws:
    """What one call draws: where each region begins, in offsets after the call's begin, and how much it takes."""

    def __init__(self, device: torch.device):
        self.regions: list[tuple[int, int]] = []
        self._generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else None
        self._own: list[torch.Generator | None] = []  # of each region that draws
        self._base = self._seed = 0

    @contextlib.contextmanager
    def noted(self, model: nn.Module) -> Iterator[None]:
        """Note what is drawn within; Refused where the host's generators, whose values a graph keeps, are."""
        before = _host_state() if self._generator else None
        self.regions.clear()
        self._base = self._offset()
        with checkpoints_replaced(model, self._noting):
            yield
        if before and _drew(before):
            raise Refused(_ON_HOST)

    def generators(self) -> list[torch.Generator]:
        """A new generator for each region that draws; the backward graph has to know them."""
        if self._generator is not None:
            device = self._generator.device
            self._own = [torch.Generator(device=device) if taken else None for _, taken in self.regions]
        return [generator for generator in self._own if generator is not None]

    @contextlib.contextmanager
    def recorded(self, model: nn.Module) -> Iterator[None]:
        """Let the regions within take the generators of `generators()` when they are computed again."""
        if self._generator is None:
            yield
            return
        left = iter(self._own)
        with _nothing_drawn(), checkpoints_replaced(model, lambda checkpoint: _region(checkpoint, left, self._drawing)):
            yield
        if next(left, self) is not self:
            raise Refused(_OTHER_LAYERS)

    def before_forward(self) -> None:
        """Remember where the generator is when the forward is launched."""
        if self._generator is not None:
            self._base, self._seed = self._offset(), self._generator.initial_seed()

    def before_backward(self) -> None:
        """Put each region's generator to where the region began."""
        for (begin, _), generator in zip(self.regions, self._own, strict=False):
            if generator is not None:
                generator.manual_seed(self._seed)
                generator.set_offset(self._base + begin)

    def _offset(self) -> int:
        return self._generator.get_offset() if self._generator is not None else 0

    def _noting(self, checkpoint: Callable) -> Callable:
        def region(*args: Any, **kwargs: Any) -> Any:
            begin = self._offset()
            out = checkpoint(*args, **kwargs)
            self.regions.append((begin - self._base, self._offset() - begin))
            return out

        return region

    @contextlib.contextmanager
    def _drawing(self, generator: torch.Generator) -> Iterator[None]:
        """Let the default generator's draws within be those of `generator`."""
        before = self._generator.graphsafe_get_state()
        self._generator.graphsafe_set_state(generator)
        try:
            yield
        finally:
            self._generator.graphsafe_set_state(before)


def _host_state() -> tuple[torch.Tensor, tuple]:
    """The states of the host's generators."""
    return torch.get_rng_state(), random.getstate()


def _drew(before: tuple[torch.Tensor, tuple]) -> bool:
    """Whether they are others than before."""
    return not torch.equal(before[0], torch.get_rng_state()) or before[1] != random.getstate()


@contextlib.contextmanager
def _nothing_drawn() -> Iterator[None]:
    """Refused where the host's generators are drawn from within, which give the same again to the call that follows."""
    before = _host_state()
    try:
        yield
        if _drew(before):
            raise Refused(_ON_HOST)
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])


def _region(checkpoint: Callable, left: Iterator[Any], drawing: Callable) -> Callable:
    """`checkpoint` without torch's way to draw again, and with that of `Draws` where the region draws."""
    settings = getattr(checkpoint, "keywords", {})

    def region(*args: Any, **kwargs: Any) -> Any:
        generator = next(left, left)
        if generator is left:
            raise Refused(_OTHER_LAYERS)
        if generator is None:
            return checkpoint(*args, **kwargs, preserve_rng_state=False)
        if settings.get("use_reentrant", True) or "context_fn" in settings:
            raise Refused('layers that draw need gradient_checkpointing_kwargs={"use_reentrant": False} alone')
        contexts = contextlib.nullcontext(), drawing(generator)
        return checkpoint(*args, **kwargs, preserve_rng_state=False, context_fn=lambda: contexts)

    return region


@contextlib.contextmanager
def checkpoints_replaced(model: nn.Module, by: Callable[[Callable], Callable]) -> Iterator[None]:
    """Other checkpointing functions in the modules that keep one, within."""
    before = [(vars(module), name) for module in model.modules() for name in CHECKPOINTS if name in vars(module)]
    kept = [mine[name] for mine, name in before]
    for (mine, name), function in zip(before, kept, strict=True):
        mine[name] = by(function)
    try:
        yield
    finally:
        for (mine, name), function in zip(before, kept, strict=True):
            mine[name] = function
