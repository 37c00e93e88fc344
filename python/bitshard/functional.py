"""Quantize, dequantize and multiply: bitsandbytes' functions for 4-bit and 8-bit blocks, with its names and arguments.

This is where a user's arguments are checked; the ops below (ops.py, csrc/ops.c) check again only what would corrupt
memory. A block is `blocksize` consecutive elements of the flattened tensor and has one scale, its largest magnitude
(absmax). Formats, thresholds and the order of roundings: docs/formats.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from bitshard import _C, ops
from bitshard.state import (
    BLOCKSIZES,
    BLOCKSIZES_8BIT,
    NESTED_BLOCKSIZE,
    STORAGE_DTYPES,
    VALUE_DTYPES,
    QuantState,
    dtype_name,
    pack_dict_to_tensor,
    unpack_tensor_to_dict,
)

__all__ = [
    "QuantState",
    "create_dynamic_map",
    "create_fp8_map",
    "create_linear_map",
    "create_normal_map",
    "dequantize_4bit",
    "dequantize_blockwise",
    "dequantize_fp4",
    "dequantize_nf4",
    "gemv_4bit",
    "get_4bit_type",
    "linear_4bit",
    "pack_dict_to_tensor",
    "quantize_4bit",
    "quantize_blockwise",
    "quantize_fp4",
    "quantize_nf4",
    "unpack_tensor_to_dict",
]

# ---- around torch's dispatcher ----

# What an op overload calls, without the Python frame around it. Dynamo traces the overload only.
_dequantize_4bit = ops.dequantize_4bit._op
_linear_4bit = ops.linear_4bit._op
_linear_4bit_dgrad = ops.linear_4bit_dgrad._op


def _allowed(reduction: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
    """`reduction` and what it gives by default: since torch 2.9 two flags, before one."""
    return reduction, (True, True) if isinstance(reduction(), tuple) else True


def enable_direct_calls(*weights: type) -> bool:
    """Let products and dequantization go around the dispatcher (csrc/direct.h), where this torch allows it.

    `weights` are the classes, beside plain tensors and parameters, that a packed weight may have.
    """
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    watchers = (torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack, torch._C._is_tracing)
    classes = (Tensor, torch.nn.Parameter, *weights)
    default = (torch._C._get_deterministic_algorithms, False)
    accumulation = (torch._C._get_cublas_allow_fp16_accumulation, False)
    settings = (
        (),
        (*default, *accumulation, *_allowed(torch._C._get_cublas_allow_fp16_reduced_precision_reduction)),
        (*default, *_allowed(torch._C._get_cublas_allow_bf16_reduced_precision_reduction)),
    )
    profiler = torch.autograd.profiler
    return exchange is not None and _C.configure_direct(
        exchange, Tensor, classes, tuple(VALUE_DTYPES.values()), watchers, settings, profiler, torch.is_grad_enabled
    )


# ---- tables ----

_tables: dict[tuple[str, torch.device], Tensor] = {}


def _table(name: str, device: torch.device) -> Tensor:
    """A table of the C core on `device`. Shared: never write to it, never hand it out but as a `shared_code`."""
    key = (name, device)
    table = _tables.get(key)
    if table is None:
        with torch.inference_mode(False):
            table = ops.table(name).to(device)
        if type(table) is Tensor and not torch.compiler.is_compiling():  # a fake tensor must not outlive its mode
            _tables[key] = table
    return table


# ---- checks ----


def check_storage(quant_storage: torch.dtype) -> None:
    """TypeError unless packed codes can be held in `quant_storage`."""
    if quant_storage not in STORAGE_DTYPES:
        names = ", ".join(dtype_name(dtype) for dtype in STORAGE_DTYPES)
        raise TypeError(f"quant_storage is {quant_storage}, supported are {names}")


def check_format(quant_type: str, blocksize: int) -> None:
    """ValueError unless the 4-bit format and the block size exist."""
    if quant_type not in ops.FORMATS:
        raise ValueError(f"quant_type is {quant_type!r}, expected 'nf4' or 'fp4'")
    if blocksize not in BLOCKSIZES:
        raise ValueError(f"invalid blocksize {blocksize}: expected one of {BLOCKSIZES}")


def check_packed(packed: Tensor, state: QuantState, where: str) -> None:
    """TypeError or ValueError unless `packed` has as many bytes, and `state` as many scales, as `state.shape` needs."""
    if not isinstance(state, QuantState):
        raise TypeError(f"{where}: expected a QuantState, got {type(state).__name__}")
    if state.shape is None or state.quant_type not in ops.FORMATS:
        raise ValueError(
            f"{where}: quant_state is of type {state.quant_type!r} and shape {state.shape}, not a 4-bit state"
        )
    check_format(state.quant_type, state.blocksize)
    if packed.dtype not in STORAGE_DTYPES:
        raise TypeError(f"{where}: packed weight is {packed.dtype}, which is no storage dtype")
    n = math.prod(state.shape)
    expected = _C.storage_elements(n, packed.element_size())
    if packed.numel() != expected:
        raise ValueError(
            f"{where}: packed weight has {packed.numel()} elements of {dtype_name(packed.dtype)}, but "
            f"{list(state.shape)} needs {expected}. Is it sharded, or was it cast to another dtype?"
        )
    if n > 0 and packed.untyped_storage().nbytes() == 0:
        raise ValueError(
            f"{where}: FSDP1 has freed this packed weight of {list(state.shape)}, as it does after a module's forward, "
            "so it cannot be dequantized or merged here. Merge in one process with the saved adapter, load "
            "bitshard.fsdp.full_state_dict(model) into a model that is not sharded, or use FSDP2 (fsdp_version: 2)."
        )
    n_blocks = _C.block_count(n, state.blocksize)
    if state.absmax.numel() != n_blocks:
        raise ValueError(
            f"{where}: absmax has {state.absmax.numel()} scales, but {list(state.shape)} with blocksize "
            f"{state.blocksize} needs {n_blocks}"
        )
    if state.absmax.dtype is not (torch.uint8 if state.nested else torch.float32):
        raise TypeError(f"{where}: absmax is {state.absmax.dtype}, expected {'uint8' if state.nested else 'float32'}")
    if state.nested and state.state2.blocksize != NESTED_BLOCKSIZE:
        raise ValueError(
            f"{where}: nested blocksize {state.state2.blocksize} is not supported, only {NESTED_BLOCKSIZE}"
        )
    if state.absmax.device != packed.device:
        raise ValueError(f"{where}: packed weight is on {packed.device}, its scales are on {state.absmax.device}")


def _check_values(x: Tensor, what: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{what} must be a tensor, got {type(x).__name__}")
    if x.dtype not in VALUE_DTYPES.values():
        raise ValueError(f"{what} only supports 16/32-bit floats, but got {x.dtype}")


def into(out: Tensor | None, values: Tensor, what: str) -> Tensor:
    """`values`, in `out` where there is one: TypeError or ValueError unless it has the dtype and shape of `values`."""
    if out is None:
        return values
    if out.dtype is not values.dtype:
        raise TypeError(f"{what} is {dtype_name(out.dtype)}, expected {dtype_name(values.dtype)}")
    if out.shape != values.shape:
        raise ValueError(f"{what} has shape {list(out.shape)}, expected {list(values.shape)}")
    return out.copy_(values)


def _check_8bit(blocksize: int, code: Tensor) -> None:
    if blocksize <= 0:
        raise ValueError(f"blocksize must be positive, got {blocksize}")
    if blocksize not in BLOCKSIZES_8BIT:
        raise ValueError(f"invalid blocksize {blocksize}: expected one of {BLOCKSIZES_8BIT}")
    if code.numel() != 256:
        raise ValueError(f"code must have 256 values, got {code.numel()}")


# ---- 4-bit ----


def quantize_4bit(
    A: Tensor,
    absmax: Tensor | None = None,
    out: Tensor | None = None,
    blocksize: int | None = None,
    compress_statistics: bool = False,
    quant_type: str = "fp4",
    quant_storage: torch.dtype = torch.uint8,
) -> tuple[Tensor, QuantState]:
    """Quantize to 4 bits: code = nearest value of the format to x / absmax of its block.

    Args:
        A: float32, float16 or bfloat16 of any shape; n elements.
        absmax: float32 tensor that receives the scales, optional.
        out: tensor that receives the packed codes, optional.
        blocksize: elements per scale, a power of two from 32 to 4096; 64 if None.
        compress_statistics: quantize the scales too, to 8 bits in blocks of 256 ("nested" scales).
        quant_type: "nf4" or "fp4".
        quant_storage: dtype that holds the packed bytes: uint8, int8, bfloat16, float16, float32 or float64.

    Returns:
        packed codes [ceil(ceil(n / 2) / itemsize), 1] of quant_storage, zero-padded, the first of a pair of codes in
        the high half of its byte; and the QuantState.
    """
    blocksize = 64 if blocksize is None else blocksize
    check_format(quant_type, blocksize)
    check_storage(quant_storage)
    _check_values(A, "4-bit quantization")
    packed, scales = ops.quantize_4bit(A, blocksize, ops.FORMATS[quant_type], quant_storage)
    state = QuantState(
        absmax=scales,
        shape=A.shape,
        blocksize=blocksize,
        quant_type=quant_type,
        dtype=A.dtype,
    )
    state.shared_code = _table(quant_type, A.device)
    if compress_statistics:
        _nest(state)
    state.absmax = into(absmax, state.absmax, "absmax")
    return into(out, packed, "out"), state


def _mean(scales: Tensor) -> Tensor:
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


def _nest(state: QuantState) -> None:
    """Quantize the scales of a 4-bit state to 8 bits: absmax - mean, dynamic map, blocks of 256."""
    code = _table("dynamic", state.absmax.device)
    offset = _mean(state.absmax)
    state.absmax, absmax2 = ops.quantize_blockwise(state.absmax, code, offset, NESTED_BLOCKSIZE)
    state.offset = offset
    state.state2 = QuantState(absmax=absmax2, blocksize=NESTED_BLOCKSIZE, dtype=torch.float32)
    state.state2.shared_code = code
    state.nested = True


def quantize_fp4(A, absmax=None, out=None, blocksize=None, compress_statistics=False, quant_storage=torch.uint8):
    """`quantize_4bit` with quant_type="fp4"."""
    return quantize_4bit(A, absmax, out, blocksize, compress_statistics, "fp4", quant_storage)


def quantize_nf4(A, absmax=None, out=None, blocksize=None, compress_statistics=False, quant_storage=torch.uint8):
    """`quantize_4bit` with quant_type="nf4"."""
    return quantize_4bit(A, absmax, out, blocksize, compress_statistics, "nf4", quant_storage)


def dequantize_4bit(
    A: Tensor,
    quant_state: QuantState | None = None,
    absmax: Tensor | None = None,
    out: Tensor | None = None,
    blocksize: int | None = None,
    quant_type: str = "fp4",
) -> Tensor:
    """Turn packed codes back into numbers: value = table[code] * absmax of its block, rounded once to the result's
    dtype.

    Args:
        A: packed codes in any storage dtype. A row vector [1, n] gives the transposed result.
        quant_state: as `quantize_4bit` returned it; else give absmax (float32), out, blocksize and quant_type.
        out: tensor that receives the result, optional.

    Returns:
        tensor of quant_state.shape and quant_state.dtype; a replicated DTensor where A is a shard (FSDP2).
    """
    if type(A) is not Tensor and hasattr(A, "device_mesh"):
        from bitshard import fsdp

        return fsdp.dequantize(A, quant_state)
    if quant_state is None:
        if absmax is None or out is None:
            raise ValueError("dequantize_4bit requires both absmax and out when quant_state is not provided")
        blocksize = 64 if blocksize is None else blocksize
        quant_state = QuantState(absmax, out.shape, None, blocksize, quant_type, out.dtype)
    shape = quant_state.shape
    try:
        rows, columns = shape if len(shape) == 2 else (math.prod(shape[:-1]), shape[-1] if shape else 1)
        absmax, absmax_map, absmax2, offset = quant_state.scales()
        blocksize, format = quant_state.blocksize, ops.FORMATS[quant_state.quant_type]
        op, values = ops.dequantize_4bit, None
        if not torch.compiler.is_dynamo_compiling():
            op = _dequantize_4bit
            values = _C.dequantize_4bit(
                A, absmax, absmax_map, absmax2, offset, blocksize, format, rows, columns, quant_state.dtype
            )
        if values is None:
            with torch._C.DisableTorchFunctionSubclass():
                values = op(
                    A, absmax, absmax_map, absmax2, offset, blocksize, format, rows, columns, quant_state.dtype
                )  # fmt: skip
    except (RuntimeError, TypeError, KeyError) as error:
        check_packed(A, quant_state, "dequantize_4bit")
        if quant_state.dtype not in VALUE_DTYPES.values():
            raise ValueError(f"4-bit dequantization only gives 16/32-bit floats, not {quant_state.dtype}") from error
        raise
    if len(shape) != 2:
        values = values.view(shape)
    if out is not None:
        values = into(out, values, "out")
    row = A.dim() == 2 and A.size(0) == 1 and A.size(1) > 1
    return values.t() if row and len(shape) == 2 else values


def dequantize_fp4(A, quant_state=None, absmax=None, out=None, blocksize=None):
    """`dequantize_4bit` with quant_type="fp4"."""
    return dequantize_4bit(A, quant_state, absmax, out, blocksize, "fp4")


def dequantize_nf4(A, quant_state=None, absmax=None, out=None, blocksize=None):
    """`dequantize_4bit` with quant_type="nf4"."""
    return dequantize_4bit(A, quant_state, absmax, out, blocksize, "nf4")


def linear_4bit(x: Tensor, packed: Tensor, state: QuantState, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + bias with W [N, K] decoded from 4 bits on the way; no gradient (autograd.py has it).

    Args:
        x: float32, float16 or bfloat16 [..., K].
        packed: packed codes of W, any storage dtype, [n, 1], [1, n] or [n].
        bias: [N] of the dtype of x.

    Returns:
        [..., N] of the dtype of x.
    """
    try:
        absmax, absmax_map, absmax2, offset = state.scales()
        N, K = state.shape
        blocksize, format = state.blocksize, ops.FORMATS[state.quant_type]
        op = ops.linear_4bit
        if not torch.compiler.is_dynamo_compiling():
            op = _linear_4bit
            y = _C.linear_4bit(x, packed, absmax, absmax_map, absmax2, offset, bias, blocksize, format, N, K)
            if y is not None:
                return y
        none = ops.empty(absmax.device) if bias is None else bias
        with torch._C.DisableTorchFunctionSubclass():
            return op(x, packed, absmax, absmax_map, absmax2, offset, none, blocksize, format, N, K)
    except (RuntimeError, TypeError, KeyError, AttributeError) as error:
        explain_linear(error, x, packed, state, bias)


def linear_4bit_dgrad(dy: Tensor, packed: Tensor, state: QuantState) -> Tensor:
    """dx = dy W for the weight of `linear_4bit`: dy [..., N] -> [..., K], dtype of dy."""
    absmax, absmax_map, absmax2, offset = state.scales()
    N, K = state.shape
    blocksize, format = state.blocksize, ops.FORMATS[state.quant_type]
    op = ops.linear_4bit_dgrad
    if not torch.compiler.is_dynamo_compiling():
        op = _linear_4bit_dgrad
        dx = _C.linear_4bit_dgrad(dy, packed, absmax, absmax_map, absmax2, offset, blocksize, format, N, K)
        if dx is not None:
            return dx
    with torch._C.DisableTorchFunctionSubclass():
        return op(dy, packed, absmax, absmax_map, absmax2, offset, blocksize, format, N, K)


def explain_linear(error: Exception, x: Tensor, packed: Tensor, state: QuantState, bias: Tensor | None) -> NoReturn:
    """Raise what is wrong with the arguments of `linear_4bit`, which the op has refused with `error`."""
    if x.device != packed.device:
        raise ValueError(f"linear_4bit: x is on {x.device}, the weight on {packed.device}") from error
    check_packed(packed, state, "linear_4bit")
    N, K = state.shape
    if x.dtype not in VALUE_DTYPES.values():
        raise TypeError(f"linear_4bit: x is {x.dtype}, expected float32, float16 or bfloat16") from error
    if x.dim() == 0 or x.shape[-1] != K:
        raise ValueError(f"linear_4bit: x of shape {list(x.shape)} does not fit a weight of shape {[N, K]}") from error
    if bias is not None and bias.numel() not in (0, N):
        raise ValueError(f"linear_4bit: bias has {bias.numel()} elements, the weight {N} rows") from error
    if bias is not None and bias.numel() and bias.dtype is not x.dtype:
        raise TypeError(f"linear_4bit: bias is {bias.dtype}, x is {x.dtype}") from error
    raise error


def gemv_4bit(
    A: Tensor,
    B: Tensor,
    out: Tensor | None = None,
    transposed_A: bool = False,
    transposed_B: bool = False,
    state: QuantState | None = None,
) -> Tensor:
    """A W^T for packed codes B of W [N, K] and A [..., K]. `transposed_A` and `transposed_B` do nothing."""
    if state is None:
        raise ValueError("state cannot be None. gemv_4bit() requires the state from quantize_4bit()")
    y = linear_4bit(A, B, state)
    return into(out, y, "out")


# ---- 8-bit blocks ----


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
    code = _table("dynamic", A.device) if code is None else code
    _check_8bit(blocksize, code)
    _check_values(A, "blockwise quantization")
    map = code.to(device=A.device, dtype=torch.float32)
    codes, scales = ops.quantize_blockwise(A, map, ops.empty(A.device), blocksize)
    state = QuantState(absmax=scales, code=code.to(A.device, copy=True), blocksize=blocksize, dtype=A.dtype)
    if nested:
        state.offset = _mean(scales)
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
        code = _table("dynamic", A.device) if code is None else code
        quant_state = QuantState(absmax=absmax, code=code, blocksize=blocksize, dtype=torch.float32)
    _check_8bit(quant_state.blocksize, quant_state.code)
    scales = quant_state.absmax
    if quant_state.nested:
        scales = dequantize_blockwise(scales, quant_state.state2) + quant_state.offset
    n_blocks = _C.block_count(A.numel(), quant_state.blocksize)
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


# ---- maps ----


def get_4bit_type(typename: str, device: torch.device | str | None = None, blocksize: int = 64) -> Tensor:
    """float32 [16]: the value of each 4-bit code of "nf4" or "fp4"; the largest magnitude is 1.

    `device` None is the GPU where there is one, else the CPU.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if typename in ops.FORMATS:
        return _table(typename, torch.device(device)).clone()
    raise NotImplementedError(f"4-bit type {typename!r} is not supported: expected nf4 or fp4")


def _padded_map(values: list[float]) -> Tensor:
    """256 ascending values: `values` and zeros."""
    return torch.tensor(sorted(values + [0.0] * (256 - len(values))), dtype=torch.float32)


def create_linear_map(signed: bool = True, total_bits: int = 8, add_zero: bool = True) -> Tensor:
    """float32 [256]: equal steps over [-1, 1] (or [0, 1]), one value fewer where that makes zero one of them."""
    total = 2**total_bits
    if signed and (add_zero or total_bits < 8):
        total -= 1
    values = torch.linspace(-1.0 if signed else 0.0, 1.0, total)
    half = values.numel() // 2
    return torch.cat([values[:half], torch.zeros(256 - values.numel()), values[half:]])


def create_normal_map(offset: float = 0.9677083, use_extra_value: bool = True) -> Tensor:
    """float32 [256]: NF4's 16 values and zeros: quantiles of the normal distribution, scaled to a maximum of 1.

    Quantiles at equal steps from `offset` to 0.5, 8 on the positive and 7 on the negative side (7 and 7 without
    `use_extra_value`). Source: QLoRA (arXiv 2305.14314), appendix E.
    """
    positive = torch.special.ndtri(torch.linspace(offset, 0.5, 9 if use_extra_value else 8).double())[:-1]
    negative = -torch.special.ndtri(torch.linspace(offset, 0.5, 8).double())[:-1]
    values = _padded_map([*positive.tolist(), *negative.tolist()])
    return values / values.max()


def create_fp8_map(signed: bool = True, exponent_bits: int = 5, precision_bits: int = 2, total_bits: int = 8) -> Tensor:
    """float32 [256]: the values of a small floating-point format, scaled to a maximum of 1, and zeros.

    With bias b = 2^(exponent_bits - 1): (1 + m) 2^-(e - b - 1) for exponent field e > 0, m 2^-b for e = 0.
    """
    if exponent_bits + precision_bits + signed != total_bits:
        raise ValueError(f"{int(signed)} + {exponent_bits} + {precision_bits} bits are not {total_bits}")
    bias = 2 ** (exponent_bits - 1)
    steps = 2**precision_bits
    values = []
    for exponent, step in itertools.product(range(2**exponent_bits), range(steps)):
        fraction = step / steps
        value = fraction * 2.0**-bias if exponent == 0 else (1 + fraction) * 2.0 ** -(exponent - bias - 1)
        values += [value, -value] if signed else [value]
    map = _padded_map(values)
    return map / map.max()


def create_dynamic_map(signed: bool = True, max_exponent_bits: int = 7, total_bits: int = 8) -> Tensor:
    """float32 [256]: the dynamic data type, whose leading zeros count the exponent and leave the rest to the fraction.

    For each power of ten from 10^-(max_exponent_bits - 1) to 1 the midpoints of equal steps from 0.1 to 1, twice as
    many each time; and 0 and 1. Source: 8-bit Approximations for Parallelism in Deep Learning (arXiv 1511.04561).
    """
    if (signed, max_exponent_bits, total_bits) == (True, 7, 8):
        return ops.table(
            "dynamic"
        )  # the constants of the checkpoint format: linspace differs in the last bit on some CPUs
    spare_bits = total_bits - 1 - max_exponent_bits
    powers = [(i - max_exponent_bits + 1, 2 ** (i + spare_bits + (not signed))) for i in range(max_exponent_bits)]
    extra = 2**spare_bits - 1
    if extra > 0:
        powers.append((0, extra))
    values = [0.0, 1.0]
    for power, count in powers:
        steps = torch.linspace(0.1, 1, int(count) + 1)
        middles = (10**power * ((steps[:-1] + steps[1:]) / 2)).tolist()
        values += middles + ([-value for value in middles] if signed else [])
    if len(values) != 2**total_bits:
        raise ValueError(
            f"no dynamic map of {total_bits} bits has max_exponent_bits={max_exponent_bits}, signed={signed}"
        )
    return _padded_map(values)
