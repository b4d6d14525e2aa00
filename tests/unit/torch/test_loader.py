"""The loader: arguments, iterable datasets, the choice of an engine.

What all engines do alike is in `engine/test_engine_conformance.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import Numbers
from helpers import make_dataset, make_tree, png
from loading import row_order
from refusals import refused
from torch.utils.data import ChainDataset, DataLoader, IterableDataset, Subset

from shardkit import (
    BlockShuffle,
    IterableLMDBDataset,
    Rank,
    ShardDataset,
    collate,
    make_loader,
    open_dataset,
)
from shardkit.errors import UsageError

ROWS = 23
BATCH = 4


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An LMDB dataset of 23 images of 12 x 8 pixels and two classes."""
    root = tmp_path_factory.mktemp("loader")
    files: dict[str, bytes | None] = {
        f"{'ab'[n % 2]}/{n:02d}.png": png(12, 8, n) for n in range(ROWS)
    }
    return make_dataset(make_tree(root / "photos", files), root / "made")


@pytest.fixture
def dataset(root: Path) -> ShardDataset:
    return open_dataset(root, decode="torch")


def load(dataset: Any, **options: Any) -> Any:
    """Return a loader that reads in two threads, unless ``options`` say otherwise."""
    given: dict[str, Any] = {"batch_size": BATCH, "engine": "thread", "num_workers": 2, **options}
    return make_loader(dataset, **given)


def rows_of(loader: Any) -> list[int]:
    """Return the rows of the batches of a loader with ``with_rows``."""
    return [row for batch in loader for row in batch[-1].tolist()]


def order_of(epoch: int, shuffle: bool | BlockShuffle = True, seed: int = 0) -> list[int]:
    rows = row_order(shuffle=shuffle, seed=seed).rows(epoch, np.arange(ROWS))
    return [int(row) for row in rows]


@pytest.mark.parametrize("engine", ["thread", "helper", "process"])
def test_it_has_the_attributes_of_a_plain_loader(dataset: ShardDataset, engine: str) -> None:
    for drop_last in (False, True):
        plain = DataLoader(dataset, BATCH, drop_last=drop_last, collate_fn=collate)
        options: dict[str, Any] = {"num_workers": 0, "rank": Rank(drop_last=drop_last)}
        loader = load(dataset, engine=engine, **options)
        for name in ("dataset", "batch_size", "num_workers", "drop_last", "collate_fn"):
            assert getattr(loader, name) == getattr(plain, name), name
        assert loader.pin_memory is torch.cuda.is_available()
        assert len(loader) == len(plain) == len(list(loader))


def test_an_invalid_epoch_is_refused() -> None:
    loader = load(Numbers())
    for epoch in (-1, 1.0, "1", None, True):
        with refused(UsageError, "epoch", repr(epoch)):
            loader.set_epoch(epoch)
    assert loader.epoch == 0


def test_the_options_of_an_iterable_dataset_are_used(root: Path) -> None:
    shuffle = BlockShuffle(rows=2, buffer=6)
    this_rank = Rank(rank=1, world_size=2, drop_last=True)
    iterable = IterableLMDBDataset(root, decode="torch", shuffle=shuffle, seed=3, rank=this_rank)
    loader = load(iterable, with_rows=True)
    expected = np.reshape(order_of(0, shuffle, seed=3)[:16], (2, 2, BATCH))[:, 1].ravel().tolist()
    assert rows_of(loader) == expected
    assert loader.drop_last
    assert loader.dataset is iterable.dataset


def test_the_loaders_arguments_override_the_iterable_datasets(root: Path) -> None:
    this_rank = Rank(rank=1, world_size=2)
    iterable = IterableLMDBDataset(root, decode="torch", shuffle=True, seed=3, rank=this_rank)
    asked = Rank(rank=0, world_size=1)
    loader = load(iterable, with_rows=True, shuffle=False, seed=0, rank=asked)
    assert rows_of(loader) == list(range(ROWS))
    assert rows_of(load(iterable, with_rows=True, shuffle=True, seed=0, rank=asked)) == order_of(0)


class Foreign(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class Sized(Foreign):
    def __len__(self) -> int:
        return 5


def test_a_dataset_without_rows_is_refused_with_a_remedy(root: Path) -> None:
    chain: Any = ChainDataset([Sized(), Sized()])
    wrong: Any
    for wrong in (Foreign(), Sized(), chain, iter([1, 2]), {1, 2}, None, 5, str(root), root):
        facts = ("length and rows", type(wrong).__name__, "torch.utils.data.DataLoader")
        with refused(UsageError, *facts):
            make_loader(wrong, 2)


def test_wrong_arguments_are_refused() -> None:
    wrong: dict[str, tuple[Any, ...]] = {
        "batch_size": (0, -1, 2.0, True, None),
        "shuffle": (1, 0, "blocks"),
        "seed": (1.5, 0.0, "1", False),
    }
    for name, values in wrong.items():
        for value in values:
            with refused(UsageError, f"{name}=", "" if value is None else repr(value)):
                make_loader(Numbers(), **{"batch_size": 2, name: value})


def test_the_repr_describes_the_loader() -> None:
    loader = load(Numbers(), num_workers=3, rank=Rank(rank=1, world_size=2))
    assert repr(loader) == (
        "Loader of 3 batches of 4, rank 1 of 2, 3 workers, engine thread: requested"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be pinned here")
@pytest.mark.parametrize("engine", ["thread", "helper", "process"])
def test_pinning_without_a_device_warns_and_continues(dataset: ShardDataset, engine: str) -> None:
    options: dict[str, Any] = {"pin_memory": True, "engine": engine, "num_workers": 0}
    with pytest.warns(RuntimeWarning, match="pin_memory=True") as caught:
        loader = make_loader(dataset, BATCH, **options)

    assert caught[0].filename == __file__
    assert not loader.pin_memory
    assert len(list(loader)) == len(loader)


def test_a_loader_without_a_batch_is_refused(dataset: Any) -> None:
    """An epoch without batches would train nothing and say nothing."""
    short = Subset(dataset, range(5))
    with refused(UsageError, "drop_last=True", "5 samples", "64"):
        make_loader(short, 64, drop_last=True)
    with refused(UsageError, "2 ranks"):
        make_loader(short, 3, rank=Rank(rank=0, world_size=2, drop_last=True))
    assert len(make_loader(short, 5, drop_last=True, num_workers=0)) == 1
    assert len(make_loader(Subset(dataset, []), 64, drop_last=True, num_workers=0)) == 0
