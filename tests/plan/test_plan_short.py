"""Which kernels MXFP4 and NVFP4 take for few rows, and of those of sm_80. For a build of its own: no GPU needed."""

import pytest
from bitshard import _C

BUILD = "75,80,90a,100,120"
GPUS = {"T4": (75, 40), "A100": (80, 108), "4090": (89, 128), "H100": (90, 132), "B200": (100, 148)}
KINDS = {"mxfp4": {"blocksize": 32, "format": 2}, "nvfp4": {"blocksize": 16, "format": 2}}
F32, F16, BF16 = range(3)


def plan(M, N, K, dtype, gpu, kind, **facts):
    return _C.plan_linear_4bit(M, N, K, dtype, *GPUS[gpu], architectures=BUILD, **KINDS.get(kind, {}), **facts)


def grouped(E, rows, N, K, dtype, gpu, kind, **facts):
    settings = {"architectures": BUILD, **KINDS.get(kind, {}), **facts}
    return _C.plan_grouped_linear_4bit(E, E * rows, N, K, dtype, *GPUS[gpu], **settings)


def entries(plan) -> list[str]:
    return [launch["entry"] for part in plan["slices"] for launch in part["launches"]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gpu", ["A100", "4090", "H100", "B200"])
def test_few_rows_take_what_nf4_takes(gpu, kind):
    """The same kernel, cut the same way, up to 64 rows; stacks up to 16 rows an expert on Hopper."""
    for (N, K), M in ((size, M) for size in ((4096, 4096), (14336, 4096), (2880, 2880)) for M in (1, 4, 16, 33, 64)):
        own, nf4 = plan(M, N, K, BF16, gpu, kind), plan(M, N, K, BF16, gpu, "nf4")
        assert own["kernel"] == nf4["kernel"] and own["kernel"] in ("gemv_4bit", "gemm_4bit_sm90"), (N, K, M)
        name = "_mx" if kind == "mxfp4" else "_nv"
        product, like = (next(e for e in entries(one) if e.startswith("gem")) for one in (own, nf4))
        assert product.removesuffix(name) == like.removesuffix("_any") and product.endswith(name)
    for rows in (1, 8, 16, 24):
        own, nf4 = (grouped(32, rows, 2880, 2880, BF16, gpu, one) for one in (kind, "nf4"))
        early = gpu == "H100" and rows > 16
        assert own["kernel"] == ("gemm_4bit_sm90_wide_grouped" if early else nf4["kernel"]), rows


def test_what_they_refuse():
    """float16 does not hold all scales of MXFP4; scales of 64 weights are loaded together; no other such blocks."""
    for gpu, kernel in (("H100", "gemv_4bit"), ("H100", "gemm_4bit_sm90"), ("A100", "gemv_4bit")):
        assert plan(8, 512, 512, F16, gpu, "nvfp4", kernel=kernel)["kernel"] == kernel
        with pytest.raises(ValueError, match="float16 does not hold scales of MXFP4"):
            plan(8, 512, 512, F16, gpu, "mxfp4", kernel=kernel)
        for kind, alignment in (("mxfp4", 1), ("nvfp4", 2)):
            with pytest.raises(ValueError, match="the scales of 64 weights are not aligned"):
                plan(8, 512, 512, BF16, gpu, kind, kernel=kernel, code_alignment=alignment)
            assert plan(8, 512, 512, BF16, gpu, kind, kernel=kernel, code_alignment=2 * alignment)
        for wrong in ({"format": 0, "blocksize": 32}, {"format": 2, "blocksize": 32, "nested": False}):
            with pytest.raises(ValueError, match="the blocksize is below 64, and it is neither"):
                plan(8, 512, 512, BF16, gpu, None, kernel=kernel, **wrong)


def test_sm80_takes_blocks_of_16():
    """Forms of 256 rows, both directions, weights and stacks; on cards with a model instead of panels."""
    for gradient in (False, True):
        for dtype, name in ((BF16, "bf16"), (F16, "f16")):
            way = "dgrad_" if gradient else ""
            found = plan(256, 4096, 4096, dtype, "4090", "nvfp4", gradient=gradient)
            assert found["kernel"] == "gemm_4bit_sm80" and entries(found)[-1] == f"gemm_sm80_{way}{name}_m256_nv"
            found = grouped(32, 100, 2880, 2880, dtype, "4090", "nvfp4", gradient=gradient)
            assert entries(found) == [f"gemm_sm80_grouped_{way}{name}_m256_nv"]
        with pytest.raises(ValueError, match="the blocksize is below 64, and it is neither"):
            plan(
                300,
                512,
                512,
                BF16,
                "A100",
                None,
                kernel="gemm_4bit_sm80",
                gradient=gradient,
                blocksize=16,
                nested=False,
            )
        with pytest.raises(ValueError, match="the scales of 64 weights are not aligned"):
            settings = {"kernel": "gemm_4bit_sm80", "gradient": gradient, "code_alignment": 2}
            plan(300, 512, 512, BF16, "A100", "nvfp4", **settings)
