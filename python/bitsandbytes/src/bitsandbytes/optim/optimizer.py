"""Base classes of the optimizers, and settings of single parameters."""

import logging

from bitshard.optim.base import Optimizer1State, Optimizer2State, Optimizer8bit
from bitshard.optim.config import GlobalOptimManager, MockArgs

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
