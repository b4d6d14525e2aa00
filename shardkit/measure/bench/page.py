"""A report of `shardkit bench` as one page that needs nothing else: no script, no network."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from shardkit.measure.bench.plot import MARK, has_matplotlib, inline_svg, require_place
from shardkit.measure.bench.report import BenchReport, Line
from shardkit.system.files import write_result
from shardkit.system.formatting import sample_words, significant, size, step_words
from shardkit.system.text import printable


def require_page(path: Path | None) -> None:
    """Make sure, before anything is measured, that a page can be written to ``path``.

    Raises:
        UsageError: If there is no such folder, or a file that is no such page.
    """
    if path is not None:
        require_place(path, "--html")


def save_page(report: BenchReport, path: Path) -> None:
    """Write a report as a page of HTML.

    Raises:
        ShardkitError: If it cannot be written.
    """
    write_result(path, page(report).encode("utf-8"))


def page(report: BenchReport) -> str:
    """Return a report as a page of HTML, with a plot if matplotlib is installed."""
    templates = Environment(
        loader=PackageLoader("shardkit.measure.bench", "."),
        autoescape=True,  # paths, options and errors are anybody's text
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"printable": printable, "significant": significant, "size": size}
    drawn = any(line.measured for line in report.lines) and has_matplotlib()
    return templates.get_template("page.html.j2").render(
        report=report,
        groups=_groups(report),
        mark=MARK,
        plot=Markup(inline_svg(report)) if drawn else None,  # noqa: S704 - drawn by us
        sample=sample_words(report.settings),
        step=step_words(report.settings),
    )


def _groups(report: BenchReport) -> list[tuple[str, str, list[Line]]]:
    """Return the lines of each path and loader."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in report.lines:
        groups.setdefault((line.path, line.loader), []).append(line)
    return [(path, loader, lines) for (path, loader), lines in groups.items()]
