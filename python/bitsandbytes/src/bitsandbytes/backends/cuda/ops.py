"""Names that upstream's kernels for CUDA use; like there, an import needs a torch that was built with CUDA."""

import torch

from ..._ops import register_kernel
from ...cextension import lib
from ...functional import CUBLAS_Context, get_ptr

__all__ = ["CUBLAS_Context", "_dequantize_4bit_impl", "get_ptr", "lib", "register_kernel"]

_get_raw_stream = torch._C._cuda_getCurrentRawStream  # AttributeError without CUDA


def _dequantize_4bit_impl(
    A: torch.Tensor, absmax: torch.Tensor, blocksize: int, quant_type: str, dtype: torch.dtype, out: torch.Tensor
) -> None:
    """Write the values of packed A, of any storage dtype, to `out` of dtype `dtype` and any shape."""
    torch.ops.bitsandbytes.dequantize_4bit.out(A, absmax, blocksize, quant_type, out.shape, dtype, out=out)
