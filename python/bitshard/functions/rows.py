"""Rows of a quantized matrix, decoded on demand: what an embedding gives, without the rest of the matrix.

A row is gathered as it is stored, codes and scales, and only what was gathered is dequantized: the values have the bits
of the dequantized matrix. There is no gradient. Shapes: a matrix [N, K], indices of any shape [...].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from bitshard import ops
from bitshard.formats.checks import check_packed
from bitshard.formats.state import NESTED_BLOCKSIZE, VALUE_DTYPES, QuantState, dtype_name


def embedding_4bit(indices: Tensor, packed: Tensor, state: QuantState) -> Tensor:
    """Rows `indices` of a 4-bit matrix: the bits of `dequantize_4bit(packed, state)[indices]`.

    Where a row is no whole number of blocks, the blocks that cover it are decoded.

    Args:
        indices: of any integer dtype, [...], on the device of the matrix, each from 0 to N - 1.
        packed, state: of `quantize_4bit` of a matrix [N, K].

    Returns:
        [..., K] of state.dtype.

    TypeError for indices of another dtype, ValueError where packed and state do not fit or are elsewhere, IndexError
    for an index out of range; on a GPU, which is not waited for, and in compiled code torch's own assertion.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if not torch.compiler.is_compiling():
            check_packed(packed, state, "embedding_4bit")
            if len(state.shape) != 2 or state.dtype not in VALUE_DTYPES.values():
                raise ValueError(
                    f"embedding_4bit: {list(state.shape)} of {state.dtype} is no matrix of 16/32-bit floats"
                )
        N, K = state.shape
        rows = checked_rows(indices, N, packed.device, "embedding_4bit")
        if rows.numel() == 0 or K == 0:
            return torch.empty((*indices.shape, K), dtype=state.dtype, device=packed.device)
        data, blocksize = packed.reshape(-1).view(torch.uint8), state.blocksize
        whole = K % blocksize == 0
        blocks, first = _covering(rows * K, K, blocksize, ops.block_count(N * K, blocksize))
        if whole:
            codes = embedding(rows, data[: N * K // 2].view(N, K // 2))
        else:
            codes = data[_elements(blocks, blocksize // 2, data.numel())]
        none, format = ops.empty(packed.device), ops.CODES[state.quant_type]
        scales = _scales(state, blocks)
        width = blocks.shape[1] * blocksize
        values = ops.dequantize_4bit(
            codes, scales, none, none, none, blocksize, format, rows.numel(), width, state.dtype
        )
        if not whole:
            values = values.gather(1, first[:, None] + torch.arange(K, dtype=torch.int64, device=values.device))
        return values.view(*indices.shape, K)


def embedding_int8(indices: Tensor, packed: Tensor, absmax: Tensor, N: int, K: int, dtype: torch.dtype) -> Tensor:
    """Rows `indices` of an int8 matrix: the bits of `dequantize_int8(packed, absmax, N, K, dtype)[indices]`.

    Args:
        indices: as of `embedding_4bit`, and with its errors.
        packed: the codes, N K bytes of a contiguous tensor of any dtype.
        absmax: float32 [N].

    Returns:
        [..., K] of `dtype`.
    """
    with torch._C.DisableTorchFunctionSubclass():
        rows = checked_rows(indices, N, packed.device, "embedding_int8")
        if rows.numel() == 0 or K == 0:
            return torch.empty((*indices.shape, K), dtype=dtype, device=packed.device)
        codes = embedding(rows, packed.reshape(-1).view(torch.uint8)[: N * K].view(N, K))
        values = ops.dequantize_int8(codes, absmax[rows], rows.numel(), K, dtype)
        return values.view(*indices.shape, K)


def checked_rows(indices: Tensor, N: int, device: torch.device, where: str) -> Tensor:
    """Indices [...] of a matrix of N rows on `device` as int64 [n]. TypeError, ValueError or IndexError: see above."""
    dtype = getattr(indices, "dtype", torch.bool)
    if dtype is torch.bool or dtype.is_floating_point or dtype.is_complex:
        found = dtype_name(indices.dtype) if isinstance(indices, Tensor) else type(indices).__name__
        raise TypeError(f"{where}: indices are {found}, expected a tensor of integers")
    if indices.device != device and not (indices.is_meta or device.type == "meta"):
        raise ValueError(f"{where}: indices are on {indices.device}, the matrix on {device}")
    rows = indices.reshape(-1).to(torch.int64)
    inside = (rows >= 0) & (rows < N)
    if torch.compiler.is_compiling() or rows.device.type != "cpu":
        torch._assert_async(inside.all(), f"{where}: an index is out of range for {N} rows")
    elif not bool(inside.all()):
        wrong = rows[~inside]
        raise IndexError(
            f"{where}: {wrong.numel()} of {rows.numel()} indices are out of range for {N} rows, the first is "
            f"{int(wrong[0])}"
        )
    return rows


def _covering(starts: Tensor, length: int, size: int, count: int) -> tuple[Tensor, Tensor]:
    """Blocks of `size` elements, of `count` in all, that hold `length` elements from each of `starts` [n] on.

    Returns int64 [n, C] (beyond the last block: the last once more), and [n] where in the first block each begins.
    """
    most = length // size if length % size == 0 else (length - 1) // size + 2
    first = starts // size
    blocks = first[:, None] + torch.arange(most, dtype=torch.int64, device=starts.device)
    return blocks.clamp_(max=count - 1), starts - first * size


def _elements(blocks: Tensor, size: int, count: int) -> Tensor:
    """Indices of the elements of blocks [n, C]: int64 [n, C * size]. The last block may be short of `count` elements:
    beyond them it has the last once more, which nobody selects."""
    elements = (blocks * size)[:, :, None] + torch.arange(size, dtype=torch.int64, device=blocks.device)
    return elements.clamp_(max=count - 1).flatten(1)


def _scales(state: QuantState, blocks: Tensor) -> Tensor:
    """The scales of blocks [n, C]: float32 [n * C]. Nested ones are decoded in whole blocks of the second level."""
    absmax, code, absmax2, offset = state.scales()
    if not state.nested:
        return absmax[blocks].view(-1)
    count = blocks.shape[1]
    level2, first = _covering(blocks[:, 0], count, NESTED_BLOCKSIZE, absmax2.numel())
    if count < NESTED_BLOCKSIZE and NESTED_BLOCKSIZE % count == 0 and state.shape[1] % state.blocksize == 0:
        level2 = level2[:, :1]  # no row crosses a block of the second level
    codes = absmax[_elements(level2, NESTED_BLOCKSIZE, absmax.numel())]
    scales = ops.dequantize_blockwise(codes, absmax2[level2].view(-1), code, offset, NESTED_BLOCKSIZE, torch.float32)
    steps = blocks - blocks[:, :1] + first[:, None]  # not arange: the last block may be there more than once
    return scales.gather(1, steps).view(-1)
