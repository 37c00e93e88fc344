"""Products and dequantization around torch's dispatcher (csrc/direct.h), where this torch allows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bitshard import _C
from bitshard.state import VALUE_DTYPES


def _allowed(reduction: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
    """`reduction` and what it gives by default: since torch 2.9 two flags, before one."""
    return reduction, (True, True) if isinstance(reduction(), tuple) else True


def enable_direct_calls(*weights: type) -> bool:
    """Let products and dequantization go around the dispatcher; whether this torch allows it.

    `weights` are the classes, beside plain tensors and parameters, that a packed weight may have.
    """
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    watchers = (torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack, torch._C._is_tracing)
    classes = (Tensor, torch.nn.Parameter, *weights)
    default = (torch._C._get_deterministic_algorithms, False)
    accumulation = (torch._C._get_cublas_allow_fp16_accumulation, False)
    settings = (
        (),
        (*default, *accumulation, *_allowed(torch._C._get_cublas_allow_fp16_reduced_precision_reduction)),
        (*default, *_allowed(torch._C._get_cublas_allow_bf16_reduced_precision_reduction)),
    )
    profiler = torch.autograd.profiler
    dtypes, grad_enabled = tuple(VALUE_DTYPES.values()), torch.is_grad_enabled
    return exchange is not None and _C.configure_direct(
        exchange, Tensor, classes, dtypes, watchers, settings, profiler, grad_enabled, torch._C._data_address
    )
