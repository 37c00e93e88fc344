"""Switches in the environment, for scripts that nobody wants to edit: what they are, and their one place of reading.

    BITSHARD_EXPERTS=1    as bitshard.experts.enable() before the model is loaded
    BITSHARD_FUSE=1       as bitshard.lora.fuse(model)
    BITSHARD_GRAPHS=1     as bitshard.graphs.enable(model)
    BITSHARD_MERGE_AWARE=1    as bitshard.lora.merge_aware(model)
    BITSHARD_ARITHMETIC=int8    as bitshard.arithmetic.enable(model)
    BITSHARD_NO_LOSS_WAIT=1    as TrainingArguments(logging_nan_inf_filter=False) where steps are graphs
    BITSHARD_FAST=1       FUSE, GRAPHS and NO_LOSS_WAIT; a 0 for one of them leaves that one out
    BITSHARD_PAD_TO_MULTIPLE_OF=64    the step of bitshard.graphs.enable(model, pad_to_multiple_of=64)

All but EXPERTS need a model. Layers with packed weights know when one begins to train, and call what stands in
`acting` (`bitshard.huggingface.at_train`, which is above them); it is None where no such switch is on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

logger = logging.getLogger("bitshard")


class Switches(NamedTuple):
    """For each thing the variable that turns it on; "" where none does."""

    experts: str = ""
    fuse: str = ""
    graphs: str = ""
    merge_aware: str = ""
    arithmetic: str = ""
    no_loss_wait: str = ""


class Acts(NamedTuple):
    """What a layer with a packed weight calls: in its `train(True)`, and in its first forward with gradients. And what
    is called where a step is launched as graphs."""

    trains: Callable[[Any], None]
    forwards: Callable[[Any], None]
    launches: Callable[[], None]


on = Switches()  # as last read
acting: Acts | None = None  # where `on` has something that needs a model
_acts: Acts | None = None  # since `attend`, which `import bitshard` calls
_warned: set[tuple[str, str]] = set()


def read() -> Switches:
    """What the environment says now. A line for each value that is none, once, on rank 0."""
    global on, acting
    fast = _asked("BITSHARD_FAST")
    by_fast = _by("BITSHARD_FUSE", fast), _by("BITSHARD_GRAPHS", fast)
    no_wait = _by("BITSHARD_NO_LOSS_WAIT", fast)
    on = Switches(_by("BITSHARD_EXPERTS"), *by_fast, _by("BITSHARD_MERGE_AWARE"), _arithmetic(), no_wait)
    acting = _acts if any(on[1:]) else None
    return on


def padding() -> int | None:
    """The step to which graphs pad batches, as BITSHARD_PAD_TO_MULTIPLE_OF says; None where it says none."""
    name = "BITSHARD_PAD_TO_MULTIPLE_OF"
    value = os.environ.get(name, "")
    if value.isdecimal() and int(value) > 0:
        return int(value)
    if value:
        _warn(name, value, "a number of tokens from 1 on")
    return None


def attend(acts: Acts) -> None:
    """Let layers call `acts` where a switch that needs a model is on."""
    global _acts
    _acts = acts
    read()


def _by(name: str, fast: bool | None = None) -> str:
    """The variable that turns on what `name` is for, by itself or because BITSHARD_FAST does (`fast`)."""
    asked = _asked(name)
    if asked is None and fast:
        return "BITSHARD_FAST"
    return name if asked else ""


def _arithmetic() -> str:
    """The variable, where it asks for 8-bit arithmetic."""
    name = "BITSHARD_ARITHMETIC"
    value = os.environ.get(name, "")
    if value == "int8":
        return name
    if value:
        _warn(name, value, "int8 or nothing")
    return ""


def _asked(name: str) -> bool | None:
    """What a variable says: on, off, or None for nothing."""
    value = os.environ.get(name, "")
    if value in ("", "0", "1"):
        return value == "1" if value else None
    _warn(name, value, "1 (on), 0 (off) or nothing")
    return None


def _warn(name: str, value: str, expected: str) -> None:
    """A line about a value that is none, once, on rank 0."""
    if (name, value) not in _warned and os.environ.get("RANK", "0") == "0":
        _warned.add((name, value))
        logger.warning("%s=%s is ignored: expected %s", name, value, expected)
