"""A checkpoint of safetensors files out of a sharded model, one layer at a time.

Every rank gathers one layer; rank 0 makes the tensors of the files from it and writes them, and the layer is given back
before the next one is gathered. After each the ranks tell each other whether all went well, so that all raise or none.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitshard.formats.state import VALUE_DTYPES, dtype_name
from bitshard.sharding.checkpoints import contents, gathering
from bitshard.sharding.checkpoints.contents import Piece
from bitshard.sharding.checkpoints.expected import class_of
from bitshard.sharding.checkpoints.files import CheckpointFiles, Entry, byte_count
from bitshard.sharding.checkpoints.written import Written, written
from bitshard.sharding.together import Ranks

_PATIENCE_S = 2  # a bar is shown for what takes longer
_WHAT = "save_pretrained"


@torch.no_grad()
def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike,
    *,
    dtype: torch.dtype | None = None,
    merge: bool = False,
    max_shard_size: int | str = "50GB",
    progress: bool = True,
) -> None:
    """Write `model` as a checkpoint that bitsandbytes, transformers and others read, whatever way it is sharded.

    4-bit weights are written as they are, each with its scales, as one process that has the whole model writes them. No
    rank ever holds more than one layer beside its shard: under FSDP2 one module with tensors of its own (a linear
    layer, an embedding), under FSDP1 one unit. Rank 0 writes. The model stays as it is, so this may be called in the
    middle of training. For a sharded model it is a collective: call it on every rank.

    Files get their names when all of them are whole and on the disk, the index last; until then, and where a rank
    fails or is killed, a checkpoint that `folder` had before stays what it was. Several processes may save into one
    folder: they take turns for the names, and what the last one wrote stays.

    Args:
        model: sharded by FSDP2 or FSDP1, loaded in parts, or whole; with or without adapters of peft. An adapter is no
            part of the checkpoint (`save_adapter` writes it).
        folder: made if need be. Rank 0 needs it, the others do not.
        dtype: None: 4-bit weights stay 4-bit, all others as they are. float32, bfloat16 or float16: 4-bit weights are
            dequantized, and all float tensors have this dtype.
        merge: add the active adapters to the weights, trained tokens and modules included. Where that breaks a tie the
            config says tie_word_embeddings=False. 4-bit weights are quantized again, as peft's `merge_and_unload`
            does; with `dtype` they are not, so nothing is lost.
        max_shard_size: the most bytes of a file, as a number or "5GB".
        progress: show a bar on rank 0 where it takes longer than 2 seconds.

    Raises, on all ranks of a sharded model where one rank fails:
        OSError: the disk is full, or cannot be written; another process has been giving its files their names here for
            a minute. A rank that is out of memory raises torch.OutOfMemoryError itself, the others ValueError.
        ValueError: arguments that cannot be, or that the ranks do not share; weights that are not quantized yet; bytes
            that are not those that were quantized; tensors that are not those which from_pretrained of the model's
            class asks for; adapters that peft cannot merge.
    """
    ranks = Ranks(alone=not gathering.is_sharded(model))

    def look() -> tuple[Written, str]:
        _check(dtype, max_shard_size)
        gathering.reshard(model)
        found = written(model, merge, dtype, _WHAT)
        if dtype is None and found.config is not None:
            contents.require_readable(found.pieces)
        facts = repr((found.entries, dtype, merge, max_shard_size)).encode()
        return found, hashlib.sha256(facts).hexdigest()[:16]

    found = ranks.together(_WHAT, look)
    if not ranks.collective and ranks.rank > 0:
        return
    collector = found.names.collector()
    with _Writer(ranks, folder, found.entries, max_shard_size, progress) as writer:
        for piece, tensors, failure in gathering.gathered(_WHAT, ranks, model, found.pieces):
            writer.write(
                lambda piece=piece, tensors=tensors: collector.add(gathering.converted(piece, tensors, dtype)).items(),
                failure,
            )
            tensors.clear()
        if found.beside is not None and dtype is None:
            writer.write(found.beside.read, None)
        elif found.beside is not None:
            found.beside.log_left_out(folder)
        parameters = sum(math.prod(piece.shape(name)) for piece in found.pieces for name in piece.names)
        writer.finish(lambda: _configs(model, dtype, found), parameters)


def _check(dtype: torch.dtype | None, max_shard_size: int | str) -> None:
    if dtype is not None and dtype not in VALUE_DTYPES.values():
        raise ValueError(f"dtype={dtype}: expected None (quantized as it is) or one of {sorted(VALUE_DTYPES)}")
    byte_count(max_shard_size)


# ---- what rank 0 does ----


def _configs(model: nn.Module, dtype: torch.dtype | None, found: Written) -> dict[str, bytes]:
    """The files beside the weights that transformers writes: name -> content. Only for a model with a config."""
    inner = contents.unwrapped(model)
    if found.config is None:
        return {}
    config = copy.deepcopy(found.config)
    config.dtype = dtype_name(dtype or _dtype_of(found.pieces))
    config.architectures = [class_of(inner).__name__]
    if dtype is not None and hasattr(config, "quantization_config"):
        del config.quantization_config
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        if getattr(inner, "generation_config", None) is not None and inner.can_generate():
            inner.generation_config.save_pretrained(folder)
        beside = found.beside.files if found.beside is not None and dtype is None else {}
        return {**beside, **{path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}}


def _dtype_of(pieces: list[Piece]) -> torch.dtype:
    """Dtype of the first float tensor, which transformers takes for the model's."""
    for piece in pieces:
        for name in piece.names:
            held = piece.held.get(name)
            found = piece.entries(None)[piece.name_of(name)].dtype if held is None else held.state.dtype
            if found.is_floating_point:
                return found
    return torch.float32


class _Writer:
    """The files on rank 0, nothing on the others; each step ends in agreement."""

    def __init__(
        self,
        ranks: Ranks,
        folder: str | os.PathLike,
        entries: dict[str, Entry],
        max_shard_size: int | str,
        progress: bool,
    ):
        self.ranks, self.entries = ranks, entries
        self.arguments = (folder, entries, max_shard_size)
        self.progress = progress
        self.files: CheckpointFiles | None = None
        self.bar: Any = None

    def __enter__(self) -> _Writer:
        try:
            self._step(self._open)
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        if self.bar is not None:
            self.bar.close()
        if kind is not None and self.files is not None:
            self.files.abort()

    def _open(self) -> None:
        self.files = CheckpointFiles(*self.arguments)
        if self.progress:
            with contextlib.suppress(ImportError):
                from tqdm.auto import tqdm

                total = sum(entry.nbytes for entry in self.entries.values())
                self.bar = tqdm(total=total, unit="B", unit_scale=True, desc="Saving", delay=_PATIENCE_S)

    def write(self, convert: Any, failure: Exception | None) -> None:
        """Write the tensors that `convert` gives on rank 0; all raise where a rank brings the `failure` of its
        gathering."""

        def put() -> None:
            if failure is not None:
                raise failure
            if self.ranks.rank > 0:
                return
            for key, tensor in convert():
                entry = self.entries[key]
                if entry.dtype.is_floating_point and not entry.late and tensor.is_floating_point():
                    tensor = tensor.to(entry.dtype)
                self.files.write(key, tensor.as_subclass(Tensor).detach().cpu())
                if self.bar is not None:
                    self.bar.update(entry.nbytes)

        self.ranks.together(_WHAT, lambda: (put(), None))

    def finish(self, configs: Any, parameters: int) -> None:
        """Give the files their names."""
        self._step(lambda: self.files.finish(configs(), parameters))

    def _step(self, action: Any) -> None:
        """Run `action` on rank 0; every rank raises where it failed."""
        self.ranks.together(_WHAT, lambda: (action() if self.ranks.rank == 0 else None, None))
