"""Instructions of a kernel (sm_75 to sm_120), as far as counting them needs: kinds, widths, branches, and paths.

An instruction has 128 bits: the operation in bits 0 to 8, the predicate in bits 12 to 15, a branch's second one in bits
87 to 90 and its kind in bits 32 and 33, its distance in words of 4 bytes above bit 34 (from sm_90 on with eight more
bits at 16), the width of a memory access in bits 73 to 75.
"""

from __future__ import annotations

import dataclasses
import functools

from helpers.cubins import Image, Kernel

FFMA, HMMA, NOP, EXIT, BRANCH, RETURN = 0x23, 0x3C, 0x118, 0x14D, 0x147, 0x150
LDS, STS, SHFL, LDGSTS = 0x184, 0x188, 0x189, 0x1AE
ALWAYS = 7  # the predicate that is true
# What has half the rate of the issue slots everywhere: integers, logic, comparisons, permutations, packing of pairs.
HALF = {
    0x03,
    0x07,
    0x08,
    0x09,
    0x0B,
    0x0C,
    0x10,
    0x11,
    0x12,
    0x16,
    0x17,
    0x19,
    0x1A,
    0x1C,
    0x36,
    0x3E,
    0x40,
    0x46,
    0x48,
}
FLOATS = {0x20, 0x21, 0x23, 0x24, 0x25, 0x27, 0x30, 0x31, 0x35}  # FMUL, FADD, FFMA, IMAD, HADD2, HFMA2


@dataclasses.dataclass(frozen=True)
class Instruction:
    operation: int
    width: int  # bytes of a lane, memory accesses
    predicated: bool
    target: int | None  # index of the instruction to which it jumps
    falls_through: bool


def decode(code: bytes, arch: int) -> list[Instruction]:
    found = []
    for at in range(0, len(code), 16):
        word = int.from_bytes(code[at : at + 16], "little")
        operation, predicated = word & 0x1FF, word >> 12 & 15 != ALWAYS
        width = {5: 8, 6: 16}.get(word >> 73 & 7, 4)
        target, falls = None, predicated or operation not in (EXIT, RETURN)
        if operation == BRANCH:
            distance, bits = word >> 34 & (1 << 48) - 1, 48
            if arch >= 90:
                distance, bits = distance << 8 | word >> 16 & 0xFF, 56
            distance -= (distance >> bits - 1) << bits
            target = at // 16 + 1 + distance // 4
            falls = predicated or word >> 87 & 15 != ALWAYS or word >> 32 & 3 != 0
        found.append(Instruction(operation, width, predicated, target, falls))
    return found


def shared_wavefronts(instruction: Instruction) -> int:
    """Passes of 128 bytes through shared memory, without bank conflicts."""
    if instruction.operation in (LDS, STS):
        return instruction.width // 4
    return 4 if instruction.operation == LDGSTS else 0


@dataclasses.dataclass(frozen=True)
class Count:
    """Instructions of a warp on one path: all, those of half rate, floats, shuffles; wavefronts of shared memory."""

    all: float
    half: float
    floats: float
    shuffles: float
    wavefronts: float

    def __mul__(self, factor: float) -> Count:
        return Count(*(value * factor for value in dataclasses.astuple(self)))


def count(instructions: list[Instruction]) -> Count:
    kept = [instruction for instruction in instructions if instruction.operation != NOP]
    return Count(
        len(kept),
        sum(i.operation in HALF for i in kept),
        sum(i.operation in FLOATS for i in kept),
        sum(i.operation == SHFL for i in kept),
        sum(map(shared_wavefronts, kept)),
    )


def loop_around(instructions: list[Instruction], marker: int) -> tuple[int, int]:
    """(first, last) of the smallest loop that has the most instructions `marker`."""
    places = [i for i, instruction in enumerate(instructions) if instruction.operation == marker]
    loops = [(i.target, at) for at, i in enumerate(instructions) if i.target is not None and i.target <= at]
    return max(loops, key=lambda loop: (sum(loop[0] <= place <= loop[1] for place in places), loop[0] - loop[1]))


def ways(instructions: list[Instruction], first: int, last: int, marker: int) -> dict[int, Count]:
    """{instructions `marker` on the way: the longest way with so many} from `first` to `last`, only forward.

    So what is done or left out is done, of alternatives the longer one is taken, and a loop on the way runs once.
    """
    open_: dict[int, dict[int, tuple]] = {
        first: {0: (0, None, None)}
    }  # {place: {met: (length, place before, its way)}}
    for at in range(first, last):
        instruction = instructions[at]
        following = [at + 1] if instruction.falls_through else []
        if instruction.target is not None and at < instruction.target <= last:
            following.append(instruction.target)
        for met, way in open_.pop(at, {}).items():
            now = met + (instruction.operation == marker)
            for to in following:
                known = open_.setdefault(to, {}).get(now)
                if known is None or known[0] < way[0] + 1:
                    open_[to][now] = (way[0] + 1, at, way)
    found = {}
    for met, way in open_.get(last, {}).items():
        taken = [last]
        while way[1] is not None:
            taken.append(way[1])
            way = way[2]
        found[met + (instructions[last].operation == marker)] = count([instructions[at] for at in taken])
    return found


@functools.cache
def loop_count(kernel: Kernel, image: Image, marker: int, markers: int | None = None) -> tuple[Count, int]:
    """(instructions of one turn of the main loop that meets `markers` or the most, `marker`s in the loop)."""
    instructions = decode(kernel.code, image.arch)
    first, last = loop_around(instructions, marker)
    found = ways(instructions, first, last, marker)
    inside = sum(instruction.operation == marker for instruction in instructions[first : last + 1])
    return found[max(found) if markers is None else markers], inside


@functools.cache
def straight_count(kernel: Kernel, image: Image, marker: int) -> Count:
    """Instructions from the start to an EXIT, the way with the most markers, without going round a loop."""
    instructions = decode(kernel.code, image.arch)
    exits = [at for at, i in enumerate(instructions) if i.operation == EXIT and not i.predicated]
    found = [pair for last in exits for pair in ways(instructions, 0, last, marker).items()]
    return max(found, key=lambda pair: (pair[0], pair[1].all))[1]
