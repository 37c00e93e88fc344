"""`bitshard run`: one program and its children with the façade, and nothing changed on disk."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from bitshard_cli import installed
from bitshard_cli.console import Mistake, Result, WrongArgument

HELP = "run a script, a module (-m) or a command with the façade, and change nothing on disk"
EXAMPLE = "bitshard run train.py --epochs 1\n  bitshard run accelerate launch --config_file fsdp.yaml train.py"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The program and all that follows it."""
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="[-m] PROGRAM ...", help="and its arguments")


def command_of(program: list[str]) -> list[str]:
    """What is executed: a script or module by this Python, else a command of the PATH."""
    if not program or program == ["-m"]:
        raise WrongArgument(
            "run what? `bitshard run script.py ...`, `bitshard run -m module ...` or `bitshard run command ...`"
        )
    name = program[0]
    if name == "-m" or Path(name).is_file():
        return [sys.executable, *program]
    found = shutil.which(name)
    if found is None or name.endswith(".py"):
        raise Mistake(f"{name}: no such script, and no such command on the PATH")
    return [found, *program[1:]]


def environment() -> dict[str, str]:
    """This process' own, with the façade first where Python looks for modules and metadata; children inherit it."""
    paths = [str(installed.carried()), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run(args: argparse.Namespace) -> Result:
    """Becomes the program: its exit status and signals are those of this process."""
    command = command_of(args.program)
    sys.stdout.flush()
    os.execve(command[0], command, environment())
    raise AssertionError("execve returned")
