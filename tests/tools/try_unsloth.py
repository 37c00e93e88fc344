"""Files of unsloth and unsloth_zoo over a tiny 4-bit model on a CPU, beside the original."""

import beside
import pytest
from beside import BOTH, OURS, THEIRS


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unsloth")
    return {which: beside.run(which, ["unsloth"], "unsloth_parts.py", out=folder / which)[0] for which in BOTH}


@pytest.mark.parametrize("case", ("check", "storage", "subclass", "linear"))
def test_each_file_loads_and_runs(results, case):
    assert "error" not in results[THEIRS][case] and "error" not in results[OURS][case], results[OURS][case]


def test_verdict_about_native_kernels_is_the_original_s(results):
    """On a CPU both say no; on GPUs benchmarks/checks/tools/on_gpu.py asks."""
    assert results[OURS]["check"] == results[THEIRS]["check"]


def test_storage_goes_to_a_float_and_back_by_assigning_data(results):
    found = results[OURS]["storage"]
    assert found == results[THEIRS]["storage"]
    assert found["converted"] == 14 and found["float_bytes"] and found["uint8_bytes"]


def test_weights_made_by_make_subclass(results):
    assert results[OURS]["subclass"] == results[THEIRS]["subclass"]


def test_zoo_s_forward_changes_no_number_and_no_key(results):
    """Whether it replaces our forward is its choice; what comes out must stay."""
    ours, theirs = results[OURS]["linear"], results[THEIRS]["linear"]
    assert ours["logits"] == ours["gradient"] == 0.0 and ours["copied"] and ours["moved"]
    assert ours["keys"] == theirs["keys"]
