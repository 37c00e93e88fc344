"""csrc/select.c, the one chooser of CUDA kernels: pure, so it is tested without a GPU.

`python tests/test_select.py` prints the table: for each shape and GPU the rows of x at which the kernel changes.
"""

import pytest
from bitshard import _C

F32, F16, BF16 = 0, 1, 2
NAMES = {"gemv_4bit", "gemm_4bit_sm90", "dense"}
SHAPES = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192), (8192, 28672))
GPUS = {"T4": (75, 40), "A100": (80, 108), "RTX 4090": (89, 128), "H200": (90, 132), "B200": (100, 148)}
ROWS = (*range(1, 130), 192, 193, 256, 257, 512, 1024, 4096, 65536)


def select(
    M: int, N: int, K: int, dtype: int = BF16, gpu: str = "H200", blocksize: int = 64, nested: bool = True
) -> str:
    return _C.select_linear_4bit(M, N, K, dtype, *GPUS[gpu], blocksize, nested)


def changes(N: int, K: int, dtype: int, gpu: str) -> list[tuple[int, str]]:
    """(M, kernel) wherever the kernel differs from that of one row fewer."""
    chosen = [(M, select(M, N, K, dtype, gpu)) for M in ROWS]
    return [pair for i, pair in enumerate(chosen) if i == 0 or pair[1] != chosen[i - 1][1]]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["float32", "float16", "bfloat16"])
def test_each_kernel_has_one_range_of_rows(gpu, dtype):
    """Every choice is known, no kernel comes back after another took over, and many rows go to the vendor GEMM."""
    for N, K in SHAPES:
        names = [name for _, name in changes(N, K, dtype, gpu)]
        assert set(names) <= NAMES and len(names) == len(set(names)), (N, K, names)
        assert names[-1] == "dense", (N, K, names)
        if gpu != "H200":
            assert "gemm_4bit_sm90" not in names, (N, K, names)


def test_one_row_is_fused():
    for gpu in GPUS:
        assert select(1, 4096, 4096, F16, gpu) == "gemv_4bit", gpu
    assert select(1, 4096, 4096, BF16, "H200") == "gemv_4bit"


def test_bf16_has_no_tensor_cores_on_sm_75():
    assert select(16, 4096, 4096, BF16, "T4") != "gemm_4bit_sm90"
    assert select(16, 4096, 4096, F16, "T4") == "gemv_4bit"


def test_small_weights_are_fused_up_to_64_rows():
    """By groups of tokens in gemv_4bit where there is no wgmma kernel; on an H200 for small weights only."""
    for gpu in ("A100", "RTX 4090", "B200"):
        assert {select(M, 14336, 4096, BF16, gpu) for M in range(1, 65)} == {"gemv_4bit"}, gpu
    assert {select(M, 1024, 4096) for M in range(1, 65)} == {"gemv_4bit"}
    assert select(32, 3584, 4096) == "gemv_4bit" and select(33, 3584, 4096) == "gemm_4bit_sm90"
    assert select(16, 4096, 4096) == "gemv_4bit" and select(17, 4096, 4096) == "gemm_4bit_sm90"
    assert select(64, 3072, 3072) == "gemv_4bit" and select(16, 13824, 5120) == "gemm_4bit_sm90"
    assert select(16, 14336, 4096) == "gemv_4bit" and select(17, 14336, 4096) == "gemm_4bit_sm90"
    assert select(8, 28672, 8192) == "gemv_4bit" and select(9, 28672, 8192) == "gemm_4bit_sm90"
    assert select(65, 4096, 4096) == "dense"


def test_large_weights_are_fused_in_slices_of_64_rows():
    """On an H200 from 30 M weights on, the more rows the larger the weight; elsewhere panels from 65 rows on."""
    for (N, K), most in {(8192, 4096): 128, (14336, 4096): 192, (8192, 8192): 192, (28672, 8192): 256}.items():
        assert select(most, N, K) == "gemm_4bit_sm90" and select(most + 1, N, K) == "dense", (N, K)
        assert select(65, N, K, BF16, "A100") == select(65, N, K, F32) == "dense"


def test_fp32_rows_go_where_they_are_faster():
    assert [select(M, 1024, 4096, F32) for M in (1, 2, 3)] == ["gemv_4bit", "gemv_4bit", "dense"]
    assert [select(M, 4096, 4096, F32) for M in (8, 9)] == ["gemv_4bit", "dense"]
    assert [select(M, 14336, 4096, F32) for M in (16, 17)] == ["gemv_4bit", "dense"]


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


def test_what_no_kernel_takes_is_dense():
    """Odd sizes, huge sizes, several thousand rows."""
    assert select(3, 98, 130) == "dense"
    assert select(4096, 4096, 4096) == "dense"
    assert select(1 << 40, 4096, 4096) == "dense"
    assert select(16, 1 << 20, 1 << 20, F16, "T4") in NAMES


def test_the_choice_is_the_same_every_time():
    assert all(select(M, 4096, 4096) == select(M, 4096, 4096) for M in ROWS)


if __name__ == "__main__":
    for gpu in GPUS:
        for N, K in SHAPES:
            print(f"{gpu:9} {N:>5} x {K:<5}", ", ".join(f"M >= {M}: {name}" for M, name in changes(N, K, BF16, gpu)))
