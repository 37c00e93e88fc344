"""A folder of 16- or 32-bit weights made into one of 4-bit or int8 weights, as from_pretrained and save_pretrained
would, with one tensor in memory at a time."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bitshard.convert.folder import blamed_on, device_of, format_of, others, skeleton_of, small_files
from bitshard.convert.look import look
from bitshard.convert.output import Output, anew, copy, remembered, require_new
from bitshard.convert.source import Source
from bitshard.convert.tensors import Chosen, Item, Tensors
from bitshard.convert.values import Progress, buffers, require_all_finite, require_finite, to_check
from bitshard.sharding.checkpoints import contents
from bitshard.sharding.checkpoints.files import byte_count
from bitshard.sharding.checkpoints.reading import some
from bitshard.sharding.loading.skeleton import refusing_code
from bitshard.weights.inventory import holder_of

_SMALL = 4096  # elements: smaller matrices are not worth a line


class Report(NamedTuple):
    """What became of the weights.

    Attributes:
        packed, dense: numbers of elements that are quantized, and that are not.
        skipped: key -> why a matrix stayed as it was.
        files: how many.
        nbytes: of all.
        left_out: tensors of the source's files that the model has no place for.
    """

    packed: int
    dense: int
    skipped: dict[str, str]
    files: int
    nbytes: int
    left_out: list[str]


def quantize_folder(
    folder: str | os.PathLike,
    out: str | os.PathLike,
    quantization_config: Any,
    *,
    device: str | torch.device = "cpu",
    max_shard_size: int | str = "5GB",
    consume: bool = False,
    progress: Progress = lambda steps, total: steps,
    check_progress: Progress = lambda steps, total: steps,
    chosen: Chosen = lambda key: None,
    chosen_by: Any = None,
) -> Report:
    """Write the model of `folder` with 4-bit or int8 weights to `out`: the bytes of loading it quantized and saving it.

    At most one tensor is in memory at a time, of a stack of experts the whole stack. Files are written into OUT.partial
    and named when they are whole; `out` appears at the end. An interrupted run is repeated with the same arguments, and
    goes on behind the last whole file. Before the first one is written, all values of the source are read once.

    Args:
        folder: config.json and safetensors files in float32, float16 or bfloat16. Those in MXFP4 or FP8 are loaded in
            4 bits as a whole and saved: their model has to fit into memory, and a run begins anew.
        out: must not exist.
        quantization_config: BitsAndBytesConfig(load_in_4bit=True, ...) or (load_in_8bit=True, ...), or FourBitConfig
            for experts, too.
        device: that quantizes.
        max_shard_size: the most bytes of a file.
        consume: delete each file of `folder` once all that was made of it is on the disk and was read back. The last
            copy of the weights is then `out`.
        progress: wraps the tensors to write, (numbers, how many).
        check_progress: wraps the tensors whose values are looked at before, (names, how many).
        chosen: key -> packed bytes and state of a weight that somebody else has quantized; None: it is quantized here.
        chosen_by: what that depends on, for a run that goes on.

    OSError: a folder or file cannot be read or written, `out` exists, the disk is full. ValueError: the files are not
    sound, not dense, or not those of the model; values are not finite, or overflow the dtype of the model.
    """
    folder, out = Path(folder), Path(out)
    require_new(out)
    device = device_of(device)
    if format_of(folder) in ("mxfp4", "fp8"):
        return _decoded(folder, out, quantization_config, device, max_shard_size, consume, check_progress)
    journal = remembered(out)
    source = Source(folder, None if journal is None else journal["source"])
    if format_of(folder):
        raise ValueError(
            f"{folder}: its weights are quantized already ({format_of(folder)}); expected float32, float16 or bfloat16"
        )
    skeleton = skeleton_of(folder, source, quantization_config, device)
    tensors = Tensors(skeleton, source, chosen)
    left_out = _left_out(tensors, source)
    if consume:
        _require_consumable(folder, source, left_out)
    small_files(folder)  # links are refused before anything is written
    require_finite(source, to_check(skeleton, source), check_progress)
    entries = {name: entry for item in tensors.items for name, entry in item.entries.items()}
    made_by = {
        "source": str(folder.resolve()), "settings": quantization_config.to_dict(), "consume": consume,
        "max_shard_size": max_shard_size, **({} if chosen_by is None else {"chosen_by": chosen_by}),
    }  # fmt: skip
    output = Output(out, made_by, source.table(), entries, byte_count(max_shard_size), buffers(skeleton, tensors.names))
    try:
        for number, made in output.steps(tensors.of, progress):
            output.write(number, made)
            if consume:
                _consume(source, tensors.items, output)
        if consume:  # where another run has written the last file, too
            _consume(source, tensors.items, output)
        parameters = sum(item.elements for item in tensors.items)
        settings = skeleton.quantizer.quantization_config
        output.finish(others(folder, settings, untie=skeleton.untied), parameters)
    finally:
        output.close()
        source.close()
    if consume:
        _remove_rest(folder)
    return _report(tensors.items, entries, len(output.names), left_out)


def _left_out(tensors: Tensors, source: Source) -> list[str]:
    """Tensors of the files that the model neither has nor says that it ignores."""
    model = tensors.skeleton.model
    used = {name for item in tensors.items for name in item.sources} | model.state_dict().keys()
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    names = sorted(source.files.keys() - used)
    return [name for name in names if not any(pattern.search(name) for pattern in ignored)]


def _require_consumable(folder: Path, source: Source, left_out: list[str]) -> None:
    """ValueError where deleting the files would lose tensors, or free nothing."""
    if left_out:
        raise ValueError(
            f"{folder}: the model has no place for {len(left_out)} tensors, which would be lost: {some(left_out)}"
        )
    links = [str(path) for path in sorted(set(source.files.values())) if path.is_symlink()]
    if links:
        raise ValueError(f"{folder}: nothing is freed by deleting links, so none is consumed: {some(links)}")


def _decoded(
    folder: Path, out: Path, quantization_config: Any, device: Any, max_shard_size: int | str, consume: bool,
    check_progress: Progress,
) -> Report:  # fmt: skip
    """The same for files that transformers decodes while it loads them."""
    from transformers import AutoModelForCausalLM

    from bitshard.huggingface.transformers import dense_config
    from bitshard.sharding.checkpoints.save import save_pretrained

    if consume:
        raise ValueError(f"{folder}: files in {format_of(folder)} are read as a whole, so none can be consumed before")
    small = small_files(folder)
    source = Source(folder)  # whose files are sound
    require_all_finite(source, check_progress)
    source.close()
    with blamed_on(folder), refusing_code(folder):
        config = dense_config(folder, trust_remote_code=False)
    options = {
        "config": config, "quantization_config": quantization_config, "device_map": str(device),
        "trust_remote_code": False,
    }  # fmt: skip
    made_by = {"source": str(folder.resolve()), "settings": quantization_config.to_dict()}
    with anew(out, made_by) as partial:
        with refusing_code(folder):
            model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
        _require_complete(folder, info)
        save_pretrained(model, partial, max_shard_size=max_shard_size)
        if wrong := look(partial).complaints:
            raise ValueError(f"{folder}: what is made of its values cannot be used: {some(wrong)}")
        for name in small.keys() - {path.name for path in partial.iterdir()}:
            copy(small[name], partial / name)
    return _report_of(model, out)


def _require_complete(folder: Path, info: dict[str, Any]) -> None:
    """ValueError where transformers has loaded something else than the files: it fills what is missing at random."""
    wrong = [f"{key} is {kind.partition('_')[0]}" for kind in ("missing_keys", "mismatched_keys", "unexpected_keys")
             for key in sorted(map(str, info.get(kind) or ()))]  # fmt: skip
    if wrong:
        raise ValueError(
            f"{folder}: {len(wrong)} tensors do not fit the model: {some(wrong)}. Stacks of experts in "
            f"{format_of(folder)} are read with --experts only"
        )


def _report_of(model: torch.nn.Module, out: Path) -> Report:
    """The report on a model that was loaded and saved as a whole."""
    packed, dense, skipped = 0, 0, {}
    paths = {id(module): path for path, module in model.named_modules()}
    owners = {id(p): (module, name) for module in model.modules() for name, p in module._parameters.items()}
    for parameter in model.parameters():
        module, name = owners[id(parameter)]
        held = holder_of(module, name)
        if held is not None:
            packed += held.state.shape.numel()
            continue
        dense += parameter.numel()
        if parameter.dim() > 1 and parameter.numel() > _SMALL:
            skipped[f"{paths[id(module)]}.{name}"] = _reason(module, name, parameter.dim())
    files = list(out.glob("*.safetensors"))
    return Report(packed, dense, skipped, len(files), sum(path.stat().st_size for path in files), [])


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


def _report(items: list[Item], entries: dict[str, Any], files: int, left_out: list[str]) -> Report:
    packed = sum(item.elements for item in items if item.packed)
    dense = sum(item.elements for item in items if not item.packed)
    skipped = {}
    for item in items:
        for key, module, name in item.places:
            tensor = contents.tensor_of(module, name)
            if not item.packed and tensor.dim() > 1 and tensor.numel() > _SMALL:
                skipped[key] = _reason(module, name, tensor.dim())
    return Report(packed, dense, skipped, files, sum(entry.nbytes for entry in entries.values()), left_out)


def _reason(module: torch.nn.Module, name: str, dimensions: int) -> str:
    """Why a matrix is not quantized."""
    if isinstance(module, torch.nn.Embedding):
        return "an embedding"
    if name != "weight":
        return "a stack of experts: --experts" if dimensions == 3 else "no weight"
    if isinstance(module, torch.nn.Linear):
        return "left out, by the settings or by transformers (heads, and what its model class names)"
    return f"of a {type(module).__name__}, no linear layer"
