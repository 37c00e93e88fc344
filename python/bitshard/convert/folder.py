"""A model's folder: its config, its model on the meta device, and the small files beside the weights."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bitshard.convert.headers import require_kind
from bitshard.convert.source import Source
from bitshard.sharding.checkpoints.expected import untied
from bitshard.sharding.checkpoints.names import unsaved
from bitshard.sharding.loading.skeleton import OwnCode, Skeleton, causal, config_of

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5")
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TIED = "tie_word_embeddings"
_SHOWN = 240  # characters of what another library says


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object of a small file. OSError where it cannot be read; ValueError where it is none."""
    require_kind(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(found).__name__}")
    return found


@contextmanager
def blamed_on(what: Path | str) -> Iterator[None]:
    """While it lasts, other exceptions than OSError and OwnCode are ValueErrors that begin with `what`."""
    try:
        yield
    except (OSError, OwnCode):
        raise
    except Exception as error:
        words = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{what}: {words if len(words) <= _SHOWN else words[:_SHOWN] + ' ...'}") from error


@contextmanager
def tensors_alone(path: Path) -> Iterator[None]:
    """While it lasts, torch's refusal of a pickle that holds more than tensors is a ValueError without torch's advice
    to load it all the same."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise ValueError(
            "it holds more than tensors, and reading it would run code: save the adapter as safetensors"
        ) from error


def device_of(name: str | torch.device) -> torch.device:
    """torch's device of this name. ValueError where there is none."""
    with blamed_on(f"device {name}"):
        device = torch.device(name)
        torch.empty(0, dtype=torch.uint8, device=device)
    if device.type == "meta":
        raise ValueError("device meta: it has no values")
    return device


def format_of(folder: Path) -> str:
    """In which format the config says that weights are; empty: 16 or 32 bits. FileNotFoundError without a config."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(2, "No such file: a folder of a model has one", str(folder / "config.json"))
    return str(quantization_of(folder).get("quant_method", ""))


def quantization_of(folder: Path) -> dict[str, Any]:
    """What the config says of 4-bit weights; empty where it says nothing."""
    path = folder / "config.json"
    found = json_object(path).get("quantization_config") or {}
    if not isinstance(found, dict):
        raise ValueError(f"{path}: its quantization_config is no JSON object")
    return found


def skeleton_of(
    folder: Path,
    source: Source,
    quantization_config: Any,
    device: torch.device,
    dtype: torch.dtype | None = None,
    runs: bool = False,
    packed: bool = False,
) -> Skeleton:
    """The model on the meta device, of its own class, in its own dtypes; the files fit it.

    Args:
        runs: it is to be run.
        packed: the files are in a layout of others, whose bytes are kept.
    """
    files = sorted(set(source.files.values())) if packed else None

    def build(config: Any, dtype: torch.dtype) -> Any:
        made = _class_of(config)
        with blamed_on(folder / "config.json"):
            return made._from_config(config, dtype=dtype) if hasattr(made, "_from_config") else causal(config, dtype)

    with blamed_on(folder / "config.json"):
        config = config_of(folder)
        if getattr(config, "dtype", None) is None:
            floats = [_DTYPES[source.dtype(name)] for name in source.files if _is_of_model(source, name)]
            config.dtype = floats[0] if floats else torch.float32
    options = {"own_dtypes": True, "runs": runs, "files": files}
    skeleton = Skeleton(config, quantization_config, dtype, device, build, **options)
    if _differ(source, getattr(skeleton.model, "all_tied_weights_keys", None) or {}):
        skeleton = Skeleton(untied(config), quantization_config, dtype, device, build, **options)
        skeleton.untied = True
    skeleton.check(source, unsaved(skeleton.model))
    return skeleton


def _is_of_model(source: Source, name: str) -> bool:
    """Whether a tensor is one whose dtype is the model's: no global scale."""
    return source.dtype(name) in _DTYPES and math.prod(source.shape(name)) > 1


def _differ(source: Source, tied: dict[str, str]) -> bool:
    """Whether the files have other values for some tensor than for the one that the model ties to it."""
    for pair in tied.items():
        files = [source.files.get(name) for name in pair]
        if None in files or not all(file.exists() for file in files):  # consumed: only what is tied is
            continue
        first, second = map(source.read, pair)
        if not torch.equal(first, second):
            return True
    return False


def _class_of(config: Any) -> Any:
    """The model's class as its config names it; the causal language model where it names none of transformers."""
    import transformers

    names = getattr(config, "architectures", None)
    name = names[0] if isinstance(names, list) and names else None
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model else transformers.AutoModelForCausalLM


def small_files(folder: Path) -> dict[str, Path]:
    """The files beside the weights by name, where links lead: configs, tokenizer, licence.

    ValueError for a link that leads nowhere or out of the folder; Hugging Face's cache has the files of a snapshot in
    the `blobs` beside it.
    """
    real = folder.resolve()
    allowed = [real, *([real.parent.parent / "blobs"] if real.parent.name == "snapshots" else [])]
    found = {}
    for path in sorted(folder.iterdir()):
        if path.name.endswith(_WEIGHTS) or path.name.startswith(".") or not (path.is_file() or path.is_symlink()):
            continue
        target = path.resolve()
        if path.is_symlink() and not target.exists():
            raise ValueError(f"{path}: a link to {target}, which leads nowhere: remove it")
        if not any(target.is_relative_to(place) for place in allowed):
            raise ValueError(
                f"{path}: a link to {target}, outside of the model's folder, is not copied: put the file itself there"
            )
        if target.is_file():
            found[path.name] = target
    return found


def others(
    folder: Path,
    quantization_config: Any,
    dtype: str | None = None,
    untie: bool = False,
    changes: dict[str, Any] | None = None,
) -> dict[str, bytes | Path]:
    """The small files, to be copied as they are, but the config, which says what the weights are now: in 4 bits, or in
    `dtype`.

    `untie`: it says that no weights are tied; `changes`: what else it says of the model.
    """
    found: dict[str, bytes | Path] = dict(small_files(folder))
    config = json_object(folder / "config.json")
    config.pop("quantization_config", None)
    if quantization_config is not None:
        config["quantization_config"] = json.loads(json.dumps(quantization_config.to_dict(), default=str))
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
    for each in (config, *config.values()) if untie else ():
        if each is config or (isinstance(each, dict) and each.get(_TIED)):
            each[_TIED] = False
    config.update(changes or {})
    found["config.json"] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    return found
