"""The chart on top of README.md: speedups over FFCV, from the tables of docs/benchmarks.md.

    python scripts/bench/plots.py docs/benchmarks.md docs/plots/ffcv.png

It needs matplotlib (``pip install matplotlib``).
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

MACHINES = {"AMD EPYC": "#1f6f8b", "Intel Xeon": "#e0a458"}
"""Columns of the page, and colors."""

ROWS = {
    "JPEG, center crop, threads": ("JPEGs of 256 pixels", "exact, threads"),
    "JPEG, center crop, processes": ("JPEGs of 256 pixels", "exact, worker processes"),
    "JPEG, random crop from 500 x 375": ("Random crops", "500 x 375, over FFCV"),
    "JPEG, random crop from 2000 x 1500": ("Random crops", "2000 x 1500, over FFCV"),
    "raw 224 x 224, threads": ("Raw pixels", "threads, over FFCV"),
    "raw 224 x 224, processes": ("Raw pixels", "worker processes, over FFCV"),
    "float16 arrays, threads": ("Arrays", "threads, over FFCV"),
    "float16 arrays, processes": ("Arrays", "worker processes, over FFCV"),
}
"""Bars of the chart: start of the section's heading, and first cell of the row."""

Range = tuple[float, float]


def speedups(page: str) -> dict[str, list[Range | str]]:
    """Return lowest and highest speedup of each bar on each machine; other cells as they are.

    Raises:
        ValueError: If the page lacks a row.
    """
    return {label: _row(page, section, name) for label, (section, name) in ROWS.items()}


def _row(page: str, section: str, name: str) -> list[Range | str]:
    text = next((part for part in page.split("\n## ") if part.startswith(section)), "")
    row = re.search(rf"^\| {re.escape(name)} \|(.*?)\|(.*?)\|", text, re.MULTILINE)
    if not row:
        raise ValueError(f"the page has no row {name!r} in a section {section!r}")
    return [_range(cell.strip()) for cell in row.groups()]


def _range(cell: str) -> Range | str:
    """Parse a cell such as "1.11 to 1.23", but not ratios of anything else."""
    numbers = re.fullmatch(r"([\d.]+)(?: to ([\d.]+))?", cell)
    return (float(numbers[1]), float(numbers[2] or numbers[1])) if numbers else cell


def draw(page: str, target: Path) -> None:
    """Draw the chart as a PNG file."""
    matplotlib: Any = import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = import_module("matplotlib.pyplot")
    bars = speedups(page)
    figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    for column, (machine, color) in enumerate(MACHINES.items()):
        axes.barh(0, 0, color=color, label=machine)  # for the legend
        for row, bar in enumerate(bars.values()):
            value, height = bar[column], row + 0.38 * column - 0.19
            if isinstance(value, str):
                axes.annotate(value, (0.03, height), fontsize=7, color="#777777", va="center")
                continue
            low, high = value
            axes.barh(
                height,
                (low + high) / 2,
                height=0.36,
                xerr=(high - low) / 2,
                color=color,
                ecolor="#444444",
                capsize=2,
            )
    axes.axvline(1, color="#444444", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.set_xlabel("speedup over FFCV, lowest to highest ratio of medians")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="2 cores, 2 workers", loc="lower right", frameon=False)
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    draw(Path(sys.argv[1]).read_text("utf-8"), Path(sys.argv[2]))
