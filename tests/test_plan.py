"""csrc/plan*.c, from the facts of a product to kernels and launches: pure, so it is tested without a GPU.

The rows and sizes at which kernels change are measured (benchmarks/results) and may move. Tested is what must hold
wherever they lie; the boundaries are searched for, not written down.

`python tests/test_plan.py` prints the table: for each shape and GPU the rows of x at which the kernel changes.
"""

import random

import cases
import pytest
from bitshard import _C

F32, F16, BF16 = 0, 1, 2
NAMES = {"gemv_4bit", "gemv_4bit_simt", "gemm_4bit_sm90", "panels"}
TENSOR_CORES = NAMES - {"gemv_4bit_simt"}
SHAPES = tuple(cases.MODEL_LINEAR.values())
SWEEP = sorted({*SHAPES, *((16 * round(1.1**i), 4096) for i in range(30, 90))}, key=lambda s: s[0] * s[1])  # to 318 M
GPUS = {"T4": (75, 40), "A100": (80, 108), "RTX 4090": (89, 128), "H200": (90, 132), "B200": (100, 148)}
OLDER = ("A100", "RTX 4090", "B200")  # with bf16 on tensor cores, without wgmma
ROWS = (*range(1, 130), 192, 193, 256, 257, 512, 1024, 4096, 65536)


STATE = _C.cuda_state()
BUILD = STATE["architectures"] if STATE["built"] else "75,80,90a,100,120,compute_120"  # without kernels: as with all


def image(gpu: str) -> tuple[int, bool]:
    """(architecture, for this GPU only) of the kernels that this build has for a GPU: by them it chooses."""
    return _C.kernel_image(BUILD, GPUS[gpu][0])


wgmma = pytest.mark.skipif(image("H200") != (90, True), reason="this build has no kernels of sm_90a")


def select(
    M: int, N: int, K: int, dtype: int = BF16, gpu: str = "H200", blocksize: int = 64, nested: bool = True
) -> str:
    return _C.plan_linear_4bit(M, N, K, dtype, *GPUS[gpu], blocksize=blocksize, nested=nested)["kernel"]


def changes(N: int, K: int, dtype: int, gpu: str) -> list[tuple[int, str]]:
    """(M, kernel) wherever the kernel differs from that of one row fewer."""
    chosen = [(M, select(M, N, K, dtype, gpu)) for M in ROWS]
    return [pair for i, pair in enumerate(chosen) if i == 0 or pair[1] != chosen[i - 1][1]]


def last_fused(N: int, K: int, dtype: int = BF16, gpu: str = "H200", blocksize: int = 64) -> int:
    """The most rows that do not go to the vendor GEMM; 0 if one row does."""
    return max((M for M in range(1, 513) if select(M, N, K, dtype, gpu, blocksize) != "panels"), default=0)


def first_gemm(N: int, K: int) -> float:
    """The fewest rows of bf16 that an H200 gives to gemm_4bit_sm90."""
    return min((M for M in range(1, 513) if select(M, N, K) == "gemm_4bit_sm90"), default=float("inf"))


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["float32", "float16", "bfloat16"])
def test_each_kernel_has_one_range_of_rows(gpu, dtype):
    """One row is fused, no kernel comes back after another took over, and many rows go to the vendor GEMM."""
    for N, K in SWEEP:
        names = [name for _, name in changes(N, K, dtype, gpu)]
        assert set(names) <= NAMES and len(names) == len(set(names)), (N, K, names)
        assert names[0].startswith("gemv_4bit") and names[-1] == "panels", (N, K, names)


@wgmma
def test_every_kernel_is_chosen_somewhere():
    """gemm_4bit_sm90 on the one GPU whose instructions it needs, and there the earlier the larger the weight."""
    chosen = {gpu: {select(M, N, K, BF16, gpu) for N, K in SWEEP for M in ROWS} for gpu in GPUS}
    assert chosen.pop("H200") == TENSOR_CORES
    assert chosen.pop("T4") == {"gemv_4bit_simt", "panels"}  # no bf16 on its tensor cores
    assert set().union(*chosen.values()) == TENSOR_CORES - {"gemm_4bit_sm90"}
    assert first_gemm(*SWEEP[0]) > first_gemm(*SWEEP[-1])


def has_tensor_cores(gpu: str, dtype: int) -> bool:
    return dtype != F32 and image(gpu)[0] >= (80 if dtype == BF16 else 75)


def takes(name: str, M: int, N: int, K: int, dtype: int, gpu: str, blocksize: int) -> bool:
    """Whether a kernel can compute this, by what its .cu file says it reads."""
    whole_units = has_tensor_cores(gpu, dtype) and N % 16 == 0 and K % 64 == 0 and blocksize % 64 == 0
    if name == "gemm_4bit_sm90":
        return image(gpu) == (90, True) and whole_units
    return name == "panels" or (whole_units and M <= 64 if name == "gemv_4bit" else K % 32 == 0 and M <= 16)


def test_no_kernel_gets_what_it_cannot_take():
    """Random products, most of them just beside what a kernel takes; on none of them a choice that would be refused."""
    draw, fused = random.Random(0), 0
    for _ in range(20_000):
        M, gpu, blocksize = draw.choice((*range(1, 70), 128, 200)), draw.choice(list(GPUS)), draw.choice((32, 64, 256))
        N, K = (draw.randint(1, 900) * draw.choice((1, 8, 16)), draw.randint(1, 300) * draw.choice((1, 32, 64)))
        product = (M, N, K, draw.choice((F32, F16, BF16)), gpu, blocksize)
        name = select(*product)
        assert takes(name, *product), (name, product)
        fused += name != "panels"
    assert fused > 3000


@wgmma
def test_larger_weights_are_fused_for_more_rows():
    """Reading 4 bits a weight instead of 16 pays for longer, and the wgmma kernel takes over earlier."""
    for dtype in (F32, BF16):
        most = [last_fused(N, K, dtype) for N, K in SWEEP]
        assert most == sorted(most) and most[0] < most[-1], (dtype, most)
    first = [first_gemm(N, K) for N, K in SWEEP]
    assert first == sorted(first, reverse=True), first


def test_without_wgmma_all_weights_are_fused_for_as_many_rows():
    """gemv_4bit to its end on tensor cores, a range that neither the shape nor the GPU changes."""
    most = {last_fused(N, K, dtype, gpu) for N, K in SWEEP for gpu in OLDER for dtype in (F16, BF16)}
    assert len(most) == 1 and most == {last_fused(1024, 4096, BF16, "H200")}


def test_bf16_has_no_tensor_cores_on_sm_75():
    """There it is fused for no more rows than where K leaves half a unit, which tensor cores cannot take; fp16 is."""
    without, most = last_fused(4096, 4096 + 32, F16, "T4"), last_fused(4096, 4096, F16, "T4")
    assert 0 < without == last_fused(4096, 4096, BF16, "T4")
    assert most > without if has_tensor_cores("T4", F16) else most == without


@pytest.mark.parametrize("gpu", GPUS)
def test_what_tensor_cores_cannot_take_is_fused_for_few_rows(gpu):
    """Half units of K, rows of W that fill no tile and blocks of 32: the ordinary cores, the same rows for each."""
    few = {last_fused(4096, 4128, F16, gpu), last_fused(4097, 4096, F16, gpu), last_fused(4096, 4096, F16, gpu, 32)}
    most = last_fused(4096, 4096, F16, gpu)
    assert len(few) == 1 and min(few) > 0
    assert max(few) < most if has_tensor_cores(gpu, F16) else few == {most}


def test_what_no_kernel_takes_goes_by_panels():
    """K that is no whole number of the smallest blocks, and sizes beyond 32-bit indices."""
    for K in (1, 31, 33, 130):
        assert last_fused(98, K) == last_fused(96, K, F32) == 0, K
    for M, N, K in ((1 << 40, 4096, 4096), (1, 1 << 33, 4096), (1, 4096, 1 << 33)):
        assert {select(M, N, K, dtype, gpu) for dtype in (F32, F16, BF16) for gpu in GPUS} == {"panels"}, (M, N, K)
    # the weights of one product may be more than that; then tensor cores, whose index counts blocks, leave it
    assert 0 < last_fused(1 << 20, 1 << 20, F16, "A100") < last_fused(1 << 10, 1 << 10, F16, "A100")


@pytest.mark.parametrize(
    "architectures, sm, image",
    [
        ("80,90a,compute_80", 90, (90, True)),
        ("80,90", 90, (90, False)),  # plain sm_90 code: no wgmma
        ("80,90,90a", 90, (90, False)),  # which of the two loads is the driver's choice
        ("80,compute_90", 90, (90, False)),  # PTX counts by what it was compiled for
        ("80,compute_90a", 90, (90, True)),
        ("compute_80", 90, (80, False)),
        ("75,compute_75", 89, (75, False)),
        ("80,90a,compute_80", 89, (80, False)),
        ("80,86,compute_89", 89, (86, False)),  # machine code before PTX
        ("80,90a,compute_80", 100, (80, False)),
        ("80,90,compute_90", 100, (90, False)),
        ("100", 103, (100, False)),
        ("100a,compute_80", 103, (80, False)),
        ("80,90", 100, (0, False)),
        ("190a,compute_900", 90, (0, False)),
        ("80", 75, (0, False)),
        ("", 90, (0, False)),
    ],
)
def test_the_image_that_loads(architectures, sm, image):
    assert _C.kernel_image(architectures, sm) == image


if __name__ == "__main__":
    for gpu in GPUS:
        for N, K in SHAPES:
            print(f"{gpu:9} {N:>5} x {K:<5}", ", ".join(f"M >= {M}: {name}" for M, name in changes(N, K, BF16, gpu)))
