"""What all commands share: a user's mistake as one line, and progress."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

TRACEBACK = "BITSHARD_TRACEBACK"
INTERRUPTED = "bitshard: interrupted"


class Mistake(Exception):
    """What the user can mend, in one line."""


class WrongArgument(Mistake):
    """An argument, or several together, that make no sense whatever the files are: exit status 2, as argparse's own."""


@contextmanager
def of_arguments() -> Iterator[None]:
    """While it lasts, a ValueError is a WrongArgument."""
    try:
        yield
    except ValueError as error:
        raise WrongArgument(str(error)) from error


def plain(line: str) -> str:
    """A line of characters that only show something: names in files may have others, which move a cursor."""
    if line.isprintable():
        return line
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode() for each in line
    )


def size(nbytes: int) -> str:
    """Bytes for people: 5.54 GB, 12.3 MB."""
    for unit, bytes_of, digits in (("TB", 1e12, 2), ("GB", 1e9, 2), ("MB", 1e6, 1), ("kB", 1e3, 1)):
        if nbytes >= bytes_of:
            return f"{nbytes / bytes_of:.{digits}f} {unit}"
    return f"{nbytes} bytes"


class Result(NamedTuple):
    """What a command found: for programs, for people, and the exit status."""

    data: dict[str, Any]
    text: str
    status: int = 0


# Whose own words are for the user; others name their kind too, for they are rather faults of this program.
_IN_PLAIN_WORDS = (Mistake, ValueError, NotImplementedError, ImportError)


def line_of(error: BaseException) -> str:
    """One line for an error that ended a command."""
    return plain(_line_of(error))


def _line_of(error: BaseException) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError):
        if error.strerror and error.filename is not None:
            return f"{error.filename}: {error.strerror}"
        return error.strerror or words
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return f"{package} is not installed: pip install {package}"
    if isinstance(error, _IN_PLAIN_WORDS):
        return words
    return f"{type(error).__name__}: {words} ({TRACEBACK}=1 shows where)"


def load(*names: str) -> ModuleType:
    """Import modules that bring large libraries with them, and give the last. Ctrl-C ends the process meanwhile, with
    its line: an exception inside of torch's own start would abort it."""
    own = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if own:
        signal.signal(signal.SIGINT, _leave)
    try:
        for name in names:
            found = importlib.import_module(name)
    finally:
        if own:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    return found


def _leave(*_: object) -> None:
    os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(130)


@contextmanager
def quiet() -> Iterator[None]:
    """While it lasts, transformers says nothing but errors, and has bars on a terminal only."""
    logging = load("transformers.utils.logging")
    said, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(said)
        if bars:
            logging.enable_progress_bar()


def require_device_and_size(args: Any) -> None:
    """WrongArgument unless --device is one that torch has, and --max-shard-size a size."""
    with of_arguments():
        load("bitshard.convert.folder").device_of(args.device)
        load("bitshard.sharding.checkpoints.files").byte_count(args.max_shard_size)


def wants_traceback() -> bool:
    """Whether whoever looks for the cause of an error asked for more than its line."""
    return os.environ.get(TRACEBACK, "0") not in ("", "0")


def progress(steps: Iterable, total: int | None = None, unit: str = "it", label: str = "") -> Any:
    """`steps` with a bar on the terminal's stderr; without a terminal, or without tqdm, as they are."""
    try:
        from tqdm import tqdm
    except ImportError:
        return steps
    return tqdm(steps, total=total, unit=unit, desc=label or None, disable=None, leave=False)


def checking(names: Iterable[str], total: int) -> Iterable[str]:
    """A bar over the tensors whose values are looked at."""
    return progress(names, total=total, unit="tensor", label="Checking values")
