"""Scales, and adapters, trained for what the whole model says: after all layers are 4-bit, and in the same bytes.

Codes stay as they are. Each block's scale is multiplied by 1 + t, and t is trained with Adam, so that what the 4-bit
model says of the next token comes nearer to what the dense model says: the Kullback-Leibler divergence, in nats a
token. With W' = (1 + t) s c for a block's scale s and the values c of its codes, dL/dt = sum of dL/dW' s c.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bitshard import ops
from bitshard.calibration.decoder import float32_products
from bitshard.calibration.layers import Layers, Made, Walked
from bitshard.calibration.solve import nearest_nested
from bitshard.functions import functional

STEPS = 150  # on a GPU, where nobody says how many
LR, LR_ADAPTER = 3e-3, 3e-4  # of t, and of an adapter's factors
WARMUP = 0.05  # of the steps; then the rate falls along a cosine
STEP_TOKENS = 8192  # of a step, which go through a layer at once
LOGITS = 1 << 28  # elements of logits at once
HELD = 16  # of so many samples one is not trained on
TuneProgress = Callable[[Iterable[int], int], Iterable[int]]


class Tuned(NamedTuple):
    """What tuning has done.

    Attributes:
        steps: how many.
        before, after: mean divergence from the dense model in nats a token, on samples that were not trained on.
        kept: whether the weights are those after tuning; False: they are as before.
        why: then why.
    """

    steps: int
    before: float
    after: float
    kept: bool
    why: str = ""

    def line(self) -> str:
        """For people."""
        if not self.kept:
            return f"not tuned, weights are as calibrated: {self.why}"
        return (
            f"tuned in {self.steps} steps: divergence from the dense model {self.before:.5f} -> {self.after:.5f} nats "
            "a token, on samples that tuning did not see"
        )


class TuneSettings(NamedTuple):
    """How to tune: steps (0: not at all), and the seed of the order of samples."""

    steps: int = 0
    seed: int = 0


class _Decoded(torch.autograd.Function):
    """Values of packed codes under scales (1 + t) s: float32 of the weight's shape; the gradient is that of t."""

    @staticmethod
    def forward(ctx: Any, change: Tensor, weight: Trained) -> Tensor:
        ctx.weight = weight
        return weight.decoded(weight.coded(weight.scales * (1 + change)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        weight = ctx.weight
        products = (gradient * weight.decoded(weight.scales)).view(-1)
        short = -len(products) % weight.state.blocksize
        return torch.nn.functional.pad(products, (0, short)).view(-1, weight.state.blocksize).sum(1), None


class Trained:
    """A 4-bit weight whose scales are trained, and its adapter.

    Args:
        made: the weight.
        device: where it is trained.

    Attributes:
        scales: float32 [blocks], as they are before.
        change: t, float32 [blocks].
        factors: A and B of its adapter, or nothing.
    """

    def __init__(self, made: Made, device: torch.device):
        self.made, self.packed, self.state = made, made.packed.to(device), made.state.moved(device)
        self._plain = functional.with_plain_scales(self.state).clone()
        self._plain.dtype = torch.float32
        self.scales = self._plain.absmax
        self.change = torch.zeros_like(self.scales, requires_grad=True)
        self.factors = [each.to(device).clone().requires_grad_(True) for each in made.adapter or ()]

    def coded(self, scales: Tensor) -> Tensor:
        """The nearest scales that the format has: themselves, or values of 8-bit codes."""
        return self._nearest(scales)[0] if self.state.nested else scales

    def decoded(self, scales: Tensor) -> Tensor:
        """float32 of the weight's shape."""
        state = self._plain.clone()
        state.absmax = scales.contiguous()
        return functional.dequantize_4bit(self.packed, state)

    def values(self) -> Tensor:
        """Those of the weight with its adapter; gradients flow to both."""
        values = _Decoded.apply(self.change, self)
        return values + self.factors[1] @ self.factors[0] if self.factors else values

    @torch.no_grad()
    def result(self) -> Made:
        """The weight with the scales that were found, on the CPU."""
        state, wanted = self.state.clone(), self.scales * (1 + self.change)
        state.absmax = self._nearest(wanted)[1] if state.nested else wanted
        adapter = tuple(each.detach().cpu() for each in self.factors) or None
        return self.made._replace(packed=self.packed.cpu(), state=state.moved(torch.device("cpu")), adapter=adapter)

    def _nearest(self, scales: Tensor) -> tuple[Tensor, Tensor]:
        return nearest_nested(scales, self.state)


class Student:
    """A decoder's layers, all on the device: 4-bit weights that are trained, and what else a layer has, which is not.

    Args:
        layers: of the model.
        made: what became of their weights, by key.
        walked: what else there is.
    """

    def __init__(self, layers: Layers, made: dict[str, Made], walked: Walked):
        self.decoder, self._rest = layers.decoder, walked.rest
        self._targets = [layers.targets(number) for number in range(len(walked.rest))]
        self.trained = {key: Trained(each, self.decoder.device) for key, each in made.items()}
        self._outside = self.decoder.outside()

    def states(self, hidden: Tensor) -> Tensor:
        """[B, L, H] that the last layer gives, of what the first one gets, [B, L, H]."""
        hidden = hidden.to(self.decoder.device)
        for number in range(len(self._rest)):
            hidden = checkpoint(self._layer, number, hidden, use_reentrant=False, preserve_rng_state=False)
        return hidden

    def logits(self, states: Tensor) -> Tensor:
        """[B, L, V] of what the last layer gives, this one's or the dense model's, [B, L, H]."""
        return self.decoder.finish(states.to(self.decoder.device), self._outside)

    def _layer(self, number: int, hidden: Tensor) -> Tensor:
        tensors = dict(self._rest[number])
        for target in self._targets[number]:
            values = self.trained[target.key].values()
            tensors[target.parameter] = values.transpose(1, 2) if target.transposed else values
        return self.decoder.run_with(number, hidden, tensors)


def divergence(student: Tensor, dense: Tensor) -> Tensor:
    """Sum over tokens of the Kullback-Leibler divergence of two logits [B, L, V], in nats."""
    ours, theirs = (logits.flatten(0, 1).float().log_softmax(-1) for logits in (student, dense))
    return torch.nn.functional.kl_div(ours, theirs, reduction="sum", log_target=True)


def tune(
    layers: Layers, made: dict[str, Made], walked: Walked, settings: TuneSettings,
    progress: TuneProgress = lambda steps, total: steps,
) -> tuple[dict[str, Made], Tuned]:  # fmt: skip
    """Train the scales, and the adapters where there are some, of weights that are calibrated.

    On the device are all 4-bit weights with twenty bytes a block beside them, what is outside the decoder layers in
    float32, one layer's weights in float32, and a batch; on the host three sets of hidden states. A sixteenth of the
    samples, at least one, is not trained on: where the divergence on them is not less afterwards, weights and adapters
    stay as they were. Where the device's memory does not hold all that, they stay as they were, too.

    Args:
        layers: of the model, dense.
        made: what became of their weights, by key.
        walked: what else of it is needed.
        settings: steps and seed.
        progress: wraps the steps' numbers, (numbers, how many).
    """
    try:
        return _tune(layers, made, walked, settings, progress)
    except RuntimeError as error:
        if not ops.is_out_of_memory(error):
            raise
        why = f"all 4-bit weights and a sample do not fit into the memory of {layers.decoder.device}"
    return made, Tuned(settings.steps, 0.0, 0.0, False, why)


def _tune(
    layers: Layers, made: dict[str, Made], walked: Walked, settings: TuneSettings, progress: TuneProgress
) -> tuple[dict[str, Made], Tuned]:
    first, dense = _joined(walked.first), _joined(walked.dense)
    generator = torch.Generator().manual_seed(settings.seed)
    mixed = torch.randperm(len(first), dtype=torch.int64, generator=generator)
    held, seen = mixed.split([max(1, len(first) // HELD), len(first) - max(1, len(first) // HELD)])
    student = Student(layers, made, walked)
    at_once = max(1, LOGITS // student.logits(dense[:1, :1]).shape[-1])
    lost = partial(_lost, student, first, dense, at_once=at_once)
    with torch.no_grad():
        before = lost(held)
    if not math.isfinite(before):
        return made, Tuned(0, before, before, False, f"its divergence from the dense model is {before} nats a token")
    optimizer, rate = _optimizer(student, settings.steps)
    per_step = min(max(1, STEP_TOKENS // first.shape[1]), len(seen))
    order = _order(seen, per_step * settings.steps, generator)
    with float32_products("high") if layers.decoder.device.type == "cuda" else nullcontext():
        for step in progress(range(settings.steps), settings.steps):
            lost(order[step * per_step : (step + 1) * per_step], backward=True)
            optimizer.step()
            optimizer.zero_grad()
            rate.step()
    with torch.no_grad():
        after = lost(held)
    kept = after < before  # False where it is not finite, too
    found = {key: weight.result() for key, weight in student.trained.items()} if kept else made
    why = "" if kept else f"its divergence on samples not seen would go from {before:.5f} to {after:.5f} nats a token"
    return found, Tuned(settings.steps, before, after, kept, why)


def _joined(batches: list[Tensor]) -> Tensor:
    """[S, L, H] of batches, which are let go."""
    found = torch.cat(batches)
    batches.clear()
    return found


def settings_of(steps: int | None, seed: int, device: torch.device, count: int) -> TuneSettings:
    """How to tune with `count` samples: steps is None where nobody has said. ValueError where it cannot be."""
    chosen = steps if steps is not None else STEPS if device.type == "cuda" and count > 1 else 0
    if chosen < 0:
        raise ValueError(f"{chosen} steps of tuning: expected 0 or more")
    if chosen and count < 2:
        raise ValueError("tuning trains on some samples and is judged by others: there is only 1")
    return TuneSettings(chosen, seed)


def _lost(
    student: Student, first: Tensor, dense: Tensor, chosen: Tensor, at_once: int, backward: bool = False
) -> float:
    """Mean divergence of the chosen samples: a step's tokens go through the layers together, and logits are those of
    `at_once` tokens at a time. Gradients are added up."""
    total, length = 0.0, first.shape[1]
    for some in chosen.split(max(1, STEP_TOKENS // length)):
        states = student.states(first[some])
        ends = states.detach().requires_grad_(backward)  # gradients of all logits meet here, then go on together
        size = max(1, at_once // len(some))
        for ours, theirs in zip(ends.split(size, 1), dense[some].split(size, 1), strict=True):
            with torch.no_grad():
                wanted = student.logits(theirs)
            found = divergence(student.logits(ours), wanted) / (len(chosen) * length)
            if backward:
                found.backward()
            total += float(found.detach())
        if backward:
            states.backward(ends.grad)
    return total


def _order(seen: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Samples in a new order each time that all were seen."""
    rounds = -(-count // len(seen))
    return torch.cat([seen[torch.randperm(len(seen), dtype=torch.int64, generator=generator)] for _ in range(rounds)])


def _optimizer(student: Student, steps: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    weights = student.trained.values()
    groups = [
        {"params": [weight.change for weight in weights], "lr": LR},
        {"params": [factor for weight in weights for factor in weight.factors], "lr": LR_ADAPTER},
    ]
    optimizer = torch.optim.Adam([group for group in groups if group["params"]])
    warmup = max(1, round(WARMUP * steps))

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)
