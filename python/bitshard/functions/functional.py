"""Quantize, dequantize and multiply: bitsandbytes' functions for 4-bit and 8-bit blocks, with its names and arguments.

This is where a user's arguments are checked; the ops below (ops.py, csrc/ops/ops.c) check again only what would corrupt
memory. A block is `blocksize` consecutive elements of the flattened tensor and has one scale, its largest magnitude
(absmax). Formats, thresholds and the order of roundings: docs/formats.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from bitshard import _C, ops
from bitshard.formats.checks import check_dense, check_packed, check_storage, check_values, into
from bitshard.formats.container import repack
from bitshard.formats.kind import kind_of
from bitshard.formats.kinds import EXPERTS, FOUR_BIT, INT8
from bitshard.formats.maps import (
    create_dynamic_map,
    create_fp8_map,
    create_linear_map,
    create_normal_map,
    get_4bit_type,
    table,
)
from bitshard.formats.microscaled import MXFP4, NVFP4
from bitshard.formats.state import (
    NESTED_BLOCKSIZE,
    VALUE_DTYPES,
    QuantState,
    int8_state,
    pack_dict_to_tensor,
    unpack_tensor_to_dict,
)
from bitshard.functions import grouped, int8, microscaled, reordered
from bitshard.functions.blockwise import dequantize_blockwise, mean, quantize_blockwise
from bitshard.shards import gather

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
    "grouped_linear_4bit",
    "grouped_linear_4bit_dgrad",
    "linear_4bit",
    "pack_dict_to_tensor",
    "quantize_4bit",
    "quantize_blockwise",
    "quantize_experts_4bit",
    "quantize_fp4",
    "quantize_mxfp4",
    "quantize_nf4",
    "quantize_nvfp4",
    "unpack_tensor_to_dict",
]


def _by_op(op: Callable[..., Tensor], *args: Any) -> Tensor:
    """What the C core calls where it cannot go around the dispatcher, and what Dynamo traces."""
    with torch._C.DisableTorchFunctionSubclass():
        return op(*args)


def _linear_by_op(op: Callable[..., Tensor], x: Tensor, packed: Tensor, absmax: Tensor, *args: Any) -> Tensor:
    absmax_map, absmax2, offset, bias, *rest = args
    bias = ops.empty(absmax.device) if bias is None else bias
    return _by_op(op, x, packed, absmax, absmax_map, absmax2, offset, bias, *rest)


def _int8_by_op(op: Callable[..., Tensor], x: Tensor, packed: Tensor, absmax: Tensor, *args: Any) -> Tensor:
    bias, *rest = args
    return _by_op(op, x, packed, absmax, ops.empty(absmax.device) if bias is None else bias, *rest)


grouped.register()
# An overload's `_op` is what it calls, without a Python frame around it; Dynamo traces the overload only.
_C.fall_back(
    (
        partial(_linear_by_op, ops.linear_4bit._op),
        partial(_by_op, ops.linear_4bit_dgrad._op),
        partial(_by_op, ops.dequantize_4bit._op),
        partial(_int8_by_op, ops.linear_int8._op),
        partial(_by_op, ops.linear_int8_dgrad._op),
    )
)
_in_graph = (
    partial(_linear_by_op, ops.linear_4bit),
    partial(_by_op, ops.linear_4bit_dgrad),
    partial(_by_op, ops.dequantize_4bit),
)


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
    FOUR_BIT.check(quant_type, blocksize)
    check_storage(quant_storage)
    check_values(A, "4-bit quantization")
    packed, scales = ops.quantize_4bit(A, blocksize, ops.FORMATS[quant_type], quant_storage)
    state = QuantState(
        absmax=scales,
        shape=A.shape,
        blocksize=blocksize,
        quant_type=quant_type,
        dtype=A.dtype,
    )
    state.share(quant_type)
    if compress_statistics:
        nest(state)
    state.absmax = into(absmax, state.absmax, "absmax")
    return into(out, packed, "out"), state


def quantize_experts_4bit(
    A: Tensor,
    blocksize: int | None = None,
    compress_statistics: bool = False,
    quant_type: str = "fp4",
    quant_storage: torch.dtype = torch.uint8,
) -> tuple[Tensor, QuantState]:
    """Quantize a stack of expert weights [E, N, K], each as `quantize_4bit` quantizes it alone, nested scales included.

    Returns:
        packed codes [E N K / 2 / itemsize, 1] of quant_storage, and the QuantState, whose kind is `kinds.EXPERTS`.

    ValueError unless A has three dimensions, none of them 0, and N K is a multiple of the blocksize.
    """
    blocksize = 64 if blocksize is None else blocksize
    if A.dim() != 3 or A.numel() == 0 or A.shape[1:].numel() % blocksize:
        raise ValueError(
            f"a stack of expert weights has shape [E, N, K] with N K a multiple of the blocksize {blocksize}, "
            f"got {list(A.shape)}"
        )
    packed, state = quantize_4bit(A, None, None, blocksize, False, quant_type, quant_storage)
    state.kind = EXPERTS
    if compress_statistics:
        nest(state)
    return packed, state


def nest(state: QuantState) -> None:
    """Quantize the scales of a 4-bit state to 8 bits: absmax - mean, dynamic map, blocks of 256; of a stack by expert.

    Offset [E] and second-level scales [E ceil(n / 256)] are those of a stack whose experts have n scales each.
    """
    code = table("dynamic", state.absmax.device)
    if not state.kind.stacked:
        offset = mean(state.absmax)
        state.absmax, absmax2 = ops.quantize_blockwise(state.absmax, code, offset, NESTED_BLOCKSIZE)
    else:
        rows = state.absmax.view(state.kind.parts(state), -1)
        means = [mean(row) for row in rows]
        made = [ops.quantize_blockwise(row, code, of, NESTED_BLOCKSIZE) for row, of in zip(rows, means, strict=True)]
        state.absmax, absmax2 = (torch.cat(each) for each in zip(*made, strict=True))
        offset = torch.stack(means)
    set_nested(state, state.absmax, absmax2, offset)


def set_nested(state: QuantState, codes: Tensor, absmax2: Tensor, offset: Tensor) -> None:
    """Give a 4-bit state nested scales: uint8 codes of the dynamic map, float32 second-level scales and offset."""
    state.absmax, state.offset = codes, offset
    state.state2 = QuantState(absmax=absmax2, blocksize=NESTED_BLOCKSIZE, dtype=torch.float32)
    state.state2.share("dynamic")
    state.nested = True


def expert_of(packed: Tensor, state: QuantState, expert: int) -> tuple[Tensor, QuantState]:
    """One expert of a stack as a weight of its own: packed codes uint8 [N K / 2, 1] and state, views of the stack's.

    Args:
        packed, state: of `quantize_experts_4bit`, whole.
    """
    experts, N, K = state.shape
    n_bytes, blocks = N * K // 2, N * K // state.blocksize
    codes = packed.reshape(-1).view(torch.uint8)[expert * n_bytes : (expert + 1) * n_bytes].view(-1, 1)
    own = QuantState(
        state.absmax[expert * blocks : (expert + 1) * blocks], torch.Size((N, K)), None, state.blocksize,
        state.quant_type, state.dtype,
    )  # fmt: skip
    own.share(state.quant_type)
    own.kind = kind_of(state.quant_type)
    if state.nested:
        own.nested, own.offset, own.state2 = True, state.offset[expert], state.state2.clone()
        own.state2.absmax = state.state2.absmax.view(experts, -1)[expert]
    return codes, own


def plain_scales(state: QuantState) -> Tensor:
    """The scales of a 4-bit state as float32 [n_blocks]: nested ones dequantized."""
    if not state.nested:
        return state.absmax
    if not state.kind.nests:
        return microscaled.plain_scales(state)
    absmax, code, absmax2, offset = state.scales()
    parts = state.kind.parts(state)
    rows = zip(absmax.view(parts, -1), absmax2.view(parts, -1), offset.view(parts), strict=True)
    made = [ops.dequantize_blockwise(row, row2, code, of, NESTED_BLOCKSIZE, torch.float32) for row, row2, of in rows]
    return torch.cat(made)


def with_plain_scales(state: QuantState) -> QuantState:
    """A copy of a 4-bit state whose scales are float32; the state itself where they are."""
    if not state.nested:
        return state
    copy = state.clone()
    copy.absmax, copy.offset, copy.state2, copy.nested = plain_scales(state), None, None, False
    return copy


def quantize_fp4(A, absmax=None, out=None, blocksize=None, compress_statistics=False, quant_storage=torch.uint8):
    """`quantize_4bit` with quant_type="fp4"."""
    return quantize_4bit(A, absmax, out, blocksize, compress_statistics, "fp4", quant_storage)


def quantize_nf4(A, absmax=None, out=None, blocksize=None, compress_statistics=False, quant_storage=torch.uint8):
    """`quantize_4bit` with quant_type="nf4"."""
    return quantize_4bit(A, absmax, out, blocksize, compress_statistics, "nf4", quant_storage)


def quantize_mxfp4(A: Tensor, quant_storage: torch.dtype = torch.uint8) -> tuple[Tensor, QuantState]:
    """Quantize to MXFP4 (blocks of 32, scales powers of two): `functions.microscaled.quantize`."""
    return microscaled.quantize(MXFP4, A, quant_storage)


def quantize_nvfp4(A: Tensor, quant_storage: torch.dtype = torch.uint8) -> tuple[Tensor, QuantState]:
    """Quantize to NVFP4 (blocks of 16, scales E4M3, one float32 for all): `functions.microscaled.quantize`."""
    return microscaled.quantize(NVFP4, A, quant_storage)


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
        tensor of quant_state.shape and quant_state.dtype; a replicated DTensor where A is a shard (FSDP2). Of a shard,
        and of a weight that was loaded in parts, this is a collective of all ranks.
    """
    if type(A) is not Tensor and gather.is_dtensor(A):
        packed, whole_state = gather.gathered(A, quant_state)
        return gather.replicated(dequantize_4bit(packed, whole_state), A.device_mesh)
    if quant_state is not None and quant_state.part is not None:
        return dequantize_4bit(*quant_state.part.gathered())
    if quant_state is None:
        if absmax is None or out is None:
            raise ValueError("dequantize_4bit requires both absmax and out when quant_state is not provided")
        blocksize = 64 if blocksize is None else blocksize
        quant_state = QuantState(absmax, out.shape, None, blocksize, quant_type, out.dtype)
    return quant_state.kind.dequantize(A, quant_state, out)


def dequantize_fp4(A, quant_state=None, absmax=None, out=None, blocksize=None):
    """`dequantize_4bit` with quant_type="fp4"."""
    return dequantize_4bit(A, quant_state, absmax, out, blocksize, "fp4")


def dequantize_nf4(A, quant_state=None, absmax=None, out=None, blocksize=None):
    """`dequantize_4bit` with quant_type="nf4"."""
    return dequantize_4bit(A, quant_state, absmax, out, blocksize, "nf4")


def linear_4bit(x: Tensor, packed: Tensor, state: QuantState, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + bias with W [N, K] in 4 bits; no gradient (autograd.py has it).

    Args:
        x: float32, float16 or bfloat16 [..., K].
        packed: packed codes of W, any storage dtype, [n, 1], [1, n] or [n].
        bias: [N] of the dtype of x.

    Returns:
        [..., N] of the dtype of x.
    """
    try:
        absmax, absmax_map, absmax2, offset = state.scales()
        if absmax.dtype is torch.bfloat16 and state.reordered:
            return linear_4bit(x, *reordered.restored(packed, state), bias)
        N, K = state.shape
        blocksize, format = state.blocksize, ops.CODES[state.quant_type]
        call = _in_graph[0] if torch.compiler.is_dynamo_compiling() else _C.linear_4bit
        return call(x, packed, absmax, absmax_map, absmax2, offset, bias, blocksize, format, N, K)
    except (RuntimeError, TypeError, KeyError, AttributeError) as error:
        explain_linear(error, x, packed, state, bias)


def linear_4bit_dgrad(dy: Tensor, packed: Tensor, state: QuantState) -> Tensor:
    """dx = dy W for the weight of `linear_4bit`: dy [..., N] -> [..., K], dtype of dy."""
    absmax, absmax_map, absmax2, offset = state.scales()
    if absmax.dtype is torch.bfloat16 and state.reordered:
        return linear_4bit_dgrad(dy, *reordered.restored(packed, state))
    N, K = state.shape
    blocksize, format = state.blocksize, ops.CODES[state.quant_type]
    call = _in_graph[1] if torch.compiler.is_dynamo_compiling() else _C.linear_4bit_dgrad
    return call(dy, packed, absmax, absmax_map, absmax2, offset, blocksize, format, N, K)


def linear_4bit_int8(x: Tensor, packed: Tensor, state: QuantState, bias: Tensor | None = None) -> Tensor:
    """`linear_4bit` in 8-bit arithmetic: x as int8 by rows and 64 columns, the 16 values of W as int8.

    Off by about 0.01 in y, a tenth of what 4 bits lose (docs/numerics.md). No gradient.

    Args and Returns: of `linear_4bit`. ValueError unless W is NF4 or FP4, and K and the blocksize are multiples of 64.
    """
    K, blocksize = state.shape[-1], state.blocksize
    if state.kind.stacked or state.quant_type not in FOUR_BIT.quant_types or K == 0 or K % 64 or blocksize % 64:
        raise ValueError(
            f"linear_4bit_int8: a {state.quant_type} weight of {K} columns in blocks of {blocksize}; it takes one of "
            "NF4 or FP4 with multiples of 64: use linear_4bit"
        )
    try:
        given = (*state.scales(), ops.empty(x.device) if bias is None else bias)
        return ops.linear_4bit_int8(x, packed, *given, blocksize, ops.CODES[state.quant_type], *state.shape)
    except (RuntimeError, TypeError) as error:
        explain_linear(error, x, packed, state, bias)


def grouped_linear_4bit(
    x: Tensor, offs: Tensor, packed: Tensor, state: QuantState, bias: Tensor | None = None
) -> Tensor:
    """y = x W_e^T + bias[e] of a stack W [E, N, K] in 4 bits, a row by its expert e; no gradient (autograd.py has it).

    Args:
        x: float32, float16 or bfloat16 [S, K], sorted by expert.
        offs: int32 [E], ascending, on the device of x: the rows of expert e are offs[e - 1] to offs[e]. Rows from
            offs[E - 1] on belong to no expert; y is zero there.
        packed, state: of `quantize_experts_4bit`.
        bias: [E, N] of the dtype of x.

    Returns:
        [S, N] of the dtype of x. On the CPU an expert's rows have the bits of `linear_4bit` of these rows.

    RuntimeError on the CPU where offs descend or end beyond S. CUDA clamps them, for it cannot know without waiting.
    """
    return _grouped(ops.grouped_linear_4bit, "x", x, offs, packed, state, bias)


def grouped_linear_4bit_dgrad(dy: Tensor, offs: Tensor, packed: Tensor, state: QuantState) -> Tensor:
    """dx = dy W_e of the rows and stack of `grouped_linear_4bit`: dy [S, N] -> [S, K], dtype of dy."""
    return _grouped(ops.grouped_linear_4bit_dgrad, "dy", dy, offs, packed, state)


def _grouped(op: Any, name: str, x: Tensor, offs: Tensor, packed: Tensor, state: QuantState, *bias: Any) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        if not torch.compiler.is_dynamo_compiling():
            _check_grouped(name, x, offs, packed, state, *bias)
        given = [ops.empty(x.device) if b is None else b for b in bias]
        E, N, K = state.shape
        numbers = (state.blocksize, ops.CODES[state.quant_type], N, K)
        if x.is_cuda and grouped.unseen(x):
            op = grouped.KERNELS[op]
        return op(x, offs, packed, *state.scales(), *given, *numbers)


def _check_grouped(
    name: str, x: Tensor, offs: Tensor, packed: Tensor, state: QuantState, bias: Tensor | None = None
) -> None:
    """TypeError or ValueError, with the numbers, unless the arguments of a grouped product fit."""
    if not state.kind.stacked:
        raise ValueError(f"grouped_linear_4bit: the state is of one weight {list(state.shape)}, not of a stack")
    (E, N, K), what = state.shape, f"grouped_linear_4bit: {name}"
    width = K if name == "x" else N
    check_dense(x, what)
    if x.dtype not in VALUE_DTYPES.values():
        raise TypeError(f"{what} is {x.dtype}, expected float32, float16 or bfloat16")
    if x.dim() != 2 or x.shape[1] != width:
        raise ValueError(f"{what} has shape {list(x.shape)}, a stack of {[E, N, K]} needs [S, {width}]")
    if offs.dtype is not torch.int32 or offs.shape != (E,):
        raise ValueError(f"grouped_linear_4bit: offs is {offs.dtype} {list(offs.shape)}, expected int32 [{E}]")
    for other, tensor in (("offs", offs), ("the stack", packed), ("bias", x if bias is None else bias)):
        if tensor.device != x.device:
            raise ValueError(f"{what} is on {x.device}, {other} on {tensor.device}")
    check_packed(packed, state, "grouped_linear_4bit")
    if bias is not None and (bias.dtype is not x.dtype or bias.shape != (E, N)):
        raise ValueError(
            f"{what} is {x.dtype}, bias is {bias.dtype} {list(bias.shape)}: expected [{E}, {N}] of its dtype"
        )


# ---- what the kinds compute ----


def _values(A: Tensor, state: QuantState, out: Tensor | None = None) -> Tensor:
    """The numbers of a whole 4-bit tensor; transposed for a row vector [1, n] of codes."""
    shape = state.shape
    try:
        rows, columns = shape if len(shape) == 2 else (math.prod(shape[:-1]), shape[-1] if shape else 1)
        absmax, absmax_map, absmax2, offset = state.scales()
        blocksize, format = state.blocksize, ops.CODES[state.quant_type]
        call = _C.dequantize_4bit
        if torch.compiler.is_dynamo_compiling():
            call = _in_graph[2]
            if state.reordered:
                return _values(*reordered.restored(A, state), out)
        values = call(A, absmax, absmax_map, absmax2, offset, blocksize, format, rows, columns, state.dtype)
    except (RuntimeError, TypeError, KeyError) as error:
        if state.reordered:  # the op knows no scales of bfloat16
            return _values(*reordered.restored(A, state), out)
        check_packed(A, state, "dequantize_4bit")
        if state.dtype not in VALUE_DTYPES.values():
            raise ValueError(f"4-bit dequantization only gives 16/32-bit floats, not {state.dtype}") from error
        raise
    if len(shape) != 2:
        values = values.view(shape)
    if out is not None:
        values = into(out, values, "out")
    row = A.dim() == 2 and A.size(0) == 1 and A.size(1) > 1
    return values.t() if row and len(shape) == 2 else values


def _stack_values(A: Tensor, state: QuantState, out: Tensor | None = None) -> Tensor:
    return _values(A, with_plain_scales(state), out)


def _int8_values(A: Tensor, state: QuantState, out: Tensor | None = None) -> Tensor:
    check_packed(A, state, "dequantize_4bit")
    return into(out, int8.dequantize(A, state.absmax, *state.shape, state.dtype), "out")


def _product(x: Tensor, packed: Tensor, state: QuantState, bias: Tensor | None, offs: None, threshold: float) -> Tensor:
    if state.in_int8 is not None and not torch.compiler.is_dynamo_compiling():
        return state.in_int8(x, packed, state, bias)
    return linear_4bit(x, packed, state, bias)


def _gradient(dy: Tensor, packed: Tensor, state: QuantState, offs: None) -> Tensor:
    return linear_4bit_dgrad(dy, packed, state)


def _stack_product(
    x: Tensor, packed: Tensor, state: QuantState, bias: Tensor | None, offs: Tensor, threshold: float
) -> Tensor:
    return grouped_linear_4bit(x, offs, packed, state, bias)


def _stack_gradient(dy: Tensor, packed: Tensor, state: QuantState, offs: Tensor) -> Tensor:
    return grouped_linear_4bit_dgrad(dy, offs, packed, state)


def _int8_product(x: Tensor, packed: Tensor, state: Any, bias: Tensor | None, offs: None, threshold: float) -> Tensor:
    if bias is not None and bias.dtype is not x.dtype:
        bias = bias.to(x.dtype)
    return int8.linear(x, packed, state.absmax, *state.shape, bias, threshold)


def _int8_gradient(dy: Tensor, packed: Tensor, state: Any, offs: None) -> Tensor:
    return int8.linear_dgrad(dy, packed, state.absmax, *state.shape)


for _one in (FOUR_BIT, MXFP4, NVFP4):
    _one.product, _one.gradient, _one.dequantize = _product, _gradient, _values
    _one.stack.product, _one.stack.gradient, _one.stack.dequantize = _stack_product, _stack_gradient, _stack_values
INT8.product, INT8.gradient = _int8_product, _int8_gradient
INT8.dequantize = _int8_values
FOUR_BIT.quantize = lambda values, **settings: quantize_4bit(values, **settings)
EXPERTS.quantize = lambda values, **settings: quantize_experts_4bit(values, **settings)
INT8.quantize = lambda values, **settings: _int8_column(values, settings["quant_storage"])


def _int8_column(values: Tensor, storage: torch.dtype) -> tuple[Tensor, QuantState]:
    """Codes of a weight [N, K] as a column of `storage`, and their state."""
    codes, scales, _ = int8.quantize(values)
    state = int8_state(scales, values.shape, values.dtype)
    return repack(codes.view(-1, 1), storage, state), state


def explain_linear(error: Exception, x: Tensor, packed: Tensor, state: QuantState, bias: Tensor | None) -> NoReturn:
    """Raise an error that says what is wrong with arguments of `linear_4bit` that the op has refused with `error`."""
    check_dense(x, "linear_4bit: x")
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
