"""search_4bit and round_4bit: against the reference, the same bits on every instruction set, and on the played GPU."""

import platform
import shutil

import pytest
import reference
import torch
from bitshard import functional, ops
from bitshard.calibration import solve
from helpers.alike import agree, by_isa, by_threads
from helpers.drawn import assert_close
from ptx import gpu as machine

FORMATS = {"nf4": 0, "fp4": 1, "e2m1": 2}
plays = pytest.mark.skipif(
    machine.nvcc() is None or shutil.which("gcc") is None or platform.machine() != "x86_64",
    reason="needs nvcc, and gcc on x86-64",
)


def panel(N, P, seed=0):
    """w, u and scales of either sign, none of which is near a tie of two codes by chance."""
    generator = torch.Generator().manual_seed(seed + N * P)
    w = torch.randn(N, P, generator=generator)
    u = torch.eye(P) * 2 + torch.triu(torch.randn(P, P, generator=generator), 1) / P
    signs = torch.randint(0, 2, (N, P), generator=generator) * 2 - 1
    return w, u, (torch.rand(N, P, generator=generator) + 1.5) * signs


def hostile():
    """Values and scales that no weight should have: nothing but sums may come of them, and the same everywhere."""
    w, u, scales = panel(40, 64)
    w[0], w[1, ::3], w[2] = float("nan"), float("inf"), 1e-42
    scales[3], scales[4], scales[5], scales[6, 5] = 0.0, 1e-40, float("inf"), float("nan")
    return w, u, scales


def bits(*tensors):
    return [tensor.contiguous().view(torch.uint8).tolist() for tensor in tensors]


@pytest.mark.parametrize("quant_type", FORMATS)
@pytest.mark.parametrize("N, P", [(1, 1), (7, 64), (33, 31), (100, 64)])
def test_codes_and_errors(device, quant_type, N, P):
    """Codes of the reference, but where a value lies between two of them; errors of these codes."""
    w, u, scales = panel(N, P)
    codes, errors = (
        each.cpu() for each in ops.round_4bit(*(t.to(device) for t in (w, u, scales)), FORMATS[quant_type])
    )
    wanted, exact = reference.round_4bit(w, u, scales, quant_type)
    values = ops.table(quant_type)
    same = (values[codes.long()] == values[wanted]).cumprod(1).bool()  # behind a tie both ways are right
    assert same.float().mean() > 0.97
    assert torch.allclose(errors[same], exact.float()[same], atol=1e-5)


@pytest.mark.parametrize("quant_type", FORMATS)
@pytest.mark.parametrize("n, period, blocksize, G", [(5000, 96, 64, 42), (33, 7, 32, 1), (9000, 3000, 4096, 70)])
def test_the_best_scale(device, quant_type, n, period, blocksize, G):
    """The error of the chosen scale is the least there is."""
    generator = torch.Generator().manual_seed(n)
    x, weights = torch.randn(n, generator=generator), torch.rand(period, generator=generator)
    scales = torch.randn(-(-n // blocksize), G, generator=generator)
    choice = ops.search_4bit(*(t.to(device) for t in (x, weights, scales)), blocksize, FORMATS[quant_type]).cpu()
    errors = reference.search_4bit(x, weights, scales, blocksize, quant_type)
    chosen = errors.gather(1, choice.long()[:, None])[:, 0]
    assert ((chosen - errors.amin(1)).abs() <= 1e-4 * chosen).all()


def test_of_equal_scales_the_first(device):
    x = (torch.rand(64 * 20) * 2 - 1).to(device)
    scales = torch.tensor([[4.0, 1.0, 1.0, 4.0]]).expand(20, 4).to(device)
    assert set(ops.search_4bit(x, torch.ones(1, device=device), scales, 64, 0).tolist()) == {1}
    nothing = torch.full((20, 4), float("nan"), device=device)
    assert set(ops.search_4bit(x, torch.ones(1, device=device), nothing, 64, 0).tolist()) == {0}


@pytest.mark.parametrize("quant_type", FORMATS)
def test_every_instruction_set_gives_the_same_bits(quant_type):
    for given in (panel(100, 64), panel(5, 17), hostile()):
        found = by_isa(lambda given=given: bits(*ops.round_4bit(*given, FORMATS[quant_type])))
        assert all(each == found["scalar"] for each in found.values()), found.keys()
        x, scales = given[0].reshape(-1), torch.randn(-(-given[0].numel() // 32), 50)
        scales[0, 3:20], scales[1] = float("nan"), 0.0
        call = (x, torch.rand(13), scales, 32, FORMATS[quant_type])
        found = by_isa(lambda call=call: ops.search_4bit(*call).tolist())
        assert all(each == found["scalar"] for each in found.values()), found.keys()


def test_threads_do_not_change_bits():
    given = panel(3000, 64)
    x, scales = given[0].reshape(-1), torch.randn(3000, 42)
    agree(by_threads(lambda: (*ops.round_4bit(*given, 0), ops.search_4bit(x, torch.ones(1), scales, 64, 0)), 1, 3))


@plays
@pytest.mark.parametrize("quant_type", FORMATS)
@pytest.mark.parametrize("sm", [90, 75])
def test_on_the_played_gpu(quant_type, sm):
    """The bits of the CPU, within bounds, in whatever order threads run."""
    gpu = machine.Gpu(sm, 2, seed=3)
    for given in (panel(70, 64), panel(5, 17), hostile()):
        codes, errors = gpu.round_4bit(*given, FORMATS[quant_type])
        wanted, exact = ops.round_4bit(*given, FORMATS[quant_type])
        assert torch.equal(codes, wanted) and torch.equal(errors.isnan(), exact.isnan())
        assert bits(errors[~errors.isnan()]) == bits(exact[~exact.isnan()])  # a NaN has the sign of its machine
    x, scales = given[0].reshape(-1)[:1000].clone(), torch.randn(16, 42)
    scales[0, 3:20], scales[1] = float("nan"), 0.0
    found = gpu.search_4bit(x, torch.rand(13).fill_(0.5), scales, 64, FORMATS[quant_type])
    assert torch.equal(found, ops.search_4bit(x, torch.full((13,), 0.5), scales, 64, FORMATS[quant_type]))


W, U, S = torch.ones(4, 64), torch.eye(64), torch.ones(4, 64)
WRONG = [
    (lambda: ops.round_4bit(W[0], U, S, 0), "w has 1 dimensions, expected 2"),
    (lambda: ops.round_4bit(W.double(), U, S, 0), "w has ScalarType 7, expected 6"),
    (lambda: ops.round_4bit(torch.ones(4, 65), U, S, 0), "w has 65 columns, expected 1 to 64"),
    (lambda: ops.round_4bit(W, U[:3], S, 0), r"u is \[3, 64\], expected \[64, 64\]"),
    (lambda: ops.round_4bit(W, U, S[:, :1], 0), r"scales is \[4, 1\], expected \[4, 64\]"),
    (lambda: ops.round_4bit(W, U, S, 3), "format 3 is none of"),
    (lambda: ops.search_4bit(W, U[0], torch.ones(3, 5), 64, 0), r"scales is \[3, 5\], expected \[4, 5\]"),
    (lambda: ops.search_4bit(W, U[0], torch.ones(4, 257), 64, 0), "257 scales a block, expected 1 to 256"),
    (lambda: ops.search_4bit(W, U[0], torch.ones(4, 0), 64, 0), "0 scales a block"),
    (lambda: ops.search_4bit(W, torch.ones(0), torch.ones(4, 5), 64, 0), "weights is empty"),
    (lambda: ops.search_4bit(W, U[0], torch.ones(4, 5), 48, 0), "blocksize"),
]


@pytest.mark.parametrize("call, words", WRONG)
def test_what_does_not_fit_raises(call, words):
    with pytest.raises(RuntimeError, match=words):
        call()


def test_nothing_of_nothing():
    codes, errors = ops.round_4bit(torch.ones(0, 64), U, torch.ones(0, 64), 0)
    assert codes.shape == errors.shape == (0, 64)
    assert ops.search_4bit(torch.ones(0), U[0], torch.ones(0, 3), 64, 0).shape == (0,)


def test_fakes_say_what_comes():
    meta = [tensor.to("meta") for tensor in (W, U, S)]
    for fake, real in zip(ops.round_4bit(*meta, 0), ops.round_4bit(W, U, S, 0), strict=True):
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
    fake, real = (ops.search_4bit(t, u, s, 64, 0) for t, u, s in ((meta[0], meta[1][0], meta[2]), (W, U[0], S)))
    assert (fake.shape, fake.dtype) == (real.shape, real.dtype)


@plays
@pytest.mark.parametrize(
    "kernel, dtype, M, N, K",
    [
        ("gemv_4bit", torch.bfloat16, 4, 64, 512),
        ("gemv_4bit_simt", torch.float16, 3, 64, 192),
        ("gemm_4bit_sm90", torch.bfloat16, 40, 256, 512),
        ("gemm_4bit_sm90_wide", torch.bfloat16, 130, 256, 256),
        ("panels", torch.bfloat16, 20, 64, 128),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_every_product_takes_scales_of_either_sign(kernel, dtype, M, N, K, nested):
    """As calibration chooses them; the kernels are those for every 4-bit weight."""
    generator = torch.Generator().manual_seed(M)
    fmt = solve.Format(nested=nested)
    w = torch.randn(N, K, generator=generator)
    scales = solve._absmax(w, 64) * torch.tensor([1.0, -1.0, 0.9]).repeat(N * K)[: N * K // 64, None]
    codes = torch.randint(0, 16, (N, K), generator=generator).to(torch.uint8)
    choice = solve.Choice(codes, scales[:, 0], None, "search")
    if nested:
        second = solve.Nested.after(scales[:, 0])
        values, kinds = second.nearest(scales)
        choice = solve.Choice(codes, values[:, 0], (kinds[:, 0], second.second, second.offset), "search")
    packed, state = solve.packed(choice, fmt, w.shape, dtype)
    assert (choice.scales < 0).float().mean() > 0.3
    x = torch.randn(M, K, generator=generator).to(dtype)
    given = [one if one.numel() else None for one in state.scales()]
    y, chosen = machine.Gpu(90, 4).linear_4bit(x, packed.reshape(-1), given, None, 64, 0, N, K, kernel)
    weight = functional.dequantize_4bit(packed, state)
    assert chosen == kernel
    assert_close(y, x.double() @ weight.double().T, x, weight.T, None)
    assert_close(functional.linear_4bit(x, packed, state), x.double() @ weight.double().T, x, weight.T, None)
