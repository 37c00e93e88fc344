"""Two lanes for the whole suite (pytest-xdist): files, longest first, each in one lane with its fixtures.

A file's seconds need not be right, only its place among the others: what is left at the end should be short.
"""

from xdist.scheduler import LoadFileScheduling

LONGEST = """
test_fsdp_parts test_docs test_ptx_wide test_examples test_fsdp_save test_fsdp_optim test_fsdp_train test_core_c
test_isa test_ptx test_export test_lora_models test_compile_models test_fsdp_axes test_checkpoints test_compile
test_optimizer_ops test_report test_fsdp_matrix test_fsdp_int8 test_int8_models test_fsdp_lora test_warm
test_optim test_native test_hf test_checkpoint_writing test_bench_report test_facade_names test_fuzz_state
test_plan test_quantize
""".split()
TOGETHER = {"tests/test_fsdp_units.py": "tests/test_fsdp_parts.py"}  # read what one fixture makes


def place(file: str) -> int:
    """When a file's turn is: those of LONGEST in that order, then all others."""
    name = TOGETHER.get(file, file).rpartition("/")[2].removesuffix(".py")
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


class Lanes(LoadFileScheduling):
    """Files as they were collected (conftest.py orders them by `place`), those that go together as one."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return TOGETHER.get(file, file)
