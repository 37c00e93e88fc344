"""LLM.int8 in Python: bitsandbytes' functions, `matmul`, `Int8Params` and `Linear8bitLt`, and who uses them."""

import concurrent.futures
import copy
import gc
import weakref

import bitsandbytes as bnb
import pytest
import reference
import torch
from bitshard.int8_params import Int8Params
from bitshard.matmul_int8 import MatmulLtState
from bitshard.tensor import Params4bit, verify
from helpers.bytes import same_bytes
from helpers.copies import pickled, saved
from torch import nn

F = bnb.functional
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
EPS = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2**-23}
K, N = 40, 24


def inputs(rows=32, dtype=torch.float16, outliers=True, seed=0):
    """x [rows, K], with outliers of 6 and more in columns 3 and 17."""
    torch.manual_seed(seed)
    x = torch.randn(rows, K).clamp(-4, 4)
    if outliers:
        x[0, 3], x[rows - 1, 17] = 9.0, -20.0
    return x.to(dtype)


def layer(threshold=6.0, dtype=torch.float32, bias=True, quantized=True, **options):
    torch.manual_seed(1)
    made = bnb.nn.Linear8bitLt(K, N, bias, has_fp16_weights=False, threshold=threshold, **options).to(dtype)
    return made.to("cpu") if quantized else made


def values(made) -> torch.Tensor:
    """The weight of a quantized layer, float64."""
    return made.weight.CB.double() * made.weight.SCB.double()[:, None] / 127


def close(y, expected, dtype, terms=1.0):
    """Within a few roundings of the dtype, of sums whose absolute terms add up to `terms`."""
    return bool(((y.double() - expected).abs() <= 4 * EPS[dtype] * (expected.abs() + terms)).all())


# ---- functions ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, K), (2, 3, K), (1, K), (0, K)])
def test_vectorwise_quant(dtype, shape):
    x = torch.randn(shape, dtype=dtype)
    codes, scales, none = F.int8_vectorwise_quant(x)
    expected, absmax, _ = reference.quantize_int8(x, 0.0)
    assert none is None and torch.equal(scales, absmax) and codes.shape == x.shape and codes.dtype is torch.int8
    assert int((codes.long() - expected).abs().max()) <= 1 if x.numel() else codes.numel() == 0
    back = F.int8_vectorwise_dequant(codes, scales)
    assert back.dtype is torch.float32
    steps = (scales / 127).view(*shape[:-1], 1).double()
    assert ((back.double() - x.double()).abs() <= 0.51 * steps).all()


def test_vectorwise_quant_finds_outliers():
    x = inputs()
    before = x.clone()
    codes, scales, columns = F.int8_vectorwise_quant(x, threshold=6.0)
    assert columns.tolist() == [3, 17] and columns.dtype is torch.int64 and torch.equal(x, before)
    assert not codes[:, [3, 17]].any() and codes[:, 4].any()
    assert float(scales.max()) <= 4.0
    assert F.int8_vectorwise_quant(x.clamp(-4, 4), threshold=6.0)[2].tolist() == []


def test_double_quant_is_both_ways():
    """Also of fp16 values above 516, whose product with 127 is no fp16 (bitsandbytes computes inf there)."""
    x = inputs() * 60
    rows, columns, row_scales, column_scales, _ = F.int8_double_quant(x)
    assert torch.equal(rows, F.int8_vectorwise_quant(x)[0])
    other = F.int8_vectorwise_quant(x.t().contiguous())
    assert torch.equal(columns.t(), other[0]) and torch.equal(column_scales, other[1])
    assert columns.long().abs().amax(0).tolist() == [127] * K and float(column_scales.max()) > 516
    rows, columns, row_scales, column_scales, found = F.int8_double_quant(inputs(), threshold=6.0)
    assert found.tolist() == [3, 17] and columns[0, 3] == 0 and columns[1, 3] != 0
    assert float(row_scales.max()) <= 4.0 and float(column_scales.max()) <= 4.0
    with pytest.raises(ValueError, match="col_stats"):
        F.int8_double_quant(x, col_stats=column_scales)


def test_products_and_scales():
    torch.manual_seed(0)
    a, b = (torch.randint(-127, 128, (rows, K), dtype=torch.int8) for rows in (6, N))
    sums = F.int8_linear_matmul(a.view(2, 3, K), b)
    assert sums.dtype is torch.int32 and torch.equal(sums.view(6, N).long(), reference.product_int8(a, b))
    out = torch.empty(6, N, dtype=torch.int32)
    assert F.int8_linear_matmul(a, b, out=out) is out and torch.equal(out, sums.view(6, N))
    rows, columns, bias = torch.rand(6), torch.rand(N), torch.randn(N, dtype=torch.float16)
    y = F.int8_mm_dequant(sums, rows, columns, bias=bias)
    assert same_bytes(y.view(6, N), reference.scale_product_int8(out, rows, columns, bias, torch.float16))
    for dtype in DTYPES:
        y = torch.ops.bitsandbytes.int8_scaled_mm(a, b, rows, columns, bias=bias, dtype=dtype)
        assert same_bytes(y, reference.scale_product_int8(out, rows, columns, bias.to(dtype), dtype))


def test_bf16_is_not_rounded_through_fp16():
    """Results above 65,504 stay what they are."""
    sums = torch.full((1, 1), 2**22, dtype=torch.int32)
    scales = torch.full((1,), 200.0)
    y = torch.ops.bitsandbytes.int8_mm_dequant(sums, scales, scales, torch.bfloat16)
    assert y.isfinite() and float(y) > 65504


def test_mixed_product_is_the_layers():
    """In bitsandbytes' three steps, and in one: equal up to the second rounding of the steps."""
    made, x = layer(bias=False), inputs()
    codes, scales, columns = F.int8_vectorwise_quant(x, 6.0)
    weight = made.weight
    y, part = torch.ops.bitsandbytes.int8_mixed_scaled_mm(x, codes, weight.CB, scales, weight.SCB, columns)
    assert torch.equal(part, x[:, [3, 17]])
    assert close(y, made(x).double(), torch.float16, terms=20.0)
    y, part = torch.ops.bitsandbytes.int8_mixed_scaled_mm(x, codes, weight.CB, scales, weight.SCB)
    assert part.numel() == 0 and same_bytes(
        y, torch.ops.bitsandbytes.int8_scaled_mm(codes, weight.CB, scales, weight.SCB)
    )


OP_CALLS = {
    "int8_vectorwise_quant": lambda a, x, s: (x, 6.0),
    "int8_vectorwise_dequant": lambda a, x, s: (a, s),
    "int8_double_quant": lambda a, x, s: (x, 6.0),
    "int8_linear_matmul": lambda a, x, s: (a, a),
    "int8_linear_matmul.out": lambda a, x, s: (a, a, torch.empty(6, 6, dtype=torch.int32)),
    "int8_mm_dequant": lambda a, x, s: (torch.ones(6, 6, dtype=torch.int32), s, s),
    "int8_scaled_mm": lambda a, x, s: (a, a, s, s, None, torch.bfloat16),
    "int8_mixed_scaled_mm": lambda a, x, s: (x, a, a, s, s, torch.tensor([1, 2])),
}


@pytest.mark.parametrize("name", OP_CALLS)
def test_opcheck(name):
    """Schemas and fakes against what the kernels do."""
    arguments = OP_CALLS[name](torch.randint(-9, 9, (6, K), dtype=torch.int8), inputs(6), torch.rand(6))
    packet, _, overload = name.partition(".")
    torch.library.opcheck(getattr(getattr(torch.ops.bitsandbytes, packet), overload or "default"), arguments)


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (ValueError, "threshold is -1", lambda: F.int8_vectorwise_quant(inputs(), -1.0)),
        (ValueError, "threshold is nan", lambda: F.int8_vectorwise_quant(inputs(), float("nan"))),
        (ValueError, "torch.int32", lambda: F.int8_vectorwise_quant(torch.ones(2, 2, dtype=torch.int32))),
        (TypeError, "A is float16", lambda: F.int8_linear_matmul(inputs(), layer().weight.CB)),
        (
            ValueError,
            r"\[2, 3\] and B \[2, 4\]",
            lambda: F.int8_linear_matmul(*(torch.ones(2, k).char() for k in (3, 4))),
        ),
        (ValueError, "3 scales for 2 rows", lambda: F.int8_vectorwise_dequant(torch.ones(2, 4).char(), torch.ones(3))),
        (
            TypeError,
            "stats is float16",
            lambda: F.int8_vectorwise_dequant(torch.ones(2, 4).char(), torch.ones(2).half()),
        ),
        (TypeError, "expected int32", lambda: F.int8_mm_dequant(torch.ones(2, 2), torch.ones(2), torch.ones(2))),
        (ValueError, "threshold is -2", lambda: bnb.nn.Linear8bitLt(4, 4, threshold=-2.0)),
        (ValueError, r"x of shape \[2, 7\]", lambda: layer()(torch.ones(2, 7))),
        (TypeError, "x is int64", lambda: layer()(torch.ones(2, K, dtype=torch.int64))),
        (TypeError, "x is float64", lambda: layer()(torch.ones(2, K, dtype=torch.float64))),
    ],
)
def test_bad_input(error, words, call):
    with pytest.raises(error, match=words):
        call()


def test_igemm():
    """int32 products of old releases: matrices, batches, each transposed or not."""
    torch.manual_seed(0)
    a, b = torch.randint(-9, 9, (2, 3, 8)).char(), torch.randint(-9, 9, (2, 8, 5)).char()
    assert torch.equal(F.igemm(a, b).long(), a.long() @ b.long())
    assert torch.equal(F.batched_igemm(a.mT.contiguous(), b, transposed_A=True).long(), a.long() @ b.long())
    assert torch.equal(F.igemm(a, b[0]).long(), a.long() @ b[0].long())
    assert torch.equal(F.igemm(a[0], b[0].t().contiguous(), transposed_B=True).long(), a[0].long() @ b[0].long())
    with pytest.raises(ValueError, match="cannot be multiplied"):
        F.igemm(a[0], b[0].t())
    with pytest.raises(TypeError, match="expected torch.int8"):
        F.check_matmul(a.int(), b, None, False, False)


# ---- the layer ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threshold", [0.0, 6.0])
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("bias", [True, False])
def test_forward(dtype, threshold, rows, bias):
    """Against float64: few rows multiply x as it is; many have the error of its codes, outlier columns apart."""
    made, x = layer(threshold, bias=bias), inputs(rows, dtype)
    y = made(x)
    exact = reference.linear_4bit(x, values(made), made.bias)
    assert y.dtype is dtype and y.shape == (rows, N)
    if rows < 8:
        assert close(y, exact, dtype, terms=40.0)
    else:
        coded = reference.linear_int8(x, values(made), made.bias, threshold, True)
        assert close(y, coded, dtype, terms=200.0)
        largest = 20.0 if threshold == 0.0 else 4.0
        assert (y.double() - exact).abs().max() < largest / 127 * K**0.5
    assert same_bytes(made(x.view(1, rows, K)).view(rows, N), y)


def test_zero_rows():
    made = layer()
    assert made(torch.ones(0, K)).shape == (0, N) and made(torch.ones(2, 0, K).half()).shape == (2, 0, N)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 40])
def test_gradients(dtype, rows):
    """dx = dy W of the values, one rounding; dbias the sum of dy, in the bias's dtype."""
    made, x = layer(dtype=dtype), inputs(rows, dtype).requires_grad_()
    dy = torch.randn(rows, N).to(dtype)
    made(x).backward(dy)
    assert close(x.grad, dy.double() @ values(made), dtype, terms=20.0)
    assert close(made.bias.grad, dy.double().sum(0), dtype, terms=40.0)
    assert made.weight.grad is None and x.grad.dtype is dtype


@pytest.mark.parametrize("rows", [2, 40])
def test_float_weights_train(rows):
    """has_fp16_weights: quantized anew in each forward, also after a step and in eval; dW is that of a dense layer."""
    torch.manual_seed(1)
    made = bnb.nn.Linear8bitLt(K, N, has_fp16_weights=True, threshold=6.0).to("cpu")
    assert made.weight.dtype is torch.float32 and made.weight.requires_grad
    x, dy = inputs(rows, torch.float32).requires_grad_(), torch.randn(rows, N)
    made(x).backward(dy)
    assert close(made.weight.grad, dy.t().double() @ x.detach().double(), torch.float32, terms=100.0)
    codes, scales, _ = F.int8_vectorwise_quant(made.weight.detach())
    assert torch.equal(made.state.CB, codes) and torch.equal(made.state.SCB, scales)
    assert close(x.grad, dy.double() @ (codes * (scales / 127)[:, None]).double(), torch.float32, terms=40.0)
    for train in (True, False):
        with torch.no_grad():
            made.weight.mul_(2.0)
        made.train(train)(x)
        assert torch.equal(made.state.SCB, made.weight.detach().abs().amax(1)), "stale codes"
    assert set(made.state_dict()) == {"weight", "bias"}


def test_matmul_alone():
    """`matmul` with a float B, with codes in a state, and its older form with dense values."""
    x = inputs(40, torch.float32)
    weight = torch.randn(N, K)
    state = bnb.MatmulLtState()
    y = bnb.matmul(x, weight, state=state, threshold=6.0)
    assert state.threshold == 6.0 and state.CB.dtype is torch.int8 and state.SCB.shape == (N,)
    state.has_fp16_weights = False
    out = torch.empty(40, N)
    assert bnb.matmul(x, weight.zero_(), out=out, state=state) is not None and torch.equal(out, y)
    dense = bnb.autograd._functions.MatMul8bitFp.apply(x, None, None, None, state)
    assert torch.allclose(dense, x @ F.int8_vectorwise_dequant(state.CB, state.SCB).t(), atol=1e-4)
    with pytest.warns(FutureWarning, match="CxB"):
        assert state.CxB is None
    state.reset_grads()
    assert state.CB is None and state.SCB is None


def test_state_shows_the_weight():
    """peft, transformers and accelerate read CB and SCB of `state` or of the weight, before and after a forward."""
    made = layer()
    for _ in range(2):
        assert made.state.SCB is made.weight.SCB and torch.equal(made.state.CB, made.weight.CB)
        assert made.state.CB.data_ptr() == made.weight.data_ptr()
        made(inputs())
    made.state.SCB = None  # accelerate, after a forward with offloading
    made.weight = Int8Params(torch.randn(N, K), requires_grad=False).to("cpu")  # peft, which then resets
    made.state.reset_grads()
    assert made.state.SCB is made.weight.SCB
    exact = reference.linear_4bit(inputs(2), values(made), made.bias)
    assert close(made(inputs(2)), exact, torch.float16, terms=200.0)


def test_as_bitsandbytes_leaves_a_layer():
    """After its first forward bitsandbytes has codes and scales in `state` only."""
    made, x = layer(), inputs()
    y, scales = made(x), made.weight.SCB
    made.weight.SCB = made.weight.CB = None
    made.state.SCB = scales
    assert same_bytes(made(x), y) and "SCB" in made.state_dict()
    assert same_bytes(made.to("cpu").half()(x), y) and made.weight.SCB is scales


def test_int8_weights_without_scales_raise():
    made = layer()
    made.weight.SCB = None
    with pytest.raises(RuntimeError, match="no scales"):
        made(inputs())
    made.weight.SCB = torch.ones(N - 1)
    with pytest.raises(ValueError, match=rf"scales \[{N - 1}\]"):
        made(inputs())


CHANGED = {
    "scales": lambda made: setattr(made.weight, "SCB", made.weight.SCB * 2),
    "scales in place": lambda made: made.weight.SCB.mul_(2),
    "scales of the state": lambda made: (
        setattr(made.state, "SCB", made.weight.SCB * 2),
        vars(made.weight).update(row_state=None),
    ),
    "weight": lambda made: setattr(made, "weight", Int8Params(made.weight.CB, SCB=made.weight.SCB * 2)),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_forward_sees_what_has_changed_since_the_last(name):
    """It asks less of a weight whose scales are those of the last forward; and of a weight without them it raises."""
    made, x = layer(bias=False), inputs()
    y = made(x)
    CHANGED[name](made)
    assert same_bytes(made(x), y * 2) and same_bytes(copy.deepcopy(made)(x), y * 2)
    made.state.SCB = made.weight.SCB = None
    with pytest.raises(RuntimeError, match="has no scales"):
        made(x)


def test_codes_of_another_size_raise():
    made = layer()
    made(inputs())
    made.weight.data = made.weight.CB[:-1].clone()
    with pytest.raises(RuntimeError, match="packed has 920 bytes, a weight .* needs 960"):
        made(inputs())


def test_dtype_moves_and_casts():
    """A module's dtype move leaves codes alone; a cast, float data and a copy of floats would destroy them: error."""
    made, x = layer(bias=False), inputs()
    y, codes = made(x), made.weight.CB.clone()
    assert made.half().float().bfloat16().weight.dtype is torch.int8 and same_bytes(made(x), y)
    for call in (
        lambda: made.weight.to(torch.float16),
        lambda: setattr(made.weight, "data", torch.zeros(N, K)),
        lambda: made.weight.copy_(torch.zeros(N, K)),
        lambda: made.weight.data.copy_(torch.zeros(N, K)),
        lambda: made.weight.data.__setitem__(0, torch.zeros(K)),
        lambda: torch._foreach_copy_([made.weight.data], [torch.zeros(N, K)]),
    ):
        with pytest.raises(TypeError, match="int8 codes|int8 weight"):
            call()
    assert torch.equal(made.weight.CB, codes) and made.weight.to("cpu") is made.weight


def test_moves_keep_everything():
    """A module's move assigns `.data`: scales go along, also to where only the codes were brought."""
    made, x = layer(), inputs()
    y, codes, scales = made(x), made.weight.CB.clone(), made.weight.SCB.clone()
    for _ in range(2):
        away = made.weight.to("meta")
        assert away.is_meta and isinstance(away, Int8Params) and torch.equal(away.SCB, scales)
        made.weight.data = Int8Params(codes.clone(), SCB=scales.clone())
        made.to("cpu")
        assert torch.equal(made.weight.CB, codes) and torch.equal(made.weight.SCB, scales) and same_bytes(made(x), y)


def test_codes_may_be_read_and_copied():
    """What dequantizes by hand, and what writes codes of another weight or into a copy: see test_guards.py, too."""
    made, other = layer(), layer()
    made.weight.data.clone().mul_(2)
    assert same_bytes(nn.Parameter(made.weight.data, requires_grad=False).data, made.weight.CB)
    scales = made.weight.SCB[:, None] / 127
    assert torch.allclose((made.weight.data * scales).double(), values(made))
    assert torch.allclose(torch.zeros(N, K).add_(made.weight.data).mul_(scales).double(), values(made))
    other.weight.data.zero_()[:] = made.weight.data[:]
    assert torch.equal(other.weight.CB, made.weight.CB)
    other.weight.data.zero_()
    assert not other.weight.dequantize().any()


COPIES = {
    "itself": lambda made: made,
    "called": lambda made: made(inputs() if isinstance(made, nn.Linear) else torch.tensor([1])) is None or made,
    "in a module": lambda made: nn.Sequential(made).to(torch.bfloat16)[0],
    "deepcopy": copy.deepcopy,
    "deepcopy of a model": lambda made: copy.deepcopy(nn.Sequential(made))[0],
    "copy": copy.copy,
    "pickle": pickled,
    "state dict": lambda made: made.load_state_dict(made.state_dict()) and made,
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", ["linear", "float linear", "trained linear", "embedding"])
def test_nothing_keeps_itself_alive(kind, how):
    """Memory is free at once when the last reference goes, without the garbage collector."""
    made = {
        "linear": layer,
        "float linear": lambda: layer(quantized=False),
        "trained linear": lambda: bnb.nn.Linear8bitLt(K, N),
        "embedding": lambda: bnb.nn.Embedding8bit(N, K).to("cpu"),
    }[kind]()
    layer()(inputs())  # what the first call in a process keeps
    gc.collect()
    gc.disable()
    try:
        other = COPIES[how](made)
        watched = [weakref.ref(each) for each in (made, other, made.weight, other.weight)]
        del made, other
        assert [ref() is None for ref in watched] == [True] * 4
    finally:
        gc.enable()


def test_what_belongs_to_a_layer_is_copied_with_it_and_alone():
    """A state that is copied or pickled alone keeps the layer that it reads, as its copies have always done."""
    made = layer()
    for twin in (copy.copy(made), copy.deepcopy(made), pickled(made)):
        assert twin.state.owner is twin and twin.packed_weight.owner is twin is not made
    assert made.state.owner is made and made.packed_weight.owner is made
    for alone in (copy.deepcopy(made.state), pickled(made.state)):
        assert torch.equal(alone.CB, made.weight.CB) and torch.equal(alone.SCB, made.weight.SCB)
    alone = copy.deepcopy(made.packed_weight)
    assert torch.equal(alone.weight.CB, made.weight.CB) and alone.owner is not made
    state, alone, codes = made.state, copy.copy(made.state), made.weight.CB
    del made
    assert torch.equal(alone.CB, codes) and state.owner is alone.owner is not None
    del alone
    assert state.owner is None and state.CB is None


def test_scales_follow_codes():
    """What is assigned to `.data` brings its scales, or has those of the weight moved to it."""

    class Away(torch.Tensor):
        """A tensor that says it is on another device."""

        device = property(lambda self: torch.device("cuda"))

        def to(self, device):
            return self.as_subclass(torch.Tensor)

    weight, other = layer().weight, Int8Params(torch.randn(N, K), requires_grad=False).to("cpu")
    weight.data = other
    assert weight.SCB is other.SCB and torch.equal(weight.CB, other.CB)
    weight.SCB = weight.SCB.as_subclass(Away)
    weight.data = weight.CB.clone()
    assert type(weight.SCB) is torch.Tensor and torch.equal(weight.SCB, other.SCB)


def test_device_and_back(device):
    """Two ways to a GPU and back: upstream leaves the scales behind."""
    made, x = layer(dtype=torch.float16), inputs()
    y, weight = made(x), made.weight
    there = made.to(device)(x.to(device)).clone()
    for _ in range(2):
        assert same_bytes(made.to("cpu")(x), y) and made.weight.SCB.device.type == "cpu"
        assert same_bytes(made.to(device)(x.to(device)), there)
    assert made.weight is weight and made.state.CB.device.type == torch.device(device).type


@pytest.mark.parametrize("way", ["deepcopy", "copy", "pickle", "torch.save"])
def test_copies(way):
    made, x = layer(), inputs()
    y = made(x)
    new = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": pickled, "torch.save": saved}[way](made)
    assert same_bytes(new(x), y) and isinstance(new.weight, Int8Params) and new.state is not made.state
    assert (new.weight is made.weight) is (way == "copy")
    assert new.state.CB.data_ptr() == new.weight.data_ptr() and new.state == made.state
    if way != "copy":  # which shares the weight
        new.weight = Int8Params(torch.ones(N, K), requires_grad=False).to("cpu")
        assert new.state != made.state and same_bytes(made(x), y)


def test_the_state_of_a_weight():
    """There from the first quantization on, and the only place of the scales; pickles keep the scales alone."""
    weight = Int8Params(torch.randn(N, K), requires_grad=False)
    assert weight.row_state is None and set(vars(weight)) == {"row_state", "has_fp16_weights"}
    weight.to("cpu")
    state = weight.row_state
    assert set(vars(weight)) == {"row_state", "has_fp16_weights"} and weight.SCB is state.absmax
    assert (state.kind.word, tuple(state.shape), state.dtype) == ("int8", (N, K), torch.float32)
    _, arguments, kept = weight.__reduce_ex__(2)
    assert set(kept) == {"SCB", "has_fp16_weights"} and kept["SCB"] is weight.SCB
    assert Int8Params(weight.data, requires_grad=False, **weight.__dict__).row_state is state
    assert pickled(weight).row_state.shape == state.shape and Int8Params(*arguments).row_state is None
    weight.SCB = weight.SCB * 2
    assert torch.equal(weight.row_state.absmax, state.absmax * 2) and weight.row_state is not state
    column = Int8Params(torch.ones(4, dtype=torch.int8), SCB=torch.ones(4))
    assert torch.equal(column.SCB, torch.ones(4)) and tuple(column.row_state.shape) == (1, 4)


def test_codes_of_another_size_than_their_state():
    """Scales that came before codes of the layer's size: the product takes the size of the codes."""
    made, x = layer(), torch.randn(3, K)
    y, codes, scales = made(x), made.weight.CB.clone(), made.weight.SCB.clone()
    made.weight = Int8Params(torch.zeros(N, 1, dtype=torch.int8), SCB=scales)
    made.weight.data = codes
    assert made.weight.row_state.shape == (N, 1) and same_bytes(made(x), y)


def test_trainable_weights_are_not_quantized():
    with pytest.raises(RuntimeError, match="requires_grad=False"):
        Int8Params(torch.randn(N, K)).to("cpu")


def test_a_float_layer_quantizes_in_its_first_forward():
    made = layer(quantized=False)
    assert made.weight.dtype is torch.float32
    dense = made.weight.detach().clone()
    y = made(inputs())
    assert made.weight.dtype is torch.int8 and torch.equal(made.weight.SCB, dense.abs().amax(1))
    assert same_bytes(layer()(inputs()), y)


def test_a_tied_float_weight_stays_a_float():
    """bitsandbytes puts int8 codes into the storage that the other module uses."""
    made = layer(quantized=False)
    tied = made.weight = nn.Parameter(torch.randn(N, K))
    y = made(inputs(2, torch.float32))
    assert made.weight is tied and tied.dtype is torch.float32 and "SCB" not in made.state_dict()
    assert torch.allclose(y, nn.functional.linear(inputs(2, torch.float32), tied, made.bias), atol=1.5)


# ---- state dicts ----


def test_state_dict_both_ways():
    made, x = layer(), inputs()
    entries = made.state_dict()
    assert {name: value.dtype for name, value in entries.items()} == {
        "weight": torch.int8, "bias": torch.float32, "SCB": torch.float32, "weight_format": torch.uint8,
    }  # fmt: skip
    assert type(entries["weight"].data) is torch.Tensor and int(entries["weight_format"]) == 0
    new = layer(threshold=6.0)
    new.weight = Int8Params(torch.randn(N, K), requires_grad=False).to("cpu")
    assert new.load_state_dict(entries) and same_bytes(new(x), made(x))
    fresh = bnb.nn.Linear8bitLt(K, N, has_fp16_weights=False, threshold=6.0, device="meta")
    fresh.load_state_dict(entries, assign=True)
    assert same_bytes(fresh(x), made(x))
    dense = nn.Linear(K, N)
    floats = layer(quantized=False)
    floats.load_state_dict(dense.state_dict())
    assert torch.equal(floats.to("cpu").weight.SCB, dense.weight.detach().abs().amax(1))


BAD_ENTRIES = {
    "SCB is missing": (lambda e: e.pop("SCB"), "codes without SCB"),
    "codes are missing": (lambda e: e.pop("weight"), "without their codes"),
    "dense weight": (lambda e: (e.pop("SCB"), e.update(weight=torch.zeros(N, K))), "dense weight of float32"),
    "too few scales": (lambda e: e.update(SCB=torch.ones(N - 1)), f"{N - 1} scales for {N} rows"),
    "scales of another dtype": (lambda e: e.update(SCB=torch.ones(N).half()), "SCB is float16"),
    "codes of another shape": (lambda e: e.update(weight=torch.zeros(K, N).char()), rf"codes \[{K}, {N}\]"),
    "codes of another dtype": (lambda e: e.update(weight=torch.zeros(N, K)), "weight is float32"),
    "scales without values": (lambda e: e.update(SCB=e["SCB"].to("meta")), "SCB is on the meta device"),
    "codes without values": (lambda e: e.update(weight=e["weight"].to("meta")), "weight is on the meta device"),
    "no values": (lambda e: e.update({k: e[k].to("meta") for k in ("weight", "SCB")}), "weight is on the meta device"),
}
META = [case for case in BAD_ENTRIES if case.endswith("values")]


@pytest.mark.parametrize("case", BAD_ENTRIES)
def test_bad_state_dicts_change_nothing(case):
    spoil, words = BAD_ENTRIES[case]
    made, other = layer(), layer()
    other.weight = Int8Params(torch.randn(N, K), requires_grad=False).to("cpu")
    entries = other.state_dict()
    spoil(entries)
    before = made(inputs())
    with pytest.raises(RuntimeError, match=words):
        made.load_state_dict(entries)
    assert same_bytes(made(inputs()), before)


@pytest.mark.parametrize("case, assign", [*((case, True) for case in META[:2]), *((case, False) for case in META)])
def test_embeddings_without_values(case, assign):
    """Codes or scales on the meta device into a real embedding, quantized or not yet: nothing changes."""
    spoil, words = BAD_ENTRIES[case]
    for made in (bnb.nn.Embedding8bit(N, K).to("cpu"), bnb.nn.Embedding8bit(N, K)):
        entries = bnb.nn.Embedding8bit(N, K).to("cpu").state_dict()
        spoil(entries)
        before = copy.deepcopy(made.weight)
        with pytest.raises(RuntimeError, match=words):
            made.load_state_dict(entries, assign=assign)
        assert same_bytes(made.weight.detach(), before.detach()) and made.weight.dtype is before.dtype
        assert before.SCB is None or torch.equal(made.weight.SCB, before.SCB)


def test_a_skeleton_is_assigned():
    """Both without values, as a model that is made on the meta device has them."""
    made = layer()
    entries = {name: value.to("meta") for name, value in layer().state_dict().items()}
    with pytest.raises(ValueError, match="weight_format is on the meta device"):
        made.load_state_dict(entries, assign=True)
    del entries["weight_format"]
    made.load_state_dict(entries, assign=True)
    assert made.weight.is_meta and made.weight.SCB.is_meta
    made.load_state_dict(layer().state_dict(), assign=True)
    assert same_bytes(made(inputs()), layer()(inputs()))


def test_foreign_formats_raise():
    entries = layer().state_dict()
    for found, words in ((1, "col32"), (9, "weight_format is 9"), ("col_ampere", "col_ampere")):
        entries["weight_format"] = found
        with pytest.raises(ValueError, match=words):
            layer().load_state_dict(entries)


def test_codes_into_a_float_layer_raise():
    with pytest.raises(RuntimeError, match="Loading a quantized checkpoint into non-quantized Linear8bitLt"):
        layer(quantized=False).load_state_dict(layer().state_dict())
    entries = {name: value for name, value in layer().state_dict().items() if name != "SCB"}
    made = layer(quantized=False)
    with pytest.raises(RuntimeError, match="codes without SCB"):
        made.load_state_dict(entries)
    assert made.weight.dtype is torch.float32


# ---- compiled ----


@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_compiled(threshold):
    """Whole graphs, with outliers and gradients, and no new compilation for the second layer's forward."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(layer(threshold, bias=False), nn.ReLU(), bnb.nn.Linear8bitLt(N, K, has_fp16_weights=False))
    model.to("cpu")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for rows in (2, 40):
        x, x2 = (inputs(rows, torch.float32).requires_grad_() for _ in range(2))
        y, y2 = model(x), compiled(x2)
        y.sum().backward()
        y2.sum().backward()
        assert same_bytes(y, y2) and same_bytes(x.grad, x2.grad)


# ---- sharded ----


def test_sharding_raises():
    """Codes alone would be sharded, without their scales; float weights that are trained are weights like others."""
    made = layer()
    with pytest.raises(ValueError, match="FSDP2: an int8 weight"):
        made.weight.new_zeros(4, K)
    assert made.weight.new_zeros(4, dtype=torch.float32).shape == (4,)
    floats = bnb.nn.Linear8bitLt(K, N).weight
    assert floats.new_zeros(3, K).shape == (3, K) and len(floats.chunk(2)) == 2


def column() -> Params4bit:
    """The weight of a layer as FSDP shards it."""
    return layer(dtype=torch.bfloat16).weight.column(None, torch.bfloat16)


def summed():
    """The state of a column, with the checksum of its bytes."""
    state = column().quant_state
    state.checksum = torch.ops.bitshard.checksum(column().data.clone())
    return state


def reason(call) -> str:
    with pytest.raises((RuntimeError, TypeError, ValueError)) as raised:
        call()
    return str(raised.value)


WORDS = {
    "cast": lambda: column().to(torch.float32),
    "half": lambda: column().half(),
    "copy": lambda: column().copy_(torch.zeros(K * N // 2, 1)),
    "arithmetic": lambda: column() + 1,
    "data": lambda: column().data.mul_(2),
    "gradient": lambda: column().requires_grad_(),
    "other data": lambda: setattr(column(), "data", torch.zeros(3, 3, dtype=torch.bfloat16)),
    "float data": lambda: setattr(column(), "data", torch.zeros(K * N // 2, 1)),
    "checked": lambda: verify(column().detach()[1:], column().quant_state, "here"),
    "other bytes": lambda: verify(torch.ones(K * N // 2, 1).bfloat16(), summed(), "here"),
    "an operator": lambda: torch.ops.aten.add_(layer().weight, 1),
}


@pytest.mark.parametrize("case", WORDS)
def test_errors_name_int8(case):
    """What is said of a 4-bit weight for the same mistake, with the right word and with what int8 weights have."""
    found = reason(WORDS[case])
    assert "int8" in found and "4-bit" not in found.replace("of 4-bit weights", ""), found
    assert "bnb_4bit_quant_storage" not in found.replace("(bnb_4bit_quant_storage of 4-bit weights)", ""), found


def test_torch_s_state_dicts(tmp_path):
    """torch.distributed's functions in one process, which find entries by getattr: of codes and of a column."""
    import torch.distributed.checkpoint as dcp
    from bitshard import fsdp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    def other():
        made = nn.Sequential(layer())
        made[0].weight = Int8Params(torch.randn(N, K), requires_grad=False).to("cpu")
        return made

    model, x = nn.Sequential(layer()), inputs()
    expected = model(x)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    for column in (False, True):
        for each in (model, new := other()):
            if column:
                fsdp.shardable(each)
        entries = get_model_state_dict(model)
        assert {key: tuple(value.shape) for key, value in entries.items()} == {
            "0.weight": (N, K), "0.bias": (N,), "0.SCB": (N,), "0.weight_format": (),
        }  # fmt: skip
        set_model_state_dict(new, entries)
        assert same_bytes(new(x), expected)
        loaded = {"model": (new := other()).state_dict()}
        dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
        new.load_state_dict(loaded["model"])
        assert same_bytes(new(x), expected)


def test_float_weights_in_threads(monkeypatch):
    """has_fp16_weights: a forward multiplies with what it has quantized, whatever other forwards do with the layer."""
    layer = bnb.nn.Linear8bitLt(64, 48, has_fp16_weights=True).to("cpu")
    x, whole = torch.randn(3, 64), MatmulLtState.SCB
    expected = layer(x).detach()

    def interrupted(state, value):
        whole.fset(state, value)
        if value is not None:
            pool.submit(state.reset_grads).result()  # as another forward begins

    monkeypatch.setattr(MatmulLtState, "SCB", property(whole.fget, interrupted))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert same_bytes(layer(x).detach(), expected)
