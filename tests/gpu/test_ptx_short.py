"""MXFP4 and NVFP4 in the kernels for few rows and in those of sm_80, on the machine of tests/ptx/: no GPU needed."""

import platform
import shutil

import pytest
import torch
from bitshard import ops
from cases import LINEAR_BOUND, ROUNDING
from helpers.microscaled import SCALE, VALUE
from ptx import gpu as machine
from ptx.products import goes_wrong, plant

pytestmark = [
    pytest.mark.skipif(machine.nvcc() is None, reason="needs nvcc"),
    pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("gcc") is None, reason="needs gcc on x86-64"),
]
BF16, F16 = torch.bfloat16, torch.float16
BLOCK = {"mxfp4": 32, "nvfp4": 16}
MOST = {"mxfp4": 252, "nvfp4": 126}  # scales above are NaN, or beyond float32
E2M1 = 2  # number of the format
GEMV, SM90, SM80 = "gemv_4bit", "gemm_4bit_sm90", "gemm_4bit_sm80"


def values(packed, scales, kind: str, E: int = 1) -> torch.Tensor:
    """float64, flat; nothing is rounded."""
    codes = torch.stack((packed >> 4, packed & 15), 1).flatten().long()
    of_block = SCALE[kind][scales[0].long()].double().view(E, -1)
    second = scales[2].double().view(E, -1).repeat_interleave(256, 1)[:, : of_block.shape[1]]
    return VALUE[codes].double() * (of_block * second).flatten().repeat_interleave(BLOCK[kind])


def weight(N: int, K: int, kind: str, E: int = 1, wide: bool = False):
    """Random codes and scales; the second level differs among 256 blocks. wide: scales of all magnitudes."""
    n, block = N * K, BLOCK[kind]
    packed = torch.randint(0, 256, (E * n // 2,), dtype=torch.uint8)
    low, high = (0, MOST[kind] + 1) if wide else ((115, 131) if kind == "mxfp4" else (30, 90))
    codes = torch.randint(low, high, (E * n // block,), dtype=torch.uint8)
    second = torch.rand(E * -(-n // block // 256)) + 0.5
    table = ops.table({"mxfp4": "e8m0", "nvfp4": "e4m3"}[kind])
    return packed, (codes, table, second, torch.zeros(E))


# kernel, sm, dtype, M, N, K, kind, bias: one that ends inside a piece of K, or in which the second level changes;
# K in parts of a block, of a cluster, of a second kernel; groups of rows; two parts of K, sums that are joined
CASES = [
    (GEMV, 90, BF16, 1, 64, 1024, "mxfp4", False),
    (GEMV, 90, BF16, 3, 96, 2880, "nvfp4", True),
    (GEMV, 90, F16, 8, 48, 4480, "nvfp4", False),
    (GEMV, 90, BF16, 5, 32, 8256, "mxfp4", True),
    (GEMV, 90, BF16, 33, 64, 320, "nvfp4", False),
    (GEMV, 90, BF16, 16, 128, 5184, "mxfp4", True),
    (GEMV, 80, BF16, 5, 64, 768, "nvfp4", True),
    (GEMV, 80, F16, 40, 64, 2560, "nvfp4", False),
    (GEMV, 80, BF16, 27, 48, 448, "mxfp4", True),
    (GEMV, 75, F16, 20, 96, 320, "nvfp4", False),
    (SM90, 90, BF16, 40, 256, 576, "mxfp4", True),
    (SM90, 90, BF16, 130, 192, 512, "nvfp4", False),
    (SM90, 90, F16, 17, 256, 1088, "nvfp4", True),
    (SM90, 90, BF16, 31, 64, 8256, "mxfp4", False),
    (SM90, 90, BF16, 64, 3200, 320, "nvfp4", False),
    (SM90, 90, BF16, 9, 272, 448, "nvfp4", True),
    # units of a row no multiple of a piece's: warps of a group in which the second level changes, and others
    (SM90, 90, BF16, 1, 160, 2880, "mxfp4", True),
    (SM90, 90, F16, 7, 80, 4032, "nvfp4", True),
    (SM90, 90, BF16, 20, 1088, 704, "nvfp4", False),
    (SM90, 90, BF16, 33, 1600, 448, "mxfp4", False),
    (SM80, 80, BF16, 40, 136, 704, "nvfp4", True),
    (SM80, 80, F16, 300, 120, 320, "nvfp4", False),
    (SM80, 80, BF16, 40, 136, 320, "mxfp4", True),
]


def assert_close(y, x, w, bias):
    exact = x.double() @ w.T + (0 if bias is None else bias.double())
    norms = x.double().square() @ w.T.square()
    allowed = LINEAR_BOUND[y.dtype] * norms.sqrt() + ROUNDING[y.dtype] * exact.abs()
    assert ((y.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)).replace("torch.", ""))
def test_products(case):
    """Forward, and the gradient of kernels that have one; the same bits in another order of threads."""
    kernel, sm, dtype, M, N, K, kind, with_bias = case
    torch.manual_seed(M + N)
    packed, scales = weight(N, K, kind)
    w, rest = values(packed, scales, kind).view(N, K), (BLOCK[kind], E2M1, N, K, kernel)
    x, bias = torch.randn(M, K).to(dtype), torch.randn(N).to(dtype) if with_bias else None
    results = []
    for seed in (0, 11):
        gpu = machine.Gpu(sm, 4, seed)
        y, chosen = gpu.linear_4bit(x, packed, scales, bias, *rest)
        assert chosen == kernel and gpu.launches
        results.append(y)
    assert torch.equal(*results)
    assert_close(results[0], x, w, bias)
    if kernel == SM80:
        dy = torch.randn(M, N).to(dtype)
        dx, _ = machine.Gpu(sm, 4).linear_4bit_dgrad(dy, packed, scales, *rest)
        assert_close(dx, dy, w.T, None)


def every_pair(kind: str, dtype):
    """W [N, 64] that has every code with every scale, and its values in `dtype`."""
    block = BLOCK[kind]
    codes = torch.arange(16, dtype=torch.uint8).repeat(MOST[kind] + 1, block // 16)
    scales = torch.arange(MOST[kind] + 1, dtype=torch.uint8)
    beyond = -len(scales) % (64 // block * 16)  # rows of W come by 16
    codes, scales = torch.cat((codes, codes[:beyond])), torch.cat((scales, scales[:beyond]))
    packed = (codes[:, 0::2] << 4 | codes[:, 1::2]).flatten()
    table = ops.table({"mxfp4": "e8m0", "nvfp4": "e4m3"}[kind])
    given = (scales, table, torch.ones(-(-len(scales) // 256)), torch.zeros(1))
    return packed, given, values(packed, given, kind).view(-1, 64).to(dtype)


@pytest.mark.parametrize(
    "kernel, sm, kind, dtype",
    [
        *(
            (*where, *what)
            for where in ((GEMV, 90), (GEMV, 80), (SM90, 90))
            for what in (("mxfp4", BF16), ("nvfp4", BF16))
        ),
        *((kernel, sm, "nvfp4", F16) for kernel, sm in ((GEMV, 90), (GEMV, 75), (SM90, 90), (SM80, 80))),
        (SM80, 80, "nvfp4", BF16),
    ],
)
def test_every_code_with_every_scale(kernel, sm, kind, dtype):
    """Exact, also where the value is a denormal number."""
    packed, scales, w = every_pair(kind, dtype)
    y, _ = machine.Gpu(sm, 2).linear_4bit(
        torch.eye(64).to(dtype), packed, scales, None, BLOCK[kind], E2M1, len(w), 64, kernel
    )
    assert torch.equal(y, w.T)


# dtype, rows of each expert, N, K, kind, bias
STACKS = [
    (BF16, [1, 0, 9, 0], 48, 256, "nvfp4", True),
    (F16, [3, 20, 0], 32, 320, "nvfp4", False),
    (BF16, [40, 0, 33], 32, 192, "mxfp4", False),
    (BF16, [2, 1], 16, 8256, "mxfp4", True),
    (BF16, [40, 0, 3], 640, 4160, "nvfp4", True),
    (BF16, [2, 7, 3], 64, 2880, "nvfp4", False),
]


@pytest.mark.parametrize("kernel", ["gemv_4bit_grouped", "gemm_4bit_sm80_grouped"])
@pytest.mark.parametrize("case", STACKS, ids=lambda case: "-".join(map(str, case)).replace("torch.", ""))
def test_stacks(case, kernel):
    dtype, counts, N, K, kind, with_bias = case
    torch.manual_seed(N + K)
    E, offs = len(counts), torch.tensor(counts).cumsum(0).int()
    packed, scales = weight(N, K, kind, E)
    w, rest = values(packed, scales, kind, E).view(E, N, K), (BLOCK[kind], E2M1, N, K, kernel)
    x, dy = (torch.randn(int(offs[-1]) + 2, width).to(dtype) for width in (K, N))
    bias = torch.randn(E, N).to(dtype) if with_bias else None
    sm = 90 if kernel == "gemv_4bit_grouped" else 80
    results = [
        machine.Gpu(sm, sms, seed).grouped_linear_4bit(x, offs, packed, scales, bias, *rest)
        for sms, seed in ((4, 0), (2, 5))
    ]
    assert torch.equal(*results) and not results[0][offs[-1] :].any()
    for e, (begin, end) in enumerate(zip([0, *offs.tolist()], offs.tolist(), strict=False)):
        assert_close(results[0][begin:end], x[begin:end], w[e], None if bias is None else bias[e])
    if sm == 80:
        dx = machine.Gpu(sm, 4).grouped_linear_4bit(dy, offs, packed, scales, None, *rest, backward=True)
        for e, (begin, end) in enumerate(zip([0, *offs.tolist()], offs.tolist(), strict=False)):
            assert_close(dx[begin:end], dy[begin:end], w[e].T, None)


@pytest.mark.parametrize("kernel", [GEMV, SM90, "gemv_4bit_grouped"])
@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_other_scales_give_nan(kernel, kind):
    """A map with one entry of its own, the other format's, an offset: what the kernel does not compute with."""
    torch.manual_seed(0)
    packed, (codes, table, second, offset) = weight(64, 256, kind)
    x, gpu, offs = torch.randn(2, 256).to(BF16), machine.Gpu(90, 2), torch.tensor([2], dtype=torch.int32)

    def multiply(*scales):
        rest = (None, BLOCK[kind], E2M1, 64, 256, kernel)
        if kernel == "gemv_4bit_grouped":
            return gpu.grouped_linear_4bit(x, offs, packed, scales, *rest)
        return gpu.linear_4bit(x, packed, scales, *rest)[0]

    assert multiply(codes, table, second, offset).isfinite().all()
    for entry in (0, 77, 254 if kind == "mxfp4" else 126):
        wrong = table.clone()
        wrong[entry] *= 1.5
        if kind == "nvfp4" and entry == 0:
            wrong[entry] = 1.5
        assert multiply(codes, wrong, second, offset).isnan().all(), entry
    assert multiply(codes, table, second, offset + 1e-30).isnan().all()
    for byte in ((253, 255) if kind == "mxfp4" else (127, 129)) if kernel == SM90 else ():
        beyond = codes.clone()
        beyond[5] = byte  # no scale of the format
        assert multiply(beyond, table, second, offset)[:, 0].isnan().all(), byte


# file, what is replaced there, by what; of which format
FAULTS = [
    ("decode_short.cuh", r"c : c >> 1\)", "c : c)", "mxfp4"),  # a half of a block of 32 has the next one's scale
    ("decode_short.cuh", r"max\(twice >> 1, 0x00400040u\)", "twice >> 1", "mxfp4"),  # 2^-127 is 0
    ("decode_short.cuh", r"0x7B807B80u", "0x7B007B00u", "nvfp4"),
    ("decode_short.cuh", r"i & 1 \? lower_factor : upper_factor", "upper_factor", "nvfp4"),
    ("decode_short.cuh", r"\(BSH_NESTED_BLOCKSIZE / UNIT_BLOCKS<KIND>\)", "BSH_NESTED_BLOCKSIZE", "nvfp4"),
    ("gemv_4bit.cuh", r"blocks\[r\]\[unit % PIECES\]", "blocks[r][0]", "nvfp4"),
    (
        "gemv_4bit.cuh",
        r"unit_scales<KIND>\(args.absmax_code, own\)",
        "unit_scales<KIND>(args.absmax_code, at)",
        "nvfp4",
    ),
]
SM90_FAULTS = [
    ("decode_short.cuh", "0x1100", "0x0100", "mxfp4"),  # half a block of 32 has the next one's scale
    ("decode_short.cuh", "0x00800080u", "0x00800000u", "mxfp4"),
    ("decode_short.cuh", ": 0x1p120f", ": 0x1p119f", "nvfp4"),
    ("decode_short.cuh", "0x3715", "0x3751", "nvfp4"),  # another unit's scale
    ("loaders_sm90.cuh", r"__all_sync\(~0u, equal\)", "true", "nvfp4"),  # the last unit's second level for all
    ("gemm_4bit_sm90.cuh", r"part\[i\] = zero", "part[i] += zero", "nvfp4"),  # units are added twice
    ("gemm_4bit_sm90.cuh", r"part\[i\] = zero", "part[i] = 0.f", "mxfp4"),  # ptxas then makes flags of it
]
NAMES = {"mxfp4": ("mx", "E8M0_32"), "nvfp4": ("nv", "E4M3_16")}  # of kernels, of their scales
# The kernel in front of gemm_4bit_sm90, which stands in a source of its own.
X_UNITS = 'extern "C"' + (machine.ROOT / "cuda/gemm/gemm_4bit_sm90.cu").read_text().partition('extern "C"')[2]


def check_format(kernel: str, kind: str, K: int) -> None:
    """All codes with all scales, and a product of few rows."""
    packed, scales, w = every_pair(kind, BF16)
    rest = (None, BLOCK[kind], E2M1)
    rows = 16 if kernel == SM90 else 64  # of its form with the fewest
    for x, exact in zip(torch.eye(64).to(BF16).split(rows), w.T.split(rows), strict=True):
        y, _ = machine.Gpu(90, 2).linear_4bit(x, packed, scales, *rest, len(w), 64, kernel)
        assert torch.equal(y, exact)
    torch.manual_seed(0)
    packed, scales = weight(48, K, kind)
    x = torch.randn(4, K).to(BF16)
    y, _ = machine.Gpu(90, 2).linear_4bit(x, packed, scales, *rest, 48, K, kernel)
    assert_close(y, x, values(packed, scales, kind).view(48, K), None)


@pytest.mark.parametrize("kernel, K", [(GEMV, 4416), (SM90, 1728)])
@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_nothing_planted_is_right(kernel, K, kind):
    check_format(kernel, kind, K)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault[0]}-{fault[1]}")
def test_planted_faults_are_seen(fault, monkeypatch, tmp_path):
    file, pattern, instead, kind = fault
    kernels = "".join(
        f"BSH_GEMV_4BIT(__nv_bfloat16, gemv_4bit_bf16_{form}_{NAMES[kind][0]}, {sizes}, {NAMES[kind][1]})\n"
        for form, sizes in (("m8_k8", "1, 8"), ("m16_k4", "2, 4"))
    )
    plant(monkeypatch, tmp_path, "gemv_4bit_short", 90, "GEMV_MX", kernels, file, pattern, instead)
    assert goes_wrong(lambda: check_format(GEMV, kind, 4416))


@pytest.mark.parametrize("fault", SM90_FAULTS, ids=lambda fault: f"{fault[0]}-{fault[1]}")
def test_faults_planted_in_wgmma_are_seen(fault, monkeypatch, tmp_path):
    file, pattern, instead, kind = fault
    name, scales = NAMES[kind]
    kernels = f"BSH_GEMM_SM90(__nv_bfloat16, gemm_4bit_bf16_m16_{name}, 16, 1, {scales})\n" + X_UNITS
    plant(monkeypatch, tmp_path, "gemm_4bit_sm90_short", 90, "GEMM_MX", kernels, file, pattern, instead)
    assert goes_wrong(lambda: check_format(SM90, kind, 1728))
