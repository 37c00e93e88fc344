"""Names of bitsandbytes that bitshard does not have: they can be imported and tested for, not used."""

from collections.abc import Callable
from typing import Any, NoReturn

BACK = "The original has it: pip install --force-reinstall --no-deps bitsandbytes==0.50.2"


def refuse(name: str) -> NoReturn:
    """Raise the error of an absent name: `name` is its full dotted path."""
    raise NotImplementedError(f"{name} is not in bitshard yet. {BACK}")


def absent_function(module: str, name: str) -> Callable[..., NoReturn]:
    """A function named `name` in `module` that raises NotImplementedError whatever it is called with."""

    def function(*args: Any, **kwargs: Any) -> NoReturn:
        refuse(f"{module}.{name}")

    function.__module__ = module
    function.__name__ = function.__qualname__ = name
    function.__doc__ = "Not in bitshard yet: raises NotImplementedError."
    return function


class Absent:
    """Base of absent classes; construction raises NotImplementedError with the name of the class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        ours = next(base for base in cls.__mro__ if base.__module__.split(".")[0] == "bitsandbytes")
        refuse(f"{ours.__module__}.{ours.__qualname__}")
