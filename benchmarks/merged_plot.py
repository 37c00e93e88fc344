"""The table of benchmarks/merged.py as a picture: gain kept of each way to serve an adapter, by text.

python benchmarks/merged_plot.py benchmarks/results/merged_h100_202611.md docs/pictures/merging.svg
"""

import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402


def main(table: Path, picture: Path) -> None:
    """Draw it."""
    matplotlib.rcParams["svg.hashsalt"] = "bitshard"
    kept: dict[str, dict[str, float]] = {}
    for line in re.findall(r"^\| (.*?) *\|$", table.read_text(), re.MULTILINE):
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 6 and re.fullmatch(r"[\d.]+", cells[5]) and cells[1] != "base":
            kept.setdefault(cells[1], {})[cells[0]] = float(cells[5])
    figure, axes = pyplot.subplots(figsize=(8, 4))
    width = 0.8 / len(kept)
    for i, (name, by_text) in enumerate(kept.items()):
        places = [x + i * width - 0.4 + width / 2 for x in range(len(by_text))]
        bars = axes.bar(places, list(by_text.values()), width, label=name)
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.set(ylabel="gain kept", ylim=(0, 1.1), xticks=range(len(by_text)), xticklabels=list(by_text))
    axes.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.08), frameon=False)
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
