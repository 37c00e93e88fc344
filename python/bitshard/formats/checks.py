"""Checks of formats, packed weights, scales and results: a mistake of the caller is an exception with the numbers.

The ops (csrc/ops/ops.c) check again only what would corrupt memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitshard.formats.state import BLOCKSIZES_8BIT, STORAGE_DTYPES, VALUE_DTYPES, QuantState, dtype_name


def check_storage(quant_storage: torch.dtype) -> None:
    """TypeError unless packed codes can be held in `quant_storage`."""
    if quant_storage not in STORAGE_DTYPES:
        names = ", ".join(dtype_name(dtype) for dtype in STORAGE_DTYPES)
        raise TypeError(f"quant_storage is {quant_storage}, supported are {names}")


def check_packed(packed: Tensor, state: QuantState, where: str) -> None:
    """TypeError or ValueError unless `packed` has as many bytes, and `state` as many scales, as `state.shape` needs."""
    if not isinstance(state, QuantState):
        raise TypeError(f"{where}: expected a QuantState, got {type(state).__name__}")
    state.kind.check_state(packed, state, where)
    if packed.dtype not in STORAGE_DTYPES:
        raise TypeError(f"{where}: packed weight is {packed.dtype}, which is no storage dtype")
    expected = state.packed_elements(packed.element_size())
    if packed.numel() != expected:
        raise ValueError(
            f"{where}: packed weight has {packed.numel()} elements of {dtype_name(packed.dtype)}, but "
            f"{list(state.shape)} needs {expected}. Is it sharded, or was it cast to another dtype?"
        )
    check_there(packed, state, where)
    if state.absmax.numel() != state.scale_count:
        raise ValueError(
            f"{where}: absmax has {state.absmax.numel()} scales, but {list(state.shape)} with blocksize "
            f"{state.blocksize} needs {state.scale_count}"
        )
    if state.absmax.device != packed.device:
        raise ValueError(f"{where}: packed weight is on {packed.device}, its scales are on {state.absmax.device}")


def check_there(packed: Tensor, state: QuantState, where: str) -> None:
    """ValueError where FSDP1 has freed the memory of packed bytes."""
    missing = packed.numel() < state.packed_elements(packed.element_size())
    if torch._C._functorch.is_functorch_wrapped_tensor(packed):  # by jvp, of what has memory
        packed = torch._C._functorch.get_unwrapped(packed)
    if state.shape.numel() > 0 and (missing or packed.untyped_storage().nbytes() == 0):
        raise ValueError(
            f"{where}: FSDP1 has freed this packed weight of {list(state.shape)}, as it does after a module's forward, "
            "so it cannot be dequantized or merged here. Merge in one process with the saved adapter, load "
            "bitshard.fsdp.full_state_dict(model) into a model that is not sharded, or use FSDP2 (fsdp_version: 2)."
        )


def check_dense(x: Tensor, what: str) -> None:
    """TypeError for nested, sparse and opaque tensors, whose elements the ops cannot reach."""
    if x.is_nested:
        raise TypeError(
            f"{what} is a nested tensor: give its rows as one tensor (x.values() of layout torch.jagged) or padded "
            "(x.to_padded_tensor(0.0)), and nest the result"
        )
    if x.layout is not torch.strided:
        raise TypeError(f"{what} has layout {x.layout}: give it dense (x.to_dense())")


def check_values(x: Tensor, what: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{what} must be a tensor, got {type(x).__name__}")
    check_dense(x, f"what {what} was given")
    if x.dtype not in VALUE_DTYPES.values():
        raise ValueError(f"{what} only supports 16/32-bit floats, but got {x.dtype}")


def into(out: Tensor | None, values: Tensor, what: str) -> Tensor:
    """`values`, copied into `out` if given: TypeError or ValueError unless it has the dtype and shape of `values`."""
    if out is None:
        return values
    if out.dtype is not values.dtype:
        raise TypeError(f"{what} is {dtype_name(out.dtype)}, expected {dtype_name(values.dtype)}")
    if out.shape != values.shape:
        raise ValueError(f"{what} has shape {list(out.shape)}, expected {list(values.shape)}")
    return out.copy_(values)


def check_8bit(blocksize: int, code: Tensor) -> None:
    if blocksize <= 0:
        raise ValueError(f"blocksize must be positive, got {blocksize}")
    if blocksize not in BLOCKSIZES_8BIT:
        raise ValueError(f"invalid blocksize {blocksize}: expected one of {BLOCKSIZES_8BIT}")
    if code.numel() != 256:
        raise ValueError(f"code must have 256 values, got {code.numel()}")
