"""The search for settings, against machines that are simulated: nothing here takes time."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from pairwise import pairwise

from shardkit.errors import MeasurementFailed
from shardkit.measure.tune.candidate import Candidate
from shardkit.measure.tune.ledger import IN_TURN
from shardkit.measure.tune.limits import ResourceLimits
from shardkit.measure.tune.search import SearchResult, search
from shardkit.measure.tune.trials import Plan, Sight, Tick, Trials


@dataclass(kw_only=True)
class Machine:
    """Rates of loaders, from how long a sample computes, waits, and holds the GIL."""

    processors: int = 8
    compute: float = 0.001
    """Seconds of a processor for one sample."""
    waits: float = 0.0
    """Seconds that one sample waits for something."""
    held: float = 0.0
    """Part of the computing time in which the lock is held."""
    process_price: float = 1.05
    noise: float = 0.0
    """Standard deviation of a rate, as a part of it, over one second."""
    starved: float = 1.0
    """Times the speed if no more batches are prefetched than there are workers."""
    by_batch: Callable[[int], float] = lambda batch_size: 1.0
    fails: Callable[[Candidate], bool] = lambda candidate: False
    start: float = 0.02
    """Seconds that a worker process takes to start."""
    overhead: dict[str, float] = field(default_factory=dict)
    """Seconds of a look beside that, for an engine."""
    starts: dict[str, float] = field(default_factory=lambda: {"spawn": 20.0})
    """Times as long as that, for other ways to start."""
    by_candidate: Callable[[Candidate], float] = lambda candidate: 1.0
    now: float = 100.0
    looks: int = 0
    tried: list[Candidate] = field(default_factory=list)
    random: random.Random = field(default_factory=lambda: random.Random(1))

    def rate(self, candidate: Candidate) -> float:
        """Return the true images/s."""
        price = self.process_price if candidate.engine == "process" else 1.0
        compute = self.compute * price
        running = candidate.workers / (compute + self.waits)
        crowd = max(0, candidate.workers - self.processors)
        limit = self.processors / compute / (1 + 0.002 * crowd)
        rate = min(running, limit)
        if candidate.engine == "thread" and self.held:
            rate = min(rate, 1 / (self.held * compute))
        if candidate.ahead <= candidate.workers:
            rate *= self.starved
        return rate * self.by_batch(candidate.batch_size) * self.by_candidate(candidate)

    def measure(self, candidate: Candidate, seconds: float) -> Sight:
        """Look at a candidate."""
        self.looks += 1
        self.tried.append(candidate)
        first = self.start * candidate.workers if candidate.engine == "process" else 0.01
        first *= self.starts.get(candidate.start_method, 1.0)
        self.now += seconds * 1.2 + first + self.overhead.get(candidate.engine, 0.0)
        if self.fails(candidate):
            raise MeasurementFailed("its process ended (killed by signal 9): it said nothing")
        spread = self.noise / math.sqrt(seconds)
        rate = self.rate(candidate) * math.exp(self.random.gauss(0, spread))
        return Sight(rate=rate, first=first, sample_bytes=150_528, worker_bytes=300_000_000)

    def clock(self) -> float:
        return self.now


def default_of(machine: Machine, engine: str = "thread") -> Candidate:
    return Candidate(engine=engine, workers=machine.processors, batch_size=64)


def tuned(machine: Machine, engine: str = "thread", **plan: Any) -> SearchResult:
    chosen = Plan(default=default_of(machine, engine), **plan)
    return search(machine.measure, chosen, clock=machine.clock)


def best_of_grid(machine: Machine, batch_sizes: tuple[int, ...] = (64,)) -> float:
    most = 8 * machine.processors
    workers = sorted({2**n for n in range(9)} | set(range(1, min(most, 65))))
    rates = []
    for engine, number, size in itertools.product(("thread", "process"), workers, batch_sizes):
        one = Candidate(engine=engine, workers=number, batch_size=size)
        more = one.changed(prefetch_factor=4)
        rates += [machine.rate(one), machine.rate(more)]
    return max(rates)


LOADS: dict[str, dict[str, Any]] = {
    "decoding": {},
    "holds the lock": {"held": 0.97},
    "half held": {"held": 0.5},
    "waits": {"compute": 0.00005, "waits": 0.003},
    "threads cost": {"process_price": 0.5},
    "starved": {"starved": 0.7},
}


@pytest.mark.parametrize(("seed", "processors", "load"), pairwise(range(5), [1, 2, 8, 64], LOADS))
def test_the_choice_is_near_the_best_of_a_grid_and_the_budget_is_kept(
    load: str, processors: int, seed: int
) -> None:
    machine = Machine(processors=processors, noise=0.03, random=random.Random(seed), **LOADS[load])
    begun = machine.now

    found = tuned(machine, held=LOADS[load].get("held"))

    assert machine.rate(found.chosen) >= 0.95 * best_of_grid(machine), found.chosen
    assert machine.now - begun <= 1.1 * 60


def test_a_transform_that_holds_the_lock_goes_to_processes() -> None:
    machine = Machine(held=0.97)

    found = tuned(machine, held=0.97)

    assert found.chosen.engine == "process"
    threads = {each.workers for each in machine.tried if each.engine == "thread"}
    assert threads == {machine.processors}, "more threads cannot help"


def test_an_unmarked_transform_stays_in_processes_unless_threads_are_clearly_faster() -> None:
    """Random numbers would not repeat: a gain that is noise is no reason for that."""

    def engine(price: float, seed: int, **more: Any) -> str:
        machine = Machine(process_price=price, noise=0.1, random=random.Random(seed), **more)
        return tuned(machine, engine="process", processes="it is unmarked").chosen.engine

    def crashes(candidate: Candidate) -> bool:
        return candidate.engine == "thread" and candidate.workers > 8

    assert {engine(1.0, seed) for seed in range(20)} == {"process"}
    assert {engine(3.0, seed) for seed in range(5)} == {"thread"}
    assert {engine(3.0, seed, fails=crashes) for seed in range(5)} == {"process"}
    long_step = tuned(Machine(), engine="process", needed=1500.0, processes="it is unmarked")
    assert long_step.chosen == Candidate(engine="process", workers=2, batch_size=64)


def test_the_defaults_stay_where_nothing_is_better() -> None:
    machine = Machine(noise=0.02)

    found = tuned(machine)

    assert found.chosen == default_of(machine)
    assert found.ledger.rates(found.chosen, IN_TURN).rounds >= 3


def test_a_load_that_waits_gets_many_more_workers_than_processors() -> None:
    found = tuned(Machine(processors=2, compute=0.00005, waits=0.003))

    assert found.chosen.workers >= 48


@pytest.mark.parametrize(
    ("seed", "budget", "engine"),
    pairwise(range(10), [16.0, 25.0, 60.0], ["thread", "process"]),
)
def test_a_gain_of_many_times_is_found_in_little_time(
    engine: str, budget: float, seed: int
) -> None:
    """As on a machine with 2 processors, on which a look at processes takes a second."""
    machine = Machine(
        processors=2,
        compute=0.0002,
        waits=0.003,
        noise=0.1,
        overhead={"thread": 0.3, "process": 0.8},
        start=0.05,
        random=random.Random(seed),
    )
    begun = machine.now

    found = tuned(machine, engine, processes="unmarked" * (engine == "process"), budget=budget)

    assert machine.now - begun <= 1.15 * budget
    assert machine.rate(found.chosen) >= 3.5 * machine.rate(default_of(machine, engine))


@pytest.mark.parametrize(("price", "wanted"), [(0.93, "process"), (1.0, "thread")])
def test_a_gain_of_some_per_cent_is_most_often_found_and_noise_is_none(
    price: float, wanted: str
) -> None:
    """Decoding, on a machine whose looks differ by 7 %."""
    engines = []
    for seed in range(20):
        machine = Machine(
            processors=2,
            compute=0.0005,
            process_price=price,
            noise=0.05,
            overhead={"thread": 0.05, "process": 0.1},
            random=random.Random(seed),
        )
        found = tuned(machine, held=0.02, start_methods=("forkserver", "spawn"))
        engines.append(found.chosen.engine)

    assert engines.count(wanted) >= 16


@pytest.mark.parametrize("load", LOADS)
def test_what_is_chosen_was_seen_to_be_better(load: str) -> None:
    for seed in range(20):
        machine = Machine(noise=0.15, random=random.Random(seed), **LOADS[load])
        found = tuned(machine, held=LOADS[load].get("held"), start_methods=("forkserver",))

        if found.chosen != default_of(machine):
            assert found.gain is not None
            assert found.gain.likely > 1
            assert found.gain.middle > 1.03


def test_processes_gain_where_threads_fail_and_a_transform_is_unmarked() -> None:
    machine = Machine(
        processors=2,
        compute=0.0002,
        waits=0.003,
        overhead={"thread": 0.3, "process": 0.8},
        fails=lambda each: each.engine == "thread" and each.workers > 16,
    )

    found = tuned(machine, engine="process", processes="it is unmarked", budget=30.0)

    assert found.chosen.engine == "process"
    assert found.chosen.workers >= 16


def test_what_fails_in_the_end_is_not_chosen() -> None:
    def fails(candidate: Candidate) -> bool:
        return candidate.engine == "process" and machine.looks > 25

    machine = Machine(processors=2, process_price=0.5, fails=fails)
    found = tuned(machine, held=0.02)

    assert machine.looks > 25
    assert "process" in {each.engine for each in found.ledger.candidates()}
    assert found.chosen == default_of(machine)


def test_a_race_goes_on_with_the_faster_ones_until_two_are_left() -> None:
    field = [Candidate(engine="thread", workers=n, batch_size=64) for n in range(1, 7)]
    machine = Machine(noise=0.05, by_candidate=lambda each: (1 + each.workers / 50) / each.workers)
    plan = Plan(default=field[0])
    trials = Trials(machine.measure, plan, machine.clock, lambda tick: None)

    best = trials.race(field, default_of(machine), until=0.9)

    counts = sorted(machine.tried.count(each) for each in field)
    assert counts[:3] == [2, 2, 2]
    assert counts[3] == 3
    assert counts[4] == counts[5] > 6
    assert machine.tried.count(best) == counts[5]


def test_of_settings_that_are_alike_the_cheapest_is_taken() -> None:
    machine = Machine(processors=8, process_price=1.0, waits=0.0003)

    found = tuned(machine, engine="process")

    assert found.chosen.engine == "thread" or found.chosen == default_of(machine, "process")
    thread = Candidate(engine="thread", workers=4, batch_size=64)
    worse = [thread.changed(workers=5), thread.changed(engine="process", workers=1)]
    assert all(thread.cost < each.cost for each in [*worse, thread.changed(prefetch_factor=3)])


def test_with_a_step_the_cheapest_that_is_enough_is_taken() -> None:
    machine = Machine(processors=8)  # 1,000 images/s for each worker

    found = tuned(machine, needed=1500.0)

    assert found.chosen == default_of(machine).changed(workers=2)
    assert max(each.workers for each in machine.tried) == 8, "faster ones are of no use"


def test_with_a_step_that_is_too_fast_for_all_the_fastest_is_taken() -> None:
    found = tuned(Machine(processors=8, held=0.97), needed=1e6, held=0.97)

    assert found.chosen.engine == "process"
    assert found.chosen.workers >= 8


def test_prefetch_is_raised_where_that_gains() -> None:
    def starved(candidate: Candidate) -> float:
        return 1.5 if candidate.prefetch_factor == 3 else 1.0

    found = tuned(Machine(processors=8, noise=0.02, by_candidate=starved))

    assert found.chosen == Candidate(engine="thread", workers=8, batch_size=64, prefetch_factor=3)


def test_the_batch_size_stays_unless_another_gains() -> None:
    flat = Machine(noise=0.02)
    steep = Machine(noise=0.02, by_batch=lambda batch_size: batch_size / 64)

    assert tuned(flat, batch_sizes=(32, 128, 256)).chosen.batch_size == 64
    assert tuned(steep, batch_sizes=(32, 128, 256)).chosen.batch_size == 256
    assert tuned(steep).chosen.batch_size == 64, "it was not asked for"


def test_a_batch_that_is_larger_than_the_dataset_is_not_tried() -> None:
    machine = Machine(processors=1, by_batch=lambda batch_size: batch_size / 64)

    found = tuned(machine, batch_sizes=(128, 256), room=ResourceLimits(images=200))

    assert {each.batch_size for each in machine.tried} == {64, 128}
    assert found.chosen.batch_size == 128


def test_a_candidate_that_fails_is_left_out_with_its_reason() -> None:
    machine = Machine(processors=4, held=0.9, fails=lambda each: each.workers > 2)

    found = tuned(machine, engine="process")

    assert found.chosen == Candidate(engine="process", workers=2, batch_size=64)
    reasons = {each.candidate: each.reason for each in found.left_out}
    assert reasons[default_of(machine, "process")].startswith("its process ended (killed by")
    assert default_of(machine, "process") not in found.ledger
    assert machine.tried.count(default_of(machine, "process")) == 1


def test_a_machine_on_which_all_fails_is_an_error_that_says_why() -> None:
    machine = Machine(fails=lambda each: True)

    with pytest.raises(MeasurementFailed, match="killed by signal 9"):
        tuned(machine)


def test_what_there_is_no_room_for_is_not_tried() -> None:
    tiny = Machine(processors=8, held=0.97)
    found = tuned(tiny, held=0.97, room=ResourceLimits(shared=200_000_000))  # 20 batches of 64

    assert 1 <= found.chosen.workers <= 4
    assert found.chosen.engine == "process"
    big = [each for each in found.left_out if each.candidate.workers == 8]
    assert "shared memory" in big[0].reason
    assert "--shm-size" in big[0].remedy
    assert not [each for each in tiny.tried if each.engine == "process" and each.workers > 4]


def test_a_loader_that_forks_slowly_is_started_in_another_way() -> None:
    slow = Machine(processors=2, held=0.97, start=3.0, starts={"forkserver": 0.1})

    found = tuned(slow, held=0.97, start_methods=("forkserver", "spawn"), budget=240.0)

    assert found.chosen.start_method == "forkserver"
    assert tuned(Machine(held=0.97), start_methods=("spawn",)).chosen.start_method == "auto"


@pytest.mark.parametrize("budget", [2.0, 5.0, 20.0, 60.0, 300.0])
@pytest.mark.parametrize("load", LOADS)
def test_every_budget_is_kept_and_gives_an_answer(load: str, budget: float) -> None:
    machine = Machine(noise=0.05, **LOADS[load])
    begun = machine.now

    found = tuned(machine, budget=budget, batch_sizes=(128,))

    assert machine.now - begun <= 1.1 * budget
    assert found.chosen in found.ledger
    assert machine.rate(found.chosen) >= 0.9 * machine.rate(default_of(machine))


def test_it_ends_early_when_all_is_clear() -> None:
    machine = Machine(processors=1)  # without noise
    begun = machine.now

    found = tuned(machine, budget=600.0)

    assert machine.now - begun < 300
    assert not found.out_of_time


def test_the_search_is_told_as_it_goes() -> None:
    machine, ticks = Machine(), list[Tick]()

    plan = Plan(default=default_of(machine), batch_sizes=(128,))
    search(machine.measure, plan, clock=machine.clock, watch=ticks.append)

    assert len(ticks) == machine.looks
    assert [each.candidate for each in ticks] == machine.tried
    assert ticks[0].doing == "the defaults"
    assert all(before.elapsed < after.elapsed for before, after in itertools.pairwise(ticks))
    assert ticks[-1].best_rate >= ticks[0].rate
