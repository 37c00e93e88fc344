"""LARS: SGD with momentum whose update is bounded by the norm of the parameter (arXiv 1708.03888)."""

from bitshard.optim import lars

from .optimizer import Optimizer1State, _Kind

__all__ = ["LARS", "LARS32bit", "LARS8bit", "Optimizer1State", "PytorchLARS"]


class _LARS(_Kind, Optimizer1State):
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
        if momentum == 0:
            raise NotImplementedError("LARS without momentum is not supported!")
        numbers = (lr, (momentum, dampening), 0.0, weight_decay, optim_bits, args, min_8bit_size)
        super().__init__("lars", params, *numbers, max_unorm=max_unorm)


class LARS(_LARS):
    """LARS, state in 32 bits, or 8 by `optim_bits`."""


class LARS8bit(_LARS, optim_bits=8):
    """LARS, state in 8 bits; as in bitsandbytes, 8-bit state is not bounded."""


class LARS32bit(_LARS, optim_bits=32):
    """LARS, state in 32 bits."""


class PytorchLARS(lars.PytorchLARS):
    """LARS in plain torch, without quantized state."""
