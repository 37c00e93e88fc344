"""Products and dequantization that bypass torch's dispatcher (csrc/python/direct.h), if this torch allows it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bitshard import _C
from bitshard.formats.state import VALUE_DTYPES


def _allowed(reduction: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
    """`reduction` and its default result: two flags since torch 2.9, one before."""
    return reduction, (True, True) if isinstance(reduction(), tuple) else True


def _storage_holds(tensor: Tensor) -> bool:
    """Whether the storage of a contiguous tensor holds all its elements."""
    end = tensor.storage_offset() + tensor.numel()
    return end * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _watch_storages() -> None:
    """From the first storage on that is shrunk, but not to 0, direct calls check the storage size of every tensor.

    A shrunk storage keeps its address, and direct calls otherwise check only that. Emptied ones, as FSDP's, have none.
    """
    resize = torch.UntypedStorage.resize_

    @functools.wraps(resize)
    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        if 0 < size < storage.nbytes():
            _C.doubt_storages()
        return resize(storage, size)

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]


def enable_direct_calls(*weights: type) -> bool:
    """Let products and dequantization bypass the dispatcher. Returns whether this version of torch allows it.

    `weights` are the classes, besides plain tensors and parameters, that a packed weight may have.
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
    asked = (torch._C._data_address, _storage_holds)
    if exchange is None or not _C.configure_direct(
        exchange, Tensor, classes, dtypes, watchers, settings, profiler, grad_enabled, *asked
    ):
        return False
    _watch_storages()
    return True
