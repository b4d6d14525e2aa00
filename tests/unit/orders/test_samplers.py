"""Samplers fit their dataset, or say why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_dataset, make_tree, png
from loading import make_datasets
from refusals import refused
from torch.utils.data import ConcatDataset, Subset

from shardkit import Balanced, Mixture, UsageError, Weighted, make_loader, open_dataset

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
    for given, facts in wrong:
        with refused(UsageError, *facts):
            Mixture(given)
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
