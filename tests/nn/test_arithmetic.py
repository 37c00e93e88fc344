"""bitshard.arithmetic: which products are in 8 bits, what is reported, and that nothing else changes."""

import copy
import io
import logging

import bitshard.arithmetic as arithmetic
import pytest
import torch
from bitshard import functional
from bitshard.nn.linear import Linear4bit
from helpers import switches
from helpers.bytes import assert_equal
from helpers.lora import fused_copy
from helpers.lora import model as made_lora
from torch import nn

ROWS = arithmetic.MIN_ROWS


class Model(nn.Module):
    """Layers of 128 columns, one of 96, and a head."""

    def __init__(self, quant_type: str = "nf4"):
        super().__init__()
        torch.manual_seed(0)
        self.up = Linear4bit(128, 192, compute_dtype=torch.float32, quant_type=quant_type)
        self.down = Linear4bit(192, 96, compute_dtype=torch.float32, quant_type=quant_type)
        self.odd = Linear4bit(96, 128, compute_dtype=torch.float32, quant_type=quant_type)
        self.head = Linear4bit(128, 64, compute_dtype=torch.float32, quant_type=quant_type)

    def get_output_embeddings(self):
        return self.head

    def forward(self, x):
        return self.head(self.odd(self.down(self.up(x).relu()).relu()))


def made(**settings) -> Model:
    return Model(**settings).to("cpu")


def inputs(rows: int = ROWS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, 128, generator=torch.Generator().manual_seed(rows)).to(dtype)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_forward_is_in_8_bits_and_gradients_are_not(quant_type):
    model, x = made(quant_type=quant_type), inputs().requires_grad_()
    before = model.up(x)
    (usual,) = torch.autograd.grad(before.sum(), x)
    found = arithmetic.enable(model)
    assert list(found.layers) == ["up", "down"] and found.layers["up"] is None
    assert found.left == {"odd": "columns or blocks that are no multiples of 64", "head": "the head"}
    assert str(found) == (
        "4 quantized layers: 2 in 8-bit arithmetic, 2 not (1: columns or blocks that are no multiples of 64; "
        "1: the head)"
    )
    y = model.up(x)
    assert_equal(y, functional.linear_4bit_int8(x, model.up.weight.data, model.up.weight.quant_state, model.up.bias))
    error = (y - before).norm() / before.norm()
    assert 0 < error < 0.02 and arithmetic.report(model).layers["up"] == pytest.approx(error.item(), rel=1e-4)
    assert_equal(torch.autograd.grad(y.sum(), x)[0], usual)
    arithmetic.disable(model)
    assert_equal(model.up(x), before)
    assert set(arithmetic.report(model).left.values()) >= {"not asked for"}


def test_products_are_counted():
    model = made()
    arithmetic.enable(model)
    for x in (inputs(), inputs(ROWS - 1), inputs().view(2, ROWS // 2, 128)):
        model(x)
    found = arithmetic.report(model)
    assert (found.in_8_bits, found.others) == (4, 2)
    assert str(found).endswith("; 4 of their 6 forward products (67%)")
    model.up.compute_dtype = torch.bfloat16
    model.up(inputs())
    assert arithmetic.report(model).others == 3


def test_layers_by_name():
    model = made()
    found = arithmetic.enable(model, layers="^down$")
    assert list(found.layers) == ["down"] and found.left["up"] == "not asked for"
    before = model.up(inputs())
    arithmetic.disable(model)
    assert_equal(model.up(inputs()), before)
    with pytest.raises(ValueError, match="'elsewhere' names none of 4 layers, the first is 'up'"):
        arithmetic.enable(model, layers="elsewhere")
    with pytest.raises(ValueError, match="no quantized weight"):
        arithmetic.enable(nn.Linear(4, 4))


def test_a_layer_that_is_too_far_off_stays(caplog):
    """x whose group holds one element that rounds all others away."""
    model, x = made(), inputs()
    before = model.up(x)
    x_far = x.clone()
    x_far[:, 5] = 3e3
    with torch.no_grad():
        model.up.weight.data.view(-1)[2::64] = 0x77  # codes of zero, so that only what is rounded away counts
    usual = model.up(x_far)
    arithmetic.enable(model)
    model.up(torch.full_like(x, torch.nan))  # decides nothing
    assert arithmetic.report(model).layers["up"] is None
    with caplog.at_level(logging.WARNING, "bitshard"):
        assert_equal(model.up(x_far), usual)
        assert_equal(model.up(x_far), usual)
    why = arithmetic.report(model).left["up"]
    assert why.startswith("off by ") and why.endswith("in its first product, more than 0.05")
    assert [r.message for r in caplog.records] == [f"8-bit arithmetic: up stays in 16 bits, {why}"]
    assert before.shape == usual.shape
    found = arithmetic.enable(model, bound=10.0)
    assert "up" in found.layers and not torch.equal(model.up(x_far), usual)


def test_copies_and_files_know_nothing_of_it():
    model = made()
    files = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    arithmetic.enable(model)
    model(inputs())
    for name, tensor in model.state_dict().items():
        assert_equal(tensor, files[name])
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert not arithmetic.report(other).layers
        arithmetic.disable(model)
        assert_equal(other(inputs()), model(inputs()))
        arithmetic.enable(model)


def test_a_fused_lora_layer():
    model = made_lora(shapes=((192, 128),))
    before = model(inputs())
    for twin in (fused_copy(model), model):
        arithmetic.enable(twin)
        x = inputs().requires_grad_()
        y = twin(x)
        y.sum().backward()
        found = arithmetic.report(twin)
        assert (found.in_8_bits, found.others) == (1, 0), found
        assert 0 < (y - before).norm() / before.norm() < 0.02 and x.grad is not None


def test_the_switch(caplog):
    with caplog.at_level(logging.INFO, "bitshard"), switches.set_to(ARITHMETIC="int8"):
        model = made()
        model.train()
        assert list(arithmetic.report(model).layers) == ["up", "down"]
    assert [r.message for r in caplog.records if "ARITHMETIC" in r.message] == [
        f"BITSHARD_ARITHMETIC=int8: {arithmetic.report(model)} (bitshard.arithmetic.enable)"
    ]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "bitshard"), switches.set_to(ARITHMETIC="int4"):
        made().train()
    assert [r.message for r in caplog.records] == ["BITSHARD_ARITHMETIC=int4 is ignored: expected int8 or nothing"]


def test_the_switch_without_train(caplog):
    with caplog.at_level(logging.WARNING, "bitshard"), switches.set_to(ARITHMETIC="int8"):
        made()(inputs().requires_grad_())
    assert any("BITSHARD_ARITHMETIC=int8: no effect on this Model" in r.message for r in caplog.records)
