"""Quantization functions and the quantization state."""

import ctypes
from collections.abc import Iterable

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
from bitshard.functions import reordered
from bitshard.int8 import (
    batched_igemm,
    check_matmul,
    igemm,
    int8_double_quant,
    int8_linear_matmul,
    int8_mm_dequant,
    int8_vectorwise_dequant,
    int8_vectorwise_quant,
)
from bitshard.optim import paged, update
from bitshard.optim.paged import GlobalPageManager, elementwise_func, fill, prefetch_tensor
from bitshard.state import NESTED_BLOCKSIZE

from .cextension import lib

__all__ = [
    "C",
    "CUBLAS_Context",
    "FIRST_CUDA_DEVICE",
    "GlobalPageManager",
    "QuantState",
    "batched_igemm",
    "check_matmul",
    "create_dynamic_map",
    "create_fp8_map",
    "create_linear_map",
    "create_normal_map",
    "dequantize_4bit",
    "dequantize_blockwise",
    "dequantize_fp4",
    "dequantize_nf4",
    "elementwise_func",
    "fill",
    "gemv_4bit",
    "get_4bit_type",
    "get_paged",
    "get_ptr",
    "has_avx512bf16",
    "igemm",
    "int8_double_quant",
    "int8_linear_matmul",
    "int8_mm_dequant",
    "int8_vectorwise_dequant",
    "int8_vectorwise_quant",
    "is_on_gpu",
    "lib",
    "name2qmap",
    "optimizer_update_32bit",
    "optimizer_update_8bit_blockwise",
    "pack_dict_to_tensor",
    "prefetch_tensor",
    "quantize_4bit",
    "quantize_blockwise",
    "quantize_fp4",
    "quantize_nf4",
    "unpack_tensor_to_dict",
]

C = 127.0
FIRST_CUDA_DEVICE = torch.device("cuda", index=0)
name2qmap: dict[str, torch.Tensor] = {}


class CUBLAS_Context:
    """Upstream's handles of cuBLASLt by device. bitshard's C core has its own; an instance gives None for each."""

    _instance = None

    def __init__(self):
        raise RuntimeError("there is one instance: CUBLAS_Context.get_instance()")

    def initialize(self) -> None:
        """Forget the devices."""
        self.context: dict[int, None] = {}

    @classmethod
    def get_instance(cls) -> "CUBLAS_Context":
        """The one instance."""
        if cls._instance is None:
            cls._instance = cls.__new__(cls)
            cls._instance.initialize()
        return cls._instance

    def get_context(self, device: torch.device) -> None:
        """None: native functions take no handle here."""
        return self.context.setdefault(device.index, None)


def is_on_gpu(tensors: Iterable[torch.Tensor | None]) -> bool:
    """True; RuntimeError where the tensors are on several devices. None and paged tensors are passed over."""
    devices = {tensor.device for tensor in tensors if tensor is not None and not getattr(tensor, "is_paged", False)}
    if len(devices) > 1:
        raise RuntimeError(f"Input tensors need to be on the same device, got {sorted(map(str, devices))}")
    return True


def get_paged(
    *shape: int, dtype: torch.dtype = torch.float32, device: torch.device = FIRST_CUDA_DEVICE
) -> torch.Tensor:
    """Zeros on the host, pinned where there is a GPU; see `bitshard.optim.paged`."""
    return paged.get_paged(*shape, dtype=dtype, device=device)


def optimizer_update_32bit(
    optimizer_name: str,
    g: torch.Tensor,
    p: torch.Tensor,
    state1: torch.Tensor,
    beta1: float,
    eps: float,
    step: int,
    lr: float,
    state2: torch.Tensor | None = None,
    beta2: float = 0.0,
    beta3: float = 0.0,
    alpha: float = 0.0,
    weight_decay: float = 0.0,
    gnorm_scale: float = 1.0,
    unorm_vec: torch.Tensor | None = None,
    max_unorm: float = 0.0,
    skip_zeros: bool = False,
) -> None:
    """Update p [n] and its float32 state by the gradient g [n] in place; see `bitshard.optim.update`."""
    is_on_gpu([g, p, state1, state2, unorm_vec])
    p = p.detach()
    param_norm = float(torch.linalg.vector_norm(p, dtype=torch.float32)) if max_unorm > 0.0 else 0.0
    numbers = (lr, beta1, beta2, beta3, alpha, eps, weight_decay, step, gnorm_scale, skip_zeros)
    settings = update.Settings(update.algorithm(optimizer_name), *numbers)
    tensors = update.Tensors(g.detach(), p, state1, state2)
    update.update(settings, tensors, update.Bound(unorm_vec, max_unorm, param_norm))


def optimizer_update_8bit_blockwise(
    optimizer_name: str,
    g: torch.Tensor,
    p: torch.Tensor,
    state1: torch.Tensor,
    state2: torch.Tensor | None,
    beta1: float,
    beta2: float,
    beta3: float,
    alpha: float,
    eps: float,
    step: int,
    lr: float,
    qmap1: torch.Tensor,
    qmap2: torch.Tensor | None,
    absmax1: torch.Tensor,
    absmax2: torch.Tensor | None,
    weight_decay: float = 0.0,
    gnorm_scale: float = 1.0,
    skip_zeros: bool = False,
) -> None:
    """Update p [n] and its 8-bit state by the gradient g [n] in place; see `bitshard.optim.update`."""
    is_on_gpu([p, g, state1, state2, qmap1, qmap2, absmax1, absmax2])
    numbers = (lr, beta1, beta2, beta3, alpha, eps, weight_decay, step, gnorm_scale, skip_zeros)
    settings = update.Settings(update.algorithm(optimizer_name), *numbers)
    update.update(settings, update.Tensors(g.detach(), p.detach(), state1, state2, qmap1, qmap2, absmax1, absmax2))


def _cuda_device_of(a: torch.Tensor) -> torch.cuda.device_of:
    """Context in which the GPU of `a` is the current one."""
    return torch.cuda.device_of(a)


def _get_tensor_stream(tensor: torch.Tensor) -> ctypes.c_void_p:
    """torch's stream on the GPU of `tensor`, for tensors of the CPU on the current GPU."""
    index = tensor.device.index if tensor.device.type == "cuda" else torch.cuda.current_device()
    return ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(index))


def get_ptr(A: torch.Tensor | None) -> ctypes.c_void_p | None:
    """Address of a tensor's first element, None for None."""
    return None if A is None else ctypes.c_void_p(A.data_ptr())


def has_avx512bf16() -> bool:
    """Whether this processor multiplies bfloat16 with AVX-512."""
    return torch.cpu._is_avx512_bf16_supported()


def _convert_weight_packed_for_cpu(
    qweight: torch.Tensor, quant_state: QuantState, block_n: int = reordered.GROUP
) -> tuple[torch.Tensor, QuantState]:
    """The form that bitsandbytes' CPU build multiplies by: codes in groups of 32 rows (`bitshard.functions.reordered`).

    Packed codes of W [N, K] -> uint8 [N, K / 2]; the scales of `quant_state`, which is changed in place, become
    bfloat16 [K / blocksize, N], nested ones too. `gemv_4bit`, `matmul_4bit` and `dequantize_4bit` take the result.
    ValueError where 32 does not divide N, or the blocksize K, and for groups of another size.
    """
    N, K = quant_state.shape
    if block_n != reordered.GROUP or N % block_n or K % quant_state.blocksize:
        raise ValueError(
            f"[{N}, {K}] with blocksize {quant_state.blocksize} is not whole in groups of {block_n} rows, or that is "
            f"not {reordered.GROUP}, which alone is read"
        )
    scales = quant_state.absmax
    if quant_state.nested:
        scales = dequantize_blockwise(scales, quant_state.state2) + quant_state.offset
    quant_state.original_dtype, quant_state.original_nested = quant_state.dtype, quant_state.nested
    quant_state.original_storage_type, quant_state.original_qshape = qweight.dtype, qweight.shape
    quant_state.nested, quant_state.state2, quant_state.dtype = False, None, torch.bfloat16
    quant_state.absmax = scales.view(N, K // quant_state.blocksize).t().to(torch.bfloat16).contiguous()
    quant_state.packing_format_for_cpu = True
    return reordered.reorder_codes(qweight, N, K), quant_state


def _convert_weight_packed_for_cpu_inverse(
    packed_weight: torch.Tensor, quant_state: QuantState, block_n: int = reordered.GROUP
) -> tuple[torch.Tensor, QuantState]:
    """The codes of `_convert_weight_packed_for_cpu` as they were; scales stay rounded, nested ones are nested again.

    ValueError for a state that was not converted.
    """
    if not getattr(quant_state, "packing_format_for_cpu", False):
        raise ValueError("this weight is not in the form of _convert_weight_packed_for_cpu")
    N, K = quant_state.shape
    if block_n != reordered.GROUP:
        raise ValueError(f"groups of {block_n} rows: there are none but of {reordered.GROUP}")
    data, absmax = reordered.restore(packed_weight, quant_state.absmax, N, K, quant_state.blocksize)
    data = data.view(-1).view(quant_state.original_storage_type).reshape(quant_state.original_qshape)
    quant_state.absmax = absmax
    if quant_state.original_nested:
        quant_state.offset = quant_state.absmax.mean()
        scales = quant_state.absmax - quant_state.offset
        quant_state.absmax, quant_state.state2 = quantize_blockwise(scales, blocksize=NESTED_BLOCKSIZE)
        quant_state.nested = True
    quant_state.dtype, quant_state.packing_format_for_cpu = quant_state.original_dtype, False
    return data, quant_state
