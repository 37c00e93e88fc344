"""Fused LoRA layers under FSDP1, FSDP2 and DDP on two processes: peft's numbers, and those of one process."""

import pytest
from fsdp.launch import agreed

pytest.importorskip("peft")
pytest.importorskip("transformers")


FSDP2 = "ddp fsdp2 fsdp2_fused_later fsdp2_kept fsdp2_mixed fsdp2_offload fsdp2_checkpointed fsdp2_layers".split()
FSDP1 = "fsdp1 fsdp1_fused_later fsdp1_bf16 fsdp1_trainer fsdp1_trainer_orig_params".split()
BY_SWITCH = "ddp fsdp2 fsdp1 fsdp1_trainer fsdp1_trainer_orig_params".split()  # fused by BITSHARD_FUSE=1
CALLS = 7 * 3  # linears, steps
BOUNDS = {"fsdp2_mixed": 2e-2, "fsdp1_bf16": 2e-2}  # relative; a wrong scale makes 5e-2 or more


@pytest.fixture(scope="module")
def alone(folder):
    return agreed(folder, 1, "lora.py", ["alone"])["alone"]


@pytest.fixture(scope="module")
def fsdp2(folder):
    return agreed(folder, 2, "lora.py", FSDP2)


@pytest.fixture(scope="module")
def fsdp1(folder):
    return agreed(folder, 2, "lora.py", FSDP1)


def gap(a, b):
    """The largest relative difference of losses and norms, and of the adapters as a whole."""
    figures = [abs(x - y) / abs(x) for key in ("losses", "norms") for x, y in zip(a[key], b[key], strict=True)]
    apart = sum((x - y) ** 2 for x, y in zip(a["weights"], b["weights"], strict=True))
    return max(*figures, (apart / sum(x * x for x in a["weights"])) ** 0.5)


def check(name, found, alone):
    bound = BOUNDS.get(name, 1e-5)
    theirs, ours, planted = (found[kind] for kind in ("peft", "fused", "planted"))
    assert theirs["calls"] == theirs["unfused"] == ours["calls_unfused"] == 0 and ours["unfused"] == 7
    assert gap(theirs, ours) <= bound, gap(theirs, ours)
    if name not in BOUNDS:
        assert gap(alone["fused"], ours) <= bound and gap(alone["peft"], ours) <= bound
    trainer = name.startswith("fsdp1_trainer")  # each A and B is an FSDP1 module, which only a call of it gathers
    line = f"{'WARNING' if trainer else 'INFO'} BITSHARD_FUSE=1: {ours['report']}"
    assert ours["said"] == ([line] if name in BY_SWITCH else []) and theirs["said"] == []
    if trainer:
        assert ours["calls"] == 0 and "0 fused, 7 left to peft (7: FSDP1 has its A and B in units" in ours["report"]
        assert "take FSDP2 (fsdp_version: 2), or use_orig_params with a policy" in ours["report"]
        return
    forwards = 2 if name == "fsdp2_checkpointed" else 1
    assert ours["calls"] == CALLS * forwards and ours["report"] == "7 LoRA layers: 7 fused"
    assert gap(theirs, planted) > bound, gap(theirs, planted)


def test_one_process(alone):
    check("alone", alone, alone)


@pytest.mark.parametrize("name", FSDP2)
def test_fsdp2_and_ddp(alone, fsdp2, name):
    check(name, fsdp2[name], alone)


@pytest.mark.parametrize("name", FSDP1)
def test_fsdp1(alone, fsdp1, name):
    check(name, fsdp1[name], alone)
