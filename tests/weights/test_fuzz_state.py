"""100,000 damaged checkpoint entries: each is read, or refused with TypeError or ValueError, and takes no memory."""

import json
import random

import pytest
import torch
from bitshard import _C, functional
from bitshard.state import QuantState
from bitshard.tensor import Params4bit
from helpers.bytes import resident_bytes

ROUNDS, SEEDS = 10_000, range(10)
VALUES = (
    None,
    True,
    -1,
    0,
    1,
    63,
    64,
    2**31,
    2**63,
    -(2**63),
    10**30,
    0.5,
    float("nan"),
    float("inf"),
    1e308,
    "",
    "nf4",
)
VALUES += (
    "fp4",
    "float32",
    "__class__",
    "load",
    "experts",
    [0.5, 0.5, 0.5],
    [3, 4, 16],
    [2**62, 4, 16],
    [],
    [64],
    [6, 70],
    [-6, 70],
    [2**62, 4],
    [[6], 70],
    {},
    {"a": 1},
    [0] * 9,
)
DTYPES = (torch.uint8, torch.int8, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def bases() -> list[tuple[torch.Tensor, dict]]:
    """Packed data and entries of sound weights and stacks of experts, plain and nested, NF4 and FP4."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape, quant_type, nested in (((6, 70), "nf4", True), ((5, 13), "fp4", False), ((300, 70), "fp4", True)):
        weight = torch.randn(shape, generator=generator)
        packed, state = functional.quantize_4bit(
            weight, quant_type=quant_type, compress_statistics=nested, blocksize=32
        )
        made.append((packed, state.as_dict(packed=True)))
    for shape, quant_type, nested in (((3, 4, 16), "nf4", True), ((5, 2, 48), "fp4", False)):
        stack = torch.randn(shape, generator=generator)
        packed, state = functional.quantize_experts_4bit(stack, 32, nested, quant_type)
        made.append((packed, state.as_dict(packed=True)))
    return made


def blob_of(entries: dict) -> tuple[str, bytes] | None:
    """(key, bytes) of the JSON entry, where it still is bytes."""
    for key, value in entries.items():
        if (
            "bitsandbytes__" in key
            and isinstance(value, torch.Tensor)
            and value.dtype is torch.uint8
            and not value.is_meta
        ):
            return key, bytes(value.flatten().tolist())
    return None


def change_value(rng: random.Random, entries: dict) -> None:
    """Another value in the JSON, or a key more or less."""
    key, text = blob_of(entries) or ("", b"")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return
    if not isinstance(values, dict):
        return
    name = rng.choice([*values, "absmax", "surprise"])
    if rng.random() < 0.2:
        values.pop(name, None)
    else:
        values[name] = rng.choice(VALUES)
    entries[key] = torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)


def change_text(rng: random.Random, entries: dict) -> None:
    """Flipped, cut, doubled or inserted bytes in the JSON."""
    key, blob = blob_of(entries) or ("", b"")
    if not blob:
        return
    text = bytearray(blob)
    place = rng.randrange(len(text))
    kind = rng.randrange(4)
    if kind == 0:
        text[place] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del text[place:]
    elif kind == 2:
        text += text[place:]
    else:
        text[place:place] = rng.choice((b"[" * 2000, b"9" * 400, b'"', b"\x00", b"{}", b"1e999", b"-", b","))
    entries[key] = torch.tensor(list(text), dtype=torch.uint8)


def change_tensor(rng: random.Random, entries: dict) -> None:
    """Another dtype, size or values of a tensor, or something that is none."""
    key = rng.choice(list(entries))
    tensor = entries[key]
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
        return
    kind = rng.randrange(6)
    if kind == 0:
        entries[key] = tensor.to(rng.choice(DTYPES))
    elif kind == 1:
        entries[key] = tensor.flatten()[: rng.randrange(tensor.numel() + 1)]
    elif kind == 2:
        entries[key] = tensor.repeat(rng.randrange(3))
    elif kind == 3:
        entries[key] = tensor.roll(1)
    elif kind == 4:
        entries[key] = tensor.to("meta")
    else:
        entries[key] = rng.choice(VALUES)


def change_keys(rng: random.Random, entries: dict) -> None:
    """An entry dropped, renamed, or there twice."""
    key = rng.choice(list(entries))
    kind = rng.randrange(4)
    if kind == 0:
        del entries[key]
    elif kind == 1:
        entries[f"x.{key}"] = entries[key]
    elif kind == 2:
        entries[rng.choice(("", "weight", "quant_state", "shape", "quant_type", "nested_absmax"))] = entries.pop(key)
    else:
        entries[f"quant_state.bitsandbytes__{rng.choice(('nf4', 'fp4', 'int8', ''))}"] = entries.pop(key)


CHANGES = (change_value, change_text, change_tensor, change_keys)


@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_states(seed):
    rng = random.Random(seed)
    sound = bases()
    read = refused = 0
    before = resident_bytes()
    for _ in range(ROUNDS):
        packed, entries = rng.choice(sound)
        entries = dict(entries)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            if entries:
                rng.choice(CHANGES)(rng, entries)
        try:
            state = QuantState.from_dict(entries, device="cpu")
            read += 1
            if state.quant_type is not None:  # what was read must be usable with its bytes, or be refused there
                weight = Params4bit.from_prequantized(packed, entries, device="cpu")
                functional.dequantize_4bit(weight.data, weight.quant_state)
        except (TypeError, ValueError) as error:
            refused += 1
            assert len(str(error)) < 1500
    assert refused > ROUNDS // 2 and read > ROUNDS // 100, (read, refused)
    assert resident_bytes() - before < 64 * 2**20


def test_damaged_bytes():
    """Any packed bytes and any finite scales decode without a crash; sizes that do not fit are refused."""
    rng = random.Random(1)
    packed, entries = bases()[0]
    for _ in range(2000):
        data = packed.clone()
        data[rng.randrange(data.numel())] = rng.randrange(256)
        if rng.random() < 0.3:
            data = data[: rng.randrange(data.numel())].to(rng.choice(DTYPES))
            if data.numel() == _C.storage_elements(6 * 70, data.itemsize):  # another storage dtype of the right size
                continue
            with pytest.raises((TypeError, ValueError)):
                Params4bit.from_prequantized(data, entries, device="cpu")
        else:
            weight = Params4bit.from_prequantized(data, entries, device="cpu")
            assert functional.dequantize_4bit(weight.data, weight.quant_state).shape == (6, 70)
