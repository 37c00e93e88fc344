"""What a step gives with dense layers in the place of the 4-bit ones."""

import contextlib
from collections.abc import Callable

import bitsandbytes as bnb
import torch


@contextlib.contextmanager
def dense(model: torch.nn.Module):
    """Each `Linear4bit` computes with its weight dequantized to the compute dtype [N, K], by torch alone."""
    layers = [layer for layer in model.modules() if isinstance(layer, bnb.nn.Linear4bit)]
    for layer in layers:
        weight = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).to(layer.compute_dtype)
        layer.forward = lambda x, weight=weight, bias=layer.bias: torch.nn.functional.linear(x, weight, bias)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def gradient_gap(model: torch.nn.Module, step: Callable[[], object]) -> float:
    """How far the gradients that the model holds are from those of the same step with dense layers: the norm of all
    differences over that of all gradients. The model's own are put back. Its dropout must be 0."""
    trained = [one for one in model.parameters() if one.grad is not None]
    own = [one.grad for one in trained]
    for one in trained:
        one.grad = None
    with dense(model):
        step()
    other = [one.grad for one in trained]
    for one, grad in zip(trained, own, strict=True):
        one.grad = grad
    gaps = [(a.double() - b.double()).norm() for a, b in zip(own, other, strict=True)]
    return float(torch.stack(gaps).norm() / torch.stack([b.double().norm() for b in other]).norm())
