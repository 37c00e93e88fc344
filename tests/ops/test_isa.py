"""Instruction sets of the CPU through the torch ops: equal bytes, equal bits for any number of threads, bounded memory.

Sizes: M rows of x, N out features, K in features.
"""

import subprocess
import sys

import cases
import pytest
import torch
from bitshard import ops
from helpers.alike import agree, by_isa, by_threads
from helpers.direct import alone

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
SIZES = (0, 1, 2, 3, 31, 33, 64, 127, 1000, 4097, 12288 + 77)
NONE = ops.empty(torch.device("cpu"))
MiB = 1 << 20


def hostile(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """n elements: ordinary ones, and runs of zeros, denormals, NaN, infinities, tiny and huge values."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator)
    kind = torch.randint(0, 12, ((n + 63) // 64,), generator=generator).repeat_interleave(64)[:n]
    rare = torch.rand(n, generator=generator) < 0.1
    x = torch.where(kind == 0, 0.0, x)
    x = torch.where(kind == 1, x * 2.0**-130, x)
    x = torch.where((kind == 2) & rare, torch.nan, x)
    x = torch.where((kind == 3) & rare, torch.inf * x.sign(), x)
    x = torch.where(kind == 4, x * 2.0**-118, x)
    x = torch.where(kind == 5, x * 2.0**124, x)
    return torch.where(kind == 6, (x * 4).round() / 12, x).to(dtype)


@pytest.mark.parametrize("format", ops.FORMATS.values(), ids=ops.FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_4bit_bytes_are_equal(dtype, format):
    for blocksize in BLOCKSIZES:
        for n in SIZES:
            x = hostile(n, dtype, n + blocksize)
            results = by_isa(lambda x=x, b=blocksize: ops.quantize_4bit(x, b, format, torch.uint8))
            agree(results)
            packed, absmax = results["scalar"]
            for out in DTYPES:
                arguments = (packed, absmax, NONE, NONE, NONE, blocksize, format, 1, n, out)
                agree(by_isa(lambda a=arguments: (ops.dequantize_4bit(*a),)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nested_and_8bit_bytes_are_equal(dtype):
    table = ops.table("dynamic")
    for blocksize in (64, 256, 4096):
        for n in SIZES:
            x = hostile(n, dtype, n - blocksize)
            results = by_isa(lambda x=x, b=blocksize: ops.quantize_blockwise(x, table, NONE, b))
            agree(results)
            back = (*results["scalar"], table, NONE, blocksize, dtype)
            agree(by_isa(lambda a=back: (ops.dequantize_blockwise(*a),)))
    for n in (1, 640, 64 * 255, 64 * 257 + 5, 64 * 1000):
        packed, absmax = ops.quantize_4bit(torch.randn(n).to(dtype), 64, 0, torch.uint8)
        offset = absmax.mean()
        results = by_isa(lambda a=absmax, o=offset: ops.quantize_blockwise(a, table, o, 256))
        agree(results)
        code, absmax2 = results["scalar"]
        arguments = (packed, code, table, absmax2, offset, 64, 0, 1, n, dtype)
        agree(by_isa(lambda a=arguments: (ops.dequantize_4bit(*a),)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_nan_only(dtype):
    """bitsandbytes' CUDA build: the scale of a whole block is where its maximum starts, of a short one 0; codes 0."""
    n, table = 64 + 5, ops.table("dynamic")
    x = torch.full((n,), torch.nan, dtype=dtype)
    scales = torch.tensor([-torch.finfo(torch.float32).max, 0.0])
    for format, first in ((0, torch.finfo(torch.float32).max), (1, -0.0)):
        values = torch.cat([torch.full((64,), first), torch.full((5,), 0.0 if format else -0.0)]).to(dtype)
        for isa, (packed, absmax) in by_isa(lambda f=format: ops.quantize_4bit(x, 64, f, torch.uint8)).items():
            assert torch.equal(absmax, scales) and not packed.any(), isa
            out = ops.dequantize_4bit(packed, absmax, NONE, NONE, NONE, 64, format, 1, n, dtype)[0]
            assert torch.equal(out, values) and torch.equal(out.signbit(), values.signbit()), isa
    for isa, (code, absmax) in by_isa(lambda: ops.quantize_blockwise(x, table, NONE, 64)).items():
        assert torch.equal(absmax, scales) and not code.any(), isa


def make_weight(N: int, K: int, nested: bool, blocksize: int = 64) -> tuple[torch.Tensor, ...]:
    """Packed weight and its scales as the ops take them: packed, absmax, absmax_map, absmax2, offset."""
    packed, absmax = ops.quantize_4bit(torch.randn(N, K) / K**0.5, blocksize, 0, torch.uint8)
    if not nested:
        return packed, absmax, NONE, NONE, NONE
    table, offset = ops.table("dynamic"), absmax.mean()
    code, absmax2 = ops.quantize_blockwise(absmax, table, offset, 256)
    return packed, code, table, absmax2, offset


def make_fine(N: int, K: int, blocksize: int, factors: int) -> tuple[torch.Tensor, ...]:
    """The same of E2M1 in blocks of 16 or 32, any bytes of scales; second level of `factors`: 1 as in the formats."""
    table = ops.table("e4m3" if blocksize == 16 else "e8m0").clone()
    table[(table.abs() < 2.0**-6) | (table.abs() > 4) | table.isnan()] = 0.0
    code = torch.randint(256, (-(-N * K // blocksize),), dtype=torch.uint8)
    absmax2 = (
        torch.rand(-(-code.numel() // 256)) + 0.01 if factors > 1 else torch.full((-(-code.numel() // 256),), 0.37)
    )
    return torch.randint(256, (-(-N * K // 2), 1), dtype=torch.uint8), code, table, absmax2, torch.zeros(1)


@pytest.mark.parametrize("kind", ("plain", "nested", "fine", "factors"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_do_not_change_bits(dtype, kind):
    for N, K in ((384, 512), (321, 130), (1, 4096)):
        fine = kind in ("fine", "factors")
        weight = make_fine(N, K, 16, 1 if kind == "fine" else 9) if fine else make_weight(N, K, kind == "nested")
        settings = (16, 2, N, K) if fine else (64, 0, N, K)
        for M in (1, 4, 16, 17, 64):
            x, dy = torch.randn(M, K, generator=torch.manual_seed(M)).to(dtype), torch.ones(M, N, dtype=dtype)

            def both(x=x, dy=dy, weight=weight, settings=settings):
                y = ops.linear_4bit(x, *weight, NONE, *settings)
                return y, ops.linear_4bit_dgrad(dy, *weight, *settings)

            by_isa(lambda both=both: agree(by_threads(both, 1, 2)))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_a_biased_product_is_rounded_once(dtype):
    """The nearest number of the dtype, but where float32 sums end beside a tie. A sum of a rounded product and the
    bias is another number in 29 of 100 places."""
    for N, K in ((256, 512), (1000, 330)):
        weight = make_weight(N, K, True)
        w = ops.dequantize_4bit(*weight, 64, 0, N, K, dtype).double()
        bias = torch.randn(N).to(dtype)
        for M in (1, 16, 17, 33, 300):
            x = torch.randn(M, K).to(dtype)
            nearest = (x.double() @ w.T + bias.double()).to(dtype)
            arguments = (x, *weight, bias, 64, 0, N, K)
            for isa, found in by_isa(lambda a=arguments: (ops.linear_4bit(*a), alone.linear_4bit(*a))).items():
                for y in found:
                    others = int((y != nearest).sum())
                    assert others <= 0.01 * y.numel(), (isa, N, K, M, f"{others} of {y.numel()}")


def check_products(M, N, K, blocksize, dtype, weight, format=0):
    """Both products on each instruction set within their bound of float64, with the W of the scalar reference."""
    w = by_isa(lambda: ops.dequantize_4bit(*weight, blocksize, format, N, K, dtype))["scalar"].double()
    x, dy, bias = torch.randn(M, K).to(dtype), torch.randn(M, N).to(dtype), torch.randn(N).to(dtype)

    def call():
        y = ops.linear_4bit(x, *weight, bias, blocksize, format, N, K)
        return y, ops.linear_4bit_dgrad(dy, *weight, blocksize, format, N, K)

    exact = (x.double() @ w.T + bias.double(), dy.double() @ w)
    sizes = (x.double().abs() @ w.abs().T + bias.double().abs(), dy.double().abs() @ w.abs())
    for isa, found in by_isa(call).items():
        for one, expected, size, terms in zip(found, exact, sizes, (K, N), strict=True):
            wrong = (one.double() - expected).abs() > cases.largest_error(expected, size, terms, dtype, False)
            assert not wrong.any(), (isa, M, N, K, terms, wrong.nonzero()[:3].tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_is_within_its_bound_of_fp64(dtype):
    for N, K, blocksize in ((96, 256, 64), (50, 98, 64), (33, 320, 4096), (40, 96, 32)):
        for M in (1, 3, 16, 40):
            check_products(M, N, K, blocksize, dtype, make_weight(N, K, True, blocksize))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocksize", (16, 32))
def test_fine_blocks_are_within_their_bound_of_fp64(blocksize, dtype):
    """By groups, by tiles (K = 96) and by panels large enough for a table of every scale; one factor and several."""
    for N, K in ((70, 256), (50, 96), (96, 1024)):
        for M in (1, 3, 5, 16, 20):
            for factors in (1, 9):
                check_products(M, N, K, blocksize, dtype, make_fine(N, K, blocksize, factors), 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_column_is_written_over_another(dtype):
    """Panels of W whose last would be one row or column, which torch 2.10 stores in the wrong places of y or dx."""
    for N, K in ((65, 64), (321, 128), (128, 321), (1, 64), (64, 1), (2, 64), (1041, 32)):
        check_products(64, N, K, 64, dtype, make_weight(N, K, False))


def run_script(script: str) -> str:
    """Runs a script in a fresh process, whose peak memory is its own."""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


PEAK = """
import resource, torch
from bitshard import ops
torch.set_num_threads(2)
N, K = {N}, {K}
NONE = torch.empty(0)
def weight(N, K):
    packed = torch.empty(N * K // 2, dtype=torch.uint8).random_(256)
    return packed, torch.rand(N * K // 64), NONE, NONE, NONE
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
def peak():  # not getrusage: its ru_maxrss starts at what the parent process had
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
def call(M, dtype, gradient, w, N, K):
    x = torch.ones(M, N if gradient else K, dtype=dtype)
    before = resident()
    if gradient:
        y = ops.linear_4bit_dgrad(x, *w, 64, 0, N, K)
    else:
        y = ops.linear_4bit(x, *w, NONE, 64, 0, N, K)
    return peak() - before - y.numel() * y.itemsize
small, big = weight(256, 256), weight(N, K)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for gradient in (False, True):
        for M in {M}:
            call(M, dtype, gradient, small, 256, 256)
            print(M, str(dtype), gradient, call(M, dtype, gradient, big, N, K))
"""


def test_peak_memory_of_large_weights():
    """28672 x 8192: beside its output, linear_4bit takes at most 64 MiB at M = 64, and nothing at M = 16."""
    for M, limit in (((16,), 4 * MiB), ((64,), 64 * MiB)):
        for line in run_script(PEAK.format(N=28672, K=8192, M=M)).splitlines():
            extra = int(line.split()[-1])
            assert extra <= limit, f"{line}: {extra / MiB:.1f} MiB, allowed {limit / MiB:.0f}"


HUGE = """
import resource, torch
from bitshard import ops
NONE = torch.empty(0)
blocksize, n = 64, 2**31 + 64 * 1000 + 37
places = [slice(0, 8192), slice(2**31 - 8192, 2**31 + 8192), slice(n // 64 * 64 - 8192, n)]
chunk = torch.randn(2**20 + 64 * 7).bfloat16()
x = torch.empty(n, dtype=torch.bfloat16)
for begin in range(0, n, chunk.numel()):
    x[begin : begin + chunk.numel()] = chunk[: n - begin]
pieces = [x[place].clone() for place in places]
packed, absmax = ops.quantize_4bit(x, blocksize, 0, torch.bfloat16)
del x
out = ops.dequantize_4bit(packed, absmax, NONE, NONE, NONE, blocksize, 0, 1, n, torch.bfloat16).view(-1)
stored = packed.view(torch.uint8).view(-1)
assert stored.numel() == ((n + 1) // 2 + 1) // 2 * 2, stored.numel()
for piece, place in zip(pieces, places):
    codes, scales = ops.quantize_4bit(piece, blocksize, 0, torch.uint8)
    assert torch.equal(stored[place.start // 2 :][: codes.numel()], codes.view(-1)), place
    assert torch.equal(absmax[place.start // blocksize :][: scales.numel()], scales), place
    arguments = (codes, scales, NONE, NONE, NONE, blocksize, 0, 1, piece.numel(), torch.bfloat16)
    assert torch.equal(out[place], ops.dequantize_4bit(*arguments).view(-1)), place
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


def available_gib() -> float:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20


@pytest.mark.skipif(available_gib() < 8, reason="a bf16 tensor of more than 2^31 elements needs 8 GiB of free memory")
def test_more_than_2_31_elements():
    peak = float(run_script(HUGE))
    assert peak <= 12, f"{peak:.1f} GiB"
