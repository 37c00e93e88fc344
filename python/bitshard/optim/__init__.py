"""Optimizers with 8-bit and 32-bit state: base classes (`base`), settings (`config`), state on shards (`shards`)."""

from bitshard.optim.base import Optimizer1State, Optimizer2State, Optimizer8bit
from bitshard.optim.config import GlobalOptimManager, MockArgs

__all__ = ["GlobalOptimManager", "MockArgs", "Optimizer1State", "Optimizer2State", "Optimizer8bit"]
