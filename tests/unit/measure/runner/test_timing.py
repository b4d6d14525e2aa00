"""A look at a loader: everything is counted, once, and nothing that was not asked for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DEADLINE

from shardkit.errors import UsageError
from shardkit.measure.runner import timing
from shardkit.measure.runner.timing import Look, StopCondition, batch_bytes, look
from shardkit.torch.data.collate import count


class Batches:
    """A loader of known batches, whose work is known too."""

    def __init__(self, sizes: list[int], seconds: float = 0.0) -> None:
        self.sizes, self.seconds = sizes, seconds
        self.epochs = self.given = 0

    def __iter__(self) -> Iterator[Any]:
        self.epochs += 1
        for size in self.sizes:
            time.sleep(self.seconds)
            self.given += 1
            yield torch.zeros(size, 3, 2, 2, dtype=torch.uint8), torch.zeros(size)


class Clock:
    """A time in which only what is planted takes any."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


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


def whole(loader: Any, epochs: int = 1, most: float | None = None) -> Look:
    return look(loader, StopCondition(epochs=epochs, whole=True, most=most), nothing)


def test_whole_epochs_are_counted_to_the_last_image() -> None:
    loader = Batches([8, 8, 8, 3])

    seen = whole(loader, epochs=3)

    assert (seen.images, len(seen.waits), loader.epochs) == (81, 12, 3)
    assert seen.waits[0] == seen.first
    assert seen.seconds >= sum(seen.waits)
    assert seen.rate == 81 / seen.seconds
    assert seen.batch_bytes == 8 * 3 * 4 + 8 * 4


@pytest.mark.parametrize(
    ("making", "using"), [(0.12, 0.10), (0.25, 0.20), (0.21, 0.20), (0.02, 0.20), (0.1, 0.1)]
)
def test_the_rate_of_a_loop_is_that_of_the_slower_of_loading_and_using(
    making: float, using: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)

    seen = look(Ahead(clock, making), StopCondition(seconds=2.0), lambda batch: clock.sleep(using))

    slower = max(making, using)
    assert seen.rate == pytest.approx(10 / slower, rel=0.03)
    assert sum(seen.waits) / seen.seconds == pytest.approx(1 - using / slower, abs=0.03)


def test_a_look_ends_with_the_first_batch_after_its_time() -> None:
    loader = Batches([5], seconds=0.002)

    seen = look(loader, StopCondition(seconds=0.05), nothing)

    assert seen.images == 5 * len(seen.waits)
    assert seen.seconds >= 0.05
    assert len(seen.waits) < loader.given, "what comes before the look is not counted"


def test_a_whole_look_has_a_limit_too() -> None:
    loader = Batches([1] * 10_000, seconds=0.002)

    seen = whole(loader, most=0.05)

    assert 0 < seen.images == len(seen.waits) < 1000


def test_every_batch_is_used_once() -> None:
    used: list[int] = []

    look(
        Batches([4, 2]),
        StopCondition(epochs=2, whole=True),
        lambda batch: used.append(len(batch[1])),
    )

    assert used == [4, 2, 4, 2]


def test_waiting_is_told_from_using() -> None:
    """The same 20 ms, once in the loader and once in the step."""
    loading = look(Batches([1], seconds=0.02), StopCondition(seconds=0.15), nothing)
    using = look(Batches([1]), StopCondition(seconds=0.15), lambda batch: time.sleep(0.02))

    assert sum(loading.waits) / loading.seconds > 0.6
    assert sum(using.waits) / using.seconds < 0.2


def test_an_empty_loader_is_refused() -> None:
    with pytest.raises(UsageError, match="no image"):
        look(Batches([]), StopCondition(seconds=0.1), nothing)


def test_processor_time_of_threads_is_that_of_workers() -> None:
    def burn(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    class Own(Batches):
        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                burn(0.1)
                yield batch

    class Others(Batches):
        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                thread = threading.Thread(target=burn, args=(0.1,))
                thread.start()
                thread.join()
                yield batch

    own, others = whole(Own([1, 1, 1])), whole(Others([1, 1, 1]))

    assert own.cpu > 0.25
    assert others.cpu > 0.25
    assert own.worker_cpu < others.worker_cpu / 3


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux keeps a record")
def test_the_peak_of_memory_is_that_of_the_look() -> None:
    class Large(Batches):
        def __iter__(self) -> Iterator[Any]:
            ballast = np.ones(30_000_000)  # 240 MB
            yield from super().__iter__()
            del ballast

    large, small = whole(Large([1, 1])), whole(Batches([1, 1]))

    assert large.peak - small.peak > 200e6


@pytest.mark.parametrize(
    ("batch", "images", "size"),
    [
        ((torch.zeros(4, 3), torch.zeros(4)), 4, 64),
        ([torch.zeros(4, 3), [0, 1, 2, 3]], 4, 48),
        ({"image": torch.zeros(6, 2), "label": torch.zeros(6)}, 6, 72),
        (torch.zeros(5, 2), 5, 40),
        ([[b"abc", b"de"], [0, 1]], 2, 5),
    ],
)
def test_batches_of_all_kinds_are_counted(batch: Any, images: int, size: int) -> None:
    assert count(batch) == images
    assert batch_bytes(batch) == size


FORKED = """
import os
from shardkit.measure.runner.timing import peaks, unique_of_workers

held = bytearray(os.urandom(200 << 20))
reading, writing = os.pipe()
if not os.fork():
    os.close(writing)
    os.read(reading, 1)  # until the parent ends
    os._exit(0)
print(peaks()[1], unique_of_workers())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what processes share is told by Linux")
def test_memory_that_a_worker_shares_is_not_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )
    peak, unique = map(int, done.stdout.split())

    assert peak > 200 << 20
    assert 0 < unique < peak / 3
