"""The ways by which other libraries know a thing of bitsandbytes, each as its library asks (docs/tools.md, a table).

None of those libraries is needed: every check is written out here, and names who asks so.
"""

import copy
import inspect
import os
import pickle
import sys
import typing
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
import upstream
from bitshard import experts, outliers
from bitshard.lora.layer import own_forward
from bitshard.nn import embedding, linear, linear8bit, parametrize, tied
from fsdp.launch import run
from helpers import moe
from helpers.bytes import same_bytes
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
QUANTIZED = (linear.Linear4bit, linear8bit.Linear8bitLt, embedding.Embedding4bit, embedding.Embedding8bit)
FORMATS = (linear.LinearNF4, linear.LinearFP4, embedding.EmbeddingNF4, embedding.EmbeddingFP4)
FLOATS = (embedding.Embedding, embedding.StableEmbedding, outliers.OutlierAwareLinear)
OTHERS = (parametrize.Bnb4bitParametrization, parametrize.PackedParametrizationList, tied.TiedHead)
MODULES = (*QUANTIZED, *FORMATS, *FLOATS, *OTHERS)


def quantized(cls: type) -> nn.Module:
    """A layer [64, 64] of `cls`, quantized."""
    torch.manual_seed(0)
    module = cls(64, 64, has_fp16_weights=False) if cls is linear8bit.Linear8bitLt else cls(64, 64)
    return module.to("cpu")


def parametrized() -> nn.Module:
    owner = nn.Module()
    owner.up = nn.Parameter(torch.randn(2, 64, 64))
    parametrize.replace_parameter_4bit(owner, "up")
    return owner


def stacks() -> nn.Module:
    """A model with 4-bit experts."""
    model = moe.model("mixtral")
    experts.quantize(model)
    return model


# ---- a class in `__mro__` with a `__module__` of bitsandbytes ----


def of_bitsandbytes(module: nn.Module) -> bool:
    """unsloth_zoo, `moe_utils_bnb4bit._is_bnb_module`: where it says no, 4-bit weights become 16-bit ones."""
    return any(getattr(base, "__module__", "").startswith("bitsandbytes") for base in type(module).__mro__)


def widen(model: nn.Module) -> int:
    """unsloth_zoo, `_dequantize_plain_param_slots`, called after each load of a quantized model."""
    count = 0
    for module in model.modules():
        for name, weight in [] if of_bitsandbytes(module) else list(module.named_parameters(recurse=False)):
            if isinstance(weight, bnb.nn.Params4bit) and getattr(weight, "quant_state", None) is not None:
                values = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
                setattr(module, name, nn.Parameter(values, requires_grad=False))
                count += 1
    return count


@pytest.mark.parametrize("cls", MODULES, ids=lambda cls: cls.__name__)
def test_every_class_of_module_is_known_by_its_bases(cls):
    assert any(base.__module__.startswith("bitsandbytes") for base in cls.__mro__)


@pytest.mark.parametrize("make", [*(lambda cls=cls: quantized(cls) for cls in QUANTIZED), parametrized, stacks])
def test_weights_stay_packed_where_others_widen_those_of_strangers(make):
    model = nn.Sequential(make())
    held = [weight for weight in model.parameters() if isinstance(weight, (bnb.nn.Params4bit, bnb.nn.Int8Params))]
    assert held and widen(model) == 0
    assert all(any(weight is other for other in model.parameters()) for weight in held)


def test_a_stranger_s_weight_would_be_widened():
    model = nn.Linear(64, 64)
    model.weight = bnb.nn.Params4bit(model.weight.data).to("cpu")
    assert widen(model) == 1 and model.weight.dtype is torch.float32


@pytest.mark.parametrize("cls", MODULES, ids=lambda cls: cls.__name__)
def test_a_class_stays_at_its_place(cls):
    """Where pickles, `inspect` and annotations look; `bitshard.lora` asks so whether a forward is of its class."""
    assert cls.__module__.startswith("bitshard.") and getattr(sys.modules[cls.__module__], cls.__name__) is cls
    assert inspect.getsource(cls).startswith(f"class {cls.__name__}(")
    forward = vars(cls).get("forward")
    assert forward is None or hasattr(forward, "__wrapped__") or own_forward(cls) is forward
    assert typing.get_type_hints(cls) is not None and pickle.loads(pickle.dumps(cls)) is cls


@pytest.mark.parametrize("make", [*(lambda cls=cls: quantized(cls) for cls in QUANTIZED), stacks])
def test_pickles_and_copies_name_no_bitsandbytes(make):
    """A pickle must load where bitsandbytes is not installed, or is another one: it names classes of bitshard only."""
    module = make()
    written = pickle.dumps(module)
    assert b"bitsandbytes" not in written and b"bitshard" in written
    for other in (pickle.loads(written), copy.deepcopy(module)):
        assert type(other) is type(module)
        assert all(same_bytes(a, b) for a, b in zip(other.parameters(), module.parameters(), strict=True))


@pytest.mark.parametrize("which", ["none", "upstream"])
def test_the_engine_beside_another_bitsandbytes_or_none(which):
    """A layer of the engine is pickled, copied and shown as ever; upstream's own classes are not found in it."""
    path = [str(ROOT / "python"), *([str(upstream.folder())] if which == "upstream" else [])]
    run([sys.executable, "-c", BESIDE, which], 120, bare=True, PYTHONPATH=os.pathsep.join(path))


BESIDE = """
import copy, inspect, pickle, sys, typing
if sys.argv[1] == "upstream":
    import bitsandbytes
    assert "+" not in bitsandbytes.__version__
else:
    sys.modules["bitsandbytes"] = None
from bitshard.nn.linear import Linear4bit
layer = Linear4bit(64, 64).to("cpu")
for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
    assert type(other) is Linear4bit and other.weight.equal(layer.weight)
assert inspect.getmodule(Linear4bit).__name__ == "bitshard.nn.linear" and typing.get_type_hints(Linear4bit) is not None
assert any(base.__module__.startswith("bitsandbytes") for base in Linear4bit.__mro__)
if sys.argv[1] == "upstream":
    assert not isinstance(layer, bitsandbytes.nn.Linear4bit)
"""
