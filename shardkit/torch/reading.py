"""What surrounds the reading of a batch: the epoch it belongs to, and whose memory it fills.

A loader states it around each batch; so it reaches a dataset through any wrapper (``Subset``,
``ConcatDataset``, a user's own), in threads and in processes, and two loaders of one dataset do not
disturb each other.
"""

from __future__ import annotations

import contextlib
import random
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from shardkit.order import Draws, check_integer, derive_key
from shardkit.torch.memory import new_shared

Allocate = Callable[[tuple[int, ...]], torch.Tensor]
"""Gives an uninitialised uint8 tensor of a shape, to be filled with a batch."""


_INSTALLED = {"site-packages", "dist-packages"}
_LIBRARIES = (Path(__file__).parent.parent, Path(sysconfig.get_path("stdlib")))


class Reading(NamedTuple):
    """One batch being read."""

    seed: int
    epoch: int
    allocate: Allocate | None = None
    """Where a batch's block comes from; None takes new memory."""
    alone: bool = True
    """Whether no other thread draws from Python's, NumPy's and PyTorch's global generators."""
    mark: npt.NDArray[np.int64] | None = None
    """Where the row being read is noted, of shape (1,): it names the sample if a worker dies."""


_READING: ContextVar[Reading | None] = ContextVar("reading", default=None)


@contextlib.contextmanager
def reading(current: Reading) -> Iterator[None]:
    """State what all datasets of this thread read for, until the end of the block."""
    token = _READING.set(current)
    try:
        yield
    finally:
        _READING.reset(token)


def new_block(
    shape: tuple[int, ...], *, shared: bool, dtype: torch.dtype = torch.uint8
) -> torch.Tensor:
    """Return an uninitialised tensor to fill with a batch.

    In a DataLoader's worker it lies in shared memory, if asked for: then the batch travels without
    a copy, and a full ``/dev/shm`` is an exception here, not a hang in a thread of the queue.
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
    """An epoch and seed that ``set_epoch`` reaches persistent workers with.

    They copied the dataset when they began; memory shared with them is the one way to tell them.
    """

    _UNSET = -1

    def __init__(self) -> None:
        self._values = _shared_if_possible(torch.tensor([self._UNSET, 0]))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Share the memory of a copy too: it has workers of its own."""
        self._values = _shared_if_possible(state["_values"])

    def set(self, epoch: int, seed: int) -> None:
        """State the epoch that is read from now on.

        Raises:
            UsageError: If a number is no integer, or the epoch is below 0.
        """
        stated = check_integer("epoch", epoch, 0), check_integer("seed", seed, -(2**63))
        self._values.copy_(torch.tensor(stated))

    def get(self) -> tuple[int, int] | None:
        """Return epoch and seed, or None if nobody stated them."""
        epoch, seed = self._values.tolist()
        return None if epoch == self._UNSET else (epoch, seed)


def _shared_if_possible(values: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(RuntimeError):  # no shared memory: then there are no workers either
        if not values.is_shared():  # type: ignore[no-untyped-call]
            values.share_memory_()  # type: ignore[no-untyped-call]
    return values


class Context:
    """What one batch of a dataset depends on beside its rows: its random numbers above all.

    With a known epoch they are a function of seed, epoch and row. Otherwise, in a plain DataLoader
    whose user never called ``set_epoch``, they follow PyTorch's generator, as everybody's do.
    """

    def __init__(self, cell: EpochCell) -> None:
        current = _READING.get()
        stated = cell.get() if current is None else (current.epoch, current.seed)
        self._alone = current is None or current.alone
        self._mark = None if current is None else current.mark
        self._stated = stated

    def note(self, row: int) -> None:
        """Note that ``row`` is being read."""
        if self._mark is not None:
            self._mark[0] = row

    @cached_property
    def _key(self) -> int:
        if self._stated is None:
            return int(torch.randint(2**63 - 1, ()).item())
        epoch, seed = self._stated
        return derive_key("draws", seed, epoch)

    def draws(self, row: int) -> Draws:
        """Return the random numbers of the sample at ``row``."""
        return Draws(self._key, row)

    def apply(
        self, function: Callable[..., Any], value: Any, row: int, *, label: bool = False
    ) -> Any:
        """Return ``function(value)``, or ``function(value, rng)`` if it has ``takes_rng``.

        Args:
            function: A transform.
            value: Its image or label.
            row: Of the sample.
            label: Whether it is the label, which has random numbers of its own.
        """
        if getattr(function, "takes_rng", False):
            bits = np.random.Philox(key=self._bits(row, label))
            return function(value, np.random.Generator(bits))
        if self._stated is not None and self._alone:
            seed_globals(self._bits(row, label))
        return function(value)

    def _bits(self, row: int, label: bool) -> int:
        """Return a seed for a transform: other numbers than those of an image operation."""
        draws = Draws(~self._key, row)
        return (draws.bits(), draws.bits())[label]

    def globals_kept(
        self, *functions: Callable[..., Any] | None
    ) -> contextlib.AbstractContextManager[None]:
        """Leave the global generators as they were, whatever `apply` does for ``functions``."""
        ordinary = any(f is not None and not getattr(f, "takes_rng", False) for f in functions)
        if ordinary and self._stated is not None and self._alone:
            return globals_kept()
        return contextlib.nullcontext()


def raised(error: BaseException) -> str:
    """Return what a transform raised, and the line of the user's own code that it came from.

    Below that line may be libraries, above it is shardkit: neither is where the mistake is.
    """
    calls = traceback.extract_tb(error.__traceback__)
    named = [call for call in calls if not call.filename.startswith("<")]  # made at run time
    own = [(path, call.lineno) for call in named if not _is_library(path := Path(call.filename))]
    where = f" ({own[-1][0].name}, line {own[-1][1]})" if own else ""
    return f"{type(error).__name__}: {error}{where}"


def _is_library(path: Path) -> bool:
    return bool(_INSTALLED & set(path.parts)) or any(map(path.is_relative_to, _LIBRARIES))


@contextlib.contextmanager
def globals_kept() -> Iterator[None]:
    """Leave the global generators as they were; in a worker process nobody else draws from them."""
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
    """Seed the generators that transforms draw from: Python's, NumPy's and PyTorch's."""
    random.seed(bits)
    np.random.seed(bits & 0xFFFFFFFF)
    # Not torch.manual_seed, which also queues a call for each GPU, in every worker, for ever.
    torch.default_generator.manual_seed(bits >> 1)


def with_rng(transform: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a transform as one that takes a generator: ``transform(image, rng)``.

    ``rng`` is a ``numpy.random.Generator`` that depends on seed, epoch and row alone, so that the
    transform draws the same for a sample in any worker, thread and resumed run. A function can be
    decorated with it; a class may have the attribute ``takes_rng = True`` instead. Such a transform
    states that it may run in several threads at once.
    """
    transform.takes_rng = True  # type: ignore[attr-defined]
    return transform
