"""SGD with momentum."""

from .optimizer import Optimizer1State, _Kind


class _SGD(_Kind, Optimizer1State):
    def __init__(
        self,
        params,
        lr,
        momentum=0,
        dampening=0,
        weight_decay=0,
        nesterov=False,
        optim_bits=32,
        args=None,
        min_8bit_size=4096,
    ):
        if momentum == 0:
            raise NotImplementedError("SGD without momentum is not supported!")
        numbers = (lr, (momentum, dampening), 0.0, weight_decay, optim_bits, args, min_8bit_size)
        super().__init__("momentum", params, *numbers)


class SGD(_SGD):
    """SGD, state in 32 bits, or 8 by `optim_bits`; `dampening` and `nesterov` are not used, as in bitsandbytes."""


class SGD8bit(_SGD, optim_bits=8):
    """SGD, state in 8 bits; `dampening` and `nesterov` are not used, as in bitsandbytes."""


class SGD32bit(_SGD, optim_bits=32):
    """SGD, state in 32 bits; `dampening` and `nesterov` are not used, as in bitsandbytes."""
