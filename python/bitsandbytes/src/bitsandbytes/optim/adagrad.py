"""Adagrad with quantized state; construction raises NotImplementedError."""

from .._absent import optimizer_advice
from .optimizer import Optimizer1State

_ADVICE = optimizer_advice("adagrad", "Adagrad")


class Adagrad(Optimizer1State):
    """Adagrad, state in 32 bits, or 8 by `optim_bits`."""

    _advice = _ADVICE


class Adagrad8bit(Optimizer1State):
    """Adagrad, state in 8 bits."""

    _advice = _ADVICE


class Adagrad32bit(Optimizer1State):
    """Adagrad, state in 32 bits."""

    _advice = _ADVICE
