"""Launches of several processes that a benchmark watches, and ends with all that they have started."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 20.0  # seconds that processes have to end when they are asked to
SHAPE = {"hidden": 4096, "intermediate": 14336, "layers": 32, "heads": 32, "kv_heads": 8, "vocabulary": 32000}  # 8B


def add_shape(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Options for each number of SHAPE."""
    for name, size in {**SHAPE, **defaults}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)


def has_gpus() -> bool:
    import torch

    return torch.cuda.is_available()


def accelerate(ranks: int) -> list[str]:
    """`accelerate launch` before the name of the script: as it is for one process, FSDP2 for more.

    Weights are made on each rank, so that none may be empty there. On a CPU accelerate takes DDP in silence for FSDP;
    examples/cpu_fsdp.py, which comes before the script there, keeps it to FSDP.
    """
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_machines", "1", "--num_processes", str(ranks)]
    if ranks == 1:
        plain = ["--mixed_precision", "no", "--dynamo_backend", "no"]
        return [*command, *plain] if has_gpus() else [*command, *plain, "--cpu"]
    command += ["--config_file", str(ROOT / "examples" / "fsdp2.yaml"), "--main_process_port", "0"]
    command += ["--fsdp_cpu_ram_efficient_loading", "false"]
    return command if has_gpus() else [*command, str(ROOT / "examples" / "cpu_fsdp.py")]


def torchrun(ranks: int) -> list[str]:
    """`torchrun` before the name of the script; plain Python for one process."""
    if ranks == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def environment(folder: str | None = None, **variables: str) -> dict[str, str]:
    """Of a worker: `folder`, if any, is first on the path; of BITSHARD_... only what `variables` has."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("BITSHARD_")}
    paths = [folder, str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    found.update(PYTHONPATH=os.pathsep.join(filter(None, paths)), BITSHARD_PLUGIN="0")
    found.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not has_gpus():
        found["OMP_NUM_THREADS"] = "1"
    return {**found, **variables}


class Records:
    """Lines of JSON in a file to which several processes add."""

    def __init__(self, file: Path):
        self.file = file
        self._at = file.stat().st_size if file.exists() else 0

    def add(self, record: dict) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def new(self) -> list[dict]:
        """Whole lines that are there since the last call, or since this was made."""
        if not self.file.exists():
            return []
        with self.file.open("rb") as file:
            file.seek(self._at)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def watched(command: list[str], env: dict[str, str], log: Path, allow: Callable[[float], str]) -> tuple[int, str]:
    """Run `command`; its status, and why it was ended, or "".

    allow: seconds since the start -> "" or the reason to end it now; called five times a second.
    """
    begun = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    reason = ""
    try:
        while process.poll() is None and not reason:
            time.sleep(0.2)
            reason = allow(time.monotonic() - begun)
    finally:
        if process.poll() is None:
            end(process)
    return process.returncode, reason


def end(process: subprocess.Popen) -> None:
    """End it and all below it: torchrun's ranks are sessions of their own, which outlive a launcher that is killed."""
    below = descendants(process.pid)
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in below:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):  # it has just ended
            continue
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def telling_lines(log: Path, count: int = 40) -> str:
    """Of a launch that failed: where its threads were when it hung, or the first traceback, behind which comes that of
    the launcher, or the last lines."""
    lines = log.read_text(errors="replace").splitlines()
    if hung := [i for i, line in enumerate(lines) if line.startswith("Timeout (")]:  # faulthandler's
        return "\n".join(lines[hung[0] :][: 10 * count])
    found = [i for i, line in enumerate(lines) if "Traceback (most recent call last)" in line] or [len(lines) - count]
    return "\n".join(lines[max(found[0], 0) : [*found, len(lines)][1]][-count:])
