"""A kind of weight that bitshard does not have: blocks of 16, a table of its own, E4M3 scales and one for all of them.

It is written from `docs/contributing.md` and touches nothing of bitshard but the list of kinds.
"""

import torch
from bitshard.formats import entries, kinds
from bitshard.formats.state import QuantState

TABLE = torch.tensor([-8.0, -6, -4, -3, -2, -1, -0.5, -0.25, 0, 0.25, 0.5, 1, 2, 3, 5, 7])
BLOCK = 16


def scales_of(state):
    """float32 [blocks]: what the codes of each block are multiplied by."""
    return state.absmax.view(torch.float8_e4m3fn).float() * state.global_scale


def quantize(values, blocksize, quant_storage, **_):
    rows = values.detach().float().reshape(-1, BLOCK)
    largest = rows.abs().amax(1) / TABLE.abs().max()
    whole = (largest.max() / 448).clamp(min=1e-30).reshape(1)
    absmax = (largest / whole).to(torch.float8_e4m3fn).view(torch.uint8)
    state = QuantState(absmax, values.shape, TABLE.clone(), BLOCK, "tenths", values.dtype)
    state.kind, state.global_scale = TENTHS, whole
    scaled = rows / scales_of(state).clamp(min=1e-30).unsqueeze(1)
    codes = (scaled.unsqueeze(-1) - TABLE.to(scaled.device)).abs().argmin(-1).to(torch.uint8).view(-1, 2)
    packed = codes[:, 0] | codes[:, 1] << 4
    unit = quant_storage.itemsize
    packed = torch.nn.functional.pad(packed, (0, -packed.numel() % unit))
    return packed.view(quant_storage).view(-1, 1), state


def dequantize(packed, state, out=None):
    data = packed.detach().as_subclass(torch.Tensor).reshape(-1).view(torch.uint8)[: state.shape.numel() // 2]
    codes = torch.stack([data & 15, data >> 4], 1).view(-1, BLOCK).long()
    values = (TABLE.to(codes.device)[codes] * scales_of(state).unsqueeze(1)).to(state.dtype).view(state.shape)
    return values if out is None else out.copy_(values)


class Tenths(kinds.Kind):
    word, name, bits = "4-bit", "tenths", 4
    quant_types, blocksize, blocksizes = ("tenths",), BLOCK, (BLOCK,)
    own_keys = ("global_scale",)
    by_blocks = False  # the scale of all blocks is the whole weight's

    def read(self, cls, given):
        shape = entries.read_shape(given)
        blocks = -(-shape.numel() // BLOCK)
        absmax = entries.vector(given, "absmax", (torch.uint8,), blocks, "a scale for 16")
        whole = entries.vector(given, "global_scale", (torch.float32,), 1, "the scale of all blocks")
        entries.check_scales(whole, "global_scale", signed=False)
        code = entries.code_map(given, "quant_map", TABLE)
        state = cls(absmax.contiguous(), shape, code, BLOCK, "tenths", entries.value_dtype(given, "dtype"))
        state.kind, state.global_scale = self, whole
        return state

    quantize = staticmethod(quantize)
    dequantize = staticmethod(dequantize)

    @staticmethod
    def product(x, packed, state, bias, offs, threshold):
        return torch.nn.functional.linear(x, dequantize(packed, state).to(x.dtype), bias)

    @staticmethod
    def gradient(dy, packed, state, offs):
        return dy @ dequantize(packed, state).to(dy.dtype)


TENTHS = Tenths()
kinds.register(TENTHS)
