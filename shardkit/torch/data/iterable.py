"""Iterable datasets: map-style datasets in an order of which each worker computes its part."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from shardkit.errors import StateMismatch, UsageError
from shardkit.sampling.order import BlockShuffle, Order
from shardkit.sampling.ranks import RankShard
from shardkit.torch.data.collate import collate
from shardkit.torch.data.datasets import (
    Function,
    HDF5Dataset,
    LMDBDataset,
    ShardDataset,
    TarDataset,
    Transforms,
    open_dataset,
)
from shardkit.torch.data.images import Decode
from shardkit.torch.data.nested import row_repeats
from shardkit.torch.data.ops import ImageOp
from shardkit.torch.data.read_context import ReadContext, reading
from shardkit.torch.data.resume import ResumeState
from shardkit.torch.data.schedule import BatchSchedule, Request

_READ_AT_ONCE = 64
"""Samples read together when they are yielded one by one."""


class IterableShardDataset(IterableDataset[Any]):
    """The rows of a dataset of any format, one after the other.

    Ranks and workers divide samples, not shards: any number of either reads each sample once.

    With a ``batch_size`` it yields batches, for ``DataLoader(dataset, batch_size=None)``, in the
    same order for any number of workers. Without, it yields samples; the ``batch_size`` of a
    ``DataLoader`` then groups samples of one worker.

    ``len`` is the number of batches or samples of this rank in an epoch. Call ``set_epoch`` before
    each epoch, as for ``DistributedSampler``; `shardkit.make_loader` does so itself.

    Raises:
        UsageError: If there is no dataset at ``path``, or an option is unknown.
        CorruptDataset: If the dataset's manifest is damaged.
    """

    _open: Callable[..., ShardDataset] = staticmethod(open_dataset)

    def __init__(  # noqa: PLR0913 - the arguments of ShardDataset, then those of a loader
        self,
        path: str | PathLike[str] | ShardDataset,
        transform: Function | ImageOp | Transforms | None = None,
        target_transform: Function | None = None,
        decode: Decode | Mapping[str, Decode] = "pil",
        *,
        fields: Sequence[str] | None = None,
        as_dict: bool = False,
        jpeg: str = "exact",
        verify: bool | None = None,
        view: int = 0,
        split: str | None = None,
        cache: str | PathLike[str] | None = None,
        cache_limit: int | str | None = None,
        fetch: str = "shards",
        root: str | PathLike[str] | None = None,
        shuffle: bool | BlockShuffle = False,
        seed: int = 0,
        batch_size: int | None = None,
        rank_shard: RankShard | None = None,
    ) -> None:
        """Open a dataset; the arguments up to ``root`` are those of `ShardDataset`.

        Args:
            path: The dataset's directory or URL, or an open map-style dataset with its own options.
            transform: Applied to each image, or a mapping by field or fields.
            target_transform: Applied to each label.
            decode: Type of the images, or of each field of images.
            fields: Names of the fields that are read; None means image and label.
            as_dict: Whether samples and batches are dicts by field name.
            jpeg: ``exact`` or ``fast``.
            verify: Whether each read compares the record's checksum.
            view: Number of this view.
            split: Name of a split.
            cache: A local folder for the shards of a dataset in an object store.
            cache_limit: Bytes of shards in the cache, as a number or as ``"50GB"``.
            fetch: Whole ``shards``, or the ``ranges`` that are read.
            root: Folder of the archives of an attached dataset.
            shuffle: As in `shardkit.make_loader`: True shuffles fully, `BlockShuffle` in blocks.
            seed: Selects the order and the random numbers of each epoch.
            batch_size: Samples in a batch; None yields single samples.
            rank_shard: This rank's subset of each epoch; None uses the rank given by
                ``torch.distributed``.
        """
        if isinstance(path, ShardDataset):
            given = (transform, target_transform, decode, fields, as_dict)
            if (*given, jpeg, verify, view, split, cache, cache_limit, fetch, root) != (
                *(None, None, "pil", None, False),
                *("exact", None, 0, None, None, None, "shards", None),
            ):
                raise UsageError(
                    "set transform, target_transform, decode, fields, as_dict, jpeg, verify, view, "
                    "split, cache, cache_limit, fetch and root where the map-style dataset is "
                    "opened"
                )
            self.dataset = path
        else:
            self.dataset = self._open(
                path,
                transform,
                target_transform,
                decode,
                fields=fields,
                as_dict=as_dict,
                jpeg=jpeg,
                verify=verify,
                view=view,
                split=split,
                cache=cache,
                cache_limit=cache_limit,
                fetch=fetch,
                root=root,
            )
        self.order = Order(size=len(self.dataset), shuffle=shuffle, seed=seed)
        self.rank_shard = rank_shard or RankShard()
        self._batched = batch_size is not None
        self._schedule = BatchSchedule(
            self.order,
            1 if batch_size is None else batch_size,
            self.rank_shard,
            repeats=row_repeats(self.dataset),
        )
        self._schedule.lookahead = self.dataset.lookahead
        self._resume = ResumeState(self.dataset, self._schedule)
        self._loaded: Mapping[str, Any] | None = None
        self._given = 0

    def __len__(self) -> int:
        return len(self._schedule)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        self._schedule.require_same_group()
        skip = self._restore(num_workers)
        run = self._resume.begin()
        requests = itertools.islice(
            self._schedule.requests(run.epoch, run.consumed),
            number + skip * num_workers,
            None,
            num_workers,
        )
        self._given = skip
        read = self._batches if self._batched else self._samples
        for request, item in read(requests):
            self._given += 1
            if num_workers == 1:
                self._resume.advance(run, request.consumed)
            yield item

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration read ``epoch``; this reaches persistent workers too.

        Raises:
            UsageError: If ``epoch`` is not an integer from 0 on.
        """
        self.dataset.set_epoch(epoch, self.order.seed)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the latest iteration in this process, as JSON values.

        In a ``DataLoader`` worker it covers that worker's part; ``torchdata``'s
        ``StatefulDataLoader`` collects it from each worker.
        """
        worker = get_worker_info()
        state = self._resume.state()
        if worker is not None and worker.num_workers > 1:
            state |= {
                "worker": worker.id,
                "num_workers": worker.num_workers,
                "given": self._given,
            }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state`` in the next iteration, unless `set_epoch` selects another epoch.

        Raises:
            StateMismatch: If ``state`` is damaged, or of another dataset, order or version.
        """
        self._resume.load(state, of_worker=True)
        given, num_workers = state.get("given", 0), state.get("num_workers", 1)
        valid = type(given) is int and type(num_workers) is int and given >= 0 and num_workers >= 1
        if not valid:
            raise StateMismatch(
                f"the state is damaged: given {given!r}, num_workers {num_workers!r}"
            )
        self._loaded, self._given = dict(state), given  # torchdata may ask before the first item

    def _restore(self, num_workers: int) -> int:
        """Apply a loaded state; return the number of this worker's items to skip."""
        stated, loaded, self._loaded = self.dataset.epoch, self._loaded, None
        # torchdata loads a state after its user set the epoch, which is the one to read.
        if loaded is not None and stated in (None, loaded["epoch"]):
            saved = loaded.get("num_workers", num_workers)
            if saved != num_workers:
                raise StateMismatch(
                    f"the state is that of one of {saved} workers, but this loader has "
                    f"{num_workers}. The state of a loader of make_loader works with any number."
                )
            self._resume.set_epoch(loaded["epoch"])
            return int(loaded.get("given", 0))
        self._resume.restart(stated or 0)
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
            self.dataset.announce(np.concatenate(ahead))
        rows = np.concatenate([request.rows for request in requests])
        repeats = [number for request in requests for number in request.numbers]
        with reading(ReadContext(self.order.seed, requests[0].epoch, repeats=repeats)):
            return self.dataset.__getitems__(rows)


class IterableLMDBDataset(IterableShardDataset):
    """`IterableShardDataset` for LMDB files."""

    _open = LMDBDataset


class IterableHDF5Dataset(IterableShardDataset):
    """`IterableShardDataset` for HDF5 files."""

    _open = HDF5Dataset


class IterableTarDataset(IterableShardDataset):
    """`IterableShardDataset` for WebDataset tar files."""

    _open = TarDataset
