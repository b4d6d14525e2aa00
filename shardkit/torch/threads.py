"""The thread engine: batches decoded by threads of this process, straight into memory used again.

It is the fast path where nothing holds the GIL for long: reading, decoding, scaling and checking
all release it. No memory is copied between processes, none is fresh, and nothing is pickled.
"""

from __future__ import annotations

import atexit
import itertools
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
from shardkit.torch.feed import Request
from shardkit.torch.fetch import Fetch
from shardkit.torch.memory import BlockPool, OwnedBlocks, new_pinned, pin
from shardkit.torch.options import LATE_REMEDY, Settings

_EXIT_SECONDS = 1.0
"""How long the interpreter's end waits for threads in the midst of a batch."""

_STOP_SECONDS = 0.2
"""How long the end of an iteration does: most often they are done, and then nothing is left."""


Batches = Generator[tuple[Request, Any], None, None]
"""Requests with their batches."""


class ThreadEngine:
    """Reads requests in threads; at most ``prefetch`` batches are ready or being made."""

    def __init__(self, fetch: Fetch, settings: Settings) -> None:
        """Make an engine; threads begin with an iteration and end with it."""
        options = settings.options
        self._fetch = fetch
        self._threads = settings.workers
        self._prefetch = settings.thread_prefetch
        self._timeout = options.timeout or None
        self._in_order = options.in_order
        self._pinned = settings.pinned
        self._pool = BlockPool(self._prefetch + 2)
        self._owned: dict[int, list[torch.Tensor]] | None = {} if options.reuse_buffers else None

    def run(self, requests: Iterator[Request]) -> Batches:
        """Give each request with its batch.

        Raises:
            LoaderFailed: If a batch takes longer than the timeout.
        """
        if self._threads == 0:
            for request in requests:
                job = _Job(request, self._new_blocks())
                yield request, self._batch(job, alone=True)
                job.release()
            return
        crew = _Crew(self._threads)
        jobs: deque[_Job] = deque()
        try:
            for request in itertools.islice(requests, self._prefetch):
                jobs.append(self._order(crew, request))
            while jobs:
                job = self._next(jobs)
                try:
                    batch = [job.future.result(self._timeout)]
                except FutureTimeout:
                    raise LoaderFailed(self._late(job.request)) from None
                job.future = Future()  # nothing here keeps a batch that its user let go
                for request in itertools.islice(requests, 1):
                    jobs.append(self._order(crew, request))
                yield job.request, batch.pop()
                job.release()
        finally:
            for job in jobs:
                job.future.cancel()
            crew.stop()
            crew.join(_STOP_SECONDS)

    def close(self) -> None:
        """Do nothing: an engine holds no thread between iterations."""

    def _order(self, crew: _Crew, request: Request) -> _Job:
        job = _Job(request, self._new_blocks())
        crew.tasks.put(partial(self._make, job, job.future))
        return job

    def _make(self, job: _Job, future: Future[Any]) -> None:
        """Make a batch; called in a thread."""
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(self._batch(job, alone=False))
        except BaseException as error:  # whatever it is, it belongs to who waits for the batch
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
            f"no batch came for {self._timeout or 0:g} s: a thread hangs in the batch of "
            f"{len(request.rows)} samples that begins with {first}. {LATE_REMEDY}"
        )


class _Job:
    """A batch that was ordered."""

    def __init__(self, request: Request, blocks: OwnedBlocks | None) -> None:
        self.request = request
        self.blocks = blocks
        self.future: Future[Any] = Future()

    def release(self) -> None:
        """Take the memory of a batch back, if its loader decides that."""
        if self.blocks is not None:
            self.blocks.release()


class _Crew:
    """The threads of one iteration.

    They are daemons: a transform that hangs must not keep the interpreter from ending.
    """

    def __init__(self, threads: int) -> None:
        self.tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self,), name="shardkit-decode", daemon=True)
            for _ in range(threads)
        ]
        _CREWS.add(self)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let each thread end after what it is doing."""
        for _ in self._threads:
            self.tasks.put(None)

    def join(self, seconds: float) -> None:
        """Wait for the threads to end, no longer than ``seconds`` for all of them."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))


def _work(crew: _Crew) -> None:
    # It holds the crew, so that the end of the interpreter finds it as long as a thread lives.
    while (task := crew.tasks.get()) is not None:
        task()
        del task  # while waiting for another, hold no batch


_CREWS: weakref.WeakSet[_Crew] = weakref.WeakSet()


@atexit.register
def _end_crews() -> None:
    """End threads before the interpreter does: one that wakes in its ruins could crash it."""
    crews = list(_CREWS)
    for crew in crews:
        crew.stop()
    for crew in crews:
        crew.join(_EXIT_SECONDS)
