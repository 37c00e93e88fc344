"""The C core: importing it registers torch.ops.bitshard.*; torch must be imported first."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

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
    """float32 bytes of the tables "nf4" (16), "fp4" (16), "e2m1" (16), "e2m1_borders" (7) or "dynamic" (256)."""

def isa() -> str:
    """Instruction set of the CPU kernels in use: "scalar", "avx2", "avx512" or "neon"."""

def isas() -> tuple[str, ...]:
    """Instruction sets usable on this CPU, worst first."""

def set_isa(name: str, /) -> None:
    """Use the CPU kernels of another instruction set of `isas()`; ValueError for any other name."""

def cuda_state() -> dict[str, bool | int | str]:
    """built (kernels are in this build), architectures, driver (version number, 0 if none), error (empty if none)."""

def kernel_image(architectures: str, sm: int, /) -> tuple[int, bool]:
    """Of a build for `architectures` ("80,90a,compute_80"), what a GPU `sm` loads: 10 * major + minor that it was
    compiled for (0: nothing loads), and whether it is code for this one GPU generation ("90a")."""

def plan_grouped_linear_4bit(
    E: int, M: int, N: int, K: int, dtype: int, sm: int, sms: int, /, **options: Any
) -> dict[str, Any]:
    """The same of a stack of E weights [N, K] and M rows in all; alignments are those of the whole stack.

    Kernels: gemv_4bit_grouped, gemm_4bit_sm90_wide_grouped, gemm_4bit_sm80_grouped, gemm_4bit_sm75_grouped and
    panels: panel_lines experts are dequantized at a time (python/bitshard/functions/grouped.py)."""

def plan_linear_4bit(
    M: int,
    N: int,
    K: int,
    dtype: int,
    sm: int,
    sms: int,
    /,
    *,
    blocksize: int = 64,
    nested: bool = True,
    format: int = 0,
    gradient: bool = False,
    x_alignment: int = 16,
    y_alignment: int = 16,
    packed_alignment: int = 16,
    code_alignment: int = 16,
    bias_alignment: int = 0,
    vendor: str = "torch",
    workspace: int = 67108864,
    kernel: str | None = None,
    architectures: str | None = None,
    tensor_maps: bool = True,
) -> dict[str, Any]:
    """How a GPU (sm: 10 * major + minor, sms: multiprocessors) computes y = x W^T + bias; `gradient`: dx = dy W.

    dtype: 0 float32, 1 float16, 2 bfloat16. format: 0 NF4, 1 FP4. Alignments: bytes, up to 16, that all rows of x (dy)
    and of y (dx), packed, the codes of nested scales and the bias (0: there is none) begin at multiples of. vendor: who
    multiplies panels, "torch" (the ops), "cublas" (calls around the dispatcher) or "" (nobody). workspace: bytes of a
    panel and, with cuBLAS, of its scratch memory, or of sums that gemm_4bit_sm90_wide shares between thread blocks.
    kernel: this one and no other. architectures: of another build than this ("80,90a,compute_80"). tensor_maps: the
    driver makes them.

    Keys: kernel ("gemv_4bit", "gemv_4bit_simt", "gemm_4bit_sm90", "gemm_4bit_sm90_wide" or "panels"); scratch_bytes (at
    any one time); vendor (whose product follows each panel, "" where fused); panel_lines (rows, for `gradient` columns,
    of W in a panel); panel (the launch that dequantizes a whole one, or None); vendor_bytes (of scratch_bytes, for
    cuBLAS); slices (of panels none), a list of dicts: rows (of x), times, scratch_bytes, launches (a list). A launch is
    a dict: entry, the name in the image; grid; block, in threads; cluster; shared_bytes, dynamic.

    ValueError, saying why, where nothing computes this or `kernel` cannot."""

def plan_linear_int8(M: int, N: int, K: int, dtype: int, sm: int, sms: int, /, **options: Any) -> dict[str, Any]:
    """The same with an int8 weight [N, K]; N and K may be 0. `outliers`: there is a threshold.

    Kernels: gemv_int8, any, mixed_int8_sm90, gemm_int8, gemm_int8_sm90, gemv_int8_dgrad, dgrad_int8_sm90 and panels,
    which are of the gradient. A slice has besides: codes (x is quantized before), capacity (outlier columns that are
    gathered), finds (the kernel finds them itself)."""

def card_rates(sm: int, /) -> dict[str, Any]:
    """What the plan takes a GPU of `sm` (10 major + minor) to do, counted from its data sheet or set.

    Of a multiprocessor: flops_per_ns_sm, the vendor's products; bytes_per_ns_sm, read; dequantized_per_ns_sm, moved by
    dequantizing. share: of these products that gemm_4bit_sm80 (on sm_75 gemm_4bit_sm75) reaches, forward and gradient,
    in tiles of 128 and 256 rows. l2: bytes that hold a panel. chosen: whether it and panels are compared by them."""

def set_card_rates(
    sm: int,
    flops_per_ns_sm: float = ...,
    bytes_per_ns_sm: float = ...,
    dequantized_per_ns_sm: float = ...,
    share: tuple[tuple[float, float], tuple[float, float]] = ...,
    l2: int = ...,
    /,
) -> None:
    """Compare kernels by these rates, all of them or none: none for the counted ones. ValueError unless they are above
    0. Not while other threads multiply."""

def force_kernel(op: str, name: str | None, /) -> None:
    """Every later product of op "linear_4bit", "grouped_linear_4bit", "linear_int8" or one of these with "_dgrad" on a
    GPU by the kernel of this name, as BITSHARD_LINEAR_4BIT, BITSHARD_GROUPED_LINEAR_4BIT_DGRAD and so on do from the
    start; None: by the plan's choice. A product that the kernel cannot take raises RuntimeError; ValueError for an
    op or a name that is none. For tests and benchmarks."""

def configure_direct(
    exchange: object,
    tensor: type,
    weights: tuple[type, ...],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    watchers: tuple[Callable[[], int], ...],
    settings: tuple[tuple[object, ...], tuple[object, ...], tuple[object, ...]],
    profiler: ModuleType,
    grad_enabled: Callable[[], bool],
    storage_address: Callable[[Tensor], int],
    storage_holds: Callable[[Tensor], bool],
    /,
) -> bool:
    """Let the functions below read tensors; whether this torch's exchange table can be used. dtypes: float32, float16,
    bfloat16; settings: for each of them callable, expected value, callable, expected value, ...; storage_address: 0 of
    a freed one; storage_holds: whether a tensor's storage holds all its elements."""

def fall_back(calls: tuple[Callable[..., Tensor], ...] | None, /) -> Any:
    """Who is called, with the same arguments, where linear_4bit, linear_4bit_dgrad, dequantize_4bit, linear_int8 and
    linear_int8_dgrad below (in this order) cannot go around the dispatcher; None: nobody, they return None, as tests
    want. What was set before."""

def doubt_storages() -> None:
    """A storage was made smaller, not empty: the functions below ask storage_holds of each tensor from now on."""

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
) -> Tensor:
    """The op of this name, around torch's dispatcher where that can be."""

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
) -> Tensor:
    """The op of this name, around torch's dispatcher where that can be."""

def linear_int8(
    x: Tensor, packed: Tensor, absmax: Tensor, bias: Tensor | None, threshold: float, N: int, K: int, /
) -> Tensor:
    """The op of this name, around torch's dispatcher where that can be."""

def linear_int8_dgrad(dy: Tensor, packed: Tensor, absmax: Tensor, N: int, K: int, /) -> Tensor:
    """The op of this name, around torch's dispatcher where that can be."""

def lora_4bit(
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
    A: Tensor,
    B: Tensor,
    scale: float,
    keep: Callable[[Tensor], object] | None = None,
    dropped: Tensor | None = None,
    /,
) -> tuple[Tensor, Tensor] | None:
    """(y = W x + bias + scale B (A x) [..., N], x A^T [M, r]) around torch's dispatcher, for contiguous tensors of one
    dtype and device, no gradient; None where it cannot: do it in Python. A: [r, K], B: [N, r], M: rows of x. keep is
    called with x A^T before the product with W; what it raises is raised. dropped, of the shape of x, is what A
    multiplies in its place."""

def lora_4bit_backward(
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
    x: Tensor | None,
    A: Tensor,
    B: Tensor,
    xa: Tensor | None,
    scale: float,
    needs_x: bool,
    apart: bool = False,
    /,
) -> tuple[Tensor | None, ...] | None:
    """The gradients (dx, dA, dB) of `lora_4bit` in the same way, for dy [..., N] and xa = x A^T. dx is None unless
    needs_x, dA where x is None, dB where xa is. apart: (dx, dA, dB, scale (dy B) A [M, K]) with dx = dy W; the last is
    None unless needs_x."""

def plain_modules(*modules: dict[str, object]) -> bool:
    """Of torch modules given by their __dict__: whether none has hooks, a forward of its own, or was compiled."""

def module_states(modules: list[dict[str, object]], /) -> bytes:
    """Of torch modules given by their __dict__: bytes that are equal while these are: modes, hooks, modules inside,
    numbers, truth values and texts among their attributes, parameters and buffers, the addresses of their values, and
    whether they want a gradient."""

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
) -> Tensor:
    """The op of this name, around torch's dispatcher where that can be."""

def optimizer_fits(batches: list[tuple[tuple, list[tuple]]], /) -> bool:
    """Whether a step of these could be done if their states, which are on the CPU, were where the parameters are."""

def optimizer_steps(batches: list[tuple[tuple, list[tuple]]], /) -> bool:
    """One step of many parameters around torch's dispatcher (csrc/python/optimizer_list.h); False: take the ops."""
