"""Draw what each of two GPUs holds of a 4-bit 70B model under FSDP2: two_gpus.svg, the picture of the README.

    python docs/pictures/two_gpus.py

Sizes follow from Llama-3-70B's shape, nested NF4 at blocksize 64, embeddings and head in bfloat16. What is loaded and
kept was seen on GPUs at the 8B shape (benchmarks/results/loading_2xh200_202611.md), bitshard's 18.4 GiB at this one
(llama70b_2xh200_202611.md, through a DistributedConfig); that accelerate leaves a uint8 base whole is its rule for
weights that are no floats.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

GIB = 2**30
LAYER = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672  # weights of a decoder layer's seven linears
BASE = 80 * LAYER * (1 / 2 + 1 / 64 + 4 / 64 / 256) / GIB  # codes, 8-bit scales, their fp32 scales
DENSE = 2 * 128256 * 8192 * 2 / GIB  # embeddings and head
CARD = 23.5  # what a card sold as 24 GB leaves
WHOLE, HALF = BASE + DENSE, (BASE + DENSE) / 2
# name, GiB on each GPU at the peak of loading, GiB that it keeps, what becomes of the bytes
WAYS = (
    ("bitsandbytes\ndefault storage", WHOLE, BASE + DENSE / 2, "base whole on every GPU"),
    (
        "bitsandbytes\nquant_storage=bfloat16",
        WHOLE,
        HALF,
        "sharded; mixed precision can\nrewrite packed bytes, silently",
    ),
    ("bitshard\nany storage", HALF, HALF, "sharded from the first byte read,\nexact or an error"),
)


def draw(file: Path) -> None:
    """Two bars for each way: hatched up to the peak of loading, filled up to what stays."""
    matplotlib.rcParams |= {
        "svg.fonttype": "none",
        "svg.hashsalt": "two_gpus",
        "font.family": "sans-serif",
        "font.size": 10,
    }
    figure, axes = pyplot.subplots(figsize=(8.4, 3.9), layout="constrained")
    for way, (name, loading, kept, fate) in enumerate(WAYS):
        color = "C0" if name.startswith("bitshard") else "0.55"
        for gpu in (0, 1):
            x = 3 * way + 1.05 * gpu
            if loading > kept:
                axes.bar(x, loading, color="white", edgecolor=color, hatch="///", linewidth=1)
            axes.bar(x, kept, color=color)
            axes.text(x, 1, f"GPU {gpu}", ha="center", color="white")
            axes.text(x, kept - 2.4, f"{kept:.1f}", ha="center", color="white", weight="bold")
            if loading > kept:
                axes.text(x, loading + 0.6, f"{loading:.1f} to load", ha="center")
        axes.text(3 * way + 0.52, -2.2, name, ha="center", va="top", weight="bold")
        axes.text(3 * way + 0.52, -8.6, fate, ha="center", va="top", color="0.3")
    axes.axhline(CARD, color="C3", linewidth=1.2, linestyle="--")
    axes.text(8.0, CARD + 0.5, "a 24 GB card", color="C3", ha="right")
    axes.set(ylim=(0, 41), xlim=(-0.8, 8.0), xticks=[], ylabel="GiB on each GPU")
    axes.set_title("Llama-3-70B in 4 bits under FSDP2 on two GPUs", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".svg"))
