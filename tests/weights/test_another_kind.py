"""A kind of weight of which bitshard knows nothing goes through everything: `helpers.another_kind`."""

import copy
import pickle

import pytest
import torch
from bitshard.nn.linear import Linear4bit
from bitshard.state import QuantState
from bitshard.tensor import Params4bit
from helpers.another_kind import BLOCK, TENTHS, dequantize, quantize
from helpers.bytes import same_bytes
from safetensors.torch import load_file, save_file

N, K = 24, 48
STORAGES = (torch.uint8, torch.bfloat16, torch.float32)


def layer(storage=torch.uint8, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    made = Linear4bit(K, N, compute_dtype=dtype, quant_type="tenths", quant_storage=storage)
    return made.to(dtype).to("cpu")


def values(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Linear(K, N).weight.detach()


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_quantized_by_its_first_move(storage):
    made = layer(storage)
    packed, state = quantize(values(), BLOCK, storage)
    assert same_bytes(made.weight.data, packed) and made.weight.dtype is storage
    assert made.quant_state == state and made.quant_state.kind is TENTHS and made.weight.blocksize == BLOCK
    assert (dequantize(packed, state) - values()).abs().max() < 0.2 * values().abs().max()
    with pytest.raises(ValueError, match="blocksize 64"):
        Params4bit(values(), quant_type="tenths", blocksize=64)
    with pytest.raises(ValueError, match="tenths"):
        Params4bit(values(), quant_type="hundredths")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_product_and_gradient(dtype):
    made = layer(dtype=dtype)
    weight = dequantize(made.weight, made.quant_state).to(dtype)
    x = torch.randn(3, 5, K, dtype=dtype, requires_grad=True)
    y = made(x)
    assert torch.equal(y, torch.nn.functional.linear(x, weight, made.bias))
    dy = torch.randn_like(y)
    dx, dbias = torch.autograd.grad(y, (x, made.bias), dy)
    assert torch.equal(dx, dy @ weight) and torch.allclose(dbias, dy.sum((0, 1)), rtol=0.02)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_files(storage, tmp_path):
    made, other = layer(storage), layer(storage, seed=1)
    save_file(made.state_dict(), tmp_path / "w.safetensors")
    found = load_file(tmp_path / "w.safetensors")
    assert set(found) == {
        "weight", "weight.absmax", "weight.quant_map", "weight.global_scale",
        "weight.quant_state.bitsandbytes__tenths", "bias",
    }  # fmt: skip
    assert not same_bytes(other.weight.data, made.weight.data)
    other.load_state_dict(found)
    assert same_bytes(other.weight.data, made.weight.data) and other.quant_state == made.quant_state
    x = torch.randn(2, K)
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), other):
        assert torch.equal(copied(x), made(x)) and copied.quant_state.kind is TENTHS


@pytest.mark.parametrize(
    "spoil, words",
    [
        ({"global_scale": None}, "global_scale is missing"),
        ({"global_scale": torch.tensor([float("nan")])}, "not finite"),
        ({"global_scale": torch.ones(2)}, "2 entries, expected 1"),
        ({"absmax": torch.zeros(5, dtype=torch.uint8)}, "5 entries, expected 72"),
        ({"quant_map": torch.arange(16.0)}, "is not the table"),
        ({"nonsense": torch.ones(1)}, "unknown"),
        ({"quant_type": "nf4"}, "layout"),
        ({"layout": "experts"}, "layout"),
    ],
)
def test_bad_entries(spoil, words):
    given = layer().quant_state.as_dict()
    assert QuantState.from_dict(given, device="cpu") == layer().quant_state
    spoilt = {name: value for name, value in {**given, **spoil}.items() if value is not None}
    with pytest.raises((TypeError, ValueError), match=words):
        QuantState.from_dict(spoilt, device="cpu")


def test_its_scale_is_no_entry_of_others():
    """What a kind does not know is refused, not dropped."""
    state = Linear4bit(K, N, quant_type="nf4").to("cpu").quant_state
    with pytest.raises(ValueError, match="global_scale"):
        QuantState.from_dict({**state.as_dict(), "global_scale": torch.ones(1)}, device="cpu")
