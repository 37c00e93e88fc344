"""Run by test_cuda.py: compares the ops with upstream bitsandbytes' CUDA library, byte for byte, in one process.

Usage: PYTHONPATH=FOLDER_OF_UPSTREAM python tests/original/cuda_upstream.py SEED
Prints what differs, and "compared C results: W wrong" last. Upstream must come before the façade on the path.
"""

import sys

import bitsandbytes.functional as F
import torch
from bitshard import ops
from torch import Tensor

BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


class Comparison:
    def __init__(self):
        self.compared = self.wrong = 0

    def __call__(self, name: str, ours: Tensor, theirs: Tensor) -> None:
        view = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[ours.itemsize]
        assert ours.dtype == theirs.dtype and ours.numel() == theirs.numel(), name
        ours, theirs = (t.contiguous().flatten().view(view) for t in (ours, theirs))
        different = int((ours != theirs).sum())
        self.compared += 1
        self.wrong += different > 0
        if different:
            print(f"{name}: {different} of {ours.numel()} differ")


def compare_4bit(compare: Comparison, x: Tensor, map: Tensor, quant_type: str, blocksize: int) -> None:
    name, format = f"{x.dtype} {quant_type} {blocksize}", ops.FORMATS[quant_type]
    theirs, state = F.quantize_4bit(x, blocksize=blocksize, quant_type=quant_type, compress_statistics=True)
    packed, absmax = ops.quantize_4bit(x, blocksize, format, torch.uint8)
    offset = absmax.mean()
    code, absmax2 = ops.quantize_blockwise(absmax, map, offset, 256)
    compare(f"{name} packed", packed, theirs)
    compare(f"{name} offset", offset, state.offset)
    compare(f"{name} scale codes", code, state.absmax)
    compare(f"{name} second scales", absmax2, state.state2.absmax)
    out = ops.dequantize_4bit(packed, code, map, absmax2, offset, blocksize, format, *x.shape, x.dtype)
    compare(f"{name} decoded", out, F.dequantize_4bit(theirs, state))


def compare_8bit(compare: Comparison, x: Tensor, map: Tensor, blocksize: int) -> None:
    none, name = ops.empty(x.device), f"{x.dtype} 8-bit {blocksize}"
    theirs, state = F.quantize_blockwise(x, blocksize=blocksize)
    code, absmax = ops.quantize_blockwise(x, map, none, blocksize)
    compare(f"{name} codes", code, theirs)
    compare(f"{name} scales", absmax, state.absmax)
    decoded = ops.dequantize_blockwise(code, absmax, map, none, blocksize, x.dtype)
    compare(f"{name} decoded", decoded, F.dequantize_blockwise(theirs, state))


def main(seed: int) -> None:
    torch.manual_seed(seed)
    rows, columns = 4099, 4103
    compare, map = Comparison(), ops.table("dynamic").cuda()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        spread = torch.randn(rows, 1, device="cuda").exp()
        x = (torch.randn(rows, columns, device="cuda") * spread).to(dtype)
        for quant_type in ("nf4", "fp4"):
            for blocksize in BLOCKSIZES:
                compare_4bit(compare, x, map, quant_type, blocksize)
        for blocksize in (64, 256, 4096):
            compare_8bit(compare, x, map, blocksize)
    print(f"compared {compare.compared} results: {compare.wrong} wrong")


if __name__ == "__main__":
    main(int(sys.argv[1]))
