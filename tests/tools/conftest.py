"""`train(which, tool, launcher, *options)`: the results of workers/train.py on each rank, run once per session."""

import functools

import beside
import pytest


@pytest.fixture(scope="session")
def train(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")

    @functools.cache
    def run(which: str, tool: str, launcher: str, *options: str) -> list[dict]:
        out = folder / "-".join([which, tool, launcher, *options]).replace("--", "")
        tools = [tool] if tool else []
        return beside.run(which, tools, "train.py", "--model", str(out / "model"), *options, out=out, launcher=launcher)

    return run
