"""EpochBatchSampler: wrapped datasets, ranks, states; batches: `test_engine_conformance.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate.data_loader import prepare_data_loader
from helpers import DEADLINE
from loading import (
    BATCH,
    CROP,
    SEED,
    DataLoaderDispatcher,
    Prints,
    epoch_by_hand,
    prints_of,
    row_order,
)
from refusals import refused
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    Subset,
    default_collate,
)

from shardkit import (
    BlockShuffle,
    EpochBatchSampler,
    Mixture,
    Rank,
    ShardDataset,
    collate,
    make_loader,
    open_dataset,
)
from shardkit.errors import UsageError

SHUFFLES = [False, True, BlockShuffle(rows=2, buffer=6)]

EPOCHS = 3


def loader_of(
    dataset: Any, sampler: EpochBatchSampler, num_workers: int = 0, **options: Any
) -> DataLoader[Any]:
    if num_workers:
        options = {"multiprocessing_context": "fork", "timeout": DEADLINE, **options}
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        **{"collate_fn": collate, **options},
    )


def sampler_of(dataset: Any, **options: Any) -> EpochBatchSampler:
    return EpochBatchSampler(dataset, BATCH, **{"shuffle": True, "seed": SEED, **options})


def by_hand(path: Path, epoch: int, **options: Any) -> list[Prints]:
    order = row_order(**{"shuffle": True, "seed": SEED, **options})
    return epoch_by_hand(open_dataset(path, decode=CROP), order, epoch, BATCH, (0, 1))


def test_default_collate_gives_the_same(root: Path) -> None:
    dataset = open_dataset(root / "lmdb", decode=CROP)
    loader = loader_of(dataset, sampler_of(dataset), collate_fn=default_collate)
    assert prints_of(loader) == by_hand(root / "lmdb", 0)


@pytest.mark.slow  # accelerate takes half a second to import
@pytest.mark.parametrize("world_size", [1, 2])
def test_accelerate_sharding_is_refused(root: Path, world_size: int) -> None:
    dataset = open_dataset(root / "lmdb", decode=CROP)

    def prepared(rank: int) -> Any:
        sampler = sampler_of(
            dataset, rank=Rank(rank=rank if world_size > 1 else 0, world_size=world_size)
        )
        loader = loader_of(dataset, sampler)
        return prepare_data_loader(loader, num_processes=2, process_index=rank)

    if world_size > 1:
        with refused(UsageError, "rank 1 of 2", "Rank(rank=0, world_size=1)"):
            list(prepared(1))
        assert len(list(sampler_of(dataset, rank=Rank(rank=1, world_size=2)))) == 6
        return
    found = [one for rank in range(2) for batch in prints_of(prepared(rank)) for one in batch]
    assert set(found) == {one for batch in by_hand(root / "lmdb", 0) for one in batch}


@pytest.mark.parametrize("world_size", [1, 2])
def test_batches_of_a_rank_are_not_divided_again(root: Path, world_size: int) -> None:
    dataset = open_dataset(root / "lmdb", decode=CROP)
    sampler = sampler_of(dataset, rank=Rank(rank=0, world_size=world_size))
    loader = DataLoaderDispatcher(loader_of(dataset, sampler))
    if world_size == 1:
        assert prints_of(loader) == by_hand(root / "lmdb", 0)
        return
    with refused(UsageError, "rank 0 of 2", "DataLoaderDispatcher", "Rank(rank=0, world_size=1)"):
        list(loader)


def test_lightnings_sampler_in_place_of_the_dataset_is_refused(root: Path) -> None:
    dataset = open_dataset(root / "lmdb", decode=CROP)
    with refused(UsageError, "DistributedSampler", "use_distributed_sampler=False"):
        sampler_of(DistributedSampler(dataset, 2, 0))


def wrapped(root: Path, kind: str) -> tuple[Any, list[ShardDataset]]:
    """Return a combined dataset and its parts."""
    one, other = (open_dataset(root / to, decode=CROP) for to in ("lmdb", "hdf5"))
    if kind == "subset":
        return Subset(one, range(20, 3, -1)), [one]
    if kind == "concat":
        return ConcatDataset([one, other]), [one, other]
    return Subset(ConcatDataset([Subset(one, [5, 7, 1]), other]), range(1, 20)), [one, other]


@pytest.mark.parametrize(("kind", "num_workers"), [("subset", 0), ("concat", 0), ("nested", 1)])
def test_the_epoch_reaches_the_parts_of_a_dataset(root: Path, kind: str, num_workers: int) -> None:
    dataset, parts = wrapped(root, kind)
    sampler = sampler_of(dataset)
    loader = loader_of(dataset, sampler, num_workers, persistent_workers=num_workers > 0)
    options: dict[str, Any] = {"num_workers": 0}
    expected = make_loader(wrapped(root, kind)[0], BATCH, shuffle=True, seed=SEED, **options)
    for epoch in range(EPOCHS):
        assert prints_of(loader) == prints_of(expected)
        assert [part.epoch for part in parts] == [epoch] * len(parts)


def test_any_dataset_with_a_length_may_be_sampled() -> None:
    numbers: Any = list(range(10))
    sampler = EpochBatchSampler(numbers, 4, shuffle=True, seed=3)
    expected = row_order(size=10, shuffle=True, seed=3)
    for epoch in range(2):
        found = list(sampler)
        assert [len(rows) for rows in found] == [4, 4, 2]
        every = [row for rows in found for row in rows]
        assert every == expected.rows(epoch, np.arange(10)).tolist()
        assert {type(row) for row in every} == {int}


def test_a_last_smaller_batch_may_be_left_out() -> None:
    sampler = EpochBatchSampler(range(11), 4, rank=Rank(rank=0, world_size=1, drop_last=True))
    assert (len(sampler), sampler.batch_size, sampler.drop_last) == (2, 4, True)
    assert list(sampler) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert EpochBatchSampler(range(11), 4).drop_last is False


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_a_new_sampler_resumes_after_every_batch(shuffle: bool | BlockShuffle) -> None:
    def new() -> EpochBatchSampler:
        return EpochBatchSampler(range(11), 3, shuffle=shuffle, seed=2)

    whole = new()
    expected = [rows for _ in range(EPOCHS) for rows in whole]
    for stop in range(2 * len(whole)):
        first = new()
        before = [rows for _, rows in zip(range(stop % 4), _after(first, stop // 4), strict=False)]
        second = new()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        after = [rows for _ in range(2) for rows in second]
        assert before + after == expected[stop // 4 * 4 :][: len(before + after)]
        assert len(after) == 8 - stop % 4


def _after(sampler: EpochBatchSampler, epochs: int) -> Any:
    """Return the next iteration after some epochs."""
    for _ in range(epochs):
        assert len(list(sampler)) == len(sampler)
    return iter(sampler)


@pytest.mark.parametrize("dataset", ["ok", Path("ok"), None, 5])
def test_what_has_no_rows_is_refused(dataset: Any) -> None:
    with refused(UsageError, "open_dataset"):
        EpochBatchSampler(dataset, 4)
    with refused(UsageError):
        Mixture([(dataset, 1)])
