"""A folder of 16- or 32-bit weights made into one of calibrated 4-bit weights, a decoder layer at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bitshard.calibration import low_rank
from bitshard.calibration.decoder import Decoder, float32_products, stack_of
from bitshard.calibration.layers import LayerReport, Layers, Made, Target, Walked, calibrate_layers
from bitshard.calibration.solve import Format
from bitshard.calibration.stored import KeptLayers
from bitshard.calibration.tuning import Tuned, TuneProgress, settings_of, tune
from bitshard.convert.folder import device_of, format_of, skeleton_of, small_files
from bitshard.convert.output import PARTIAL, checksum, naming, remembered, require_new
from bitshard.convert.quantize import Report, quantize_folder
from bitshard.convert.source import Source
from bitshard.convert.values import Progress, require_finite, require_numbers, to_check
from bitshard.sharding.checkpoints.files import byte_count
from bitshard.sharding.loading.skeleton import Skeleton
from bitshard.weights.inventory import holder_of

LayerProgress = Callable[[Iterable[LayerReport], int], Iterable[LayerReport]]


class Calibrated(NamedTuple):
    """What became of the weights, of each decoder layer, and what tuning did (None: there was none)."""

    report: Report
    layers: list[LayerReport]
    tuned: Tuned | None


def calibrate_folder(
    folder: str | os.PathLike,
    out: str | os.PathLike,
    quantization_config: Any,
    ids: Tensor,
    *,
    device: str | torch.device = "cpu",
    max_shard_size: int | str = "5GB",
    consume: bool = False,
    adapter: str | os.PathLike | None = None,
    rank: int = 16,
    tune_steps: int | None = None,
    seed: int = 0,
    progress: Progress = lambda steps, total: steps,
    check_progress: Progress = lambda steps, total: steps,
    layer_progress: LayerProgress = lambda reports, total: reports,
    tune_progress: TuneProgress = lambda steps, total: steps,
) -> Calibrated:
    """Write the model of `folder` with calibrated 4-bit weights to `out`; format and names are those of
    `convert.quantize.quantize_folder`, and so are the arguments that are not said here.

    On the device are one decoder layer in float32 and its second moments, on the host the embeddings and the samples'
    hidden states in float32, S L H 4 bytes. Tuning needs more of both: `tuning.tune`. Finished layers are kept in
    OUT.calibration; an interrupted run is repeated with the same arguments, and goes on behind the last of them.

    Args:
        ids: int64 [S, L], samples (`samples.samples`).
        adapter: a folder for an adapter of peft that corrects what is left; must not exist.
        rank: of that.
        tune_steps: of tuning scales and adapter after all layers are calibrated; None: `tuning.STEPS` on a GPU, else 0.
        seed: of the order in which tuning sees samples.
        layer_progress: wraps the reports of decoder layers, (reports, how many layers).
        tune_progress: wraps the steps of tuning, (numbers, how many).

    ValueError: ids or positions that the model has no embedding for, weights that are quantized already, a config that
    makes int8 weights, an adapter that is not beside `out`.
    NotImplementedError: a model whose decoder layers cannot be run one by one.
    """
    folder, out, device = Path(folder), Path(out), device_of(device)
    adapter = Path(adapter) if adapter is not None else None
    settings = settings_of(tune_steps, seed, device, len(ids))
    require_new(out)
    byte_count(max_shard_size)
    if adapter is not None:
        require_new(adapter)
        _require_beside(adapter, out)
        require_new(_partial(adapter))
    require_dense(folder)
    require_4bit(quantization_config)
    small_files(folder)
    journal = remembered(out)
    source = Source(folder, None if journal is None else journal["source"])
    skeleton = skeleton_of(folder, source, quantization_config, torch.device("cpu"))
    made_by = {
        "source": str(folder.resolve()), "settings": quantization_config.to_dict(), "ids": checksum(ids.contiguous()),
        "rank": rank if adapter is not None else 0, "table": source.table(),
    }  # fmt: skip
    require_finite(source, to_check(skeleton, source), check_progress)
    stored = KeptLayers(out, made_by)
    try:
        tuned = stored.recall_tuned(settings)
        walk = Walked() if settings.steps and tuned is None else None
        reports, layers = _layers(
            folder, source, skeleton, stored, ids, device, made_by["rank"], layer_progress, journal, walk
        )
        if walk is not None and layers is not None:
            made = {key: each for number in range(len(reports)) for key, each in stored.recall(number)[0].items()}
            found, tuned = tune(layers, made, walk, settings, tune_progress)
            stored.keep_tuned(found, tuned, settings)
            del walk, made, found
        given = Given(skeleton, stored, len(reports), tuned)
        given.require_finite()
        if adapter is not None:  # before the weights have their name: a run that fails here can be repeated
            with naming(_partial(adapter)):
                low_rank.save_adapter(_partial(adapter), out, given.factors(), rank)
        report = quantize_folder(
            folder, out, quantization_config, device=device, max_shard_size=max_shard_size, consume=consume,
            progress=progress, check_progress=check_progress, chosen=given.weight,
            chosen_by=made_by | {"tuned": settings._asdict()},
        )  # fmt: skip
        if adapter is not None:
            os.rename(_partial(adapter), adapter)
        stored.close(done=True)
    finally:
        if adapter is not None:
            shutil.rmtree(_partial(adapter), ignore_errors=True)
        stored.close(done=False)
    return Calibrated(report, reports, tuned)


def _require_beside(adapter: Path, out: Path) -> None:
    """ValueError where one is, or is in, the other."""
    first, second = adapter.resolve(), out.resolve()
    if first.is_relative_to(second) or second.is_relative_to(first):
        raise ValueError(f"the adapter's folder {adapter} and that of the weights {out}: expected one beside the other")


def _partial(folder: Path) -> Path:
    return folder.with_name(folder.name + PARTIAL)


def _layers(
    folder: Path, source: Source, skeleton: Skeleton, stored: KeptLayers, ids: Tensor, device: torch.device, rank: int,
    progress: LayerProgress, journal: Any, walked: Walked | None,
) -> tuple[list[LayerReport], Layers | None]:  # fmt: skip
    """What became of each layer, and what has run them: nothing where all were there."""
    if journal is not None:  # the files are being written: all layers are there
        reports = []
        while (found := stored.recall(len(reports))) is not None:
            reports.append(found[1])
        return reports, None
    dense = skeleton_of(folder, source, None, torch.device("cpu"), dtype=torch.float32, runs=True)
    dense.model.eval()
    walk = Walk(dense, skeleton, source, device, rank)
    require_ids(dense.model, ids)
    walk.fill_rest(head=walked is not None)
    layers = Layers(walk.decoder, walk.load, walk.targets, stored.recall, stored.keep)
    with float32_products("highest"):
        reports = list(progress(calibrate_layers(layers, ids, walked), len(walk.decoder.layers)))
    return reports, layers


def require_dense(folder: Path) -> None:
    """ValueError where a folder's weights are quantized already, OSError where it has no config."""
    if format_of(folder):
        raise ValueError(f"{folder}: its weights are quantized already ({format_of(folder)}); calibrate 16-bit ones")


def require_4bit(quantization_config: Any) -> None:
    """ValueError for a config that makes no 4-bit weights."""
    if not getattr(quantization_config, "load_in_4bit", False):
        name = "load_in_8bit" if getattr(quantization_config, "load_in_8bit", False) else "no load_in_4bit"
        raise ValueError(
            f"calibration chooses codes and scales of 4-bit weights, the quantization_config has {name}; int8 weights "
            "need none: quantize them with bitshard quantize --bits 8, or load with load_in_8bit=True"
        )


def require_ids(model: nn.Module, ids: Tensor) -> None:
    """ValueError unless all ids have an embedding, and as many positions as there are in a sample."""
    rows = model.get_input_embeddings().weight.shape[0]
    if int(ids.max()) >= rows or int(ids.min()) < 0:
        raise ValueError(
            f"the tokenizer does not fit the model: it gives token {int(ids.max())}, and there are {rows} embeddings"
        )
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or ids.shape[1]
    if ids.shape[1] > positions:
        raise ValueError(f"samples of {ids.shape[1]} tokens: the model has {positions} positions (--length)")


class Walk:
    """The decoder layers of a folder, each read when it is wanted.

    Args:
        dense: the model without weights, float32, on the CPU.
        packed: the same with its 4-bit layers, which says what becomes 4-bit.
        source: the files.
        device: on which layers run.
        rank: of the adapters that correct what is left; 0: none.
    """

    def __init__(self, dense: Skeleton, packed: Skeleton, source: Source, device: torch.device, rank: int = 0):
        self.dense, self.source, self.device = dense, source, device
        self.decoder = Decoder(dense.model, device)
        self._targets = targets_of(packed, self.decoder.path)
        if rank:
            self._targets = _adapted(packed.model, self._targets, rank)

    def fill_rest(self, head: bool) -> None:
        """Read what is outside the decoder layers, and the head only where it is wanted."""
        inside = {module for layer in self.decoder.layers for module in layer.modules()}
        left_out = None if head else self.dense.model.get_output_embeddings()
        for module in self.dense.model.modules():
            if module not in inside and module is not left_out and not list(module.children()):
                self.dense.fill(module, self.source)

    def load(self, number: int) -> nn.Module:
        """A layer, read from the files; those before it are let go."""
        for before in self.decoder.layers[:number]:
            before.to("meta")
        layer = self.decoder.layers[number]
        self.dense.fill(layer, self.source)
        return layer.to(self.device)

    def targets(self, number: int) -> list[Target]:
        """What becomes 4-bit of a layer."""
        return self._targets.get(number, [])


def targets_of(packed: Skeleton, path: str) -> dict[int, list[Target]]:
    """{number of a decoder layer: what becomes 4-bit of it} of a model whose layers have this path."""
    found: dict[int, list[Target]] = {}
    for key, module, leaf in packed.places():
        held = holder_of(module, leaf)
        if held is None or not key.startswith(f"{path}."):
            continue
        number, _, name = key.removeprefix(f"{path}.").partition(".")
        weight = module._parameters[leaf]
        fmt = Format(weight.quant_type, weight.blocksize, weight.compress_statistics)
        is_stack = held.layer is not module
        name = name if is_stack else name.removesuffix(".weight")
        target = Target(key, name, is_stack, getattr(held, "transposed", False), fmt, packed.dtype)
        found.setdefault(int(number), []).append(target)
    return found


def _adapted(model: nn.Module, found: dict[int, list[Target]], rank: int) -> dict[int, list[Target]]:
    """What becomes 4-bit of each layer, with the rank of its adapter where peft can have one."""
    names = {target.name for targets in found.values() for target in targets if not target.is_stack}
    without = {name for name in names if low_rank.taken_for_experts(model, name)}
    why = "no correction: peft takes layers of such names for experts"

    def adapted(target: Target) -> Target:
        return target._replace(why=why) if target.name in without else target._replace(rank=rank)

    return {number: list(map(adapted, targets)) for number, targets in found.items()}


class Given:
    """Weights that are calibrated, by their keys.

    Args:
        packed: the model with its 4-bit layers.
        stored: where they are.
        count: of layers.
        tuned: what tuning did to them.
    """

    def __init__(self, packed: Skeleton, stored: KeptLayers, count: int, tuned: Tuned | None):
        self._stored = stored
        self._is_tuned = tuned is not None and tuned.kept
        found = targets_of(packed, stack_of(packed.model)[0])
        self._number = {target.key: number for number, targets in found.items() for target in targets}
        self._last: tuple[int, dict[str, Made]] | None = None
        self._count = count

    def weight(self, key: str) -> tuple[Tensor, Any] | None:
        """Packed bytes and state, on the CPU; None: this one is quantized as always."""
        number = self._number.get(key)
        if number is None:
            return None
        if self._last is None or self._last[0] != number:
            self._last = number, self._layer(number)
        made = self._last[1][key]
        return made.packed, made.state

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The adapters' factors by the names of linear layers and of stacks of experts, in the model's order."""
        found = {}
        for number in range(self._count):
            for key, made in self._layer(number).items():
                if made.adapter is not None:
                    found[key.removesuffix(".weight")] = made.adapter
        return found

    def require_finite(self) -> None:
        """ValueError where a scale, or a factor of an adapter, is not finite."""
        for number in range(self._count):
            for key, made in self._layer(number).items():
                scales = made.state.state2 if made.state.nested else made.state
                found = {f"{key}.absmax": scales.absmax}
                if made.adapter is not None:
                    found |= {f"{key}.lora_A": made.adapter[0], f"{key}.lora_B": made.adapter[1]}
                require_numbers(found, self._stored.folder)

    def _layer(self, number: int) -> dict[str, Made]:
        made = self._stored.recall(number)[0]
        return self._stored.tuned(made) if self._is_tuned else made
