"""State of one parameter as entries of a state dict, and back: checked whole before anything is taken.

Entries have bitsandbytes' names. Those of `HIDDEN` stand in a dict of their own under `WRAPPED`, as there, so that
FSDP1 does not take them for tensors of the parameter's shape.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from bitshard import ops
from bitshard.optim import flat, shards
from bitshard.shards.gather import is_dtensor

WRAPPED = "__bnb_optimizer_quant_state__"
HIDDEN = {
    "qmap1",
    "qmap2",
    "max1",
    "max2",
    "new_max1",
    "new_max2",
    "state1",
    "state2",
    "gnorm_vec",
    "absmax1",
    "absmax2",
    "unorm_vec",
}
Page = Callable[[Tensor], Tensor]  # copies a state to paged memory
BITS = "state_bits"  # beside the HIDDEN of a DTensor


def to_entries(state: dict[str, Any], p: Tensor, lead: int, bits: int) -> dict[str, Any]:
    """Entries for the state of `p`; a DTensor's values and scales become DTensors. Shares memory with the state.

    A DTensor's also say whether the state is in 8 or 32 bits: torch.distributed copies codes into a float32 tensor
    without a word.
    `bits` are what the settings ask for; a small part of a parameter is in 32 all the same.
    """
    if flat.is_flat(p) and "state1" in state:
        device = shards.local(p).device  # FSDP1 gathers there what is in paged memory
        tensors = {key: value.detach().to(device) for key, value in state.items() if isinstance(value, Tensor)}
        return flat.to_entries(state | tensors, lead, bits)
    entries = {key: value for key, value in state.items() if key not in HIDDEN}
    hidden = {key: _entry(key, value, p, lead) for key, value in state.items() if key in HIDDEN}
    if is_dtensor(p) and isinstance(state.get("state1"), Tensor):
        hidden[BITS] = 8 if state["state1"].dtype == torch.uint8 else 32
    return {**entries, WRAPPED: hidden} if hidden else entries


def _entry(key: str, value: Any, p: Tensor, lead: int) -> Any:
    if not isinstance(value, Tensor) or is_dtensor(value):
        return value
    if key in ("state1", "state2"):
        return shards.values_to_entry(value.detach(), p, lead if key == "state1" else 0)
    return shards.scales_to_entry(value, p) if key in ("absmax1", "absmax2") else value


def from_entries(
    entries: dict[str, Any],
    p: Tensor,
    states: int,
    lead: int,
    move: bool,
    page: Page | None = None,
) -> dict[str, Any]:
    """The state of `p` from entries, in memory of its own; on the device of `p` where `move` is true.

    `states` is how many the algorithm has, `lead` 1 where the first is AdEMAMix's pair; `page` copies state1 and state2
    to paged memory, where they stay. TypeError or ValueError for entries of another algorithm, dtype, shape or
    blocksize.
    """
    if not isinstance(entries, dict):
        raise TypeError(f"the state is a {type(entries).__name__}, not a dict")
    wrapped = entries.get(WRAPPED, {})
    if not isinstance(wrapped, dict):
        raise TypeError(f"{WRAPPED} is a {type(wrapped).__name__}, not a dict")
    entries = {key: value for key, value in entries.items() if key != WRAPPED} | wrapped
    if not entries:
        return {}
    for key, value in entries.items():
        _check_tensor(key, value, p)
    if flat.is_flat(p) or flat.is_saved(entries):
        entries = flat.from_entries(entries, states, lead)
    _check_names(entries, states)
    _check_bits(entries.pop(BITS, None), entries)
    state = {key: _copy(value, p, move) for key, value in entries.items() if key not in HIDDEN}
    state["step"] = _step(entries["step"])
    for n in range(1, states + 1):
        state |= _values(entries, n, p, lead if n == 1 else 0, move, page)
    if "unorm_vec" in entries:
        state["unorm_vec"] = _vector(entries, "unorm_vec", 1, p, move)
    return state


def _check_tensor(key: Any, value: Any, p: Tensor) -> None:
    """TypeError or ValueError for a tensor that nothing can be read from."""
    if not isinstance(value, Tensor):
        return
    if value.layout is not torch.strided:
        raise TypeError(f"{key} is sparse ({value.layout})")
    if value.is_meta and not shards.local(p).is_meta:
        raise ValueError(f"{key} is on the meta device, which has no values")


def _copy(value: Any, p: Tensor, move: bool) -> Any:
    if not isinstance(value, Tensor):
        return deepcopy(value)
    return value.detach().to(shards.local(p).device if move and value.dim() else value.device, copy=True)


def _step(value: Any) -> int:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**62 or value != int(value):
        raise ValueError(f"step must be a whole number from 0 on, got {str(value)[:40]!r}")
    return int(value)


def _check_names(entries: dict[str, Any], states: int) -> None:
    """ValueError where the entries are not those of an algorithm with this many states."""
    expected = {"step", *(f"state{n}" for n in range(1, states + 1))}
    if missing := expected - entries.keys():
        raise ValueError(f"the state has no {', '.join(sorted(missing))}: it has {', '.join(map(str, entries))}")
    if states == 1 and isinstance(entries.get("state2"), Tensor):
        raise ValueError("the state has state2, and this algorithm has one state")
    kinds = {
        entries[f"state{n}"].dtype if isinstance(entries[f"state{n}"], Tensor) else None for n in range(1, states + 1)
    }
    if len(kinds) != 1 or not kinds <= {torch.float32, torch.uint8}:
        raise TypeError(f"state1 and state2 must both be float32, or both uint8, got {[str(kind) for kind in kinds]}")


def _check_bits(bits: Any, entries: dict[str, Any]) -> None:
    """ValueError where codes of 8 bits have become float32."""
    scales = [key for key in ("absmax1", "absmax2", "qmap1", "qmap2") if entries.get(key) is not None]
    if entries["state1"].dtype == torch.float32 and (bits not in (None, 32) or scales):
        raise ValueError(
            "the state was saved in 8 bits, and this optimizer keeps it in 32: give it the optim_bits and "
            "min_8bit_size of the one that saved it"
        )
    if entries["state1"].dtype == torch.uint8 and bits not in (None, 8):
        raise ValueError(f"the state is in 8 bits, and {BITS} beside it is {bits!r}")


def _values(entries: dict[str, Any], n: int, p: Tensor, lead: int, move: bool, page: Page | None) -> dict[str, Any]:
    """state<n> of this rank, with its map and scales where it is in 8 bits."""
    name, value = f"state{n}", entries[f"state{n}"]
    device = shards.local(p).device if move else shards.local(value).device
    keep = page or (lambda part: part.to(device, copy=True, memory_format=torch.contiguous_format))
    if value.dtype == torch.float32:
        part = shards.own_part(value, p, lead, name)
        return {name: keep(part)}
    absmax = entries.get(f"absmax{n}")
    if not isinstance(absmax, Tensor) or absmax.dtype != torch.float32:
        raise ValueError(f"{name} is in 8 bits and has no float32 absmax{n}: only blocks of 256 are supported")
    qmap, beside = _vector(entries, f"qmap{n}", 256, p, False), shards.local(value).device
    if not is_dtensor(absmax):
        absmax = absmax.to(beside)
    codes, scales = shards.own_codes(value, absmax, qmap.to(beside), p, lead, name)
    return {name: keep(codes), f"qmap{n}": qmap.to(device), f"absmax{n}": scales.to(device, copy=True)}


def _vector(entries: dict[str, Any], key: str, size: int, p: Tensor, move: bool) -> Tensor:
    """A float32 vector of `size` elements, which all ranks have alike."""
    value = entries.get(key)
    if is_dtensor(value):
        value = value._local_tensor
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or tuple(value.shape) != (size,):
        seen = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{key} must be float32 [{size}], got {seen}")
    return value.detach().to(shards.local(p).device if move else value.device, copy=True)


def check_groups(groups: list[dict], saved: Any, needed: set[str]) -> None:
    """ValueError where saved parameter groups are of other parameters, or lack a setting of this optimizer.

    TypeError or ValueError where a setting is none.
    """
    if not isinstance(saved, (list, tuple)) or len(groups) != len(saved):
        raise ValueError("loaded state dict has a different number of parameter groups")
    for index, (group, other) in enumerate(zip(groups, saved, strict=True)):
        if not isinstance(other, dict) or not isinstance(other.get("params"), (list, tuple)):
            raise TypeError(f"loaded parameter group {index} is no dict with a list of parameters")
        if len(group["params"]) != len(other["params"]):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: group "
                f"{index} has {len(group['params'])} parameters, the loaded one {len(other['params'])}"
            )
        if missing := needed - other.keys():
            raise ValueError(
                f"loaded parameter group {index} has no {', '.join(sorted(missing))}: it is of another optimizer"
            )
        for key in needed:
            _check_setting(index, key, other[key])
        if "betas" in needed and len(other["betas"]) != len(group["betas"]):
            raise ValueError(
                f"loaded parameter group {index} has {len(other['betas'])} betas, this optimizer {len(group['betas'])}"
            )


def _check_setting(index: int, key: str, value: Any) -> None:
    """A number from 0 on; betas are several, and below 1."""
    if (key == "betas") != isinstance(value, (list, tuple)):
        raise TypeError(f"loaded parameter group {index}: {key} is a {type(value).__name__}")
    for number in value if key == "betas" else (value,):
        if isinstance(number, Tensor) and number.numel() == 1 and not number.is_meta:
            number = number.item()
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise TypeError(f"loaded parameter group {index}: {key} has a {type(number).__name__}, not a number")
        if not 0 <= number < (1.0 if key == "betas" else float("inf")):
            raise ValueError(f"loaded parameter group {index}: {key} is {number:g}")


def new_scales(p: Tensor, lead: int) -> Tensor:
    """Zeros for the scales of this rank's blocks: float32 [blocks], or [2, blocks] for AdEMAMix's pair."""
    blocks = ops.block_count(shards.local(p).numel(), shards.BLOCKSIZE)
    return torch.zeros((*(2,) * lead, blocks), dtype=torch.float32, device=shards.local(p).device)
