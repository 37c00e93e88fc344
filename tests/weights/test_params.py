"""Params4bit: moves, copies, guards, and the calls that transformers, accelerate, peft and FSDP make on it."""

import copy
import gc
import weakref

import bitshard.tensor
import cases
import pytest
import torch
from bitshard import _C, functional, ops
from bitshard.formats.container import container_dtype, repack
from bitshard.int8_params import Int8Params
from bitshard.nn.linear import Linear4bit, LinearNF4
from bitshard.process.launch import fsdp_launch
from bitshard.state import QuantState
from bitshard.tensor import Params4bit, verify
from bitshard.weights.guards import Packed
from helpers.copies import pickled, saved
from torch import nn

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
ATTRIBUTES = {
    "quant_state",
    "blocksize",
    "compress_statistics",
    "quant_type",
    "quant_storage",
    "module",
    "bnb_quantized",
}


def dense(N=96, K=130, dtype=torch.float32):
    return torch.randn(N, K, generator=torch.Generator().manual_seed(0)).to(dtype)


def quantized(storage=torch.bfloat16, **settings) -> Params4bit:
    return Params4bit(dense(), quant_type="nf4", quant_storage=storage, **settings).to("cpu")


def raw(weight) -> torch.Tensor:
    """The bytes of a weight, plain."""
    return weight.data.contiguous().flatten().view(torch.uint8).clone()


def values(weight: Params4bit) -> torch.Tensor:
    return functional.dequantize_4bit(weight.data, weight.quant_state)


# ---- quantizing ----


@pytest.mark.parametrize("storage", cases.STORAGES)
def test_to_quantizes_in_place(storage):
    weight = Params4bit(dense(), quant_type="nf4", quant_storage=storage)
    assert weight.shape == (96, 130) and not weight.bnb_quantized and set(weight.__dict__) == ATTRIBUTES
    assert weight.to("cpu") is weight
    assert weight.bnb_quantized and weight.dtype is storage
    assert weight.shape == (_C.storage_elements(96 * 130, storage.itemsize), 1)
    assert set(weight.__dict__) == ATTRIBUTES and not weight.requires_grad
    expected, _ = functional.quantize_nf4(dense(), compress_statistics=True)
    assert torch.equal(raw(weight)[: expected.numel()], expected.flatten())
    assert int(weight.quant_state.checksum) == int(ops.checksum(weight.data))


@pytest.mark.parametrize("move", [lambda w: w.cpu(), lambda w: w.to(device="cpu"), lambda w: w.to(torch.zeros(1))])
def test_every_first_move_quantizes(move):
    assert move(Params4bit(dense())).bnb_quantized


@pytest.mark.parametrize("n", [1, 2, 3, 5, 9, 65, 129])
@pytest.mark.parametrize("storage", cases.STORAGES)
def test_odd_sizes(n, storage):
    """Padded with zeros to whole storage elements, where bitsandbytes raises."""
    weight = Params4bit(dense(1, n), quant_storage=storage).to("cpu")
    assert values(weight).shape == (1, n)
    assert torch.equal(
        values(weight), functional.dequantize_4bit(*functional.quantize_4bit(dense(1, n), compress_statistics=True))
    )


def test_dtype_alone_does_not_quantize():
    weight = Params4bit(dense()).to(torch.bfloat16)
    assert isinstance(weight, Params4bit) and weight.dtype is torch.bfloat16 and not weight.bnb_quantized
    assert weight.to("cpu").quant_state.dtype is torch.bfloat16


@pytest.mark.parametrize("storage", [torch.int32, torch.float8_e4m3fn, torch.bool, torch.int64, None])
def test_storage_refused_at_construction(storage):
    with pytest.raises(TypeError, match="quant_storage"):
        Params4bit(dense(), quant_storage=storage)


def test_bad_settings_refused_at_construction():
    with pytest.raises(ValueError, match="int4"):
        Params4bit(dense(), quant_type="int4")
    with pytest.raises(ValueError, match="100"):
        Params4bit(dense(), blocksize=100)


# ---- moves ----


def test_same_device_is_the_same_object():
    weight = quantized()
    assert weight.to("cpu") is weight and weight.cpu() is weight and weight.to("cpu", torch.bfloat16) is weight


def test_meta_keeps_the_statistics():
    weight = quantized()
    state, absmax = weight.quant_state, weight.quant_state.absmax
    moved = weight.to("meta")
    assert isinstance(moved, Params4bit) and moved.is_meta and moved.shape == weight.shape and moved.bnb_quantized
    assert moved.quant_state is state and state.absmax is absmax and not absmax.is_meta
    assert not weight.is_meta and torch.equal(values(weight), values(weight))
    assert Params4bit(dense()).to("meta").bnb_quantized is False


def test_module_to_meta_and_to_empty():
    layer = LinearNF4(130, 96, quant_storage=torch.bfloat16).to("cpu")
    state = layer.quant_state
    x = torch.randn(2, 130)
    y, saved = layer(x), layer.state_dict()
    layer.to("meta")
    assert (
        type(layer.weight) is Params4bit
        and layer.weight.is_meta
        and layer.quant_state is state
        and not state.absmax.is_meta
    )
    layer.to_empty(device="cpu")
    assert type(layer.weight) is Params4bit and layer.weight.shape == saved["weight"].shape
    with torch.no_grad():
        layer.weight.data.view(torch.uint8).zero_()
        layer.bias.copy_(saved["bias"])
    with pytest.raises(ValueError, match="other bytes.*checksum"):
        layer(x)
    with torch.no_grad():
        layer.weight.copy_(saved["weight"])
    assert torch.equal(layer(x), y)


# ---- module dtype moves and casts of the tensor ----


@pytest.mark.parametrize("storage", cases.STORAGES)
def test_module_dtype_moves_leave_packed_bytes_alone(storage):
    layer = nn.Sequential(LinearNF4(130, 96, quant_storage=storage)).to("cpu")
    weight, before = layer[0].weight, raw(layer[0].weight)
    moves = [
        lambda: layer.to(torch.float16),
        lambda: layer.to("cpu", torch.bfloat16),
        layer.half,
        layer.bfloat16,
        layer.double,
        layer.float,
        lambda: layer.type(torch.float32),
    ]
    for move in moves:
        move()
        assert layer[0].weight is weight and weight.dtype is storage and torch.equal(raw(weight), before)
    assert layer[0].bias.dtype is torch.float32


FORBIDDEN = {
    "to(dtype)": lambda w: w.to(torch.float64),
    "to(device, dtype)": lambda w: w.to("cpu", torch.float64),
    "Tensor.to": lambda w: torch.Tensor.to(w, torch.float64),
    "double": lambda w: w.double(),
    "type": lambda w: w.type(torch.float64),
    "type_as": lambda w: w.type_as(torch.zeros(1, dtype=torch.float64)),
    "data": lambda w: setattr(w, "data", w.data.double()),
    "add": lambda w: w + 1,
    "radd": lambda w: 1 + w,
    "iadd": lambda w: w.__iadd__(1),
    "mul": lambda w: torch.mul(w, 2),
    "div": lambda w: w / 2,
    "neg": lambda w: -w,
    "matmul": lambda w: torch.zeros(1, w.shape[0], dtype=w.dtype) @ w,
    "linear": lambda w: nn.functional.linear(torch.zeros(2, 1, dtype=w.dtype), w),
    "add_": lambda w: w.add_(1),
    "mul_": lambda w: torch.Tensor.mul_(w, 2),
    "normal_": lambda w: nn.init.normal_(w),
    "kaiming": lambda w: nn.init.kaiming_uniform_(w),
    "zeros_": lambda w: nn.init.zeros_(w),
    "keyword": lambda w: torch.add(input=w, other=1),
    "copy_": lambda w: w.copy_(torch.zeros(w.shape, dtype=torch.float64)),
    "item": lambda w: w.__setitem__(0, 1.0),
    "nan_to_num_": lambda w: w.nan_to_num_(),
    "floor_": lambda w: w.floor_(),
    "sin_": lambda w: torch.sin_(w),
    "random_": lambda w: w.random_(),
    "triu_": lambda w: w.triu_(),
    "foreach": lambda w: torch._foreach_mul_([w], 2.0),
    "xor": lambda w: w.__ixor__(1),
    "out": lambda w: torch.cumsum(torch.ones(w.shape, dtype=w.dtype), 0, out=w),
    "data mul_": lambda w: w.data.mul_(2),
    "data iadd": lambda w: w.data.__iadd__(1),
    "data lerp_": lambda w: w.data.lerp_(torch.zeros_like(w.data), 0.5),
    "data normal_": lambda w: w.data.normal_(std=0.02),
    "data init": lambda w: nn.init.zeros_(w.data),
    "data item": lambda w: w.data.__setitem__(0, 1.0),
    "data copy_": lambda w: w.data.copy_(torch.zeros(w.shape, dtype=torch.float64)),
    "data foreach": lambda w: torch._foreach_mul_([w.data], 2.0),
    "data out": lambda w: torch.mul(torch.ones(w.shape, dtype=w.dtype), 2, out=w.data),
    "data detach": lambda w: w.data.detach().zero_(),
    "data of a parameter": lambda w: nn.Parameter(w.data, requires_grad=False).zero_(),
}


@pytest.mark.parametrize("name", FORBIDDEN)
@pytest.mark.parametrize("storage", [torch.bfloat16, torch.uint8])
def test_casts_and_arithmetic_raise(name, storage):
    weight = quantized(storage)
    before = raw(weight)
    with pytest.raises((TypeError, ValueError), match="4-bit weight"), torch.no_grad():
        FORBIDDEN[name](weight)
    assert torch.equal(raw(weight), before)


def test_casts_of_float_weights_are_free():
    weight = Params4bit(dense())
    assert weight.half().dtype is torch.float16 and (weight * 2).shape == weight.shape
    nn.init.zeros_(weight)
    weight.data = weight.data.to(torch.uint8)  # transformers does this on meta weights before a packed one comes
    assert weight.dtype is torch.uint8 and not weight.bnb_quantized


def test_data_setter():
    weight = quantized()
    with pytest.raises(TypeError, match="param_dtype"):
        weight.data = weight.data.float()
    with pytest.raises(ValueError, match=r"\[96, 130\].*3120"):
        weight.data = dense(dtype=torch.bfloat16)
    flat = weight.data.flatten()[:100]
    weight.data = flat  # FSDP1 with use_orig_params does this
    assert weight.data_ptr() == flat.data_ptr()


def test_data_is_plain_but_for_in_place_functions():
    """Results, copies, views and pickles of `.data` are plain tensors; bytes of the same dtype may be written."""
    weight = quantized()
    data, bytes_ = weight.data, raw(weight)
    for plain in (data.clone(), data.view(-1), data.t(), data.float(), copy.deepcopy(data), data[:5]):
        assert type(plain) is torch.Tensor
    for loaded in (saved(data, weights_only=True), pickled(data)):
        assert type(loaded) is torch.Tensor and torch.equal(loaded.view(torch.uint8).flatten(), bytes_)
    other = quantized()
    other.data.copy_(weight.data)
    other.data[:3] = weight.data[:3]
    torch._foreach_copy_([other.data], [weight.data])
    assert torch.equal(raw(other), bytes_) and torch.equal(values(other), values(weight))
    state = weight.quant_state
    assert torch.equal(
        functional.linear_4bit(dense(2), data, state), functional.linear_4bit(dense(2), data.clone(), state)
    )
    rebuilt = Params4bit(data, requires_grad=False, **weight.__dict__)
    assert type(rebuilt) is Params4bit and torch.equal(raw(rebuilt), bytes_)
    assert type(nn.Parameter(data, requires_grad=False).detach()) is type(data)
    assert type(Params4bit(dense()).data) is torch.Tensor


def test_inspection_is_allowed():
    weight = quantized()
    assert weight.numel() == 3120 and weight.element_size() == 2 and weight.is_floating_point()
    assert weight.data_ptr() and weight.untyped_storage().nbytes() == 6240 and weight.is_contiguous()
    assert torch.equal(weight, weight.data) and bool((weight.data == weight).any())
    assert weight.clone().shape == weight.shape and weight.view(-1).shape == (3120,) and weight.t().shape == (1, 3120)
    assert torch.zeros(2).to(weight).dtype is torch.bfloat16 and "Params4bit" in repr(weight)


# ---- the __dict__ round trip ----


def test_dict_round_trips():
    """Libraries rebuild weights from the old one's attributes: a fresh one quantizes with its settings."""
    old = quantized()
    old._is_hf_initialized = True
    fresh = [
        Params4bit(dense(), requires_grad=False, **LinearNF4(130, 96, device="meta").weight.__dict__).to("cpu"),
        Params4bit(dense(), requires_grad=False, **{**old.__dict__, "bnb_quantized": False}).to("cpu"),
        Params4bit(dense(), requires_grad=False, **old.__dict__).to("cpu"),  # randlora leaves bnb_quantized as it was
        Params4bit(dense().cpu(), **old.__dict__).cpu(),
    ]
    for weight in fresh:
        assert weight.bnb_quantized and weight.quant_type == "nf4" and torch.allclose(values(weight), values(old))
    same = Params4bit(old.data, requires_grad=old.requires_grad, **old.__dict__)
    assert same.bnb_quantized and same.quant_state is old.quant_state and same.to("cpu") is same
    with pytest.raises(TypeError):
        Params4bit(old.data, requires_grad=False, **{**old.__dict__, "requires_grad": False})


def test_data_that_fits_nothing():
    old = quantized()
    with pytest.raises(ValueError, match=r"\[3119, 1\].*\[96, 130\].*3120"):
        Params4bit(old.data[:-1], **old.__dict__)


# ---- copies ----


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.int8])
def test_copies(storage):
    """Of 4-bit weights, and of int8 codes [N, K]."""
    int8 = storage is torch.int8
    weight = Int8Params(dense(), requires_grad=False).to("cpu") if int8 else quantized(storage)
    copies = {
        "deepcopy": copy.deepcopy(weight),
        "pickle": pickled(weight),
        "copy": copy.copy(weight),
        "torch.save": saved(weight),
        "weights_only": saved(weight, weights_only=True),
    }
    for name, other in copies.items():
        assert type(other) is type(weight) and isinstance(other, nn.Parameter), name
        assert set(other.__dict__) == ({"row_state", "has_fp16_weights"} if int8 else ATTRIBUTES), name
        assert other.own_state == weight.own_state and torch.equal(raw(other), raw(weight)), name
        assert other.bnb_quantized and other.requires_grad is False and other.dtype is storage
        assert not int8 or torch.equal(other.dequantize(), weight.dequantize())
        assert (other.data_ptr() == weight.data_ptr()) is (name == "copy")
        assert (other.own_state is weight.own_state) is (name == "copy")
        assert (other.own_state.absmax is weight.own_state.absmax) is (name == "copy")


def test_copies_of_a_float_weight():
    weight = Params4bit(dense(), quant_type="nf4")
    for other in (copy.deepcopy(weight), pickled(weight)):
        assert other.to("cpu").quant_type == "nf4"
    assert not weight.bnb_quantized


def test_copied_modules_are_whole():
    layer = LinearNF4(130, 96, quant_storage=torch.bfloat16).to("cpu")
    for other in (copy.deepcopy(layer), pickled(layer)):
        assert other.weight.module is other and other.quant_state is other.weight.quant_state
        assert other.quant_state is not layer.quant_state
    alone = copy.deepcopy(layer.weight)
    assert alone.module is None, "a copy must not point to the old layer"


# ---- pieces and views ----


def test_chunk_and_split():
    weight = quantized()
    pieces = [torch.chunk(weight, 3), torch.split(weight, 1040), weight.chunk(3), weight.split(1040)]
    for parts in pieces:
        assert isinstance(parts, tuple) and [type(p) for p in parts] == [Params4bit] * 3
        assert all(p.quant_state is weight.quant_state and p.bnb_quantized and p.shape == (1040, 1) for p in parts)
        assert torch.equal(torch.cat([p.data for p in parts]), weight.data)


def test_detach_and_as_strided_keep_the_class():
    weight = quantized()
    for view in (
        weight.detach(),
        torch.as_strided(weight, (3120, 1), (1, 1)),
        nn.Parameter(weight, requires_grad=False),
    ):
        assert (
            type(view) is Params4bit and view.quant_state is weight.quant_state and view.data_ptr() == weight.data_ptr()
        )


def test_new_zeros_is_a_shard():
    from bitshard.shards.shard import PackedShard

    weight = quantized()
    assert type(weight.new_zeros(1560, 1)) is PackedShard
    assert type(Params4bit(dense()).new_zeros(4)) is torch.Tensor


def test_state_attributes_resolve():
    weight = quantized()
    state = weight.quant_state
    for name, expected in {
        "absmax": state.absmax,
        "code": state.code,
        "quant_map": state.code,
        "offset": state.offset,
        "state2": state.state2,
        "nested_absmax": state.state2.absmax,
        "nested_quant_map": state.state2.code,
        "nested_blocksize": 256,
        "nested_dtype": torch.float32,
        "nested_offset": state.offset,
    }.items():
        assert getattr(weight, name) is expected or getattr(weight, name) == expected
    plain = quantized(compress_statistics=False)
    assert plain.offset is None and plain.state2 is None
    for bare, name in ((plain, "nested_absmax"), (Params4bit(dense()), "absmax"), (plain, "surprise")):
        with pytest.raises(AttributeError, match=name):
            getattr(bare, name)


# ---- prequantized ----


@pytest.mark.parametrize("storage", cases.STORAGES)
@pytest.mark.parametrize("nested", [False, True])
def test_from_prequantized(storage, nested):
    weight = quantized(storage, compress_statistics=nested)
    entries = {f"a.b.weight.{key}": value for key, value in weight.quant_state.as_dict(packed=True).items()}
    module = LinearNF4(130, 96, device="meta")
    other = Params4bit.from_prequantized(weight.data, entries, device="cpu", module=module)
    assert other.quant_storage is storage and other.dtype is storage and other.quant_state == weight.quant_state
    assert module.quant_state is other.quant_state and set(other.__dict__) == ATTRIBUTES
    assert other.compress_statistics is nested and torch.equal(values(other), values(weight))
    assert int(other.quant_state.checksum) == int(weight.quant_state.checksum)
    row = Params4bit.from_prequantized(weight.data.t(), entries, device="cpu")
    assert row.shape == weight.shape and torch.equal(raw(row), raw(weight))


def test_from_prequantized_bad_sizes():
    weight = quantized(torch.uint8)
    entries = weight.quant_state.as_dict(packed=True)
    for data, words in (
        (weight.data[:-1], "6239 elements of uint8.*needs 6240"),
        (weight.data.to(torch.bfloat16), "6240 elements of bfloat16.*needs 3120"),
    ):
        with pytest.raises(ValueError, match=words):
            Params4bit.from_prequantized(data, entries, device="cpu")
    with pytest.raises(TypeError, match="int64"):
        Params4bit.from_prequantized(weight.data.long(), entries, device="cpu")


@pytest.mark.parametrize("shape", [(130, 96), (48, 260), (96 * 130,), (2, 48, 130)])
def test_from_prequantized_for_another_layer(shape):
    """As many weights in another shape would load, and give a wrong product or a late error."""
    weight = Params4bit(dense().reshape(shape), quant_type="nf4").to("cpu")
    entries = weight.quant_state.as_dict(packed=True)
    with pytest.raises(ValueError, match=r"does not fit a layer of \[96, 130\]"):
        Params4bit.from_prequantized(weight.data, entries, device="cpu", module=LinearNF4(130, 96, device="meta"))
    assert Params4bit.from_prequantized(weight.data, entries, device="cpu").quant_state.shape == shape


# ---- the container under FSDP launches ----


def test_container_dtype(monkeypatch):
    assert container_dtype(torch.bfloat16, torch.uint8) is torch.uint8
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert container_dtype(torch.bfloat16, torch.uint8) is torch.bfloat16
    assert container_dtype(torch.float32, torch.int8) is torch.float32
    assert container_dtype(torch.bfloat16, torch.float16) is torch.float16, "a declared float storage stays"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"ACCELERATE_USE_FSDP": "true"}, True),
        ({"ACCELERATE_USE_FSDP": "1"}, True),
        ({"ACCELERATE_USE_FSDP": "false"}, False),
        ({"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, True),
        ({"FSDP_CPU_RAM_EFFICIENT_LOADING": "False"}, True),
        ({"RANK": "1", "WORLD_SIZE": "2"}, False),
        ({"RANK": "1", "WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true"}, True),
        ({"RANK": "1", "WORLD_SIZE": "2", "ACCELERATE_USE_DEEPSPEED": "true"}, False),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, False),
    ],
)
def test_fsdp_launch(monkeypatch, environment, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert fsdp_launch() is expected


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(96, 130), (1, 5), (3, 7)])
def test_uint8_in_a_float_container(monkeypatch, dtype, shape):
    """Under an FSDP launch the default storage becomes the weight's dtype in memory; files and attributes say uint8."""
    expected = Params4bit(dense(*shape, dtype), quant_type="nf4").to("cpu")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    weight = Params4bit(dense(*shape, dtype), quant_type="nf4").to("cpu")
    assert weight.dtype is dtype and weight.quant_storage is torch.uint8
    assert weight.shape == (_C.storage_elements(shape[0] * shape[1], dtype.itemsize), 1)
    assert torch.equal(weight.saved_data(), expected.data) and torch.equal(values(weight), values(expected))
    assert int(weight.quant_state.checksum) == int(expected.quant_state.checksum)
    entries = expected.quant_state.as_dict(packed=True)
    loaded = Params4bit.from_prequantized(expected.data, entries, device="cpu")
    assert loaded.dtype is dtype and loaded.quant_storage is torch.uint8 and torch.equal(raw(loaded), raw(weight))
    again = Params4bit(loaded.data, requires_grad=False, **loaded.__dict__)
    assert again.bnb_quantized and torch.equal(again.saved_data(), expected.data)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 15, 16, 17, 1000])
def test_repack(n):
    data, state = functional.quantize_4bit(torch.randn(n))
    for dtype in cases.STORAGES:
        packed = repack(data, dtype, state)
        assert packed.dtype is dtype and packed.shape == (_C.storage_elements(n, dtype.itemsize), 1)
        assert torch.equal(repack(packed, torch.uint8, state), data)


# ---- what others ask and set ----


def test_same_bytes_in_another_dtype():
    """A view of a weight's own memory as its `.data` is let through, both ways; another address or size is not."""
    weight = quantized(torch.uint8)
    expected, address = values(weight), weight.data_ptr()
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        weight.data = weight.data.reshape(-1).view(dtype).reshape(-1, 1)
        weight.quant_storage = dtype
        assert weight.dtype is dtype and weight.data_ptr() == address and torch.equal(values(weight), expected)
    flat = weight.data.reshape(-1)
    for foreign in (flat.clone().view(torch.bfloat16).view(-1, 1), flat[:-2].view(torch.bfloat16).view(-1, 1)):
        with pytest.raises(TypeError, match="packed bytes in a uint8 container"):
            weight.data = foreign


@pytest.mark.parametrize("storage", cases.STORAGES, ids=str)
def test_packed_bytes_are_not_trained(storage):
    """In every container, and whoever asks: peft copies the layers of modules_to_save and wants their gradients."""
    module = Linear4bit(130, 96, quant_type="nf4", quant_storage=storage).to("cpu")
    weight = module.weight
    for ask in (
        lambda: weight.requires_grad_(True),
        lambda: weight.requires_grad_(),
        lambda: setattr(weight, "requires_grad", True),
        lambda: module.requires_grad_(True),
        lambda: Params4bit(weight.data, requires_grad=True, **weight.__dict__),
        lambda: Params4bit(torch.randn(8, 64), requires_grad=True, quant_storage=storage).to("cpu"),
    ):
        with pytest.raises(RuntimeError, match="llm_int8_skip_modules.*modules_to_save"):
            ask()
        assert not weight.requires_grad
    weight.requires_grad = False
    assert not weight.requires_grad_(False).requires_grad and Params4bit(torch.randn(2, 2), True).requires_grad


@pytest.mark.parametrize("container", [torch.uint8, torch.float32])
def test_reductions_tell_of_the_bytes(monkeypatch, caplog, container):
    """As of a weight of bitsandbytes, whatever the container; one warning says what they are."""
    expected = quantized(torch.uint8).data
    monkeypatch.setattr(bitshard.tensor, "_warned_of_bytes", False)
    if container is torch.float32:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    weight = quantized(torch.uint8)
    assert weight.dtype is container and weight.quant_storage is torch.uint8
    assert int(weight.sum()) == int(torch.sum(weight)) == int(expected.sum())
    assert not weight.isnan().any() and torch.isnan(weight).shape == expected.shape
    with pytest.raises(RuntimeError):
        expected.mean()
    with pytest.raises(RuntimeError):
        weight.mean()
    assert len(caplog.records) == 1 and "packed bytes" in caplog.text
    floats = Params4bit(dense(), quant_type="nf4", quant_storage=torch.float32).to("cpu")
    for reduce in (torch.Tensor.norm, torch.norm, torch.mean, torch.linalg.vector_norm):
        found, same = reduce(floats), reduce(floats.data)
        assert torch.equal(found, same) or (found.isnan() and same.isnan())
    for compute in (lambda: weight + 1, lambda: weight.half(), lambda: weight.lerp(weight, 0.1)):
        with pytest.raises((TypeError, ValueError)):
            compute()


def test_a_weight_made_without_its_constructor():
    packed = quantized(torch.uint8).data.as_subclass(torch.Tensor)
    made = torch.Tensor._make_subclass(Params4bit, packed)
    assert type(made.data) is torch.Tensor and made.data.data_ptr() == packed.data_ptr()
    assert not made.bnb_quantized and made.quant_state is None and made.module is None
    assert torch.equal(made.clone(), packed) and made.detach().shape == packed.shape


def test_guards_are_not_where_others_delete_them():
    """unsloth takes `__torch_function__` out of the class's own attributes."""
    assert "__torch_function__" not in vars(Params4bit)
    assert Params4bit.__torch_function__.__func__ is vars(Packed)["__torch_function__"].__func__


def test_fsdp2_of_older_torch_names_the_setting(monkeypatch):
    """Which shards no integers: its own error names nothing that a user could change."""
    monkeypatch.setattr(bitshard.tensor, "_FSDP2_TAKES_INTEGERS", False)
    with pytest.raises(ValueError, match="FSDP2 of torch .* shards no uint8.*bnb_4bit_quant_storage"):
        quantized(torch.uint8).new_zeros(24, 1)
    assert quantized(torch.bfloat16).new_zeros(24, 1).shape == (24, 1)


def test_a_shard_that_is_wrapped_again_stays_itself():
    """Patches of FSDP2 hand our own shard to the constructor."""
    weight = quantized(torch.bfloat16)
    shard = weight.new_zeros(24, 1)
    assert Params4bit(data=shard, requires_grad=False, **weight.__dict__) is shard


# ---- verify ----


def test_verify():
    weight = quantized()
    state = weight.quant_state
    verify(weight, state, "here")
    verify(weight.data, state, "here")
    damaged = weight.data.clone()
    damaged.view(torch.uint8)[2000] ^= 1
    with pytest.raises(ValueError, match="here: .*other bytes.*use_orig_params"):
        verify(damaged, state, "here")
    with pytest.raises(ValueError, match="arrived as .* float32.*param_dtype.*quant_storage"):
        verify(weight.data.float(), state, "here")
    with pytest.raises(ValueError, match="other bytes"):
        verify(weight.data.to(torch.float16), state, "here")  # the same size, and silently wrong without a checksum
    state.checksum = None
    verify(damaged, state, "here")  # nothing to compare with


# ---- life times ----


def test_weights_are_freed():
    layer = LinearNF4(130, 96).to("cpu")
    watched = weakref.ref(layer.weight)
    layer.weight = Params4bit(dense(), quant_type="nf4", module=layer).to("cpu")
    gc.collect()
    assert watched() is None
    watched = weakref.ref(layer.quant_state)
    del layer
    gc.collect()
    assert watched() is None


def test_state_type():
    assert isinstance(quantized().quant_state, QuantState)
