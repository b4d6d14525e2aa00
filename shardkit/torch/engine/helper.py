"""The helper engine: one child process runs the thread engine, and sends batches through its slots.

The training process takes finished batches and announces further requests. Its launches of kernels
wait neither for the GIL nor for the loader's Python.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from shardkit.torch.data.memory import full_explained
from shardkit.torch.data.schedule import PackedRequest, Request
from shardkit.torch.engine.fetch import Batches, Fetch
from shardkit.torch.engine.options import Settings
from shardkit.torch.engine.processes import Answers, ProcessEngine, Remote, Requests, failure
from shardkit.torch.engine.ring import Ring, Slots
from shardkit.torch.engine.threads import ThreadEngine

_CALLS = 2
"""Calls under way: the helper can answer one while the training process takes the other."""

_IN_USE = 2
"""Blocks of the batch in use and of the one before it."""

_UNKNOWN = -1, -1
"""Place of a failed request."""


class HelperEngine(ProcessEngine):
    """A process engine with one worker, in which threads read the requests.

    Batches and errors are those of the thread engine.
    """

    def __init__(self, fetch: Fetch, settings: Settings) -> None:
        """Create an engine; the process starts with the first iteration."""
        process_settings = replace(
            settings, num_workers=min(1, settings.num_workers), process_prefetch=_CALLS
        )
        super().__init__(fetch, process_settings)
        self._settings = settings
        self._source = _Calls(ThreadEngine(fetch, settings))
        self._threads = settings.num_workers
        self._slots = self.blocks(settings)

    @staticmethod
    def blocks(settings: Settings) -> int:
        """Return how many blocks of shared memory are reused.

        A block holds the batches of one view that a thread reads at once.
        """
        return settings.thread_prefetch + _CALLS + _IN_USE

    @staticmethod
    def least_in_block(fetch: Fetch, settings: Settings) -> int:
        """Return how many batches a thread reads at once into a block."""
        return fetch.batches_at_once(settings.batch_size)

    @classmethod
    def at_once(cls, fetch: Fetch, settings: Settings) -> tuple[int, int]:
        """Return 1 and the calls under way: threads read several batches at once."""
        return 1, _CALLS

    def _remote(self, ring: Ring) -> _RemoteThreads:
        return _RemoteThreads(self._fetch, ring, self._marks, self._settings)

    def _seed(self) -> int:
        """Return another seed for each helper, as in threads without a seed."""
        return torch.Generator().seed() >> 2  # to which the number of a worker is added


class _Call(NamedTuple):
    """A message to the helper, which answers with the next batches."""

    is_first: bool
    """Whether it starts an iteration; the rest of the one before is dropped."""
    requests: list[PackedRequest]
    """Further requests, to be read in advance."""
    batches: int
    """Number of batches in the answer: as many as a thread reads at once."""


class _Calls(Requests):
    """Yields calls, each of which announces the requests that the threads then read."""

    def __init__(self, threads: ThreadEngine) -> None:
        super().__init__()
        self._threads = threads

    def __iter__(self) -> Iterator[tuple[bool, list[PackedRequest], int]]:
        requests = super().__iter__()
        first = next(requests, None)
        if first is None:
            return
        together, ahead = self._threads.at_once()
        requests = itertools.chain([first], requests)
        announced = [r.packed() for r in itertools.islice(requests, ahead + together)]
        waiting = len(announced)
        is_first = True
        while waiting:
            batches = min(together, waiting)
            yield is_first, announced, batches
            announced = [r.packed() for r in itertools.islice(requests, together)]
            is_first = False
            waiting += len(announced) - batches


class _RemoteThreads(Remote):
    """Answers calls in the helper."""

    def __init__(self, fetch: Fetch, ring: Ring, marks: torch.Tensor, settings: Settings) -> None:
        super().__init__(fetch, ring)
        self._marks = marks
        # The training process waits for batches, with the timeout; and pins them.
        options = replace(settings.options, timeout=0.0, pin_memory=False)
        self._settings = replace(settings, options=options, pinned=False)
        self._announced: deque[Request] = deque()
        self._batches: Batches | None = None

    def _answers(self, message: tuple[Any, ...], slots: Slots) -> Answers:
        call = _Call(*message)
        if call.is_first:
            if self._batches is not None:
                self._batches.close()
            self._announced.clear()
            marks = np.split(self._marks[0].numpy(), self._settings.num_workers)
            threads = ThreadEngine(self._fetch, self._settings, allocate=slots.new, marks=marks)
            self._batches = threads.run(_emptied(self._announced))
        self._announced.extend(map(Request.unpacked, call.requests))
        assert self._batches is not None
        answers: Answers = []
        try:
            with full_explained():
                for _ in range(call.batches):
                    request, batch = next(self._batches)
                    answers.append((request.batch_id, batch))
                    del batch
        except BaseException as error:
            answers.append((_UNKNOWN, failure(error, "in a thread of the helper")))
        return answers


def _emptied(requests: deque[Request]) -> Iterator[Request]:
    """Yield the items of a queue, also those added meanwhile, until it is empty."""
    while requests:
        yield requests.popleft()
