"""`bitshard.fsdp.load` and `load_on_rank0`: models loaded unit by unit, under FSDP2 and FSDP1, on two processes.

The worker is tests/fsdp/parts/units.py, whose models alone.py makes.
"""

import pytest
from bitshard import fsdp as bitshard_fsdp
from fsdp.launch import LIMIT, launch, options, passed, results
from test_fsdp_parts import CELLS, FAULTS, HALF, MODELS

CHECKS = ["memory", *MODELS, *(name.replace("model", "rank0") for name in HALF)]
CHECKS += "adapters_lora adapters_dora rank0_lora rank0_dora own_units dense_and_tied saved saved_rank0 missing".split()
CHECKS += [*FAULTS, "fault_rank0_bytes", "fault_rank0_rows", "lone_faults"]


@pytest.fixture(scope="module")
def found(parts_folder):
    """The results of both ranks."""
    launch(2, "parts/units.py", *options(parts_folder, "units"), timeout=LIMIT)
    return results(parts_folder, "units", 2)


def test_all_checks_ran(found):
    assert len(CELLS) == 12
    assert [list(rank) for rank in found] == [list(found[0])] * 2
    assert sorted(found[0]) == sorted(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_loaded_unit_by_unit(found, name):
    passed(found, name)


@pytest.mark.parametrize("load", [bitshard_fsdp.load, bitshard_fsdp.load_on_rank0])
def test_without_a_process_group_it_says_so(load, tmp_path):
    with pytest.raises(ValueError, match="no process group"):
        load(tmp_path)
