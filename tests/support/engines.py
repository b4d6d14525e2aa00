"""Whatever reads a dataset in batches, behind one interface; and the same batches by hand."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import DEADLINE, FORMATS, make_dataset, make_tree, png, wait_until
from loading import BATCH, ROWS, SEED, Print, Prints, prints
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from shardkit import (
    Balanced,
    BlockShuffle,
    EpochBatchSampler,
    IterableShardDataset,
    RandomCrop,
    Rank,
    Weighted,
    collate,
    make_loader,
    open_dataset,
)
from shardkit.sampling.epochs import Epochs
from shardkit.torch.data.order_options import OrderOptions
from shardkit.torch.data.read_context import NumberedRows, ReadContext

DECODE = RandomCrop(8, padding=2)
"""Each sample depends on random numbers, and every engine can draw them."""

LOADERS: dict[str, dict[str, Any]] = {
    "serial": {"engine": "thread", "num_workers": 0},
    "thread": {"engine": "thread", "num_workers": 2},
    "helper": {"engine": "helper", "num_workers": 2, "start_method": "fork"},
    "process": {"engine": "process", "num_workers": 2, "start_method": "fork"},
    "process without workers": {"engine": "process", "num_workers": 0},
    "resident": {"resident": "cpu"},
}
"""Loaders of `make_loader`."""

OTHERS = (
    "DataLoader",
    "StatefulDataLoader",
    "iterable",
    "iterable in make_loader",
    "iterable in DataLoader",
    "iterable in StatefulDataLoader",
)
"""An iterable dataset and loaders of others, over our order."""

ENGINES = (*LOADERS, *OTHERS)

WITH_WORKERS = ("thread", "helper", "process")
"""Loaders that read ahead."""

WITH_PROCESSES = ("helper", "process")

ANY_DATASET = tuple(name for name in LOADERS if name != "resident")
"""Loaders that read datasets of others."""

WEIGHTS = np.arange(ROWS) % 5

ORDERS: dict[str, dict[str, Any]] = {
    "stored": {"shuffle": False},
    "shuffled": {"shuffle": True},
    "blocks": {"shuffle": BlockShuffle(rows=3, buffer=9)},
    "weighted": {"sampler": Weighted(WEIGHTS)},
    "balanced": {"sampler": Balanced(), "samples_per_epoch": 17},
    "short": {"shuffle": True, "samples_per_epoch": 9},
    "long": {"shuffle": BlockShuffle(rows=3, buffer=9), "samples_per_epoch": 31},
    "repeated": {"shuffle": True, "aug_repeats": 3, "samples_per_epoch": ROWS},
    "views": {"shuffle": True, "views": 2},
    "all": {"sampler": Weighted(WEIGHTS), "samples_per_epoch": 14, "aug_repeats": 2, "views": 3},
    "pytorch": {"sampler": RandomSampler(range(ROWS)), "samples_per_epoch": 30},
}
PLAIN_ORDERS = ("stored", "shuffled", "blocks")
"""Those that iterable datasets have, too."""

PLACES = ((0, 1), (0, 2), (1, 2), (2, 3))
"""Rank and number of ranks."""


def orders_of(engine: str) -> tuple[str, ...]:
    """Return the orders in which an engine can read."""
    return PLAIN_ORDERS if engine.startswith("iterable") else tuple(ORDERS)


def make_even(root: Path) -> Path:
    """Make a dataset of 23 images of one size in each format, below ``root``; return ``root``."""
    files: dict[str, bytes | None] = {
        f"{'abc'[n % 3]}/{n:04d}.png": png(12, 10, n) for n in range(ROWS)
    }
    make_tree(root / "photos", files)
    for to in FORMATS:
        make_dataset(root / "photos", root / to, to=to)
    return root


def rank_of(place: tuple[int, int]) -> Rank:
    return Rank(rank=place[0], world_size=place[1])


class Other:
    """A loader of others, or an iterable dataset, with the interface of shardkit's loaders."""

    def __init__(self, make: Callable[[], tuple[Any, Any]]) -> None:
        self._make = make
        self.loader, self._epochs = make()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        self._epochs.set_epoch(epoch)

    def state_dict(self) -> Any:
        return self.loader.state_dict()

    def restart(self) -> None:
        """Continue with a new loader, as a new process would make it."""
        self.loader, self._epochs = self._make()

    def load_state_dict(self, state: Any) -> None:
        """Resume with a new loader: torchdata's takes a state only before its first epoch."""
        self.restart()
        self.loader.load_state_dict(pickle.loads(pickle.dumps(state)))

    def close(self) -> None:
        """End with the iterators, which have the workers."""


def open_loader(engine: str, dataset: Any, batch_size: int = BATCH, **options: Any) -> Any:
    """Return what reads ``dataset`` in batches, in an order of shardkit."""
    if engine in LOADERS or engine == "iterable in make_loader":
        given = {"timeout": DEADLINE / 2, **LOADERS.get(engine, LOADERS["thread"]), **options}
        if engine not in LOADERS:
            names = [name for name in ("shuffle", "seed", "rank") if name in given]
            dataset = IterableShardDataset(dataset, **{name: given.pop(name) for name in names})
        return make_loader(dataset, batch_size, **given)
    persistent = options.pop("persistent_workers", True)
    num_workers = 0 if engine == "iterable" else options.pop("num_workers", 2)
    workers: dict[str, Any] = {"num_workers": num_workers}
    if num_workers:
        workers |= {"multiprocessing_context": "fork", "timeout": DEADLINE / 2}
        workers |= {"persistent_workers": persistent}
    kind = StatefulDataLoader if "Stateful" in engine else DataLoader

    def make() -> tuple[Any, Any]:
        if engine.startswith("iterable"):
            rows = IterableShardDataset(dataset, batch_size=batch_size, **options)
            return (rows if engine == "iterable" else kind(rows, batch_size=None, **workers)), rows
        sampler = EpochBatchSampler(dataset, batch_size, **options)
        return kind(dataset, batch_sampler=sampler, collate_fn=collate, **workers), sampler

    return Other(make)


def flat(batch: Any) -> Prints:
    """Return the fingerprints of a batch, of one view after the other."""
    views = batch if isinstance(batch[0], (list, tuple)) else (batch,)
    return [each for view in views for each in prints(view)]


def take(batches: Iterator[Any], number: int | None = None) -> list[Prints]:
    """Return the fingerprints of the next batches, or of all."""
    return [flat(batch) for batch in itertools.islice(batches, number)]


def failure_of(loader: Any) -> tuple[list[Any], BaseException]:
    """Return the batches before the first error, and that error without its callers.

    What is left is read too: a ``DataLoader`` takes 5 s to end each worker that still has work.
    """
    batches, found = iter(loader), list[Any]()
    error: BaseException | None = None
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            break
        except (Exception, SystemExit) as raised:
            ended = raised.with_traceback(None)
            error = error or ended
        else:
            if error is None:
                found.append(batch)
    assert error is not None, f"{len(found)} batches, and no error"
    return found, error


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


class ByHand:
    """The batches of any order, as docs/order.md states them; each sample is read alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._samples: dict[tuple[str, int], list[tuple[int, list[Print]]]] = {}

    def samples(self, order: str, epoch: int) -> list[tuple[int, list[Print]]]:
        """Return row and fingerprints of each sample of an epoch; one for each view."""
        if (order, epoch) not in self._samples:
            self._samples[order, epoch] = self._read(order, epoch)
        return self._samples[order, epoch]

    def _read(self, name: str, epoch: int) -> list[tuple[int, list[Print]]]:
        options = dict(ORDERS[name])
        dataset = open_dataset(self.path, decode=DECODE)
        rows_of = {name: options.pop(name) for name in ("shuffle", "sampler") if name in options}
        order, epochs = OrderOptions(seed=SEED, **rows_of).order(dataset), Epochs(**options)
        rows = epochs.rows(order, epoch, np.arange(epochs.size(order))).tolist()
        found = []
        for position, row in enumerate(rows):
            numbers = [position * epochs.views + view for view in range(epochs.views)]
            repeats = [[number] if name not in PLAIN_ORDERS else None for number in numbers]
            contexts = [ReadContext(SEED, epoch, repeats=each) for each in repeats]
            read = [dataset.__getitems__(NumberedRows([row], each)) for each in contexts]
            found.append((row, [prints(collate(each))[0] for each in read]))
        return found

    def batches(
        self, order: str, epoch: int, place: tuple[int, int] = (0, 1), batch_size: int = BATCH
    ) -> list[Prints]:
        """Return the batches of one rank, of one view after the other."""
        rank, world_size = place
        samples = self.samples(order, epoch)
        strided = ORDERS[order].get("aug_repeats", 1) > 1
        batches = []
        for start in range(0, len(samples), world_size * batch_size):
            step = samples[start : start + world_size * batch_size]
            each = len(step) // world_size
            step = step[: each * world_size]
            own = step[rank::world_size] if strided else step[rank * each : (rank + 1) * each]
            if own:
                views = zip(*(shown for _, shown in own), strict=True)
                batches.append(list(itertools.chain(*views)))
        return batches


class Numbers(Dataset[int]):
    """A dataset of others, with only the methods that a DataLoader needs."""

    def __init__(self, rows: int = ROWS, hook: Callable[[int], object] = bool) -> None:
        self._rows, self._hook = rows, hook

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> int:
        if not 0 <= row < self._rows:
            raise IndexError(row)
        self._hook(row)
        return row * row


def squares(rows: int = ROWS, batch_size: int = BATCH) -> list[list[int]]:
    """Return the batches of `Numbers` in stored order."""
    return [
        [row * row for row in range(start, min(rows, start + batch_size))]
        for start in range(0, rows, batch_size)
    ]


def shared(count: int = 1) -> torch.Tensor:
    """Return zeros that this process and its forks share."""
    zeros = torch.zeros(count, dtype=torch.int64)
    zeros.share_memory_()  # type: ignore[no-untyped-call]
    return zeros


class Crew:
    """The threads and processes that read, and were started since this was created."""

    def __init__(self) -> None:
        self._before = {*threading.enumerate(), *multiprocessing.active_children()}

    def at_work(self) -> list[Any]:
        threads = [each for each in threading.enumerate() if each.name == "shardkit-decode"]
        return [
            each
            for each in (*threads, *multiprocessing.active_children())
            if each not in self._before
        ]

    def ends(self) -> None:
        """Wait until they have ended."""
        wait_until(lambda: not self.at_work(), "the end of all workers")


def opened(engine: str, dataset: Any, **options: Any) -> closing[Any]:
    """Return `open_loader`, closed at the end of a ``with`` block."""
    return closing(open_loader(engine, dataset, **options))
