"""The search for the fastest loader settings within a time budget.

The time that one thread needs for an image, on a CPU, with the GIL, and waiting, tells how many
workers each engine needs. These, twice and half as many are measured in the first round. The two
best are compared with the defaults in each later round, and the neighbors of the leader join: other
numbers of workers, other prefetch. A setting is judged by one number: the median, over the rounds,
of its speed divided by that of the defaults in the same round.

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
from shardkit.measure.runner.spec import LoadCost, LoaderSpec
from shardkit.system.priority import priority_problem
from shardkit.system.text import amount
from shardkit.torch.engine.options import ENGINE_KINDS

GAIN = 1.05
"""Minimum speedup over the defaults to change them. Anything closer is a tie."""

_TIE = 1.03
"""Settings that are slower than the best by less are as fast, and the cheapest is better."""

_LARGE_GAIN = 1.5
"""The same with fewer than `LEAST_ROUNDS` rounds."""

ENOUGH = 1.25
"""Multiple of the training step's rate that leaves loading a margin."""

LEAST_ROUNDS = 3
"""Rounds in common with the defaults that a choice requires, if there is time."""

_FINAL_ROUNDS = 15
_FINALISTS = 2
"""Rounds of the best settings, and how many stay in each round, in addition to the defaults."""

_MOST_WORKERS = 256

_TIMES = 16
"""Most workers to try at first, in a multiple of those of the defaults: processes start slowly."""

_CROWD = 1.5
"""Times as many workers as wait on average: they do not wait in turn."""

_SEARCH = 0.4
"""Fraction of the budget in which neighbors join."""

_EACH = 1 / 30
"""Fraction of the budget for a measurement. Noise decides shorter ones: in 15 seconds, 93% of the
choices on simulated machines that wait were within 5% of the best; with 1/100, 85%."""
_SHORTEST = 0.1
_LONGEST = 1.0
_OVERHEAD = 0.3
"""Least and most seconds of a measurement, and in addition."""

_FEW = 8
"""Workers whose start takes as long as the rest of a measurement."""

_OTHERS = {"thread": "helper", "helper": "thread"}
"""Engines with the same threads, in this process or in another."""

Measure = Callable[[LoaderSpec, float], float]
"""Measures a setting for at least so many seconds and returns images/s, or raises
MeasurementFailed."""


def name_of(setting: LoaderSpec) -> str:
    """Return the name of a setting in reports."""
    prefetch = f"prefetch factor {setting.prefetch_factor}, " * bool(setting.prefetch_factor)
    priority = f"{setting.priority} priority, " * bool(setting.priority)
    pinned = "no pinned memory, " * (setting.pin_memory is False)
    batches = f"batches of {setting.batch_size}"
    workers = amount(setting.workers, "worker")
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
    cost: LoadCost

    def suited(self, engine: str) -> int:
        """Return the fewest workers that use up the CPUs or the GIL, or suffice for the step."""
        cost = self.cost
        usual = self.default.workers
        limits = [usual / cost.computing]
        if ENGINE_KINDS[engine].shares_gil and cost.held:
            limits.append(1 / cost.held)
        if self.needed is not None:
            limits.append(ENOUGH * self.needed)
        waits = cost.seconds - cost.computing
        workers = min(limits) * (cost.computing + _CROWD * waits)
        return max(1, min(round(workers), _TIMES * usual, _MOST_WORKERS))


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
    while race.run(field):
        field = race.next_field()
    return race.result()


def compare(
    measure: Measure,
    plan: Plan,
    others: Sequence[LoaderSpec],
    *,
    clock: Callable[[], float] = time.monotonic,
    watch: Watch = lambda text, done, total: None,
) -> list[Tried]:
    """Compare the defaults of a plan with others; they stay first unless one is clearly faster."""
    race = _Race(measure, plan, clock, watch)
    while race.rounds < _FINAL_ROUNDS and race.run(others, least=1 + len(others)):
        pass
    return race.result().ranking


def loop_variants(setting: LoaderSpec, *, has_cuda: bool) -> list[LoaderSpec]:
    """Return settings that load about as fast, but may disturb a training loop less."""
    others = list[LoaderSpec]()
    if setting.engine in _OTHERS:
        others.append(replace(setting, engine=_OTHERS[setting.engine]))
    if priority_problem() is None:
        others += [replace(variant, priority="low") for variant in (setting, *others)]
    if has_cuda:
        others.append(replace(setting, pin_memory=False))
    return others


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
        self._seconds_per_worker: dict[str, float] = {}
        """The shortest measurement of each engine."""
        self._out_of_time = False

    @property
    def rounds(self) -> int:
        """The rounds so far."""
        return len(self._rounds)

    def starters(self) -> list[LoaderSpec]:
        """Return each engine with the suited number of workers, twice and half as many."""
        plan = self._plan
        suited = [(engine, plan.suited(engine)) for engine in plan.engines]
        return self._new(
            replace(plan.default, engine=engine, num_workers=max(1, int(times * number)))
            for times in (1, 2, 0.5)
            for engine, number in suited
        )

    def neighbors(self) -> list[LoaderSpec]:
        """Return settings next to the leader that were not tried: workers, then prefetch."""
        leader = self.ranked()[0]
        if self._is_enough(leader):
            return []
        workers = leader.workers
        near = 2 * workers, -(-3 * workers // 2), 3 * workers // 4, workers // 2
        factors = 1, -(-2 * ahead(leader) // workers)
        return self._new(
            replace(leader, num_workers=number, prefetch_factor=None) for number in near
        ) or self._new(replace(leader, prefetch_factor=factor) for factor in factors)

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

    def run(self, field: Sequence[LoaderSpec], least: int = 2) -> bool:
        """Measure the defaults and a field while there is time; return whether one of it was.

        A tiny budget must do for ``least`` settings, and for one that works.
        """
        self._rounds.append(rates := {})
        reference = self._reference
        attempts = 0
        seconds = min(max(self._plan.budget * _EACH, _SHORTEST), _LONGEST)
        for setting in turn([reference, *field], len(self._rounds) - 1):
            if self._tried.get(setting) or setting in rates:
                continue
            start = self._clock()
            elapsed = start - self._start
            per_worker = self._seconds_per_worker.get(setting.engine)
            needed = seconds + _OVERHEAD + setting.workers * (per_worker or 0.0)
            is_late = elapsed + needed > self._plan.budget
            if is_late and len(self._tried) >= least and self._working:
                self._out_of_time = True
                continue
            self._watch(name_of(setting), min(elapsed, self._plan.budget), self._plan.budget)
            self._tried[setting] = ""
            try:
                rates[setting] = self._measure(setting, seconds)
            except (MeasurementFailed, UsageError) as error:
                self._tried[setting] = str(error)
            took = (self._clock() - start) / max(_FEW, setting.workers)
            self._seconds_per_worker[setting.engine] = min(took, per_worker or took)
            attempts += setting != reference
        return attempts > 0

    def next_field(self) -> list[LoaderSpec]:
        """Return the best settings, and the neighbors of a leader that was measured twice.

        If no setting works, return those with one worker.
        """
        if not self._working:
            single = replace(self._plan.default, num_workers=1)
            return self._new(replace(single, engine=engine) for engine in self._plan.engines)
        best = [setting for setting in self.ranked() if setting != self._reference][:_FINALISTS]
        rounds = min(len(self._ratios(setting)) for setting in (self._reference, *best))
        joining = self.neighbors()
        self._out_of_time = bool(joining) or rounds < LEAST_ROUNDS
        if rounds < 2 or self._clock() - self._start > _SEARCH * self._plan.budget:
            joining = []
        is_done = rounds >= LEAST_ROUNDS and self._is_enough(self.ranked()[0])
        return [] if is_done or (rounds >= _FINAL_ROUNDS and not joining) else [*best, *joining]

    def ranked(self) -> list[LoaderSpec]:
        """Return the measured settings, the best first; raises if all of them failed."""
        if not self._working:
            raise MeasurementFailed(next(iter(self._tried.values())))
        return sorted(self._working, key=self._rank)

    def result(self) -> SearchResult:
        """Return the ranking. The defaults stay unless a setting is clearly faster."""
        ranked = self.ranked()
        default = self._plan.default
        ranked.sort(key=self._is_doubtful)
        choice = ranked[0]
        if not self._is_enough(choice):
            near = self._score(choice) / _TIE
            choice = min((setting for setting in ranked if self._score(setting) >= near), key=cost)
        ratios = self._ratios(choice)
        least = GAIN if len(ratios) >= LEAST_ROUNDS else _LARGE_GAIN
        if len(ratios) > 1:  # of many settings, the one with the luckiest rounds is the first
            least += statistics.stdev(ratios) / math.sqrt(len(ratios))
        if default in ranked and not self._is_enough(choice) and self._score(choice) < least:
            choice = default
        ranked.insert(0, ranked.pop(ranked.index(choice)))
        return SearchResult(
            ranking=[self._summary(setting) for setting in ranked],
            left_out={name_of(setting): why for setting, why in self._tried.items() if why},
            out_of_time=self._out_of_time,
        )

    @property
    def _working(self) -> list[LoaderSpec]:
        return [setting for setting, why in self._tried.items() if not why]

    @property
    def _reference(self) -> LoaderSpec:
        """The defaults, or the first setting that works if they do not."""
        return next(iter(self._working), self._plan.default)

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
