"""The search for the best settings of a loader, by whatever measures them, within a budget of time.

It knows no process and no dataset: tests run it against machines that are simulated. It goes in
four steps: both engines, with more and fewer workers, are looked at shortly; the best of them are
measured in turn, and the faster of those go on; then prefetch, the way of batches between processes
and the batch size are varied; in the end the choice is held against the defaults.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardkit.errors import MeasurementFailed
from shardkit.measure.runner.gil import HOLDS
from shardkit.measure.tune.candidate import Candidate
from shardkit.measure.tune.ledger import IN_TURN, Ledger, Ratio
from shardkit.measure.tune.limits import LeftOut
from shardkit.measure.tune.trials import (
    GAIN,
    LEAST_ROUNDS,
    MOST_ROUNDS,
    SHORTEST,
    Measure,
    Plan,
    Trials,
    Watch,
)

MOST_WORKERS = 256
ENOUGH = 1.25
"""Times the rate that a training step uses up: then loading has room for a slower moment."""

_CLIMB, _AS_WELL = 1.15, 1.05
"""More workers are looked at as long as each doubling gains the first: less may be noise, and would
take twice the memory. Fewer are looked at as long as they lose no more than the second."""
_NEAR = 0.8
"""A short look may be wrong by this."""
_FAR = 0.6
"""An engine that is behind by this with the default number of workers is not looked at further."""
_SOONER = 0.5
"""Seconds that another way to start workers gains at the least."""
_SLOW_START = 1.5
"""Seconds to the first batch from which on other ways to start are looked at: they import PyTorch
anew, so that none of them takes less."""
_FIELD = 6
"""That are measured in turn."""
_EXPLORE, _ALONE, _RACE, _VARY = 0.4, 0.6, 0.7, 0.9
"""Parts of the budget that are used up when each step ends, most often."""
_STEEP, _CLIMB_ON = 1.3, 0.5
"""As long as a doubling of workers gains that much, more are looked at up to that part."""
_CLEARLY, _UNCLEAR = 2.0, 7
"""So much faster than the defaults the choice needs only one more round beside them; and so many
rounds, for which time is kept, if it is near them."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What the search ends with."""

    chosen: Candidate
    ledger: Ledger
    gain: Ratio | None
    """How much faster than the defaults the choice is; None if no round had both."""
    left_out: list[LeftOut]
    firsts: dict[Candidate, float]
    """Seconds to the first batch of each, at the least."""
    out_of_time: bool
    """Whether something was not looked at, for want of time."""


def search(
    measure: Measure,
    plan: Plan,
    *,
    clock: Callable[[], float] = time.monotonic,
    watch: Watch = lambda tick: None,
) -> SearchResult:
    """Find the settings that are best.

    Args:
        measure: Measures one candidate.
        plan: What is searched for.
        clock: Tells the time, in seconds.
        watch: Told after each look.

    Raises:
        MeasurementFailed: If nothing can be measured; it says why the defaults cannot.
    """
    return _Search(Trials(measure, plan, clock, watch), plan).run()


class _Search:
    """A search under way."""

    def __init__(self, trials: Trials, plan: Plan) -> None:
        self._trials = trials
        self._plan = plan

    def run(self) -> SearchResult:
        """Search."""
        default = self._plan.default
        self._trials.doing = "the defaults"
        self._trials.attempt(default, self._trials.seconds(default), math.inf)
        self._trials.doing = "engines and workers"
        self._explore()
        if not self._trials.ledger.candidates():
            raise MeasurementFailed(self._trials.left_out[default].reason)
        best = settled = self._settle()
        until = self._end_of_varying(settled)
        if not self._is_enough(best):
            best = self._vary(best, until - self._time_for_starts(best))
        best = self._begin_sooner(best, until)
        self._compare(best)
        chosen = self._chosen(best, settled)
        return SearchResult(
            chosen=chosen,
            gain=self._gain(chosen),
            ledger=self._trials.ledger,
            left_out=list(self._trials.left_out.values()),
            firsts=self._trials.firsts,
            out_of_time=self._trials.out_of_time,
        )

    # The first step: engines and workers

    def _explore(self) -> None:
        """Look at both engines with the default number of workers, then with more and fewer."""
        engines = sorted(("thread", "process"), key=lambda each: each != self._plan.default.engine)
        tops = {each: top for each in engines if (top := self._beginning(each)) is not None}
        most = 1
        promising = self._promising(tops)
        if not self._asks_for_processes:
            promising.sort(key=lambda each: each == "process")  # which take time to start
        for engine in promising:
            if most > tops[engine] and self._gains(engine, most, tops[engine]):
                tops[engine] = most  # where one engine wants many, the other does so too
            tops[engine] = most = self._climb(engine, tops[engine])
        for engine in self._promising(tops):
            self._descend(engine, tops[engine])

    def _promising(self, tops: dict[str, int]) -> list[str]:
        """Return the engines that are not far behind."""
        rates = {engine: self._rate(engine, top) or 0.0 for engine, top in tops.items()}
        best = max(rates.values(), default=0.0)
        return [each for each, rate in rates.items() if self._suffices(rate) or rate > _FAR * best]

    def _beginning(self, engine: str) -> int | None:
        """Return the default number of workers, or as many as there is room for."""
        workers = self._plan.default.workers
        while workers and self._rate(engine, workers) is None:
            workers //= 2
        return workers or None

    def _gains(self, engine: str, more: int, workers: int) -> bool:
        """Tell whether more workers are faster."""
        found = self._rate(engine, more, _CLIMB_ON)
        return (found or 0.0) > (self._rate(engine, workers) or 0.0)

    def _climb(self, engine: str, workers: int) -> int:
        """Look at more workers, as long as they gain; return the best number."""
        rate, until = self._rate(engine, workers) or 0.0, _EXPLORE
        held = self._plan.held is not None and self._plan.held >= HOLDS and engine == "thread"
        while not self._suffices(rate) and not held and 2 * workers <= MOST_WORKERS:
            more = self._rate(engine, 2 * workers, until)
            if more is None or more < _CLIMB * rate:
                break
            until = _CLIMB_ON if more > _STEEP * rate else _EXPLORE
            workers, rate = 2 * workers, more
        return workers

    def _descend(self, engine: str, workers: int) -> None:
        """Look at fewer workers, as long as they do as well, and at numbers between."""
        rate = self._rate(engine, workers) or 0.0
        fewer = workers // 2
        while fewer:
            less = self._rate(engine, fewer)
            if less is None or not (self._suffices(less) or less * _AS_WELL >= rate):
                break
            fewer //= 2
        if not self._suffices(rate):
            for near in (3 * workers // 2, (3 * workers + 3) // 4):
                self._rate(engine, near)

    def _rate(self, engine: str, workers: int, until: float = _EXPLORE) -> float | None:
        """Return the rate of an engine with so many workers, which is looked at only once."""
        batch_size = self._plan.default.batch_size
        candidate = Candidate(engine=engine, workers=workers, batch_size=batch_size)
        if candidate in self._trials.ledger:
            return self._trials.ledger.rates(candidate).median
        return self._trials.attempt(candidate, self._trials.seconds(candidate), until)

    def _suffices(self, rate: float) -> bool:
        """Tell whether a rate is enough for the training step; never, if none is known."""
        return self._plan.needed is not None and rate >= ENOUGH * self._plan.needed

    def _is_enough(self, candidate: Candidate) -> bool:
        return self._suffices(self._trials.ledger.rates(candidate).median)

    # The second step: the best of them in turn

    def _settle(self) -> Candidate:
        """Return the best of what was looked at, after longer looks."""
        self._trials.doing = "the best in turn"
        ledger = self._trials.ledger
        known = [each for each in ledger.candidates() if each not in self._trials.left_out]
        processes = [each for each in known if each.engine == "process"]
        if not self._asks_for_processes or not processes:
            return self._fastest(known, _RACE)
        best = self._fastest(processes, _ALONE)
        if self._is_enough(best) or self._threads_failed:
            return best
        threads = [each for each in known if each.engine == "thread"][: _FIELD // 2]
        return self._trials.race([best, *threads], best, _RACE, sure=True)

    def _fastest(self, known: Sequence[Candidate], until: float) -> Candidate:
        """Return the best of some, the fastest first, or the cheapest that is enough."""
        ledger, default = self._trials.ledger, self._plan.default
        enough = sorted((each for each in known if self._is_enough(each)), key=lambda e: e.cost)
        if enough:
            return self._cheapest(enough)
        best = ledger.rates(known[0]).median
        near = [each for each in known if ledger.rates(each).median >= _NEAR * best][:_FIELD]
        return self._trials.race(near, default, until)

    def _cheapest(self, enough: Sequence[Candidate]) -> Candidate:
        """Return the cheapest that is enough for the step, also when measured again."""
        for candidate in enough:
            for _ in range(LEAST_ROUNDS):
                self._trials.round += 1
                self._trials.attempt(candidate, self._trials.long([candidate], _RACE), _RACE)
            if self._is_enough(candidate) and candidate not in self._trials.left_out:
                return candidate
        return self._trials.ledger.fastest(enough)

    # The third step: everything else

    def _vary(self, best: Candidate, end: float) -> Candidate:
        """Vary prefetch and the way of batches, and then the batch size.

        Args:
            best: What is varied.
            end: The part of the budget that may be used up then.
        """
        self._trials.doing = "prefetch and transport"
        more = -(-2 * best.ahead // best.workers)
        variants = [best.changed(prefetch_factor=factor) for factor in (more, 1)]
        if best.engine == "process":
            variants.append(best.changed(sharing_strategy="file_system"))
        now = self._trials.elapsed() / self._plan.budget
        until = (now + end) / 2 if self._plan.batch_sizes else end
        field = [best, *self._trials.possible(variants)]
        best = self._trials.race(field, best, until, sure=True)
        self._trials.doing = "batch size"
        sizes = [
            best.changed(batch_size=each)
            for each in sorted(self._plan.batch_sizes, reverse=True)  # most often larger ones gain
            if each != best.batch_size and each <= (self._plan.room.images or each)
        ]
        possible = self._trials.possible(sizes)
        return self._trials.race([best, *possible], best, end, sure=True) if possible else best

    def _end_of_varying(self, best: Candidate) -> float:
        """Return the part of the budget after which the choice is held against the defaults."""
        default = self._plan.default
        if best == default or default in self._trials.left_out:
            return _VARY
        gain = self._gain(best)
        low = 0.0 if gain is None else gain.low
        rounds = 1 if low > _CLEARLY else LEAST_ROUNDS if low > 1 else _UNCLEAR
        return min(_VARY, 1 - rounds * self._trials.cost([best, default]) / self._plan.budget)

    def _time_for_starts(self, best: Candidate) -> float:
        """Return the part of the budget that looks at ways to start workers take."""
        looks = len(self._plan.start_methods) if self._starts_slowly(best) else 0
        return looks * self._trials.cost([best]) / self._plan.budget

    def _starts_slowly(self, best: Candidate) -> bool:
        return best.engine == "process" and self._trials.firsts[best] > _SLOW_START

    def _begin_sooner(self, best: Candidate, until: float) -> Candidate:
        """Return the candidate with a way to start workers that is clearly faster, if one is."""
        if not self._starts_slowly(best):
            return best
        self._trials.doing = "start methods"
        firsts = self._trials.firsts
        for way in (best.changed(start_method=method) for method in self._plan.start_methods):
            self._trials.round += 1
            self._trials.attempt(way, SHORTEST, until)
            if way in firsts and 2 * firsts[way] + _SOONER < firsts[best]:
                return way
        return best

    # The fourth step

    def _compare(self, best: Candidate) -> None:
        """Measure the choice and the defaults in turn, until it is clear which is faster."""
        self._trials.doing = "the choice and the defaults"
        field = list(dict.fromkeys([best, self._plan.default]))
        for number in range(LEAST_ROUNDS if self._is_enough(best) else MOST_ROUNDS):
            field = [each for each in field if each not in self._trials.left_out]
            seconds = self._trials.long(field, 1.0)
            if not field or not self._trials.fits(field, seconds, 1.0):
                break
            self._trials.round += 1
            for each in field if number % 2 else field[::-1]:
                self._trials.attempt(each, seconds, math.inf)
            gain = self._gain(best)
            clear = len(field) == 1 or (gain and (gain.low > 1 or gain.high < GAIN))
            if number + 1 >= LEAST_ROUNDS and clear:
                break

    def _chosen(self, *wanted: Candidate) -> Candidate:
        """Return the first of some that is better than the defaults, or the defaults."""
        left_out, default = self._trials.left_out, self._plan.default
        possible = [each for each in wanted if each not in left_out]
        if default in left_out:
            return (possible or wanted)[0]
        return next((each for each in possible if self._is_better(each)), default)

    def _is_better(self, candidate: Candidate) -> bool:
        """Tell whether a candidate gains something over the defaults.

        Likely is enough: to stay would be wrong more often. To leave processes takes more.
        """
        gain, enough = self._gain(candidate), self._is_enough(candidate)
        if self._asks_for_processes and candidate.engine == "thread":
            sure = gain is not None and gain.low > 1 and gain.middle > GAIN
            return sure and not self._threads_failed
        return gain is None or enough or (gain.likely > 1 and gain.middle > GAIN)

    def _gain(self, candidate: Candidate) -> Ratio | None:
        """Return how much faster than the defaults a candidate is.

        First, short looks count only where there was no time for others.
        """
        ledger, default = self._trials.ledger, self._plan.default
        found = ledger.ratio(candidate, default, IN_TURN)
        if found is not None and found.rounds >= LEAST_ROUNDS:
            return found
        return ledger.ratio(candidate, default)

    @property
    def _asks_for_processes(self) -> bool:
        """Whether threads are no equals of the defaults: another loss than speed may come of them.

        An unmarked transform may not be safe in threads, and its random numbers do not repeat.
        """
        return bool(self._plan.processes) and self._plan.default.engine == "process"

    @property
    def _threads_failed(self) -> bool:
        left = self._trials.left_out.values()
        return any(each.failed and each.candidate.engine == "thread" for each in left)
