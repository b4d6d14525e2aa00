"""How a loader works: every option, its default, and why it is that."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.multiprocessing

from shardkit.errors import UsageError
from shardkit.share import Share
from shardkit.torch.collate import collate

ENGINES = ("auto", "thread", "process")
LATE_REMEDY = (
    "A transform may wait for something, or a disk is stuck; LoaderOptions(timeout=...) changes "
    "how long is waited."
)
"""What to do if a batch does not come within the timeout."""

START_METHODS = ("auto", "fork", "forkserver", "spawn")


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How batches are made. Only ``share`` has to do with which samples come, and in which order.

    docs/training.md gives the measurements behind the defaults.

    Raises:
        UsageError: If an option is unknown or out of range.
    """

    share: Share | None = None
    """This process's part of each epoch; None is an iterable dataset's own, or all that
    ``torch.distributed`` gives it."""
    collate_fn: Callable[[Sequence[Any]], Any] = collate
    """Makes a batch of samples; the default hands an image block on without a copy."""
    engine: str = "auto"
    """``thread`` decodes in threads of this process, into memory that is used again: the fast path.
    ``process`` uses a PyTorch DataLoader with worker processes, for transforms that hold the GIL.
    ``auto`` takes threads unless something in the dataset may hold the GIL; ``Loader.reason`` says
    why it chose."""
    workers: int | None = None
    """Threads or processes; None takes the processors that this process may use, divided by
    ``LOCAL_WORLD_SIZE``. 0 reads in the main thread, when a batch is asked for."""
    prefetch: int | None = None
    """Batches that are being made or ready, of all workers together; None takes ``workers + 2``
    with threads, ``2 * workers`` with processes. The thread engine holds two more at most: the one
    in use and the one before it."""
    in_order: bool = True
    """Whether batches come in the order of the epoch. False gives each as soon as it is done, which
    evens out batches that take long; a run can then not be resumed exactly."""
    timeout: float = 300.0
    """Seconds after which a batch that does not come is an error; 0 waits for ever."""
    with_rows: bool = False
    """Whether a batch ends with its rows: int64 of shape (N,), -1 for samples that are padding."""
    reuse_buffers: bool = False
    """Whether the memory of a batch's images is written again as soon as the next batch is asked
    for, whoever still holds it (thread engine). Without it memory is used again too, but only when
    the last tensor over it is gone: a batch is its user's to keep."""
    pin_memory: bool | None = None
    """Whether batches lie in page-locked memory; None if there is a CUDA device to copy them to."""
    start_method: str = "auto"
    """How worker processes begin: ``fork``, ``forkserver``, ``spawn``; ``auto`` forks if no other
    thread runs and CUDA is not in use, else it takes a fork server that has loaded torch."""
    persistent_workers: bool = True
    """Whether worker processes live on between epochs: starting them takes 0.1 to 2 s."""
    sharing_strategy: str | None = None
    """How worker processes share tensors, as in ``torch.multiprocessing.set_sharing_strategy``;
    None leaves it. ``file_system`` needs fewer open files, and leaves rubbish after a crash."""

    def __post_init__(self) -> None:
        _require_known("engine", self.engine, ENGINES)
        _require_known("start_method", self.start_method, START_METHODS)
        for name, low in (("workers", 0), ("prefetch", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < low):
                raise UsageError(f"{name}={value!r} is not an integer from {low} on")
        strategies = torch.multiprocessing.get_all_sharing_strategies()  # type: ignore[no-untyped-call]
        if self.sharing_strategy is not None:
            _require_known("sharing_strategy", self.sharing_strategy, tuple(strategies))
        if not isinstance(self.timeout, (int, float)) or not 0 <= self.timeout < math.inf:
            raise UsageError(f"timeout={self.timeout!r} is not a number of seconds, from 0 on")
        if not callable(self.collate_fn):
            raise UsageError(f"collate_fn={self.collate_fn!r} is not a function")
        if self.share is not None and not isinstance(self.share, Share):
            raise UsageError(f"share={self.share!r} is not a shardkit.Share(...)")

    def resolved(self, workers: int, *, pinned: bool) -> Settings:
        """Return these options with numbers for what was left open.

        Args:
            workers: Taken if none are asked for.
            pinned: Whether memory is page-locked, if that is left open.
        """
        workers = workers if self.workers is None else self.workers
        least = max(1, workers)
        return Settings(
            options=self,
            workers=workers,
            thread_prefetch=max(least, self.prefetch or workers + 2),
            process_prefetch=max(least, self.prefetch or 2 * workers),
            pinned=pinned if self.pin_memory is None else self.pin_memory,
        )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options without anything left open."""

    options: LoaderOptions
    workers: int
    thread_prefetch: int
    process_prefetch: int
    pinned: bool


def _require_known(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name}={value!r} is unknown; known are {', '.join(known)}")
