"""LLM.int8 in pieces, with bitsandbytes' names and arguments: codes, int32 sums, scaled products; no gradients.

A matrix [M, K] is int8 codes and one float32 scale for each row: its largest |value|, which has the code 127. A column
of x with a value of `threshold` or more in any row is an outlier column: its codes are zero where M > 1, and its part
of a product is computed from the values. threshold 0: there are none. The formulas are those of CUDA kernels of
bitsandbytes (csrc/core/int8.h has them, docs/numerics.md says where these differ).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bitshard import _C, ops
from bitshard.formats.checks import check_values, into
from bitshard.formats.state import VALUE_DTYPES, dtype_name


def check_threshold(threshold: float) -> float:
    """The threshold of outliers as a float; ValueError unless it is zero or more, and a number."""
    if not threshold >= 0.0:
        raise ValueError(f"threshold is {threshold}, expected 0 (no outliers) or more")
    return float(threshold)


def check_codes(codes: Tensor, what: str) -> None:
    """TypeError unless these are int8 codes."""
    if codes.dtype is not torch.int8:
        raise TypeError(f"{what} is {dtype_name(codes.dtype)}, expected int8")


def check_scales(scales: Tensor, rows: int, what: str) -> None:
    """TypeError or ValueError unless `scales` are float32, one for each row."""
    if scales.dtype is not torch.float32:
        raise TypeError(f"{what} is {dtype_name(scales.dtype)}, expected float32")
    if scales.numel() != rows:
        raise ValueError(f"{what} has {scales.numel()} scales for {rows} rows")


def quantize(x: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """(codes int8 of the shape of x, scales float32 [rows], marks of outlier columns uint8 [K], [0] without threshold).

    x is float32, float16 or bfloat16 [..., K]. The host does not wait for the device.
    """
    check_values(x, "x of int8 quantization")
    if x.dim() == 0:
        raise ValueError("int8 quantization: x has no dimension, expected [..., K]")
    codes, absmax, outliers = ops.quantize_int8(x.reshape(-1, x.shape[-1]), check_threshold(threshold))
    return codes.view(x.shape), absmax, outliers


def int8_vectorwise_quant(A: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes of A by rows.

    Args:
        A: float32, float16 or bfloat16 [..., K].
        threshold: of outliers; 0 for none.

    Returns:
        (codes int8 of the shape of A, scales float32 [rows], indices int64 of outlier columns; None without threshold).

    The host waits for the indices on a GPU. TypeError or ValueError for other dtypes and for a negative threshold.
    """
    codes, absmax, outliers = quantize(A, threshold)
    return codes, absmax, None if threshold == 0.0 else outliers.nonzero().view(-1)


def int8_vectorwise_dequant(A: Tensor, stats: Tensor) -> Tensor:
    """float32 values of codes A int8 [..., K] with scales `stats` float32 [rows]: A * stats / 127 of each row."""
    check_codes(A, "int8_vectorwise_dequant: A")
    if A.dim() == 0:
        raise ValueError("int8_vectorwise_dequant: A has no dimension, expected [..., K]")
    rows = math.prod(A.shape[:-1])
    check_scales(stats, rows, "int8_vectorwise_dequant: stats")
    return ops.dequantize_int8(A.contiguous(), stats.reshape(-1), rows, A.shape[-1], torch.float32).view(A.shape)


def int8_linear_matmul(A: Tensor, B: Tensor, out: Tensor | None = None, dtype: torch.dtype = torch.int32) -> Tensor:
    """Exact sums int32 [..., N] of codes A int8 [..., K] and B int8 [N, K]: A B^T, into `out` if given.

    `dtype` is int32; TypeError or ValueError for anything else, and for shapes that do not fit.
    """
    if dtype is not torch.int32:
        raise TypeError(f"int8_linear_matmul: dtype is {dtype_name(dtype)}, there is int32 only")
    check_codes(A, "int8_linear_matmul: A")
    check_codes(B, "int8_linear_matmul: B")
    if A.dim() < 1 or B.dim() != 2 or A.shape[-1] != B.shape[-1]:
        raise ValueError(f"int8_linear_matmul: A {list(A.shape)} and B {list(B.shape)}, expected [..., K] and [N, K]")
    sums = ops.product_int8(A.reshape(-1, A.shape[-1]), B)
    return into(out, sums.view(*A.shape[:-1], B.shape[0]), "int8_linear_matmul: out")


def scale_product(
    A: Tensor, row_stats: Tensor, col_stats: Tensor, dtype: torch.dtype | None = None, bias: Tensor | None = None
) -> Tensor:
    """y = A row_stats col_stats / 127^2 + bias, rounded once to `dtype` (float16 if None).

    A int32 [..., N], row_stats float32 [rows], col_stats float32 [N], bias [N].
    """
    dtype = dtype or torch.float16
    if dtype not in VALUE_DTYPES.values():
        raise TypeError(f"int8_mm_dequant: dtype is {dtype_name(dtype)}, expected float32, float16 or bfloat16")
    if A.dtype is not torch.int32 or A.dim() < 1:
        raise TypeError(f"int8_mm_dequant: A is {dtype_name(A.dtype)} {list(A.shape)}, expected int32 [..., N]")
    N = A.shape[-1]
    check_scales(row_stats, math.prod(A.shape[:-1]), "int8_mm_dequant: row_stats")
    check_scales(col_stats, N, "int8_mm_dequant: col_stats")
    bias = ops.empty(A.device) if bias is None else bias.to(dtype)
    sums = A.reshape(-1, N)
    return ops.scale_product_int8(sums, row_stats.view(-1), col_stats.view(-1), bias, dtype).view(A.shape)


def int8_mm_dequant(
    A: Tensor, row_stats: Tensor, col_stats: Tensor, out: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """float16 values of int32 sums A [..., N] with scales float32 of rows and columns, and a bias [N] if given."""
    y = scale_product(A, row_stats, col_stats, torch.float16, bias)
    return y if out is None else out.copy_(y)


def scaled_product(
    A: Tensor,
    B: Tensor,
    row_stats: Tensor,
    col_stats: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`int8_linear_matmul` of codes A [..., K] and B [N, K], and `scale_product` of its sums."""
    return scale_product(int8_linear_matmul(A, B), row_stats, col_stats, dtype, bias)


def mixed_scaled_product(
    A: Tensor,
    CA: Tensor,
    CB: Tensor,
    SCA: Tensor,
    SCB: Tensor,
    outlier_cols: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(`scaled_product` of codes CA [M, K] and CB [N, K] plus A W^T of the outlier columns, those columns of A).

    Without outlier columns the second result is empty. `linear` computes all of it at once, and rounds once.
    """
    y = scaled_product(CA, CB, SCA, SCB, bias, A.dtype)
    if outlier_cols is None or outlier_cols.numel() == 0:
        return y, A.new_empty(0)
    columns = A[:, outlier_cols].contiguous()
    values = int8_vectorwise_dequant(CB[:, outlier_cols].contiguous(), SCB).to(A.dtype)
    return y.addmm(columns, values.t()), columns


def double_quant(A: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """(codes by rows, codes by columns, scales of rows, scales of columns, outlier columns or None) of A [M, K].

    Codes are int8 [M, K], scales float32. Values of `threshold` or more count for no scale, and are zero in the codes
    by columns.
    """
    rows, row_stats, outlier_cols = int8_vectorwise_quant(A, threshold)
    if A.dim() != 2:
        raise ValueError(f"int8_double_quant: A is {list(A.shape)}, expected [M, K]")
    if threshold > 0.0:
        A = A.masked_fill(A.abs() >= threshold, 0.0)
    columns, col_stats, _ = quantize(A.t().contiguous())
    return rows, columns.t().contiguous(), row_stats, col_stats, outlier_cols


def int8_double_quant(
    A: Tensor,
    col_stats: Tensor | None = None,
    row_stats: Tensor | None = None,
    out_col: Tensor | None = None,
    out_row: Tensor | None = None,
    threshold: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Codes of A [M, K] by rows and by columns: see `double_quant`. ValueError where a result is given in advance."""
    given = {"col_stats": col_stats, "row_stats": row_stats, "out_col": out_col, "out_row": out_row}
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"int8_double_quant: {name} must be None, results cannot be given in advance")
    return double_quant(A, threshold)


def dequantize(packed: Tensor, absmax: Tensor, N: int, K: int, dtype: torch.dtype) -> Tensor:
    """Values [N, K] of `dtype`, each rounded once: N K bytes of codes in any dtype, and scales float32 [N]."""
    return ops.dequantize_int8(packed, absmax, N, K, dtype)


def linear(
    x: Tensor, packed: Tensor, absmax: Tensor, N: int, K: int, bias: Tensor | None = None, threshold: float = 0.0
) -> Tensor:
    """y = x W^T + bias with W [N, K] in int8, rounded once to the dtype of x.

    Args:
        x: float32, float16 or bfloat16 [..., K].
        packed: codes of W, N K bytes in any dtype and shape.
        absmax: float32 [N], scales of W.
        bias: [N] of the dtype of x.
        threshold: of outlier columns in x, which are multiplied as they are; 0 for none.

    Few rows of x are all multiplied as they are (csrc/ops/ops.c says up to how many).
    """
    if torch.compiler.is_dynamo_compiling():
        return ops.linear_int8(x, packed, absmax, ops.empty(x.device) if bias is None else bias, threshold, N, K)
    return _C.linear_int8(x, packed, absmax, bias, threshold, N, K)


def linear_dgrad(dy: Tensor, packed: Tensor, absmax: Tensor, N: int, K: int) -> Tensor:
    """dx = dy W for the weight of `linear`: dy [..., N] -> [..., K], dtype of dy."""
    if torch.compiler.is_dynamo_compiling():
        return ops.linear_int8_dgrad(dy, packed, absmax, N, K)
    return _C.linear_int8_dgrad(dy, packed, absmax, N, K)


# ---- int32 products of old releases ----


def check_matmul(
    A: Tensor,
    B: Tensor,
    out: Tensor | None,
    transposed_A: bool,
    transposed_B: bool,
    expected_type: torch.dtype = torch.int8,
) -> tuple[int, ...]:
    """The shape of the product of two matrices, a batch and a matrix, or two batches, either of them transposed.

    TypeError unless both are of `expected_type`, ValueError for shapes that do not fit, `out` among them.
    """
    if A.dtype is not expected_type or B.dtype is not expected_type:
        raise TypeError(f"A is {A.dtype} and B is {B.dtype}, expected {expected_type}")
    a, b = list(A.shape), list(B.shape)
    a = a[:-2] + a[:-3:-1] if transposed_A else a
    b = b[:-2] + b[:-3:-1] if transposed_B else b
    sizes = (len(a), len(b))
    if sizes not in ((2, 2), (3, 2), (3, 3)) or a[-1] != b[-2] or (sizes == (3, 3) and a[0] != b[0]):
        what = f"{'transposed ' * bool(transposed_A)}A {list(A.shape)}, {'transposed ' * bool(transposed_B)}B"
        raise ValueError(f"these cannot be multiplied: {what} {list(B.shape)}")
    shape = (*a[:-1], b[-1])
    if out is not None and tuple(out.shape) != shape:
        raise ValueError(f"out has shape {list(out.shape)}, expected {list(shape)}")
    return shape


def igemm(
    A: Tensor, B: Tensor, out: Tensor | None = None, transposed_A: bool = False, transposed_B: bool = False
) -> Tensor:
    """int32 product of int8 A [..., M, K] and B [K, N] or [batch, K, N], each transposed first where that is said."""
    shape = check_matmul(A, B, out, transposed_A, transposed_B)
    A = A.transpose(-1, -2) if transposed_A else A
    B = B if transposed_B else B.transpose(-1, -2)  # [N, K], of which product_int8 takes the rows
    if B.dim() == 2:
        y = ops.product_int8(A.reshape(-1, A.shape[-1]), B.contiguous()).view(shape)
    else:
        pairs = zip(A.unbind(0), B.unbind(0), strict=True)
        y = torch.stack([ops.product_int8(a.contiguous(), b.contiguous()) for a, b in pairs])
    return into(out, y, "igemm: out")


def batched_igemm(
    A: Tensor, B: Tensor, out: Tensor | None = None, transposed_A: bool = False, transposed_B: bool = False
) -> Tensor:
    """`igemm` of two batches: A [batch, M, K] and B [batch, K, N]. ValueError for anything else."""
    if A.dim() != 3 or B.dim() != 3:
        raise ValueError(f"batched_igemm: A {list(A.shape)} and B {list(B.shape)}, expected 3 dimensions each")
    return igemm(A, B, out, transposed_A, transposed_B)
