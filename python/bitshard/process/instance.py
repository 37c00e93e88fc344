"""Classes of bitsandbytes of which a process has one object."""

from __future__ import annotations

from typing import Any


class OneInstance:
    """Made by `get_instance` only."""

    _instance: Any = None

    def __init__(self):
        raise RuntimeError(f"Call {type(self).__name__}.get_instance() instead: there is one instance")

    def begin(self) -> None:
        """What the instance begins with."""

    @classmethod
    def get_instance(cls) -> Any:
        """The one instance."""
        if cls._instance is None:
            cls._instance = cls.__new__(cls)
            cls._instance.begin()
        return cls._instance
