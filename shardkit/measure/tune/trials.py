"""Looks at candidates within limits and a budget: one by one, or in turn until it is clear.

It knows no process and no dataset: whatever measures them is given to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shardkit.errors import MeasurementFailed, UsageError
from shardkit.measure.tune.candidate import Candidate
from shardkit.measure.tune.ledger import Ledger
from shardkit.measure.tune.limits import Footprint, LeftOut, ResourceLimits, what_forbids

GAIN = 1.03
"""Settings are changed for more than this; what is nearer is alike, and the cheaper is taken."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 14
_ANYWAY = 0.85
"""Part of the budget up to which candidates are measured in turn for the first times."""
_START = 0.02
"""Seconds that a forked worker process takes to start, and to end."""
SHORTEST, LONGEST = 0.1, 1.0
"""Seconds of a first look; later ones are longer, if there is time."""


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What one look at a candidate gives."""

    rate: float
    """Images/s."""
    first: float = 0.0
    """Seconds to the first batch."""
    sample_bytes: float = 0.0
    worker_bytes: int = 0


Measure = Callable[[Candidate, float], Sight]
"""Looks at a candidate for so many seconds. MeasurementFailed: it is left out."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is searched for."""

    default: Candidate
    """What `make_loader` does by itself."""
    batch_sizes: tuple[int, ...] = ()
    """That may be taken instead of the default's."""
    needed: float | None = None
    """Images/s that the training step uses up."""
    held: float | None = None
    """Part of the time in which making a sample holds the interpreter's lock."""
    budget: float = 60.0
    """Seconds."""
    room: ResourceLimits = field(default_factory=ResourceLimits)
    processes: str = ""
    """What asks for worker processes, as a transform that may be unsafe in threads; or nothing."""
    start_methods: tuple[str, ...] = ()
    """Ways to start worker processes that are held against the default."""


@dataclass(frozen=True, kw_only=True)
class Tick:
    """How far the search has come."""

    doing: str
    candidate: Candidate
    rate: float
    best: Candidate
    best_rate: float
    elapsed: float
    budget: float


Watch = Callable[[Tick], None]


class Trials:
    """What was tried so far, and what may still be."""

    def __init__(
        self, measure: Measure, plan: Plan, clock: Callable[[], float], watch: Watch
    ) -> None:
        """Begin: the budget runs from now on.

        Args:
            measure: Measures one candidate.
            plan: What is searched for.
            clock: Tells the time, in seconds.
            watch: Told after each look.
        """
        self.ledger = Ledger()
        self.left_out: dict[Candidate, LeftOut] = {}
        self.firsts: dict[Candidate, float] = {}
        """Seconds to the first batch of each, at the least."""
        self.out_of_time = False
        """Whether something was not looked at, for want of time."""
        self.doing = ""
        self.round = 0
        self._measure = measure
        self._plan = plan
        self._clock = clock
        self._watch = watch
        self._begun = clock()
        self._needs = Footprint()
        self._overheads = {"thread": (0.1, 1), "process": (0.4, 1)}
        """Seconds that the last look took besides, and its number of workers."""

    def _look(self, candidate: Candidate, seconds: float) -> float:
        """Measure a candidate and return its rate."""
        begun = self._clock()
        seen = self._measure(candidate, seconds)
        if not seen.rate > 0:
            raise MeasurementFailed("it gave no batch in that time")
        taken = self._clock() - begun
        self._overheads[candidate.engine] = max(0.05, taken - seconds), candidate.workers
        self._needs = Footprint(
            sample_bytes=max(self._needs.sample_bytes, seen.sample_bytes),
            worker_bytes=max(self._needs.worker_bytes, seen.worker_bytes),
        )
        self.ledger.add(candidate, self.round, seen.rate)
        first = min(seen.first, self.firsts.get(candidate, math.inf))
        self.firsts[candidate] = first
        best = self.ledger.fastest(self.ledger.candidates())
        self._watch(
            Tick(
                doing=self.doing,
                candidate=candidate,
                rate=seen.rate,
                best=best,
                best_rate=self.ledger.rates(best).median,
                elapsed=self._clock() - self._begun,
                budget=self._plan.budget,
            )
        )
        return seen.rate

    def attempt(self, candidate: Candidate, seconds: float, until: float) -> float | None:
        """Measure a candidate if that is possible in time; return its rate, or None."""
        if candidate in self.left_out:
            return None
        forbidden = what_forbids(candidate, self._needs, self._plan.room)
        if forbidden is not None and candidate != self._plan.default:
            self.left_out[candidate] = forbidden
            return None
        if not self.fits([candidate], seconds, until):
            self.out_of_time = True
            return None
        try:
            return self._look(candidate, seconds)
        except (MeasurementFailed, UsageError) as error:
            self.left_out[candidate] = LeftOut(candidate=candidate, reason=str(error), failed=True)
            return None

    def fits(self, candidates: Sequence[Candidate], seconds: float, until: float) -> bool:
        """Tell whether looks at some candidates end before a part of the budget is used up."""
        needed = sum(seconds + self._overhead(each) for each in candidates)
        return self.elapsed() + needed <= until * self._plan.budget

    def _overhead(self, candidate: Candidate) -> float:
        """Return the seconds that a look takes besides; more processes take longer to start."""
        seen, workers = self._overheads[candidate.engine]
        more = max(0, candidate.workers - workers) if candidate.engine == "process" else 0
        return seen + _START * more

    def elapsed(self) -> float:
        """Return the seconds since the beginning."""
        return self._clock() - self._begun

    def seconds(self, candidate: Candidate) -> float:
        """Return how long a first look at a candidate takes.

        Workers that began together end together: a look shorter than some of their batches counts
        one turn too many, or too few.
        """
        base = min(max(self._plan.budget / 100, SHORTEST), LONGEST)
        known = [
            self.ledger.rates(each).median
            for each in self.ledger.candidates()
            if each.engine == candidate.engine
        ]
        if not known:
            return base
        turn = candidate.workers * candidate.batch_size / max(known)
        return min(max(base, 2 * turn), max(base, (self._plan.budget - self.elapsed()) / 20))

    def possible(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return those that this machine has room for, and note the others."""
        possible = []
        for each in candidates:
            forbidden = what_forbids(each, self._needs, self._plan.room)
            if forbidden is None:
                possible.append(each)
            else:
                self.left_out[each] = forbidden
        return possible

    def race(
        self, field: Sequence[Candidate], kept: Candidate, until: float, *, sure: bool = False
    ) -> Candidate:
        """Measure candidates in turn until it is clear which is best; return that.

        After the second round the faster half goes on, then a third of them, until there are two:
        so most of the time goes to those that are hard to tell apart.

        Args:
            field: The candidates; the first are the most promising.
            kept: This one stays, unless another is better; if it is none of them, the cheapest of
                those that are alike is taken.
            until: The part of the budget that may be used up then.
            sure: Whether it stays, too, as long as it is not certain that the other is better.
        """
        left, since = self._affordable(field, kept, until), self.round + 1
        for number in range(MOST_ROUNDS):
            seconds = self.long(left, until)
            limit = until if sure or number + 1 >= LEAST_ROUNDS else max(until, _ANYWAY)
            if len(left) < 2 or not self.fits(left, seconds, limit):
                self.out_of_time |= number == 0 and len(left) > 1
                break
            self.round += 1
            shift = number % len(left)
            turn = left[shift:] + left[:shift]
            done = {each for each in turn if self.attempt(each, seconds, math.inf) is not None}
            left = [each for each in left if each in done]
            if number >= 1 and left:
                left = self._without_losers(left, since)
                left = self._leaders(left, kept, since, max(2, len(field) // (number + 1)))
            if number + 1 < LEAST_ROUNDS:
                continue
            vain = sure and kept in left and self._is_vain(left, kept, since)
            if vain or self._is_clear(left, since):
                break
        if self.round < since + 1:  # there was no time for two: what was seen before counts too
            since, left = 0, [each for each in left if each in self.ledger]
        return self._best_of(left, kept, since, sure) if left else field[0]

    def _affordable(
        self, field: Sequence[Candidate], kept: Candidate, until: float
    ) -> list[Candidate]:
        """Return so many of some candidates that there is time for enough rounds of them."""
        cost = self.cost(field)
        time = until * self._plan.budget - self.elapsed()
        number = max(2, int(time / (LEAST_ROUNDS * cost / len(field))))
        if number >= len(field):
            return list(field)
        self.out_of_time = True
        if kept not in field:
            return list(field[:number])
        others = [each for each in field if each != kept]
        return [*others[: number - 1], kept]

    def cost(self, field: Sequence[Candidate]) -> float:
        """Return the seconds that one round of some candidates takes at the least."""
        return sum(self.seconds(each) + self._overhead(each) for each in field)

    def long(self, field: Sequence[Candidate], until: float) -> float:
        """Return how long looks at some candidates in turn may last."""
        base = max(map(self.seconds, field), default=0.0)
        looks = max(1, len(field) * (LEAST_ROUNDS + 1))
        each = (until * self._plan.budget - self.elapsed()) / looks
        spent = max(map(self._overhead, field), default=0.0)
        return min(max(each - spent, base), 2.5 * base)

    def _without_losers(self, left: Sequence[Candidate], since: int) -> list[Candidate]:
        """Return those that are not clearly slower than the fastest."""
        leader = self.ledger.fastest(left, since)
        stay = []
        for each in left:
            ratio = self.ledger.ratio(each, leader, since)
            if each == leader or ratio is None or ratio.high >= 1 / GAIN:
                stay.append(each)
        return stay

    def _leaders(
        self, left: Sequence[Candidate], kept: Candidate, since: int, number: int
    ) -> list[Candidate]:
        """Return the fastest, and what is kept: what is left of the time tells these apart."""
        ranked = sorted(left, key=lambda each: -self.ledger.rates(each, since).median)
        return [each for each in left if each in ranked[:number] or each == kept]

    def _is_vain(self, left: Sequence[Candidate], kept: Candidate, since: int) -> bool:
        """Tell whether nothing looks better than what is kept."""
        ratios = [self.ledger.ratio(each, kept, since) for each in left if each != kept]
        return not any(ratio and ratio.middle > GAIN for ratio in ratios)

    def _is_clear(self, left: Sequence[Candidate], since: int) -> bool:
        """Tell whether all that are left are alike, so that more looks tell nothing new."""
        if not left:
            return True
        leader = self.ledger.fastest(left, since)
        ratios = [self.ledger.ratio(each, leader, since) for each in left if each != leader]
        return all(ratio and ratio.low * GAIN > 1 for ratio in ratios)

    def _best_of(
        self, left: Sequence[Candidate], kept: Candidate, since: int, sure: bool
    ) -> Candidate:
        """Return the fastest, or what is as fast: what was kept so far, or else the cheapest."""
        leader = self.ledger.fastest(left, since)
        alike = [leader]
        for each in left:
            ratio = self.ledger.ratio(each, leader, since)
            if each != leader and ratio is not None and ratio.middle * GAIN >= 1:
                alike.append(each)
        best = kept if kept in alike else min(alike, key=lambda each: each.cost)
        better = self.ledger.ratio(best, kept, since)
        return kept if sure and not (better and better.low > 1) else best
