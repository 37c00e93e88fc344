"""Batches of a causal language model made longer on the right, so that many lengths share a graph.

A token of a causal model sees what is left of it, so tokens behind all others change nothing of them. They get labels
that losses ignore (-100), and results are cut to the length of the batch again. A mask of ones goes on with ones, for
zeros would cost attention its fast kernel; a mask with zeros goes on with zeros. In packed batches the new tokens are a
sequence of their own.

Rows of one length that hold packed sequences share a graph, too, with or without new tokens: the list of sequences is
filled up with empty ones, and the length of the longest, an upper bound to attention, becomes that of the row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils import _pytree as pytree

IGNORED = -100  # label that torch's and transformers' losses leave out
SEQUENCES = 32  # entries that the list of packed sequences has at least; else a power of two
LONG = 8192  # in longer rows the bound is a power of two from here on: attention has idle blocks for what is too much
FILLS = {"input_ids": 0, "labels": IGNORED, "shift_labels": IGNORED, "token_type_ids": 0}
ENDS = ("cu_seq_lens_q", "cu_seq_lens_k")  # int32 [sequences + 1]: where packed sequences begin, and the last ends
LONGEST = ("max_length_q", "max_length_k")  # int: at least the longest of them


class Padded(NamedTuple):
    """Arguments of a call, and how long they are now and were (tokens in a row)."""

    kwargs: dict[str, Any]
    length: int = 0
    before: int = 0
    packed: bool = False

    def facts(self, facts: tuple) -> tuple:
        """What masks ask of values (`masks.facts`), after it: new tokens of a packed batch are a new sequence."""
        restarts = self.packed and self.length > self.before and "position_ids" in self.kwargs
        return (*facts[:-1], True) if restarts else facts

    def cut(self, output: Any) -> Any:
        """The output of the call for the tokens that were there before."""
        return output if self.length == self.before else pytree.tree_map(self._cut, output)

    def _cut(self, value: Any) -> Any:
        missing = self.length - value.size(1) if isinstance(value, Tensor) and value.ndim > 1 else -1
        # a result of the next token has one less
        return value[:, : self.before - missing] if missing in (0, 1) else value


def pads(model: nn.Module) -> bool:
    """Whether tokens behind all others change nothing of a model: a causal one without a loss over all tokens."""
    config = getattr(model, "config", None)
    names = {type(module).__name__.removeprefix("FSDP") for module in model.modules() if hasattr(module, "config")}
    causal = any("CausalLM" in name for name in names)
    balanced = getattr(config, "output_router_logits", False)
    return causal and not balanced and not getattr(config, "is_encoder_decoder", False)


def packed(kwargs: dict[str, Any]) -> bool:
    """Whether rows hold several sequences, of which the call has a list."""
    return any(end in kwargs for end in ENDS)


def padded(kwargs: dict[str, Any], step: int, ones: bool) -> Padded:
    """Arguments whose rows have a multiple of `step` tokens; unchanged where one of them has a meaning not known here.

    Args:
        ones: whether the attention mask has no zeros.
    """
    ids = kwargs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        return Padded(kwargs)
    before = ids.size(1)
    more, several = -before % step, packed(kwargs)
    out = dict(kwargs)
    for name, value in kwargs.items():
        if name in ENDS or not isinstance(value, Tensor) or value.ndim == 0:
            continue
        if value.shape[-1] != before or value.ndim != 2:
            return Padded(kwargs)
        if name in FILLS or name == "attention_mask":
            fill = int(ones) if name == "attention_mask" else FILLS[name]
            out[name] = pad(value, (0, more), value=fill) if more else value
        elif name == "position_ids":
            out[name] = _positions(value, more, several)
        elif name == "seq_idx":
            out[name] = torch.cat([value, value[:, -1:].add(1).expand(-1, more)], 1) if more else value
        else:
            return Padded(kwargs)
    for name in ENDS:
        if isinstance(kwargs.get(name), Tensor):
            out[name] = _ends(kwargs[name], before, more)
    for name in LONGEST:
        if isinstance(kwargs.get(name), int):
            out[name] = min(before + more, _power_of_two(max(kwargs[name], more, LONG)))
    return Padded(out, before + more, before, several)


def _positions(positions: Tensor, more: int, several: bool) -> Tensor:
    """[B, S + more]: going on, or from 0 where sequences are packed."""
    if not more:
        return positions
    new = torch.arange(more, device=positions.device, dtype=positions.dtype).expand(positions.size(0), -1)
    return torch.cat([positions, new if several else new + positions[:, -1:] + 1], 1)


def _ends(ends: Tensor, before: int, more: int) -> Tensor:
    """With the new tokens as a sequence, and empty sequences behind."""
    count = ends.numel() + (more > 0)
    return pad(ends, (0, _power_of_two(max(count, SEQUENCES)) - ends.numel()), value=before + more)


def _power_of_two(number: int) -> int:
    """The least that is not below it."""
    return 1 << (number - 1).bit_length()
