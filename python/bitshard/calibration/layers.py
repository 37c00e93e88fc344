"""A decoder layer made 4-bit, for the inputs that come through the layers before it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bitshard.calibration import low_rank
from bitshard.calibration.decoder import Decoder
from bitshard.calibration.moments import Moments
from bitshard.calibration.solve import Format, Inputs, Solved, packed, solve
from bitshard.functions import functional
from bitshard.functions.functional import QuantState

TOKENS = 8192  # of samples that go through a layer at once, on a GPU


class Target(NamedTuple):
    """What a weight becomes.

    Attributes:
        key: its name in the model.
        name: that in its layer: of a linear layer, or of a stack of experts with its module's.
        is_stack, transposed: whether it is a stack of experts, and shows [E, K, N].
        fmt: of its blocks.
        dtype: of its values.
        rank: of the adapter that corrects what is left; 0: none.
        why: why there is none, where one was asked for.
    """

    key: str
    name: str
    is_stack: bool
    transposed: bool
    fmt: Format
    dtype: torch.dtype
    rank: int = 0
    why: str = ""

    @property
    def parameter(self) -> str:
        """The name of its tensor in its layer."""
        return self.name if self.is_stack else f"{self.name}.weight"


class Made(NamedTuple):
    """A weight in 4 bits.

    Attributes:
        packed: uint8 [ceil(n / 2), 1].
        state: its quantization state.
        adapter: float32 (A [r, K], B [N, r]) whose product B A corrects it, of a stack [E, r, K] and [E, N, r], or
            None.
        error, plain, whole: of this, of plain quantization and of no weight, summed over tokens (`solve`); error
            without the adapter.
        methods: how many matrices were chosen by which method.
    """

    packed: Tensor
    state: QuantState
    adapter: tuple[Tensor, Tensor] | None
    error: float
    plain: float
    whole: float
    methods: dict[str, int]


class LayerReport(NamedTuple):
    """What became of a decoder layer.

    Attributes:
        number: of the layer.
        error, plain: shares of its products that are lost, squared: as chosen, and to the nearest.
        methods: how many matrices were chosen by which method.
        remarks: what could not be done, a line each.
    """

    number: int
    error: float
    plain: float
    methods: dict[str, int]
    remarks: list[str]


class Layers(NamedTuple):
    """Where layers come from, and where they go.

    Attributes:
        decoder: runs them.
        load: number -> a dense float32 layer on the decoder's device, which may be changed.
        targets: number -> what becomes 4-bit of it.
        recall: number -> {key: Made} of an earlier run, or None.
        keep: (number, {key: Made}, report) -> None: remember them.
    """

    decoder: Decoder
    load: Callable[[int], nn.Module]
    targets: Callable[[int], list[Target]]
    recall: Callable[[int], tuple[dict[str, Made], LayerReport] | None]
    keep: Callable[[int, dict[str, Made], LayerReport], None]


class Walked:
    """What `tuning` needs of a model, gathered while its layers are calibrated.

    Attributes:
        first, dense: hidden states of the samples on the CPU, float32 in batches [B, L, H]: what the first layer gets,
            and what the dense model's last one gives.
        rest: of each layer the tensors that do not become 4-bit, by their names, on the decoder's device.
    """

    def __init__(self) -> None:
        self.first: list[Tensor] = []
        self.dense: list[Tensor] = []
        self.rest: list[dict[str, Tensor]] = []

    def begin(self, hidden: list[Tensor]) -> None:
        """What the first layer gets."""
        self.first = self.dense = hidden

    def add(self, decoder: Decoder, number: int, layer: nn.Module, targets: list[Target]) -> None:
        """A dense layer."""
        self.dense = [decoder.run(layer, number, batch).cpu() for batch in self.dense]
        packed = {target.parameter for target in targets}
        every = (*layer.named_parameters(), *layer.named_buffers())
        self.rest.append({name: tensor.detach().clone() for name, tensor in every if name not in packed})


@torch.no_grad()
def calibrate_layers(layers: Layers, ids: Tensor, walked: Walked | None = None) -> Iterator[LayerReport]:
    """Make one decoder layer after the other 4-bit, each on what its predecessors make of the samples by then: with
    the adapters that correct what is left, where there are some.

    Args:
        layers: of a model.
        ids: int64 [S, L], samples of L tokens.
        walked: is given what tuning needs.
    """
    decoder = layers.decoder
    hidden = _batches(decoder.embed(ids), max(1, TOKENS // ids.shape[1]) if decoder.device.type == "cuda" else 1)
    if walked is not None:
        walked.begin(hidden)
    for number in range(len(decoder.layers)):
        layer = layers.load(number)
        if number == 0:
            decoder.learn(ids[0], layer, hidden[0][:1])
        found, targets = layers.recall(number), layers.targets(number)
        if walked is not None:
            walked.add(decoder, number, layer, targets)
        if found is None:
            moments = Moments(layer, [target.name for target in targets])
            with moments.watching():
                for batch in hidden:
                    decoder.run(layer, number, batch)
            found = _made(layer, targets, moments, number)
            layers.keep(number, *found)
            del moments
        made, report = found
        for target in targets:
            _put(layer, target, made[target.key])
        if number + 1 < len(decoder.layers):
            hidden = [decoder.run(layer, number, batch).cpu() for batch in hidden]
        yield report


def _batches(samples: Iterable[Tensor], size: int) -> list[Tensor]:
    """Samples [1, L, H] joined to [size, L, H]."""
    found = list(samples)
    return [torch.cat(found[i : i + size]) for i in range(0, len(found), size)]


def _made(
    layer: nn.Module, targets: list[Target], moments: Moments, number: int
) -> tuple[dict[str, Made], LayerReport]:
    made: dict[str, Made] = {}
    uncorrected = [target for target in targets if target.why]
    remarks = [f"{', '.join(target.key for target in uncorrected)}: {uncorrected[0].why}"] if uncorrected else []
    shared: dict[str, Inputs] = {}
    for target in targets:
        if target.is_stack:
            made[target.key] = _stack(layer, target, moments, remarks)
            continue
        leader = moments.leader(target.name)
        if leader not in shared:
            shared = {leader: _inputs(moments.of(target.name), layer.get_submodule(target.name).in_features, layer)}
            if shared[leader].why:
                remarks.append(f"{target.key}: {shared[leader].why}: scales are searched, no errors passed on")
        made[target.key] = _linear(layer, target, shared[leader])
    total = [sum(getattr(each, name) for each in made.values()) for name in ("error", "plain", "whole")]
    whole = total[2] or 1.0
    methods = _counted(each.methods for each in made.values())
    return made, LayerReport(number, total[0] / whole, total[1] / whole, methods, remarks)


def _counted(found: Iterable[dict[str, int]]) -> dict[str, int]:
    return dict(sum(map(Counter, found), Counter()))


def _inputs(H: Tensor | None, K: int, layer: nn.Module) -> Inputs:
    return Inputs(torch.zeros(K, K, dtype=torch.float32, device=next(layer.parameters()).device) if H is None else H)


def _solved(
    w: Tensor, target: Target, inputs: Inputs
) -> tuple[Solved, Tensor, QuantState, tuple[Tensor, Tensor] | None]:
    """What `solve` chose for w [N, K], its packed bytes and state, and an adapter where the target has one."""
    solved = solve(w, inputs, target.fmt)
    data, state = packed(solved.choice, target.fmt, w.shape, target.dtype)
    values = _require_no_worse(target.key, w, data, state, inputs, solved)
    return solved, data, state, low_rank.correction(w - values, inputs.H, target.rank) if target.rank else None


def _linear(layer: nn.Module, target: Target, inputs: Inputs) -> Made:
    w = layer.get_submodule(target.name).weight.detach()
    _require_finite(target.key, w)
    solved, data, state, adapter = _solved(w, target, inputs)
    return Made(data, state, adapter, solved.error, solved.plain, solved.whole, {solved.choice.method: 1})


def _stack(layer: nn.Module, target: Target, moments: Moments, remarks: list[str]) -> Made:
    stack = _tensor(layer, target)
    _require_finite(target.key, stack)
    parts, factors, empty = [], [], 0
    for expert in range(len(stack)):
        w = (stack[expert].t() if target.transposed else stack[expert]).contiguous()
        H, rows = moments.of_expert(target.name, expert)
        solved, data, state, adapter = _solved(w, target, _inputs(H, w.shape[1], layer))
        factors += [] if adapter is None else [adapter]
        parts.append((data, state, solved, rows))
        empty += rows == 0
    if empty:
        remarks.append(f"{target.key}: no token reached {empty} of {len(stack)} experts: calibrated for the layer's")
    data, state = _joined([part[0] for part in parts], [part[1] for part in parts])
    methods = _counted({part[2].choice.method: 1} for part in parts)
    sums = [sum(getattr(part[2], name) * part[3] for part in parts) for name in ("error", "plain", "whole")]
    rows = max(sum(part[3] for part in parts), 1)
    adapter = (torch.stack([a for a, _ in factors]), torch.stack([b for _, b in factors])) if factors else None
    return Made(data, state, adapter, *(total / rows for total in sums), methods)


def _joined(packed_parts: list[Tensor], states: list[QuantState]) -> tuple[Tensor, QuantState]:
    """Experts' packed bytes and states as those of their stack."""
    state = states[0]
    shape = torch.Size((len(states), *state.shape))
    absmax = torch.cat([each.absmax for each in states])
    if not state.kind.nests:
        second = torch.cat([each.state2.absmax for each in states])
        return torch.cat(packed_parts), state.kind.stack.state(QuantState, absmax, second, shape, state.dtype)
    made = QuantState(
        absmax=absmax, shape=shape, blocksize=state.blocksize, quant_type=state.quant_type, dtype=state.dtype
    )
    made.share(state.quant_type)
    made.kind = made.kind.stack
    if state.nested:
        second = torch.cat([each.state2.absmax for each in states])
        functional.set_nested(made, absmax, second, torch.stack([each.offset for each in states]))
    return torch.cat(packed_parts), made


def _require_finite(key: str, w: Tensor) -> None:
    wrong = int((~torch.isfinite(w)).sum())
    if wrong:
        raise ValueError(f"{key}: {wrong} of its {w.numel()} values are not finite")


def _require_no_worse(key: str, w: Tensor, data: Tensor, state: QuantState, inputs: Inputs, solved: Solved) -> Tensor:
    """float32 [N, K], what a reader decodes; RuntimeError where its error is above that of plain quantization,
    ValueError where that is no number."""
    values = _decoded(data, state)
    error = inputs.error(w - values)
    if not math.isfinite(solved.plain):
        largest = float(w.abs().max()), float(inputs.weights.max().sqrt())
        raise ValueError(f"{key}: values up to {largest[0]:g} and inputs about {largest[1]:g} overflow their errors")
    if not error <= solved.plain * (1 + 1e-4) + 1e-30:
        raise RuntimeError(f"{key}: an error of {error:g} is above that of plain quantization, {solved.plain:g}")
    return values


def _decoded(data: Tensor, state: QuantState) -> Tensor:
    """The values of a packed weight in float32, whatever its own dtype is."""
    wide = state.clone()
    wide.dtype = torch.float32
    return functional.dequantize_4bit(data, wide)


def _tensor(layer: nn.Module, target: Target) -> Tensor:
    parent, _, leaf = target.name.rpartition(".")
    return layer.get_submodule(parent)._parameters[leaf].detach()


def _put(layer: nn.Module, target: Target, made: Made) -> None:
    """Give a dense layer the values of a weight in 4 bits, with its adapter."""
    device = next(layer.parameters()).device
    values = _decoded(made.packed.to(device), made.state.moved(device))
    if made.adapter is not None:
        a, b = (each.to(device) for each in made.adapter)
        values = values + b @ a
    if target.is_stack:
        _tensor(layer, target).copy_(values.transpose(1, 2) if target.transposed else values)
    else:
        layer.get_submodule(target.name).weight.data.copy_(values)


def summary(reports: list[LayerReport]) -> dict[str, Any]:
    """Mean shares that are lost in all layers, how many matrices were chosen by which method, and remarks."""
    count = max(len(reports), 1)
    return {
        "error": sum(report.error for report in reports) / count,
        "plain": sum(report.plain for report in reports) / count,
        "methods": _counted(report.methods for report in reports),
        "remarks": [remark for report in reports for remark in report.remarks],
    }
