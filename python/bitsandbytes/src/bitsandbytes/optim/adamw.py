"""AdamW: exponential means of the gradient and of its square, weight decay apart from them."""

from .adam import _Adam
from .optimizer import Optimizer2State

__all__ = ["AdamW", "AdamW32bit", "AdamW8bit", "Optimizer2State", "PagedAdamW", "PagedAdamW32bit", "PagedAdamW8bit"]


class _AdamW(_Adam):
    _unused = {"optim_bits": 32}

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=1e-2,
        amsgrad=False,
        optim_bits=32,
        args=None,
        min_8bit_size=4096,
        is_paged=False,
    ):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, optim_bits, args, min_8bit_size, is_paged)


class AdamW(_AdamW):
    """AdamW, state in 32 bits, or 8 by `optim_bits`."""


class AdamW8bit(_AdamW, optim_bits=8):
    """AdamW, state in 8 bits."""

    _only = ("amsgrad", "optim_bits")


class AdamW32bit(_AdamW, optim_bits=32):
    """AdamW, state in 32 bits."""


class PagedAdamW(_AdamW, is_paged=True):
    """AdamW, state in 32 bits, or 8 by `optim_bits`, in paged memory."""


class PagedAdamW8bit(_AdamW, optim_bits=8, is_paged=True):
    """AdamW, state in 8 bits, in paged memory."""

    _only = ("amsgrad", "optim_bits")


class PagedAdamW32bit(_AdamW, optim_bits=32, is_paged=True):
    """AdamW, state in 32 bits, in paged memory."""
