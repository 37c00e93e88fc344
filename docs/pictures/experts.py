"""Draw where the bytes of a 4-bit stack of experts are: experts.svg, the picture of docs/experts.md.

    python docs/pictures/experts.py

From top to bottom: the module and its two stacks; one stack as one column of bytes, expert after expert, with its
scales; what each of two ranks keeps of it; which rows of x an expert multiplies.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.patches import Rectangle  # noqa: E402

EXPERTS, WIDTH = 6, 8.0
COLORS = [f"C{i}" for i in range(EXPERTS)]
ROWS = (3, 1, 0, 4, 2, 2)  # of x, by expert


def strip(axes, y: float, height: float, parts: list[float], texts: list[str], label: str) -> None:
    """A row of boxes from x = 0 to WIDTH, one for each expert, named at its left."""
    x, total = 0.0, sum(parts)
    for part, text, color in zip(parts, texts, COLORS, strict=True):
        width = WIDTH * part / total
        axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor="white", linewidth=1.5))
        if part:
            axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color="white", fontsize=8)
        x += width
    axes.text(-0.15, y + height / 2, label, ha="right", va="center")


def draw(file: Path) -> None:
    """The four rows."""
    settings = {"svg.fonttype": "none", "svg.hashsalt": "experts", "font.family": "sans-serif", "font.size": 10}
    matplotlib.rcParams |= settings
    figure, axes = pyplot.subplots(figsize=(8.4, 4.1), layout="constrained")
    even = [1.0] * EXPERTS
    axes.text(0, 6.35, "mlp.experts (transformers' class)", weight="bold")
    for x, name in ((0.0, "gate_up_proj  Params4bit [n, 1]"), (4.1, "down_proj  Params4bit [n, 1]")):
        axes.add_patch(Rectangle((x, 5.6), 3.9, 0.55, facecolor="0.88", edgecolor="0.5"))
        axes.text(x + 1.95, 5.87, name, ha="center", va="center")
    strip(axes, 4.4, 0.6, even, ["0: N K / 2 bytes" if e == 0 else f"{e}" for e in range(EXPERTS)], "codes")
    strip(axes, 3.75, 0.35, even, ["N K / 64, own offset"] + [""] * (EXPERTS - 1), "scales")
    half = WIDTH / 2
    for rank in (0, 1):
        axes.add_patch(Rectangle((rank * half + 0.03, 2.65), half - 0.06, 0.55, facecolor="0.88", edgecolor="0.5"))
        axes.text(rank * half + half / 2, 2.92, f"rank {rank} keeps these, and their scales", ha="center", va="center")
    axes.text(-0.15, 2.92, "FSDP2", ha="right", va="center")
    axes.plot([half, half], [2.55, 5.1], color="0.3", linestyle="--", linewidth=1)
    strip(axes, 1.3, 0.5, list(map(float, ROWS)), [f"{rows} rows" for rows in ROWS], "x, sorted")
    x = 0.0
    for expert, rows in enumerate(ROWS):
        x += WIDTH * rows / sum(ROWS)
        axes.text(x, 0.98, f"offs[{expert}]", ha="center", fontsize=7, color="0.3") if rows else None
    axes.text(0, 0.4, "one grouped product: the rows of an expert times its W; expert 2 has none and costs nothing")
    axes.set(xlim=(-1.2, WIDTH + 0.3), ylim=(0.2, 6.8))
    axes.axis("off")
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".svg"))
