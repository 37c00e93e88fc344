"""A folder of 16- or 32-bit weights made into one of 4-bit weights, as from_pretrained and save_pretrained would, with
one tensor in memory at a time."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bitshard import inventory
from bitshard.convert.folder import format_of, others, skeleton_of, small_files
from bitshard.convert.output import PARTIAL, Output, require_new
from bitshard.convert.source import Source
from bitshard.convert.tensors import Item, Tensors
from bitshard.sharding.checkpoints.files import byte_count

Progress = Callable[[Iterable, int], Iterable]


class Report(NamedTuple):
    """What became of the weights.

    Attributes:
        packed, dense: numbers of elements that are 4-bit, and that are not.
        skipped: key -> why a matrix stayed as it was.
        files: how many.
        nbytes: of all.
    """

    packed: int
    dense: int
    skipped: dict[str, str]
    files: int
    nbytes: int


def quantize_folder(
    folder: str | os.PathLike,
    out: str | os.PathLike,
    quantization_config: Any,
    *,
    device: str | torch.device = "cpu",
    max_shard_size: int | str = "5GB",
    consume: bool = False,
    progress: Progress = lambda steps, total: steps,
) -> Report:
    """Write the model of `folder` with 4-bit weights to `out`: the bytes of loading it quantized and saving it.

    At most one tensor is in memory at a time, of a stack of experts the whole stack. Files are written into OUT.partial
    and named when they are whole; `out` appears at the end. An interrupted run is repeated with the same arguments, and
    goes on behind the last whole file.

    Args:
        folder: config.json and safetensors files in float32, float16 or bfloat16. Those in MXFP4 or FP8 are loaded in
            4 bits as a whole and saved: their model has to fit into memory, and a run begins anew.
        out: must not exist.
        quantization_config: BitsAndBytesConfig(load_in_4bit=True, ...), or FourBitConfig for experts, too.
        device: that quantizes.
        max_shard_size: the most bytes of a file.
        consume: delete each file of `folder` once all that was made of it is on the disk and was read back. The last
            copy of the weights is then `out`.
        progress: wraps the files to write, (numbers, how many).

    OSError: a folder or file cannot be read or written, `out` exists, the disk is full. ValueError: the files are not
    sound, not dense, or not those of the model.
    """
    folder, out = Path(folder), Path(out)
    require_new(out)
    if format_of(folder) in ("mxfp4", "fp8"):
        return _decoded(folder, out, quantization_config, device, max_shard_size, consume)
    journal = Output.remembered(out)
    source = Source(folder, None if journal is None else journal["source"])
    if format_of(folder):
        raise ValueError(
            f"{folder}: its weights are quantized already ({format_of(folder)}); expected float32, float16 or bfloat16"
        )
    skeleton = skeleton_of(folder, source, quantization_config, torch.device(device))
    tensors = Tensors(skeleton, source)
    entries = {name: entry for item in tensors.items for name, entry in item.entries.items()}
    made_by = {
        "source": str(folder.resolve()), "settings": quantization_config.to_dict(), "consume": consume,
        "max_shard_size": max_shard_size,
    }  # fmt: skip
    output = Output(out, made_by, source.table(), entries, byte_count(max_shard_size))
    try:
        missing = output.missing()
        for number in progress(missing, len(missing)):
            output.write(number, tensors.of(set(output.names[number])))
            if consume:
                _consume(source, tensors.items, output)
        parameters = sum(item.elements for item in tensors.items)
        output.finish(others(folder, skeleton.quantizer.quantization_config), parameters)
    finally:
        output.close()
        source.close()
    if consume:
        _remove_rest(folder)
    return _report(tensors.items, entries, len(output.names))


def _decoded(
    folder: Path, out: Path, quantization_config: Any, device: Any, max_shard_size: int | str, consume: bool
) -> Report:
    """The same for files that transformers decodes while it loads them."""
    from transformers import AutoModelForCausalLM

    from bitshard.sharding.checkpoints.save import save_pretrained
    from bitshard.transformers import dense_config

    if consume:
        raise ValueError(f"{folder}: files in {format_of(folder)} are read as a whole, so none can be consumed before")
    options = {"config": dense_config(folder), "quantization_config": quantization_config, "device_map": str(device)}
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    partial = out.with_name(out.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    save_pretrained(model, partial, max_shard_size=max_shard_size)
    for name in small_files(folder) - {path.name for path in partial.iterdir()}:
        shutil.copy(folder / name, partial / name)
    os.rename(partial, out)
    return _report_of(model, out)


def _report_of(model: torch.nn.Module, out: Path) -> Report:
    _, packed, others = inventory.take(model)
    files = list(out.glob("*.safetensors"))
    return Report(packed, sum(others.values()), {}, len(files), sum(path.stat().st_size for path in files))


def _consume(source: Source, items: list[Item], output: Output) -> None:
    """Delete the files of which nothing is needed any more."""
    whole = {name for number, names in enumerate(output.names) if output.path(number).exists() for name in names}
    needed = {source.files[name] for item in items if not whole.issuperset(item.entries) for name in item.sources}
    for path in set(source.files.values()) - needed:
        source.release(path)
        path.unlink(missing_ok=True)


def _remove_rest(folder: Path) -> None:
    """The index of files that are gone."""
    for path in folder.glob("*.safetensors.index.json"):
        path.unlink()


def _report(items: list[Item], entries: dict[str, Any], files: int) -> Report:
    packed = sum(item.elements for item in items if item.packed)
    dense = sum(item.elements for item in items if not item.packed)
    skipped = {item.place[0]: _reason(item) for item in items if not item.packed and _is_matrix(item)}
    return Report(packed, dense, skipped, files, sum(entry.nbytes for entry in entries.values()))


def _is_matrix(item: Item) -> bool:
    return any(len(entry.shape) > 1 and math.prod(entry.shape) > 4096 for entry in item.entries.values())


def _reason(item: Item) -> str:
    """Why a matrix is not 4-bit."""
    _, module, name = item.place
    if isinstance(module, torch.nn.Embedding):
        return "an embedding"
    if name != "weight":
        return "a stack of experts: --experts" if any(len(e.shape) == 3 for e in item.entries.values()) else "no weight"
    if isinstance(module, torch.nn.Linear):
        return "left out, by the settings or by transformers (heads, and what its model class names)"
    return f"of a {type(module).__name__}, no linear layer"
