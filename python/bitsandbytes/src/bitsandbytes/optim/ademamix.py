"""AdEMAMix with quantized state; construction raises NotImplementedError."""

from .optimizer import Optimizer2State


class AdEMAMix(Optimizer2State):
    """AdEMAMix, state in 32 bits, or 8 by `optim_bits`."""


class AdEMAMix8bit(AdEMAMix):
    """AdEMAMix, state in 8 bits."""


class AdEMAMix32bit(Optimizer2State):
    """AdEMAMix, state in 32 bits."""


class PagedAdEMAMix(AdEMAMix):
    """AdEMAMix, state in 32 bits, or 8 by `optim_bits`, in paged memory."""


class PagedAdEMAMix8bit(AdEMAMix8bit):
    """AdEMAMix, state in 8 bits, in paged memory."""


class PagedAdEMAMix32bit(AdEMAMix32bit):
    """AdEMAMix, state in 32 bits, in paged memory."""
