"""The adapters of a sharded model in files, as peft writes them for a model of one process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from bitshard.sharding.checkpoints.contents import WRAPPED
from bitshard.sharding.together import Ranks
from bitshard.shards import gather

_WHAT = "save_adapter"
_CONFIG = "adapter_config.json"


@torch.no_grad()
def save_adapter(model: nn.Module, folder: str | os.PathLike, **options: Any) -> None:
    """Write the adapters of `model` as `model.save_pretrained(folder)` writes them in one process.

    Sharded by FSDP2, or not: every rank gathers what belongs to the adapters, one tensor after the other, and
    rank 0 writes the files, which `PeftModel.from_pretrained` reads. The base is not gathered. A collective: call it on
    every rank.

    Args:
        model: a model of peft, or one of transformers with adapters (`add_adapter`, `bitshard.fsdp.load`).
        folder: made if need be. Rank 0 needs it, the others do not.
        options: for `save_pretrained` of the model, for instance `selected_adapters`.

    Raises, on all ranks where one rank fails:
        OSError: the disk is full, or cannot be written.
        ValueError: a model without adapters, or one of FSDP1; arguments that the ranks do not share.
    """
    ranks = Ranks()

    def look() -> tuple[nn.Module, Any]:
        if FullyShardedDataParallel.fsdp_modules(model):
            raise ValueError(
                "save_adapter: FSDP1 gives no part of a state dict. Write the merged model with "
                "bitshard.fsdp.save_pretrained(model, folder, merge=True), or use FSDP2 (fully_shard)."
            )
        inner = _adapted(model)
        return inner, (sorted(inner.peft_config), repr(sorted(options.items())))

    inner = ranks.together(_WHAT, look)
    tensors = ranks.together(_WHAT, lambda: (_gathered(inner, options, ranks.rank == 0), None))
    ranks.together(_WHAT, lambda: (_write(inner, folder, tensors, options) if ranks.rank == 0 else None, None))


def _adapted(model: nn.Module) -> Any:
    """The model inside of wrappers that has the adapters. ValueError where there is none."""
    inner = model
    while not hasattr(type(inner), "save_pretrained"):
        found = next((inner._modules[name] for name in (*WRAPPED, "module") if name in inner._modules), None)
        if found is None:
            break
        inner = found
    if not getattr(inner, "peft_config", None) or not hasattr(inner, "save_pretrained"):
        raise ValueError(f"this {type(model).__name__} has no adapters of peft")
    return inner


def _gathered(inner: Any, options: dict[str, Any], keep: bool) -> dict[str, Tensor]:
    """What of the state dict peft takes for the adapters, whole, on the CPU of the rank that keeps it."""
    tensors = {}
    state_dict = inner.state_dict()
    wanted = _wanted(inner, state_dict, options)
    for key, value in state_dict.items():
        if key in wanted:
            value = gather.whole(value) if gather.is_dtensor(value) else value
            if keep:
                tensors[key] = value.detach().cpu()
    return tensors


def _wanted(inner: Any, state_dict: dict[str, Any], options: dict[str, Any]) -> set[str]:
    """The keys that peft chooses, told by tensors without data in the places of those that it would gather.

    Of a model that transformers has sharded peft copies all it is given; there the keys with the adapter's name count.
    """
    from peft import get_peft_model_state_dict

    empty = {key: torch.empty(v.shape, dtype=v.dtype, device="meta") for key, v in state_dict.items()}
    keys, wanted = {id(value): key for key, value in empty.items()}, set()
    embeddings = options.get("save_embedding_layers", "auto")
    for name in options.get("selected_adapters") or list(inner.peft_config):
        try:
            chosen = get_peft_model_state_dict(inner, empty, adapter_name=name, save_embedding_layers=embeddings)
            wanted |= {keys[id(value)] for value in chosen.values()}
        except (NotImplementedError, KeyError):  # copies: of no data, or of other identity
            wanted |= {key for key in empty if name in key.split(".")}
    return wanted


def _write(inner: Any, folder: str | os.PathLike, tensors: dict[str, Tensor], options: dict[str, Any]) -> None:
    inner.save_pretrained(folder, state_dict=tensors, **options)
    for path in Path(folder).rglob(_CONFIG):
        _name_base(path, inner)


def _name_base(path: Path, inner: Any) -> None:
    """Give the config of an adapter the base's own class where it names the one that FSDP2 has derived from it."""
    config = json.loads(path.read_text(encoding="utf-8"))
    named, base = config.get("auto_mapping"), type(inner.get_base_model()) if config.get("auto_mapping") else None
    if base is None or not issubclass(base, FSDPModule):
        return
    own = next(cls for cls in base.__mro__[1:] if not issubclass(cls, FSDPModule) and cls is not object)
    named.update(base_model_class=own.__name__, parent_library=own.__module__)
    path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
