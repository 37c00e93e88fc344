"""The safetensors files of a checkpoint: which tensor is where, of what shape, and the tensor itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitshard.formats.layouts import Layout, Stacks
from bitshard.formats.state import QuantState

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD = re.compile(r"(model(?:\.\w+)?)-\d{5}-of-(\d{5})\.safetensors")  # one file of several
_ENTRY = re.compile(r"(.+)\.((?:nested_)?(?:absmax|quant_map)|quant_state\.bitsandbytes__\w+)")  # beside a packed stack
_SHOWN = 5  # of the complaints in an error


class Checkpoint:
    """The tensors of a folder of safetensors files, or of a list of files; read one at a time.

    Attributes:
        where: the folder, or the first file, for messages.
        files: name of a tensor -> its file.
    """

    def __init__(self, source: str | Path | Iterable[str | Path], known: dict[str, Path] | None = None):
        """`known`: which tensors there are and in which files, where these need not all be there."""
        self._open: dict[Path, Any] = {}
        if known is not None:
            self.where, self.files = next(iter(known.values()), Path()).parent, known
        elif isinstance(source, (str, Path)):
            self.where = Path(source)
            self.files = _indexed(self.where) or self._named(_loose(self.where))
        else:
            paths = [Path(path) for path in source]
            self.where = paths[0] if paths else Path()
            self.files = self._named(paths)
        if not self.files:
            raise ValueError(f"{self.where}: no safetensors files there")
        # name -> key of the weight in the model, its layout, its key in the files, dtype
        self._laid_out: dict[str, tuple[str, type[Layout] | Stacks, str, torch.dtype]] = {}
        self._last: tuple[str, dict[str, Tensor]] | None = None
        self._beside: dict[str, list[str]] = {}
        for name in self.files:
            layer, dot, entry = name.partition(".weight.")
            found = _ENTRY.fullmatch(name)
            if dot:
                self._beside.setdefault(f"{layer}.weight", []).append(entry)
            elif found is not None and found[1] in self.files:
                self._beside.setdefault(found[1], []).append(found[2])

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def entries(self, name: str) -> list[str]:
        """Names of the entries beside a packed weight ("absmax", "quant_map", ...); empty for a dense one."""
        return self._beside.get(name, [])

    def show(self, packed: dict[str, tuple[type[Layout] | Stacks, str]], dtype: torch.dtype) -> None:
        """Show packed weights that the files have in a layout of others by the names of bitsandbytes' entries.

        Args:
            packed: key in the model -> layout, key in the files (`laid_out.packed_weights`).
            dtype: that the weights dequantize to.
        """
        for key, (layout, own) in packed.items():
            self._beside[key] = [*layout.kind.entry_names()]
            for shown in (key, *(f"{key}.{entry}" for entry in self._beside[key])):
                self._laid_out[shown] = key, layout, own, dtype
                self.files.setdefault(shown, self.files[layout.names(own)[0]])

    def layout(self, name: str) -> Layout | Stacks | None:
        """The layout of a weight, where it is one of others."""
        _, layout, own, _ = self._laid_out.get(name, (None, None, name, None))
        return None if layout is None else layout.of(own, self._get)

    def scales(self, name: str) -> list[str]:
        """The files' names of what a packed weight is multiplied with."""
        if name not in self._laid_out:
            return [f"{name}.{entry}" for entry in self.entries(name)]
        _, layout, own, _ = self._laid_out[name]
        return layout.scale_names(own)

    def _read_laid_out(self, name: str) -> Tensor:
        key, layout, own, dtype = self._laid_out[name]
        if self._last is None or self._last[0] != key:
            packed, state, _ = layout.read(own, self._get, dtype, QuantState)
            shown = {f"{key}.{entry}": value for entry, value in state.as_dict(packed=True).items()}
            self._last = key, {key: packed, **shown}
        return self._last[1][name]

    def _get(self, name: str) -> Tensor | None:
        return self._handle(self.files[name]).get_tensor(name) if name in self.files else None

    def shape(self, name: str) -> list[int]:
        """Shape of a tensor, read from the header of its file."""
        return list(self._handle(self.files[name]).get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """A tensor, on the CPU; it may be the file itself, mapped into memory."""
        if name in self._laid_out:
            return self._read_laid_out(name)
        return self._handle(self.files[name]).get_tensor(name)

    def close(self) -> None:
        """Let go of the files."""
        self._open.clear()

    def _named(self, paths: list[Path]) -> dict[str, Path]:
        return {name: path for path in paths for name in self._handle(path).keys()}

    def _handle(self, path: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        if path not in self._open:
            try:
                self._open[path] = safe_open(str(path), "pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path}: cannot be read as safetensors ({error})") from error
        return self._open[path]


def _indexed(folder: Path) -> dict[str, Path]:
    """{tensor: file} as the index of `folder` says; empty where it has none. ValueError for files that are absent."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    if not (folder / INDEX).is_file():
        return {}
    names = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    files = sorted(set(names.values()))
    absent = [file for file in files if not (folder / file).is_file()]
    if absent:
        raise ValueError(
            f"{folder}: {len(absent)} of {len(files)} files that its index names are absent: {some(absent)}"
        )
    return {name: folder / file for name, file in names.items()}


def _loose(folder: Path) -> list[Path]:
    """The files of a folder without an index; beside a single file no shards, which a save is about to remove.

    ValueError for shards that are not all of one checkpoint, as a save that is not over leaves them.
    """
    paths = sorted(folder.glob("*.safetensors"))
    shards = [path for path in paths if SHARD.fullmatch(path.name)]
    if folder / SINGLE in paths:
        return [path for path in paths if path not in shards]
    kinds = {SHARD.fullmatch(path.name).groups() for path in shards}
    if shards and (len(kinds) > 1 or len(shards) != int(next(iter(kinds))[1])):
        raise ValueError(
            f"{folder}: there is no {INDEX}, and these {len(shards)} files are not one checkpoint: "
            f"{some([path.name for path in shards])}. Is it still being written?"
        )
    return paths


def some(complaints: list[str]) -> str:
    """The first of them, and how many more there are."""
    rest = len(complaints) - _SHOWN
    return "; ".join(complaints[:_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")
