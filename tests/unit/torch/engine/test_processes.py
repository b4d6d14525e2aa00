"""Datasets in several processes and threads: reads at once, forks of forks, what workers get."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import FORMATS, in_fork, make_dataset, make_tree, png
from loading import prints_of
from torch.utils.data import DataLoader

from shardkit import collate, convert, open_dataset
from shardkit.errors import CorruptShard

ROWS = 10


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of ten images of one size in three shards, in each format."""
    root = tmp_path_factory.mktemp("processes")
    files: dict[str, bytes | None] = {f"{'ab'[n % 2]}/{n}.png": png(12, 8, n) for n in range(ROWS)}
    make_tree(root / "photos", files)
    for to in FORMATS:
        make_dataset(root / "photos", root / to, to=to)
    return root


def loader_of(dataset: Any, **options: Any) -> DataLoader[Any]:
    given: dict[str, Any] = {"batch_size": 3, "collate_fn": collate, "num_workers": 1, **options}
    return DataLoader(dataset, multiprocessing_context="fork", **given)


def first_error(dataset: Any, **options: Any) -> Exception:
    """Return the first error that a loader raises; the rest is read too, or its end takes long."""
    found: list[Exception] = []
    remaining = iter(loader_of(dataset, **options))
    while True:
        try:
            next(remaining)
        except StopIteration:
            break
        except Exception as error:
            found.append(error)
    return found[0]


@pytest.mark.parametrize("to", FORMATS)
def test_a_worker_reads_while_its_parent_reads_too(root: Path, to: str) -> None:
    dataset = open_dataset(root / to, decode="torch")
    expected = prints_of(DataLoader(dataset, 3, collate_fn=collate))
    found = []
    for batch in loader_of(dataset):
        found += prints_of([batch])
        assert len(dataset[:]) == ROWS
    assert found == expected


@pytest.mark.parametrize("to", FORMATS)
def test_threads_read_at_once(root: Path, to: str) -> None:
    dataset = open_dataset(root / to, decode="numpy")
    expected = [image.tobytes() for image, _ in open_dataset(root / to, decode="numpy")[:]]
    start = threading.Barrier(4)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        chance = np.random.default_rng(seed)
        start.wait()
        for _ in range(60):
            rows = chance.integers(0, ROWS, 5)
            found = [image.tobytes() for image, _ in dataset[rows]]
            wrong.extend(row for row, got in zip(rows, found, strict=True) if got != expected[row])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert wrong == []


@pytest.mark.parametrize("to", FORMATS)
def test_one_process_may_open_a_dataset_twice_and_its_forks_read_it(root: Path, to: str) -> None:
    one, two = (open_dataset(root / to, decode="bytes") for _ in range(2))
    expected = list(one[:])
    assert list(two[:]) == expected
    del one

    def read_in_fork(depth: int) -> bool:
        fine = list(two[:]) == expected
        if depth:
            assert in_fork(lambda: read_in_fork(depth - 1)) == 0
        return fine

    assert read_in_fork(2)
    assert list(two[:]) == expected


def test_a_missing_shard_found_by_a_worker_keeps_its_type(root: Path, tmp_path: Path) -> None:
    place = make_dataset(root / "photos", tmp_path / "made", to="webdataset")
    dataset = open_dataset(place, decode="torch")
    (place / "shard-000000.tar").unlink()
    error = first_error(dataset)
    assert type(error) is CorruptShard
    assert "shard-000000.tar" in str(error)


def test_the_data_sent_to_a_worker_does_not_grow_with_the_dataset(tmp_path: Path) -> None:
    sizes = []
    for count in (4, 400):
        place = tmp_path / f"{count:03d}"
        files: dict[str, bytes | None] = {f"a/{n:04d}.png": png(2, 2) for n in range(count)}
        convert(make_tree(place / "photos", files), place / "made", to="webdataset", workers=1)
        dataset = open_dataset(place / "made", decode="bytes")
        assert len(dataset[:]) == count
        sizes.append(len(pickle.dumps(dataset)) - len(str(place)))
    assert abs(sizes[0] - sizes[1]) < 10  # PyTorch writes the address of a tensor, in decimal
    assert sizes[0] < 1500
