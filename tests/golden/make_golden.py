"""Writes golden.npz: bytes that upstream bitsandbytes' CUDA backend makes, for tests to compare with.

Run on a GPU with upstream bitsandbytes importable (PYTHONPATH=FOLDER_OF_UPSTREAM python make_golden.py OUT.npz).
16- and 32-bit floats are stored as their bits. Keys:
  x/<dtype>/<input>                        the input, flat
  4bit/<dtype>/<input>/<format>/<blocksize>/{packed,absmax,out}
  nested/<dtype>/<input>/<format>/<blocksize>/{code,absmax2,offset,out}     same packed bytes as 4bit/...
  8bit/<dtype>/<input>/<blocksize>/{code,absmax,out}                        the dynamic map
  map/dynamic, map/nf4, map/fp4            tables as upstream holds them; meta: versions and GPU
"""

import json
import os
import sys

os.environ["BITSHARD_PLUGIN"] = "0"  # an original bitsandbytes runs its own kernels

import bitsandbytes as bnb
import bitsandbytes.functional as F
import numpy as np
import torch

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def hostile(dtype: torch.dtype) -> torch.Tensor:
    """Blocks of 64: zeros, denormals, inf, NaN, both infs, largest values, near-ties, signed zeros, a lone spike."""
    info = torch.finfo(dtype)
    ramp = torch.linspace(-1, 1, 64)
    thresholds = torch.arange(64).float().sub(32).div(32)
    rows = [
        torch.zeros(64),
        torch.full((64,), -0.0),
        ramp * info.tiny * 0.25,
        ramp * info.smallest_normal,
        ramp.clone().index_fill(0, torch.tensor(5), float("inf")),
        ramp.clone().index_fill(0, torch.tensor(7), float("nan")),
        torch.full((64,), float("nan")),
        ramp.clone().index_fill(0, torch.tensor(3), float("inf")).index_fill(0, torch.tensor(9), float("-inf")),
        ramp * info.max,
        thresholds,
        thresholds * (5 / 12),
        thresholds * (5 / 6),
        torch.full((64,), -1e-6).index_fill(0, torch.tensor(0), 1.0),
        torch.zeros(64).index_fill(0, torch.tensor(11), 1e-3),
        ramp.abs() * info.tiny * 4,
        -ramp.abs(),
    ]
    return torch.cat(rows).to(dtype)


def inputs(dtype: torch.dtype, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random tensors of odd and tiny sizes, weights of usual spread, wide magnitudes, and the hostile blocks."""
    made = {f"n{n}": torch.randn(n, generator=generator) * 0.02 for n in (1, 2, 3, 31, 63, 64, 65, 127, 129, 1001)}
    made["n4113"] = torch.randn(4113, generator=generator)
    made["n20000"] = torch.randn(20000, generator=generator) * 0.05
    made["wide"] = torch.randn(2048, generator=generator) * torch.exp(torch.randn(2048, generator=generator) * 4)
    made = {name: x.to(dtype) for name, x in made.items()}
    made["hostile"] = hostile(dtype)
    return made


def bits(x: torch.Tensor) -> np.ndarray:
    x = x.detach().cpu().contiguous()
    views = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
    array = (x.view(views[x.dtype]) if x.dtype in views else x).numpy()
    return array.view({4: np.uint32, 2: np.uint16, 1: np.uint8}[array.itemsize])


def main(path: str) -> None:
    out: dict[str, np.ndarray] = {}
    generator = torch.Generator().manual_seed(20261121)
    skipped = []
    for dtype_name, dtype in DTYPES.items():
        for name, x in inputs(dtype, generator).items():
            out[f"x/{dtype_name}/{name}"] = bits(x)
            x = x.cuda()
            for blocksize in BLOCKSIZES:
                if name == "n20000" and blocksize not in (64, 256, 4096):
                    continue
                for fmt in ("nf4", "fp4"):
                    key = f"{dtype_name}/{name}/{fmt}/{blocksize}"
                    try:
                        packed, state = F.quantize_4bit(x, blocksize=blocksize, quant_type=fmt)
                    except Exception as error:
                        skipped.append(f"4bit/{key}: {error}")
                        continue
                    out[f"4bit/{key}/packed"] = bits(packed.flatten())
                    out[f"4bit/{key}/absmax"] = bits(state.absmax)
                    out[f"4bit/{key}/out"] = bits(F.dequantize_4bit(packed, state).flatten())
                    nested_packed, nested = F.quantize_4bit(
                        x, blocksize=blocksize, quant_type=fmt, compress_statistics=True
                    )
                    assert torch.equal(nested_packed, packed), key
                    out[f"nested/{key}/code"] = bits(nested.absmax)
                    out[f"nested/{key}/absmax2"] = bits(nested.state2.absmax)
                    out[f"nested/{key}/offset"] = bits(nested.offset.reshape(1).float())
                    out[f"nested/{key}/out"] = bits(F.dequantize_4bit(packed, nested).flatten())
                if blocksize >= 64:
                    code, state = F.quantize_blockwise(x, blocksize=blocksize)
                    key = f"8bit/{dtype_name}/{name}/{blocksize}"
                    out[f"{key}/code"] = bits(code.flatten())
                    out[f"{key}/absmax"] = bits(state.absmax)
                    out[f"{key}/out"] = bits(F.dequantize_blockwise(code, state).flatten().to(dtype))
    out["map/dynamic"] = bits(F.create_dynamic_map().float())
    out["map/nf4"] = bits(F.get_4bit_type("nf4", device="cpu").float())
    out["map/fp4"] = bits(F.get_4bit_type("fp4", device="cpu").float())
    meta = {
        "bitsandbytes": bnb.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "skipped": skipped,
    }
    out["meta"] = np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8)
    np.savez_compressed(path, **out)
    print(json.dumps({**meta, "skipped": len(skipped), "first": skipped[:2], "arrays": len(out)}))


if __name__ == "__main__":
    main(sys.argv[1])
