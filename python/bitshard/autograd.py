"""matmul_4bit: y = A W^T + bias with W in 4 bits, and its gradient with respect to A and bias. W itself is frozen.

The packed weight is a plain attribute of the autograd context, not a saved tensor: hooks on saved tensors (activation
offloading) would copy it, and FSDP2 frees and refills its storage between forward and backward.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from bitshard import functional
from bitshard.checks import check_dense, into
from bitshard.state import QuantState


class MatMul4Bit(torch.autograd.Function):
    """y [..., N] = x [..., K] W^T + bias; dx = dy W, dbias = the sum of dy over its rows."""

    @staticmethod
    def forward(
        ctx: Any, A: Tensor, B: Tensor, out: Tensor | None, bias: Tensor | None, quant_state: QuantState
    ) -> Tensor:
        ctx.packed = B
        ctx.state = quant_state
        ctx.bias_dtype = None if bias is None else bias.dtype
        y = functional.linear_4bit(A, B, quant_state, bias)
        ctx.y_shape = y.shape
        return y if out is None else into(out, y, "out")

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, None]:
        needs_x, _, _, needs_bias, _ = ctx.needs_input_grad
        state = ctx.state
        dx = dbias = None
        if needs_x:
            product = functional.linear_4bit_dgrad
            if _transforms():
                product = MatMul4BitInputGradientForwardMode.apply
            elif torch.is_grad_enabled() and dy.requires_grad:  # create_graph=True: a derivative of dx is wanted
                product = MatMul4BitInputGradient.apply
            dx = product(dy, ctx.packed, state)
        if needs_bias:
            dbias = dy.reshape(dy.shape[:-1].numel(), state.shape[0]).sum(0, dtype=ctx.bias_dtype)
        return dx, None, None, dbias, None


class MatMul4BitInputGradient(torch.autograd.Function):
    """dx [..., K] = dy [..., N] W, differentiable in dy: second and higher derivatives of `matmul_4bit`."""

    @staticmethod
    def forward(ctx: Any, dy: Tensor, packed: Tensor, state: QuantState) -> Tensor:
        ctx.packed = packed
        ctx.state = state
        return functional.linear_4bit_dgrad(dy, packed, state)

    @staticmethod
    def backward(ctx: Any, ddx: Tensor) -> tuple[Tensor, None, None]:
        return matmul_4bit(ddx, ctx.packed, ctx.state), None, None


class MatMul4BitForwardMode(MatMul4Bit):
    """The same with forward-mode derivatives, and in the form that torch.func asks for (`grad`, `vjp`, `jvp`).

    A class of its own, because Dynamo traces no Function that has a `jvp`.
    """

    @staticmethod
    def forward(A: Tensor, B: Tensor, out: Tensor | None, bias: Tensor | None, quant_state: QuantState) -> Tensor:
        y = functional.linear_4bit(A, B, quant_state, bias)
        return y if out is None else into(out, y, "out")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, ctx.packed, _, bias, ctx.state = inputs
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.y_shape = output.shape

    @staticmethod
    def jvp(ctx: Any, dA: Tensor | None, dB: None, dout: None, dbias: Tensor | None, dstate: None) -> Tensor:
        """dy = dA W^T + dbias: the product is linear in both."""
        if dA is not None:
            return functional.linear_4bit(dA, ctx.packed, ctx.state, dbias)
        return dbias.expand(ctx.y_shape).contiguous()


class MatMul4BitInputGradientForwardMode(MatMul4BitInputGradient):
    """As `MatMul4BitForwardMode`."""

    @staticmethod
    def forward(dy: Tensor, packed: Tensor, state: QuantState) -> Tensor:
        return functional.linear_4bit_dgrad(dy, packed, state)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, ctx.packed, ctx.state = inputs

    @staticmethod
    def jvp(ctx: Any, ddy: Tensor, dpacked: None, dstate: None) -> Tensor:
        """The product is linear in dy."""
        return functional.linear_4bit_dgrad(ddy, ctx.packed, ctx.state)


def _transforms() -> bool:
    """Whether forward-mode derivatives or a transform of torch.func are active, and Dynamo is not tracing."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


# What `MatMul4Bit.apply` calls in the end; its wrapper in Python, which costs more than the rest of the bookkeeping,
# serves functorch and Dynamo (tested for below) and removes wrappers that functorch left behind (`_unwrap` does).
_apply = super(torch.autograd.Function, MatMul4Bit).apply
_unwrap = torch._C._functorch.unwrap_if_dead


def matmul_4bit(
    A: Tensor,
    B: Tensor,
    quant_state: QuantState,
    out: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """A W^T + bias, differentiable in A and bias.

    Args:
        A: float32, float16 or bfloat16 [..., K].
        B: packed codes of W [N, K]: [n, 1] of any storage dtype, or its transpose [1, n].
        quant_state: the state of B.
        out: tensor that receives the result, optional.
        bias: [N] of the dtype of A, optional.

    Returns:
        [..., N] of the dtype of A.

    TypeError or ValueError if shapes, dtypes, devices or sizes do not fit.
    """
    if not isinstance(quant_state, QuantState):
        raise ValueError(f"matmul_4bit: quant_state is required, got {type(quant_state).__name__}")
    if quant_state.shape is None or len(quant_state.shape) != 2:
        raise ValueError(f"matmul_4bit: quant_state.shape must be [N, K], got {quant_state.shape}")
    N, K = quant_state.shape
    try:
        width = A.shape[-1]
    except IndexError:
        raise ValueError(f"matmul_4bit: x of shape [] does not fit a weight of shape {[N, K]}") from None
    except RuntimeError:  # some nested tensors have no shape
        check_dense(A, "matmul_4bit: x")
        raise
    if width != K and width == N:
        return _matmul_transposed(A, B, quant_state, out, bias)
    if _transforms():  # tangents need no requires_grad
        return MatMul4BitForwardMode.apply(A, B, out, bias, quant_state)
    if torch.is_grad_enabled() and (A.requires_grad or (bias is not None and bias.requires_grad)):
        if torch.compiler.is_dynamo_compiling():
            return MatMul4Bit.apply(A, B, out, bias, quant_state)
        if bias is not None:
            bias = _unwrap(bias)
        return _apply(_unwrap(A), B, out, bias, quant_state)
    y = functional.linear_4bit(A, B, quant_state, bias)
    return y if out is None else into(out, y, "out")


def _matmul_transposed(A: Tensor, B: Tensor, state: QuantState, out: Tensor | None, bias: Tensor | None) -> Tensor:
    """A W + bias for a weight that was quantized as [K, N], which old releases allowed; no layer does."""
    if getattr(B, "module", None) is not None:
        raise ValueError(
            f"matmul_4bit: x of shape {list(A.shape)} does not fit the weight of a layer, of shape {list(state.shape)}"
        )
    warnings.warn(
        f"matmul_4bit: the weight was quantized from a [K, N] tensor ({list(state.shape)}). Re-quantize from the "
        "weight in [N, K] (out_features, in_features) orientation. This will be an error in a future version.",
        DeprecationWarning,
        stacklevel=3,
    )
    weight = functional.dequantize_4bit(B if state.reordered else B.reshape(-1, 1), state).to(A.dtype)
    y = torch.nn.functional.linear(A, weight.t(), bias)
    return y if out is None else into(out, y, "out")


# ---- stacks of expert weights ----


class GroupedMatMul4Bit(torch.autograd.Function):
    """y [S, N] = x [S, K] W_e^T + bias[e] of a stack; dx = dy W_e, dbias[e] = the sum of dy over the rows of e."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, offs: Tensor, packed: Tensor, state: QuantState, bias: Tensor | None) -> Tensor:
        ctx.packed, ctx.state = packed, state
        ctx.save_for_backward(offs)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return functional.grouped_linear_4bit(x, offs, packed, state, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None, Tensor | None]:
        needs_x, _, _, _, needs_bias = ctx.needs_input_grad
        (offs,), dx, dbias = ctx.saved_tensors, None, None
        if needs_x:
            dx = GroupedMatMul4BitInputGradient.apply(dy, offs, ctx.packed, ctx.state)
        if needs_bias:
            dbias = sums_of_groups(dy, offs).to(ctx.bias_dtype)
        return dx, None, None, None, dbias


class GroupedMatMul4BitInputGradient(torch.autograd.Function):
    """dx [S, K] = dy [S, N] W_e, differentiable in dy."""

    @staticmethod
    def forward(ctx: Any, dy: Tensor, offs: Tensor, packed: Tensor, state: QuantState) -> Tensor:
        ctx.packed, ctx.state = packed, state
        ctx.save_for_backward(offs)
        return functional.grouped_linear_4bit_dgrad(dy, offs, packed, state)

    @staticmethod
    def backward(ctx: Any, ddx: Tensor) -> tuple[Tensor, None, None, None]:
        (offs,) = ctx.saved_tensors
        return GroupedMatMul4Bit.apply(ddx, offs, ctx.packed, ctx.state, None), None, None, None


def sums_of_groups(x: Tensor, offs: Tensor) -> Tensor:
    """float32 [E, N]: for each expert the sum of its rows of x [S, N], in their order."""
    rows = torch.arange(x.shape[0], device=x.device, dtype=offs.dtype)
    expert = torch.searchsorted(offs, rows, right=True)
    sums = x.new_zeros(offs.numel() + 1, x.shape[1], dtype=torch.float32)
    return sums.index_add(0, expert, x.float())[:-1]


def grouped_matmul_4bit(
    x: Tensor, offs: Tensor, packed: Tensor, quant_state: QuantState, bias: Tensor | None = None
) -> Tensor:
    """`functional.grouped_linear_4bit`, differentiable in x and bias: arguments, result and errors are the same."""
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return GroupedMatMul4Bit.apply(x, offs, packed, quant_state, bias)
    return functional.grouped_linear_4bit(x, offs, packed, quant_state, bias)
