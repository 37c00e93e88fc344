"""Graphs with collectives in them: they go before the process group does, and a rank that waits too long ends.

NCCL does not give a communicator up while a graph has it inside, so `destroy_process_group` would wait for ever. And
torch's own watchdog sees the collectives that torch calls, not those that a graph launches. A thread looks four times a
second: is somebody destroying the process group? Has the last launch been running for longer than the group's timeout?
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from typing import Any

import torch

from bitshard.process import foreign

PERIOD = 0.25  # s
TIMEOUT = 600.0  # s, where the group has none; torch's own for NCCL

_known: weakref.WeakSet = weakref.WeakSet()
_last: tuple[Any, float] | None = None  # event behind the last launch, and when that was
_thread: threading.Thread | None = None


def knows(enabled: Any) -> None:
    """Drop the graphs of `enabled` in time; from the first on, a thread looks."""
    global _thread
    _known.add(enabled)
    distributed = torch.distributed
    if _thread is None and distributed.is_available() and distributed.is_initialized():
        _thread = threading.Thread(target=_watch, args=(timeout(),), name="bitshard graphs", daemon=True)
        _thread.start()


def launched(device: torch.device) -> None:
    """A graph with collectives was launched on the current stream."""
    global _last
    if device.type == "cuda":
        event = torch.cuda.Event()
        event.record()
        _last = event, time.monotonic()


def drop_all() -> None:
    """Drop all graphs; also at the interpreter's exit, before torch frees its communicators."""
    with contextlib.ExitStack() as every:  # also where one of them raises
        for enabled in list(_known):
            every.callback(enabled.drop)


atexit.register(drop_all)


def timeout() -> float:
    """The timeout of the default group's collectives in seconds."""
    group = torch.distributed.group.WORLD
    try:
        return group._get_backend(torch.device("cuda")).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        return TIMEOUT


def _watch(limit: float) -> None:
    while True:
        time.sleep(PERIOD)
        if destroying():
            drop_all()
        if late(limit):
            _end(limit)


def destroying() -> bool:
    """Whether a thread is in torch's destroy_process_group."""
    return foreign.runs_in_a_thread(foreign.TORCH_DESTROYS)


def late(limit: float) -> bool:
    """Whether the last launch has been running for more than `limit` seconds."""
    global _last
    last = _last
    if last is None:
        return False
    event, begin = last
    if event.query():
        _last = None if _last is last else _last
        return False
    return time.monotonic() - begin > limit


def _end(limit: float) -> None:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    sys.stderr.write(
        f"bitshard.graphs: rank {rank} has waited for {limit:.0f} s, the timeout of its process group, for a step that "
        "was launched as a graph: another rank is missing or late (init_process_group(timeout=...))\n"
    )
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGABRT)
