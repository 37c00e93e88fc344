"""The entry point `bitsandbytes.backends`: an installed upstream calls `register` at the end of its own import.

An exception there would end upstream's import, so there is none: where the kernels cannot be registered, upstream's own
stay, and `state` says why. Versions are read from metadata, because upstream sets its own only behind this call.
"""

from __future__ import annotations

import os

SWITCH = "BITSHARD_PLUGIN"
_state = "not called: this bitsandbytes knows no entry points `bitsandbytes.backends`"


def state() -> str:
    """What became of it in this process, in one line."""
    return _state


def register() -> None:
    """bitshard's kernels for upstream's ops, all or none."""
    global _state
    if os.environ.get(SWITCH, "1") == "0":
        _state = f"off by {SWITCH}=0: upstream's own kernels"
        return
    try:
        from bitshard import bnb_ops

        _state = bnb_ops.replace_kernels() + f"; {SWITCH}=0 switches it off; sharding needs `bitshard use`"
    except Exception as error:
        _state = f"upstream's own kernels stay: {' '.join(str(error).split()) or type(error).__name__}"
