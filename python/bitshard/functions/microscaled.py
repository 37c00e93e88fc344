"""Values to MXFP4 and NVFP4: scales as their specifications say, codes to the nearest; by torch, on any device."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bitshard import ops
from bitshard.formats.checks import check_storage, check_values
from bitshard.formats.entries import NESTED_BLOCKSIZE
from bitshard.formats.maps import table
from bitshard.formats.microscaled import ALL, LARGEST_CODE, LARGEST_SCALE, Microscaled
from bitshard.formats.state import QuantState

_LEAST_SCALE = 2.0**-9  # of E4M3
_AT_ONCE = 1 << 22  # elements


def quantize(
    kind: Microscaled, A: Tensor, quant_storage: torch.dtype, blocksize: int | None = None, **_: Any
) -> tuple[Tensor, QuantState]:
    """Quantize to MXFP4 or NVFP4; a stack [E, N, K] each weight by itself.

    MXFP4: scale 2^(floor(log2 of the block's largest magnitude) - 2), values beyond 6 scales become 6 (OCP Microscaling
    Formats v1.0, 6.3). NVFP4: global scale = the weight's largest magnitude / (6 * 448); a block's scale = its largest
    magnitude / 6 / global scale, rounded to E4M3. Codes: value / scale, to the nearest, of two as near the even one.

    Args:
        A: float32, float16 or bfloat16 of any shape; of a stack [E, N, K].
        quant_storage: dtype that holds the packed bytes.

    Returns:
        packed codes as of `functional.quantize_4bit`, and the QuantState.

    TypeError or ValueError for other dtypes and blocksizes, and for values that are not finite.
    """
    blocksize = kind.blocksize if blocksize is None else blocksize
    kind.check(kind.name_of_type, blocksize)
    check_storage(quant_storage)
    check_values(A, f"{kind.name_of_type} quantization")
    kind.check_shape(A.shape, blocksize)
    if A.is_meta:
        packed = A.new_empty((ops.storage_elements(A.numel(), quant_storage.itemsize), 1), dtype=quant_storage)
        scales = A.new_empty(ops.block_count(A.numel(), blocksize), dtype=torch.uint8)
        second = A.new_empty(kind.second_level(A.shape), dtype=torch.float32) if kind.has_global else None
        return packed, kind.state(QuantState, scales, second, A.shape, A.dtype)
    weights = A.detach().reshape(A.shape[0], -1) if kind.stacked else A.detach().reshape(1, -1)
    made = [_quantize(kind, weight) for weight in weights]
    codes, scales = (torch.cat([each[i] for each in made]) for i in range(2))
    repeats = ops.block_count(scales.numel() // len(made), NESTED_BLOCKSIZE)
    second = torch.stack([each[2] for each in made]).repeat_interleave(repeats) if kind.has_global else None
    state = kind.state(QuantState, scales, second, A.shape, A.dtype)
    missing = ops.storage_elements(A.numel(), quant_storage.itemsize) * quant_storage.itemsize - codes.numel()
    return torch.nn.functional.pad(codes, (0, missing)).view(quant_storage).view(-1, 1), state


def _quantize(kind: Microscaled, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes uint8 [ceil(n / 2)], scales uint8 [blocks] and the global scale float32 [] of values [n]."""
    n, size = values.numel(), kind.blocksize
    blocks = torch.nn.functional.pad(values, (0, -n % size)).view(-1, size)
    largest = blocks.abs().amax(1).float() if n else values.new_zeros(0, dtype=torch.float32)
    if not bool(largest.isfinite().all()):
        count = int((~values.isfinite()).sum())
        raise ValueError(f"{kind.name_of_type} quantization: {count} of {n} values are infinite or NaN")
    scales, whole = _nv_scales(largest) if kind.has_global else _mx_scales(largest)
    units = torch.where(largest > 0, table(kind.scale_table, values.device)[scales.long()] * whole, 1.0)
    step = _AT_ONCE // size
    packed = [_codes(blocks[i : i + step].float() / units[i : i + step, None]) for i in range(0, len(blocks), step)]
    codes = torch.cat(packed) if packed else values.new_zeros(0, dtype=torch.uint8)
    return codes[: (n + 1) // 2], scales, whole


def _mx_scales(largest: Tensor) -> tuple[Tensor, Tensor]:
    """E8M0 bytes of blocks of these largest magnitudes, and 1; 2^0 for blocks of zeros."""
    exponent = torch.frexp(largest).exponent - 1  # floor(log2)
    scales = torch.where(largest > 0, exponent - 2 + 127, 127).clamp(0, 252)
    return scales.to(torch.uint8), largest.new_ones(())


def _nv_scales(largest: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 bytes of blocks of these largest magnitudes, and the global scale; 2^-9 and up, for a scale of 0 is none."""
    whole = largest.max() / (LARGEST_CODE * LARGEST_SCALE) if largest.numel() else largest.new_zeros(())
    whole = torch.where(whole > 0, whole, 1.0)
    scales = (largest / LARGEST_CODE / whole).clamp(_LEAST_SCALE, LARGEST_SCALE)
    return scales.to(torch.float8_e4m3fn).view(torch.uint8), whole


def _codes(scaled: Tensor) -> Tensor:
    """Packed codes uint8 [n / 2] of values in units of their scales, n even."""
    scaled = scaled.flatten()
    found = torch.bucketize(scaled.abs(), table("e2m1_borders", scaled.device), out_int32=True) + 8 * (scaled < 0)
    pairs = found.to(torch.uint8).view(-1, 2)
    return pairs[:, 0] << 4 | pairs[:, 1]


def plain_scales(state: QuantState) -> Tensor:
    """The scales of a whole tensor as float32 [n_blocks]: RN(map[byte] * global scale), denormal ones too."""
    parts = state.kind.parts(state)
    codes, second = state.absmax.view(parts, -1), state.state2.absmax.view(parts, -1)
    units = table(state.kind.scale_table, codes.device)[codes.long()]
    return (units * second.repeat_interleave(NESTED_BLOCKSIZE, 1)[:, : codes.shape[1]]).view(-1)


for _kind in ALL:
    _kind.quantize = partial(quantize, _kind)
