"""LAMB: Adam whose update is bounded by the norm of the parameter (arXiv 1904.00962)."""

from .optimizer import Optimizer2State, _Kind


class _LAMB(_Kind, Optimizer2State):
    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0,
        amsgrad=False,
        adam_w_mode=True,
        optim_bits=32,
        args=None,
        min_8bit_size=4096,
        max_unorm=1.0,
    ):
        numbers = (lr, betas, eps, weight_decay, optim_bits, args, min_8bit_size)
        super().__init__("lamb", params, *numbers, max_unorm=max_unorm)


class LAMB(_LAMB):
    """LAMB, state in 32 bits, or 8 by `optim_bits`."""


class LAMB8bit(_LAMB, optim_bits=8):
    """LAMB, state in 8 bits; as in bitsandbytes, 8-bit state is not bounded."""

    _only = ("amsgrad", "max_unorm")


class LAMB32bit(_LAMB, optim_bits=32):
    """LAMB, state in 32 bits."""
