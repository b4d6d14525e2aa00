"""Orders by weight are frozen and statistically right; samplers fit their dataset."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_dataset, make_tree, png
from hypothesis import given
from hypothesis import strategies as st
from loading import make_datasets
from refusals import refused
from torch.utils.data import ConcatDataset, Subset

from shardkit import Balanced, Mixture, Weighted, make_loader, open_dataset
from shardkit.errors import UsageError
from shardkit.orders.weighted import (
    BLOCK,
    GroupedOrder,
    WeightedOrder,
    block_counts,
    check_weights,
)
from shardkit.sampling.order import Order, Positions, permute_each


def weighted(weights: Any, seed: int = 0) -> WeightedOrder:
    cumulative = np.cumsum(check_weights("weights", weights))
    return WeightedOrder(size=len(weights), seed=seed, cumulative=cumulative)


def grouped(sizes: list[int], counts: list[int], seed: int = 0) -> GroupedOrder:
    """Return an order of groups of neighboring rows, stored backward."""
    return GroupedOrder(
        size=sum(sizes),
        seed=seed,
        kind="Test",
        counts=np.array(counts),
        sizes=np.array(sizes),
        members=np.arange(sum(sizes))[::-1].copy(),
    )


def groups_of(order: GroupedOrder, rows: Positions) -> Positions:
    ends = np.cumsum(order.sizes)
    return np.searchsorted(ends, order.size - 1 - rows, side="right")


def test_the_rows_are_frozen() -> None:
    positions = np.array([0, 1, 2, 3, 4, 10**6, 10**12])
    assert weighted([1, 0, 2, 0.5, 0], 3).rows(2, positions).tolist() == [2, 2, 0, 2, 3, 0, 0]
    found = grouped([3, 5, 1], [2, 1, 1], 3).rows(2, positions).tolist()
    assert found == [0, 3, 8, 0, 7, 6, 8]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=9),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 10**6),
    st.data(),
)
def test_any_positions_give_the_rows_of_the_whole_epoch(
    groups: list[tuple[int, int]], seed: int, epoch: int, data: st.DataObject
) -> None:
    sizes, counts = map(list, zip(*groups, strict=True))
    chosen = data.draw(st.lists(st.integers(0, 299), max_size=20))
    weights = np.array(sizes) - min(sizes)
    orders: list[Order] = [grouped(sizes, counts, seed)]
    orders += [weighted(weights, seed)] if weights.any() else []
    for order in orders:
        whole = order.rows(epoch, np.arange(300))
        picked = order.rows(epoch, np.array(chosen, np.int64))
        assert picked.dtype == np.int64
        assert picked.tolist() == whole[chosen].tolist()
        assert 0 <= whole.min() <= whole.max() < order.size


def test_rows_come_in_proportion_to_their_weights_and_never_with_the_weight_0() -> None:
    weights = np.array([0, 1, 5, 0, 0, 2.5, 0.5, 0])
    counts = np.bincount(weighted(weights).rows(0, np.arange(90_000)), minlength=8)
    expected = 90_000 * weights / weights.sum()
    assert not counts[weights == 0].any()
    used = weights > 0
    deviations = (counts - expected)[used] / np.sqrt(expected[used])
    assert 0 < np.abs(deviations).max() < 4
    first = weighted(weights).rows(1, np.arange(1000))
    assert (first != weighted(weights, 1).rows(1, np.arange(1000))).any()
    assert (first != weighted(weights).rows(2, np.arange(1000))).any()


def test_extreme_weights_stay_in_range() -> None:
    for weights in ([1e-300, 1e300], [0, 1e-280, 0], [1.0] * 1000 + [0] * 1000):
        rows = weighted(weights).rows(0, np.arange(5000))
        assert np.array(weights)[rows].min() > 0


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 4)), min_size=1, max_size=6),
    st.integers(0, 1000),
)
def test_each_block_has_the_exact_share_of_each_group(
    groups: list[tuple[int, int]], seed: int
) -> None:
    sizes, counts = map(list, zip(*groups, strict=True))
    order = grouped(sizes, counts, seed)
    block, blocks = sum(counts), 60
    rows = order.rows(0, np.arange(block * blocks))
    for each in groups_of(order, rows).reshape(blocks, block):
        assert np.bincount(each, minlength=len(sizes)).tolist() == counts
    for group, (size, count) in enumerate(groups):
        own = rows[groups_of(order, rows) == group]
        times = np.bincount(own)[np.unique(own)]
        assert len(own) == blocks * count
        if len(own) >= size:  # without replacement: each row before any comes again
            assert len(np.unique(own)) == size
            assert times.max() - times.min() <= 1


def test_the_order_of_groups_and_of_their_rows_is_random() -> None:
    order = grouped([2, 2, 2], [1, 1, 1])
    rows = order.rows(0, np.arange(3 * 6000)).reshape(-1, 3)
    blocks = Counter(map(tuple, groups_of(order, rows).tolist()))
    assert set(blocks) == set(itertools.permutations(range(3)))
    assert 890 < min(blocks.values()) < max(blocks.values()) < 1110  # 1000 of each, +- 3.8 sigma
    firsts = Counter(grouped([2, 2, 2], [1, 1, 1], s).rows(0, np.arange(1))[0] for s in range(600))
    assert len(firsts) == 6
    assert 65 < min(firsts.values()) < max(firsts.values()) < 135  # 100 of each


def test_groups_continue_in_the_next_epoch_and_late_epochs_do_not_overflow() -> None:
    order = grouped([4, 3], [2, 1], 1)
    epochs = [order.rows(epoch, np.arange(7)) for epoch in range(9)]
    assert np.concatenate(epochs).tolist() == order.rows(0, np.arange(63)).tolist()
    late = order.rows(2**62, np.array([0, 2**40]))
    assert 0 <= late.min() <= late.max() < 7


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
def test_many_small_permutations_are_permutations_and_even(size: int) -> None:
    many = 24_000
    keys = np.repeat(np.random.default_rng(size).integers(0, 2**64, many, np.uint64), size)
    positions = np.tile(np.arange(size), many)
    found = permute_each(np.full_like(positions, size), keys, positions).reshape(many, size)
    assert np.array_equal(np.sort(found, axis=1), np.tile(np.arange(size), (many, 1)))
    for place in range(size):
        counts = np.bincount(found[:, place], minlength=size)
        assert np.abs(counts - many / size).max() < 4.5 * np.sqrt(many / size)
    if size == 4:
        orders = Counter(map(tuple, found.tolist()))
        assert len(orders) == 24
        assert 860 < min(orders.values()) < max(orders.values()) < 1140


def test_shares_are_rounded_by_the_largest_remainders() -> None:
    def counts(*weights: float) -> list[int]:
        return list(block_counts(np.array(weights, np.float64)).tolist())

    assert counts(3, 1) == [7500, 2500]
    assert counts(0.7, 0.2, 0.1) == [7000, 2000, 1000]
    assert counts(1, 1, 1) == [3334, 3333, 3333]
    assert counts(1, 0, 1e-9) == [BLOCK, 0, 0]


WRONG: dict[str, tuple[Any, str]] = {
    "negative": ([1, -0.5], "number 1 is -0.5"),
    "nan": ([float("nan"), 1], "number 0 is nan"),
    "infinite": ([1, float("inf")], "number 1 is inf"),
    "all zero": ([0, 0], "sum above 0"),
    "tiny": ([0, 5e-324, 0], "sum above 0"),
    "overflow": ([1e308, 1e308], "finite sum"),
    "empty": ([], "a list of numbers"),
    "nested": ([[1, 2]], r"shape \(1, 2\)"),
    "text": (["many"], "must be numbers"),
    "none": (None, "finite|list of numbers"),
}


def test_wrong_weights_are_refused() -> None:
    for weights, message in WRONG.values():
        with pytest.raises(UsageError, match=message):
            check_weights("weights", weights)


# Samplers fit their dataset, or say why not.

Given = tuple[Any, dict[str, Any]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 9 images in the classes a, b and c."""
    return make_datasets(tmp_path_factory.mktemp("samplers"), 9) / "lmdb"


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of one image in each of the classes a, b, d and e."""
    root = tmp_path_factory.mktemp("others")
    make_tree(root / "photos", {f"{name}/1.png": png(8, 8, 0) for name in "abde"})
    return make_dataset(root / "photos", root / "lmdb")


class Labeled:
    """Three samples with given targets."""

    def __init__(self, targets: Any) -> None:
        self.targets = targets

    def __len__(self) -> int:
        return 3

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(1), row


def refuses(dataset: Any, *facts: object, **options: Any) -> None:
    with refused(UsageError, *facts):
        make_loader(dataset, 2, num_workers=0, **options)


def test_weights_must_be_one_for_each_row(path: Path) -> None:
    dataset = open_dataset(path)
    refuses(dataset, "8 weights", "9 rows", sampler=Weighted([1] * 8))
    refuses(dataset, "shuffle=", "sampler=", sampler=Weighted([1] * 9), shuffle=True)
    refuses(dataset, "Weighted(...)", sampler=Weighted)
    refuses(Subset(dataset, []), "0 rows", sampler=Weighted([1]))
    for weights in (torch.ones(9), np.ones(9, np.float32), (1,) * 9):
        assert len(make_loader(dataset, 2, sampler=Weighted(weights))) == 5


def test_balance_needs_labels_that_mean_the_same(path: Path, others: Path) -> None:
    one, other = open_dataset(path), open_dataset(others)
    both: Any = ConcatDataset([one, other])
    refuses(both, "3 (a, b, c)", "4 (a, b, d, ...)", sampler=Balanced())
    mapped: Any = ConcatDataset([one, open_dataset(others, target_transform=abs)])
    assert len(make_loader(mapped, 2, sampler=Balanced())) == 7
    for targets in (None, [0, 1], [0.5, 1, 2], [[0], [1], [2]]):
        refuses(Labeled(targets), "Labeled", "targets", sampler=Balanced())
    refuses(Labeled([0, -1, 1]), "row 1", "-1", sampler=Balanced())
    loader = make_loader(Labeled([5, 5, 0]), 2, sampler=Balanced(), samples_per_epoch=8)
    assert [2 in batch[1].tolist() for batch in loader] == [True] * 4


def test_a_mixture_is_read_from_its_own_datasets(path: Path, others: Path) -> None:
    one, same, other = open_dataset(path), open_dataset(path), open_dataset(others)
    mixture = Mixture({one: 1, same: 2})
    both: Any = ConcatDataset([same, one])
    assert len(make_loader(both, 2, sampler=mixture)) == 9
    refuses(one, "mixture.dataset", sampler=mixture)
    refuses(ConcatDataset([one, other]), "mixture.dataset", sampler=mixture)
    different = Mixture({one: 1, other: 1})
    refuses(different.dataset, "3 (a, b, c)", sampler=different)
    alone = Mixture({one: 1})
    assert len(make_loader(one, 2, sampler=alone)) == 5


def test_wrong_mixtures_are_refused(path: Path, others: Path) -> None:
    one, other = open_dataset(path), open_dataset(others)
    wrong: list[tuple[Any, tuple[str, ...]]] = [
        ({one: 1, other: -1}, ("number 1", "-1")),
        ({one: 0, other: 0}, ("above 0",)),
        ({one: 1, other: 1e-5}, ("10000",)),
        ([(one, 1), (one, 2)], ("twice",)),
        ([range(3), range(3)], ("{dataset: weight, ...}",)),
        (None, ("{dataset: weight, ...}",)),
        ({}, ()),
        ({Path("a"): 1}, ("Path", "open_dataset")),
        ([(Subset(one, []), 1), (other, 1)], ("dataset 0",)),
    ]
    for parts, facts in wrong:
        with refused(UsageError, *facts):
            Mixture(parts)
    # Their texts have paths, and are cut off: where depends on the length of these.
    datasets: Any = [one, other]
    with pytest.raises(UsageError, match=r"\{dataset: weight, \.\.\.\}"):
        Mixture(datasets)


def test_wrong_epochs_are_refused(path: Path) -> None:
    wrong = {"samples_per_epoch": 0, "views": 0, "aug_repeats": 1.5, "endless": 1}
    for name, value in wrong.items():
        refuses(open_dataset(path), f"{name}={value!r}", **{name: value})
    short: dict[str, Any] = {"endless": True, "drop_last": True, "samples_per_epoch": 1}
    refuses(open_dataset(path), "1 sample", "drop_last=False", **short)
