"""merge_4bit: the numbers of the reference through the quantizer, on each instruction set and on a played GPU."""

import math
import platform
import shutil

import pytest
import reference
import torch
from bitshard import functional, ops
from bitshard.formats.maps import table
from bitshard.functions import merge as merging
from bitshard.functions import microscaled
from bitshard.functions.merge import merge_4bit
from bitshard.kinds import INT8, kind_of
from helpers.alike import agree, by_isa, by_threads
from ptx import gpu as machine

CPU = torch.device("cpu")
FORMATS = {"nf4": 0, "fp4": 1}
SHORT = ("mxfp4", "nvfp4")
SHAPES = [(24, 128, 64), (7, 33, 64), (40, 96, 32), (5, 1000, 128), (9, 512, 4096), (130, 64, 64)]
plays = pytest.mark.skipif(
    machine.nvcc() is None or shutil.which("gcc") is None or platform.machine() != "x86_64",
    reason="needs nvcc, and gcc on x86-64",
)


def weight(N, K, blocksize=64, quant_type="nf4", nested=False, storage=torch.uint8):
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(N * K)) * 0.02
    return functional.quantize_4bit(w, None, None, blocksize, nested, quant_type, storage)


def adapters(N, K, ranks=(5,), dtype=torch.float32, size=0.05, device="cpu"):
    """Large enough to change most codes."""
    generator = torch.Generator().manual_seed(K)
    return [
        (
            (torch.randn(r, K, generator=generator) * size).to(device, dtype),
            (torch.randn(N, r, generator=generator) * size).to(device, dtype),
            1.5 / (i + 1),
        )
        for i, r in enumerate(ranks)
    ]


def expected(packed, state, given):
    """By the definition: dequantized, added, quantized."""
    values = functional.dequantize_4bit(packed, _in_float32(state))
    merged = reference.merge_4bit(values, given)
    found, new = functional.quantize_4bit(merged, None, None, state.blocksize, False, state.quant_type, packed.dtype)
    if state.nested:
        mean, code = torch.tensor(math.fsum(new.absmax.tolist()) / new.absmax.numel()), table("dynamic", CPU)
        functional.set_nested(new, *ops.quantize_blockwise(new.absmax, code, mean, 256), mean)
    return found, new


def _in_float32(state):
    state = state.clone()
    state.dtype = torch.float32
    return state


def same(found, wanted):
    (packed, state), (other, exact) = found, wanted
    assert packed.dtype is other.dtype and torch.equal(packed.view(torch.uint8), other.view(torch.uint8))
    assert torch.equal(state.absmax, exact.absmax) and state.nested == exact.nested
    if state.nested:
        assert torch.equal(state.state2.absmax, exact.state2.absmax) and torch.equal(state.offset, exact.offset)


def test_the_reference_rounds_once():
    """fma of the reference against exact fractions."""
    from fractions import Fraction

    generator = torch.Generator().manual_seed(3)
    a, b = torch.randn(2, 3000, generator=generator)
    c = -a * b * (1 + torch.randn(3000, generator=generator) * 2.0**-22) + (torch.arange(3000) % 3 == 0) * 1e-9
    found = reference.fma(a, b, c)
    for i in range(3000):
        exact = Fraction(a[i].item()) * Fraction(b[i].item()) + Fraction(c[i].item())
        around = torch.nextafter(found[i].repeat(2), torch.tensor([-torch.inf, torch.inf]))
        off = abs(Fraction(found[i].item()) - exact)
        assert all(off <= abs(Fraction(other.item()) - exact) for other in around), i


@pytest.mark.parametrize("quant_type", FORMATS)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("N, K, blocksize", SHAPES)
def test_bytes_of_the_definition(quant_type, nested, N, K, blocksize):
    packed, state = weight(N, K, blocksize, quant_type, nested)
    for ranks, dtype in (
        ((5,), torch.float32),
        ((1,), torch.bfloat16),
        ((3, 8, 2), torch.float16),
        ((), torch.float32),
    ):
        given = adapters(N, K, ranks, dtype)
        found = by_isa(lambda given=given: merge_4bit(packed, state, given))
        for each in found.values():
            same(each, expected(packed, state, given))
        if ranks:
            assert not torch.equal(found["scalar"][0], packed)


def short_blocks(N, K, quant_type, storage=torch.uint8):
    """A weight in MXFP4 or NVFP4; its first rows are larger than the others."""
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(N * K)) * 0.02
    w[: N // 3] *= 7
    return kind_of(quant_type).quantize(w, quant_storage=storage)


def of_short_blocks(packed, state, given):
    """By the definition: dequantized, added, quantized as `bitshard quantize --type` does."""
    merged = reference.merge_4bit(functional.dequantize_4bit(packed, _in_float32(state)), given)
    return state.kind.quantize(merged, quant_storage=packed.dtype)


@pytest.mark.parametrize("at_once", [None, 1 << 22, 2048])
@pytest.mark.parametrize("quant_type", SHORT)
def test_mxfp4_and_nvfp4_have_the_bytes_of_the_definition(quant_type, at_once, monkeypatch):
    """On each instruction set; by one op, and in one panel and in several, whose last one is short."""
    if at_once is not None:
        monkeypatch.setattr(merging, "_one_op", lambda *_: False)
        monkeypatch.setattr(microscaled, "AT_ONCE", at_once)
    for N, K, ranks, dtype, storage in (
        (24, 128, (5,), torch.float32, torch.uint8),
        (7, 33, (1,), torch.bfloat16, torch.float32),
        (70, 96, (3, 8, 2), torch.float16, torch.bfloat16),
        (130, 64, (), torch.float32, torch.uint8),
        (40, 1000, (4,), torch.bfloat16, torch.uint8),
        (0, 64, (2,), torch.float32, torch.uint8),
    ):
        packed, state = short_blocks(N, K, quant_type, storage)
        given = adapters(N, K, ranks, dtype)
        wanted = of_short_blocks(packed, state, given)
        found = by_isa(lambda packed=packed, state=state, given=given: merge_4bit(packed, state, given))
        for each in found.values():
            same(each, wanted)
            assert each[1] == wanted[1] and each[1].kind is state.kind and each[1].shape == (N, K)
        assert not (ranks and N) or not torch.equal(wanted[0].view(torch.uint8), packed.view(torch.uint8))


@pytest.mark.parametrize("quant_type", [*FORMATS, *SHORT])
def test_values_of_some_rows(quant_type):
    """Not quantized, on each instruction set; the first of them may be in the middle of a block."""
    for N, K, row0, rows in ((7, 33, 3, 2), (40, 1000, 0, 40), (9, 4100, 8, 1), (5, 64, 5, 0)):
        packed, state = short_blocks(N, K, quant_type) if quant_type in SHORT else weight(N, K, 64, quant_type, True)
        (A, B, s), *_ = given = adapters(N, K, (3,), torch.bfloat16)
        numbers = (state.blocksize, ops.CODES[quant_type], N, K, row0, rows)
        of_ranks = torch.tensor([0.0, 0.0, s])
        found = by_isa(lambda p=packed, t=state, n=numbers: ops.merged_values(p, *t.scales(), A, B, of_ranks, *n))  # noqa: B023
        dense = functional.dequantize_4bit(packed, _in_float32(state))
        for values in found.values():
            assert torch.equal(values, reference.merged_values(dense, given, row0, rows))


@pytest.mark.parametrize("quant_type", SHORT)
def test_no_adapter_changes_nothing_but_the_global_scale(quant_type):
    """Merged values that are those of W get its bytes: a second merge of nothing is the first."""
    packed, state = short_blocks(48, 128, quant_type)
    once = merge_4bit(packed, state, [])
    same(merge_4bit(*once, []), once)
    assert torch.equal(functional.dequantize_4bit(*once), functional.dequantize_4bit(packed, state))


def test_several_global_scales():
    """A weight whose halves have global scales of their own, as gate and up of files, gets one of the largest value."""
    halves = [short_blocks(64, 64, "nvfp4"), short_blocks(64, 64, "nvfp4")]
    halves[1][1].state2.absmax.mul_(3)
    packed = torch.cat([codes for codes, _ in halves])
    absmax, second = (
        torch.cat([pick(of) for _, of in halves]) for pick in (lambda s: s.absmax, lambda s: s.state2.absmax)
    )
    assert second.numel() == 2 and second[0] != second[1]
    state = kind_of("nvfp4").state(type(halves[0][1]), absmax, second, torch.Size((128, 64)), torch.float32)
    given = adapters(128, 64)
    found = merge_4bit(packed, state, given)
    same(found, of_short_blocks(packed, state, given))
    largest = reference.merge_4bit(functional.dequantize_4bit(packed, state), given).abs().max()
    assert found[1].state2.absmax.unique().allclose(largest / 2688, rtol=1e-6)


@pytest.mark.parametrize("quant_type", SHORT)
def test_values_that_are_not_finite_are_seen(quant_type):
    """Scales say so, without waiting for a GPU; what writes a weight refuses them with the numbers."""
    packed, state = short_blocks(48, 64, quant_type)
    for bad in (float("nan"), float("inf")):
        (A, B, s), *_ = adapters(48, 64)
        A[2, 40] = bad
        codes, new = merge_4bit(packed, state, [(A, B, s)])
        assert not functional.dequantize_4bit(codes, new).isfinite().all()
        with pytest.raises(ValueError, match=r"W \+ s B A is not finite: (the global|\d+ of \d+ scales)"):
            merging.require_numbers(new)
    merging.require_numbers(state)


@pytest.mark.parametrize("storage", [torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize("quant_type", [*FORMATS, *SHORT])
def test_an_expert_of_a_stack_has_the_bytes_that_it_has_alone(quant_type, storage):
    """Whatever the strides of A and B; padding is zeros."""
    E, N, K = 3, 6, 96
    settings = {"quant_type": quant_type, "compress_statistics": True, "blocksize": 64} if quant_type in FORMATS else {}
    values = torch.randn(E, N, K) * torch.tensor([1.0, 5, 0.1]).view(E, 1, 1)
    packed, state = kind_of(quant_type).stack.quantize(values, quant_storage=storage, **settings)
    state.checksum = ops.checksum(packed)
    A, B = torch.randn(E, K, 2).transpose(1, 2), torch.randn(N, 2, E).permute(2, 0, 1)
    merged, new = merge_4bit(packed, state, [(A, B, 0.3), (B.new_ones(E, 1, K), B[:, :, :1], 0.1)])
    assert merged.shape == packed.shape and new.kind is state.kind and new.shape == state.shape
    assert new.checksum is None  # that of other bytes is not kept
    for e in range(E):
        given = [(A[e], B[e], 0.3), (torch.ones(1, K), B[e, :, :1], 0.1)]
        same(functional.expert_of(merged, new, e), merge_4bit(*functional.expert_of(packed, state, e), given))
    assert new == functional.QuantState.from_dict(new.as_dict(packed=True), device="cpu")


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_the_container_stays(storage):
    packed, state = weight(7, 33, storage=storage)
    given = adapters(7, 33)
    merged, new = merge_4bit(packed, state, given)
    same((merged, new), expected(packed, state, given))
    assert merged.shape == packed.shape and new.dtype is state.dtype and new.shape == state.shape


def test_order_and_zero_scales_count():
    """Adapters are added in their order; one of scale 0 or rank 0 changes nothing."""
    packed, state = weight(16, 128)
    one, two = adapters(16, 128, (4, 4))
    still = (two[0], two[1], 0.0)
    same(merge_4bit(packed, state, [one, still]), merge_4bit(packed, state, [one]))
    same(merge_4bit(packed, state, [(one[0][:0], one[1][:, :0], 2.0), one]), merge_4bit(packed, state, [one]))
    same(merge_4bit(packed, state, [one, two]), expected(packed, state, [one, two]))
    mixed = [one, (two[0].bfloat16(), two[1].bfloat16(), two[2])]
    same(merge_4bit(packed, state, mixed), expected(packed, state, mixed))


def test_threads_do_not_change_bytes():
    packed, state = weight(300, 500)
    given = adapters(300, 500, (9,))
    agree(by_threads(lambda: (lambda made: (made[0], made[1].absmax))(merge_4bit(packed, state, given)), 1, 3))


@plays
@pytest.mark.parametrize("quant_type", FORMATS)
@pytest.mark.parametrize("sm", [90, 75])
def test_on_the_played_gpu(quant_type, sm):
    """The bytes of the CPU, in one launch and one for nested scales, by the fast kernel and that for any sizes."""
    gpu = machine.Gpu(sm, 2, seed=5)
    cases = [(20, 128, 64, (70, 3), torch.float32, False), (70, 576, 64, (5,), torch.bfloat16, True)]
    cases += [(7, 33, 64, (5,), torch.float16, True), (6, 128, 32, (2, 2), torch.float32, False)]
    cases += [(10, 64, 64, (500, 13), torch.float32, False), (18, 64, 64, (512,), torch.bfloat16, False)]
    cases += [(66, 192, 64, (33,), torch.float16, True), (67, 192, 64, (3, 30), torch.bfloat16, False)]
    for N, K, blocksize, ranks, dtype, nested in cases:
        packed, state = weight(N, K, blocksize, quant_type, nested)
        given = adapters(N, K, ranks, dtype)
        scales = torch.tensor([x for _, b, s in given for x in (*[0.0] * (b.shape[1] - 1), s)])
        a, b = torch.cat([A for A, _, _ in given]), torch.cat([B for _, B, _ in given], 1)
        of = [one if one.numel() else None for one in state.scales()]
        merged, absmax, *of_gpu = gpu.merge_4bit(packed, of, a, b, scales, blocksize, FORMATS[quant_type], N, K)
        plain, code = functional.with_plain_scales(state), table("dynamic", CPU) if nested else torch.empty(0)
        of_op, last = (packed, *state.scales(), a, b, scales), (blocksize, FORMATS[quant_type], N, K)
        exact, new, *_ = ops.merge_4bit(*of_op, torch.empty(0), *last)
        again, *of_cpu = ops.merge_4bit(*of_op, code, *last)
        assert torch.equal(merged, exact) and torch.equal(absmax, new) and torch.equal(again, exact), (N, K)
        assert torch.equal(of_cpu[2], torch.tensor([math.fsum(new.tolist()) / len(new)] if nested else []))
        assert len(of_gpu) == 3 * nested and all(map(torch.equal, of_gpu, of_cpu))
        same((exact, _plain(plain, new)), expected(packed, plain, given))
        fast = blocksize == 64 and K % 64 == 0
        assert len(gpu.launches) == 1 + nested and ("any" in gpu.launches[0]) != fast


@plays
@pytest.mark.parametrize("quant_type", [*FORMATS, *SHORT])
@pytest.mark.parametrize("sm", [90, 75])
def test_values_on_the_played_gpu(quant_type, sm):
    """The numbers of the CPU before they are quantized, of some rows; two launches."""
    gpu = machine.Gpu(sm, 2, seed=6)
    for N, K, ranks, dtype, row0, rows in (
        (20, 128, (70, 3), torch.float32, 0, 20),
        (70, 96, (5,), torch.bfloat16, 32, 38),
        (33, 33, (4, 1), torch.float16, 31, 2),
        (8, 4100, (2,), torch.bfloat16, 5, 3),
    ):
        packed, state = short_blocks(N, K, quant_type) if quant_type in SHORT else weight(N, K, 64, quant_type, True)
        of_ranks = torch.tensor([x for r in ranks for x in (*[0.0] * (r - 1), 1.5 / r)])
        given = adapters(N, K, ranks, dtype)
        a, b = torch.cat([A for A, _, _ in given]), torch.cat([B for _, B, _ in given], 1)
        numbers = (state.blocksize, ops.CODES[quant_type], N, K, row0, rows)
        found = gpu.merged_values(packed, state.scales(), a, b, of_ranks, *numbers)
        exact = ops.merged_values(packed, *state.scales(), a, b, of_ranks, *numbers)
        assert torch.equal(found, exact), (N, K)
        assert len(gpu.launches) == 2 and "add_adapters" in gpu.launches[1], gpu.launches


@plays
@pytest.mark.parametrize("quant_type", SHORT)
@pytest.mark.parametrize("sm", [90, 75])
def test_short_blocks_on_the_played_gpu(quant_type, sm):
    """The bytes of the CPU in one launch, of NVFP4 in three; also where the largest value is of the last rows, is not
    finite, or is 0, and for scales beyond the format's ends."""
    gpu = machine.Gpu(sm, 2, seed=7)
    cases = [
        (20, 128, (70, 3), torch.float32, 1.0),
        (70, 576, (5,), torch.bfloat16, 1.0),
        (64, 128, (), torch.float16, 1.0),
    ]
    cases += [
        (7, 64, (33,), torch.float16, 1.0),
        (130, 192, (2, 1), torch.bfloat16, 1e30),
        (66, 64, (1,), torch.float32, 1e-30),
    ]
    cases += [(65, 128, (3,), torch.float32, math.inf), (66, 64, (3,), torch.float32, 0.0)]
    for N, K, ranks, dtype, size in cases:
        packed, state = short_blocks(N, K, quant_type)
        given = adapters(N, K, ranks, dtype)
        if size == 0:
            packed, given = torch.zeros_like(packed), [(A * 0, B, s) for A, B, s in given]
        elif given:
            given[-1][1][-1] *= size
        wanted, new = merge_4bit(packed, state, given)
        scales = torch.tensor([x for _, b, s in given for x in (*[0.0] * (b.shape[1] - 1), s)])
        a = torch.cat([A for A, _, _ in given]) if given else torch.empty(0, K, dtype=dtype)
        b = torch.cat([B for _, B, _ in given], 1) if given else torch.empty(N, 0, dtype=dtype)
        codes = (state.blocksize, ops.CODES[quant_type], N, K)
        found, scales8, second = gpu.merge_e2m1(packed, state.scales(), a, b, scales, *codes)
        assert torch.equal(found, wanted) and torch.equal(scales8, new.absmax), (N, K)
        has_global = state.kind.has_global
        assert not has_global or torch.equal(second.nan_to_num(7), new.state2.absmax.nan_to_num(7)), (N, K)
        assert len(gpu.launches) == (3 if has_global else 1), gpu.launches


def _plain(state, absmax):
    state = state.clone()
    state.absmax = absmax
    return state


def test_on_a_gpu(device):
    """The bytes of the CPU."""
    for N, K, blocksize, nested in [*((*shape, False) for shape in SHAPES), (1000, 576, 64, True)]:
        packed, state = weight(N, K, blocksize, "nf4", nested)
        given = adapters(N, K, (16, 3), torch.bfloat16)
        wanted = merge_4bit(packed, state, given)
        moved = [(A.to(device), B.to(device), s) for A, B, s in given]
        found, new = merge_4bit(packed.to(device), state.to(device), moved)
        same((found.cpu(), new.to("cpu")), wanted)
    for quant_type in SHORT:
        for N, K, ranks in ((64, 128, (16, 3)), (33, 33, (16, 3)), (1300, 4096, (16, 3)), (1300, 4096, (16,))):
            packed, state = short_blocks(N, K, quant_type)
            given = adapters(N, K, ranks, torch.bfloat16)
            wanted = merge_4bit(packed, state, given)
            moved = [(A.to(device), B.to(device), s) for A, B, s in given]
            found, new = merge_4bit(packed.to(device), state.clone().to(device), moved)
            same((found.cpu(), new.to("cpu")), wanted)


def test_a_stack_on_a_gpu(device):
    """Each expert has the CPU's bytes."""
    E, N, K = 3, 70, 192
    w = torch.randn(E, N, K, generator=torch.Generator().manual_seed(1)) * 0.02
    for quant_type in ("nf4", *SHORT):
        kind = kind_of(quant_type)
        settings = {"quant_type": quant_type, "compress_statistics": True} if kind.nests else {}
        packed, state = kind.stack.quantize(w, quant_storage=torch.uint8, blocksize=kind.blocksize, **settings)
        given = [(torch.randn(E, 4, K), torch.randn(E, N, 4) * 0.01, 2.0)]
        wanted = merge_4bit(packed, state, given)
        moved = [(A.to(device), B.to(device), s) for A, B, s in given]
        found, new = merge_4bit(packed.to(device), state.clone().to(device), moved)
        same((found.cpu(), new.to("cpu")), wanted)


W, S = weight(8, 64)
A, B, R, NONE = torch.ones(2, 64), torch.ones(8, 2), torch.ones(2), torch.empty(0)
WRONG = [
    (
        lambda: ops.merge_4bit(W, *S.scales(), A[:, :63], B, R, NONE, 64, 0, 8, 64),
        r"a has 126 elements, expected \[2, 64\]",
    ),
    (lambda: ops.merge_4bit(W, *S.scales(), A, B.t(), R, NONE, 64, 0, 8, 64), r"b has 16 elements, expected \[8, 2\]"),
    (lambda: ops.merge_4bit(W, *S.scales(), A, B.half(), R, NONE, 64, 0, 8, 64), "b has ScalarType 5, expected 6"),
    (lambda: ops.merge_4bit(W, *S.scales(), A, B, R.double(), NONE, 64, 0, 8, 64), "scales has ScalarType 7"),
    (lambda: ops.merge_4bit(W, *S.scales(), A, B, R, NONE, 64, 2, 8, 64), "format 2 is neither"),
    (lambda: ops.merge_4bit(W, *S.scales(), A, B, R, R, 64, 0, 8, 64), "map has 2 elements, expected 256"),
    (lambda: ops.merge_4bit(W[:-1], *S.scales(), A, B, R, NONE, 64, 0, 8, 64), "packed"),
    (lambda: ops.merged_values(W, *S.scales(), A, B, R, 64, 0, 8, 64, 6, 3), "3 rows from row 6 on, the weight has 8"),
    (lambda: ops.merged_values(W, *S.scales(), A, B, R, 64, 0, 8, 64, -1, 3), "3 rows from row -1 on"),
    (lambda: ops.merged_values(W, *S.scales(), A, B, R, 64, 3, 8, 64, 0, 8), "format 3 is none of"),
    (lambda: ops.merge_e2m1(W, *S.scales(), A, B, R, 64, 0, 8, 64), "format 0 in blocks of 64 is neither MXFP4 nor"),
]


@pytest.mark.parametrize("call, words", WRONG)
def test_what_does_not_fit_raises(call, words):
    with pytest.raises(RuntimeError, match=words):
        call()


def test_what_is_refused():
    eight = INT8.state(type(S), torch.ones(8), torch.Size((8, 64)), torch.float32)
    with pytest.raises(ValueError, match="NF4, FP4, MXFP4 and NVFP4 weights, this one is int8"):
        merge_4bit(torch.zeros(512, dtype=torch.uint8), eight, [])
    with pytest.raises(ValueError, match=r"A is \[2, 32\] and B \[8, 2\], the weight is \[8, 64\]"):
        merge_4bit(W, S, [(A[:, :32], B, 1.0)])
    with pytest.raises(TypeError, match="float64"):
        merge_4bit(W, S, [(A.double(), B, 1.0)])
