"""The native library: C functions under bitsandbytes' names, called with addresses. They live in `bitshard._C`."""

import ctypes as ct
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from bitshard import _C
from bitshard.ops import FORMATS

from ._absent import Absent, absent_function
from .consts import DYNAMIC_LIBRARY_SUFFIX, PACKAGE_DIR
from .cuda_specs import CUDASpecs, get_cuda_specs, get_cuda_version_tuple, get_rocm_gpu_arch

__all__ = [
    "BNB_BACKEND",
    "HIP_ENVIRONMENT",
    "ROCM_GPU_ARCH",
    "ROCM_WARP_SIZE_64",
    "BNBNativeLibrary",
    "CudaBNBNativeLibrary",
    "get_native_library",
    "lib",
]

BNB_BACKEND = "CUDA" if torch.cuda.is_available() else "CPU"
HIP_ENVIRONMENT = False
ROCM_GPU_ARCH = get_rocm_gpu_arch()
ROCM_WARP_SIZE_64 = False

_DTYPES = ("fp32", "fp16", "bf16")
_FORMATS = ("", *(f"_{name}" for name in FORMATS))  # "" is of 8 bits
_POINTER, _INT = ct.c_void_p, ct.c_int32

# Arguments of the CUDA functions, and what those of them return that do. csrc/native/cuda.c says what each of them is.
_CUDA_ARGTYPES: dict[str, list[Any]] = {
    # code, A, absmax, out, blocksize, n
    **{f"cquantize_blockwise_{d}{f}": [_POINTER] * 4 + [_INT] * 2 for d in _DTYPES for f in _FORMATS},
    # code, A, absmax, out, blocksize, n, stream
    **{f"cdequantize_blockwise_{d}{f}": [_POINTER] * 4 + [_INT] * 2 + [_POINTER] for d in _DTYPES for f in _FORMATS},
    # A, B, absmax, absmax_8bit, absmax_code, absmax_offset, out, bias, M, N, K, blocksize, quant_type, stream
    **{f"cgemm_4bit_{d}": [_POINTER] * 8 + [_INT] * 5 + [_POINTER] for d in _DTYPES},
    # m, n, k, A, B, absmax, datatype, out, lda, ldb, ldc, blocksize, stream
    **{f"cgemm_4bit_inference_naive_{d}": [_INT] * 3 + [_POINTER] * 5 + [_INT] * 4 + [_POINTER] for d in _DTYPES},
    # A, out, rowStats, threshold, rows, cols, stream
    "cint8_vector_quant": [_POINTER] * 3 + [ct.c_float] + [_INT] * 2 + [_POINTER],
    # A, rowStats, colStats, out, bias, numRows, numCols, stream
    "cdequant_mm_int32_fp16": [_POINTER] * 5 + [_INT] * 2 + [_POINTER],
    # ctx, m, n, k, A, B, C, rowStats, lda, ldb, ldc, stream
    "cigemmlt_32": [_POINTER] + [_INT] * 3 + [_POINTER] * 4 + [_INT] * 3 + [_POINTER],
    "get_context": [],
}
_RESULTS: dict[str, Any] = {"cigemmlt_32": _INT, "get_context": _POINTER}

# The CPU functions have no argtypes, as in bitsandbytes: pass ctypes objects of the right width.
_CPU_FUNCTIONS = (
    *(f"c{way}quantize_blockwise_cpu_{d}" for way in ("", "de") for d in _DTYPES),
    *(f"cdequantize_blockwise_cpu_{f}_{d}" for f in FORMATS for d in _DTYPES),
)


def _cpu_only(name: str) -> Callable[..., NoReturn]:
    def function(*args: Any, **kwargs: Any) -> NoReturn:
        why = "torch sees no GPU" if _C.cuda_state()["built"] else _C.cuda_state()["error"]
        raise RuntimeError(f"bitsandbytes.cextension.lib.{name} needs CUDA: {why}")

    function.__name__ = function.__qualname__ = name
    return function


class BNBNativeLibrary:
    """The C functions as attributes or items: `lib.name`, `lib["name"]`.

    Every name has an answer, so that programs can look functions up before they know whether they need them. What is
    there is a ctypes function. What needs a GPU where there is none raises RuntimeError when it is called, anything
    else NotImplementedError. A ctypes function that could not compute raises RuntimeError with the numbers and leaves
    its output as it was.
    """

    compiled_with_cuda = False

    def __init__(self, lib: ct.CDLL):
        lib.bsh_native_last_error.argtypes = []
        lib.bsh_native_last_error.restype = ct.c_char_p
        self._lib = lib
        for name in _CPU_FUNCTIONS:
            getattr(lib, name).errcheck = self._check

    def _check(self, result: Any, function: Any, arguments: tuple) -> Any:
        error = self._lib.bsh_native_last_error()
        if error:
            raise RuntimeError(error.decode())
        return result

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__") or name == "_lib":
            raise AttributeError(name)
        if name in _CUDA_ARGTYPES and not self.compiled_with_cuda:
            function = _cpu_only(name)
        else:
            function = getattr(self._lib, name, None) or absent_function("bitsandbytes.cextension.lib", name)
        setattr(self, name, function)
        return function

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return getattr(self, name)


class CudaBNBNativeLibrary(BNBNativeLibrary):
    """The same with the CUDA functions, which work on the device where their output lies."""

    compiled_with_cuda = True

    def __init__(self, lib: ct.CDLL):
        super().__init__(lib)
        for name, argtypes in _CUDA_ARGTYPES.items():
            function = getattr(lib, name)
            function.argtypes, function.restype = argtypes, _RESULTS.get(name)
            function.errcheck = self._check


def get_native_library() -> BNBNativeLibrary:
    """The library of this build of bitshard; with the CUDA functions where torch sees a GPU and the build has them."""
    library = ct.CDLL(_C.__file__)
    with_cuda = torch.cuda.is_available() and hasattr(library, "cdequantize_blockwise_fp32")
    return CudaBNBNativeLibrary(library) if with_cuda else BNBNativeLibrary(library)


lib = get_native_library()


# ---- the rest of the module's names: which library serves which version of CUDA ----

__all__ += [
    "CUDASpecs",
    "DYNAMIC_LIBRARY_SUFFIX",
    "ErrorHandlerMockBNBNativeLibrary",
    "PACKAGE_DIR",
    "XpuBNBNativeLibrary",
    "get_available_cuda_binary_versions",
    "get_cuda_bnb_library_path",
    "get_cuda_specs",
    "get_cuda_version_tuple",
    "get_rocm_gpu_arch",
    "get_xpu_bnb_library_path",
    "logger",
    "parse_cuda_version",
]

logger = logging.getLogger(__name__)


class XpuBNBNativeLibrary(Absent, BNBNativeLibrary):
    """Native library for Intel GPUs."""


class ErrorHandlerMockBNBNativeLibrary(Absent, BNBNativeLibrary):
    """Type of `lib` where the native library cannot be loaded; bitshard cannot be imported then."""


def get_cuda_bnb_library_path(cuda_specs: CUDASpecs) -> Path:
    """bitshard's C core, which serves every version of CUDA; a file that does not exist where it has no kernels.

    BNB_CUDA_VERSION, by which upstream is told another version, chooses nothing; RuntimeError where it is no number.
    """
    override = os.environ.get("BNB_CUDA_VERSION", "0")
    if not override.isdigit():
        raise RuntimeError(f"BNB_CUDA_VERSION={override!r}: expected digits only, as in 124 for CUDA 12.4")
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
