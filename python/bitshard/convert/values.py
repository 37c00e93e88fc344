"""Values that are not finite: found in files before anything is made of them, and in what is made.

A weight's scale is the largest magnitude in its block, so an infinite value makes the whole block NaN, and a NaN is
passed over. Bytes of codes that are kept in a float dtype are no values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitshard.convert.headers import Stored
from bitshard.convert.source import Source
from bitshard.formats.state import dtype_name
from bitshard.sharding.checkpoints import contents
from bitshard.sharding.checkpoints.files import Entry
from bitshard.sharding.checkpoints.names import Names, unsaved
from bitshard.sharding.checkpoints.reading import Checkpoint, some
from bitshard.sharding.loading.skeleton import Skeleton
from bitshard.weights.inventory import holder_of

Progress = Callable[[Iterable, int], Iterable]
_CHUNK = 1 << 22  # elements that are looked at together
_FLOATS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
_AS_THEY_ARE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # which aminmax takes


def fault_of(
    values: Iterable[Tensor], shape: Iterable[int], dtype: torch.dtype | None = None, infinite: bool = False
) -> str | None:
    """What is wrong with the values of a tensor, in words; None: they are finite, and stay so in `dtype`.

    Args:
        values: flat float tensors, which one behind the other are the tensor.
        shape: of the tensor.
        infinite: whether infinities are right.
    """
    elements = place = nan = infinities = beyond = 0
    first: tuple[int, float] | None = None
    for chunk in values:
        numbers = _numbers(chunk)
        elements += numbers.numel()
        if numbers.numel() and not _is_finite(numbers, dtype):
            is_nan, is_infinite = numbers.isnan(), numbers.isinf()
            outside = ~numbers.to(dtype or numbers.dtype).isfinite() & ~is_nan & ~is_infinite
            wrong = is_nan | outside if infinite else is_nan | is_infinite | outside
            nan, beyond = nan + int(is_nan.sum()), beyond + int(outside.sum())
            infinities += 0 if infinite else int(is_infinite.sum())
            if first is None and bool(wrong.any()):
                at = int(wrong.to(torch.uint8).argmax())
                first = place + at, float(numbers[at])
        place += numbers.numel()
    if first is None:
        return None
    where = _index(first[0], tuple(shape), elements)
    if not nan and not infinities:
        count = f"{beyond:,} of its {elements:,} values"
        return f"{count} do not fit {dtype_name(dtype)}, the first, {first[1]:g}, at {where}"
    kinds = ", ".join(f"{count:,} {word}" for count, word in ((nan, "NaN"), (infinities, "infinite")) if count)
    return f"{nan + infinities:,} of its {elements:,} values are not finite ({kinds}), the first at {where}"


def _numbers(chunk: Tensor) -> Tensor:
    if chunk.is_complex():
        chunk = torch.view_as_real(chunk).reshape(-1)
    return chunk if chunk.dtype in _AS_THEY_ARE else chunk.float()


def _is_finite(numbers: Tensor, dtype: torch.dtype | None) -> bool:
    """Rounding keeps the order, so what holds of the least and the largest value holds of all; NaN is both."""
    ends = torch.stack(numbers.aminmax())
    return bool(ends.to(dtype or ends.dtype).isfinite().all())


def _index(place: int, shape: tuple[int, ...], elements: int) -> list[int]:
    if math.prod(shape) != elements:  # complex numbers, two of which are one
        place //= 2
    found = []
    for size in reversed(shape):
        place, index = divmod(place, size)
        found.append(index)
    return found[::-1]


def fault_in(tensor: Tensor, dtype: torch.dtype | None = None, infinite: bool = False) -> str | None:
    """The same of a tensor; of one that holds no floats None."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        return None
    flat = tensor.detach().as_subclass(Tensor).reshape(-1)
    return fault_of(flat.split(_CHUNK) if flat.numel() else (), tensor.shape, dtype, infinite)


def fault_in_file(file: Path, stored: Stored, dtype: str) -> str | None:
    """The same of a tensor of a file, of which a part at a time is read, by safetensors' name of its dtype.

    An infinite scalar is taken for a bound, as Gemma 4 has them. OSError where the file cannot be read.
    """
    if dtype not in _FLOATS:
        return None
    return fault_of(_read(file, stored, _FLOATS[dtype]), stored.shape, infinite=not stored.shape)


def _read(file: Path, stored: Stored, dtype: torch.dtype) -> Iterator[Tensor]:
    with file.open("rb") as opened:
        opened.seek(stored.begin)
        left = stored.nbytes
        while left > 0:
            data = bytearray(opened.read(min(left, _CHUNK * dtype.itemsize)))
            left -= len(data)
            if not data or len(data) % dtype.itemsize:
                raise OSError(f"{file}: the file ends inside a tensor")
            yield torch.frombuffer(data, dtype=dtype)


def dtype_in(name: str, dtype: str, names: Any) -> str:
    """What the bytes of a dense tensor are: scales of MXFP4 are exponents, which files have as U8."""
    is_exponents = dtype == "U8" and name.endswith("_scales") and f"{name.removesuffix('scales')}blocks" in names
    return "F8_E8M0" if is_exponents else dtype


def is_packed(name: str, names: Any) -> bool:
    """Whether the tensor `name` of a checkpoint holds 4-bit codes, in whatever dtype."""
    return f"{name}.absmax" in names


# ---- before anything is written ----


Wanted = dict[str, "tuple[torch.dtype | None, bool]"]  # name -> dtype that it becomes, whether it may be infinite


def to_check(skeleton: Skeleton, source: Source) -> Wanted:
    """What the model is made of, for `require_finite`. Files that are consumed already were looked at before."""
    return {name: how for name, how in _wanted(skeleton, source) if source.files[name].exists()}


def require_finite(source: Source, wanted: Wanted, progress: Progress = lambda steps, total: steps) -> None:
    """ValueError that names the tensors of the files in which values are not finite, or do not fit the dtype that the
    model has them in. Buffers may be infinite.

    Args:
        wanted: of `to_check`.
        progress: wraps the names of the tensors, (names, how many).
    """
    _require(source.where, source, wanted, progress)


def require_all_finite(source: Source, progress: Progress = lambda steps, total: steps) -> None:
    """The same of every tensor of the files."""
    _require(source.where, source, dict.fromkeys(source.files, (None, False)), progress)


def _require(where: Path, source: Source, wanted: dict[str, tuple], progress: Progress) -> None:
    found, too_large = [], False
    for name in progress(wanted, len(wanted)):
        dtype, infinite = wanted[name]
        if is_packed(name, source) or (own := dtype_in(name, source.dtype(name), source)) not in _FLOATS:
            continue
        tensor = source.read(name)
        fault = fault_in(tensor if tensor.is_floating_point() else tensor.view(_FLOATS[own]), dtype, infinite)
        if fault is not None:
            found.append(f"{name}: {fault}")
            too_large |= "do not fit" in fault
    if not found:
        return
    dtypes = '. "dtype": "float32" in config.json holds more, where it is one of dtype' if too_large else ""
    raise ValueError(
        f"{where}: nothing was written, as values in {len(found)} of {len(wanted)} tensors cannot be used: "
        f"{some(found)}{dtypes}"
    )


def _wanted(skeleton: Skeleton, source: Checkpoint) -> Iterator[tuple[str, tuple[torch.dtype | None, bool]]]:
    """(name in the files, (dtype that it becomes, whether it may be infinite)) of all that the model is made of."""
    left_out = unsaved(skeleton.model)
    for place in skeleton.places():
        key, module, leaf = place
        if key in left_out:
            continue
        is_dense = holder_of(module, leaf) is None
        dtype = contents.tensor_of(module, leaf).dtype if is_dense else skeleton.dtype
        for name in skeleton.sources(place, source):
            yield name, (dtype if dtype.is_floating_point else None, leaf in module._buffers)
            beside = source.scales(name)
            if name.endswith("weight"):
                beside.append(f"{name.removesuffix('weight')}SCB")
            yield from ((each, (None, False)) for each in beside if each in source)


def require_numbers(tensors: dict[str, Tensor], where: Path | str, infinite: Any = ()) -> None:
    """ValueError that names those of the tensors whose values are not finite; those in `infinite` may be infinite."""
    faults = ((name, fault_in(tensor, infinite=name in infinite)) for name, tensor in tensors.items())
    found = [f"{name}: {fault}" for name, fault in faults if fault is not None]
    if found:
        raise ValueError(f"{where}: values in {len(found)} of {len(tensors)} tensors cannot be used: {some(found)}")


def buffers(skeleton: Skeleton, names: Names) -> set[str]:
    """Names in a new checkpoint of the model's buffers, whose values may be infinite."""
    found = {}
    for key, module, name in skeleton.all_places():
        if name in module._buffers and key in names.keys and names.together(key) == [key]:
            tensor = contents.tensor_of(module, name)
            found[key] = Entry(tensor.dtype, tuple(tensor.shape))
    return set(names.entries(found))
