"""The judgement: whether the GPU waits, why, and what helps; pure functions of measured values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from shardkit.measure.doctor.profile import Profile
from shardkit.measure.doctor.remedies import ADVICE, OWN_CODE, WAITS, Remedy

GAIN = 1.1
"""Least speedup that is worth a change."""

_OVERSUBSCRIBED = 1.3
"""Speedup with one PyTorch thread from which the threads are the cause."""

_ALONE = 0.15
"""A stage is the only cause if its fraction exceeds the next one by this."""

_LEAST_GAP = 0.02
"""Smallest relative difference that a longer run should decide."""

_ERRORS = 2.5
"""Standard errors between a median and the ends of its range."""


@dataclass(frozen=True, kw_only=True)
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
        factor = math.exp(_ERRORS * deviation / math.sqrt(len(values)))
        median = statistics.median(values)
        return cls(
            median=median,
            low=median / factor,
            high=median * factor,
            rounds=len(values),
            variation=deviation,
        )

    def decisive_rounds(self, other: float) -> int:
        """Return the number of rounds after which the range would not contain ``other``."""
        gap = max(_LEAST_GAP, abs(math.log(other / self.median)))
        return math.ceil((_ERRORS * self.variation / gap) ** 2)


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why loading is not faster."""

    stage: str
    """The longest stage, or ``torch threads``."""
    fraction: float
    """Its fraction of an image's time."""
    next_stage: str
    """The next stage, if it takes about as long; otherwise empty."""
    next_fraction: float
    p50: float
    p95: float
    """Percentiles of the stage's time, in seconds."""
    waits: bool
    """Whether it waits rather than computes."""
    held: float | None
    """Fraction of its time with the GIL held; None for decoding and reading, which release it."""


@dataclass(frozen=True, kw_only=True)
class Rated:
    """A remedy that helps."""

    remedy: Remedy
    rate: Range
    """Images per second with it."""
    enough: str
    """``yes``, ``no`` or ``unclear``: whether the GPU then never waits; empty without a step."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What limits loading, and what helps."""

    status: str
    """``starved``: the GPU waits. ``fed``: it does not. ``undecided``: the rounds differ too much.
    ``unknown``: no training step is given."""
    delivered: Range
    """Images per second of the loader."""
    needed: float | None
    """Images per second of the training step; None without one."""
    cause: Cause
    remedies: list[Rated]
    """The fastest first; none if the GPU does not wait."""
    unclear: list[str]
    """Names of remedies that may help: the rounds differ too much to tell."""
    without_gain: list[str]
    """Names of measured remedies that do not help."""
    recommended: Rated | None
    """The remedy to apply first: a setting if one is enough, otherwise the fastest."""
    advice: str
    """A change that doctor cannot measure; empty without one."""
    decisive_seconds: float | None
    """Duration of rounds that would decide the status or the unclear remedies; None if decided."""

    @property
    def waiting(self) -> tuple[float, float] | None:
        """Lowest and highest fraction of the time that the GPU waits; None if unknown."""
        if self.needed is None:
            return None
        low, high = self.delivered.low, self.delivered.high
        return max(0.0, 1 - high / self.needed), max(0.0, 1 - low / self.needed)


def diagnose(
    profile: Profile,
    delivered: Sequence[float],
    measured: Sequence[tuple[Remedy, Sequence[float]]],
    *,
    needed: float | None,
    round_seconds: float,
) -> Diagnosis:
    """Return the diagnosis.

    Args:
        profile: The loader's stages.
        delivered: Images per second of the loader in each round.
        measured: The same of each remedy, in the same rounds; empty if it was given up.
        needed: Images per second of the training step.
        round_seconds: Duration of a round.
    """
    base = Range.of(delivered)
    status = {"": "unknown", "yes": "fed", "no": "starved"}.get(_enough(base, needed), "undecided")
    rated, unclear, without, rounds = [], [], [], 0
    for remedy, rates in measured:
        ratios = [rate / other for rate, other in zip(rates, delivered, strict=bool(rates))]
        ratio = Range.of(ratios) if ratios else None
        if ratio is None or ratio.median < GAIN:
            without.append(remedy.name)
        elif ratio.low <= 1:
            unclear.append(remedy.name)
            rounds = max(rounds, ratio.decisive_rounds(1.0))
        else:
            rate = Range.of(rates)
            rated.append(Rated(remedy=remedy, rate=rate, enough=_enough(rate, needed)))
    if status == "undecided" and needed is not None:
        rounds = base.decisive_rounds(needed)
    rated.sort(key=lambda each: -each.rate.median)
    cause = find_cause(profile, rated, base)
    if status == "fed":
        rated, unclear, rounds = [], [], 0
    settings = [each for each in rated if each.enough == "yes" and each.remedy.recipe is None]
    return Diagnosis(
        status=status,
        delivered=base,
        needed=needed,
        cause=cause,
        remedies=rated,
        unclear=unclear,
        without_gain=without,
        recommended=next(iter(settings or rated), None),
        advice="" if status == "fed" else _advice(cause),
        decisive_seconds=rounds * round_seconds if rounds else None,
    )


def _advice(cause: Cause) -> str:
    """Return a change that cannot be measured; a faster disk only if reading waits for it."""
    return ADVICE.get(cause.stage, "") if cause.waits or cause.stage != "read" else ""


def _enough(rate: Range, needed: float | None) -> str:
    if needed is None:
        return ""
    if rate.low >= needed:
        return "yes"
    return "no" if rate.high < needed else "unclear"


def find_cause(profile: Profile, rated: Sequence[Rated], base: Range) -> Cause:
    """Return the longest stage, or PyTorch's threads if loading is much faster without them."""
    names = sorted(profile.stages, key=lambda name: -profile.stages[name].seconds)
    first, *rest = names
    fraction, next_fraction = (profile.fraction(name) for name in (first, rest[0] if rest else ""))
    together = fraction - next_fraction < _ALONE
    stage = profile.stages[first]
    freed = [each.rate.median for each in rated if each.remedy.variant.torch_threads]
    oversubscribed = max(freed, default=0.0) >= _OVERSUBSCRIBED * base.median
    return Cause(
        stage="torch threads" if oversubscribed else first,
        fraction=fraction,
        next_stage=rest[0] if together else "",
        next_fraction=next_fraction if together else 0.0,
        p50=stage.p50,
        p95=stage.p95,
        waits=stage.busy < WAITS,
        held=profile.held if first in OWN_CODE else None,
    )
