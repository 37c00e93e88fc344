"""matmul: y = x W^T + bias with a packed W of any kind, and its gradients with respect to x and bias. W is frozen.

What multiplies is the kind's (`bitshard.kinds`): 4-bit weights, stacks of them and int8 weights have their derivatives
here. The packed weight is a plain attribute of the autograd context, not a saved tensor: hooks on saved tensors
(activation offloading) would copy it, and FSDP2 frees and refills its storage between forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from bitshard.formats.checks import into


class MatMul(torch.autograd.Function):
    """y = x W^T + bias; dx = dy W, dbias = the sum of dy over its rows, of a stack over those of each expert.

    `state` is a `QuantState`, or what else has the attributes that its kind's product asks for. offs: of a stack.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        packed: Tensor,
        out: Tensor | None,
        bias: Tensor | None,
        state: Any,
        offs: Tensor | None = None,
        threshold: float = 0.0,
    ) -> Tensor:
        _keep(ctx, packed, bias, state, offs)
        y = state.kind.product(x, packed, state, bias, offs, threshold)
        return y if out is None else into(out, y, "out")

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs, state, offs = ctx.needs_input_grad, ctx.state, _offs(ctx)
        dx = dbias = None
        if needs[0]:
            dx = input_gradient(dy, ctx.packed, state, offs)
        if needs[3]:
            dbias = state.kind.bias_gradient(dy, state, offs, ctx.bias_dtype)
        return (dx, None, None, dbias, None, None, None)[: len(needs)]


class InputGradient(torch.autograd.Function):
    """dx = dy W, differentiable in dy: second and higher derivatives of `matmul`."""

    @staticmethod
    def forward(ctx: Any, dy: Tensor, packed: Tensor, state: Any, offs: Tensor | None = None) -> Tensor:
        _keep(ctx, packed, None, state, offs)
        return state.kind.gradient(dy, packed, state, offs)

    @staticmethod
    def backward(ctx: Any, ddx: Tensor) -> tuple[Tensor | None, ...]:
        # without a threshold: of int8 weights in ddx's own numbers for few rows only, as exact as the forward
        ddy = matmul(ddx, ctx.packed, ctx.state, offs=_offs(ctx))
        return (ddy, None, None, None)[: len(ctx.needs_input_grad)]


def _keep(ctx: Any, packed: Tensor, bias: Tensor | None, state: Any, offs: Tensor | None) -> None:
    ctx.packed, ctx.state, ctx.of_stack = packed, state, offs is not None
    ctx.bias_dtype = None if bias is None else bias.dtype
    if offs is not None:
        ctx.save_for_backward(offs)


def _offs(ctx: Any) -> Tensor | None:
    return ctx.saved_tensors[0] if ctx.of_stack else None


class MatMulForwardMode(MatMul):
    """The same with forward-mode derivatives, and in the form that torch.func asks for (`grad`, `vjp`, `jvp`).

    A class of its own, because Dynamo traces no Function that has a `jvp`.
    """

    @staticmethod
    def forward(
        x: Tensor,
        packed: Tensor,
        out: Tensor | None,
        bias: Tensor | None,
        state: Any,
        offs: Tensor | None,
        threshold: float,
    ) -> Tensor:
        y = state.kind.product(x, packed, state, bias, offs, threshold)
        return y if out is None else into(out, y, "out")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, packed, _, bias, state, offs, ctx.threshold = inputs
        _keep(ctx, packed, bias, state, offs)
        ctx.offs, ctx.y_shape = offs, output.shape

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dpacked: None, dout: None, dbias: Tensor | None, *rest: None) -> Tensor:
        """dy = dx W^T + dbias: the product is linear in both."""
        if dx is not None or ctx.of_stack:
            dx = dbias.new_zeros(*ctx.y_shape[:-1], ctx.state.shape[-1]) if dx is None else dx
            return ctx.state.kind.product(dx, ctx.packed, ctx.state, dbias, ctx.offs, ctx.threshold)
        return dbias.expand(ctx.y_shape).contiguous()


class InputGradientForwardMode(InputGradient):
    """As `MatMulForwardMode`."""

    @staticmethod
    def forward(dy: Tensor, packed: Tensor, state: Any, offs: Tensor | None) -> Tensor:
        return state.kind.gradient(dy, packed, state, offs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, packed, state, ctx.offs = inputs
        _keep(ctx, packed, None, state, ctx.offs)

    @staticmethod
    def jvp(ctx: Any, ddy: Tensor, *rest: None) -> Tensor:
        """The product is linear in dy."""
        return ctx.state.kind.gradient(ddy, ctx.packed, ctx.state, ctx.offs)


def _transforms() -> bool:
    """Whether forward-mode derivatives or a transform of torch.func are active, and Dynamo is not tracing."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


# What `MatMul.apply` calls in the end; its wrapper in Python, which costs more than the rest of the bookkeeping, serves
# functorch and Dynamo (tested for below) and removes wrappers that functorch left behind (`_unwrap` does).
_apply = super(torch.autograd.Function, MatMul).apply
_unwrap = torch._C._functorch.unwrap_if_dead


def matmul(
    x: Tensor,
    packed: Tensor,
    state: Any,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    offs: Tensor | None = None,
    threshold: float = 0.0,
) -> Tensor:
    """x W^T + bias, differentiable in x and bias.

    Args:
        x: float32, float16 or bfloat16 [..., K]; of a stack [S, K], sorted by expert.
        packed, state: of W [N, K], or of a stack [E, N, K].
        bias: [N], of a stack [E, N]; of the dtype of x, of an int8 weight of any, in which its gradient is.
        out: tensor that receives the result, optional.
        offs: int32 [E], where the rows of each expert of a stack end.
        threshold: of outlier columns of x, for an int8 weight; 0 for none.

    Returns:
        [..., N] of the dtype of x.

    TypeError or ValueError if shapes, dtypes, devices or sizes do not fit.
    """
    if _transforms():  # tangents need no requires_grad
        return MatMulForwardMode.apply(x, packed, out, bias, state, offs, threshold)
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        if torch.compiler.is_dynamo_compiling():
            return MatMul.apply(x, packed, out, bias, state, offs, threshold)
        if bias is not None:
            bias = _unwrap(bias)
        return _apply(_unwrap(x), packed, out, bias, state, offs, threshold)
    y = state.kind.product(x, packed, state, bias, offs, threshold)
    return y if out is None else into(out, y, "out")


def input_gradient(dy: Tensor, packed: Tensor, state: Any, offs: Tensor | None = None) -> Tensor:
    """dx = dy W, differentiable in dy where somebody asks for that (create_graph=True)."""
    if _transforms():
        return InputGradientForwardMode.apply(dy, packed, state, offs)
    if torch.is_grad_enabled() and dy.requires_grad:
        return InputGradient.apply(dy, packed, state, offs)
    return state.kind.gradient(dy, packed, state, offs)
