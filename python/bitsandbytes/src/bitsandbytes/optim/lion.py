"""Lion: steps of one size, by the sign of a mean of gradients (arXiv 2302.06675)."""

from .optimizer import Optimizer1State


class Lion(Optimizer1State):
    """Lion, state in 32 bits, or 8 by `optim_bits`."""

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


class Lion8bit(Optimizer1State):
    """Lion, state in 8 bits."""

    def __init__(
        self,
        params,
        lr=1e-4,
        betas=(0.9, 0.99),
        weight_decay=0,
        args=None,
        min_8bit_size=4096,
        is_paged=False,
    ):
        numbers = (lr, betas, 0.0, weight_decay, 8, args, min_8bit_size)
        super().__init__("lion", params, *numbers, is_paged=is_paged)


class Lion32bit(Optimizer1State):
    """Lion, state in 32 bits."""

    def __init__(
        self,
        params,
        lr=1e-4,
        betas=(0.9, 0.99),
        weight_decay=0,
        args=None,
        min_8bit_size=4096,
        is_paged=False,
    ):
        numbers = (lr, betas, 0.0, weight_decay, 32, args, min_8bit_size)
        super().__init__("lion", params, *numbers, is_paged=is_paged)


class PagedLion(Optimizer1State):
    """Lion, state in 32 bits, or 8 by `optim_bits`, in paged memory."""

    def __init__(
        self,
        params,
        lr=1e-4,
        betas=(0.9, 0.99),
        weight_decay=0,
        optim_bits=32,
        args=None,
        min_8bit_size=4096,
    ):
        numbers = (lr, betas, 0.0, weight_decay, optim_bits, args, min_8bit_size)
        super().__init__("lion", params, *numbers, is_paged=True)


class PagedLion8bit(Optimizer1State):
    """Lion, state in 8 bits, in paged memory."""

    def __init__(
        self,
        params,
        lr=1e-4,
        betas=(0.9, 0.99),
        weight_decay=0,
        args=None,
        min_8bit_size=4096,
    ):
        numbers = (lr, betas, 0.0, weight_decay, 8, args, min_8bit_size)
        super().__init__("lion", params, *numbers, is_paged=True)


class PagedLion32bit(Optimizer1State):
    """Lion, state in 32 bits, in paged memory."""

    def __init__(
        self,
        params,
        lr=1e-4,
        betas=(0.9, 0.99),
        weight_decay=0,
        args=None,
        min_8bit_size=4096,
    ):
        numbers = (lr, betas, 0.0, weight_decay, 32, args, min_8bit_size)
        super().__init__("lion", params, *numbers, is_paged=True)
