"""Saving from sharded models: checkpoints for everybody, layer by layer; torch's own in every way of sharding; faults.

The workers are in tests/fsdp/saving: streamed.py and checkpoints.py under torchrun, compared with alone.py.
"""

import json
import sys
import time

import pytest
import upstream
from fsdp.launch import WORKERS, launch, run

SAVING = WORKERS / "saving"
LIMIT = 240
WAYS = "whole cut native native_sharded fsdp1 fsdp1_orig parts".split()
KINDS = {
    "whole": "dora bias trained",
    "cut": "dora bias trained",
    "native": "bias",
    "fsdp1": "dora",
    "fsdp1_orig": "bias",
}
STREAMED = [
    *(f"{what}_{way}" for way in WAYS for what in ("base", "merged", "values")),
    *(f"base_{way}_{cell}" for way in ("whole", "native") for cell in ("bf16-plain-fp32", "fp32-nested-bf16")),
    *(f"{what}_{way}_{kind}" for way in KINDS for kind in KINDS[way].split() for what in ("merged", "values")),
    *"values_whole_fp32 values_whole_none rotten_whole rotten_native memory_whole memory_native memory_fsdp1".split(),
    *"misuse full_disk no_room unwritable".split(),
]
STREAMED_FOUR = "base_whole merged_whole values_whole base_replicas".split()
FORMS = {2: ("fsdp2", "fsdp1", "fsdp1_orig"), 1: ("whole", "fsdp2"), 3: ("fsdp2_bytes", "fsdp2")}
CHECKPOINTS = {
    world: [f"{what}_{form}" for what in ("save", "load", "plain_load", "full", "adapters") for form in FORMS[world]]
    for world in FORMS
}
CHECKPOINTS[2] += [
    f"fault_{name}" for name in "without_scales of_another_shape of_another_format truncated without_index".split()
]
CHECKPOINTS[2] += ["default_planner"]
CHECKPOINTS[3] += ["plain_load_fsdp1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The models of alone.py, and what one process saves."""
    folder = tmp_path_factory.mktemp("saving")
    run([sys.executable, str(SAVING / "alone.py"), *options(folder, "alone")], LIMIT)
    return folder


def options(folder, name):
    return ["--dir", str(folder), "--out", str(folder / name)]


def results(folder, name, ranks):
    return [json.loads((folder / f"{name}.{rank}").read_text()) for rank in range(ranks)]


def streamed(folder, ranks):
    name = f"streamed{ranks}"
    launch(ranks, "cpu_fsdp.py", str(SAVING / "streamed.py"), *options(folder, name), timeout=LIMIT)
    return results(folder, name, ranks)


@pytest.fixture(scope="module")
def streamed2(folder):
    return streamed(folder, 2)


@pytest.fixture(scope="module")
def streamed4(folder):
    """Two replicas of two shards, and four shards."""
    return streamed(folder, 4)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """World size -> results. Each launch reads what those before it have written."""
    folder, found = tmp_path_factory.mktemp("checkpoints"), {}
    for world in FORMS:
        name = f"checkpoints{world}"
        launch(world, "saving/checkpoints.py", *options(folder, name), timeout=LIMIT)
        found[world] = results(folder, name, world)
    return found


def passed(ranks, check):
    for rank in ranks:
        assert check in rank, f"not run: {list(rank)[-1]} failed before: {rank[list(rank)[-1]].get('trace')}"
        assert "error" not in rank[check], rank[check].get("trace")


@pytest.mark.parametrize("check", STREAMED)
def test_streamed_from_two_ranks(streamed2, check):
    passed(streamed2, check)


@pytest.mark.parametrize("check", STREAMED_FOUR)
def test_streamed_from_four_ranks(streamed4, check):
    passed(streamed4, check)


@pytest.mark.parametrize("world, check", [(world, check) for world in FORMS for check in CHECKPOINTS[world]])
def test_distributed_checkpoints(checkpoints, world, check):
    passed(checkpoints[world], check)


def test_every_form_was_read_by_every_other(checkpoints):
    """On three ranks what one, two and three wrote, whole and sharded in either way."""
    forms = {f"dcp-{form}-{world}" for world in FORMS for form in FORMS[world]}
    assert set(checkpoints[3][0]["load_fsdp2"]["ok"]) == set(checkpoints[3][0]["plain_load_fsdp1"]["ok"]) == forms
    assert len(checkpoints[1][0]["load_whole"]["ok"]) == 5


def test_no_check_is_missing(streamed2, streamed4, checkpoints):
    assert set(streamed2[0]) == set(STREAMED) and set(streamed4[0]) == set(STREAMED_FOUR)
    for world in FORMS:
        assert set(checkpoints[world][0]) == set(CHECKPOINTS[world])


def test_a_killed_rank_leaves_the_last_good_checkpoint(tmp_path):
    """Of either kind; the launch is over before the others' patience is."""
    for what in ("killed_streamed", "killed_dcp"):
        began = time.monotonic()
        arguments = [*options(tmp_path, what), "--only", what]
        text = launch(2, "saving/checkpoints.py", *arguments, timeout=120, fails=True)
        assert "saved without a rank" not in text and "Signal 9 (SIGKILL)" in text, text
        assert time.monotonic() - began < 60
    launch(1, "saving/checkpoints.py", *options(tmp_path, "after"), "--only", "after_kill", timeout=120)
    passed(results(tmp_path, "after", 1), "after_kill")


def test_the_original_bitsandbytes_reads_what_shards_wrote(folder, streamed2, tmp_path):
    """Through transformers: the same bytes, scales and settings of every layer as ours reads."""
    passed(streamed2, "base_whole")
    try:
        upstream.folder()
    except OSError as error:
        pytest.skip(f"the original bitsandbytes is not to be had: {error}")
    saved = folder / "streamed2-whole-uint8-nested-bf16-none-behind"
    upstream.run(SAVING / "read.py", str(saved), str(tmp_path / "theirs"), str(upstream.folder()))
    run([sys.executable, str(SAVING / "read.py"), str(saved), str(tmp_path / "ours")], LIMIT)
    assert (tmp_path / "theirs").read_bytes() == (tmp_path / "ours").read_bytes()
    assert (tmp_path / "ours").stat().st_size > 50_000
