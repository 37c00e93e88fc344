"""Which kernel takes which product on the GPUs that people own, and an estimate, not a measurement, of its time there.

    python benchmarks/cards.py [--kernels FILE]     prints the tables of docs/cards.md

All is read from the built extension: the plan of a product, for a build with all architectures, and instructions from
machine code. For the latter on all of these cards --kernels names an _C.abi3.so built for BITSHARD_CUDA_ARCHS=all.
docs/cards.md says how the estimate is made and how far it is from what an H200 measured.
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import functools
import itertools
import sys
from pathlib import Path

from bitshard import _C
from timing import markdown_table

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from cases import MODEL_LINEAR  # noqa: E402
from helpers import cubins, sass  # noqa: E402
from helpers.cards import CARDS, Card  # noqa: E402

F32, F16, BF16 = 0, 1, 2  # as the C core counts
# Rows of x at which the plan is asked; changes between them are searched for. A tile more begins at 64 i + 1 rows.
ROWS = sorted({*range(1, 130), *range(136, 4097, 8), *range(129, 4097, 64)})
BYTES_4BIT = 0.5 + 1 / 64 + 4 / 64 / 256  # of a weight, nested scales, blocksize 64

# What an H200 measured (benchmarks/results): how long a call in a graph takes to begin and end, the parts of the data
# sheet's bandwidth and tensor rate that a copy and a large product reach, the gap between panels, and the clocks a warp
# takes for 1,024 weights in gemv_4bit's sm_80 form (by tokens of a block) and in gemv_4bit_simt (by rows of x).
START_US, COPY, PRODUCT, GAP_US = 3.5, 0.89, 0.72, 2.3
WAIT_GEMV = {8: 640, 16: 640, 32: 900}
WAIT_SIMT = {1: 2475, 2: 2475, 4: 3880, 8: 5610}
LOAD_LATENCY = 150  # clocks more for 1,024 weights where loads pass registers (sm_75 has no asynchronous copies)
PANEL_BYTES = 64 << 20


# ---- the choice ------------------------------------------------------------------------------------------------------


DEFAULT_BUILD, WHOLE_BUILD = "75,80,90a,compute_80", "75,80,86,89,90a,100,120,compute_120"  # of setup.py


@dataclasses.dataclass(frozen=True)
class Choice:
    """One product on one card: the kernel's name in the plan, its entry in the machine code, blocks of threads.

    groups: how often W is decoded. busy: the part of the multiprocessors that have a block.
    """

    kernel: str
    entry: str = ""
    groups: int = 1
    busy: float = 1.0


def choose(
    card: Card, M: int, N: int, K: int, dtype: int, architectures: str | None = WHOLE_BUILD, gradient: bool = False
) -> Choice:
    """What the C core plans, blocksize 64, nested. architectures None: of this build."""
    plan = _C.plan_linear_4bit(M, N, K, dtype, card.sm, card.sms, architectures=architectures, gradient=gradient)
    if not plan["slices"]:
        return Choice(plan["kernel"])
    first = plan["slices"][0]
    (product,) = [launch for launch in first["launches"] if launch["entry"].startswith(("gemv_4bit", "gemm_"))]
    across, groups = product["grid"][:2]
    if plan["kernel"] != "gemv_4bit":
        groups = sum(part["times"] for part in plan["slices"])
        return Choice(plan["kernel"], product["entry"], groups, min(1.0, across / card.sms))
    return Choice(plan["kernel"], product["entry"], groups, min(1.0, across * groups / card.sms))


def changes(card: Card, N: int, K: int, dtype: int, gradient: bool = False) -> list[tuple[int, str]]:
    """(rows, kernel) wherever the kernel differs from that of one row fewer, to 4,096 rows."""

    def kernel(M: int) -> str:
        return choose(card, M, N, K, dtype, gradient=gradient).kernel

    found = [(ROWS[0], kernel(ROWS[0]))]
    for low, high in itertools.pairwise(ROWS):
        if (name := kernel(high)) != found[-1][1]:
            found.append((bisect.bisect(range(low + 1, high), False, key=lambda M: kernel(M) == name) + low + 1, name))
    return found


def image_rows() -> list[list[str]]:
    """What of a build is loaded on a card, as nvcc numbers it."""
    rows = []
    for name, card in CARDS.items():
        images = [_C.kernel_image(build, card.sm) for build in (DEFAULT_BUILD, WHOLE_BUILD)]
        rows.append([name, f"sm_{card.sm}", *(f"{arch}{'a' * only}" if arch else "none" for arch, only in images)])
    return rows


def in_turns(found: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Panels and the one pass that is estimated beside them may take turns: then from the second turn on as one."""
    names = [name for _, name in found]
    twice = [i for i, name in enumerate(names) if names.count(name) > 1]
    if not twice:
        return found
    return [*found[: twice[0] + 1], (found[twice[0] + 1][0], "either of the two")]


def words(changes: list[tuple[int, str]]) -> str:
    """ "gemv_4bit to 64, panels"."""
    found = in_turns(changes)
    ends = [f" to {following[0] - 1}" for following in found[1:]] + [""]
    return ", ".join(name + end for (_, name), end in zip(found, ends, strict=True))


def plan_rows(gradient: bool = False) -> list[list[str]]:
    """A row for cards and shapes that are treated alike."""
    alike: dict[tuple, list[str]] = {}
    for name, card in CARDS.items():
        for label, dtype in (("bfloat16", BF16), ("float16", F16), ("float32", F32)):
            plans: dict[str, list[str]] = {}
            for N, K in MODEL_LINEAR.values():
                plans.setdefault(words(changes(card, N, K, dtype, gradient)), []).append(f"{N} x {K}")
            for plan, shapes in plans.items():
                key = (label, "all" if len(plans) == 1 else ", ".join(shapes), plan)
                alike.setdefault(key, []).append(name)
    return [[", ".join(names), *key] for key, names in alike.items()]


# ---- instructions ----------------------------------------------------------------------------------------------------


class Counts:
    """Instructions and wavefronts of a warp for 1,024 weights, from the machine code of one build."""

    def __init__(self, file: str | Path):
        self.found = {}
        for image in cubins.images(file):
            if image.kind == cubins.MACHINE_CODE:
                for name, kernel in cubins.kernels(image).items():
                    self.found[image.arch, name] = (kernel, image)

    @functools.cache  # noqa: B019 - lives as long as the program
    def of(self, sm: int, name: str, rows: int = 8) -> sass.Count | None:
        """None where the build has no machine code of it for `sm`. rows: of x, gemv_4bit_simt."""
        if (sm, name) not in self.found:
            return None
        kernel, image = self.found[sm, name]
        if "quantize" in name:
            return sass.straight_count(kernel, image, sass.SHFL)
        if "simt" in name:
            return sass.loop_count(kernel, image, sass.FFMA, 32 * rows)[0]
        count, products = sass.loop_count(kernel, image, sass.HMMA)
        if products == 0:
            return None  # an empty shell, which the host does not start there
        tokens = int(name.split("_m")[1].split("_")[0])
        weights = products * 16 * (8 if sm < 80 else 16) * 8 // tokens
        return count * (1024 / weights)


def clocks(count: sass.Count, sm: int) -> float:
    """Clocks of a multiprocessor for a warp's instructions: the pipe that takes longest."""
    floats = 2 if sm in (75, 80) else 4
    shared = count.wavefronts * (2 if sm == 75 else 1) + count.shuffles
    return max(count.all / 4, count.half / 2, count.floats / floats, shared)


# ---- time ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Microseconds: bytes, instructions and waiting run beside each other, `more` comes on top."""

    bytes: float
    instructions: float
    waiting: float
    more: float

    @property
    def us(self) -> float:
        return max(self.bytes, self.instructions, self.waiting) + self.more


def waiting_clocks(sm: int, tokens: int) -> float:
    """Of a multiprocessor, for 1,024 weights, gemv_4bit: what its warps take that wait for themselves.

    0 for the form of sm_90, whose times are measured.
    """
    if 90 <= sm < 120:
        return 0
    return (WAIT_GEMV[tokens] + LOAD_LATENCY) / 4 if sm < 80 else WAIT_GEMV[tokens] / 8


def bytes_us(card: Card, n_bytes: float) -> float:
    return n_bytes / (COPY * card.bandwidth) * 1e6


def clocks_us(card: Card, weights: float, of_1024: float) -> float:
    return weights / 1024 * of_1024 / (card.sms * card.clock) * 1e6


def dense(card: Card, M: int, N: int, K: int) -> Estimate:
    """The same product with 16-bit weights."""
    n_bytes = 2 * (N * K + M * (N + K))
    return Estimate(bytes_us(card, n_bytes), 2 * M * N * K / (PRODUCT * card.tensor) * 1e6, 0, START_US)


def blockwise(card: Card, counts: Counts, weights: int, op: str, dtype: int) -> Estimate:
    """dequantize_4bit or quantize_4bit of so many weights."""
    name = f"{op}_{'bf16' if dtype == BF16 else 'f16'}_{'nested' if op == 'dequantize_4bit' else 'nf4'}"
    count = counts.of(card.sm, name)
    issue = clocks_us(card, weights, clocks(count, card.sm)) if count else 0
    return Estimate(bytes_us(card, weights * (2 + BYTES_4BIT)), issue, 0, START_US)


def panels(card: Card, counts: Counts, M: int, N: int, K: int, dtype: int) -> Estimate:
    """W dequantized and multiplied panel by panel: gradients and products of many rows where no kernel takes them."""
    decoded = blockwise(card, counts, N * K, "dequantize_4bit", dtype).us - START_US
    gaps = -(-2 * N * K // PANEL_BYTES) * GAP_US
    product = dense(card, M, N, K)
    return dataclasses.replace(product, more=START_US + decoded + gaps)


def linear(card: Card, counts: Counts, M: int, N: int, K: int, dtype: int, choice: Choice) -> Estimate | None:
    """None where nothing here counts the kernel: gemm_4bit_sm90 and _wide, whose times are measured."""
    weights, n_bytes = N * K, N * K * BYTES_4BIT + 2 * M * (N + K)
    if choice.kernel == "panels":
        return panels(card, counts, M, N, K, dtype)
    if choice.kernel.startswith("gemm_4bit_sm90"):
        return None
    if choice.kernel == "gemv_4bit_simt":
        rows = min(M, 8)
        count = counts.of(card.sm, choice.entry, rows)
        blocks = min(2, max(1, N // 32 / card.sms))  # of 8 warps, on a multiprocessor
        wait = WAIT_SIMT[min(n for n in WAIT_SIMT if n >= rows)] / (8 * blocks)
    else:
        count = counts.of(card.sm, choice.entry)
        wait = waiting_clocks(card.sm, int(choice.entry.split("_m")[1].split("_")[0]))
    work = weights * choice.groups / choice.busy
    issue = clocks_us(card, work, clocks(count, card.sm)) if count else 0
    return Estimate(bytes_us(card, n_bytes), issue, clocks_us(card, work, wait), START_US)


# ---- tables ----------------------------------------------------------------------------------------------------------

ESTIMATED = ("RTX 4090", "RTX 3090", "T4")
ESTIMATED_ROWS = (1, 8, 16, 32, 64, 256, 1024, 4096)
ESTIMATED_SHAPES = ((4096, 4096), (14336, 4096))
COUNTED = (
    ("gemv_4bit_f16_m8_k4", 8),
    ("gemv_4bit_f16_m8_k8", 8),
    ("gemv_4bit_f16_m16_k4", 8),
    ("gemv_4bit_f16_m32_k4", 8),
    ("gemv_4bit_simt_f16_nested", 1),
    ("gemv_4bit_simt_f16_nested", 8),
    ("gemv_4bit_simt_bf16_nested", 1),
    ("dequantize_4bit_f16_nested", 8),
    ("dequantize_4bit_bf16_nested", 8),
    ("quantize_4bit_f16_nf4", 8),
    ("quantize_4bit_bf16_nf4", 8),
)
COUNTED_SMS = (75, 80, 86, 89, 90, 120)


def count_rows(counts: Counts) -> list[list[str]]:
    rows = []
    for name, M in COUNTED:
        cells = []
        for sm in COUNTED_SMS:
            count = counts.of(sm, name, M)
            cells.append(f"{count.all:.0f} / {clocks(count, sm):.0f}" if count else "-")
        rows.append([name + (f", {M} rows" if "simt" in name else ""), *cells])
    return rows


def needed_rows(counts: Counts) -> list[list[str]]:
    """Clocks of a multiprocessor for 1,024 weights: in which memory brings them, and what gemv_4bit takes."""
    rows = []
    for name, card in CARDS.items():
        brought = 1024 * BYTES_4BIT / (COPY * card.bandwidth) * card.sms * card.clock
        cells = [name, f"{brought:.0f}"]
        for tokens in (8, 16, 32):
            count = counts.of(card.sm, f"gemv_4bit_f16_m{tokens}_k{8 if tokens == 8 else 4}")
            waits = "" if waiting_clocks(card.sm, tokens) == 0 else f" / {waiting_clocks(card.sm, tokens):.0f}"
            cells.append(f"{clocks(count, card.sm):.0f}{waits}" if count else "-")
        rows.append(cells)
    return rows


def estimate_rows(counts: Counts, name: str) -> list[list[str]]:
    card = CARDS[name]
    dtype = F16 if card.sm < 80 else BF16
    rows = []
    for N, K in ESTIMATED_SHAPES:
        for M in ESTIMATED_ROWS:
            choice = choose(card, M, N, K, dtype)
            ours, theirs = linear(card, counts, M, N, K, dtype, choice), dense(card, M, N, K)
            gradient = panels(card, counts, M, N, K, dtype)
            parts = {"bytes": ours.bytes, "instructions": ours.instructions, "waiting": ours.waiting}
            most = max(parts, key=parts.get)
            if choice.kernel == "panels":
                most = "panels"
            cells = [f"{N} x {K}", str(M), choice.kernel, f"{ours.us:.0f}", most, f"{theirs.us:.0f}"]
            rows.append([*cells, f"{theirs.us / ours.us:.2f}", f"{theirs.us / gradient.us:.2f}"])
    return rows


def other_rows(counts: Counts) -> list[list[str]]:
    """What is no product on tensor cores, 14336 x 4096: microseconds and, of blocks, the share of a copy's speed."""
    rows, (N, K) = [], (14336, 4096)
    for name in ESTIMATED:
        card = CARDS[name]
        for label, dtype in (("float16", F16), ("bfloat16", BF16)):
            for op in ("dequantize_4bit", "quantize_4bit"):
                e = blockwise(card, counts, N * K, op, dtype)
                numbers = [f"{e.bytes:.0f}", f"{e.instructions:.0f}", "-", f"{e.us:.0f}"]
                rows.append([name, f"{op}, {label}", *numbers])
        for M in (1, 8):
            e = linear(card, counts, M, N, K, F32, choose(card, M, N, K, F32))
            numbers = [f"{e.bytes:.0f}", f"{e.instructions:.0f}", f"{e.waiting:.0f}", f"{e.us:.0f}"]
            rows.append([name, f"gemv_4bit_simt, float32, {M} rows", *numbers])
    return rows


# Rows of benchmarks/results/small_m_h200_202611.md and blocks_and_training_h200_202611.md: microseconds on an H200.
H200_GEMV = {
    (1024, 4096): {1: 3.15, 8: 3.49, 16: 4.22},
    (4096, 4096): {1: 5.81, 8: 6.17, 16: 7.38},
    (14336, 4096): {1: 12.83, 8: 13.13, 16: 15.88},
    (4096, 14336): {1: 13.52, 8: 14.14, 16: 19.34},
    (8192, 8192): {1: 13.76, 8: 14.36, 16: 19.62},
    (28672, 8192): {1: 36.63, 8: 38.28},
}
H200_SM80_FORM = {  # tokens of a block
    16: {(14336, 4096): {32: 39.3, 64: 71.5}, (8192, 8192): {32: 44.3, 64: 81.6}},
    32: {(14336, 4096): {32: 29.8, 64: 50.6}, (8192, 8192): {32: 32.3, 64: 56.5}},
}
H200_SIMT = {(1024, 4096): {1: 23.0}, (4096, 4096): {1: 23.0}, (14336, 4096): {1: 46.9, 4: 69.3, 8: 97.8}}
H200_DENSE = {(4096, 4096): 13.3, (14336, 4096): 30.4, (8192, 8192): 34.1, (28672, 8192): 108.6}  # one row
H200_BLOCKS = {16777216: (12.7, 23.6), 58720256: (38.6, 53.0), 234881024: (146.0, 171.7)}  # dequantize, quantize
H200_PANELS = {(28672, 8192): {1024: 836, 2048: 1522}, (14336, 4096): {512: 123.7, 1024: 203, 2048: 388}}


def check_rows(counts: Counts) -> list[list[str]]:
    """The method on an H200: estimate, measurement, estimate over measurement."""
    card, pairs = CARDS["H200"], []
    for (N, K), times in H200_GEMV.items():
        for M, us in times.items():
            choice = choose(card, M, N, K, BF16)
            pairs.append((f"gemv_4bit {N} x {K}, {M} rows", linear(card, counts, M, N, K, BF16, choice), us))
    older = dataclasses.replace(card, sm=80)  # its machine code, on the H200's multiprocessors
    for tokens, shapes in H200_SM80_FORM.items():
        for (N, K), times in shapes.items():
            for M, us in times.items():
                choice = Choice("gemv_4bit", f"gemv_4bit_bf16_m{tokens}_k4", M // tokens)
                e = linear(older, counts, M, N, K, BF16, choice)
                pairs.append((f"its sm_80 form, {N} x {K}, {M} rows by {tokens}", e, us))
    for (N, K), times in H200_SIMT.items():
        for M, us in times.items():
            e = linear(card, counts, M, N, K, F32, choose(card, M, N, K, F32))
            pairs.append((f"gemv_4bit_simt {N} x {K}, float32, {M} rows", e, us))
    pairs += [(f"16-bit linear {N} x {K}, 1 row", dense(card, 1, N, K), us) for (N, K), us in H200_DENSE.items()]
    for weights, times in H200_BLOCKS.items():
        for op, us in zip(("dequantize_4bit", "quantize_4bit"), times, strict=True):
            pairs.append((f"{op}, {weights / 1e6:.1f} M", blockwise(card, counts, weights, op, BF16), us))
    for (N, K), times in H200_PANELS.items():
        pairs += [(f"panels {N} x {K}, {M} rows", panels(card, counts, M, N, K, BF16), us) for M, us in times.items()]
    return [[what, f"{e.us:.1f}", f"{us:.1f}", f"{e.us / us:.2f}"] for what, e, us in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default=_C.__file__, help="a built extension to count instructions in")
    counts = Counts(parser.parse_args().kernels)
    print(markdown_table(["GPU", "is", "default build", "all architectures"], image_rows()), "\n")
    print(markdown_table(["GPU", "x", "N x K", "rows of x"], plan_rows()), "\n")
    print(markdown_table(["GPU", "dy", "N x K", "rows of dy"], plan_rows(gradient=True)), "\n")
    print(markdown_table(["kernel", *(f"sm_{sm}" for sm in COUNTED_SMS)], count_rows(counts)), "\n")
    header = ["GPU", "memory", "to 8 rows", "to 16", "to 32"]
    print(markdown_table(header, needed_rows(counts)), "\n")
    header = ["N x K", "rows", "kernel", "us", "bound by", "16-bit us", "times faster", "gradient"]
    for name in ESTIMATED:
        print(f"{name}, estimated, not measured\n\n{markdown_table(header, estimate_rows(counts, name))}\n")
    header = ["GPU", "kernel", "bytes us", "instructions us", "waiting us", "us"]
    print(f"Estimated, not measured, 14336 x 4096\n\n{markdown_table(header, other_rows(counts))}\n")
    print(markdown_table(["on an H200", "estimated us", "measured us", "ratio"], check_rows(counts)))


if __name__ == "__main__":
    main()
