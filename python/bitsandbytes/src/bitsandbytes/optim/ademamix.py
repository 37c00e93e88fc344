"""AdEMAMix: Adam with a second, slow mean of the gradient (arXiv 2409.03137)."""

from bitshard.optim.ademamix import ReferenceAdEMAMix as _ReferenceAdEMAMix  # noqa: F401  (tests read it)

from .optimizer import Optimizer2State, _Kind


class _AdEMAMix(_Kind, Optimizer2State):
    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999, 0.9999),
        alpha=5.0,
        t_alpha=None,
        t_beta3=None,
        eps=1e-8,
        weight_decay=1e-2,
        optim_bits=32,
        min_8bit_size=4096,
        is_paged=False,
    ):
        own = {"alpha": alpha, "t_alpha": t_alpha, "t_beta3": t_beta3}
        numbers = (lr, betas, eps, weight_decay, optim_bits, None, min_8bit_size)
        super().__init__("ademamix", params, *numbers, is_paged=is_paged, **own)


class AdEMAMix(_AdEMAMix):
    """AdEMAMix, state in 32 bits, or 8 by `optim_bits`."""


class AdEMAMix8bit(AdEMAMix, optim_bits=8):
    """AdEMAMix, state in 8 bits."""


class PagedAdEMAMix8bit(AdEMAMix8bit, is_paged=True):
    """AdEMAMix, state in 8 bits, in paged memory."""


class PagedAdEMAMix(AdEMAMix, is_paged=True):
    """AdEMAMix, state in 32 bits, or 8 by `optim_bits`, in paged memory."""


class AdEMAMix32bit(_AdEMAMix, optim_bits=32):
    """AdEMAMix, state in 32 bits."""


class PagedAdEMAMix32bit(AdEMAMix32bit, is_paged=True):
    """AdEMAMix, state in 32 bits, in paged memory."""
