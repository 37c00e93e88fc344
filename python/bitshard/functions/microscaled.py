"""Values to MXFP4 and NVFP4: scales as their specifications say, codes to the nearest; on CUDA by torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bitshard import ops
from bitshard.formats.checks import check_storage, check_values
from bitshard.formats.entries import NESTED_BLOCKSIZE
from bitshard.formats.maps import table
from bitshard.formats.microscaled import ALL, LARGEST_CODE, LARGEST_SCALE, MXFP4, NVFP4, Microscaled
from bitshard.formats.state import QuantState

_LEAST_SCALE = 2.0**-9  # of E4M3
AT_ONCE = 1 << 22  # elements of a panel, whole blocks
Panels = Callable[[], Iterable[Tensor]]


def quantize(
    kind: Microscaled, A: Tensor, quant_storage: torch.dtype, blocksize: int | None = None, **_: Any
) -> tuple[Tensor, QuantState]:
    """Quantize to MXFP4 or NVFP4; a stack [E, N, K] each weight by itself.

    MXFP4: scale 2^(floor(log2 of the block's largest magnitude) - 2), values beyond 6 scales become 6 (OCP Microscaling
    Formats v1.0, 6.3). NVFP4: global scale = the weight's largest magnitude / (6 * 448), then the reciprocal of its
    reciprocal; a block's scale = its largest magnitude / 6 / global scale, rounded to E4M3. Codes: value / scale, to
    the nearest, of two as near the even one. A CPU and a GPU make the same bytes.

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
    for weight in weights:
        _require_finite(kind, weight)
    panels = [partial(weight.split, AT_ONCE) for weight in weights]
    return quantize_panels(kind, panels, A.shape, A.dtype, quant_storage)


def _require_finite(kind: Microscaled, values: Tensor) -> None:
    if values.numel() and not bool(torch.stack(values.aminmax()).isfinite().all()):
        count = int((~values.isfinite()).sum())
        raise ValueError(f"{kind.name_of_type} quantization: {count} of {values.numel()} values are infinite or NaN")


def quantize_panels(
    kind: Microscaled, weights: Sequence[Panels], shape: torch.Size, dtype: torch.dtype, quant_storage: torch.dtype
) -> tuple[Tensor, QuantState]:
    """`quantize` of values that come in panels, one after the other; nothing waits for a GPU.

    Args:
        weights: of one weight, or of each of a stack, what gives its values in their order: float [n] each, all but the
            last in whole blocks. It is called once, and once before where there is a global scale.
        shape, dtype: of the state.
        quant_storage: dtype that holds the packed bytes.

    Values that are not finite are not refused: the scale of their block, or the global one, is no finite number then.
    """
    made = [_quantize(kind, panels) for panels in weights]
    codes, scales = (torch.cat([each[i] for each in made]) for i in range(2))
    repeats = ops.block_count(scales.numel() // len(made), NESTED_BLOCKSIZE)
    second = torch.stack([each[2] for each in made]).repeat_interleave(repeats) if kind.has_global else None
    state = kind.state(QuantState, scales, second, shape, dtype)
    n = shape.numel()
    missing = ops.storage_elements(n, quant_storage.itemsize) * quant_storage.itemsize - codes.numel()
    return torch.nn.functional.pad(codes, (0, missing)).view(quant_storage).view(-1, 1), state


def _quantize(kind: Microscaled, panels: Panels) -> tuple[Tensor, Tensor, Tensor | None]:
    """Packed codes uint8 [ceil(n / 2)], scales uint8 [blocks] and the global scale float32 [] of values [n]."""
    whole = _global_scale(panels()) if kind.has_global else None
    made = [ops.quantize_e2m1(values, ops.empty(values.device) if whole is None else whole) for values in panels()]
    return torch.cat([codes for codes, _ in made]), torch.cat([scales for _, scales in made]), whole


def quantize_e2m1(x: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """The op's kernel on CUDA, with the bytes of the C core's: MXFP4 where `whole` is empty, else NVFP4.

    Args:
        x: float32, float16 or bfloat16 [n]. whole: float32 [], the global scale.

    Returns:
        packed codes uint8 [ceil(n / 2)], and a scale for each block, uint8.
    """
    kind = NVFP4 if whole.numel() else MXFP4
    n, size = x.numel(), kind.blocksize
    blocks = torch.nn.functional.pad(x.reshape(-1), (0, -n % size)).view(-1, size)
    largest = blocks.abs().amax(1).float()
    scales = _nv_scales(largest, whole) if kind.has_global else _mx_scales(largest)
    units = table(kind.scale_table, x.device)[scales.long()]
    units = torch.where(largest == 0, 1.0, units * whole if kind.has_global else units)
    return _codes(blocks.float() / units[:, None])[: (n + 1) // 2], scales


def _over(values: Tensor, number: float) -> Tensor:
    """values / number. A GPU divides by a tensor only; with a number, torch multiplies with its rounded inverse."""
    return values / values.new_full((), number)


def _mx_scales(largest: Tensor) -> Tensor:
    """E8M0 bytes of blocks of these largest magnitudes; 2^0 for blocks of zeros, NaN where one is not finite."""
    exponent = torch.frexp(largest).exponent - 1  # floor(log2)
    scales = torch.where(largest > 0, exponent - 2 + 127, 127).clamp(0, 252)
    return torch.where(largest.isfinite(), scales, 255).to(torch.uint8)


def _global_scale(panels: Iterable[Tensor]) -> Tensor:
    """float32 []: the largest magnitude / (6 * 448), then 1 / RN(1 / it), so that files with a divisor can have it."""
    largest = torch.stack([_largest(values) for values in panels]).max()
    whole = _over(largest, LARGEST_CODE * LARGEST_SCALE)
    again = whole.reciprocal().reciprocal()
    whole = torch.where((again > 0) & again.isfinite(), again, whole)  # of numbers below 2^-126 there is no inverse
    return torch.where(whole == 0, 1.0, whole)


def _largest(values: Tensor) -> Tensor:
    """float32 []: the largest magnitude, 0 of none."""
    return torch.stack(values.aminmax()).abs().max().float() if values.numel() else values.new_zeros(()).float()


def _nv_scales(largest: Tensor, whole: Tensor) -> Tensor:
    """E4M3 bytes of blocks of these largest magnitudes; 2^-9 and up, for a scale of 0 is none."""
    scales = (_over(largest, LARGEST_CODE) / whole).clamp(_LEAST_SCALE, LARGEST_SCALE)
    return scales.to(torch.float8_e4m3fn).view(torch.uint8)


def _codes(scaled: Tensor) -> Tensor:
    """Packed codes uint8 [n / 2] of values in units of their scales, n even."""
    scaled = scaled.flatten()
    found = torch.bucketize(scaled.abs(), table("e2m1_borders", scaled.device), out_int32=True).to(torch.uint8)
    pairs = found.add_((scaled < 0).to(torch.uint8), alpha=8).view(-1, 2)
    return pairs[:, 0] << 4 | pairs[:, 1]


def plain_scales(state: QuantState) -> Tensor:
    """The scales of a whole tensor as float32 [n_blocks]: RN(map[byte] * global scale), denormal ones too."""
    parts = state.kind.parts(state)
    codes, second = state.absmax.view(parts, -1), state.state2.absmax.view(parts, -1)
    units = table(state.kind.scale_table, codes.device)[codes.long()]
    return (units * second.repeat_interleave(NESTED_BLOCKSIZE, 1)[:, : codes.shape[1]]).view(-1)


torch.library.impl("bitshard::quantize_e2m1", "CUDA", quantize_e2m1)
for _kind in ALL:
    _kind.quantize = partial(quantize, _kind)
