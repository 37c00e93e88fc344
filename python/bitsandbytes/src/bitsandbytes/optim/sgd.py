"""SGD with quantized state; construction raises NotImplementedError."""

from .optimizer import Optimizer1State


class SGD(Optimizer1State):
    """SGD, state in 32 bits, or 8 by `optim_bits`."""


class SGD8bit(Optimizer1State):
    """SGD, state in 8 bits."""


class SGD32bit(Optimizer1State):
    """SGD, state in 32 bits."""
