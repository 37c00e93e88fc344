"""Merge-aware QLoRA under FSDP1 and FSDP2 on two processes: one process's training, and the bytes of its forward."""

import pytest
from fsdp.launch import agreed

pytest.importorskip("peft")
pytest.importorskip("transformers")

SHORT = ("mxfp4", "nvfp4")  # whose scales ranks have parts of, and one global scale
TWO = (
    "fsdp2 fsdp2_later fsdp2_checkpointed fsdp2_mixed fsdp1 fsdp1_trainer".split()
    + [f"fsdp2 {n}" for n in SHORT]
    + ["fsdp1 nvfp4"]
)
STACKS = ["experts qwen3_moe nf4", "experts gpt_oss mxfp4", "experts qwen3_moe nvfp4"]  # 3 experts on two ranks
ALONE = ["alone", *(f"alone {name}" for name in SHORT)]
REFUSED = {"fsdp2_mixed": "is bfloat16 in the forward", "fsdp1_trainer": "take FSDP2"}


@pytest.fixture(scope="module")
def alone(folder):
    return agreed(folder, 1, "merge_aware.py", ALONE)


@pytest.fixture(scope="module")
def two(folder):
    return agreed(folder, 2, "merge_aware.py", TWO + STACKS)


@pytest.mark.parametrize("name", ALONE)
def test_one_process(alone, name):
    found = alone[name]
    assert (found["differing"], found["layers"], found["same_logits"]) == (0, 7, True)


@pytest.mark.parametrize("name", TWO)
def test_two_processes(alone, two, name):
    found, alone = two[name], alone[name.replace(name.partition(" ")[0], "alone")]
    if name in REFUSED:
        assert REFUSED[name] in found["refused"]
        return
    assert (found["differing"], found["layers"], found.get("same_logits", True)) == (0, 7, True)
    if name == "fsdp2_later":  # another run: its first step is an ordinary one
        assert found["losses"] != alone["losses"]
        return
    for key in ("losses", "norms"):
        assert found[key] == pytest.approx(alone[key], rel=2e-3), key  # a code that flips with the order of a sum


@pytest.mark.parametrize("name", STACKS)
def test_stacks_of_experts_on_two_processes(two, name):
    """The loss, gradients, merged bytes of files and logits of one process."""
    assert two[name] == {"same_loss": True, "gradients": True, "same_logits": True, "differing": 0, "layers": 4}
