"""The whole experts forward of one layer on a GPU: 4-bit stacks against 16-bit ones with torch's `grouped_mm`.

    python benchmarks/experts_forward.py [--shapes ...] [--tokens 1,64,4096] [--original] [--out FILE]

The experts modules of transformers with the same routing, gate and sum over the chosen experts included; Mixtral's and
DeepSeek-V3's shapes in Qwen3-MoE's module, beside each other on the GPU. Time and routing as in experts.py. --original:
also bitsandbytes' `nn.parametrize.replace_parameter_4bit`, which decodes a whole stack whenever the module asks for it,
for `grouped_mm`. It is imported from the path: its package with libbitsandbytes_cuda130.so before bitshard's own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from bench_int8 import original
from bitshard import experts
from experts import DEVICE, DTYPE, SHAPES, TURNS, write
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from turns import microseconds


def module(name: str) -> torch.nn.Module:
    """The experts module of a shape in bf16, random."""
    count, chosen, hidden, intermediate = SHAPES[name]
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_experts_per_tok": chosen}
    torch.set_default_dtype(DTYPE)
    with torch.device(DEVICE):
        if name.startswith("gpt-oss"):
            made = GptOssExperts(GptOssConfig(**sizes, num_local_experts=count))
        else:
            made = Qwen3MoeExperts(Qwen3MoeConfig(**sizes, moe_intermediate_size=intermediate, num_experts=count))
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            for expert in parameter:
                expert.normal_(0, 0.02)
    made.config._experts_implementation = "grouped_mm"
    return made


def chosen_of(name: str, tokens: int, skewed: bool, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts of each token, what they count)."""
    count, chosen = SHAPES[name][:2]
    generator = torch.Generator().manual_seed(seed)
    weights = 1 / torch.arange(1, count + 1).float() if skewed else torch.ones(count)
    weights = weights[torch.randperm(count, generator=generator)]
    picked = torch.multinomial(weights.expand(tokens, -1), chosen, generator=generator)
    return picked.to(DEVICE), torch.full(picked.shape, 1 / chosen, device=DEVICE, dtype=DTYPE)


@torch.no_grad()
def times(modules: dict[str, torch.nn.Module], name: str, tokens: int, skewed: bool) -> dict[str, float]:
    """Microseconds of a forward of each."""
    calls = 8 if tokens <= 512 else 2
    routings = [chosen_of(name, tokens, skewed, seed) for seed in range(calls)]
    x = torch.randn(tokens, SHAPES[name][2], device=DEVICE, dtype=DTYPE)
    return microseconds(
        {k: lambda i, m=m: m(x, *routings[i % calls]) for k, m in modules.items()}, routine=calls, turns=TURNS
    )


def contestants(name: str, bnb) -> dict[str, torch.nn.Module]:
    """{whose: module} on the GPU; 4-bit ones in nested NF4, blocks of 64."""
    found = {"16-bit": module(name), "bitshard": module(name)}
    experts.quantize(found["bitshard"], quant_type="nf4", compress_statistics=True)
    if bnb is not None:
        from bitsandbytes.nn.parametrize import replace_parameter_4bit

        found["bitsandbytes"] = module(name)
        for stack in ("gate_up_proj", "down_proj"):
            replace_parameter_4bit(found["bitsandbytes"], stack, True, "nf4", 64)
    return found


def cells_of(tokens: str) -> list[tuple[int, bool]]:
    """[(tokens, skewed)] of numbers with commas; one token has no skew."""
    cells = [(int(count), skewed) for count in tokens.split(",") for skewed in (False, True)]
    return [cell for cell in cells if cell != (1, True)]


def main() -> None:
    """Print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="1,64,4096")
    parser.add_argument("--original", action="store_true", help="bitsandbytes' parametrization, too")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    bnb = original() if options.original else None
    if options.original and bnb is None:
        parser.error("no original bitsandbytes on the path")
    cells, rows = cells_of(options.tokens), []
    for name in options.shapes.split(","):
        modules = contestants(name, bnb)
        for tokens, skewed in cells:
            found = times(modules, name, tokens, skewed)
            mine = found.pop("bitshard")
            cells_of_row = [f"{us:.1f}" for us in (*found.values(), mine)] + [
                f"{us / mine:.2f}" for us in found.values()
            ]
            rows.append([name, str(tokens), "skewed" if skewed else "uniform", *cells_of_row])
            print(" | ".join(rows[-1]), flush=True)
        del modules
        torch.cuda.empty_cache()
    others = ["16-bit", *([f"bitsandbytes {bnb.__version__}"] if bnb else [])]
    header = ["shape", "tokens", "routing", *(f"{name} us" for name in (*others, "bitshard"))]
    header += [f"speed of {name}" for name in others]
    write(header, rows, options.out)


if __name__ == "__main__":
    main()
