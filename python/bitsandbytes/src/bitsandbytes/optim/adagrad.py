"""Adagrad with quantized state; construction raises NotImplementedError."""

from .optimizer import Optimizer1State


class Adagrad(Optimizer1State):
    """Adagrad, state in 32 bits, or 8 by `optim_bits`."""


class Adagrad8bit(Optimizer1State):
    """Adagrad, state in 8 bits."""


class Adagrad32bit(Optimizer1State):
    """Adagrad, state in 32 bits."""
