"""Optimizers under DeepSpeed's ZeRO: the losses of one process, the same ones after a checkpoint; the original too."""

import beside
import pytest
from beside import BOTH, OURS, THEIRS

# Of ZeRO a rank's part is cut out of all parameters in a row, so blocks of 8-bit states begin elsewhere than in one
# process: bounds of the losses, relative.
BOUNDS = {
    "zero1_32bit": 1e-5,
    "zero1_8bit": 1e-3,
    "zero1_lion_bf16": 3e-2,
    "zero2_32bit": 1e-5,
    "zero2_8bit": 1e-3,
    "zero2_8bit_bf16": 3e-2,
    "zero2_ademamix": 1e-3,
    "zero2_paged": 1e-3,
    "zero2_offload": 1e-3,
    "zero3_8bit": 1e-3,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """results(package): {case: losses} of both ranks, from one launch."""
    found = {}

    def run(which):
        if which not in found:
            out = tmp_path_factory.mktemp(which)
            found[which] = beside.run(
                which, ["deepspeed"], "zero_optimizers.py", out=out, launcher="torchrun", timeout=500
            )
        return found[which]

    return run


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("which", BOTH)
def test_losses_are_those_of_one_process(results, which, name):
    for rank in results(which):
        losses = rank[name]["before"] + rank[name]["after"]
        assert beside.gap(rank[name]["alone"], losses) <= BOUNDS[name]
        assert losses[0] - losses[-1] > 0.05


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("which", BOTH)
def test_a_checkpoint_goes_on_where_it_was(results, which, name):
    """Bit for bit, and not without the optimizer's state."""
    for rank in results(which):
        assert rank[name]["resumed"] == rank[name]["after"]
        assert rank[name]["without_state"] != rank[name]["after"]


@pytest.mark.parametrize("name", BOUNDS)
def test_losses_are_the_original_s(results, name):
    ours, theirs = (results(which)[0][name] for which in (OURS, THEIRS))
    assert beside.gap(theirs["before"] + theirs["after"], ours["before"] + ours["after"]) <= BOUNDS[name]
