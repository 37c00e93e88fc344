"""Two lanes for the whole suite (pytest-xdist): files, longest first, each in one lane with its fixtures.

A file's seconds need not be right, only its place among the others: what is left at the end should be short.
"""

from xdist.scheduler import LoadFileScheduling

LONGEST = """
test_fsdp_parts test_fsdp_save test_docs test_fsdp_train test_fsdp_optim test_core_c test_ptx_int8 test_fsdp_matrix
test_examples test_isa test_fsdp_experts test_ptx_wide test_export test_compile_models test_calibration test_fsdp_axes
test_experts test_convert test_writers test_wheels test_ptx_grouped test_planning test_optimizer_ops test_ptx
test_compile test_run
test_fsdp_int8 test_fsdp_lora test_checkpoints test_lora_models test_report test_serving test_fuzz_state test_quantize
test_hf test_calibration_ops test_optim test_int8_models test_embeddings test_checkpoint_writing
test_calibration_experts test_values test_folders test_fuzz_optim test_merging test_bench_report test_native test_plan
test_lora test_switch
""".split()
TOGETHER = {"tests/sharding/test_fsdp_units.py": "tests/sharding/test_fsdp_parts.py"}  # read what one fixture makes


def place(file: str) -> int:
    """When a file's turn is: those of LONGEST in that order, then all others."""
    name = TOGETHER.get(file, file).rpartition("/")[2].removesuffix(".py")
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


class Lanes(LoadFileScheduling):
    """Files as they were collected (conftest.py orders them by `place`), those that go together as one."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return TOGETHER.get(file, file)
