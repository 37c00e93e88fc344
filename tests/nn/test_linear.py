"""Linear4bit: forward, dtypes, state dicts, and what forward does with weights that others put in its place."""

import contextlib
import logging
import warnings
from types import SimpleNamespace
from unittest import mock

import cases
import pytest
import torch
from bitshard import functional
from bitshard.nn.linear import Linear4bit, LinearFP4, LinearNF4, fix_4bit_weight_quant_state_from_module
from bitshard.nn.linear8bit import Linear8bitLt
from bitshard.tensor import Params4bit
from helpers import copies
from helpers.bytes import same_bytes
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


def layer(kind=LinearNF4, **settings) -> Linear4bit:
    torch.manual_seed(0)
    return kind(130, 96, **settings).to("cpu")


def dense(module: Linear4bit) -> torch.Tensor:
    return functional.dequantize_4bit(module.weight.data, module.quant_state)


# ---- forward ----


@pytest.mark.parametrize("kind", [LinearNF4, LinearFP4, Linear4bit])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
def test_forward(kind, bias, storage):
    module = layer(kind, bias=bias, quant_storage=storage)
    assert module.quant_state.quant_type == ("nf4" if kind is LinearNF4 else "fp4")
    x = torch.randn(2, 3, 130)
    expected = nn.functional.linear(x, dense(module), module.bias)
    assert torch.allclose(module(x), expected, atol=1e-5)


@pytest.mark.parametrize("compute", [None, *cases.DTYPES])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_dtypes(compute, dtype):
    """The result has the dtype of x; the product is computed in compute_dtype, or in that of a first bf16 or fp32 x."""
    module = layer(compute_dtype=compute)
    x = torch.randn(4, 130).to(dtype)
    y = module(x)
    used = compute or dtype
    expected = nn.functional.linear(x.to(used), dense(module).to(used), module.bias.to(used)).to(dtype)
    assert y.dtype is dtype and torch.allclose(y.float(), expected.float(), atol=0.1, rtol=0.02)
    assert module.compute_dtype is (compute or (None if dtype is torch.float16 else dtype))


# ---- the bias, which bitsandbytes' layers keep in the dtype of their products ----


def biased(kind: str, dtype: torch.dtype = torch.float16) -> tuple[nn.Module, torch.Tensor]:
    """A 4-bit or int8 layer [96, 130] with a float32 bias, and x [2, 130] of `dtype`."""
    made = layer() if kind == "4-bit" else Linear8bitLt(130, 96, has_fp16_weights=False).to("cpu")
    assert made.bias.dtype is torch.float32
    return made, torch.randn(2, 130).to(dtype)


BOTH_KINDS = pytest.mark.parametrize("kind", ["4-bit", "int8"])


@BOTH_KINDS
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_the_bias_stays_in_the_dtype_of_products(kind, dtype):
    module, x = biased(kind, dtype)
    bias, expected = module.bias, module.bias.detach().to(dtype)
    y = module(x)
    assert module.bias is bias and same_bytes(bias.detach(), expected) and same_bytes(module(x), y)
    assert module.state_dict()["bias"].dtype is dtype


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("autocast", [False, True])
def test_the_bias_has_the_dtype_to_which_x_is_cast(dtype, autocast):
    """compute_dtype, whatever x is; autocast casts no x here."""
    module = layer(compute_dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        y = module(torch.randn(2, 130).to(dtype))
    assert y.dtype is dtype and module.bias.dtype is torch.bfloat16


@BOTH_KINDS
def test_a_bias_converted_in_inference_mode_can_be_trained(kind):
    """bitsandbytes leaves a tensor of inference mode in the parameter, which no backward takes."""
    module, x = biased(kind)
    with torch.inference_mode():
        module(x)
    assert module.bias.dtype is torch.float16 and not module.bias.is_inference()
    module(x).sum().backward()
    assert torch.equal(module.bias.grad, torch.full((96,), 2.0, dtype=torch.float16))


def of_one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return contextlib.closing(SimpleNamespace(close=torch.distributed.destroy_process_group))


def capturing():
    """As if a CUDA graph were captured, for a bias that says that it is on a GPU."""
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True))
    stack.enter_context(mock.patch.object(nn.Parameter, "is_cuda", True))
    return stack


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def under(context):
    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with context():
            return module(x)

    return forward


def exported(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if isinstance(module, Linear8bitLt):
        module(x.float())  # torch.export is given the scales of the last forward
    return torch.export.export(module, (x,)).module()(x)


def stateless(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    bias = module.bias.detach().clone()
    y = torch.func.functional_call(module, {"bias": bias}, (x,))
    assert bias.dtype is torch.float32
    return y


OTHERS_KNOW_IT = {
    "a process group": under(of_one_rank),
    "a CUDA graph": under(capturing),
    "a dispatch mode": under(Watching),
    "torch.compile": lambda module, x: torch.compile(module, backend="eager")(x),
    "torch.export": exported,
    "torch.jit.trace": lambda module, x: torch.jit.trace(module, (x,), check_trace=False)(x),
    "a transform": lambda module, x: torch.func.jvp(module, (x,), (x,))[0],
    "a stateless call": stateless,
}


@BOTH_KINDS
@pytest.mark.parametrize("who", OTHERS_KNOW_IT)
@pytest.mark.filterwarnings("ignore")
def test_a_bias_that_others_know_stays_as_it_is(kind, who):
    """Then each forward converts it, and y is the same; the next plain forward keeps it converted."""
    module, x = biased(kind)
    with torch.no_grad():
        y = OTHERS_KNOW_IT[who](module, x)
    bias = module.bias.detach().clone()
    assert bias.dtype is torch.float32
    assert same_bytes(y, module(x)) and same_bytes(module.bias.detach(), bias.half())


@BOTH_KINDS
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.complex64])
def test_a_product_that_raises_leaves_the_bias(kind, dtype):
    module, x = biased(kind, dtype)
    with pytest.raises(TypeError):
        module(x)
    assert module.bias.dtype is torch.float32


def test_the_bias_of_trained_int8_weights_stays_as_it_is():
    module = Linear8bitLt(130, 96)
    module(torch.randn(2, 130).half())
    assert module.bias.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_an_x_of_no_floats_raises(dtype):
    with pytest.raises(TypeError, match=str(dtype).removeprefix("torch.")):
        layer(compute_dtype=torch.float32)(torch.ones(2, 130).to(dtype))


@pytest.mark.parametrize("shape", [(2, 129), (2, 96), (96,), (2, 0), ()])
@pytest.mark.parametrize("bias", [False, True])
def test_an_x_of_another_width_raises(shape, bias):
    """Also where it is N wide, which `matmul_4bit` still takes for bare weights quantized as [K, N]."""
    with pytest.raises(ValueError, match=r"does not fit .*\[96, 130\]"):
        layer(bias=bias)(torch.ones(shape))


@pytest.mark.parametrize("rows", [1, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_a_weight_on_the_meta_device_raises(rows, bias):
    """A result on the device of x would be uninitialized memory."""
    module = layer(bias=bias).to("meta")
    with pytest.raises(ValueError, match="x is on cpu, the weight on meta"):
        module(torch.randn(rows, 130))
    assert module(torch.empty(rows, 130, device="meta")).is_meta


def test_float16_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="bitshard.nn.linear"):
        layer()(torch.randn(4, 130).half())
    assert "slow" in caplog.text


def test_forward_changes_no_weight():
    module = layer(quant_storage=torch.bfloat16)
    weight, state, data = module.weight, module.quant_state, module.weight.data.clone()
    with torch.no_grad():
        module.eval()(torch.randn(1, 130))
    module.train()(torch.randn(5, 130).requires_grad_()).sum().backward()
    assert module.weight is weight and module.quant_state is state and weight.quant_state is state
    assert torch.equal(weight.data.view(torch.uint8), data.view(torch.uint8))


def test_no_buffers_and_frozen():
    module = layer()
    assert not list(module.buffers()) and not module.weight.requires_grad and module.bias.requires_grad


def test_not_quantized_yet():
    with pytest.raises(RuntimeError, match=r"\[96, 130\].*not quantized yet.*\.to\("):
        LinearNF4(130, 96)(torch.randn(1, 130))


@pytest.mark.parametrize("shape", [(0, 64), (8, 0), (0, 0)])
def test_layers_without_rows_or_columns(shape):
    """Forward, backward, a state dict and a compiled program, as nn.Linear; warnings of its initialization aside."""
    N, K = shape
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        module, other = LinearNF4(K, N).to("cpu"), LinearNF4(K, N)
    other.load_state_dict(module.state_dict())
    x, dy = torch.randn(3, K, requires_grad=True), torch.ones(3, N)
    expected = module.bias.expand(3, N)
    for forward in (module, other.to("cpu"), torch.compile(module, backend="aot_eager")):
        x.grad = None
        y = forward(x)
        y.backward(dy)
        assert torch.equal(y, expected) and torch.equal(x.grad, torch.zeros(3, K))


def test_settings():
    module = LinearNF4(130, 96, compress_statistics=False, quant_storage=torch.float16, device="meta")
    assert (module.quant_type, module.compress_statistics, module.quant_storage) == ("nf4", False, torch.float16)
    assert module.weight.is_meta and module.weight.module is module
    with pytest.raises(TypeError, match="int32"):
        LinearNF4(130, 96, quant_storage=torch.int32)
    with torch.device("meta"):
        assert Linear4bit(8, 8, False, torch.bfloat16).weight.is_meta


def test_reset_parameters_leaves_packed_bytes():
    module = layer(quant_storage=torch.bfloat16)
    before = module.weight.data.clone()
    module.reset_parameters()
    assert torch.equal(module.weight.data.view(torch.uint8), before.view(torch.uint8))


def test_from_a_dense_model():
    torch.manual_seed(1)
    source = nn.Sequential(nn.Linear(130, 96), nn.Linear(96, 8))
    model = nn.Sequential(LinearNF4(130, 96), LinearNF4(96, 8))
    assert not any(model.load_state_dict(source.state_dict()))
    model.to("cpu")
    x = torch.randn(16, 130)
    assert (model(x) - source(x)).abs().mean() < 0.1 * source(x).abs().mean() + 0.1


# ---- weights from others ----


def test_a_weight_put_here_brings_its_state():
    """peft's merge assigns a new Params4bit; accelerate may do so without `module`."""
    module = layer()
    other = Params4bit(torch.randn(96, 130), quant_type="fp4").to("cpu")
    module.weight = other
    x = torch.randn(2, 130)
    expected = nn.functional.linear(x, functional.dequantize_4bit(other.data, other.quant_state), module.bias)
    assert torch.allclose(module(x), expected, atol=1e-5) and module.quant_state is other.quant_state
    module.weight = Params4bit(torch.randn(96, 130))
    with pytest.raises(RuntimeError, match="not quantized yet"):
        module(x)


def test_a_weight_without_a_state_is_verified_with_the_layers():
    module = layer(quant_storage=torch.bfloat16)
    x = torch.randn(2, 130)
    y, data = module(x), module.weight.data
    module.weight = Params4bit(data, quant_storage=torch.bfloat16, bnb_quantized=True)
    assert torch.equal(module(x), y)
    fix_4bit_weight_quant_state_from_module(module)
    damaged = data.clone()
    damaged.view(torch.uint8)[3] ^= 1
    other = layer(quant_storage=torch.bfloat16)
    other.weight = Params4bit(damaged, quant_storage=torch.bfloat16, bnb_quantized=True)
    with pytest.raises(ValueError, match="other bytes"):
        other(x)


def test_merge_like_peft():
    module = layer()
    weight = module.weight
    kwargs = {**weight.__dict__, "bnb_quantized": False, "requires_grad": False}
    module.weight = Params4bit(dense(module).cpu(), **kwargs).to("cpu")
    assert module.quant_state is module.weight.quant_state
    x = torch.randn(2, 130)
    assert torch.allclose(module(x), nn.functional.linear(x, dense(module), module.bias), atol=1e-5)


def as_fsdp1_view(module: Linear4bit, data: torch.Tensor) -> None:
    """What FSDP1 leaves in the module: a plain tensor attribute instead of the parameter."""
    module._parameters.pop("weight", None)
    module.__dict__["weight"] = data


def test_plain_views_are_verified_once(monkeypatch):
    import bitshard.nn.holder

    module = layer(quant_storage=torch.bfloat16)
    x = torch.randn(2, 130)
    y = module(x)
    data = module.weight.data.clone()
    calls = []
    monkeypatch.setattr(bitshard.nn.holder, "verify", lambda *args: calls.append(args))
    for _ in range(3):
        as_fsdp1_view(module, data.clone())
        assert torch.equal(module(x), y)
    assert len(calls) == 1


@pytest.mark.parametrize("bad", ["one bit", "another dtype", "fp32", "half of it", "rounded NaNs"])
def test_damaged_views_raise(bad):
    module = layer(quant_storage=torch.bfloat16)
    data = module.weight.data.clone()
    if bad == "one bit":
        data.view(torch.uint8)[77, 0] ^= 16
    elif bad == "another dtype":
        data = data.to(torch.float16)
    elif bad == "fp32":
        data = data.float()
    elif bad == "half of it":
        data = data[: len(data) // 2]
    else:
        data.view(torch.int16)[5] = 0x7F81  # a signalling NaN, which a cast would rewrite
    as_fsdp1_view(module, data)
    with pytest.raises(ValueError, match="use_orig_params|param_dtype"):
        module(torch.randn(2, 130))


def test_flat_shard_raises():
    module = layer(quant_storage=torch.bfloat16)
    as_fsdp1_view(module, module.weight.data.flatten())
    with pytest.raises(ValueError, match="FSDP"):
        module(torch.randn(2, 130))


def test_foreign_data_is_verified():
    """FSDP1 with use_orig_params assigns `.data` of the parameter itself."""
    module = layer(quant_storage=torch.bfloat16)
    x = torch.randn(2, 130)
    y, data = module(x), module.weight.data.clone()
    module.weight.data = data.clone()
    held = module.packed_weight
    assert held.foreign and torch.equal(module(x), y) and held.checked is module.quant_state
    other = layer(quant_storage=torch.bfloat16)
    damaged = data.clone()
    damaged.view(torch.uint8)[0] ^= 1
    other.weight.data = damaged
    with pytest.raises(ValueError, match="other bytes"):
        other(x)


def test_a_new_state_is_verified_again():
    module = layer(quant_storage=torch.bfloat16)
    x = torch.randn(2, 130)
    as_fsdp1_view(module, module.weight.data.clone())
    module(x)
    module.quant_state = layer(quant_storage=torch.bfloat16, compress_statistics=False).quant_state
    module.quant_state.checksum += 1
    with pytest.raises(ValueError, match="other bytes"):
        module(x)


# ---- state dicts ----

KEYS = {"weight", "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4"}
NESTED_KEYS = {"weight.nested_absmax", "weight.nested_quant_map"}


@pytest.mark.parametrize("storage", cases.STORAGES)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict(storage, nested, assign):
    module = layer(quant_storage=storage, compress_statistics=nested)
    entries = module.state_dict()
    assert set(entries) == KEYS | {"bias"} | (NESTED_KEYS if nested else set())
    assert all(type(value) is torch.Tensor for key, value in entries.items()), "plain tensors only"
    assert entries["weight"].dtype is storage and entries["weight"].shape[1] == 1
    loaded = copies.saved(entries, weights_only=True)
    x = torch.randn(3, 130)
    for fresh in (
        LinearNF4(130, 96),
        LinearFP4(130, 96).to("cpu"),
        LinearNF4(130, 96, quant_storage=torch.float16).to("cpu"),
    ):
        result = fresh.load_state_dict(loaded, assign=assign)
        assert not result.missing_keys and not result.unexpected_keys
        assert fresh.quant_state == module.quant_state and fresh.quant_state is fresh.weight.quant_state
        assert fresh.weight.module is fresh and fresh.quant_storage is storage and fresh.quant_type == "nf4"
        assert torch.equal(fresh(x), module(x)) and not fresh.packed_weight.foreign
    meta = LinearNF4(130, 96, device="meta")
    meta.load_state_dict(loaded, assign=True)
    assert torch.equal(meta(x), module(x))


def test_load_keeps_the_parameter_object():
    module, source = layer(), layer(quant_storage=torch.uint8)
    weight = module.weight
    module.load_state_dict(source.state_dict())
    assert module.weight is weight


def test_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = nn.Sequential(layer(), layer(quant_storage=torch.bfloat16), layer(LinearFP4, compress_statistics=False))
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    fresh = nn.Sequential(LinearNF4(130, 96), LinearNF4(130, 96), LinearFP4(130, 96))
    fresh.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"))
    x = torch.randn(3, 130)
    for ours, theirs in zip(fresh, model, strict=True):
        assert torch.equal(ours(x), theirs(x))


def test_container_and_files(monkeypatch):
    """Under an FSDP launch the container is a float dtype; the state dict still says uint8, in both directions."""
    plain = layer()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    module = layer()
    assert module.weight.dtype is torch.float32
    saved = module.state_dict()
    for key, value in plain.state_dict().items():
        assert torch.equal(saved[key], value) and saved[key].dtype is value.dtype, key
    fresh = LinearNF4(130, 96)
    fresh.load_state_dict(plain.state_dict())
    assert fresh.weight.dtype is torch.float32 and fresh.weight.quant_storage is torch.uint8
    x = torch.randn(2, 130)
    assert torch.equal(fresh(x), plain(x))
    assert module.state_dict(keep_vars=True)["weight"] is module.weight


def bad_dicts():
    def without(*names):
        return lambda saved: [saved.pop(name) for name in names]

    def with_(name, value):
        return lambda saved: saved.update({name: value(saved)})

    return {
        "no statistics": (without(*(KEYS | NESTED_KEYS) - {"weight"}), "other bytes"),
        "no absmax": (without("weight.absmax"), "absmax is missing"),
        "no blob": (without("weight.quant_state.bitsandbytes__nf4"), "neither quant_type"),
        "no weight": (without("weight"), 'Missing key.*"weight"'),
        "short weight": (with_("weight", lambda saved: saved["weight"][:-1]), "needs 6240"),
        "no bytes": (with_("weight", lambda saved: saved["weight"].to("meta")), "weight is on the meta device"),
        "scales without values": (
            with_("weight.absmax", lambda saved: saved["weight.absmax"].to("meta")),
            "absmax is on the meta device",
        ),
        "cast weight": (with_("weight", lambda saved: saved["weight"].bfloat16()), "needs 3120"),
        "another shape": (
            lambda saved: saved.update(LinearNF4(64, 96).to("cpu").state_dict()),
            r"\[96, 64\].*\[96, 130\]",
        ),
        "surprise": (with_("weight.surprise", lambda saved: torch.zeros(1)), "surprise"),
    }


@pytest.mark.parametrize("name", bad_dicts())
def test_bad_state_dicts(name):
    change, words = bad_dicts()[name]
    torch.manual_seed(5)
    saved = LinearNF4(130, 96).to("cpu").state_dict()
    change(saved)
    module = layer()
    x = torch.randn(2, 130)
    y = module(x)
    with pytest.raises(RuntimeError, match=words):
        module.load_state_dict(saved)
    if name != "no weight":
        module.bias.data.copy_(layer().bias)
        assert torch.equal(module(x), y), "a refused dict must change nothing of the weight"


def test_dense_weights_for_a_quantized_layer():
    with pytest.raises(RuntimeError, match=r"dense weight \[96, 130\].*before that moves"):
        layer().load_state_dict(nn.Linear(130, 96).state_dict())


def test_bytes_without_statistics_must_be_the_same_bytes():
    module = layer()
    assert not any(module.load_state_dict({k: v for k, v in module.state_dict().items() if k in ("weight", "bias")}))
