"""Helpers for loader tests: small datasets, fingerprints of batches, epochs without a loader."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import FORMATS, make_dataset, make_tree, png

from shardkit import (
    BlockShuffle,
    IterableHDF5Dataset,
    IterableLMDBDataset,
    IterableShardDataset,
    IterableTarDataset,
    RandomResizedCrop,
    Rank,
    ShardDataset,
    collate,
    make_loader,
    open_dataset,
)
from shardkit.sampling.order import Order

ROWS = 23
"""A number that neither 2, 3 nor 4 divides, nor any product of them."""

SEED = 5

BATCH = 2

CROP = RandomResizedCrop(8)
"""Each sample depends on random numbers: so a tail is equal only if these are."""

METHODS = ("fork", pytest.param("forkserver", marks=pytest.mark.slow))
"""How worker processes start, for tests in which that hardly matters."""

ITERABLE: dict[str, Callable[..., IterableShardDataset]] = {
    "hdf5": IterableHDF5Dataset,
    "lmdb": IterableLMDBDataset,
    "webdataset": IterableTarDataset,
}
"""The iterable dataset of each format."""


class DataLoaderDispatcher:
    """Stands in for the class of accelerate that divides what a loader of rank 0 yields."""

    def __init__(self, loader: Iterable[Any]) -> None:
        """Wrap a loader."""
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        """Yield all batches: the others would get them from here."""
        yield from self._loader


Print = tuple[int, int]
"""CRC-32 of a sample's image, and its label."""

Prints = list[Print]
"""Those of a batch."""


def make_datasets(root: Path, rows: int = ROWS, first: int = 0) -> Path:
    """Make a dataset of ``rows`` images in each format, below ``root``; return ``root``."""
    files: dict[str, bytes | None] = {
        f"{'abc'[n % 3]}/{n:04d}.png": png(11 + n % 4, 10, first + n) for n in range(rows)
    }
    make_tree(root / "photos", files)
    for to in FORMATS:
        make_dataset(root / "photos", root / to, to=to)
    return root


def row_order(**options: Any) -> Order:
    """Return the order of `ROWS` rows, or of ``size``, as docs/order.md states it."""
    return Order(**{"size": ROWS, **options})


def crc(image: Any) -> int:
    """Return the CRC-32 of an image's values, in any memory layout."""
    return zlib.crc32(np.ascontiguousarray(np.asarray(image)).tobytes())


def prints(batch: Any) -> Prints:
    """Return a fingerprint of each sample of a batch."""
    images, labels = batch[0], batch[1]
    return [(crc(image), int(label)) for image, label in zip(images, labels, strict=True)]


def prints_of(batches: Iterable[Any]) -> list[Prints]:
    """Return the fingerprints of each batch."""
    return [prints(batch) for batch in batches]


def epoch_by_hand(
    dataset: ShardDataset, order: Order, epoch: int, batch_size: int, place: tuple[int, int]
) -> list[Prints]:
    """Return the batches of one rank in an epoch without a loader, as docs/order.md states them.

    Args:
        dataset: A dataset that no loader uses.
        order: Of its rows.
        epoch: The epoch.
        batch_size: Samples in a batch.
        place: Rank and world_size; what does not divide evenly is left out.
    """
    rank, world_size = place
    dataset.set_epoch(epoch, order.seed)
    rows = order.rows(epoch, np.arange(order.size))
    batches = []
    for start in range(0, order.size, world_size * batch_size):
        step = rows[start : start + world_size * batch_size]
        each = len(step) // world_size
        if each:
            batches.append(prints(collate(dataset[step[rank * each : (rank + 1) * each]])))
    return batches


def same(one: Any, other: Any) -> bool:
    """Return whether two batches are equal in types, structure and values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def close(batches: Iterator[Any]) -> None:
    """Abandon an iteration, as if its process ended."""
    batches.close()  # type: ignore[attr-defined]


class Topology(NamedTuple):
    """Options that may change when resuming."""

    kind: str
    engine: str
    num_workers: int
    world_size: int
    batch: int

    def ranks(self, path: Path, shuffle: bool | BlockShuffle, **this_rank: Any) -> list[Any]:
        """Return what each rank iterates over."""
        return [self._rank(path, shuffle, r, this_rank) for r in range(self.world_size)]

    def _rank(
        self, path: Path, shuffle: bool | BlockShuffle, rank: int, this_rank: dict[str, Any]
    ) -> Any:
        place = Rank(rank=rank, world_size=self.world_size, **this_rank)
        if self.kind == "alone":  # the iterable dataset itself, without any loader
            return ITERABLE[path.name](
                path, decode=CROP, shuffle=shuffle, seed=SEED, batch_size=self.batch, rank=place
            )
        dataset: Any = open_dataset(path, decode=CROP)
        if self.kind == "iterable":
            dataset = IterableShardDataset(dataset, shuffle=shuffle, seed=SEED)
        options: dict[str, Any] = {
            "rank": place,
            "engine": self.engine,
            "num_workers": self.num_workers,
            "with_rows": True,
            "start_method": "fork",
        }
        if self.kind == "iterable":
            return make_loader(dataset, self.batch, **options)
        return make_loader(dataset, self.batch, shuffle=shuffle, seed=SEED, **options)


class Samples:
    """Maps fingerprints to rows of an epoch."""

    def __init__(self, path: Path, shuffle: bool | BlockShuffle) -> None:
        self.order = Order(size=ROWS, shuffle=shuffle, seed=SEED)
        self._dataset = open_dataset(path, decode=CROP)

    def rows(self, epoch: int) -> list[int]:
        """Return the rows of an epoch in their order."""
        return [int(row) for row in self.order.rows(epoch, np.arange(ROWS))]

    def of(self, epoch: int) -> dict[Print, int]:
        """Return the row of each fingerprint; all samples of an epoch differ."""
        self._dataset.set_epoch(epoch, SEED)
        every = prints((*zip(*self._dataset[:], strict=True),))
        assert len(set(every)) == ROWS
        return {found: row for row, found in enumerate(every)}


def rows_in(batch: Any, known: Mapping[Print, int]) -> list[int]:
    """Return the rows of a batch after checking its labels."""
    if batch is None:
        return []
    found = [known[one] for one in prints(batch)]
    if len(batch) == 3:
        stated = batch[2].tolist()
        assert [row for row in stated if row >= 0] == found[: len(stated) - stated.count(-1)]
    return found


def step(iterators: list[Iterator[Any]], known: Mapping[Print, int]) -> list[int]:
    """Return the rows of all ranks in one step."""
    return [row for one in iterators for row in rows_in(next(one, None), known)]


def read_epoch(ranks: list[Any], known: Mapping[Print, int]) -> list[int]:
    """Return the rows of all ranks, step by step, to the end."""
    iterators = list(map(iter, ranks))
    return list(itertools.chain(*iter(lambda: step(iterators, known), [])))
