"""Weights in the form that `_convert_weight_packed_for_cpu` gives: functions take them, files and layers do not.

bitsandbytes converts only where the CPU multiplies bfloat16 (AVX512-BF16); here the form is the same on every machine.
"""

import bitsandbytes as bnb
import cases
import pytest
import torch
from bitshard import functional

N, K = 96, 256
convert = bnb.functional._convert_weight_packed_for_cpu


def quantized(quant_type="nf4", nested=False, blocksize=64, storage=torch.uint8):
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(3)) / 16
    return functional.quantize_4bit(w, None, None, blocksize, nested, quant_type, storage)


def with_rounded_scales(packed, state):
    """The weight as it was, with scales as converting rounds them: plain, to bfloat16."""
    rounded = state.clone()
    if state.nested:
        rounded.absmax = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
        rounded.nested, rounded.state2 = False, None
    rounded.absmax = rounded.absmax.bfloat16().float()
    rounded.dtype = torch.bfloat16
    return packed, rounded


def values(*shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("quant_type", cases.FORMATS)
@pytest.mark.parametrize("nested, blocksize, storage", [(False, 32, torch.uint8), (True, 128, torch.bfloat16)])
def test_what_was_converted_for_the_cpu_is_taken(quant_type, nested, blocksize, storage):
    """By gemv_4bit, matmul_4bit with bias and gradients, dequantize_4bit and the operator: the bits of plain scales."""
    plain = with_rounded_scales(*quantized(quant_type, nested, blocksize, storage))
    packed, state = convert(*quantized(quant_type, nested, blocksize, storage))
    assert packed.shape == (N, K // 2) and state.absmax.dtype is torch.bfloat16
    assert torch.equal(functional.dequantize_4bit(packed, state), functional.dequantize_4bit(*plain))
    for dtype in cases.DTYPES:
        x, bias = values(2, 3, K, dtype=dtype).requires_grad_(), values(N, dtype=dtype).requires_grad_()
        expected = functional.gemv_4bit(x, plain[0], state=plain[1])
        for given in (packed, packed.t()):
            assert torch.equal(functional.gemv_4bit(x, given, state=state), expected)
        code = functional.get_4bit_type(quant_type, device="cpu")
        gemv = torch.ops.bitsandbytes.gemv_4bit(x.detach(), packed, [N, K], state.absmax, code, blocksize)
        assert torch.equal(gemv, expected)
        found, wanted = (bnb.matmul_4bit(x, *weight, bias=bias) for weight in ((packed, state), plain))
        dy = values(2, 3, N, dtype=dtype)
        gradients = [torch.autograd.grad(y, (x, bias), dy) for y in (found, wanted)]
        assert torch.equal(found, wanted) and all(map(torch.equal, *gradients))


def test_converting_changes_what_it_was_given_and_nothing_else_does():
    packed, state = convert(*quantized())
    before = packed.clone(), state.absmax.clone()
    functional.gemv_4bit(torch.ones(1, K), packed, state=state)
    assert torch.equal(packed, before[0]) and torch.equal(state.absmax, before[1]) and state.packing_format_for_cpu


def test_compiled_programs_take_what_was_converted():
    packed, state = convert(*quantized())
    x = values(2, K, dtype=torch.bfloat16)
    compiled = torch.compile(lambda x: bnb.matmul_4bit(x, packed, state), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), bnb.matmul_4bit(x, packed, state))


def test_what_is_not_of_this_form_raises():
    packed, state = convert(*quantized())
    x = torch.ones(1, K)
    with pytest.raises(ValueError, match=r"\[96, 256\].*12287 bytes"):
        functional.gemv_4bit(x, packed.view(-1)[1:], state=state)
    with pytest.raises(ValueError, match="uint8, not torch.int8"):
        functional.gemv_4bit(x, packed.view(torch.int8), state=state)
    state.absmax = state.absmax.t().contiguous()
    with pytest.raises(ValueError, match=r"scales of shape \[96, 4\]"):
        functional.dequantize_4bit(packed, state)
    state.absmax = state.absmax.view(-1)
    with pytest.raises(TypeError, match="absmax is torch.bfloat16, expected float32"):
        functional.dequantize_4bit(packed, state)
    for rows in (16, 96):
        with pytest.raises(ValueError, match=f"groups of {rows} rows"):
            convert(*quantized(), block_n=rows)


def test_it_is_not_saved():
    """Loaded again, its scales would be refused: converting back is said to be needed."""
    _, state = convert(*quantized())
    with pytest.raises(ValueError, match=r"\[96, 256\].*_convert_weight_packed_for_cpu_inverse"):
        state.as_dict(packed=True)


def test_layers_refuse_it():
    layer = bnb.nn.LinearNF4(K, N).to("cpu")
    layer.weight.data, layer.weight.quant_state = convert(layer.weight.data, layer.weight.quant_state)
    with pytest.raises(ValueError, match="other bytes"):
        layer(torch.ones(1, K))
