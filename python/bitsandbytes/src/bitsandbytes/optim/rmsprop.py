"""RMSprop: the gradient over the root of a mean of its squares."""

from .optimizer import Optimizer1State, _Kind


class _RMSprop(_Kind, Optimizer1State):
    def __init__(
        self,
        params,
        lr=1e-2,
        alpha=0.99,
        eps=1e-8,
        weight_decay=0,
        momentum=0,
        centered=False,
        optim_bits=32,
        args=None,
        min_8bit_size=4096,
    ):
        if alpha == 0:
            raise NotImplementedError("RMSprop with alpha==0.0 is not supported!")
        if centered:
            raise NotImplementedError("Centered RMSprop is not supported!")
        super().__init__("rmsprop", params, lr, (alpha, momentum), eps, weight_decay, optim_bits, args, min_8bit_size)


class RMSprop(_RMSprop):
    """RMSprop, state in 32 bits, or 8 by `optim_bits`; `momentum` is not used, as in bitsandbytes."""


class RMSprop8bit(_RMSprop, optim_bits=8):
    """RMSprop, state in 8 bits; `momentum` is not used, as in bitsandbytes."""


class RMSprop32bit(_RMSprop, optim_bits=32):
    """RMSprop, state in 32 bits; `momentum` is not used, as in bitsandbytes."""
