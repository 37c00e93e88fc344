"""Switches of the environment, read again within a test, and a recorder in the place of `bitshard.graphs.enable`."""

import contextlib

import pytest
from bitshard import graphs
from bitshard.huggingface import at_train
from bitshard.process import switches

NAMES = ("BITSHARD_EXPERTS", "BITSHARD_FUSE", "BITSHARD_GRAPHS", "BITSHARD_MERGE_AWARE")
NAMES += ("BITSHARD_ARITHMETIC", "BITSHARD_NO_LOSS_WAIT", "BITSHARD_FAST")


@contextlib.contextmanager
def read_as(**values: str):
    """BITSHARD_<NAME> by name while this is open, beside the switches that are set; they do what they do."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in values.items():
                patch.setenv(f"BITSHARD_{name}", value)
            switches.read()
            yield
    finally:
        switches.read()


@contextlib.contextmanager
def set_to(**values: str):
    """BITSHARD_<NAME> by name while this is open, and no other switch; yields what `graphs.enable` was called with."""
    enabled = []
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in NAMES:
                patch.delenv(name, raising=False)
            for name, value in values.items():
                patch.setenv(f"BITSHARD_{name}", value)
            patch.setattr(graphs, "enable", enabled.append, raising=False)
            patch.setattr(at_train, "_missed", False)
            switches.read()
            yield enabled
    finally:
        switches.read()
