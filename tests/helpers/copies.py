"""Copies of weights, states and modules as libraries make them: by pickle, and by files of torch."""

import io
import pickle
from typing import Any

import torch


def pickled(thing: Any) -> Any:
    """`thing` through a pickle."""
    return pickle.loads(pickle.dumps(thing))


def saved(thing: Any, weights_only: bool = False) -> Any:
    """`thing` through torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)
