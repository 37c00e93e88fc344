"""What `matmul_4bit` adds to the product of test_products.py: forms of the weight, errors; layers under autograd."""

import cases
import pytest
import torch
from bitshard import functional, matmul_4bit
from bitshard.autograd import MatMul4Bit
from bitshard.nn.linear import LinearNF4
from bitshard.tensor import Params4bit
from torch.utils.checkpoint import checkpoint


def weight(N=96, K=130, **settings):
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    return functional.quantize_4bit(w, quant_type="nf4", **settings)


def test_forms_of_the_weight():
    packed, state = weight()
    x = torch.randn(3, 130)
    y = matmul_4bit(x, packed, state)
    for form in (packed.t(), packed.flatten(), Params4bit(packed, quant_state=state, bnb_quantized=True)):
        assert torch.equal(matmul_4bit(x, form, state), y)
    out = torch.empty(3, 96)
    assert torch.equal(matmul_4bit(x, packed, state, out=out), y) and torch.equal(out, y)
    for storage in cases.STORAGES:
        other, other_state = weight(quant_storage=storage)
        assert torch.equal(matmul_4bit(x, other, other_state), y)


def test_old_orientation():
    packed, state = weight(130, 96)
    dense = functional.dequantize_4bit(packed, state)
    x = torch.randn(3, 130, requires_grad=True)
    with pytest.warns(DeprecationWarning, match="Re-quantize from the weight"):
        y = matmul_4bit(x, packed, state)
    assert torch.allclose(y, x @ dense, atol=1e-5)
    y.sum().backward()
    assert torch.allclose(x.grad, dense.sum(1).expand(3, 130), atol=1e-4)


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
