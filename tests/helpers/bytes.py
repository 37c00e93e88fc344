"""Comparing tensors by their bytes, as packed words must be: NaN equals NaN of the same bits, 0.0 is not -0.0."""

from pathlib import Path

import torch
from torch import Tensor


def as_bytes(data: Tensor) -> Tensor:
    """A copy of the elements of a tensor of any class and dtype, in order, as plain uint8 [bytes] on the CPU."""
    return on_device(data).cpu().clone()


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and equal bytes. Classes, strides and devices do not count."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    return torch.equal(on_device(a), on_device(b).to(a.device))


def same(found, expected) -> bool:
    """The same for dictionaries, lists and tuples of them, to any depth; what is no tensor is equal."""
    if isinstance(found, Tensor):
        return isinstance(expected, Tensor) and same_bytes(found, expected)
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in found)
    if isinstance(found, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == expected


def wrong_bytes(got: Tensor, expected: Tensor) -> int:
    """How many bytes of `got` are not those of `expected`, whatever their dtypes; the larger size if sizes differ."""
    got, expected = as_bytes(got), as_bytes(expected)
    return int((got != expected).sum()) if got.numel() == expected.numel() else max(got.numel(), expected.numel())


def on_device(data: Tensor) -> Tensor:
    """The bytes [bytes] where the tensor is; a view of it if it is contiguous."""
    return data.detach().as_subclass(Tensor).contiguous().view(-1).view(torch.uint8)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    """Same shape, dtype and bytes; else how many elements are wrong, and the first of them with both values."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, (actual.shape, actual.dtype)
    if same_bytes(actual, expected):
        return
    bad = (as_bytes(actual) != as_bytes(expected)).view(*actual.shape, actual.itemsize).any(-1)
    index = tuple(int(i) for i in torch.nonzero(bad)[0])
    values = f"{actual[index].cpu()!r}, expected {expected[index].cpu()!r}"
    raise AssertionError(f"{int(bad.sum())} of {bad.numel()} wrong, first at {index}: {values}")


def resident_bytes() -> int:
    """Memory that this process has in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
