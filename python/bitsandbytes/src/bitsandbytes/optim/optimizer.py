"""Base classes of the optimizers; construction raises NotImplementedError."""

import logging

from torch.optim import Optimizer

from .._absent import OPTIMIZERS, Absent, AbsentInstance
from ..utils import sync_gpu

__all__ = [
    "GlobalOptimManager",
    "MockArgs",
    "Optimizer1State",
    "Optimizer2State",
    "Optimizer8bit",
    "logger",
    "sync_gpu",
]

logger = logging.getLogger(__name__)


class MockArgs(Absent):
    """Settings of an optimizer."""

    _advice = OPTIMIZERS


class GlobalOptimManager(AbsentInstance):
    """Registry of optimizer settings per parameter."""

    _advice = OPTIMIZERS


class Optimizer8bit(Absent, Optimizer):
    """Optimizer whose state is quantized."""

    _advice = OPTIMIZERS


class Optimizer1State(Optimizer8bit):
    """Optimizer with one state tensor per parameter."""


class Optimizer2State(Optimizer8bit):
    """Optimizer with two state tensors per parameter."""
