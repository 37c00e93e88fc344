"""LARS with quantized state; construction raises NotImplementedError."""

from torch.optim import Optimizer

from .._absent import OPTIMIZERS, Absent
from .optimizer import Optimizer1State


class LARS(Optimizer1State):
    """LARS, state in 32 bits, or 8 by `optim_bits`."""


class LARS8bit(Optimizer1State):
    """LARS, state in 8 bits."""


class LARS32bit(Optimizer1State):
    """LARS, state in 32 bits."""


class PytorchLARS(Absent, Optimizer):
    """LARS without quantized state."""

    _advice = OPTIMIZERS
