"""RMSprop with quantized state; construction raises NotImplementedError."""

from .._absent import optimizer_advice
from .optimizer import Optimizer1State

_ADVICE = optimizer_advice("rmsprop", "RMSprop")


class RMSprop(Optimizer1State):
    """RMSprop, state in 32 bits, or 8 by `optim_bits`."""

    _advice = _ADVICE


class RMSprop8bit(Optimizer1State):
    """RMSprop, state in 8 bits."""

    _advice = _ADVICE


class RMSprop32bit(Optimizer1State):
    """RMSprop, state in 32 bits."""

    _advice = _ADVICE
