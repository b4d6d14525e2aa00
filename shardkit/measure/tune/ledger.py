"""What was measured of several candidates, and which of two is faster, as far as can be told.

The speed of a machine changes while one measures: so rates are compared within a round only, in
which all were measured one after the other, and over rounds the ratios are averaged.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from shardkit.measure.tune.candidate import Candidate

_T = (31.8, 6.96, 4.54, 3.75, 3.36, 3.14, 3.00, 2.90, 2.82, 2.76, 2.72, 2.68, 2.65, 2.62)
"""Student's t for 1, 2, ... degrees of freedom: 1 % is beyond one side.

A ratio is looked at after each round, and any of the looks may be wrong: of equal candidates one is
found to be faster by 5 % of the series from the third round to the fourteenth, and by many more if
5 % were beyond each.
"""
_USUAL, _WORTH = 0.1, 2
"""The noise of a ratio's logarithm as it is taken to be before any was seen, and worth how many
degrees of freedom that is. So one round makes a gain of somewhat more than 2 certain.
"""
IN_TURN = 1
"""The first round in which candidates were measured in turn; what is looked at shortly before, to
see what is promising, is of round 0.
"""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Images/s of a candidate."""

    median: float
    low: float
    high: float
    rounds: int


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How much faster one is than another: 1.1 is a tenth faster."""

    low: float
    """It is at least this, with 95 % certainty, if one looks from the third round on."""
    likely: float
    """It is at least this, five times of six, if one looks once."""
    middle: float
    high: float
    rounds: int
    """That had both."""
    lowest: float
    """Ratio of the worst round."""
    highest: float
    """Ratio of the best round."""


class Ledger:
    """Rates of candidates by round."""

    def __init__(self) -> None:
        """Begin empty."""
        self._rounds: dict[Candidate, dict[int, float]] = {}

    def add(self, candidate: Candidate, number: int, rate: float) -> None:
        """Note a rate of the round ``number``."""
        self._rounds.setdefault(candidate, {})[number] = rate

    def __contains__(self, candidate: Candidate) -> bool:
        return candidate in self._rounds

    def candidates(self) -> list[Candidate]:
        """Return all that were measured, the fastest first."""
        return sorted(self._rounds, key=lambda each: -self.rates(each).median)

    def rates(self, candidate: Candidate, since: int = 0) -> Rates:
        """Return what was seen of a candidate, from the round ``since`` on, if it was in any."""
        rounds = self._rounds[candidate]
        seen = [rate for number, rate in rounds.items() if number >= since]
        seen = seen or list(rounds.values())
        return Rates(
            median=statistics.median(seen), low=min(seen), high=max(seen), rounds=len(seen)
        )

    def ratio(self, one: Candidate, other: Candidate, since: int = 0) -> Ratio | None:
        """Return how much faster ``one`` is than ``other``; None if no round had both.

        The middle is a median: a round that something else disturbed does not move it.
        """
        mine, theirs = self._rounds.get(one, {}), self._rounds.get(other, {})
        common = sorted(number for number in mine if number in theirs and number >= since)
        if not common:
            return None
        logs = [math.log(mine[number] / theirs[number]) for number in common]
        mean, (error, reach) = statistics.fmean(logs), _reach(logs)
        return Ratio(
            low=math.exp(mean - reach),
            likely=math.exp(mean - error),
            middle=math.exp(statistics.median(logs)),
            high=math.exp(mean + reach),
            rounds=len(logs),
            lowest=math.exp(min(logs)),
            highest=math.exp(max(logs)),
        )

    def fastest(self, field: Sequence[Candidate], since: int = 0) -> Candidate:
        """Return which of some was the fastest, from the round ``since`` on."""
        return max(field, key=lambda each: self.rates(each, since).median)


def _reach(logs: Sequence[float]) -> tuple[float, float]:
    """Return how far from their mean the truth is likely to be, and how far it may be.

    Two rounds or one do not tell their own noise: it is taken together with what is usual. Of more
    rounds the nearer of both holds, unless the noise is unusual: then it is their own.
    """
    rounds = len(logs)
    own = statistics.variance(logs) if rounds > 1 else 0.0
    known = _WORTH + rounds - 1
    mixed = (_WORTH * _USUAL**2 + (rounds - 1) * own) / known
    error = math.sqrt(mixed / rounds)
    reach = _t(known) * error
    if rounds > 2:
        alone = _t(rounds - 1) * math.sqrt(own / rounds)
        reach = alone if own > _USUAL**2 else min(reach, alone)
        error = min(error, math.sqrt(own / rounds))
    return error, reach


def _t(degrees: int) -> float:
    return _T[min(degrees, len(_T)) - 1]
