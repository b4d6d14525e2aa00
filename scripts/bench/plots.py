"""Bars of a table: the median of each contender, and how far the rounds were apart."""

from __future__ import annotations

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
    measured = [result for result in table.results if result.rates]
    if not measured:
        return
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.32 * len(measured)), layout="constrained")
    axes.barh(
        [result.name for result in measured],
        [result.median for result in measured],
        xerr=_spread(measured),
        color=[_OURS if "shardkit" in result.name else _OTHERS for result in measured],
        ecolor="#555555",
        capsize=2,
    )
    axes.invert_yaxis()
    axes.set_xlabel(f"{table.unit}, median and range of {table.rounds} rounds")
    axes.set_title(table.title, fontsize="medium", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=120)
    pyplot.close(figure)


def _spread(measured: list[Result]) -> list[list[float]]:
    """Return how far below and above its median each contender came."""
    medians = [result.median or 0.0 for result in measured]
    low = [m - min(result.rates) for m, result in zip(medians, measured, strict=True)]
    high = [max(result.rates) - m for m, result in zip(medians, measured, strict=True)]
    return [low, high]
