"""A measurement of a loader counts every batch once, and nothing else."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from clocks import Clock
from helpers import execute

from shardkit.errors import UsageError
from shardkit.measure.runner import timing
from shardkit.measure.runner.spec import StopCondition
from shardkit.measure.runner.timing import Measurement, measure


class Batches:
    """A loader of known batches, whose work is known too."""

    def __init__(
        self, sizes: list[int], seconds: float = 0.0, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self.sizes, self.seconds, self.sleep = sizes, seconds, sleep
        self.epochs = self.given = 0

    def __iter__(self) -> Iterator[Any]:
        self.epochs += 1
        for size in self.sizes:
            self.sleep(self.seconds)
            self.given += 1
            yield torch.zeros(size, 3, 2, 2, dtype=torch.uint8), torch.zeros(size)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of measurements."""
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


class Ahead:
    """A loader that makes one batch after the other, at most two ahead, while others are used."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def __iter__(self) -> Iterator[Any]:
        ready: list[float] = []
        taken = [0.0, 0.0]
        while True:
            begun = max(taken[-2], ready[-1] if ready else 0.0)
            ready.append(begun + self.seconds)
            self.clock.now = max(self.clock.now, ready[-1])
            taken.append(self.clock.now)
            yield torch.zeros(10, 3, 2, 2, dtype=torch.uint8), torch.zeros(10)


def nothing(batch: object) -> None:
    """Use no batch."""


def whole(loader: Any, epochs: int = 1, seconds: float = 60.0) -> Measurement:
    stop = StopCondition(epochs=epochs, whole=True, seconds=seconds)
    return measure(loader, stop, nothing)


def test_whole_epochs_are_counted_to_the_last_image() -> None:
    loader = Batches([8, 8, 8, 3])

    seen = whole(loader, epochs=3)

    assert (seen.images, len(seen.waits), loader.epochs) == (81, 12, 3)
    assert seen.waits[0] == seen.first
    assert seen.seconds >= sum(seen.waits)
    assert seen.rate == 81 / seen.seconds


@pytest.mark.parametrize(
    ("making", "using"), [(0.12, 0.10), (0.25, 0.20), (0.21, 0.20), (0.02, 0.20), (0.1, 0.1)]
)
def test_the_rate_of_a_loop_is_that_of_the_slower_of_loading_and_using(
    making: float, using: float, clock: Clock
) -> None:
    seen = measure(
        Ahead(clock, making), StopCondition(seconds=2.0), lambda batch: clock.sleep(using)
    )

    slower = max(making, using)
    assert seen.rate == pytest.approx(10 / slower, rel=0.03)
    assert sum(seen.waits) / seen.seconds == pytest.approx(1 - using / slower, abs=0.03)


def test_a_measurement_ends_with_the_first_batch_after_its_time(clock: Clock) -> None:
    loader = Batches([5], seconds=0.02, sleep=clock.sleep)

    seen = measure(loader, StopCondition(seconds=0.5), nothing)

    assert len(seen.waits) == 25
    assert seen.images == 5 * 25
    assert seen.seconds == pytest.approx(0.5)
    assert loader.given == 1 + 5 + 25, "the first and the lead do not count"


@pytest.mark.parametrize("seconds", [0.1, 0.5, 0.667, 2.0])
def test_workers_in_step_have_the_rate_of_whole_turns(seconds: float, clock: Clock) -> None:
    """12 workers each need 0.25 s for a batch of 10, and all are ready at once."""

    def bursts() -> Iterator[Any]:
        while True:
            clock.sleep(0.25)
            for _ in range(12):
                yield torch.zeros(10, 3, 2, 2, dtype=torch.uint8), torch.zeros(10)

    seen = measure(bursts(), StopCondition(seconds=seconds, turn=12), nothing)

    assert seen.rate == pytest.approx(12 * 10 / 0.25)
    assert seen.seconds >= seconds


def test_there_is_a_batch_even_if_counting_cpu_time_takes_longer(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with many worker processes on a busy machine."""

    def slow() -> float:
        clock.now += 1.0
        return 0.0

    monkeypatch.setattr(timing, "cpu_seconds", slow)

    assert measure(Ahead(clock, 0.1), StopCondition(seconds=0.5), nothing).images == 10


def test_a_whole_measurement_has_a_time_limit(clock: Clock) -> None:
    seen = whole(Batches([1] * 10_000, seconds=0.02, sleep=clock.sleep), seconds=0.5)

    assert seen.images == len(seen.waits) == 25


def test_every_batch_is_used_once() -> None:
    used: list[int] = []

    measure(
        Batches([4, 2]),
        StopCondition(epochs=2, whole=True),
        lambda batch: used.append(len(batch[1])),
    )

    assert used == [4, 2, 4, 2]


def test_waiting_and_using_are_distinguished(clock: Clock) -> None:
    """The same 20 ms, once in the loader and once in the step."""
    loading = measure(
        Batches([1], seconds=0.02, sleep=clock.sleep), StopCondition(seconds=0.15), nothing
    )
    using = measure(Batches([1]), StopCondition(seconds=0.15), lambda batch: clock.sleep(0.02))

    assert sum(loading.waits) == pytest.approx(loading.seconds)
    assert loading.seconds == pytest.approx(using.seconds)
    assert sum(using.waits) == 0


def test_an_empty_loader_is_refused() -> None:
    with pytest.raises(UsageError, match="no image"):
        measure(Batches([]), StopCondition(seconds=0.1), nothing)


def test_cpu_time_of_threads_counts() -> None:
    """The time of the thread itself says when it ends, so other load does not matter."""

    def burn() -> None:
        end = time.thread_time() + 0.1
        while time.thread_time() < end:
            pass

    class Busy(Batches):
        def __iter__(self) -> Iterator[Any]:
            thread = threading.Thread(target=burn)
            thread.start()
            thread.join()
            yield from super().__iter__()

    assert whole(Busy([1])).cpu > 0.07, "the system counts in hundredths of a second"


FORKED = """
import os
from shardkit.measure.runner.timing import memory_used

held = bytearray(os.urandom(200 << 20))
reading, writing = os.pipe()
if not os.fork():
    os.close(writing)
    os.read(reading, 1)  # until the parent ends
    os._exit(0)
print(memory_used())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="what processes share is told by Linux")
def test_memory_that_workers_share_counts_once() -> None:
    done = execute(sys.executable, "-W", "ignore", "-c", FORKED, check=True)
    assert 200 << 20 < int(done.stdout) < 400 << 20, "200 MB are shared and count once"
