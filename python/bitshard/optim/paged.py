"""Tensors in paged memory: on the host, where a GPU can reach them. Without a GPU they are plain tensors of the CPU."""

from __future__ import annotations

import logging
from math import prod

import torch
from torch import Tensor

from bitshard.process.instance import OneInstance

logger = logging.getLogger(__name__)
_said: set[str] = set()


class GlobalPageManager(OneInstance):
    """The tensors in paged memory; one instance a process."""

    def initialize(self) -> None:
        """Forget all tensors."""
        self.paged_tensors: list[Tensor] = []

    begin = initialize

    def prefetch_all(self, to_cpu: bool = False) -> None:
        """Prefetch all, the first one last: it is used first."""
        for tensor in reversed(self.paged_tensors):
            prefetch_tensor(tensor, to_cpu)


def say_without_gpu() -> None:
    """Once a process, in the log: a paged optimizer runs on the CPU."""
    if "cpu" not in _said:
        _said.add("cpu")
        logger.warning(
            "A paged optimizer on the CPU keeps its state in plain host memory: there is no GPU to page for."
        )


def host_bytes(size: int, device: torch.device | None = None) -> Tensor:
    """uint8 zeros on the host, pinned where there is a GPU and `device` is not the CPU. RuntimeError if it fails."""
    pin = torch.cuda.is_available() and (device is None or torch.device(device).type != "cpu")
    try:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=pin)
    except RuntimeError as error:
        kind = "pinned host memory" if pin else "host memory"
        raise RuntimeError(f"no {size / 2**30:.2f} GiB of {kind} for paged tensors: {error}") from error


def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
    """A tensor of zeros on the host, pinned where there is a GPU, with `is_paged` and the index of `device`.

    RuntimeError, which says how many GiB, where there is no such memory.
    """
    tensor = host_bytes(prod(shape) * dtype.itemsize).view(dtype).view(shape)
    tensor.is_paged = True
    tensor.page_deviceid = None if device is None else torch.device(device).index
    return tensor


def prefetch_tensor(A: Tensor, to_cpu: bool = False) -> None:
    """Nothing moves: host memory is where it is. ValueError for a tensor that is not paged."""
    if not getattr(A, "is_paged", False):
        raise ValueError("Only paged tensors can be prefetched!")


def elementwise_func(func_name: str, A: Tensor, B: Tensor | None, value: float, prefetch: bool = True) -> None:
    """Write to A, float32 or uint8: "fill" value everywhere, "arange" 0, 1, 2, ..., "_mul" A * B."""
    if A.dtype not in (torch.float32, torch.uint8) or (func_name != "fill" and A.dtype != torch.float32):
        raise NotImplementedError(f"Function not implemented: {func_name} for {A.dtype}")
    if func_name == "fill":
        A.fill_(value)
    elif func_name == "arange":
        A.copy_(torch.arange(A.numel(), dtype=A.dtype, device=A.device).view_as(A))
    elif func_name == "_mul" and B is not None:
        A.mul_(B)
    else:
        raise NotImplementedError(f"Function not implemented: {func_name}")


def fill(A: Tensor, value: float, device: torch.device | None = None, prefetch: bool = True) -> None:
    """Write `value` to every element of A, float32 or uint8."""
    elementwise_func("fill", A, None, value)
