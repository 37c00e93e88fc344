"""Lion with quantized state; construction raises NotImplementedError."""

from .optimizer import Optimizer1State


class Lion(Optimizer1State):
    """Lion, state in 32 bits, or 8 by `optim_bits`."""


class Lion8bit(Optimizer1State):
    """Lion, state in 8 bits."""


class Lion32bit(Optimizer1State):
    """Lion, state in 32 bits."""


class PagedLion(Optimizer1State):
    """Lion, state in 32 bits, or 8 by `optim_bits`, in paged memory."""


class PagedLion8bit(Optimizer1State):
    """Lion, state in 8 bits, in paged memory."""


class PagedLion32bit(Optimizer1State):
    """Lion, state in 32 bits, in paged memory."""
