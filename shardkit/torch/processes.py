"""The process engine: a DataLoader with persistent workers, for transforms that hold the GIL."""

from __future__ import annotations

import contextlib
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
from shardkit.torch import workers
from shardkit.torch.feed import Request
from shardkit.torch.fetch import Fetch
from shardkit.torch.options import LATE_REMEDY, Settings
from shardkit.torch.ring import Packed, Ring, Slots

SPARE_SLOTS = 3
"""Slots of a worker beside those of batches under way: one in use, one before it, one to fill."""

_POLL_SECONDS = 2.0
"""How often it is looked whether workers live while no batch comes."""


class ProcessEngine:
    """Reads requests in worker processes, or with 0 workers in this one."""

    def __init__(self, fetch: Fetch, settings: Settings) -> None:
        """Make an engine; processes begin with the first iteration.

        Raises:
            UsageError: If the dataset cannot be sent to processes that are started as asked.
        """
        options = settings.options
        self._fetch = fetch
        self._workers = settings.workers
        self._each = max(1, -(-settings.process_prefetch // max(1, self._workers)))
        self._timeout = options.timeout
        self._poll = min(_POLL_SECONDS, self._timeout or _POLL_SECONDS)
        self._in_order = options.in_order
        self._pinned = settings.pinned
        self._persistent = options.persistent_workers
        self._sharing = options.sharing_strategy
        self._asked_method = options.start_method
        if self._workers and self._asked_method != "auto":
            workers.require_start(self._asked_method, fetch)
        self._loader: DataLoader[Any] | None = None
        self._source = _Requests()
        self._iterator: Any = None
        self._end: weakref.finalize[..., ProcessEngine] | None = None

    def run(self, requests: Iterator[Request]) -> Generator[tuple[Request, Any], None, None]:
        """Give each request with its batch.

        Raises:
            LoaderFailed: If a worker dies, or a batch takes longer than the timeout.
        """
        if self._loader is None or not self._persistent:
            self.close()
            self._loader = self._start()
        self._source.begin(requests)
        try:
            self._iterator = self._begin()
            self._watch()
            while (answer := self._next()) is not None:
                number, batch = answer
                del answer
                yield self._source.take(number), batch
                del batch
        except GeneratorExit:
            if not self._persistent:
                self.close()
            raise
        except BaseException as error:
            reason = self._explain(error)
            self.close()  # nobody waits for what they do, and the next iteration has fresh ones
            if reason is None:
                raise
            raise LoaderFailed(reason) from error
        if not self._persistent:
            self.close()

    def _begin(self) -> Any:
        """Return PyTorch's iterator; persistent workers first end what was left by a break."""
        if self._iterator is not None:
            self._iterator._timeout = self._timeout or threading.TIMEOUT_MAX
        try:
            assert self._loader is not None
            iterator = iter(self._loader)
        except RuntimeError as error:
            if str(error).startswith("DataLoader timed out after"):
                raise LoaderFailed(self._late()) from None
            raise
        if self._workers:
            iterator._timeout = self._poll
        return iterator

    def _next(self) -> tuple[int, Any] | None:
        """Return the next batch with its number, or None at the end.

        PyTorch is asked to give up soon and asked again: only then does it look whether workers
        live, which it otherwise learns from signals, and those of a fork server send none.

        Raises:
            RuntimeError: If a worker died.
            LoaderFailed: If no batch comes within the timeout.
        """
        begun = time.monotonic()
        while True:
            try:
                number, batch = next(self._iterator)
            except StopIteration:
                return None
            except RuntimeError as error:
                if not str(error).startswith("DataLoader timed out after"):
                    raise
                if self._timeout and time.monotonic() - begun >= self._timeout:
                    raise LoaderFailed(self._late()) from None
            else:
                return number, batch

    def close(self) -> None:
        """End the worker processes in the midst of whatever they do."""
        iterator, self._iterator, self._loader = self._iterator, None, None
        if self._end is not None:
            self._end()
            self._end = None
        if iterator is not None and self._workers:
            with contextlib.suppress(Exception):  # they may be dead, which is as well
                iterator._shutdown_workers()

    def start_method(self) -> str | None:
        """Return how workers would be started now; threads may begin after a loader is made."""
        if not self._workers:
            return None
        return workers.choose_start_method() if self._asked_method == "auto" else self._asked_method

    def _watch(self) -> None:
        """Have the workers ended when this engine is gone, or the interpreter ends.

        PyTorch would wait for them: 5 s for each that is busy, and for each idle one too, if the
        garbage collector took their queues first.
        """
        if self._workers and self._end is None:
            iterator = self._iterator
            self._end = weakref.finalize(
                self, workers.end, iterator._workers, iterator._workers_done_event, os.getpid()
            )

    def _start(self) -> DataLoader[Any]:
        count, method = self._workers, self.start_method()
        if method is not None:
            workers.require_start(method, self._fetch)
        self._ring = Ring(count, self._each + SPARE_SLOTS)
        self._marks = torch.full((max(1, count),), -1)
        self._marks.share_memory_()  # type: ignore[no-untyped-call]
        if count:
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
            worker_init_fn=partial(workers.begin_worker, self._sharing) if count else None,
            prefetch_factor=self._each if count else None,
            persistent_workers=count > 0,
            generator=torch.Generator(),  # iterating must not draw from the global one
            in_order=self._in_order,
            multiprocessing_context=method,
        )

    def _explain(self, error: BaseException) -> str | None:
        """Return what is to be said of an error that PyTorch raised for its workers, or None."""
        text = str(error)
        if not isinstance(error, RuntimeError) or not text.startswith("DataLoader worker (pid"):
            return None
        dead = [
            (number, process.exitcode)
            for number, process in enumerate(getattr(self._iterator, "_workers", ()))
            if process.exitcode is not None
        ]
        told = "; ".join(
            f"worker {number} {workers.how_it_ended(code)} {self._where(number)}"
            for number, code in dead
        )
        return f"a worker process died: {told or text}.{workers.hint([code for _, code in dead])}"

    def _late(self) -> str:
        places = "; ".join(f"worker {n} was {self._where(n)}" for n in range(self._workers))
        return f"no batch came for {self._timeout:g} s: {places}. {LATE_REMEDY}"

    def _where(self, worker: int) -> str:
        row = int(self._marks[worker])
        return "before its first sample" if row < 0 else f"at {self._fetch.name(row)}"


class _Requests:
    """The sampler of the DataLoader: gives requests to it, and remembers them until answered."""

    def __init__(self) -> None:
        self._coming: Iterator[Request] = iter(())
        self._open: dict[int, Request] = {}

    def begin(self, requests: Iterator[Request]) -> None:
        """Let the next iteration give ``requests``."""
        self._coming = requests
        self._open = {}

    def __iter__(self) -> Iterator[tuple[int, Request]]:
        for number, request in enumerate(self._coming):
            self._open[number] = request
            yield number, request

    def take(self, number: int) -> Request:
        """Return the request of the given number, which was answered."""
        return self._open.pop(number)


class _Remote(Dataset[Any]):
    """What a worker process has: it reads a request and sends the batch through its slots."""

    def __init__(self, fetch: Fetch, ring: int, flags: torch.Tensor, marks: torch.Tensor) -> None:
        self._fetch = fetch
        self._ring = ring
        self._flags = flags
        self._marks = marks
        self._slots: Slots | None = None

    def __getitem__(self, asked: tuple[int, Request]) -> tuple[int, Any]:
        number, request = asked
        worker = get_worker_info()
        if worker is None:
            return number, self._fetch(request)
        if self._slots is None:
            self._slots = Slots(self._ring, worker.id, self._flags)
        mark = self._marks.numpy()[worker.id : worker.id + 1]
        mark[0] = request.rows[0]
        try:
            batch = self._fetch(request, allocate=self._slots.new, mark=mark)
        except (StopIteration, SystemExit) as error:  # in a worker these would end it quietly
            raise LoaderFailed(
                f"{type(error).__name__} was raised ({error}) in the batch that begins with "
                f"{self._fetch.name(int(request.rows[0]))}"
            ) from error
        return number, Packed(self._slots.pack(batch))


def _as_it_is(batch: Any) -> Any:
    return batch
