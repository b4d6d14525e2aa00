"""The thread engine: threads of this process decode batches directly into reused memory.

It is fastest where nothing holds the GIL for long: reading, decoding, scaling and checksums release
it. Nothing is copied between processes or pickled.
"""

from __future__ import annotations

import atexit
import itertools
import math
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardkit.errors import LoaderFailed
from shardkit.system.priority import lower_priority
from shardkit.torch.data.memory import BlockPool, new_pinned, pin
from shardkit.torch.data.read_context import Allocate
from shardkit.torch.data.schedule import Request
from shardkit.torch.engine.fetch import Batches, Engine, Fetch
from shardkit.torch.engine.options import LATE_REMEDY, Settings

_EXIT_SECONDS = 1.0
"""Seconds that interpreter shutdown waits for threads that are making a batch."""

_STOP_SECONDS = 0.2
"""Seconds that the end of an iteration waits for them; usually they have finished."""


class ThreadEngine(Engine):
    """Reads requests in threads; at most ``prefetch`` batches are ready or in progress.

    Of small batches, a thread reads several at once: Python would take longer than copying one.
    """

    def __init__(
        self,
        fetch: Fetch,
        settings: Settings,
        *,
        allocate: Allocate | None = None,
        marks: Sequence[npt.NDArray[np.int64] | None] = (),
    ) -> None:
        """Create an engine; threads start and stop with an iteration.

        ``allocate`` provides the memory of batches, for several threads at a time; None takes
        memory of this process, as ``settings`` ask for. ``marks`` are `ReadContext.mark` of each
        thread; empty for none.
        """
        options = settings.options
        self._fetch = fetch
        self._threads = settings.num_workers
        self._prefetch = settings.thread_prefetch
        self._is_prefetch_default = options.prefetch_factor is None
        self._batch_size = settings.batch_size
        self._together: int | None = None
        """Batches to read at once; None before the first iteration."""
        self._timeout = options.timeout
        self._pinned = settings.pinned and allocate is None
        self._is_low = settings.is_low
        self._new_block = allocate
        self._marks = marks or [None] * self._threads
        self._pool = BlockPool((self._prefetch + 2) * fetch.blocks)

    def run(self, requests: Iterator[Request]) -> Batches:
        """Yield each request with its batch; LoaderFailed if a batch exceeds the timeout."""
        if self._threads == 0:
            for request in requests:
                yield request, self._ready(self._fetch(request, allocate=self._allocate()))
            return
        first = next(requests, None)
        if first is None:
            return
        requests = itertools.chain([first], requests)
        group, free = self.at_once()
        # PyTorch's current device is that of a thread.
        device = torch.cuda.current_device() if self._pinned else None
        threads = _WorkerThreads(
            [partial(self._make, mark) for mark in self._marks], device, is_low=self._is_low
        )
        owner = os.getpid()
        jobs: deque[_Job] = deque()

        def submit() -> None:
            nonlocal free
            while free >= group and (batch_requests := list(itertools.islice(requests, group))):
                jobs.append(_Job(batch_requests))
                threads.tasks.put(jobs[-1])
                free -= len(batch_requests)

        try:
            submit()
            while jobs:
                job = self._next(jobs, threads.finished)
                for request in job.requests:
                    batch = [job.take()]
                    free += 1
                    submit()
                    yield request, batch.pop()
        finally:
            if not threads.stopped and os.getpid() == owner:  # a fork has no threads, but locks
                threads.stop()
                threads.join(_STOP_SECONDS)

    def at_once(self) -> tuple[int, int]:
        """Return how many batches to read at once, and to prefetch."""
        if self._together is None:
            self._together = self._fetch.batches_at_once(self._batch_size)
        group = self._together
        prefetch = self._prefetch
        if self._is_prefetch_default:
            return group, group * prefetch
        return max(1, min(group, prefetch // (self._threads + 1))), prefetch

    def _make(self, mark: npt.NDArray[np.int64] | None, job: _Job) -> None:
        """Make the batches of a job; runs in a thread."""
        allocate = self._allocate()
        try:
            for batch in self._fetch.read_several(job.requests, allocate=allocate, mark=mark):
                job.batches.append(self._ready(batch))
        except BaseException as error:  # re-raised where the batch is awaited
            job.error = error

    def _allocate(self) -> Allocate:
        if self._new_block is not None:
            return self._new_block
        return new_pinned if self._pinned else self._pool.new

    def _ready(self, batch: Any) -> Any:
        return pin(batch) if self._pinned else batch

    def _next(self, jobs: deque[_Job], finished: queue.SimpleQueue[_Job]) -> _Job:
        """Wait for the next job, and remove it from ``jobs``."""
        first = jobs[0]
        end = time.monotonic() + (self._timeout or math.inf)
        while not first.arrived:
            remaining = max(0.0, end - time.monotonic())
            try:
                job = finished.get(timeout=None if remaining == math.inf else remaining)
            except queue.Empty:
                raise LoaderFailed(self._late(first.requests[0])) from None
            job.arrived = True
        jobs.remove(first)
        return first

    def _late(self, request: Request) -> str:
        first = self._fetch.name(int(request.rows[0]))
        return (
            f"no batch arrived for {self._timeout:g} s: a thread is stuck in the batch of "
            f"{len(request.rows)} samples that starts with {first}. {LATE_REMEDY}"
        )


class _Job:
    """Batches that a thread reads at once."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.batches: deque[Any] = deque()
        self.error: BaseException | None = None
        """Why there are fewer batches than requests."""
        self.arrived = False
        """Whether the loader was told that the batches are ready."""

    def take(self) -> Any:
        """Return the next batch, and keep none that its user may release; or raise the error."""
        if self.error is not None and not self.batches:
            raise self.error
        return self.batches.popleft()


class _WorkerThreads:
    """The threads of one iteration.

    They are daemons: a transform that hangs must not block interpreter shutdown.
    """

    def __init__(
        self, makers: Sequence[Callable[[_Job], None]], device: int | None, *, is_low: bool
    ) -> None:
        # A Future for each batch would take about 50 us more of the GIL.
        self.tasks: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.finished: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self.stopped = False
        self._threads = [
            threading.Thread(
                target=_work, args=(self, make, device, is_low), name="shardkit-decode", daemon=True
            )
            for make in makers
        ]
        _RUNNING.add(self)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Make each thread exit after its current batch."""
        self.stopped = True
        for _ in self._threads:
            self.tasks.put(None)

    def join(self, seconds: float) -> None:
        """Wait at most ``seconds`` for all threads to exit."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))


def _work(
    threads: _WorkerThreads, make: Callable[[_Job], None], device: int | None, is_low: bool
) -> None:
    if is_low:
        lower_priority()
    if device is not None:  # else pinning could create a context on the first GPU, for each rank
        torch.cuda.set_device(device)
    # This reference keeps `threads` in _RUNNING until the last thread has exited.
    while (job := threads.tasks.get()) is not None:
        if not threads.stopped:
            make(job)
            threads.finished.put(job)
        del job  # hold no batch while waiting


_RUNNING: weakref.WeakSet[_WorkerThreads] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop threads before shutdown, when a thread in C++ code would abort, and `os` is gone."""
    running = list(_RUNNING)
    for threads in running:
        threads.stop()
    for threads in running:
        threads.join(_EXIT_SECONDS)
