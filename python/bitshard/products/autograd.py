"""`matmul_4bit` and `grouped_matmul_4bit`: `bitshard.products.matmul` of 4-bit weights, and of stacks of them."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from bitshard.formats.checks import check_dense, into
from bitshard.formats.state import QuantState
from bitshard.functions import functional
from bitshard.products import MatMul, matmul


class MatMul4Bit(MatMul):
    """`products.MatMul` by bitsandbytes' name: `apply(A, B, out, bias, quant_state)`."""


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
    return matmul(A, B, quant_state, bias, out)


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


def grouped_matmul_4bit(
    x: Tensor, offs: Tensor, packed: Tensor, quant_state: QuantState, bias: Tensor | None = None
) -> Tensor:
    """`functional.grouped_linear_4bit`, differentiable in x and bias: arguments, result and errors are the same."""
    return matmul(x, packed, quant_state, bias, offs=offs)
