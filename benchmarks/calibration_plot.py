"""The table of benchmarks/calibration.py as a picture: loss above dense, mean of the texts, against bits per weight.

python benchmarks/calibration_plot.py benchmarks/results/calibration_cpu_202611.md docs/pictures/calibration.svg
"""

import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402


def rows(page: str) -> list[tuple[str, float, float]]:
    """(name, bits, mean loss above dense) of each row but the dense one."""
    found = []
    for line in re.findall(r"^\| (.* \| .*)\|$", page, re.MULTILINE):
        name, bits, *cells = line.split(" | ")
        above = [float(number) for number in re.findall(r"\(\+([\d.]+)\)", " ".join(cells))]
        if above and name != "dense":
            found.append((name.strip("*"), float(bits), sum(above) / len(above)))
    return found


def main(table: Path, picture: Path) -> None:
    """Draw it."""
    matplotlib.rcParams["svg.hashsalt"] = "bitshard"
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name, bits, above in rows(table.read_text()):
        ours = "calibrated" in name
        axes.scatter(bits, above, color="tab:blue" if ours else "tab:gray", zorder=3)
        axes.annotate(name, (bits, above), textcoords="offset points", xytext=(6, 3), fontsize=8)
    axes.set(xlabel="bits per weight", ylabel="loss above dense, nats", ylim=(0, None), xlim=(4.05, 4.85))
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
