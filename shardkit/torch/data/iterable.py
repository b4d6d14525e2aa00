"""Iterable datasets: the rows of a map-style dataset in order, divided among workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from os import PathLike
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from shardkit.errors import StateMismatch, UsageError
from shardkit.options import changed, takes
from shardkit.sampling.ranks import Rank
from shardkit.system.text import quoted
from shardkit.torch.data.collate import collate
from shardkit.torch.data.datasets import (
    HDF5Dataset,
    LMDBDataset,
    ShardDataset,
    TarDataset,
    open_dataset,
)
from shardkit.torch.data.divided import require_undivided
from shardkit.torch.data.nested import row_repeats
from shardkit.torch.data.order_options import OrderedDataset, OrderOptions, RowOrder
from shardkit.torch.data.read_context import ReadContext, read_at_once
from shardkit.torch.data.reader_options import ReaderOptions
from shardkit.torch.data.resume import ResumeState, Run, is_count
from shardkit.torch.data.schedule import BatchSchedule, Request

_READ_AT_ONCE = 64
"""Samples read together when they are yielded one by one."""


class _Start(NamedTuple):
    """Where an iteration starts in this process."""

    run: Run
    yielded: int
    """Items of this worker that came before."""
    num_workers: int | None
    """Workers of the state that it resumes; None if any number will do."""


class IterableShardDataset(OrderedDataset):
    """The rows of a dataset of any format, one after the other.

    Ranks and workers divide samples, not shards: whatever their number, each sample is read once.

    With a ``batch_size`` it yields batches, for ``DataLoader(dataset, batch_size=None)``, in the
    same order for any number of workers. Without one, it yields samples; the ``batch_size`` of a
    ``DataLoader`` then groups samples of one worker.

    ``len`` is the number of batches or samples of this rank in an epoch. Call ``set_epoch`` before
    each epoch, as for ``DistributedSampler``; `shardkit.make_loader` does so automatically.

    Raises:
        UsageError: If there is no dataset at ``path``, or an option is unknown.
        CorruptDataset: If the dataset's manifest is damaged.
    """

    _open: Callable[..., ShardDataset] = staticmethod(open_dataset)

    @takes(ReaderOptions, RowOrder)
    def __init__(
        self,
        reading: ReaderOptions,
        options: RowOrder,
        path: str | PathLike[str] | ShardDataset,
        *,
        batch_size: int | None = None,
    ) -> None:
        """Open a dataset.

        Args:
            path: The dataset's directory or URL, or an open map-style dataset with its own options.
            batch_size: Samples in a batch; None yields single samples.
        """
        if not isinstance(path, ShardDataset):
            path = self._open(path, **vars(reading))
        elif names := changed(reading):
            raise UsageError(
                f"{', '.join(sorted(names))} cannot be set for an open map-style dataset",
                remedy="set options when you open it",
            )
        self.dataset = path
        self.order = OrderOptions(shuffle=options.shuffle, seed=options.seed).order(self.dataset)
        self.rank = options.rank or Rank()
        self._batched = batch_size is not None
        self._schedule = BatchSchedule(
            self.order,
            1 if batch_size is None else batch_size,
            self.rank,
            repeats=row_repeats(self.dataset),
        )
        self._schedule.lookahead = self.dataset.shards.files.lookahead
        self._resume = ResumeState(self.dataset, self._schedule)
        self._loaded: Mapping[str, Any] | None = None
        self._started: _Start | None = None
        """The latest iteration in this process; None if `set_epoch` or a state came after it."""
        self._yielded = 0
        """Items of it that this worker has yielded."""

    def __len__(self) -> int:
        return len(self._schedule)

    def __iter__(self) -> Iterator[Any]:
        require_undivided("dataset", self._schedule.rank)
        # Starts here, not with the first item: torchdata asks for the state of a worker before it.
        return self._items(self._start())

    def __getstate__(self) -> dict[str, Any]:
        require_undivided("dataset", self._schedule.rank)  # a spawned worker has no such callers
        return vars(self)

    def _items(self, start: _Start) -> Iterator[Any]:
        if self._started is None:  # the epoch was set since
            start = self._start()
        run, skip, saved = start
        worker = get_worker_info()
        number, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        self._schedule.require_same_group()
        if saved not in (None, num_workers):
            raise StateMismatch(
                f"the state was saved by one of {saved} workers, but this loader has "
                f"{num_workers}. The state of a make_loader loader works with any number of "
                "workers."
            )
        requests = itertools.islice(
            self._schedule.requests(run.epoch, run.consumed),
            number + skip * num_workers,
            None,
            num_workers,
        )
        read = self._batches if self._batched else self._samples
        for yielded, (request, item) in enumerate(read(requests), skip + 1):
            if self._started is start:
                self._yielded = yielded
                if num_workers == 1:
                    self._resume.advance(run, request.consumed)
            yield item

    def _start(self) -> _Start:
        """Start the next iteration."""
        state = self._seek() or {}
        self._loaded = None
        self._started = _Start(self._resume.begin(), self._yielded, state.get("num_workers"))
        return self._started

    def _seek(self) -> Mapping[str, Any] | None:
        """Go to where the next iteration starts; return the loaded state if it resumes that."""
        state = self._loaded
        epoch = self.dataset.epoch
        # torchdata loads a state after its user set the epoch, which is the one to read.
        if state is None or epoch not in (None, state["epoch"]):
            self._resume.restart(epoch or 0)
            self._yielded = 0
            return None
        self._resume.load(state, of_worker=True)
        self._resume.keep_epoch()
        self._yielded = state.get("given", 0)
        return state

    def completed(self, order: OrderOptions) -> OrderOptions:
        """Return options of a loader, with those of this dataset where they are None."""
        shuffle = self.order.shuffle if order.sampler is None else None
        return replace(
            order,
            shuffle=shuffle if order.shuffle is None else order.shuffle,
            seed=self.order.seed if order.seed is None else order.seed,
            rank=order.rank or self.rank,
        )

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration read ``epoch``; this reaches persistent workers too.

        Raises:
            UsageError: If ``epoch`` is not an integer of at least 0.
        """
        self.dataset.set_epoch(epoch, self.order.seed)
        self._started = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the latest iteration in this process, as JSON values.

        After `set_epoch` or `load_state_dict` it is the start of the next iteration. In a
        ``DataLoader`` worker it covers that worker's samples; ``StatefulDataLoader`` of
        ``torchdata`` collects it from each worker.
        """
        if self._started is None and (loaded := self._seek()) is not None:
            return dict(loaded)
        state = self._resume.state()
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            state |= {
                "worker": worker.id,
                "num_workers": worker.num_workers,
                "given": self._yielded,
            }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state`` in the next iteration, unless `set_epoch` selects another epoch.

        Raises:
            StateMismatch: If ``state`` is damaged, or belongs to another dataset, order or version.
        """
        self._resume.check(state, of_worker=True)
        items = state.get("given", 0)
        num_workers = state.get("num_workers", 1)
        valid = is_count(items) and items <= self._schedule.size and is_count(num_workers)
        if not valid or num_workers == 0:
            raise StateMismatch(
                f"the state is damaged: given {quoted(items)}, num_workers {quoted(num_workers)}"
            )
        self._loaded = dict(state)
        self._started = None

    def _batches(self, requests: Iterator[Request]) -> Iterator[tuple[Request, Any]]:
        for request in requests:
            yield request, collate(self._read([request]))

    def _samples(self, requests: Iterator[Request]) -> Iterator[tuple[Request, Any]]:
        while group := list(itertools.islice(requests, _READ_AT_ONCE)):
            yield from zip(group, self._read(group), strict=True)

    def _read(self, requests: list[Request]) -> Any:
        context = ReadContext(self.order.seed, requests[0].epoch)
        return read_at_once(self.dataset, requests, context)


class IterableLMDBDataset(IterableShardDataset):
    """`IterableShardDataset` for LMDB files."""

    _open = LMDBDataset


class IterableHDF5Dataset(IterableShardDataset):
    """`IterableShardDataset` for HDF5 files."""

    _open = HDF5Dataset


class IterableTarDataset(IterableShardDataset):
    """`IterableShardDataset` for WebDataset tar files."""

    _open = TarDataset
