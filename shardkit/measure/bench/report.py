"""What `shardkit bench` found, as values: tables, JSON, plots and pages all tell these."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardkit.measure.runner.environment import Environment
from shardkit.measure.runner.rounds import Outcome
from shardkit.system.formatting import json_value, speedup_words
from shardkit.system.machine import OtherLoad
from shardkit.system.text import printable

VERSION = 1
"""Of the JSON that `BenchReport.as_dict` gives."""

STAYED = 0.1
"""A cold line of whose files a larger part than this was in memory does not count as cold."""

UNSTEADY = 1.6
"""A line whose fastest round is more than so many times as fast as its slowest was disturbed."""

_PLACES = {"warm": "from memory", "cold": "from disk"}


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A number that each round gave, in the middle and at its ends."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one value or more."""
        return cls(median=statistics.median(values), lowest=min(values), highest=max(values))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Numbers of one line."""

    images_per_second: Spread
    rounds: tuple[float, ...]
    """Images/s of each round, in their order."""
    megabytes_per_second: float
    """Of stored bytes, in millions."""
    batches: int
    """That were waited for, in all rounds."""
    wait_p50: float
    """Milliseconds that the loop waited for a batch: half of them came sooner."""
    wait_p95: float
    wait_p99: float
    waiting: float
    """Share of the time, 0 to 1, in which the loop waited for a batch."""
    first_batch: float
    """Seconds from the beginning to the first batch, the start of workers included; a median."""
    processors: float
    """Processors that were used, in the mean: 1.9 is nearly two."""
    processors_per_worker: float | None
    """The same for each worker, thread or process; None without workers."""
    peak_memory: int
    """Bytes of memory that the main process had at the most, shared ones included."""
    peak_memory_per_worker: int | None
    """The same of the worker process that had the most; None where workers are no processes, or
    had ended."""
    engine: str
    reason: str
    """Why it was this engine; empty for PyTorch's own loader."""
    workers: int
    resident: float | None
    """Of a cold line: the largest part of the files, 0 to 1, that was in memory nevertheless when
    a round began; None if it is not known, and for a warm one."""
    warnings: tuple[str, ...]
    gain: Spread | None = None
    """Images/s in relation to the baseline's of the same round; None if that was not measured."""

    @property
    def cold(self) -> bool:
        """Whether the files of a cold line really were on disk."""
        return self.resident is not None and self.resident <= STAYED


@dataclass(frozen=True, kw_only=True)
class Line:
    """One dataset or folder, read by one loader, warm or cold."""

    path: str
    loader: str
    """As it is given to ``--loader``."""
    cache: str
    """``warm`` or ``cold``."""
    baseline: bool
    """Whether others are compared with this one."""
    measured: Measured | None
    problem: str
    """Why it could not be measured; empty if it was."""

    @property
    def chosen(self) -> str:
        """What ``auto`` became; empty if the loader's name tells it."""
        found = self.measured
        if found is None or self.loader.startswith(found.engine):
            return ""
        return f"{found.engine} engine, {found.workers} worker{'s' if found.workers != 1 else ''}"


@dataclass(frozen=True, kw_only=True)
class Source:
    """What was read."""

    path: str
    kind: str
    """``dataset`` or ``folder``."""
    split: str
    """Which split was read, the largest; nothing if there are none."""
    images: int
    """That were read."""
    total: int
    """That there are."""
    bytes: int
    """Of all files that there are."""
    mean_bytes: float
    """Of an image, as it is stored."""
    filesystem: str
    """Its kind; empty if the system does not tell."""

    @property
    def what(self) -> str:
        """What was read, in words."""
        return f"{self.kind}, split {printable(self.split)}" if self.split else self.kind


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """What was measured, of what, how and where."""

    sources: tuple[Source, ...]
    lines: tuple[Line, ...]
    settings: dict[str, Any]
    """Rounds, seconds, batch size, what a sample is, what is done with a batch."""
    environment: Environment
    load: OtherLoad
    """What others did when it began."""
    command: str = ""
    """That measured it, if it was one."""

    @property
    def failed(self) -> bool:
        """Whether a line could not be measured."""
        return any(line.problem for line in self.lines)

    @property
    def headline(self) -> str:
        """The answer, in one sentence."""
        if not any(line.measured for line in self.lines):
            return "Nothing could be measured."
        told = [text for cache in _PLACES if (text := _compared(self, cache))]
        groups = {(line.path, line.loader) for line in self.lines}
        if all(line.cache == "cold" for line in self.lines) and not _really_cold(self):
            return _not_cold(self)
        if not told and len(groups) == 1:
            return f"It gives {' and '.join(self._alone())}."
        if not told:
            return "Nothing can be compared; the lines tell why."
        if self.against_folder:
            return f"Converting makes loading {' and '.join(told)}."
        return f"The best of the others gives {' and '.join(told)}."

    @property
    def details(self) -> tuple[str, ...]:
        """What stands behind the answer, and what takes from it; a sentence each."""
        found = [text for cache in _PLACES if (text := _explained(self, cache))]
        return (*found, *_doubts(self))

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON values; None stands for a number that is not one."""
        told = {"headline": self.headline, "details": list(self.details)}
        found = json_value({"shardkit_bench": VERSION, **told, **dataclasses.asdict(self)})
        assert isinstance(found, dict)
        return found

    def kind(self, path: str) -> str:
        """Return whether a path is a ``dataset`` or a ``folder``."""
        return next(source.kind for source in self.sources if source.path == path)

    @property
    def against_folder(self) -> bool:
        """Whether datasets are compared with a plain folder of images."""
        kinds = {source.kind for source in self.sources}
        base = next(line for line in self.lines if line.baseline)
        return len(kinds) > 1 and self.kind(base.path) == "folder"

    def _alone(self) -> list[str]:
        return [
            f"{line.measured.images_per_second.median:,.0f} images/s {_place(line.measured)}"
            for line in self.lines
            if line.measured
        ]


def measured(outcome: Outcome, baseline: Outcome | None) -> Measured | None:
    """Return the numbers of a line; None if it has none."""
    if not outcome.seen:
        return None
    looks = [each.look for each in outcome.seen]
    waits, seconds, last = outcome.waits, sum(each.seconds for each in looks), outcome.seen[-1]
    rate, workers = Spread.of(outcome.rates), last.workers
    worker_peak = max(each.worker_peak for each in looks)
    warnings = dict.fromkeys(text for each in outcome.seen for text in each.warnings)
    return Measured(
        images_per_second=rate,
        rounds=tuple(outcome.rates),
        megabytes_per_second=rate.median * outcome.mean_bytes / 1e6,
        batches=len(waits),
        wait_p50=1000 * percentile(waits, 50),
        wait_p95=1000 * percentile(waits, 95),
        wait_p99=1000 * percentile(waits, 99),
        waiting=min(1.0, sum(waits) / seconds),
        first_batch=statistics.median(each.first for each in looks),
        processors=sum(each.cpu for each in looks) / seconds,
        processors_per_worker=(
            sum(each.worker_cpu for each in looks) / seconds / workers if workers else None
        ),
        peak_memory=max(each.peak for each in looks),
        peak_memory_per_worker=worker_peak or None,
        engine=last.engine,
        reason=last.reason,
        workers=workers,
        resident=outcome.resident if outcome.contender.cache == "cold" else None,
        warnings=tuple(warnings),
        gain=_gain(outcome, baseline),
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the least of some sorted values that ``percent`` % of them do not exceed."""
    return values[max(0, math.ceil(len(values) * percent / 100) - 1)] if values else math.nan


def _gain(outcome: Outcome, baseline: Outcome | None) -> Spread | None:
    """Compare round with round: what ran a minute later ran on another machine."""
    if baseline is None or not baseline.seen:
        return None
    pairs = zip(outcome.rates, baseline.rates, strict=True)
    gains = [mine / other for mine, other in pairs if other]
    return Spread.of(gains) if gains else None


def _best(report: BenchReport, cache: str) -> Line | None:
    """Return the line that the answer is about; None if there is nothing to compare."""
    wanted = [
        line
        for line in report.lines
        if line.cache == cache and not line.baseline and _gain_of(line) is not None
    ]
    if report.against_folder:  # a folder read in another way answers nothing
        wanted = [line for line in wanted if report.kind(line.path) == "dataset"]
    return max(wanted, key=lambda line: _gain_of(line) or 0.0, default=None)


def _gain_of(line: Line) -> float | None:
    found = line.measured and line.measured.gain
    return found.median if found else None


def _compared(report: BenchReport, cache: str) -> str:
    best = _best(report, cache)
    if best is None or best.measured is None or best.measured.gain is None:
        return ""
    if cache == "cold" and not _really_cold(report):
        return ""
    gain, place = best.measured.gain, _PLACES[cache]
    same = gain.lowest <= 1 <= gain.highest
    if report.against_folder:
        how = "neither faster nor slower" if same else f"{gain.median:.1f} x as fast"
    elif same or gain.median < 1:
        how = "no more than the first line"
    else:
        how = f"{gain.median:.1f} x as much as the first line"
    return f"{how} {place}{', beyond what the rounds differ by' if same else ''}"


def _explained(report: BenchReport, cache: str) -> str:
    best = _best(report, cache) if cache == "warm" or _really_cold(report) else None
    base = next((each for each in report.lines if each.baseline and each.cache == cache), None)
    if best is None or base is None or best.measured is None or base.measured is None:
        return ""
    gain = best.measured.gain
    assert gain is not None
    speedup = speedup_words(gain.median, gain.lowest, gain.highest, len(best.measured.rounds))
    text = (
        f"{cache}: {best.path} with {best.loader}, compared with {base.path} with {base.loader}: "
        f"{speedup}"
    )
    if report.settings["step_ms"] or report.settings["model"]:
        text += (
            f"; the loop waits for data {best.measured.waiting:.0%} and "
            f"{base.measured.waiting:.0%} of the time"
        )
    return f"{text}."


def _place(found: Measured) -> str:
    return _PLACES["cold" if found.cold else "warm"]


def _really_cold(report: BenchReport) -> bool:
    return all(
        line.measured.cold for line in report.lines if line.measured and line.cache == "cold"
    )


def _not_cold(report: BenchReport) -> str:
    if any(line.measured and line.measured.resident is None for line in report.lines):
        return "Whether anything was read from disk is not known: the system does not tell."
    return "Nothing was read from disk: the files stayed in memory."


def _stayed(resident: float | None, path: str) -> str:
    if resident is None:
        return (
            f"it is not known whether {path} was read from disk: the system tells it of files that "
            "you own or may write, and not on all file systems."
        )
    return f"{resident:.0%} of {path} stayed in memory: it is not read from disk."


def _doubts(report: BenchReport) -> list[str]:
    stayed = [
        f"cold: {_stayed(line.measured.resident, line.path)}"
        for line in report.lines
        if line.cache == "cold" and line.measured and not line.measured.cold
    ]
    sampled = [
        f"{source.images:,} of {source.total:,} images of {source.path} were read."
        for source in report.sources
        if source.images < source.total
    ]
    rounds = report.settings["rounds"]
    few = ["One or two rounds do not show what is chance: --rounds 5 does."] if rounds < 3 else []
    spreads = [line.measured.images_per_second for line in report.lines if line.measured]
    unsteady = sum(each.highest > UNSTEADY * each.lowest for each in spreads)
    if unsteady:
        few.append(
            f"In {unsteady} of {len(spreads)} lines the rounds differ by more than {UNSTEADY} x: "
            "something else uses this machine, so measure again when it is idle."
        )
    elif report.load.disturbs:
        load = str(report.load)
        few.append(f"{load[0].upper()}{load[1:]}: measure again when it is idle.")
    failed = sum(1 for line in report.lines if line.problem)
    lost = [f"{failed} of {len(report.lines)} lines could not be measured."] if failed else []
    return [*dict.fromkeys(stayed), *sampled, *few, *lost]
