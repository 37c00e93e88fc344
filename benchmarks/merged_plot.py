"""First tables of records of benchmarks/merged.py as a picture: gain kept of each way to serve an adapter, by text.

python benchmarks/merged_plot.py benchmarks/results/merged_h{100,200}_202611.md docs/pictures/merging.svg

Of lines that several records have the last one's.
"""

import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402

LEFT_OUT = ("base", "LoRA, nearest, by its own rate")


def main(*files: Path) -> None:
    """Draw it: tables, and the picture."""
    matplotlib.rcParams["svg.hashsalt"] = "bitshard"
    kept: dict[str, dict[str, float]] = {}
    for record in files[:-1]:
        first = re.search(r"(^\|.*\n)+", record.read_text(), re.MULTILINE)
        for line in first.group().splitlines()[2:]:
            text, name, _, _, _, gain, *_ = (cell.strip() for cell in line.strip("|").split("|"))
            if name not in LEFT_OUT:
                kept.setdefault(name, {})[text] = float(gain)
    by_text = dict.fromkeys(text for of in kept.values() for text in of)
    figure, axes = pyplot.subplots(figsize=(8, 4))
    width = 0.8 / len(kept)
    for i, (name, gains) in enumerate(kept.items()):
        places = [list(by_text).index(text) + i * width - 0.4 + width / 2 for text in gains]
        bars = axes.bar(places, list(gains.values()), width, label=name)
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.set(ylabel="gain kept", ylim=(0, 1.1), xticks=range(len(by_text)), xticklabels=list(by_text))
    axes.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.08), frameon=False)
    figure.tight_layout()
    figure.savefig(files[-1], metadata={"Date": None})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
