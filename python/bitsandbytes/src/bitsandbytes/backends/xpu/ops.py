"""No kernels: bitshard does not run on Intel GPUs."""

import logging

from ..._ops import register_kernel
from ...cextension import ErrorHandlerMockBNBNativeLibrary, lib
from ...functional import get_ptr
from ..utils import triton_available

__all__ = ["ErrorHandlerMockBNBNativeLibrary", "get_ptr", "lib", "logger", "register_kernel", "triton_available"]

logger = logging.getLogger(__name__)
