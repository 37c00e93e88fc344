"""Optimizers with 8-bit and 32-bit state."""

from .adagrad import Adagrad, Adagrad8bit, Adagrad32bit
from .adam import Adam, Adam8bit, Adam32bit, PagedAdam, PagedAdam8bit, PagedAdam32bit
from .adamw import AdamW, AdamW8bit, AdamW32bit, PagedAdamW, PagedAdamW8bit, PagedAdamW32bit
from .ademamix import AdEMAMix, AdEMAMix8bit, AdEMAMix32bit, PagedAdEMAMix, PagedAdEMAMix8bit, PagedAdEMAMix32bit
from .lamb import LAMB, LAMB8bit, LAMB32bit
from .lars import LARS, LARS8bit, LARS32bit, PytorchLARS
from .lion import Lion, Lion8bit, Lion32bit, PagedLion, PagedLion8bit, PagedLion32bit
from .optimizer import GlobalOptimManager
from .rmsprop import RMSprop, RMSprop8bit, RMSprop32bit
from .sgd import SGD, SGD8bit, SGD32bit

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
