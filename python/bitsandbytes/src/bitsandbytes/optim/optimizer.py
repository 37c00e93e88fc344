"""Base classes of the optimizers; construction raises NotImplementedError."""

from torch.optim import Optimizer

from .._absent import Absent


class GlobalOptimManager(Absent):
    """Registry of optimizer settings per parameter."""

    @classmethod
    def get_instance(cls) -> "GlobalOptimManager":
        """Raises NotImplementedError."""
        return cls()


class Optimizer8bit(Absent, Optimizer):
    """Optimizer whose state is quantized."""


class Optimizer1State(Optimizer8bit):
    """Optimizer with one state tensor per parameter."""


class Optimizer2State(Optimizer8bit):
    """Optimizer with two state tensors per parameter."""
