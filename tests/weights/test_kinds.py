"""Kinds of packed weights: sizes, format and products are a kind's, and whatever moves the bytes asks it."""

import re
from pathlib import Path

import pytest
import torch
from bitshard import functional, kinds, tensor
from bitshard.formats import container
from bitshard.sharding.checkpoints import contents
from bitshard.sharding.weights.state_entries import differences
from bitshard.state import QuantState

ROOT = Path(__file__).parents[2]


class OneByteEach(kinds.Kind):
    """A byte an element, a scale a row: what no 4-bit weight has."""

    word = "one-byte"
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
    """Holder, shard, loading and saving count no codes themselves, and nothing asks which kind it has."""
    counted = re.compile(r"ops\.(?:storage_elements|block_count)\(")
    package = ROOT / "python/bitshard"
    above = [path for name in ("nn", "sharding", "weights", "shards") for path in (package / name).rglob("*.py")]
    above.append(package / "formats/container.py")
    assert not [path.relative_to(package).as_posix() for path in above if counted.search(path.read_text())]
    asked = re.compile(r"kind (?:is|is not|==|!=) (?:\w+\.)?(?:INT8|EXPERTS|FOUR_BIT)\b")
    assert asked.search("if state.kind is not kinds.INT8:")
    assert not [
        path.relative_to(package).as_posix() for path in package.rglob("*.py") if asked.search(path.read_text())
    ]


def int8_weight(dtype=torch.bfloat16):
    """(values, column, state) of an int8 weight [7, 5]."""
    torch.manual_seed(0)
    values = torch.randn(7, 5, dtype=dtype)
    return values, *kinds.INT8.quantize(values, quant_storage=dtype)


def test_int8_is_bytes_with_scales_of_rows():
    values, column, state = int8_weight()
    codes, scales, _ = functional.int8.quantize(values)
    assert state.kind is kinds.INT8 and state.scale_count == 7 and torch.equal(state.absmax, scales)
    assert column.shape == (18, 1) and column.dtype is torch.bfloat16
    assert torch.equal(container.repack(column, torch.int8, state).view(7, 5), codes)
    again = functional.dequantize_4bit(column, state)
    assert again.dtype is torch.bfloat16 and torch.equal(again, state.kind.dequantize(column, state))
    assert (again.float() - values.float()).abs().max() < 0.02 * values.abs().max()
    x = torch.randn(3, 5, dtype=torch.bfloat16)
    assert torch.allclose(
        state.kind.product(x, column, state, None, None, 0.0).float(), x.float() @ again.float().t(), atol=0.05
    )
    with pytest.raises(ValueError, match="\\[7, 5\\] needs 18"):
        functional.dequantize_4bit(column[1:], state)


def test_int8_entries_of_files_and_states():
    """A file has the names of a layer, a sharded state dict those of a state; each can be read as the other."""
    _, column, state = int8_weight()
    filed = contents.packed_tensors("a.weight", column, state, torch.int8)
    assert {key: tuple(value.shape) for key, value in filed.items()} == {
        "a.weight": (7, 5), "a.SCB": (7,), "a.weight_format": (),
    }  # fmt: skip
    entries = kinds.INT8.unfiled("a.weight", {**filed, "a.bias": 3}, state)
    assert set(entries) == {"a.weight", "a.bias", "a.weight.absmax", "a.weight.quant_state.bitsandbytes__int8"}
    read = QuantState.from_dict({k: v for k, v in entries.items() if k.startswith("a.weight.")}, device="cpu")
    assert read == state and read.kind is kinds.INT8 and not list(differences(read, state))
    assert kinds.FOUR_BIT.unfiled("a.weight", filed, state) is filed


@pytest.mark.parametrize(
    "spoil, words",
    [
        ({"absmax": torch.ones(6)}, "6 entries, expected 7"),
        ({"absmax": torch.ones(7).half()}, "absmax is torch.float16"),
        ({"absmax": torch.tensor([1.0, -1, 1, 1, 1, 1, 1])}, "below zero"),
        ({"absmax": torch.full((7,), torch.nan)}, "not finite"),
        ({"shape": (7, 5, 1)}, "int8 of shape"),
        ({"layout": "experts"}, "layout"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"nested_blocksize": 256}, "missing beside"),
    ],
)
def test_bad_int8_states(spoil, words):
    state = int8_weight()[2]
    entries = {**state.as_dict(), **spoil}
    assert QuantState.from_dict(state.as_dict(), device="cpu") == state
    with pytest.raises((TypeError, ValueError), match=words):
        QuantState.from_dict(entries, device="cpu")
