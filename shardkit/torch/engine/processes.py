"""The process engine: a DataLoader with persistent workers, for transforms that hold the GIL."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import threading
import time
import weakref
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any

import torch
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset, get_worker_info

from shardkit.errors import LoaderFailed
from shardkit.system.bootstrap import guard_helpers
from shardkit.system.turns import shared_turn
from shardkit.torch import _compat
from shardkit.torch.data.memory import full_explained
from shardkit.torch.data.schedule import Request
from shardkit.torch.engine import workers
from shardkit.torch.engine.failure import Failure, is_from_worker
from shardkit.torch.engine.fetch import Fetch
from shardkit.torch.engine.options import LATE_REMEDY, Settings
from shardkit.torch.engine.ring import Packed, Ring, Slots

SPARE_SLOTS = 3
"""Slots of a worker in addition to prefetched batches: one in use, one before it, one to fill."""

_POLL_SECONDS = 0.5
"""Interval at which the loader checks that workers live while no batch arrives."""

_LIMITS = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of a system that permits no more processes or files."""


class ProcessEngine:
    """Reads requests in worker processes, or with 0 workers in this one."""

    def __init__(self, fetch: Fetch, settings: Settings) -> None:
        """Create an engine; processes start with the first iteration.

        Raises:
            UsageError: If the dataset cannot be sent to processes with the requested start method.
        """
        options = settings.options
        self._fetch = fetch
        self._workers = settings.num_workers
        self._each = max(1, -(-settings.process_prefetch // max(1, self._workers)))
        self._timeout = options.timeout
        self._poll = min(_POLL_SECONDS, self._timeout or _POLL_SECONDS)
        self._in_order = options.in_order
        self._pinned = settings.pinned
        self._is_low = settings.is_low
        self._persistent = options.persistent_workers
        self._sharing = options.sharing_strategy
        self._requested_method = options.start_method
        if self._workers and self._requested_method != "auto":
            workers.require_start(self._requested_method, fetch)
        self._loader: DataLoader[Any] | None = None
        self._source = _Requests()
        self._iterator: Any = None
        self._owner = os.getpid()
        self._end: weakref.finalize[..., ProcessEngine] | None = None

    def run(self, requests: Iterator[Request]) -> Generator[tuple[Request, Any], None, None]:
        """Yield each request with its batch.

        Raises:
            LoaderFailed: If a worker dies, or a batch exceeds the timeout.
        """
        if self._loader is None or not self._persistent or self._owner != os.getpid():
            self.close()
            self._loader = self._start()
            self._owner = os.getpid()
        self._source.begin(requests)
        try:
            self._iterator = self._begin()
            self._watch()
            while (answer := self._next()) is not None:
                number, batch = answer
                del answer
                if isinstance(batch, Failure):
                    raise batch.rebuild()
                yield self._source.take(number), batch
                del batch
        except GeneratorExit:
            if not self._persistent:
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

    def _begin(self) -> Any:
        """Return PyTorch's iterator; persistent workers first finish what a ``break`` left."""
        if self._iterator is not None:
            _compat.set_timeout(self._iterator, self._timeout or threading.TIMEOUT_MAX)
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
                f"{self._workers} worker processes cannot be started: {error.strerror}. "
                "Use fewer num_workers, or raise the limits of the system (`ulimit -n -u`)."
            ) from error
        if self._workers:
            _compat.set_timeout(iterator, self._poll)
        return iterator

    def _next(self) -> tuple[int, Any] | None:
        """Return the next batch with its number, or None at the end.

        PyTorch gets a short timeout and is called again: it checks on workers only at a timeout or
        a signal, and those of a fork server send no signal.

        Raises:
            RuntimeError: If a worker died.
            LoaderFailed: If no batch arrives within the timeout.
        """
        start = time.monotonic()
        while True:
            try:
                number, batch = next(self._iterator)
            except StopIteration:
                return None
            except RuntimeError as error:
                if not _compat.is_timeout(error):
                    raise
                if self._timeout and time.monotonic() - start >= self._timeout:
                    raise LoaderFailed(self._late()) from None
            else:
                return number, batch

    def close(self) -> None:
        """Stop the worker processes, whatever they are doing."""
        iterator, self._iterator, self._loader = self._iterator, None, None
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
                _compat.done_event(iterator),
                os.getpid(),
            )

    def _start(self) -> DataLoader[Any]:
        count, method = self._workers, self.start_method()
        if method is not None:
            workers.require_start(method, self._fetch)
        with full_explained():
            self._ring = Ring(count, (self._each + SPARE_SLOTS) * self._fetch.views)
            self._marks = torch.full((max(1, count),), -1)
            self._marks.share_memory_()  # type: ignore[no-untyped-call]
        if count:
            guard_helpers()
            workers.share_temporary_folder()
        if method == "forkserver":
            workers.preload()
        if self._sharing is not None:  # both ends must agree
            torch.multiprocessing.set_sharing_strategy(self._sharing)  # type: ignore[no-untyped-call]
        return DataLoader(
            _Remote(self._fetch, self._ring.number, self._ring.flags, self._marks),
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
            generator=torch.Generator(),  # iterating must not draw from the global one
            in_order=self._in_order,
            multiprocessing_context=method,
        )

    def _explain(self, error: BaseException) -> str | None:
        """Return a message for an error that PyTorch raised for its workers, or None."""
        if is_from_worker(error) or not _compat.is_dead_worker(error):
            return None
        dead = [
            (number, process.exitcode)
            for number, process in enumerate(_compat.worker_processes(self._iterator))
            if process.exitcode is not None
        ]
        ends = "; ".join(
            f"worker {number} {workers.how_it_ended(code)} {self._where(number)}"
            for number, code in dead
        )
        return f"a worker process died: {ends or error}.{workers.hint([code for _, code in dead])}"

    def _late(self) -> str:
        places = "; ".join(f"worker {n} was {self._where(n)}" for n in range(self._workers))
        return f"no batch arrived for {self._timeout:g} s: {places}. {LATE_REMEDY}"

    def _where(self, worker: int) -> str:
        row = int(self._marks[worker])
        return "before its first sample" if row < 0 else f"at {self._fetch.name(row)}"


class _Requests:
    """The sampler of the ``DataLoader``: yields requests, and keeps them until answered."""

    def __init__(self) -> None:
        self._coming: Iterator[Request] = iter(())
        self._open: dict[int, Request] = {}

    def begin(self, requests: Iterator[Request]) -> None:
        """Make the next iteration yield ``requests``."""
        self._coming = requests
        self._open = {}

    def __iter__(self) -> Iterator[tuple[int, Request]]:
        for number, request in enumerate(self._coming):
            self._open[number] = request
            yield number, request

    def take(self, number: int) -> Request:
        """Return and forget the request of the given number."""
        return self._open.pop(number)


class _Remote(Dataset[Any]):
    """The dataset in a worker process: it reads a request and sends the batch through its slots."""

    def __init__(self, fetch: Fetch, ring: int, flags: torch.Tensor, marks: torch.Tensor) -> None:
        self._fetch = fetch
        self._ring = ring
        self._flags = flags
        self._marks = marks
        self._slots: Slots | None = None

    def __getitem__(self, numbered: tuple[int, Request]) -> tuple[int, Any]:
        number, request = numbered
        worker = get_worker_info()
        if worker is None:
            return number, self._fetch(request)
        if self._slots is None:
            self._slots = Slots(self._ring, worker.id, self._flags)
        mark = self._marks.numpy()[worker.id : worker.id + 1]
        mark[0] = request.rows[0]
        try:
            with full_explained():
                batch = self._fetch(request, allocate=self._slots.new, mark=mark)
                return number, Packed(self._slots.pack(batch))
        except (StopIteration, SystemExit) as error:  # these would end a worker silently
            failed = LoaderFailed(
                f"{type(error).__name__} was raised ({error}) in the batch that starts with "
                f"{self._fetch.name(int(request.rows[0]))}"
            )
            failed.__cause__ = error
            return number, Failure(failed)
        except Exception as error:
            return number, Failure(error)


def _as_it_is(batch: Any) -> Any:
    return batch
