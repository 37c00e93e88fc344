"""bitshard.products.matmul of every kind of packed weight against the dense product, and its derivatives of any order.

Weights are what their bytes decode to, in float64 here; x in float32. On a CPU, and on a GPU where one is.
"""

import pytest
import torch
from bitshard import functional, int8
from bitshard.kinds import INT8
from bitshard.matmul_int8 import RowScales
from bitshard.products import matmul
from torch.autograd import forward_ad

N, K, E, ROWS = 96, 128, 3, 7
OFFS = torch.tensor([2, 2, 6], dtype=torch.int32)  # an expert without rows, and a row of no expert


class Weight:
    """A packed weight, what a product takes of it, and what it decodes to."""

    def __init__(self, kind: str, device: str = "cpu"):
        generator = torch.Generator().manual_seed(5)
        values = torch.randn(*((E, N, K) if kind == "stack" else (N, K)), generator=generator).to(device)
        self.rest = {}
        if kind == "stack":
            self.packed, self.state = functional.quantize_experts_4bit(values, compress_statistics=True)
            self.rest["offs"] = OFFS.to(device)
        elif kind == "int8":
            self.packed, scales, _ = int8.quantize(values)
            self.state = RowScales(scales, values.shape, INT8)
        else:
            self.packed, self.state = functional.quantize_4bit(values, compress_statistics=True, quant_type=kind)
        dense = int8.dequantize(self.packed, scales, N, K, torch.float32) if kind == "int8" else None
        self.values = (functional.dequantize_4bit(self.packed, self.state) if dense is None else dense).double()
        self.x = torch.randn(ROWS, K, generator=generator).to(device)
        self.bias = torch.randn(*((E, N) if kind == "stack" else (N,)), generator=generator).to(device)
        self.dy = torch.randn(ROWS, N, generator=generator).to(device)

    def product(self, x, bias=None, out=None):
        return matmul(x, self.packed, self.state, bias, out, **self.rest)

    def exact(self, x, bias=None):
        """The same in float64, by the dense weight."""
        x, bias = x.double(), None if bias is None else bias.double()
        if not self.rest:
            return torch.nn.functional.linear(x, self.values, bias)
        begin, parts = 0, []
        for e, end in enumerate(OFFS.tolist()):
            parts.append(torch.nn.functional.linear(x[begin:end], self.values[e], None if bias is None else bias[e]))
            begin = end
        return torch.cat([*parts, x.new_zeros(ROWS - begin, N)])


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request):
    return request.param


@pytest.fixture(params=["nf4", "fp4", "stack", "int8"])
def weight(request, device):
    return Weight(request.param, device)


def close(found, expected, rel=2e-2):
    """int8 codes seven rows of x; 4-bit products are exact to float32."""
    return (found.double() - expected).norm() <= rel * expected.norm()


def test_forward(weight):
    for bias in (None, weight.bias):
        y = weight.product(weight.x, bias)
        assert y.dtype is torch.float32 and close(y, weight.exact(weight.x, bias))
        out = torch.empty_like(y)
        assert weight.product(weight.x, bias, out) is out and torch.equal(out, y)


def test_gradients(weight):
    x, bias = weight.x.clone().requires_grad_(), weight.bias.clone().requires_grad_()
    found = torch.autograd.grad(weight.product(x, bias), (x, bias), weight.dy)
    given = [tensor.detach().double().requires_grad_() for tensor in (x, bias)]
    expected = torch.autograd.grad(weight.exact(*given), given, weight.dy.double())
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype is torch.float32 and close(ours, theirs, 1e-5)


def test_second_derivatives(weight):
    """dx is linear in dy: its derivative is the product itself."""
    dy = weight.dy.clone().requires_grad_()
    x = weight.x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(weight.product(x), x, dy, create_graph=True)
    v = torch.randn(ROWS, K, generator=torch.Generator().manual_seed(6)).to(weight.x.device)
    (ddy,) = torch.autograd.grad(dx, dy, v)
    assert close(ddy, weight.exact(v))


@pytest.mark.parametrize("parts", ["x", "bias", "both"])
def test_forward_mode(weight, parts):
    draw = torch.Generator().manual_seed(7)
    dx = torch.randn(ROWS, K, generator=draw).to(weight.x.device) if parts != "bias" else None
    db = torch.randn(weight.bias.shape, generator=draw).to(weight.x.device) if parts != "x" else None
    with forward_ad.dual_level():
        x = weight.x if dx is None else forward_ad.make_dual(weight.x, dx)
        bias = weight.bias if db is None else forward_ad.make_dual(weight.bias, db)
        found = forward_ad.unpack_dual(weight.product(x, bias)).tangent
    expected = weight.exact(weight.x * 0 if dx is None else dx, db)
    assert close(found, expected)


def test_torch_func(weight):
    found = torch.func.grad(lambda x: (weight.product(x) * weight.dy).sum())(weight.x)
    x = weight.x.double().requires_grad_()
    (expected,) = torch.autograd.grad(weight.exact(x), x, weight.dy.double())
    assert close(found, expected, 1e-5)


def test_kinds_say_what_multiplies(weight, monkeypatch):
    """The autograd function knows none of them: another kind's product is called in its place."""
    called = []
    kind = weight.state.kind
    monkeypatch.setattr(kind, "product", lambda x, *rest: called.append(len(rest)) or x.new_zeros(ROWS, N))
    monkeypatch.setattr(kind, "gradient", lambda dy, *rest: called.append(len(rest)) or dy.new_zeros(ROWS, K))
    x = weight.x.clone().requires_grad_()
    weight.product(x).sum().backward()
    assert called == [5, 3] and not x.grad.any()


def test_a_threshold_is_of_int8_alone(device):
    weight = Weight("int8", device)
    x = weight.x.repeat(6, 1)  # more than those that are multiplied as they are
    x[:, 5] = 50.0
    found = matmul(x, weight.packed, weight.state, threshold=6.0)
    without = matmul(x, weight.packed, weight.state)
    exact = weight.exact(x)
    assert weight.state.kind is INT8
    assert (found.double() - exact).norm() < 0.5 * (without.double() - exact).norm()
