"""`bitshard use`: the façade instead of an installed bitsandbytes, in the environment that has this bitshard."""

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
    site = switch.own_site()
    switch.check_first(site)
    found = switch.use(site)
    found["hidden"] = [f"{owner.name} {owner.version} in {owner.site}" for owner in installed.owners_beside(site)]
    text = f"bitsandbytes {found['active']}, bitshard's façade, is active in {found['site']}"
    if not found["changed"]:
        return Result(found, f"{text} already")
    for name in found["hidden"]:
        text += f"\n{name} is as it was, and no longer imported here"
    if found["kept"]:
        text += f"\nbitsandbytes {found['kept']} is kept in {found['kept_in']}: `bitshard unuse` puts it back"
    return Result(found, text)
