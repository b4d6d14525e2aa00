"""Results of `shardkit bench`, as data and as text."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardkit.measure.runner.material import SubjectInfo
from shardkit.measure.runner.other_load import OtherLoad
from shardkit.measure.runner.rounds import Result, Spread
from shardkit.system.numbers import json_value, significant
from shardkit.system.text import amount, printable, shortened, size

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
        rate = self.images_per_second
        speedup = self.speedup
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
        measured = self.measured
        title = shortened(self.loader, 60)
        if measured is not None and not self.loader.startswith(measured.engine):
            title += f": {measured.engine} engine, {amount(measured.workers, 'worker')}"
        return f"{title}  (the baseline)" if self.baseline else title


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """Result of `bench`."""

    sources: tuple[SubjectInfo, ...]
    """The datasets and folders that were read."""
    lines: tuple[Line, ...]
    settings: dict[str, Any]
    """Rounds, seconds, batch size, samples and step."""
    environment: dict[str, Any]
    """Machine and versions, from `shardkit.measure.runner.environment`."""
    load: OtherLoad
    """CPU use of other processes at the start."""
    interrupted: bool = False
    """Whether Ctrl-C ended it early. If so, only complete rounds count."""
    command: str = ""
    """Command that ran the measurement, if there was one."""

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
        """Plain folders, if datasets are compared with one; otherwise empty."""
        folders = {source.path for source in self.sources if source.kind == "folder"}
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
            f"{amount(round(measured.images_per_second.median), 'image')}/s "
            f"{_PLACES['cold' if measured.cold else 'warm']}"
            for _, measured in self.measured
        ]
        return f"It reads {' and '.join(rates)}."

    def _answer(self, cache: str) -> str:
        """Return how the best line compares with the baseline; empty if nothing can be compared."""
        compared = [pair for pair in self.measured if pair[0].cache == cache]
        if cache == "cold" and not all(measured.cold for _, measured in compared):
            return ""
        # Reading a folder in another way is not a conversion.
        speedups = [
            measured.speedup for line, measured in compared if line.path not in self.folders
        ]
        best = max(filter(None, speedups), key=lambda speedup: speedup.median, default=None)
        if best is None:
            return ""
        if best.lowest <= 1 <= best.highest:
            return f"not clearly faster or slower {_PLACES[cache]} ({best.describe()})"
        return f"{best.median:.2f}x as fast {_PLACES[cache]}"

    @property
    def details(self) -> tuple[str, ...]:
        """Limits of the answer, one sentence each."""
        texts = [text for _, measured in self.measured for text in measured.warnings]
        rounds = self.settings["rounds"]
        complete = self.settings["complete"]
        if self.interrupted:
            texts.append(f"Interrupted: the table shows {complete} of {rounds} rounds.")
        for line, measured in self.measured:
            if line.cache == "cold" and not measured.cold:
                resident = measured.resident
                fraction = "an unknown fraction" if resident is None else f"{resident:.0%}"
                texts.append(f"cold: {fraction} of {line.path} stayed cached, not read from disk.")
        for source in self.sources:
            if source.images < source.total:
                count = f"{source.images:,} of {source.total:,}"
                texts.append(f"{count} images of {source.path} were read.")
        spreads = [measured.images_per_second for _, measured in self.measured]
        unsteady = sum(spread.highest > UNSTEADY * spread.lowest for spread in spreads)
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
        answer = [printable(self.headline), *(f"  {printable(detail)}" for detail in self.details)]
        return "\n".join([self.table(), "", *answer])

    def table(self) -> str:
        """Return the measurements and their settings as text."""
        lines = [_HEAD]
        last = None
        for line in self.lines:
            if last is None or line.path != last.path:
                lines.append(
                    next(source.title for source in self.sources if source.path == line.path)
                )
            if last is None or (line.path, line.loader) != (last.path, last.loader):
                lines.append(f"  {line.title}")
            failure = f"    {line.cache} failed: {shortened(line.problem, 80)}"
            lines.append(line.measured.row(line.cache) if line.measured else failure)
            last = line
        settings = self.settings
        where = self.environment
        return "\n".join(
            [
                *lines,
                "",
                f"  sample    {_sample_words(settings)}",
                f"  step      {_step_words(settings)}",
                f"  measured  {amount(settings['complete'], 'round')} of {settings['length']}; "
                f"{where['processors']} CPUs, {size(where['memory'])}",
            ]
        )


def _sample_words(settings: dict[str, Any]) -> str:
    """Describe the samples and batches of a report's settings."""
    texts = [printable(settings["decode"])]
    if settings["transform"]:
        texts.append(f"then {printable(settings['transform'])}")
    return f"{' '.join(texts)}, batches of {settings['batch_size']}, in random order"


def _step_words(settings: dict[str, Any]) -> str:
    """Describe the training step of a report's settings."""
    if settings["model"]:
        return f"training {printable(settings['model'])} with each batch"
    if settings["step_ms"]:
        return f"a {settings['step_ms']:g} ms wait for each batch"
    return "none: batches are read and discarded"


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
    samples = result.samples
    last = result.samples[-1]
    waits = [wait for sample in samples for wait in sample.waits]
    p50, p95 = 1000 * np.percentile(waits, (50, 95), method="inverted_cdf")  # measured values
    seconds = sum(sample.seconds for sample in samples)
    compared = result is not baseline and bool(baseline.samples)
    return Measured(
        images_per_second=Spread.of(result.rates),
        speedup=Spread.paired(result.rates, baseline.rates) if compared else None,
        wait_p50=float(p50),
        wait_p95=float(p95),
        waiting=min(1.0, sum(waits) / seconds),
        first_batch=statistics.median(sample.first for sample in samples),
        processors=sum(sample.cpu for sample in samples) / seconds,
        memory=max(sample.memory for sample in samples),
        engine=last.engine,
        workers=last.workers,
        resident=result.resident if result.candidate.cache == "cold" else None,
        warnings=tuple(dict.fromkeys(text for sample in samples for text in sample.warnings)),
    )
