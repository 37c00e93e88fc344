"""8-bit blocks, with bitsandbytes' names and arguments, and the mean of scales that nesting takes out."""

from __future__ import annotations

import torch
from torch import Tensor

from bitshard import ops
from bitshard.formats.checks import check_8bit, check_values, into
from bitshard.formats.maps import table
from bitshard.formats.state import QuantState


def mean(scales: Tensor) -> Tensor:
    """Mean of float32 scales [n], float32 []; 0 of none. The same for any number of threads, which torch's is not.

    On the CPU up to 7,680 scales are added in the order of torch's reduction on a GPU, which one thread block does
    then, so that the offset has bitsandbytes' bits; more are added in float64.
    """
    n = scales.numel()
    if n == 0:
        return scales.new_zeros(())
    if scales.device.type != "cpu":
        return scales.mean()
    return (_sum_of_one_block(scales) if n <= 7680 else _sum_of_rows(scales).float()) * (1 / n)


def _sum_of_one_block(x: Tensor) -> Tensor:
    """Sum of float32 [n], 0 < n <= 7680: thread t of w takes element t, t + w, ... (beyond 128: groups of four)."""
    lanes = 4 if x.numel() > 128 else 1
    groups = x.numel() // lanes
    width = min(1 << (groups.bit_length() - 1), 512)
    rest = x[groups * lanes :]
    rows = torch.nn.functional.pad(x[: groups * lanes], (0, -groups % width * lanes)).view(-1, width, lanes)
    sums = rows[0]
    for row in rows[1:]:
        sums = sums + row
    first, *others = sums.unbind(1)
    sums = first + torch.nn.functional.pad(rest, (0, width - rest.numel()))
    for other in others:
        sums = sums + other
    while sums.numel() > 1:
        half = sums.numel() // 2
        sums = sums[:half] + sums[half:]
    return sums[0]


def _sum_of_rows(x: Tensor) -> Tensor:
    """Sum of [n], float64 []: of rows of 1,024 until torch adds the rest with one thread (below 32,768 elements)."""
    while x.numel() >= 32768:
        x = torch.nn.functional.pad(x, (0, -x.numel() % 1024)).view(-1, 1024).sum(1, dtype=torch.float64)
    return x.sum(dtype=torch.float64)


def quantize_blockwise(
    A: Tensor,
    code: Tensor | None = None,
    absmax: Tensor | None = None,
    out: Tensor | None = None,
    blocksize: int = 4096,
    nested: bool = False,
) -> tuple[Tensor, QuantState]:
    """Quantize to 8 bits: code = index of the nearest value of a 256-entry map to x / absmax of its block.

    Args:
        A: float32, float16 or bfloat16 of any shape.
        code: ascending map of 256 values in [-1, 1]; the signed dynamic map if None.
        absmax, out: tensors that receive the scales and the codes, optional.
        blocksize: elements per scale, a power of two from 32 to 16384.
        nested: quantize the scales too.

    Returns:
        uint8 codes of the shape of A, and the QuantState.
    """
    code = table("dynamic", A.device) if code is None else code
    check_8bit(blocksize, code)
    check_values(A, "blockwise quantization")
    map = code.to(device=A.device, dtype=torch.float32)
    codes, scales = ops.quantize_blockwise(A, map, ops.empty(A.device), blocksize)
    state = QuantState(absmax=scales, code=code.to(A.device, copy=True), blocksize=blocksize, dtype=A.dtype)
    if nested:
        state.offset = mean(scales)
        state.absmax, state.state2 = quantize_blockwise(scales - state.offset, blocksize=blocksize)
        state.nested = True
    state.absmax = into(absmax, state.absmax, "absmax")
    return into(out, codes, "out"), state


def dequantize_blockwise(
    A: Tensor,
    quant_state: QuantState | None = None,
    absmax: Tensor | None = None,
    code: Tensor | None = None,
    out: Tensor | None = None,
    blocksize: int = 4096,
    nested: bool = False,
) -> Tensor:
    """Turn 8-bit codes back into numbers: value = map[code] * absmax of its block.

    Args:
        A: uint8 codes.
        quant_state: as `quantize_blockwise` returned it; else give absmax and, where not the default, code and
            blocksize.
        out: tensor that receives the result, optional.

    Returns:
        tensor of the shape of A and of quant_state.dtype (float32 without a state).
    """
    if quant_state is None and absmax is None:
        raise ValueError("dequantize_blockwise requires either quant_state or absmax")
    if A.dtype is not torch.uint8:
        raise ValueError(f"A must be uint8, got {A.dtype}")
    if quant_state is None:
        code = table("dynamic", A.device) if code is None else code
        quant_state = QuantState(absmax=absmax, code=code, blocksize=blocksize, dtype=torch.float32)
    check_8bit(quant_state.blocksize, quant_state.code)
    scales = quant_state.absmax
    if quant_state.nested:
        scales = dequantize_blockwise(scales, quant_state.state2) + quant_state.offset
    n_blocks = ops.block_count(A.numel(), quant_state.blocksize)
    if scales.numel() != n_blocks:
        raise ValueError(
            f"dequantize_blockwise: absmax has {scales.numel()} scales, {A.numel()} codes with blocksize "
            f"{quant_state.blocksize} need {n_blocks}"
        )
    map = quant_state.code.to(device=A.device, dtype=torch.float32)
    values = ops.dequantize_blockwise(
        A, scales.to(torch.float32), map, ops.empty(A.device), quant_state.blocksize, quant_state.dtype
    )
    return into(out, values, "out")
