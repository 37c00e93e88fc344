"""What arithmetic8_training.py does to x, dy and results, as one Triton kernel: the same numbers in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # of a program


@triton.jit
def _left(
    t, row, out, M, C, columns, LIMIT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, SCALED: tl.constexpr
):
    """[ROWS, columns] of t [M, C] in bfloat16 and, with a LIMIT, in int8 under one scale a row; WIDTH: power of 2."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    within = tl.arange(0, WIDTH)[None, :]
    c = tl.program_id(1) * columns + within
    inside = (m < M) & (c < C) & (within < columns)
    at = m.to(tl.int64) * C + c
    value = tl.load(t + at, inside, 0.0).to(tl.bfloat16).to(tl.float32)
    if SCALED:
        value = value * tl.load(row + c, (c < C) & (within < columns), 0.0)
    if LIMIT > 0:
        scale = tl.div_rn(tl.max(tl.abs(value), 1)[:, None], tl.full((ROWS, 1), LIMIT, tl.float32))
        code = tl.div_rn(value, tl.where(scale > 0, scale, 1.0).broadcast_to(ROWS, WIDTH))
        value = ((code + 12582912.0) - 12582912.0) * scale  # 1.5 x 2^23: to the nearest integer, halves to even
    tl.store(out + at, value, inside)


def left(t: Tensor, columns: int | None, limit: float, row: Tensor | None) -> Tensor:
    """t [M, C] in bfloat16, times `row` [C], with a `limit` as int8 numbers of one scale per row and `columns`."""
    t = t.contiguous()
    M, C = t.shape
    columns = min(columns or C, C) if limit else min(C, 1024)
    out = torch.empty_like(t)
    grid = (triton.cdiv(M, ROWS), triton.cdiv(C, columns))
    _left[grid](t, row, out, M, C, columns, limit, ROWS, triton.next_power_of_2(columns), row is not None, num_warps=4)
    return out
