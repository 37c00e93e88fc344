"""MXFP4 and NVFP4: values of every code and scale, quantizing to the nearest, states, and what is refused.

The oracles are written from the specification: E2M1 and E8M0 of OCP Microscaling Formats v1.0, E4M3 by its fields.
"""

import copy
import math
import pickle

import pytest
import reference
import torch
from bitshard import functional, ops
from bitshard.functions import microscaled
from bitshard.kinds import kind_of
from bitshard.nn.linear import Linear4bit
from bitshard.state import QuantState
from helpers.alike import agree, by_isa
from helpers.bytes import same_bytes
from helpers.microscaled import SCALE, VALUE, e2m1, e4m3, e8m0
from safetensors.torch import load_file, save_file

TYPES = ("mxfp4", "nvfp4")
BLOCK = {"mxfp4": 32, "nvfp4": 16}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
N, K = 24, 96


def exact(packed, scales, whole, quant_type, dtype):
    """RN(code * RN(scale * global scale)) in float32, then in dtype: [n]."""
    codes = torch.stack([packed >> 4, packed & 15], -1).view(-1).long()
    units = (SCALE[quant_type][scales.long()] * whole).repeat_interleave(BLOCK[quant_type])
    return (VALUE[codes] * units[: codes.numel()]).to(dtype)


@pytest.mark.parametrize("quant_type, whole", [("mxfp4", 1.0), ("nvfp4", 1.0), ("nvfp4", 0.00371), ("nvfp4", 1e-37)])
def test_every_code_with_every_scale(device, quant_type, whole):
    """All 256 packed bytes with all 256 scales, in rows that end inside a block or not; denormal numbers too."""
    size, rows = BLOCK[quant_type], (1, 256, 16 * 3)
    packed = torch.arange(256, dtype=torch.uint8).repeat(256)
    scales = torch.arange(256, dtype=torch.uint8).repeat_interleave(512 // size)
    count = -(-scales.numel() // 256)
    table = ops.table({"mxfp4": "e8m0", "nvfp4": "e4m3"}[quant_type])
    assert torch.equal(table.nan_to_num(), (SCALE[quant_type] + 0.0).nan_to_num())
    second, offset = torch.full((count,), whole), torch.zeros(1)
    given = [tensor.to(device) for tensor in (packed, scales, table, second, offset)]
    for dtype in DTYPES:
        wanted = exact(packed, scales, whole, quant_type, dtype)
        for n in rows:
            shape = (n, packed.numel() * 2 // n) if n != 48 else (1, packed.numel() * 2)

            def decode(shape=shape, dtype=dtype):
                return ops.dequantize_4bit(*given, size, 2, *shape, dtype).cpu().view(-1)

            for isa, found in (by_isa(decode) if device.type == "cpu" else {"cuda": decode()}).items():
                assert torch.equal(found.isnan(), wanted.isnan()), isa
                assert torch.equal(found.nan_to_num(), wanted.nan_to_num()), (isa, dtype, shape)


@pytest.mark.parametrize("quant_type", TYPES)
@pytest.mark.parametrize("n", [1, 15, 17, 33, 1000, 4096 + 16])
def test_short_ends_are_equal_on_every_instruction_set(quant_type, n):
    packed, state = kind_of(quant_type).quantize(torch.randn(n), quant_storage=torch.uint8)
    for dtype in DTYPES:
        arguments = (packed, *state.scales(), BLOCK[quant_type], 2, 1, n, dtype)
        agree(by_isa(lambda a=arguments: (ops.dequantize_4bit(*a),)))
        whole = state.state2.absmax[0] if quant_type == "nvfp4" else 1.0
        wanted = exact(packed.view(-1), state.absmax, whole, quant_type, dtype)[:n]
        assert torch.equal(ops.dequantize_4bit(*arguments).view(-1), wanted)


EDGES = (0.0, 5e-39, 1e-45, -1e-38, 1.2e-38, 3.4e38, -2.6e38, 448.0, 6.0, math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("whole", [None, 0.00371, 1.0, 2e-38, 1e30])
def test_the_quantizer_of_cuda_has_the_bytes_of_c(dtype, whole):
    """By torch, here on the CPU, and by each instruction set; magnitudes of any size, ties, short ends, NaN."""
    generator = torch.Generator().manual_seed(4)
    sizes = torch.logspace(-44, 38, 128, dtype=torch.float64).repeat_interleave(32)
    for values in (
        torch.randn(4096, generator=generator).double() * sizes,
        (torch.randint(-56, 57, (4097,), generator=generator) / 8).double(),
        torch.tensor(EDGES).double().repeat(40)[torch.randperm(480, generator=generator)],
        torch.randn(33, generator=generator).double(),
        torch.zeros(0).double(),
    ):
        x = values.to(dtype)
        of = ops.empty(x.device) if whole is None else torch.tensor(whole)
        wanted = microscaled.quantize_e2m1(x, of)
        found = by_isa(lambda x=x, of=of: ops.quantize_e2m1(x, of))
        agree(found)
        for codes, scales in found.values():
            assert torch.equal(scales, wanted[1]) and torch.equal(codes, wanted[0])


@pytest.mark.parametrize("quant_type", TYPES)
def test_the_op_has_the_numbers_of_the_reference(quant_type):
    torch.manual_seed(3)
    values = torch.randn(32 * 40) * torch.logspace(-8, 8, 40).repeat_interleave(32)
    for x in (values, values.bfloat16(), torch.randint(-28, 29, (333,)) / 4, torch.zeros(40)):
        whole = None if quant_type == "mxfp4" else x.abs().max().float() / 2688 + 1e-6
        codes, scales = ops.quantize_e2m1(x, ops.empty(x.device) if whole is None else whole)
        wanted, bytes_ = reference.quantize_e2m1(x, whole)
        assert torch.equal(codes, reference.pack(wanted, 1)) and torch.equal(scales, bytes_)


def nearest(value: float, scale: float) -> float:
    """The value of E2M1 that is nearest to value / scale; of two the one of the even code."""
    scaled = value / scale
    return min(range(16), key=lambda code: (abs(e2m1(code) - scaled), code % 2, (code >> 3) != (scaled < 0)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mxfp4_is_the_nearest(dtype):
    torch.manual_seed(0)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 6.9, 7.9, -0.25, -0.75, -5.0, 0.0, -0.1, 4.0])
    values = torch.cat([ties.repeat(2), torch.randn(7 * 32) * torch.logspace(-9, 4, 7).repeat_interleave(32)]).to(dtype)
    values[40] = 0.0
    packed, state = functional.quantize_mxfp4(values)
    codes = torch.stack([packed >> 4, packed & 15], -1).view(-1).tolist()
    for b, block in enumerate(values.float().view(-1, 32).tolist()):
        largest = max(map(abs, block))
        scale = 2.0 ** (math.floor(math.log2(largest)) - 2) if largest else 1.0
        assert e8m0(int(state.absmax[b])) == scale, b
        for i, value in enumerate(block):
            assert e2m1(codes[32 * b + i]) == e2m1(nearest(value, scale)), (b, i, value, scale)


@pytest.mark.parametrize("shape", [(64, 48), (3, 16, 32)])
def test_nvfp4_is_the_nearest(shape):
    """Scales that are nearest to a block's largest magnitude / 6, in units of the weight's own; experts have theirs."""
    torch.manual_seed(1)
    values = torch.randn(shape) * torch.logspace(-3, 1, shape[-2]).unsqueeze(1)
    values[0] *= 3
    one = kind_of("nvfp4")
    packed, state = (one.stack if len(shape) == 3 else one).quantize(values, quant_storage=torch.uint8)
    parts = shape[0] if len(shape) == 3 else 1
    codes = torch.stack([packed.view(-1) >> 4, packed.view(-1) & 15], -1).view(parts, -1, 16)
    bytes_, whole = state.absmax.view(parts, -1), state.state2.absmax.view(parts, -1)[:, 0]
    finite = SCALE["nvfp4"][1:127].double()
    for part, blocks in enumerate(values.view(parts, -1, 16)):
        assert whole[part] == 1 / (1 / (blocks.abs().max() / (6 * 448)))
        for b, block in enumerate(blocks):
            wanted = float(block.abs().max() / 6 / whole[part])
            found = e4m3(int(bytes_[part, b]))
            assert abs(found - wanted) <= (finite - wanted).abs().min() * (1 + 1e-6)
            scale = float(torch.tensor(found) * whole[part])
            for i, value in enumerate(block.tolist()):
                assert e2m1(int(codes[part, b, i])) == e2m1(nearest(value, scale)), (part, b, i)


def test_every_global_scale_has_a_divisor(device):
    """compressed-tensors' files have a float32 of which it is the rounded reciprocal; it is near to the quotient."""
    for exponent in (-100, -20, 0, 60):
        for step in range(64):
            largest = torch.full((16,), (1 + step / 64 + 0.003) * 2.0**exponent, device=device)
            whole = functional.quantize_nvfp4(largest)[1].state2.absmax[0].cpu()
            assert 1 / (1 / whole) == whole
            assert torch.allclose(whole, largest[0].cpu() / 2688, rtol=2.0**-22, atol=0)
    least = torch.full((16,), 1e-42, device=device)  # whose quotient has no reciprocal in float32
    packed, state = functional.quantize_nvfp4(torch.cat([least, -least]))
    assert state.state2.absmax[0] > 0 and functional.dequantize_4bit(packed, state).isfinite().all()


@pytest.mark.parametrize("quant_type", TYPES)
def test_zeros_and_what_is_no_number(quant_type):
    values = torch.zeros(64)
    packed, state = kind_of(quant_type).quantize(values, quant_storage=torch.uint8)
    assert torch.equal(functional.dequantize_4bit(packed, state), values)
    values[3], values[40] = math.nan, math.inf
    with pytest.raises(ValueError, match="2 of 64 values are infinite or NaN"):
        kind_of(quant_type).quantize(values, quant_storage=torch.uint8)
    values[3] = values[40] = 0.0
    with pytest.raises(ValueError, match="blocksize 64"):
        kind_of(quant_type).quantize(values, quant_storage=torch.uint8, blocksize=64)
    with pytest.raises(ValueError, match="float"):
        kind_of(quant_type).quantize(values.long(), quant_storage=torch.uint8)


def layer(quant_type, storage=torch.uint8, seed=0):
    torch.manual_seed(seed)
    return Linear4bit(K, N, quant_type=quant_type, quant_storage=storage).to("cpu")


@pytest.mark.parametrize("quant_type", TYPES)
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
def test_layers_and_files(quant_type, storage, tmp_path):
    made, other = layer(quant_type, storage), layer(quant_type, storage, seed=1)
    save_file(made.state_dict(), tmp_path / "w.safetensors")
    found = load_file(tmp_path / "w.safetensors")
    names = {"weight", "weight.absmax", f"weight.quant_state.bitsandbytes__{quant_type}", "bias"}
    assert set(found) == names | ({"weight.nested_absmax"} if quant_type == "nvfp4" else set())
    assert not same_bytes(other.weight.data, made.weight.data)
    other.load_state_dict(found)
    assert same_bytes(other.weight.data, made.weight.data) and other.quant_state == made.quant_state
    x = torch.randn(2, K)
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), other):
        assert torch.equal(copied(x), made(x)) and copied.quant_state.kind is kind_of(quant_type)
    values = functional.dequantize_4bit(made.weight, made.quant_state)
    assert torch.allclose(made(x), torch.nn.functional.linear(x, values, made.bias), atol=1e-5)


@pytest.mark.parametrize("quant_type", TYPES)
def test_a_stack_is_its_experts(quant_type):
    kind = kind_of(quant_type).stack
    values = torch.randn(3, 8, 48) * torch.tensor([1.0, 5, 0.1]).view(3, 1, 1)
    packed, state = kind.quantize(values, quant_storage=torch.uint8)
    for e in range(3):
        one, own = functional.expert_of(packed, state, e)
        alone, theirs = kind_of(quant_type).quantize(values[e], quant_storage=torch.uint8)
        assert same_bytes(one, alone) and own == theirs and own.kind is kind_of(quant_type)
        assert torch.equal(functional.dequantize_4bit(packed, state)[e], functional.dequantize_4bit(one, own))
    again = QuantState.from_dict(state.as_dict(packed=True), device="cpu")
    assert again == state and again.kind is kind
    with pytest.raises(ValueError, match="multiple of the"):
        kind.quantize(torch.randn(3, 8, 17)[:, :5, :5], quant_storage=torch.uint8)


BAD = [
    ("mxfp4", {"absmax": lambda t: t.index_fill(0, torch.tensor([1, 4]), 255)}, "2 of 72 scales of mxfp4 are NaN"),
    ("mxfp4", {"absmax": lambda t: t.index_fill(0, torch.tensor([1]), 253)}, r"2\^126.*byte 253, expected at most 252"),
    ("mxfp4", {"absmax": lambda t: t[1:]}, "71 entries, expected 72"),
    ("mxfp4", {"absmax": lambda t: t.float()}, "float32"),
    ("mxfp4", {"nested_absmax": lambda t: torch.ones(1)}, None),
    ("mxfp4", {"blocksize": lambda t: 16}, "blocksize is int 16, mxfp4 has 32"),
    ("mxfp4", {"layout": lambda t: "nvfp4"}, "layout"),
    ("mxfp4", {"layout": lambda t: None}, "layout"),
    ("nvfp4", {"absmax": lambda t: t.index_fill(0, torch.tensor([7]), 127)}, "1 of 144 scales of nvfp4 are NaN"),
    ("nvfp4", {"absmax": lambda t: t.index_fill(0, torch.tensor([7]), 129)}, "negative: byte 129"),
    ("nvfp4", {"nested_absmax": lambda t: t * 0}, "global scale is 0.0"),
    ("nvfp4", {"nested_absmax": lambda t: t * math.nan}, "global scale is nan"),
    ("nvfp4", {"nested_absmax": lambda t: t.repeat(2)}, "2 entries, expected 1"),
    ("nvfp4", {"shape": lambda t: (24, 97)}, "144 entries, expected 146"),
]


@pytest.mark.parametrize("quant_type, spoil, words", BAD)
def test_bad_entries(quant_type, spoil, words):
    given = layer(quant_type).quant_state.as_dict()
    assert QuantState.from_dict(given, device="cpu") == layer(quant_type).quant_state
    spoilt = {**given, **{name: change(given.get(name)) for name, change in spoil.items()}}
    spoilt = {name: value for name, value in spoilt.items() if value is not None}
    with pytest.raises((TypeError, ValueError), match=words or "nested_absmax"):
        QuantState.from_dict(spoilt, device="cpu")
