"""The thread engine: threads of this process decode batches directly into reused memory.

It is fastest where nothing holds the GIL for long: reading, decoding, scaling and checksums release
it. Nothing is copied between processes or pickled.
"""

from __future__ import annotations

import atexit
import itertools
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
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
        self._timeout = options.timeout or None
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
                job = _Job(request, self._new_blocks())
                yield request, self._batch(job, alone=True)
                job.release()
            return
        threads, owner = _WorkerThreads(self._threads), os.getpid()
        jobs: deque[_Job] = deque()
        try:
            for request in itertools.islice(requests, self._prefetch):
                jobs.append(self._submit(threads, request))
            while jobs:
                job = self._next(jobs)
                try:
                    batch = [job.future.result(self._timeout)]
                except FutureTimeout:
                    raise LoaderFailed(self._late(job.request)) from None
                job.future = Future()  # keep no batch that its user has released
                for request in itertools.islice(requests, 1):
                    jobs.append(self._submit(threads, request))
                yield job.request, batch.pop()
                job.release()
        finally:
            if os.getpid() == owner:  # a fork has no threads, but may have copied their locks
                for job in jobs:
                    job.future.cancel()
                threads.stop()
                threads.join(_STOP_SECONDS)

    def close(self) -> None:
        """Do nothing: an engine holds no thread between iterations."""

    def _submit(self, threads: _WorkerThreads, request: Request) -> _Job:
        job = _Job(request, self._new_blocks())
        threads.tasks.put(partial(self._make, job, job.future))
        return job

    def _make(self, job: _Job, future: Future[Any]) -> None:
        """Make a batch; runs in a thread."""
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(self._batch(job, alone=False))
        except BaseException as error:  # re-raised where the batch is awaited
            future.set_exception(error)

    def _batch(self, job: _Job, *, alone: bool) -> Any:
        if self._pinned:
            return pin(self._fetch(job.request, allocate=new_pinned, alone=alone))
        allocate = self._pool.new if job.blocks is None else job.blocks.new
        return self._fetch(job.request, allocate=allocate, alone=alone)

    def _new_blocks(self) -> OwnedBlocks | None:
        return None if self._owned is None else OwnedBlocks(self._owned)

    def _next(self, jobs: deque[_Job]) -> _Job:
        if self._in_order:
            return jobs.popleft()
        futures = [job.future for job in jobs]
        if not wait(futures, self._timeout, return_when=FIRST_COMPLETED).done:
            raise LoaderFailed(self._late(jobs[0].request))
        done = next(job for job in jobs if job.future.done())
        jobs.remove(done)
        return done

    def _late(self, request: Request) -> str:
        first = self._fetch.name(int(request.rows[0]))
        return (
            f"no batch arrived for {self._timeout or 0:g} s: a thread is stuck in the batch of "
            f"{len(request.rows)} samples that starts with {first}. {LATE_REMEDY}"
        )


class _Job:
    """A submitted batch."""

    def __init__(self, request: Request, blocks: OwnedBlocks | None) -> None:
        self.request = request
        self.blocks = blocks
        self.future: Future[Any] = Future()

    def release(self) -> None:
        """Reclaim the memory of the batch with ``reuse_buffers``."""
        if self.blocks is not None:
            self.blocks.release()


class _WorkerThreads:
    """The threads of one iteration.

    They are daemons: a transform that hangs must not block interpreter shutdown.
    """

    def __init__(self, threads: int) -> None:
        self.tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self,), name="shardkit-decode", daemon=True)
            for _ in range(threads)
        ]
        _RUNNING.add(self)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Make each thread exit after its current task."""
        for _ in self._threads:
            self.tasks.put(None)

    def join(self, seconds: float) -> None:
        """Wait at most ``seconds`` for all threads to exit."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))


def _work(threads: _WorkerThreads) -> None:
    # This reference keeps `threads` in _RUNNING until the last thread has exited.
    while (task := threads.tasks.get()) is not None:
        task()
        del task  # hold no batch while waiting


_RUNNING: weakref.WeakSet[_WorkerThreads] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop threads before interpreter shutdown: a late one could crash it."""
    running = list(_RUNNING)
    for threads in running:
        threads.stop()
    for threads in running:
        threads.join(_EXIT_SECONDS)
