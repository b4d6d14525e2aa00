"""Interleaved rounds: every candidate is measured once per round, since machines change speed."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from shardkit.errors import MeasurementFailed
from shardkit.measure.runner import session
from shardkit.measure.runner.material import SubjectInfo
from shardkit.measure.runner.process import MeasurementProcess
from shardkit.measure.runner.spec import PLAIN, LoaderSpec, StepSpec, StopCondition, Subject
from shardkit.measure.runner.timing import Measurement
from shardkit.system.text import amount

CACHES = ("warm", "cold")
"""``warm``: the files are cached. ``cold``: their pages were dropped before."""

T = TypeVar("T")

Watch = Callable[[str, float, float], None]
"""Called before each measurement with its name, the work done, and all work."""


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
        middle = statistics.median(values)
        return cls(median=middle, lowest=min(values), highest=max(values), rounds=len(values))

    @classmethod
    def paired(cls, rates: Sequence[float], others: Sequence[float]) -> Spread:
        """Return the spread of the ratios of two candidates in the same rounds."""
        return cls.of([rate / other for rate, other in zip(rates, others, strict=True)])

    @property
    def clear(self) -> bool:
        """Whether at least three rounds measured a ratio, and all agree which is faster."""
        return self.rounds >= 3 and (self.lowest > 1 or self.highest < 1)

    def describe(self) -> str:
        """Return a ratio as text: ``1.94x (1.57x to 3.50x in 5 rounds)``."""
        rounds = amount(self.rounds, "round")
        return f"{self.median:.2f}x ({self.lowest:.2f}x to {self.highest:.2f}x in {rounds})"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One loader of one subject."""

    subject: Subject
    loader: LoaderSpec
    stop: StopCondition
    cache: str = "warm"
    step: StepSpec = field(default_factory=StepSpec)
    """The use of each batch."""

    def __str__(self) -> str:
        return f"{self.subject.path} {self.loader} {self.cache}"

    @property
    def process(self) -> tuple[Subject, bool]:
        """Key of its process: PyTorch's loader forks, so it needs one without threads."""
        return self.subject, self.loader.engine == PLAIN


@dataclass(kw_only=True)
class Result:
    """Measurements of a candidate."""

    candidate: Candidate
    opened: SubjectInfo | None = None
    """The opened subject; None if that failed."""
    samples: list[Measurement] = field(default_factory=list)
    """One per round; empty if one of them failed."""
    resident: float | None = 0.0
    """Largest fraction of the files, 0 to 1, that stayed cached before a cold one; or None."""
    problem: str = ""
    """Why it could not be measured."""

    @property
    def rates(self) -> list[float]:
        """Images per second in each round."""
        return [sample.rate for sample in self.samples]


def turn(items: Sequence[T], number: int) -> list[T]:
    """Return the order in which round ``number`` measures the items: each is first in turn."""
    shift = number % max(1, len(items))
    return [*items[shift:], *items[:shift]]


def run_interleaved(
    candidates: Sequence[Candidate], *, rounds: int, watch: Watch = lambda text, done, total: None
) -> tuple[list[Result], bool]:
    """Measure candidates in ``rounds``, after one short round that does not count.

    Return the results in the order of the candidates, and whether Ctrl-C ended the measurement:
    then only complete rounds count. Without any, `KeyboardInterrupt` is raised.
    """
    results = [Result(candidate=candidate) for candidate in candidates]
    complete = 0
    interrupted = False
    with contextlib.ExitStack() as stack:
        # All start at once, since each imports PyTorch first.
        processes = {
            key: stack.enter_context(MeasurementProcess(key[0]))
            for key in dict.fromkeys(candidate.process for candidate in candidates)
        }
        for key, process in processes.items():
            _open([result for result in results if result.candidate.process == key], process)
        cached: set[Subject] = set()
        try:
            for number in range(rounds + 1):
                for position, result in enumerate(turn(results, number)):
                    done = number * len(results) + position
                    total = (rounds + 1) * len(results)
                    watch(str(result.candidate), done, total)
                    if not result.problem:
                        process = processes[result.candidate.process]
                        _measure(result, process, cached, warm_up=not number)
                complete = number
        except KeyboardInterrupt:
            if not complete:
                raise
            interrupted = True
    for result in results:
        del result.samples[complete:]
    return results, interrupted


def _open(results: Sequence[Result], process: MeasurementProcess) -> None:
    opened = None
    problem = ""
    try:
        opened = process.open()
    except MeasurementFailed as error:
        problem = str(error)
    for result in results:
        result.opened = opened
        result.problem = problem


def _measure(
    result: Result, process: MeasurementProcess, cached: set[Subject], *, warm_up: bool
) -> None:
    """Measure a candidate once, or note why that failed; ``cached`` lists subjects in memory."""
    candidate = result.candidate
    subject = result.candidate.subject
    stop = result.candidate.stop
    if warm_up:
        stop = replace(stop, seconds=stop.seconds / 4, epochs=stop.epochs and 1)
    try:
        if candidate.cache == "cold":
            cached.discard(subject)
            stayed = process.call(session.drop)
            before = result.resident
            result.resident = None
            if stayed is not None and before is not None:
                result.resident = max(stayed, before)
        elif subject not in cached and subject.limit is not None:  # all may not fit in memory
            process.call(session.warm)
            cached.add(subject)
        sample = process.measure(candidate.loader, stop, candidate.step)
        result.samples += [] if warm_up else [sample]
    except MeasurementFailed as error:
        result.problem = str(error)
        result.samples = []
