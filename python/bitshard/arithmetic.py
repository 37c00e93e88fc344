"""Products of 4-bit layers in 8-bit arithmetic, on a CPU: faster and less exact, for those who ask for it.

    print(bitshard.arithmetic.enable(model))      # behind get_peft_model, before training
    print(bitshard.arithmetic.report(model))      # later: how many products were computed so, and why others were not
    bitshard.arithmetic.disable(model)

The forward product of a layer takes x as int8 by rows and 64 columns, and the weight's 16 values as int8
(`functional.linear_4bit_int8`), where x is float32 or float16 and has MIN_ROWS rows or more; with bfloat16 it gains
nothing (benchmarks/results/linear_4bit_int8_cpu_202611.md). Other products, and all input gradients, stay what they
are. So do the head, layers that the kernel does not take or that are on a GPU, where 16 bits are faster, and a layer
whose first such product is further than `bound` from the usual one. Files, copies and pickles know nothing of it.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bitshard.formats.state import QuantState
from bitshard.functions import functional
from bitshard.process import launch
from bitshard.weights import inventory

logger = logging.getLogger("bitshard")

BOUND = 0.05  # four times the error of an ordinary layer, half of what 4 bits lose
MIN_ROWS = 64


class InInt8:
    """Who multiplies with one weight: in 8 bits unless its first product was too far off, and counted."""

    def __init__(self, name: str, bound: float):
        self.name, self.bound = name, bound
        self.error: float | None = None  # of y, relative, of the first product
        self.reason = ""  # why the layer stays in 16 bits
        self.in_8_bits = self.others = 0

    def __call__(self, x: Tensor, packed: Tensor, state: QuantState, bias: Tensor | None) -> Tensor:
        few = x.numel() < MIN_ROWS * state.shape[1]
        if self.reason or few or x.device.type != "cpu" or x.dtype is torch.bfloat16:
            self.others += 1
            return functional.linear_4bit(x, packed, state, bias)
        y = functional.linear_4bit_int8(x, packed, state, bias)
        if self.error is None:
            y = self._checked(y, functional.linear_4bit(x, packed, state, bias))
        self.in_8_bits += not self.reason
        self.others += bool(self.reason)
        return y

    def _checked(self, y: Tensor, wide: Tensor) -> Tensor:
        """y of the first product, or `wide`, which is the same in 16 bits, from which y is too far."""
        error = ((y.float() - wide.float()).norm() / wide.float().norm()).item()
        if error != error:  # values that are no numbers, or nothing but zeros: another batch decides
            return y
        self.error = error
        if error <= self.bound:
            return y
        self.reason = f"off by {error:.3f} in its first product, more than {self.bound:g}"
        if launch.first_rank():
            logger.warning("8-bit arithmetic: %s stays in 16 bits, %s", self.name, self.reason)
        return wide


@dataclass(frozen=True)
class Report:
    """What `enable` and `report` found; prints as one line.

    Attributes:
        layers: {name: relative error of y in the first product in 8 bits, None before it} of those that take part.
        left: {name: why not} of the other quantized weights.
        in_8_bits, others: forward products so far in 8 bits, and others of quantized layers that `enable` has seen.
    """

    layers: dict[str, float | None] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    in_8_bits: int = 0
    others: int = 0

    def __str__(self) -> str:
        reasons = Counter(self.left.values()).most_common()
        line = f"{len(self.layers) + len(self.left)} quantized layers: {len(self.layers)} in 8-bit arithmetic"
        if reasons:
            line += f", {len(self.left)} not ({'; '.join(f'{n}: {why}' for why, n in reasons)})"
        if self.in_8_bits + self.others:
            share = self.in_8_bits / (self.in_8_bits + self.others)
            line += f"; {self.in_8_bits:,} of their {self.in_8_bits + self.others:,} forward products ({share:.0%})"
        return line


def enable(model: nn.Module, layers: str = "", bound: float = BOUND) -> Report:
    """Compute forward products of the 4-bit layers of `model` in 8-bit arithmetic from now on.

    Args:
        model: with quantized weights, on a CPU; others are left as they are, and the report says so.
        layers: regular expression that the names of layers must contain a match of; "" for all but the head.
        bound: the relative error of y in a layer's first product of MIN_ROWS rows or more above which it stays in
            16 bits.

    ValueError if `model` has no quantized weight, or no layer that `layers` names.
    """
    found, chosen = inventory.holders(model), re.compile(layers)
    if not found:
        raise ValueError("arithmetic.enable: the model has no quantized weight")
    if not any(chosen.search(name) for name, _ in found):
        raise ValueError(
            f"arithmetic.enable: {layers!r} names none of {len(found)} layers, the first is {found[0][0]!r}"
        )
    head = _head(model)
    for name, held in found:
        state = held.state
        state.in_int8 = None
        if _refused(held, head) or not chosen.search(name):
            continue
        state.in_int8 = InInt8(name, bound)
    return report(model)


def disable(model: nn.Module) -> None:
    """Compute all products of `model` as if `enable` had never been called."""
    for _, held in inventory.holders(model):
        held.state.in_int8 = None


def report(model: nn.Module) -> Report:
    """What is computed in 8 bits, and what is not."""
    layers, left, counts, head = {}, {}, [0, 0], _head(model)
    for name, held in inventory.holders(model):
        by = held.state.in_int8
        why = _refused(held, head) or ("not asked for" if by is None else by.reason)
        if why:
            left[name] = why
        else:
            layers[name] = by.error
        if by is not None:
            counts = [counts[0] + by.in_8_bits, counts[1] + by.others]
    return Report(layers, left, *counts)


def _head(model: nn.Module) -> nn.Module | None:
    get = getattr(model, "get_output_embeddings", None)
    return get() if get is not None else None


def _refused(held: Any, head: nn.Module | None) -> str:
    """Why a weight is in 16 bits whatever was asked; "" where it need not."""
    state = held.state
    if held.owner is head:
        return "the head"
    if state.quant_type not in ("nf4", "fp4") or state.kind.stacked:
        return "a stack of experts" if state.kind.stacked else f"{state.quant_type} weights"
    if state.sharded is not None or state.part is not None:
        return "sharded"
    if state.absmax.device.type != "cpu":
        return f"on {state.absmax.device.type}, where 16 bits are faster"
    if state.shape[1] % 64 or state.blocksize % 64:
        return "columns or blocks that are no multiples of 64"
    return ""
