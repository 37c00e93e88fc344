"""Kinds of packed weights: sizes, format and products are a kind's, and whatever moves the bytes asks it."""

import re
from pathlib import Path

import pytest
import torch
from bitshard import container, functional, kinds, tensor
from bitshard.sharding.checkpoints import contents
from bitshard.sharding.weights.state_entries import differences
from bitshard.state import QuantState

ROOT = Path(__file__).parents[1]


class OneByteEach(kinds.Kind):
    """A byte an element, a scale a row: what no 4-bit weight has."""

    format = ("shape",)

    def elements(self, state, itemsize):
        return -(-state.shape.numel() // itemsize)

    def scale_count(self, state):
        return state.shape[0]


class State(QuantState):
    kind = OneByteEach()


@pytest.fixture
def made():
    """(packed bytes of [3, 5], their state) of the other kind."""
    shape = torch.Size((3, 5))
    return torch.arange(15, dtype=torch.uint8).view(-1, 1), State(torch.ones(3), shape, dtype=torch.float32)


def test_sizes_of_4bit_weights():
    for shape, blocksize in (((3, 5), 64), ((7, 64), 64), ((128, 96), 256)):
        packed, state = functional.quantize_4bit(torch.randn(shape), blocksize=blocksize)
        assert state.kind is kinds.FOUR_BIT and state.scale_count == state.absmax.numel()
        for dtype in (torch.uint8, torch.bfloat16, torch.float32):
            assert state.packed_elements(dtype.itemsize) == container.repack(packed, dtype, state).numel()
        assert torch.equal(state.kind.dequantize(packed, state), functional.dequantize_4bit(packed, state))


@pytest.mark.parametrize("dtype, elements", [(torch.uint8, 15), (torch.bfloat16, 8), (torch.float32, 4)])
def test_another_kind_has_other_sizes(made, dtype, elements):
    """Containers, checks of bytes and entries of files go by it."""
    packed, state = made
    again = container.repack(packed, dtype, state)
    assert again.shape == (elements, 1) and torch.equal(again.view(torch.uint8).view(-1)[:15], packed.view(-1))
    assert torch.equal(container.repack_whole(again, state, torch.uint8, "w"), packed)
    with pytest.raises(ValueError, match=rf"packs into {elements}"):
        container.repack_whole(again[1:], state, torch.uint8, "w")
    tensor.verify(again, state, "here")
    with pytest.raises(ValueError):
        tensor.verify(again[1:], state, "here")

    class Held:
        storage = dtype

    Held.state = state
    assert contents._packed_entry(Held).shape == (elements, 1) and state.scale_count == 3


def test_format_is_the_kinds(made):
    other = State(torch.ones(3), torch.Size((3, 6)), blocksize=7)
    assert list(differences(made[1], other)) == [("shape", torch.Size((3, 5)), torch.Size((3, 6)))]


def test_whoever_moves_bytes_asks_the_kind():
    """Holder, shard, loading and saving count no codes themselves; rows are quantized where no state is yet."""
    counted = re.compile(r"ops\.(?:storage_elements|block_count)\(")
    package = ROOT / "python/bitshard"
    above = [*(package / "nn").rglob("*.py"), *(package / "sharding").rglob("*.py")]
    above += [package / name for name in ("tensor.py", "container.py", "shard.py", "gather.py", "placeholder.py")]
    found = [path.relative_to(package).as_posix() for path in above if counted.search(path.read_text())]
    assert found == ["sharding/weights/rows.py"]
