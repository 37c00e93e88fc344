"""The line that says what of a model is 4-bit."""

import gc
import logging
import weakref

import pytest
import torch
from bitshard.nn.linear import Linear4bit
from bitshard.nn.linear8bit import Linear8bitLt
from bitshard.nn.parametrize import replace_parameter_4bit
from bitshard.sharding.report import describe
from bitshard.weights import inventory
from torch import nn


def quantized(k, n):
    return Linear4bit(k, n, bias=False, quant_type="nf4").to("cpu")


class Model(nn.Module):
    """A 4-bit layer, an embedding tied to nothing, 16-bit experts and a head."""

    def __init__(self, experts=0, layers=1):
        super().__init__()
        self.embed = nn.Embedding(10, 64)
        self.layers = nn.ModuleList(quantized(64, 64) for _ in range(layers))
        self.experts = nn.Module()
        self.experts.up = nn.Parameter(torch.randn(experts, 8, 16))
        self.lm_head = nn.Linear(64, 10, bias=False)

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.INFO, logger="bitshard")
    return lambda: [(record.levelno, record.getMessage()) for record in caplog.records if record.name == "bitshard"]


def test_line_at_the_first_forward_only(told):
    model = Model(layers=3)
    for layer in model.layers:
        assert not layer.packed_weight.reported
    for _ in range(2):
        model(torch.arange(4))
    (level, text), *more = told()
    assert level == logging.INFO and not more
    assert text == "4-bit: 3 weights, 12,288 of 13,568 elements (90.6%); not 4-bit: embeddings 4.7%, head 4.7%."


def test_a_warning_where_less_than_half_is_4_bit(told):
    model = nn.Sequential(Model(experts=64))  # in a wrapper, as DDP is one
    model(torch.arange(4))
    ((level, text),) = told()
    assert level == logging.WARNING and "(30.2%)" in text and "experts 60.4%" in text
    assert "bitshard.experts.enable()" in text


@pytest.mark.parametrize("as_columns", [False, True])
def test_the_line_of_int8_layers(told, monkeypatch, as_columns):
    """Whole ones, and as FSDP shards them; of a mixture; not of layers that are trained as floats."""
    model = Model(layers=2)
    for _ in range(2):
        layer = Linear8bitLt(64, 64, bias=False, has_fp16_weights=False).to("cpu")
        if as_columns:
            layer.packed_weight.enter()
        model.layers.append(layer)
    trained = nn.Sequential(Linear8bitLt(64, 64, bias=False))
    trained(torch.ones(2, 64))
    assert not told()
    for _ in range(2):
        model(torch.arange(4))
    (level, text), *more = told()
    start = "4-bit and int8: 4 weights, 16,384 of 17,664 elements (92.8%); not 4-bit or int8: embeddings 3.6%"
    assert level == logging.INFO and not more and text == f"{start}, head 3.6%."
    model.layers = model.layers[2:]
    assert inventory.line(model)[0].startswith("int8: 2 weights, 8,192 of 9,472 elements (86.5%); not int8: embeddings")
    assert (
        describe(model) == "int8 base not sharded: 2 weights, all 8,192 bytes and 512 bytes of scales in this process"
    )
    fresh = nn.Sequential(Model(layers=0, experts=64), nn.Embedding(4, 64), model.layers[0])
    fresh[2].packed_weight.reported = False
    fresh[2](torch.ones(2, 64))
    assert told()[-1][0] == logging.INFO  # the layer alone
    assert "of this model is int8: load" in inventory._ADVICE.format(inventory.line(fresh)[2])


def test_a_float_layer_of_int8_reports_when_it_is_quantized(told):
    """By its first forward."""
    layer = Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)
    layer(torch.ones(2, 64))
    assert told() == [(logging.INFO, "int8: 1 weight, 4,096 of 4,096 elements (100.0%).")]


@pytest.mark.parametrize("of", [Linear4bit, Linear8bitLt])
def test_a_caller_may_drop_its_model(told, of):
    """The look for the model on the call stack keeps no variable of a function that goes on without it."""
    options = {"has_fp16_weights": False} if of is Linear8bitLt else {}
    model = nn.Sequential(of(64, 64, bias=False, **options).to("cpu"), nn.ReLU())
    model(torch.ones(2, 64))
    assert len(told()) == 1
    gone = weakref.ref(model), weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_the_outermost_module_is_found(told):
    """Through methods that others than nn.Module call: generate, and the steps of Lightning."""

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = quantized(64, 64), nn.Linear(64, 64, bias=False)

        def generate(self, x):
            return self.encoder(x)

        def training_step(self, x):
            return self.encoder(x)

        def predict_step(self, x):
            return self.encoder(x)

    for method in ("generate", "training_step", "predict_step"):
        getattr(Whole(), method)(torch.ones(2, 64))
    assert [text.partition(" (")[0] for _, text in told()] == ["4-bit: 1 weight, 4,096 of 8,192 elements"] * 3


def test_experts_count_where_they_are_4_bit():
    model = Model(experts=64)
    replace_parameter_4bit(model.experts, "up")
    held, elements, others = inventory.take(model)
    assert (len(held), elements) == (2, 64 * 64 + 64 * 8 * 16) and "experts" not in others


def test_tied_weights_count_once():
    model = Model()
    model.lm_head.weight = model.embed.weight
    assert sum(inventory.take(model)[2].values()) == 640


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.parametrize("orig", [False, True])
def test_the_same_under_fsdp1(told, monkeypatch, orig):
    """Whose flat parameters hold several weights in one."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = Model(layers=3).requires_grad_(False)
        FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=orig)(torch.arange(4))
    finally:
        torch.distributed.destroy_process_group()
    assert [text.partition(";")[0] for _, text in told()] == ["4-bit: 3 weights, 12,288 of 13,568 elements (90.6%)"]
