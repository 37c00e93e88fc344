"""State of FSDP1's flat parameters, and of views of them: as tensors of one element for each of the parameter's.

FSDP1 gathers, splits and pads such tensors itself, and takes nothing else that differs between ranks. So the two means
of AdEMAMix are two entries, codes are float32, for it flattens no integers, and a scale stands at each element of its
block; the maps are left out. The step is a tensor without dimensions: loading from rank 0 FSDP1 takes no numbers. It
also wants the same entries of all ranks, while each decides by the size of its own part what is in 8 bits: where 8 bits
were asked for, float32 state has the scale -1 (`PLAIN`) at each element. Padding comes back as zeros, and stands for
zero.

On the number of ranks that saved it the state is exactly what it was. On another one the parts begin elsewhere: where
blocks differ, values are quantized again, with the error that `shards` states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitshard import ops
from bitshard.formats.maps import create_dynamic_map
from bitshard.optim.shards import BLOCKSIZE

PLAIN = -1.0


def is_flat(p: Tensor) -> bool:
    """Whether FSDP1 has flattened this parameter."""
    return getattr(p, "_fsdp_flattened", False) or getattr(p, "_is_flat_param", False)


def is_saved(entries: dict[str, Any]) -> bool:
    """Whether entries are those of `to_entries`: they differ from others in AdEMAMix's names, and in 8 bits."""
    state, absmax = entries.get("state1"), entries.get("absmax1")
    both = isinstance(state, Tensor) and isinstance(absmax, Tensor)
    return "state1_0" in entries or (both and state.dtype == torch.float32 and state.shape == absmax.shape)


def to_entries(state: dict[str, Any], lead: int, bits: int) -> dict[str, Any]:
    """Entries of the elements' shape, and the step; `bits` are those that the settings ask for."""
    entries = {"step": torch.tensor(state["step"], dtype=torch.int64)}
    for n in (1, 2):
        if (value := state.get(f"state{n}")) is None:
            continue
        absmax = state.get(f"absmax{n}")
        for index in range(2) if n == 1 and lead else (None,):
            end = f"{n}" if index is None else f"{n}_{index}"
            part = value if index is None else value[index]
            entries[f"state{end}"] = part.float()
            if absmax is not None:
                scales = absmax if index is None else absmax[index]
                entries[f"absmax{end}"] = scales.repeat_interleave(BLOCKSIZE)[: part.numel()].view(part.shape)
            elif bits == 8:
                entries[f"absmax{end}"] = torch.full_like(part, PLAIN)
    return entries


def from_entries(entries: dict[str, Any], states: int, lead: int) -> dict[str, Any]:
    """The entries of a parameter that is not sharded, from those of `to_entries`. ValueError where one is missing."""
    found = {"step": entries.get("step")}
    for n in range(1, states + 1):
        ends = [f"{n}_0", f"{n}_1"] if n == 1 and lead else [f"{n}"]
        values, scales = ([entries.get(f"{key}{end}") for end in ends] for key in ("state", "absmax"))
        if any(not isinstance(value, Tensor) for value in values):
            raise ValueError(
                f"the state has no {', '.join(f'state{end}' for end in ends)}: it has {', '.join(map(str, entries))}"
            )
        if len(ends) > 1 and values[0].shape != values[1].shape:
            raise ValueError(f"state{n} has two parts of shapes {tuple(values[0].shape)} and {tuple(values[1].shape)}")
        if isinstance(scales[0], Tensor):
            _check(values, scales, n)
            if _all_plain(scales):
                values = [v.where(a == PLAIN, torch.zeros_like(v)) for v, a in zip(values, scales, strict=True)]
            else:
                qmap = create_dynamic_map(signed=n == 1).to(values[0].device)
                pairs = [_of_elements(v, a, qmap) for v, a in zip(values, scales, strict=True)]
                values = [codes for codes, _ in pairs]
                found |= {f"qmap{n}": qmap, f"absmax{n}": _joined([scales for _, scales in pairs])}
        found[f"state{n}"] = _joined(values)
    return found


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts) if len(parts) > 1 else parts[0]


def _check(values: list[Tensor], scales: list[Tensor], n: int) -> None:
    """ValueError where these are no codes, or plain values, with a scale for each."""
    if any(not isinstance(a, Tensor) or a.shape != v.shape for a, v in zip(scales, values, strict=True)):
        raise ValueError(f"absmax{n} has not one scale for each element: it was not saved under FSDP1")
    if any(tensor.dtype != torch.float32 for tensor in (*values, *scales)):
        raise ValueError(f"state{n} and its scales must be float32: it was not saved under FSDP1")
    for v, a in zip(values, scales, strict=True):
        if not ((a == PLAIN) | (a >= 0)).all():
            raise ValueError(f"absmax{n} has scales that are neither from 0 on nor {PLAIN:g}")
        if not ((a == PLAIN) | ((v >= 0) & (v <= 255) & (v == v.floor()))).all():
            raise ValueError(f"state{n} has scales and is no float32 codes from 0 to 255: it was not saved under FSDP1")


def _all_plain(scales: list[Tensor]) -> bool:
    """Whether all elements but padding are float32 values."""
    return all(bool((a <= 0).all()) for a in scales) and any(bool((a == PLAIN).any()) for a in scales)


def _of_elements(values: Tensor, absmax: Tensor, qmap: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales of blocks): the codes themselves where one scale fits each block, else quantized again."""
    plain = absmax == PLAIN
    codes = values.where(absmax > 0, torch.full_like(values, int((qmap == 0).nonzero()[0]))).to(torch.uint8)
    top = _of_blocks(absmax.reshape(-1))
    own = top.repeat_interleave(BLOCKSIZE)[: absmax.numel()].view(absmax.shape)
    if not plain.any() and ((absmax == 0) | (absmax == own)).all():
        return codes, top
    values = values.where(plain, qmap[codes.int()] * absmax)
    codes, top = ops.quantize_blockwise(values.contiguous(), qmap, ops.empty(qmap.device), BLOCKSIZE)
    return codes.view(absmax.shape), top


def _of_blocks(scales: Tensor) -> Tensor:
    """One scale a block: the largest, for what was padding is zero."""
    short = -scales.numel() % BLOCKSIZE
    return torch.nn.functional.pad(scales, (0, short)).view(-1, BLOCKSIZE).amax(1)
