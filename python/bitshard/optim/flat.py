"""State of FSDP1's flat parameters, and of views of them: as tensors of one element for each of the parameter's.

FSDP1 gathers, splits and pads such tensors itself, and takes nothing else that differs between ranks. So the two means
of AdEMAMix are two entries, codes are float32, for it flattens no integers, and a scale stands at each element of its
block; the maps are left out. Padding comes back as zeros, which is no code for zero: where a scale is zero the code of
zero is put.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitshard.maps import create_dynamic_map
from bitshard.optim.layout import BLOCKSIZE


def is_flat(p: Tensor) -> bool:
    """Whether FSDP1 has flattened this parameter."""
    return getattr(p, "_fsdp_flattened", False) or getattr(p, "_is_flat_param", False)


def to_entries(state: dict[str, Any], lead: int) -> dict[str, Any]:
    """Entries of the elements' shape, and the step."""
    entries = {"step": state["step"]}
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
    return entries


def from_entries(entries: dict[str, Any], states: int, lead: int) -> dict[str, Any]:
    """The entries of a parameter that is not sharded, from those of `to_entries`. ValueError where one is missing."""
    found = {"step": entries.get("step")}
    for n in range(1, states + 1):
        ends = [f"{n}_0", f"{n}_1"] if n == 1 and lead else [f"{n}"]
        values, scales = ([entries.get(f"{key}{end}") for end in ends] for key in ("state", "absmax"))
        if any(not isinstance(value, Tensor) for value in values):
            raise ValueError(
                f"the state has no {', '.join(f'state{end}' for end in ends)}: it has {', '.join(entries)}"
            )
        if isinstance(scales[0], Tensor):
            if any(not isinstance(a, Tensor) or a.shape != v.shape for a, v in zip(scales, values, strict=True)):
                raise ValueError(f"absmax{n} has not one scale for each element: it was not saved under FSDP1")
            if any(v.dtype != torch.float32 or not ((v >= 0) & (v <= 255)).all() for v in values):
                raise ValueError(
                    f"state{n} has scales and is no float32 codes from 0 to 255: it was not saved under FSDP1"
                )
            values = [v.to(torch.uint8) for v in values]
            qmap = create_dynamic_map(signed=n == 1).to(values[0].device)
            zero = int((qmap == 0).nonzero()[0])
            values = [v.where(a != 0, torch.full_like(v, zero)) for v, a in zip(values, scales, strict=True)]
            scales = [_of_blocks(a.reshape(-1)) for a in scales]
            found |= {f"qmap{n}": qmap, f"absmax{n}": torch.stack(scales) if len(ends) > 1 else scales[0]}
        found[f"state{n}"] = torch.stack(values) if len(ends) > 1 else values[0]
    return found


def _of_blocks(scales: Tensor) -> Tensor:
    """One scale a block: the largest, for what was padding is zero."""
    short = -scales.numel() % BLOCKSIZE
    return torch.nn.functional.pad(scales, (0, short)).view(-1, BLOCKSIZE).amax(1)
