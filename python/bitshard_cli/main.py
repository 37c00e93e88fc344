"""The command line itself: `bitshard COMMAND ...`."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from bitshard_cli import console

# Each is a module here with HELP, EXAMPLE, arguments(parser) and run(args), which gives data, text and a status.
COMMANDS = ("plan", "quantize", "merge", "inspect", "report", "use", "unuse", "run")
OWN_ARGUMENTS = "run"  # all that follows it belongs to the program that it starts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bitshard", description="4-bit weights that survive sharding.")
    parser.add_argument("--version", action="store_true", help="the version, and nothing else")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name in COMMANDS:
        _add(commands, name, importlib.import_module(f"bitshard_cli.{name}"))
    return parser


def _add(commands: argparse._SubParsersAction, name: str, module: ModuleType) -> None:
    own = commands.add_parser(
        name,
        help=module.HELP,
        description=module.HELP,
        epilog=f"example:\n  {module.EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.arguments(own)
    if name != OWN_ARGUMENTS:
        own.add_argument("--json", action="store_true", help="the result as JSON on stdout")
    own.set_defaults(run=module.run, json=False)


def _parsed(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """argparse would take options behind `run` for its own where they come first, such as -m."""
    if words[:1] == [OWN_ARGUMENTS] and words[1:2] not in (["-h"], ["--help"]):
        args = parser.parse_args(words[:1])
        args.program = words[1:]
        return args
    return parser.parse_args(words)


def _version() -> str:
    import importlib.metadata

    return importlib.metadata.version("bitshard")


def _print(result: console.Result, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result.data, indent=2, default=str))
    elif result.text:
        print("\n".join(map(console.plain, result.text.split("\n"))))
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 for what a line on stderr says, 2 for wrong arguments, 130 behind Ctrl-C."""
    try:
        parser = _parser()
        args = _parsed(parser, list(sys.argv[1:] if arguments is None else arguments))
        if args.version:
            print(_version())
            return 0
        if args.command is None:
            parser.print_help()
            return 0
        result = console.Result(*args.run(args))
        _print(result, args.json)
        return result.status
    except KeyboardInterrupt:
        exec("")  # an interrupt inside of exec(), as imports have it, would else end Python by the signal
        print(console.INTERRUPTED, file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if console.wants_traceback():
            raise
        print(f"bitshard: {console.line_of(error)}", file=sys.stderr)
        return 2 if isinstance(error, console.WrongArgument) else 1


if __name__ == "__main__":
    sys.exit(main())
