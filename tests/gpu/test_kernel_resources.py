"""Each kernel of each architecture in the build fits there: registers, shared memory, spills, read from the binary.

No GPU and no tools of CUDA are needed. Architectures that this build does not have are read from another one:

    BITSHARD_CUDA_ARCHS=all python setup.py build_ext --build-lib build/all --build-temp build/all-temp
    BITSHARD_KERNELS=build/all/bitshard/_C.abi3.so python -m pytest tests/gpu/test_kernel_resources.py

`PYTHONPATH=tests python tests/gpu/test_kernel_resources.py [FILE]` prints the table of docs/cards.md.
"""

import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from bitshard import _C
from helpers import cards, cubins
from helpers.cards import ALONE, LIMITS, Launch, blocks_at_once, expected, launch_of
from helpers.cubins import MACHINE_CODE, PTX, Kernel

FILE = pathlib.Path(os.environ.get("BITSHARD_KERNELS", _C.__file__))
IMAGES = cubins.images(FILE)
CODE = [image for image in IMAGES if image.kind == MACHINE_CODE]
ARCHS = list(dict.fromkeys(image.name for image in CODE))
NAMES = frozenset(name for image in CODE for name in cubins.kernels(image))

if not IMAGES:
    pytest.skip("bitshard was built without nvcc: there are no kernels to read", allow_module_level=True)
# (architecture in the build, GPU that loads it): code of sm_80 also runs on cards with less memory.
LOADED = [(arch, sm) for arch in ARCHS for sm in LIMITS if _C.kernel_image(arch, sm)[0]]
by_arch = pytest.mark.parametrize("arch", ARCHS)
by_gpu = pytest.mark.parametrize("arch, sm", LOADED, ids=[f"{arch}-on-{sm}" for arch, sm in LOADED])
needs_code = pytest.mark.skipif(
    not CODE, reason="only PTX in this build: registers are known once a driver compiles it"
)

# Local memory that is not 0, and why: (kernels, architectures, bytes of a thread, accesses in the kernel itself).
EXCEPTIONS = (
    # any_block_8bit, a function that takes a tensor's last block, indexes arrays as it runs; the kernel hands it those.
    (r"optimizer_8bit_", "", 288, 25),
    (r"optimizer_8bit_ademamix_f32", "", 288, 31),
    (r"optimizer_8bit_ademamix_b?f16", "", 288, 39),  # all loads of a block go out before anything else
    # Three moments of 8 elements and 1024 threads, so 64 registers: numbers that do not change are read again.
    (r"optimizer_32bit_ademamix_", "", 80, 7),
    # 512 threads leave 128 registers; ptxas for sm_100 needs up to 4 more than for sm_90.
    (r"gemv_4bit_\w+_(?:m16_k4|m16_k4_any|m8_k8_any)$", "100", 16, 8),
    (r"gemv_4bit_\w+_(?:m16_k4|m16_k4_any|m8_k8_any)$", "110", 16, 8),
    # An array of 64 numbers, which ptxas 13.0 keeps in registers for every architecture before these.
    *((r"round_4bit_", arch, 256, 1787) for arch in ("100", "110", "120")),
    # What a block keeps from one segment of its work to the next, beside 128 registers of 512 threads.
    (r"gemv_4bit_grouped_", "", 64, 64),
    (r"gemv_4bit_grouped_\w+_(?:mx|nv)$", "90a", 80, 41),  # and scales of short blocks
    (r"merge_4bit_f32_", "90a", 8, 3),  # 64 sums in 128 registers
)
LOCAL_ACCESS = (0x183, 0x187)  # LDL, STL: low nine bits of an instruction
WGMMA = (0x1F0, 0x1F1)  # HGMMA, IGMMA of sm_90a; bits 87 to 89 say which register is the flag to add, 0: a constant


def kernels_of(arch: str) -> list[tuple[cubins.Image, Kernel]]:
    return [(image, k) for image in CODE if image.name == arch for k in cubins.kernels(image).values()]


def launches(arch: str, sm: int) -> list[tuple[Kernel, Launch]]:
    """What the host starts on a GPU `sm` of the kernels of one architecture, each with its largest block."""
    pairs = [(kernel, launch_of(kernel, image, sm)) for image, kernel in kernels_of(arch)]
    return [(kernel, launch) for kernel, launch in pairs if launch is not None]


def too_large(pairs: list[tuple[Kernel, Launch]], limits: cards.Limits) -> dict[str, Launch]:
    """Kernels of which a multiprocessor does not hold one block."""
    return {kernel.name: launch for kernel, launch in pairs if blocks_at_once(kernel, launch, limits) < 1}


def local_accesses(kernel: Kernel) -> int:
    code = kernel.code
    return sum(int.from_bytes(code[i : i + 2], "little") & 0x1FF in LOCAL_ACCESS for i in range(0, len(code), 16))


def wgmma_flags(kernel: Kernel) -> list[int]:
    words = (int.from_bytes(kernel.code[i : i + 16], "little") for i in range(0, len(kernel.code), 16))
    return [word >> 87 & 7 for word in words if word & 0x1FF in WGMMA]


# ---- that it is read right ----


def test_images_are_those_of_the_build():
    """Each fatbin holds what setup.py was told to compile, machine code and PTX, or of that what its line names."""
    fatbins = [sorted(i.name for i in IMAGES if i.fatbin == fatbin) for fatbin in {image.fatbin for image in IMAGES}]
    wanted = max(fatbins, key=len)
    if FILE.samefile(_C.__file__):
        assert wanted == sorted(_C.cuda_state()["architectures"].split(","))
    sources = (pathlib.Path(__file__).parents[2] / "cuda" / "sources.txt").read_text().splitlines()
    named = [line.split()[1:] for line in sources if line and line[0] != "#"]
    assert sum(each == ["90a"] for each in named) >= 6 and sum("75" in each for each in named) >= 2
    expected = [[arch for arch in wanted if not each or arch in each] for each in named]
    assert sorted(fatbins) == sorted(each for each in expected if each)


@needs_code
@by_arch
def test_the_host_names_every_kernel(arch):
    """Each architecture has the kernels that the host's table names, but for those of sm_90a or sm_75 alone."""
    found = [name for image in CODE if image.name == arch for name in cubins.kernels(image)]
    named = cubins.named_by_host(FILE, NAMES)
    assert len(found) == len(set(found))
    assert set(found) == {
        name
        for name in named
        if (arch == "90a" or not name.startswith(cards.ONLY_90A))
        and (arch == "75" or not name.startswith(cards.ONLY_75))
    }


@needs_code
@by_gpu
def test_plans_start_every_kernel(arch, sm):
    """Products of the sweep start all kernels that are there for them, but for empty shells of other architectures."""
    started = {kernel.name for kernel, _ in launches(arch, sm) if not ALONE.match(kernel.name)}
    there = [(image, kernel) for image, kernel in kernels_of(arch) if not ALONE.match(kernel.name)]
    assert started == {kernel.name for image, kernel in there if expected(kernel.name, image, sm)}


@needs_code
@by_arch
@pytest.mark.skipif(not shutil.which("cuobjdump"), reason="needs cuobjdump")
def test_cuobjdump_reads_the_same(arch, tmp_path):
    file, line = (
        tmp_path / "image.cubin",
        re.compile(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)"),
    )
    for image in [image for image in CODE if image.name == arch]:
        file.write_bytes(image.data)
        text = subprocess.run(["cuobjdump", "-res-usage", file], capture_output=True, text=True, check=True).stdout
        theirs = {name: tuple(map(int, numbers)) for name, *numbers in line.findall(text)}
        assert set(theirs) == set(cubins.kernels(image))
        for kernel in cubins.kernels(image).values():
            registers, stack, shared, local = theirs[kernel.name]
            reserved = cubins.RESERVED_SHARED if image.arch >= 90 and shared else 0
            assert (kernel.registers, kernel.shared, kernel.local) == (registers, shared - reserved, stack + local)


# ---- what it says ----


@needs_code
@by_gpu
def test_every_kernel_fits(arch, sm):
    """One block at least, as the host starts it, on a multiprocessor of each GPU that loads it."""
    pairs = launches(arch, sm)
    assert len(pairs) > 80
    assert not too_large(pairs, LIMITS[sm])
    assert all(launch.threads <= (kernel.max_threads or cards.BLOCK_THREADS) for kernel, launch in pairs)


@needs_code
@by_arch
def test_no_local_memory(arch):
    """No spills and no arrays in memory, but for EXCEPTIONS."""
    for image, kernel in [(image, k) for image, k in kernels_of(arch) if expected(k.name, image)]:
        allowed = [(0, 0)]
        allowed += [(n, k) for names, only, n, k in EXCEPTIONS if re.match(names, kernel.name) and only in ("", arch)]
        bytes_, accesses = max(allowed)
        assert kernel.local <= bytes_ and local_accesses(kernel) <= accesses, (image.name, kernel)


@pytest.mark.skipif("90a" not in ARCHS, reason="needs code of sm_90a")
def test_warps_of_a_group_multiply_alike():
    """Of sums that some warps set to 0, ptxas can make a flag of each warp: one that is then taken for all four."""
    flags = {kernel.name: wgmma_flags(kernel) for _, kernel in kernels_of("90a")}
    assert sum(map(bool, flags.values())) > 50
    assert not [name for name, found in flags.items() if any(found)]


@needs_code
@by_gpu
def test_kernels_bound_by_memory_have_company(arch, sm):
    """Dequantizing and quantizing hide the latency of memory by blocks beside each other: 768 threads at least."""
    pairs = [
        (k, launch) for k, launch in launches(arch, sm) if re.match(r"(?:de)?quantize_(?:4bit|blockwise)_b?f", k.name)
    ]
    alone = {k.name: n for k, launch in pairs if (n := blocks_at_once(k, launch, LIMITS[sm])) * launch.threads < 768}
    assert len(pairs) >= 18 and not alone


@pytest.mark.parametrize("name", sorted({image.name for image in IMAGES if image.kind == PTX}))
def test_ptx(name):
    """Counted, so that a build of PTX only does not look tested."""
    pytest.skip("PTX: registers and spills are known once a driver compiles it")


# ---- that it can fail ----


@needs_code
@by_gpu
def test_a_smaller_gpu_is_too_small(arch, sm):
    """Half the shared memory, a third of the registers of a block, fewer threads: each is found."""
    pairs, limits = launches(arch, sm), LIMITS[sm]
    half = dataclasses.replace(limits, shared_block=limits.shared_block // 2)
    assert any(name.startswith("gemv_4bit_f16") for name in too_large(pairs, half))
    assert any(name.startswith("optimizer_8bit") for name in too_large(pairs, dataclasses.replace(limits, threads=512)))
    more = [(dataclasses.replace(kernel, registers=kernel.registers + 9), launch) for kernel, launch in pairs]
    assert any(name.startswith("optimizer_8bit") for name in too_large(more, limits))
    assert len(too_large([(dataclasses.replace(k, registers=256), launch) for k, launch in pairs], limits)) == len(
        pairs
    )


def test_blocks_at_once():
    """By registers, threads, shared memory and number, as the guide's formula gives them."""
    small = Kernel("k", 32, 0, 0, None, b"")
    assert blocks_at_once(small, Launch(256, 0), LIMITS[80]) == 8
    assert blocks_at_once(small, Launch(256, 0), LIMITS[86]) == 6
    assert blocks_at_once(small, Launch(32, 0), LIMITS[75]) == 16
    assert blocks_at_once(dataclasses.replace(small, registers=33), Launch(256, 0), LIMITS[80]) == 6
    assert blocks_at_once(small, Launch(128, 99 * 1024), LIMITS[86]) == 1
    assert blocks_at_once(small, Launch(128, 99 * 1024 + 16), LIMITS[86]) == 0
    assert blocks_at_once(small, Launch(128, 64 * 1024), LIMITS[75]) == 1
    assert blocks_at_once(dataclasses.replace(small, shared=1024), Launch(64, 81 * 1024), LIMITS[80]) == 1
    assert blocks_at_once(small, Launch(64, 81 * 1024), LIMITS[80]) == 2


GROUPS = {
    "gemv_4bit, 8 tokens, 4 units": r"gemv_4bit_b?f16_m8_k4",
    "gemv_4bit, 8 tokens, 8 units": r"gemv_4bit_b?f16_m8_k8",
    "gemv_4bit, 16 tokens": r"gemv_4bit_b?f16_m16",
    "gemv_4bit, 32 tokens": r"gemv_4bit_b?f16_m32",
    "gemv_4bit_simt": r"gemv_4bit_simt",
    "join_splits": r"join_splits",
    "gemm_4bit_sm90, 16 tokens": r"gemm_4bit_b?f16_m16",
    "gemm_4bit_sm90, 32 tokens": r"gemm_4bit_b?f16_m32(?:_any)?$",
    "the same, two parts of K": r"gemm_4bit_b?f16_m32_p2",
    "gemm_4bit_sm90, 64 tokens": r"gemm_4bit_b?f16_m64(?:_any)?$",
    "the same, two parts of K ": r"gemm_4bit_b?f16_m64_p2",
    "x_units": r"x_units",
    "gemm_4bit_sm90_wide, 128 tokens": r"gemm_wide_.*m128",
    "gemm_4bit_sm90_wide, 192 tokens": r"gemm_wide_.*m192",
    "gemm_4bit_sm90_wide, 256 tokens": r"gemm_wide_.*m256",
    "clear_flags": r"clear_flags",
    "gemm_4bit_sm75": r"gemm_sm75_(?!grouped)",
    "gemm_4bit_sm75_grouped": r"gemm_sm75_grouped_",
    "gemm_4bit_sm80, 128 rows": r"gemm_sm80_(?!grouped).*m128",
    "gemm_4bit_sm80, 256 rows": r"gemm_sm80_(?!grouped).*m256",
    "gemm_4bit_sm80_grouped, 128 rows": r"gemm_sm80_grouped_.*m128",
    "gemm_4bit_sm80_grouped, 256 rows": r"gemm_sm80_grouped_.*m256",
    "dequantize_4bit": r"dequantize_4bit_b?f",
    "quantize_4bit": r"quantize_4bit_b?f",
    "quantize_blockwise": r"quantize_blockwise_b?f",
    "dequantize_blockwise": r"dequantize_blockwise_b?f",
    "those of odd sizes (`_any`)": r"(?:de)?quantize_(?:4bit|blockwise)_any",
    "checksum": r"checksum",
    "gemv_int8, 8 rows": r"gemv_int8_b?f16_m8",
    "gemv_int8, 16 rows": r"gemv_int8_b?f16_m16",
    "join_codes": r"join_codes",
    "gemv_int8_dgrad": r"gemv_int8_dgrad",
    "gemm_int8": r"gemm_int8_(?:i32|b?f)",
    "gemm_4bit_int8": r"int8_gemm_4bit",
    "gemm_int8_sm90, 64 x 64": r"gemm_int8_sm90_.*m64_n64",
    "gemm_int8_sm90, 64 x 128": r"gemm_int8_sm90_.*m64_n128",
    "gemm_int8_sm90, 128 x 96": r"gemm_int8_sm90_.*m128_n96",
    "gemm_int8_sm90, 128 x 128": r"gemm_int8_sm90_.*m128_n128",
    "gemm_int8_sm90, 128 x 256": r"gemm_int8_sm90_.*m128_n256",
    "mixed_int8_sm90": r"mixed_int8_sm90",
    "dgrad_int8_sm90": r"dgrad_int8_sm90",
    "quantize_int8": r"quantize_int8",
    "outliers_int8, clear_int8": r"outliers_int8|clear_int8",
    "dequantize_int8, scale_product_int8": r"dequantize_int8|scale_product_int8",
    "linear_int8_any": r"linear_int8_(?:dgrad_)?any",
    "sort_by_expert": r"sort_by_expert",
    "sum_by_token": r"sum_by_token",
    "search_4bit": r"search_4bit",
    "round_4bit": r"round_4bit",
    "merge_4bit, merge_e2m1": r"merge_(?:4bit|mxfp4|nvfp4)",
    "optimizer, 32 bits": r"optimizer_32bit",
    "optimizer, 8 bits": r"optimizer_8bit",
    "optimizer's norm": r"optimizer_s",
}


def cell(pairs: list[tuple[Kernel, Launch]], limits: cards.Limits) -> str:
    """registers; KiB of shared memory; blocks at once; local memory where there is some."""
    if not pairs:
        return "-"

    def span(values: list[int]) -> str:
        return str(min(values)) if min(values) == max(values) else f"{min(values)}-{max(values)}"

    text = span([kernel.registers for kernel, _ in pairs])
    shared = max(kernel.shared + launch.shared for kernel, launch in pairs)
    text += f" / {shared / 1024:.0f}" if shared >= 512 else " / 0"
    text += f" / {span([blocks_at_once(kernel, launch, limits) for kernel, launch in pairs])}"
    local = max(kernel.local for kernel, _ in pairs)
    return text + (f" ({local} B)" if local else "")


def table() -> str:
    sms = {arch: int(arch.rstrip("af")) for arch in ARCHS}
    pairs = {arch: launches(arch, sm) for arch, sm in sms.items()}
    lines = ["| kernels | " + " | ".join(f"sm_{arch}" for arch in ARCHS) + " |", "|---" * (len(ARCHS) + 1) + "|"]
    for group, names in GROUPS.items():
        cells = [cell([p for p in pairs[arch] if re.match(names, p[0].name)], LIMITS[sms[arch]]) for arch in ARCHS]
        lines.append(f"| {group.strip()} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        os.environ["BITSHARD_KERNELS"] = sys.argv[1]
        os.execv(sys.executable, [sys.executable, __file__])
    print(table())
