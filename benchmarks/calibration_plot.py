"""Tables of benchmarks/calibration.py as a picture: loss above dense, mean of the texts, against bits per weight.

python benchmarks/calibration_plot.py benchmarks/results/calibration_cpu_202611.md
    benchmarks/results/calibration_training_h100_202611.md docs/pictures/calibration.svg

Of a second table only what the first one does not have; it has a marker of its own.
"""

import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402

MARKERS = "oD"
APART = 0.008  # nats between labels one above the other


def rows(page: str) -> dict[str, tuple[float, float]]:
    """{name: (bits, mean loss above dense)} of each row but the dense one; of a name the first."""
    found = {}
    for line in re.findall(r"^\| (.* \| .*)\|$", page, re.MULTILINE):
        name, bits, *cells = line.split(" | ")
        above = [float(number) for number in re.findall(r"\(([+-][\d.]+)\)", " ".join(cells))]
        if above and name != "dense":
            found.setdefault(name.strip("*"), (float(bits), sum(above) / len(above)))
    return found


def main(tables: list[Path], picture: Path) -> None:
    """Draw it."""
    matplotlib.rcParams["svg.hashsalt"] = "bitshard"
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    points = {}
    for table, marker in zip(tables, MARKERS, strict=False):
        points = {name: (*found, marker) for name, found in rows(table.read_text()).items()} | points
    labels: dict[float, float] = {}  # of each number of bits the height of the highest label
    for name, (bits, above, marker) in sorted(points.items(), key=lambda item: item[1][1]):
        ours = "calibrated" in name or "tuned" in name
        axes.scatter(bits, above, marker=marker, color="tab:blue" if ours else "tab:gray", zorder=3)
        labels[bits] = max(above, labels.get(bits, 0) + APART)
        axes.annotate(name, (bits, labels[bits]), textcoords="offset points", xytext=(7, -3), fontsize=8)
    axes.set(xlabel="bits per weight", ylabel="loss above dense, nats", ylim=(0, None), xlim=(4.05, 4.85))
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    *given, last = map(Path, sys.argv[1:])
    main(given, last)
