"""Adagrad: the gradient over the root of the sum of its squares."""

from .optimizer import Optimizer1State, _Kind


class _Adagrad(_Kind, Optimizer1State):
    _unused = {"optim_bits": 32}

    def __init__(
        self,
        params,
        lr=1e-2,
        lr_decay=0,
        weight_decay=0,
        initial_accumulator_value=0,
        eps=1e-10,
        optim_bits=32,
        args=None,
        min_8bit_size=4096,
    ):
        for text, value in (("learning rate", lr), ("weight_decay value", weight_decay), ("epsilon value", eps)):
            if not 0.0 <= value:
                raise ValueError(f"Invalid {text}: {value}")
        if initial_accumulator_value != 0.0:
            raise ValueError("Initial accumulator value != 0.0 not supported!")
        if lr_decay != 0.0:
            raise ValueError("Lr Decay != 0.0 not supported!")
        super().__init__("adagrad", params, lr, (0.0, 0.0), eps, weight_decay, optim_bits, args, min_8bit_size)


class Adagrad(_Adagrad):
    """Adagrad, state in 32 bits, or 8 by `optim_bits`."""


class Adagrad8bit(_Adagrad, optim_bits=8):
    """Adagrad, state in 8 bits."""

    _unused, _only = {"optim_bits": 8}, ("optim_bits",)


class Adagrad32bit(_Adagrad, optim_bits=32):
    """Adagrad, state in 32 bits."""
