"""LARS: SGD with momentum whose update is bounded by the norm of the parameter (arXiv 1708.03888)."""

from bitshard.optim import lars

from .optimizer import Optimizer1State

__all__ = ["LARS", "LARS32bit", "LARS8bit", "Optimizer1State", "PytorchLARS"]


def _check(momentum: float) -> None:
    """NotImplementedError without momentum."""
    if momentum == 0:
        raise NotImplementedError("LARS without momentum is not supported!")


class LARS(Optimizer1State):
    """LARS, state in 32 bits, or 8 by `optim_bits`."""

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
        max_unorm=0.02,
    ):
        _check(momentum)
        numbers = (lr, (momentum, dampening), 0.0, weight_decay, optim_bits, args, min_8bit_size)
        super().__init__("lars", params, *numbers, max_unorm=max_unorm)


class LARS8bit(Optimizer1State):
    """LARS, state in 8 bits; as in bitsandbytes, 8-bit state is not bounded."""

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
        max_unorm=0.02,
    ):
        _check(momentum)
        numbers = (lr, (momentum, dampening), 0.0, weight_decay, 8, args, min_8bit_size)
        super().__init__("lars", params, *numbers, max_unorm=max_unorm)


class LARS32bit(Optimizer1State):
    """LARS, state in 32 bits."""

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
        max_unorm=0.02,
    ):
        _check(momentum)
        numbers = (lr, (momentum, dampening), 0.0, weight_decay, 32, args, min_8bit_size)
        super().__init__("lars", params, *numbers, max_unorm=max_unorm)


class PytorchLARS(lars.PytorchLARS):
    """LARS in plain torch, without quantized state."""
