"""`LoaderOptions`: every option of a loader, its default, and the reason for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.multiprocessing

from shardkit.errors import UsageError
from shardkit.sampling.ranks import RankShard
from shardkit.torch.data.collate import collate

ENGINES = ("auto", "thread", "process")
LATE_REMEDY = (
    "A transform may be blocked, or a disk may be stuck. If batches are just slow, raise timeout="
)
"""What to do if a batch does not arrive within the timeout."""

MOST_WORKERS = 1024
"""Maximum number of workers. More would use up threads, processes or files before any batch."""

START_METHODS = ("auto", "fork", "forkserver", "spawn")


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How batches are made. Only ``rank_shard`` affects which samples they hold.

    Options that PyTorch's ``DataLoader`` has too have the same name and meaning here.
    docs/training.md gives the measurements behind the defaults.

    Raises:
        UsageError: If an option is unknown or out of range.
    """

    rank_shard: RankShard | None = None
    """This rank's subset of each epoch. None uses that of an iterable dataset, or the rank given by
    ``torch.distributed``."""
    collate_fn: Callable[[Sequence[Any]], Any] = collate
    """Makes a batch of samples. The default passes on a block of images without copying it."""
    engine: str = "auto"
    """``thread`` decodes in threads of this process into reused memory, which is fastest.
    ``process`` uses a PyTorch ``DataLoader`` with worker processes, for transforms that hold the
    GIL. ``auto`` uses threads unless something in the dataset may hold the GIL; ``Loader.reason``
    gives the reason."""
    num_workers: int | None = None
    """Threads or processes. None uses one for each CPU that this process may use, divided by
    ``LOCAL_WORLD_SIZE``. 0 reads in the main thread, on request."""
    prefetch_factor: int | None = None
    """Batches that each worker prepares ahead, as in PyTorch. None is 2 for processes, and
    ``num_workers + 2`` batches in all for threads. The thread engine holds at most two more: the
    batch in use and the one before it. Without transforms, a thread reads several small batches at
    once, up to 8 MiB, and None counts these as one."""
    in_order: bool = True
    """Whether batches arrive in the order of the epoch. False returns each as soon as it is ready,
    so one slow batch delays no other; such a run cannot resume exactly."""
    timeout: float = 300.0
    """Seconds to wait for a batch before raising an error; 0 waits forever."""
    with_rows: bool = False
    """Whether a batch ends with its rows: int64 of shape (N,), -1 for padding. For a ``Subset``
    they are rows of its dataset; for a ``ConcatDataset``, its own."""
    reuse_buffers: bool = False
    """Whether requesting the next batch overwrites the images of this one, even if they are still
    referenced (thread engine). By default memory is reused only after its last tensor is freed, so
    you can keep a batch as long as you like."""
    pin_memory: bool | None = None
    """Whether batches are in pinned memory. None pins them if a CUDA device is available. True
    without one warns and has no effect."""
    start_method: str = "auto"
    """How worker processes start: ``fork``, ``forkserver`` or ``spawn``. ``auto`` forks on Linux
    while no other thread runs and CUDA is not initialized; otherwise it uses a fork server that has
    already imported torch. If that cannot run the transform or the main file, as in a notebook, the
    engine ``auto`` uses threads and warns."""
    persistent_workers: bool = True
    """Whether worker processes survive between epochs: starting them takes 0.1 to 2 s."""
    sharing_strategy: str | None = None
    """How worker processes share tensors, as in ``torch.multiprocessing.set_sharing_strategy``.
    None keeps the current strategy. ``file_system`` needs fewer open files, but leaves files behind
    after a crash."""

    def __post_init__(self) -> None:
        _require_known("engine", self.engine, ENGINES)
        _require_known("start_method", self.start_method, START_METHODS)
        for name, minimum in (("num_workers", 0), ("prefetch_factor", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < minimum):
                raise UsageError(f"{name}={value!r} is not an integer from {minimum} on")
        if self.num_workers is not None and self.num_workers > MOST_WORKERS:
            raise UsageError(f"num_workers={self.num_workers} is more than {MOST_WORKERS}")
        strategies = torch.multiprocessing.get_all_sharing_strategies()  # type: ignore[no-untyped-call]
        if self.sharing_strategy is not None:
            _require_known("sharing_strategy", self.sharing_strategy, tuple(strategies))
        if not isinstance(self.timeout, (int, float)) or not 0 <= self.timeout < math.inf:
            raise UsageError(f"timeout={self.timeout!r} is not a number of seconds, from 0 on")
        if not callable(self.collate_fn):
            raise UsageError(f"collate_fn={self.collate_fn!r} is not a function")
        if self.rank_shard is not None and not isinstance(self.rank_shard, RankShard):
            raise UsageError(f"rank_shard={self.rank_shard!r} is not a shardkit.RankShard(...)")

    def updated(self, given: Mapping[str, Any]) -> LoaderOptions:
        """Return a copy with other values; None keeps the current one.

        Raises:
            UsageError: If an option is already set to another value, or is out of range.
        """
        given = {name: value for name, value in given.items() if value is not None}
        default = LoaderOptions()
        for name, value in given.items():
            if getattr(self, name) not in (getattr(default, name), value):
                raise UsageError(
                    f"{name} is {getattr(self, name)!r} in options= and {value!r} as an argument: "
                    "leave one of them out"
                )
        return replace(self, **given)

    def resolved(self, num_workers: int, *, pinned: bool) -> Settings:
        """Return these options with the defaults filled in.

        Args:
            num_workers: Default number of workers.
            pinned: Whether memory can be pinned.
        """
        workers = num_workers if self.num_workers is None else self.num_workers
        prefetch = None
        if self.prefetch_factor is not None:
            prefetch = self.prefetch_factor * max(1, workers)
        return Settings(
            options=self,
            num_workers=workers,
            thread_prefetch=prefetch or workers + 2,
            process_prefetch=prefetch or max(1, 2 * workers),
            pinned=pinned and self.pin_memory is not False,
        )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options with all defaults filled in."""

    options: LoaderOptions
    num_workers: int
    thread_prefetch: int
    """Batches that all threads together prepare ahead."""
    process_prefetch: int
    """Batches that all processes together prepare ahead."""
    pinned: bool


def _require_known(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name}={value!r} is unknown; choose from {', '.join(known)}")
