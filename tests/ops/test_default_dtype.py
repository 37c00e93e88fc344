"""torch.set_default_dtype of 16 and of 64 bits: everything has the bits and dtypes that it has with float32.

transformers sets it while it makes a model, and scripts of others leave it set.
"""

import contextlib
import copy
import dataclasses
import functools

import bitsandbytes as bnb
import pytest
import torch
from bitshard import experts, functional, optim
from bitshard.calibration import layers, low_rank, solve
from bitshard.calibration.moments import Sum
from bitshard.functions import grouped, rows
from helpers import moe
from helpers import optim as optimizers
from helpers.bytes import same_bytes
from helpers.copies import saved
from helpers.lora import fused_copy
from helpers.lora import model as lora_model
from helpers.lora import run as run_lora
from torch import nn

F = bnb.functional
DEFAULTS = (torch.float16, torch.bfloat16, torch.float64)
OPTIMIZERS = [*optimizers.CLASSES, *(f"Paged{name}{bits}bit" for name in optimizers.PAGED for bits in (8, 32))]
BOUNDED = ("adam", "ademamix", "lamb", "lion", "lars", "momentum", "rmsprop", "adagrad")  # with max_unorm
PARAMETERS = (torch.float32, torch.bfloat16)


@contextlib.contextmanager
def default_dtype(dtype):
    """While it lasts, torch makes tensors of this dtype where nobody names one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def values(*shape, dtype=torch.float32, seed=0):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return made.to(dtype)


def leaves(found):
    """Tensors, numbers and texts of a result, in order."""
    if dataclasses.is_dataclass(found):
        found = vars(found)
    if isinstance(found, (list, tuple)):
        return [leaf for item in found for leaf in leaves(item)]
    if isinstance(found, dict):
        return [leaf for key, item in found.items() for leaf in (str(key), *leaves(item))]
    if isinstance(found, F.QuantState):
        return leaves(found.as_dict(packed=False)) + leaves(found.as_dict(packed=True))
    return [found]


def same(found, expected):
    """Whether two results have the same leaves: tensors of one dtype and shape with equal bytes."""
    found, expected = leaves(found), leaves(expected)
    return len(found) == len(expected) and all(
        same_bytes(a, b) if isinstance(a, torch.Tensor) else repr(a) == repr(b)
        for a, b in zip(found, expected, strict=True)
    )


# ---- what is compared; each gives a result whose inputs have dtypes of their own ----


def maps():
    made = [F.create_linear_map(*settings) for settings in ((True, 8), (False, 8), (True, 4), (True, 8, False))]
    made += [F.create_normal_map(), F.create_normal_map(use_extra_value=False)]
    made += [F.create_fp8_map(), F.create_fp8_map(False, 5, 3), F.create_fp8_map(True, 2, 1, 4)]
    made += [F.create_dynamic_map(), F.create_dynamic_map(signed=False), F.create_dynamic_map(True, 3, 4)]
    return [*made, F.get_4bit_type("nf4", "cpu"), F.get_4bit_type("fp4", "cpu")]


def blockwise():
    out = []
    for dtype in (torch.float32, torch.bfloat16):
        for settings in ({}, {"nested": True}, {"code": F.create_dynamic_map(signed=False)}, {"blocksize": 64}):
            codes, state = F.quantize_blockwise(values(3, 500, dtype=dtype), **settings)
            out += [codes, state, F.dequantize_blockwise(codes, state)]
    return out


def four_bits():
    out = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for settings in ({"quant_type": "nf4"}, {"quant_type": "fp4", "blocksize": 128}):
            for nested in (False, True):
                packed, state = F.quantize_4bit(values(70, 96, dtype=dtype), compress_statistics=nested, **settings)
                again = F.QuantState.from_dict(dict(state.as_dict(packed=True)), device="cpu")
                out += [packed, state, again, F.dequantize_4bit(packed, state), F.dequantize_4bit(packed, again)]
                out += [F.gemv_4bit(values(1, 96, dtype=dtype), packed.t(), state=state)]
                out += [rows.embedding_4bit(torch.tensor([3, 69]), packed, state)]
    return out


def layer_of_4_bits():
    out = []
    for nested in (False, True):
        layer = bnb.nn.LinearNF4(96, 70, compress_statistics=nested, compute_dtype=torch.float32)
        layer.weight = bnb.nn.Params4bit(values(70, 96), requires_grad=False, compress_statistics=nested, module=layer)
        layer.bias.data = values(70)
        layer.to("cpu")
        x = values(5, 96, seed=1).requires_grad_()
        y = layer(x)
        y.sum().backward()
        entries = saved(copy.deepcopy(layer).state_dict(), weights_only=True)
        out += [y.detach(), x.grad, dict(layer.state_dict()), entries]
    return [*out, bnb.nn.Params4bit(None), bnb.nn.Int8Params(None).data]


def eight_bits():
    x = values(40, 96)
    x[3, 7] = 20
    codes, scales, columns = F.int8_vectorwise_quant(x, 6.0)
    out = [codes, scales, columns, F.int8_vectorwise_dequant(codes, scales), F.int8_double_quant(x, threshold=6.0)]
    sums = F.int8_linear_matmul(codes, codes)
    out += [sums, F.int8_mm_dequant(sums, scales, scales)]
    for dtype in (torch.float32, torch.bfloat16):
        out += [bnb.matmul(x.to(dtype), values(30, 96, dtype=dtype, seed=2), threshold=6.0)]
    layer = bnb.nn.Linear8bitLt(96, 30, has_fp16_weights=False, threshold=6.0)
    layer.weight = bnb.nn.Int8Params(values(30, 96, seed=2), requires_grad=False)
    layer.bias.data = values(30)
    layer.to("cpu")
    a = x.clone().requires_grad_()
    y = layer(a)
    y.sum().backward()
    return [*out, y.detach(), a.grad, dict(layer.state_dict())]


def embeddings():
    out, tokens = [], torch.tensor([[0, 49], [7, 7]])
    for cls in (bnb.nn.EmbeddingNF4, bnb.nn.EmbeddingFP4, bnb.nn.Embedding8bit):
        module = cls(50, 96, dtype=torch.bfloat16)
        module.load_state_dict({"weight": values(50, 96, dtype=torch.bfloat16)})
        module.to("cpu")
        out += [module(tokens), module.dequantize(), dict(module.state_dict())]
        out += [module.linear(values(3, 96, dtype=torch.bfloat16))]
    return out


def stacks():
    packed, state = functional.quantize_experts_4bit(values(3, 32, 64), compress_statistics=True)
    x, ends = values(9, 64), torch.tensor([2, 5, 9], dtype=torch.int32)
    out = [packed, state, functional.grouped_linear_4bit(x, ends, packed, state)]
    out += [grouped.by_panels(x, ends, packed, state.scales(), (3, 64, 0, 32, 64), False, 2)]
    found = copy.deepcopy(mixture())
    experts.quantize(found)
    return [*out, moe.logits(found)]


def calibration():
    w, out = values(48, 96) * 0.05, []
    x, moments = values(400, 96, seed=3), Sum()
    moments.add(x)
    empty = layers._inputs(None, 96, nn.Linear(1, 1, dtype=torch.bfloat16))
    for inputs in (solve.Inputs(moments.mean()), empty, solve.Inputs(torch.full((96, 96), torch.inf, dtype=w.dtype))):
        for fmt in (solve.Format(), solve.Format("fp4", 128, True)):
            found = solve.solve(w, inputs, fmt)
            left = w - found.choice.values(fmt)
            out += [found, solve.packed(found.choice, fmt, w.shape, torch.bfloat16)]
            out += [low_rank.correction(left, inputs.H, 4)]
    return out


def adapters():
    return [run_lora(each, values(3, 11, 320, dtype=dtype), values(3, 11, 200, dtype=dtype)) for dtype, each in fused()]


WORK = (maps, blockwise, four_bits, layer_of_4_bits, eight_bits, embeddings, stacks, calibration, adapters)


@functools.cache
def mixture():
    return moe.model("qwen3_moe", experts=4, num_hidden_layers=1)


@functools.cache
def fused():
    """(dtype of x, fused LoRA layers) on 4-bit and int8 weights."""
    found = []
    for dtype, adapter, threshold in (
        (torch.bfloat16, torch.float32, None),
        (torch.float32, torch.float32, None),
        (torch.bfloat16, torch.float32, 6.0),
    ):
        found.append((dtype, fused_copy(lora_model([(200, 320)], dtype, adapter, threshold=threshold))))
    return found


@functools.cache
def expected(work, *arguments):
    """What a piece of work gives with torch's own default, float32."""
    assert torch.get_default_dtype() is torch.float32
    return work(*arguments)


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
@pytest.mark.parametrize("dtype", DEFAULTS, ids=str)
def test_the_bits_are_those_of_the_default_float32(work, dtype):
    wanted = expected(work)
    with default_dtype(dtype):
        found = work()
    assert same(found, wanted)


def made(name, params):
    """An optimizer by the name of its class, or of an algorithm whose updates are bounded."""
    if name not in BOUNDED:
        return optimizers.make(name, params)
    states = 2 if name in BOUNDED[:3] else 1
    betas = (0.9, 0.99, 0.999)[: states + (name == "ademamix")]
    return getattr(optim, f"Optimizer{states}State")(name, params, lr=1e-2, betas=betas, max_unorm=0.1)


def steps(name):
    """Parameters and state after three steps, between which the state went through a state dict of a new optimizer."""
    params = [nn.Parameter(values(*shape, dtype=dtype)) for shape in ((4, 4096), (5, 3)) for dtype in PARAMETERS]
    optimizer, out = made(name, params), []
    for step in range(3):
        for place, p in enumerate(params):
            p.grad = values(*p.shape, dtype=p.dtype, seed=10 * step + place)
        optimizer.step()
        again = made(name, params)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        out += [[p.detach().clone() for p in params], copy.deepcopy(again.state_dict()["state"])]
        optimizer = again
    return out


@pytest.mark.parametrize("name", [*OPTIMIZERS, *BOUNDED])
@pytest.mark.parametrize("dtype", DEFAULTS, ids=str)
def test_optimizers(name, dtype):
    wanted = expected(steps, name)
    with default_dtype(dtype):
        found = steps(name)
    assert same(found, wanted)


def test_a_difference_is_seen():
    """In dtype, bits, or the sign of a zero; and in numbers and names."""
    one = torch.zeros(2, dtype=torch.float32)
    assert same([one, {"a": 1}], [one.clone(), {"a": 1}])
    for other in ([one.double(), {"a": 1}], [-one, {"a": 1}], [one, {"a": 2}], [one, {"b": 1}], [one]):
        assert not same(other, [one, {"a": 1}])
