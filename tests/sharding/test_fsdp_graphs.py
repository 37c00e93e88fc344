"""Steps as graphs under FSDP2, HSDP, DDP on one, two and three processes: the numbers of steps without graphs."""

import json

import pytest
from fsdp.launch import launch

pytest.importorskip("peft")
pytest.importorskip("transformers")


FIRST = "the first of its form"
OWN = "fsdp2_own_lengths"
TWO = "ddp ddp_accumulate fsdp2 fsdp2_kept fsdp2_freed fsdp2_mixed fsdp2_checkpointed fsdp2_evaluated fsdp2_loaded "
TWO = [*TWO.split(), "fsdp2_accumulate", OWN, "fsdp2_in_place", "hsdp"]
ONE = ["alone", "fsdp2", "fsdp2_evaluated"]
THREE = ["fsdp2_checkpointed", OWN]
NEVER = {"fsdp2_offload": "fsdp_offload_params", "fsdp1": "use FSDP2"}


@pytest.fixture(scope="module")
def results(folder):
    kept = {}

    def of(world, names):
        if world not in kept:
            out = folder / f"{world}.json"
            launch(world, "graphs.py", "--dir", str(folder), "--only", ",".join(names), "--out", str(out))
            kept[world] = json.loads(out.read_text())["ranks"]
        return kept[world]

    return of


def same(plain, captured, exact):
    """Steps and adapter of both; without `exact` but for what another order of a sum does."""
    if exact:
        assert plain["steps"] == captured["steps"] and plain["weights"] == captured["weights"]
        return
    for a, b in zip(plain["steps"], captured["steps"], strict=True):
        assert b == pytest.approx(a, rel=1e-4)
    assert captured["weights"] == pytest.approx(plain["weights"], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    "world, name", [*((1, name) for name in ONE), *((2, name) for name in TWO), *((3, name) for name in THREE)]
)
def test_steps_are_those_without_graphs(results, world, name):
    for rank in results(world, {1: ONE, 2: [*TWO, *NEVER], 3: THREE}[world]):
        plain, captured = rank[name]["plain"], rank[name]["graphs"]
        # FSDP2 sums the whole gradients of an accumulation, and reduces once; with graphs it reduces each
        same(plain, captured, name != "fsdp2_accumulate")
        calls = len(plain["steps"]) * (3 if "accumulate" in name else 1)
        assert captured["replays"] + sum(captured["eager"].values()) == calls
        assert set(captured["eager"]) == {FIRST}
        if name == OWN:
            assert captured["graphs"] == 3 <= captured["captures"] <= 8 and captured["replays"] >= 16
        else:
            assert captured["captures"] == 1 and captured["replays"] >= calls - 2


@pytest.mark.parametrize("name", NEVER)
def test_what_no_graph_repeats(results, name):
    for rank in results(2, [*TWO, *NEVER]):
        same(rank[name]["plain"], rank[name]["graphs"], True)
        assert rank[name]["graphs"]["replays"] == 0
        assert any(NEVER[name] in why for why in rank[name]["graphs"]["eager"])
