"""`make_loader` and the `Loader` that it returns."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch.utils.data import IterableDataset

from shardkit.errors import LoaderFailed, UsageError
from shardkit.sampling.epochs import Epochs
from shardkit.sampling.order import BlockShuffle
from shardkit.sampling.ranks import RankShard
from shardkit.torch.data import nested
from shardkit.torch.data.iterable import IterableShardDataset
from shardkit.torch.data.resume import ResumeState
from shardkit.torch.data.samplers import make_order
from shardkit.torch.data.schedule import BatchSchedule
from shardkit.torch.engine import preflight, workers
from shardkit.torch.engine.fetch import Fetch
from shardkit.torch.engine.options import LoaderOptions, Settings
from shardkit.torch.engine.processes import SPARE_SLOTS, ProcessEngine
from shardkit.torch.engine.threads import ThreadEngine
from shardkit.torch.tuned import load_tuned

_LOG = logging.getLogger(__name__)

FILES_PER_BATCH = 2
"""File descriptors that a batch uses on its way from a worker process."""

_THREADS = (
    "using threads, since {}; in threads a transform without shardkit.with_rng does not draw "
    "repeatable random numbers"
)

_USER = 4
"""Stack level of warnings in `_choose_engine`, which point at the caller of `make_loader`."""


def make_loader(  # noqa: PLR0913 - what is read, in which order, and how
    dataset: Any,
    batch_size: int | None = None,
    *,
    shuffle: bool | BlockShuffle | None = None,
    sampler: Any = None,
    num_workers: int | None = None,
    collate_fn: Callable[[Sequence[Any]], Any] | None = None,
    pin_memory: bool | None = None,
    drop_last: bool | None = None,
    timeout: float | None = None,
    prefetch_factor: int | None = None,
    persistent_workers: bool | None = None,
    in_order: bool | None = None,
    seed: int | None = None,
    samples_per_epoch: int | None = None,
    aug_repeats: int = 1,
    views: int = 1,
    endless: bool = False,
    options: LoaderOptions | None = None,
    tuned: str | PathLike[str] | None = None,
) -> Loader:
    """Return a loader of batches, with defaults for this machine and dataset.

    Arguments that ``torch.utils.data.DataLoader`` has too have the same names here. They may also
    be set in ``options``, which holds all others.

    Args:
        dataset: A dataset of shardkit, or any other with ``__len__`` and ``__getitem__``.
        batch_size: Samples in a batch of this rank; may be omitted if ``tuned`` sets it.
        shuffle: False reads in stored order, True fully shuffles each epoch, and `BlockShuffle`
            shuffles blocks of neighboring rows. None is the setting of an iterable dataset, and
            False for others.
        sampler: Selects the rows of each epoch, instead of ``shuffle``: `Weighted`, `Balanced`,
            `Mixture`, or a sampler of PyTorch that yields rows. Its random numbers depend on seed
            and epoch, and ranks divide its rows.
        num_workers: Threads or processes; 0 reads in the main thread.
        collate_fn: Makes a batch of samples.
        pin_memory: Whether batches are in pinned memory.
        drop_last: Whether to leave out a last, smaller batch.
        timeout: Seconds to wait for a batch before raising an error.
        prefetch_factor: Batches that each worker prepares ahead.
        persistent_workers: Whether worker processes survive between epochs.
        in_order: Whether batches arrive in the order of the epoch.
        seed: Selects the order and the random numbers of each epoch; None is the seed of an
            iterable dataset, and 0 for others.
        samples_per_epoch: Samples in an epoch, of all ranks; the next epoch continues where this
            one ended. None is the length of the dataset or sampler.
        aug_repeats: Repeated augmentation: each sample comes so often, with different random
            numbers, in neighboring ranks of the same step.
        views: If more than 1, each batch is a tuple of so many batches of the same samples, with
            different random numbers.
        endless: Whether an iteration continues with the next epoch instead of ending.
        options: All other options, such as the engine and the rank.
        tuned: A file written by ``shardkit tune --out``, for settings that ``options`` leaves open.

    Raises:
        UsageError: If options contradict each other or the dataset, or ``tuned`` is invalid.
    """
    options = LoaderOptions() if options is None else options
    if not isinstance(options, LoaderOptions):
        raise UsageError(f"options={options!r} is not a shardkit.LoaderOptions(...)")
    options = options.updated(
        {
            "num_workers": num_workers,
            "collate_fn": collate_fn,
            "pin_memory": pin_memory,
            "timeout": timeout,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "in_order": in_order,
        }
    )
    if tuned is not None:
        found = load_tuned(tuned)
        options = found.options(options)
        batch_size = found.batch_size if batch_size is None else batch_size
        found.warn_of_threads(preflight.why_processes(dataset))
    if batch_size is None:
        raise UsageError("batch_size= is required, unless tuned= sets it")
    rank_shard = options.rank_shard
    if isinstance(dataset, IterableShardDataset):
        shuffle = dataset.order.shuffle if shuffle is None and sampler is None else shuffle
        seed = dataset.order.seed if seed is None else seed
        rank_shard = dataset.rank_shard if rank_shard is None else rank_shard
        dataset = dataset.dataset
    if not _has_rows(dataset):
        raise UsageError(
            f"make_loader needs a dataset with a length and rows, not {type(dataset).__name__}: "
            "open a path with shardkit.open_dataset; for another IterableDataset, use "
            "torch.utils.data.DataLoader"
        )
    rank_shard = rank_shard or RankShard()
    if drop_last is not None:
        rank_shard = replace(rank_shard, drop_last=drop_last)
    shuffle, seed = False if shuffle is None else shuffle, 0 if seed is None else seed
    order = make_order(dataset, shuffle, seed, sampler)
    epochs = Epochs(samples_per_epoch=samples_per_epoch, aug_repeats=aug_repeats, views=views)
    schedule = BatchSchedule(order, batch_size, rank_shard, epochs, nested.row_repeats(dataset))
    schedule.lookahead = getattr(dataset, "lookahead", 0)
    fetch = Fetch(dataset, options.collate_fn, with_rows=options.with_rows, views=views)
    by = "requested" if tuned is None else f"tuned, in {tuned}"
    return Loader(fetch, schedule, options, by, endless=endless)


def _has_rows(dataset: Any) -> bool:
    if isinstance(dataset, (str, bytes, IterableDataset)):
        return False
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


class Loader:
    """Yields the batches of one epoch in each iteration; made by `make_loader`.

    It has the interface of ``torch.utils.data.DataLoader`` that training loops use: ``len`` (the
    number of batches of this rank in an epoch), ``dataset``, ``batch_size``, ``num_workers``,
    ``drop_last``, ``collate_fn`` and ``pin_memory``.

    Each iteration reads the next epoch, so no call is needed to change the order; ``set_epoch``
    selects one. With ``endless``, it continues with the epochs after that. ``state_dict`` can be
    called at any time.
    """

    def __init__(
        self,
        fetch: Fetch,
        schedule: BatchSchedule,
        options: LoaderOptions,
        by: str = "requested",
        *,
        endless: bool = False,
    ) -> None:
        """Create a loader; use `make_loader` instead."""
        self.dataset = fetch.dataset
        self.batch_size = schedule.batch_size
        self.drop_last = schedule.rank_shard.drop_last
        self.collate_fn = fetch.collate
        self.options = options
        self._schedule = schedule
        self._endless = schedule.require_endless(endless)
        self._resume = ResumeState(fetch.dataset, schedule)
        self._iteration = 0
        settings = options.resolved(preflight.default_workers(), pinned=torch.cuda.is_available())
        self.num_workers = settings.num_workers
        self.pin_memory = settings.pinned
        if options.pin_memory and not settings.pinned:
            warnings.warn(
                "pin_memory=True has no effect: no CUDA device is available",
                RuntimeWarning,
                stacklevel=3,
            )
        self.engine, self.reason = _choose_engine(fetch, schedule.batch_size, settings, by)
        engine = ThreadEngine if self.engine == "thread" else ProcessEngine
        self._engine: ThreadEngine | ProcessEngine = engine(fetch, settings)
        self._new_threads = partial(ThreadEngine, fetch, settings)
        _LOG.info("%r", self)

    def __len__(self) -> int:
        return len(self._schedule)

    def __iter__(self) -> Iterator[Any]:
        self._iteration += 1
        return self._iterate(self._iteration)

    def __repr__(self) -> str:
        rank_shard = self._schedule.rank_shard
        return (
            f"Loader of {len(self)} batches of {self.batch_size}, rank {rank_shard.rank} of "
            f"{rank_shard.world_size}, {self.num_workers} workers, engine {self.engine}: "
            f"{self.reason}"
        )

    @property
    def epoch(self) -> int:
        """The last epoch started, or the next one once it is exhausted."""
        return self._resume.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration read ``epoch``, or the rest of it after `load_state_dict`.

        Raises:
            UsageError: If ``epoch`` is not an integer from 0 on.
        """
        self._resume.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch, as JSON values.

        The state is the same on all ranks, and a run with any number of ranks and workers and any
        batch size can resume from it.

        Raises:
            UsageError: If ``in_order`` is False: a position cannot describe which rows are left.
        """
        if not self.options.in_order:
            raise UsageError(
                "a loader with in_order=False has no state, since it cannot resume exactly"
            )
        return self._resume.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state`` in the next iteration.

        Raises:
            StateMismatch: If ``state`` is damaged, or of another dataset, order or version.
        """
        self._resume.load(state)

    def close(self) -> None:
        """Stop worker processes now instead of with the loader, which can still be used."""
        self._iteration += 1
        self._engine.close()

    def _iterate(self, iteration: int) -> Iterator[Any]:
        self._schedule.require_same_group()
        run, owner = self._resume.begin(), os.getpid()
        self._require_start()
        requests = self._schedule.requests(run.epoch, run.consumed, endless=self._endless)
        batches = self._engine.run(requests)
        try:
            for request, batch in batches:
                self._resume.advance(run._replace(epoch=request.epoch), request.consumed)
                yield batch
                del batch
                if os.getpid() != owner:
                    raise LoaderFailed(
                        f"process {owner} started this iteration, and this process is a fork of "
                        "it, which cannot continue it. Iterate over the loader again here: "
                        "`for batch in loader`"
                    )
                if self._iteration != iteration:
                    raise LoaderFailed(
                        "this iteration ended because another one of the same loader started, or "
                        "the loader was closed: use a loader for each"
                    )
        finally:
            batches.close()
        self._resume.finish(run)

    def _require_start(self) -> None:
        """Switch to threads if worker processes cannot start now and were not requested.

        Other threads, or CUDA, may run since the loader was created; then workers cannot fork.
        """
        if self.options.engine != "auto" or not isinstance(self._engine, ProcessEngine):
            return
        problem = self._engine.start_problem()
        if problem is not None:
            warnings.warn(_THREADS.format(problem), RuntimeWarning, stacklevel=3)
            self.engine, self.reason = "thread", f"{self.reason}, but {problem}"
            self._engine = self._new_threads()


def _choose_engine(fetch: Fetch, batch_size: int, settings: Settings, by: str) -> tuple[str, str]:
    """Return an engine and the reason for it (``by`` if it was requested)."""
    asked = settings.options.engine
    reason = by if asked != "auto" else preflight.why_processes(fetch.dataset)
    if asked == "thread":
        return "thread", by
    if reason is None:
        return "thread", "nothing in this dataset holds the GIL for long"
    problem = _process_problem(fetch, batch_size, settings)
    if problem is None:
        return "process", reason
    if asked == "process":
        warnings.warn(f"loading may fail: {problem}", RuntimeWarning, stacklevel=_USER)
        return "process", reason
    warnings.warn(_THREADS.format(problem), RuntimeWarning, stacklevel=_USER)
    return "thread", f"{reason}, but {problem}"


def _process_problem(fetch: Fetch, batch_size: int, settings: Settings) -> str | None:
    """Return why worker processes may fail on this machine, or None."""
    if settings.num_workers == 0:
        return None
    batches = settings.process_prefetch + SPARE_SLOTS * settings.num_workers
    size = preflight.batch_bytes(fetch.dataset, batch_size * fetch.views)
    problem = preflight.shared_memory_problem(size * batches) if size else None
    problem = problem or preflight.descriptor_problem(FILES_PER_BATCH * batches * fetch.views)
    return problem or workers.start_problem(settings.options.start_method, fetch)
