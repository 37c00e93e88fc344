"""csrc/plan*.c, from the facts of a product to kernels and launches: pure, so it is tested without a GPU.

The rows and sizes at which kernels change are measured (benchmarks/results) and may move. Tested is what must hold
wherever they lie; the boundaries are searched for, not written down.

`PYTHONPATH=tests python tests/plan/test_plan.py` prints the table: for each shape and GPU the rows of x at which the
kernel changes.
"""

import itertools
import os
import pathlib
import random
import re
import subprocess
import sys

import cases
import pytest
from bitshard import _C

ROOT = pathlib.Path(__file__).parents[2]
F32, F16, BF16 = 0, 1, 2
WIDE, SM80, SM75 = "gemm_4bit_sm90_wide", "gemm_4bit_sm80", "gemm_4bit_sm75"
NAMES = {"gemv_4bit", "gemv_4bit_simt", "gemm_4bit_sm90", WIDE, SM80, SM75, "panels"}
MANY_ROWS = {WIDE, SM80, SM75, "panels"}
TENSOR_CORES = NAMES - {"gemv_4bit_simt"}
SHAPES = tuple(cases.MODEL_LINEAR.values())
SWEEP = sorted({*SHAPES, *((16 * round(1.1**i), 4096) for i in range(30, 90))}, key=lambda s: s[0] * s[1])  # to 318 M
GPUS = {"T4": (75, 40), "A100": (80, 108), "RTX 4090": (89, 128), "H200": (90, 132), "B200": (100, 148)}
MODELLED = ("A100", "RTX 4090")  # where gemm_4bit_sm80 is chosen
OLDER = ("A100", "RTX 4090", "B200")  # with bf16 on tensor cores, without wgmma
ROWS = (*range(1, 130), 192, 193, 256, 257, 512, 1024, 4096, 65536)


STATE = _C.cuda_state()
BUILD = STATE["architectures"] if STATE["built"] else "75,80,90a,100,120,compute_120"  # without kernels: as with all


def image(gpu: str) -> tuple[int, bool]:
    """(architecture, for this GPU only) of the kernels that this build has for a GPU: by them it chooses."""
    return _C.kernel_image(BUILD, GPUS[gpu][0])


wgmma = pytest.mark.skipif(image("H200") != (90, True), reason="this build has no kernels of sm_90a")


def select(M: int, N: int, K: int, dtype: int = BF16, gpu: str = "H200", blocksize: int = 64, **facts) -> str:
    return _C.plan_linear_4bit(M, N, K, dtype, *GPUS[gpu], blocksize=blocksize, **facts)["kernel"]


def changes(N: int, K: int, dtype: int, gpu: str, **facts) -> list[tuple[int, str]]:
    """(M, kernel) wherever the kernel differs from that of one row fewer."""
    chosen = [(M, select(M, N, K, dtype, gpu, **facts)) for M in ROWS]
    return [pair for i, pair in enumerate(chosen) if i == 0 or pair[1] != chosen[i - 1][1]]


def last_fused(N: int, K: int, dtype: int = BF16, gpu: str = "H200", blocksize: int = 64, **facts) -> int:
    """The most rows that a kernel for few rows takes; 0 if it does not take one row."""
    rows = (M for M in range(1, 513) if select(M, N, K, dtype, gpu, blocksize, **facts) not in MANY_ROWS)
    return max(rows, default=0)


def first_gemm(N: int, K: int) -> float:
    """The fewest rows of bf16 that an H200 gives to gemm_4bit_sm90."""
    return min((M for M in range(1, 513) if select(M, N, K) == "gemm_4bit_sm90"), default=float("inf"))


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["float32", "float16", "bfloat16"])
def test_each_kernel_has_one_range_of_rows(gpu, dtype):
    """One row is fused, no kernel for few rows comes back after another took over, and many rows go to the vendor GEMM.

    Panels and kernels for many rows take turns while the weight is small: their time has steps, a tile of rows each.
    """
    for N, K in SWEEP:
        names = [name for _, name in changes(N, K, dtype, gpu)]
        few = list(itertools.takewhile(lambda name: name not in MANY_ROWS, names))
        many = names[len(few) :]
        assert few[0].startswith("gemv_4bit") and set(few) <= NAMES and len(few) == len(set(few)), (N, K, names)
        assert many and set(many) <= MANY_ROWS, (N, K, names)
        known = {"panels", *[WIDE] * has_wide(gpu, dtype), *[SM80] * (gpu in MODELLED and dtype != F32)}
        known |= {SM75} if gpu == "T4" and dtype == F16 else set()
        assert set(many) <= known, (N, K, names)
        assert many[-1] == "panels" or has_wide(gpu, dtype), (N, K, names)


@wgmma
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["float16", "bfloat16"])
def test_many_rows_of_large_weights_go_in_one_pass(dtype, gradient):
    """On Hopper, from the 65th row on forward and from the first on for the gradient; a small weight by panels."""
    few = [] if gradient else range(1, 65)
    for N, K in ((28672, 8192), (8192, 28672)):
        some = (*range(len(few) + 1, 257), 384, 512)
        assert {select(M, N, K, dtype, gradient=gradient) for M in some} == {WIDE}, (N, K)
    for N, K in SWEEP:
        assert WIDE not in {select(M, N, K, dtype, gradient=gradient) for M in few}, (N, K)
        if N * K > 50_000_000:
            assert {select(M, N, K, dtype, gradient=gradient) for M in (65, 128, 256, 512)} == {WIDE}, (N, K)
    assert {select(M, 1024, 4096, dtype, gradient=gradient) for M in range(65, 513)} == {"panels"}


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["float16", "bfloat16"])
def test_cards_without_wgmma_multiply_some_hundred_rows_in_one_pass(dtype, gradient):
    """By the model: where dequantizing costs more than decoding in each tile, which grows with the rows. Up to 64 rows
    forward stay fused; the gradient begins with the first row. A card without a model keeps panels."""
    few = range(1, 65) if not gradient else []
    for gpu in MODELLED:
        for N, K in ((4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192)):
            chosen = {M: select(M, N, K, dtype, gpu, gradient=gradient) for M in (*few, 65, 128, 256, 512, 4096, 16384)}
            assert {chosen[M] for M in (65, 128, 256, 512)} == {SM80}, (gpu, N, K, chosen)
            assert {chosen[M] for M in few} <= {"gemv_4bit"} and chosen[4096] == chosen[16384] == "panels", (gpu, N, K)
    assert {select(M, N, K, dtype, "B200", gradient=gradient) for N, K in SWEEP for M in (65, 512)} == {"panels"}


@wgmma
def test_every_kernel_is_chosen_somewhere():
    """gemm_4bit_sm90 and _wide on the one GPU whose instructions they need, the former the earlier the larger the
    weight; the latter alone knows the input gradient."""
    chosen = {gpu: {select(M, N, K, BF16, gpu) for N, K in SWEEP for M in ROWS} for gpu in GPUS}
    assert chosen.pop("H200") == TENSOR_CORES - {SM80, SM75}
    assert chosen.pop("T4") == {"gemv_4bit_simt", "panels"}  # no bf16 on its tensor cores
    assert set().union(*chosen.values()) == TENSOR_CORES - {"gemm_4bit_sm90", WIDE, SM75}
    assert first_gemm(*SWEEP[0]) > first_gemm(*SWEEP[-1])
    for gpu in GPUS:
        back = {select(M, N, K, BF16, gpu, gradient=True) for N, K in SWEEP for M in ROWS}
        assert back == {"panels", *[WIDE] * (gpu == "H200"), *[SM80] * (gpu in MODELLED)}, gpu


def has_tensor_cores(gpu: str, dtype: int) -> bool:
    return dtype != F32 and image(gpu)[0] >= (80 if dtype == BF16 else 75)


def has_wide(gpu: str, dtype: int) -> bool:
    return image(gpu) == (90, True) and dtype != F32


def takes(name: str, gradient: bool, M: int, N: int, K: int, dtype: int, gpu: str, blocksize: int) -> bool:
    """Whether a kernel can compute this, by what its .cu file says it reads."""
    whole_units = has_tensor_cores(gpu, dtype) and K % 64 == 0 and blocksize % 64 == 0
    if name == SM80:
        whole = K % 64 == 0 and blocksize % 32 == 0 and (not gradient or N % 8 == 0)
        return whole and dtype != F32 and image(gpu)[0] >= 80
    if name == SM75:
        whole = K % 64 == 0 and blocksize % 32 == 0 and (not gradient or N % 8 == 0)
        return whole and dtype == F16 and image(gpu)[0] == 75
    if name in MANY_ROWS:
        return name == "panels" or (has_wide(gpu, dtype) and whole_units)
    if name == "gemm_4bit_sm90":
        return image(gpu) == (90, True) and whole_units and N % 16 == 0 and not gradient
    few = whole_units and N % 16 == 0 and M <= 64 if name == "gemv_4bit" else K % 32 == 0 and M <= 16
    return few and not gradient


def test_no_kernel_gets_what_it_cannot_take():
    """Random products, most of them just beside what a kernel takes; on none of them a choice that would be refused."""
    draw, fused, wide = random.Random(0), 0, {False: 0, True: 0}
    for _ in range(20_000):
        M, gpu, blocksize = draw.choice((*range(1, 70), 128, 200)), draw.choice(list(GPUS)), draw.choice((32, 64, 256))
        N, K = (draw.randint(1, 900) * draw.choice((1, 8, 16)), draw.randint(1, 300) * draw.choice((1, 32, 64)))
        product, gradient = (M, N, K, draw.choice((F32, F16, BF16)), gpu, blocksize), draw.random() < 0.2
        name = select(*product, gradient=gradient)
        assert takes(name, gradient, *product), (name, product)
        fused += name not in MANY_ROWS
        wide[gradient] += name == WIDE
    assert fused > 2500
    assert min(wide.values()) > 10 or not has_wide("H200", BF16)


@wgmma
def test_larger_weights_are_fused_for_more_rows():
    """Reading 4 bits a weight instead of 16 pays for longer, and the wgmma kernels take over earlier.

    tensor_maps: without them there is no gemm_4bit_sm90_wide, and gemm_4bit_sm90 goes on in slices.
    """
    for dtype, tensor_maps in ((F32, True), (BF16, False)):
        most = [last_fused(N, K, dtype, tensor_maps=tensor_maps) for N, K in SWEEP]
        assert most == sorted(most) and most[0] < most[-1], (dtype, most)
    assert {last_fused(N, K, BF16) for N, K in SWEEP} == {64}  # and where there is, it follows
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
    """Half units of K and rows of W that fill no tile: the ordinary cores, the same rows; of short blocks fewer."""
    few = {last_fused(4096, 4128, F16, gpu), last_fused(4097, 4096, F16, gpu)}
    most = last_fused(4096, 4096, F16, gpu)
    assert len(few) == 1 and min(few) > 4
    for blocksize in (16, 32):
        names = [select(rows, 4096, 4096, F16, gpu, blocksize) for rows in (1, 4, 5)]
        assert names[:2] == ["gemv_4bit_simt"] * 2 and names[2] != "gemv_4bit_simt", (blocksize, names)
    assert max(few) < most if has_tensor_cores(gpu, F16) else few == {most}


def test_what_no_kernel_takes_goes_by_panels():
    """K that is no whole number of the smallest blocks, and sizes beyond 32-bit indices."""
    for K in (1, 31, 33, 130):
        assert last_fused(98, K) == last_fused(96, K, F32) == 0, K
    for M, N, K in ((1, 1 << 33, 4096), (1, 4096, 1 << 33), (1 << 20, 1 << 33, 64), (1 << 20, 64, 1 << 33)):
        for gradient in (False, True):
            chosen = {select(M, N, K, dtype, gpu, gradient=gradient) for dtype in (F32, F16, BF16) for gpu in GPUS}
            assert chosen == {"panels"}, (M, N, K, gradient)
    assert {select(1 << 40, 4096, 4096, F32, gpu) for gpu in GPUS} == {"panels"}
    assert {select(1 << 40, 4096, 4096, BF16, gpu) for gpu in OLDER} == {"panels"}
    # the weights of one product may be more than that; then tensor cores, whose index counts blocks, leave it
    assert 0 < last_fused(1 << 20, 1 << 20, F16, "A100") < last_fused(1 << 10, 1 << 10, F16, "A100")


# For a person to check: per product the bytes of scratch memory, then the launches, each entry[grid threads, cluster of
# blocks if there are clusters, KiB of dynamic shared memory if any]; 3 * (...): for as many slices of x. dx: gradient;
# by: that kernel is forced.
EVERY = "75,80,86,89,90a,100,120,compute_120"
ONE_PASS = {"3090", "A100", "4090", "L40S", "5090"}
CARDS = GPUS | {"H100": (90, 132), "3090": (86, 82), "4090": (89, 128), "L40S": (89, 142), "5090": (120, 170)}
ARM = {"Jetson Orin": (87, 16), "GH200": (90, 132), "GB200": (100, 148), "Jetson Thor": (110, 20), "GB10": (121, 48)}
PLANS = """
H100 bf16  4096 x 4096  M 1        0 gemv_4bit_bf16_m8_k4[132x1 512 224K]
H100 bf16  4096 x 14336 M 8   262144 gemv_4bit_bf16_m8_k8[132x1 448 c2 224K]
H100 bf16 14336 x 4096  M 16       0 gemv_4bit_bf16_m16_k4[132x1 512 224K]
H100 f16   4096 x 4096  M 32 2099200 x_units[1x1 256] gemm_4bit_f16_m32_p2[4x32 640 224K]
H100 bf16 28672 x 8192  M 16 3939328 x_units[64x1 256] gemm_4bit_bf16_m16[132x1 512 224K]
H100 bf16 28672 x 8192  M 32 7871488 x_units[128x1 256] gemm_4bit_bf16_m32[132x1 512 224K]
H100 bf16 14336 x 4096  M 64  524288 x_units[128x1 256] gemm_4bit_bf16_m64_p2[1x128 512 224K]
H100 bf16 28672 x 8192  M 192 by gemm_4bit_sm90 8395776 3 * (x_units[256x1 256] gemm_4bit_bf16_m64[132x1 384 224K])
H100 bf16 28672 x 8192  M 257 by panels 67108864 panels of 4096: dequantize_4bit_bf16_nested[4096x1 256]
H100 bf16  4096 x 4096  M 100 8392704 clear_flags[1x1 256] gemm_wide_bf16_m128[128x1 384 c2 189K]
H100 bf16 28672 x 8192  M 192 12980480 clear_flags[1x1 256] gemm_wide_bf16_m192[132x1 384 c2 213K]
H100 f16  14336 x 4096  M 1024 17305856 clear_flags[1x1 256] gemm_wide_f16_m256[132x1 384 c2 221K]
H100 bf16 16384 x 4096  M 256      0 gemm_wide_bf16_m256[128x1 384 c2 221K]
H100 bf16  4096 x 14336 dx M 1     0 gemm_wide_dgrad_bf16_m128[112x1 384 c2 189K]
H100 bf16  8192 x 8192  dx M 256 16781312 clear_flags[1x1 256] gemm_wide_dgrad_bf16_m256[128x1 384 c2 221K]
H100 bf16  1024 x 4096  dx M 128 8388608 panels of 4096: dequantize_4bit_bf16_nested[512x1 256]
H100 f32   4096 x 4096  M 2        0 gemv_4bit_simt_f32_nested[128x1 256]
H100 bf16  1001 x 4096  M 4        0 gemv_4bit_simt_bf16_nested[32x1 256]
H100 bf16  1024 x 4100  M 4  8396800 panels of 1024: dequantize_4bit_bf16_nested[513x1 256]
H100 bf16   512 x 40960 M 16       0 2 * (gemv_4bit_simt_bf16_nested[16x1 256])
B200 bf16 14336 x 4096  M 64       0 gemv_4bit_bf16_m16_k4[37x4 512 224K]
A100 bf16 14336 x 4096  M 1        0 gemv_4bit_bf16_m8_k8[108x1 256 97K]
A100 bf16 14336 x 4096  M 64 7340032 gemv_4bit_bf16_m32_k4[54x2 256 97K] join_splits_bf16_m32[1792x2 256]
A100 bf16  4096 x 14336 M 4   524288 gemv_4bit_bf16_m8_k8[108x1 224 97K] join_splits_bf16_m8[128x1 256]
3090 f16   4096 x 4096  M 32 1048576 gemv_4bit_f16_m32_k4[82x1 256 97K] join_splits_f16_m32[512x1 256]
4090 bf16 14336 x 4096  M 8        0 gemv_4bit_bf16_m8_k8[128x1 256 97K]
4090 bf16 14336 x 4096  M 65 8389120 gemm_sm80_bf16_m128[128x1 128 65K]
4090 bf16 14336 x 4096  M 8192 67108864 panels of 8192: dequantize_4bit_bf16_nested[4096x1 256]
A100 bf16  4096 x 4096  M 128 7078400 gemm_sm80_bf16_m128[108x1 128 65K]
A100 bf16 14336 x 4096  dx M 512 14156288 gemm_sm80_dgrad_bf16_m256[108x1 256 97K]
3090 bf16  4096 x 4096  dx M 1 5374464 gemm_sm80_dgrad_bf16_m128[82x1 128 65K]
3090 f16   4096 x 14336 M 512 10748416 gemm_sm80_f16_m256[82x1 256 97K]
5090 bf16 28672 x 8192  M 200 22283008 gemm_sm80_bf16_m256[170x1 256 97K]
L40S bf16  4096 x 4096  dx M 256 8388864 gemm_sm80_dgrad_bf16_m128[128x1 128 65K]
L40S bf16  8192 x 8192  M 16 2097152 gemv_4bit_bf16_m16_k4[140x1 256 97K] join_splits_bf16_m16[512x1 256]
5090 bf16  4096 x 14336 M 1   524288 gemv_4bit_bf16_m8_k8[168x1 224 97K] join_splits_bf16_m8[128x1 256]
T4   f16   4096 x 4096  M 1   262144 gemv_4bit_f16_m8_k8[40x1 128 53K] join_splits_f16_m8[128x1 256]
T4   f16   4096 x 4096  M 16 1048576 gemv_4bit_f16_m16_k4[40x1 128 57K] join_splits_f16_m16[256x1 256]
H100 bf16 28672 x 8192  dx M 512 by panels 58720256 panels of 1024: dequantize_4bit_bf16_nested[3584x1 256]
T4   f16   4096 x 4096  dx M 1 5243136 gemm_sm75_dgrad_f16_m256[40x1 256 49K]
T4   f16   4096 x 4096  M 128 5243136 gemm_sm75_f16_m256[40x1 256 49K]
T4   f16  14336 x 4096  M 512 5243136 gemm_sm75_f16_m256[40x1 256 49K]
T4   f16   4096 x 14336 dx M 256 5243136 gemm_sm75_dgrad_f16_m256[40x1 256 49K]
T4   f16   4096 x 4096  M 4096 33554432 panels of 4096: dequantize_4bit_f16_nested[2048x1 256]
T4   bf16  4096 x 4096  M 128 33554432 panels of 4096: dequantize_4bit_bf16_nested[2048x1 256]
T4   bf16  4096 x 4096  M 4        0 gemv_4bit_simt_bf16_nested[128x1 256]
"""
ROW = re.compile(r"(\S+) +(\S+) +(\d+) x (\d+) +(dx )?M (\d+) +(?:by (\S+) +)?(\d+) (.+)")


def launch_text(launch: dict) -> str:
    (x, y, _), cluster, shared = launch["grid"], launch["cluster"], launch["shared_bytes"]
    more = (f" c{cluster}" if cluster > 1 else "") + (f" {shared // 1024}K" if shared else "")
    return f"{launch['entry']}[{x}x{y} {launch['block']}{more}]"


def plan_text(plan: dict) -> str:
    if plan["kernel"] == "panels":
        return f"panels of {plan['panel_lines']}: {launch_text(plan['panel'])}"
    (part,) = plan["slices"]
    text = " ".join(map(launch_text, part["launches"]))
    return text if part["times"] == 1 else f"{part['times']} * ({text})"


@pytest.mark.parametrize("row", PLANS.strip().splitlines())
def test_plans(row):
    gpu, dtype, N, K, gradient, M, kernel, scratch, text = ROW.fullmatch(row).groups()
    number = {"f32": F32, "f16": F16, "bf16": BF16}[dtype]
    sizes = (int(M), int(N), int(K), number, *CARDS[gpu])
    plan = _C.plan_linear_4bit(*sizes, gradient=gradient is not None, kernel=kernel, architectures=EVERY)
    assert (plan["scratch_bytes"], plan_text(plan)) == (int(scratch), text)


def wide_launch(M: int, N: int, K: int, sms: int = 132, **facts) -> dict:
    """The product of the first slice, by gemm_4bit_sm90_wide."""
    plan = _C.plan_linear_4bit(M, N, K, BF16, 90, sms, kernel=WIDE, architectures=EVERY, **facts)
    assert sum(part["rows"] * part["times"] for part in plan["slices"]) == M
    return plan["slices"][0]["launches"][-1]


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("N, K", [(28672, 8192), (8192, 28672)])
def test_the_form_that_pads_least(N, K, gradient):
    """Tiles of 128, 192 or 256 tokens, whichever holds the rows of x with the least work."""
    rows = {128: (1, 64, 100, 128), 192: (129, 150, 192, 257, 300, 384), 256: (193, 250, 256, 500, 512, 2048, 65536)}
    for tokens, some in rows.items():
        for M in some:
            entry = wide_launch(M, N, K, gradient=gradient)["entry"]
            assert entry == f"gemm_wide_{'dgrad_' * gradient}bf16_m{tokens}", M


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("sms", [132, 114, 78, 3, 2])
def test_the_wide_kernel_on_smaller_cards(sms, gradient):
    """Pairs of blocks, as many as there are pairs of multiprocessors at most; chosen there, too."""
    for (N, K), M in itertools.product((*SHAPES, (200, 64), (1000, 320)), (1, 100, 160, 256, 300, 1000, 4096)):
        launch = wide_launch(M, N, K, sms, gradient=gradient)
        assert 0 < launch["grid"][0] <= sms and launch["grid"][0] % 2 == 0 and launch["grid"][1:] == (1, 1), (M, N, K)
        assert (launch["cluster"], launch["block"]) == (2, 384)
    if sms > 3:
        for M in (100, 256, 1024):
            plan = _C.plan_linear_4bit(M, 28672, 8192, BF16, 90, sms, gradient=gradient, architectures=EVERY)
            assert plan["kernel"] == WIDE, M


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_huge_products_are_estimated(gradient):
    """The largest M, N and K that indices allow: an estimate that overflowed would leave the kernel in no form."""
    side = (1 << 31) // 1024 - 64
    for M, N, K in ((1 << 40, 4096, 4096), (1 << 20, side, 1 << 16), (1 << 20, 1 << 10, side), (1 << 36, 1 << 9, side)):
        plan = _C.plan_linear_4bit(M, N, K, BF16, 90, 132, gradient=gradient, architectures=EVERY)
        assert plan["kernel"] in MANY_ROWS and plan["scratch_bytes"] <= 64 << 20, (M, N, K)
        assert wide_launch(M, N, K, gradient=gradient)["grid"] == (132, 1, 1)
    assert select(1 << 40, 28672, 8192, gradient=gradient, architectures=EVERY) in MANY_ROWS
    for N, K in ((1 << 22, 64), (64, 1 << 22), (side, 1 << 18)):  # beyond what an index reaches
        with pytest.raises(ValueError, match="W is too large for 32-bit indices"):
            _C.plan_linear_4bit(256, N, K, BF16, 90, 132, kernel=WIDE, gradient=gradient, architectures=EVERY)
        assert select(256, N, K, gradient=gradient, architectures=EVERY) != WIDE


def test_rows_left_over_have_a_slice_of_their_own():
    """200 rows are three slices of 64 and one of 8, which takes the smaller kernel."""
    plan = _C.plan_linear_4bit(200, 28672, 8192, BF16, 90, 132, kernel="gemm_4bit_sm90", architectures=EVERY)
    assert [(part["rows"], part["times"]) for part in plan["slices"]] == [(64, 3), (8, 1)]
    assert [part["launches"][-1]["entry"][-4:] for part in plan["slices"]] == ["_m64", "_m16"]
    assert plan["scratch_bytes"] == max(part["scratch_bytes"] for part in plan["slices"])
    plan = _C.plan_linear_4bit((2 << 16) + 100, 28672, 8192, BF16, 90, 132, kernel=WIDE, architectures=EVERY)
    assert [(part["rows"], part["times"]) for part in plan["slices"]] == [(1 << 16, 2), (100, 1)]
    assert [part["launches"][-1]["entry"][-5:] for part in plan["slices"]] == ["_m256", "_m128"]
    assert plan["scratch_bytes"] == max(part["scratch_bytes"] for part in plan["slices"])


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("vendor", ["torch", "cublas"])
def test_scratch_memory_is_bounded(gradient, vendor):
    """64 MiB beside the result, for every shape of the models and any number of rows; with cuBLAS its own included."""
    most = 0
    for N, K in SHAPES:
        for M in ROWS:
            for gpu in GPUS:
                plan = _C.plan_linear_4bit(M, N, K, BF16, *GPUS[gpu], gradient=gradient, vendor=vendor)
                assert plan["scratch_bytes"] <= 64 << 20, (M, N, K, gpu)
                assert (plan["vendor"] == vendor) == (plan["kernel"] == "panels") and plan["panel_lines"] <= max(N, K)
                most = max(most, plan["scratch_bytes"])
    assert most > 32 << 20
    sizes, by = (512, 28672, 8192, BF16, 90, 132), {"gradient": gradient, "vendor": vendor, "kernel": "panels"}
    small = _C.plan_linear_4bit(*sizes, **by, workspace=8 << 20)
    assert small["scratch_bytes"] <= 8 << 20 and small["panel_lines"] % 64 == 0
    least = _C.plan_linear_4bit(*sizes, **by, workspace=1)
    assert least["panel_lines"] == 1 and least["vendor_bytes"] == 0


def entries(plan: dict) -> list[str]:
    return [launch["entry"] for part in plan["slices"] for launch in part["launches"]]


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("kernel", [None, WIDE])
def test_the_wide_kernel_keeps_to_the_workspace(gradient, kernel):
    """A small one leaves no room for the sums of shared tiles: they are computed whole then, forced or not."""
    facts = {"gradient": gradient, "kernel": kernel, "architectures": EVERY}
    sizes = list(itertools.product(SHAPES, (100, 160, 256, 300, 512, 1000, 4096)))
    shared = {}
    for workspace in (64 << 20, 8 << 20, 1 << 20, 1):
        plans = [_C.plan_linear_4bit(M, N, K, BF16, 90, 132, workspace=workspace, **facts) for (N, K), M in sizes]
        wide = [plan for plan in plans if plan["kernel"] == WIDE]
        assert wide and all(plan["scratch_bytes"] <= workspace for plan in wide)
        shared[workspace] = sum("clear_flags" in entries(plan) for plan in wide)
    assert shared[64 << 20] > shared[8 << 20] >= shared[1 << 20] == shared[1] == 0


@pytest.mark.parametrize("gradient", [False, True])
def test_the_wide_kernel_keeps_its_scratch_small(gradient):
    """64 MiB at most for any number of rows; none where no tile is shared."""
    most, facts = 0, {"gradient": gradient, "kernel": "gemm_4bit_sm90_wide", "architectures": EVERY}
    for N, K in ((28672, 8192), (8192, 28672), (14336, 4096), (4096, 4096), (200, 64), (1 << 17, 4096)):
        for M in (1, 128, 129, 256, 300, 512, 2048, 4000, 1 << 16, 100_000):
            plan = _C.plan_linear_4bit(M, N, K, BF16, 90, 132, **facts)
            assert (plan["scratch_bytes"] > 0) == ("clear_flags" in entries(plan)), (M, N, K)
            assert sum(part["rows"] * part["times"] for part in plan["slices"]) == M
            most = max(most, plan["scratch_bytes"])
    assert 16 << 20 < most <= 64 << 20


@pytest.mark.parametrize(
    "M, facts, kernel",
    [
        (4, {}, "gemv_4bit"),
        (4, {"y_alignment": 2}, "gemv_4bit"),  # it stores single elements
        (4, {"packed_alignment": 4}, "gemv_4bit_simt"),
        (4, {"packed_alignment": 2}, "panels"),
        (4, {"x_alignment": 8}, "panels"),
        (48, {}, "gemm_4bit_sm90"),
        (48, {"y_alignment": 2}, "gemv_4bit"),  # the next best, not panels
        (48, {"packed_alignment": 8}, "panels"),
        (100, {"y_alignment": 2}, WIDE),
        (100, {"tensor_maps": False}, "gemm_4bit_sm90"),
        (100, {"tensor_maps": False, "y_alignment": 2}, "panels"),
        (400, {}, WIDE),
        (48, {"gradient": True}, WIDE),
        (48, {"gradient": True, "x_alignment": 8}, "panels"),
        (48, {"gradient": True, "tensor_maps": False}, "panels"),
        (48, {"N": 14335}, "panels"),
        (48, {"N": 14335, "vendor": ""}, WIDE),  # nobody multiplies panels
        (8, {"N": 14335, "vendor": ""}, "gemv_4bit_simt"),
        (1, {"gradient": True, "vendor": ""}, WIDE),
        (400, {"vendor": ""}, WIDE),
        (400, {"vendor": "", "tensor_maps": False}, "gemm_4bit_sm90"),  # in slices
        (400, {"vendor": "", "tensor_maps": False, "y_alignment": 2}, "gemv_4bit"),
        (400, {"vendor": "", "packed_alignment": 4}, "gemv_4bit_simt"),
        (48, {"kernel": "panels"}, "panels"),
        (400, {"kernel": "gemv_4bit"}, "gemv_4bit"),
        (4, {"kernel": "gemv_4bit_simt"}, "gemv_4bit_simt"),
        (400, {"kernel": "gemm_4bit_sm90_wide"}, "gemm_4bit_sm90_wide"),
        (400, {"kernel": "gemm_4bit_sm90_wide", "gradient": True, "y_alignment": 2}, "gemm_4bit_sm90_wide"),
        (400, {"tensor_maps": False}, "panels"),
    ],
)
def test_the_next_best_kernel(M, facts, kernel):
    sizes, rest = (facts.get("N", 14336), 4096), {name: value for name, value in facts.items() if name != "N"}
    assert _C.plan_linear_4bit(M, *sizes, BF16, 90, 132, architectures=EVERY, **rest)["kernel"] == kernel


@pytest.mark.parametrize(
    "facts, words",
    [
        ({"kernel": "gemm_4bit_sm90", "sm": 89}, "forced cannot multiply M = 48, N = 4096, K = 4096 of bfloat16"),
        ({"kernel": "gemm_4bit_sm90", "sm": 89}, "on sm_89: gemm_4bit_sm90: needs sm_90a code on sm_90"),
        ({"kernel": "gemm_4bit_sm90", "architectures": "80,90"}, "needs sm_90a code on sm_90"),
        ({"kernel": "gemm_4bit_sm90_wide", "sm": 89}, "needs sm_90a code on sm_90"),
        ({"kernel": "gemm_4bit_sm90_wide", "tensor_maps": False}, "the driver makes no tensor maps"),
        ({"kernel": "gemm_4bit_sm90_wide", "gradient": True, "x_alignment": 8}, "rows of x are not 16-byte aligned"),
        ({"kernel": "gemm_4bit_sm90_wide", "blocksize": 32}, "the blocksize is below 64"),
        ({"kernel": "gemm_4bit_sm90_wide", "dtype": F32}, "no float32"),
        ({"kernel": "gemm_4bit_sm90_wide", "sms": 1}, "fewer than 2 multiprocessors"),
        ({"kernel": "gemm_4bit_sm75", "sm": 80}, "no code of sm_75"),
        ({"kernel": "gemm_4bit_sm75", "sm": 75}, "only float16"),
        ({"kernel": "gemm_4bit_sm75", "sm": 75, "dtype": F16, "K": 4128}, "K is no multiple of 64"),
        ({"kernel": "gemm_4bit_sm75", "sm": 75, "dtype": F16, "K": 1 << 21}, "more stages than 16 bits count"),
        ({"kernel": "gemm_4bit_sm80", "sm": 75}, "no code for sm_80 or later"),
        ({"kernel": "gemm_4bit_sm80", "dtype": F32}, "no float32"),
        ({"kernel": "gemm_4bit_sm80", "K": 4128}, "K is no multiple of 64"),
        ({"kernel": "gemm_4bit_sm80", "x_alignment": 8}, "rows of x are not 16-byte aligned"),
        ({"kernel": "gemm_4bit_sm80", "packed_alignment": 8}, "packed is not 16-byte aligned"),
        ({"kernel": "gemm_4bit_sm80", "N": 4100, "gradient": True}, "N is no multiple of 8"),
        ({"kernel": "gemm_4bit_sm80", "N": 1 << 22}, "W is too large for 32-bit indices"),
        ({"kernel": "gemv_4bit", "N": 4097}, "gemv_4bit: N is no multiple of 16"),
        ({"kernel": "gemv_4bit", "K": 4128}, "K is no multiple of 64"),
        ({"kernel": "gemv_4bit", "blocksize": 32}, "the blocksize is below 64"),
        ({"kernel": "gemv_4bit", "dtype": F32}, "of float32 in blocks of 64"),
        ({"kernel": "gemv_4bit", "packed_alignment": 4}, "packed is not 16-byte aligned"),
        ({"kernel": "gemv_4bit", "gradient": True}, "linear_4bit_dgrad: the kernel that was forced"),
        ({"kernel": "gemv_4bit", "K": 1 << 20}, "K is longer than a cluster of blocks holds"),
        ({"kernel": "gemv_4bit_simt", "x_alignment": 8}, "rows of x are not 16-byte aligned"),
        ({"kernel": "panels", "vendor": ""}, "panels: no vendor's product"),
        ({"K": 130, "vendor": ""}, "nothing multiplies M = 48, N = 4096, K = 130"),
        (
            {"K": 130, "vendor": ""},
            "gemm_4bit_sm90_wide: K is no multiple of 64; gemv_4bit_simt: K is no multiple of 32; gemm_4bit_sm80: ",
        ),
        ({"K": 130, "vendor": "cublas", "bias_alignment": 2}, "panels: the bias is not 16-byte aligned for cuBLAS"),
        ({"kernel": "gemv"}, "no kernel 'gemv'"),
        ({"vendor": "nvidia"}, "no vendor 'nvidia'"),
        ({"x_alignment": 6}, "alignments 1, 2, 4, 8 or 16"),
        ({"N": 1 << 40, "K": 1 << 40}, "is not a tensor shape"),
    ],
)
def test_what_cannot_be_planned(facts, words):
    """Which kernel, for which numbers, and why not."""
    sizes = {"M": 48, "N": 4096, "K": 4096, "dtype": BF16, "sm": 90, "sms": 132}
    positional = [facts.get(name, value) for name, value in sizes.items()]
    rest = {name: value for name, value in facts.items() if name not in sizes}
    with pytest.raises(ValueError, match=re.escape(words)):
        _C.plan_linear_4bit(*positional, **{"architectures": EVERY, **rest})


@pytest.fixture
def unforced():
    yield
    for op in ("linear_4bit", "linear_4bit_dgrad"):
        _C.force_kernel(op, None)


def test_forcing_a_kernel(unforced):
    """A plan that names none takes the forced one; each direction has its own, and CPU products know of none."""
    _C.force_kernel("linear_4bit", "panels")
    assert select(1, 4096, 4096) == "panels"
    assert (
        _C.plan_linear_4bit(1, 4096, 4096, BF16, 90, 132, kernel="gemv_4bit", architectures=EVERY)["kernel"]
        == "gemv_4bit"
    )
    _C.force_kernel("linear_4bit_dgrad", "gemv_4bit_simt")
    with pytest.raises(ValueError, match="gemv_4bit_simt: no input gradient"):
        _C.plan_linear_4bit(1, 4096, 4096, BF16, 90, 132, gradient=True)
    _C.force_kernel("linear_4bit", None)
    assert select(1, 4096, 4096) == "gemv_4bit"
    for op, name in (("linear_4bit", "dense"), ("quantize_4bit", "panels")):
        with pytest.raises(ValueError, match=f"'{name if op == 'linear_4bit' else op}'"):
            _C.force_kernel(op, name)


def in_fresh_process(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=300
    )


def test_forcing_by_the_environment():
    code = "import torch; from bitshard import _C; print(_C.plan_linear_4bit(1, 4096, 4096, 2, 90, 132)['kernel'])"
    assert in_fresh_process(code, BITSHARD_LINEAR_4BIT="gemv_4bit_simt").stdout == "gemv_4bit_simt\n"
    wrong = in_fresh_process(code, BITSHARD_LINEAR_4BIT_DGRAD="fast")
    assert (
        wrong.returncode != 0
        and "no kernel 'fast' of linear_4bit_dgrad: expected one of gemm_4bit_sm90, " in wrong.stderr
    )


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


def documented(header: str) -> list[list[str]]:
    """Rows of the table of docs/cards.md whose header begins so."""
    _, _, behind = (ROOT / "docs/cards.md").read_text(encoding="utf-8").partition(header)
    lines = itertools.takewhile(lambda line: line.startswith("|"), behind.splitlines()[2:])
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("machine, header", [("x86_64", "| GPU | is |"), ("aarch64", "| GPU of an Arm machine | is |")])
def test_documented_images(machine, header):
    """What of a default build and of one for all architectures each card loads."""
    default, every = (
        re.search(rf'{name}"?[:=] "(.+?)"', (ROOT / "setup.py").read_text().replace(" =", "="))[1]
        for name in ("ARCHITECTURES_DEFAULT", machine)
    )
    assert (every == EVERY) is (machine == "x86_64")
    rows, cards = documented(header), CARDS if machine == "x86_64" else ARM
    assert {name.removeprefix("RTX ") for name, *_ in rows} <= {name.removeprefix("RTX ") for name in cards}
    for name, is_, *loaded in rows:
        sm = cards.get(name, cards.get(name.removeprefix("RTX ")))[0]
        images = [_C.kernel_image(build, sm) for build in (default, every)]
        assert [is_, *loaded] == [f"sm_{sm}", *(f"{arch}{'a' * only}" for arch, only in images)], name


def test_documented_rows():
    """Up to how many rows of x a fused kernel takes the layers of Llama 3, on each card that docs/cards.md names."""
    dtypes = {"float32": F32, "float16": F16, "bfloat16": BF16}
    rows = documented("| GPU | x | kernel")
    assert len(rows) == 4
    for names, x, kernel, most in rows:
        names = [name.strip().removeprefix("RTX ") for name in names.split(",")]
        cards = set(CARDS) - {"B200", "RTX 4090"} if "all" in names[0] else set(names)
        dtype, low, high = dtypes[x.split(",")[0]], *map(int, (re.findall(r"\d+", most) * 2)[:2])
        for card, (N, K) in itertools.product(cards, SHAPES):
            plans = [_C.plan_linear_4bit(M, N, K, dtype, *CARDS[card], architectures=EVERY) for M in range(1, 130)]
            chosen = [plan["kernel"] for plan in plans]
            many = {SM80} if card in ONE_PASS and dtype != F32 else {"panels"}
            many = {SM75} if card == "T4" and dtype == F16 else many
            last = next(M for M, name in enumerate(chosen) if name in MANY_ROWS)
            assert low <= last <= high and set(chosen[:last]) == {kernel} and set(chosen[last:]) == many, card
            back = _C.plan_linear_4bit(1, N, K, dtype, *CARDS[card], architectures=EVERY, gradient=True)
            assert {back["kernel"]} == many, card


def test_documented_rows_of_one_pass():
    """Up to how many rows gemm_4bit_sm80 takes these layers, as docs/cards.md has it: from the least to the most."""
    steps = (128, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 8192)
    rows = documented("| GPU | forward")
    assert {name.removeprefix("RTX ") for name, *_ in rows} == ONE_PASS | {"T4"}
    for name, *documented_rows in rows:
        kernel, dtype = (SM75, F16) if name == "T4" else (SM80, BF16)
        for gradient, text in zip((False, True), documented_rows, strict=True):
            low, high = map(int, (re.findall(r"\d+", text.replace(",", "")) * 2)[:2])
            for N, K in SHAPES:
                settings = (dtype, *CARDS[name.removeprefix("RTX ")])
                plans = {
                    M: _C.plan_linear_4bit(M, N, K, *settings, architectures=EVERY, gradient=gradient) for M in steps
                }
                taken = [M for M, plan in plans.items() if plan["kernel"] == kernel]
                assert all(plans[M]["kernel"] == kernel for M in steps if M <= low) and max(taken) <= high, (name, N, K)


if __name__ == "__main__":
    for gpu in GPUS:
        for N, K in SHAPES:
            print(f"{gpu:9} {N:>5} x {K:<5}", ", ".join(f"M >= {M}: {name}" for M, name in changes(N, K, BF16, gpu)))


# ---- stacks of experts ----


def grouped(E, M, N, K, **settings):
    return _C.plan_grouped_linear_4bit(E, M, N, K, 2, 90, 132, architectures="90a", **settings)


@pytest.mark.parametrize(
    "E, M, N, K, gradient, kernel, entry, cluster",
    [
        (128, 8, 1536, 2048, False, "gemv_4bit_grouped", "m8_k4", 1),
        (256, 8, 4096, 7168, False, "gemv_4bit_grouped", "m8_k8", 1),
        (8, 2, 4096, 14336, False, "gemv_4bit_grouped", "m8_k8", 1),
        (8, 128, 28672, 4096, False, "gemv_4bit_grouped", "m16_k4", 1),
        (128, 4096, 1536, 2048, False, "gemm_4bit_sm90_wide_grouped", "m128", 2),
        (128, 32768, 1536, 2048, False, "gemm_4bit_sm90_wide_grouped", "m256", 2),
        (32, 16384, 5760, 2880, False, "gemm_4bit_sm90_wide_grouped", "m256", 2),
        (256, 32768, 4096, 7168, True, "gemm_4bit_sm90_wide_grouped", "dgrad_bf16_m256", 2),
        (1, 10**8, 4096, 4096, False, "gemm_4bit_sm90_wide_grouped", "m256", 2),
        (128, 8, 1536, 2048, True, "gemm_4bit_sm90_wide_grouped", "dgrad_bf16_m128", 2),
    ],
)
def test_grouped_products(E, M, N, K, gradient, kernel, entry, cluster):
    """The kernel, its form and its clusters, by the rows that an expert has on average."""
    plan = grouped(E, M, N, K, gradient=gradient)
    launch = plan["slices"][0]["launches"][0]
    assert plan["kernel"] == kernel and entry in launch["entry"] and launch["cluster"] == cluster
    assert launch["grid"][0] <= 132 and launch["shared_bytes"] <= 227 << 10


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("sm, rows, blocksize, form", [
    (80, 16, 64, "few"), (80, 80, 64, "few"), (80, 81, 64, "m128"), (80, 144, 64, "m128"), (80, 145, 64, "m256"),
    (80, 223, 64, "m256"), (80, 224, 64, "m128"), (80, 431, 64, "m128"), (80, 432, 64, "m256"), (80, 16, 32, "m256"),
    (80, 512, 32, "m256"),
    (86, 16, 64, "m256"), (89, 100, 4096, "m256"), (120, 512, 128, "m256"),
])  # fmt: skip
def test_grouped_products_of_cards_with_a_model(sm, rows, blocksize, form, gradient):
    """In one pass, without scratch memory, in 99 KiB of shared memory."""
    form = "m128" if form == "few" and not gradient else form
    settings = {"gradient": gradient, "blocksize": blocksize, "architectures": "80,86,89,120"}
    plan = _C.plan_grouped_linear_4bit(128, 128 * rows, 1536, 2048, 2, sm, 100, **settings)
    (part,) = plan["slices"]
    (launch,) = part["launches"]
    assert plan["kernel"] == "gemm_4bit_sm80_grouped" and launch["entry"].endswith(form) and not plan["scratch_bytes"]
    assert launch["grid"][0] == (100 if form == "m256" else 200) and launch["shared_bytes"] <= 99 << 10


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("rows, blocksize", [(4, 64), (64, 32), (512, 4096)])
def test_grouped_products_of_a_t4(rows, blocksize, gradient):
    """In one pass for fp16, without scratch memory: panels multiply each expert with all rows there."""
    settings = {"gradient": gradient, "blocksize": blocksize, "architectures": "75,80"}
    plan = _C.plan_grouped_linear_4bit(32, 32 * rows, 1536, 2048, F16, 75, 40, **settings)
    (launch,) = plan["slices"][0]["launches"]
    assert plan["kernel"] == "gemm_4bit_sm75_grouped" and launch["grid"][0] == 40 and not plan["scratch_bytes"]
    plan = _C.plan_grouped_linear_4bit(1, 8192, 1536, 2048, F16, 75, 40, **settings)
    assert plan["kernel"] == "panels"  # of one expert they have no more to do


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("dtype, way", [(1, "f16"), (2, "bf16")])
@pytest.mark.parametrize("blocksize, name", [(32, "mx"), (16, "nv")])
def test_short_blocks_on_hopper(blocksize, name, dtype, way, gradient):
    """MXFP4 and NVFP4 by kernels of their own: weights from 65 rows on and gradients, stacks."""
    settings = {"gradient": gradient, "blocksize": blocksize, "format": 2, "architectures": "80,90a"}
    for rows, form in ((65, "m256"), (2048, "m256")):
        plan = _C.plan_grouped_linear_4bit(32, 32 * rows, 2880, 2880, dtype, 90, 132, **settings)
        (launch,) = plan["slices"][0]["launches"]
        assert plan["kernel"] == "gemm_4bit_sm90_wide_grouped" and launch["shared_bytes"] <= 227 << 10
        assert launch["entry"] == f"gemm_wide_grouped_{name}_{'dgrad_' * gradient}{way}_{form}"
    for M, form in ((100, "m128"), (192, "m192"), (2048, "m256")):
        plan = _C.plan_linear_4bit(M, 14336, 4096, dtype, 90, 132, kernel=WIDE, **settings)
        launch = plan["slices"][0]["launches"][-1]
        assert launch["entry"] == f"gemm_wide_{name}_{'dgrad_' * gradient}{way}_{form}"
        assert launch["shared_bytes"] <= 227 << 10
    assert select(100, 14336, 4096, dtype, **settings) == WIDE
    assert select(64 if gradient else 65, 4096, 4096, dtype, **settings) == WIDE


def test_short_blocks_that_are_none_of_these_formats():
    """Blocks of 32 of NF4, and E2M1 with plain scales, are for gemm_4bit_sm80."""
    for facts in ({"format": 0}, {"format": 2, "nested": False}):
        settings = {"blocksize": 32, "architectures": "80,90a", **facts}
        assert _C.plan_linear_4bit(256, 14336, 4096, BF16, 90, 132, **settings)["kernel"] == SM80
        with pytest.raises(ValueError, match="the blocksize is below 64"):
            _C.plan_linear_4bit(256, 14336, 4096, BF16, 90, 132, kernel=WIDE, **settings)


def test_more_experts_than_wide_tiles_of_short_blocks_hold():
    """Scales of blocks of 16 take shared memory: above 480 experts tiles have 128 rows."""
    for E, form in ((480, "m256"), (481, "m128"), (512, "m128")):
        settings = {"blocksize": 16, "format": 2}
        launch = grouped(E, E * 2048, 512, 512, **settings)["slices"][0]["launches"][0]
        assert launch["entry"].endswith(form) and launch["shared_bytes"] <= 227 << 10
        assert grouped(E, E * 2048, 512, 512, **{**settings, "blocksize": 32})["slices"][0]["launches"][0][
            "entry"
        ].endswith("m256")


@pytest.mark.parametrize(
    "settings, sm, dtype",
    [({}, 75, 2), ({}, 80, 0), ({"blocksize": 16}, 90, 2), ({}, 90, 0)]
    + [({"x_alignment": 8}, sm, 2) for sm in (80, 90)],
)
def test_grouped_products_that_no_kernel_takes(settings, sm, dtype):
    plan = _C.plan_grouped_linear_4bit(
        128, 64, 1536, 2048, dtype, sm, 132, architectures="75,80,90a", workspace=256 << 20, **settings
    )
    assert plan["kernel"] == "panels" and not plan["slices"]
    assert plan["panel_lines"] == (256 << 20) // (1536 * 2048 * (4 if dtype == 0 else 2))


def test_more_rows_than_a_word_counts_tiles_of():
    """2^20 tiles of 128 tokens, experts' last ones included."""
    assert grouped(8, (2**20 - 9) * 128, 64, 64)["kernel"] == "gemm_4bit_sm90_wide_grouped"
    assert grouped(8, (2**20 - 8) * 128, 64, 64)["kernel"] == "panels"


def test_grouped_plans_refuse_nonsense():
    for E in (0, -1, 2**31):
        with pytest.raises(ValueError, match="experts"):
            grouped(E, 8, 64, 64)
    with pytest.raises(ValueError, match="positive"):
        grouped(4, 0, 64, 64)
    with pytest.raises(TypeError):
        _C.plan_grouped_linear_4bit("4", 8, 64, 64, 2, 90, 132)
