"""The process engine: worker processes, for transforms that hold the GIL."""

from __future__ import annotations

import errno
import itertools
import os
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.multiprocessing

from shardkit.errors import LoaderFailed
from shardkit.system.bootstrap import guard_helpers
from shardkit.system.turns import shared_turn
from shardkit.torch.data.memory import full_explained
from shardkit.torch.data.schedule import PackedRequest, Request
from shardkit.torch.engine import preflight, workers
from shardkit.torch.engine.crew import Crew, PinningCrew
from shardkit.torch.engine.failure import Failure, is_from_worker
from shardkit.torch.engine.fetch import Batches, Engine, Fetch
from shardkit.torch.engine.options import LATE_REMEDY, Settings
from shardkit.torch.engine.ring import Ring, Slots
from shardkit.torch.engine.threads import ThreadEngine

FILES_PER_BATCH = 2
"""File descriptors that a batch uses on its way from a worker process."""

SPARE_SLOTS = 3
"""Slots of a worker in addition to prefetched batches: one in use, one before it, one to fill."""

_SHARE = 8
"""Fraction of the free shared memory that batches read at once may take, inverted."""

_POLL_SECONDS = 0.5
"""Interval at which the loader checks that workers live while no batch arrives."""

_LIMITS = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of a system that permits no more processes or files."""


class ProcessEngine(Engine):
    """Reads requests in worker processes, or with 0 workers in this one."""

    def __init__(self, fetch: Fetch, settings: Settings) -> None:
        """Create an engine; processes start with the first iteration."""
        options = settings.options
        self._fetch = fetch
        self._workers = settings.num_workers
        self._here = ThreadEngine(fetch, settings)
        """The engine without workers."""
        self._together, self._each = self.at_once(fetch, settings)
        self._threads = 1
        """Reading threads of each process."""
        self._slots = self._each + SPARE_SLOTS
        self._timeout = options.timeout
        self._poll = min(_POLL_SECONDS, self._timeout or _POLL_SECONDS)
        self._pinned = settings.pinned
        self._is_low = settings.is_low
        self._persistent = options.persistent_workers
        self._sharing = options.sharing_strategy
        self._requested_method = options.start_method
        if self._workers and self._requested_method != "auto":
            workers.require_start(self._requested_method, fetch)
        self._source: Requests = _Groups(self._together)
        self._crew: Crew | None = None
        self._waiting = 0
        """Messages that the crew has not answered yet."""
        self._owner = os.getpid()
        self._end: weakref.finalize[..., ProcessEngine] | None = None

    @classmethod
    def problem(cls, fetch: Fetch, settings: Settings) -> str | None:
        """Return why the processes may fail on this machine, or None."""
        if settings.num_workers == 0:
            return None
        blocks = cls.blocks(settings)
        size = preflight.batch_bytes(fetch.dataset, settings.batch_size, fetch.ops or (fetch.op,))
        needed = blocks * cls.least_in_block(fetch, settings)
        problem = preflight.shared_memory_problem(size * needed) if size else None
        problem = problem or preflight.descriptor_problem(FILES_PER_BATCH * blocks * fetch.blocks)
        return problem or workers.start_problem(settings.options.start_method, fetch)

    def run(self, requests: Iterator[Request]) -> Batches:
        """Yield each request with its batch.

        Raises LoaderFailed if a worker dies or a batch exceeds the timeout.
        """
        if not self._workers:
            yield from self._here.run(requests)
            return
        if not self._persistent or self._owner != os.getpid():
            self.close()
        try:
            crew = self._begin()
            self._source.begin(requests)
            messages = iter(self._source)
            for message in itertools.islice(messages, self._each * self._workers):
                self._ask(crew, message)
            while self._waiting:
                answers = self._next(crew)
                for message in itertools.islice(messages, 1):
                    self._ask(crew, message)
                while answers:
                    batch_id, batch = answers.pop(0)
                    if isinstance(batch, Failure):
                        raise batch.rebuild()
                    yield self._source.take(batch_id), batch
                    del batch
        except GeneratorExit:
            if not self._persistent and self._crew is crew:
                self.close()
            raise
        except BaseException as error:
            reason = self._explain(error)
            self.close()  # their results are not needed, and the next iteration starts new ones
            if reason is None:
                raise
            raise LoaderFailed(reason) from error
        if not self._persistent:
            self.close()

    def _begin(self) -> Crew:
        """Return the crew; one that is there first finishes the last iteration."""
        if self._crew is None:
            self._crew = self._start()
            self._owner = os.getpid()
            self._waiting = 0
            # At interpreter shutdown, too.
            self._end = weakref.finalize(self, self._crew.stop)
        elif death := self._death():
            raise LoaderFailed(death)
        while self._waiting:
            self._next(self._crew)
        return self._crew

    def _ask(self, crew: Crew, message: Any) -> None:
        crew.ask(message)
        self._waiting += 1

    def _next(self, crew: Crew) -> Answers:
        """Return the next batches."""
        start = time.monotonic()
        while not crew.wait(self._poll):
            if death := self._death():
                raise LoaderFailed(death)
            if self._timeout and time.monotonic() - start >= self._timeout:
                raise LoaderFailed(self._late())
        try:
            answers: Answers = crew.take()
        except BlockingIOError:
            raise LoaderFailed(self._late()) from None
        except OSError as error:
            if error.errno not in _LIMITS:
                raise
            raise LoaderFailed(
                f"a batch cannot be received from its worker process: {error.strerror}",
                remedy="Keep fewer batches, raise the system limit (`ulimit -n`), or use "
                "sharing_strategy='file_system'.",
            ) from error
        self._waiting -= 1
        return answers

    @staticmethod
    def blocks(settings: Settings) -> int:
        """Return how many blocks of shared memory are reused; a block holds a batch of one view."""
        return settings.process_prefetch + SPARE_SLOTS * settings.num_workers

    @staticmethod
    def least_in_block(_: Fetch, __: Settings) -> int:
        """Return for how many batches of one view a block has room at least."""
        return 1

    @classmethod
    def at_once(cls, fetch: Fetch, settings: Settings) -> tuple[int, int]:
        """Return how many batches a worker reads at once, and how often each does so ahead.

        Several small batches go into one block, which takes shared memory from other loaders only
        where there is plenty.
        """
        ahead = max(1, -(-settings.process_prefetch // max(1, settings.num_workers)))
        together = fetch.batches_at_once(settings.batch_size) if settings.num_workers else 1
        if settings.options.prefetch_factor is not None:
            together = min(together, ahead // 2)
        shared = preflight.shared_memory()
        if together > 1 and shared is not None:
            size = preflight.batch_bytes(fetch.dataset, settings.batch_size) or 1
            share = shared[1] // (_SHARE * preflight.local_ranks())
            together = min(together, share // (size * cls.blocks(settings)))
        together = max(1, together)
        if settings.options.prefetch_factor is not None:
            ahead = -(-ahead // together)
        return together, ahead

    def close(self) -> None:
        """Stop the worker processes, whatever they are doing."""
        self._crew = None
        if self._end is not None:
            self._end()
            self._end = None

    def start_problem(self) -> str | None:
        """Return why workers cannot start now, or None; no problem if they already run."""
        if not self._workers or (self._crew is not None and self._persistent):
            return None
        return workers.start_problem(self._requested_method, self._fetch)

    def start_method(self) -> str | None:
        """Return the start method that would be used now; it depends on the running threads."""
        if not self._workers:
            return None
        return (
            workers.choose_start_method()
            if self._requested_method == "auto"
            else self._requested_method
        )

    def _start(self) -> Crew:
        method = self.start_method()
        assert method is not None, "there are workers"
        workers.require_start(method, self._fetch)
        with full_explained():
            ring = Ring(self._workers, self._slots * self._fetch.blocks)
            self._marks = torch.full((self._workers, self._threads), -1)
            self._marks.share_memory_()  # type: ignore[no-untyped-call]
        guard_helpers()
        workers.share_temporary_folder()
        if method == "forkserver":
            workers.preload()
        if self._sharing is not None:  # both ends must agree
            torch.multiprocessing.set_sharing_strategy(self._sharing)  # type: ignore[no-untyped-call]
        setup = workers.Setup(
            self._sharing, shared_turn(), self._is_low, self._seed(), self._fetch.dataset
        )
        try:
            crew = (PinningCrew if self._pinned else Crew)(
                self._remote(ring).answer, ring.unpack, setup, self._workers, method
            )
            crew.timeout = self._timeout
        except OSError as error:
            if error.errno not in _LIMITS:
                raise
            raise LoaderFailed(
                f"{self._workers} worker processes cannot be started: {error.strerror}",
                remedy="Reduce num_workers, or raise the system limits (`ulimit -n -u`).",
            ) from error
        return crew

    def _remote(self, ring: Ring) -> Remote:
        """Return what new workers do."""
        return _RemoteFetch(self._fetch, ring, self._marks)

    def _seed(self) -> int:
        """Return a seed for the workers' global generators."""
        return 0

    def _explain(self, error: BaseException) -> str | None:
        """Return a message for an error that has no other cause than the death of a worker."""
        if self._crew is None or is_from_worker(error):
            return None
        if not isinstance(error, (EOFError, ConnectionError)):
            return None
        workers.wait_for_one(self._crew.processes)
        return self._death() or "a worker process has closed its connection."

    def _death(self) -> str | None:
        """Return a message on workers that have died, with the cause, or None."""
        assert self._crew is not None
        dead = [
            (number, process.exitcode)
            for number, process in enumerate(self._crew.processes)
            if process.exitcode is not None
        ]
        if not dead:
            return None
        ends = "; ".join(
            f"worker {number} {workers.how_it_ended(code)} "
            + " or ".join(map(self._where, self._marks[number].tolist()))
            for number, code in dead
        )
        return f"a worker process died: {ends}.{workers.hint([code for _, code in dead])}"

    def _late(self) -> str:
        rows = enumerate(self._marks.flatten().tolist())
        activity = "; ".join(f"worker {number} was {self._where(row)}" for number, row in rows)
        return f"no batch arrived for {self._timeout:g} s: {activity}. {LATE_REMEDY}"

    def _where(self, row: int) -> str:
        return "before its first sample" if row < 0 else f"at {self._fetch.name(row)}"


class Requests:
    """Turns requests into messages, and keeps them until answered."""

    def __init__(self) -> None:
        self._coming: Iterator[Request] = iter(())
        self._open: dict[tuple[int, int], Request] = {}

    def begin(self, requests: Iterator[Request]) -> None:
        """Make the next iteration yield ``requests``."""
        self._coming = requests
        self._open = {}

    def __iter__(self) -> Iterator[Any]:
        for request in self._coming:
            self._open[request.batch_id] = request
            yield request

    def take(self, batch_id: tuple[int, int]) -> Request:
        """Return and forget a request."""
        return self._open.pop(batch_id)


class _Groups(Requests):
    """Yields lists of requests that a worker reads at once."""

    def __init__(self, together: int) -> None:
        super().__init__()
        self._together = together

    def __iter__(self) -> Iterator[list[PackedRequest]]:
        requests = super().__iter__()
        while group := [r.packed() for r in itertools.islice(requests, self._together)]:
            yield group


Answers = list[tuple[tuple[int, int], Any]]
"""Batches with the positions of their requests. The last may be the `Failure` of the next batch."""


class Remote:
    """What a worker process does: it reads requests, and sends batches through its slots."""

    def __init__(self, fetch: Fetch, ring: Ring) -> None:
        self._fetch = fetch
        self._flags = ring.flags
        self._slots: Slots | None = None

    def slots(self, worker: int) -> Slots:
        """Return the slots of this worker."""
        if self._slots is None:
            self._slots = Slots(worker, self._flags)
        return self._slots

    def answer(self, message: Any, worker: int) -> bytes:
        """Return the pickled batches that a message asks for."""
        slots = self.slots(worker)
        answers = self._answers(message, slots)
        try:
            with full_explained():
                return slots.pack(answers)
        except Exception as error:
            return slots.pack([(answers[0][0], Failure(error))])

    def _answers(self, message: Any, slots: Slots) -> Answers:
        """Return the batches that a message asks for."""
        raise NotImplementedError


def failure(error: BaseException, where: str) -> Failure:
    """Return the `Failure` to send. An error that would end a loop or process becomes another."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return Failure(error)
    failed = LoaderFailed(f"{type(error).__name__} was raised ({error}) {where}")
    failed.__cause__ = error
    return Failure(failed)


class _RemoteFetch(Remote):
    """Reads the requests of one group."""

    def __init__(self, fetch: Fetch, ring: Ring, marks: torch.Tensor) -> None:
        super().__init__(fetch, ring)
        self._marks = marks

    def _answers(self, message: list[PackedRequest], slots: Slots) -> Answers:
        requests = list(map(Request.unpacked, message))
        mark = self._marks.numpy()[slots.worker]
        mark[0] = requests[0].rows[0]
        answers: Answers = []
        try:
            with full_explained():
                batches = self._read(requests, slots, mark)
                for request, batch in zip(requests, batches, strict=True):
                    answers.append((request.batch_id, batch))
                    del batch
        except (Exception, SystemExit) as error:
            request = requests[len(answers)]
            first = self._fetch.name(int(request.rows[0]))
            where = f"in the batch that starts with {first}"
            answers.append((request.batch_id, failure(error, where)))
        return answers

    def _read(
        self, requests: list[Request], slots: Slots, mark: npt.NDArray[np.int64]
    ) -> Iterable[Any]:
        """Return the batches of requests."""
        if len(requests) == 1:  # without a generator, which would change a StopIteration
            return [self._fetch(requests[0], allocate=slots.new, mark=mark)]
        return self._fetch.read_several(requests, allocate=slots.new, alone=True, mark=mark)
