"""Iterable datasets: the map-style ones, read in an order that each worker knows its part of."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from shardkit.errors import StateMismatch, UsageError
from shardkit.order import Blocks, Order
from shardkit.share import Share
from shardkit.torch.collate import collate
from shardkit.torch.datasets import (
    HDF5Dataset,
    LMDBDataset,
    ShardDataset,
    TarDataset,
    open_dataset,
)
from shardkit.torch.feed import Feed, Progress, Request
from shardkit.torch.ops import ImageOp
from shardkit.torch.reading import Reading, reading

_READ_AT_ONCE = 64
"""Samples that are announced and read together when they are given out one by one."""


class IterableShardDataset(IterableDataset[Any]):
    """The images and labels of a dataset of any format, one after the other.

    Ranks and workers divide samples, not shards: any number of either reads each sample once.

    With a ``batch_size`` it gives whole batches, for ``DataLoader(dataset, batch_size=None)``, in
    the same order for any number of workers. Without, it gives samples; a DataLoader's own
    ``batch_size`` then makes each batch of samples of one worker.

    ``len`` is what this rank gives in an epoch, in batches or samples. Call ``set_epoch`` before
    each epoch, as for ``DistributedSampler``; `shardkit.make_loader` does so by itself.

    Raises:
        UsageError: If there is no dataset at ``source``, or an option is unknown.
        CorruptDataset: If the dataset's manifest is damaged.
    """

    _kind: Callable[..., ShardDataset] = staticmethod(open_dataset)

    def __init__(  # noqa: PLR0913 - the names that ShardDataset and DataLoader made familiar
        self,
        source: str | PathLike[str] | ShardDataset,
        transform: Callable[[Any], Any] | None = None,
        decode: str | ImageOp = "pil",
        *,
        shuffle: bool | Blocks = False,
        seed: int = 0,
        batch_size: int | None = None,
        share: Share | None = None,
    ) -> None:
        """Make an iterable dataset.

        Args:
            source: The dataset's directory, or a map-style dataset with options of its own.
            transform: Applied to each image; for a directory.
            decode: What an image is, as for `ShardDataset`; for a directory.
            shuffle: True is `Blocks`, which reads forwards, with its default sizes.
            seed: Chooses the order and the random numbers of each epoch.
            batch_size: Samples in a batch; None gives single samples.
            share: This process's part of each epoch; None is all that ``torch.distributed`` gives.
        """
        if isinstance(source, ShardDataset):
            if transform is not None or decode != "pil":
                raise UsageError("transform and decode are those of the dataset that was given")
            self.source = source
        else:
            self.source = self._kind(source, transform, None, decode)
        self.order = Order(
            size=len(self.source), shuffle=Blocks() if shuffle is True else shuffle, seed=seed
        )
        self.share = share or Share()
        self._batched = batch_size is not None
        self._feed = Feed(self.order, 1 if batch_size is None else batch_size, self.share)
        self._progress = Progress(self.source, self._feed)
        self._loaded: Mapping[str, Any] | None = None
        self._given = 0

    def __len__(self) -> int:
        return len(self._feed)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        self._feed.require_same_group()
        skip = self._place(workers)
        run = self._progress.begin()
        requests = itertools.islice(
            self._feed.requests(run.epoch, run.consumed), number + skip * workers, None, workers
        )
        self._given = skip
        give = self._batches if self._batched else self._samples
        for request, item in give(requests):
            self._given += 1
            if workers == 1:
                self._progress.advance(run, request.consumed)
            yield item

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration read ``epoch``; it reaches persistent workers too.

        Raises:
            UsageError: If it is not an integer from 0 on.
        """
        self.source.set_epoch(epoch, self.order.seed)

    def state_dict(self) -> dict[str, Any]:
        """Return where the latest iteration in this process stands, as JSON values.

        In a DataLoader's worker it is that worker's part; ``torchdata``'s ``StatefulDataLoader``
        asks each for it.
        """
        worker = get_worker_info()
        state = self._progress.state()
        if worker is not None and worker.num_workers > 1:
            state |= {"worker": worker.id, "workers": worker.num_workers, "given": self._given}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` stood, with the next iteration, unless it is to read another epoch.

        Raises:
            StateMismatch: If it is of another dataset, order or version, or is no state.
        """
        self._progress.load(state, of_worker=True)
        given, workers = state.get("given", 0), state.get("workers", 1)
        if type(given) is not int or type(workers) is not int or given < 0 or workers < 1:
            raise StateMismatch(f"the state is damaged: given {given!r}, workers {workers!r}")
        self._loaded, self._given = dict(state), given  # asked for again before the first item

    def _place(self, workers: int) -> int:
        """Let the progress stand where the iteration begins; return this worker's items to skip."""
        stated, loaded, self._loaded = self.source.epoch, self._loaded, None
        # torchdata loads a state after its user named the epoch, which is the one to read.
        if loaded is not None and stated in (None, loaded["epoch"]):
            if loaded.get("workers", workers) != workers:
                raise StateMismatch(
                    f"the state is that of one of {loaded['workers']} workers, and there are "
                    f"{workers}. The state of a loader of make_loader goes with any number."
                )
            self._progress.set(loaded["epoch"])
            return int(loaded.get("given", 0))
        self._progress.restart(stated or 0)
        return 0

    def _batches(self, requests: Iterator[Request]) -> Iterator[tuple[Request, Any]]:
        for request in requests:
            yield request, collate(self._read([request]))

    def _samples(self, requests: Iterator[Request]) -> Iterator[tuple[Request, Any]]:
        while several := list(itertools.islice(requests, _READ_AT_ONCE)):
            yield from zip(several, self._read(several), strict=True)

    def _read(self, requests: list[Request]) -> Any:
        ahead = [request.ahead for request in requests if len(request.ahead)]
        if ahead:
            self.source.announce(np.concatenate(ahead))
        with reading(Reading(self.order.seed, requests[0].epoch)):
            return self.source.__getitems__(np.concatenate([request.rows for request in requests]))


class IterableLMDBDataset(IterableShardDataset):
    """The images and labels of a dataset of LMDB files; see `IterableShardDataset`."""

    _kind = LMDBDataset


class IterableHDF5Dataset(IterableShardDataset):
    """The images and labels of a dataset of HDF5 files; see `IterableShardDataset`."""

    _kind = HDF5Dataset


class IterableTarDataset(IterableShardDataset):
    """The images and labels of a dataset of WebDataset tar files; see `IterableShardDataset`."""

    _kind = TarDataset
