"""The process engine: a DataLoader with persistent workers, for transforms that hold the GIL."""

from __future__ import annotations

import contextlib
import errno
import itertools
import multiprocessing
import os
import time
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset, get_worker_info

from shardkit.errors import LoaderFailed
from shardkit.system.bootstrap import guard_helpers
from shardkit.system.turns import shared_turn
from shardkit.torch import _compat
from shardkit.torch.data.memory import full_explained
from shardkit.torch.data.read_context import Allocate
from shardkit.torch.data.schedule import Request
from shardkit.torch.engine import preflight, workers
from shardkit.torch.engine.failure import Failure, is_from_worker
from shardkit.torch.engine.fetch import Batches, Engine, Fetch
from shardkit.torch.engine.options import LATE_REMEDY, Settings
from shardkit.torch.engine.ring import Ring, Slots

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
        self._loader: DataLoader[Any] | None = None
        self._source: Requests = _Groups(self._together)
        self._iterator: Any = None
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
        if self._loader is None or not self._persistent or self._owner != os.getpid():
            self.close()
            self._loader = self._start()
            self._owner = os.getpid()
        self._source.begin(requests)
        try:
            self._iterator = self._begin()
            self._watch()
            while (answers := self._next()) is not None:
                while answers:
                    batch_id, batch = answers.pop(0)
                    if isinstance(batch, Failure):
                        raise batch.rebuild()
                    # PyTorch before 2.10 makes a list of each tuple that it pins.
                    epoch, position = batch_id
                    yield self._source.take((epoch, position)), batch
                    del batch
        except GeneratorExit:
            if not self._persistent:
                self.close()
            raise
        except BaseException as error:
            _compat.unwatch(self._iterator)
            reason = self._explain(error)
            self.close()  # their results are not needed, and the next iteration starts new ones
            if reason is None:
                raise
            raise LoaderFailed(reason) from error
        if not self._persistent:
            self.close()

    def _begin(self) -> Any:
        """Return PyTorch's iterator; persistent workers first finish the last iteration."""
        if self._iterator is not None:
            if death := self._death():
                raise LoaderFailed(death)
            _compat.set_timeout(self._iterator, self._timeout)
        before = set(multiprocessing.active_children())
        try:
            assert self._loader is not None
            iterator = iter(self._loader)
        except RuntimeError as error:
            if _compat.is_timeout(error):
                raise LoaderFailed(self._late()) from None
            raise
        except OSError as error:
            if error.errno not in _LIMITS:
                raise
            for process in set(multiprocessing.active_children()) - before:
                process.kill()  # PyTorch leaves those that have started
            raise LoaderFailed(
                f"{self._workers} worker processes cannot be started: {error.strerror}",
                remedy="Reduce num_workers, or raise the system limits (`ulimit -n -u`).",
            ) from error
        if self._workers:
            _compat.set_timeout(iterator, self._poll)
        return iterator

    def _next(self) -> Answers | None:
        """Return the next batches, or None at the end.

        PyTorch gets a short timeout and is called again: it checks on workers only at a timeout or
        a signal, and those of a fork server send no signal.
        """
        start = time.monotonic()
        while True:
            try:
                answers: Answers = _compat.next_within(self._iterator, self._timeout)
            except StopIteration:
                return None
            except BlockingIOError:
                raise LoaderFailed(self._late()) from None
            except RuntimeError as error:
                if not _compat.is_timeout(error):
                    raise
                if self._timeout and time.monotonic() - start >= self._timeout:
                    raise LoaderFailed(self._late()) from None
            else:
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
        iterator, self._iterator = self._iterator, None
        self._loader = None
        if self._owner != os.getpid():  # a fork does not own the workers and their queues
            if iterator is not None:
                _compat.disown(iterator)
            self._end = None
            return
        if self._end is not None:
            self._end()
            self._end = None
        if iterator is not None and self._workers:
            with contextlib.suppress(Exception):  # they may be dead already
                _compat.shut_down(iterator)

    def start_problem(self) -> str | None:
        """Return why workers cannot start now, or None; no problem if they already run."""
        if not self._workers or (self._loader is not None and self._persistent):
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

    def _watch(self) -> None:
        """Stop the workers when this engine is freed, or at interpreter shutdown.

        PyTorch would wait 5 s for each busy worker, and for each idle one if the garbage collector
        freed their queues first.
        """
        if self._workers and self._end is None:
            iterator = self._iterator
            self._end = weakref.finalize(
                self,
                workers.end,
                _compat.worker_processes(iterator),
                os.getpid(),
                iterator,
            )

    def _start(self) -> DataLoader[Any]:
        count = self._workers
        method = self.start_method()
        if method is not None:
            workers.require_start(method, self._fetch)
        with full_explained():
            self._ring = Ring(count, self._slots * self._fetch.blocks)
            self._marks = torch.full((max(1, count), self._threads), -1)
            self._marks.share_memory_()  # type: ignore[no-untyped-call]
        if count:
            guard_helpers()
            workers.share_temporary_folder()
        if method == "forkserver":
            workers.preload()
        if self._sharing is not None:  # both ends must agree
            torch.multiprocessing.set_sharing_strategy(self._sharing)  # type: ignore[no-untyped-call]
        return DataLoader(
            self._remote(),
            batch_size=None,
            sampler=self._source,
            num_workers=count,
            collate_fn=_as_it_is,
            pin_memory=self._pinned,
            timeout=self._poll if count else 0,
            worker_init_fn=(
                partial(workers.begin_worker, self._sharing, shared_turn(), self._is_low)
                if count
                else None
            ),
            prefetch_factor=self._each if count else None,
            persistent_workers=count > 0,
            generator=self._generator(),
            multiprocessing_context=method,
        )

    def _remote(self) -> Remote:
        """Return the dataset for a new ``DataLoader``."""
        return _RemoteFetch(self._fetch, self._ring, self._marks)

    def _generator(self) -> torch.Generator:
        """Return the source of the workers' seeds; iterating must not draw from the global one."""
        return torch.Generator()

    def _explain(self, error: BaseException) -> str | None:
        """Return a message for an error that PyTorch raised for its workers, or None."""
        if not self._workers or is_from_worker(error):
            return None
        if isinstance(error, (EOFError, ConnectionError)):  # it died while it handed memory over
            workers.wait_for_one(_compat.worker_processes(self._iterator))
            return self._death()
        if not _compat.is_dead_worker(error):
            return None
        return self._death() or f"a worker process died: {error}."

    def _death(self) -> str | None:
        """Return a message on workers that have died, with the cause, or None."""
        dead = [
            (number, process.exitcode)
            for number, process in enumerate(_compat.worker_processes(self._iterator))
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
    """The sampler of the ``DataLoader``: yields requests, and keeps them until answered."""

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

    def __iter__(self) -> Iterator[list[Request]]:
        requests = super().__iter__()
        while group := list(itertools.islice(requests, self._together)):
            yield group


Answers = list[tuple[tuple[int, int], Any]]
"""Batches with the positions of their requests. The last may be the `Failure` of the next batch."""


class Remote(Dataset[Any]):
    """The dataset in a worker process: it reads requests, and sends batches through its slots."""

    def __init__(self, fetch: Fetch, ring: Ring) -> None:
        self._fetch = fetch
        self._ring = ring.number
        self._flags = ring.flags
        self._slots: Slots | None = None

    def slots(self, worker: int) -> Slots:
        """Return the slots of this worker."""
        if self._slots is None:
            self._slots = Slots(self._ring, worker, self._flags)
        return self._slots


def failure(error: BaseException, where: str) -> Failure:
    """Return the `Failure` to send. An error that would end a loop or process becomes another."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return Failure(error)
    return Failure(_raised(error, where))


def _raised(error: BaseException, where: str) -> LoaderFailed:
    failed = LoaderFailed(f"{type(error).__name__} was raised ({error}) {where}")
    failed.__cause__ = error
    return failed


class _RemoteFetch(Remote):
    """Reads the requests of one group."""

    def __init__(self, fetch: Fetch, ring: Ring, marks: torch.Tensor) -> None:
        super().__init__(fetch, ring)
        self._marks = marks

    def __getitem__(self, requests: list[Request]) -> Any:
        worker = get_worker_info()
        if worker is None:
            return [(request.batch_id, self._read_here(request)) for request in requests]
        slots = self.slots(worker.id)
        mark = self._marks.numpy()[worker.id]
        mark[0] = requests[0].rows[0]
        answers: Answers = []
        try:
            with full_explained():
                batches = self._read(requests, slots.new, mark)
                for request, batch in zip(requests, batches, strict=True):
                    answers.append((request.batch_id, batch))
                    del batch
        except (Exception, SystemExit) as error:
            request = requests[len(answers)]
            answers.append((request.batch_id, failure(error, self._where(request))))
        try:
            with full_explained():
                return slots.pack(answers)
        except Exception as error:
            return [(requests[0].batch_id, Failure(error))]

    def _read_here(self, request: Request) -> Any:
        """Return a batch in the main process."""
        try:
            return self._fetch(request)
        except StopIteration as error:  # for PyTorch, the end of the epoch
            raise _raised(error, self._where(request)) from error

    def _where(self, request: Request) -> str:
        return f"in the batch that starts with {self._fetch.name(int(request.rows[0]))}"

    def _read(
        self, requests: list[Request], allocate: Allocate, mark: npt.NDArray[np.int64]
    ) -> Iterable[Any]:
        """Return the batches of requests."""
        if len(requests) == 1:  # without a generator, which would change a StopIteration
            return [self._fetch(requests[0], allocate=allocate, mark=mark)]
        return self._fetch.read_several(requests, allocate=allocate, alone=True, mark=mark)


def _as_it_is(answers: Answers) -> Answers:
    return answers
