"""A tiny model on 8 and 16 processes of this machine's CPU (`make worlds`): some minutes, so no part of `make test`.

The worker is tests/fsdp/parts/worlds.py.
"""

import json
import os
import subprocess
import sys

import pytest
from fsdp.launch import WORKERS, free_port, launch, options, passed, results, run
from helpers import warm

WORKER = WORKERS / "parts" / "worlds.py"
CHECKS = ("exact", "planted", "trained", "resumed", "saved")
WORLDS = (8, 16)
LIMIT = 900  # seconds, of sixteen processes on two cores
PATIENCE = 25  # seconds that a rank waits for others: GROUP_TIMEOUT of parts/shared.py


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model's files, and the losses of one process."""
    made = tmp_path_factory.mktemp("worlds")
    run([sys.executable, str(WORKER), *options(made, "alone")], 240)
    passed(results(made, "alone", 1), "make")
    return made


@pytest.fixture(scope="module")
def found(folder):
    """{world: results of its ranks}: 16 resumes what 8 saved, and then 8 what 16 saved."""
    seen = {}
    for world in WORLDS:
        launch(world, "parts/worlds.py", *options(folder, str(world)), timeout=LIMIT)
        seen[world] = results(folder, str(world), world)
    again = [*options(folder, "again"), "--only", "resumed"]
    launch(WORLDS[0], "parts/worlds.py", *again, timeout=LIMIT)
    seen["again"] = results(folder, "again", WORLDS[0])
    return seen


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("world", WORLDS)
def test_world(found, world, check):
    passed(found[world], check)


@pytest.mark.parametrize("world", WORLDS)
def test_each_rank_has_its_part(found, world):
    parts = [rank["exact"]["ok"] for rank in found[world]]
    assert {(part["fsdp"], part["ranks"]) for part in parts} == {("FSDP2", world)}
    assert sum(part["own"] for part in parts) >= parts[0]["packed"]
    assert max(part["own"] for part in parts) <= parts[0]["packed"] / world + 4 * 14 + 1


def test_resumed_by_more_and_by_fewer(found):
    passed(found["again"], "resumed")
    names = {f"checkpoint-{world}" for world in WORLDS}
    assert found[16][0]["resumed"]["ok"].keys() == names == found["again"][0]["resumed"]["ok"].keys()


@pytest.mark.parametrize("world", WORLDS)
def test_one_rank_is_killed(folder, world):
    """No launcher ends the others: each ends with an error of its own, within the group's timeout."""
    env = {**warm.without_launcher(), **warm.WORKER, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    env["MASTER_PORT"] = str(free_port())
    command = [warm.python(), str(WORKER), *options(folder, f"killed{world}"), "--only", "killed"]
    ranks = [
        subprocess.Popen(command, env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}, stderr=subprocess.DEVNULL)
        for r in range(world)
    ]
    try:
        codes = [rank.wait(LIMIT) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes[world - 2] != 0 and not os.path.exists(folder / f"killed{world}.{world - 2}")
    for rank in set(range(world)) - {world - 2}:
        seen = json.loads((folder / f"killed{world}.{rank}").read_text())
        assert codes[rank] == 1 and "no error" not in seen["error"], (rank, seen)
        assert seen["seconds"] < PATIENCE + 10, (rank, seen)


def test_nothing_grows_with_ranks_and_layers(tmp_path):
    """Calls of rank 0; but for torch's own checkpoints, whose planner on rank 0 has the plans of all ranks."""
    script, found = WORKERS.parents[1] / "benchmarks" / "worlds.py", tmp_path / "shares.json"
    run([sys.executable, str(script), "--ranks", "2,4", "--layers", "2,4", "--json", str(found)], LIMIT, fresh=True)
    shares = json.loads(found.read_text())
    assert shares.pop("checkpoint") > 0.02
    assert max(map(abs, shares.values())) < 0.003, shares
