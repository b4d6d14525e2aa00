"""A report of `shardkit bench` as a self-contained HTML page: no script, no network."""

from __future__ import annotations

from html import escape
from pathlib import Path

from shardkit.measure.bench.plot import MARK, has_matplotlib, inline_svg
from shardkit.measure.bench.report import BenchReport
from shardkit.system.files import write_result
from shardkit.system.text import printable

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="{mark}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>shardkit bench: {headline}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 0 auto; padding: 1.5rem 1rem; max-width: 64rem; overflow-wrap: anywhere; }}
body {{ font: 16px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: clamp(1.3rem, 4vw, 1.9rem); line-height: 1.25; text-wrap: balance; }}
.scroll {{ overflow-x: auto; }}
svg {{ display: block; width: 100%; min-width: 34rem; height: auto; }}
pre {{ font: .82rem/1.45 ui-monospace, "DejaVu Sans Mono", monospace; }}
</style>
</head>
<body>
<h1>{headline}</h1>
{details}
{plot}
<pre class="scroll" tabindex="0">{table}</pre>
</body>
</html>
"""


def save_page(report: BenchReport, path: Path) -> None:
    """Write a report as an HTML page.

    Raises:
        ShardkitError: If it cannot be written.
    """
    write_result(path, page(report).encode("utf-8"))


def page(report: BenchReport) -> str:
    """Return a report as an HTML page, with a plot if matplotlib is installed."""
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
    plot = "<p>No plot: nothing was measured.</p>"
    if report.measured:
        plot = "<p>No plot: matplotlib is not installed (pip install 'shardkit[plot]').</p>"
    if report.measured and has_matplotlib():
        plot = f'<div class="scroll" tabindex="0">{inline_svg(report)}</div>'
    return _PAGE.format(
        mark=MARK,
        headline=escape(printable(report.headline)),
        details="\n".join(f"<p>{escape(printable(text))}</p>" for text in report.details),
        plot=plot,
        table=escape("\n".join([report.table(), *rows])),
    )
