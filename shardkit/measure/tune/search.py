"""The search for the fastest loader settings within a time budget.

About ten settings are measured in interleaved rounds: both engines, with several numbers of
workers. The slower half leaves after each round. Then the neighbors of the leader join: other
numbers of workers, other prefetch, other batch sizes. In the end, the two best are compared with
the defaults for as long as the budget lasts. A setting is judged by one number: the median, over
the rounds, of its speed divided by that of the defaults in the same round.

The search knows no process and no dataset: tests run it on simulated machines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardkit.errors import MeasurementFailed, UsageError
from shardkit.measure.runner.rounds import Spread, Watch, turn
from shardkit.measure.tune.setting import LeftOut, Setting

GAIN = 1.05
"""Minimum speedup over the defaults to change them. Anything closer is a tie."""

_LARGE_GAIN = 1.5
"""The same with fewer than `LEAST_ROUNDS` rounds."""

ENOUGH = 1.25
"""Multiple of the training step's rate that leaves loading a margin."""

LEAST_ROUNDS = 3
"""Rounds in common with the defaults that a choice requires, if there is time."""

_FINAL_ROUNDS = 15
_FINALISTS, _KEPT = 2, 3
"""Settings in the final, and those that stay when neighbors join, each with the defaults."""

_MOST_WORKERS = 256
_SEARCH = 0.6
"""Fraction of the budget for the search; the rest is for the final."""

_SHORTEST, _LONGEST = 0.1, 1.0
"""Seconds of a measurement. Those in the final are up to 2.5 times as long."""


Measure = Callable[[Setting, float], float]
"""Measures a setting for so many seconds and returns images/s, or raises MeasurementFailed."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to search for."""

    default: Setting
    """What `make_loader` uses by itself."""
    engines: tuple[str, ...] = ("thread", "process")
    batch_sizes: tuple[int, ...] = ()
    """Alternatives to the default's batch size."""
    needed: float | None = None
    """Images per second that the training step consumes."""
    budget: float = 60.0
    """Seconds."""
    images: int = 10**9
    """Images in an epoch."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A setting and its measurements."""

    setting: Setting
    images_per_second: Spread
    speedup: Spread | None
    """Ratio to the defaults in the same rounds; None if they could not be measured."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What the search found."""

    ranking: list[Tried]
    """Settings that were compared with the defaults; the first is the choice."""
    stopped: list[Tried]
    """Settings that left after fewer rounds."""
    left_out: list[LeftOut]
    out_of_time: bool
    """Whether the budget ended before the search did."""


def search(
    measure: Measure,
    plan: Plan,
    *,
    clock: Callable[[], float] = time.monotonic,
    watch: Watch = lambda text, done, total: None,
) -> SearchResult:
    """Find the fastest settings; with a training step, the cheapest that are fast enough.

    Args:
        measure: Measures one setting.
        plan: What to search for.
        clock: Returns the time in seconds.
        watch: Called before each measurement.

    Raises:
        MeasurementFailed: If no setting can be measured; it reports why the defaults cannot.
    """
    race = _Race(measure, plan, clock, watch)
    going = race.run(race.starters())
    while going and (joining := race.neighbors()):
        going = race.run([*joining, *race.ranked()[:_KEPT]])
    race.final()
    return race.result()


class _Race:
    """Measurements so far, and the rules for the next ones."""

    def __init__(
        self, measure: Measure, plan: Plan, clock: Callable[[], float], watch: Watch
    ) -> None:
        self._measure, self._plan, self._clock, self._watch = measure, plan, clock, watch
        self._start = clock()
        self._rates: dict[Setting, dict[int, float]] = {}
        """Images per second of each setting in each round."""
        self._left_out: dict[Setting, str] = {}
        self._round = 0
        self._out_of_time = False
        self._overheads = {"thread": 0.1, "process": 0.4}
        """Seconds that recent measurements of each engine took in addition to their length."""

    def starters(self) -> list[Setting]:
        """Return the defaults, and both engines with fewer and more workers, likely ones first."""
        default = self._plan.default
        workers = default.workers
        numbers = {
            "thread": (workers, 2 * workers, 4 * workers, workers // 2, 1),
            "process": (workers, 2 * workers, workers // 2),
        }
        chosen = [
            default.changed(engine=engine, workers=number)
            for rank in range(5)
            for engine in self._plan.engines
            for number in numbers[engine][rank : rank + 1]
            if 1 <= number <= _MOST_WORKERS
        ]
        return list(dict.fromkeys([default, *chosen]))

    def neighbors(self) -> list[Setting]:
        """Return settings next to the leader that were not tried: workers, prefetch, batch size."""
        leader = self.ranked()[0]
        if self._is_enough(leader):
            return []
        workers = leader.workers
        most = max(each.workers for each in self._rates if each.engine == leader.engine)
        larger = (4 * workers, 2 * workers) if workers == most else (2 * workers,)
        numbers = (*larger, -(-3 * workers // 2), 3 * workers // 4, workers // 2)
        groups = (
            [
                leader.changed(workers=number, prefetch_factor=None)
                for number in numbers
                if 1 <= number <= _MOST_WORKERS
            ],
            [
                leader.changed(prefetch_factor=factor)
                for factor in (1, -(-2 * leader.ahead // workers))
            ],
            [leader.changed(batch_size=size) for size in self._plan.batch_sizes],
        )
        for group in groups:
            new = [each for each in dict.fromkeys(group) if self._is_new(each)]
            if new:
                return new
        return []

    def run(self, field: Sequence[Setting]) -> bool:
        """Measure settings and the defaults in one round, and the faster half in a second one.

        Returns:
            Whether there was time for all of it.
        """
        for _ in range(2):
            self._round += 1
            for each in self._with_default(field):
                if not self._fits([each], self._seconds(each), _SEARCH):
                    self._out_of_time = True
                    if len(self._rates) > 1:  # a tiny budget must do for two settings
                        return False
                self._try(each, self._seconds(each))
            faster = [each for each in self.ranked() if each in field]
            field = faster[: -(-len(faster) // 2)]
        return True

    def final(self) -> None:
        """Compare the best settings with the defaults until the budget is used up."""
        while True:
            ranked = self.ranked()
            others = [each for each in ranked if each != self._reference]
            field = self._with_default(others[:_FINALISTS])
            least = min(len(self._common(each)) for each in field)
            if least >= _FINAL_ROUNDS or (least >= LEAST_ROUNDS and self._is_enough(ranked[0])):
                return
            seconds = {each: self._final_seconds(each, len(field)) for each in field}
            if not self._fits(field, max(seconds.values()), 1.0):
                self._out_of_time |= least < LEAST_ROUNDS
                return
            self._round += 1
            for each in turn(field, self._round):
                self._try(each, seconds[each])

    def ranked(self) -> list[Setting]:
        """Return the measured settings, the best first.

        Raises:
            MeasurementFailed: If all of them failed.
        """
        working = [each for each in self._rates if each not in self._left_out]
        if not working:
            raise MeasurementFailed(next(iter(self._left_out.values())))
        return sorted(working, key=self._rank)

    def result(self) -> SearchResult:
        """Return what was found. The defaults stay unless a setting is clearly faster."""
        ranked, default = self.ranked(), self._plan.default
        compared = [each for each in ranked if len(self._common(each)) >= LEAST_ROUNDS] or ranked
        if default in compared and self._is_tie(compared[0]):
            compared.remove(default)
            compared.insert(0, default)
        return SearchResult(
            ranking=[self._tried(each) for each in compared],
            stopped=[self._tried(each) for each in ranked if each not in compared],
            left_out=[LeftOut(setting=each, reason=why) for each, why in self._left_out.items()],
            out_of_time=self._out_of_time,
        )

    # Measuring

    def _try(self, setting: Setting, seconds: float) -> None:
        """Measure a setting, or note why that is not possible."""
        if setting in self._left_out:
            return
        batches = -(-self._plan.images // setting.batch_size)
        if setting.workers > batches and setting != self._plan.default:
            self._left_out[setting] = f"an epoch has only {batches} such batches"
            return
        self._watch(str(setting), min(self._elapsed(), self._plan.budget), self._plan.budget)
        start = self._clock()
        try:
            rate = self._measure(setting, seconds)
        except (MeasurementFailed, UsageError) as error:
            self._left_out[setting] = str(error)
            return
        spent = max(0.05, self._clock() - start - seconds)
        self._overheads[setting.engine] = (self._overheads[setting.engine] + spent) / 2
        self._rates.setdefault(setting, {})[self._round] = rate

    def _seconds(self, setting: Setting) -> float:
        """Return the length of a measurement.

        Workers that start together finish together, so it covers at least two batches of each.
        """
        base = min(max(self._plan.budget / 100, _SHORTEST), _LONGEST)
        rates = [
            rate
            for each, rounds in self._rates.items()
            if each.engine == setting.engine
            for rate in rounds.values()
        ]
        if not rates:
            return base
        turns = 2 * setting.workers * setting.batch_size / max(rates)
        left = self._plan.budget - self._elapsed()
        return min(max(base, turns), max(base, left / 20))

    def _final_seconds(self, setting: Setting, field: int) -> float:
        """Return the length of a measurement in the final: longer, if there is time."""
        base = self._seconds(setting)
        left = self._plan.budget - self._elapsed()
        fitting = left / (field * 2 * LEAST_ROUNDS) - self._overheads[setting.engine]
        return min(max(fitting, base), 2.5 * base)

    def _fits(self, settings: Sequence[Setting], seconds: float, part: float) -> bool:
        """Return whether measurements end before a fraction of the budget is used up."""
        needed = sum(seconds + self._overheads[each.engine] for each in settings)
        return self._elapsed() + needed <= part * self._plan.budget

    def _elapsed(self) -> float:
        return self._clock() - self._start

    # Judging

    @property
    def _reference(self) -> Setting:
        """The defaults, or the first setting that works if they do not."""
        return next(each for each in self._rates if each not in self._left_out)

    def _with_default(self, field: Sequence[Setting]) -> list[Setting]:
        default = self._plan.default if not self._rates else self._reference
        return list(dict.fromkeys([default, *field]))

    def _common(self, setting: Setting) -> list[int]:
        """Return the rounds that measured a setting and the defaults."""
        return sorted(self._rates[setting].keys() & self._rates[self._reference].keys())

    def _ratios(self, setting: Setting) -> list[float]:
        reference = self._rates[self._reference]
        return [self._rates[setting][each] / reference[each] for each in self._common(setting)]

    def _score(self, setting: Setting) -> float:
        """Return the number that decides: the median ratio to the defaults."""
        ratios = self._ratios(setting)
        return Spread.of(ratios).median if ratios else 0.0

    def _rank(self, setting: Setting) -> tuple[float, ...]:
        if self._is_enough(setting):
            return (-math.inf, *setting.cost)
        return (-self._score(setting),)

    def _is_enough(self, setting: Setting) -> bool:
        """Return whether a setting is fast enough for the training step, if there is one."""
        rate = Spread.of(list(self._rates[setting].values())).median
        return self._plan.needed is not None and rate >= ENOUGH * self._plan.needed

    def _is_tie(self, best: Setting) -> bool:
        """Return whether the best setting is no better than the defaults."""
        least = GAIN if len(self._common(best)) >= LEAST_ROUNDS else _LARGE_GAIN
        return not self._is_enough(best) and self._score(best) < least

    def _is_new(self, setting: Setting) -> bool:
        if setting in self._rates or setting in self._left_out:
            return False
        same = setting.changed(prefetch_factor=None)  # the engine's default may be this factor
        return same == setting or same.ahead != setting.ahead

    def _tried(self, setting: Setting) -> Tried:
        ratios = self._ratios(setting)
        compared = self._plan.default not in self._left_out and ratios
        return Tried(
            setting=setting,
            images_per_second=Spread.of(list(self._rates[setting].values())),
            speedup=Spread.of(ratios) if compared else None,
        )
