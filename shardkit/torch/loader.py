"""`make_loader` and the `Loader` that it returns."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from os import PathLike
from typing import Any, Generic, Protocol

import torch
from typing_extensions import TypeVar

from shardkit.errors import LoaderFailed, UsageError, setting
from shardkit.options import takes
from shardkit.system.late import load
from shardkit.system.priority import priority_problem
from shardkit.torch.data import nested
from shardkit.torch.data.collate import collate
from shardkit.torch.data.datasets import ShardDataset
from shardkit.torch.data.order_options import OrderedDataset, OrderOptions
from shardkit.torch.data.resume import Resumable, ResumeState
from shardkit.torch.data.schedule import BatchSchedule
from shardkit.torch.engine import preflight
from shardkit.torch.engine.fetch import Engine, Fetch
from shardkit.torch.engine.options import ENGINE_KINDS, READERS, LoaderOptions, Settings

_LOG = logging.getLogger(__name__)

Batch_co = TypeVar("Batch_co", covariant=True, default=Any)

_USER = 5
"""Stack level of warnings in `_choose_engine`, which point at the caller of `make_loader`."""


class Preset(Protocol):
    """Settings for the arguments of a loader that are None."""

    def complete(
        self, options: LoaderOptions, dataset: Any, batch_size: int | None
    ) -> tuple[LoaderOptions, int, str]:
        """Return options and batch size with these settings, and the reason for the engine."""


@takes(OrderOptions, LoaderOptions)
def make_loader(
    order: OrderOptions,
    options: LoaderOptions,
    dataset: Any,
    batch_size: int | None = None,
    *,
    tuned: str | PathLike[str] | None = None,
) -> Loader[Any]:
    """Return a loader of batches, with defaults for this machine and dataset.

    Options that PyTorch's ``DataLoader`` has too have the same name and meaning here.
    docs/benchmarks.md has the measurements behind the defaults.

    Args:
        dataset: A shardkit dataset, or any other with ``__len__`` and ``__getitem__``.
        batch_size: Samples in a batch of this rank; may be omitted if ``tuned`` sets it.
        tuned: A file written by ``shardkit tune --out``, for settings that other arguments leave
            open.

    Raises:
        UsageError: If an option is out of range, options contradict each other or the dataset, or
            ``tuned`` is invalid.
    """
    by = "requested"
    if tuned is not None:
        preset: Preset = load("shardkit.torch.tuned:load_tuned")(tuned)
        options, batch_size, by = preset.complete(options, dataset, batch_size)
    if batch_size is None:
        raise UsageError(f"{setting('batch_size')} is required, unless tuned= sets it")
    reader = reader_of(options)
    options, by = reader.suited(options, by)
    if isinstance(dataset, OrderedDataset):
        order = dataset.completed(order)
        dataset = dataset.dataset
    if not nested.has_rows(dataset):
        raise UsageError(
            f"make_loader needs a dataset with a length and rows, not {type(dataset).__name__}",
            remedy="open a path with shardkit.open_dataset; for another IterableDataset, use "
            "torch.utils.data.DataLoader",
        )
    schedule = order.schedule(dataset, batch_size)
    if isinstance(dataset, ShardDataset):
        schedule.lookahead = dataset.shards.files.lookahead
    fetch = reader(
        dataset,
        options.collate_fn or collate,
        with_rows=options.with_rows,
        op=order.op,
        views=order.view_ops,
    )
    loader: Loader[Any] = Loader(fetch, schedule, options, by)
    loader.order = order
    return loader


def reader_of(options: LoaderOptions) -> type[Fetch]:
    """Return the class that reads batches for a loader; its `Fetch.suited` checks options."""
    reader: type[Fetch] = load(READERS[options.resident or options.on_bad])
    return reader


class TrainerEpochs:
    """Takes the epoch of a trainer, which sets it where PyTorch's ``DataLoader`` has a sampler.

    Lightning calls ``loader.batch_sampler.sampler.set_epoch(epoch)`` before each epoch.
    """

    def __init__(self, resume: ResumeState, schedule: BatchSchedule) -> None:
        self.batch_size = schedule.batch_size
        self.drop_last = schedule.rank.drop_last
        self.set_epoch = resume.follow

    @property
    def sampler(self) -> TrainerEpochs:
        """The sampler whose epoch is set."""
        return self


# Not a subclass of DataLoader: frameworks take those apart and rebuild them with samplers of their
# own. The process engine uses a real one inside.
class Loader(Resumable, Generic[Batch_co]):
    """Yields the batches of one epoch in each iteration; created by `make_loader`.

    It has the interface of ``torch.utils.data.DataLoader`` that training loops use: ``len`` (the
    number of batches of this rank in an epoch), ``dataset``, ``batch_size``, ``num_workers``,
    ``drop_last``, ``collate_fn`` and ``pin_memory``.

    Each iteration reads the next epoch, so no call is needed to change the order; ``set_epoch``
    selects one. With ``endless``, it continues with the epochs after that. ``state_dict`` can be
    called at any time.

    Editors know the type of its batches if you annotate a variable: ``loader: Loader[tuple[Tensor,
    Tensor]] = make_loader(...)``.
    """

    order: OrderOptions
    """The options of its order, to create an equivalent loader."""

    def __init__(
        self,
        fetch: Fetch,
        schedule: BatchSchedule,
        options: LoaderOptions,
        by: str = "requested",
    ) -> None:
        """Create a loader; use `make_loader` instead."""
        self.dataset = fetch.dataset
        self.batch_size = schedule.batch_size
        self.drop_last = schedule.rank.drop_last
        self.collate_fn = fetch.collate
        self.options = options
        self._schedule = schedule
        self._resume = ResumeState(fetch.dataset, schedule)
        self.batch_sampler = TrainerEpochs(self._resume, schedule)
        """For trainers, which set the epoch of its ``sampler``."""
        self.bad: dict[int, str] = {}
        """Rows that ``on_bad="drop"`` has left out so far, as ``with_rows`` gives them, and why."""
        self._iteration = 0
        settings = options.resolved(
            preflight.default_workers(),
            pinned=torch.cuda.is_available(),
            batch_size=schedule.batch_size,
        )
        self.num_workers = settings.num_workers
        self.pin_memory = settings.pinned
        if options.pin_memory and not settings.pinned:
            warnings.warn(
                "pin_memory=True has no effect: no CUDA device is available",
                RuntimeWarning,
                stacklevel=4,
            )
        self.priority = "low" if settings.is_low else "normal"
        """Effective priority of the threads or processes."""
        if options.priority != self.priority:
            problem = priority_problem() or "with 0 workers, the training thread loads"
            warnings.warn(f"priority='low' has no effect: {problem}", RuntimeWarning, stacklevel=4)
        self.engine, self.reason = _choose_engine(fetch, settings, by)
        self._fetch = fetch
        self._settings = settings
        self._engine = _engine_class(self.engine)(fetch, settings)
        _LOG.info("%r", self)

    def __len__(self) -> int:
        return len(self._schedule)

    def __iter__(self) -> Iterator[Batch_co]:
        self._iteration += 1
        return self._iterate(self._iteration)

    def __repr__(self) -> str:
        rank = self._schedule.rank
        return (
            f"Loader of {len(self)} batches of {self.batch_size}, rank {rank.rank} of "
            f"{rank.world_size}, {self.num_workers} workers, engine {self.engine}: "
            f"{self.reason}"
        )

    def end_epochs_after(self, batches: int) -> None:
        """If a state is at least ``batches`` batches into its epoch, resume it with the next epoch.

        Use this for trainers that end epochs early; ``len`` and iterations do not change.
        """
        self._resume.limit = batches * self.batch_size * self._schedule.rank.world_size

    def close(self) -> None:
        """Stop worker processes now instead of with the loader, which can still be used."""
        self._iteration += 1
        self._engine.close()

    def _iterate(self, iteration: int) -> Iterator[Any]:
        self._schedule.require_same_group()
        run = self._resume.begin()
        owner = os.getpid()
        self._require_start()
        requests = self._schedule.requests(run.epoch, run.consumed, endless=self._schedule.endless)
        batches = self._engine.run(requests)
        batches = self._fetch.accepted(batches, self.bad, self.options.max_bad, self._schedule)
        try:
            for request, batch in batches:
                self._resume.advance(run._replace(epoch=request.epoch), request.consumed)
                yield batch
                del batch  # its memory is reused once the loop has dropped it too
                if os.getpid() != owner:
                    raise LoaderFailed(
                        f"process {owner} started this iteration, and this process is a fork of "
                        "it, which cannot continue it",
                        remedy="Iterate over the loader again here: `for batch in loader`",
                    )
                if self._iteration != iteration:
                    raise LoaderFailed(
                        "this iteration ended because another one of the same loader started, "
                        "or the loader was closed",
                        remedy="use a separate loader for each",
                    )
        finally:
            batches.close()
        self._resume.finish(run)

    def _require_start(self) -> None:
        """Switch to threads if worker processes cannot start now, unless only they will do.

        Other threads, or CUDA, may run since the loader was created; then workers cannot fork.
        """
        if self.options.engine == "process":
            return
        problem = self._engine.start_problem()
        if problem is not None:
            _warn_of_threads(self.engine, problem, stacklevel=4)
            self.engine = "thread"
            self.reason = f"{self.reason}, but {problem}"
            self._engine = _engine_class(self.engine)(self._fetch, self._settings)


def _choose_engine(fetch: Fetch, settings: Settings, by: str) -> tuple[str, str]:
    """Return an engine and the reason for it (``by`` if it was requested)."""
    requested = settings.options.engine
    engine = requested
    reason = by
    if requested == "auto":
        engine, reason = preflight.suited_engine(preflight.why_processes(fetch.dataset))
    is_free = requested == "auto" and engine == "process"
    problem = preflight.why_threads(fetch.dataset) if is_free else None
    problem = problem or _engine_class(engine).problem(fetch, settings)
    if problem is None:
        return engine, reason
    if requested == "process":
        warnings.warn(f"loading may fail: {problem}", RuntimeWarning, stacklevel=_USER)
        return engine, reason
    _warn_of_threads(engine, problem, stacklevel=_USER + 1)
    return "thread", f"{reason}, but {problem}"


def _engine_class(name: str) -> type[Engine]:
    kind: type[Engine] = load(ENGINE_KINDS[name].target)
    return kind


def _warn_of_threads(engine: str, problem: str, *, stacklevel: int) -> None:
    """Warn that threads are used instead; in a helper they differ only in speed."""
    message = f"using threads, because {problem}"
    if engine == "process":
        message += "; in threads, a transform without shardkit.with_rng is not repeatable"
    warnings.warn(message, RuntimeWarning, stacklevel=stacklevel)
