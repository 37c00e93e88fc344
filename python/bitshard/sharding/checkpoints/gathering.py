"""The tensors of a checkpoint out of a sharded model, a piece at a time: gathered by all ranks, adapters merged.

Every rank gathers a layer and gives it back before the next one is gathered. What can fail on one rank is tried before
the collective; what fails behind it comes back beside the tensors, for the ranks' next agreement.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from bitshard.sharding.checkpoints import contents, merging, ready
from bitshard.sharding.checkpoints.contents import Piece
from bitshard.sharding.together import Ranks
from bitshard.shards import gather
from bitshard.weights.inventory import holders
from bitshard.weights.tensor import verify


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks have parts of its tensors."""
    if FullyShardedDataParallel.fsdp_modules(model) or any(map(gather.is_dtensor, model.parameters())):
        return True
    return any(held.shard is not None or held.state.part is not None for _, held in holders(model))


def reshard(model: nn.Module) -> None:
    """Give back what a forward has left gathered, which is of FSDP2's param_dtype."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gathered(
    what: str, ranks: Ranks, model: nn.Module, pieces: list[Piece]
) -> Iterator[tuple[Piece, dict[Any, Any], Exception | None]]:
    """Each piece with its tensors, whole: by name, by id those of the adapter, and (bytes, state) of a 4-bit weight.

    Collectives, which the ranks enter when all are ready; a unit of FSDP1 is whole while its pieces are handed out.
    Beside them what this rank alone has failed with behind its collectives, for the ranks' next agreement.

    Args:
        what: the function that errors name.
        ranks, model: who gathers, and what.
        pieces: of `contents.pieces`, in whose order they come.
    """
    # FSDP1 takes the first unit that it is asked for as the root.
    if isinstance(model, FullyShardedDataParallel) and pieces and pieces[0].unit is not model:
        with _summoned(model, what, ranks):
            pass
    for _, group in itertools.groupby(pieces, key=lambda piece: id(piece.unit)):
        same_unit = list(group)
        with _summoned(same_unit[0].unit, what, ranks):
            for piece in same_unit:
                units_within = _adapter_units(piece)
                ranks.together(what, lambda piece=piece, units=units_within: (_ready(piece, units), None))
                with contextlib.ExitStack() as stack:
                    for unit in units_within:
                        stack.enter_context(_whole_unit(unit))
                    tensors, failure = {}, None
                    try:
                        tensors = whole(piece)
                    except Exception as error:  # whatever it is, the others wait
                        failure = error
                    yield piece, tensors, failure


def _summoned(unit: Any, what: str, ranks: Ranks) -> Any:
    """While this is open the parameters of a unit of FSDP1 are whole; the ranks enter when all have memory for it."""
    if unit is not None:
        ranks.together(what, lambda: (ready.unit(unit), None))
    return _whole_unit(unit)


def _adapter_units(piece: Piece) -> list[Any]:
    """Units of FSDP1 that have adapters of a piece, other than its own."""
    found = [] if piece.tuner is None else FullyShardedDataParallel.fsdp_modules(piece.tuner)
    return [unit for unit in found if unit is not piece.unit]


def _ready(piece: Piece, units: list[Any]) -> None:
    for unit in units:
        ready.unit(unit)
    ready.piece(piece)


def _whole_unit(unit: Any) -> Any:
    if unit is None:
        return contextlib.nullcontext()
    return FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False)


def whole(piece: Piece) -> dict[Any, Any]:
    """Its tensors, gathered: by name, by id those of the adapter, and (bytes, state) of a 4-bit weight."""
    tensors: dict[Any, Any] = {}
    for name in piece.names:
        if name in piece.held:
            tensors[name] = _whole_packed(piece, piece.held[name])
        else:
            tensors[name] = _whole_tensor(piece.tensor(name))
    if piece.tuner is not None:
        for tensor in merging.adapter_tensors(piece.tuner):
            tensors[id(tensor)] = _whole_tensor(tensor)
    return tensors


def _whole_tensor(tensor: Any) -> Tensor:
    return gather.whole(tensor) if gather.is_dtensor(tensor) else tensor.detach()


def _whole_packed(piece: Piece, held: Any) -> tuple[Tensor, Any]:
    if held.shard is not None:
        return gather.gathered(held.shard, held.state)
    if held.state.part is not None:
        return held.state.part.gathered()
    weight = piece.tensor(held.name)
    return weight.detach().as_subclass(Tensor), held.state


# ---- what a checkpoint has of it ----


def converted(piece: Piece, tensors: dict[Any, Any], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The tensors of a piece as the checkpoint has them."""
    others = {name: tensors[name] for name in piece.names if name not in piece.held}
    adapter = {key: tensor for key, tensor in tensors.items() if isinstance(key, int)}
    for name, held in piece.held.items():
        _verify(*tensors[name], held.state, piece.name_of(name))
    if piece.tuner is None:
        packed = {name: tensors[name] for name in piece.held}
    elif not any(held.kind.stacked for held in piece.held.values()):
        return _merged(piece, tensors, adapter, others, dtype)
    elif dtype is None or merging.merges_bytes(piece.tuner):
        packed, others = merging.merged_stacks(
            piece.tuner, adapter, {name: tensors[name] for name in piece.held}, others
        )
    else:
        values = {name: held.oriented(held.kind.dequantize(*tensors[name])) for name, held in piece.held.items()}
        packed, others = {}, merging.merged_dense(piece.tuner, adapter, {**values, **others})
    found: dict[str, Tensor] = {}
    for name, (codes, state) in packed.items():
        key, held = piece.name_of(name), piece.held[name]
        if dtype is not None:
            found[key] = as_in_files(held, held.oriented(state.kind.dequantize(codes, state)), dtype)
        else:
            found.update(contents.packed_tensors(key, codes, state, held.storage))
    return {**found, **{piece.name_of(name): tensor for name, tensor in others.items()}}


def as_in_files(held: Any, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of a 4-bit weight as files of dense weights have them."""
    return (values.t().contiguous() if held.of_conv1d else values).to(dtype)


def _merged(
    piece: Piece, tensors: dict, adapter: dict, others: dict[str, Tensor], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """The same of one layer with the adapters of peft's layer around it."""
    found: dict[str, Tensor] = {}
    before = others
    for name, held in piece.held.items():
        (packed, state), key = tensors[name], piece.name_of(name)
        if dtype is not None:
            values, others = merging.merged_values(piece.tuner, adapter, packed, state, others)
            found[key] = as_in_files(held, values, dtype)
        else:
            (packed, state), others = merging.merged_packed(piece.tuner, adapter, held, packed, state, others)
            found.update(contents.packed_tensors(key, packed, state, held.storage))
    if not piece.held:
        others = merging.merged_dense(piece.tuner, adapter, others)
    elif dtype is None:
        others = merging.with_biases(piece.tuner, adapter, before, others)
    return {**found, **{piece.name_of(name): tensor for name, tensor in others.items()}}


def _verify(packed: Tensor, state: Any, kept: Any, key: str) -> None:
    """ValueError unless these are the bytes that were quantized."""
    known = state.clone()
    known.sharded = kept.sharded
    verify(packed, known, key)
