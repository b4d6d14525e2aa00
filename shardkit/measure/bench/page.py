"""A report of `shardkit bench` as a self-contained HTML page: no script, no network."""

from __future__ import annotations

from html import escape
from pathlib import Path

from shardkit.measure.bench.plot import COLORS, MARK
from shardkit.measure.bench.report import BenchReport
from shardkit.system.files import write_result
from shardkit.system.text import printable, shortened

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="generator" content="{mark}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>shardkit bench: {headline}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 0 auto; padding: 1.5rem 1rem; max-width: 64rem; overflow-wrap: anywhere; }}
body {{ font: 16px/1.4 system-ui, sans-serif; }}
dl {{ display: grid; grid-template-columns: 16rem 1fr; gap: .5rem .8rem; align-items: center; }}
dl {{ font-size: .85rem; }}
dt {{ text-align: right; }}
dd {{ margin: 0; display: flex; gap: .5rem; align-items: center; }}
i {{ height: 1.6rem; }}
pre {{ overflow-x: auto; font: .82rem/1.45 ui-monospace, "DejaVu Sans Mono", monospace; }}
</style>
<h1>{headline}</h1>
{details}
<dl>
{bars}
</dl>
<pre tabindex="0">{table}</pre>
</html>
"""


def save_page(report: BenchReport, path: Path) -> None:
    """Write a report as an HTML page: the answer, a bar of images/s for each line, and the table.

    Raises:
        ShardkitError: If it cannot be written.
    """
    write_result(path, page(report).encode("utf-8"))


def page(report: BenchReport) -> str:
    """Return a report as an HTML page."""
    most = max((found.images_per_second.median for _, found in report.measured), default=0.0)
    bars = []
    for line, found in report.measured:
        rate, ratio = found.images_per_second.median, found.speedup
        title = escape(f"{shortened(line.path, 60)} {shortened(line.loader, 60)}, {line.cache}")
        style = f"width: {70 * rate / most:.1f}%; background: {COLORS[line.cache]}"
        text = f"{rate:,.0f}" + (f" ({ratio.median:.2f}x)" if ratio else " images/s")
        bars.append(f'<dt>{title}</dt><dd><i style="{style}"></i>{text}</dd>')
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
        mark=MARK,
        headline=escape(printable(report.headline)),
        details="\n".join(f"<p>{escape(printable(text))}</p>" for text in report.details),
        bars="\n".join(bars),
        table=escape("\n".join([report.table(), *rows])),
    )
