"""Lightning's plugin, diffusers' quantizers and sentence-transformers, in 4 and 8 bits, beside the original."""

import functools
import math

import beside
import pytest
from beside import BOTH, OURS, THEIRS


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """results(tool, worker, *arguments): {package: results} of one process each; "" is a tool of the environment."""
    folder = tmp_path_factory.mktemp("loading")

    @functools.cache
    def run(tool, worker, *arguments):
        out, tools = folder / "-".join([worker, *arguments]), [tool] if tool else []
        return {which: beside.run(which, tools, worker, *arguments, out=out / which)[0] for which in BOTH}

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


@pytest.mark.parametrize("mode", ("int8", "int8-training"))
def test_lightning_int8(results, mode):
    """The original's codes, scales and keys; the head trains behind codes, all layers behind float weights."""
    found = results("lightning", "lightning_plugin.py")
    ours, theirs = found[OURS][mode], found[THEIRS][mode]
    same = ("classes", "dtypes", "trained", "thresholds", "bytes", "keys", "scales", "moved")
    assert all(ours.get(name) == theirs.get(name) for name in same)
    assert ours["classes"] == ["Int8Params"] * 2 and ours["thresholds"] == [6.0] * 2
    assert ours["trained"] == [mode == "int8-training"] * 2 and ours.get("moved", [True, True]) == [True, True]
    assert ("0.SCB" in ours["keys"]) is (mode == "int8")
    assert beside.gap(theirs["losses"], ours["losses"]) <= 0.01
    assert ours["losses"][-1] < 0.3 * ours["losses"][0]


def test_lightning_loads_codes_and_scales_together(results):
    """Its hook takes codes out of the state dict; the original then loads the scales beside codes of another weight."""
    found = results("lightning", "lightning_plugin.py")
    ours, theirs = found[OURS]["loaded_int8"], found[THEIRS]["loaded_int8"]
    assert ours == {"differed": True, "codes_loaded": True, "scales_loaded": True}
    assert theirs == {"differed": True, "codes_loaded": False, "scales_loaded": True}


@pytest.mark.parametrize("name", ("replaced", "replaced_meta", "replaced_int8"))
def test_lightning_puts_packed_bytes_into_a_layer(results, name):
    """By `.data =` and `.quant_state =` (`.SCB =`), or into a weight on the meta device, as it does on CUDA."""
    found = results("lightning", "lightning_plugin.py")
    ours, theirs = found[OURS][name], found[THEIRS][name]
    assert "error" not in theirs and "error" not in ours, (ours, theirs)
    assert ours["keys"] == theirs["keys"]
    bound = 0.01 * max(map(abs, theirs["out"])) if name == "replaced_int8" else 0.1
    assert close(ours["out"], theirs["out"], bound) and close(ours["grad"], theirs["grad"], 0.1)


def test_diffusers(results):
    """A transformer quantizes to the original's bytes, comes back from disk with them, and can be dequantized."""
    found = results("diffusers", "diffusers_quantizer.py")
    ours, theirs = found[OURS], found[THEIRS]
    assert ours["packed"] == theirs["packed"] and len(ours["packed"]) > 8
    assert ours["kept"] and ours["gap"] == 0.0 and ours["dequantized"] < 1e-4
    assert close(ours["sample"], theirs["sample"], 0.05) and not close(ours["sample"], ours["dense"], 1e-3)
    assert ours["bytes"] == theirs["bytes"] < 0.3


def test_diffusers_int8(results):
    """The same in 8 bits: codes and scales of the original, kept by files; values by `dequantize_and_replace`."""
    found = results("diffusers", "diffusers_quantizer.py", "--bits", "8")
    ours, theirs = found[OURS], found[THEIRS]
    assert ours["packed"] == theirs["packed"] and len(ours["packed"]) == 32
    assert ours["kept"] and ours["gap"] == 0.0
    assert ours["dequantized"] < 1.1 * theirs["dequantized"] < 0.05
    assert close(ours["sample"], theirs["sample"], 0.02) and not close(ours["sample"], ours["dense"], 1e-3)
    assert close(ours["sample"], ours["dense"], 0.05) and ours["bytes"] == theirs["bytes"] < 0.3


def test_accelerate_int8(results):
    """`load_and_quantize_model`: the original's scales, its codes but for halves, kept by files; `cpu_offload`."""
    found = results("", "accelerate_loader.py")
    ours, theirs = found[OURS], found[THEIRS]
    assert "again_error" not in ours and "offload_error" not in ours, (ours, theirs)
    assert (
        ours["keys"] == theirs["keys"] and ours["codes"].keys() == theirs["codes"].keys() and len(ours["codes"]) == 14
    )
    for (codes, scales), (their_codes, their_scales) in zip(
        ours["codes"].values(), theirs["codes"].values(), strict=True
    ):
        assert wrong(codes, their_codes) <= 1e-3 and scales == their_scales
    assert ours["kept"] and ours["gap"] == ours["offloaded_gap"] == 0.0
    assert close(ours["logits"], theirs["logits"], 0.05)


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
