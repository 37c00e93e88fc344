"""AdamW: exponential means of the gradient and of its square, weight decay apart from them."""

from .adam import _BITS, Optimizer2State, _Adam

__all__ = [
    "AdamW",
    "AdamW32bit",
    "AdamW8bit",
    "Optimizer2State",
    "PagedAdamW",
    "PagedAdamW32bit",
    "PagedAdamW8bit",
]

_DECAY = {"weight_decay": 1e-2}


class AdamW(_Adam, default=_DECAY):
    """AdamW, state in 32 bits, or 8 by `optim_bits`."""


class AdamW8bit(_Adam, default=_DECAY, shown=_BITS, optim_bits=8):
    """AdamW, state in 8 bits."""


class AdamW32bit(_Adam, default=_DECAY, shown=_BITS, optim_bits=32):
    """AdamW, state in 32 bits."""


class PagedAdamW(_Adam, default=_DECAY, is_paged=True):
    """AdamW, state in 32 bits, or 8 by `optim_bits`, in paged memory."""


class PagedAdamW8bit(_Adam, default=_DECAY, shown=_BITS, optim_bits=8, is_paged=True):
    """AdamW, state in 8 bits, in paged memory."""


class PagedAdamW32bit(_Adam, default=_DECAY, shown=_BITS, optim_bits=32, is_paged=True):
    """AdamW, state in 32 bits, in paged memory."""
