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
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch

from shardkit.errors import LoaderFailed
from shardkit.torch.data.memory import BlockPool, OwnedBlocks, new_pinned, pin
from shardkit.torch.data.schedule import Request
from shardkit.torch.engine.fetch import Fetch
from shardkit.torch.engine.options import LATE_REMEDY, Settings

_EXIT_SECONDS = 1.0
"""Seconds that interpreter shutdown waits for threads that are making a batch."""

_STOP_SECONDS = 0.2
"""Seconds that the end of an iteration waits for them; usually they have finished."""


Batches = Generator[tuple[Request, Any], None, None]
"""Requests with their batches."""


class ThreadEngine:
    """Reads requests in threads; at most ``prefetch`` batches are ready or in progress."""

    def __init__(self, fetch: Fetch, settings: Settings) -> None:
        """Create an engine; threads start and stop with an iteration."""
        options = settings.options
        self._fetch = fetch
        self._threads = settings.num_workers
        self._prefetch = settings.thread_prefetch
        self._timeout = options.timeout
        self._in_order = options.in_order
        self._pinned = settings.pinned
        self._pool = BlockPool((self._prefetch + 2) * fetch.views)
        self._owned: dict[int, list[torch.Tensor]] | None = {} if options.reuse_buffers else None

    def run(self, requests: Iterator[Request]) -> Batches:
        """Yield each request with its batch.

        Raises:
            LoaderFailed: If a batch exceeds the timeout.
        """
        if self._threads == 0:
            for request in requests:
                job = self._new_job(request)
                yield request, self._batch(job, alone=True)
                job.release()
            return
        threads, owner = _WorkerThreads(self._threads, self._make), os.getpid()
        jobs: deque[_Job] = deque()
        try:
            for request in itertools.islice(requests, self._prefetch):
                jobs.append(self._new_job(request))
                threads.tasks.put(jobs[-1])
            while jobs:
                job = self._next(jobs, threads.finished)
                batch = [job.take()]
                for request in itertools.islice(requests, 1):
                    jobs.append(self._new_job(request))
                    threads.tasks.put(jobs[-1])
                yield job.request, batch.pop()
                job.release()
        finally:
            if os.getpid() == owner:  # a fork has no threads, but may have copied their locks
                threads.stop()
                threads.join(_STOP_SECONDS)

    def close(self) -> None:
        """Do nothing: an engine holds no thread between iterations."""

    def _new_job(self, request: Request) -> _Job:
        return _Job(request, None if self._owned is None else OwnedBlocks(self._owned))

    def _make(self, job: _Job) -> None:
        """Make a batch; runs in a thread."""
        try:
            job.batch = self._batch(job, alone=False)
        except BaseException as error:  # re-raised where the batch is awaited
            job.error = error

    def _batch(self, job: _Job, *, alone: bool) -> Any:
        if self._pinned:
            return pin(self._fetch(job.request, allocate=new_pinned, alone=alone))
        allocate = self._pool.new if job.blocks is None else job.blocks.new
        return self._fetch(job.request, allocate=allocate, alone=alone)

    def _next(self, jobs: deque[_Job], finished: queue.SimpleQueue[_Job]) -> _Job:
        """Wait for the next batch, and remove its job from ``jobs``."""
        first, end = jobs[0], time.monotonic() + (self._timeout or math.inf)
        while not first.arrived:
            left = max(0.0, end - time.monotonic())
            try:
                job = finished.get(timeout=None if left == math.inf else left)
            except queue.Empty:
                raise LoaderFailed(self._late(first.request)) from None
            job.arrived = True
            if not self._in_order:
                first = job
        jobs.remove(first)
        return first

    def _late(self, request: Request) -> str:
        first = self._fetch.name(int(request.rows[0]))
        return (
            f"no batch arrived for {self._timeout:g} s: a thread is stuck in the batch of "
            f"{len(request.rows)} samples that starts with {first}. {LATE_REMEDY}"
        )


class _Job:
    """A submitted batch."""

    def __init__(self, request: Request, blocks: OwnedBlocks | None) -> None:
        self.request = request
        self.blocks = blocks
        self.batch: Any = None
        self.error: BaseException | None = None
        self.arrived = False
        """Whether the loader knows that the batch is ready."""

    def take(self) -> Any:
        """Return the batch, and keep none that its user may release; or raise its error."""
        if self.error is not None:
            raise self.error
        batch, self.batch = self.batch, None
        return batch

    def release(self) -> None:
        """Reclaim the memory of the batch with ``reuse_buffers``."""
        if self.blocks is not None:
            self.blocks.release()


class _WorkerThreads:
    """The threads of one iteration.

    They are daemons: a transform that hangs must not block interpreter shutdown.
    """

    def __init__(self, threads: int, make: Callable[[_Job], None]) -> None:
        # A Future for each batch would take about 50 us more of the GIL.
        self.tasks: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.finished: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self.stopped = False
        self._threads = [
            threading.Thread(target=_work, args=(self, make), name="shardkit-decode", daemon=True)
            for _ in range(threads)
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


def _work(threads: _WorkerThreads, make: Callable[[_Job], None]) -> None:
    # This reference keeps `threads` in _RUNNING until the last thread has exited.
    while (job := threads.tasks.get()) is not None:
        if not threads.stopped:
            make(job)
            threads.finished.put(job)
        del job  # hold no batch while waiting


_RUNNING: weakref.WeakSet[_WorkerThreads] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop threads before interpreter shutdown: a late one could crash it."""
    running = list(_RUNNING)
    for threads in running:
        threads.stop()
    for threads in running:
        threads.join(_EXIT_SECONDS)
