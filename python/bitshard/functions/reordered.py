"""The second form of a 4-bit weight, which bitsandbytes' CPU build makes for its own product: conversion back.

W [N, K], N a multiple of 32 and K of the blocksize. Codes: uint8 [N, K / 2]; of 32 rows and a pair of columns the 64
codes, row by row: the first 32 are low halves of 32 bytes, the others high halves. Scales: bfloat16 [K / blocksize, N],
never nested. Products and dequantization accept this form and convert it back at every call, which makes them slower,
not faster. Nothing is stored or sharded in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitshard.formats.state import QuantState

GROUP = 32  # rows


def reorder_codes(packed: Tensor, N: int, K: int) -> Tensor:
    """Packed codes of W [N, K] in any storage dtype -> uint8 [N, K / 2] of the second form."""
    data = packed.reshape(-1).view(torch.uint8)[: N * K // 2]
    codes = torch.stack([data >> 4, data & 15], -1).view(N // GROUP, GROUP, K // 2, 2)
    low, high = codes.transpose(1, 2).reshape(-1, 2, GROUP).unbind(1)
    return (high << 4 | low).view(N, K // 2)


def restore_codes(packed: Tensor, N: int, K: int) -> Tensor:
    """The reverse: uint8 [N, K / 2] or its transpose -> packed codes, uint8 [N * K / 2, 1]."""
    rows = (packed if packed.is_contiguous() else packed.t()).reshape(-1, GROUP)
    codes = torch.stack([rows & 15, rows >> 4], 1).view(N // GROUP, K // 2, GROUP, 2)
    first, second = codes.transpose(1, 2).reshape(-1, 2).unbind(1)
    return (first << 4 | second).view(-1, 1)


def restore(packed: Tensor, absmax: Tensor, N: int, K: int, blocksize: int) -> tuple[Tensor, Tensor]:
    """(packed codes uint8 [N * K / 2, 1], scales float32 [N * K / blocksize]) of a weight in the second form.

    ValueError if codes and scales are not those of W [N, K] in this form.
    """
    if packed.dtype is not torch.uint8:
        raise ValueError(f"a weight reordered for bitsandbytes' CPU product is uint8, not {packed.dtype}")
    if N % GROUP or K % blocksize or packed.numel() != N * K // 2 or absmax.shape != (K // blocksize, N):
        raise ValueError(
            f"a weight of shape {[N, K]} with blocksize {blocksize}, reordered for bitsandbytes' CPU product, has "
            f"{N * K // 2} bytes and scales of shape {[K // blocksize, N]}, and {N} is a multiple of {GROUP} and {K} "
            f"of {blocksize}; here are {packed.numel()} bytes and scales of shape {list(absmax.shape)}"
        )
    with torch._C.DisableTorchFunctionSubclass():
        return restore_codes(packed.detach(), N, K), absmax.detach().t().reshape(-1).float()


def restored(packed: Tensor, state: QuantState) -> tuple[Tensor, QuantState]:
    """`restore` for a state, which is not changed: packed codes and a new state, without the table."""
    N, K = state.shape
    packed, absmax = restore(packed, state.absmax, N, K, state.blocksize)
    return packed, QuantState(absmax, state.shape, None, state.blocksize, state.quant_type, state.dtype)
