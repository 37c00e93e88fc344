"""Wall and CPU time of each test: a plugin that records them, and a program that prints the slowest.

    PYTHONPATH=tests make test PYTEST="-p helpers.times --times times.jsonl"
    python tests/helpers/times.py times.jsonl

CPU time is that of the test with its fixtures, of processes that it waited for, and of the forks of the server of
warm.py that its lane asked for. It means the same beside other work; wall time does not.
"""

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption("--times", help="file that gets a line of JSON for each test: name, wall and CPU seconds")


def spent() -> float:
    """CPU seconds of this process, of its children that have ended, and of the server's forks for it."""
    from helpers import warm

    lane = {"cpu": os.environ.get("PYTEST_XDIST_WORKER", "")}
    return sum(os.times()[:4]) + sum(warm.ask(lane, server).get("cpu", 0.0) for server in (warm.PROGRAM, warm.BARE))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    if not item.config.getoption("--times"):
        yield
        return
    began, before = time.monotonic(), spent()
    yield
    line = json.dumps([item.nodeid, round(time.monotonic() - began, 2), round(spent() - before, 2)])
    with open(item.config.getoption("--times"), "a") as file:
        file.write(line + "\n")


def table(rows: list[tuple[str, float, float]], most: int) -> str:
    """Markdown: the tests with most CPU time, then the files with most."""
    files, walls = Counter(), Counter()
    for name, wall, cpu in rows:
        files[name.partition("::")[0]] += cpu
        walls[name.partition("::")[0]] += wall
    slowest = sorted(rows, key=lambda row: -row[2])[:most]
    lines = ["| test (the first of a fixture has its time) | CPU s | wall s |", "|---|---|---|"]
    lines += [f"| {name.removeprefix('tests/')} | {cpu:.1f} | {wall:.1f} |" for name, wall, cpu in slowest]
    lines += ["", "| file | CPU s | wall s |", "|---|---|---|"]
    lines += [
        f"| {name.removeprefix('tests/')} | {cpu:.1f} | {walls[name]:.1f} |" for name, cpu in files.most_common(20)
    ]
    return "\n".join([*lines, f"| all, {len(rows)} tests | {files.total():.0f} | |"])


if __name__ == "__main__":
    print(table([tuple(json.loads(line)) for line in Path(sys.argv[1]).read_text().splitlines()], 30))
