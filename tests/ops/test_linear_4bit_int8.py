"""linear_4bit_int8: 4-bit weights in 8-bit arithmetic, against exact sums of codes; equal bits everywhere on a CPU.

Sizes: M rows of x, N out features, K in features.
"""

import cases
import pytest
import reference
import torch
from bitshard import functional, ops
from helpers.alike import agree, by_isa, by_threads
from helpers.bytes import assert_equal

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FACTORS = {"nf4": 124.11, "fp4": 120.0}
NONE = ops.empty(torch.device("cpu"))


def make_weight(N: int, K: int, quant_type: str = "nf4", nested: bool = False, blocksize: int = 64) -> tuple:
    """Packed codes and state of a normal W."""
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(N + K)) / K**0.5
    return functional.quantize_4bit(w, None, None, blocksize, nested, quant_type)


def make_x(M: int, K: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Columns of different size, one of them large, as activations have them."""
    generator = torch.Generator().manual_seed(M)
    x = torch.randn(M, K, generator=generator) * (0.5 * torch.randn(K, generator=generator)).exp()
    x[:, K // 2] *= 30
    return x.to(dtype)


def call(x, packed, state, bias=NONE):
    numbers = (state.blocksize, ops.CODES[state.quant_type], *state.shape)
    return ops.linear_4bit_int8(x, packed, *state.scales(), bias, *numbers)


def operands(packed, state) -> tuple:
    """W's codes times the factor, rounded, int64 [N, K], and the scale of each 64 columns, float32 [N, K / 64]."""
    N, K = state.shape
    units = (ops.table(state.quant_type).double() * FACTORS[state.quant_type]).round().long()
    codes = units[reference.unpack(packed, N * K)].view(N, K)
    scales = functional.plain_scales(state).repeat_interleave(state.blocksize // 64)
    return codes, scales.view(N, K // 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quant_type", FACTORS)
def test_sums_of_codes(quant_type, dtype):
    """Within what float32 loses by adding K / 64 groups and scaling them; equal on each instruction set."""
    for N, K, blocksize, nested in (
        (33, 64, 64, False),
        (130, 320, 64, True),
        (65, 512, 128, False),
        (321, 4096, 4096, True),
    ):
        packed, state = make_weight(N, K, quant_type, nested, blocksize)
        codes, scales = operands(packed, state)
        bias = torch.randn(N).to(dtype)
        for M in (1, 5, 127, 128, 300):
            x = make_x(M, K, dtype)
            of_x = ops.quantize_int8(x.view(-1, 64), 0.0)[:2]
            exact, size = reference.linear_4bit_int8(*of_x, codes, scales, bias, FACTORS[quant_type])
            found = by_isa(lambda a=(x, packed, state, bias): call(*a))
            agree(found)
            allowed = cases.largest_error(exact, size, K // 64 + 4, dtype, False)
            wrong = (found["scalar"].double() - exact).abs() > allowed
            assert not wrong.any(), (M, N, K, wrong.nonzero()[:3].tolist())


def test_no_code_is_lost():
    """A row of W for each code, and x of 127ths: every product is a whole number."""
    for quant_type, format in ops.FORMATS.items():
        packed = torch.arange(16, dtype=torch.uint8).mul(17).repeat_interleave(32)
        state = functional.QuantState(torch.ones(16), torch.Size((16, 64)), None, 64, quant_type, torch.float32)
        state.share(quant_type)
        codes, _ = operands(packed, state)
        x = torch.zeros(3, 64)
        x[0, 0], x[1, 63], x[2, :2] = 1.0, -1.0, torch.tensor([1.0, 64 / 127])
        y = call(x, packed, state) * FACTORS[quant_type]
        expected = torch.stack([codes[:, 0], -codes[:, 0], codes[:, 0] * 191 / 127])
        assert torch.allclose(y, expected.float(), rtol=1e-6, atol=0), (format, y - expected)


@pytest.mark.parametrize("M", (3, 200))
def test_rows_of_values_that_are_none(M):
    """A NaN or an infinity makes its row NaN and no other; zeros and what is below 2^-118 are 0 beside a bias."""
    packed, state = make_weight(70, 256)
    x, bias = make_x(M, 256), torch.randn(70)
    clean = call(x, packed, state, bias)
    x[0, 3], x[2, 200], x[1] = torch.nan, -torch.inf, 2.0**-120
    found = by_isa(lambda: call(x, packed, state, bias))
    agree(found)
    y = found["scalar"]
    assert y[0].isnan().all() and y[2].isnan().all()
    assert_equal(y[1], bias)
    assert_equal(y[3:], clean[3:])


def test_threads_and_chunks_do_not_change_bits():
    """K so large that rows of x take several chunks; rows alone have the bits that they have among others."""
    packed, state = make_weight(260, 65536)
    x = make_x(520, 65536, torch.bfloat16)
    found = by_threads(lambda: call(x, packed, state), 1, 2)
    agree(found)
    assert_equal(call(x[300:303], packed, state), found[1][300:303])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_biased_sum_is_rounded_once(dtype):
    packed, state = make_weight(96, 256)
    x, bias = make_x(140, 256, torch.bfloat16), torch.randn(96).bfloat16()
    wide = call(x.float(), packed, state, bias.float())
    if dtype is torch.bfloat16:
        assert_equal(call(x, packed, state, bias), wide.to(dtype))


def test_far_less_than_the_weights_own_error():
    """docs/numerics.md: of y, beside what NF4 itself loses."""
    N, K, M = 256, 2048, 256
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(0)) / K**0.5
    packed, state = functional.quantize_nf4(w)
    x = make_x(M, K)
    exact = x.double() @ functional.dequantize_4bit(packed, state).double().T
    lost = (exact - x.double() @ w.double().T).norm() / exact.norm()
    off = (call(x, packed, state).double() - exact).norm() / exact.norm()
    assert off < 0.02 < 0.08 < lost, (off, lost)


def test_shapes():
    packed, state = make_weight(33, 128)
    for shape in ((128,), (2, 3, 128), (0, 128)):
        assert call(torch.ones(shape), packed, state).shape == (*shape[:-1], 33)
    rows = make_x(40, 256)[:, :128]
    assert_equal(call(rows, packed, state), call(rows.contiguous(), packed, state))


def test_refusals():
    packed, state = make_weight(4, 96, blocksize=32)
    scales = state.scales()
    with pytest.raises(RuntimeError, match="96 columns in blocks of 32, expected multiples of 64"):
        ops.linear_4bit_int8(torch.ones(2, 96), packed, *scales, NONE, 32, 0, 4, 96)
    packed, state = make_weight(4, 128)
    arguments = (packed, *state.scales(), NONE, 64)
    with pytest.raises(RuntimeError, match="format 2 is neither NF4"):
        ops.linear_4bit_int8(torch.ones(2, 128), *arguments, 2, 4, 128)
    with pytest.raises(RuntimeError, match="last dimension of x is 64, the weight needs 128"):
        ops.linear_4bit_int8(torch.ones(2, 64), *arguments, 0, 4, 128)
    with pytest.raises(RuntimeError, match="linear_4bit_int8: "):
        ops.linear_4bit_int8(torch.ones(2, 128).double(), *arguments, 0, 4, 128)
    with pytest.raises(ValueError, match="nf4 weight of 128 columns in blocks of 32"):
        functional.linear_4bit_int8(torch.ones(2, 128), *make_weight(4, 128, blocksize=32))
    with pytest.raises(ValueError, match=r"x of shape \[2, 64\] does not fit"):
        functional.linear_4bit_int8(torch.ones(2, 64), packed, state)
    assert_equal(functional.linear_4bit_int8(make_x(3, 128), packed, state), call(make_x(3, 128), packed, state))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_has_the_cpus_bits(dtype):
    for N, K, M in ((33, 64, 3), (130, 192, 130), (1000, 4096, 700)):
        packed, state = make_weight(N, K, nested=True)
        x, bias = make_x(M, K, dtype), torch.randn(N).to(dtype)
        expected = call(x, packed, state, bias)
        scales = (tensor.cuda() for tensor in state.scales())
        numbers = (state.blocksize, ops.CODES[state.quant_type], N, K)
        assert_equal(ops.linear_4bit_int8(x.cuda(), packed.cuda(), *scales, bias.cuda(), *numbers).cpu(), expected)
