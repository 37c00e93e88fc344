"""SGD with momentum."""

from .optimizer import Optimizer1State


def _check(momentum: float) -> None:
    """NotImplementedError without momentum."""
    if momentum == 0:
        raise NotImplementedError("SGD without momentum is not supported!")


class SGD(Optimizer1State):
    """SGD, state in 32 bits, or 8 by `optim_bits`; `dampening` and `nesterov` are not used, as in bitsandbytes."""

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
        _check(momentum)
        numbers = (lr, (momentum, dampening), 0.0, weight_decay, optim_bits, args, min_8bit_size)
        super().__init__("momentum", params, *numbers)


class SGD8bit(Optimizer1State):
    """SGD, state in 8 bits; `dampening` and `nesterov` are not used, as in bitsandbytes."""

    def __init__(
        self,
        params,
        lr,
        momentum=0,
        dampening=0,
        weight_decay=0,
        nesterov=False,
        args=None,
        min_8bit_size=4096,
    ):
        _check(momentum)
        numbers = (lr, (momentum, dampening), 0.0, weight_decay, 8, args, min_8bit_size)
        super().__init__("momentum", params, *numbers)


class SGD32bit(Optimizer1State):
    """SGD, state in 32 bits; `dampening` and `nesterov` are not used, as in bitsandbytes."""

    def __init__(
        self,
        params,
        lr,
        momentum=0,
        dampening=0,
        weight_decay=0,
        nesterov=False,
        args=None,
        min_8bit_size=4096,
    ):
        _check(momentum)
        numbers = (lr, (momentum, dampening), 0.0, weight_decay, 32, args, min_8bit_size)
        super().__init__("momentum", params, *numbers)
