"""bitshard.products.matmul of every kind of packed weight against the dense product, and its derivatives of any order.

Weights are what their bytes decode to. On a CPU, and on a GPU where one is.
"""

import gc
import weakref

import pytest
import torch
from bitshard import autograd, matmul_4bit
from bitshard.kinds import INT8
from bitshard.products import matmul
from cases import DTYPES, LINEAR, LINEAR_BOUND
from helpers.drawn import KINDS, Weight
from torch.autograd import forward_ad

N, K = 96, 130
FEW, MANY = 3, 20  # rows that a CPU multiplies with int8 weights as they are, and rows that it codes
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # beside the largest value
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def place(request):
    return request.param


@pytest.fixture(params=KINDS)
def weight(request, place):
    return Weight(request.param, N, K, place)


def close(found, expected, weight, rows, dtype=torch.float32):
    """Rows that are coded for int8 weights are so far off; what follows from others is exact to the dtype."""
    if found is None or expected is None:
        return found is expected
    coded = weight.kind == "int8" and (rows > FEW or found.is_cuda)
    largest = float(expected.detach().abs().max())
    error = (found.detach().double() - expected.detach().double()).abs().max()
    return error <= max(TOLERANCE[dtype], 3e-2 if coded else 0.0) * largest


def twins(*tensors):
    """Leaves of the same values, once as they are and once in float64."""
    return [
        [None if t is None else t.detach().to(dtype or t.dtype).requires_grad_(t.requires_grad) for t in tensors]
        for dtype in (None, torch.float64)
    ]


# A stack has whole blocks in each expert; rows that int8 codes have test_int8_ops.py.
BOUNDED = [(k, d, s) for k in KINDS for d in ("forward", "gradient") for s in (*LINEAR, (260, 65, 130))]
BOUNDED = [(k, d, s) for k, d, s in BOUNDED if not k.endswith("stack") or s[1] * s[2] % 64 == 0]
BOUNDED = [(k, d, s) for k, d, s in BOUNDED if (k, d) != ("int8", "forward") or s[0] <= FEW]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind, direction, shape", BOUNDED)
def test_within_the_bound_of_fp64(device, kind, direction, shape, dtype):
    """|y - exact| <= bound * sqrt(sum of squared products) + one rounding of y; strided, expanded x, and a bias."""
    if (kind, direction, device.type) == ("int8", "forward", "cuda"):
        pytest.skip("which rows are coded differs there: tests/gpu/test_cuda_int8.py")
    rows, n, k = shape
    weight, forward = Weight(kind, n, k, device), direction == "forward"
    w = weight.decoded(dtype).double()
    x, w = weight.drawn(rows, k if forward else n, dtype=dtype), w if forward else w.transpose(-1, -2)
    limits, offs = torch.finfo(dtype), weight.offs(rows)
    cases = [(x, None), (torch.stack([x, x], -1)[..., 0], None), (x[:1].expand(rows, -1), None)]
    for given, bias in [*cases, (x, weight.bias(dtype))] if forward else cases:
        arguments = (given, weight.packed, weight.state)
        y = weight.state.kind.product(*arguments, bias, offs, 0.0) if forward else None
        y = weight.state.kind.gradient(*arguments, offs) if y is None else y
        b = None if bias is None else bias.double()
        exact = weight.exact(given.double(), b, w)
        size = weight.exact(given.double().square(), None if b is None else b.square(), w.square()).sqrt()
        wrong = (y.double() - exact).abs() > LINEAR_BOUND[dtype] * size + limits.eps * exact.abs() + limits.tiny
        assert y.dtype is dtype and y.shape == exact.shape and not wrong.any(), (int(wrong.sum()), bias is not None)


@pytest.mark.parametrize("rows", [1, FEW, MANY])
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_and_gradients(weight, dtype, rows):
    """Of x and bias, of either, and without a bias; each has its dtype, and the forward writes where it is told to."""
    grad = weight.drawn(rows, N, seed=2, dtype=dtype)
    for needs_x, needs_bias in ((True, True), (True, False), (False, True), (True, None)):
        x = weight.drawn(rows, K, dtype=dtype).requires_grad_(needs_x)
        bias = None if needs_bias is None else weight.bias(dtype).requires_grad_(needs_bias)
        ours, theirs = twins(x, bias)
        y, expected = weight.product(*ours), weight.exact(*theirs)
        out = torch.empty_like(y)
        with torch.set_grad_enabled(bool(needs_bias)):
            written = weight.product(*ours, out=out)
        assert written.data_ptr() == out.data_ptr() and torch.equal(out, y) and y.dtype is dtype
        y.backward(grad)
        expected.backward(grad.double())
        assert close(y, expected, weight, rows, dtype)
        for a, b in zip(ours, theirs, strict=True):
            assert a is None or a.grad is None or a.grad.dtype is dtype
            assert a is None or close(a.grad, b.grad, weight, 1, dtype)


@pytest.mark.parametrize("shape", [(K,), (2, FEW, K), (2, MANY, K)])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_leading_dimensions(kind, shape, place):
    weight = Weight(kind, N, K, place)
    x, bias = weight.drawn(*shape).requires_grad_(), weight.bias().requires_grad_()
    grad = weight.drawn(*shape[:-1], N)
    ours, flat = twins(x, bias)[0], twins(x.reshape(-1, K), bias)[0]
    weight.product(*ours).backward(grad)
    weight.product(*flat).backward(grad.view(-1, N))
    assert weight.product(*ours).shape == grad.shape and torch.equal(ours[0].grad.view(-1, K), flat[0].grad)
    assert torch.equal(ours[1].grad, flat[1].grad)
    assert torch.equal(weight.product(*ours).view(-1, N), weight.product(*flat))


def test_no_rows(weight):
    x, bias = weight.drawn(0, K).requires_grad_(), weight.bias().requires_grad_()
    y = weight.product(x, bias)
    assert y.shape == (0, N)
    y.sum().backward()
    assert x.grad.shape == (0, K) and bias.grad.shape == bias.shape and not bias.grad.any()


def test_a_gradient_that_is_one_number(weight):
    """Expanded, without memory of its own."""
    (x,), (other,) = twins(weight.drawn(FEW, K).requires_grad_())
    weight.product(x).sum().backward()
    weight.exact(other).sum().backward()
    assert close(x.grad, other.grad, weight, 1)


@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_forward_mode(weight, rows, requires_grad):
    """Tangents of x and bias pass through as they do through the dense product; none is dropped."""
    x, dx = (weight.drawn(rows, K, seed=seed) for seed in (0, 1))
    bias, dbias = weight.bias().requires_grad_(requires_grad), weight.bias() * 2
    for moves in ((True, True), (True, False), (False, True)):
        with forward_ad.dual_level():
            given = [
                forward_ad.make_dual(t, dt) if moved else t
                for t, dt, moved in zip((x.requires_grad_(requires_grad), bias), (dx, dbias), moves, strict=True)
            ]
            found, expected = map(forward_ad.unpack_dual, (weight.product(*given), weight.exact(*given)))
            assert close(found.primal, expected.primal, weight, rows)
            assert close(found.tangent, expected.tangent, weight, rows)


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_torch_func(weight, rows):
    """jvp, vjp, grad, and each of another, of x and of the bias: those of the dense product."""
    x, dx = (weight.drawn(rows, K, seed=seed) for seed in (0, 1))
    bias, dbias = weight.bias(), weight.bias() * 2
    func, both = torch.func, (weight.product, weight.exact)
    loss = [lambda x, bias, product=product: product(x, bias).square().mean() for product in both]
    for found, wanted in (
        [func.jvp(product, (x, bias), (dx, dbias)) for product in both],
        [func.jvp(lambda x, p=product: p(x, bias), (x,), (dx,)) for product in both],
        [func.jvp(lambda b, p=product: p(x, b), (bias,), (dbias,)) for product in both],
        [func.vjp(product, x, bias)[1](torch.ones(rows, N, device=x.device)) for product in both],
        [func.grad(one, argnums=(0, 1))(x, bias) for one in loss],
        [func.jvp(func.grad(one, argnums=(0, 1)), (x, bias), (dx, dbias))[1] for one in loss],
    ):
        for actual, expected in zip(found, wanted, strict=True):
            assert close(actual, expected, weight, rows)


@pytest.mark.filterwarnings("ignore:Input #")
@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    """The product is linear in x and bias, so that one finite difference of any length is the derivative."""
    weight = Weight(kind, 8, 64)
    x, bias = weight.drawn(FEW, 64).requires_grad_(), weight.bias().requires_grad_()
    exact = kind != "int8"  # few rows of x lose bits where a difference is as long as they are
    torch.autograd.gradcheck(weight.product, (x, bias), eps=1.0, atol=1e-3 if exact else 1e-2, rtol=1e-3)


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_higher_derivatives(weight, rows):
    """Gradient penalties, Hessians: those of the dense product, to the third derivative."""

    def derivatives(product, at, b):
        first = torch.autograd.grad(product(at, b).pow(4).mean(), (at, b), create_graph=True)
        second = torch.autograd.grad(sum(g.square().mean() for g in first), (at, b), create_graph=True)
        return [*first, *second, *torch.autograd.grad(sum(g.square().mean() for g in second), (at, b))]

    ours, theirs = twins(weight.drawn(rows, K).requires_grad_(), weight.bias().requires_grad_())
    rel = 0.3 if weight.kind == "int8" and (rows > FEW or weight.packed.is_cuda) else 1e-3  # of y to the ninth power
    for found, expected in zip(derivatives(weight.product, *ours), derivatives(weight.exact, *theirs), strict=True):
        largest = float(expected.detach().abs().max())
        assert largest > 0 and (found.detach().double() - expected.detach()).abs().max() <= rel * largest


def test_what_needs_no_gradient_builds_no_graph(weight):
    x = weight.drawn(FEW, K).requires_grad_()
    with torch.no_grad():
        assert weight.product(x).grad_fn is None
    assert weight.product(x.detach()).grad_fn is None and "MatMul" in weight.product(x).grad_fn.name()


def test_saved_tensor_hooks_do_not_see_the_weight(weight):
    """Activation offloading copies what is saved; the packed weight is not among it, nor anything of its size."""
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        weight.product(weight.drawn(FEW, K).requires_grad_()).sum().backward()
    assert weight.packed.numel() not in sizes


def test_backward_reads_the_weight_as_it_is_then(weight):
    """FSDP2 frees the storage of the gathered weight after forward and fills it again before backward, or does not."""
    (x,), (other,) = twins(weight.drawn(FEW, K).requires_grad_())
    y, packed = weight.product(x), weight.packed
    freed = weight.product(x)
    bytes_, size = packed.clone(), packed.untyped_storage().nbytes()
    packed.untyped_storage().resize_(0)
    with pytest.raises((RuntimeError, ValueError), match="freed"):
        freed.sum().backward()
    packed.untyped_storage().resize_(size)
    with torch.no_grad():
        packed.copy_(bytes_)
    y.sum().backward()
    weight.exact(other).sum().backward()
    assert close(x.grad, other.grad, weight, 1)


def test_graph_is_freed(weight):
    y = weight.product(weight.drawn(FEW, K).requires_grad_())
    watched = weakref.ref(weight.packed)
    y.sum().backward()
    del weight.packed, y
    gc.collect()
    assert watched() is None


def test_kinds_say_what_multiplies(weight, monkeypatch):
    """The autograd function knows none of them: another kind's product is called in its place."""
    called = []
    kind = weight.state.kind
    monkeypatch.setattr(kind, "product", lambda x, *rest: called.append(len(rest)) or x.new_zeros(len(x), N))
    monkeypatch.setattr(kind, "gradient", lambda dy, *rest: called.append(len(rest)) or dy.new_zeros(len(dy), K))
    x = weight.drawn(FEW, K).requires_grad_()
    weight.product(x).sum().backward()
    assert called == [5, 3] and not x.grad.any()


def test_the_functions_of_4bit_weights_are_this_one(place):
    """`matmul_4bit` and `grouped_matmul_4bit`: the same bits, forward and backward. On a GPU torch adds up an expert's
    rows of the bias's gradient in any order."""
    for kind in ("nf4", "stack"):
        weight = Weight(kind, N, K, place)
        ours, theirs = (twins(weight.drawn(MANY, K).requires_grad_(), weight.bias().requires_grad_())[0] for _ in "12")
        named = (
            matmul_4bit(theirs[0], weight.packed, weight.state, bias=theirs[1])
            if kind == "nf4"
            else autograd.grouped_matmul_4bit(theirs[0], weight.offs(MANY), weight.packed, weight.state, theirs[1])
        )
        y = weight.product(*ours)
        y.square().sum().backward(), named.square().sum().backward()
        assert torch.equal(y, named)
        assert torch.equal(ours[0].grad, theirs[0].grad)
        apart = (ours[1].grad - theirs[1].grad).abs().max()
        assert apart <= (0 if kind == "nf4" or place == "cpu" else 1e-5) * theirs[1].grad.abs().max()


def test_a_threshold_is_of_int8_alone(place):
    weight = Weight("int8", N, K, place)
    x = weight.drawn(42, K)
    x[:, 5] = 50.0
    found = matmul(x, weight.packed, weight.state, threshold=6.0)
    without, exact = matmul(x, weight.packed, weight.state), weight.exact(x.double())
    assert weight.state.kind is INT8
    assert (found.double() - exact).norm() < 0.5 * (without.double() - exact).norm()
