"""The context in which a batch is read: its epoch, and the memory that it fills.

A loader sets it for each batch. So it reaches a dataset through any wrapper (``Subset``,
``ConcatDataset``, your own), in threads and processes. It is a context variable, not an attribute
of the dataset: two loaders over subsets of one dataset must not change each other's epoch.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from shardkit.options import check_integer
from shardkit.record import IMAGE, LABEL
from shardkit.sampling.order import Draws, derive_key, sample_number
from shardkit.torch.data.memory import new_shared
from shardkit.torch.data.ops import ImageOp
from shardkit.torch.data.schedule import Request, view_number

Allocate = Callable[[tuple[int, ...]], torch.Tensor]
"""Returns an uninitialized uint8 tensor of a shape, to fill with a batch."""


_TURN = 1 << 36
"""Added to a row that is read more often than a batch has numbers; larger than any dataset."""

_INSTALLED = {"site-packages", "dist-packages"}
_LIBRARIES = (Path(__file__).parent.parent, Path(sysconfig.get_path("stdlib")))


class ReadContext(NamedTuple):
    """The batch being read."""

    seed: int
    epoch: int
    allocate: Allocate | None = None
    """Allocates the block of a batch; None allocates new memory."""
    alone: bool = True
    """Whether no other thread uses the global generators of Python, NumPy and PyTorch."""
    mark: npt.NDArray[np.int64] | None = None
    """Receives the row being read, shape (1,), to name the sample if a worker dies."""
    repeats: Sequence[int] | None = None
    """A number for each row of the batch, different for equal rows of an epoch; empty if no row
    repeats, None if unknown."""
    earlier: Counter[int] | None = None
    """Rows of each dataset that were read for this batch, by a wrapper that does not read all of
    them in one call."""
    op: ImageOp | None = None
    """The operation of the view being read; None for the ``decode`` of the dataset."""
    views: tuple[ImageOp | None, ...] = ()
    """The operation of each view, as ``op``: then a sample is a tuple of samples. Each view has its
    random numbers, so `repeats` numbers the rows if there are several."""


_WITHOUT_LOADER = ReadContext(seed=0, epoch=0)
_NOTHING = contextlib.nullcontext()


class NumberedRows(list[int]):
    """Rows of a batch that carry the context in which they are read, to any process.

    They set it for this thread as long as they exist: for all rows, or for the one to which an
    iteration has come. So it reaches the shardkit datasets inside any wrapper, also with PyTorch's
    ``DataLoader``, which passes on nothing else and drops the rows after reading them.
    """

    def __init__(self, rows: Iterable[int], context: ReadContext) -> None:
        """Create a list of ``rows`` that are read in ``context``, from now on."""
        super().__init__(rows)
        self.context = context._replace(earlier=Counter())
        self._set(self.context)

    def __iter__(self) -> Iterator[int]:
        numbers = self.context.repeats
        try:
            for position, row in enumerate(super().__iter__()):
                repeats = numbers[position : position + 1] if numbers else numbers
                self._set(self.context._replace(repeats=repeats, earlier=None))
                yield row
        finally:
            self._set(self.context)

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        # NumPy would iterate, which takes longer than copying a batch of raw pixels.
        return np.array(self[:], dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return NumberedRows, (self[:], self.context._replace(earlier=None))

    def _set(self, context: ReadContext) -> None:
        self.current = context
        _READING.set(ref(self))


_READING: ContextVar[ReadContext | ref[NumberedRows] | None] = ContextVar("reading", default=None)


def _current() -> ReadContext | None:
    """Return the context of this thread, unless the rows that have set it no longer exist."""
    current = _READING.get()
    if not isinstance(current, ref):
        return current
    if (rows := current()) is not None:
        return rows.current
    _READING.set(None)
    return None


class reading:  # noqa: N801 - a generator would take three times as long, twice for each batch
    """Set the context of all datasets in this thread, until the end of the block."""

    def __init__(self, current: ReadContext) -> None:
        self._current = current

    def __enter__(self) -> None:
        self._token = _READING.set(self._current)

    def __exit__(self, *_: object) -> None:
        _READING.reset(self._token)


def read_at_once(dataset: Any, requests: Sequence[Request], context: ReadContext) -> Any:
    """Return the samples of requests of one epoch, read from a shardkit dataset in one call.

    ``context`` is that of all requests; it numbers no repeats yet.
    """
    ahead = [request.ahead for request in requests if len(request.ahead)]
    if ahead:
        dataset.announce(np.concatenate(ahead))
    rows = np.concatenate([request.rows for request in requests])
    repeats = [number for request in requests for number in request.numbers]
    with reading(context._replace(repeats=repeats)):
        return dataset.__getitems__(rows)


def new_block(
    shape: tuple[int, ...], *, shared: bool, dtype: torch.dtype = torch.uint8
) -> torch.Tensor:
    """Return an uninitialized tensor to fill with a batch.

    In a ``DataLoader`` worker it is in shared memory if ``shared``: then the batch is sent without
    a copy, and a full ``/dev/shm`` raises an exception here; in PyTorch it ends a queue's thread,
    and the loader hangs. One block for all images, since each tensor sent costs half a millisecond.
    """
    if dtype != torch.uint8:
        in_bytes = (*shape[:-1], shape[-1] * dtype.itemsize)
        return new_block(in_bytes, shared=shared).view(dtype)
    current = _current()
    if current is not None and current.allocate is not None and shared:
        return current.allocate(shape)
    if not shared or get_worker_info() is None:
        return torch.from_numpy(np.empty(shape, np.uint8))  # in half the time of torch.empty
    return new_shared(int(np.prod(shape))).view(shape)


class EpochCell:
    """The epoch and seed that ``set_epoch`` sets, also for persistent workers.

    Workers copied the dataset when they started, so only shared memory reaches them.
    """

    _UNSET = -1

    def __init__(self) -> None:
        self._values = _shared_if_possible(torch.tensor([self._UNSET, 0]))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Share the memory of a copy too: it has its own workers."""
        self._values = _shared_if_possible(state["_values"])

    def set(self, epoch: int, seed: int) -> None:
        """Set the epoch to read from now on."""
        values = check_integer("epoch", epoch, 0), check_integer("seed", seed, -(2**63))
        self._values.copy_(torch.tensor(values))

    def get(self) -> tuple[int, int] | None:
        """Return epoch and seed, or None if unset."""
        epoch, seed = self._values.tolist()
        return None if epoch == self._UNSET else (epoch, seed)


def _shared_if_possible(values: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(RuntimeError):  # without shared memory there are no workers either
        if not values.is_shared():  # type: ignore[no-untyped-call]
            values.share_memory_()  # type: ignore[no-untyped-call]
    return values


class BatchContext:
    """How one dataset reads the rows of a batch: with which random numbers, from its `ReadContext`.

    With a known epoch they are a function of seed, epoch, view, row, and how often the row came
    before. Otherwise, in a plain ``DataLoader`` without ``set_epoch``, they follow PyTorch's
    generator.
    """

    def __init__(self, cell: EpochCell, view: int = 0, rows: object = None) -> None:
        """Use the context of `NumberedRows` or of the loader, or the epoch in ``cell``."""
        current = rows.context if isinstance(rows, NumberedRows) else _current()
        self._epoch_and_seed = cell.get() if current is None else (current.epoch, current.seed)
        current = current or _WITHOUT_LOADER
        self._alone = current.alone
        self.mark = current.mark
        """Receives the row being read, if not None."""
        self._repeats = current.repeats
        self._earlier = current.earlier
        self.op = current.op
        """See `ReadContext`, as for ``views``."""
        self.views = current.views
        self._dataset = id(cell)
        self._view = view

    def of_views(self) -> list[BatchContext]:
        """Return the context of each view; this one alone if samples are not tuples of views."""
        if not self.views:
            return [self]
        contexts = []
        for view, op in enumerate(self.views):
            context = copy.copy(self)
            context.op = op
            if len(self.views) > 1:
                assert self._repeats is not None, "samples with views are numbered"
                context._repeats = [view_number(n, view, len(self.views)) for n in self._repeats]
            contexts.append(context)
        return contexts

    def samples(self, rows: list[int]) -> list[int]:
        """Return the sample number of each row, which determines its random numbers.

        It is the row itself, unless the row may repeat in the epoch. Without a loader that numbers
        repeats, only the rows of one call are known. If a wrapper reads the rows of a batch in
        several calls, or more rows, each takes the next of the batch's numbers.
        """
        numbers = self._repeats
        if numbers is None:
            if len(set(rows)) == len(rows):
                return rows
            seen: Counter[int] = Counter()
            numbers = []
            for row in rows:
                numbers.append(seen[row])
                seen[row] += 1
        elif not numbers:
            return rows
        if len(numbers) == len(rows):
            return [sample_number(row, number) for row, number in zip(rows, numbers, strict=True)]
        earlier = Counter() if self._earlier is None else self._earlier
        samples = []
        for row in rows:
            turn, position = divmod(earlier[self._dataset], len(numbers))
            earlier[self._dataset] += 1
            samples.append(sample_number(row + turn * _TURN, numbers[position]))
        return samples

    def note(self, row: int) -> None:
        """Record that ``row`` is being read."""
        if self.mark is not None:
            self.mark[0] = row

    @cached_property
    def key(self) -> int:
        """The key of the random numbers of image operations."""
        if self._epoch_and_seed is None:
            return int(torch.randint(2**63 - 1, ()).item())
        epoch, seed = self._epoch_and_seed
        return draws_key(self._view, seed, epoch)

    def draws(self, sample: int) -> Draws:
        """Return the random numbers of a sample."""
        return Draws(self.key, sample)

    def apply(
        self, function: Callable[..., Any], values: Sequence[Any], sample: int, field: str = IMAGE
    ) -> Any:
        """Return ``function(*values)``, or ``function(*values, rng)`` if it has ``takes_rng``.

        Each name of a field or fields has its own random numbers.
        """
        if getattr(function, "takes_rng", False):
            bits = np.random.Philox(key=self._bits(sample, field))
            return function(*values, np.random.Generator(bits))
        if self._epoch_and_seed is not None and self._alone:
            seed_globals(self._bits(sample, field))
        return function(*values)

    def _bits(self, sample: int, field: str) -> int:
        """Return a seed for a transform, different from that of an image operation."""
        if field not in (IMAGE, LABEL):
            return Draws(derive_key(f"transform {field}", self.key, 0), sample).bits()
        draws = Draws(~self.key, sample)
        return (draws.bits(), draws.bits())[field == LABEL]

    def globals_kept(
        self, *functions: Callable[..., Any] | None
    ) -> contextlib.AbstractContextManager[None]:
        """Restore the global generators after `apply` has called ``functions``."""
        seeds = self._epoch_and_seed is not None and self._alone
        if seeds and any(f is not None and not getattr(f, "takes_rng", False) for f in functions):
            return globals_kept()
        return _NOTHING


def draws_key(view: int, seed: int, epoch: int) -> int:
    """Return the key of the random numbers of image operations."""
    return derive_key(f"draws {view}", seed, epoch)


def raised(error: BaseException) -> str:
    """Return an exception of a transform as text, with the line of the user's code that raised it.

    Calls below that line are in libraries, calls above it in shardkit.
    """
    calls = traceback.extract_tb(error.__traceback__)
    named = [call for call in calls if not call.filename.startswith("<")]  # generated at run time
    lines = [(path, call.lineno) for call in named if not _is_library(path := Path(call.filename))]
    where = f" ({lines[-1][0].name}, line {lines[-1][1]})" if lines else ""
    return f"{type(error).__name__}: {error}{where}"


def _is_library(path: Path) -> bool:
    return bool(_INSTALLED & set(path.parts)) or any(map(path.is_relative_to, _LIBRARIES))


@contextlib.contextmanager
def globals_kept() -> Iterator[None]:
    """Restore the global generators at the end, except in a worker process, which owns them."""
    if get_worker_info() is not None:
        yield
        return
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def seed_globals(bits: int) -> None:
    """Seed the global generators of Python, NumPy and PyTorch."""
    random.seed(bits)
    np.random.seed(bits & 0xFFFFFFFF)
    # Not torch.manual_seed: it also queues a call for each GPU; in workers that list only grows.
    torch.default_generator.manual_seed(bits >> 1)


def with_rng(transform: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a transform that accepts a generator: ``transform(image, rng)``.

    ``rng`` is a ``numpy.random.Generator`` that depends only on seed, epoch, view and row. So the
    transform is reproducible in any worker, thread and resumed run. Decorate a function with it, or
    set ``takes_rng = True`` in a class. The transform must be thread-safe: it runs in several
    threads at once.
    """
    transform.takes_rng = True  # type: ignore[attr-defined]
    return transform
