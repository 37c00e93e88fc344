"""AdamW: exponential means of the gradient and of its square, weight decay apart from them."""

from .adam import _check_8bit
from .optimizer import Optimizer2State


class AdamW(Optimizer2State):
    """AdamW, state in 32 bits, or 8 by `optim_bits`."""

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
        numbers = (lr, betas, eps, weight_decay, optim_bits, args, min_8bit_size)
        super().__init__("adam", params, *numbers, is_paged=is_paged)


class AdamW8bit(Optimizer2State):
    """AdamW, state in 8 bits."""

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
        _check_8bit("AdamW8bit", amsgrad, optim_bits)
        numbers = (lr, betas, eps, weight_decay, 8, args, min_8bit_size)
        super().__init__("adam", params, *numbers, is_paged=is_paged)


class AdamW32bit(Optimizer2State):
    """AdamW, state in 32 bits."""

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
        numbers = (lr, betas, eps, weight_decay, 32, args, min_8bit_size)
        super().__init__("adam", params, *numbers, is_paged=is_paged)


class PagedAdamW(Optimizer2State):
    """AdamW, state in 32 bits, or 8 by `optim_bits`, in paged memory."""

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
    ):
        numbers = (lr, betas, eps, weight_decay, optim_bits, args, min_8bit_size)
        super().__init__("adam", params, *numbers, is_paged=True)


class PagedAdamW8bit(Optimizer2State):
    """AdamW, state in 8 bits, in paged memory."""

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
    ):
        _check_8bit("PagedAdamW8bit", amsgrad, optim_bits)
        numbers = (lr, betas, eps, weight_decay, 8, args, min_8bit_size)
        super().__init__("adam", params, *numbers, is_paged=True)


class PagedAdamW32bit(Optimizer2State):
    """AdamW, state in 32 bits, in paged memory."""

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
    ):
        numbers = (lr, betas, eps, weight_decay, 32, args, min_8bit_size)
        super().__init__("adam", params, *numbers, is_paged=True)
