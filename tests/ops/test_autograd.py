"""Gradients of matmul_4bit and Linear4bit against the dense product, and what autograd keeps alive."""

import gc
import weakref

import cases
import pytest
import torch
from bitshard import functional, matmul_4bit
from bitshard.autograd import MatMul4Bit
from bitshard.nn.linear import LinearNF4
from bitshard.tensor import Params4bit
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def weight(N=96, K=130, **settings):
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    return functional.quantize_4bit(w, quant_type="nf4", **settings)


def run(product, x, bias, grad):
    """(y, dx, dbias) of product(x, bias) under a given output gradient."""
    x = x.detach().clone().requires_grad_(x.requires_grad)
    bias = None if bias is None else bias.detach().clone().requires_grad_(bias.requires_grad)
    y = product(x, bias)
    y.backward(grad)
    return y.detach(), x.grad, None if bias is None else bias.grad


def close(actual, expected, dtype):
    if actual is None or expected is None:
        return actual is expected
    scale = expected.float().abs().max()
    return (
        actual.dtype is expected.dtype and (actual.float() - expected.float()).abs().max() <= TOLERANCE[dtype] * scale
    )


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True), (True, None)])
@pytest.mark.parametrize("shape", [(130,), (1, 130), (5, 130), (2, 3, 130), (2, 20, 130)])
def test_gradients(dtype, nested, needs, shape):
    packed, state = weight(compress_statistics=nested)
    dense = functional.dequantize_4bit(packed, state).to(dtype)
    x = torch.randn(shape).to(dtype).requires_grad_(needs[0])
    bias = None if needs[1] is None else torch.randn(96).to(dtype).requires_grad_(needs[1])
    grad = torch.randn(*shape[:-1], 96).to(dtype)
    ours = run(lambda x, b: matmul_4bit(x, packed, state, bias=b), x, bias, grad)
    expected = run(lambda x, b: torch.nn.functional.linear(x, dense, b), x, bias, grad)
    for actual, wanted in zip(ours, expected, strict=True):
        assert close(actual, wanted, dtype)


@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_forward_mode(rows, requires_grad):
    """Tangents of x and bias pass through as they do through the dense product, or raise; none is dropped."""
    packed, state = weight()
    dense = functional.dequantize_4bit(packed, state)
    x, dx = (torch.randn(rows, 130) for _ in range(2))
    bias, dbias = (torch.randn(96) for _ in range(2))
    x.requires_grad_(requires_grad)
    for moves_x, moves_bias in ((True, True), (True, False), (False, True)):
        with forward_ad.dual_level():
            dual_x = forward_ad.make_dual(x, dx) if moves_x else x
            dual_bias = forward_ad.make_dual(bias, dbias) if moves_bias else bias
            y = forward_ad.unpack_dual(matmul_4bit(dual_x, packed, state, bias=dual_bias))
            wanted = forward_ad.unpack_dual(torch.nn.functional.linear(dual_x, dense, dual_bias))
            assert close(y.primal, wanted.primal, torch.float32) and close(y.tangent, wanted.tangent, torch.float32)


@pytest.mark.parametrize("rows", [3, 20])
def test_torch_func(rows):
    """jvp, vjp, grad, and each of another, of x and of the bias: those of the dense product."""
    packed, state = weight()
    dense = functional.dequantize_4bit(packed, state)
    x, dx = (torch.randn(rows, 130) for _ in range(2))
    bias, dbias = (torch.randn(96) for _ in range(2))

    def ours(x, bias):
        return matmul_4bit(x, packed, state, bias=bias)

    def theirs(x, bias):
        return torch.nn.functional.linear(x, dense, bias)

    func = torch.func
    loss = [lambda x, bias, product=product: product(x, bias).square().mean() for product in (ours, theirs)]
    for found, wanted in (
        [func.jvp(product, (x, bias), (dx, dbias)) for product in (ours, theirs)],
        [func.jvp(lambda x, p=product: p(x, bias), (x,), (dx,)) for product in (ours, theirs)],
        [func.jvp(lambda b, p=product: p(x, b), (bias,), (dbias,)) for product in (ours, theirs)],
        [func.vjp(product, x, bias)[1](torch.ones(rows, 96)) for product in (ours, theirs)],
        [func.grad(one, argnums=(0, 1))(x, bias) for one in loss],
        [func.jvp(func.grad(one, argnums=(0, 1)), (x, bias), (dx, dbias))[1] for one in loss],
    ):
        for actual, expected in zip(found, wanted, strict=True):
            assert close(actual, expected, torch.float32)


@pytest.mark.filterwarnings("ignore:Input #")
def test_gradcheck():
    """The product is linear in x and bias, so that one finite difference of any length is the derivative."""
    packed, state = weight(8, 64)
    x, bias = torch.randn(3, 64, requires_grad=True), torch.randn(8, requires_grad=True)
    torch.autograd.gradcheck(
        lambda x, b: matmul_4bit(x, packed, state, bias=b), (x, bias), eps=1.0, atol=1e-3, rtol=1e-3, nondet_tol=0.0
    )


@pytest.mark.filterwarnings("ignore:Input #")
def test_higher_derivatives():
    """Gradient penalties, Hessians: those of the dense product, to the third derivative."""
    packed, state = weight()
    dense = functional.dequantize_4bit(packed, state)
    x, bias = torch.randn(3, 130), torch.randn(96)

    def derivatives(product):
        at, b = x.clone().requires_grad_(), bias.clone().requires_grad_()
        first = torch.autograd.grad(product(at, b).pow(4).mean(), (at, b), create_graph=True)
        second = torch.autograd.grad(sum(g.square().mean() for g in first), (at, b), create_graph=True)
        third = torch.autograd.grad(sum(g.square().mean() for g in second), (at, b))
        return [*first, *second, *third]

    ours = derivatives(lambda x, b: matmul_4bit(x, packed, state, bias=b))
    expected = derivatives(lambda x, b: torch.nn.functional.linear(x, dense, b))
    for actual, wanted in zip(ours, expected, strict=True):
        largest = float(wanted.detach().abs().max())
        assert largest > 0 and torch.allclose(actual, wanted, rtol=1e-3, atol=1e-4 * largest)


def test_expanded_gradient():
    packed, state = weight()
    x = torch.randn(4, 130, requires_grad=True)
    matmul_4bit(x, packed, state).sum().backward()
    assert torch.allclose(x.grad, functional.dequantize_4bit(packed, state).sum(0).expand(4, 130), atol=1e-4)


def test_forms_of_the_weight():
    packed, state = weight()
    x = torch.randn(3, 130)
    y = matmul_4bit(x, packed, state)
    for form in (packed.t(), packed.flatten(), Params4bit(packed, quant_state=state, bnb_quantized=True)):
        assert torch.equal(matmul_4bit(x, form, state), y)
    for storage in cases.STORAGES:
        other, other_state = weight(quant_storage=storage)
        assert torch.equal(matmul_4bit(x, other, other_state), y)


@pytest.mark.parametrize("grad", [False, True])
def test_out(grad):
    packed, state = weight()
    x = torch.randn(3, 130, requires_grad=grad)
    out = torch.empty(3, 96)
    with torch.no_grad() if not grad else torch.enable_grad():
        assert torch.equal(matmul_4bit(x, packed, state, out=out), out)
    assert torch.equal(out, matmul_4bit(x, packed, state))


def test_no_rows():
    packed, state = weight()
    x = torch.empty(0, 130, requires_grad=True)
    bias = torch.zeros(96, requires_grad=True)
    y = matmul_4bit(x, packed, state, bias=bias)
    assert y.shape == (0, 96)
    y.sum().backward()
    assert x.grad.shape == (0, 130) and torch.equal(bias.grad, torch.zeros(96))


def test_old_orientation():
    packed, state = weight(130, 96)
    dense = functional.dequantize_4bit(packed, state)
    x = torch.randn(3, 130, requires_grad=True)
    with pytest.warns(DeprecationWarning, match="Re-quantize from the weight"):
        y = matmul_4bit(x, packed, state)
    assert torch.allclose(y, x @ dense, atol=1e-5)
    y.sum().backward()
    assert torch.allclose(x.grad, dense.sum(1).expand(3, 130), atol=1e-4)


def test_no_grad_builds_no_graph():
    packed, state = weight()
    x = torch.randn(3, 130, requires_grad=True)
    with torch.no_grad():
        assert matmul_4bit(x, packed, state).grad_fn is None
    assert matmul_4bit(x.detach(), packed, state).grad_fn is None
    assert "MatMul" in matmul_4bit(x, packed, state).grad_fn.name()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant):
    layer = LinearNF4(130, 130, compute_dtype=torch.float32).to("cpu")
    x = torch.randn(3, 130, requires_grad=True)
    layer(layer(x)).square().sum().backward()
    expected = x.grad.clone(), layer.bias.grad.clone()
    x.grad = layer.bias.grad = None
    checkpoint(lambda x: layer(layer(x)), x, use_reentrant=use_reentrant).square().sum().backward()
    assert torch.equal(x.grad, expected[0]) and torch.equal(layer.bias.grad, expected[1])


def test_autocast():
    layer = LinearNF4(130, 96, compute_dtype=torch.bfloat16).to("cpu")
    x = torch.randn(3, 130, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    y.float().sum().backward()
    assert x.grad.dtype is torch.float32


def test_saved_tensor_hooks_do_not_see_the_weight():
    """Activation offloading copies what is saved; the packed weight is not among it, nor anything of its size."""
    packed, state = weight()
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        matmul_4bit(torch.randn(3, 130, requires_grad=True), packed, state).sum().backward()
    assert packed.numel() not in sizes


def test_backward_reads_the_weight_as_it_is_then():
    """FSDP2 frees the storage of the gathered weight after forward and fills it again before backward."""
    packed, state = weight()
    x = torch.randn(3, 130, requires_grad=True)
    y = matmul_4bit(x, packed, state)
    bytes_, size = packed.clone(), packed.untyped_storage().nbytes()
    packed.untyped_storage().resize_(0)
    packed.untyped_storage().resize_(size)
    with torch.no_grad():
        packed.copy_(bytes_)
    y.sum().backward()
    assert torch.allclose(x.grad[0], functional.dequantize_4bit(packed, state).sum(0), atol=1e-4)


def test_freed_weight_raises():
    packed, state = weight()
    y = matmul_4bit(torch.randn(3, 130, requires_grad=True), packed, state)
    packed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="freed"):
        y.sum().backward()


def test_graph_is_freed():
    packed, state = weight()
    x = torch.randn(3, 130, requires_grad=True)
    y = matmul_4bit(x, packed, state)
    watched = weakref.ref(packed)
    y.sum().backward()
    del packed, y
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a.update(quant_state=None), "quant_state is required"),
        (lambda a: a.update(A=torch.randn(3, 131)), r"\[3, 131\].*\[96, 130\]"),
        (lambda a: a.update(A=torch.tensor(1.0)), r"\[\].*\[96, 130\]"),
        (lambda a: a.update(A=torch.randn(3, 130).double()), "float64"),
        (lambda a: a.update(B=a["B"][:-1]), "6239"),
        (lambda a: a.update(bias=torch.zeros(95)), "95"),
        (lambda a: setattr(a["quant_state"], "shape", torch.Size([96 * 130])), r"\[N, K\]"),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_bad_arguments(change, words, grad):
    packed, state = weight()
    arguments = {"A": torch.randn(3, 130), "B": packed, "quant_state": state}
    change(arguments)
    arguments["A"].requires_grad_(grad)
    with pytest.raises((TypeError, ValueError), match=words):
        matmul_4bit(**arguments)


def test_function_is_named_as_upstreams():
    assert MatMul4Bit.__name__ == "MatMul4Bit" and issubclass(MatMul4Bit, torch.autograd.Function)
