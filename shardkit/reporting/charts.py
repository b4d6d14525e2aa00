"""Charts of a report as SVG: histograms and class balance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from shardkit.reporting.report import Histogram
from shardkit.system.numbers import significant
from shardkit.system.text import printable, shortened

_WIDTH = 320
_HEIGHT = 150
_LEFT = 54
_TOP = 10
"""Size of a histogram's bars in units of its view box, and the space for the axis and the top."""

_BAR = 22
_LABELS = 150
_BARS = 360
_VALUES = 110
"""Height of a class's row, and width of its name, its longest bar and its numbers."""

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Six of Okabe and Ito's color-blind safe colors, for sections and splits."""


def histogram(chart: Histogram) -> str:
    """Return a histogram with labeled axes; its text alternative has median and range.

    If all values are equal, return a sentence instead.
    """
    edges = chart.edges
    counts = chart.counts
    most = max(chart.counts)
    if edges[0] == edges[-1]:
        return f"<p>All {most:,} images: {_number(edges[0])} ({escape(chart.unit)})</p>"
    step = _WIDTH / len(counts)
    bars = "".join(
        f"M{_LEFT + n * step:.1f} {_TOP + _HEIGHT}v{-_HEIGHT * count / most:.1f}"
        f"h{step - 1:.1f}V{_TOP + _HEIGHT}z"
        for n, count in enumerate(counts)
        if count
    )
    ticks = [
        _text(_LEFT + _WIDTH * fraction, _TOP + _HEIGHT + 16, _number(edge), anchor)
        for fraction, edge, anchor in (
            (0, edges[0], "start"),
            (0.5, edges[len(counts) // 2], "middle"),
            (1, edges[-1], "end"),
        )
    ]
    description = (
        f"{chart.title}, {chart.unit}: {_number(edges[0])} to {_number(edges[-1])}, "
        f"median {_number(chart.median)}"
    )
    foot = _TOP + _HEIGHT
    return (
        f'<svg viewBox="0 0 {_LEFT + _WIDTH + 6} {foot + 40}" role="img" '
        f'aria-label="{escape(description)}">'
        f'<path class="grid" d="M{_LEFT} {_TOP}h{_WIDTH}m0 {_HEIGHT / 2}h{-_WIDTH}"/>'
        f'<path class="bar" d="{bars}"/><path class="axis" d="M{_LEFT} {foot}h{_WIDTH}"/>'
        + _text(_LEFT - 5, _TOP + 5, f"{most:,}", "end")
        + _text(_LEFT - 5, _TOP + _HEIGHT / 2, "images", "end")
        + _text(_LEFT - 5, foot + 4, "0", "end")
        + "".join(ticks)
        + _text(_LEFT + _WIDTH / 2, foot + 34, chart.unit, "middle")
        + "</svg>"
    )


def class_bars(
    counts: Mapping[str, Sequence[int]],
    sections: Sequence[str],
    colors: Mapping[str, str] | None = None,
) -> str:
    """Return a bar for each class, with a section for each dataset or split.

    ``counts`` are the images of each class in each section. Without ``colors`` of the classes,
    those of the sections are used.
    """
    most = max((sum(part_counts) for part_counts in counts.values()), default=0) or 1
    drawn = []
    for line, (name, part_counts) in enumerate(counts.items()):
        top = line * _BAR
        x = float(_LABELS)
        drawn.append(_text(_LABELS - 6, top + 15, shortened(name, 20), "end"))
        for number, count in enumerate(part_counts):
            width = _BARS * count / most
            color = colors[name] if colors else COLORS[number % len(COLORS)]
            drawn.append(
                f'<rect x="{x:.1f}" y="{top + 3}" width="{width:.1f}" height="16" fill="{color}"/>'
            )
            x += width
        numbers = " + ".join(f"{count:,}" for count in part_counts)
        drawn.append(_text(x + 6, top + 15, numbers, "start"))
    description = f"Images of {len(counts):,} classes in {', '.join(map(printable, sections))}"
    width = _LABELS + _BARS + _VALUES
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(description)}">'
        f'<svg class="wide" viewBox="0 0 {width} {_BAR * len(counts)}" role="img" '
        f'aria-label="{escape(description)}">{"".join(drawn)}</svg></div>'
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) < 1000 else significant(value)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
