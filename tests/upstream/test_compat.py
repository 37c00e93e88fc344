"""The façade against its contract: names, signatures, detection, and the calls that Hugging Face libraries make."""

import copy
import importlib
import importlib.metadata
import inspect

import bitsandbytes as bnb
import bitshard.functional
import bitshard.nn.linear
import bitshard.tensor
import pytest
import torch
from packaging import version
from torch import nn
from torch.nn.utils import parametrize

# Parameters and defaults as bitsandbytes 0.50.2 has them. "A.b" is a method of A.
SIGNATURES = {
    "bitsandbytes": {
        "matmul_4bit": "(A, B, quant_state, out=None, bias=None)",
    },
    "bitsandbytes.autograd._functions": {
        "matmul_4bit": "(A, B, quant_state, out=None, bias=None)",
    },
    "bitsandbytes.functional": {
        "QuantState": "(absmax, shape=None, code=None, blocksize=None, quant_type=None, dtype=None, offset=None, "
        "state2=None)",
        "QuantState.from_dict": "(qs_dict, device)",
        "QuantState.as_dict": "(self, packed=False)",
        "QuantState.to": "(self, device)",
        "create_dynamic_map": "(signed=True, max_exponent_bits=7, total_bits=8)",
        "create_fp8_map": "(signed=True, exponent_bits=5, precision_bits=2, total_bits=8)",
        "create_linear_map": "(signed=True, total_bits=8, add_zero=True)",
        "create_normal_map": "(offset=0.9677083, use_extra_value=True)",
        "dequantize_4bit": "(A, quant_state=None, absmax=None, out=None, blocksize=None, quant_type='fp4')",
        "dequantize_blockwise": "(A, quant_state=None, absmax=None, code=None, out=None, blocksize=4096, nested=False)",
        "dequantize_fp4": "(A, quant_state=None, absmax=None, out=None, blocksize=None)",
        "dequantize_nf4": "(A, quant_state=None, absmax=None, out=None, blocksize=None)",
        "gemv_4bit": "(A, B, out=None, transposed_A=False, transposed_B=False, state=None)",
        "get_4bit_type": "(typename, device=None, blocksize=64)",
        "get_ptr": "(A)",
        "quantize_4bit": "(A, absmax=None, out=None, blocksize=None, compress_statistics=False, quant_type='fp4', "
        "quant_storage=torch.uint8)",
        "quantize_blockwise": "(A, code=None, absmax=None, out=None, blocksize=4096, nested=False)",
        "quantize_fp4": "(A, absmax=None, out=None, blocksize=None, compress_statistics=False, "
        "quant_storage=torch.uint8)",
        "quantize_nf4": "(A, absmax=None, out=None, blocksize=None, compress_statistics=False, "
        "quant_storage=torch.uint8)",
    },
    "bitsandbytes.nn": {
        "Linear4bit": "(input_features, output_features, bias=True, compute_dtype=None, compress_statistics=True, "
        "quant_type='fp4', quant_storage=torch.uint8, device=None)",
        "LinearFP4": "(input_features, output_features, bias=True, compute_dtype=None, compress_statistics=True, "
        "quant_storage=torch.uint8, device=None)",
        "LinearNF4": "(input_features, output_features, bias=True, compute_dtype=None, compress_statistics=True, "
        "quant_storage=torch.uint8, device=None)",
        "Params4bit": "(data=None, requires_grad=False, quant_state=None, blocksize=None, compress_statistics=True, "
        "quant_type='fp4', quant_storage=torch.uint8, module=None, bnb_quantized=False, **kwargs)",
    },
    "bitsandbytes.nn.modules": {
        "Linear4bit.forward": "(self, x)",
        "Linear4bit.set_compute_type": "(self, x)",
        "Params4bit.cpu": "(self)",
        "Params4bit.cuda": "(self, device=None, non_blocking=False)",
        "Params4bit.from_prequantized": "(data, quantized_stats, requires_grad=False, device='cuda', module=None, "
        "**kwargs)",
        "Params4bit.to": "(self, *args, **kwargs)",
        "fix_4bit_weight_quant_state_from_module": "(module)",
    },
    "bitsandbytes.nn.parametrize": {
        "Bnb4bitParametrization": "(quant_state)",
        "Bnb4bitParametrization.forward": "(self, quantized_param)",
        "replace_parameter_4bit": "(module, param_name, compress_statistics=False, quant_type='nf4', blocksize=None)",
        "replace_parameter_4bit_prequantized": "(module, param_name, qs_dict, device)",
    },
    "bitsandbytes.utils": {
        "pack_dict_to_tensor": "(source_dict)",
        "replace_linear": "(model, linear_replacement, skip_modules=('lm_head',), copy_weights=False, "
        "post_processing_function=None)",
        "sync_gpu": "(t)",
        "unpack_tensor_to_dict": "(tensor_data)",
    },
}

OPTIMIZERS = {
    "Adagrad": "adagrad",
    "Adam": "adam",
    "AdamW": "adamw",
    "AdEMAMix": "ademamix",
    "LAMB": "lamb",
    "LARS": "lars",
    "Lion": "lion",
    "RMSprop": "rmsprop",
    "SGD": "sgd",
}
PAGED = ("Adam", "AdamW", "AdEMAMix", "Lion")
EMBEDDINGS = ("Embedding", "Embedding4bit", "Embedding8bit", "EmbeddingFP4", "EmbeddingNF4", "StableEmbedding")

SCHEMAS = [
    "quantize_4bit(Tensor A, int blocksize, str quant_type, ScalarType quant_storage) -> (Tensor, Tensor)",
    "dequantize_4bit(Tensor A, Tensor absmax, int blocksize, str quant_type, int[] shape, ScalarType dtype) -> Tensor",
    "gemm_4bit(Tensor A, Tensor B, int[] shapeB, Tensor absmax, int blocksize, str quant_type, Tensor? bias=None, "
    "Tensor? absmax_8bit=None, Tensor? absmax_code=None, Tensor? absmax_offset=None) -> Tensor",
    "gemv_4bit(Tensor A, Tensor B, int[] shapeB, Tensor absmax, Tensor code, int blocksize) -> Tensor",
    "quantize_blockwise(Tensor A, Tensor code, int blocksize) -> (Tensor, Tensor)",
    "dequantize_blockwise(Tensor A, Tensor absmax, Tensor code, int blocksize, ScalarType dtype) -> Tensor",
]
OUT_VARIANTS = ["dequantize_4bit", "gemv_4bit", "dequantize_blockwise"]

STORAGES = [torch.uint8, torch.bfloat16, torch.float16, torch.float32]


def optimizer_names():
    for name, module in OPTIMIZERS.items():
        for bits in ("", "8bit", "32bit"):
            yield module, name + bits
            if name in PAGED:
                yield module, "Paged" + name + bits
    yield "lars", "PytorchLARS"


def plain_signature(function) -> str:
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def quantized(shape=(48, 64), **options) -> bnb.nn.Params4bit:
    torch.manual_seed(0)
    return bnb.nn.Params4bit(torch.randn(shape), requires_grad=False, **options).to("cpu")


# ---- names, signatures, identity ----


@pytest.mark.parametrize("module", SIGNATURES)
def test_signatures(module):
    owner = importlib.import_module(module)
    for name, expected in SIGNATURES[module].items():
        item = owner
        for part in name.split("."):
            item = getattr(item, part)
        assert plain_signature(item) == expected, f"{module}.{name}"


def test_facade_is_bitshard():
    assert bnb.__version__.endswith("+bitshard." + importlib.metadata.version("bitshard"))
    assert bnb.__version__ == importlib.metadata.version("bitsandbytes")
    assert bnb.nn.Params4bit is bnb.nn.modules.Params4bit is bitshard.tensor.Params4bit
    assert bnb.nn.Linear4bit is bnb.nn.modules.Linear4bit is bitshard.nn.linear.Linear4bit
    assert bnb.functional.QuantState is bitshard.functional.QuantState
    assert bnb.matmul_4bit is bnb.autograd._functions.matmul_4bit


def test_class_names_and_bases():
    """Hugging Face compares these names as strings, and some by isinstance."""
    for name in ("Params4bit", "Int8Params"):
        assert getattr(bnb.nn, name).__name__ == name and issubclass(getattr(bnb.nn, name), nn.Parameter)
    for name in ("Linear4bit", "Linear8bitLt", "OutlierAwareLinear"):
        assert getattr(bnb.nn, name).__name__ == name and issubclass(getattr(bnb.nn, name), nn.Linear)
    for name in EMBEDDINGS:
        assert getattr(bnb.nn, name).__name__ == name and issubclass(getattr(bnb.nn, name), nn.Embedding)
    assert issubclass(bnb.nn.LinearNF4, bnb.nn.Linear4bit) and issubclass(bnb.nn.LinearFP4, bnb.nn.Linear4bit)
    assert "torchao" not in bnb.nn.Params4bit.__module__
    layer = bnb.nn.LinearNF4(8, 8)
    assert isinstance(layer.weight, bnb.nn.Params4bit) and type(layer.weight).__name__ == "Params4bit"


def test_features_and_devices():
    assert "multi_backend" in bnb.features
    assert bnb.supported_torch_devices == {"cpu", "cuda"}
    assert bnb.cextension.HIP_ENVIRONMENT is False
    assert bnb.functional.get_ptr(None) is None
    tensor = torch.zeros(1)
    assert bnb.functional.get_ptr(tensor).value == tensor.data_ptr()


@pytest.mark.parametrize(("module", "name"), list(optimizer_names()))
def test_optimizers_are_classes(module, name):
    cls = getattr(bnb.optim, name)
    assert cls is getattr(importlib.import_module(f"bitsandbytes.optim.{module}"), name)
    assert issubclass(cls, torch.optim.Optimizer)
    assert cls.__name__ == name and "bitsandbytes" in str(cls)
    assert not isinstance(torch.optim.SGD([torch.zeros(1)], lr=0.1), cls)
    momentum = {"momentum": 0.9} if name.startswith(("SGD", "LARS")) else {}
    assert isinstance(cls([torch.zeros(1, requires_grad=True)], lr=1e-3, **momentum), torch.optim.Optimizer)


def test_absent_names_raise_their_own_name():
    with pytest.raises(NotImplementedError, match=r"\.cadam32bit_grad_fp32 is not in bitshard yet"):
        bnb.functional.lib.cadam32bit_grad_fp32()


def test_module_diagnostics(capsys):
    from bitsandbytes.diagnostics.main import main

    main()
    assert "bitsandbytes" in capsys.readouterr().out


# ---- bitsandbytes:: operators ----


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.split("(")[0])
def test_op_schemas(schema):
    name = schema.split("(")[0]
    assert str(getattr(torch.ops.bitsandbytes, name).default._schema) == "bitsandbytes::" + schema


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ops_equal_functional(quant_type, storage, dtype):
    torch.manual_seed(0)
    w, x = torch.randn(24, 40, dtype=dtype), torch.randn(2, 3, 40, dtype=dtype)
    bias = torch.randn(24, dtype=dtype)
    ops = torch.ops.bitsandbytes
    packed, state = bnb.functional.quantize_4bit(w, blocksize=32, quant_type=quant_type, quant_storage=storage)
    op_packed, op_absmax = ops.quantize_4bit(w, 32, quant_type, storage)
    assert torch.equal(op_packed.view(torch.uint8), packed.view(torch.uint8)) and torch.equal(op_absmax, state.absmax)

    dense = bnb.functional.dequantize_4bit(packed, state)
    assert torch.equal(ops.dequantize_4bit(packed, op_absmax, 32, quant_type, w.shape, dtype), dense)
    out = torch.empty_like(w)
    ops.dequantize_4bit.out(packed, op_absmax, 32, quant_type, w.shape, dtype, out=out)
    assert torch.equal(out, dense)

    y = bnb.matmul_4bit(x, packed, state, bias=bias)
    assert torch.equal(ops.gemm_4bit(x, packed, w.shape, op_absmax, 32, quant_type, bias=bias), y)
    row = x[:1, :1]
    code = bnb.functional.get_4bit_type(quant_type, device="cpu")
    assert torch.equal(
        ops.gemv_4bit(row, packed, w.shape, op_absmax, code, 32), bnb.functional.gemv_4bit(row, packed, state=state)
    )


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_gemm_op_with_nested_scales(quant_type):
    torch.manual_seed(0)
    w, x = torch.randn(24, 64), torch.randn(3, 64)
    packed, state = bnb.functional.quantize_4bit(w, quant_type=quant_type, compress_statistics=True)
    nested = {"absmax_8bit": state.absmax, "absmax_code": state.state2.code, "absmax_offset": state.offset}
    y = torch.ops.bitsandbytes.gemm_4bit(x, packed, w.shape, state.state2.absmax, 64, quant_type, **nested)
    assert torch.equal(y, bnb.matmul_4bit(x, packed, state))
    with pytest.raises(ValueError, match="absmax_code"):
        torch.ops.bitsandbytes.gemm_4bit(
            x, packed, w.shape, state.state2.absmax, 64, quant_type, absmax_8bit=state.absmax
        )


def test_blockwise_ops_equal_functional():
    torch.manual_seed(0)
    x, code = torch.randn(7, 50), bnb.functional.create_dynamic_map()
    packed, state = bnb.functional.quantize_blockwise(x, code=code, blocksize=64)
    op_packed, op_absmax = torch.ops.bitsandbytes.quantize_blockwise(x, code, 64)
    assert torch.equal(op_packed, packed) and torch.equal(op_absmax, state.absmax)
    dense = bnb.functional.dequantize_blockwise(packed, state)
    assert torch.equal(torch.ops.bitsandbytes.dequantize_blockwise(packed, op_absmax, code, 64, torch.float32), dense)
    out = torch.empty_like(x)
    torch.ops.bitsandbytes.dequantize_blockwise.out(packed, op_absmax, code, 64, torch.float32, out=out)
    assert torch.equal(out, dense)


@pytest.mark.parametrize("storage", STORAGES)
def test_opcheck(storage):
    """Odd sizes included: the fakes must give the padded shapes of the kernels."""
    torch.manual_seed(0)
    ops, check = torch.ops.bitsandbytes, torch.library.opcheck
    w, x = torch.randn(5, 33), torch.randn(2, 33)
    packed, absmax = ops.quantize_4bit(w, 32, "nf4", storage)
    check(ops.quantize_4bit.default, (w, 32, "nf4", storage))
    check(ops.dequantize_4bit.default, (packed, absmax, 32, "nf4", [5, 33], torch.bfloat16))
    check(ops.dequantize_4bit.out, (packed, absmax, 32, "nf4", [5, 33], torch.float32, torch.empty(5, 33)))
    check(ops.gemm_4bit.default, (x, packed, [5, 33], absmax, 32, "nf4", torch.randn(5)))
    if storage is torch.uint8:
        code = bnb.functional.create_dynamic_map()
        codes, scales = ops.quantize_blockwise(w, code, 64)
        check(ops.quantize_blockwise.default, (w, code, 64))
        check(ops.dequantize_blockwise.default, (codes, scales, code, 64, torch.float16))
        check(ops.dequantize_blockwise.out, (codes, scales, code, 64, torch.float32, torch.empty(5, 33)))


def test_ops_refuse_bad_arguments():
    ops = torch.ops.bitsandbytes
    with pytest.raises(ValueError, match="blocksize must be one of .* got 48"):
        ops.quantize_4bit(torch.zeros(64), 48, "nf4", torch.uint8)
    with pytest.raises(ValueError, match="'int4'"):
        ops.quantize_4bit(torch.zeros(64), 64, "int4", torch.uint8)
    with pytest.raises(TypeError, match="float64"):
        ops.quantize_4bit(torch.zeros(64, dtype=torch.float64), 64, "nf4", torch.uint8)
    packed, absmax = ops.quantize_4bit(torch.zeros(2, 64), 64, "nf4", torch.uint8)
    with pytest.raises(ValueError, match=r"\[N, K\], got \[2, 1, 64\]"):
        ops.gemm_4bit(torch.zeros(1, 64), packed, [2, 1, 64], absmax, 64, "nf4")
    with pytest.raises(ValueError, match="16 values"):
        ops.gemv_4bit(torch.zeros(1, 64), packed, [2, 64], absmax, torch.zeros(16), 64)
    with pytest.raises(ValueError, match=r"\(2, 64\).*\(2, 63\)"):
        ops.dequantize_4bit.out(packed, absmax, 64, "nf4", [2, 64], torch.float32, out=torch.empty(2, 63))


# ---- detection ----


def test_transformers_detects():
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.integrations.bitsandbytes import validate_bnb_backend_availability
    from transformers.utils import is_bitsandbytes_available

    assert is_bitsandbytes_available()
    assert is_bitsandbytes_available("0.48")
    assert validate_bnb_backend_availability(raise_exception=True)


def test_accelerate_detects():
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate.utils import imports

    assert imports.is_4bit_bnb_available() and imports.is_8bit_bnb_available()
    assert imports.is_bnb_available(min_version="0.48.0")
    assert imports.is_bitsandbytes_multi_backend_available()


def test_peft_detects():
    pytest.importorskip("peft", reason="peft is not installed")
    from peft.import_utils import is_bnb_4bit_available, is_bnb_available

    assert is_bnb_available() and is_bnb_4bit_available()
    import peft.tuners.lora.bnb as lora

    assert lora.bnb is bnb


def test_version_gates():
    """vLLM and transformers want >= 0.46.1, unsloth > 0.43.3; a pinned requirement of the base version still holds."""
    from packaging.requirements import Requirement

    ours = version.parse(bnb.__version__)
    assert ours >= version.parse("0.46.1") and ours > version.parse("0.43.3")
    assert Requirement("bitsandbytes==0.50.2").specifier.contains(ours)
    assert set(importlib.metadata.packages_distributions()["bitsandbytes"]) == {"bitsandbytes"}


# ---- the __dict__ round trip and .to() ----


def test_dict_holds_constructor_keywords_only():
    keywords = set(inspect.signature(bnb.nn.Params4bit).parameters) - {"data", "requires_grad", "kwargs"}
    fresh = bnb.nn.Params4bit(torch.randn(8, 64), requires_grad=False)
    assert set(fresh.__dict__) == keywords
    assert set(fresh.to("cpu").__dict__) == keywords
    assert set(copy.deepcopy(fresh).__dict__) == keywords


@pytest.mark.parametrize("storage", STORAGES)
def test_transformers_quantize_call(storage):
    """transformers Bnb4bitQuantize: rebuild a meta parameter with real data from its attribute dict."""
    torch.manual_seed(0)
    with torch.device("meta"):
        module = bnb.nn.Linear4bit(
            64, 48, False, torch.bfloat16, compress_statistics=True, quant_type="nf4", quant_storage=storage
        )
    module.source_cls = nn.Linear
    module.requires_grad_(False)
    old, value = module.weight, torch.randn(48, 64, dtype=torch.bfloat16)
    old._is_hf_initialized = True
    new = bnb.nn.Params4bit(value, requires_grad=False, **old.__dict__).to(value.device)
    module.weight = new
    reference, state = bnb.functional.quantize_4bit(
        value, blocksize=64, compress_statistics=True, quant_type="nf4", quant_storage=storage
    )
    assert type(new).__name__ == "Params4bit" and new.bnb_quantized and new.dtype == storage
    assert torch.equal(new.data.view(torch.uint8), reference.view(torch.uint8))
    assert new.quant_state == state and module.quant_state is new.quant_state
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    assert torch.equal(module(x), bnb.matmul_4bit(x, reference, state))


def test_accelerate_rebuild_calls():
    """accelerate set_module_tensor_to_device and init_empty_weights: attribute dict of a quantized parameter."""
    old = quantized(quant_type="nf4")
    again = type(old)(old.data, requires_grad=old.requires_grad, **old.__dict__).to("cpu", non_blocking=True)
    assert again.bnb_quantized and torch.equal(again.data, old.data) and again.quant_state == old.quant_state
    module = bnb.nn.LinearNF4(64, 48, bias=False)
    module.weight = old
    kwargs = module._parameters["weight"].__dict__
    kwargs["requires_grad"] = old.requires_grad
    meta = type(old)(module._parameters["weight"].to(torch.device("meta")), **kwargs)
    del kwargs["requires_grad"]
    assert meta.device.type == "meta" and meta.shape == old.shape
    assert old.quant_state.absmax.device.type == "cpu", "moving to meta must leave the scales where they are"


@pytest.mark.parametrize("data_keyword", [False, True])
def test_peft_merge_calls(data_keyword):
    """peft lora, hira, oft, road: dequantize, add, quantize again with the old parameter's attributes."""
    old = quantized(quant_type="nf4", compress_statistics=True)
    merged = bnb.functional.dequantize_4bit(old.data, old.quant_state) + 0.125
    kwargs = old.__dict__
    kwargs["bnb_quantized"] = False
    kwargs["requires_grad"] = False
    kwargs.pop("data", None)
    kwargs = {key: value for key, value in kwargs.items() if not key.startswith("_")}
    data = merged.to("cpu")
    new = bnb.nn.Params4bit(data=data, **kwargs) if data_keyword else bnb.nn.Params4bit(data, **kwargs)
    new = new.to(old.device)
    reference, state = bnb.functional.quantize_4bit(merged, blocksize=64, compress_statistics=True, quant_type="nf4")
    assert torch.equal(new.data, reference) and new.quant_state == state


def test_peft_merge_call_that_keeps_the_quantized_flag():
    """peft randlora and pvera leave bnb_quantized=True beside dense data; the data decides."""
    old = quantized(quant_type="nf4")
    dense = bnb.functional.dequantize_4bit(old.data, old.quant_state) + 0.125
    assert old.bnb_quantized
    new = bnb.nn.Params4bit(dense, requires_grad=False, **old.__dict__).to("cpu")
    reference, state = bnb.functional.quantize_4bit(dense, blocksize=64, compress_statistics=True, quant_type="nf4")
    assert torch.equal(new.data, reference) and new.quant_state == state


def test_loftq_and_olora_calls():
    torch.manual_seed(0)
    data = torch.randn(48, 64)
    loftq = bnb.nn.Params4bit(data.to("cpu"), requires_grad=False, compress_statistics=False, quant_type="nf4").to(
        "cpu"
    )
    dense = bnb.functional.dequantize_4bit(loftq.data, loftq.quant_state)
    assert dense.shape == data.shape and (dense - data).abs().mean() < 0.1
    olora = loftq.__class__(
        data,
        quant_type=loftq.quant_type,
        quant_storage=loftq.quant_storage,
        compress_statistics=loftq.compress_statistics,
        module=loftq.module,
    ).to("cpu")
    assert torch.equal(olora.data, loftq.data)


def test_to_quantizes_in_place_and_once():
    param = bnb.nn.Params4bit(torch.randn(48, 64), requires_grad=False, quant_type="nf4")
    assert not param.bnb_quantized
    assert param.to("cpu") is param and param.bnb_quantized
    packed, state = param.data.clone(), param.quant_state
    param.to("cpu")
    assert torch.equal(param.data, packed) and param.quant_state is state


def test_to_meta_keeps_scales():
    param = quantized()
    state, absmax = param.quant_state, param.quant_state.absmax.clone()
    moved = param.to("meta")
    assert moved.device.type == "meta" and moved.shape == param.shape
    assert param.quant_state is state and torch.equal(state.absmax, absmax)
    unquantized = bnb.nn.Params4bit(torch.randn(8, 64), requires_grad=False)
    assert not unquantized.to("meta").bnb_quantized


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_prequantized_keys(nested, quant_type):
    """transformers Bnb4bitDeserialize passes 'weight.'-prefixed keys, diffusers full paths."""
    old = quantized(quant_type=quant_type, compress_statistics=nested)
    packed = old.quant_state.as_dict(packed=True)
    expected = {"absmax", "quant_map", f"quant_state.bitsandbytes__{quant_type}"}
    assert set(packed) == expected | ({"nested_absmax", "nested_quant_map"} if nested else set())
    for prefix in ("weight.", "model.layers.0.mlp.up_proj.weight."):
        module = bnb.nn.Linear4bit(64, 48, bias=False, quant_type=quant_type)
        stats = {prefix + key: value for key, value in packed.items()}
        new = bnb.nn.Params4bit.from_prequantized(
            data=old.data, quantized_stats=stats, requires_grad=False, device=old.device, module=module
        )
        assert new.bnb_quantized and new.quant_state == old.quant_state and module.quant_state is new.quant_state
        assert new.compress_statistics == nested and new.quant_type == quant_type and new.blocksize == 64
    assert new.quant_state.nested == nested


def test_state_dict_keys_resolve_as_attributes():
    """torch's get_model_state_dict walks every key by getattr."""
    module = bnb.nn.LinearNF4(64, 48, bias=False).to("cpu")
    for key in module.state_dict():
        item = module
        for part in key.split("."):
            item = getattr(item, part)
        assert isinstance(item, torch.Tensor), key
    with pytest.raises(AttributeError, match="nonsense"):
        _ = module.weight.nonsense


def test_no_buffers():
    """transformers overwrites non-persistent buffers after loading, FSDP copies all buffers to every rank."""
    module = bnb.nn.LinearNF4(64, 48).to("cpu")
    assert list(module.named_buffers()) == []


def test_parameter_count_formula():
    """transformers and peft count weights as numel * 2 * element_size of the packed storage."""
    for storage in STORAGES:
        param = quantized((48, 64), quant_storage=storage)
        assert param.numel() * 2 * param.element_size() == 48 * 64


def test_vllm_and_tgi_calls():
    """Weight handed over transposed, quant_state by position; state rebuilt from full keys."""
    old = quantized((48, 64), quant_type="nf4")
    x = torch.randn(3, 64)
    y = bnb.functional.dequantize_4bit(old.data, old.quant_state)
    torch.testing.assert_close(bnb.matmul_4bit(x, old.data.t(), old.quant_state), x @ y.t())
    torch.testing.assert_close(bnb.matmul_4bit(x, old.t(), bias=None, quant_state=old.quant_state), x @ y.t())
    stats = {f"model.layers.0.self_attn.q_proj.weight.{k}": v for k, v in old.quant_state.as_dict(packed=True).items()}
    state = bnb.functional.QuantState.from_dict(stats, device="cpu")
    assert state == old.quant_state


def test_replace_linear():
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleDict({"inner": nn.Linear(8, 4), "lm_head": nn.Linear(4, 2)}))
    weight = model[1]["inner"].weight
    bnb.utils.replace_linear(model, bnb.nn.LinearNF4, copy_weights=True)
    assert type(model[0]) is bnb.nn.LinearNF4 and type(model[1]["inner"]) is bnb.nn.LinearNF4
    assert type(model[1]["lm_head"]) is nn.Linear
    assert torch.equal(model[1]["inner"].weight, weight)


# ---- parametrize ----


class Experts(nn.Module):
    """Like the fused experts of an MoE layer: a 3-D parameter read twice per forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 16, 32))

    def forward(self, x):
        return x @ self.weight[0] + x @ self.weight[1]


@pytest.mark.parametrize("nested", [False, True])
def test_parametrize_round_trip(nested):
    module, dense = Experts(), Experts().weight.detach()
    bnb.nn.parametrize.replace_parameter_4bit(module, "weight", compress_statistics=nested, quant_type="nf4")
    packed, state = bnb.functional.quantize_4bit(dense, compress_statistics=nested, quant_type="nf4")
    expected = bnb.functional.dequantize_4bit(packed, state)
    assert torch.equal(module.weight, expected) and not module.weight.requires_grad
    saved = module.state_dict()
    assert set(saved) == {"weight"} | {"weight." + key for key in state.as_dict(packed=True)}

    other = Experts()
    other.weight = nn.Parameter(saved["weight"], requires_grad=False)
    stats = {key.removeprefix("weight."): value for key, value in saved.items() if key != "weight"}
    bnb.nn.parametrize.replace_parameter_4bit_prequantized(other, "weight", stats, torch.device("cpu"))
    assert torch.equal(other.weight, expected)
    x = torch.randn(2, 16)
    assert torch.equal(other(x), module(x))


def test_parametrize_dequantizes_once_per_forward(monkeypatch):
    module = Experts()
    bnb.nn.parametrize.replace_parameter_4bit(module, "weight")
    calls = []
    original = bitshard.functional.dequantize_4bit
    monkeypatch.setattr(bitshard.functional, "dequantize_4bit", lambda *a, **k: calls.append(1) or original(*a, **k))
    module(torch.randn(2, 16))
    assert len(calls) == 1
    assert parametrize._cache_enabled == 0 and parametrize._cache == {}


def test_parametrize_hooks_alone():
    """On a module that has no parametrization yet, as bitsandbytes' own tests register them."""
    module = nn.Linear(4, 4)
    bnb.nn.parametrize._register_parametrization_hooks(module, "weight")
    module(torch.ones(1, 4))
    module.load_state_dict(module.state_dict())
    assert parametrize._cache_enabled == 0


def test_parametrize_survives_dtype_moves():
    module = Experts()
    bnb.nn.parametrize.replace_parameter_4bit(module, "weight")
    before = module.weight.clone()
    module.to(torch.bfloat16)
    assert torch.equal(module.weight, before)


def test_parametrize_sees_damaged_bytes():
    module = Experts()
    bnb.nn.parametrize.replace_parameter_4bit(module, "weight")
    packed = module.parametrizations["weight"].original
    expected = module.weight.clone()
    copied = copy.deepcopy(module)
    packed.data = packed.data.clone()
    assert torch.equal(module.weight, expected)
    damaged = packed.data.clone()
    damaged[5] ^= 1
    other = copied.parametrizations["weight"].original
    copied.parametrizations["weight"].packed_weight.foreign = True
    other.data = damaged
    with pytest.raises(ValueError, match="checksum"):
        _ = copied.weight


def test_parametrize_in_an_fsdp_launch(monkeypatch):
    """The container is a float, so that accelerate and FSDP1 shard it; files say uint8."""
    plain, module = Experts(), Experts()
    bnb.nn.parametrize.replace_parameter_4bit(plain, "weight")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    bnb.nn.parametrize.replace_parameter_4bit(module, "weight")
    assert module.parametrizations["weight"].original.dtype == torch.float32
    saved = module.state_dict()
    assert saved["weight"].dtype == torch.uint8 and type(saved["weight"]) is torch.Tensor
    assert torch.equal(saved["weight"], plain.state_dict()["weight"]) and torch.equal(module.weight, plain.weight)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_parametrize_under_fsdp2(monkeypatch):
    """fully_shard shards the packed bytes; forward is exact, and every entry of the state dict is a DTensor."""
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # torch before 2.12 shards no uint8
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    module, x = Experts(), torch.randn(2, 16)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        bnb.nn.parametrize.replace_parameter_4bit(module, "weight", compress_statistics=True)
        expected, saved = module(x), module.state_dict()
        assert saved["weight"].dtype == torch.uint8
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        assert torch.equal(module(x), expected)
        sharded = module.state_dict()
        assert sharded.keys() == saved.keys() and all(isinstance(value, DTensor) for value in sharded.values())
        for key in ("weight", "weight.absmax", "weight.nested_absmax"):
            assert torch.equal(sharded[key].full_tensor(), saved[key])
    finally:
        torch.distributed.destroy_process_group()


def test_parametrize_errors():
    module = Experts()
    module.plain = torch.zeros(2)
    with pytest.raises(AttributeError, match="'nothing'"):
        bnb.nn.parametrize.replace_parameter_4bit(module, "nothing")
    with pytest.raises(TypeError, match="'plain'.*Tensor"):
        bnb.nn.parametrize.replace_parameter_4bit_prequantized(module, "plain", {}, torch.device("cpu"))
