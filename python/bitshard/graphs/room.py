"""Room for calls that run without a graph: beside the graphs' pool a step takes about as much memory again.

A call is spared that where others of its kind showed all that it could show: it is recorded at once, in the pool. Else
the graphs go first, to be made anew in their turn. Both cost recordings, so neither goes on for ever where the GPU has
memory for the call. `Enabled` asks in first calls of forms only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

import torch

from bitshard.graphs.pair import Learned

BESIDE = 0.1  # of the pool: what a call may take beside it
KNOWN = 64  # forms whose first calls may teach another one
FREE = 32  # recordings for the sake of memory: of a form that never ran, or that had graphs before
WORTH = 16  # launches that pay for one more


def affordable(recordings: int, launches: int) -> bool:
    """Whether there may be more recordings for the sake of memory: where lengths grow for ever, or hardly repeat, a
    recording in each step would take longer than what it saves."""
    return recordings < FREE + launches // WORTH


class Looks:
    """What the first calls of forms showed, by kind: the form without the sizes of its tensors."""

    def __init__(self) -> None:
        self._known: deque[tuple[Hashable, list[torch.Size], Learned]] = deque(maxlen=KNOWN)
        self._each: deque[Hashable] = deque(maxlen=KNOWN)

    def add(self, kind: Hashable, shapes: list[torch.Size], learned: Learned) -> None:
        """A first call ran, with tensors of these shapes."""
        self._known.append((kind, shapes, learned))

    def each(self, kind: Hashable) -> None:
        """Let every form of this kind be looked at from now on."""
        self._each.append(kind)

    def forget(self) -> None:
        """The model has changed."""
        self._known.clear()

    def shown(self, kind: Hashable, shapes: list[torch.Size], device: torch.device) -> Learned | None:
        """What the first call with these shapes would show; None where it has to run to show it."""
        known = [(others, learned) for other, others, learned in self._known if other == kind and learned.used]
        if kind in self._each or len({frozenset(learned.used) for _, learned in known}) != 1:
            return None  # which results get gradients depends on the length
        longer = [learned for others, learned in known if _fits(shapes, others)]
        shorter = [learned for others, learned in known if _fits(others, shapes)]
        for learned in reversed(longer):
            if _same_masks(learned, shorter) and (found := learned.for_shorter(device)) is not None:
                return found
        return None


def _fits(shapes: list[torch.Size], others: list[torch.Size]) -> bool:
    """Whether no size is above the other's."""
    pairs = zip(shapes, others, strict=True)
    return all(n <= most for mine, theirs in pairs for n, most in zip(mine, theirs, strict=True))


def _same_masks(longer: Learned, shorter: list[Learned]) -> bool:
    """Whether a call between these gets masks where the longer one did. One that was left out there is left out; one
    that was made may be left out here, for a window masks nothing of fewer tokens."""
    return all(note is None for note in longer.notes) or any(longer.notes == other.notes for other in shorter)
