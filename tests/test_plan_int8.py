"""Which kernel an int8 product takes on a GPU, and how it is cut: no GPU is needed."""

import pytest
from bitshard import _C

F32, F16, BF16 = 0, 1, 2
ALL = "75,80,86,89,90a,100,120"


def plan(M, N=4096, K=4096, dtype=F16, sm=90, sms=132, architectures=ALL, **settings):
    return _C.plan_linear_int8(M, N, K, dtype, sm, sms, architectures=architectures, **settings)


@pytest.fixture(autouse=True)
def chosen_by_the_plan():
    yield
    for op in ("linear_int8", "linear_int8_dgrad"):
        _C.force_kernel(op, None)


@pytest.mark.parametrize(
    "kernel, M, settings",
    [
        ("gemv_int8", 1, {}),
        ("gemv_int8", 32, {}),
        ("gemm_int8_sm90", 33, {}),
        ("gemv_int8", 16, {"sm": 80}),
        ("gemm_int8", 17, {"sm": 80}),
        ("gemm_int8", 33, {"sm": 100}),
        ("gemm_int8", 33, {"sm": 90, "architectures": "80,compute_80"}),
        ("gemm_int8", 33, {"tensor_maps": False}),
        ("gemm_int8", 33, {"packed_alignment": 1}),
        ("gemm_int8", 33, {"K": 4100, "packed_alignment": 4}),
        ("any", 16, {"packed_alignment": 8}),
        ("any", 16, {"x_alignment": 4}),
        ("any", 16, {"K": 4100}),
        ("any", 16, {"N": 4100}),
        ("any", 16, {"dtype": F32}),
        ("gemm_int8", 17, {"dtype": F32}),
        ("any", 16, {"sm": 75, "dtype": BF16}),
        ("gemv_int8", 16, {"sm": 75}),
        ("any", 100, {"K": 0}),
        ("gemv_int8_dgrad", 8, {"gradient": True}),
        ("gemv_int8_dgrad", 1, {"gradient": True, "sm": 100}),
        ("dgrad_int8_sm90", 9, {"gradient": True}),
        ("gemv_int8_dgrad", 32, {"gradient": True, "N": 28672, "K": 8192}),
        ("dgrad_int8_sm90", 33, {"gradient": True, "N": 28672, "K": 8192}),
        ("dgrad_int8_sm90", 1024, {"gradient": True}),
        ("panels", 1025, {"gradient": True}),
        ("panels", 64, {"gradient": True, "K": 4100}),
        ("panels", 1, {"gradient": True, "sm": 80}),
        ("panels", 4096, {"gradient": True, "dtype": BF16}),
        ("any", 40, {"gradient": True, "dtype": F32}),
        ("any", 40, {"gradient": True, "N": 0}),
        ("dgrad_int8_sm90", 4096, {"gradient": True, "cublas": False}),
        ("any", 40, {"gradient": True, "cublas": False, "sm": 80}),
    ],
)
def test_which_kernel(kernel, M, settings):
    found = plan(M, **settings)
    assert found["kernel"] == kernel and found["codes"] == kernel.startswith("gemm_int8")
    again = plan(M, **settings)
    assert found == again


def test_outlier_columns_that_are_gathered():
    """What the workspace holds of x and W in 16 bits, whole chunks of 64, no more than there are."""
    assert plan(64)["capacity"] == 0
    assert plan(64, outliers=True)["capacity"] == 4096
    assert plan(4096, 28672, 8192, outliers=True)["capacity"] == (64 << 20) // (2 * (4096 + 28672)) // 64 * 64
    assert plan(64, K=100, packed_alignment=4, outliers=True)["capacity"] == 128
    assert plan(64, outliers=True, workspace=1 << 16)["capacity"] == 0
    assert plan(64, dtype=F32, outliers=True)["capacity"] == 0
    assert plan(64, dtype=BF16, sm=75, outliers=True)["capacity"] == 0
    with_outliers, without = plan(64, outliers=True), plan(64)
    assert with_outliers["scratch_bytes"] > without["scratch_bytes"] >= 64 * 4096 + 64 * 4


@pytest.mark.parametrize("M, N, K", [(33, 4096, 4096), (128, 4096, 4096), (300, 14336, 4096), (4096, 28672, 8192)])
def test_a_cut_fills_the_gpu_once(M, N, K):
    """No more blocks than run at once; blocks share the depth of a tile only where there are few tiles."""
    launch = plan(M, N, K)["launch"]
    blocks, cluster = launch["grid"][0], launch["cluster"]
    assert blocks % cluster == 0 and blocks <= 132 and launch["shared_bytes"] <= 227 << 10
    assert cluster == (2 if launch["entry"].endswith("n256") else 1) or M <= 128


def test_panels_of_the_gradient():
    found = plan(4096, 28672, 8192, gradient=True)
    assert found["panel_columns"] == 1024 and found["scratch_bytes"] <= 64 << 20
    assert plan(64, 256, 96, gradient=True, kernel="panels")["panel_columns"] == 96
    assert plan(64, 40, 96, gradient=True, workspace=64, kernel="panels")["panel_columns"] == 1


def test_forced():
    _C.force_kernel("linear_int8", "gemm_int8")
    assert plan(1)["kernel"] == "gemm_int8"
    _C.force_kernel("linear_int8", "gemv_int8")
    assert plan(64)["launch"]["grid"][1] == 4
    with pytest.raises(ValueError, match="M = 65, N = 4096, K = 4096 on sm_90: too many rows"):
        plan(65)
    _C.force_kernel("linear_int8_dgrad", "gemv_int8_dgrad")
    assert plan(33, gradient=True)["kernel"] == "gemv_int8_dgrad"
    with pytest.raises(ValueError, match="more than 64 rows"):
        plan(65, gradient=True)
    with pytest.raises(ValueError, match="no kernel 'gemm': expected gemv_int8"):
        _C.force_kernel("linear_int8", "gemm")
    with pytest.raises(ValueError, match="too large for 32-bit indices"):
        plan(2**40)
    with pytest.raises(ValueError, match="must be positive"):
        plan(0)
