"""`bitshard inspect`: what is in safetensors files."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from bitshard_cli import console
from bitshard_cli.console import Result

HELP = "formats, shapes, storage, scales and sizes of safetensors files, and what is wrong with them and their values"
EXAMPLE = "bitshard inspect Llama-3-8B-nf4"


def arguments(parser: argparse.ArgumentParser) -> None:
    """What is looked at."""
    parser.add_argument("path", type=Path, help="a folder of a model, or one file")
    parser.add_argument("--tensors", action="store_true", help="a line for every weight")
    parser.add_argument("--headers", action="store_true", help="read headers only, no values: at once")
    parser.add_argument("--sums", action="store_true", help="read everything: a checksum for every weight")


def bar(names: Iterable[str], total: int) -> Iterable[str]:
    """A bar over the tensors."""
    return console.progress(names, total=total, unit="tensor", label="Reading")


def run(args: argparse.Namespace) -> Result:
    """Looks, and says what it found; the status is 1 where something is wrong."""
    found = console.load("bitshard.convert.look").look(
        args.path, sums=args.sums, progress=bar, check_values=not args.headers
    )
    lines = [found.summary()]
    lines += [f"  {line}" for line in found.kinds()]
    if args.tensors or args.sums:
        lines += [f"  {weight.line()}" for weight in found.weights]
    lines += [f"wrong: {complaint}" for complaint in found.complaints]
    return Result(found.data(), "\n".join(map(console.plain, lines)), 1 if found.complaints else 0)
