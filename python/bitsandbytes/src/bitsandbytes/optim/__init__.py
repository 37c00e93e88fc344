"""Optimizers: importable and usable in `isinstance`; construction raises NotImplementedError."""

from .adagrad import Adagrad, Adagrad32bit, Adagrad8bit
from .adam import Adam, Adam32bit, Adam8bit, PagedAdam, PagedAdam32bit, PagedAdam8bit
from .adamw import AdamW, AdamW32bit, AdamW8bit, PagedAdamW, PagedAdamW32bit, PagedAdamW8bit
from .ademamix import AdEMAMix, AdEMAMix32bit, AdEMAMix8bit, PagedAdEMAMix, PagedAdEMAMix32bit, PagedAdEMAMix8bit
from .lamb import LAMB, LAMB32bit, LAMB8bit
from .lars import LARS, LARS32bit, LARS8bit, PytorchLARS
from .lion import Lion, Lion32bit, Lion8bit, PagedLion, PagedLion32bit, PagedLion8bit
from .optimizer import GlobalOptimManager
from .rmsprop import RMSprop, RMSprop32bit, RMSprop8bit
from .sgd import SGD, SGD32bit, SGD8bit

__all__ = [
    "AdEMAMix",
    "AdEMAMix32bit",
    "AdEMAMix8bit",
    "Adagrad",
    "Adagrad32bit",
    "Adagrad8bit",
    "Adam",
    "Adam32bit",
    "Adam8bit",
    "AdamW",
    "AdamW32bit",
    "AdamW8bit",
    "GlobalOptimManager",
    "LAMB",
    "LAMB32bit",
    "LAMB8bit",
    "LARS",
    "LARS32bit",
    "LARS8bit",
    "Lion",
    "Lion32bit",
    "Lion8bit",
    "PagedAdEMAMix",
    "PagedAdEMAMix32bit",
    "PagedAdEMAMix8bit",
    "PagedAdam",
    "PagedAdam32bit",
    "PagedAdam8bit",
    "PagedAdamW",
    "PagedAdamW32bit",
    "PagedAdamW8bit",
    "PagedLion",
    "PagedLion32bit",
    "PagedLion8bit",
    "PytorchLARS",
    "RMSprop",
    "RMSprop32bit",
    "RMSprop8bit",
    "SGD",
    "SGD32bit",
    "SGD8bit",
]
