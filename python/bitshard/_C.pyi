"""The C core: importing it registers torch.ops.bitshard.*; torch must be imported first."""

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

version: str

def storage_elements(n: int, itemsize: int, /) -> int:
    """Whole storage elements of `itemsize` bytes that hold n 4-bit codes."""

def block_count(n: int, blocksize: int, /) -> int:
    """Blocks, and so scales, of n elements: ceil(n / blocksize)."""

def rank_slice(total: int, world: int, rank: int, /) -> tuple[int, int]:
    """(begin, length) of the chunk of ceil(total / world) elements a rank keeps; the last may be short or empty."""

def table(name: str, /) -> bytes:
    """float32 bytes of the tables "nf4" (16), "fp4" (16) or "dynamic" (256)."""

def isa() -> str:
    """Instruction set of the CPU kernels in use: "scalar", "avx2" or "avx512"."""

def isas() -> tuple[str, ...]:
    """Instruction sets usable on this CPU, worst first."""

def set_isa(name: str, /) -> None:
    """Use the CPU kernels of another instruction set of `isas()`; ValueError for any other name."""

def cuda_state() -> dict[str, bool | int | str]:
    """built (kernels are in this build), architectures, driver (version number, 0 if none), error (empty if none)."""

def kernel_image(architectures: str, sm: int, /) -> tuple[int, bool]:
    """Of a build for `architectures` ("80,90a,compute_80"), what a GPU `sm` loads: 10 * major + minor that it was
    compiled for (0: nothing loads), and whether it is code for this one GPU generation ("90a")."""

def select_linear_4bit(M: int, N: int, K: int, dtype: int, sm: int, sms: int, blocksize: int, nested: bool, /) -> str:
    """Name of the CUDA kernel that linear_4bit would run for these numbers; dtype 0 float32, 1 float16, 2 bfloat16."""

def configure_direct(
    exchange: object,
    tensor: type,
    weights: tuple[type, ...],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    watchers: tuple[Callable[[], int], ...],
    settings: tuple[tuple[object, ...], tuple[object, ...], tuple[object, ...]],
    profiler: ModuleType,
    grad_enabled: Callable[[], bool],
    /,
) -> bool:
    """Let the functions below read tensors; whether this torch's exchange table can be used. dtypes: float32, float16,
    bfloat16; settings: for each of them callable, expected value, callable, expected value, ..."""

def linear_4bit(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    absmax_map: Tensor,
    absmax2: Tensor,
    offset: Tensor,
    bias: Tensor | None,
    blocksize: int,
    format: int,
    N: int,
    K: int,
    /,
) -> Tensor | None:
    """The op of this name around torch's dispatcher; None where it cannot: take the op."""

def linear_4bit_dgrad(
    dy: Tensor,
    packed: Tensor,
    absmax: Tensor,
    absmax_map: Tensor,
    absmax2: Tensor,
    offset: Tensor,
    blocksize: int,
    format: int,
    N: int,
    K: int,
    /,
) -> Tensor | None:
    """The op of this name around torch's dispatcher; None where it cannot: take the op."""

def dequantize_4bit(
    packed: Tensor,
    absmax: Tensor,
    absmax_map: Tensor,
    absmax2: Tensor,
    offset: Tensor,
    blocksize: int,
    format: int,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    /,
) -> Tensor | None:
    """The op of this name around torch's dispatcher; None where it cannot: take the op."""

def optimizer_fits(batches: list[tuple[tuple, list[tuple]]], /) -> bool:
    """Whether a step of these could be done if their states, which are on the CPU, were where the parameters are."""

def optimizer_steps(batches: list[tuple[tuple, list[tuple]]], /) -> bool:
    """One step of many parameters around torch's dispatcher (csrc/optimizer_list.h); False: take the ops."""
