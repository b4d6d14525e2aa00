"""One look at a loader at work: its rate, how long each batch was waited for, and the cost."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from shardkit.errors import UsageError
from shardkit.measure.runner.material import BatchSource
from shardkit.measure.runner.steps import Step
from shardkit.torch.data.collate import count

LEAD = 0.2
"""Part of a look that comes first and does not count: batches that were made before it began."""


@dataclass(frozen=True, kw_only=True)
class StopCondition:
    """How long a look lasts."""

    seconds: float = 1.0
    """It ends with the first batch after this."""
    epochs: int | None = None
    """Or after so many epochs, if that is sooner."""
    whole: bool = False
    """Whether it counts from the beginning, the start of workers and all: a cold epoch does. It
    lasts as many epochs as are said, whatever ``seconds`` says."""
    rows: int | None = None
    """An epoch reads only so many rows of the dataset, the first ones; None reads all."""
    most: float | None = None
    """Seconds after which a whole look ends nevertheless."""

    @property
    def limit(self) -> float:
        """Seconds after which it ends with the next batch; infinite if only epochs end it."""
        return self.seconds if not self.whole else self.most or math.inf


@dataclass(frozen=True, kw_only=True)
class Look:
    """What was seen."""

    images: int
    seconds: float
    waits: list[float]
    """Seconds that each batch was waited for."""
    first: float
    """Seconds from the beginning to the first batch, the start of workers included."""
    cpu: float
    """Seconds of processor time, of this process and its workers."""
    peak: int
    """Bytes of memory that this process had at the most, shared ones included."""
    worker_peak: int
    """The same of the worker process that had the most; 0 without any."""
    batch_bytes: int
    """Bytes of the tensors of a batch."""
    worker_cpu: float = 0.0
    """Seconds of processor time but for the thread that asks for batches: what the workers used,
    threads or processes."""
    worker_unique: int = 0
    """Bytes of memory that a worker process shared with no other at the end, of the one that had
    the most; 0 without any, or where the system does not tell. So much each further one takes."""

    @property
    def rate(self) -> float:
        """Images a second."""
        return self.images / self.seconds


def look(loader: BatchSource, span: StopCondition, step: Step) -> Look:
    """Read batches and use them, for a while.

    Raises:
        UsageError: If the loader gives no batch.
    """
    _forget_peak()
    begun, used, own = time.perf_counter(), cpu_seconds(), time.thread_time()
    batches = _epochs(loader, span.epochs)
    batch = next(batches, None)
    first = time.perf_counter() - begun
    if batch is None:
        raise UsageError("there is no image in it")
    size = batch_bytes(batch)
    waits, images, start = [], 0, time.perf_counter()
    if span.whole:
        waits, images, start = [first], count(batch), begun
        step(batch)
    else:
        while batch is not None and time.perf_counter() - start < LEAD * span.seconds:
            step(batch)
            batch = next(batches, None)
        # What came before does not count. From the receipt of a batch to the receipt of another
        # there are as many waits as steps, and each wait comes after a step that it overlaps.
        start, used, own = time.perf_counter(), cpu_seconds(), time.thread_time()
    while batch is not None:
        if not span.whole:
            step(batch)
        asked = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            break
        waits.append(time.perf_counter() - asked)
        images += count(batch)
        if span.whole:
            step(batch)
        if time.perf_counter() - start >= span.limit:
            break
    seconds = time.perf_counter() - start
    cpu, own = cpu_seconds() - used, time.thread_time() - own
    peak, worker_peak = peaks()
    unique = unique_of_workers()
    batches.close()
    return Look(
        images=images,
        seconds=seconds,
        waits=waits,
        first=first,
        cpu=cpu,
        peak=peak,
        worker_peak=worker_peak,
        batch_bytes=size,
        worker_cpu=max(0.0, cpu - own),
        worker_unique=unique,
    )


def batch_bytes(batch: Any) -> int:
    """Return the bytes of a batch's tensors, and of stored images in it."""
    if isinstance(batch, Mapping):
        return sum(map(batch_bytes, batch.values()))
    if isinstance(batch, (tuple, list)):
        return sum(map(batch_bytes, batch))
    if isinstance(batch, bytes):
        return len(batch)
    return int(getattr(batch, "nbytes", 0))


def cpu_seconds() -> float:
    """Return the processor time of this process, its living descendants and those it waited for."""
    process = psutil.Process()
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = each.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def peaks() -> tuple[int, int]:
    """Return the most memory, in bytes, that this process had, and that one of its workers had."""
    process = psutil.Process()
    workers = []
    for each in process.children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            workers.append(_peak(each))
    return _peak(process), max(workers, default=0)


def unique_of_workers() -> int:
    """Return the most memory, in bytes, that a worker of this process has for itself alone."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            found.append(int(each.memory_full_info().uss))
    return max(found, default=0)


def _forget_peak() -> None:
    """Let the record of this process's memory begin anew, where the system keeps one."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def _peak(process: psutil.Process) -> int:
    """Return the most memory a process had; where the system keeps no record, what it has now."""
    with (
        contextlib.suppress(OSError),
        open(f"/proc/{process.pid}/status", encoding="ascii") as file,
    ):
        for line in file:
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return int(process.memory_info().rss)


def _epochs(loader: BatchSource, limit: int | None) -> Generator[Any, None, None]:
    """Give the batches of one epoch after the other; nothing more once one is empty."""
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
