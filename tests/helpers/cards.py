"""What GPUs hold: limits of each architecture, figures of the cards that people own, and how the host launches there.

Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". Figures of cards: the vendor's
data sheets and architecture white papers, named in docs/cards.md.
"""

import dataclasses
import re

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
    120: Limits(1536, 24, 100 * KIB, 99 * KIB),
}


@dataclasses.dataclass(frozen=True)
class Card:
    """clock: Hz, boost; bandwidth: bytes/s; tensor: FLOP/s, 16-bit factors, fp32 sums, dense; l2, memory: bytes."""

    sm: int
    sms: int
    clock: float
    bandwidth: float
    tensor: float
    l2: float
    memory: float


CARDS = {
    "T4": Card(75, 40, 1.59e9, 320e9, 65e12, 4e6, 16e9),
    "RTX 3090": Card(86, 82, 1.695e9, 936e9, 71e12, 6e6, 24e9),
    "A100": Card(80, 108, 1.41e9, 2039e9, 312e12, 40e6, 80e9),
    "RTX 4090": Card(89, 128, 2.52e9, 1008e9, 165.2e12, 72e6, 24e9),
    "L40S": Card(89, 142, 2.52e9, 864e9, 362e12, 96e6, 48e9),
    "RTX 5090": Card(120, 170, 2.407e9, 1792e9, 209.5e12, 96e6, 32e9),
    "H100": Card(90, 132, 1.98e9, 3350e9, 989e12, 50e6, 80e9),
    "H200": Card(90, 132, 1.98e9, 4800e9, 989e12, 50e6, 141e9),
}


# ---- what a block takes ----


@dataclasses.dataclass(frozen=True)
class Launch:
    """Of one block: threads and bytes of dynamic shared memory."""

    threads: int
    shared: int


WIDE, NARROW, TURING = range(2, -1, -1)  # the forms of gemv_4bit.cu, in the order of the host's table


def generation(arch: int) -> int:
    """Which form of gemv_4bit.cu machine code of `arch` is: WIDE has 224 KiB of shared memory and clusters."""
    return WIDE if 90 <= arch < 120 else NARROW if arch >= 80 else TURING


def is_launched(name: str, image: Image) -> bool:
    """Whether the host starts kernel `name` where it has loaded `image`; others may be empty shells."""
    form = generation(image.arch)
    if name.startswith(("gemm_4bit", "x_units")):
        return (image.arch, image.only) == (90, True)
    if re.match(r"gemv_4bit_(?:bf16|f16)_m|join_splits_", name):
        tensor_cores = form != TURING or "_bf16_" not in name
        return tensor_cores and (form == NARROW or "_m32" not in name) and not (form == WIDE and "join" in name)
    return True


def launch_of(kernel: Kernel, image: Image, requested: tuple[int, ...]) -> Launch:
    """The largest block with which the host starts a kernel. requested: its dynamic shared memory, for each form."""
    threads = kernel.max_threads or 256  # join_splits and x_units have no __launch_bounds__
    return Launch(threads, requested[generation(image.arch) if len(set(requested)) > 1 else 0])


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
