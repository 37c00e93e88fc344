"""Quantization functions and the quantization state."""

import ctypes

import torch
from bitshard.functional import (
    QuantState,
    create_dynamic_map,
    create_fp8_map,
    create_linear_map,
    create_normal_map,
    dequantize_4bit,
    dequantize_blockwise,
    dequantize_fp4,
    dequantize_nf4,
    gemv_4bit,
    get_4bit_type,
    pack_dict_to_tensor,
    quantize_4bit,
    quantize_blockwise,
    quantize_fp4,
    quantize_nf4,
    unpack_tensor_to_dict,
)

from ._absent import absent_function
from .cextension import lib

ABSENT = (
    "batched_igemm",
    "check_matmul",
    "get_paged",
    "igemm",
    "int8_double_quant",
    "int8_linear_matmul",
    "int8_mm_dequant",
    "int8_vectorwise_dequant",
    "int8_vectorwise_quant",
    "optimizer_update_32bit",
    "optimizer_update_8bit_blockwise",
    "prefetch_tensor",
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
    "get_ptr",
    "has_avx512bf16",
    "lib",
    "pack_dict_to_tensor",
    "quantize_4bit",
    "quantize_blockwise",
    "quantize_fp4",
    "quantize_nf4",
    "unpack_tensor_to_dict",
    *ABSENT,
]

globals().update({name: absent_function(__name__, name) for name in ABSENT})


def get_ptr(A: torch.Tensor | None) -> ctypes.c_void_p | None:
    """Address of a tensor's first element, None for None."""
    return None if A is None else ctypes.c_void_p(A.data_ptr())


def has_avx512bf16() -> bool:
    """Whether this processor multiplies bfloat16 with AVX-512."""
    return torch.cpu._is_avx512_bf16_supported()


def _convert_weight_packed_for_cpu(
    qweight: torch.Tensor, quant_state: QuantState, block_n: int = 32
) -> tuple[torch.Tensor, QuantState]:
    """Both as they are: packed weights have one layout on every processor."""
    return qweight, quant_state


def _convert_weight_packed_for_cpu_inverse(
    packed_weight: torch.Tensor, quant_state: QuantState, block_n: int = 32
) -> tuple[torch.Tensor, QuantState]:
    """Both as they are: packed weights have one layout on every processor."""
    return packed_weight, quant_state
