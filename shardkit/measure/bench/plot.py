"""A report of `shardkit bench` as a plot of images per second."""

from __future__ import annotations

import io
import os
import warnings
from importlib import import_module, util
from pathlib import Path
from typing import Any

from shardkit.errors import UsageError
from shardkit.measure.bench.report import BenchReport
from shardkit.system.files import write_result
from shardkit.system.formatting import sample_words
from shardkit.system.text import shortened

SUFFIXES = (".png", ".svg")

MARK = "made by shardkit bench"
"""At the start of each plot and page, so that only these are ever overwritten."""

_HEAD = 4096
"""Bytes at the start of a file that contain the mark."""

COLORS = {"warm": "#E59A66", "cold": "#66AAD1"}
"""Light vermilion and blue of Okabe and Ito's palette, which color-blind people can distinguish."""

_SETTINGS = {
    "font.size": 9,
    "svg.hashsalt": "shardkit",  # the same report gives the same bytes
    "text.parse_math": False,  # a path may contain dollar signs
}


def require_output(path: Path, option: str) -> None:
    """Check, before anything is measured, that ``--plot`` or ``--html`` can write ``path``.

    Raises:
        UsageError: If it cannot, or if a file is there that `shardkit bench` did not write.
    """
    folder, plots = path.absolute().parent, option == "--plot"
    unknown = path.suffix.lower() not in SUFFIXES
    refusals = (
        (plots and unknown, f"a plot is a file named *{' or *'.join(SUFFIXES)}"),
        (plots and not has_matplotlib(), "this requires matplotlib: pip install 'shardkit[plot]'"),
        (path.is_dir(), "this is a folder; name a file in it"),
        (not folder.is_dir(), f"there is no folder {path.parent}; create it first"),
        (not os.access(folder, os.W_OK | os.X_OK), f"the folder {path.parent} cannot be written"),
        (
            path.exists() and not _is_ours(path),
            "shardkit bench did not write this file; choose another name, or remove it",
        ),
    )
    for refused, why in refusals:
        if refused:
            raise UsageError(f"{option} {path}: {why}")


def _is_ours(path: Path) -> bool:
    """Return whether a file is empty, or a plot or page written here."""
    if not path.is_file():  # a device
        return False
    with open(path, "rb") as file:
        head = file.read(_HEAD)
    return not head or MARK.encode() in head


def has_matplotlib() -> bool:
    """Return whether plots can be drawn here."""
    return util.find_spec("matplotlib") is not None


def save_plot(report: BenchReport, path: Path) -> None:
    """Draw a report into a PNG or SVG file.

    Raises:
        ShardkitError: If it cannot be written.
    """
    write_result(path, drawn(report, path.suffix.lower()[1:]))


def drawn(report: BenchReport, kind: str) -> bytes:
    """Return the measured lines of a report, drawn as ``png`` or ``svg``."""
    matplotlib: Any = import_module("matplotlib")
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings(), io.BytesIO() as file:
        # A letter that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        metadata = {"Date": None, "Creator": MARK} if kind == "svg" else {"Software": MARK}
        _figure(report).savefig(file, format=kind, dpi=150, metadata=metadata)
        return file.getvalue()


def _figure(report: BenchReport) -> Any:
    figures: Any = import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(9.2, 1.5 + 0.5 * len(report.measured)), layout="constrained")
    title = f"{report.headline}\n{sample_words(report.settings)}"
    figure.suptitle(title, fontsize="medium", x=0.01, ha="left", wrap=True)
    axes = figure.subplots()
    for place, (line, found) in enumerate(report.measured):
        rate, speedup = found.images_per_second, found.speedup
        axes.barh(place, rate.median, color=COLORS[line.cache])
        axes.plot([rate.lowest, rate.highest], [place, place], "|-", color="black", linewidth=1.2)
        ratio = "" if speedup is None else f"  ({speedup.median:.2f}x)"
        axes.annotate(
            f"{rate.median:,.0f}{ratio}",
            (rate.highest, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize="small",
        )
    labels = [
        f"{shortened(line.path, 42)}\n{shortened(line.loader, 42)}, {line.cache}"
        for line, _ in report.measured
    ]
    axes.set_yticks(range(len(labels)), labels, fontsize="small")
    axes.invert_yaxis()  # the first is on top
    axes.margins(x=0.22)
    axes.set_xlim(left=0)
    axes.set_xlabel("images/s: median, range, and median ratio to the baseline")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.grid(axis="x", alpha=0.2, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure
