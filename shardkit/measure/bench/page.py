"""A report of `shardkit bench` as a self-contained HTML page: no script, no network."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from shardkit.measure.bench.plot import MARK, has_matplotlib, inline_svg
from shardkit.measure.bench.report import BenchReport
from shardkit.system.files import write_result
from shardkit.system.formatting import size
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
    templates.filters["printable"] = printable
    where = report.environment
    return templates.get_template("page.html.j2").render(
        report=report,
        mark=MARK,
        plot=Markup(inline_svg(report)) if report.measured and has_matplotlib() else None,  # noqa: S704 - drawn by us
        facts={
            "date": where["date"],
            "CPUs": f"{where['processors']}, {where['processor']}",
            "memory": size(where["memory"]),
            "accelerator": where["accelerator"],
            "system": f"{where['system']}, Python {where['python']}",
            "software": ", ".join(f"{name} {text}" for name, text in where["versions"].items()),
            "command": report.command,
        },
    )
