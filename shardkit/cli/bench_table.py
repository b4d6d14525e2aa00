"""What `shardkit bench` found, as a table for a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Sequence

from shardkit.cli.console import say
from shardkit.cli.show import amount, line, wrapped
from shardkit.measure.bench.report import BenchReport, Line, Source
from shardkit.system.formatting import sample_words, significant, size, step_words
from shardkit.system.text import printable, shortened

_WIDTH = 98
_GROUPS = (
    ("", ("cache",)),
    ("images/s", ("median", "rounds", "gain")),
    ("", ("MB/s",)),
    ("ms to wait", ("p50", "p95", "p99")),
    ("first", ("s",)),
    ("CPUs", ("all", "each")),
    ("peak MiB", ("main", "each")),
)
"""Columns; those of one group stand close together. ``each`` is for each worker."""

_COLUMNS = tuple(name for _, names in _GROUPS for name in names)
_NONE = "-"


def show_report(report: BenchReport) -> None:
    """Print a report: each dataset, its loaders, and the answer."""
    rows = {id(each): _cells(each) for each in report.lines if each.measured}
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows.values(), strict=True)]
    say(_title(widths))
    say(_row(_COLUMNS, widths))
    for source in report.sources:
        say(_named(source))
        lines = [each for each in report.lines if each.path == source.path]
        for loader in dict.fromkeys(each.loader for each in lines):
            _show_loader([each for each in lines if each.loader == loader], rows, widths)
    _show_ground(report)
    say()
    for number, text in enumerate((report.headline, *report.details)):
        wrapped(printable(text), "  ", first="  " if number else "", cut=True)


def _show_loader(
    lines: Sequence[Line], rows: dict[int, tuple[str, ...]], widths: Sequence[int]
) -> None:
    chosen = next((f": {each.chosen}" for each in lines if each.chosen), "")
    base = "  (the base)" if lines[0].baseline else ""
    say(f"  {shortened(lines[0].loader, 60)}{chosen}{base}")
    for each in lines:
        if each.measured:
            say(_row(rows[id(each)], widths))
        else:
            text = f"{each.cache}  failed: {printable(each.problem)}"
            wrapped(text, "    ", first="    ", cut=True)
    for text in dict.fromkeys(text for m in lines if m.measured for text in m.measured.warnings):
        wrapped(f"note: {printable(text)}", "    ", first="    ", cut=True)


def _cells(line: Line) -> tuple[str, ...]:
    found = line.measured
    assert found is not None
    rate = found.images_per_second
    each, memory = found.processors_per_worker, found.peak_memory_per_worker
    return (
        line.cache,
        f"{rate.median:,.0f}",
        f"{rate.lowest:,.0f}..{rate.highest:,.0f}",
        _NONE if found.gain is None else f"{found.gain.median:.2f} x",
        f"{found.megabytes_per_second:.1f}",
        *(significant(wait) for wait in (found.wait_p50, found.wait_p95, found.wait_p99)),
        f"{found.first_batch:.2f}",
        f"{found.processors:.2f}",
        _NONE if each is None else f"{each:.2f}",
        f"{found.peak_memory / 2**20:,.0f}",
        _NONE if memory is None else f"{memory / 2**20:,.0f}",
    )


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    texts = [cells[0].ljust(widths[0])]
    texts += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
    return f"    {'  '.join(_grouped(texts))}".rstrip()


def _title(widths: Sequence[int]) -> str:
    """Return the line of the groups' names, each in the middle of its columns."""
    spans = map(len, _grouped(["-" * width for width in widths]))
    titles = [title.center(span) for (title, _), span in zip(_GROUPS, spans, strict=True)]
    return f"    {'  '.join(titles)}".rstrip()


def _grouped(cells: Sequence[str]) -> list[str]:
    """Join the cells of each group."""
    rest = iter(cells)
    found = []
    for title, names in _GROUPS:
        gap = "  " if title == "images/s" else " "
        found.append(gap.join(next(rest) for _ in names))
    return found


def _named(source: Source) -> str:
    what = f"{source.what}, {amount(source.total, 'image')}, {size(source.bytes)}"
    return f"{shortened(source.path, _WIDTH - len(what) - 2)}  {what}"


def _show_ground(report: BenchReport) -> None:
    """Print what the numbers hold for."""
    settings, where = report.settings, report.environment
    say()
    line("sample", sample_words(settings))
    line("step", step_words(settings))
    line("measured", f"{amount(settings['rounds'], 'round')} of {settings['seconds']:g} s")
    line("machine", f"{amount(where.processors, 'processor')}, {size(where.memory)}")
