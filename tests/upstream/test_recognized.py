"""The ways by which other libraries know a thing of bitsandbytes, each as its library asks (docs/tools.md, a table).

None of those libraries is needed: every check is written out here, and names who asks so.
"""

import copy
import importlib.metadata
import importlib.util
import inspect
import os
import pickle
import sys
import typing
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from bitshard import experts, outliers
from bitshard.lora.layer import own_forward
from bitshard.nn import embedding, linear, linear8bit, parametrize, tied
from fsdp.launch import run
from helpers import moe, upstream
from helpers.bytes import same_bytes
from helpers.copies import pickled
from packaging.version import Version
from torch import nn

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
    assert typing.get_type_hints(cls) is not None and pickled(cls) is cls


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
    path = [*([str(upstream.folder())] if which == "upstream" else []), str(Path(linear.__file__).parents[2])]
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


# ---- names of classes ----


@pytest.mark.parametrize(
    ("cls", "layer", "weight"),
    [
        (linear.Linear4bit, "Linear4bit", "Params4bit"),
        (linear.LinearNF4, "LinearNF4", "Params4bit"),
        (linear8bit.Linear8bitLt, "Linear8bitLt", "Int8Params"),
        (embedding.Embedding4bit, "Embedding4bit", "Params4bit"),
    ],
)
def test_names_of_layers_and_weights(cls, layer, weight):
    """`param.__class__.__name__ == "Params4bit"`: peft (`get_bnb_param_type`), accelerate
    (`set_module_tensor_to_device`, FSDP2), trl, axolotl, LLaMA-Factory (`count_parameters`), unsloth.
    `type(module).__name__`: accelerate's hooks, peft's DoRA, unsloth."""
    module = quantized(cls)
    assert type(module).__name__ == layer and type(module.weight).__name__ == weight
    assert module.weight.__class__.__name__ == weight  # of a weight that FSDP2 has gathered, too: tests/fsdp/checks


def test_names_in_the_mro():
    """unsloth, `kernels.utils._base_quant_state`, `fsdp2_qlora.is_params4bit`, `fsdp2_native`: subclasses count."""
    module = quantized(linear.LinearNF4)
    assert any(base.__name__ == "Linear4bit" for base in type(module).__mro__)
    assert any(base.__name__ == "Params4bit" for base in type(module.weight).__mro__)
    int8 = quantized(linear8bit.Linear8bitLt).weight
    assert any(base.__name__ in ("Params4bit", "Int8Params") for base in type(int8).__mro__)


def test_isinstance_of_what_the_facade_names():
    """transformers' quantizers, peft, accelerate (`bnb.py`), trl, axolotl, ms-swift, diffusers."""
    four, eight = quantized(linear.LinearFP4), quantized(linear8bit.Linear8bitLt)
    assert isinstance(four, bnb.nn.Linear4bit) and isinstance(four.weight, bnb.nn.modules.Params4bit)
    assert isinstance(eight, bnb.nn.Linear8bitLt) and isinstance(eight.weight, bnb.nn.Int8Params)
    assert not isinstance(eight, bnb.nn.Linear4bit) and not isinstance(four.weight, bnb.nn.Int8Params)
    assert issubclass(bnb.nn.LinearNF4, bnb.nn.Linear4bit) and isinstance(four.weight, nn.Parameter)


# ---- attributes ----


def test_attributes_of_weights():
    """`hasattr(weight, "quant_state")` and "SCB": peft (LoRA-GA), accelerate, transformers (RWKV), unsloth."""
    four, eight = quantized(linear.Linear4bit).weight, quantized(linear8bit.Linear8bitLt).weight
    assert four.quant_state is not None and four.bnb_quantized and not hasattr(four, "SCB")
    assert eight.SCB is not None and not hasattr(eight, "quant_state")
    assert linear.Linear4bit(64, 64).weight.quant_state is None
    assert {"blocksize", "compress_statistics", "quant_type", "quant_storage", "module"} <= vars(four).keys()
    assert four.dtype is torch.uint8 and tuple(four.shape) == (2048, 1)  # unsloth_zoo: `weight.shape[-1] == 1`


def test_attributes_of_layers():
    """`compute_dtype`: peft (`_move_adapter_to_device_of_base_layer`). `state`: peft's dequantization, accelerate."""
    four, eight = quantized(linear.Linear4bit), quantized(linear8bit.Linear8bitLt)
    assert hasattr(four, "compute_dtype") and hasattr(four, "compute_type_is_set") and four.quant_state is not None
    assert {"SCB", "CB", "threshold"} <= set(dir(eight.state)) and not hasattr(eight, "compute_dtype")


def test_a_layer_s_state_is_no_entry_of_its_dict():
    """unsloth asks `layer.__dict__` where a weight has lost its state: bitshard's keep it, gathered ones too."""
    four = quantized(linear.Linear4bit)
    assert vars(four).get("quant_state") is None and four.weight.quant_state is four.quant_state


def test_attributes_of_states():
    """`type(state) is list` was bitsandbytes before 0.39: unsloth and unsloth_zoo still ask, then read these."""
    for nested in (False, True):
        state = bnb.functional.quantize_4bit(torch.randn(64, 64), quant_type="nf4", compress_statistics=nested)[1]
        assert type(state) is not list and state.nested is nested and state.quant_type == "nf4"
        assert (state.state2 is not None) is nested and (state.offset is not None) is nested
        assert not getattr(state, "packing_format_for_cpu", False)  # unsloth, `bnb_override`
        state.dtype, state._unsloth_nf4_plan = torch.bfloat16, ()  # it writes both
        assert state.dtype is torch.bfloat16 and state.blocksize == 64 and state.code.numel() == 16


def test_a_try_of_the_layer():
    """unsloth_zoo, `cpu.runtime.cpu_bnb_4bit_supported`: a forward and a backward decide; else it loads 16 bits."""
    layer = bnb.nn.Linear4bit(128, 64, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
    assert not layer.weight.bnb_quantized
    layer.weight = layer.weight._quantize("cpu")
    x = torch.randn(4, 128, dtype=torch.bfloat16, requires_grad=True)
    layer(x).float().sum().backward()
    assert layer.weight.bnb_quantized and torch.isfinite(x.grad).all()


# ---- optimizers ----

ADAMS = [name for name in bnb.optim.__all__ if "Adam" in name and "AdEMAMix" not in name]


def unwrapped(function):
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


@pytest.mark.parametrize("name", ADAMS)
def test_classes_of_optimizers(name):
    """transformers' Trainer: `"bitsandbytes" in str(cls)`. unsloth, `fsdp2_bnb_optim._plain_bnb_class` (may it step
    shards) and `state_offload._grad_only_step` (may it step some parameters at a time): modules of the bases."""
    cls, base = getattr(bnb.optim, name), bnb.optim.optimizer.Optimizer2State
    made = cls([nn.Parameter(torch.ones(4))])
    assert "bitsandbytes" in str(cls) and issubclass(cls, base)
    above = cls.__mro__[: cls.__mro__.index(base)]
    assert all(one.__module__.startswith("bitsandbytes.") for one in above)
    for method in ("step", "init_state", "update_step"):
        whole = unwrapped(getattr(base, method))
        assert all(unwrapped(vars(one).get(method, whole)) is whole for one in above)
    owner = next(one for one in type(made).__mro__ if "step" in vars(one))  # torch puts it on the class that is made
    assert (owner is base or owner.__module__.startswith("bitsandbytes.")) and made.args.optim_bits in (8, 32)
    assert isinstance(made, (bnb.optim.AdamW, bnb.optim.AdamW32bit)) is (name in ("AdamW", "AdamW32bit"))  # accelerate


# ---- what is installed ----


def test_the_installed_distribution():
    """`find_spec` and the version in metadata: transformers, accelerate, peft, diffusers, LLaMA-Factory
    (`check_version("bitsandbytes>=0.43.0")`), axolotl's pin; `__version__`: unsloth."""
    assert importlib.util.find_spec("bitsandbytes") is not None and "bitsandbytes" in sys.modules  # trl asks the latter
    found, needed = Version(importlib.metadata.version("bitsandbytes")), Version("0.48.2.dev0")
    assert found > needed and Version(bnb.__version__) > needed and Version(bnb.__version__).release == (0, 50, 2)


def test_names_and_operators_that_are_asked_for():
    """peft: `hasattr(bnb.nn, "Linear4bit")`, `int8_vectorwise_dequant`; accelerate: `features`; transformers: devices;
    unsloth: operators. It also asks for pointers of the native library, which are there with a GPU only."""
    assert hasattr(bnb.nn, "Linear4bit") and hasattr(bnb.functional, "int8_vectorwise_dequant")
    assert "multi_backend" in bnb.features and {"cpu", "cuda"} <= bnb.supported_torch_devices
    assert hasattr(torch.ops.bitsandbytes, "dequantize_4bit") and hasattr(torch.ops.bitsandbytes, "gemm_4bit")


def test_what_is_not_answered():
    """`type(x).__module__` of one class: unsloth, `fp8_to_nf4._output_dtype` and `extract_quant_model_param_count`.
    bitshard's classes keep their places; docs/tools.md says what follows."""
    layer = quantized(linear.Linear4bit)
    assert type(layer).__module__ == "bitshard.nn.linear" and type(layer.quant_state).__module__ == "bitshard.state"
    assert type(layer.weight).__name__ == "Params4bit"  # which the two ask first
