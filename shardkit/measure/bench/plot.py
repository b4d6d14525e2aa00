"""A report of `shardkit bench` as a plot of images per second."""

from __future__ import annotations

import contextlib
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

_STARTS = (b"\x89PNG", b"<?xml", b"<!doctype html>")
_HEAD = 4096
"""Bytes at the start of a file that contain the mark."""

_COLORS = {"warm": "#E59A66", "cold": "#66AAD1"}
"""Light vermilion and blue of Okabe and Ito's palette, which color-blind people can distinguish."""

_HATCHES = {"warm": "", "cold": "////"}
_WORDS = {"warm": "warm: files in memory", "cold": "cold: files on disk"}

_INK = "#0a0b0c"
"""Text and axes; in a page it becomes the page's text color, light or dark."""

_SETTINGS = {
    "font.family": "DejaVu Sans",  # part of matplotlib
    "font.size": 9,
    "hatch.linewidth": 0.7,
    "svg.hashsalt": "shardkit",  # the same report gives the same bytes
    "text.parse_math": False,  # a path may contain dollar signs
    **{f"{name}.color": _INK for name in ("text", "xtick", "ytick")},
    **{f"axes.{name}": _INK for name in ("edgecolor", "labelcolor")},
}


def require_output(path: Path, option: str) -> None:
    """Check, before anything is measured, that a plot or page can be written to ``path``.

    Raises:
        UsageError: If it is a folder, if its folder does not exist or is read-only, or if a file is
            there that `shardkit bench` did not write. For a plot, also if matplotlib is missing or
            the suffix is unknown.
    """
    if option == "--plot" and path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{option} {path}: a plot is a file named *{' or *'.join(SUFFIXES)}")
    if option == "--plot" and not has_matplotlib():
        raise UsageError("--plot requires matplotlib: pip install 'shardkit[plot]'")
    folder = path.absolute().parent
    if path.is_dir():
        raise UsageError(f"{option} {path}: this is a folder; name a file in it")
    if not folder.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {path}: the folder {path.parent} cannot be written")
    if path.exists() and not _is_ours(path):
        raise UsageError(
            f"{option} {path}: this file exists and shardkit bench did not write it; choose "
            "another name, or remove it"
        )


def _is_ours(path: Path) -> bool:
    """Return whether a file is empty, or a plot or page written here."""
    if not path.is_file():  # a device
        return False
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD)
    except OSError:
        return False
    return not head or (head.startswith(_STARTS) and MARK.encode() in head)


def has_matplotlib() -> bool:
    """Return whether plots can be drawn here."""
    return util.find_spec("matplotlib") is not None


def save_plot(report: BenchReport, path: Path) -> None:
    """Draw a report into a PNG or SVG file.

    Raises:
        ShardkitError: If it cannot be written.
    """
    write_result(path, drawn(report, path.suffix.lower()[1:]))


def inline_svg(report: BenchReport) -> str:
    """Return a report drawn as an ``<svg>`` element in the color of the surrounding text."""
    text = drawn(report, "svg", in_page=True).decode("utf-8")
    text = text.replace("'DejaVu Sans'", "system-ui, 'DejaVu Sans', sans-serif")
    return text[text.index("<svg") :].replace(_INK, "currentColor")


def drawn(report: BenchReport, kind: str, *, in_page: bool = False) -> bytes:
    """Return the measured lines of a report, drawn as ``png`` or ``svg``.

    Args:
        report: The report.
        kind: ``png`` or ``svg``.
        in_page: Whether a page shows it, with a title, a background and fonts of its own.
    """
    matplotlib: Any = import_module("matplotlib")
    fonts = {"svg.fonttype": "none" if in_page else "path"}
    with contextlib.ExitStack() as stack, io.BytesIO() as file:
        stack.enter_context(matplotlib.rc_context({**_SETTINGS, **fonts}))
        stack.enter_context(warnings.catch_warnings())
        # A letter that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        figure = _figure(report)
        if not in_page:
            title = f"{report.headline}\n{sample_words(report.settings)}"
            figure.suptitle(title, fontsize="medium", x=0.01, ha="left", wrap=True)
        metadata = {"Date": None, "Creator": MARK} if kind == "svg" else {"Software": MARK}
        figure.savefig(file, format=kind, dpi=150, transparent=in_page, metadata=metadata)
        return file.getvalue()


def _figure(report: BenchReport) -> Any:
    figures: Any = import_module("matplotlib.figure")
    patches: Any = import_module("matplotlib.patches")
    figure = figures.Figure(figsize=(9.2, 2.2 + 0.47 * len(report.measured)), layout="constrained")
    axes = figure.subplots()
    place, places, last = -1.1, [], None
    for line, found in report.measured:
        if (line.path, line.loader) != last:  # a line above each group names it
            place, last = place + 1.1, (line.path, line.loader)
            axes.annotate(
                f"{shortened(line.path, 42)}: {shortened(line.loader, 48)}",
                (0, place + 0.15),
                xycoords=("axes fraction", "data"),
                va="center",
                fontsize="small",
                fontweight="bold",
                annotation_clip=False,
            )
        place += 1
        places.append(place)
        rate, speedup = found.images_per_second, found.speedup
        axes.barh(place, rate.median, height=0.8, **_look(line.cache))
        axes.plot([rate.lowest, rate.highest], [place, place], "|-", color=_INK, linewidth=1.2)
        ratio = "" if speedup is None else f"  ({speedup.median:.2f}x)"
        axes.annotate(
            f"{rate.median:,.0f}{ratio}",
            (rate.highest, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize="small",
        )
    axes.set_yticks(places, [line.cache for line, _ in report.measured])
    axes.set_ylim(place + 0.7, -0.3)  # the first is on top
    axes.margins(x=0.22)
    axes.set_xlim(left=0)
    axes.set_xlabel("images/s: median, range, and median ratio to the baseline")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.grid(axis="x", color=f"{_INK}22", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    caches = dict.fromkeys(line.cache for line, _ in report.measured)
    handles = [patches.Patch(label=_WORDS[cache], **_look(cache)) for cache in caches]
    figure.legend(handles=handles, loc="outside lower left", ncols=2, frameon=False)
    return figure


def _look(cache: str) -> dict[str, Any]:
    return {"facecolor": _COLORS[cache], "edgecolor": _INK, "hatch": _HATCHES[cache]}
