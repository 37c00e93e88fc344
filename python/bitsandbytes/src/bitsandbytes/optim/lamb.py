"""LAMB with quantized state; construction raises NotImplementedError."""

from .optimizer import Optimizer2State


class LAMB(Optimizer2State):
    """LAMB, state in 32 bits, or 8 by `optim_bits`."""


class LAMB8bit(Optimizer2State):
    """LAMB, state in 8 bits."""


class LAMB32bit(Optimizer2State):
    """LAMB, state in 32 bits."""
