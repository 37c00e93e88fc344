"""One call on each instruction set of this CPU, or with several numbers of threads, and whether the bits are equal."""

import torch
from bitshard import _C
from helpers.bytes import assert_equal


def by_isa(call) -> dict:
    """{instruction set: what call() gives there}, the scalar reference first."""
    before = _C.isa()
    try:
        return {isa: (_C.set_isa(isa), call())[1] for isa in _C.isas()}
    finally:
        _C.set_isa(before)


def by_threads(call, *counts: int) -> dict:
    """{number of threads: what call() gives with so many}."""
    before = torch.get_num_threads()
    try:
        return {count: (torch.set_num_threads(count), call())[1] for count in counts}
    finally:
        torch.set_num_threads(before)


def agree(found: dict) -> None:
    """Tensors, or sequences of them, with the dtypes, shapes and bits of the first; what differs is named."""
    assert len(found) > 1 or found.keys() == {"scalar"}
    given = {name: [one] if isinstance(one, torch.Tensor) else one for name, one in found.items()}
    first, expected = next(iter(given.items()))
    for name, one in given.items():
        for i, (actual, wanted) in enumerate(zip(one, expected, strict=True)):
            try:
                assert_equal(actual, wanted)
            except AssertionError as error:
                raise AssertionError(f"{name} against {first}, result {i}: {error}") from None
