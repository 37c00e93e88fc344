"""What callers ask of the native library. bitshard's is `bitshard._C`; it exports no ctypes symbols."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
from bitshard import _C

from ._absent import Absent, absent_function
from .consts import DYNAMIC_LIBRARY_SUFFIX, PACKAGE_DIR
from .cuda_specs import CUDASpecs, get_cuda_specs, get_cuda_version_tuple, get_rocm_gpu_arch

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


# ---- the rest of the module's names: which library serves which version of CUDA ----

__all__ += [
    "BNBNativeLibrary",
    "CUDASpecs",
    "CudaBNBNativeLibrary",
    "DYNAMIC_LIBRARY_SUFFIX",
    "ErrorHandlerMockBNBNativeLibrary",
    "PACKAGE_DIR",
    "XpuBNBNativeLibrary",
    "get_available_cuda_binary_versions",
    "get_cuda_bnb_library_path",
    "get_cuda_specs",
    "get_cuda_version_tuple",
    "get_native_library",
    "get_rocm_gpu_arch",
    "get_xpu_bnb_library_path",
    "logger",
    "parse_cuda_version",
]

logger = logging.getLogger(__name__)
BNBNativeLibrary = type(lib)


class CudaBNBNativeLibrary(Absent, BNBNativeLibrary):
    """Type of `lib` with a GPU, for `isinstance`; without one, of nothing."""


class XpuBNBNativeLibrary(Absent, BNBNativeLibrary):
    """Native library for Intel GPUs."""


class ErrorHandlerMockBNBNativeLibrary(Absent, BNBNativeLibrary):
    """Type of `lib` where the native library cannot be loaded; bitshard cannot be imported then."""


if torch.cuda.is_available():
    CudaBNBNativeLibrary = BNBNativeLibrary


def get_native_library() -> BNBNativeLibrary:
    """`lib`."""
    return lib


def get_cuda_bnb_library_path(cuda_specs: CUDASpecs) -> Path:
    """bitshard's C core, which serves every version of CUDA; a file that does not exist where it has no kernels."""
    if _C.cuda_state()["built"]:
        return Path(_C.__file__)
    return PACKAGE_DIR / f"libbitsandbytes_cuda{cuda_specs.cuda_version_string}{DYNAMIC_LIBRARY_SUFFIX}"


def get_xpu_bnb_library_path() -> Path:
    """A file that does not exist: bitshard has no kernels for Intel GPUs."""
    return PACKAGE_DIR / f"libbitsandbytes_xpu{DYNAMIC_LIBRARY_SUFFIX}"


def get_available_cuda_binary_versions() -> list[str]:
    """The version of torch's CUDA, as "12.4", where bitshard has kernels for it."""
    version = get_cuda_version_tuple()
    return [f"{version[0]}.{version[1]}"] if version and _C.cuda_state()["built"] else []


def parse_cuda_version(version_str: str) -> str:
    """A version with its dot, "12.4" for "124"; what is not digits comes back as it is."""
    if not version_str.isdigit() or len(version_str) < 3:
        return version_str
    return f"{int(version_str[:2])}.{int(version_str[2:])}"
