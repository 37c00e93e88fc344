"""Products of a stack of expert weights: each expert as a weight of its own, byte for byte, whatever the others are."""

import copy

import pytest
import reference
import torch
from bitshard import _C, autograd, functional, kinds, ops
from bitshard.functions import grouped
from bitshard.state import QuantState
from cases import DTYPES, FORMATS, LINEAR_BOUND, ROUNDING
from helpers.bytes import same_bytes
from helpers.copies import pickled

COUNTS = [0, 1, 20, 3, 7, 0, 17, 2]  # rows of each expert: none, few, more than are decoded in registers


def stack(E, N, K, dtype=torch.bfloat16, blocksize=64, nested=False, quant_type="nf4", storage=torch.uint8):
    w = torch.randn(E, N, K, generator=torch.Generator().manual_seed(N)).to(dtype)
    return w, *functional.quantize_experts_4bit(w, blocksize, nested, quant_type, storage)


def rows(E, width, dtype, beyond=3):
    offs = torch.tensor(COUNTS[:E]).cumsum(0).int()
    x = torch.randn(int(offs[-1]) + beyond, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    return x, offs


def each(E, offs):
    return zip(range(E), [0, *offs.tolist()], offs.tolist(), strict=False)


@pytest.mark.parametrize("quant_type", FORMATS)
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize(
    "E, N, K, blocksize", [(3, 48, 64, 32), (5, 96, 192, 64), (8, 160, 128, 128), (2, 64, 1024, 64)]
)
def test_an_expert_is_a_weight_of_its_own(E, N, K, blocksize, nested, quant_type):
    """Bytes, scales and values are those of `quantize_4bit` of each; so are the bits of both products."""
    w, packed, state = stack(E, N, K, blocksize=blocksize, nested=nested, quant_type=quant_type)
    whole = functional.dequantize_4bit(packed, state)
    assert state.kind is kinds.EXPERTS and whole.shape == (E, N, K) and whole.dtype is w.dtype
    for dtype in DTYPES:
        (x, offs), (dy, _) = rows(E, K, dtype), rows(E, N, dtype)
        bias = torch.randn(E, N).to(dtype)
        y, dx = functional.grouped_linear_4bit(x, offs, packed, state, bias), None
        dx = ops.grouped_linear_4bit_dgrad(dy, offs, packed, *state.scales(), blocksize, ops.FORMATS[quant_type], N, K)
        for e, begin, end in each(E, offs):
            own, of = functional.quantize_4bit(w[e], None, None, blocksize, nested, quant_type)
            assert same_bytes(own.view(-1), packed.view(E, -1)[e])
            assert same_bytes(functional.dequantize_4bit(own, of), whole[e])
            assert same_bytes(y[begin:end], functional.linear_4bit(x[begin:end], own, of, bias[e]))
            assert same_bytes(dx[begin:end], functional.linear_4bit_dgrad(dy[begin:end], own, of))
        assert not y[end:].any() and not dx[end:].any()


def declining(panel):
    """What the C core answers on CUDA where its plan has panels of so many experts."""
    return lambda x, *rest: x.new_empty(0, panel, 0)


@pytest.mark.parametrize("nested", [False, True])
def test_panels_of_the_gpu(nested, monkeypatch):
    """What runs on CUDA, here on the CPU: any number of panels, rows of no expert, offs that do not fit."""
    _, packed, state = stack(8, 96, 128, nested=nested, storage=torch.bfloat16)
    (x, offs), (dy, _), bias = rows(8, 128, torch.float32), rows(8, 96, torch.float32), torch.randn(8, 96)
    y = functional.grouped_linear_4bit(x, offs, packed, state, bias)
    dx = functional.grouped_linear_4bit_dgrad(dy, offs, packed, state)
    numbers = (64, 0, 96, 128)
    for experts in (1, 3, 8):
        monkeypatch.setattr(ops, "grouped_linear_4bit_fused", declining(experts))
        monkeypatch.setattr(ops, "grouped_linear_4bit_dgrad_fused", declining(experts))
        found = grouped.grouped_linear_4bit(x, offs, packed, *state.scales(), bias, *numbers)
        torch.testing.assert_close(found, y, rtol=1e-5, atol=1e-5)
        found = grouped.grouped_linear_4bit_dgrad(dy, offs, packed, *state.scales(), *numbers)
        torch.testing.assert_close(found, dx, rtol=1e-5, atol=1e-5)
    wrong = torch.tensor([5, -3, 4000, 7, 2**31 - 1, -(2**31), 0, 1], dtype=torch.int32)
    found = grouped.grouped_linear_4bit(x, wrong, packed, *state.scales(), bias, *numbers)
    expected = functional.grouped_linear_4bit(x, wrong.clamp(0, len(x)).cummax(0).values, packed, state, bias)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("N, K", [(96, 128), (16, 36), (12, 64)])
def test_panels_of_sizes_that_torch_takes(N, K, monkeypatch):
    """`grouped_mm` wants rows that begin at multiples of 16 bytes; other stacks go an expert at a time."""
    called = []

    def grouped_mm(x, weights, offs):
        assert not [size for size in weights.shape[1:] if size % 8]
        called.append(tuple(weights.shape))
        experts = torch.searchsorted(offs, torch.arange(len(x), dtype=offs.dtype), right=True).clamp(max=len(offs) - 1)
        return torch.stack([row @ weights[expert] for row, expert in zip(x, experts, strict=True)])

    _, packed, state = stack(4, N, K, nested=False, storage=torch.bfloat16)
    x, offs = rows(4, K, torch.bfloat16)
    expected = functional.grouped_linear_4bit(x, offs, packed, state)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", grouped_mm, raising=False)
    found = grouped.by_panels(x, offs, packed, state.scales(), (4, 64, 0, N, K), False, 2)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert bool(called) is (N % 8 == 0 and K % 8 == 0)


def test_the_op_is_called_where_somebody_sees_it():
    """On CUDA its kernel is called directly otherwise."""
    from torch._subclasses import FakeTensorMode
    from torch.profiler import profile

    x = torch.ones(2)
    assert grouped.unseen(x) and not grouped.unseen(torch.nn.Parameter(x))
    with FakeTensorMode():
        assert not grouped.unseen(x)
    with profile():
        assert not grouped.unseen(x)
    seen = []
    torch.func.vmap(lambda one: seen.append(grouped.unseen(x)) or one)(x)
    assert seen == [False]
    assert {op.name().split("::")[1]: kernel.__name__ for op, kernel in grouped.KERNELS.items()} == {
        name: name for name in ("grouped_linear_4bit", "grouped_linear_4bit_dgrad")
    }


# tokens, experts of each, experts: none; fewer pairs than lanes; many experts; more pairs than a warp's stretch
PAIRS = [(0, 4, 8), (1, 8, 128), (7, 3, 5), (64, 8, 256), (40, 1, 2000), (3000, 6, 64), (5, 2, 1)]


def pairs(tokens, k, E):
    """Numbers of experts, and some that are none's."""
    chosen = torch.randint(-3, E + 3, (tokens, k), generator=torch.Generator().manual_seed(E))
    return torch.where(chosen == -2, 2**40, torch.where(chosen == -3, -(2**40), chosen))


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("tokens, k, E", PAIRS)
def test_sort_by_expert(tokens, k, E, elsewhere, device):
    chosen = pairs(tokens, k, E)
    found = ops.sort_by_expert(chosen.to(device), E, elsewhere)
    assert [t.dtype for t in found] == [torch.int64] * 3 + [torch.int32]
    expected = reference.sort_by_expert(chosen, E, elsewhere)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))


def test_wrong_numbers_mark_their_places():
    """Below 0, and from E on where no expert is elsewhere: among the nearest expert's pairs, minus S."""
    chosen = torch.tensor([[2, -1], [3, 0], [-7, 1]])
    order, back, rows, offs = ops.sort_by_expert(chosen, 3, False)
    assert order.tolist() == [1, 3, 4, 5, 0, 2] and rows.tolist() == [0, 1, 2, 2, 0, 1] and offs.tolist() == [3, 4, 6]
    assert back.tolist() == [4, 0 - 6, 5 - 6, 1, 2 - 6, 3]
    assert torch.equal(order[back], torch.arange(6))
    order, back, _, offs = ops.sort_by_expert(chosen, 3, True)
    assert order.tolist() == [1, 3, 4, 5, 0, 2] and offs.tolist() == [3, 4, 5]
    assert back.tolist() == [4, 0 - 6, 5, 1, 2 - 6, 3]


def test_what_sort_by_expert_refuses():
    chosen = torch.zeros(4, 2, dtype=torch.int64)
    for given, E, message in (
        (chosen.int(), 3, "chosen has ScalarType"),
        (chosen, 0, "0 experts"),
        (chosen, 2**31, "2147483648 experts"),
        (chosen[0, 0], 3, "chosen has 0 dimensions"),
    ):
        with pytest.raises(RuntimeError, match=f"sort_by_expert: {message}"):
            ops.sort_by_expert(given, E, False)


SUMS = [(5, 8, 96), (1, 1, 8), (3, 11, 1), (70, 4, 2880), (2, 9, 1001), (0, 2, 64), (4, 0, 64), (4, 2, 0)]


def summands(tokens, k, H, dtype, counts_dtype):
    generator = torch.Generator().manual_seed(H)
    y, counts = torch.randn(tokens * k, H, generator=generator), torch.rand(tokens, k, generator=generator)
    return y.to(dtype), torch.randperm(tokens * k, generator=generator), counts.to(counts_dtype)


@pytest.mark.parametrize("tokens, k, H", SUMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_by_token(tokens, k, H, dtype, device):
    """The same bits everywhere, whatever lies where."""
    for counts_dtype in {dtype, torch.float32}:
        given = summands(tokens, k, H, dtype, counts_dtype)
        expected = reference.sum_by_token(*given)
        assert same_bytes(ops.sum_by_token(*(t.to(device) for t in given)).cpu(), expected)
        y = torch.cat([given[0].new_zeros(1), given[0].flatten()])[1:].view(given[0].shape)  # not at 16 bytes
        assert same_bytes(ops.sum_by_token(*(t.to(device) for t in (y, *given[1:]))).cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_with_a_marked_place_is_nan(dtype, device):
    """Whatever it counts, and no other token: the places of wrong numbers, which `sort_by_expert` has marked."""
    for k, H in ((3, 96), (11, 1001)):
        y, back, counts = summands(6, k, H, dtype, dtype)
        expected = reference.sum_by_token(y, back, counts)
        for pair in (1, 2 * k, 4 * k - 1):
            back[pair] -= len(back)
            counts.view(-1)[pair] = 0
        found = ops.sum_by_token(*(t.to(device) for t in (y, back, counts))).cpu()
        assert found[[0, 2, 3]].isnan().all() and same_bytes(found[[1, 4, 5]], expected[[1, 4, 5]])
        torch.testing.assert_close(found, reference.sum_by_token(y, back, counts), rtol=0, atol=0, equal_nan=True)


def test_what_sum_by_token_refuses():
    y, back, counts = summands(3, 2, 8, torch.float32, torch.float32)
    for given, message in (
        ((y[:5], back, counts), "y has 2 dimensions and 5 rows, counts 2 dimensions and 6 elements"),
        ((y[0], back, counts), "y has 1 dimensions"),
        ((y, back, counts.view(-1)), "y has 2 dimensions and 6 rows, counts 1 dimensions"),
        ((y, back.int(), counts), "back has ScalarType"),
        ((y, back[:5], counts), "back has 5 elements, expected 6"),
        ((y.double(), back, counts), "y"),
        ((y, back, counts.double()), "counts"),
        ((y, back - 7, counts), r"back\[\d\] is -7 of 6 rows"),
        ((y, back + 1, counts), r"back\[\d\] is 6 of 6 rows"),
    ):
        with pytest.raises(RuntimeError, match=f"sum_by_token: {message}"):
            ops.sum_by_token(*given)


MISTAKES = [
    ({"x": torch.zeros(4, 65)}, ValueError, r"\[4, 65\], a stack of \[3, 32, 64\] needs \[S, 64\]"),
    ({"x": torch.zeros(4, 1, 64)}, ValueError, r"\[4, 1, 64\]"),
    ({"x": torch.zeros(4, 64, dtype=torch.float64)}, TypeError, "float64"),
    ({"x": torch.zeros(4, 64, device="meta")}, ValueError, "x is on meta, offs on cpu"),
    ({"offs": torch.tensor([1, 2])}, ValueError, r"int64 \[2\], expected int32 \[3\]"),
    ({"offs": torch.tensor([1, 2, 3])}, ValueError, "int64"),
    ({"offs": torch.tensor([1, 2, 5], dtype=torch.int32)}, RuntimeError, r"offs\[2\] is 5 after 2.*the 4 rows"),
    ({"offs": torch.tensor([2, 1, 3], dtype=torch.int32)}, RuntimeError, r"offs\[1\] is 1 after 2"),
    ({"offs": torch.tensor([-1, 1, 3], dtype=torch.int32)}, RuntimeError, r"offs\[0\] is -1 after 0"),
    ({"bias": torch.zeros(3, 33)}, ValueError, r"\[3, 33\]: expected \[3, 32\]"),
    ({"bias": torch.zeros(3, 32).half()}, ValueError, "float16"),
    ({"packed": torch.zeros(100, 1, dtype=torch.uint8)}, ValueError, "100 elements"),
]


@pytest.mark.parametrize("change, error, words", MISTAKES)
def test_mistakes(change, error, words):
    _, packed, state = stack(3, 32, 64, torch.float32)
    given = {
        "x": torch.zeros(4, 64),
        "offs": torch.tensor([1, 2, 4], dtype=torch.int32),
        "packed": packed,
        "bias": None,
    }
    given |= change
    with pytest.raises(error, match=words):
        functional.grouped_linear_4bit(given["x"], given["offs"], given["packed"], state, given["bias"])


def test_the_op_reads_nothing_out_of_bounds():
    """Called by itself it refuses scales and weights of other sizes."""
    _, packed, state = stack(3, 32, 64, torch.float32, nested=True)
    x, offs, none = torch.zeros(4, 64), torch.tensor([1, 2, 4], dtype=torch.int32), ops.empty(torch.device("cpu"))
    absmax, map, absmax2, offset = state.scales()
    good = [x, offs, packed, absmax, map, absmax2, offset, none, 64, 0, 32, 64]
    ops.grouped_linear_4bit(*good)
    for place, value in (
        *((1, offs[:2]), (1, offs.long()), (1, offs[:0]), (2, packed[1:]), (3, absmax[1:]), (5, absmax2[1:])),
        *((6, offset[:1]), (7, torch.zeros(3, 31)), (8, 96), (8, 4096), (9, 3), (10, 33), (11, 63), (10, 2**40)),
    ):
        with pytest.raises(RuntimeError, match="grouped_linear_4bit: "):
            ops.grouped_linear_4bit(*good[:place], value, *good[place + 1 :])


@pytest.mark.parametrize("shape", [(3, 5, 7), (0, 32, 64), (4, 64), (2, 3, 64, 64)])
def test_shapes_that_are_no_stack(shape):
    with pytest.raises(ValueError, match=r"N K a multiple of the blocksize 64, got"):
        functional.quantize_experts_4bit(torch.zeros(shape))


@pytest.mark.parametrize("nested", [False, True])
def test_states_go_through_files_copies_and_pickles(nested):
    _, packed, state = stack(3, 48, 64, nested=nested, blocksize=32, quant_type="fp4")
    entries = state.as_dict(packed=True)
    for again in (QuantState.from_dict(entries, "cpu"), copy.deepcopy(state), pickled(state)):
        assert again == state and again.kind is kinds.EXPERTS
        assert same_bytes(functional.dequantize_4bit(packed, again), functional.dequantize_4bit(packed, state))


def changed(**values):
    _, _, state = stack(3, 48, 64, nested=True)
    return {**state.as_dict(), "layout": "experts"} | values


@pytest.mark.parametrize(
    "values, words",
    [
        ({"layout": "stack"}, "layout is str 'stack', known are"),
        ({"layout": 3}, "layout is int 3"),
        ({"shape": (144, 64)}, r"needs a shape \[E, N, K\]"),
        ({"shape": (3, 48, 65)}, r"got \[3, 48, 65\]"),
        ({"nested_offset": 0.5}, "float 0.5, expected a list of one for 3"),
        ({"nested_offset": [0.5, 0.5]}, "2 numbers, expected a list of one for 3"),
        ({"nested_offset": [0.5, 0.5, float("nan")]}, "expected a finite"),
        ({"nested_offset": [0.5, 0.5, "x"]}, "must be a number"),
        ({"nested_absmax": torch.zeros(2)}, "2 entries, expected 3"),
        ({"absmax": torch.zeros(5, dtype=torch.uint8)}, "5 entries, expected 144"),
    ],
)
def test_hostile_states(values, words):
    with pytest.raises((TypeError, ValueError), match=words):
        QuantState.from_dict(changed(**values), "cpu")
    assert QuantState.from_dict(changed(), "cpu").kind is kinds.EXPERTS


# ---- on a GPU ----

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_gpu(*tensors):
    return [t.cuda() if isinstance(t, torch.Tensor) else t for t in tensors]


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_on_a_gpu(dtype, nested, monkeypatch):
    """The error rule of the products, in one panel and in several; a bias; rows of no expert; gradients."""
    _, packed, state = stack(8, 96, 128, nested=nested, storage=torch.bfloat16)
    (x, offs), (dy, _), bias = rows(8, 128, dtype), rows(8, 96, dtype), torch.randn(8, 96).to(dtype)
    of_dtype = copy.copy(state)
    of_dtype.dtype = dtype
    weights = functional.dequantize_4bit(packed, of_dtype)
    scale = reference.grouped_linear_4bit(x.double().square(), offs, weights.double().square(), bias.double().square())
    expected = reference.grouped_linear_4bit(x, offs, weights, bias)
    back = reference.grouped_linear_4bit_dgrad(dy, offs, weights)
    back_scale = reference.grouped_linear_4bit_dgrad(dy.double().square(), offs, weights.double().square())
    there = copy.deepcopy(state).to("cuda")
    x, offs, dy, bias, packed = on_gpu(x, offs, dy, bias, packed)
    if dtype is torch.float32:  # which no kernel takes: the core says how many experts fit
        none, numbers = ops.empty(x.device), (64, ops.FORMATS["nf4"], 96, 128)
        answer = ops.grouped_linear_4bit_fused(x, offs, packed, *there.scales(), none, *numbers)
        assert answer.shape == (0, 8, 0)
    for experts in (None, 1, 3, 8):  # as the plan says, then panels
        if experts:
            monkeypatch.setattr(ops, "grouped_linear_4bit_fused", declining(experts))
            monkeypatch.setattr(ops, "grouped_linear_4bit_dgrad_fused", declining(experts))
        x.requires_grad_()
        y = autograd.grouped_matmul_4bit(x, offs, packed, there, bias)
        (dx,) = torch.autograd.grad(y, x, dy)
        bound = 2 * LINEAR_BOUND[dtype]  # the bias is added to a rounded product
        assert ((y.detach().cpu().double() - expected).abs() <= bound * scale.sqrt()).all()
        assert ((dx.cpu().double() - back).abs() <= bound * back_scale.sqrt()).all()
        assert not y[offs[-1] :].any() and not dx[offs[-1] :].any()


WITH_GRADIENT = ("gemm_4bit_sm90_wide_grouped", "gemm_4bit_sm80_grouped")


@pytest.fixture
def forced():
    """Makes products of stacks take a kernel, and their gradients where it has them."""

    def force(kernel):
        _C.force_kernel("grouped_linear_4bit", kernel)
        _C.force_kernel("grouped_linear_4bit_dgrad", kernel if kernel in WITH_GRADIENT else WITH_GRADIENT[0])

    yield force
    for op in ("grouped_linear_4bit", "grouped_linear_4bit_dgrad"):
        _C.force_kernel(op, None)


# Rows of an expert with which gemm_4bit_sm90_wide_grouped makes other tiles of what is left of them.
ENDS = (1, 128, 129, 192, 193, 256, 257, 320, 321, 384, 385, 448, 449, 512, 513, 1000)


@needs_gpu
@pytest.mark.parametrize("kernel", WITH_GRADIENT)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("N, K", [(264, 320), (512, 128), (64, 2880)])
def test_every_width_of_a_tile_on_a_gpu(N, K, dtype, kernel, forced):
    """The error rule in every row, and the bits of an expert's rows whatever others there are."""
    E = len(ENDS) + 2
    _, packed, state = stack(E, N, K, nested=True)
    counts = torch.tensor([0, *ENDS, 0])
    offs = counts.cumsum(0).int()
    generator = torch.Generator().manual_seed(K)
    x, dy = (torch.randn(int(offs[-1]) + 5, width, generator=generator).to(dtype) for width in (K, N))
    of_dtype = copy.copy(state)
    of_dtype.dtype = torch.float32
    weights, there = functional.dequantize_4bit(packed, of_dtype), copy.deepcopy(state).to("cuda")
    settings = (64, ops.FORMATS["nf4"], N, K)
    forced(kernel)
    for given, op, of in (
        (x, ops.grouped_linear_4bit_fused, weights),
        (dy, ops.grouped_linear_4bit_dgrad_fused, weights.transpose(1, 2)),
    ):
        none = [ops.empty(torch.device("cuda"))] if of is weights else []
        arguments = on_gpu(given, offs, packed)
        y = op(*arguments, *there.scales(), *none, *settings)
        expected = reference.grouped_linear_4bit(given, offs, of, None)
        norms = reference.grouped_linear_4bit(given.double().square(), offs, of.double().square(), None)
        allowed = LINEAR_BOUND[dtype] * norms.sqrt() + ROUNDING[dtype] * expected.abs()
        assert ((y.cpu().double() - expected).abs() <= allowed).all() and not y[offs[-1] :].any()
        assert same_bytes(y, op(*arguments, *there.scales(), *none, *settings))
        for e in (5, E - 2):  # alone, all other rows being of no expert
            begin, end = int(offs[e - 1]), int(offs[e])
            alone = torch.zeros_like(offs)
            alone[e:] = end - begin
            rows_of = torch.cat([given[begin:end], torch.zeros(3000, given.shape[1], dtype=dtype)])
            own = op(*on_gpu(rows_of, alone, packed), *there.scales(), *none, *settings)
            assert same_bytes(own[: end - begin], y[begin:end])


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["nested", "plain", "blocks of 128", "blocks of 32"])
@pytest.mark.parametrize("kernel", ["gemv_4bit_grouped", *WITH_GRADIENT])
@pytest.mark.parametrize(
    "E, N, K", [(8, 96, 128), (8, 384, 192), (5, 2880, 320), (33, 128, 2880), (40, 16, 4160), (4, 64, 9216)]
)
def test_kernels_on_a_gpu(E, N, K, kernel, kind, dtype, forced):
    """The error rule, with offs that leave experts without rows, some with many, and rows of no expert; twice equal."""
    blocksize = int(kind.split()[-1]) if "of" in kind else 64
    if blocksize == 32 and kernel != "gemm_4bit_sm80_grouped":
        pytest.skip("takes larger blocks")
    forced(kernel)
    _, packed, state = stack(E, N, K, blocksize=blocksize, nested=kind != "plain")
    counts = torch.randint(0, 20, (E,), generator=torch.Generator().manual_seed(N))
    counts[::3], counts[1] = 0, 300
    offs = counts.cumsum(0).int()
    generator = torch.Generator().manual_seed(K)
    x, dy = (torch.randn(int(offs[-1]) + 5, width, generator=generator).to(dtype) for width in (K, N))
    bias, of_dtype = torch.randn(E, N, generator=generator).to(dtype), copy.copy(state)
    of_dtype.dtype = torch.float32
    weights = functional.dequantize_4bit(packed, of_dtype)
    there = copy.deepcopy(state).to("cuda")
    settings = (state.blocksize, ops.FORMATS["nf4"], N, K)
    arguments = on_gpu(x, offs, packed)
    y, again = (ops.grouped_linear_4bit_fused(*arguments, *there.scales(), bias.cuda(), *settings) for _ in range(2))
    expected = reference.grouped_linear_4bit(x, offs, weights, bias)
    norms = reference.grouped_linear_4bit(x.double().square(), offs, weights.double().square(), bias.double().square())

    def right(found, expected, norms):
        allowed = LINEAR_BOUND[dtype] * norms.sqrt() + ROUNDING[dtype] * expected.abs()
        return ((found.cpu().double() - expected).abs() <= allowed).all()

    assert right(y, expected, norms)
    assert same_bytes(y, again) and not y[offs[-1] :].any()
    if kernel in WITH_GRADIENT:
        dx = ops.grouped_linear_4bit_dgrad_fused(*on_gpu(dy, offs, packed), *there.scales(), *settings)
        norms = reference.grouped_linear_4bit_dgrad(dy.double().square(), offs, weights.double().square())
        assert right(dx, reference.grouped_linear_4bit_dgrad(dy, offs, weights), norms)
        assert not dx[offs[-1] :].any()


@needs_gpu
def test_on_a_gpu_as_a_graph():
    """Nothing waits for the host; other offs than those of the capture give other rows their experts."""
    _, packed, state = stack(8, 96, 128, nested=True, storage=torch.bfloat16)
    state, packed = state.to("cuda"), packed.cuda()
    x, offs = on_gpu(*rows(8, 128, torch.bfloat16))
    other = torch.tensor([9, 9, 9, 20, 31, 31, 40, 45], dtype=torch.int32, device="cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        functional.grouped_linear_4bit(x, offs, packed, state)
    torch.cuda.current_stream().wait_stream(stream)
    given = offs.clone()
    with torch.cuda.graph(graph):
        y = functional.grouped_linear_4bit(x, given, packed, state)
    for now in (offs, other):
        given.copy_(now)
        graph.replay()
        torch.testing.assert_close(y, functional.grouped_linear_4bit(x, now, packed, state), rtol=0, atol=0)


@needs_gpu
def test_on_a_gpu_wrong_offs_read_nothing_beyond():
    """They are clamped there: the host does not know them."""
    _, packed, state = stack(8, 96, 128, storage=torch.bfloat16)
    x, _ = rows(8, 128, torch.bfloat16)
    wrong = torch.tensor([5, -3, 4000, 7, 2**31 - 1, -(2**31), 0, 1], dtype=torch.int32)
    there = copy.deepcopy(state).to("cuda")
    found = functional.grouped_linear_4bit(*on_gpu(x, wrong, packed), there)
    expected = functional.grouped_linear_4bit(x, wrong.clamp(0, len(x)).cummax(0).values, packed, state)
    torch.testing.assert_close(found.cpu(), expected, rtol=2e-2, atol=0.15)  # W is rounded to bf16 here or there


@needs_gpu
def test_a_model_on_a_gpu():
    """Forward, and a training step with peft's adapters on stacks: as with the decoded experts."""
    from bitshard import experts
    from helpers import moe
    from peft import LoraConfig, get_peft_model

    for family in ("qwen3_moe", "gpt_oss", "nemotron_h"):
        model = moe.model(family, dtype=torch.bfloat16).cuda()
        dense = copy.deepcopy(model)
        experts.quantize(model)
        dense = moe.decoded(dense, model)
        tokens = moe.TOKENS.cuda()
        with torch.no_grad():
            y, expected = model(input_ids=tokens).logits.float(), dense(input_ids=tokens).logits.float()
        assert ((y - expected).norm() / expected.norm()) < 3e-2, family
        if family == "nemotron_h":
            continue
        lora = {
            "r": 4,
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "init_lora_weights": False,
        }
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(**lora))
        torch.manual_seed(1)
        dense = get_peft_model(dense, LoraConfig(**lora))
        losses = [each(input_ids=tokens, labels=tokens).loss for each in (model, dense)]
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=2e-2)
        losses[0].backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
