"""Contenders side by side: each in a process of its own, once in each round, in turning order.

One round that does not count comes first. On a machine whose speed changes from minute to minute
only what ran beside it can be compared, so medians over rounds are what is told.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardkit.errors import MeasurementFailed
from shardkit.measure.runner.process import MeasurementProcess, Seen
from shardkit.measure.runner.spec import LoaderSpec, Subject
from shardkit.measure.runner.steps import StepSpec
from shardkit.measure.runner.timing import StopCondition

CACHES = ("warm", "cold")
"""Whether files were read just before, or their pages were dropped."""

COLD_MOST = 10
"""A cold look lasts an epoch, for only the first after a drop is cold, but at most so many times as
long as a warm one. It counts from its beginning, the start of workers and all."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One line of a table."""

    name: str
    subject: Subject
    loading: LoaderSpec
    cache: str = "warm"


@dataclass(kw_only=True)
class Outcome:
    """What was seen of a contender."""

    contender: Contender
    seen: list[Seen] = field(default_factory=list)
    """One for each round that counts."""
    split: str = ""
    """Which split is read; nothing if there are none."""
    images: int = 0
    """That are read."""
    total: int = 0
    """In the dataset."""
    mean_bytes: float = 0.0
    """Stored bytes of an image."""
    bytes: int = 0
    """Of all files that there are."""
    resident: float | None = 0.0
    """The largest part of the files that was in memory when a cold round began, 0 to 1; None if
    it is not known of some round."""
    problem: str = ""
    """Why it could not be measured."""

    @property
    def rates(self) -> list[float]:
        """Images/s of each round."""
        return [each.look.rate for each in self.seen]

    @property
    def rate(self) -> float | None:
        """The median of the rates; None if it could not be measured."""
        return statistics.median(self.rates) if self.seen else None

    @property
    def waits(self) -> list[float]:
        """Seconds that each batch of all rounds was waited for, sorted."""
        return sorted(wait for each in self.seen for wait in each.look.waits)


Watch = Callable[[str, int, int], None]
"""Told what is done now, how much of the work is done, and how much there is."""


def run_interleaved(
    contenders: Sequence[Contender],
    *,
    rounds: int,
    seconds: float,
    step: StepSpec | None = None,
    watch: Watch = lambda text, done, total: None,
) -> list[Outcome]:
    """Measure contenders.

    Args:
        contenders: Those of one subject share a process, one after the other.
        rounds: That count.
        seconds: How long a warm look lasts; a cold one is an epoch.
        step: What is done with each batch.
        watch: Told before each look.

    Raises:
        UsageError: If one cannot be done as it was asked.
    """
    outcomes = [Outcome(contender=each) for each in contenders]
    with contextlib.ExitStack() as stack:
        arena = _Interleaved(outcomes, stack)
        total = (rounds + 1) * len(outcomes)
        for number in range(rounds + 1):
            shift = number % max(1, len(outcomes))
            for place, outcome in enumerate(outcomes[shift:] + outcomes[:shift]):
                if outcome.problem:
                    continue
                watch(outcome.contender.name, number * len(outcomes) + place, total)
                seen = arena.look(outcome, seconds if number else seconds / 4, step)
                if seen is not None and number:
                    outcome.seen.append(seen)
    return outcomes


class _Interleaved:
    """The processes in which contenders are measured."""

    def __init__(self, outcomes: Sequence[Outcome], stack: contextlib.ExitStack) -> None:
        """Start the processes, all at once, since each loads PyTorch first; open the subjects."""
        self._stack = stack
        self._served: dict[tuple[Subject, bool], MeasurementProcess] = {}
        self._cooled: set[Subject] = set()
        for outcome in outcomes:
            if _key(outcome.contender) not in self._served:
                self._start(outcome.contender)
            if outcome.contender.subject.limit is not None:  # a whole dataset may be too large
                self._cooled.add(outcome.contender.subject)
        opened: dict[tuple[Subject, bool], dict[str, Any] | str] = {}
        for outcome in outcomes:
            key = _key(outcome.contender)
            if key not in opened:
                try:
                    opened[key] = self._served[key].open()
                except MeasurementFailed as error:
                    opened[key] = str(error)
            found = opened[key]
            if isinstance(found, str):
                outcome.problem = found
                continue
            outcome.split = found["split"]
            outcome.images, outcome.total = found["images"], found["total"]
            outcome.mean_bytes, outcome.bytes = found["mean_bytes"], found["bytes"]

    def look(self, outcome: Outcome, seconds: float, step: StepSpec | None) -> Seen | None:
        """Look at one contender; None, and the problem is noted, if it fails."""
        contender = outcome.contender
        try:
            process = self._served[_key(contender)]
            process.restart_if_ended()  # by another contender's transform
            if contender.cache == "warm":
                if contender.subject in self._cooled:
                    process.warm()
                    self._cooled.discard(contender.subject)
                return process.look(contender.loading, StopCondition(seconds=seconds), step)
            stayed = process.drop()
            if stayed is None or outcome.resident is None:
                outcome.resident = None
            else:
                outcome.resident = max(outcome.resident, stayed)
            span = StopCondition(epochs=1, whole=True, most=COLD_MOST * seconds)
            seen = process.look(contender.loading, span, step)
        except MeasurementFailed as error:
            outcome.problem, outcome.seen = str(error), []
            return None
        if seen.look.images < outcome.images and contender.subject.limit is not None:
            self._cooled.add(contender.subject)
        return seen

    def _start(self, contender: Contender) -> None:
        self._served[_key(contender)] = self._stack.enter_context(
            MeasurementProcess(contender.subject)
        )


def _key(contender: Contender) -> tuple[Subject, bool]:
    """Return what decides on the process: workers of PyTorch's own loader are kept apart."""
    return contender.subject, contender.loading.engine == "plain"
