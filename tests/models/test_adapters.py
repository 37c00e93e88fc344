"""Trainable parameters of two dtypes around 4-bit layers, as accelerate and FSDP1 find them before they shard."""

import pytest
import torch
from bitshard import tensor
from bitshard.nn.linear import Linear4bit
from torch import nn


class Adapted(nn.Module):
    """A 4-bit layer in an adapter with a matrix and magnitudes, as DoRA has."""

    def __init__(self, matrix, magnitude):
        super().__init__()
        layer = Linear4bit(32, 16, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
        self.base_layer = layer.to("cpu")
        self.lora_A = nn.Linear(32, 4, bias=False, dtype=matrix)
        self.magnitude = nn.Parameter(torch.rand(16, dtype=magnitude))


def model_of(matrix, magnitude):
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(matrix, magnitude), nn.Linear(4, 4, dtype=torch.bfloat16))
    model.append(nn.Linear(4, 4, dtype=torch.float16).requires_grad_(False))
    return model


def another_function(model):
    for param in model.parameters():
        assert param.requires_grad or param.is_floating_point() is not None


def fsdp2_prepare_model(model):
    """Asks what accelerate's function of this name asks."""
    for name, param in model.named_parameters():
        assert name and (param.requires_grad or param.is_floating_point() is not None)


def dtypes(model):
    return [parameter.dtype for name, parameter in model.named_parameters() if "base_layer" not in name]


def test_an_adapter_of_two_dtypes_gets_the_wider_one(caplog):
    model = model_of(torch.bfloat16, torch.float32)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    fsdp2_prepare_model(model)
    assert dtypes(model) == [torch.float32] * 4 + [torch.float16] * 2
    assert model[0].base_layer.weight.dtype is torch.uint8
    assert all(torch.equal(before[name].to(parameter.dtype), parameter) for name, parameter in model.named_parameters())
    assert caplog.text.count("bfloat16 and float32") == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_adapter_of_one_dtype_stays(dtype, caplog):
    model = model_of(dtype, dtype)
    before = dtypes(model)
    fsdp2_prepare_model(model)
    assert dtypes(model) == before and not caplog.text


def test_nobody_else_who_asks_changes_an_adapter(caplog):
    model = model_of(torch.bfloat16, torch.float32)
    before = dtypes(model)
    another_function(model)
    assert dtypes(model) == before and not caplog.text


def test_modules_around_several_layers_are_no_adapters(caplog):
    """Their units may be of one dtype each, so that FSDP2 takes them."""
    model = nn.Sequential(model_of(torch.bfloat16, torch.bfloat16)[0].base_layer, nn.Linear(4, 4, dtype=torch.bfloat16))
    model.append(Linear4bit(32, 16, bias=False, quant_type="nf4").to("cpu")).append(nn.Linear(4, 4))
    before = [parameter.dtype for parameter in model.parameters()]
    fsdp2_prepare_model(model)
    assert [parameter.dtype for parameter in model.parameters()] == before and not caplog.text


def _recursive_wrap(module):
    """Asks what FSDP1's function of this name asks, of a model and then of its parts."""
    assert sum(param.numel() for param in module.parameters()) > 0
    for child in module.children():
        if next(child.parameters(), None) is not None:
            _recursive_wrap(child)


@pytest.mark.parametrize("clips_one", [True, False])
def test_fsdp1_of_torch_2_10_finds_one_dtype(clips_one, monkeypatch, caplog):
    """Its clip_grad_norm_ wants one dtype among all gradients; that of later torch does not."""
    monkeypatch.setattr(tensor, "_FSDP1_CLIPS_ONE_DTYPE", clips_one)
    model = model_of(torch.bfloat16, torch.float32)
    before = dtypes(model)
    assert sum(parameter.numel() for parameter in model.parameters()) > 0 and dtypes(model) == before
    _recursive_wrap(model)
    assert dtypes(model) == ([torch.float32] * 4 + [torch.float16] * 2 if clips_one else before)
    assert caplog.text.count("clips gradients of one dtype") == clips_one


def test_fsdp1_of_torch_2_10_leaves_one_dtype(monkeypatch, caplog):
    monkeypatch.setattr(tensor, "_FSDP1_CLIPS_ONE_DTYPE", True)
    model = model_of(torch.bfloat16, torch.bfloat16)
    before = dtypes(model)
    _recursive_wrap(model)
    assert dtypes(model) == before and not caplog.text
