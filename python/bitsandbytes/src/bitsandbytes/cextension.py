"""What callers ask of the native library. bitshard's is `bitshard._C`; it exports no ctypes symbols."""

from collections.abc import Callable
from typing import NoReturn

import torch

from ._absent import absent_function

__all__ = ["BNB_BACKEND", "HIP_ENVIRONMENT", "ROCM_GPU_ARCH", "ROCM_WARP_SIZE_64", "NativeLibrary", "lib"]

BNB_BACKEND = "CUDA" if torch.cuda.is_available() else "CPU"
HIP_ENVIRONMENT = False
ROCM_GPU_ARCH = "unknown"
ROCM_WARP_SIZE_64 = False


class NativeLibrary:
    """Answers every symbol name with a function that raises NotImplementedError when it is called."""

    compiled_with_cuda = False

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent_function("bitsandbytes.cextension.lib", name)


lib = NativeLibrary()
