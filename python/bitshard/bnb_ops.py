"""bitsandbytes' ops for 4-bit, int8 and blockwise data and for optimizers, on top of bitshard's own.

The façade defines them; beside an installed upstream, which has defined them, `replace_kernels` exchanges its kernels.
Schemas are those of bitsandbytes 0.50.2: optional tensors, format names and n-dimensional shapes, where bitshard's own
ops take empty tensors, integers and rows x columns. No op here has a gradient; `bitsandbytes.matmul_4bit` has.
Shapes: packed weights [n, 1] of any storage dtype, `absmax` f32 [n_blocks], 8-bit codes in the shape of the data.
"""

import warnings
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch

from bitshard import _C
from bitshard.formats.state import BLOCKSIZES, VALUE_DTYPES
from bitshard.functions import int8, reordered
from bitshard.functions.functional import get_4bit_type
from bitshard.ops import FORMATS, block_count, storage_elements
from bitshard.optim.update import Bound, Settings, Tensors, algorithm, update


class Op(NamedTuple):
    """An op: its name and overload, arguments and results, one kernel for CPU and CUDA, and one for tracing."""

    name: str
    schema: str
    kernel: Callable
    fake: Callable


def _with_out(name: str, schema: str, kernel: Callable, fake: Callable) -> tuple[Op, Op]:
    """`name`, whose result is one tensor, and `name.out`, which writes that to a last argument `out`."""

    def write(*arguments) -> None:
        *inputs, out = arguments
        result = kernel(*inputs)
        _check_out(out, result)
        out.copy_(result)

    def fake_write(*arguments) -> None:
        *inputs, out = arguments
        _check_out(out, fake(*inputs))

    whole = Op(name, f"({schema}) -> Tensor", kernel, fake)
    return whole, Op(f"{name}.out", f"({schema}, Tensor! out) -> ()", write, fake_write)


def _format(quant_type: str) -> int:
    if quant_type not in FORMATS:
        raise ValueError(f"quant_type must be 'nf4' or 'fp4', got {quant_type!r}")
    return FORMATS[quant_type]


def _check_4bit(blocksize: int, dtype: torch.dtype) -> None:
    if blocksize not in BLOCKSIZES:
        raise ValueError(f"blocksize must be one of {BLOCKSIZES}, got {blocksize}")
    _check_float(dtype)


def _check_float(dtype: torch.dtype) -> None:
    if dtype not in VALUE_DTYPES.values():
        raise TypeError(f"dtype must be float32, float16 or bfloat16, got {dtype}")


def _check_out(out: torch.Tensor, result: torch.Tensor) -> None:
    shape, dtype, device = tuple(result.shape), result.dtype, result.device
    if tuple(out.shape) != shape or out.dtype != dtype or out.device != device:
        raise ValueError(f"out must be {dtype} {shape} on {device}, got {out.dtype} {tuple(out.shape)} on {out.device}")


def _rows_columns(shape: Sequence[int]) -> tuple[int, int]:
    return (prod(shape[:-1]), shape[-1]) if len(shape) > 0 else (1, 1)


def _n_k(shape: Sequence[int]) -> tuple[int, int]:
    if len(shape) != 2:
        raise ValueError(f"shapeB must be [N, K], got {list(shape)}")
    return shape[0], shape[1]


def _new_scales(A, blocksize: int):
    return A.new_empty((block_count(A.numel(), blocksize),), dtype=torch.float32)


def _quantize_4bit(A, blocksize: int, quant_type: str, quant_storage: torch.dtype):
    _check_4bit(blocksize, A.dtype)
    return torch.ops.bitshard.quantize_4bit(A, blocksize, _format(quant_type), quant_storage)


def _quantize_4bit_fake(A, blocksize: int, quant_type: str, quant_storage: torch.dtype):
    _check_4bit(blocksize, A.dtype)
    packed = A.new_empty((storage_elements(A.numel(), quant_storage.itemsize), 1), dtype=quant_storage)
    return packed, _new_scales(A, blocksize)


def _dequantize_4bit(A, absmax, blocksize: int, quant_type: str, shape: Sequence[int], dtype: torch.dtype):
    _check_4bit(blocksize, dtype)
    none = absmax.new_empty(0)
    rows, columns = _rows_columns(shape)
    data = torch.ops.bitshard.dequantize_4bit(
        A, absmax, none, none, none, blocksize, _format(quant_type), rows, columns, dtype
    )
    return data.view(shape)


def _dequantize_4bit_fake(A, absmax, blocksize: int, quant_type: str, shape: Sequence[int], dtype: torch.dtype):
    _check_4bit(blocksize, dtype)
    return A.new_empty(shape, dtype=dtype)


def _gemm_4bit(
    A,
    B,
    shapeB: Sequence[int],
    absmax,
    blocksize: int,
    quant_type: str,
    bias=None,
    absmax_8bit=None,
    absmax_code=None,
    absmax_offset=None,
):
    """`absmax` is the second level of nested scales when `absmax_8bit` is given, the scales themselves otherwise."""
    _check_4bit(blocksize, A.dtype)
    none = absmax.new_empty(0)
    scales = (absmax, none, none, none)
    if absmax_8bit is not None:
        if absmax_code is None or absmax_offset is None:
            raise ValueError("absmax_8bit needs absmax_code and absmax_offset")
        scales = (absmax_8bit, absmax_code, absmax, absmax_offset.float())
    bias = A.new_empty(0) if bias is None else bias
    n, k = _n_k(shapeB)
    return torch.ops.bitshard.linear_4bit(A, B, *scales, bias, blocksize, _format(quant_type), n, k)


def _gemv_4bit(A, B, shapeB: Sequence[int], absmax, code, blocksize: int):
    """The format is read off `code`, which makes the host wait for a `code` on the GPU. With `absmax` in bfloat16, B
    is as `functional._convert_weight_packed_for_cpu` gives it."""
    if absmax.dtype is torch.bfloat16:
        B, absmax = reordered.restore(B, absmax, *_n_k(shapeB), blocksize)
    values = code.detach().cpu().float()
    for name in FORMATS:
        if torch.equal(values, get_4bit_type(name, device="cpu")):
            return _gemm_4bit(A, B, shapeB, absmax, blocksize, name)
    raise ValueError(f"code must hold the 16 values of NF4 or FP4, got {values.tolist()}")


def _gemm_4bit_fake(A, B, shapeB: Sequence[int], absmax, blocksize: int, *others):
    _check_4bit(blocksize, A.dtype)
    return A.new_empty((*A.shape[:-1], _n_k(shapeB)[0]))


def _gemv_4bit_fake(A, B, shapeB: Sequence[int], absmax, code, blocksize: int):
    return _gemm_4bit_fake(A, B, shapeB, absmax, blocksize)


def _quantize_blockwise(A, code, blocksize: int):
    _check_float(A.dtype)
    return torch.ops.bitshard.quantize_blockwise(A, code, code.new_empty(0), blocksize)


def _quantize_blockwise_fake(A, code, blocksize: int):
    _check_float(A.dtype)
    packed = torch.empty_like(A, dtype=torch.uint8, memory_format=torch.contiguous_format)
    return packed, _new_scales(A, blocksize)


def _dequantize_blockwise(A, absmax, code, blocksize: int, dtype: torch.dtype):
    _check_float(dtype)
    return torch.ops.bitshard.dequantize_blockwise(A, absmax, code, code.new_empty(0), blocksize, dtype)


def _dequantize_blockwise_fake(A, absmax, code, blocksize: int, dtype: torch.dtype):
    _check_float(dtype)
    return torch.empty_like(A, dtype=dtype, memory_format=torch.contiguous_format)


def _int8_vectorwise_quant(A, threshold: float = 0.0):
    return int8.int8_vectorwise_quant(A, threshold)


def _int8_vectorwise_quant_fake(A, threshold: float = 0.0):
    _check_float(A.dtype)
    return A.new_empty(A.shape, dtype=torch.int8), _row_scales(A), _outlier_columns(A, threshold)


def _row_scales(A):
    return A.new_empty((prod(A.shape[:-1]),), dtype=torch.float32)


def _outlier_columns(A, threshold: float):
    if threshold == 0.0:
        return None
    return A.new_empty((torch.library.get_ctx().new_dynamic_size(),), dtype=torch.int64)


def _int8_vectorwise_dequant_fake(A, stats):
    int8.check_codes(A, "A")
    return A.new_empty(A.shape, dtype=torch.float32)


def _int8_double_quant(A, threshold: float = 0.0):
    return int8.double_quant(A, threshold)


def _int8_double_quant_fake(A, threshold: float = 0.0):
    _check_float(A.dtype)
    codes, columns = (A.new_empty(A.shape, dtype=torch.int8) for _ in range(2))
    col_stats = A.new_empty((A.shape[-1],), dtype=torch.float32)
    return codes, columns, _row_scales(A), col_stats, _outlier_columns(A, threshold)


def _int8_linear_matmul(A, B):
    return int8.int8_linear_matmul(A, B)


def _int8_linear_matmul_fake(A, B):
    int8.check_codes(A, "A")
    int8.check_codes(B, "B")
    return A.new_empty((*A.shape[:-1], B.shape[0]), dtype=torch.int32)


def _int8_mm_dequant(A, row_stats, col_stats, dtype=None, bias=None):
    return int8.scale_product(A, row_stats, col_stats, dtype, bias)


def _int8_mm_dequant_fake(A, row_stats, col_stats, dtype=None, bias=None):
    return A.new_empty(A.shape, dtype=dtype or torch.float16)


def _int8_scaled_mm(A, B, row_stats, col_stats, bias=None, dtype=None):
    return int8.scaled_product(A, B, row_stats, col_stats, bias, dtype)


def _int8_scaled_mm_fake(A, B, row_stats, col_stats, bias=None, dtype=None):
    return A.new_empty((*A.shape[:-1], B.shape[0]), dtype=dtype or torch.float16)


def _int8_mixed_scaled_mm(A, CA, CB, SCA, SCB, outlier_cols=None, bias=None):
    return int8.mixed_scaled_product(A, CA, CB, SCA, SCB, outlier_cols, bias)


def _int8_mixed_scaled_mm_fake(A, CA, CB, SCA, SCB, outlier_cols=None, bias=None):
    columns = torch.library.get_ctx().new_dynamic_size()
    return A.new_empty((*CA.shape[:-1], CB.shape[0])), A.new_empty((A.shape[0], columns))


def _optimizer_fake(optimizer_name: str, g, p, *others, **options) -> None:
    if g.numel() != p.numel():
        raise ValueError(f"g and p must have the same number of elements, got {g.numel()} and {p.numel()}")
    _check_float(g.dtype)
    _check_float(p.dtype)


def _optimizer_update_32bit(
    name, g, p, state1, state2, unorm_vec, max_unorm, param_norm,
    beta1, beta2, beta3, alpha, eps, weight_decay, step, lr, gnorm_scale=1.0, skip_zeros=False,
) -> None:  # fmt: skip
    numbers = (lr, beta1, beta2, beta3, alpha, eps, weight_decay, step, gnorm_scale, skip_zeros)
    update(Settings(algorithm(name), *numbers), Tensors(g, p, state1, state2), Bound(unorm_vec, max_unorm, param_norm))


def _optimizer_update_8bit_blockwise(
    name, g, p, state1, state2, beta1, beta2, beta3, alpha, eps, step, lr,
    qmap1, qmap2, absmax1, absmax2, weight_decay=0.0, gnorm_scale=1.0, skip_zeros=False,
) -> None:  # fmt: skip
    numbers = (lr, beta1, beta2, beta3, alpha, eps, weight_decay, step, gnorm_scale, skip_zeros)
    update(Settings(algorithm(name), *numbers), Tensors(g, p, state1, state2, qmap1, qmap2, absmax1, absmax2))


OPS = (
    Op(
        "quantize_4bit",
        "(Tensor A, int blocksize, str quant_type, ScalarType quant_storage) -> (Tensor, Tensor)",
        _quantize_4bit,
        _quantize_4bit_fake,
    ),
    *_with_out(
        "dequantize_4bit",
        "Tensor A, Tensor absmax, int blocksize, str quant_type, int[] shape, ScalarType dtype",
        _dequantize_4bit,
        _dequantize_4bit_fake,
    ),
    Op(
        "gemm_4bit",
        "(Tensor A, Tensor B, int[] shapeB, Tensor absmax, int blocksize, str quant_type, Tensor? bias=None,"
        " Tensor? absmax_8bit=None, Tensor? absmax_code=None, Tensor? absmax_offset=None) -> Tensor",
        _gemm_4bit,
        _gemm_4bit_fake,
    ),
    *_with_out(
        "gemv_4bit",
        "Tensor A, Tensor B, int[] shapeB, Tensor absmax, Tensor code, int blocksize",
        _gemv_4bit,
        _gemv_4bit_fake,
    ),
    Op(
        "quantize_blockwise",
        "(Tensor A, Tensor code, int blocksize) -> (Tensor, Tensor)",
        _quantize_blockwise,
        _quantize_blockwise_fake,
    ),
    *_with_out(
        "dequantize_blockwise",
        "Tensor A, Tensor absmax, Tensor code, int blocksize, ScalarType dtype",
        _dequantize_blockwise,
        _dequantize_blockwise_fake,
    ),
    Op(
        "int8_vectorwise_quant",
        "(Tensor A, float threshold=0.0) -> (Tensor, Tensor, Tensor?)",
        _int8_vectorwise_quant,
        _int8_vectorwise_quant_fake,
    ),
    Op(
        "int8_vectorwise_dequant",
        "(Tensor A, Tensor stats) -> Tensor",
        int8.int8_vectorwise_dequant,
        _int8_vectorwise_dequant_fake,
    ),
    Op(
        "int8_double_quant",
        "(Tensor A, float threshold=0.0) -> (Tensor, Tensor, Tensor, Tensor, Tensor?)",
        _int8_double_quant,
        _int8_double_quant_fake,
    ),
    *_with_out("int8_linear_matmul", "Tensor A, Tensor B", _int8_linear_matmul, _int8_linear_matmul_fake),
    Op(
        "int8_mm_dequant",
        "(Tensor A, Tensor row_stats, Tensor col_stats, ScalarType? dtype=None, Tensor? bias=None) -> Tensor",
        _int8_mm_dequant,
        _int8_mm_dequant_fake,
    ),
    Op(
        "int8_scaled_mm",
        "(Tensor A, Tensor B, Tensor row_stats, Tensor col_stats, Tensor? bias=None, ScalarType? dtype=None) -> Tensor",
        _int8_scaled_mm,
        _int8_scaled_mm_fake,
    ),
    Op(
        "int8_mixed_scaled_mm",
        "(Tensor A, Tensor CA, Tensor CB, Tensor SCA, Tensor SCB, Tensor? outlier_cols=None, Tensor? bias=None)"
        " -> (Tensor, Tensor?)",
        _int8_mixed_scaled_mm,
        _int8_mixed_scaled_mm_fake,
    ),
    Op(
        "optimizer_update_32bit",
        "(str optimizer_name, Tensor(a0!) g, Tensor(a1!) p, Tensor(a2!) state1,"
        " Tensor(a3!)? state2, Tensor(a4!)? unorm_vec, float max_unorm, float param_norm, float beta1, float beta2,"
        " float beta3, float alpha, float eps, float weight_decay, int step, float lr, float gnorm_scale,"
        " bool skip_zeros=False) -> ()",
        _optimizer_update_32bit,
        _optimizer_fake,
    ),
    Op(
        "optimizer_update_8bit_blockwise",
        "(str optimizer_name, Tensor(a0!) g, Tensor(a1!) p, Tensor(a2!) state1,"
        " Tensor(a3!)? state2, float beta1, float beta2, float beta3, float alpha, float eps, int step, float lr,"
        " Tensor(a4!) qmap1, Tensor(a5!)? qmap2, Tensor(a6!) absmax1, Tensor(a7!)? absmax2, float weight_decay,"
        " float gnorm_scale, bool skip_zeros=False) -> ()",
        _optimizer_update_8bit_blockwise,
        _optimizer_fake,
    ),
)


def replace_kernels() -> str:
    """Let an upstream's ops, on CPU and CUDA, run these kernels: all, or none.

    Returns what was done, in one line. Raises RuntimeError with the reason if an op is not there or has another schema
    than it has here; then nothing was changed.
    """
    for op in OPS:
        _require_same(op)
    keys = ("CPU", "CUDA") if _C.cuda_state()["built"] else ("CPU",)
    library = torch.library.Library("bitsandbytes", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*[Oo]verrid", category=UserWarning)  # it is what is asked for
            for op in OPS:
                for key in keys:
                    library.impl(op.name, op.kernel, key, allow_override=True)
    except BaseException:
        library._destroy()  # upstream's own kernels come back
        raise
    _replaced.append(library)  # its end would take the kernels away
    return f"bitshard's kernels for {len(OPS)} of upstream's ops on {' and '.join(keys)}"


_replaced: list[torch.library.Library] = []


def _require_same(op: Op) -> None:
    name, _, overload = op.name.partition(".")
    try:
        found = getattr(getattr(torch.ops.bitsandbytes, name), overload or "default")._schema
    except AttributeError:
        raise RuntimeError(f"this bitsandbytes has no op bitsandbytes::{op.name}") from None
    wanted = torch._C.parse_schema(f"bitsandbytes::{op.name}{op.schema}")
    if str(found) != str(wanted):
        raise RuntimeError(f"this bitsandbytes has {found}, where bitshard knows {wanted}")
