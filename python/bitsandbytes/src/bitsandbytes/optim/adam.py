"""Adam: exponential means of the gradient and of its square; weight decay is AdamW's."""

from .optimizer import Optimizer2State, _Kind


class _Adam(_Kind, Optimizer2State):
    _unused = {"optim_bits": 32, "is_paged": False}

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


class Adam(_Adam):
    """Adam, state in 32 bits, or 8 by `optim_bits`."""


class Adam8bit(_Adam, optim_bits=8):
    """Adam, state in 8 bits."""

    _only = ("amsgrad", "optim_bits")


class Adam32bit(_Adam, optim_bits=32):
    """Adam, state in 32 bits."""


class PagedAdam(_Adam, is_paged=True):
    """Adam, state in 32 bits, or 8 by `optim_bits`, in paged memory."""


class PagedAdam8bit(_Adam, optim_bits=8, is_paged=True):
    """Adam, state in 8 bits, in paged memory."""

    _only = ("amsgrad", "optim_bits")


class PagedAdam32bit(_Adam, optim_bits=32, is_paged=True):
    """Adam, state in 32 bits, in paged memory."""
