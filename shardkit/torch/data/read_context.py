"""The context in which a batch is read: its epoch, and the memory that it fills.

A loader sets it for each batch. So it reaches a dataset through any wrapper (``Subset``,
``ConcatDataset``, your own), in threads and processes, and loaders of one dataset are independent.
"""

from __future__ import annotations

import contextlib
import random
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from shardkit.record import IMAGE, LABEL
from shardkit.sampling.order import Draws, check_integer, derive_key, sample_number
from shardkit.torch.data.memory import new_shared

Allocate = Callable[[tuple[int, ...]], torch.Tensor]
"""Returns an uninitialized uint8 tensor of a shape, to fill with a batch."""


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


class NumberedRows(list[int]):
    """Rows of a batch that state their epoch and numbers, for a plain ``DataLoader``.

    It passes them to ``__getitems__`` as they are, also in another process.
    """

    def __init__(self, rows: Iterable[int], context: ReadContext) -> None:
        """Create a list of ``rows`` that are read in ``context``."""
        super().__init__(rows)
        self.context = context

    def __reduce__(self) -> tuple[Any, ...]:
        return NumberedRows, (list(self), self.context)


_READING: ContextVar[ReadContext | None] = ContextVar("reading", default=None)


class reading:  # noqa: N801 - a generator would take three times as long, twice for each batch
    """Set the context of all datasets in this thread, until the end of the block."""

    def __init__(self, current: ReadContext) -> None:
        self._current = current

    def __enter__(self) -> None:
        self._token = _READING.set(self._current)

    def __exit__(self, *_: object) -> None:
        _READING.reset(self._token)


def new_block(
    shape: tuple[int, ...], *, shared: bool, dtype: torch.dtype = torch.uint8
) -> torch.Tensor:
    """Return an uninitialized tensor to fill with a batch.

    In a ``DataLoader`` worker it is in shared memory if ``shared``: then the batch is sent without
    a copy, and a full ``/dev/shm`` raises an exception here instead of blocking a queue thread.
    """
    if dtype != torch.uint8:
        in_bytes = (*shape[:-1], shape[-1] * dtype.itemsize)
        return new_block(in_bytes, shared=shared).view(dtype)
    current = _READING.get()
    if current is not None and current.allocate is not None and shared:
        return current.allocate(shape)
    if not shared or get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
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
        """Set the epoch to read from now on.

        Raises:
            UsageError: If a number is not an integer, or the epoch is below 0.
        """
        stated = check_integer("epoch", epoch, 0), check_integer("seed", seed, -(2**63))
        self._values.copy_(torch.tensor(stated))

    def get(self) -> tuple[int, int] | None:
        """Return epoch and seed, or None if unset."""
        epoch, seed = self._values.tolist()
        return None if epoch == self._UNSET else (epoch, seed)


def _shared_if_possible(values: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(RuntimeError):  # without shared memory there are no workers either
        if not values.is_shared():  # type: ignore[no-untyped-call]
            values.share_memory_()  # type: ignore[no-untyped-call]
    return values


class Context:
    """The random numbers of one batch of a dataset.

    With a known epoch they are a function of seed, epoch, view, row, and how often the row came
    before. Otherwise, in a plain ``DataLoader`` without ``set_epoch``, they follow PyTorch's
    generator.
    """

    def __init__(self, cell: EpochCell, view: int = 0, rows: object = None) -> None:
        """Use the context of the loader or of `NumberedRows`, or the epoch in ``cell``."""
        current = _READING.get() or getattr(rows, "context", None)
        stated = cell.get() if current is None else (current.epoch, current.seed)
        self._alone = current is None or current.alone
        self.mark = None if current is None else current.mark
        """Receives the row being read, if not None."""
        self._repeats = None if current is None else current.repeats
        self._stated = stated
        self._view = view

    def samples(self, rows: list[int]) -> list[int]:
        """Return the sample number of each row, which determines its random numbers.

        It is the row itself, unless the row may repeat in the epoch. Without a loader that numbers
        repeats, only the rows of one call are known.
        """
        counts = self._repeats
        if counts is None:
            if len(set(rows)) == len(rows):
                return rows
            seen: Counter[int] = Counter()
            counts = []
            for row in rows:
                counts.append(seen[row])
                seen[row] += 1
        elif len(counts) != len(rows):
            return rows
        return [sample_number(row, count) for row, count in zip(rows, counts, strict=True)]

    def note(self, row: int) -> None:
        """Record that ``row`` is being read."""
        if self.mark is not None:
            self.mark[0] = row

    @cached_property
    def key(self) -> int:
        """The key of the random numbers of image operations."""
        if self._stated is None:
            return int(torch.randint(2**63 - 1, ()).item())
        epoch, seed = self._stated
        return derive_key(f"draws {self._view}", seed, epoch)

    def draws(self, sample: int) -> Draws:
        """Return the random numbers of a sample."""
        return Draws(self.key, sample)

    def apply(
        self, function: Callable[..., Any], values: Sequence[Any], sample: int, field: str = IMAGE
    ) -> Any:
        """Return ``function(*values)``, or ``function(*values, rng)`` if it has ``takes_rng``.

        Args:
            function: A transform.
            values: The value of a field, or of each of several fields.
            sample: The sample's number.
            field: Name of the field or fields; each name has its own random numbers.
        """
        if getattr(function, "takes_rng", False):
            bits = np.random.Philox(key=self._bits(sample, field))
            return function(*values, np.random.Generator(bits))
        if self._stated is not None and self._alone:
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
        ordinary = any(f is not None and not getattr(f, "takes_rng", False) for f in functions)
        if ordinary and self._stated is not None and self._alone:
            return globals_kept()
        return contextlib.nullcontext()


def raised(error: BaseException) -> str:
    """Return an exception of a transform as text, with the line of the user's code that raised it.

    Calls below that line are in libraries, calls above it in shardkit.
    """
    calls = traceback.extract_tb(error.__traceback__)
    named = [call for call in calls if not call.filename.startswith("<")]  # generated at run time
    own = [(path, call.lineno) for call in named if not _is_library(path := Path(call.filename))]
    where = f" ({own[-1][0].name}, line {own[-1][1]})" if own else ""
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
    """Mark a transform that takes a generator: ``transform(image, rng)``.

    ``rng`` is a ``numpy.random.Generator`` that depends only on seed, epoch, view and row. So the
    transform is repeatable in any worker, thread and resumed run. Use it as a decorator of a
    function, or set ``takes_rng = True`` in a class. The transform must be thread-safe: it runs in
    several threads at once.
    """
    transform.takes_rng = True  # type: ignore[attr-defined]
    return transform
