"""A report of `shardkit bench` as an SVG chart, and as a self-contained HTML page around it."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

from shardkit.errors import UsageError
from shardkit.measure.bench.report import BenchReport
from shardkit.system.files import require_own_output
from shardkit.system.formatting import sample_words
from shardkit.system.text import printable, shortened

_MARK = "made by shardkit bench"
"""At the start of each chart and page, so that only these are ever overwritten."""

_COLORS = {"warm": "#D55E00", "cold": "#0072B2"}
"""Two of Okabe and Ito's color-blind safe colors, with a contrast of 3:1 on white and on black."""

_WIDTH = 920
_BARS = 760
_ROW = 46
_TICKS = 5
"""Width of a chart and of its longest bar, height of a row, and most intervals of the axis."""

# Fonts and colors are attributes, too, for programs that do not know the system's colors.
_CHART = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 0 {width} {height}" role="img"
 fill="#000" font-family="system-ui, sans-serif" font-size="13">
<!-- {mark} -->
<title>{title}</title>
<style>svg {{ color-scheme: light dark; fill: CanvasText; stroke: none; }}
.back {{ fill: Canvas; }} path {{ stroke: CanvasText; }}</style>
<rect class="back" x="-10" width="100%" height="100%" fill="#fff"/>
{parts}
</svg>
"""

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="generator" content="{mark}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>shardkit bench: {headline}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 1.5rem auto; padding: 0 1rem; max-width: 64rem; overflow-wrap: anywhere;
  font: 16px/1.4 system-ui, sans-serif; }}
pre {{ overflow-x: auto; font: .82rem/1.45 ui-monospace, "DejaVu Sans Mono", monospace; }}
</style>
<h1>{headline}</h1>
{details}
{chart}
<pre tabindex="0">{table}</pre>
</html>
"""


def page(report: BenchReport) -> str:
    """Return a report as an HTML page: the answer, the chart, and the table."""
    where = report.environment
    facts = {
        "date": where["date"],
        "CPU": where["processor"],
        "accelerator": where["accelerator"],
        "system": f"{where['system']}, Python {where['python']}",
        "software": ", ".join(f"{name} {text}" for name, text in where["versions"].items()),
        "command": report.command,
    }
    rows = [f"  {name:<10}{printable(text)}" for name, text in facts.items() if text]
    return _PAGE.format(
        mark=_MARK,
        headline=escape(printable(report.headline)),
        details="\n".join(f"<p>{escape(printable(text))}</p>" for text in report.details),
        chart=chart(report) if report.measured else "",
        table=escape("\n".join([report.table(), *rows])),
    )


def chart(report: BenchReport) -> str:
    """Return a report as an SVG image: a bar of images/s and its range for each measured line."""
    most = max((measured.images_per_second.highest for _, measured in report.measured), default=1.0)
    foot = _ROW * len(report.measured) + 5
    step = 10 ** math.floor(math.log10(most / _TICKS))
    step *= next(factor for factor in (1, 2, 5, 10) if _TICKS * factor * step >= most)
    parts = []
    for number in range(math.floor(most / step) + 1):
        x = _BARS * number * step / most
        parts.append(f'<path d="M{x:.1f} 0V{foot}" stroke="#000" opacity=".15"/>')
        parts.append(_text(x, foot + 16, f"{number * step:,g}", anchor="middle"))
    for number, (line, measured) in enumerate(report.measured):
        rate = measured.images_per_second
        ratio = measured.speedup
        top = _ROW * number
        low, middle, high = (_BARS * v / most for v in (rate.lowest, rate.median, rate.highest))
        name = f"{shortened(line.path, 60)}: {shortened(line.loader, 50)}, {line.cache}"
        value = f"{rate.median:,.0f}" + (f" ({ratio.median:.2f}x)" if ratio else "")
        parts += [
            _text(0, top + 17, name),
            f'<rect y="{top + 22}" width="{middle:.1f}" height="18" fill="{_COLORS[line.cache]}"/>',
            f'<path d="M{low:.1f} {top + 27}v8m0-4H{high:.1f}m0-4v8" stroke="#000" fill="none"/>',
            _text(high + 6, top + 36, value),
        ]
    samples = sample_words(report.settings)
    label = "images/s: median, range, and (median ratio to the baseline)"
    parts += [_text(0, foot + 38, label), _text(0, foot + 56, samples)]
    title = escape(printable(report.headline))
    drawn = "\n".join(parts)
    return _CHART.format(width=_WIDTH, height=foot + 66, mark=_MARK, title=title, parts=drawn)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def require_output(path: Path, option: str) -> None:
    """Raise `UsageError` if ``path`` cannot be written, or shardkit bench did not write it."""
    if option == "--plot" and path.suffix.lower() != ".svg":
        raise UsageError(f"{option} {path}: a plot is a file named *.svg")
    require_own_output(path, option, _MARK)
