"""Something that every rank does for itself: all go on, or all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from bitshard import ops
from bitshard.shards.gather import everyone

Done = TypeVar("Done")


class Ranks:
    """The ranks that do something together: those of the default process group, or with `alone` this one by itself.

    Where there is no group of several, an action's error is raised as it is.
    """

    def __init__(self, alone: bool = False):
        there = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if there else 0
        self.world = dist.get_world_size() if there else 1
        self.collective = self.world > 1 and not alone

    def together(self, what: str, action: Callable[[], tuple[Done, Any]]) -> Done:
        """Run `action` on every rank: what it did, and facts about it that all must share.

        Where it raises on one rank, all raise the same: OSError where that rank's error has a number, as of a full
        disk, else ValueError, saying `what`, which rank and why; a rank that is out of memory raises that. ValueError
        on all ranks where the facts differ. A collective: a rank that dies is seen by its timeout.
        """
        if not self.collective:
            return action()[0]
        done, facts, failure, cause = None, None, None, None
        try:
            done, facts = action()
        except Exception as error:  # whatever it is, the others wait
            failure, cause = (f"{type(error).__name__}: {error}", getattr(error, "errno", None)), error
        brought = everyone((failure, facts))
        if brought == [(None, facts)] * self.world:
            return done
        if cause is not None and ops.is_out_of_memory(cause):
            raise cause
        for rank, (failure, _) in enumerate(brought):
            if failure is not None:
                text, number = failure
                text = f"{what}: rank {rank} of {self.world}: {text}"
                raise (ValueError(text) if number is None else OSError(number, text)) from cause
        if any(other != facts for _, other in brought):
            raise ValueError(
                f"{what}: the ranks bring different things, do all have the same files and arguments? "
                f"{_differences([other for _, other in brought])}"
            )
        return done


def _differences(facts: list[Any]) -> Any:
    """The entries of dictionaries that differ, by rank; other facts as they are."""
    if not all(isinstance(fact, dict) for fact in facts):
        return facts
    by_name = {name: [fact.get(name) for fact in facts] for fact in facts for name in fact}
    return {name: values for name, values in by_name.items() if any(value != values[0] for value in values)}


def together(what: str, action: Callable[[], tuple[Done, Any]]) -> Done:
    """Run `action` on all ranks of the default process group: `Ranks.together`."""
    return Ranks().together(what, action)
