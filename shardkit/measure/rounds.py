"""Contenders side by side: each in a process of its own, once in each round, in turning order.

One round that does not count comes first. On a machine whose speed changes from minute to minute
only what ran beside it can be compared, so medians over rounds are what is told.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shardkit.errors import MeasurementFailed
from shardkit.measure.served import Seen, Served
from shardkit.measure.spec import Loading, Subject
from shardkit.measure.steps import StepSpec
from shardkit.measure.timing import Span

CACHES = ("warm", "cold")
"""Whether files were read just before, or their pages were dropped."""

COLD_EPOCHS = Span(epochs=1, whole=True)
"""Only the first epoch after a drop is cold; it counts from its beginning, workers and all."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One line of a table."""

    name: str
    subject: Subject
    loading: Loading
    cache: str = "warm"


@dataclass(kw_only=True)
class Outcome:
    """What was seen of a contender."""

    contender: Contender
    seen: list[Seen] = field(default_factory=list)
    """One for each round that counts."""
    images: int = 0
    """In the dataset."""
    mean_bytes: float = 0.0
    """Stored bytes of an image."""
    bytes: int = 0
    """Of all files that an epoch reads."""
    resident: float = 0.0
    """The largest part of the files that was in memory when a cold round began, 0 to 1."""
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


def contend(
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
        served = _serve(outcomes, stack)
        total = (rounds + 1) * len(outcomes)
        for number in range(rounds + 1):
            shift = number % max(1, len(outcomes))
            for place, outcome in enumerate(outcomes[shift:] + outcomes[:shift]):
                if outcome.problem:
                    continue
                watch(outcome.contender.name, number * len(outcomes) + place, total)
                process = served[_key(outcome.contender)]
                seen = _look(process, outcome, seconds if number else seconds / 4, step)
                if seen is not None and number:
                    outcome.seen.append(seen)
    return outcomes


def _key(contender: Contender) -> tuple[Subject, bool]:
    """Return what decides on the process: workers of PyTorch's own loader are kept apart."""
    return contender.subject, contender.loading.engine == "plain"


def _serve(
    outcomes: Sequence[Outcome], stack: contextlib.ExitStack
) -> dict[tuple[Subject, bool], Served]:
    """Start the processes, all at once, since each loads PyTorch first, and open the subjects."""
    served: dict[tuple[Subject, bool], Served] = {}
    for outcome in outcomes:
        key = _key(outcome.contender)
        if key not in served:
            served[key] = stack.enter_context(Served(outcome.contender.subject))
    opened = {key: process.open() for key, process in served.items()}
    for outcome in outcomes:
        found = opened[_key(outcome.contender)]
        outcome.images, outcome.mean_bytes = found["images"], found["mean_bytes"]
        outcome.bytes = found["bytes"]
    return served


def _look(process: Served, outcome: Outcome, seconds: float, step: StepSpec | None) -> Seen | None:
    contender = outcome.contender
    try:
        if contender.cache == "warm":
            return process.look(contender.loading, Span(seconds=seconds), step)
        outcome.resident = max(outcome.resident, process.drop())
        return process.look(contender.loading, COLD_EPOCHS, step)
    except MeasurementFailed as error:
        outcome.problem, outcome.seen = str(error), []
        return None
