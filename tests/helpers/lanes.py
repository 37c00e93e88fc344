"""Two lanes for the whole suite (pytest-xdist): files, longest first, each in one lane with its fixtures.

A file's seconds need not be right, only its place among the others: what is left at the end should be short. Those that
compile (test_core_c, test_ptx*) stand where a clone that has compiled nothing wants them.
"""

from xdist.scheduler import LoadFileScheduling

LONGEST = """
test_fsdp_parts test_fsdp_save test_fsdp_optim test_examples test_fsdp_train test_core_c test_ptx_int8
test_fsdp_experts test_fsdp_matrix test_graphs_trainers test_ptx_wide test_ptx test_wheels test_docs test_isa
test_fsdp_axes test_ptx_grouped test_compile_models test_export test_convert test_lora_models test_experts
test_planning test_fsdp_graphs test_writers test_switch test_calibration test_compile test_checkpoint_writing
test_optimizer_ops test_merging test_fsdp_lora test_serving test_fsdp_int8 test_report test_graphs_enabled
test_at_train test_hf test_memory test_checkpoints test_calibration_experts test_fuzz_optim test_int8 test_quantize
test_bench_report test_fuzz_state test_plan test_warm test_lora test_graphs test_optim_loss test_run test_products
test_job test_source
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
