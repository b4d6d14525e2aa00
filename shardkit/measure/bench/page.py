"""A report of `shardkit bench` as a self-contained HTML page: no script, no network."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from shardkit.measure.bench.plot import MARK, has_matplotlib, inline_svg
from shardkit.measure.bench.report import BenchReport
from shardkit.system.files import write_result
from shardkit.system.formatting import sample_words, size, step_words
from shardkit.system.text import printable


def save_page(report: BenchReport, path: Path) -> None:
    """Write a report as an HTML page.

    Raises:
        ShardkitError: If it cannot be written.
    """
    write_result(path, page(report).encode("utf-8"))


def page(report: BenchReport) -> str:
    """Return a report as an HTML page, with a plot if matplotlib is installed."""
    templates = Environment(
        loader=PackageLoader("shardkit.measure.bench", "."),
        autoescape=True,  # paths, options and errors may contain anything
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"printable": printable, "size": size}
    drawn = any(line.measured for line in report.lines) and has_matplotlib()
    return templates.get_template("page.html.j2").render(
        report=report,
        groups=[
            (path, loader, list(lines))
            for (path, loader), lines in groupby(
                report.lines, key=lambda each: (each.path, each.loader)
            )
        ],
        mark=MARK,
        plot=Markup(inline_svg(report)) if drawn else None,  # noqa: S704 - drawn by us
        sample=sample_words(report.settings),
        step=step_words(report.settings),
    )
