"""torch's dropout in pieces: what it draws, kept as one byte an element, and what is made of that again.

The ops are those that `torch.nn.functional.dropout(x, p, True)` calls, so that torch's default generator gives the same
draws and goes on as far: on CUDA one kernel, which can be captured in a graph; on a CPU one op after the other, with
1 / (1 - p) rounded to the dtype of x.

For the backward of y = B (A dropout(x)) the mask is kept beside x, which layers on one input share, instead of x
dropped, of which each layer has its own. x dropped is made again of both, with the same bits: on CUDA by the backward
of the kernel, for both compute float(x) keep s and round once. The kernel's s is the quotient of 1 and 1 - p in
float32, which is not always 1 / (1 - p) rounded to float32, torch's factor of gradients.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor


class Dropout(NamedTuple):
    """The dropout of one call: each element of x, in `dtype`, is 0 with the probability p, which is between 0 and 1."""

    p: float
    dtype: torch.dtype

    def drop(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(x dropped, its mask of bool), of the layout of x [..., K], which has elements; no gradient."""
        x = x.to(self.dtype)
        if in_one_kernel(x):
            return torch.native_dropout(x, self.p, True)
        noise = torch.empty_like(x).bernoulli_(1.0 - self.p)
        mask = noise.bool()
        return x * noise.div_(1.0 - self.p), mask

    def again(self, x: Tensor, mask: Tensor) -> Tensor:
        """The bits of x dropped, of x and the mask that it was dropped with; a function of x that has derivatives."""
        x = x.to(self.dtype)
        if in_one_kernel(x):
            factor = 1.0 / ctypes.c_float(1.0 - self.p).value  # rounded to float32 by the op: the quotient in float32
            return torch.ops.aten.native_dropout_backward(x, mask, factor)
        return x * self.noise(mask)

    def noise(self, mask: Tensor) -> Tensor:
        """What x was multiplied with, and a gradient is, as torch rounds it on a CPU."""
        return mask.to(self.dtype).div_(1.0 - self.p)

    def add_gradient(self, dx: Tensor, dropped: Tensor, mask: Tensor) -> None:
        """dx [rows, K] += the gradient of x, of that of x dropped; in one pass, rounded once."""
        if in_one_kernel(dx):
            dx.addcmul_(dropped, mask, value=1.0 / (1.0 - self.p))
        else:
            dx.addcmul_(dropped, self.noise(mask))


def in_one_kernel(x: Tensor) -> bool:
    """Whether torch drops elements of x by `native_dropout`."""
    return x.is_cuda
