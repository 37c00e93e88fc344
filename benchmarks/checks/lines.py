"""A line for each check of a script of this folder, then a count."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable

import torch


def parser(doc: str | None, seconds: float) -> argparse.ArgumentParser:
    """With the arguments that `run` takes."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--only", default="", help="checks whose name has this")
    made.add_argument("--seconds", type=float, default=seconds)
    return made


def run(cases: Iterable[tuple[str, Callable[[], str]]], options: argparse.Namespace) -> int:
    """1 where a check says what is wrong, or none ran."""
    begin, done, failed = time.monotonic(), 0, 0
    for name, check in cases:
        if options.only not in name:
            continue
        if time.monotonic() - begin > options.seconds:
            print(f"stopped after {options.seconds:.0f} s")
            break
        try:
            wrong = check()
            torch.cuda.synchronize()
        except RuntimeError as error:
            wrong = str(error).splitlines()[0]
        done, failed = done + 1, failed + bool(wrong)
        print(f"{'WRONG' if wrong else 'ok':5} {name} {wrong}", flush=True)
    print(f"{done} checks, {failed} wrong, {time.monotonic() - begin:.0f} s, {torch.cuda.get_device_name()}")
    return int(failed > 0 or done == 0)
