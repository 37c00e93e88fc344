"""torch.ops.bitshard.*: importing this registers the ops of the C core and their fake versions.

"None" is an empty tensor, a format is an int (CODES). The fakes give the shapes, dtypes and devices of results, for
torch.compile and meta tensors; the arithmetic is in csrc/. Sizes: M rows of x, N out features, K in features.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

try:
    from bitshard import _C
except ImportError as error:
    raise ImportError(
        f"bitshard's C core cannot be used with torch {torch.__version__}: {error}. Run `python -m bitshard` to see "
        "why."
    ) from error

FORMATS = {"nf4": 0, "fp4": 1}  # bitsandbytes' names
CODES = {**FORMATS, "mxfp4": 2, "nvfp4": 2}  # which table the 4-bit codes of a quant_type have
_E2M1 = {"mxfp4": "e2m1", "nvfp4": "e2m1"}
_SCALES = {"e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}
# Formulas of csrc/core/optimizer.h by bitsandbytes' names. LAMB and LARS are Adam and momentum with max_unorm.
OPTIMIZERS = {
    "adam": 0,
    "momentum": 1,
    "rmsprop": 2,
    "adagrad": 3,
    "lion": 4,
    "ademamix": 5,
    "lamb": 0,
    "lars": 1,
}

quantize_4bit = torch.ops.bitshard.quantize_4bit.default
dequantize_4bit = torch.ops.bitshard.dequantize_4bit.default
quantize_blockwise = torch.ops.bitshard.quantize_blockwise.default
dequantize_blockwise = torch.ops.bitshard.dequantize_blockwise.default
linear_4bit = torch.ops.bitshard.linear_4bit.default
linear_4bit_int8 = torch.ops.bitshard.linear_4bit_int8.default
linear_4bit_dgrad = torch.ops.bitshard.linear_4bit_dgrad.default
grouped_linear_4bit = torch.ops.bitshard.grouped_linear_4bit.default
grouped_linear_4bit_dgrad = torch.ops.bitshard.grouped_linear_4bit_dgrad.default
grouped_linear_4bit_fused = torch.ops.bitshard.grouped_linear_4bit_fused.default  # on CUDA; `functions.grouped`
grouped_linear_4bit_dgrad_fused = torch.ops.bitshard.grouped_linear_4bit_dgrad_fused.default
search_4bit = torch.ops.bitshard.search_4bit.default
round_4bit = torch.ops.bitshard.round_4bit.default
quantize_e2m1 = torch.ops.bitshard.quantize_e2m1.default  # on CUDA `functions.microscaled`
merge_4bit = torch.ops.bitshard.merge_4bit.default
merge_e2m1 = torch.ops.bitshard.merge_e2m1.default
merged_values = torch.ops.bitshard.merged_values.default
quantize_int8 = torch.ops.bitshard.quantize_int8.default
dequantize_int8 = torch.ops.bitshard.dequantize_int8.default
product_int8 = torch.ops.bitshard.product_int8.default
scale_product_int8 = torch.ops.bitshard.scale_product_int8.default
linear_int8 = torch.ops.bitshard.linear_int8.default
linear_int8_dgrad = torch.ops.bitshard.linear_int8_dgrad.default
sort_by_expert = torch.ops.bitshard.sort_by_expert.default
sum_by_token = torch.ops.bitshard.sum_by_token.default
checksum = torch.ops.bitshard.checksum.default
optimizer_32bit = torch.ops.bitshard.optimizer_32bit.default
optimizer_8bit_blockwise = torch.ops.bitshard.optimizer_8bit_blockwise.default

rank_slice = _C.rank_slice


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, by torch's exception type or, on a CPU, by its message."""
    said = isinstance(error, RuntimeError) and str(error)
    return isinstance(error, torch.OutOfMemoryError) or bool(said and "can't allocate memory" in said)


def torchs(error: RuntimeError) -> RuntimeError:
    """The exception that torch would raise for an error of the C core, with its attributes; else the error itself."""
    if type(error) is not RuntimeError or not str(error).startswith("CUDA out of memory. "):
        return error
    out = torch.OutOfMemoryError(str(error))
    out.__dict__.update(error.__dict__)
    return out


def _raising(call: Callable) -> Callable:
    """An op whose C code ran out of a GPU's memory raises what torch raises; C itself can raise a RuntimeError only."""

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            if torchs(error) is error:
                raise
            raise torchs(error) from None

    return run


OPS = (quantize_4bit, dequantize_4bit, quantize_blockwise, dequantize_blockwise, linear_4bit, linear_4bit_dgrad)
OPS += (grouped_linear_4bit, grouped_linear_4bit_dgrad, checksum, optimizer_32bit, optimizer_8bit_blockwise)
OPS += (sort_by_expert, sum_by_token, merge_4bit, merge_e2m1, merged_values, quantize_e2m1, linear_4bit_int8)
OPS += (quantize_int8, dequantize_int8, product_int8, scale_product_int8, linear_int8, linear_int8_dgrad)
for _op in OPS:
    _op._op = _raising(_op._op)

_empty: dict[torch.device, Tensor] = {}


def empty(device: torch.device) -> Tensor:
    """The "None" of op arguments: a float32 tensor of no elements, one per device."""
    if torch.compiler.is_compiling():
        return torch.empty(0, dtype=torch.float32, device=device)
    tensor = _empty.get(device)
    if tensor is None:
        with torch.inference_mode(False):
            tensor = torch.empty(0, dtype=torch.float32, device=device)
        if type(tensor) is Tensor:  # under a fake mode it would be fake, and outlive the mode
            _empty[device] = tensor
    return tensor


def storage_elements(n: int, itemsize: int) -> int:
    """Elements of `itemsize` bytes that hold n 4-bit codes: `_C.storage_elements`, for code that torch may trace."""
    return ((n + 1) // 2 + itemsize - 1) // itemsize


def block_count(n: int, blocksize: int) -> int:
    """Blocks of n elements, the last one short: `_C.block_count`, for code that torch may trace."""
    return (n + blocksize - 1) // blocksize


def table(name: str) -> Tensor:
    """float32 table on the CPU: of the C core "nf4" [16], "fp4" [16], "mxfp4", "nvfp4" [16] or "dynamic" [256], and
    "e2m1_borders" [7], above which |value| / scale gets the next code; of torch's 8-bit floats "e8m0" or "e4m3" [256].

    Zeros are positive, as in bitsandbytes' files, although its kernels and ours decode FP4's code 8 to -0.0.
    """
    if name in _SCALES:
        return torch.arange(256, dtype=torch.uint8).view(_SCALES[name]).float() + 0.0
    return torch.frombuffer(bytearray(_C.table(_E2M1.get(name, name))), dtype=torch.float32) + 0.0


def _check_devices(op: str, real: Tensor, *others: Tensor) -> None:
    """A call with any tensor on the meta device runs the fake; a result on a real device would be uninitialized."""
    for other in others:
        if other.device != real.device and not real.is_meta:
            raise RuntimeError(f"{op}: tensors on {real.device} and {other.device}")


def _product(op: str, x: Tensor, K: int, N: int, *others: Tensor) -> Tensor:
    """[..., N] of an op that multiplies x [..., K], or dy, with a weight: `others`, its bytes the first of them."""
    _check_devices(op, x, *others)
    _check_devices(op, others[0], x)
    name = "dy" if op.endswith("dgrad") else "x"
    torch._check(x.shape[-1] == K, lambda: f"{op}: {name} has {x.shape[-1]} columns, the weight needs {K}")
    return x.new_empty((*x.shape[:-1], N))


@torch.library.register_fake("bitshard::quantize_4bit")
def _(x: Tensor, blocksize: int, format: int, storage: torch.dtype) -> tuple[Tensor, Tensor]:
    n = x.numel()
    packed = x.new_empty((storage_elements(n, storage.itemsize), 1), dtype=storage)
    return packed, x.new_empty((block_count(n, blocksize),), dtype=torch.float32)


@torch.library.register_fake("bitshard::dequantize_4bit")
def _(packed, absmax, absmax_map, absmax2, offset, blocksize, format, rows, columns, dtype) -> Tensor:
    _check_devices("dequantize_4bit", packed, absmax, absmax_map, absmax2, offset)
    return packed.new_empty((rows, columns), dtype=dtype)


@torch.library.register_fake("bitshard::quantize_blockwise")
def _(x: Tensor, map: Tensor, offset: Tensor, blocksize: int) -> tuple[Tensor, Tensor]:
    _check_devices("quantize_blockwise", x, map, offset)
    n_blocks = block_count(x.numel(), blocksize)
    return x.new_empty(x.shape, dtype=torch.uint8), x.new_empty((n_blocks,), dtype=torch.float32)


@torch.library.register_fake("bitshard::dequantize_blockwise")
def _(code: Tensor, absmax: Tensor, map: Tensor, offset: Tensor, blocksize: int, dtype: torch.dtype) -> Tensor:
    _check_devices("dequantize_blockwise", code, absmax, map, offset)
    return code.new_empty(code.shape, dtype=dtype)


@torch.library.register_fake("bitshard::linear_4bit")
def _(x, packed, absmax, absmax_map, absmax2, offset, bias, blocksize, format, N, K) -> Tensor:
    return _product("linear_4bit", x, K, N, packed, absmax, absmax_map, absmax2, offset, bias)


@torch.library.register_fake("bitshard::linear_4bit_int8")
def _(x, packed, absmax, absmax_map, absmax2, offset, bias, blocksize, format, N, K) -> Tensor:
    return _product("linear_4bit_int8", x, K, N, packed, absmax, absmax_map, absmax2, offset, bias)


@torch.library.register_fake("bitshard::linear_4bit_dgrad")
def _(dy, packed, absmax, absmax_map, absmax2, offset, blocksize, format, N, K) -> Tensor:
    return _product("linear_4bit_dgrad", dy, N, K, packed, absmax, absmax_map, absmax2, offset)


@torch.library.register_fake("bitshard::grouped_linear_4bit")
def _(x, offs, packed, absmax, absmax_map, absmax2, offset, bias, blocksize, format, N, K) -> Tensor:
    return _product("grouped_linear_4bit", x, K, N, packed, offs, absmax, absmax_map, absmax2, offset, bias)


@torch.library.register_fake("bitshard::grouped_linear_4bit_dgrad")
def _(dy, offs, packed, absmax, absmax_map, absmax2, offset, blocksize, format, N, K) -> Tensor:
    return _product("grouped_linear_4bit_dgrad", dy, N, K, packed, offs, absmax, absmax_map, absmax2, offset)


@torch.library.register_fake("bitshard::sort_by_expert")
def _(chosen: Tensor, E: int, elsewhere: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pairs = (chosen.new_empty(chosen.numel()) for _ in range(3))
    return *pairs, chosen.new_empty(E, dtype=torch.int32)


@torch.library.register_fake("bitshard::sum_by_token")
def _(y: Tensor, back: Tensor, counts: Tensor) -> Tensor:
    _check_devices("sum_by_token", y, back, counts)
    return y.new_empty(counts.shape[0], y.shape[1])


@torch.library.register_fake("bitshard::search_4bit")
def _(x: Tensor, weights: Tensor, scales: Tensor, blocksize: int, format: int) -> Tensor:
    _check_devices("search_4bit", x, weights, scales)
    return x.new_empty(-(-x.numel() // blocksize), dtype=torch.uint8)


@torch.library.register_fake("bitshard::round_4bit")
def _(w: Tensor, u: Tensor, scales: Tensor, format: int) -> tuple[Tensor, Tensor]:
    _check_devices("round_4bit", w, u, scales)
    return w.new_empty(w.shape, dtype=torch.uint8), torch.empty_like(w)


@torch.library.register_fake("bitshard::merge_4bit")
def _(packed, absmax, absmax_map, absmax2, offset, a, b, scales, map, blocksize, format, N, K) -> tuple[Tensor, ...]:
    _check_devices("merge_4bit", packed, absmax, absmax_map, absmax2, offset, a, b, scales, map)
    merged, blocks = packed.new_empty((packed.numel(), 1)), block_count(N * K, blocksize)
    scales = packed.new_empty((blocks,), dtype=torch.uint8 if map.numel() else torch.float32)
    seconds = block_count(blocks, 256) if map.numel() else 0
    return merged, scales, *(packed.new_empty((n,), dtype=torch.float32) for n in (seconds, int(seconds > 0)))


@torch.library.register_fake("bitshard::merge_e2m1")
def _(packed, absmax, absmax_map, absmax2, offset, a, b, scales, blocksize, format, N, K) -> tuple[Tensor, ...]:
    _check_devices("merge_e2m1", packed, absmax, absmax_map, absmax2, offset, a, b, scales)
    merged, blocks = packed.new_empty((packed.numel(), 1)), block_count(N * K, blocksize)
    seconds = block_count(blocks, 256) if blocksize == 16 else 0
    return (
        merged,
        packed.new_empty((blocks,), dtype=torch.uint8),
        packed.new_empty((seconds,), dtype=torch.float32),
    )


@torch.library.register_fake("bitshard::merged_values")
def _(packed, absmax, absmax_map, absmax2, offset, a, b, scales, blocksize, format, N, K, row0, rows) -> Tensor:
    _check_devices("merged_values", packed, absmax, absmax_map, absmax2, offset, a, b, scales)
    return packed.new_empty((rows, K), dtype=torch.float32)


@torch.library.register_fake("bitshard::quantize_e2m1")
def _(x: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    _check_devices("quantize_e2m1", x, whole)
    n, blocksize = x.numel(), 16 if whole.numel() else 32
    codes = x.new_empty((storage_elements(n, 1),), dtype=torch.uint8)
    return codes, x.new_empty((block_count(n, blocksize),), dtype=torch.uint8)


@torch.library.register_fake("bitshard::quantize_int8")
def _(x: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    rows = math.prod(x.shape[:-1])
    outliers = x.new_empty((x.shape[-1] if threshold > 0 else 0,), dtype=torch.uint8)
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((rows,), dtype=torch.float32), outliers


@torch.library.register_fake("bitshard::dequantize_int8")
def _(packed: Tensor, absmax: Tensor, N: int, K: int, dtype: torch.dtype) -> Tensor:
    _check_devices("dequantize_int8", packed, absmax)
    return packed.new_empty((N, K), dtype=dtype)


@torch.library.register_fake("bitshard::product_int8")
def _(a: Tensor, b: Tensor) -> Tensor:
    _check_devices("product_int8", a, b)
    _check_devices("product_int8", b, a)
    columns = a.shape[-1], b.shape[-1]
    torch._check(columns[0] == columns[1], lambda: f"product_int8: a has {columns[0]} columns, b has {columns[1]}")
    return a.new_empty((*a.shape[:-1], b.shape[0]), dtype=torch.int32)


@torch.library.register_fake("bitshard::scale_product_int8")
def _(sums: Tensor, row_absmax: Tensor, col_absmax: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    _check_devices("scale_product_int8", sums, row_absmax, col_absmax, bias)
    return sums.new_empty(sums.shape, dtype=dtype)


@torch.library.register_fake("bitshard::linear_int8")
def _(x: Tensor, packed: Tensor, absmax: Tensor, bias: Tensor, threshold: float, N: int, K: int) -> Tensor:
    return _product("linear_int8", x, K, N, packed, absmax, bias)


@torch.library.register_fake("bitshard::linear_int8_dgrad")
def _(dy: Tensor, packed: Tensor, absmax: Tensor, N: int, K: int) -> Tensor:
    return _product("linear_int8_dgrad", dy, N, K, packed, absmax)


@torch.library.register_fake("bitshard::checksum")
def _(packed: Tensor) -> Tensor:
    return packed.new_empty((), dtype=torch.int64)


@torch.library.register_fake("bitshard::optimizer_32bit")
def _(g: Tensor, p: Tensor, state1: Tensor, state2: Tensor, unorm: Tensor, algorithm: int, *numbers) -> None:
    _check_step("optimizer_32bit", g, p, state1, state2, unorm)


@torch.library.register_fake("bitshard::optimizer_8bit_blockwise")
def _(g, p, state1, state2, qmap1, qmap2, absmax1, absmax2, algorithm: int, *numbers) -> None:
    _check_step("optimizer_8bit_blockwise", g, p, state1, state2, qmap1, qmap2, absmax1, absmax2)


def _check_step(op: str, g: Tensor, p: Tensor, *others: Tensor) -> None:
    _check_devices(op, g, p, *others)
    _check_devices(op, p, g)
    torch._check(p.numel() == g.numel(), lambda: f"{op}: p has {p.numel()} elements, expected {g.numel()}")
