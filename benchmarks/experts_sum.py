"""Memory of QLoRA of a mixture of experts on one GPU of N, on paper, part by part.

    python benchmarks/experts_sum.py [--model NAME] [--ranks 1] [--tokens 2048] [--rank 8] [--lora-dtype bfloat16]

Base in nested NF4 in blocks of 64, experts among it; embeddings, head, norms and routers in bf16; adapters on attention
and experts; optimizer with 8-bit states; gradient checkpointing of decoder layers. Under FSDP2 all but what a forward
needs of one layer is a Nth. docs/experts.md shows the tables.
"""

import argparse
from typing import NamedTuple

GIB = 2**30
PANELS = 256 << 20  # bound of the decoded experts (bitshard.grouped.WORKSPACE)


class Shape(NamedTuple):
    """Sizes that a model's published config has."""

    layers: int
    hidden: int
    experts: int
    chosen: int  # experts of a token
    intermediate: int  # of an expert
    queries: int  # attention heads times their size
    keys: int  # heads of keys and values times their size
    vocabulary: int


MODELS = {
    "Qwen3-30B-A3B": Shape(48, 2048, 128, 8, 768, 32 * 128, 4 * 128, 151936),
    "gpt-oss-120b": Shape(36, 2880, 128, 4, 2880, 64 * 64, 8 * 64, 201088),
}


def packed(elements: float) -> float:
    """Bytes of 4-bit codes, of a byte per block of 64 and of a float32 per 256 blocks."""
    return elements * (1 / 2 + 1 / 64 + 4 / 64 / 256)


def parts(shape: Shape, ranks: int, tokens: int, rank: int, lora_bytes: int) -> dict[str, tuple[float, str]]:
    """{part: (bytes on one GPU at the peak of a step, how they are counted)}."""
    L, H, E, k, I, Q, K, V = shape  # noqa: E741, as the tables name it
    stacks = E * 3 * I * H
    attention = 2 * Q * H + 2 * K * H
    adapted = E * rank * ((H + 2 * I) + (I + H)) + rank * (2 * (Q + H) + 2 * (K + H))
    layer = packed(stacks + attention) + adapted * lora_bytes
    rows = tokens * k
    found = {
        "experts, 4-bit": (L * packed(stacks) / ranks, "L E 3 I H, 0.516 bytes each"),
        "attention, 4-bit": (L * packed(attention) / ranks, "L (2 Q + 2 K) H, 0.516 bytes each"),
        "embeddings and head": (2 * V * H * 2 / ranks, "2 V H, 2 bytes each"),
        "routers and norms": (L * (E * H + 2 * H) * 2 / ranks, "L (E + 2) H, 2 bytes each"),
        "adapters": (L * adapted * lora_bytes / ranks, f"r = {rank}, {lora_bytes} bytes each"),
        "their gradients": (L * adapted * lora_bytes / ranks, "as many bytes"),
        "8-bit states of the optimizer": (L * adapted * 2 * (1 + 4 / 256) / ranks, "two bytes and scales each"),
        "inputs of the layers": (L * tokens * H * 2, "L T H, 2 bytes each: what checkpointing keeps"),
        "one layer in backward": (
            rows * (2 * H + 6 * I + 2 * H) * 2 + tokens * (6 * H + 2 * Q + 2 * K) * 2,
            "about T k (4 H + 6 I) and T (6 H + 2 Q + 2 K), 2 bytes each",
        ),
        "decoded experts": (float(PANELS), "bound of the panels; none on Hopper, whose kernels decode"),
        "logits": (tokens * V * 14, "T V, 14 bytes each in backward"),
    }
    if ranks > 1:
        found["a gathered layer"] = (layer, "packed bytes, scales and adapters of one layer")
    return found


def table(name: str, options: argparse.Namespace) -> str:
    """The parts of a model as a Markdown table. The logits are gone before the gradients are there."""
    lora_bytes = {"bfloat16": 2, "float32": 4}[options.lora_dtype]
    found = parts(MODELS[name], options.ranks, options.tokens, options.rank, lora_bytes)
    backward = ("their gradients", "one layer in backward", "decoded experts")  # behind the logits, which are gone then
    total = sum(size for part, (size, _) in found.items() if part not in (*backward, "logits"))
    total += max(sum(found[part][0] for part in backward), found["logits"][0])
    cards = f"{options.ranks} GPU{'' if options.ranks == 1 else 's'}"
    lines = [f"| {name}, {cards}, 1 x {options.tokens} tokens | GiB | counted as |", "|---|---|---|"]
    lines += [f"| {part} | {size / GIB:.2f} | {how} |" for part, (size, how) in found.items()]
    lines.append(
        f"| **peak** | **{total / GIB:.2f}** | the sum, with the larger of the logits and of what backward has |"
    )
    return "\n".join(lines)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="default: each, Qwen3-30B-A3B on 1 GPU, gpt-oss-120b on 2")
    parser.add_argument("--ranks", type=int, help="GPUs")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--lora-dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    given = options.ranks
    for name in [options.model] if options.model else MODELS:
        options.ranks = given or (2 if name == "gpt-oss-120b" else 1)
        print(table(name, options), end="\n\n")


if __name__ == "__main__":
    main()
