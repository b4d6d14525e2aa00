"""A report of `shardkit bench` as a picture: how many images a second, and how long waits are."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Iterator
from importlib import import_module, util
from pathlib import Path
from typing import Any

from shardkit.errors import UsageError
from shardkit.measure.bench.report import BenchReport, Line, Measured
from shardkit.system.files import write_result
from shardkit.system.formatting import sample_words
from shardkit.system.text import shortened

SUFFIXES = (".png", ".svg")

MARK = "made by shardkit bench"
"""Stands at the beginning of each plot and page, so that only these are ever replaced."""

_BEGINNINGS = (b"\x89PNG", b"<?xml", b"<!doctype html>")
_HEAD = 4096
"""Bytes of a file in which the mark stands."""

_COLOURS = {"warm": "#D55E00", "cold": "#0072B2"}
"""Vermillion and blue of Okabe and Ito's palette, which colour-blind people tell apart."""

_FILLS = {"warm": "#E59A66", "cold": "#66AAD1"}
"""The same, lighter; opaque, since SVG has no hatches on see-through colours."""

_HATCHES = {"warm": "", "cold": "////"}
_MARKERS = {"warm": "o", "cold": "D"}

_INK = "#0a0b0c"
"""Text and axes; in a page it becomes the colour of the page's text, light or dark."""

_FONTS = "system-ui, 'DejaVu Sans', sans-serif"
"""Of a page."""

_SETTINGS = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9,
    "hatch.linewidth": 0.7,
    "svg.hashsalt": "shardkit",  # the same report gives the same bytes
    "text.parse_math": False,  # a path may have dollars in it
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), _INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), _INK),
}


def require_plot(path: Path | None) -> None:
    """Make sure, before anything is measured, that a plot can be written to ``path``.

    Raises:
        UsageError: If matplotlib is missing, the suffix unknown, or the place is not ours.
    """
    if path is None:
        return
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {path}: a plot is a file named *{' or *'.join(SUFFIXES)}")
    if not has_matplotlib():
        raise UsageError("--plot needs matplotlib: pip install 'shardkit[plot]'")
    require_place(path, "--plot")


def require_place(path: Path, option: str) -> None:
    """Make sure that a file can be written at ``path``, and that nothing of others is lost by it.

    Raises:
        UsageError: If its folder does not exist or cannot be written, or if ``path`` is a folder,
            or a file that `shardkit bench` did not write.
    """
    if path.is_dir():
        raise UsageError(f"{option} {path}: this is a folder; name a file in it")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {path}: the folder {path.parent} cannot be written")
    if path.exists() and not _ours(path):
        raise UsageError(
            f"{option} {path}: this file is there already, and shardkit bench did not write it; "
            "name another, or remove it"
        )


def _ours(path: Path) -> bool:
    """Tell whether a file holds nothing, or a plot or page that was made here."""
    if not path.is_file():  # a device
        return False
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD)
    except OSError:
        return False
    return not head or (head.startswith(_BEGINNINGS) and MARK.encode() in head)


def has_matplotlib() -> bool:
    """Return whether plots can be drawn here."""
    return util.find_spec("matplotlib") is not None


def save_plot(report: BenchReport, path: Path) -> None:
    """Draw a report into a PNG or SVG file.

    Raises:
        ShardkitError: If it cannot be written.
    """
    write_result(path, drawn(report, path.suffix.lower()[1:]))


def drawn(report: BenchReport, kind: str, *, bare: bool = False) -> bytes:
    """Return a report drawn as ``png`` or ``svg``.

    Args:
        report: What is drawn: its lines that could be measured.
        kind: ``png`` or ``svg``.
        bare: Whether it stands in a page, which has the title, and its own background.
    """
    with _settings(bare), io.BytesIO() as file:
        figure = _figure(report, bare=bare)
        metadata = {"Date": None, "Creator": MARK} if kind == "svg" else {"Software": MARK}
        figure.savefig(file, format=kind, dpi=150, transparent=bare, metadata=metadata)
        return file.getvalue()


def inline_svg(report: BenchReport) -> str:
    """Return a report drawn as an ``<svg>`` element whose ink is the colour of the text around."""
    text = drawn(report, "svg", bare=True).decode("utf-8")
    text = text.replace("'DejaVu Sans'", _FONTS).replace(_INK, "currentColor")
    return text[text.index("<svg") :]


@contextlib.contextmanager
def _settings(bare: bool) -> Iterator[None]:
    matplotlib: Any = import_module("matplotlib")
    # A browser has fonts for all scripts; elsewhere letters are drawn, so that they look alike.
    fonts = {"svg.fonttype": "none" if bare else "path"}
    with matplotlib.rc_context({**_SETTINGS, **fonts}), warnings.catch_warnings():
        # A letter that the font has not is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        yield


def _figure(report: BenchReport, *, bare: bool) -> Any:
    lines = [line for line in report.lines if line.measured]
    figures: Any = import_module("matplotlib.figure")
    height = 1.5 + 0.3 * len(lines) + 0.34 * len(_groups(lines)) + (0 if bare else 0.5)
    figure = figures.Figure(figsize=(9.2, height), layout="constrained")
    rates, waits = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    places = _places(lines)
    for line, place in zip(lines, places, strict=True):
        assert line.measured is not None
        _draw_rate(rates, line, line.measured, place)
        _draw_wait(waits, line, line.measured, place)
    _name_groups(rates, lines, places)
    _finish(rates, waits, report)
    _legend(figure, lines)
    if not bare:
        figure.suptitle(
            f"{report.headline}\n{sample_words(report.settings)}",
            fontsize="medium",
            x=0.01,
            ha="left",
        )
    return figure


def _groups(lines: list[Line]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((line.path, line.loader) for line in lines))


def _places(lines: list[Line]) -> list[float]:
    """Return where each line stands: those of one loader together, a name's height above them."""
    places, place, last = [], 0.0, None
    for line in lines:
        if (line.path, line.loader) != last:
            place, last = place + 1.1, (line.path, line.loader)
        places.append(place)
        place += 1
    return places


def _draw_rate(axes: Any, line: Line, found: Measured, place: float) -> None:
    rate, colour = found.images_per_second, _COLOURS[line.cache]
    axes.barh(
        place,
        rate.median,
        height=0.8,
        color=_FILLS[line.cache],
        edgecolor=colour,
        hatch=_HATCHES[line.cache],
    )
    axes.plot([rate.lowest, rate.highest], [place, place], color=_INK, linewidth=1.2)
    axes.plot(found.rounds, [place] * len(found.rounds), "|", color=_INK, markersize=7)
    gain = "" if found.gain is None or line.baseline else f"  ({found.gain.median:.2f} x)"
    axes.annotate(
        f"{rate.median:,.0f}{gain}",
        (rate.highest, place),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize="small",
    )


def _draw_wait(axes: Any, line: Line, found: Measured, place: float) -> None:
    colour, low = _COLOURS[line.cache], max(found.wait_p50, _LEAST)
    middle, high = max(found.wait_p95, _LEAST), max(found.wait_p99, _LEAST)
    axes.plot([low, high], [place, place], color=colour, linewidth=2.5, solid_capstyle="round")
    axes.plot(low, place, _MARKERS[line.cache], color=colour, markersize=6)
    axes.plot([middle, high], [place, place], "|", color=_INK, markersize=9)


_LEAST = 0.01
"""Milliseconds: a shorter wait is none, and has no place on a logarithmic axis."""


def _name_groups(axes: Any, lines: list[Line], places: list[float]) -> None:
    """Write above each group what is read, and by what; beside each line, warm or cold."""
    named = set()
    for line, place in zip(lines, places, strict=True):
        if (group := (line.path, line.loader)) in named:
            continue
        named.add(group)
        axes.annotate(
            f"{shortened(line.path, 42)}: {shortened(line.loader, 48)}",
            (0, place - 0.95),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize="small",
            fontweight="bold",
            annotation_clip=False,
        )
    axes.set_yticks(places, [line.cache for line in lines])
    axes.set_ylim(places[-1] + 0.7, places[0] - 1.3)  # the first is on top


def _finish(rates: Any, waits: Any, report: BenchReport) -> None:
    rounds = report.settings["rounds"]
    rates.margins(x=0.22)
    rates.set_xlim(left=0)
    rates.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    rates.set_xlabel(f"images/s: median, and each of {rounds} rounds")
    waits.set_xscale("log")
    waits.set_xlabel("wait for a batch, in ms:\np50 (mark), p95 and p99 (ticks)")
    waits.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    for axes in (rates, waits):
        axes.grid(axis="x", color=f"{_INK}22", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)


def _legend(figure: Any, lines: list[Line]) -> None:
    patches: Any = import_module("matplotlib.patches")
    words = {"warm": "warm: files in memory", "cold": "cold: files on disk"}
    handles = [
        patches.Patch(
            facecolor=_FILLS[cache], edgecolor=colour, hatch=_HATCHES[cache], label=words[cache]
        )
        for cache, colour in _COLOURS.items()
        if any(line.cache == cache for line in lines)
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=2, frameon=False)
