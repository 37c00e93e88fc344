"""FSDP1's low-memory way: rank 0 has the model, the others have it on the meta device until FSDP1 sends the weights.

`sync_module_states=True` sends parameters and buffers. What a 4-bit layer needs besides, the quantization states, goes
before it: each rank gets the states, and weights of their size and dtype without data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bitshard.formats.state import QuantState
from bitshard.sharding.loading.skeleton import Skeleton, packed_weights
from bitshard.sharding.loading.units import begin, compute_device, outermost, shown, unit_name
from bitshard.sharding.together import together
from bitshard.weights.tensor import Params4bit

_MADE = "_materialized"  # attribute of a parameter on the meta device: what has taken its place


def load_on_rank0(
    source: Any,
    files: str | Path | Iterable[str | Path] | None = None,
    *,
    quantization_config: Any = None,
    dtype: torch.dtype | None = None,
    build: Callable[..., nn.Module] | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> nn.Module:
    """A model of transformers for FSDP1: whole in rank 0's host memory, on the meta device elsewhere.

    Wrap it with `sync_module_states=True` and `param_init_fn=bitshard.fsdp.materialize`. The packed bytes are kept in a
    container of `dtype`, which FSDP1 flattens together with the rest. Adapters are added before it is wrapped, on all
    ranks; those of rank 0 count.

    Args:
        device: where rank 0 quantizes; default: the current GPU, or the CPU.
        source, files, quantization_config, dtype, build, progress: as `load`.

    ValueError or OSError on all ranks where rank 0 cannot read its files. A collective: all ranks call it.
    """
    if not dist.is_initialized():
        raise ValueError("load_on_rank0: there is no process group; start the script with torchrun")
    reads = dist.get_rank() == 0

    where = device if reads else "cpu"
    skeleton, reader = together(
        "load_on_rank0", lambda: begin(source, files, quantization_config, dtype, build, where, reads)
    )
    for unit in [*shown(outermost(skeleton.units()), progress), skeleton.model]:
        what = f"load_on_rank0: {unit_name(skeleton.model, unit) or 'what is in no unit'}"
        together(what, lambda unit=unit: _fill_on_host(skeleton, unit, reader) if reads else (None, None))
        send_quant_states(unit)
    return skeleton.done()


def send_quant_states(model: nn.Module) -> int:
    """Give the 4-bit layers on the meta device the states of rank 0's layers, whose weights are there; how many.

    For models that rank 0 has loaded and the other ranks have built on the meta device, with the same 4-bit layers.
    What comes to their weights after that (`sync_module_states=True`) is compared with what rank 0 quantized in the
    first forward. ValueError on all ranks where layers differ. A collective.
    """
    weights = list(packed_weights(model))
    shapes = [list(held.shape or ()) for held in weights]
    together("send_quant_states", lambda: (None, shapes))
    box = [together("send_quant_states", lambda: (_states(weights) if dist.get_rank() == 0 else [], None))]
    dist.broadcast_object_list(box, src=0)
    if dist.get_rank() > 0:
        for held, told in zip(weights, box[0], strict=True):
            _await(held, *told)
    return len(weights)


def materialize(module: nn.Module) -> None:
    """FSDP1's `param_init_fn`: memory for the parameters and buffers of `module` that are on the meta device.

    A parameter that modules share stays one, as it is on the rank that has the weights (`to_empty` makes two of it).
    """
    device = compute_device(None)
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            if not hasattr(parameter, _MADE):
                made = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
                setattr(parameter, _MADE, made)
            module._parameters[name] = getattr(parameter, _MADE)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device=device)


def _fill_on_host(skeleton: Skeleton, unit: nn.Module, reader: Any) -> tuple[None, None]:
    """Fill a unit where it is quantized, and bring it to the host."""
    skeleton.fill(unit, reader)
    unit.to("cpu")
    return None, None


def _states(weights: list[Any]) -> list[tuple[Any, ...]]:
    """What other ranks must know of each weight: its state, checksum, size, dtypes and layout in files."""
    told = []
    for held in weights:
        weight = held.weight
        if not isinstance(weight, Params4bit) or not weight.bnb_quantized or weight.is_meta:
            raise ValueError(f"a layer of {list(held.shape)} has no quantized weight on rank 0")
        state = weight.quant_state
        entries = {name: value.cpu() for name, value in state.as_dict(packed=True).items()}
        dtypes = weight.dtype, weight.quant_storage
        told.append((entries, int(state.checksum), tuple(weight.shape), *dtypes, held.layout))
    return told


def _await(
    held: Any, entries: dict, checksum: int, shape: tuple, dtype: torch.dtype, storage: torch.dtype, layout: Any
) -> None:
    """Give a layer a weight without data, whose bytes FSDP1 brings."""
    state = QuantState.from_dict(entries, device="cpu")
    if list(state.shape) != list(held.shape):
        raise ValueError(f"rank 0 has a weight of {list(state.shape)} for a layer of {list(held.shape)}")
    state.checksum = torch.tensor(checksum, dtype=torch.int64)
    weight = Params4bit.of_state(torch.empty(shape, dtype=dtype, device="meta"), state, storage, held.layer)
    held.take(weight)
    held.layout = layout
    held.delivered()
