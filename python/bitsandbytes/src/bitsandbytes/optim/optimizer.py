"""Base classes of the optimizers, and settings of single parameters."""

import functools
import inspect
import logging
from collections.abc import Callable
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


class _Kind:
    """What the classes of one kind of optimizer share: `class Lion8bit(_Lion, optim_bits=8)` fixes an argument.

    The constructor of such a class is its kind's without the argument, as bitsandbytes has it. `_unused` names fixed
    arguments that it takes all the same and does not use, with their defaults; `_only` those of which it takes the
    default alone: ValueError for other values.
    """

    _unused: dict[str, Any] = {}
    _only: tuple[str, ...] = ()

    def __init_subclass__(cls, *, optim_bits: int | None = None, is_paged: bool | None = None, **others: Any):
        super().__init_subclass__(**others)
        fixed = {"optim_bits": optim_bits, "is_paged": is_paged}
        fixed = {name: value for name, value in fixed.items() if value is not None}
        if fixed:
            cls.__init__ = _fixing(cls, cls.__init__, fixed)


def _fixing(cls: type[_Kind], whole: Callable[..., None], fixed: dict[str, Any]) -> Callable[..., None]:
    """The constructor `whole` with some arguments fixed, as that of `cls`."""
    own = {}
    for name, parameter in inspect.signature(whole).parameters.items():
        if name in cls._unused:
            own[name] = parameter.replace(default=cls._unused[name])
        elif name not in fixed:
            own[name] = parameter
    signature = inspect.Signature(list(own.values()))

    @functools.wraps(whole)
    def __init__(*args, **options):
        try:
            given = signature.bind(*args, **options).arguments
        except TypeError as error:
            raise TypeError(f"{__init__.__qualname__}() {error}") from None
        for name in cls._only:
            _check_default(cls.__name__, name, given.get(name, own[name].default), own[name].default)
        whole(**{**given, **fixed})

    __init__.__qualname__, __init__.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    __init__.__signature__ = signature
    return __init__


def _check_default(cls: str, name: str, value: Any, default: Any) -> None:
    """ValueError for another value of an argument that a class has for compatibility alone."""
    if default is False:
        if value:
            raise ValueError(f"{cls} does not support {name}=True")
    elif value != default:
        raise ValueError(f"{cls} only supports {name}={default} (default value for compatibility)")
