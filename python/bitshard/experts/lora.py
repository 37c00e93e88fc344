"""y = W_e x + bias + s B_e (A_e x) of rows sorted by expert, with 4-bit W, and its gradients as one autograd function.

As `bitshard.lora.product` for one weight: s is a factor of x A^T and dy B only, and saved for backward are x, A, B and
s x A^T, A and B as the parameters that they are views of. peft keeps B with the experts innermost, [N, r, E]: each
product with it needs one copy, [E, r, N].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, pad

from bitshard.experts.adapted import ALIGNED, Dense, LowRank, Merged
from bitshard.formats.state import QuantState
from bitshard.functions import functional, merge_again
from bitshard.functions.merge import Adapter
from bitshard.products.autograd import grouped_matmul_4bit


def fits(added: LowRank | Dense | Merged, x: Tensor, bias: Tensor | None) -> bool:
    """Whether `product` multiplies with this: rows of x and y are whole 16 bytes, and no bias is trained."""
    if not isinstance(added, LowRank) or (bias is not None and bias.requires_grad):
        return False
    unit = ALIGNED // x.element_size()
    return added.lhs.shape[1] % unit == 0 and added.rhs.shape[2] % unit == 0


def product(
    x: Tensor,
    offs: Tensor,
    packed: Tensor,
    state: QuantState,
    bias: Tensor | None,
    A: Tensor,
    B: Tensor,
    scale: float,
) -> Tensor:
    """[S, N] of the dtype of x.

    Args:
        x, offs, packed, state, bias: as of `functional.grouped_linear_4bit`.
        A: [E, r, K]. B: [E, N, r], both of any floating-point dtype.
        scale: s.
    """
    return GroupedLora4Bit.apply(x, offs, packed, state, bias, A, B, scale)


def _rank_padded(factor: Tensor) -> Tensor:
    """A factor [E, r, .] with zeros behind its rank, up to whole 16 bytes."""
    missing = -factor.shape[1] % (ALIGNED // factor.element_size())
    return pad(factor, (0, 0, 0, missing)) if missing else factor


def _rows(factor: Tensor, dtype: torch.dtype) -> Tensor:
    """A factor [E, r, .] of `dtype` in contiguous rows that begin at whole 16 bytes."""
    factor = _rank_padded(factor.to(dtype, memory_format=torch.contiguous_format)).contiguous()
    return factor if torch.compiler.is_compiling() or factor.data_ptr() % ALIGNED == 0 else factor.clone()


def _scaled(values: Tensor, scale: float) -> Tensor:
    """In place; not a launch where peft's scale is 1, as it is where `lora_alpha` is the rank."""
    return values if scale == 1 else values.mul_(scale)


class GroupedLora4Bit(torch.autograd.Function):
    """`product` with dx = dy W_e + s (dy B_e) A_e, dA_e = s (dy B_e)^T x and dB_e = s dy^T (x A_e^T)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        offs: Tensor,
        packed: Tensor,
        state: QuantState,
        bias: Tensor | None,
        A: Tensor,
        B: Tensor,
        scale: float,
    ) -> Tensor:
        xa = _scaled(grouped_mm(x, _rows(A, x.dtype).transpose(1, 2), offs=offs), scale)
        y = functional.grouped_linear_4bit(x, offs, packed, state, bias)
        y.add_(grouped_mm(xa, _rows(B.transpose(1, 2), x.dtype), offs=offs))
        ctx.rest = (packed, state, bias, scale)
        ctx.save_for_backward(x, offs, A, B, xa)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and dy.requires_grad:
            return _differentiable(ctx, dy)
        x, offs, A, B, xa = ctx.saved_tensors
        packed, state, _, scale = ctx.rest
        needs_x, needs_a, needs_b = (ctx.needs_input_grad[i] for i in (0, 5, 6))
        dx = dA = dB = dxa = None
        dy = dy.contiguous()
        if needs_x or needs_a:
            dxa = _scaled(grouped_mm(dy, _rows(B.transpose(1, 2), dy.dtype).transpose(1, 2), offs=offs), scale)
        if needs_b:
            dB = grouped_mm(dy.t(), xa, offs=offs)[:, :, : B.shape[2]].to(B.dtype)
        if needs_a:
            dA = grouped_mm(dxa.t(), x, offs=offs)[:, : A.shape[1]].to(A.dtype)
        if needs_x:
            dx = functional.grouped_linear_4bit_dgrad(dy, offs, packed, state)
            dx.add_(grouped_mm(dxa, _rows(A, dy.dtype), offs=offs))
        return dx, None, None, None, None, dA, dB, None


def merged_product(
    x: Tensor, offs: Tensor, packed: Tensor, state: QuantState, bias: Tensor | None, adapters: Sequence[Adapter]
) -> Tensor:
    """[S, N] of the dtype of x: the product with the merged bytes of `functions.merge.merge_4bit`.

    Args:
        x, offs, packed, state, bias: as of `functional.grouped_linear_4bit`.
        adapters: A [E, r, K], B [E, N, r] and s of each.
    """
    factors = [factor for A, B, _ in adapters for factor in (A, B)]
    return GroupedMerged4Bit.apply(x, offs, packed, state, bias, tuple(s for _, _, s in adapters), *factors)


class GroupedMerged4Bit(torch.autograd.Function):
    """`merged_product`; gradients of A and B as of W_e + s B_e A_e, of x with the merged codes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        offs: Tensor,
        packed: Tensor,
        state: QuantState,
        bias: Tensor | None,
        scales: tuple[float, ...],
        *factors: Tensor,
    ) -> Tensor:
        ctx.rest = packed, state, scales, None if bias is None else bias.dtype
        ctx.save_for_backward(x, offs, *factors)
        merged = merge_again.for_forward(x, packed, state, _adapters(factors, scales))
        return functional.grouped_linear_4bit(x, offs, *merged, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("a merge-aware stack has no second derivatives (create_graph=True)")
        packed, state, scales, bias_dtype = ctx.rest
        x, offs, *factors = ctx.saved_tensors
        dx = dbias = None
        dy = dy.contiguous()
        if ctx.needs_input_grad[0]:
            codes, new = merge_again.for_gradient(x, packed, state, _adapters(factors, scales))
            dx = functional.grouped_linear_4bit_dgrad(dy, offs, codes, new)
        if ctx.needs_input_grad[4]:
            dbias = state.kind.bias_gradient(dy, state, offs, bias_dtype)
        found: list[Tensor | None] = []
        for A, B, s in _adapters(factors, scales):
            found += _factor_gradients(x, offs, dy, A, B, s) if True in ctx.needs_input_grad[6:] else [None, None]
        return dx, None, None, None, dbias, None, *found


def _adapters(factors: Sequence[Tensor], scales: tuple[float, ...]) -> list[Adapter]:
    return list(zip(factors[::2], factors[1::2], scales, strict=True))


def _factor_gradients(x: Tensor, offs: Tensor, dy: Tensor, A: Tensor, B: Tensor, s: float) -> list[Tensor]:
    """dA and dB of s B_e (A_e x) in the dtypes of A and B."""
    with torch.enable_grad():
        own = [factor.detach().requires_grad_() for factor in (A, B)]
        y = LowRank(own[1], own[0], s).product(x.detach(), offs, transposed=False)
        return list(torch.autograd.grad(y, own, dy.to(y.dtype)))


def _differentiable(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients as functions of dy, x, A and B that can be derived again (create_graph=True)."""
    x, offs, A, B, _ = ctx.saved_tensors
    packed, state, bias, scale = ctx.rest
    y = grouped_matmul_4bit(x, offs, packed, state, bias)
    y = y + LowRank(B, A, scale).product(x, offs, transposed=False)
    places = [place for place in (0, 5, 6) if ctx.needs_input_grad[place]]
    inputs = {0: x, 5: A, 6: B}
    found = torch.autograd.grad(y, [inputs[place] for place in places], dy, create_graph=True)
    out: list[Tensor | None] = [None] * 8
    for place, gradient in zip(places, found, strict=True):
        out[place] = gradient
    return tuple(out)
