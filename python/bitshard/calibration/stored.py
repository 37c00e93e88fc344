"""Layers that are calibrated, kept on the disk until all are: an interrupted run goes on behind the last whole one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitshard.calibration.layers import LayerReport, Made
from bitshard.calibration.tuning import Tuned, TuneSettings
from bitshard.convert import output
from bitshard.functions.functional import QuantState
from bitshard.sharding.checkpoints import contents

FOLDER = ".calibration"
TUNED = "tuned.safetensors"


class KeptLayers:
    """The folder OUT.calibration, of one run at a time. OSError where another process has it, or no run has left it.

    Args:
        out: where the weights will be.
        made_by: all that the result depends on. ValueError where the folder is that of another run.
    """

    def __init__(self, out: Path, made_by: dict[str, Any]):
        self.folder = out.with_name(out.name + FOLDER)
        made_by = output.plain(made_by)
        self._lock = output.claimed(self.folder, made_by, "a calibration with other arguments or files has left")
        try:
            output.begin(self.folder, made_by)
        except BaseException:
            self.close(done=False)
            raise

    def keep(self, number: int, made: dict[str, Made], report: LayerReport) -> None:
        """Write a layer."""
        from safetensors.torch import save

        tensors: dict[str, Tensor] = {}
        for key, each in made.items():
            tensors |= contents.packed_tensors(key, each.packed, each.state, torch.uint8)
            if each.adapter is not None:
                tensors[f"{key}.lora_A"], tensors[f"{key}.lora_B"] = each.adapter
        numbers = {key: [each.error, each.plain, each.whole, each.methods] for key, each in made.items()}
        metadata = {"numbers": json.dumps(numbers), "report": json.dumps(report._asdict())}
        plain = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        output.write_whole(self._path(number), save(plain, metadata))

    def recall(self, number: int) -> tuple[dict[str, Made], LayerReport] | None:
        """A layer that was written, on the CPU; None: it was not."""
        from safetensors import safe_open

        if not self._path(number).exists():
            return None
        with safe_open(self._path(number), "pt") as file:
            names = list(file.keys())
            numbers = json.loads(file.metadata()["numbers"])
            report = LayerReport(**json.loads(file.metadata()["report"]))
            made = {key: _read(file, names, key, numbers[key]) for key in numbers}
        return made, report

    def keep_tuned(self, made: dict[str, Made], tuned: Tuned, settings: TuneSettings) -> None:
        """Write what tuning has changed, and what it did."""
        from safetensors.torch import save

        tensors: dict[str, Tensor] = {}
        for key, each in made.items() if tuned.kept else ():
            tensors[f"{key}.absmax"] = each.state.absmax
            if each.adapter is not None:
                tensors[f"{key}.lora_A"], tensors[f"{key}.lora_B"] = each.adapter
        plain = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        metadata = {"tuned": json.dumps(tuned._asdict()), "settings": json.dumps(settings)}
        output.write_whole(self.folder / TUNED, save(plain, metadata))

    def recall_tuned(self, settings: TuneSettings) -> Tuned | None:
        """What tuning with these settings did; None: there was none, or with others."""
        from safetensors import safe_open

        if not (self.folder / TUNED).exists():
            return None
        with safe_open(self.folder / TUNED, "pt") as file:
            metadata = file.metadata()
        return Tuned(**json.loads(metadata["tuned"])) if json.loads(metadata["settings"]) == list(settings) else None

    def tuned(self, made: dict[str, Made]) -> dict[str, Made]:
        """Weights of a layer as tuning has left them."""
        from safetensors import safe_open

        found = {}
        with safe_open(self.folder / TUNED, "pt") as file:
            names = set(file.keys())
            for key, each in made.items():
                if f"{key}.absmax" in names:
                    each.state.absmax = file.get_tensor(f"{key}.absmax")
                if f"{key}.lora_A" in names:
                    each = each._replace(adapter=tuple(file.get_tensor(f"{key}.lora_{end}") for end in "AB"))
                found[key] = each
        return found

    def close(self, done: bool) -> None:
        """Remove the folder where all is `done`, or nothing is whole; else leave it to another run."""
        if self._lock < 0:
            return
        if done or not any(self.folder.glob("layer-*.safetensors")):
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1

    def _path(self, number: int) -> Path:
        return self.folder / f"layer-{number:05d}.safetensors"


def _read(file: Any, names: list[str], key: str, numbers: list[Any]) -> Made:
    beside = {name.removeprefix(f"{key}."): file.get_tensor(name) for name in names if name.startswith(f"{key}.")}
    factors = [beside.pop(name, None) for name in ("lora_A", "lora_B")]
    state = QuantState.from_dict(beside, device="cpu")
    adapter = None if factors[0] is None else (factors[0], factors[1])
    return Made(file.get_tensor(key), state, adapter, *numbers)
