"""The weights of a model as dense tensors under the names of its checkpoint, one at a time: what servers are sent."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bitshard.formats.state import VALUE_DTYPES, dtype_name
from bitshard.sharding.checkpoints import contents, gathering, merging
from bitshard.sharding.checkpoints.contents import Piece
from bitshard.sharding.checkpoints.names import Collector
from bitshard.sharding.checkpoints.written import Written, written
from bitshard.sharding.together import Ranks
from bitshard.shards import gather

_WHAT = "dense_weights"
Model = nn.Module | Callable[[], nn.Module]


def dense_weights(
    model: Model, dtype: torch.dtype = torch.bfloat16, merge: bool = True, device: torch.device | str | None = None
) -> DenseWeights:
    """All weights of `model`, one after the other: (name in the checkpoint, dense tensor), adapters merged into them.

        for name, tensor in bitshard.fsdp.dense_weights(model):
            server.update(name, tensor)

    4-bit weights are dequantized, and the product of each active adapter is added to the values; nothing is quantized
    again. Experts come under the names of the checkpoint, one by one where it has them so. The model stays as it is, so
    this may be called between any two steps. It can be iterated again, and then gives the weights of that time. For a
    sharded model an iteration is a collective: every rank goes through all of it, and has each whole tensor until it
    asks for the next.

    Args:
        model: of transformers or any other module; sharded by FSDP2 or FSDP1, loaded in parts, or whole; with adapters
            of peft or without. Or a function that gives it, where it is wrapped later.
        dtype: of all float tensors: bfloat16, float16 or float32.
        merge: add the active adapters, if there are any. False gives the base.
        device: where the tensors are wanted; None: where they were gathered.

    Raises while it is iterated, on all ranks where one fails, as `save_pretrained`; ValueError at once for a dtype that
    it does not know.
    """
    if dtype not in VALUE_DTYPES.values():
        raise ValueError(f"dense_weights: dtype={dtype}, expected one of {sorted(VALUE_DTYPES)}")
    return DenseWeights(model, dtype, merge, device)


class DenseWeights:
    """What `dense_weights` gives: an iterable of (name, tensor).

    Args:
        model, dtype, merge, device: as of `dense_weights`.
    """

    def __init__(self, model: Model, dtype: torch.dtype, merge: bool, device: Any):
        self._model, self.dtype, self.merge, self.device = model, dtype, merge, device

    def metadata(self) -> list[tuple[str, str, list[int]]]:
        """(name, dtype such as "bfloat16", shape) of each, in their order, as vLLM wants them announced.

        Nothing is gathered, so one rank may ask alone.
        """
        found = self._written(self.model)
        collector = found.names.collector()
        return [
            (name, dtype_name(tensor.dtype), list(tensor.shape))
            for piece in found.pieces
            for tensors in _like(piece, self.dtype)
            for name, tensor in collector.add(tensors).items()
        ]

    @property
    def model(self) -> nn.Module:
        """The model, as it is wrapped now."""
        return self._model if isinstance(self._model, nn.Module) else self._model()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        model = self.model
        ranks = Ranks(alone=not gathering.is_sharded(model))

        def look() -> tuple[Written, str]:
            gathering.reshard(model)
            found = self._written(model)
            facts = repr((found.entries, self.dtype, self.merge)).encode()
            return found, hashlib.sha256(facts).hexdigest()[:16]

        with torch.no_grad():
            found = ranks.together(_WHAT, look)
        collector = found.names.collector()
        walk = gathering.gathered(_WHAT, ranks, model, found.pieces)
        with contextlib.closing(walk):
            while True:
                with torch.no_grad():  # not around `yield`: the caller's own mode is not ours
                    gathered = next(walk, None)
                if gathered is None:
                    return
                yield from self._of(ranks, collector, *gathered)

    def _written(self, model: nn.Module) -> Written:
        merge = self.merge and any(map(contents.is_adapted_by_peft, model.modules()))
        found = written(model, merge, self.dtype, _WHAT)
        # FSDP registers parameters anew, and so in another order, but the order is to be the one announced before.
        found.pieces = [merging.part_of(piece, sorted(piece.names)) for piece in found.pieces]
        return found

    def _of(
        self, ranks: Ranks, collector: Collector, piece: Piece, tensors: dict[Any, Any], failure: Exception | None
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a piece, one at a time. All ranks raise where one has failed to make the first."""
        made = self._made(piece, tensors)

        def first() -> tuple[dict[str, Tensor] | None, None]:
            if failure is not None:
                raise failure
            return self._next(made), None

        found = ranks.together(_WHAT, first)
        while found is not None:
            with torch.no_grad():
                named = collector.add(found)
            for name in list(named):
                yield name, named.pop(name).detach()
            found = self._next(made)

    @staticmethod
    def _next(made: Iterator[dict[str, Tensor]]) -> dict[str, Tensor] | None:
        with torch.no_grad():
            return next(made, None)

    def _made(self, piece: Piece, tensors: dict[Any, Any]) -> Iterator[dict[str, Tensor]]:
        """{key in the model: tensor}, of stacks of experts one after the other, else the whole piece."""
        own = {_storage(tensor) for tensor in map(piece.tensor, piece.names) if not gather.is_dtensor(tensor)}
        for some in _groups(piece):
            made = gathering.converted(merging.part_of(piece, some), tensors, self.dtype)
            for key in map(piece.name_of, some):
                yield {key: self._handed_out(made.pop(key), own)}

    def _handed_out(self, tensor: Tensor, own: set[int]) -> Tensor:
        """A tensor of the dtype and device that are wanted, in memory that is not the model's."""
        tensor = tensor.as_subclass(Tensor).detach()
        dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(self.device or tensor.device, dtype, copy=_storage(tensor) in own)


def _groups(piece: Piece) -> list[list[str]]:
    """Names of the tensors of a piece that are made at once: with LoRA on a linear layer its weight and bias."""
    alone = piece.tuner is None or hasattr(piece.tuner, "parameter_name")
    return [[name] for name in piece.names] if alone else [piece.names]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _like(piece: Piece, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """What `_made` gives, on the meta device."""
    for key, entry in piece.entries(dtype).items():
        yield {key: torch.empty(entry.shape, dtype=entry.dtype, device="meta")}
