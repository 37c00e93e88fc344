"""Tables of code values: those of the C core on any device, and bitsandbytes' constructors of 256-entry maps."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from bitshard import ops

_tables: dict[tuple[str, torch.device], Tensor] = {}


def table(name: str, device: torch.device) -> Tensor:
    """A table of the C core on `device`. Shared: never write to it, and return it only as a `shared_code`."""
    key = (name, device)
    found = _tables.get(key)
    if found is None:
        with torch.inference_mode(False):
            found = ops.table(name).to(device)
        if type(found) is Tensor and not torch.compiler.is_compiling():  # a fake tensor must not outlive its mode
            _tables[key] = found
    return found


def get_4bit_type(typename: str, device: torch.device | str | None = None, blocksize: int = 64) -> Tensor:
    """float32 [16]: the value of each 4-bit code of "nf4" or "fp4"; the largest magnitude is 1.

    `device` None is the GPU if there is one, else the CPU.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if typename in ops.FORMATS:
        return table(typename, torch.device(device)).clone()
    raise NotImplementedError(f"4-bit type {typename!r} is not supported: expected nf4 or fp4")


def _padded_map(values: list[float]) -> Tensor:
    """256 ascending values: `values` and zeros."""
    return torch.tensor(sorted(values + [0.0] * (256 - len(values))), dtype=torch.float32)


def create_linear_map(signed: bool = True, total_bits: int = 8, add_zero: bool = True) -> Tensor:
    """float32 [256]: equal steps over [-1, 1] (or [0, 1]), one value fewer where that makes zero one of them."""
    total = 2**total_bits
    if signed and (add_zero or total_bits < 8):
        total -= 1
    values = torch.linspace(-1.0 if signed else 0.0, 1.0, total, dtype=torch.float32)
    half = values.numel() // 2
    return torch.cat([values[:half], torch.zeros(256 - values.numel(), dtype=torch.float32), values[half:]])


def create_normal_map(offset: float = 0.9677083, use_extra_value: bool = True) -> Tensor:
    """float32 [256]: NF4's 16 values and zeros: quantiles of the normal distribution, scaled to a maximum of 1.

    Quantiles at equal steps from `offset` to 0.5, 8 on the positive and 7 on the negative side (7 and 7 without
    `use_extra_value`). Source: QLoRA (arXiv 2305.14314), appendix E.
    """
    positive, negative = (
        torch.special.ndtri(torch.linspace(offset, 0.5, count, dtype=torch.float32).double())[:-1].tolist()
        for count in (9 if use_extra_value else 8, 8)
    )
    values = _padded_map(positive + [-value for value in negative])
    return values / values.max()


def create_fp8_map(signed: bool = True, exponent_bits: int = 5, precision_bits: int = 2, total_bits: int = 8) -> Tensor:
    """float32 [256]: the values of a small floating-point format, scaled to a maximum of 1, and zeros.

    With bias b = 2^(exponent_bits - 1): (1 + m) 2^-(e - b - 1) for exponent field e > 0, m 2^-b for e = 0.
    """
    if exponent_bits + precision_bits + signed != total_bits:
        raise ValueError(f"{int(signed)} + {exponent_bits} + {precision_bits} bits are not {total_bits}")
    bias = 2 ** (exponent_bits - 1)
    steps = 2**precision_bits
    values = []
    for exponent, step in itertools.product(range(2**exponent_bits), range(steps)):
        fraction = step / steps
        value = fraction * 2.0**-bias if exponent == 0 else (1 + fraction) * 2.0 ** -(exponent - bias - 1)
        values += [value, -value] if signed else [value]
    map = _padded_map(values)
    return map / map.max()


def create_dynamic_map(signed: bool = True, max_exponent_bits: int = 7, total_bits: int = 8) -> Tensor:
    """float32 [256]: the dynamic data type, whose leading zeros count the exponent and leave the rest to the fraction.

    For each power of ten from 10^-(max_exponent_bits - 1) to 1 the midpoints of equal steps from 0.1 to 1, twice as
    many each time; and 0 and 1. Source: 8-bit Approximations for Parallelism in Deep Learning (arXiv 1511.04561).
    """
    if (signed, max_exponent_bits, total_bits) == (True, 7, 8):
        return ops.table(
            "dynamic"
        )  # the constants of the checkpoint format: linspace differs in the last bit on some CPUs
    spare_bits = total_bits - 1 - max_exponent_bits
    powers = [(i - max_exponent_bits + 1, 2 ** (i + spare_bits + (not signed))) for i in range(max_exponent_bits)]
    extra = 2**spare_bits - 1
    if extra > 0:
        powers.append((0, extra))
    values = [0.0, 1.0]
    for power, count in powers:
        steps = torch.linspace(0.1, 1, int(count) + 1, dtype=torch.float32)
        middles = (10**power * ((steps[:-1] + steps[1:]) / 2)).tolist()
        values += middles + ([-value for value in middles] if signed else [])
    if len(values) != 2**total_bits:
        raise ValueError(
            f"no dynamic map of {total_bits} bits has max_exponent_bits={max_exponent_bits}, signed={signed}"
        )
    return _padded_map(values)
