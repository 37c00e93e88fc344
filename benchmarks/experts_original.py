"""4-bit experts beside those of the original bitsandbytes: the whole experts forward of one layer on a GPU.

    python benchmarks/experts_original.py [--shapes ...] [--tokens 1,64,4096] [--out FILE]

The original's `nn.parametrize.replace_parameter_4bit` decodes a whole stack each time that the module asks for it, and
torch's `grouped_mm` multiplies. It is imported from the path, which has its package with libbitsandbytes_cuda130.so
before bitshard's own `bitsandbytes`. Modules, routing and time as in experts_forward.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import timing
import torch
from bench_int8 import original
from bitshard import _C, experts
from experts import SHAPES
from experts_forward import cells_of, module, times

STACKS = ("gate_up_proj", "down_proj")


def parametrized(bnb, made: torch.nn.Module) -> torch.nn.Module:
    """The module with stacks of the original: nested NF4 in blocks of 64."""
    for name in STACKS:
        bnb.nn.parametrize.replace_parameter_4bit(made, name, compress_statistics=True, quant_type="nf4", blocksize=64)
    return made


def main() -> None:
    """Print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="1,64,4096")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    bnb, rows, cells = original(), [], cells_of(options.tokens)
    if bnb is None:
        parser.error("no original bitsandbytes with a CUDA library on the path")
    torch.manual_seed(0)
    for name in options.shapes.split(","):
        theirs = parametrized(bnb, module(name))
        found = [times(theirs, name, *cell) for cell in cells]
        del theirs
        torch.cuda.empty_cache()
        ours = module(name)
        experts.quantize(ours, quant_type="nf4", compress_statistics=True)
        for (tokens, skewed), slow in zip(cells, found, strict=True):
            fast = times(ours, name, tokens, skewed)
            how = "skewed" if skewed else "uniform"
            rows.append([name, str(tokens), how, f"{slow:.0f}", f"{fast:.0f}", f"{slow / fast:.1f}"])
            print(" | ".join(rows[-1]), flush=True)
        del ours
        torch.cuda.empty_cache()
    versions = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, kernels {_C.cuda_state()['architectures']}"
    header = ["shape", "tokens", "routing", f"bitsandbytes {bnb.__version__} us", "bitshard us", "speed"]
    text = f"{versions}, commit {timing.commit('python', 'csrc', 'cuda')}\n\n{timing.markdown_table(header, rows)}\n"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
