"""Adagrad: the gradient over the root of the sum of its squares."""

from .optimizer import Optimizer1State, Variant


def _check(lr: float, weight_decay: float, eps: float, initial_accumulator_value: float, lr_decay: float) -> None:
    """ValueError for numbers out of range and for forms that there are not."""
    for text, value in (("learning rate", lr), ("weight_decay value", weight_decay), ("epsilon value", eps)):
        if not 0.0 <= value:
            raise ValueError(f"Invalid {text}: {value}")
    if initial_accumulator_value != 0.0:
        raise ValueError("Initial accumulator value != 0.0 not supported!")
    if lr_decay != 0.0:
        raise ValueError("Lr Decay != 0.0 not supported!")


class _Adagrad(Variant, Optimizer1State):
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
        _check(lr, weight_decay, eps, initial_accumulator_value, lr_decay)
        super().__init__("adagrad", params, lr, (0.0, 0.0), eps, weight_decay, optim_bits, args, min_8bit_size)

    def check(self, optim_bits, lr, weight_decay, eps, initial_accumulator_value, lr_decay, **given):
        _check(lr, weight_decay, eps, initial_accumulator_value, lr_decay)
        if self.fixed.get("optim_bits") == 8 and optim_bits != 8:
            raise ValueError("Adagrad8bit only supports optim_bits=8 (default value for compatibility)")


class Adagrad(_Adagrad):
    """Adagrad, state in 32 bits, or 8 by `optim_bits`."""


class Adagrad8bit(_Adagrad, default={"optim_bits": 8}, shown=("optim_bits",), optim_bits=8):
    """Adagrad, state in 8 bits."""


class Adagrad32bit(_Adagrad, shown=("optim_bits",), optim_bits=32):
    """Adagrad, state in 32 bits."""
