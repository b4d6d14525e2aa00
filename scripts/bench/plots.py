"""Bar charts of benchmark tables: median and range of each candidate.

    python scripts/bench/plots.py docs/plots    redraw every chart from its JSON file

A chart shows each other library once, and of shardkit's rows only those that a user would choose
between: LMDB shards, read by threads, with and without one option. The table has all rows.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from importlib import import_module
from pathlib import Path
from typing import Any

from harness import Result, Table

_OURS, _OTHERS = "#1f6f8b", "#b0b7bd"


def plot(table: Table, target: Path) -> None:
    """Draw a table as a PNG file; does nothing if nothing was measured.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    matplotlib: Any = import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = import_module("matplotlib.pyplot")
    measured = charted([result for result in table.results if result.rates])
    if not measured:
        return
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.32 * len(measured)), layout="constrained")
    axes.barh(
        [_label(result.name) for result in measured],
        [result.median for result in measured],
        xerr=_spread(measured),
        color=[_OURS if "shardkit" in result.name else _OTHERS for result in measured],
        ecolor="#555555",
        capsize=2,
    )
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(f"{table.unit}, median and range of {table.rounds} rounds")
    figure.suptitle(textwrap.fill(table.title, 80), fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=120)
    pyplot.close(figure)


def charted(results: list[Result]) -> list[Result]:
    """Return the rows that a chart shows: the others', and at most two of shardkit's."""
    ours = [one for one in results if one.name.startswith("shardkit lmdb") and not _special(one)]
    others = [one for one in results if not one.name.startswith("shardkit ")]
    return others + ours


def _special(result: Result) -> bool:
    """Return whether only the table shows the row."""
    return ", process" in result.name or ", jpeg=" in result.name


def _label(name: str) -> str:
    return re.sub(r"^shardkit lmdb(, thread)?", "shardkit", name)


def _spread(measured: list[Result]) -> list[list[float]]:
    """Return how far below and above its median each contender came."""
    medians = [result.median or 0.0 for result in measured]
    low = [m - min(result.rates) for m, result in zip(medians, measured, strict=True)]
    high = [max(result.rates) - m for m, result in zip(medians, measured, strict=True)]
    return [low, high]


def main(folder: Path) -> None:
    """Redraw the chart of each JSON file in the folder."""
    for path in sorted(folder.glob("*.json")):
        stored = json.loads(path.read_text("utf-8"))
        results = [Result(**result) for result in stored.pop("results")]
        known = {name: stored[name] for name in ("name", "title", "baseline", "unit", "rounds")}
        plot(Table(results=results, **known), path.with_suffix(".png"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
