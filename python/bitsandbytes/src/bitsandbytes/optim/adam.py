"""Adam with quantized state; construction raises NotImplementedError."""

from .optimizer import Optimizer2State


class Adam(Optimizer2State):
    """Adam, state in 32 bits, or 8 by `optim_bits`."""


class Adam8bit(Optimizer2State):
    """Adam, state in 8 bits."""


class Adam32bit(Optimizer2State):
    """Adam, state in 32 bits."""


class PagedAdam(Optimizer2State):
    """Adam, state in 32 bits, or 8 by `optim_bits`, in paged memory."""


class PagedAdam8bit(Optimizer2State):
    """Adam, state in 8 bits, in paged memory."""


class PagedAdam32bit(Optimizer2State):
    """Adam, state in 32 bits, in paged memory."""
