"""Interleaved rounds: every candidate is measured once per round, in turning order.

The speed of a machine changes from minute to minute. So only measurements of one round are
compared, and a speedup is the median of the rounds' ratios.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from shardkit.errors import MeasurementFailed
from shardkit.measure.runner.material import Opened
from shardkit.measure.runner.process import MeasurementProcess
from shardkit.measure.runner.spec import PLAIN, LoaderSpec, StepSpec, StopCondition, Subject
from shardkit.measure.runner.timing import Measurement
from shardkit.system.formatting import speedup_words

CACHES = ("warm", "cold")
"""``warm``: the files are cached. ``cold``: their pages were dropped before."""

COLD_MOST = 10
"""A cold measurement is one epoch, since later ones are warm; at most this many times as long as a
warm one."""

_AGREE = 3
"""Fewer rounds than this may agree by chance."""

T = TypeVar("T")

Watch = Callable[[str, float, float], None]
"""Called before each measurement with its name, the work done, and all work."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One loader of one subject."""

    name: str
    subject: Subject
    loader: LoaderSpec
    cache: str = "warm"
    step: StepSpec = field(default_factory=StepSpec)
    """What is done with each batch."""
    stop: StopCondition | None = None
    """When a measurement ends, instead of the usual length; one epoch in the first round."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median and range of a number that each round measured."""

    median: float
    lowest: float
    highest: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one or more values."""
        return cls(
            median=statistics.median(values),
            lowest=min(values),
            highest=max(values),
            rounds=len(values),
        )

    @classmethod
    def paired(cls, rates: Sequence[float], others: Sequence[float]) -> Spread:
        """Return the spread of the ratios of two candidates in the same rounds."""
        return cls.of([rate / other for rate, other in zip(rates, others, strict=True)])

    @property
    def clear(self) -> bool:
        """Whether at least three rounds measured a ratio, and all agree which is faster."""
        return self.rounds >= _AGREE and (self.lowest > 1 or self.highest < 1)

    def describe(self) -> str:
        """Return a ratio as text: ``1.94x (1.57x to 3.50x in 5 rounds)``."""
        return speedup_words(self.median, self.lowest, self.highest, self.rounds)


@dataclass(kw_only=True)
class Result:
    """Measurements of a candidate."""

    candidate: Candidate
    opened: Opened | None = None
    """What the subject contains; None if it could not be opened."""
    samples: list[Measurement] = field(default_factory=list)
    """One per round; empty if one of them failed."""
    resident: float | None = 0.0
    """Largest fraction of the files, 0 to 1, that stayed cached before a cold measurement; None if
    unknown."""
    problem: str = ""
    """Why it could not be measured."""

    @property
    def rates(self) -> list[float]:
        """Images per second in each round."""
        return [each.rate for each in self.samples]

    @property
    def waits(self) -> list[float]:
        """Seconds that each batch of all rounds was waited for, sorted."""
        return sorted(wait for each in self.samples for wait in each.waits)


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Results of interleaved rounds."""

    results: list[Result]
    """In the order of the candidates."""
    complete: int
    """Rounds that measured every candidate."""
    interrupted: bool = False
    """Whether Ctrl-C ended the measurement early."""


def turn(items: Sequence[T], number: int) -> list[T]:
    """Return the order in which round ``number`` measures the items: each is first in turn."""
    shift = number % max(1, len(items))
    return [*items[shift:], *items[:shift]]


def run_interleaved(
    candidates: Sequence[Candidate],
    *,
    rounds: int,
    seconds: float,
    watch: Watch = lambda text, done, total: None,
) -> Rounds:
    """Measure candidates in rounds, after one short round that does not count.

    Ctrl-C keeps the complete rounds.

    Args:
        candidates: Those of one subject share a process, except for PyTorch's own loader.
        rounds: Number of rounds that count.
        seconds: Length of a warm measurement; a cold one is an epoch.
        watch: Called before each measurement.

    Raises:
        UsageError: If a candidate is invalid.
        KeyboardInterrupt: If no round is complete.
    """
    results = [Result(candidate=each) for each in candidates]
    complete, interrupted = 0, False
    with contextlib.ExitStack() as stack:
        processes = _Processes(results, stack)
        try:
            for number in range(rounds + 1):
                for place, result in enumerate(turn(results, number)):
                    if not result.problem:
                        done = number * len(results) + place
                        watch(result.candidate.name, done, (rounds + 1) * len(results))
                        length = seconds if number else seconds / 4
                        processes.measure(result, length, counts=number > 0)
                complete = number
        except KeyboardInterrupt:
            if not complete:
                raise
            interrupted = True
    for result in results:
        del result.samples[complete:]
    return Rounds(results=results, complete=complete, interrupted=interrupted)


class _Processes:
    """The processes that measure candidates."""

    def __init__(self, results: Sequence[Result], stack: contextlib.ExitStack) -> None:
        """Start all processes at once, since each imports PyTorch first, and open the subjects."""
        self._processes: dict[Any, MeasurementProcess] = {}
        self._cooled = {
            # A whole dataset may not fit in memory.
            each.candidate.subject
            for each in results
            if each.candidate.subject.limit is not None
        }
        opened: dict[Any, Opened | str] = {}
        for result in results:
            key = _key(result.candidate)
            if key not in self._processes:
                process = MeasurementProcess(result.candidate.subject)
                self._processes[key] = stack.enter_context(process)
        for key, process in self._processes.items():
            try:
                opened[key] = process.open()
            except MeasurementFailed as error:
                opened[key] = str(error)
        for result in results:
            found = opened[_key(result.candidate)]
            if isinstance(found, str):
                result.problem = found
            else:
                result.opened = found

    def measure(self, result: Result, seconds: float, *, counts: bool) -> None:
        """Measure a candidate once, or note why that failed."""
        candidate, subject = result.candidate, result.candidate.subject
        stop = candidate.stop or StopCondition(seconds=seconds)
        if candidate.stop is not None and not counts:
            stop = replace(stop, epochs=1)
        try:
            process = self._processes[_key(candidate)]
            process.restart_if_ended()  # another candidate's transform may have ended it
            if candidate.cache == "cold":
                stayed = process.drop()
                known = stayed is not None and result.resident is not None
                result.resident = max(stayed or 0.0, result.resident or 0.0) if known else None
                stop = StopCondition(epochs=1, whole=True, seconds=COLD_MOST * seconds)
            elif subject in self._cooled:
                process.warm()
            if candidate.cache == "warm":
                self._cooled.discard(subject)
            elif subject.limit is not None:
                self._cooled.add(subject)
            found = process.measure(candidate.loader, stop, candidate.step)
        except MeasurementFailed as error:
            result.problem = str(error)
            result.samples = []
            return
        if counts:
            result.samples.append(found)


def _key(candidate: Candidate) -> tuple[Subject, bool]:
    """Return what decides on the process: PyTorch's loader forks, so it has one without threads."""
    return candidate.subject, candidate.loader.engine == PLAIN
