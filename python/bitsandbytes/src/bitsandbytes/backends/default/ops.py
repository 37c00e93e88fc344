"""Numbers by which upstream's kernels know the optimizers."""

from ..._ops import register_kernel
from ..utils import _get_4bit_code

__all__ = [
    "ADAGRAD",
    "ADAM",
    "ADEMAMIX",
    "LION",
    "MOMENTUM",
    "RMSPROP",
    "_get_4bit_code",
    "name2optimizer_id",
    "register_kernel",
]

MOMENTUM, RMSPROP, ADAGRAD, ADAM, LION, ADEMAMIX = range(6)
name2optimizer_id = {
    "momentum": MOMENTUM,
    "lars": MOMENTUM,
    "rmsprop": RMSPROP,
    "adagrad": ADAGRAD,
    "adam": ADAM,
    "lamb": ADAM,
    "lion": LION,
    "ademamix": ADEMAMIX,
}
