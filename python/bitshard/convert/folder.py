"""A model's folder: its config, its model on the meta device, and the small files beside the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from bitshard.convert.source import Source
from bitshard.sharding.loading.skeleton import Skeleton

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5")
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def format_of(folder: Path) -> str:
    """In which format the config says that weights are; empty: 16 or 32 bits. FileNotFoundError without a config."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(2, "No such file: a folder of a model has one", str(folder / "config.json"))
    return str(quantization_of(folder).get("quant_method", ""))


def quantization_of(folder: Path) -> dict[str, Any]:
    """What the config says of 4-bit weights; empty where it says nothing."""
    try:
        found = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: no JSON ({error})") from None
    return (found.get("quantization_config") if isinstance(found, dict) else None) or {}


def skeleton_of(
    folder: Path, source: Source, quantization_config: Any, device: torch.device, dtype: torch.dtype | None = None
) -> Skeleton:
    """The model on the meta device, of its own class, in its own dtypes; the files fit it."""
    import transformers
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    if getattr(config, "dtype", None) is None:
        floats = [_DTYPES[source.dtype(name)] for name in source.files if source.dtype(name) in _DTYPES]
        config.dtype = floats[0] if floats else torch.float32
    name = (getattr(config, "architectures", None) or [""])[0]
    made = getattr(transformers, name, transformers.AutoModelForCausalLM)

    def build(config: Any, dtype: torch.dtype) -> Any:
        make = made._from_config if hasattr(made, "_from_config") else made.from_config
        return make(config, dtype=dtype)

    skeleton = Skeleton(config, quantization_config, dtype, device, build, own_dtypes=True)
    skeleton.check(source)
    return skeleton


def small_files(folder: Path) -> set[str]:
    """Names of the files beside the weights: configs, tokenizer, licence."""
    return {
        path.name
        for path in folder.iterdir()
        if path.is_file() and not path.name.endswith(_WEIGHTS) and not path.name.startswith(".")
    }


def others(folder: Path, quantization_config: Any, dtype: str | None = None) -> dict[str, bytes]:
    """The small files as they are, but the config, which says what the weights are now: in 4 bits, or in `dtype`."""
    found = {name: (folder / name).read_bytes() for name in sorted(small_files(folder))}
    config = json.loads(found["config.json"])
    config.pop("quantization_config", None)
    if quantization_config is not None:
        config["quantization_config"] = json.loads(json.dumps(quantization_config.to_dict(), default=str))
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
    found["config.json"] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    return found
