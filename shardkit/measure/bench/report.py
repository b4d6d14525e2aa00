"""Results of `shardkit bench`, as data and as text."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardkit.measure.runner.material import Opened
from shardkit.measure.runner.rounds import Result, Spread
from shardkit.system.formatting import json_value, sample_words, significant, size, step_words
from shardkit.system.machine import OtherLoad
from shardkit.system.text import printable, shortened

VERSION = 3
"""Version of the JSON that `BenchReport.as_dict` returns."""

STAYED = 0.1
"""A cold line counts as cold if at most this fraction of its files stayed cached."""

UNSTEADY = 1.6
"""A line was disturbed if its fastest round is more than this many times as fast as its slowest."""

_PLACES = {"warm": "from memory", "cold": "from disk"}
_ROW = "    {:<5}{:>9}{:>15}{:>7}{:>13}{:>8}{:>8}{:>5}{:>9}{:>6}{:>6}"
_HEAD = _ROW.format(
    "cache",
    "images/s",
    "range",
    "ratio",
    "range",
    "p50 ms",
    "p95 ms",
    "wait",
    "first s",
    "CPUs",
    "MiB",
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Numbers of one line."""

    images_per_second: Spread
    speedup: Spread | None
    """Images/s divided by the baseline's in the same round; None for the baseline."""
    wait_p50: float
    """Median time in ms that the loop waited for a batch."""
    wait_p95: float
    waiting: float
    """Fraction of the time, 0 to 1, in which the loop waited for data."""
    first_batch: float
    """Median seconds from the start to the first batch, including the start of workers."""
    processors: float
    """Average number of CPUs used."""
    memory: int
    """Most bytes of memory of the process and its workers after a round."""
    engine: str
    workers: int
    resident: float | None
    """Largest fraction of a cold line's files, 0 to 1, that stayed cached; None if unknown."""
    warnings: tuple[str, ...]

    @property
    def cold(self) -> bool:
        """Whether the files of a cold line really were on disk."""
        return self.resident is not None and self.resident <= STAYED

    def row(self, cache: str) -> str:
        """Return the table row of a line."""
        rate, speedup = self.images_per_second, self.speedup
        return _ROW.format(
            cache,
            f"{rate.median:,.0f}",
            f"{rate.lowest:,.0f}..{rate.highest:,.0f}",
            f"{speedup.median:.2f}x" if speedup else "-",
            f"{speedup.lowest:.2f}..{speedup.highest:.2f}" if speedup else "-",
            significant(self.wait_p50),
            significant(self.wait_p95),
            f"{self.waiting:.0%}",
            f"{self.first_batch:.2f}",
            f"{self.processors:.2f}",
            f"{self.memory / 2**20:,.0f}",
        )


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
    def title(self) -> str:
        """The loader, and what ``auto`` became."""
        found, title = self.measured, shortened(self.loader, 60)
        if found is not None and not self.loader.startswith(found.engine):
            title += f": {found.engine} engine, {found.workers} worker{'s' * (found.workers != 1)}"
        return f"{title}  (the baseline)" if self.baseline else title


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """Result of `bench`."""

    sources: tuple[Opened, ...]
    """What was read."""
    lines: tuple[Line, ...]
    settings: dict[str, Any]
    """Rounds, seconds, batch size, samples and step."""
    environment: dict[str, Any]
    """Machine and versions, from `shardkit.measure.runner.environment`."""
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
    def measured(self) -> list[tuple[Line, Measured]]:
        """Lines that were measured, with their numbers."""
        return [(line, line.measured) for line in self.lines if line.measured]

    @property
    def folders(self) -> set[str]:
        """Plain folders, if datasets are compared with one; else empty."""
        folders = {each.path for each in self.sources if each.kind == "folder"}
        base = next(line.path for line in self.lines if line.baseline)
        return folders if base in folders and len(folders) < len(self.sources) else set()

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        answers = " and ".join(text for cache in _PLACES if (text := self._answer(cache)))
        if answers and self.folders:
            return f"Converting makes loading {answers}."
        if answers:
            return f"Compared with the baseline, the best loader is {answers}."
        if not self.measured:
            return "Nothing could be measured."
        if len({(line.path, line.loader) for line in self.lines}) > 1:
            return "Nothing can be compared; the lines show why."
        rates = [
            f"{found.images_per_second.median:,.0f} images/s "
            f"{_PLACES['cold' if found.cold else 'warm']}"
            for _, found in self.measured
        ]
        return f"It reads {' and '.join(rates)}."

    def _answer(self, cache: str) -> str:
        """Return how the best line compares with the baseline; empty if nothing can be compared."""
        found = [(line, each) for line, each in self.measured if line.cache == cache]
        if cache == "cold" and not all(each.cold for _, each in found):
            return ""
        # Reading a folder in another way is not a conversion.
        speedups = [each.speedup for line, each in found if line.path not in self.folders]
        best = max(filter(None, speedups), key=lambda each: each.median, default=None)
        if best is None:
            return ""
        if best.lowest <= 1 <= best.highest:
            return f"not clearly faster or slower {_PLACES[cache]} ({best.describe()})"
        return f"{best.median:.2f}x as fast {_PLACES[cache]}"

    @property
    def details(self) -> tuple[str, ...]:
        """What limits the answer, one sentence each."""
        texts = [each for _, found in self.measured for each in found.warnings]
        rounds, complete = self.settings["rounds"], self.settings["complete"]
        if self.interrupted:
            texts.append(f"Interrupted: the table shows {complete} of {rounds} rounds.")
        for line, found in self.measured:
            if line.cache == "cold" and not found.cold:
                part = "an unknown fraction" if found.resident is None else f"{found.resident:.0%}"
                texts.append(f"cold: {part} of {line.path} stayed cached, not read from disk.")
        for source in self.sources:
            if source.images < source.total:
                count = f"{source.images:,} of {source.total:,}"
                texts.append(f"{count} images of {source.path} were read.")
        spreads = [found.images_per_second for _, found in self.measured]
        unsteady = sum(each.highest > UNSTEADY * each.lowest for each in spreads)
        if unsteady or self.load.disturbs:
            why = f"{unsteady} of {len(spreads)} lines vary by more than {UNSTEADY}x between rounds"
            why = why if unsteady else f"{self.load}"
            texts.append(f"{why[0].upper()}{why[1:]}: measure again on an idle machine.")
        if self.failed:
            failed = sum(bool(line.problem) for line in self.lines)
            texts.append(f"{failed} of {len(self.lines)} lines could not be measured.")
        return tuple(dict.fromkeys(texts))

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
        lines, last = [_HEAD], None
        for line in self.lines:
            if last is None or line.path != last.path:
                lines.append(next(each.title for each in self.sources if each.path == line.path))
            if last is None or (line.path, line.loader) != (last.path, last.loader):
                lines.append(f"  {line.title}")
            failure = f"    {line.cache} failed: {shortened(line.problem, 80)}"
            lines.append(line.measured.row(line.cache) if line.measured else failure)
            last = line
        settings, where = self.settings, self.environment
        return "\n".join(
            [
                *lines,
                "",
                f"  sample    {sample_words(settings)}",
                f"  step      {step_words(settings)}",
                f"  measured  {settings['complete']} rounds of {settings['length']}; "
                f"{where['processors']} CPUs, {size(where['memory'])}",
            ]
        )


def line_of(result: Result, baseline: Result, loader: str = "") -> Line:
    """Return the line of a candidate; ``loader`` replaces the loader's own name."""
    candidate = result.candidate
    return Line(
        path=candidate.subject.path,
        loader=loader or str(candidate.loader),
        cache=candidate.cache,
        baseline=result is baseline,
        measured=_measured(result, baseline) if result.samples else None,
        problem=result.problem,
    )


def _measured(result: Result, baseline: Result) -> Measured:
    samples, last = result.samples, result.samples[-1]
    waits = [wait for each in samples for wait in each.waits]
    p50, p95 = 1000 * np.percentile(waits, (50, 95), method="inverted_cdf")  # measured values
    seconds = sum(each.seconds for each in samples)
    compared = result is not baseline and bool(baseline.samples)
    return Measured(
        images_per_second=Spread.of(result.rates),
        speedup=Spread.paired(result.rates, baseline.rates) if compared else None,
        wait_p50=float(p50),
        wait_p95=float(p95),
        waiting=min(1.0, sum(waits) / seconds),
        first_batch=statistics.median(each.first for each in samples),
        processors=sum(each.cpu for each in samples) / seconds,
        memory=max(each.memory for each in samples),
        engine=last.engine,
        workers=last.workers,
        resident=result.resident if result.candidate.cache == "cold" else None,
        warnings=tuple(dict.fromkeys(text for each in samples for text in each.warnings)),
    )
