"""Lightning's plugin, diffusers' quantizer and sentence-transformers over 4-bit weights, beside the original."""

import math

import beside
import pytest
from beside import BOTH, OURS, THEIRS


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """results(tool, worker): {package: results} of one process each."""
    found = {}

    def run(tool, worker):
        if worker not in found:
            folder = tmp_path_factory.mktemp(tool)
            found[worker] = {which: beside.run(which, [tool], worker, out=folder / which)[0] for which in BOTH}
        return found[worker]

    return run


def wrong(a, b):
    """The share of bytes that differ."""
    assert len(a) == len(b) > 0
    return sum(x != y for x, y in zip(a, b, strict=True)) / len(a)


def close(a, b, bound):
    return max(abs(x - y) for x, y in zip(a, b, strict=True)) <= bound


@pytest.mark.parametrize("mode", ("nf4", "nf4-dq", "fp4", "fp4-dq"))
def test_lightning(results, mode):
    """The plugin's layers hold the original's bytes, write its keys and train a head with its losses."""
    found = results("lightning", "lightning_plugin.py")
    ours, theirs = found[OURS][mode], found[THEIRS][mode]
    assert ours["classes"] == theirs["classes"] == ["Params4bit"] * 2
    assert ours["keys"] == theirs["keys"] and ours["has_state"] and ours["dtypes"] == theirs["dtypes"]
    # FP4: on CPUs the original rounds some values to another code than on GPUs
    bound = 0 if mode.startswith("nf4") else 0.01
    assert all(wrong(a, b) <= bound for a, b in zip(ours["bytes"], theirs["bytes"], strict=True))
    assert beside.gap(theirs["losses"], ours["losses"]) <= 1e-3
    assert ours["losses"][-1] < 0.9 * ours["losses"][0]


@pytest.mark.parametrize("name", ("replaced", "replaced_meta"))
def test_lightning_puts_packed_bytes_into_a_layer(results, name):
    """By `.data =` and `.quant_state =`, or into a weight on the meta device, as it does on CUDA."""
    found = results("lightning", "lightning_plugin.py")
    ours, theirs = found[OURS][name], found[THEIRS][name]
    assert "error" not in theirs and "error" not in ours, (ours, theirs)
    assert ours["keys"] == theirs["keys"]
    assert close(ours["out"], theirs["out"], 0.1) and close(ours["grad"], theirs["grad"], 0.1)


def test_diffusers(results):
    """A transformer quantizes to the original's bytes, comes back from disk with them, and can be dequantized."""
    found = results("diffusers", "diffusers_quantizer.py")
    ours, theirs = found[OURS], found[THEIRS]
    assert ours["packed"] == theirs["packed"] and len(ours["packed"]) > 8
    assert ours["kept"] and ours["gap"] == 0.0 and ours["dequantized"] < 1e-4
    assert close(ours["sample"], theirs["sample"], 0.05) and not close(ours["sample"], ours["dense"], 1e-3)
    assert ours["bytes"] == theirs["bytes"] < 0.3


def test_sentence_transformers(results):
    """Embeddings of a 4-bit BERT: near the dense ones, the same after saving and loading."""
    found = results("sentence-transformers", "sentence.py")
    ours, theirs = found[OURS], found[THEIRS]
    assert ours["packed"] == theirs["packed"] and len(ours["packed"]) == 13
    assert ours["kept"] and ours["gap"] == 0.0
    for a, b, dense in zip(ours["embeddings"], theirs["embeddings"], ours["dense"], strict=True):
        assert close(a, b, 0.02) and 0.9 < cosine(a, dense) < 0.99999


def cosine(a, b):
    product = sum(x * y for x, y in zip(a, b, strict=True))
    return product / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
