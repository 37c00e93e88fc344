"""Cells of the matrix with int8 weights: blocks like those of common.py around a `Linear8bitLt`."""

import torch
from bitshard.nn.linear8bit import Linear8bitLt
from bitshard.tensor import Params4bit
from common import BASE_DTYPE
from torch import nn


def hostile_values(n, k, dtype, seed):
    """[n, k] whose int8 codes are random bytes, with runs of -1 and 0x7F81 at the start; the scales of rows differ."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (n, k), generator=generator)
    codes[0, :8], codes[1, :8] = -1, torch.tensor([-127, 127] * 4)
    codes[:, k - 1] = 127  # the largest of each row, so that quantizing gives these codes again
    scales = torch.pow(2.0, torch.randint(-3, 4, (n, 1), generator=generator)) * 127
    return (codes * scales / 127).to(dtype)


class Block(nn.Module):
    """An int8 linear whose weight was of `dtype`, with a small trainable branch beside it, as LoRA makes it."""

    def __init__(self, n, k, dtype, device, seed):
        super().__init__()
        self.base = Linear8bitLt(k, n, bias=False, has_fp16_weights=False).to(dtype)
        self.base.load_state_dict({"weight": hostile_values(n, k, dtype, seed)})
        self.base.to(device)
        assert type(self.base.weight) is Params4bit and self.base.weight.dtype is dtype
        generator = torch.Generator().manual_seed(seed + 1)
        self.down = nn.Parameter(torch.randn(k, 4, generator=generator).to(device, BASE_DTYPE) * 0.1)
        self.up = nn.Parameter(torch.randn(4, n, generator=generator).to(device, BASE_DTYPE) * 0.1)

    def forward(self, x):
        return self.base(x) + (x.to(self.down.dtype) @ self.down @ self.up).to(x.dtype)


def build(shape, dtype, device):
    """Two blocks of opposite shapes, so that the second takes what the first gives."""
    n, k = shape
    return nn.Sequential(Block(n, k, dtype, device, 0), Block(k, n, dtype, device, 1))
