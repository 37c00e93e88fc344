"""What GPUs hold: limits of each architecture, and how the host launches there.

Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
"""

import dataclasses
import functools
import itertools
import re

from bitshard import _C
from helpers.cubins import Image, Kernel

REGISTERS, REGISTERS_OF_THREAD, REGISTER_UNIT = (
    65536,
    255,
    256,
)  # of a multiprocessor and block; a warp gets whole units
BLOCK_THREADS = 1024


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of one architecture. shared_block: with the opt-in; shared_reserved: taken from shared_sm by every block."""

    threads: int
    blocks: int
    shared_sm: int
    shared_block: int
    shared_reserved: int = 1024


KIB = 1024
LIMITS = {
    75: Limits(1024, 16, 64 * KIB, 64 * KIB, 0),
    80: Limits(2048, 32, 164 * KIB, 163 * KIB),
    86: Limits(1536, 16, 100 * KIB, 99 * KIB),
    87: Limits(1536, 16, 164 * KIB, 163 * KIB),
    89: Limits(1536, 24, 100 * KIB, 99 * KIB),
    90: Limits(2048, 32, 228 * KIB, 227 * KIB),
    100: Limits(2048, 32, 228 * KIB, 227 * KIB),
    103: Limits(2048, 32, 228 * KIB, 227 * KIB),
    110: Limits(1536, 24, 228 * KIB, 227 * KIB),
    120: Limits(1536, 24, 100 * KIB, 99 * KIB),
    121: Limits(1536, 24, 100 * KIB, 99 * KIB),
}


# ---- what a block takes ----


@dataclasses.dataclass(frozen=True)
class Launch:
    """Of one block: threads and bytes of dynamic shared memory."""

    threads: int
    shared: int


# Entries that no plan names.
ALONE = re.compile(
    r"(?:de)?quantize_|checksum|optimizer_|sort_by_expert|sum_by_token|search_4bit|round_4bit|merge_(?:4bit|mxfp4|nvfp4)|add_adapters|clear_int8|outliers_int8|scale_product_int8|split_scales_int8|gemm_int8_i32|int8_gemm_4bit"
)
STEP_COPIES = 64 * KIB  # BSH_STEP_COPIES_BYTES, dynamic shared memory of those for 8-bit states; the others have none
SORT_COUNTERS = 48 * KIB  # 4 bytes each of BSH_SORT_COUNTERS
GEMM_4BIT_INT8 = 48640  # BSH_GEMM_4BIT_INT8_SHARED
SHAPES = ((4096, 4096), (1024, 8192), (14336, 4096), (28672, 8192), (48, 128), (272, 448), (97, 96), (64, 32))  # N, K
ROWS = (1, 8, 9, 16, 17, 32, 33, 64, 65, 160, 200, 600)
BLOCKS = ((32, 0), (64, 0), (128, 0), (32, 2), (16, 2))  # sizes, format


# Of the sources that cuda/sources.txt has for this architecture alone.
ONLY_90A = ("gemm_4bit", "gemm_wide", "x_units", "clear_flags", "gemm_int8_sm90", "mixed_int8_sm90", "dgrad_int8_sm90")
ONLY_75 = ("gemm_sm75",)


def expected(name: str, image: Image, sm: int | None = None) -> bool:
    """Whether the host starts an entry where it has loaded `image`, on some GPU or on one; else it may be an empty
    shell."""
    wide = 90 <= image.arch < 120  # 224 KiB of shared memory, clusters
    if name.startswith(ONLY_90A):
        return (image.arch, image.only) == (90, True)
    if name.startswith("gemm_sm75"):
        return image.arch == 75
    if name.startswith("gemm_sm80"):
        small = sm is not None and LIMITS[sm].shared_sm < 128 * KIB  # one block of a tile of 128 rows at once
        return image.arch >= 80 and not (small and re.match(r"gemm_sm80_grouped_.*m128", name))
    if name.startswith(("gemv_4bit_grouped", "gemv_int8_dgrad")):
        return wide
    if re.match(r"gemv_(?:4bit|int8)_(?:bf16|f16)_m|join_(?:splits|codes)_", name):
        tensor_cores = image.arch >= (80 if "_bf16_" in name else 75)
        return (
            tensor_cores and ("_m32" not in name or (image.arch >= 80 and not wide)) and not (wide and "join" in name)
        )
    return True


@functools.cache
def planned(sm: int, architectures: str) -> dict[str, Launch]:
    """The largest block of each entry that products start on a GPU `sm`, from a build for `architectures`."""
    found: dict[str, Launch] = {}
    both = ("gemm_4bit_sm90_wide", "gemm_4bit_sm80", "gemm_4bit_sm75")  # directions
    kernels = (None, "gemv_4bit", "gemv_4bit_simt", "gemm_4bit_sm90", *both)
    axes = (ROWS, SHAPES, range(3), (40, 132), BLOCKS, (False, True), kernels, (False, True))
    for M, (N, K), dtype, sms, (blocksize, fmt), nested, kernel, gradient in itertools.product(*axes):
        if gradient and kernel not in (None, *both):
            continue
        settings = {
            "gradient": gradient,
            "blocksize": blocksize,
            "format": fmt,
            "nested": nested,
            "kernel": kernel,
            "architectures": architectures,
        }
        try:
            plan = _C.plan_linear_4bit(M, N, K, dtype, sm, sms, **settings)
        except ValueError:
            continue  # the forced kernel does not take it
        for launch in (launch for part in plan["slices"] for launch in part["launches"]):
            note(found, launch)
    axes = ((4, 128), (1, 8, 16, 40, 110, 170, 256, 500), SHAPES, range(3), BLOCKS[1:], (False, True), (False, True))
    axes += ((None, "gemm_4bit_sm80_grouped", "gemm_4bit_sm75_grouped"),)
    for E, rows, (N, K), dtype, (blocksize, fmt), nested, gradient, kernel in itertools.product(*axes):
        settings = {"gradient": gradient, "blocksize": blocksize, "nested": nested, "kernel": kernel}
        settings |= {"architectures": architectures, "format": fmt}
        try:
            plan = _C.plan_grouped_linear_4bit(E, E * rows, N, K, dtype, sm, 132, **settings)
        except ValueError:
            continue
        for launch in (launch for part in plan["slices"] for launch in part["launches"]):
            note(found, launch)
    kernels = (None, "any", "mixed_int8_sm90", "gemm_int8", "dgrad_int8_sm90", "gemv_int8_dgrad", "panels")
    for M, (N, K), dtype, sms, gradient, kernel in itertools.product(
        (*ROWS, 1024), SHAPES, range(3), (40, 132), (False, True), kernels
    ):
        settings = {"gradient": gradient, "kernel": kernel, "architectures": architectures}
        try:
            plan = _C.plan_linear_int8(M, N, K, dtype, sm, sms, **settings)
        except ValueError:
            continue
        for launch in (launch for part in plan["slices"] for launch in part["launches"]):
            note(found, launch)
    return found


def note(found: dict[str, Launch], launch: dict) -> None:
    """Take a launch of a plan into the largest blocks."""
    known = found.get(launch["entry"], Launch(0, 0))
    threads, shared = max(known.threads, launch["block"]), max(known.shared, launch["shared_bytes"])
    found[launch["entry"]] = Launch(threads, shared)


def launch_of(kernel: Kernel, image: Image, sm: int) -> Launch | None:
    """The largest block with which the host starts a kernel of `image` on a GPU `sm`; None: it does not."""
    if ALONE.match(kernel.name):
        copies = STEP_COPIES if kernel.name.startswith("optimizer_8bit_") and sm >= 80 else 0
        if kernel.name == "sort_by_expert":
            copies = SORT_COUNTERS
        if kernel.name == "gemm_int8_i32":  # with what the plan gives the others
            copies = planned(sm, image.name)["gemm_int8_f32"].shared
        if kernel.name.startswith("int8_gemm_4bit"):
            if image.arch < 80:  # an empty shell
                return None
            copies = GEMM_4BIT_INT8
        return Launch(kernel.max_threads or BLOCK_THREADS, copies)
    return planned(sm, image.name).get(kernel.name)


def registers_of_block(kernel: Kernel, threads: int) -> int:
    """Registers that a block occupies: each warp's are rounded up."""
    of_warp = -(-kernel.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    return of_warp * -(-threads // 32)


def blocks_at_once(kernel: Kernel, launch: Launch, limits: Limits) -> int:
    """Blocks that a multiprocessor holds; 0 where a launch would fail."""
    shared = kernel.shared + launch.shared
    if shared > limits.shared_block or kernel.registers > REGISTERS_OF_THREAD or launch.threads > BLOCK_THREADS:
        return 0
    by_shared = limits.shared_sm // (shared + limits.shared_reserved) if shared else limits.blocks
    by_registers = REGISTERS // registers_of_block(kernel, launch.threads)
    return min(by_shared, by_registers, limits.threads // launch.threads, limits.blocks)
