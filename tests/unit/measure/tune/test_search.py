"""The search for settings and training loops on simulated machines: nothing here takes time."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from refusals import refused

from shardkit.errors import MeasurementFailed
from shardkit.measure.runner.spec import LoadCost, LoaderSpec
from shardkit.measure.tune import search as search_module
from shardkit.measure.tune.search import (
    GAIN,
    Plan,
    SearchResult,
    Tried,
    ahead,
    compare,
    cost,
    loop_variants,
    name_of,
    search,
)


@dataclass(kw_only=True)
class Machine:
    """Rates of loaders, from how long a sample computes, waits, and holds the GIL."""

    processors: int = 8
    compute: float = 0.001
    """CPU seconds per sample."""
    waits: float = 0.0
    """Seconds that a sample waits for something."""
    held: float = 0.0
    """Fraction of the computing time in which the GIL is held."""
    process_price: float = 1.05
    noise: float = 0.0
    """Standard deviation of a rate, as a fraction of it, over one second."""
    starved: float = 1.0
    """Speed if no more batches are prefetched than there are workers."""
    by_setting: Callable[[LoaderSpec], float] = lambda setting: 1.0
    fails: Callable[[LoaderSpec], bool] = lambda setting: False
    start: float = 0.02
    """Seconds that a worker process takes to start."""
    doubt: float = 0.0
    """Standard deviation of the cost of a sample, as a fraction of it."""
    overhead: dict[str, float] = field(default_factory=dict)
    """Further seconds of a measurement, by the engine."""
    now: float = 100.0
    tried: list[LoaderSpec] = field(default_factory=list)
    random: random.Random = field(default_factory=lambda: random.Random(1))

    def rate(self, setting: LoaderSpec) -> float:
        """Return the true images/s."""
        price = self.process_price if setting.engine == "process" else 1.0
        compute = self.compute * price
        running = setting.workers / (compute + self.waits)
        crowd = max(0, setting.workers - self.processors)
        limit = self.processors / compute / (1 + 0.002 * crowd)
        # Workers that wait do so at random, so some CPUs are idle while others are in demand.
        rate = (running**-6 + limit**-6) ** (-1 / 6) if self.waits else min(running, limit)
        if setting.engine == "thread" and self.held:
            rate = min(rate, 1 / (self.held * compute))
        if ahead(setting) <= setting.workers:
            rate *= self.starved
        return rate * self.by_setting(setting)

    def measure(self, setting: LoaderSpec, seconds: float) -> float:
        """Measure a setting."""
        self.tried.append(setting)
        start = self.start * setting.workers if setting.engine == "process" else 0.01
        self.now += seconds * 1.2 + start + self.overhead.get(setting.engine, 0.0)
        if self.fails(setting):
            raise MeasurementFailed("its process ended (killed by signal 9): without a message")
        spread = self.noise / math.sqrt(seconds)
        return self.rate(setting) * math.exp(self.random.gauss(0, spread))

    @property
    def cost(self) -> LoadCost:
        compute, waits = (
            seconds * math.exp(self.random.gauss(0, self.doubt))
            for seconds in (self.compute, self.waits)
        )
        return LoadCost(seconds=compute + waits, computing=compute, held=self.held * compute)

    def default(self, engine: str = "thread") -> LoaderSpec:
        return LoaderSpec(engine=engine, num_workers=self.processors, batch_size=64)

    def tune(self, engine: str = "thread", **plan: Any) -> SearchResult:
        default = self.default(engine)
        chosen = Plan(default=default, cost=self.cost, **plan)
        return search(self.measure, chosen, clock=lambda: self.now)


def chosen(found: SearchResult) -> LoaderSpec:
    return found.ranking[0].setting


def best_of_grid(
    machine: Machine, engines: tuple[str, ...] = ("thread", "process"), most: int = 256
) -> float:
    workers = {2**n for n in range(9)} | set(range(1, min(8 * machine.processors, 65)))
    rates = []
    for engine, number in itertools.product(engines, (n for n in workers if n <= most)):
        one = LoaderSpec(engine=engine, num_workers=number, batch_size=64)
        rates += [machine.rate(one), machine.rate(replace(one, prefetch_factor=4))]
    return max(rates)


LOADS: dict[str, dict[str, Any]] = {
    "decoding": {},
    "holds the GIL": {"held": 0.97},
    "half held": {"held": 0.5},
    "waits": {"compute": 0.00005, "waits": 0.003},
    "processes win": {"process_price": 0.85},
    "starved": {"starved": 0.7},
}


@pytest.mark.parametrize("load", LOADS)
def test_the_choice_is_near_the_best_of_a_grid_and_the_budget_is_kept(load: str) -> None:
    for seed, processors in enumerate((1, 2, 8, 64)):
        machine = Machine(
            processors=processors, noise=0.03, random=random.Random(seed), **LOADS[load]
        )
        start = machine.now

        found = machine.tune()

        assert machine.rate(chosen(found)) >= 0.95 * best_of_grid(machine), chosen(found)
        assert machine.now - start <= 1.1 * 60


@pytest.mark.parametrize("load", LOADS)
def test_the_first_row_is_the_best_by_the_number_that_decides(load: str) -> None:
    for seed in range(5):
        machine = Machine(noise=0.15, random=random.Random(seed), **LOADS[load])
        found = machine.tune()
        rounds = [each.speedup.rounds for each in found.ranking if each.speedup]
        assert len(rounds) == len(found.ranking)
        compared = sum(each >= 3 for each in rounds)
        speedups = [speedup(each) for each in found.ranking[:compared]]

        assert speedups[1:] == sorted(speedups[1:], reverse=True)
        if chosen(found) == machine.default():
            assert all(each < 1.5 for each in speedups)
        else:
            assert 1.03 * speedups[0] >= max(speedups) >= GAIN
        assert rounds[0] >= 3 or speedups[0] >= 1.5


def test_in_20_seconds_noise_rarely_decides() -> None:
    """Two loads that wait on 2 CPUs, whose measurements of a second vary by 6%."""
    near = 0
    for seed, compute in itertools.product(range(15), (0.0003, 0.0006)):
        machine = Machine(
            processors=2,
            compute=compute,
            waits=0.003,
            held=0.5,
            noise=0.06,
            doubt=0.2,
            overhead={"thread": 0.05, "process": 0.3},
            random=random.Random(seed),
        )
        choice = chosen(machine.tune(budget=15))
        near += machine.rate(choice) >= 0.95 * best_of_grid(machine, most=64)
    assert near >= 24, "of 30"


def speedup(tried: Tried) -> float:
    assert tried.speedup is not None
    return tried.speedup.median


@pytest.mark.parametrize(
    ("price", "wanted"), [(0.85, "process"), (0.9, "process"), (1.0, "thread"), (1.1, "thread")]
)
def test_small_gains_are_found_and_noise_is_not_a_gain(price: float, wanted: str) -> None:
    """Decoding on 2 CPUs, whose measurements vary by 7%; processes need 1 / 0.85 of the time."""
    right = 0
    for seed in range(40):
        machine = Machine(
            processors=2,
            compute=0.0005,
            process_price=price,
            noise=0.05,
            overhead={"thread": 0.05, "process": 0.3},
            random=random.Random(seed),
        )
        right += chosen(machine.tune()).engine == wanted
    assert right >= 34


def test_the_defaults_stay_where_nothing_is_better() -> None:
    machine = Machine(noise=0.02)

    assert chosen(machine.tune()) == machine.default()


def test_about_ten_settings_are_tried() -> None:
    for load in LOADS.values():
        machine = Machine(processors=2, **load)
        machine.tune()
        assert len(set(machine.tried)) <= 22, "the waiting load needs the most"


@pytest.mark.parametrize(
    ("engines", "load"),
    [
        (("process",), {"compute": 0.0002, "waits": 0.001}),
        (("process",), {"compute": 0.0002, "waits": 0.003}),
        (("process",), {"compute": 0.0003, "waits": 0.060}),
        (("thread", "process"), {"compute": 0.0002, "waits": 0.010}),
        (("thread", "process"), {"compute": 0.001, "waits": 0.010}),
        (("thread", "process"), {"compute": 0.003, "held": 0.97}),
        (("thread", "process"), {"compute": 0.013, "held": 0.05}),
        (("thread", "process"), {"compute": 0.00001, "held": 0.5}),
    ],
)
def test_twenty_seconds_are_enough(engines: tuple[str, ...], load: dict[str, Any]) -> None:
    """On 2 CPUs, on which a measurement of 32 processes takes 2 s; opening takes 6 of the 20 s."""
    near = 0
    for seed in range(10):
        machine = Machine(
            processors=2,
            noise=0.015,
            overhead={"thread": 0.2, "process": 0.5},
            start=0.04,
            doubt=0.2,
            process_price=1.03,
            random=random.Random(seed),
            **load,
        )
        start = machine.now

        found = machine.tune(engines[0], engines=engines, budget=14.0)

        assert machine.now - start <= 1.15 * 14
        near += machine.rate(chosen(found)) >= 0.95 * best_of_grid(machine, engines, 32)
    assert near >= 9


def test_a_setting_that_fails_late_is_not_chosen() -> None:
    def fails(setting: LoaderSpec) -> bool:
        return setting.engine == "process" and len(machine.tried) > 25

    machine = Machine(processors=2, process_price=0.5, fails=fails)
    found = machine.tune()

    assert len(machine.tried) > 25
    assert chosen(found) == machine.default()


def test_with_a_step_the_cheapest_that_is_enough_is_chosen() -> None:
    machine = Machine(processors=8)  # 1,000 images/s per worker

    found = machine.tune(needed=3000.0)

    assert chosen(found) == replace(machine.default(), num_workers=4)
    thread = machine.default()
    dearer = (replace(thread, engine="process", num_workers=1), replace(thread, prefetch_factor=3))
    assert all(cost(thread) < cost(each) for each in dearer)


def test_with_a_step_that_is_too_fast_the_fastest_is_chosen() -> None:
    found = Machine(processors=8, held=0.97).tune(needed=1e6)

    assert chosen(found).engine == "process"
    assert chosen(found).workers >= 8


def test_more_prefetch_is_chosen_if_it_gains() -> None:
    def gains(setting: LoaderSpec) -> float:
        return 1.5 if ahead(setting) == 16 else 1.0

    machine = Machine(processors=8, noise=0.02, by_setting=gains)

    found = machine.tune(engines=("process",), engine="process")

    assert ahead(chosen(found)) == 16


def test_settings_that_fail_are_left_out_with_the_reason() -> None:
    machine = Machine(processors=4, held=0.9, fails=lambda each: each.workers > 2)

    found = machine.tune("process")

    assert chosen(found).workers == 2
    assert chosen(found).engine == "process"
    reasons = found.left_out
    assert reasons[name_of(machine.default("process"))].startswith("its process ended (killed by")
    assert all(each.speedup is None for each in found.ranking), "no defaults to compare with"
    assert machine.tried.count(machine.default("process")) == 1


def test_a_machine_on_which_all_settings_fail_is_an_error() -> None:
    with refused(MeasurementFailed, "9"):
        Machine(fails=lambda each: True).tune()


def test_slow_failures_leave_the_whole_budget_to_find_a_setting_that_works() -> None:
    machine = Machine(fails=lambda setting: setting.workers > 1, overhead={"process": 1.0})

    found = machine.tune("process", engines=("process",), budget=8.0)

    assert [setting.workers for setting in machine.tried[:5]] == [8, 16, 4, 1, 1]
    assert chosen(found).workers == 1


def test_workers_without_a_batch_are_not_tried() -> None:
    machine = Machine(processors=8, held=0.97)
    machine.tune(images=5 * 64)

    assert machine.tried[0] == machine.default(), "the defaults are always measured"
    others = [each for each in machine.tried if each != machine.default()]
    assert max(each.workers for each in others) <= 5


@pytest.mark.parametrize("load", LOADS)
def test_every_budget_is_kept_and_gives_an_answer(load: str) -> None:
    for budget in (2.0, 5.0, 20.0, 60.0, 300.0):
        machine = Machine(noise=0.05, **LOADS[load])
        start = machine.now

        found = machine.tune(budget=budget)

        assert machine.now - start <= 1.1 * budget + 1
        assert machine.rate(chosen(found)) >= 0.9 * machine.rate(machine.default())


def test_a_long_budget_is_not_used_up() -> None:
    machine = Machine(processors=1)
    start = machine.now

    found = machine.tune(budget=600.0)

    assert machine.now - start < 300
    assert not found.out_of_time
    assert Machine(processors=8).tune(budget=5.0).out_of_time


# Training loops beside loaders, on made-up rates: what is tried, and what is chosen.

BEST = LoaderSpec(engine="thread", num_workers=2, batch_size=64)
LOW, HELPER = replace(BEST, priority="low"), replace(BEST, engine="helper")
BOTH = replace(HELPER, priority="low")


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        (BEST, [HELPER, LOW, BOTH]),
        (HELPER, [BEST, BOTH, LOW]),
        (replace(BEST, engine="process"), [replace(LOW, engine="process")]),
    ],
)
def test_the_variants_load_as_the_setting_does(
    setting: LoaderSpec, found: list[LoaderSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_module, "priority_problem", lambda: None)
    assert loop_variants(setting, has_cuda=False) == found
    assert loop_variants(setting, has_cuda=True) == [*found, replace(setting, pin_memory=False)]


def test_without_priorities_only_the_engine_varies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "priority_problem", lambda: "none here")
    assert loop_variants(BEST, has_cuda=False) == [HELPER]


def loops(
    rate: Callable[[LoaderSpec, int], float], rounds: int = 5
) -> tuple[list[LoaderSpec], list[LoaderSpec]]:
    """Return the settings in order of the result, and in that of the measurements."""
    measured: list[LoaderSpec] = []

    def measure(setting: LoaderSpec, seconds: float) -> float:
        measured.append(setting)
        return rate(setting, measured.count(setting))

    def clock() -> float:
        return 10.0 * len(measured)

    plan = Plan(default=BEST, cost=LoadCost(0.001, 0.001, 0.0), budget=30.0 * rounds)
    tried = compare(measure, plan, [LOW, HELPER], clock=clock)
    return [each.setting for each in tried], measured


@pytest.mark.parametrize("gain", [1.08, 1.5, 3.0])
def test_a_faster_loop_is_chosen(gain: float) -> None:
    noise = itertools.cycle((0.99, 1.0, 1.01))
    order, _ = loops(lambda each, _: 100.0 * next(noise) * (gain if each == LOW else 1.0))
    assert order[0] == LOW


@pytest.mark.parametrize("gain", [0.5, 1.0, 1.04])
def test_the_fastest_loader_stays_without_a_clear_gain(gain: float) -> None:
    order, _ = loops(lambda each, _: 100.0 * (gain if each == LOW else 1.0))
    assert order[0] == BEST
    assert set(order) == {BEST, LOW, HELPER}


def test_few_rounds_change_nothing() -> None:
    order, _ = loops(lambda each, _: 140.0 if each == LOW else 100.0, rounds=2)
    assert order[0] == BEST


def test_rounds_are_interleaved_within_the_time() -> None:
    _, measured = loops(lambda *_: 100.0, rounds=3)
    assert measured == [BEST, LOW, HELPER, LOW, HELPER, BEST, HELPER, BEST, LOW]


def test_a_setting_that_fails_is_left_out() -> None:
    def rate(setting: LoaderSpec, _: int) -> float:
        if setting == HELPER:
            raise MeasurementFailed("no shared memory")
        return 100.0

    order, measured = loops(rate)
    assert order == [BEST, LOW]
    assert measured.count(HELPER) == 1
