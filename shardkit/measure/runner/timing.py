"""One measurement of a loader: its rate, the wait for each batch, CPU time and memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any

import psutil

from shardkit.errors import UsageError
from shardkit.measure.runner.spec import StopCondition
from shardkit.measure.runner.steps import Step
from shardkit.torch.data.collate import count

LEAD = 0.2
_LEAD_TURNS = 2
"""Fraction of a measurement that comes first and does not count, and the least turns of it."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Measured values of one loader."""

    images: int
    seconds: float
    waits: tuple[float, ...]
    """Seconds that the loop waited for each batch."""
    first: float
    """Seconds from the start to the first batch, including the start of workers."""
    cpu: float
    """Seconds of CPU time, of the process and its workers."""
    memory: int
    """Bytes of memory at the end, of the process and its workers; shared pages count once."""
    engine: str = ""
    """Engine that the loader used."""
    workers: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        """Images per second."""
        return self.images / self.seconds


def measure(loader: Iterable[Any], stop: StopCondition, step: Step) -> Measurement:
    """Read batches and use them until the stop condition.

    A measurement starts and ends with the arrival of a batch, so it has as many waits as steps. A
    ``whole`` one starts with the loader instead, and its first wait includes the start of workers.
    """
    start = time.perf_counter()
    cpu = cpu_seconds()
    batches = _epochs(loader, stop.epochs)
    batch = next(batches, None)
    first = time.perf_counter() - start
    if batch is None:
        raise UsageError("the loader returned no batch: there is no image to read")
    waits = [first]
    images = count(batch)

    def read(end: float, turns: int) -> None:
        nonlocal batch, images
        while batch is not None:
            step(batch)
            requested = time.perf_counter()
            batch = next(batches, None)
            now = time.perf_counter()
            if batch is not None:
                waits.append(now - requested)
                images += count(batch)
            done, rest = divmod(len(waits), stop.turn)
            if now >= end and done >= turns and not rest:
                return

    if not stop.whole:
        read(start + first + LEAD * stop.seconds, _LEAD_TURNS)
        start = time.perf_counter()
        cpu = cpu_seconds()
        images = 0
        waits.clear()
    read(start + stop.seconds, 1)
    seconds = time.perf_counter() - start
    measurement = Measurement(
        images=images,
        seconds=seconds,
        waits=tuple(waits),
        first=first,
        cpu=cpu_seconds() - cpu,
        memory=memory_used(),
    )
    batches.close()
    return measurement


def cpu_seconds() -> float:
    """Return the CPU time of this process, its running descendants and those it waited for."""
    total = 0.0
    for process in _processes():
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def memory_used() -> int:
    """Return the bytes of memory of this process and its workers; shared pages count once."""
    total = 0
    for process in _processes():
        with contextlib.suppress(psutil.Error, OSError):
            info = process.memory_full_info()
            total += getattr(info, "pss", info.rss)  # macOS does not record the first
    return total


def _processes() -> list[psutil.Process]:
    process = psutil.Process()
    return [process, *process.children(recursive=True)]


def _epochs(loader: Iterable[Any], limit: int | None) -> Generator[Any, None, None]:
    """Yield the batches of one epoch after the other; stop after an empty one."""
    number = 0
    while limit is None or number < limit:
        empty = True
        for batch in loader:
            empty = False
            yield batch
            del batch
        if empty:
            return
        number += 1
