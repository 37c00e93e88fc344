"""`bitshard report`: what is installed, what is used, what is wrong and the command that fixes it."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from bitshard_cli import console, installed, switch, tried
from bitshard_cli.console import Mistake, Result

HELP = "what is installed, what is used, what is wrong and the command that fixes it"
EXAMPLE = "bitshard report"
IN_A_TREE = "in bitshard's source tree"


class Row(NamedTuple):
    """A line of the report, and the command that mends what is wrong in it."""

    name: str
    text: str
    mend: str | None = None


def arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def version(distribution: str) -> str | None:
    """That of an installed distribution; None: there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _exchange() -> str:
    """The command that makes the façade active."""
    try:
        installed.carried()
    except Mistake:
        return f"pip install --force-reinstall --no-deps ./python/bitsandbytes   ({IN_A_TREE})"
    try:
        switch.check_first(switch.own_site())
    except Mistake:
        return "bitshard run PROGRAM   (`bitshard use` says why it cannot exchange the package here)"
    return "bitshard use"


def _torch() -> Row:
    try:
        torch = console.load("torch")
    except ImportError as error:
        return Row("torch", f"cannot be imported: {error}", "pip install torch")
    return Row("torch", f"{torch.__version__}, CUDA {'available' if torch.cuda.is_available() else 'not available'}")


def _core() -> list[Row]:
    rebuild = f"pip install --force-reinstall --no-deps .   ({IN_A_TREE})"
    try:
        _C = console.load("torch", "bitshard", "bitshard._C")
    except ImportError as error:
        causes = {"BITSHARD_ISA": "unset BITSHARD_ISA", "needs torch >= 2.10": "pip install 'torch>=2.10'"}
        mends = [mend for cause, mend in causes.items() if cause in str(error)]
        return [Row("C core", f"cannot be imported: {error}", (mends or [rebuild])[0])]
    usable = ", ".join(_C.isas())
    rows = [Row("C core", _C.version), Row("CPU kernels", f"{_C.isa()} (usable: {usable}; BITSHARD_ISA= lowers it)")]
    cuda = _C.cuda_state()
    if not cuda["built"]:
        import torch

        mend = f"install the CUDA toolkit, then {rebuild}" if torch.cuda.is_available() else None
        return [*rows, Row("CUDA kernels", "not in this build (no nvcc when it was made)", mend)]
    state = cuda["error"] or f"driver {cuda['driver']}"
    return [*rows, Row("CUDA kernels", f"{cuda['architectures']}; {state}")]


def _bitsandbytes() -> list[Row]:
    """What an exchange left undone, what is wrong, the active one, the plug-in, what is kept."""
    found, place = list(installed.owners()), installed.imported()
    undone, kept = _kept()
    wrong = [Row("bitsandbytes", line, line.rpartition(": ")[2]) for line in installed.complaints()]
    plug_in = [_plugin()] if place is not None and found and not found[0].is_facade else []
    return [*undone, *wrong, _imported(found, place), *plug_in, *kept]


def _imported(found: list[installed.Owner], place: Path | None) -> Row:
    if place is None:
        text = "none: transformers, peft and trl will not find 4-bit and 8-bit support"
        return Row("bitsandbytes", text, _exchange())
    if not found:
        text = "a folder on the path without an installed distribution: accelerate will not accept it"
        return Row("bitsandbytes", text, _exchange())
    return _active(found[0])


def _active(owner: installed.Owner) -> Row:
    where = ", editable" if owner.editable else ""
    if not owner.is_facade:
        text = f"{owner.version}{where}: upstream, so bitshard is not used by transformers, peft and trl"
        return Row("bitsandbytes", text, _exchange())
    text = f"{owner.version}{where}: bitshard's façade"
    try:
        wanted = installed.carried_version()
    except Mistake:
        return Row("bitsandbytes", text)
    if owner.version != wanted:
        return Row("bitsandbytes", f"{text}, of another version than this engine's {wanted}", _exchange())
    return Row("bitsandbytes", text)


def _plugin() -> Row:
    """What upstream's import in a process of its own makes of the plug-in."""
    code = "import bitsandbytes; from bitshard_cli import plugin; print(plugin.state())"
    try:
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return Row("plug-in", "unknown: importing bitsandbytes took more than two minutes")
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["no message"])[-1]
        return Row("plug-in", f"unknown: bitsandbytes cannot be imported: {last}")
    return Row("plug-in", ran.stdout.strip().splitlines()[-1])


def _kept() -> tuple[list[Row], list[Row]]:
    """What `use` or `unuse` was interrupted in, and what is kept."""
    site = installed.home()
    try:
        journal = switch.kept(site)
    except Mistake as error:
        return [Row("kept", str(error))], []
    if journal is not None and journal.phase != "used":
        begun = {"using": "bitshard use", "unusing": "bitshard unuse"}[journal.phase]
        return [Row("kept", f"`{begun}` was interrupted in {site}", begun)], []
    if journal is None or not journal.version:
        return [], []
    text = f"bitsandbytes {journal.version} in {site / switch.KEPT}"
    newer = next((owner.version for owner in installed.owners_in(site) if not owner.is_facade), None)
    if newer is None:
        return [], [Row("kept", f"{text}: `bitshard unuse` puts it back")]
    text += f", which pip has replaced by {newer} since: no longer needed, `rm -r {site / switch.KEPT}` deletes it"
    return [], [Row("kept", text)]


def _tried() -> list[Row]:
    """Which versions of the stack were tested, and a warning for installed ones outside that range."""
    rows = []
    for package, versions in tried.TRIED.items():
        own = version(package)
        if own is None:
            continue
        doubt = tried.beyond(package, own)
        warning = f". Warning: {own} is {doubt}; `make newest` in the source tree tests it" if doubt else ""
        rows.append(Row("tried with", f"{package} {', '.join(versions)}{warning}"))
    return rows


def rows() -> list[Row]:
    """The report."""
    found = [
        Row("python", f"{platform.python_version()} ({sys.executable})"),
        Row("bitshard", version("bitshard") or "not installed"),
        _torch(),
    ]
    if found[-1].mend is None:
        found += _core()
    found += _bitsandbytes()
    return found + _tried()


def run(args: argparse.Namespace) -> Result:
    """The report; the status is 1 if something is wrong."""
    found = rows()
    mend = next((row.mend for row in found if row.mend), None)
    lines = [f"{row.name:<14}{row.text}" for row in found]
    lines += ["", f"To mend: {mend}" if mend else "Nothing is wrong."]
    data = {"rows": [row._asdict() for row in found], "mend": mend}
    return Result(data, "\n".join(lines), 1 if mend else 0)
