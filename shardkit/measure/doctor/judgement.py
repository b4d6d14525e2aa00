"""The judgement: whether the GPU waits, why, and what helps; pure functions of measured values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardkit.measure.doctor.pipeline import Remedy
from shardkit.measure.doctor.profile import Profile

TORCH_THREADS = "torch threads"
"""The cause if loading is much faster without PyTorch's threads."""

_GAIN = 1.1
_OVERSUBSCRIBED = 1.3
"""Least speedup that is worth a change, and that makes PyTorch's threads the cause."""

_DISTURBED = 0.95
"""Fraction of the step's rate below which the loader disturbs the training loop."""

_ERRORS = 2.5
_LEAST_GAP = 0.02
"""Standard errors from a median to the ends of its range; least difference worth a longer run."""


@dataclass(frozen=True)
class Range:
    """A typical value of several rounds; more rounds make it narrower."""

    median: float
    low: float
    high: float
    rounds: int
    variation: float
    """Relative standard deviation of the rounds."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        """Return the range of at least two positive values."""
        deviation = statistics.stdev(map(math.log, values))
        median = statistics.median(values)
        factor = math.exp(_ERRORS * deviation / math.sqrt(len(values)))
        return cls(median, median / factor, median * factor, len(values), deviation)

    def reaches(self, needed: float | None) -> str:
        """Return whether the value reaches another: ``yes``, ``no``, ``unclear``, or empty."""
        if needed is None:
            return ""
        return "yes" if self.low >= needed else "no" if self.high < needed else "unclear"

    def decisive_rounds(self, other: float) -> int:
        """Return the number of rounds after which the range would not contain ``other``."""
        gap = max(_LEAST_GAP, abs(math.log(other / self.median)))
        return math.floor((_ERRORS * self.variation / gap) ** 2) + 1


class Measured(NamedTuple):
    """Rates with a remedy, and those of the loader as it is, in the same rounds."""

    remedy: Remedy
    rates: Sequence[float] | None
    """None if it failed."""
    delivered: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Rated:
    """A remedy, and what it reached."""

    remedy: Remedy
    verdict: str
    """``gain``, ``unclear`` (the rounds differ too much to tell), ``no gain`` or ``failed``."""
    rate: Range | None = None
    """Images per second with it; None if it failed."""
    enough: str = ""
    """``yes``, ``no`` or ``unclear``: whether the GPU then never waits; empty without a step."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The cause of slow loading, and the remedies."""

    status: str
    """``starved``: the GPU waits. ``fed``: it does not. ``undecided``: the rounds differ too much.
    ``unknown``: no training step is given."""
    delivered: Range
    """Images per second of the loader."""
    needed: float | None
    """Images per second of the training step; None without one."""
    cause: str
    """The longest stage, or `TORCH_THREADS`."""
    remedies: list[Rated]
    """All remedies, those that help first, the fastest first; none if the GPU does not wait."""
    recommended: Rated | None
    """The remedy to apply first: a setting if one is enough, otherwise the fastest."""
    decisive_seconds: float | None
    """Duration of rounds that would decide the status or the unclear remedies; None if decided."""

    @property
    def waiting(self) -> tuple[float, float] | None:
        """Lowest and highest fraction of the time that the GPU waits; None if unknown."""
        if self.needed is None:
            return None
        low = self.delivered.low
        high = self.delivered.high
        return max(0.0, 1 - high / self.needed), max(0.0, 1 - low / self.needed)


def diagnose(
    profile: Profile,
    delivered: Sequence[float],
    measured: Sequence[Measured],
    *,
    needed: float | None,
    round_seconds: float,
) -> Diagnosis:
    """Judge the rates of the loader and of remedies."""
    base = Range.of(delivered)
    status = {"": "unknown", "yes": "fed", "no": "starved"}.get(base.reaches(needed), "undecided")
    rated = []
    rounds = base.decisive_rounds(needed) if needed and status == "undecided" else 0
    for remedy in measured if status != "fed" else ():
        ratio, rating = _judged(remedy, needed)
        rated.append(rating)
        if ratio is not None and rating.verdict == "unclear" and status != "undecided":
            rounds = max(rounds, ratio.decisive_rounds(1.0))
    rated.sort(key=_rank)
    gains = [rating for rating in rated if rating.verdict == "gain"]
    settings = [
        rating for rating in gains if rating.enough == "yes" and rating.remedy.recipe is None
    ]
    freed = [rating.rate.median for rating in gains if rating.rate and rating.remedy.torch_threads]
    oversubscribed = max(freed, default=0.0) >= _OVERSUBSCRIBED * base.median
    cause = TORCH_THREADS if oversubscribed else profile.longest
    return Diagnosis(
        status=status,
        delivered=base,
        needed=needed,
        cause=cause,
        remedies=rated,
        recommended=next(iter(settings or gains), None),
        decisive_seconds=rounds * round_seconds if rounds else None,
    )


@dataclass(frozen=True, kw_only=True)
class LoopDiagnosis:
    """The training loop, while the loader works at the same time."""

    alone: Range
    """Images per second of the training step on one batch again and again, without a loader."""
    loop: Range
    """Images per second of the loop with the loader as it is."""
    remedies: list[Rated] = field(default_factory=list)
    """Changes that may disturb the loop less, those that help first; none if it is not slower."""
    needed_seconds: float | None = None
    """Time that measuring changes would take; None if they were measured, or are not needed."""

    @property
    def is_slower(self) -> bool:
        """Whether the loop is clearly slower than the step alone."""
        return self.loop.high < _DISTURBED * self.alone.median

    @property
    def recommended(self) -> Rated | None:
        """The best change; None if none helps."""
        return next((rated for rated in self.remedies if rated.verdict == "gain"), None)


def judge_loop(
    alone: Sequence[float], loop: Sequence[float], measured: Sequence[Measured] = ()
) -> LoopDiagnosis:
    """Judge the rates of the training loop, and of the step alone, in the same rounds."""
    remedies = sorted((_judged(remedy, None)[1] for remedy in measured), key=_rank)
    return LoopDiagnosis(alone=Range.of(alone), loop=Range.of(loop), remedies=remedies)


def _judged(measured: Measured, needed: float | None) -> tuple[Range | None, Rated]:
    """Return the speedup of a remedy, None if it failed, and the judgement."""
    remedy, rates, delivered = measured
    if rates is None:
        return None, Rated(remedy=remedy, verdict="failed")
    rate = Range.of(rates)
    ratio = Range.of([rate / base for rate, base in zip(rates, delivered, strict=True)])
    verdict = "no gain" if ratio.median < _GAIN else "gain" if ratio.low > 1 else "unclear"
    return ratio, Rated(remedy=remedy, verdict=verdict, rate=rate, enough=rate.reaches(needed))


def _rank(rated: Rated) -> tuple[bool, float]:
    """Return the sort key of remedies: those that help first, the fastest first."""
    return rated.verdict != "gain", -rated.rate.median if rated.rate else 0.0
