"""axolotl's 4-bit experts: its own way beside the original, and with bitshard's experts on as well."""

import beside
import pytest
from beside import BOTH, OURS, THEIRS


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("axolotl_experts")
    return {which: beside.run(which, ["axolotl"], "axolotl_experts.py", out=folder / which)[0] for which in BOTH}


def test_its_own_way_gives_loss_and_gradients_of_the_original(results):
    ours, theirs = results[OURS], results[THEIRS]
    assert ours["quantized"] == theirs["quantized"] == 4 and not ours["said"]
    assert ours["trained"] == theirs["trained"] and len(ours["trained"]) == 8
    assert beside.gap(theirs["losses"], ours["losses"]) <= 1e-4
    assert min(ours["losses"]) > 0


def test_with_bitshard_s_experts_on_bitshard_s_win_and_a_line_says_so(results, tmp_path, monkeypatch):
    monkeypatch.setenv("BITSHARD_EXPERTS", "1")
    both = beside.run(OURS, ["axolotl"], "axolotl_experts.py", "--both", out=tmp_path)[0]
    assert both["quantized"] == 4 and both["count"] == 0
    assert len(both["said"]) == 1 and "bitshard quantizes the stacks of these 2 modules" in both["said"][0]
    assert both["trained"] == results[OURS]["trained"]
    assert beside.gap(results[OURS]["losses"], both["losses"]) <= 1e-2  # nested scales by expert, not by stack
