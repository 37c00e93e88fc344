"""Adam: exponential means of the gradient and of its square; weight decay is AdamW's."""

from .optimizer import Optimizer2State, Variant

_BITS, _BOTH = ("optim_bits",), ("optim_bits", "is_paged")


class _Adam(Variant, Optimizer2State):
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

    def check(self, amsgrad, optim_bits, **given):
        if self.fixed.get("optim_bits") != 8:
            return
        name = type(self).__name__
        if amsgrad:
            raise ValueError(f"{name} does not support amsgrad=True")
        if optim_bits != 32:
            raise ValueError(f"{name} only supports optim_bits=32 (default value for compatibility)")


class Adam(_Adam):
    """Adam, state in 32 bits, or 8 by `optim_bits`."""


class Adam8bit(_Adam, shown=_BITS, optim_bits=8):
    """Adam, state in 8 bits."""


class Adam32bit(_Adam, shown=_BITS, optim_bits=32):
    """Adam, state in 32 bits."""


class PagedAdam(_Adam, shown=_BOTH, is_paged=True):
    """Adam, state in 32 bits, or 8 by `optim_bits`, in paged memory."""


class PagedAdam8bit(_Adam, shown=_BOTH, optim_bits=8, is_paged=True):
    """Adam, state in 8 bits, in paged memory."""


class PagedAdam32bit(_Adam, shown=_BOTH, optim_bits=32, is_paged=True):
    """Adam, state in 32 bits, in paged memory."""
