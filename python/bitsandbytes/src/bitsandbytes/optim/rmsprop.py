"""RMSprop with quantized state; construction raises NotImplementedError."""

from .optimizer import Optimizer1State


class RMSprop(Optimizer1State):
    """RMSprop, state in 32 bits, or 8 by `optim_bits`."""


class RMSprop8bit(Optimizer1State):
    """RMSprop, state in 8 bits."""


class RMSprop32bit(Optimizer1State):
    """RMSprop, state in 32 bits."""
