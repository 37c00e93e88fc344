"""Versions of the stack with which the whole test suite was run: `make oldest`, `make test` and `make newest`.

The first is the oldest version that is supported, the last the newest that existed.
"""

from __future__ import annotations

import re

TRIED = {
    "torch": ("2.10.0", "2.13.0", "2.15.0"),
    "transformers": ("5.17.0", "5.23.0", "5.24.0"),
    "peft": ("0.21.0", "0.21.2"),
    "accelerate": ("1.15.0",),
    "trl": ("1.16.0",),
}


def minor(version: str) -> tuple[int, ...]:
    """The first two numbers of a version; only these are compared: (2, 13) of "2.13.0+cpu"."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def beyond(package: str, version: str) -> str | None:
    """Why a version of a package of `TRIED` is untested: it is newer or older than all of them; else None."""
    oldest, newest = TRIED[package][0], TRIED[package][-1]
    if minor(version) > minor(newest):
        return f"newer than {newest}, the newest that was tried"
    if minor(version) < minor(oldest):
        return f"older than {oldest}, the oldest that was tried"
    return None
