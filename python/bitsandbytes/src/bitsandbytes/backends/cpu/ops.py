"""Names that upstream's kernels for the CPU use. bitshard's are in its C core."""

import logging

from ..._ops import register_kernel
from ...cextension import ErrorHandlerMockBNBNativeLibrary, lib
from ...functional import get_ptr, has_avx512bf16

__all__ = [
    "ErrorHandlerMockBNBNativeLibrary",
    "gemm_4bit_forward_kernel",
    "get_ptr",
    "has_avx512bf16",
    "lib",
    "logger",
    "register_kernel",
]

logger = logging.getLogger(__name__)
gemm_4bit_forward_kernel = None  # upstream puts a function here where the package `kernels` gives it one
