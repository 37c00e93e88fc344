"""benchmarks/cards.py: the plan for GPUs that nobody tried here, and the counting behind its estimate."""

import functools
import itertools
import pathlib
import re
import shutil
import subprocess
import sys

import cases
import pytest
from bitshard import _C
from helpers import cubins, sass
from helpers.cards import CARDS, LIMITS

ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import cards as bench  # noqa: E402

F32, F16, BF16 = bench.F32, bench.F16, bench.BF16
SHAPES = tuple(cases.MODEL_LINEAR.values())
CODE = [image for image in cubins.images(_C.__file__) if image.kind == cubins.MACHINE_CODE]
SMS = sorted({image.arch for image in CODE})
MODERN = ("RTX 3090", "A100", "RTX 4090", "L40S", "RTX 5090")
by_sm = pytest.mark.parametrize("sm", SMS)


MANY_ROWS = {"gemm_4bit_sm90_wide", "panels"}
HOPPER = ("H100", "H200")


@functools.cache
def plan(name: str, dtype: int, gradient: bool = False) -> list[list[tuple[int, str]]]:
    return [bench.changes(CARDS[name], N, K, dtype, gradient) for N, K in SHAPES]


# ---- which kernel takes which product ----


@pytest.mark.parametrize("name", CARDS)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["float32", "float16", "bfloat16"])
def test_few_rows_are_fused_and_many_go_to_the_vendor(name, dtype):
    """For every layer of Llama 3 on every card, each kernel for few rows in one range; on Hopper 16 bits in one pass.

    The input gradient is for many rows from the first on.
    """
    one_pass = name in HOPPER and dtype != F32
    for changes in plan(name, dtype):
        names = [kernel for _, kernel in changes]
        few = list(itertools.takewhile(lambda kernel: kernel not in MANY_ROWS, names))
        many = names[len(few) :]
        assert few[0].startswith("gemv_4bit") and len(few) == len(set(few)) and changes[len(few)][0] <= 257, changes
        assert many == ["panels"] or (one_pass and set(many) <= MANY_ROWS), changes
    chosen = {kernel for changes in plan(name, dtype, gradient=True) for _, kernel in changes}
    assert chosen == (MANY_ROWS if one_pass else {"panels"})


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["float32", "float16", "bfloat16"])
def test_cards_of_one_kind_have_one_plan(dtype):
    """sm_80 to sm_89 and sm_120 alike: 16 bits to 64 rows on tensor cores. H100 as H200."""
    for gradient in (False, True):
        assert plan("H100", dtype, gradient) == plan("H200", dtype, gradient)
    plans = [plan(name, dtype) for name in MODERN]
    assert all(found == plans[0] for found in plans)
    if dtype != F32:
        assert {tuple(changes) for changes in plans[0]} == {((1, "gemv_4bit"), (65, "panels"))}


def test_no_bf16_on_the_tensor_cores_of_a_t4():
    """Ordinary cores take it, for 16 rows at most, as they do float32; float16 goes to the tensor cores."""
    assert all(changes[0][1] == "gemv_4bit_simt" and changes[-1][0] <= 17 for changes in plan("T4", BF16))
    assert {tuple(changes) for changes in plan("T4", F16)} == {((1, "gemv_4bit"), (65, "panels"))}


def test_wgmma_on_hopper_only():
    chosen = {
        name: {kernel for dtype in (F16, BF16) for found in plan(name, dtype) for _, kernel in found} for name in CARDS
    }
    for wgmma in ("gemm_4bit_sm90", "gemm_4bit_sm90_wide"):
        assert {name for name, kernels in chosen.items() if wgmma in kernels} == set(HOPPER), wgmma


@pytest.mark.parametrize("dtype", [F16, BF16], ids=["float16", "bfloat16"])
def test_changes_are_found_to_the_row(dtype):
    """Between the rows that are asked for: kernel by kernel the same as row by row."""
    for (N, K), gradient in itertools.product(((1024, 8192), (4096, 4096)), (False, True)):
        names = [bench.choose(CARDS["H100"], M, N, K, dtype, gradient=gradient).kernel for M in range(1, 1100)]
        expected = [(M, name) for M, name in enumerate(names, 1) if M == 1 or name != names[M - 2]]
        assert [pair for pair in bench.changes(CARDS["H100"], N, K, dtype, gradient) if pair[0] < 1100] == expected


def test_kernels_that_take_turns():
    """Of an alternation the table says the first part."""
    found = [(1, "a"), (65, "panels"), (100, "wide")]
    assert bench.words(found) == "a to 64, panels to 99, wide"
    assert bench.words([*found, (200, "panels"), (300, "wide")]) == "a to 64, panels to 99, either of the two"
    assert bench.words([(1, "wide"), (257, "panels"), (512, "wide")]) == "wide to 256, either of the two"


def test_what_the_wide_kernel_does():
    """Its entry, once over W, on all pairs of multiprocessors; nothing here estimates its time."""
    card = CARDS["H100"]
    for gradient in (False, True):
        choice = bench.choose(card, 2048, 28672, 8192, BF16, gradient=gradient)
        assert choice.kernel == "gemm_4bit_sm90_wide" and choice.entry.endswith("bf16_m256") and choice.groups == 1
        assert choice.busy == 1.0 and bench.linear(card, COUNTS, 2048, 28672, 8192, BF16, choice) is None


def test_images_of_the_builds():
    """A default build has sm_80's code for Ampere and Ada, PTX for a 5090."""
    found = {row[0]: tuple(row[2:]) for row in bench.image_rows()}
    assert found == {
        "T4": ("75", "75"),
        "RTX 3090": ("80", "86"),
        "A100": ("80", "80"),
        "RTX 4090": ("80", "89"),
        "L40S": ("80", "89"),
        "RTX 5090": ("80", "120"),
        "H100": ("90a", "90a"),
        "H200": ("90a", "90a"),
    }
    setup = (ROOT / "setup.py").read_text()
    assert f'DEFAULT = "{bench.DEFAULT_BUILD}"' in setup and f'ALL = "{bench.WHOLE_BUILD}"' in setup


def test_figures_of_cards():
    """Each of an architecture with limits, and none absurd: a wrong unit would show."""
    for name, card in CARDS.items():
        assert card.sm in LIMITS and 40 <= card.sms <= 200 and 1e9 < card.clock < 3e9, name
        assert 3e11 < card.bandwidth < 5e12 and 6e13 < card.tensor < 1e15 and 4e6 <= card.l2 < 2e8 < card.memory, name
        assert 30 < card.tensor / card.bandwidth < 500


def documented(header: str) -> list[list[str]]:
    """Rows of the table of docs/cards.md whose header begins so."""
    lines = (ROOT / "docs/cards.md").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(header))
    end = next(i for i in range(at, len(lines)) if not lines[i].startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[at + 2 : end]]


def test_documented_figures():
    """docs/cards.md names the figures that the estimate uses."""
    rows = {row[0]: list(map(float, row[1:7])) for row in documented("| GPU | multiprocessors |")}
    for name, card in CARDS.items():
        (found,) = [numbers for known, numbers in rows.items() if known == name or known.startswith(f"{name} SXM")]
        expected = [
            card.sms,
            card.clock / 1e9,
            card.bandwidth / 1e9,
            card.tensor / 1e12,
            card.l2 / 1e6,
            card.memory / 1e9,
        ]
        assert found == pytest.approx(expected), name


def test_documented_plan():
    """`python benchmarks/cards.py` prints what docs/cards.md should say."""
    assert documented("| GPU | is |") == bench.image_rows()
    assert documented("| GPU | x | N x K |") == bench.plan_rows()
    assert documented("| GPU | dy | N x K |") == bench.plan_rows(gradient=True)


def test_the_program_prints_all_tables():
    command = [sys.executable, str(ROOT / "benchmarks/cards.py")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert not ran.returncode, ran.stderr
    assert ran.stdout.count("estimated, not measured") == len(bench.ESTIMATED)
    kernels = ("gemv_4bit_simt", "quantize_4bit", "panels", "gemm_4bit_sm90_wide")
    for word in (*CARDS, *kernels, "rows of dy", "on an H200"):
        assert word in ran.stdout, word


# ---- counting ----


def instruction(operation: int, predicate: int = sass.ALWAYS, distance: int = 0, width: int = 0) -> bytes:
    """As sm_75 to sm_89 encode it. distance: in instructions, from the one behind."""
    word = operation | predicate << 12 | width << 73 | sass.ALWAYS << 87
    return (word | (4 * distance & (1 << 48) - 1) << 34).to_bytes(16, "little")


FADD, LOP3, NEVER = 0x21, 0x12, 0


def test_branches_forward_and_back():
    code = instruction(sass.BRANCH, 0, 2) + instruction(FADD) + instruction(sass.BRANCH, distance=-3)
    first, add, last = sass.decode(code, 80)
    assert (first.target, first.falls_through, last.target, last.falls_through) == (3, True, 0, False)
    assert add.target is None and add.falls_through


def test_longest_way_through_a_loop():
    """What may be left out is counted, of two branches the longer one; the loop is the one around the markers."""
    code = instruction(FADD)
    code += instruction(LOP3)  # 1, the loop's head
    code += instruction(sass.BRANCH, 0, 2)  # 2: to 5
    code += instruction(sass.LDS, width=6) + instruction(sass.SHFL)  # may be left out
    code += instruction(sass.FFMA)  # 5
    code += instruction(sass.BRANCH, 0, 2)  # 6: to 9
    code += instruction(FADD) + instruction(sass.BRANCH, distance=3)  # 7, 8: to 12
    code += instruction(LOP3) * 4  # 9 to 12
    code += instruction(sass.BRANCH, 0, -13)  # 13: to 1
    code += instruction(sass.EXIT)
    instructions = sass.decode(code, 86)
    assert sass.loop_around(instructions, sass.FFMA) == (1, 13)
    (found,) = sass.ways(instructions, 1, 13, sass.FFMA).values()
    assert found == sass.Count(all=11, half=5, floats=1, shuffles=1, wavefronts=4)


def test_ways_by_the_number_of_markers():
    """As gemv_4bit_simt does rows of x: each step may be the last one."""
    step = instruction(sass.FFMA) * 2 + instruction(sass.BRANCH, 0, 0)
    places = [step[:-16] + instruction(sass.BRANCH, 0, 3 * (2 - i)) for i in range(3)]
    found = sass.ways(sass.decode(b"".join(places) + instruction(sass.EXIT), 75), 0, 9, sass.FFMA)
    assert {markers: count.all for markers, count in found.items()} == {2: 4, 4: 7, 6: 10}


@pytest.mark.parametrize("sm", SMS)
@pytest.mark.skipif(not shutil.which("cuobjdump"), reason="needs cuobjdump and nvdisasm")
def test_nvdisasm_reads_the_same(sm, tmp_path):
    """Branches and their targets, widths of shared memory accesses: all kernels of one file."""
    line = re.compile(r"^\s+/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+ )?(\w+)([.\w]*)([^;\n]*);", re.MULTILINE)
    file = tmp_path / "image.cubin"
    (found,) = [i for i in CODE if i.arch == sm and "gemv_4bit_simt_f32_plain" in cubins.kernels(i)]
    for chosen in (found, next(i for i in CODE if i.arch == sm and "gemv_4bit_f16_m8_k4" in cubins.kernels(i))):
        file.write_bytes(chosen.data)
        text = subprocess.run(["cuobjdump", "-sass", file], capture_output=True, text=True, check=True).stdout
        parts = dict(re.findall(r"Function : (\w+)\n(.*?)(?=Function : |\Z)", text, re.DOTALL))
        assert set(parts) == set(cubins.kernels(chosen))
        for name, part in parts.items():
            theirs, ours = line.findall(part), sass.decode(cubins.kernels(chosen)[name].code, sm)
            assert len(theirs) >= len(ours) > 0  # functions that a kernel calls stand behind it
            for (_, word, more, operands), mine in zip(theirs, ours, strict=False):
                assert (word == "BRA") is (mine.operation == sass.BRANCH)
                if word == "BRA":
                    assert int(re.search(r"0x([0-9a-f]+)\W*$", operands)[1], 16) == 16 * mine.target
                if word in ("LDS", "STS"):
                    assert mine.width == (16 if ".128" in more else 8 if ".64" in more else 4), (word, more)


COUNTS = bench.Counts(_C.__file__)


@by_sm
def test_instructions_of_the_main_loops(sm):
    """For 1,024 weights; docs/cards.md has how many clocks memory leaves each card for them."""
    most = {"f16_m8_k4": 140, "f16_m8_k8": 120, "f16_m16_k4": 150}
    for form, instructions in most.items():
        count = COUNTS.of(sm, f"gemv_4bit_{form}")
        assert 60 < count.all < instructions and 24 <= count.wavefronts <= 34, (form, count)
    one, eight = (COUNTS.of(sm, "gemv_4bit_simt_f32_nested", rows) for rows in (1, 8))
    assert 200 < one.all < 330 and one.shuffles == 32 and 300 < eight.all - one.all < 400
    for name, most in (("dequantize_4bit_f16_nested", 330), ("quantize_4bit_f16_nf4", 660)):
        assert most / 2 < COUNTS.of(sm, name).all < most


@pytest.mark.skipif(90 not in SMS, reason="this build has no kernels of sm_90a")
def test_a_profiler_counted_the_same():
    """ncu on an H200, 14336 x 4096, 16 rows: 121 instructions, 30 wavefronts for 1,024 weights, start and end too."""
    count = COUNTS.of(90, "gemv_4bit_bf16_m16_k4")
    assert 0.9 < count.all / 121 < 1.02 and 0.95 < count.wavefronts / 30 < 1.1


@pytest.mark.skipif(not {80, 90} <= set(SMS), reason="this build has no kernels of sm_80 and sm_90a")
def test_the_estimate_meets_what_was_measured():
    """On an H200: products, panels and dequantization within 45 % of what they took, half of them within 20 %."""
    ratios = {row[0]: float(row[3]) for row in bench.check_rows(COUNTS)}
    close = [what for what, ratio in ratios.items() if 0.8 <= ratio <= 1.25]
    assert len(ratios) > 35 and all(0.55 < ratio < 1.5 for ratio in ratios.values()) and 2 * len(close) > len(ratios)
