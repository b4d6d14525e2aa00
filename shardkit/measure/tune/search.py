"""The search for the fastest loader settings within a time budget.

About ten settings are measured in interleaved rounds: the suitable engines, with several numbers of
workers. The slower half leaves after each round. Then the neighbors of the leader join: other
numbers of workers, other prefetch. In the end, the two best are compared with
the defaults for as long as the budget lasts. A setting is judged by one number: the median, over
the rounds, of its speed divided by that of the defaults in the same round.

The search knows no process and no dataset: tests run it on simulated machines.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from shardkit.errors import MeasurementFailed, UsageError
from shardkit.measure.runner.rounds import Spread, Watch, turn
from shardkit.measure.runner.spec import LoaderSpec
from shardkit.torch.engine.options import ENGINE_KINDS

GAIN = 1.05
"""Minimum speedup over the defaults to change them. Anything closer is a tie."""

_LARGE_GAIN = 1.5
"""The same with fewer than `LEAST_ROUNDS` rounds."""

ENOUGH = 1.25
"""Multiple of the training step's rate that leaves loading a margin."""

LEAST_ROUNDS = 3
"""Rounds in common with the defaults that a choice requires, if there is time."""

_FINAL_ROUNDS = 15
_FINALISTS = 2
_KEPT = 2
"""Settings in the final, and those that stay when neighbors join, in addition to the defaults."""

_MOST_WORKERS = 256

_TIMES = 8
_AT_ONCE = 32
"""Times the workers of the defaults to try at once, at least so many: processes start slowly."""

_COMPUTES = 0.7
"""Fraction of the processors from which a loader does not wait."""

_SEARCH = 0.6
"""Fraction of the budget for the search; the rest is for the final."""

_SHORTEST = 0.1
_LONGEST = 1.0
_OVERHEAD = 0.3
"""Seconds of a measurement, if each worker makes two batches in it; and in addition."""

Measure = Callable[[LoaderSpec, float], float]
"""Measures a setting for so many seconds and returns images/s, or raises MeasurementFailed."""


def name_of(setting: LoaderSpec) -> str:
    """Return the name of a setting in reports."""
    workers = f"{setting.workers} worker{'s' * (setting.workers != 1)}"
    prefetch = f"prefetch factor {setting.prefetch_factor}, " * bool(setting.prefetch_factor)
    priority = f"{setting.priority} priority, " * bool(setting.priority)
    pinned = "no pinned memory, " * (setting.pin_memory is False)
    batches = f"batches of {setting.batch_size}"
    return f"{setting.engine}, {workers}, {prefetch}{priority}{pinned}{batches}"


def ahead(setting: LoaderSpec) -> int:
    """Return the batches in progress or ready."""
    settings = setting.loader_options().resolved(0, pinned=False)
    shares = ENGINE_KINDS[setting.engine].shares_gil
    return settings.thread_prefetch if shares else settings.process_prefetch


def cost(setting: LoaderSpec) -> tuple[int, ...]:
    """Return a sort key of settings that are fast enough; processes need more memory and time."""
    engine = list(ENGINE_KINDS).index(setting.engine)
    return engine, setting.workers, ahead(setting) * setting.batch_size


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Task and limits of a search."""

    default: LoaderSpec
    """Default setting of `make_loader`."""
    engines: tuple[str, ...] = ("thread", "process")
    needed: float | None = None
    """Images per second that the training step consumes."""
    budget: float = 60.0
    """Seconds."""
    images: int = 10**9
    """Images in an epoch."""
    busy: float = 1.0
    """Fraction of the processors that the defaults use; code that waits uses little."""

    @property
    def enough(self) -> int:
        """Workers that keep the processors busy, unless the loader waits for the GIL."""
        workers = self.default.workers / max(self.busy, 1 / _MOST_WORKERS)
        return min(round(workers), _MOST_WORKERS)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of workers to try first, likely ones before others."""
        usual = self.default.workers
        waits = (min(self.enough, max(_TIMES * usual, _AT_ONCE)),) * (self.busy < _COMPUTES)
        return usual, *waits, 2 * usual, usual // 2, 4 * usual, 1


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A setting and its measurements."""

    setting: LoaderSpec
    images_per_second: Spread
    speedup: Spread | None
    """Ratio to the defaults in the same rounds; None if they could not be measured."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Result of a search."""

    ranking: list[Tried]
    """The first is the choice. Those with fewer than `LEAST_ROUNDS` rounds come last."""
    left_out: dict[str, str]
    """Settings that could not be measured, and why."""
    out_of_time: bool
    """Whether the budget ended before the search did."""


def search(
    measure: Measure,
    plan: Plan,
    *,
    clock: Callable[[], float] = time.monotonic,
    watch: Watch = lambda text, done, total: None,
) -> SearchResult:
    """Find the fastest settings; with a training step, the cheapest that are fast enough."""
    race = _Race(measure, plan, clock, watch)
    field = race.starters()
    while field and race.run(race.with_default(field), _SEARCH):
        faster = [setting for setting in race.ranked() if setting in field]
        if not race.run(race.with_default(faster[: -(-len(faster) // 2)]), _SEARCH):
            break
        joining = race.neighbors()
        field = joining and [*joining, *race.ranked()[:_KEPT]]
    race.final()
    return race.result()


class _Race:
    """Measurements so far, and the rules for the next ones."""

    def __init__(
        self, measure: Measure, plan: Plan, clock: Callable[[], float], watch: Watch
    ) -> None:
        self._measure = measure
        self._plan = plan
        self._clock = clock
        self._watch = watch
        self._start = clock()
        self._rounds: list[dict[LoaderSpec, float]] = []
        """Images per second of the settings in each round."""
        self._tried: dict[LoaderSpec, str] = {}
        """Settings, and why they failed; empty for those that work."""
        self._out_of_time = False

    def starters(self) -> list[LoaderSpec]:
        """Return the engines with fewer and more workers than the defaults, likely ones first."""
        default = self._plan.default
        engines = self._plan.engines
        pairs = [(engine, number) for number in self._plan.numbers for engine in engines]
        return self._new(
            replace(default, engine=engine, num_workers=number) for engine, number in pairs
        )

    def neighbors(self) -> list[LoaderSpec]:
        """Return settings next to the leader that were not tried: workers, then prefetch."""
        leader = self.ranked()[0]
        if self._is_enough(leader):
            return []
        workers = leader.workers
        most = max(setting.workers for setting in self._tried if setting.engine == leader.engine)
        next_one = self._plan.enough if workers < self._plan.enough else 4 * workers
        more = (min(next_one, 4 * workers),) if workers == most else ()  # while more are faster
        near = 2 * workers, -(-3 * workers // 2), 3 * workers // 4, workers // 2
        factors = 1, -(-2 * ahead(leader) // workers)

        def with_workers(numbers: Iterable[int]) -> list[LoaderSpec]:
            return self._new(
                replace(leader, num_workers=number, prefetch_factor=None) for number in numbers
            )

        return (
            with_workers(more)
            or with_workers(near)
            or self._new(replace(leader, prefetch_factor=factor) for factor in factors)
        )

    def _new(self, settings: Iterable[LoaderSpec]) -> list[LoaderSpec]:
        """Return the settings that can be tried and were not; each worker needs a batch."""
        new = []
        for setting in dict.fromkeys(settings):
            most = min(_MOST_WORKERS, -(-self._plan.images // setting.batch_size))
            usual = replace(setting, prefetch_factor=None)  # perhaps with the same prefetch
            differs = setting == usual or ahead(setting) != ahead(usual)
            if setting not in self._tried and 1 <= setting.workers <= most and differs:
                new.append(setting)
        return new

    def with_default(self, field: Sequence[LoaderSpec]) -> list[LoaderSpec]:
        """Return a field with the defaults in front."""
        return list(dict.fromkeys([self._reference, *field]))

    def run(self, field: Sequence[LoaderSpec], part: float) -> bool:
        """Measure a field in one round; return whether this part of the budget was enough."""
        self._rounds.append({})
        for setting in field:
            seconds = self._seconds(setting)
            elapsed = self._clock() - self._start
            # Failures may take long, and nothing can be chosen before one setting works.
            limit = part * self._plan.budget if "" in self._tried.values() else self._plan.budget
            fits = elapsed + seconds + _OVERHEAD <= limit
            if not fits and len(self._tried) > 1:  # a tiny budget must do for two settings
                self._out_of_time |= part < 1
                return False
            if self._tried.get(setting):
                continue
            self._watch(name_of(setting), min(elapsed, self._plan.budget), self._plan.budget)
            self._tried[setting] = ""
            try:
                self._rounds[-1][setting] = self._measure(setting, seconds)
            except (MeasurementFailed, UsageError) as error:
                self._tried[setting] = str(error)
        return True

    def final(self) -> None:
        """Compare the best settings with the defaults until the budget is used up."""
        least = 0
        going = True
        while going and least < _FINAL_ROUNDS:
            others = [setting for setting in self.ranked() if setting != self._reference]
            field = self.with_default(others[:_FINALISTS])
            least = min(len(self._ratios(setting)) for setting in field)
            if least >= LEAST_ROUNDS and self._is_enough(self.ranked()[0]):
                return
            going = self.run(turn(field, len(self._rounds)), 1.0)
        self._out_of_time |= least < LEAST_ROUNDS

    def ranked(self) -> list[LoaderSpec]:
        """Return the measured settings, the best first; raises if all of them failed."""
        working = [setting for setting, why in self._tried.items() if not why]
        if not working:
            raise MeasurementFailed(next(iter(self._tried.values())))
        return sorted(working, key=self._rank)

    def result(self) -> SearchResult:
        """Return the ranking. The defaults stay unless a setting is clearly faster."""
        ranked = self.ranked()
        default = self._plan.default
        ranked.sort(key=self._is_doubtful)
        least = GAIN if len(self._ratios(ranked[0])) >= LEAST_ROUNDS else _LARGE_GAIN
        tie = not self._is_enough(ranked[0]) and self._score(ranked[0]) < least
        if default in ranked and tie:
            ranked.remove(default)
            ranked.insert(0, default)
        return SearchResult(
            ranking=[self._summary(setting) for setting in ranked],
            left_out={name_of(setting): why for setting, why in self._tried.items() if why},
            out_of_time=self._out_of_time,
        )

    def _seconds(self, setting: LoaderSpec) -> float:
        """Return the length of a measurement: at least two batches of each worker."""
        base = min(max(self._plan.budget / 100, _SHORTEST), _LONGEST)
        same = [other for other in self._tried if other.engine == setting.engine]
        fastest = max((rate for other in same for rate in self._rates(other)), default=math.inf)
        turns = 2 * setting.workers * setting.batch_size / fastest
        remaining = self._plan.budget - (self._clock() - self._start)
        return min(max(base, turns), max(base, remaining / 20))

    @property
    def _reference(self) -> LoaderSpec:
        """The defaults, or the first setting that works if they do not."""
        return next(
            (setting for setting, why in self._tried.items() if not why), self._plan.default
        )

    def _rates(self, setting: LoaderSpec) -> list[float]:
        return [rates[setting] for rates in self._rounds if setting in rates]

    def _ratios(self, setting: LoaderSpec) -> list[float]:
        """Return the ratios to the defaults, of the rounds that measured both."""
        base = self._reference
        shared = [rates for rates in self._rounds if setting in rates and base in rates]
        return [rates[setting] / rates[base] for rates in shared]

    def _rank(self, setting: LoaderSpec) -> tuple[float, ...]:
        if self._is_enough(setting):
            return (-math.inf, *cost(setting))
        return (-self._score(setting),)

    def _score(self, setting: LoaderSpec) -> float:
        """Return the number that decides."""
        return statistics.median(self._ratios(setting) or [0.0])

    def _is_doubtful(self, setting: LoaderSpec) -> bool:
        """Return whether a setting has too few rounds, and no gain that is large anyway."""
        return len(self._ratios(setting)) < LEAST_ROUNDS and self._score(setting) < _LARGE_GAIN

    def _is_enough(self, setting: LoaderSpec) -> bool:
        """Return whether a setting is fast enough for the training step, if there is one."""
        rate = statistics.median(self._rates(setting))
        return self._plan.needed is not None and rate >= ENOUGH * self._plan.needed

    def _summary(self, setting: LoaderSpec) -> Tried:
        ratios = self._ratios(setting)
        compared = ratios and not self._tried[self._plan.default]
        return Tried(
            setting=setting,
            images_per_second=Spread.of(self._rates(setting)),
            speedup=Spread.of(ratios) if compared else None,
        )
