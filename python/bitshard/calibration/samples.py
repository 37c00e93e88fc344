"""Samples for calibration: pieces of equal length of a text, a folder of texts, JSON lines, parquet, or a dataset."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_ENOUGH = 32  # characters that are read for each token that is wanted, about


def samples(
    text: str | os.PathLike, tokenizer: Any, count: int = 128, length: int = 2048, seed: int = 0, column: str = "text"
) -> Tensor:
    """int64 [S, L]: up to `count` pieces of L = `length` tokens, drawn from a text's first 32 L `count` characters.

    Args:
        text: a file of UTF-8 text, .jsonl or .parquet with a column of texts, a folder of these, or a name that
            `datasets.load_dataset` knows.
        tokenizer: of the model.
        count, length: of the samples. Fewer are given where the text has no more.
        seed: of the draw; the same seed gives the same samples.
        column: of texts, in files that have columns.

    ValueError where the text is shorter than a sample, is no text, or has no such column. OSError where it cannot be
    read.
    """
    if count < 1 or length < 2:
        raise ValueError(f"{count} samples of {length} tokens: expected at least 1 of at least 2")
    parts, characters, most = [], 0, _ENOUGH * count * length
    for part in _texts(text, column, most):
        parts.append(part)
        characters += len(part)
        if characters >= most:
            break
    ids = torch.tensor(tokenizer("\n\n".join(parts), verbose=False)["input_ids"], dtype=torch.long)
    pieces = len(ids) // length
    if pieces == 0:
        raise ValueError(f"{text}: {len(ids)} tokens of text, and a sample has {length}")
    chosen = (
        torch.randperm(pieces, dtype=torch.int64, generator=torch.Generator().manual_seed(seed))[:count].sort().values
    )
    return ids[: pieces * length].view(pieces, length)[chosen].clone()


def _texts(text: str | os.PathLike, column: str, most: int) -> Iterator[str]:
    """Texts in their order; of a file that is one text, `most` characters."""
    path = Path(text)
    if not str(text):
        raise ValueError("a text without a name: expected a file, a folder or a dataset's name")
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.is_file() and not each.name.startswith("."))
        if not files:
            raise ValueError(f"{path}: a folder without files")
        for file in files:
            yield from _of_file(file, column, most)
    elif path.exists():
        yield from _of_file(path, column, most)
    else:
        yield from _of_dataset(str(text), column)


def _of_file(path: Path, column: str, most: int) -> Iterator[str]:
    if path.suffix == ".parquet":
        yield from _of_parquet(path, column)
        return
    try:
        with path.open(encoding="utf-8") as file:
            if path.suffix == ".jsonl":
                yield from (_of_line(path, number, line, column) for number, line in enumerate(file, 1) if line.strip())
            else:
                yield _plain(path, file.read(most))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: no UTF-8 text (byte {error.start})") from None


def _plain(path: Path, text: str) -> str:
    """The same; ValueError where it has zero bytes, as binary files have."""
    zero = text.find("\0")
    if zero >= 0:
        raise ValueError(f"{path}: no text (character {zero} is a zero byte)")
    return text


def _of_line(path: Path, number: int, line: str, column: str) -> str:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: no JSON ({error})") from None
    if not isinstance(found, dict) or not isinstance(found.get(column), str):
        raise ValueError(f"{path}, line {number}: no text in a column {column!r}")
    return found[column]


def _of_parquet(path: Path, column: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: no parquet file ({error})") from None
    if column not in file.schema_arrow.names:
        raise ValueError(f"{path}: no column {column!r} among {file.schema_arrow.names}")
    kind = file.schema_arrow.field(column).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_dictionary(kind)):
        raise ValueError(f"{path}: no text in a column {column!r}, but {kind}")
    for batch in file.iter_batches(columns=[column]):
        yield from (value for value in batch.column(0).to_pylist() if isinstance(value, str))


def _of_dataset(name: str, column: str) -> Iterator[str]:
    if os.sep in name.rstrip(os.sep) and (name.startswith((".", os.sep)) or name.count(os.sep) > 1):
        raise FileNotFoundError(2, "No such file or folder", name)
    if "." in name and "/" not in name:
        raise FileNotFoundError(2, "No such file or folder", name)
    import datasets

    known = inspect.signature(datasets.load_dataset).parameters  # datasets 4 and later run no code of a dataset
    code = {"trust_remote_code": False} if "trust_remote_code" in known else {}
    try:
        found = datasets.load_dataset(name, split="train", streaming=True, **code)
        for row in found:
            if not isinstance(row.get(column), str):
                raise ValueError(f"{name}: no text in a column {column!r} among {sorted(row)}")
            yield row[column]
    except (OSError, datasets.exceptions.DatasetNotFoundError) as error:
        raise ValueError(f"{name}: no such file, and no dataset that can be had ({_first(error)})") from None


def _first(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
