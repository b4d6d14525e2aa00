"""Samplers, epochs of any length, repeats and views: ranks, batch sizes, mixtures and states.

That each engine reads them in order and resumes is a law of `engine/test_engine_conformance.py`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import DECODE, ORDERS, PLAIN_ORDERS, WEIGHTS, ByHand, make_even, open_loader
from loading import BATCH, ROWS, SEED, make_datasets, prints, prints_of
from torch.utils.data import DataLoader, Subset, default_collate

from shardkit import (
    Balanced,
    EpochBatchSampler,
    Mixture,
    Rank,
    Weighted,
    collate,
    make_loader,
    open_dataset,
)
from shardkit.errors import StateMismatch

CASES = [name for name in ORDERS if name not in PLAIN_ORDERS]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_even(tmp_path_factory.mktemp("sampling"))


@pytest.fixture(scope="module")
def by_hand(root: Path) -> ByHand:
    return ByHand(root / "hdf5")


def loader_of(root: Path, order: str, batch_size: int = BATCH, **options: Any) -> Any:
    """Return a loader with rows that reads in this process."""
    dataset = open_dataset(root / "lmdb", decode=DECODE)
    given = {"with_rows": True, **ORDERS[order], **options}
    return open_loader("serial", dataset, batch_size, seed=SEED, **given)


@pytest.mark.parametrize("case", CASES)
def test_other_ranks_and_batch_sizes_read_exactly_the_rest(
    root: Path, by_hand: ByHand, case: str
) -> None:
    def run(world_size: int, batch: int, state: Any, steps: int | None) -> tuple[list[Any], Any]:
        found, states = [], []
        for rank in range(world_size):
            shard = Rank(rank=rank, world_size=world_size, remainder="exact")
            loader = loader_of(root, case, batch, rank=shard)
            loader.set_epoch(1) if state is None else loader.load_state_dict(state)
            for each in itertools.islice(loader, steps):
                views = each if ORDERS[case].get("views", 1) > 1 else (each,)
                shown = map(list, zip(*map(prints, views), strict=True))
                found += list(zip(views[0][2].tolist(), shown, strict=True))
            states.append(loader.state_dict())
        assert states == states[:1] * world_size or steps is None
        return found, states[0]

    everything = Counter(map(str, by_hand.samples(case, 1)))
    for before, after in (((2, 3), (3, 2)), ((3, 1), (1, 4)), ((1, 2), (2, 1))):
        read, state = run(*before, None, 1)
        rest, _ = run(*after, state, None)
        assert Counter(map(str, read + rest)) == everything, (case, before, after)


def test_copies_of_a_sample_are_on_different_ranks(root: Path) -> None:
    found = []
    for rank in range(3):
        shard = Rank(rank=rank, world_size=3)
        loader = loader_of(root, "repeated", rank=shard)
        found.append([(rows.tolist(), prints(batch)) for *batch, rows in loader])
    for step in zip(*found, strict=True):
        rows, samples = zip(*step, strict=True)
        if len(rows[0]) == BATCH:
            assert rows[0] == rows[1] == rows[2]
            assert len(set(rows[0])) == BATCH
            assert len(set(itertools.chain(*samples))) == 3 * BATCH  # cropped differently


def test_views_are_batches_of_the_same_rows_and_reuse_memory(root: Path) -> None:
    loader = loader_of(root, "views", num_workers=1)
    pointers, batches = set(), 0
    for one, other in itertools.chain(loader, loader):
        batches += 2
        assert one[2].tolist() == other[2].tolist()
        assert one[1].tolist() == other[1].tolist()
        assert not one[0].equal(other[0])
        pointers |= {one[0].data_ptr(), other[0].data_ptr()}
    assert len(pointers) < batches / 2


def test_a_subset_and_default_collate_work(root: Path) -> None:
    dataset = open_dataset(root / "lmdb", decode=DECODE)
    subset: Any = Subset(dataset, range(5, 20))
    assert set(subset.dataset.targets[5:20].tolist()) == {0, 1, 2}
    loader = make_loader(subset, 3, sampler=Balanced(), samples_per_epoch=30)
    for _, labels in loader:
        assert sorted(labels.tolist()) == [0, 1, 2]
    sampler = EpochBatchSampler(subset, 4, views=2)
    images, labels = next(
        iter(DataLoader(subset, batch_sampler=sampler, collate_fn=default_collate))
    )
    assert labels[:4].tolist() == labels[4:].tolist()
    assert not images[:4].equal(images[4:])
    endless: Any = DataLoader(
        subset,
        batch_sampler=EpochBatchSampler(subset, 4, endless=True),
        num_workers=1,
        multiprocessing_context="fork",
        collate_fn=collate,
    )
    expected = make_loader(subset, 4, endless=True)
    assert prints_of(itertools.islice(endless, 9)) == prints_of(itertools.islice(expected, 9))


def test_a_mixture_has_exact_shares(root: Path, tmp_path: Path) -> None:
    one = open_dataset(root / "lmdb", decode=DECODE)
    other = open_dataset(make_datasets(tmp_path, 7, 100) / "hdf5", decode=DECODE)
    without: Any = Subset(other, [])

    def rows_of(mixture: Mixture) -> list[int]:
        order = mixture.order(mixture.dataset, SEED)
        found: list[int] = order.rows(0, np.arange(10_000)).tolist()
        return found

    rows = rows_of(Mixture({one: 3, other: 1}))
    counts = np.bincount(rows, minlength=ROWS + 7)
    assert counts[:ROWS].sum() == 7500
    assert counts[:ROWS].max() - counts[:ROWS].min() == 1
    assert counts[ROWS:].max() - counts[ROWS:].min() == 1
    assert rows_of(Mixture([(one, 0.75), (other, 0.25), (without, 0)])) == rows
    assert set(rows_of(Mixture({one: 3, other: 0, without: 0}))) == set(range(ROWS))


def test_a_mixture_resumes_with_other_ranks(root: Path, tmp_path: Path) -> None:
    one = open_dataset(root / "lmdb", decode=DECODE)
    other = open_dataset(make_datasets(tmp_path, 7, 100) / "hdf5", decode=DECODE)
    mixture = Mixture({one: 2, other: 1})

    def loader_of_rank(rank: int, world_size: int, batch: int) -> Any:
        shard = Rank(rank=rank, world_size=world_size, remainder="exact")
        options: dict[str, Any] = {"num_workers": 2, "engine": "thread", "rank": shard}
        given: dict[str, Any] = {"sampler": mixture, "samples_per_epoch": 50, **options}
        return make_loader(mixture.dataset, batch, **given)

    everything = list(itertools.chain(*prints_of(loader_of_rank(0, 1, 50))))
    assert len(set(everything)) == 50  # although rows repeat
    ranks = [loader_of_rank(rank, 2, 3) for rank in range(2)]
    steps = zip(*ranks, strict=True)
    read = [prints(batch) for step in itertools.islice(steps, 4) for batch in step]
    alone = loader_of_rank(0, 1, 7)
    alone.load_state_dict(ranks[0].state_dict())
    assert list(itertools.chain(*read, *prints_of(alone))) == everything


def test_a_changed_sampler_is_refused_by_name(root: Path) -> None:
    loaders = {case: loader_of(root, case) for case in CASES}
    loaders["plain"] = loader_of(root, "shuffled")
    dataset = open_dataset(root / "lmdb", decode=DECODE)
    options: dict[str, Any] = {"sampler": Weighted(WEIGHTS + 1), "num_workers": 0, "seed": SEED}
    loaders["other weights"] = make_loader(dataset, BATCH, **options)
    states = {name: loader.state_dict() for name, loader in loaders.items()}
    for name, other in itertools.permutations(loaders, 2):
        with pytest.raises(StateMismatch, match="order"):
            loaders[name].load_state_dict(states[other])
        assert loaders[name].state_dict() == states[name], other
    names = {name: state["order"] for name, state in states.items()}
    assert names["plain"] == "shuffle=True"
    assert names["repeated"] == "shuffle=True, samples_per_epoch=23, aug_repeats=3"
    assert names["pytorch"] == (
        "RandomSampler(replacement=False, num_samples=23, of=23), samples_per_epoch=30"
    )
    assert names["weighted"].startswith("Weighted(23 rows, digest ")
    assert names["balanced"].startswith("Balanced(3 groups, digest ")
    assert max(map(len, names.values())) < 100
