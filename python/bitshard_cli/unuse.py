"""`bitshard unuse`: what `bitshard use` took away is put back."""

from __future__ import annotations

import argparse

from bitshard_cli import switch
from bitshard_cli.console import Result

HELP = "put the bitsandbytes back that `use` exchanged, byte for byte and without a network"
EXAMPLE = "bitshard unuse"


def arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(args: argparse.Namespace) -> Result:
    """Puts back, and says what is active."""
    found = switch.unuse(switch.own_site())
    if not found["changed"]:
        return Result(found, f"nothing to put back: `bitshard use` exchanged nothing in {found['site']}")
    back = f"bitsandbytes {found['put_back']} is" if found["put_back"] else "there was none before, so none is"
    return Result(found, f"{back} active in {found['site']}")
