"""Base classes of the optimizers, and settings of single parameters."""

import functools
import inspect
import logging
from typing import Any

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


class Variant:
    """Optimizers that are one constructor with some arguments fixed: `class Lion8bit(_Lion, optim_bits=8)`."""

    fixed: dict[str, Any] = {}

    def __init_subclass__(
        cls, shown: tuple[str, ...] = (), default: dict[str, Any] | None = None, **fixed: Any
    ) -> None:
        """Give the class a constructor.

        Args:
            shown: names of fixed arguments that stay in the signature, for compatibility.
            default: defaults that are others than those of the constructor above.
            fixed: values of arguments of the constructor above.
        """
        super().__init_subclass__()
        cls.fixed = {**cls.fixed, **fixed}
        if not fixed and not default:
            return
        above, changed = cls.__init__, default or {}
        parameters = [
            parameter.replace(default=changed.get(name, parameter.default))
            for name, parameter in inspect.signature(above).parameters.items()
            if name in shown or name not in fixed
        ]
        signature = inspect.Signature(parameters)

        @functools.wraps(above)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                given = signature.bind(self, *args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{type(self).__name__}: {error}") from None
            given.apply_defaults()
            type(self).check(**given.arguments)
            above(**{**given.arguments, **fixed})

        __init__.__signature__ = signature  # type: ignore[attr-defined]
        cls.__init__ = __init__  # type: ignore[misc]

    def check(self, **given: Any) -> None:
        """ValueError for arguments that are there for compatibility alone."""
