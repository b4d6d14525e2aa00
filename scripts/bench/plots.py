"""The chart on top of README.md: images/s of each loader, from the results that the page cites.

    python scripts/bench/plots.py docs/results/amd-2026-11-26/crop.json docs/plots/loaders.png

It needs matplotlib (``pip install matplotlib``).
"""

from __future__ import annotations

import json
import statistics
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

CANDIDATES = {
    "ImageFolder-like, resized files": "ImageFolder",
    "WebDataset": "WebDataset",
    "LitData": "LitData",
    "MosaicML Streaming": "MosaicML Streaming",
    "Hugging Face datasets": "Hugging Face datasets",
    "energon": "energon",
    "SPDL, Pillow": "SPDL (Pillow)",
    "FFCV": "FFCV",
    "shardkit lmdb, thread": "shardkit",
    "shardkit lmdb, thread, planes": "shardkit, planes",
}
"""Names in the results, and on the chart."""

KILOBYTES = {"shardkit, planes": 134}
"""Mean size of an image, of 200 photographs; all others read the same JPEGs of `JPEG_KILOBYTES`."""

JPEG_KILOBYTES = 30


def medians(results: str) -> dict[str, float]:
    """Return images/s of each bar, slowest first.

    Raises:
        ValueError: If the results lack a candidate.
    """
    rates = {result["name"]: result["rates"] for result in json.loads(results)["results"]}
    if missing := [name for name in CANDIDATES if not rates.get(name)]:
        raise ValueError(f"the results have no rates of {', '.join(missing)}")
    bars = {label: statistics.median(rates[name]) for name, label in CANDIDATES.items()}
    return dict(sorted(bars.items(), key=lambda bar: bar[1]))


def draw(results: str, target: Path) -> None:
    """Draw the chart as a PNG file."""
    matplotlib: Any = import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = import_module("matplotlib.pyplot")
    bars = medians(results)
    figure, axes = pyplot.subplots(figsize=(8, 3.8), layout="constrained")
    colors = ["#1f6f8b" if label.startswith("shardkit") else "#a9b7bf" for label in bars]
    drawn = axes.barh(list(bars), list(bars.values()), color=colors, height=0.7)
    texts = [
        f"{rate:,.0f}   ({KILOBYTES.get(label, JPEG_KILOBYTES)} KB per image)"
        for label, rate in bars.items()
    ]
    axes.bar_label(drawn, texts, padding=4, fontsize=8)
    axes.set_xlim(0, max(bars.values()) * 1.35)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("images/s, center crops of 256-pixel JPEGs; 2 cores of AMD EPYC, 2 workers")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    draw(Path(sys.argv[1]).read_text("utf-8"), Path(sys.argv[2]))
