"""4-bit layers whose products are panels of sm_80: W is dequantized whole, and the fastest cuBLASLt product of sm_80
(mma.sync, no wgmma) multiplies it. For qlora_step.py: what a card older than Hopper does, on a Hopper card."""

from __future__ import annotations

from functools import cache

import bitsandbytes as bnb
import torch
from bitshard import functional
from gemm_sm80 import Lt, fastest

lt = cache(Lt)


@cache
def found(M: int, N: int, K: int, gradient: bool) -> tuple:
    """(product, algorithm) for x of M rows; not while a graph is captured, whose sizes have run before."""
    product = lt().product(M, N, K, gradient)
    w = torch.randn(N, K, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(M, N if gradient else K, device="cuda", dtype=torch.bfloat16)
    y = torch.empty(M, K if gradient else N, device="cuda", dtype=torch.bfloat16)
    return product, fastest(lt(), product, w, x, y)[0]


def multiply(x: torch.Tensor, packed: torch.Tensor, state, gradient: bool) -> torch.Tensor:
    """x [..., K] W^T, or with `gradient` x [..., N] W, in bfloat16."""
    N, K = state.shape
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y = rows.new_empty(len(rows), K if gradient else N)
    product, algorithm = found(len(rows), N, K, gradient)
    lt().run(product, algorithm, functional.dequantize_4bit(packed, state), rows, y)
    return y.view(*x.shape[:-1], -1)


class Panels(torch.autograd.Function):
    """A product whose gradient goes the same way."""

    @staticmethod
    def forward(ctx, x, packed, state):
        ctx.save_for_backward(packed)
        ctx.state = state
        return multiply(x, packed, state, False)

    @staticmethod
    def backward(ctx, dy):
        return multiply(dy, *ctx.saved_tensors, ctx.state, True), None, None


def replace(model: torch.nn.Module) -> None:
    """Let all 4-bit layers of a model multiply like this."""
    for layer in model.modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            packed = layer.weight.detach().as_subclass(torch.Tensor)
            layer.forward = lambda x, packed=packed, state=layer.weight.quant_state: Panels.apply(x, packed, state)
