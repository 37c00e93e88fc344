"""Scales and codes of a matrix, chosen for the inputs that it is multiplied with; the format stays what it is.

With H the mean of x x^T over inputs x, a matrix W [N, K] and its 4-bit form Q, a product loses
tr((W - Q) H (W - Q)^T): the error here. A scale is searched for each block under the diagonal of H. Then codes are
chosen column by column, those that matter most first, and each column's error is passed on to the columns behind it
(GPTQ, arXiv 2210.17323). Where scales are 8-bit floats (MXFP4, NVFP4) those that are tried are such floats.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bitshard import ops
from bitshard.formats.kind import Kind, kind_of
from bitshard.formats.maps import table
from bitshard.formats.microscaled import LARGEST_CODE, LARGEST_SCALE, Microscaled
from bitshard.formats.state import NESTED_BLOCKSIZE, QuantState
from bitshard.functions import functional
from bitshard.functions.blockwise import mean

PANEL = 64  # columns that are rounded before what they have passed on reaches all others
STEPS, LEAST, MOST = 21, 0.72, 1.12  # scales that are tried: multiples of a block's largest magnitude, of either sign;
# in MXFP4 and NVFP4, whose codes have both signs alike, of one
HEADROOM = 1.15  # of a second-level scale over the scales that a first search chose
DAMPING = 0.05  # of H, in parts of its mean diagonal; ten times as much where that is singular, at most RETRIES times
RETRIES = 3


class Format(NamedTuple):
    """What a matrix becomes: the name of the format, elements of a block, and whether plain scales are nested."""

    quant_type: str = "nf4"
    blocksize: int = 64
    nested: bool = False

    @property
    def kind(self) -> Kind:
        """The kind of a matrix in it."""
        return kind_of(self.quant_type)


class Choice(NamedTuple):
    """Codes and scales of a matrix of n elements.

    Attributes:
        codes: uint8 [N, K].
        scales: float32 [ceil(n / blocksize)], as a reader decodes them.
        nested: (uint8 codes of the scales, float32 [ceil(scales / 256)], float32 offset), or None. Of MXFP4 and NVFP4
            codes are bytes of 8-bit floats, the second level is the global scale.
        method: "plain" (what quantizing to the nearest chooses), "search" or "passed on".
    """

    codes: Tensor
    scales: Tensor
    nested: tuple[Tensor, Tensor, Tensor] | None
    method: str

    def values(self, fmt: Format) -> Tensor:
        """float32 [N, K], as a reader decodes them."""
        units = table(fmt.quant_type, self.codes.device)[self.codes.long()]
        return units * _by_element(self.scales, self.codes.shape, fmt.blocksize)


class Solved(NamedTuple):
    """The best choice for a matrix, and its error beside that of plain quantization and of no matrix at all."""

    choice: Choice
    error: float
    plain: float
    whole: float


class Inputs:
    """What is known of the inputs of matrices with K columns, prepared once for all that share them.

    Args:
        H: float32 [K, K], the mean of x x^T.

    Attributes:
        weights: float32 [K], what an error of a column counts by itself.
        order: [K], columns in the order in which they are rounded.
        passes: the upper triangular U with U^T U = H^-1 in that order, or None where H cannot be inverted.
        why: then why.
    """

    def __init__(self, H: Tensor):
        self.H, self.why = H, ""
        self.passes: Tensor | None = None
        diagonal = H.diagonal()
        if not bool(torch.isfinite(H).all()):
            self.H = torch.eye(len(H), dtype=H.dtype, device=H.device)
            self.why = "moments that are not finite"
        elif not bool((diagonal > 0).any()):
            self.H = torch.eye(len(H), dtype=H.dtype, device=H.device)
            self.why = "no input but zeros"
        self.weights = self.H.diagonal().contiguous()
        self.order = torch.argsort(self.weights, descending=True, stable=True)
        if not self.why:
            self.passes = self._factor()

    def _factor(self) -> Tensor | None:
        ordered = self.H[self.order][:, self.order]
        for retry in range(RETRIES):
            damped = ordered.clone()
            damped.diagonal().add_(DAMPING * 10**retry * self.weights.mean())
            lower, failed = torch.linalg.cholesky_ex(damped)
            if int(failed):
                continue
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed) and bool(torch.isfinite(upper).all()):
                return upper
        self.why = "singular moments"
        return None

    def error(self, difference: Tensor) -> float:
        """tr(D H D^T) of D [N, K]."""
        return float(((difference @ self.H) * difference).sum(dtype=torch.float64))


class Nested:
    """Second-level scales, and the values that a scale can have by them.

    Scales have either sign, so that their mean is near zero and an 8-bit code is precise to about a hundredth of a
    scale; the search tries values that codes can have, and so loses next to nothing by them.

    Args:
        second: float32 [ceil(S / 256)].
        offset: float32, a number.
    """

    def __init__(self, second: Tensor, offset: Tensor):
        self.second, self.offset = second, offset
        self.map = table("dynamic", second.device)
        self._between = (self.map[1:] + self.map[:-1]) / 2

    @classmethod
    def after(cls, scales: Tensor) -> Nested:
        """Fixed before a search, by scales [S] of a first one."""
        offset = mean(scales)
        groups = torch.nn.functional.pad(scales - offset, (0, -len(scales) % NESTED_BLOCKSIZE))
        second = groups.view(-1, NESTED_BLOCKSIZE).abs().amax(1).mul(HEADROOM).clamp_min(1e-30)
        return cls(second, offset)

    def nearest(self, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Values that scales [S, G] can have, and their codes."""
        second = self.second.repeat_interleave(NESTED_BLOCKSIZE)[: len(wanted)].unsqueeze(1)
        codes = torch.bucketize((wanted - self.offset) / second, self._between)
        return self.map[codes] * second + self.offset, codes.to(torch.uint8)


class Floats:
    """Scales that are 8-bit floats, E8M0 or E4M3, times one global scale; the class has what `Nested` has.

    Args:
        kind: of the weight.
        second: float32 [ceil(S / 256)], the global scale each time.
        offset: 0.
    """

    def __init__(self, kind: Microscaled, second: Tensor, offset: Tensor):
        self.second, self.offset = second, offset
        self._first = 1 if kind.has_global else 0  # a scale of 0 is none
        every = table(kind.scale_table, second.device)[self._first : kind.largest_scale + 1]
        self.map = every * second[:1] if kind.has_global else every
        self._between = (self.map[1:] + self.map[:-1]) / 2

    @classmethod
    def of(cls, kind: Microscaled, largest: Tensor, shape: torch.Size) -> Floats:
        """For a matrix whose blocks have these largest magnitudes [S, 1]; a multiple of each of them can be tried."""
        whole = largest.max() * MOST / (LARGEST_CODE * LARGEST_SCALE) if largest.numel() else largest.new_ones(())
        whole = torch.where(whole > 0, whole, 1.0) if kind.has_global else torch.ones_like(whole)
        return cls(kind, whole.repeat(kind.second_level(shape)), whole.new_zeros(()))

    def wanted(self, largest: Tensor) -> Tensor:
        """Scales to try [S, G] for blocks of these largest magnitudes [S, 1]."""
        if self._first:
            return largest / LARGEST_CODE * _steps(largest.device)
        power = torch.exp2(torch.frexp(largest).exponent.float() - 3)  # as quantizing to the nearest has it
        return power * power.new_tensor([1.0, 0.5, 2.0])

    def nearest(self, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """As of `Nested`."""
        codes = torch.bucketize(wanted, self._between)
        return self.map[codes], (codes + self._first).to(torch.uint8)


def nearest_nested(scales: Tensor, state: QuantState) -> tuple[Tensor, Tensor]:
    """Scales nearest to `scales` [S] that the second level of a nested state can express, and their codes."""
    parts, kind = state.kind.parts(state), state.kind
    make = Nested if kind.nests else partial(Floats, kind)
    rows = zip(scales.view(parts, -1), state.state2.absmax.view(parts, -1), state.offset.view(parts), strict=True)
    found = [make(second, offset).nearest(row.unsqueeze(1)) for row, second, offset in rows]
    return torch.cat([values for values, _ in found]).squeeze(1), torch.cat([codes for _, codes in found]).squeeze(1)


def solve(w: Tensor, inputs: Inputs, fmt: Format) -> Solved:
    """The best of three choices for w, float32 [N, K]: plain, searched, and searched with errors passed on."""
    found = [_plain(w, fmt), _nearest(w, inputs, fmt)]
    if inputs.passes is not None:
        found.append(_passed_on(w, inputs, found[1], fmt))
    errors = [inputs.error(w - choice.values(fmt)) for choice in found]
    best = min(range(len(found)), key=lambda i: errors[i] if errors[i] == errors[i] else float("inf"))
    return Solved(found[best], errors[best], errors[0], inputs.error(w))


def packed(choice: Choice, fmt: Format, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, QuantState]:
    """A choice as packed bytes uint8 [ceil(n / 2), 1] and the state of a tensor of this shape and dtype."""
    codes = choice.codes.reshape(-1)
    if len(codes) % 2:  # a missing last value counts as zero
        codes = torch.cat([codes, codes.new_tensor([7 if fmt.quant_type == "nf4" else 0])])
    data = (codes[0::2] << 4 | codes[1::2]).view(-1, 1)
    if not fmt.kind.nests:
        return data, fmt.kind.state(QuantState, *choice.nested[:2], shape, dtype)
    state = QuantState(
        absmax=choice.scales, shape=shape, blocksize=fmt.blocksize, quant_type=fmt.quant_type, dtype=dtype
    )
    state.share(fmt.quant_type)
    if choice.nested is not None:
        functional.set_nested(state, *choice.nested)
    return data, state


# ---- the three choices ----


def _plain(w: Tensor, fmt: Format) -> Choice:
    """To the nearest: of NF4 and FP4 what bitsandbytes chooses."""
    settings = {"blocksize": fmt.blocksize, "compress_statistics": fmt.nested, "quant_type": fmt.quant_type}
    data, state = fmt.kind.quantize(w, quant_storage=torch.uint8, **settings)
    flat = data.view(-1)
    codes = torch.stack([flat >> 4, flat & 15], 1).view(-1)[: w.numel()].view(w.shape)
    nested = (state.absmax, state.state2.absmax, state.offset) if state.nested else None
    return Choice(codes, functional.plain_scales(state), nested, "plain")


def _nearest(w: Tensor, inputs: Inputs, fmt: Format) -> Choice:
    """The scale of each block that has the least squared errors under `weights`, and the nearest codes."""
    largest, second, nested = _absmax(w, fmt.blocksize), None, None
    if fmt.kind.nests:
        steps = _steps(w.device)
        wanted = largest * torch.cat([steps, -steps])
        scales, _ = _searched(w, inputs.weights, wanted, fmt)
        second = Nested.after(scales) if fmt.nested else None
    else:
        second = Floats.of(fmt.kind, largest, w.shape)
        wanted = second.wanted(largest)
    if second is not None:
        wanted, codes = second.nearest(wanted)
        scales, choice = _searched(w, inputs.weights, wanted, fmt)
        nested = (codes.gather(1, choice).squeeze(1), second.second, second.offset)
    codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    by_element = _by_element(scales, w.shape, fmt.blocksize)
    for columns in _panels(w.shape[1]):
        alone = torch.eye(columns.stop - columns.start, dtype=w.dtype, device=w.device)
        part = (each[:, columns].contiguous() for each in (w, by_element))
        codes[:, columns] = _rounded(*part, alone, fmt)[0]
    return Choice(codes, scales, nested, "search")


def _passed_on(w: Tensor, inputs: Inputs, searched: Choice, fmt: Format) -> Choice:
    """The scales that were searched, and codes that make up for the errors of those before them."""
    order, upper = inputs.order, inputs.passes
    left = w[:, order]
    scales = _by_element(searched.scales, w.shape, fmt.blocksize)[:, order]
    codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    for columns in _panels(w.shape[1]):
        u = upper[columns, columns].contiguous()
        made, errors = _rounded(left[:, columns].contiguous(), scales[:, columns].contiguous(), u, fmt)
        codes[:, order[columns]] = made
        left[:, columns.stop :].addmm_(errors, upper[columns, columns.stop :], alpha=-1)
    return Choice(codes, searched.scales, searched.nested, "passed on")


def _rounded(w: Tensor, scales: Tensor, u: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    return ops.round_4bit(w, u, scales, ops.CODES[fmt.quant_type])


def _searched(w: Tensor, weights: Tensor, wanted: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """The best of the wanted scales [S, G] for each block [S], and its number [S, 1]."""
    choice = ops.search_4bit(w, weights, wanted, fmt.blocksize, ops.CODES[fmt.quant_type]).long().unsqueeze(1)
    return wanted.gather(1, choice).squeeze(1), choice


def _panels(K: int) -> list[slice]:
    return [slice(begin, min(begin + PANEL, K)) for begin in range(0, K, PANEL)]


def _steps(device: torch.device) -> Tensor:
    return torch.linspace(LEAST, MOST, STEPS, dtype=torch.float32, device=device)


def _absmax(w: Tensor, blocksize: int) -> Tensor:
    """Largest magnitudes of the blocks of w, [S, 1]."""
    flat = w.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -len(flat) % blocksize)).view(-1, blocksize).abs().amax(1, keepdim=True)


def _by_element(scales: Tensor, shape: torch.Size, blocksize: int) -> Tensor:
    return scales.repeat_interleave(blocksize)[: shape.numel()].view(shape)
