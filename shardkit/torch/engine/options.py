"""`LoaderOptions`: how a loader makes batches; the defaults, and the reasons for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch.multiprocessing

from shardkit.errors import UsageError
from shardkit.options import option, require_valid
from shardkit.system.priority import priority_problem


class EngineKind(NamedTuple):
    """The location of an engine, and the kind of its workers."""

    target: str
    """``module:CLASS`` of an `Engine`."""
    worker: str
    """Name of a worker."""
    shares_gil: bool
    """Whether they are threads of one process."""
    starts_processes: bool


ENGINE_KINDS = {
    "thread": EngineKind(
        "shardkit.torch.engine.threads:ThreadEngine",
        "thread",
        shares_gil=True,
        starts_processes=False,
    ),
    "helper": EngineKind(
        "shardkit.torch.engine.helper:HelperEngine",
        "helper thread",
        shares_gil=True,
        starts_processes=True,
    ),
    "process": EngineKind(
        "shardkit.torch.engine.processes:ProcessEngine",
        "worker process",
        shares_gil=False,
        starts_processes=True,
    ),
}
"""All engines, the cheapest first."""

READERS: dict[str, str] = {
    "raise": "shardkit.torch.engine.fetch:Fetch",
    "drop": "shardkit.torch.engine.dropping:DroppingFetch",
    "cpu": "shardkit.torch.engine.resident:ResidentFetch",
    "cuda": "shardkit.torch.engine.resident:CudaFetch",
}
"""``module:CLASS`` of the `Fetch` for each value of ``resident``, and without of ``on_bad``."""

ON_BAD = ("raise", "drop")

ENGINES = ("auto", *ENGINE_KINDS)
LATE_REMEDY = (
    "A transform may be blocked, or a disk may be stuck. If batches are only slow, raise timeout="
)
"""Remedy if a batch does not arrive within the timeout."""

MOST_WORKERS = 1024
"""Maximum number of workers. More would use up threads, processes or files before any batch."""

PRIORITIES = ("normal", "low")
START_METHODS = ("auto", "fork", "forkserver", "spawn")


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How batches are made; no option affects which samples they hold.

    Raises:
        UsageError: If an option is unknown or out of range.
    """

    INSTEAD: ClassVar[Mapping[str, str]] = {
        "batch_sampler": "set the order with sampler= and the batches with batch_size= and "
        "drop_last=, or pass it to torch.utils.data.DataLoader with collate_fn=shardkit.collate",
        "worker_init_fn": "draw random numbers in a transform marked shardkit.with_rng, and create "
        "what a worker needs when the transform is first called",
        "generator": "seed= sets the order and all random numbers",
        "multiprocessing_context": "use start_method=",
        "pin_memory_device": "move batches with shardkit.DevicePrefetcher",
    }
    """Replacements for options of PyTorch's ``DataLoader`` that a loader lacks."""

    collate_fn: Callable[[Sequence[Any]], Any] | None = option(
        None,
        help="Function that combines samples into a batch. None uses `collate`, which passes on "
        "a block of images without copying it.",
    )
    engine: str = option(
        "auto",
        help="``thread`` decodes in threads of this process into reused memory, which is fastest. "
        "``helper`` runs these threads in one child process, so that they do not delay the "
        "kernel launches of the training loop. ``process`` uses a PyTorch ``DataLoader`` with "
        "worker processes, for transforms that hold the GIL. ``auto`` uses processes if "
        "something in the dataset may hold the GIL, otherwise threads; ``Loader.reason`` gives "
        "the reason.",
        choices=ENGINES,
    )
    resident: str | None = option(
        None,
        help="Memory that holds the whole dataset, decoded when the loader is created: ``cpu`` or "
        "``cuda``, the current device. Batches and states are the same as without it. Each rank "
        "holds all rows. Images must have one size, and only `RandomCrop` may draw random "
        "numbers.",
        choices=tuple(memory for memory in READERS if memory not in ON_BAD),
    )
    num_workers: int | None = option(
        None,
        help="Number of threads, or of processes with the ``process`` engine. None uses one for "
        "each CPU that this process may use, divided by ``LOCAL_WORLD_SIZE``; or 0 with "
        "``resident``. 0 reads in the main thread, on request.",
        minimum=0,
    )
    priority: str = option(
        "normal",
        help="CPU priority of the loader's threads or processes. ``low`` is nice 19: they yield "
        "to the training loop, which launches kernels with less delay, but also to other "
        "programs. Other threads keep their priority. Linux only: elsewhere, or with 0 workers, "
        "``low`` warns and has no effect.",
        choices=PRIORITIES,
    )
    prefetch_factor: int | None = option(
        None,
        help="Batches that each worker prepares ahead, as in PyTorch. None means 2 for "
        "processes, and ``num_workers + 2`` batches in total for threads. The thread engine "
        "holds at most two more: the batch in use and the one before it. The helper holds "
        "another two, in transit to this process. Without transforms, a thread or process reads "
        "several small batches at once, up to 8 MiB, or 20 MiB if nothing is decoded, and None "
        "counts them as one.",
        minimum=1,
    )
    timeout: float = option(
        300.0, help="Seconds to wait for a batch before raising an error; 0 waits forever."
    )
    with_rows: bool = option(
        False,
        help="Whether each batch ends with its row numbers: int64 of shape (N,), -1 for padding. "
        "For a ``Subset`` they are rows of its dataset; for a ``ConcatDataset``, its own.",
    )
    on_bad: str = option(
        "raise",
        help="What to do with a sample whose record is damaged or cannot be decoded. ``drop`` "
        "leaves it out of its batch, which is then smaller: no other sample takes its place, and "
        "a batch without samples is left out. ``Loader.bad`` lists such rows.",
        choices=ON_BAD,
    )
    max_bad: int = option(
        100,
        help="Maximum number of bad rows with ``on_bad='drop'``; if there are more, the "
        "iteration raises `LoaderFailed`.",
        minimum=0,
    )
    pin_memory: bool | None = option(
        None,
        help="Whether batches are in pinned memory. None pins them if a CUDA device is available. "
        "True without one warns and has no effect.",
    )
    start_method: str = option(
        "auto",
        help="How worker processes start: ``fork``, ``forkserver`` or ``spawn``. ``auto`` forks "
        "on Linux while no other thread runs and CUDA is not initialized; otherwise it uses a "
        "fork server that has already imported torch. If that cannot run the transform or the "
        "main file, as in a notebook, the ``auto`` engine uses threads and warns.",
        choices=START_METHODS,
    )
    persistent_workers: bool = option(
        True,
        help="Whether worker processes survive between epochs: starting them takes 0.1 to 2 s.",
    )
    sharing_strategy: str | None = option(
        None,
        help="How worker processes share tensors, as in "
        "``torch.multiprocessing.set_sharing_strategy``. None keeps the current strategy. "
        "``file_system`` needs fewer open files, but leaves files behind after a crash.",
    )

    def __post_init__(self) -> None:
        require_valid(self)
        if self.num_workers is not None and self.num_workers > MOST_WORKERS:
            raise UsageError(f"num_workers must be at most {MOST_WORKERS}, not {self.num_workers}")
        strategies = torch.multiprocessing.get_all_sharing_strategies()  # type: ignore[no-untyped-call]
        if self.sharing_strategy not in (None, *strategies):
            raise UsageError(
                f"sharing_strategy={self.sharing_strategy!r} is unknown;",
                remedy=f"choose from {', '.join(sorted(strategies))}",
            )
        if not 0 <= self.timeout < math.inf:
            raise UsageError(f"timeout must be at least 0 seconds, not {self.timeout!r}")

    def resolved(self, num_workers: int, *, pinned: bool, batch_size: int = 1) -> Settings:
        """Return these options with the defaults filled in; ``pinned`` allows pinned memory."""
        workers = num_workers if self.num_workers is None else self.num_workers
        prefetch = (self.prefetch_factor or 0) * max(1, workers)
        return Settings(
            options=self,
            num_workers=workers,
            thread_prefetch=prefetch or workers + 2,
            process_prefetch=prefetch or max(1, 2 * workers),
            pinned=pinned and self.pin_memory is not False,
            batch_size=batch_size,
            is_low=self.priority == "low" and workers > 0 and priority_problem() is None,
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
    batch_size: int
    is_low: bool
    """Whether threads and processes lower their priority."""
