"""The files that a checkpoint is made of, some of which may be consumed already: their tensors are remembered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitshard.convert.headers import other_weights, read_header, read_index
from bitshard.sharding.checkpoints.reading import INDEX, Checkpoint


class Source(Checkpoint):
    """The tensors of a folder, known by name, shape and file before one is read.

    Args:
        folder: of safetensors files.
        remembered: `table()` of an earlier run; then files may be absent.

    The index and every header are checked first (`headers`): OSError or ValueError where a file is not sound.
    ValueError where one has changed since the earlier run.
    """

    def __init__(self, folder: Path, remembered: dict[str, list[Any]] | None = None):
        self.folder = folder
        if remembered is None:
            if (folder / INDEX).is_file():
                read_index(folder / INDEX)
            self._open_all(folder)
            headers = {path: read_header(path) for path in sorted(set(self.files.values()))}
            there = {name: headers[path] for name, path in self.files.items() if name in headers[path]}
            self._shapes = {name: header[name].shape for name, header in there.items()}
            self._dtypes = {name: headers[self.files[name]][name].dtype for name in self._shapes}
            self._stamps = {path.name: _stamp(path) for path in headers}
            absent = sorted(self.files.keys() - self._shapes.keys())
            if absent:
                raise ValueError(f"{folder}: its index names {len(absent)} tensors that its files lack: {absent[:3]}")
        else:
            paths = {name: folder / file for name, (file, *_) in remembered.items()}
            super().__init__((), paths)
            self._shapes = {name: tuple(shape) for name, (_, shape, _, _) in remembered.items()}
            self._dtypes = {name: dtype for name, (_, _, dtype, _) in remembered.items()}
            self._stamps = {file: stamp for file, _, _, stamp in remembered.values()}
            for file, stamp in self._stamps.items():
                if (folder / file).exists() and _stamp(folder / file) != stamp:
                    raise ValueError(
                        f"{folder / file}: it has changed since the run that was interrupted; delete what that has left"
                    )

    def _open_all(self, folder: Path) -> None:
        try:
            super().__init__(folder)
        except ValueError as error:
            paths = sorted(folder.glob("*.safetensors"))
            for path in paths:
                read_header(path)  # whose words for a file that is none are plainer
            if paths or not (others := other_weights(folder)):
                raise
            raise ValueError(f"{error}{others}") from None

    def table(self) -> dict[str, list[Any]]:
        """{name: [file, shape, dtype, size and time of the file]}, for another run."""
        return {
            name: [self.files[name].name, list(shape), self._dtypes[name], self._stamps[self.files[name].name]]
            for name, shape in self._shapes.items()
        }

    def shape(self, name: str) -> list[int]:
        """Shape of a tensor, also of one whose file is gone."""
        return list(self._shapes[name])

    def dtype(self, name: str) -> str:
        """safetensors' name of its dtype."""
        return self._dtypes[name]

    def release(self, path: Path) -> None:
        """Let go of one file."""
        self._open.pop(path, None)


def _stamp(path: Path) -> list[int]:
    """What tells a file from one that was written later."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]
