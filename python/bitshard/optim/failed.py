"""What a step that failed has done: the next one goes on from there, so that nothing is counted twice.

A parameter is marked with the gradient that it was updated by. As long as that is the same tensor and nobody has
written to it, the next step leaves out what was updated. With another gradient a parameter that was updated as a whole
is stepped as any; one that was updated in part is not, for its elements would differ in the steps they have seen.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from bitshard.optim import shards
from bitshard.shards.gather import is_dtensor


class _Mark(NamedTuple):
    gradient: TensorWeakRef
    version: int
    end: int | None  # elements from the first on that are updated; None: it is not known
    numel: int
    name: str

    def is_of(self, gradient: Tensor) -> bool:
        """Whether this gradient is the one of the step that failed, as it was."""
        own = _own(gradient)
        return self.gradient() is own and self.version == _version(own)


def _own(gradient: Tensor) -> Tensor:
    return gradient._local_tensor if is_dtensor(gradient) else gradient


def _version(gradient: Tensor) -> int:
    return -1 if gradient.is_inference() else gradient._version


class Failed:
    """Marks of the parameters of one optimizer; none where its last step was whole."""

    def __init__(self):
        self._marks: dict[Tensor, _Mark] = {}

    def __bool__(self) -> bool:
        return bool(self._marks)

    def note(self, p: Tensor, name: str, end: int | None) -> None:
        """Store that the first `end` elements of this rank's part of `p` are updated, state too; None: not known."""
        own = _own(p.grad)
        self._marks[p] = _Mark(TensorWeakRef(own), _version(own), end, shards.local(p).numel(), name)

    def end_of(self, p: Tensor) -> int | None:
        """Elements that the step with the gradient of `p` has updated: 0 where it must begin, None for all.

        RuntimeError where it cannot go on.
        """
        mark = self._marks.get(p)
        if mark is None:
            return 0
        same = mark.is_of(p.grad)
        if mark.end == mark.numel:
            return None if same else 0
        if mark.end is None or not same:
            other = ", and this is another gradient" if mark.end is not None else ""
            raise RuntimeError(f"{mark.name}: {_words(mark)}{other}; {_way_out(mark)}")
        return mark.end

    def check_whole(self) -> None:
        """RuntimeError where a parameter is updated in part: its state is nothing to keep."""
        for mark in self._marks.values():
            if mark.end != mark.numel:
                raise RuntimeError(f"{mark.name}: {_words(mark)}; {_way_out(mark)}")

    def forget(self, parameters: list[Tensor] | None = None) -> None:
        """A step of these was whole; None: all have other states now."""
        for p in list(self._marks) if parameters is None else parameters:
            self._marks.pop(p, None)


def _words(mark: _Mark) -> str:
    if mark.end is None:
        return "a step failed, and of this parameter it is not known what was updated"
    return f"a step failed after the first {mark.end} of {mark.numel} elements were updated"


def _way_out(mark: _Mark) -> str:
    load = "load the model and the optimizer from a checkpoint"
    return load if mark.end is None else f"call step() with the gradients of that step to go on, or {load}"
