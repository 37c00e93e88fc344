"""QLoRA through other people's launchers and patches, on two processes, beside the original and beside one process."""

import beside
import pytest
from beside import BOTH, OURS, THEIRS

BF16 = ("--dtype", "bfloat16")
AXOLOTL = ("--patch", "axolotl", "--storage", "bfloat16")  # the storage of axolotl's loader
UNSLOTH = ("--patch", "unsloth")
ZERO = ("--loaded-by", "none")  # transformers takes no device_map under ZeRO-3
# name: tool on the path, launcher, options, whether the base is sharded, bound of the losses
CASES = {
    "axolotl": ("axolotl", "fsdp2", AXOLOTL, True, 1e-5),
    "axolotl_bf16": ("axolotl", "fsdp2", (*AXOLOTL, *BF16), True, 2e-2),
    "axolotl_dora": ("axolotl", "fsdp2", (*AXOLOTL, "--dora"), True, 1e-5),
    "unsloth": ("unsloth", "fsdp2", UNSLOTH, True, 1e-5),
    "unsloth_bf16": ("unsloth", "fsdp2", (*UNSLOTH, *BF16, "--storage", "bfloat16"), True, 2e-2),
    "trl_dora_bf16": ("", "fsdp2", ("--sft", "--dora", *BF16, "--storage", "bfloat16"), True, 2e-2),
    "ddp": ("", "torchrun", (), False, 1e-5),
    "zero2": ("deepspeed", "torchrun", ("--zero", "2", *ZERO), False, 1e-5),
    "zero2_bf16": ("deepspeed", "torchrun", ("--zero", "2", "--bf16", *ZERO, *BF16), False, 2e-2),
    "zero2_bf16_engine": ("deepspeed", "torchrun", ("--zero", "2", "--bf16", *ZERO), False, 2e-2),
    "zero3": ("deepspeed", "torchrun", ("--zero", "3", *ZERO), True, 1e-5),
    "zero3_bf16": ("deepspeed", "torchrun", ("--zero", "3", "--bf16", *ZERO, *BF16), True, 2e-2),
    "zero3_bf16_engine": ("deepspeed", "torchrun", ("--zero", "3", "--bf16", *ZERO), True, 2e-2),
}


# with the original FSDP2 raises "expects uniform original parameter dtype": accelerate upcasts no model with Params4bit
OURS_ONLY = ("trl_dora_bf16",)
RUNS = [(which, name) for which in BOTH for name in CASES if which == OURS or name not in OURS_ONLY]


@pytest.mark.parametrize(("which", "name"), RUNS)
def test_bytes_are_exact_and_losses_those_of_one_process(train, name, which):
    tool, launcher, options, sharded, bound = CASES[name]
    ranks = train(which, tool, launcher, *options)
    for rank in ranks:
        assert rank["wrong"] == 0
        assert rank["losses"] == ranks[0]["losses"]
        assert rank["base"]["local"] * (2 if sharded else 1) == rank["base"]["whole"]
    (alone,) = train(which, "", "", *in_one_process(options))
    assert alone["wrong"] == 0
    assert beside.gap(alone["losses"], ranks[0]["losses"]) <= bound
    assert max(alone["losses"]) - min(alone["losses"]) > 0.02


@pytest.mark.parametrize("name", [name for name in CASES if name not in OURS_ONLY])
def test_losses_are_the_original_s(train, name):
    tool, launcher, options, _, bound = CASES[name]
    ours, theirs = (train(which, tool, launcher, *options)[0]["losses"] for which in (OURS, THEIRS))
    assert beside.gap(theirs, ours) <= max(bound, 1e-4)


def in_one_process(options):
    """The options of the one process that a launch is compared with: no patch, no engine."""
    kept = [option for option in options if option in ("--dora", "--sft")]
    return (*kept, *BF16) if "--dtype" in options else tuple(kept)
