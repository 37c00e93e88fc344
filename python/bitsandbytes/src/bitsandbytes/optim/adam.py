"""Adam: exponential means of the gradient and of its square; weight decay is AdamW's."""

from .optimizer import Optimizer2State


def _check_8bit(name: str, amsgrad: bool, optim_bits: int) -> None:
    """ValueError for arguments that the classes with 8 bits in their name have for compatibility alone."""
    if amsgrad:
        raise ValueError(f"{name} does not support amsgrad=True")
    if optim_bits != 32:
        raise ValueError(f"{name} only supports optim_bits=32 (default value for compatibility)")


class Adam(Optimizer2State):
    """Adam, state in 32 bits, or 8 by `optim_bits`."""

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0,
        amsgrad=False,
        optim_bits=32,
        args=None,
        min_8bit_size=4096,
        is_paged=False,
    ):
        numbers = (lr, betas, eps, weight_decay, optim_bits, args, min_8bit_size)
        super().__init__("adam", params, *numbers, is_paged=is_paged)


class Adam8bit(Optimizer2State):
    """Adam, state in 8 bits."""

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0,
        amsgrad=False,
        optim_bits=32,
        args=None,
        min_8bit_size=4096,
        is_paged=False,
    ):
        _check_8bit("Adam8bit", amsgrad, optim_bits)
        numbers = (lr, betas, eps, weight_decay, 8, args, min_8bit_size)
        super().__init__("adam", params, *numbers, is_paged=is_paged)


class Adam32bit(Optimizer2State):
    """Adam, state in 32 bits."""

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0,
        amsgrad=False,
        optim_bits=32,
        args=None,
        min_8bit_size=4096,
        is_paged=False,
    ):
        numbers = (lr, betas, eps, weight_decay, 32, args, min_8bit_size)
        super().__init__("adam", params, *numbers, is_paged=is_paged)


class PagedAdam(Optimizer2State):
    """Adam, state in 32 bits, or 8 by `optim_bits`, in paged memory."""

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0,
        amsgrad=False,
        optim_bits=32,
        args=None,
        min_8bit_size=4096,
        is_paged=False,
    ):
        numbers = (lr, betas, eps, weight_decay, optim_bits, args, min_8bit_size)
        super().__init__("adam", params, *numbers, is_paged=True)


class PagedAdam8bit(Optimizer2State):
    """Adam, state in 8 bits, in paged memory."""

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0,
        amsgrad=False,
        optim_bits=32,
        args=None,
        min_8bit_size=4096,
        is_paged=False,
    ):
        _check_8bit("PagedAdam8bit", amsgrad, optim_bits)
        numbers = (lr, betas, eps, weight_decay, 8, args, min_8bit_size)
        super().__init__("adam", params, *numbers, is_paged=True)


class PagedAdam32bit(Optimizer2State):
    """Adam, state in 32 bits, in paged memory."""

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0,
        amsgrad=False,
        optim_bits=32,
        args=None,
        min_8bit_size=4096,
        is_paged=False,
    ):
        numbers = (lr, betas, eps, weight_decay, 32, args, min_8bit_size)
        super().__init__("adam", params, *numbers, is_paged=True)
