"""SGD with quantized state; construction raises NotImplementedError."""

from .._absent import optimizer_advice
from .optimizer import Optimizer1State

_ADVICE = optimizer_advice("sgd", "SGD")


class SGD(Optimizer1State):
    """SGD, state in 32 bits, or 8 by `optim_bits`."""

    _advice = _ADVICE


class SGD8bit(Optimizer1State):
    """SGD, state in 8 bits."""

    _advice = _ADVICE


class SGD32bit(Optimizer1State):
    """SGD, state in 32 bits."""

    _advice = _ADVICE
