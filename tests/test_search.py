"""The search for settings, against machines that are simulated: nothing here takes time."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from shardkit.errors import MeasurementFailed
from shardkit.measure.candidate import Candidate
from shardkit.measure.search import Found, search
from shardkit.measure.trials import Plan, Sight


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
        return rate * self.by_batch(candidate.batch_size)

    def measure(self, candidate: Candidate, seconds: float) -> Sight:
        """Look at a candidate."""
        self.looks += 1
        self.tried.append(candidate)
        first = self.start * candidate.workers if candidate.engine == "process" else 0.01
        if candidate.start_method == "spawn":
            first *= 20
        self.now += seconds * 1.2 + first
        if self.fails(candidate):
            raise MeasurementFailed("its process ended (killed by signal 9): it said nothing")
        spread = self.noise / math.sqrt(seconds)
        rate = self.rate(candidate) * math.exp(self.random.gauss(0, spread))
        return Sight(rate=rate, first=first, sample_bytes=150_528, worker_bytes=300_000_000)

    def clock(self) -> float:
        return self.now


def default_of(machine: Machine, engine: str = "thread") -> Candidate:
    return Candidate(engine=engine, workers=machine.processors, batch_size=64)


def tuned(machine: Machine, engine: str = "thread", **plan: Any) -> Found:
    chosen = Plan(default=default_of(machine, engine), **plan)
    return search(machine.measure, chosen, clock=machine.clock)


def best_of_grid(machine: Machine, batch_sizes: tuple[int, ...] = (64,)) -> float:
    most = 8 * machine.processors
    workers = sorted({2**n for n in range(9)} | set(range(1, min(most, 65))))
    rates = []
    for engine, number, size in itertools.product(("thread", "process"), workers, batch_sizes):
        one = Candidate(engine=engine, workers=number, batch_size=size)
        more = one.changed(prefetch=2 * one.ahead)
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


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("processors", [1, 2, 8, 64])
@pytest.mark.parametrize("load", LOADS)
def test_the_choice_is_near_the_best_of_a_grid_and_the_budget_is_kept(
    load: str, processors: int, seed: int
) -> None:
    machine = Machine(processors=processors, noise=0.03, random=random.Random(seed), **LOADS[load])
    begun = machine.now

    found = tuned(machine, held=LOADS[load].get("held"))

    assert machine.rate(found.chosen) >= 0.95 * best_of_grid(machine), found.chosen
    assert machine.now - begun <= 1.1 * 60
