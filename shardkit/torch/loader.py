"""`make_loader`: what a training loop talks to."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

import torch
from torch.utils.data import IterableDataset

from shardkit.errors import LoaderFailed, UsageError
from shardkit.order import Blocks, Order
from shardkit.share import Share
from shardkit.torch import preflight
from shardkit.torch.feed import Feed, Progress
from shardkit.torch.fetch import Fetch
from shardkit.torch.iterable import IterableShardDataset
from shardkit.torch.options import LoaderOptions, Settings
from shardkit.torch.processes import SPARE_SLOTS, ProcessEngine
from shardkit.torch.threads import ThreadEngine
from shardkit.torch.tuned import load_tuned

_LOG = logging.getLogger(__name__)

FILES_PER_BATCH = 2
"""Descriptors that a batch takes on its way from a worker process."""

_USER = 4
"""Calls from `_choose_engine` up to whoever called `make_loader`: a warning points there."""


def make_loader(  # noqa: PLR0913 - what is read, in which order, and how
    dataset: Any,
    batch_size: int | None = None,
    *,
    shuffle: bool | Blocks | None = None,
    seed: int | None = None,
    options: LoaderOptions | None = None,
    tuned: str | PathLike[str] | None = None,
) -> Loader:
    """Return a loader of batches, tuned for this machine and dataset.

    Args:
        dataset: A dataset of shardkit, or any other with ``__len__`` and ``__getitem__``.
        batch_size: Samples in a batch of this rank; may be left out if ``tuned`` says it.
        shuffle: False reads in the stored order, True in any order, `Blocks` forwards; None does
            what an iterable dataset was made with, and does not shuffle any other.
        seed: Chooses the order and the random numbers of each epoch; None is an iterable dataset's
            own, or 0.
        options: How the work is done, and this process's share of it.
        tuned: A file that ``shardkit tune --out`` wrote: its settings are taken for whatever
            ``options`` leave open.

    Raises:
        UsageError: If options contradict each other or the dataset, or the file is none of tune's.
    """
    options = LoaderOptions() if options is None else options
    if not isinstance(options, LoaderOptions):
        raise UsageError(f"options={options!r} is not a shardkit.LoaderOptions(...)")
    if tuned is not None:
        found = load_tuned(tuned)
        options = found.options(options)
        batch_size = found.batch_size if batch_size is None else batch_size
        found.warn_of_threads(preflight.why_processes(dataset))
    if batch_size is None:
        raise UsageError("batch_size=None is not an integer from 1 on, and no tuned= says one")
    share = options.share
    if isinstance(dataset, IterableShardDataset):
        shuffle = dataset.order.shuffle if shuffle is None else shuffle
        seed = dataset.order.seed if seed is None else seed
        share = dataset.share if share is None else share
        dataset = dataset.source
    if not _has_rows(dataset):
        raise UsageError(
            f"make_loader needs a dataset with a length and rows, not {type(dataset).__name__}; "
            "open a path with shardkit.open_dataset; a foreign IterableDataset needs "
            "torch.utils.data.DataLoader"
        )
    order = Order(
        size=len(dataset),
        shuffle=False if shuffle is None else shuffle,
        seed=0 if seed is None else seed,
    )
    feed = Feed(order, batch_size, share or Share())
    fetch = Fetch(dataset, options.collate_fn, with_rows=options.with_rows)
    return Loader(fetch, feed, options, "asked for" if tuned is None else f"tuned, in {tuned}")


def _has_rows(dataset: Any) -> bool:
    if isinstance(dataset, (str, bytes, IterableDataset)):
        return False
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


class Loader:
    """Gives the batches of one epoch at each iteration; made by `make_loader`.

    It behaves as ``torch.utils.data.DataLoader`` where training loops look: ``len`` is the number
    of batches in an epoch of this rank, ``dataset``, ``batch_size``, ``num_workers``,
    ``drop_last``, ``collate_fn`` and ``pin_memory`` are what they are there.

    Each iteration reads the next epoch, so the order differs without any call; ``set_epoch`` names
    one. ``state_dict`` may be asked at any time and says which batch comes next.
    """

    def __init__(
        self, fetch: Fetch, feed: Feed, options: LoaderOptions, asked: str = "asked for"
    ) -> None:
        """Make a loader; use `make_loader`."""
        self.dataset = fetch.dataset
        self.batch_size = feed.batch_size
        self.drop_last = feed.share.drop_last
        self.collate_fn = fetch.collate
        self.options = options
        self._feed = feed
        self._progress = Progress(fetch.dataset, feed)
        self._iteration = 0
        settings = options.resolved(preflight.default_workers(), pinned=torch.cuda.is_available())
        self.num_workers = settings.workers
        self.pin_memory = settings.pinned
        self.engine, self.reason = _choose_engine(fetch.dataset, feed.batch_size, settings, asked)
        engine = ThreadEngine if self.engine == "thread" else ProcessEngine
        self._engine: ThreadEngine | ProcessEngine = engine(fetch, settings)
        _LOG.info("%r", self)

    def __len__(self) -> int:
        return len(self._feed)

    def __iter__(self) -> Iterator[Any]:
        self._iteration += 1
        return self._iterate(self._iteration)

    def __repr__(self) -> str:
        return (
            f"Loader of {len(self)} batches of {self.batch_size}, rank {self._feed.share.rank} of "
            f"{self._feed.share.world}, {self.num_workers} workers, engine {self.engine}: "
            f"{self.reason}"
        )

    @property
    def epoch(self) -> int:
        """The epoch that was begun last, or once it is read to its end, the one that comes next."""
        return self._progress.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration read ``epoch``: from where a loaded state left it, if it did.

        Raises:
            UsageError: If it is not an integer from 0 on.
        """
        self._progress.set(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the run stands: which batch comes next, as JSON values.

        All ranks have the same state, and a run of any number of ranks and workers, with batches
        of any size, can go on from it.

        Raises:
            UsageError: If batches do not come in order: then nothing short of all rows read says
                which are left.
        """
        if not self.options.in_order:
            raise UsageError(
                "with in_order=False a run cannot be resumed exactly: no state is kept"
            )
        return self._progress.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` stood, with the next iteration.

        Raises:
            StateMismatch: If it is of another dataset, order or version, or is no state.
        """
        self._progress.load(state)

    def close(self) -> None:
        """End worker processes now, and not when the loader is gone; it can be used again."""
        self._iteration += 1
        self._engine.close()

    def _iterate(self, iteration: int) -> Iterator[Any]:
        self._feed.require_same_group()
        run = self._progress.begin()
        batches = self._engine.run(self._feed.requests(run.epoch, run.consumed))
        try:
            for request, batch in batches:
                self._progress.advance(run, request.consumed)
                yield batch
                del batch
                if self._iteration != iteration:
                    raise LoaderFailed(
                        "this iteration ended when another of the same loader began, or the "
                        "loader was closed; make a loader for each"
                    )
        finally:
            batches.close()
        self._progress.finish(run)


def _choose_engine(dataset: Any, batch_size: int, settings: Settings, by: str) -> tuple[str, str]:
    """Return an engine, and why it is the one (``by``, if asked for); warn of disappointments."""
    asked = settings.options.engine
    reason = by if asked != "auto" else preflight.why_processes(dataset)
    if asked == "thread":
        return "thread", by
    if reason is None:
        return "thread", "nothing in this dataset holds the GIL for long"
    problem = _process_problem(dataset, batch_size, settings)
    if problem is None:
        return "process", reason
    if asked == "process":
        warnings.warn(f"loading may fail: {problem}", RuntimeWarning, stacklevel=_USER)
        return "process", reason
    warnings.warn(
        f"threads are taken, since {problem}; random numbers of a transform that is not marked "
        "with shardkit.with_rng do not repeat in them",
        RuntimeWarning,
        stacklevel=_USER,
    )
    return "thread", f"{reason}, but {problem}"


def _process_problem(dataset: Any, batch_size: int, settings: Settings) -> str | None:
    """Return why worker processes may fail on this machine, or None."""
    if settings.workers == 0:
        return None
    batches = settings.process_prefetch + SPARE_SLOTS * settings.workers
    size = preflight.batch_bytes(dataset, batch_size)
    problem = preflight.shared_memory_problem(size * batches) if size else None
    return problem or preflight.descriptor_problem(FILES_PER_BATCH * batches)
