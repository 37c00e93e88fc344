"""Lion: steps of one size, by the sign of a mean of gradients (arXiv 2302.06675)."""

from .optimizer import Optimizer1State, _Kind


class _Lion(_Kind, Optimizer1State):
    def __init__(
        self,
        params,
        lr=1e-4,
        betas=(0.9, 0.99),
        weight_decay=0,
        optim_bits=32,
        args=None,
        min_8bit_size=4096,
        is_paged=False,
    ):
        numbers = (lr, betas, 0.0, weight_decay, optim_bits, args, min_8bit_size)
        super().__init__("lion", params, *numbers, is_paged=is_paged)


class Lion(_Lion):
    """Lion, state in 32 bits, or 8 by `optim_bits`."""


class Lion8bit(_Lion, optim_bits=8):
    """Lion, state in 8 bits."""


class Lion32bit(_Lion, optim_bits=32):
    """Lion, state in 32 bits."""


class PagedLion(_Lion, is_paged=True):
    """Lion, state in 32 bits, or 8 by `optim_bits`, in paged memory."""


class PagedLion8bit(_Lion, optim_bits=8, is_paged=True):
    """Lion, state in 8 bits, in paged memory."""


class PagedLion32bit(_Lion, optim_bits=32, is_paged=True):
    """Lion, state in 32 bits, in paged memory."""
