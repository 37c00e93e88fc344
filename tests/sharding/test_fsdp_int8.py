"""LLM.int8 in the real stack on two processes: Trainer and peft on `load_in_8bit` under FSDP2 and FSDP1."""

import json
import sys

import pytest
from fsdp.launch import WORKERS, accelerate_launch, made_model, run
from helpers.bytes import same_bytes
from safetensors.torch import load_file

BOUND = 1e-5  # relative, of each loss, as of 4-bit weights in float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama in model/, and room for runs."""
    return made_model(tmp_path_factory.mktemp("int8"))


def results(folder, name, start, ranks, scenarios):
    """The results of rank 0 of a run; all ranks have the same."""
    out = folder / name
    out.mkdir()
    start("--only", ",".join(scenarios), "--model", str(folder / "model"), "--dir", str(out), "--out", str(out / "r"))
    found = [json.loads((out / f"r.{rank}").read_text()) for rank in range(ranks)]
    for scenario in scenarios:
        assert all("error" not in rank[scenario] for rank in found), found[0][scenario].get("trace")
        assert all(rank[scenario] == found[0][scenario] for rank in found), scenario
    return found[0]


@pytest.fixture(scope="module")
def alone(folder):
    """One process."""
    command = [sys.executable, str(WORKERS / "int8.py")]
    return results(folder, "alone", lambda *options: run([*command, *options], 240), 1, ["trainer", "dora", "saved"])


@pytest.fixture(scope="module")
def fsdp2(folder):
    """accelerate launch with FSDP2."""
    return results(
        folder,
        "fsdp2",
        lambda *options: accelerate_launch("fsdp2.yaml", "int8.py", *options),
        2,
        ["trainer", "dora", "resume", "early", "saved", "units"],
    )


def gap(a, b):
    assert len(a) == len(b) >= 2
    return max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))


def test_fsdp2_gives_the_losses_of_one_process(alone, fsdp2):
    for scenario in ("trainer", "dora"):
        assert gap(alone[scenario]["losses"], fsdp2[scenario]["losses"]) <= BOUND, scenario
    assert "int8 base sharded by FSDP2 over 2 ranks: 14 weights" in fsdp2["trainer"]["report"]
    losses = alone["trainer"]["losses"]
    assert len(set(losses)) == 4, "the steps are of different rows"


def test_a_run_resumes(fsdp2):
    """Saved by Trainer after two of four steps."""
    assert fsdp2["resume"]["losses"] == fsdp2["trainer"]["losses"]


def test_loaded_before_fsdp_was_known(alone, fsdp2):
    """accelerate asks for the class of a weight before it shards: the weight becomes a column then."""
    assert gap(alone["trainer"]["losses"][:2], fsdp2["early"]["losses"]) <= BOUND


def test_files_are_those_of_one_process(folder, alone, fsdp2):
    """The base bit for bit; and merging into shards says which function writes the merged model."""
    base = [load_file(folder / name / "files" / "base" / "model.safetensors") for name in ("alone", "fsdp2")]
    assert base[0].keys() == base[1].keys() and len(base[0]) > 40
    assert all(same_bytes(base[0][key], base[1][key]) for key in base[0])
    assert "save_pretrained(model, folder, merge=True)" in fsdp2["saved"]["error_seen"]


def test_loaded_unit_by_unit(fsdp2):
    """`bitshard.fsdp.load` of dense and of int8 files; compared in the worker."""
    assert "int8 base sharded by FSDP2 over 2 ranks: 14 weights" in fsdp2["units"]["report"]


def test_weights_loaded_in_parts(folder, alone):
    """Each rank keeps its part of the first model from loading on."""
    launch = lambda *options: accelerate_launch("fsdp2_cut.yaml", "int8.py", *options, BITSHARD_CUT="1")  # noqa: E731
    cut = results(folder, "cut", launch, 2, ["trainer"])
    assert gap(alone["trainer"]["losses"], cut["trainer"]["losses"]) <= BOUND


def test_fsdp1(folder, alone):
    """The losses of one process; loaded too early, or merged, it is an error that says what to do."""
    launch = lambda *options: accelerate_launch("fsdp1.yaml", "int8.py", "--fsdp", "1", *options)  # noqa: E731
    out = folder / "fsdp1"
    out.mkdir()
    launch(
        "--only", "trainer,early,saved", "--model", str(folder / "model"), "--dir", str(out), "--out", str(out / "r")
    )
    fsdp1 = json.loads((out / "r.0").read_text())
    assert gap(alone["trainer"]["losses"], fsdp1["trainer"]["losses"]) <= BOUND, fsdp1
    assert "bitshard.fsdp.shardable" in fsdp1["early"]["error_seen"]
    assert "FSDP1 has freed this packed weight" in fsdp1["saved"]["error_seen"]
