"""Which kernel an int8 product takes on a GPU, and how it is cut: no GPU is needed."""

import pytest
from bitshard import _C

F32, F16, BF16 = 0, 1, 2
ALL = "75,80,86,89,90a,100,120"
LARGE = {"N": 28672, "K": 8192}


def plan(M, N=4096, K=4096, dtype=F16, sm=90, sms=132, architectures=ALL, **settings):
    found = _C.plan_linear_int8(M, N, K, dtype, sm, sms, architectures=architectures, **settings)
    part = found["slices"][0] if found["slices"] else {"codes": False, "launches": [None]}
    return {**part, **found, "launch": part["launches"][0]}


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
        ("gemv_int8", 32, {"outliers": True}),
        ("gemm_int8_sm90", 33, {"outliers": True}),
        ("mixed_int8_sm90", 33, {"outliers": True, "N": 14336}),
        ("mixed_int8_sm90", 64, {"outliers": True, "N": 14336}),
        ("gemm_int8_sm90", 65, {"outliers": True, "N": 14336}),
        ("gemm_int8_sm90", 64, {"outliers": True, "N": 14336, "x_alignment": 8}),
        ("gemm_int8", 64, {"outliers": True, "tensor_maps": False}),
        ("gemv_int8", 16, LARGE),
        ("gemm_int8_sm90", 17, LARGE),
        ("gemv_int8", 32, LARGE | {"outliers": True}),
        ("gemv_int8", 32, LARGE | {"sm": 100}),
        ("mixed_int8_sm90", 64, LARGE | {"outliers": True}),
        ("gemm_int8_sm90", 65, LARGE | {"outliers": True}),
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
        ("gemv_int8_dgrad", 32, LARGE | {"gradient": True}),
        ("dgrad_int8_sm90", 33, LARGE | {"gradient": True}),
        ("dgrad_int8_sm90", 1024, {"gradient": True}),
        ("panels", 1025, {"gradient": True}),
        ("panels", 64, {"gradient": True, "K": 4100}),
        ("panels", 1, {"gradient": True, "sm": 80}),
        ("panels", 4096, {"gradient": True, "dtype": BF16}),
        ("any", 40, {"gradient": True, "dtype": F32}),
        ("any", 40, {"gradient": True, "N": 0}),
        ("dgrad_int8_sm90", 4096, {"gradient": True, "vendor": ""}),
        ("any", 40, {"gradient": True, "vendor": "", "sm": 80}),
    ],
)
def test_which_kernel(kernel, M, settings):
    found = plan(M, **settings)
    assert found["kernel"] == kernel and found["codes"] == kernel.startswith("gemm_int8")
    again = plan(M, **settings)
    assert found == again


def test_outlier_columns_that_are_gathered():
    """What the workspace holds of x and W in 16 bits, whole chunks of 64, no more than there are."""
    assert plan(200)["capacity"] == 0
    assert plan(200, outliers=True, sm=80)["capacity"] == 4096
    assert plan(4096, 28672, 8192, outliers=True)["capacity"] == (64 << 20) // (2 * (4096 + 28672)) // 64 * 64
    assert plan(64, K=100, packed_alignment=4, outliers=True)["capacity"] == 128
    assert plan(200, outliers=True, sm=80, workspace=1 << 16)["capacity"] == 0
    assert plan(64, dtype=F32, outliers=True)["capacity"] == 0
    assert plan(64, dtype=BF16, sm=75, outliers=True)["capacity"] == 0
    assert plan(64, outliers=True)["capacity"] == 0  # x as it is
    with_outliers, without = plan(200, outliers=True), plan(200)
    assert with_outliers["scratch_bytes"] > without["scratch_bytes"] >= 200 * 4096 + 200 * 4


def test_outlier_columns_that_the_product_finds():
    """All of gemm_int8_sm90 but its largest form, and blocks that share a tile: less memory than to gather them."""
    for M, N, K in ((200, 4096, 4096), (256, 28672, 8192), (1024, 4096, 4096)):
        found = plan(M, N, K, outliers=True)
        assert found["finds"] and found["capacity"] == 0 and found["scratch_bytes"] < M * (K + 256) + 2 * K + 2048
        assert not plan(M, N, K)["finds"]
    for M, N, K in ((4096, 14336, 4096), (200, 4096, 32768 + 128)):
        found = plan(M, N, K, outliers=True)
        assert found["kernel"] == "gemm_int8_sm90" and not found["finds"] and found["capacity"] > 0
    assert not plan(200, outliers=True, sm=80)["finds"]


SIZES = [(33, 4096, 4096), (128, 4096, 4096), (300, 14336, 4096), (1024, 4096, 4096), (4096, 28672, 8192), (40, 48, 16)]


@pytest.mark.parametrize(
    "settings", [{}, {"kernel": "mixed_int8_sm90"}, {"gradient": True, "kernel": "dgrad_int8_sm90"}]
)
@pytest.mark.parametrize("M, N, K", SIZES)
def test_a_cut_fills_the_gpu_once(M, N, K, settings):
    """No more blocks than run at once; blocks share the depth of a tile only where there are few tiles."""
    launch = plan(M, N, K, **settings)["launch"]
    blocks, cluster = launch["grid"][0], launch["cluster"]
    assert blocks % cluster == 0 and blocks <= 132 and launch["shared_bytes"] <= 227 << 10
    pairs = "kernel" in settings or launch["entry"].endswith(("n256", "c2"))
    of_form = 3 if launch["entry"].endswith("c3") else 1 + pairs
    assert cluster % of_form == 0 and (cluster == of_form or M <= 300)


# Which form and how many blocks of a cluster were the fastest by direction or kernel and size: on an H100, to 4 %;
# mixed_int8_sm90 and gradients on an H200.
FASTEST = [
    ({}, 33, 4096, 4096, "m64_n64", 1),
    ({}, 96, 4096, 4096, "m64_n64_c2", 2),
    ({}, 128, 4096, 4096, "m64_n64_c2", 2),
    ({}, 160, 4096, 4096, "m64_n128_c3", 3),
    ({}, 192, 4096, 4096, "m64_n128_c3", 3),
    ({}, 256, 4096, 4096, "m128_n96_c2", 2),
    ({}, 384, 4096, 4096, "m128_n128", 1),
    ({}, 512, 4096, 4096, "m128_n128_c2", 2),
    ({}, 1024, 4096, 4096, "m128_n256", 2),
    ({}, 4096, 4096, 4096, "m128_n256", 2),
    ({}, 64, 14336, 4096, "m64_n64", 1),
    ({}, 128, 14336, 4096, "m128_n128", 1),
    ({}, 192, 14336, 4096, "m128_n256", 2),
    ({}, 384, 14336, 4096, "m128_n128", 1),
    ({}, 512, 14336, 4096, "m128_n256", 2),
    ({}, 1024, 14336, 4096, "m128_n128_c2", 2),
    ({}, 32, 28672, 8192, "m64_n128", 1),
    ({}, 128, 28672, 8192, "m128_n128", 1),
    ({}, 192, 28672, 8192, "m128_n256", 2),
    ({}, 384, 28672, 8192, "m128_n128", 1),
    ({}, 512, 28672, 8192, "m128_n128_c2", 2),
    ({}, 1024, 28672, 8192, "m128_n256", 2),
    ({"outliers": True}, 33, 4096, 4096, "m64_n64", 1),
    ({"outliers": True}, 128, 4096, 4096, "m64_n64_c2", 2),
    ({"outliers": True}, 192, 4096, 4096, "m64_n128_c3", 3),
    ({"outliers": True}, 256, 4096, 4096, "m128_n96_c2", 2),
    ({"outliers": True}, 768, 4096, 4096, "m128_n96_c2", 2),
    ({"outliers": True}, 1024, 4096, 4096, "m128_n128_c2", 2),
    ({"outliers": True}, 4096, 4096, 4096, "m128_n256", 2),
    ({"outliers": True}, 192, 14336, 4096, "m64_n128", 1),
    ({"outliers": True}, 256, 14336, 4096, "m128_n128_c2", 2),
    ({"outliers": True}, 128, 28672, 8192, "m128_n128", 1),
    ({"outliers": True}, 1024, 28672, 8192, "m128_n256", 2),
    ({"outliers": True}, 64, 14336, 4096, "m64", 2),
    ({"outliers": True}, 128, 14336, 4096, "m128_n128", 1),
    ({"outliers": True, "kernel": "mixed_int8_sm90"}, 128, 14336, 4096, "m128", 2),
    ({"outliers": True}, 64, 28672, 8192, "m64", 2),
    ({"outliers": True, "kernel": "mixed_int8_sm90"}, 64, 4096, 4096, "m64", 6),
    ({"gradient": True}, 64, 4096, 4096, "m64", 6),
    ({"gradient": True}, 256, 4096, 4096, "m256", 6),
    ({"gradient": True}, 64, 14336, 4096, "m64", 6),
    ({"gradient": True}, 256, 14336, 4096, "m256", 6),
]


@pytest.mark.parametrize("settings, M, N, K, form, cluster", FASTEST)
def test_the_fastest_cut(settings, M, N, K, form, cluster):
    launch = plan(M, N, K, **settings)["launch"]
    assert launch["entry"].endswith(f"16_{form}") and launch["cluster"] == cluster


def test_panels_of_the_gradient():
    found = plan(4096, 28672, 8192, gradient=True)
    assert found["panel_lines"] == 1024 and found["scratch_bytes"] <= 64 << 20
    assert plan(64, 256, 96, gradient=True, kernel="panels")["panel_lines"] == 96
    assert plan(64, 40, 96, gradient=True, workspace=64, kernel="panels")["panel_lines"] == 1


def test_forced():
    _C.force_kernel("linear_int8", "gemm_int8")
    assert plan(1)["kernel"] == "gemm_int8"
    _C.force_kernel("linear_int8", "gemv_int8")
    assert plan(64)["launch"]["grid"][1] == 4
    with pytest.raises(ValueError, match="M = 65, N = 4096, K = 4096 of float16 on sm_90: gemv_int8: too many rows"):
        plan(65)
    _C.force_kernel("linear_int8_dgrad", "gemv_int8_dgrad")
    assert plan(33, gradient=True)["kernel"] == "gemv_int8_dgrad"
    with pytest.raises(ValueError, match="more than 64 rows"):
        plan(65, gradient=True)
    _C.force_kernel("linear_int8", "mixed_int8_sm90")
    assert plan(1)["kernel"] == plan(5000)["kernel"] == "mixed_int8_sm90"
    for refused in ({"K": 4104}, {"sm": 100}, {"dtype": F32}, {"x_alignment": 8}, {"tensor_maps": False}):
        with pytest.raises(ValueError, match="the kernel that was forced cannot multiply"):
            plan(40, **refused)
    with pytest.raises(ValueError, match="no kernel 'gemm' of linear_int8: expected one of gemv_int8"):
        _C.force_kernel("linear_int8", "gemm")
    with pytest.raises(ValueError, match="too large for 32-bit indices"):
        plan(2**40)
    with pytest.raises(ValueError, match="must be positive"):
        plan(0)
