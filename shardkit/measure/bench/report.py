"""Results of `shardkit bench`, as data and as text."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardkit.measure.runner.rounds import Result, Spread
from shardkit.system.formatting import json_value, sample_words, significant, size, step_words
from shardkit.system.machine import OtherLoad
from shardkit.system.text import printable, shortened

VERSION = 2
"""Version of the JSON that `BenchReport.as_dict` returns."""

STAYED = 0.1
"""A cold line counts as cold if at most this fraction of its files stayed cached."""

UNSTEADY = 1.6
"""A line was disturbed if its fastest round is more than this many times as fast as its slowest."""

_PLACES = {"warm": "from memory", "cold": "from disk"}
_WIDTH = 98
_GROUPS = (
    ("", ("cache",)),
    ("images/s", ("median", "range")),
    ("times baseline", ("median", "range")),
    ("wait, ms", ("p50", "p95", "p99")),
    ("waiting", ("%",)),
    ("first", ("s",)),
    ("CPUs", ("",)),
    ("memory", ("MiB",)),
)
"""Columns of the table, in groups."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Numbers of one line."""

    images_per_second: Spread
    speedup: Spread | None
    """Images/s divided by the baseline's in the same round; None for the baseline."""
    wait_p50: float
    """Median time in ms that the loop waited for a batch."""
    wait_p95: float
    wait_p99: float
    waiting: float
    """Fraction of the time, 0 to 1, in which the loop waited for data."""
    first_batch: float
    """Median seconds from the start to the first batch, including the start of workers."""
    processors: float
    """Average number of CPUs used."""
    memory: int
    """Most bytes of memory of the process and its workers after a round."""
    engine: str
    reason: str
    """Why ``auto`` chose this engine."""
    workers: int
    resident: float | None
    """Of a cold line: largest fraction of the files, 0 to 1, that stayed cached; None if unknown,
    and for a warm line."""
    warnings: tuple[str, ...]

    @property
    def cold(self) -> bool:
        """Whether the files of a cold line really were on disk."""
        return self.resident is not None and self.resident <= STAYED

    def cells(self) -> list[str]:
        """Return the table cells of a line."""
        rate, speedup = self.images_per_second, self.speedup
        return [
            f"{rate.median:,.0f}",
            f"{rate.lowest:,.0f}..{rate.highest:,.0f}",
            "-" if speedup is None else f"{speedup.median:.2f}x",
            "-" if speedup is None else f"{speedup.lowest:.2f}..{speedup.highest:.2f}",
            *(significant(wait) for wait in (self.wait_p50, self.wait_p95, self.wait_p99)),
            f"{100 * self.waiting:.0f}",
            f"{self.first_batch:.2f}",
            f"{self.processors:.2f}",
            f"{self.memory / 2**20:,.0f}",
        ]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One dataset or folder, read by one loader, warm or cold."""

    path: str
    loader: str
    """The loader as in ``--loader``."""
    cache: str
    """``warm`` or ``cold``."""
    baseline: bool
    """Whether the others are compared with this one."""
    measured: Measured | None
    problem: str
    """Why it could not be measured; empty if it was."""

    @property
    def chosen(self) -> str:
        """What ``auto`` became; empty if the loader's name shows it."""
        found = self.measured
        if found is None or self.loader.startswith(found.engine):
            return ""
        return f"{found.engine} engine, {found.workers} worker{'s' if found.workers != 1 else ''}"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A dataset or folder that was read."""

    path: str
    kind: str
    """``dataset`` or ``folder``."""
    split: str
    """Split that was read, the largest; empty without splits."""
    images: int
    """Images that were read."""
    total: int
    bytes: int
    """Bytes of all files."""

    @property
    def what(self) -> str:
        """Kind and split."""
        return f"{self.kind}, split {printable(self.split)}" if self.split else self.kind


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """Result of `bench`."""

    sources: tuple[Source, ...]
    lines: tuple[Line, ...]
    settings: dict[str, Any]
    """Rounds, seconds, batch size, samples and step."""
    environment: dict[str, Any]
    load: OtherLoad
    """CPU use of other processes at the start."""
    interrupted: bool = False
    """Whether Ctrl-C ended it early; then only complete rounds count."""
    command: str = ""
    """Command that measured it, if there was one."""

    @property
    def failed(self) -> bool:
        """Whether a line could not be measured."""
        return any(line.problem for line in self.lines)

    @property
    def against_folder(self) -> bool:
        """Whether datasets are compared with a plain folder of images."""
        base = next(line for line in self.lines if line.baseline)
        return self.kind(base.path) == "folder" and len({each.kind for each in self.sources}) > 1

    def kind(self, path: str) -> str:
        """Return whether a path is a ``dataset`` or a ``folder``."""
        return next(source.kind for source in self.sources if source.path == path)

    @property
    def measured(self) -> list[tuple[Line, Measured]]:
        """Lines that were measured, with their numbers."""
        return [(line, line.measured) for line in self.lines if line.measured]

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        if not self.measured:
            return "Nothing could be measured."
        if all(line.cache == "cold" for line in self.lines) and not self._really_cold():
            return "Nothing was read from disk, as far as the system shows: files stayed cached."
        answers = [text for cache in _PLACES if (text := self._answer(cache))]
        if answers and self.against_folder:
            return f"Converting makes loading {' and '.join(answers)}."
        if answers:
            return f"Compared with the baseline, the best loader is {' and '.join(answers)}."
        if len({(line.path, line.loader) for line in self.lines}) > 1:
            return "Nothing can be compared; the lines show why."
        rates = [
            f"{found.images_per_second.median:,.0f} images/s "
            f"{_PLACES['cold' if found.cold else 'warm']}"
            for _, found in self.measured
        ]
        return f"It reads {' and '.join(rates)}."

    @property
    def details(self) -> tuple[str, ...]:
        """What limits the answer, one sentence each."""
        return tuple(dict.fromkeys(self._details()))

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values; None stands for NaN and infinity."""
        texts = {"headline": self.headline, "details": list(self.details)}
        values: dict[str, Any] = json_value(
            {"shardkit_bench": VERSION, **texts, **dataclasses.asdict(self)}
        )
        return values

    def describe(self) -> str:
        """Return the report as text for a terminal of 100 columns: the table and the answer."""
        answer = [printable(self.headline), *(f"  {printable(each)}" for each in self.details)]
        return "\n".join([self.table(), "", *answer])

    def table(self) -> str:
        """Return the measurements and their settings as text."""
        rows = [[line.cache, *found.cells()] for line, found in self.measured]
        names = [name for _, columns in _GROUPS for name in columns]
        widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
        spans = map(len, _grouped(["-" * width for width in widths]))
        titles = [title.center(span) for (title, _), span in zip(_GROUPS, spans, strict=True)]
        lines = [f"    {'  '.join(titles)}".rstrip(), _row(names, widths)]
        for source in self.sources:
            what = f"{source.what}, {source.total:,} images, {size(source.bytes)}"
            lines.append(f"{shortened(source.path, _WIDTH - len(what) - 2)}  {what}")
            last = ""
            for line in (each for each in self.lines if each.path == source.path):
                if line.loader != last:
                    chosen = f": {line.chosen}" if line.chosen else ""
                    base = "  (the baseline)" if line.baseline else ""
                    lines.append(f"  {shortened(line.loader, 60)}{chosen}{base}")
                    last = line.loader
                if line.measured:
                    lines.append(_row([line.cache, *line.measured.cells()], widths))
                else:
                    lines.append(f"    {line.cache}  failed: {shortened(line.problem, 80)}")
        settings, where = self.settings, self.environment
        return "\n".join(
            [
                *lines,
                "",
                f"  sample    {sample_words(settings)}",
                f"  step      {step_words(settings)}",
                f"  measured  {settings['complete']} rounds of {settings['seconds']:g} s; "
                f"{where['processors']} CPUs, {size(where['memory'])}",
            ]
        )

    def _answer(self, cache: str) -> str:
        """Return how the best line compares with the baseline; empty if nothing can be compared."""
        speedups = [
            found.speedup
            for line, found in self.measured
            if line.cache == cache
            # Reading a folder in another way is not a conversion.
            and not (self.against_folder and self.kind(line.path) == "folder")
        ]
        best = max(filter(None, speedups), key=lambda each: each.median, default=None)
        if best is None or (cache == "cold" and not self._really_cold()):
            return ""
        if best.lowest <= 1 <= best.highest:
            return f"not clearly faster or slower {_PLACES[cache]} ({best.describe()})"
        return f"{best.median:.2f}x as fast {_PLACES[cache]}"

    def _really_cold(self) -> bool:
        return all(found.cold for line, found in self.measured if line.cache == "cold")

    def _details(self) -> list[str]:
        texts = [each for _, found in self.measured for each in found.warnings]
        if self.interrupted:
            complete, planned = self.settings["complete"], self.settings["rounds"]
            texts.append(f"Interrupted: the table shows {complete} of {planned} rounds.")
        elif self.settings["rounds"] < 3:
            texts.append("One or two rounds do not show chance variation: use --rounds 5.")
        for line, found in self.measured:
            if line.cache == "cold" and not found.cold:
                stayed = (
                    "an unknown fraction" if found.resident is None else f"{found.resident:.0%}"
                )
                texts.append(f"cold: {stayed} of {line.path} stayed cached, not read from disk.")
        texts += [
            f"{source.images:,} of {source.total:,} images of {source.path} were read."
            for source in self.sources
            if source.images < source.total
        ]
        spreads = [found.images_per_second for _, found in self.measured]
        unsteady = sum(each.highest > UNSTEADY * each.lowest for each in spreads)
        if unsteady or self.load.disturbs:
            why = f"{unsteady} of {len(spreads)} lines vary by more than {UNSTEADY}x between rounds"
            why = why if unsteady else f"{self.load}"
            texts.append(f"{why[0].upper()}{why[1:]}: measure again on an idle machine.")
        failed = sum(1 for line in self.lines if line.problem)
        if failed:
            texts.append(f"{failed} of {len(self.lines)} lines could not be measured.")
        return texts


def measured(result: Result, baseline: Result | None) -> Measured | None:
    """Return the numbers of a line; None if it has none."""
    if not result.samples:
        return None
    samples, waits, last = result.samples, result.waits, result.samples[-1]
    seconds = sum(each.seconds for each in samples)
    compared = baseline is not None and bool(baseline.samples)
    return Measured(
        images_per_second=Spread.of(result.rates),
        speedup=Spread.paired(result.rates, baseline.rates) if baseline and compared else None,
        wait_p50=1000 * percentile(waits, 50),
        wait_p95=1000 * percentile(waits, 95),
        wait_p99=1000 * percentile(waits, 99),
        waiting=min(1.0, sum(waits) / seconds),
        first_batch=statistics.median(each.first for each in samples),
        processors=sum(each.cpu for each in samples) / seconds,
        memory=max(each.memory for each in samples),
        engine=last.engine,
        reason=last.reason,
        workers=last.workers,
        resident=result.resident if result.candidate.cache == "cold" else None,
        warnings=tuple(dict.fromkeys(text for each in samples for text in each.warnings)),
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the smallest of some sorted values that ``percent`` % of them do not exceed."""
    return values[max(0, math.ceil(len(values) * percent / 100) - 1)] if values else math.nan


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    texts = [cells[0].ljust(widths[0])]
    texts += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
    return f"    {'  '.join(_grouped(texts))}".rstrip()


def _grouped(cells: Sequence[str]) -> list[str]:
    """Join the cells of each group of columns."""
    rest = iter(cells)
    return [" ".join(next(rest) for _ in names) for _, names in _GROUPS]
