"""Pickles of 0.1.0, made when the engine's modules were not in folders yet, and what pickles name today."""

import gzip
import io
import pickle
import pickletools
import zipfile
from pathlib import Path

import pytest
import torch
from bitshard import functional

FILE = Path(__file__).parents[1] / "golden" / "pickles.bin.gz"
NAMES = ("layer", "weight", "eight", "int8", "state")
TRUSTED = ("weight", "int8")  # files of tensors; whole modules need weights_only=False, as of every library


@pytest.fixture(scope="module")
def old():
    return pickle.loads(gzip.decompress(FILE.read_bytes()))


def loaded(data: bytes, name: str):
    return torch.load(io.BytesIO(data), weights_only=name in TRUSTED)


def named(data: bytes) -> set[str]:
    """The classes and functions of the engine that a file of torch.save names."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        (entry,) = (name for name in file.namelist() if name.endswith("data.pkl"))
        ops = pickletools.genops(file.read(entry))
    return {argument for op, argument, _ in ops if op.name == "GLOBAL" and argument.startswith("bitshard")}


@pytest.mark.parametrize("name", NAMES)
def test_old_pickles_load(old, name):
    found = loaded(old[name], name)
    if name in ("layer", "weight"):
        weight = found if name == "weight" else found.weight
        values = functional.dequantize_4bit(weight.data, weight.quant_state)
        assert values.flatten().tolist() == old["values"]["layer"]
    elif name in ("eight", "int8"):
        weight = found if name == "int8" else found.weight
        assert weight.dequantize().flatten().tolist() == old["values"]["int8"]
    else:
        assert (found.quant_type, found.shape) == ("fp4", (3, 64))


@pytest.mark.parametrize("name", NAMES)
def test_new_pickles_name_what_old_ones_did(old, name):
    """So a release before can read them."""
    buffer = io.BytesIO()
    torch.save(loaded(old[name], name), buffer)
    assert named(buffer.getvalue()) == named(old[name]) != set()
