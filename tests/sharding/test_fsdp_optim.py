"""Optimizers on shards: the steps of one process, checkpoints, other numbers of ranks; Trainer under FSDP2."""

import json

import pytest
from fsdp.launch import accelerate_launch, launch
from helpers.optim import TRAINER_NAMES

ELSEWHERE = "elsewhere,one_process_elsewhere,fsdp1_elsewhere"  # what another number of ranks wrote


def test_optimizers_on_shards(tmp_path):
    """Every check of tests/fsdp/optimizers.py on two ranks; then three ranks go on with what those saved."""
    for world, checks, count in ((2, (), 14), (3, ("--only", ELSEWHERE), 3)):
        launch(world, "optimizers.py", "--dir", str(tmp_path), "--out", str(tmp_path / "r"), *checks)
        for rank in json.loads((tmp_path / "r").read_text())["ranks"]:
            failed = {name: result["trace"] for name, result in rank.items() if "error" in result}
            assert not failed and len(rank) == count, failed
    assert [rank[name]["ok"] for name in ELSEWHERE.split(",")] == [4, 8, 12]


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory):
    """{name: losses} of one process, each resumed to the same."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from fsdp import optim_trainer

    return {name: optim_trainer.check(name, str(tmp_path_factory.mktemp(name))) for name in TRAINER_NAMES}


def test_trainer_in_one_process(in_one_process):
    """All names train; paged ones as the others, and each algorithm in its own way."""
    assert list(in_one_process) == TRAINER_NAMES
    for name, same in (("paged_adamw_8bit", "adamw_8bit"), ("rmsprop_bnb", "rmsprop_bnb_32bit")):
        assert in_one_process[name] == in_one_process[same]
    assert all(losses[-1] < losses[0] for losses in in_one_process.values())
    assert (
        len({in_one_process[name][-1] for name in ("paged_adamw_32bit", "ademamix", "lion_32bit", "rmsprop_bnb")}) == 4
    )


@pytest.mark.parametrize("version", [1, 2])
def test_trainer_under_fsdp(tmp_path, in_one_process, version):
    """All names in one launch, resumed from whole state dicts and under FSDP2 from sharded ones too."""
    accelerate_launch(f"fsdp{version}.yaml", "optim_trainer.py", str(tmp_path / "r"), str(tmp_path / "runs"))
    results = [json.loads((tmp_path / f"r.{rank}").read_text()) for rank in range(2)]
    assert results[0] == results[1] and list(results[0]) == TRAINER_NAMES, results[0]
    for name, losses in results[0].items():
        bound = 1e-5 if version == 2 or "8bit" not in name else 1e-3  # FSDP1's blocks are of its flat parameters
        assert losses == pytest.approx(in_one_process[name], rel=bound), name
