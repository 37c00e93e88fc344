"""`bitshard use`: the façade instead of an installed bitsandbytes."""

from __future__ import annotations

import argparse

from bitshard_cli import installed, switch
from bitshard_cli.console import Result

HELP = "exchange an installed bitsandbytes for bitshard's façade; `unuse` puts it back"
EXAMPLE = "bitshard use"


def arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(args: argparse.Namespace) -> Result:
    """Exchanges, and says what is where."""
    found = switch.use(switch.site_of(list(installed.owners())))
    text = f"bitsandbytes {found['active']}, bitshard's façade, is active in {found['site']}"
    if not found["changed"]:
        return Result(found, f"{text} already")
    if found["kept"]:
        text += f"\nbitsandbytes {found['kept']} is kept in {found['kept_in']}: `bitshard unuse` puts it back"
    return Result(found, text)
