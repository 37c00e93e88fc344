"""The CUDA kernels without a GPU: as nvcc compiles them, on the machine of tests/ptx/, launched by the product's code.

Blocks and optimizers give the bytes of the CPU's kernels, products stay within the bound; every access is checked
against the memory that an op was given, and threads run in an order drawn from a seed.
"""

import ctypes
import itertools
import os
import platform
import shutil
import struct

import pytest
import torch
from bitshard import functional, ops
from bitshard.formats import maps
from helpers.drawn import assert_close, packed_weight
from ptx import gpu as machine
from ptx import translate

pytestmark = [
    pytest.mark.skipif(machine.nvcc() is None, reason="needs nvcc"),
    pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("gcc") is None, reason="needs gcc on x86-64"),
]
NAN, INFINITY = float("nan"), float("inf")


# ---- the machine ----


@pytest.fixture(scope="module")
def kernel():
    """Runs a kernel of machine.ptx: (name, threads, arguments) -> error or "". It may touch tensors among them."""
    file = machine.HERE / "machine.ptx"
    text = translate.without_comments(file.read_text())

    def run(name, threads, *arguments, seed=0):
        library = machine.compiled(text, name, f"machine-{name}", [file])
        values = [
            ctypes.c_uint64(a.data_ptr()) if isinstance(a, torch.Tensor) else ctypes.c_uint64(a) for a in arguments
        ]
        sizes = list(translate.functions_of(text)[name].parameters.values())
        parameters = machine.block_of(sizes, [ctypes.addressof(value) for value in values])
        ranges = [(t.data_ptr(), t.data_ptr() + t.numel() * 4) for t in arguments if isinstance(t, torch.Tensor)]
        return machine.start(library, name.encode(), parameters, (1, 1, 1), (threads, 1, 1), 1024, 1, 1, seed, ranges)

    return run


def words(n):
    return torch.zeros(n, dtype=torch.int32)


def bits_of(value):
    return struct.unpack("<I", struct.pack("<f", value))[0]


@pytest.mark.parametrize("seed", [0, 7])
def test_shuffles_and_tables(kernel, seed):
    out, values = words(32), torch.arange(100, 132, dtype=torch.int32)
    assert kernel("shuffles", 32, out, values, seed=seed) == ""
    expected = []
    for lane in range(32):
        down = lane + 3 if lane % 8 + 3 < 8 else lane
        expected.append(values[lane ^ 5] + 1000 * values[down] + 1000000 * (lane % 4 + 1))
    assert out.tolist() == [int(one) for one in expected]


def test_bits(kernel):
    out, a, b = words(8), 0x91A2B3C4, 0x15263748
    assert kernel("bits", 1, out, a, b) == ""
    expected = [0x00B34815, (a & b) | (~a & 0xFF), (b & 0xFFFF000F) | (a & 0xFFF) << 4, 0x9]  # 0x00: the sign of 0x15
    expected += [(b << 8 | a >> 24) & 0xFFFFFFFF, 0, (a << 16 | a >> 16) & 0xFFFFFFFF, 0xFFFFFFFF]
    assert [one & 0xFFFFFFFF for one in out.tolist()] == expected


@pytest.mark.parametrize(
    "a, b, c, expected",
    [
        (3.0, 5.0, -15.0, [0.0, 15.0, 5.0, 5.0, 0.33333334, 1.7320508]),
        (1.0 + 2**-23, 1.0 - 2**-23, -1.0, [-(2.0**-46), 1.0, 1.0 + 2**-23, 1.0 + 2**-23, 0.9999999, 1.0]),
        (2.0**-100, 2.0**-40, 0.0, [2.0**-140, 0.0, 2.0**-40, 2.0**-40, 2.0**100, 2.0**-50]),
        (NAN, 2.0, 1.0, [NAN, NAN, 2.0, NAN, NAN, NAN]),
    ],
)
def test_floats(kernel, a, b, c, expected):
    out = words(8)
    assert kernel("floats", 1, out, bits_of(a), bits_of(b), bits_of(c)) == ""
    found = out[:6].view(torch.float32)
    wanted = torch.tensor(expected, dtype=torch.float32)
    assert torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found.nan_to_num(), wanted.nan_to_num())
    assert out[6].item() == int(not a <= b)
    pair = out[7:].view(torch.bfloat16)
    assert torch.equal(pair.nan_to_num(), torch.tensor([b, a]).bfloat16().nan_to_num())


def test_a_missing_barrier_shows(kernel):
    """With the barrier right in every order; without it wrong."""
    expected = [(thread + 1) % 64 for thread in range(64)]
    for seed in range(4):
        out = words(64)
        assert kernel("neighbours", 64, out, 0, seed=seed) == "" and out.tolist() == expected
    assert kernel("neighbours", 64, out, 1) == "" and out.tolist() != expected


@pytest.mark.parametrize("first, expected", [(0, 3064), (24, 1040), (64, 0)])
def test_votes_at_a_barrier(kernel, first, expected):
    out = words(64)
    assert kernel("votes", 64, out, first, seed=first) == "" and out.tolist() == [expected] * 64


def test_a_copy_is_there_after_its_wait_only(kernel):
    values = torch.arange(5, 9, dtype=torch.int32)
    for late, expected in ((0, 7), (1, -1)):  # shared memory begins as ones
        out = words(1)
        assert kernel("copies", 1, out, values, late) == "" and out.item() == expected


def test_bulk_copies_and_mbarriers(kernel):
    values = torch.arange(16, dtype=torch.int32)
    for seed in range(3):
        out = words(32)
        assert kernel("bulk", 32, out, values, seed=seed) == ""
        assert out.tolist() == list(range(16)) * 2


@pytest.mark.parametrize(
    "what, reason", [(0, ""), (8, "outside or not aligned"), (2, "outside or not aligned"), (99, "wait for one")]
)
def test_what_a_kernel_must_not_do(kernel, what, reason):
    error = kernel("bad", 64, words(2), what)
    assert reason in error and bool(error) == bool(reason)


# ---- the project's kernels ----


def same(a, b):
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def hostile(n, dtype):
    """Values over all magnitudes, blocks of zeros, infinities, NaN, denormals."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=generator) * 2.0 ** torch.randint(-20, 8, (n,), generator=generator)
    x[64:128] = 0
    x[200:210], x[300], x[301], x[420] = 1e-41, INFINITY, -INFINITY, NAN
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_4bit_blocks(dtype):
    """Quantized and dequantized bytes are the CPU's: wide and any forms, ends of any length, hostile values."""
    gpu, none = machine.Gpu(90, 2), torch.empty(0)
    for fmt, (n, blocksize) in itertools.product((0, 1), ((4096 + 512, 64), (1001, 128), (777, 32), (9000, 4096))):
        x = hostile(n, dtype)
        packed, absmax = gpu.quantize_4bit(x, blocksize, fmt)
        expected = ops.quantize_4bit(x, blocksize, fmt, torch.uint8)
        assert same(packed, expected[0]) and same(absmax, expected[1]), (fmt, n, blocksize)
        out = gpu.dequantize_4bit(packed, (absmax, None, None, None), blocksize, fmt, n, dtype)
        wanted = ops.dequantize_4bit(expected[0], absmax, none, none, none, blocksize, fmt, 1, n, dtype)
        assert same(out, wanted), (fmt, n, blocksize)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_blocks_of_nan_only(dtype):
    """The bytes of the CPU, in the wide form, in the one for any block and in a short last one."""
    gpu, table, none = machine.Gpu(90, 2), maps.create_dynamic_map(True), torch.empty(0)
    x = torch.full((4096 + 64 + 5,), NAN, dtype=dtype)
    for fmt in (0, 1):
        found, expected = gpu.quantize_4bit(x, 64, fmt), ops.quantize_4bit(x, 64, fmt, torch.uint8)
        assert all(map(same, found, expected)), fmt
    assert all(map(same, gpu.quantize_blockwise(x, table, 256), ops.quantize_blockwise(x, table, none, 256)))


@pytest.mark.parametrize("sm", [90, 80])
def test_nested_scales(sm):
    gpu = machine.Gpu(sm, 2)
    weight = torch.randn(96, 200, generator=torch.Generator().manual_seed(0))
    packed, state = functional.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    for dtype in (torch.bfloat16, torch.float32):
        out = gpu.dequantize_4bit(packed.reshape(-1), state.scales(), 64, 0, weight.numel(), dtype)
        assert same(out, ops.dequantize_4bit(packed, *state.scales(), 64, 0, 96, 200, dtype))


@pytest.mark.parametrize("quant_type, block", [("mxfp4", 32), ("nvfp4", 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_short_blocks(dtype, quant_type, block):
    """Every scale with bytes of all values, wide and by elements, with an end inside a block; denormal numbers stay."""
    gpu, whole, generator = machine.Gpu(90, 2), 1.0 if block == 32 else 1e-37, torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (256 * block // 2,), dtype=torch.uint8, generator=generator)
    scales = torch.arange(256, dtype=torch.uint8)
    table = ops.table({"mxfp4": "e8m0", "nvfp4": "e4m3"}[quant_type])
    for n in (256 * block, 256 * block - 5, 40):
        given = (scales[: -(-n // block)], table, torch.full((1,), whole), torch.zeros(1))
        out = gpu.dequantize_4bit(packed[: (n + 1) // 2], given, block, 2, n, dtype)
        wanted = ops.dequantize_4bit(packed[: (n + 1) // 2], *given, block, 2, 1, n, dtype).view(-1)
        assert torch.equal(out.isnan(), wanted.isnan()) and same(out.nan_to_num(), wanted.nan_to_num()), n
        assert dtype is torch.float16 or ((out != 0) & (out.abs() < 2.0**-126)).any() or n == 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_8bit_blocks(dtype):
    gpu, none = machine.Gpu(90, 2), torch.empty(0)
    for values in (maps.create_dynamic_map(True), maps.create_linear_map(False)):
        x = hostile(3000, dtype)
        code, absmax = gpu.quantize_blockwise(x, values, 256)
        expected = ops.quantize_blockwise(x, values, none, 256)
        assert same(code, expected[0]) and same(absmax, expected[1])
        out = gpu.dequantize_blockwise(code, absmax, values, 256, dtype)
        assert same(out, ops.dequantize_blockwise(code, absmax, values, none, 256, dtype))


def test_checksum():
    for n in (1, 7, 8, 4097, 100_003):
        data = torch.randint(0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))
        assert machine.Gpu(90, 2).checksum(data) == ops.checksum(data).item()


def product(gpu, dtype, M, N, K, quant_type, nested, bias, kernel):
    """y of a forced kernel, with what assert_close compares it to."""
    packed, state, decode = packed_weight(N, K, "cpu", quant_type, nested, torch.uint8)
    generator = torch.Generator().manual_seed(M)
    x = torch.randn(M, K, generator=generator).to(dtype)
    b = torch.randn(N, generator=generator).to(dtype) if bias else None
    scales = [one if one.numel() else None for one in state.scales()]
    fmt = ops.FORMATS[quant_type]
    y, chosen = gpu.linear_4bit(x, packed.reshape(-1), scales, b, 64, fmt, N, K, kernel)
    assert chosen == kernel and gpu.launches
    weight = decode(dtype).reshape(N, K)
    expected = x.double() @ weight.double().T + (b.double() if bias else 0)
    return y, expected, x, weight, b


# kernel, sm, dtype, M, N, K, format, nested, bias: every kind of tile, sums that are joined, ragged N, slices of M
PRODUCTS = [
    ("gemv_4bit", 90, torch.bfloat16, 1, 64, 1024, "nf4", True, False),
    ("gemv_4bit", 90, torch.float16, 8, 96, 512, "fp4", False, True),
    ("gemv_4bit", 90, torch.bfloat16, 16, 128, 512, "nf4", True, True),
    ("gemv_4bit", 80, torch.bfloat16, 5, 64, 768, "nf4", True, True),
    ("gemv_4bit", 80, torch.float16, 40, 64, 512, "fp4", True, False),
    ("gemv_4bit", 75, torch.float16, 3, 64, 512, "nf4", True, True),
    ("gemv_4bit", 75, torch.float16, 20, 96, 256, "fp4", False, False),
    ("gemv_4bit_simt", 90, torch.float32, 2, 33, 256, "nf4", True, True),
    ("gemv_4bit_simt", 90, torch.bfloat16, 3, 100, 192, "fp4", False, False),
    ("gemv_4bit_simt", 90, torch.float16, 5, 64, 96, "nf4", True, True),
    ("gemm_4bit_sm90", 90, torch.bfloat16, 40, 256, 512, "nf4", True, True),
    ("gemm_4bit_sm90", 90, torch.bfloat16, 130, 192, 512, "fp4", False, False),
    ("gemm_4bit_sm90", 90, torch.float16, 17, 256, 1024, "nf4", True, False),
    ("panels", 90, torch.bfloat16, 20, 100, 192, "nf4", True, True),
    ("panels", 90, torch.float16, 3, 33, 70, "fp4", False, True),
]


@pytest.mark.parametrize("case", PRODUCTS, ids=lambda case: "-".join(map(str, case)).replace("torch.", ""))
def test_products(case):
    """Within the bound of all products; the same bits on another run of threads."""
    kernel, sm, *rest = case
    results = []
    for seed in (0, 11):
        y, expected, x, weight, bias = product(machine.Gpu(sm, 4, seed), *rest, kernel)
        assert_close(y, expected, x, weight.T, bias)
        results.append(y)
    assert same(*results)


def test_a_wrong_weight_is_seen():
    """One changed byte of 16,384: the comparison above is not that wide."""
    packed, state, decode = packed_weight(64, 512, "cpu", "nf4", True, torch.uint8)
    x = torch.randn(1, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight = decode(torch.bfloat16).reshape(64, 512)
    codes = packed.reshape(-1).clone()
    codes[5000] = 255 - codes[5000]
    y, _ = machine.Gpu(90, 4).linear_4bit(x, codes, list(state.scales()), None, 64, 0, 64, 512, "gemv_4bit")
    with pytest.raises(AssertionError):
        assert_close(y, x.double() @ weight.double().T, x, weight.T)


def test_input_gradient_by_panels():
    """Panels of 64 KiB, so that there are several."""
    packed, state, decode = packed_weight(130, 256, "cpu", "nf4", True, torch.uint8)
    dy = torch.randn(5, 130, generator=torch.Generator().manual_seed(1)).bfloat16()
    gpu = machine.Gpu(90, 4, workspace_bytes=48 << 10)
    dx, chosen = gpu.linear_4bit_dgrad(dy, packed.reshape(-1), list(state.scales()), 64, 0, 130, 256)
    weight = decode(torch.bfloat16).reshape(130, 256)
    assert chosen == "panels" and len(gpu.launches) > 1
    assert_close(dx, dy.double() @ weight.double(), dy, weight)


# ---- optimizers ----

NAMES = ("adam", "momentum", "rmsprop", "adagrad", "lion", "ademamix")
SIZES = (1, 300, 5 * 256, 9000)
NUMBERS = [1e-3, 0.9, 0.999, 0.9999, 5.0, 1e-8, 1e-2, 1.0, 0.0, 0.0]  # as in driver.c


PAIRS = {  # dtypes of gradients and of parameters, by what the kernels are called
    "bf16": (torch.bfloat16, torch.bfloat16),
    "f16": (torch.float16, torch.float16),
    "f32": (torch.float32, torch.float32),
    "mixed": (torch.bfloat16, torch.float32),
}
KERNELS = list(itertools.product(NAMES, (8, 32), PAIRS))
# Each algorithm in two dtypes; BITSHARD_ALL_KERNELS=1 runs all 48.
SOME = [k for i, k in enumerate(KERNELS) if "BITSHARD_ALL_KERNELS" in os.environ or i % 4 == (i // 4) % 4]


def parameters(name, dtype, blockwise):
    """Fresh parameters of several sizes with states of zeros."""
    found = []
    for n in SIZES:
        p = {"p": torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)}
        moments = 2 if name == "ademamix" else 1
        lead = (2,) if name == "ademamix" else ()
        kind = torch.uint8 if blockwise else torch.float32
        p["state1"] = torch.zeros(*lead, n, dtype=kind)
        if blockwise:
            p["absmax1"] = torch.zeros(*lead, -(-n // 256))
        if name in ("adam", "ademamix"):
            p["state2"] = torch.zeros(n, dtype=kind)
            if blockwise:
                p["absmax2"] = torch.zeros(-(-n // 256))
        assert p["state1"].numel() == moments * n
        found.append(p)
    return found


def spoil(g, huge):
    """Blocks with a gradient that is no number, others with one whose square is none if `huge`, others as they were.

    That square makes fp32 parameters so large that their bound, of approximate quotients, is not theirs any more.
    """
    g[260::2560], g[600::2560], g[1100::2560] = float("inf"), float("nan"), float("-inf")
    if huge:
        g[1300::2560] = 3e20


@pytest.mark.parametrize("name, bits, pair", SOME)
def test_optimizers(name, bits, pair):
    """Four steps of four parameters in one launch: states are the CPU's bit for bit, 16-bit parameters too.

    fp32 parameters see the GPU's approximate roots and quotients; without decay the states do not. 8-bit states see
    gradients that are no numbers, too.
    """
    gpu, none, blockwise = machine.Gpu(90, 2), torch.empty(0), bits == 8
    g_dtype, dtype = PAIRS[pair]
    settings = [*NUMBERS[:6], 0.0 if dtype is torch.float32 else 1e-2, *NUMBERS[7:]]
    used = (maps.create_dynamic_map(True), maps.create_dynamic_map(False)) if blockwise else None
    if blockwise and name in ("rmsprop", "adagrad"):
        used = (used[1], used[1])
    ours, theirs = parameters(name, dtype, blockwise), parameters(name, dtype, blockwise)
    for step in range(1, 5):
        for p, q in zip(ours, theirs, strict=True):
            generator = torch.Generator().manual_seed(step)
            p["g"] = q["g"] = (torch.randn(p["p"].numel(), generator=generator) * 0.1).to(g_dtype)
            if blockwise and step % 2 == 0:
                spoil(p["g"], huge=dtype is not torch.float32)
            states = [q["state1"], q.get("state2", none)]
            if blockwise:
                maps_of = [used[0], used[1] if "state2" in q else none]
                states += [*maps_of, q["absmax1"], q.get("absmax2", none)]
                ops.optimizer_8bit_blockwise(
                    q["g"], q["p"], *states, NAMES.index(name), *settings[:7], step, 1.0, False, 256
                )
            else:
                numbers = (*settings[:7], step, 0.0, 0.0, 1.0, False)
                ops.optimizer_32bit(q["g"], q["p"], *states, none, NAMES.index(name), *numbers)
        gpu.optimizer_step(NAMES.index(name), step, ours, used, settings)
        assert gpu.launches == [f"optimizer_{bits}bit_{name}_{pair}"]
    for p, q in zip(ours, theirs, strict=True):
        if dtype is torch.float32:
            assert ((p.pop("p") - q["p"]).abs() <= 2.0**-22 * q["p"].abs().clamp(min=0.01)).all()
        for key in p:
            assert same(p[key], q[key]), (q["p"].numel(), key)


def other_maps():
    """Maps that are not bitsandbytes' own: some have one code at most in each cell of the kernel's table, some not."""
    generator = torch.Generator().manual_seed(0)
    minus_zero, no_zero, twice = (maps.create_dynamic_map(True) for _ in range(3))
    minus_zero[127], no_zero[127], twice[200] = -0.0, 1e-7, twice[201]
    uneven = torch.cat([torch.linspace(-1, -0.01, 30), torch.linspace(0.011, 1, 226)])
    drawn = torch.rand(256, generator=generator)
    found = {"linear": maps.create_linear_map(True), "minus zero": minus_zero, "no zero": no_zero, "twice": twice}
    found |= {"uneven": uneven, "cubes": ((2 * drawn - 1) ** 3).sort().values, "negative": (-drawn).sort().values}
    return found | {"positive": (2.0 ** (-20 * drawn)).sort().values}


@pytest.mark.parametrize("case", other_maps())
def test_maps_of_other_kinds(case):
    gpu, none = machine.Gpu(90, 2), torch.empty(0)
    values = other_maps()[case]
    ours, theirs = (parameters("lion", torch.bfloat16, True) for _ in range(2))
    for step in range(1, 4):
        for p, q in zip(ours, theirs, strict=True):
            generator = torch.Generator().manual_seed(step)
            n = p["p"].numel()
            wide = 2.0 ** torch.randint(-22, 1, (n,), generator=generator)
            p["g"] = q["g"] = (torch.randn(n, generator=generator) * wide).bfloat16()
            states = [q["state1"], none, values, none, q["absmax1"], none]
            lion = NAMES.index("lion")
            ops.optimizer_8bit_blockwise(q["g"], q["p"], *states, lion, *NUMBERS[:7], step, 1.0, False, 256)
        gpu.optimizer_step(NAMES.index("lion"), step, ours, (values, values), NUMBERS)
    for p, q in zip(ours, theirs, strict=True):
        assert all(same(p[key], q[key]) for key in p), p["p"].numel()
