"""Grouped products of 4-bit stacks on CUDA: by a kernel of the C core, else by panels.

Which of them, and how many experts a panel has, is the C core's plan (csrc/plan). Panels of experts are decoded into
memory bounded by BITSHARD_WORKSPACE_MB, one expert at least, and multiplied. Nothing waits for the host and no shape
depends on data, so that a CUDA graph can hold it: offs stay on the device.
torch multiplies groups of rows with bfloat16 on sm_80 and newer, N and K being multiples of 8. With other dtypes and
sizes, and on older GPUs, each expert is multiplied with all rows, of which its own are kept: E times the work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitshard import ops


def _by_expert(values: Tensor, first: int, last: int, experts: int) -> Tensor:
    """Those of experts [first, last) among values that each expert has as many of."""
    each = values.numel() // experts
    return values.reshape(-1)[first * each : last * each]


def _decoded(packed: Tensor, scales: tuple, first: int, last: int, numbers: tuple, dtype: torch.dtype) -> Tensor:
    """Experts [first, last) as [n, N, K] of `dtype`."""
    experts, blocksize, format, N, K = numbers
    absmax, absmax_map, absmax2, offset = scales
    own = _by_expert(absmax, first, last, experts)
    if absmax.dtype is torch.uint8:
        rows = zip(own.view(last - first, -1), absmax2.view(experts, -1)[first:last], offset[first:last], strict=True)
        own = torch.cat([ops.dequantize_blockwise(a, b, absmax_map, c, 256, torch.float32) for a, b, c in rows])
    none, n_bytes = ops.empty(packed.device), N * K // 2
    codes = packed.reshape(-1).view(torch.uint8)[first * n_bytes : last * n_bytes]
    values = ops.dequantize_4bit(codes, own, none, none, none, blocksize, format, (last - first) * N, K, dtype)
    return values.view(last - first, N, K)


def _grouped_mm(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """[S, N]: rows of x by their expert in weights [n, K, N]; what rows beyond the last end get does not matter."""
    aligned = weights.shape[1] % 8 == 0 == weights.shape[2] % 8  # its rows begin at multiples of 16 bytes
    if x.dtype is torch.bfloat16 and aligned and torch.cuda.get_device_capability(x.device) >= (8, 0):
        return torch.nn.functional.grouped_mm(x, weights, offs=ends)
    rows = torch.arange(x.shape[0], device=x.device, dtype=ends.dtype)
    y = x.new_zeros(x.shape[0], weights.shape[2])
    for expert in range(weights.shape[0]):
        begin = ends[expert - 1] if expert else 0
        own = ((rows >= begin) & (rows < ends[expert])).unsqueeze(1)
        y = torch.where(own, x @ weights[expert], y)
    return y


def by_panels(
    x: Tensor, offs: Tensor, packed: Tensor, scales: tuple, numbers: tuple, gradient: bool, panel: int
) -> Tensor:
    """The product without bias, `panel` experts at a time; numbers: E, blocksize, format, N, K."""
    experts, _, _, N, K = numbers
    S, width = x.shape[0], K if gradient else N
    ends = offs.clamp(0, S).cummax(0).values
    rows = torch.arange(S, dtype=torch.int64, device=x.device)
    y = x.new_zeros(S, width)
    if S == 0:
        return y
    for first in range(0, experts, panel):
        last = min(first + panel, experts)
        weights = _decoded(packed, scales, first, last, numbers, x.dtype)
        weights = weights if gradient else weights.transpose(1, 2)
        begin = ends[first - 1] if first else torch.zeros_like(ends[0])
        places = (rows + begin) % S  # the panel's rows first
        part = _grouped_mm(x[places], weights, ends[first:last] - begin)
        own = (rows < ends[last - 1] - begin).unsqueeze(1)
        y = y.index_copy(0, places, torch.where(own, part, y[places]))
    return y


def _panel(y: Tensor) -> int:
    """0 where the C core has multiplied; else how many experts a panel has: it answers [0, n, 0] then."""
    return y.shape[1] if y.ndim == 3 else 0


def grouped_linear_4bit(
    x: Tensor, offs: Tensor, packed: Tensor, absmax: Tensor, absmax_map: Tensor, absmax2: Tensor, offset: Tensor,
    bias: Tensor, blocksize: int, format: int, N: int, K: int,
) -> Tensor:  # fmt: skip
    """The op's kernel on CUDA: arguments of its schema (csrc/ops/ops.c)."""
    numbers, scales = (offs.numel(), blocksize, format, N, K), (absmax, absmax_map, absmax2, offset)
    y = ops.grouped_linear_4bit_fused(x, offs, packed, *scales, bias, blocksize, format, N, K)
    if not (panel := _panel(y)):
        return y
    y = by_panels(x, offs, packed, scales, numbers, gradient=False, panel=panel)
    if bias.numel() == 0:
        return y
    rows = torch.arange(x.shape[0], device=x.device, dtype=offs.dtype)
    expert = torch.searchsorted(offs.clamp(0, x.shape[0]).cummax(0).values, rows, right=True)
    bias = torch.cat([bias.view(-1, N), bias.new_zeros(1, N)])
    return y + bias[expert]


def grouped_linear_4bit_dgrad(
    dy: Tensor, offs: Tensor, packed: Tensor, absmax: Tensor, absmax_map: Tensor, absmax2: Tensor, offset: Tensor,
    blocksize: int, format: int, N: int, K: int,
) -> Tensor:  # fmt: skip
    """The same for the input gradient."""
    numbers, scales = (offs.numel(), blocksize, format, N, K), (absmax, absmax_map, absmax2, offset)
    dx = ops.grouped_linear_4bit_dgrad_fused(dy, offs, packed, *scales, blocksize, format, N, K)
    panel = _panel(dx)
    return by_panels(dy, offs, packed, scales, numbers, gradient=True, panel=panel) if panel else dx


# What the ops run on CUDA; the C core has them for the CPU.
KERNELS = {
    ops.grouped_linear_4bit: grouped_linear_4bit,
    ops.grouped_linear_4bit_dgrad: grouped_linear_4bit_dgrad,
}


def unseen(x: Tensor) -> bool:
    """Whether nobody would see the op, so that its kernel may be called without the dispatcher, which costs host time.

    A compiler, a dispatch mode, a transform of torch.func or a profiler would see it.
    """
    return (
        type(x) is Tensor
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not torch.autograd.profiler._is_profiler_enabled
    )


def register() -> None:
    """Let the ops of stacks run `KERNELS` on CUDA."""
    for kernel in KERNELS.values():
        torch.library.impl(f"bitshard::{kernel.__name__}", "CUDA", kernel)
