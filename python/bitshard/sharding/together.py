"""Something that every rank does for itself: all go on, or all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from bitshard.gather import everyone

Done = TypeVar("Done")


def together(what: str, action: Callable[[], tuple[Done, Any]]) -> Done:
    """Run `action` on every rank: what it did, and facts about it that all must share.

    ValueError on all ranks where one rank's `action` raises, with that rank's error, or where the facts differ. A
    collective of the default process group, where there is one: a rank that dies is seen by its timeout.
    """
    done, facts, failure, cause = None, None, None, None
    try:
        done, facts = action()
    except Exception as error:  # whatever it is, the others wait
        failure, cause = f"{type(error).__name__}: {error}", error
    brought = everyone((failure, facts))
    if isinstance(cause, torch.OutOfMemoryError):
        raise cause
    for rank, (failure, _) in enumerate(brought):
        if failure is not None:
            raise ValueError(f"{what}: rank {rank} of {len(brought)}: {failure}") from cause
    if any(other != facts for _, other in brought):
        raise ValueError(
            f"{what}: the ranks bring different things, do they read the same files? {[other for _, other in brought]}"
        )
    return done
