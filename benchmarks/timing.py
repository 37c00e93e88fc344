"""Timing shared by the benchmarks: medians, contestants in processes of their own, what the machine is, tables."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["BITSHARD_PLUGIN"] = "0"  # an original bitsandbytes runs its own kernels
ROOT = Path(__file__).resolve().parent.parent


def median_ms(call: Callable[[int], object], seconds: float = 0.2, at_least: int = 5, at_most: int = 100) -> float:
    """Median milliseconds of call(i), i = 0, 1, ..., for work that is done when it returns; three calls warm up."""
    for i in range(3):
        begin = time.perf_counter()
        call(i)
        once = time.perf_counter() - begin
    times = []
    for i in range(max(at_least, min(at_most, int(seconds / max(once, 1e-6))))):
        begin = time.perf_counter()
        call(i)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


class Contestant:
    """A process that answers one JSON request per line with one JSON line, so that contestants run one at a time."""

    def __init__(self, command: list[str], environment: dict[str, str]):
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"{self.process.args} ended with {self.process.wait()}")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def serve(answer: Callable[..., dict]) -> None:
    """The other end of Contestant."""
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


def cpu_name_and_flags() -> tuple[str, list[str]]:
    """Model name of the CPU and its vector instruction flags."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    fields = dict(reversed([tuple(part.strip() for part in line.split(":", 1)) for line in lines if ":" in line]))
    wanted = ("avx", "fma", "f16c", "amx", "asimd", "i8mm", "bf16", "sve")
    flags = [flag for flag in fields.get("flags", fields.get("Features", "")).split() if flag.startswith(wanted)]
    return fields.get("model name", platform.processor() or platform.machine()), flags


def commit(*sources: str) -> str:
    """Short hash of the checkout, marked where `sources` (git pathspecs) differ from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno", "--", *sources], capture_output=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.strip() + (" with uncommitted changes" if changed.strip() else "")


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown that also reads well as text: columns padded to equal width, numbers to the right."""
    cells = [header, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    right = [all(row[i][:1].isdigit() or row[i] == "-" for row in rows) for i in range(len(header))]

    def line(row: list[str]) -> str:
        padded = (cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True))
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if r else "-") for w, r in zip(widths, right, strict=True)) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])
