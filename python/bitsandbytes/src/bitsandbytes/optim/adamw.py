"""AdamW with quantized state; construction raises NotImplementedError."""

from .optimizer import Optimizer2State


class AdamW(Optimizer2State):
    """AdamW, state in 32 bits, or 8 by `optim_bits`."""


class AdamW8bit(Optimizer2State):
    """AdamW, state in 8 bits."""


class AdamW32bit(Optimizer2State):
    """AdamW, state in 32 bits."""


class PagedAdamW(Optimizer2State):
    """AdamW, state in 32 bits, or 8 by `optim_bits`, in paged memory."""


class PagedAdamW8bit(Optimizer2State):
    """AdamW, state in 8 bits, in paged memory."""


class PagedAdamW32bit(Optimizer2State):
    """AdamW, state in 32 bits, in paged memory."""
