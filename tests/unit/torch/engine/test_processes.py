"""The same samples in every process, with any start method, after any reads."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import FORMATS, make_tree, png
from loading import METHODS
from pairwise import pairwise
from torch.utils.data import DataLoader, Dataset, StackDataset

from shardkit import ShardDataset, collate, open_dataset
from shardkit.conversion.convert import convert_scan
from shardkit.conversion.plan import ConvertOptions
from shardkit.errors import CorruptRecord, CorruptShard
from shardkit.sources.imagefolder import scan_imagefolder

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

ROWS = 10


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of ten images of one size in three shards, in each format."""
    root = tmp_path_factory.mktemp("processes")
    files: dict[str, bytes | None] = {f"{'ab'[n % 2]}/{n}.png": png(12, 8, n) for n in range(ROWS)}
    make_tree(root / "photos", files)
    for to in FORMATS:
        make(root, root / to, to)
    return root


def make(root: Path, target: Path, to: str) -> Path:
    options = ConvertOptions(to=to, shard_samples=4)
    convert_scan(scan_imagefolder(root / "photos"), target, options)
    return target


def batches(dataset: Any, *, num_workers: int, method: str | None = None) -> list[Any]:
    loader = DataLoader(
        dataset,
        batch_size=3,
        num_workers=num_workers,
        collate_fn=collate if isinstance(dataset, ShardDataset) else None,
        multiprocessing_context=method,
    )
    return list(loader)


def first_error(dataset: Any, *, method: str, num_workers: int = 1, **options: Any) -> Exception:
    """Return the first error that a loader raises; the rest is read too, or its end takes long."""
    loader = DataLoader(
        dataset,
        batch_size=3,
        num_workers=num_workers,
        multiprocessing_context=method,
        collate_fn=collate,
        **options,
    )
    found: list[Exception] = []
    remaining = iter(loader)
    while True:
        try:
            next(remaining)
        except StopIteration:
            break
        except Exception as error:
            found.append(error)
    return found[0]


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert_same(list(one.items()), list(other.items()))
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


@pytest.mark.parametrize(
    ("to", "method", "read_before"), pairwise(FORMATS, ["fork", "forkserver"], [False, True])
)
def test_workers_give_the_batches_of_the_main_process(
    root: Path, to: str, method: str, read_before: bool
) -> None:
    expected = batches(open_dataset(root / to, decode="torch"), num_workers=0)
    dataset = open_dataset(root / to, decode="torch")
    if read_before:
        assert len(dataset[:]) == ROWS
    assert_same(batches(dataset, num_workers=2, method=method), expected)
    assert_same(batches(dataset, num_workers=0), expected)  # and it reads on here


@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.slow
def test_spawned_workers_read_all_formats(root: Path, read_before: bool) -> None:
    def every() -> StackDataset[Any]:
        return StackDataset(**{to: open_dataset(root / to, decode="torch") for to in FORMATS})

    expected = batches(every(), num_workers=0)
    dataset = every()
    if read_before:
        assert len(dataset[0]) == len(FORMATS)
    assert_same(batches(dataset, num_workers=2, method="spawn"), expected)


@pytest.mark.parametrize("to", FORMATS)
def test_a_worker_reads_while_its_parent_reads_too(root: Path, to: str) -> None:
    dataset = open_dataset(root / to, decode="torch")
    expected = batches(dataset, num_workers=0)
    loader = DataLoader(
        dataset, batch_size=3, num_workers=2, collate_fn=collate, multiprocessing_context="fork"
    )
    for found, wanted in zip(loader, expected, strict=True):
        assert_same(found, wanted)
        assert len(dataset[:]) == ROWS


@pytest.mark.parametrize("to", FORMATS)
def test_workers_that_persist_read_every_epoch(root: Path, to: str) -> None:
    dataset = open_dataset(root / to, decode="torch")
    expected = batches(dataset, num_workers=0)
    loader = DataLoader(
        dataset,
        batch_size=3,
        num_workers=2,
        collate_fn=collate,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    for _ in range(3):
        assert_same(list(loader), expected)


@pytest.mark.parametrize("to", FORMATS)
def test_threads_read_at_once(root: Path, to: str) -> None:
    dataset = open_dataset(root / to, decode="numpy")
    expected = [image.tobytes() for image, _ in open_dataset(root / to, decode="numpy")[:]]
    start = threading.Barrier(4)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        chance = np.random.default_rng(seed)
        start.wait()
        try:
            for _ in range(60):
                rows = chance.integers(0, ROWS, 5)
                found = [image.tobytes() for image, _ in dataset[rows]]
                wrong.extend(
                    row for row, got in zip(rows, found, strict=True) if got != expected[row]
                )
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("to", FORMATS)
def test_one_process_may_open_a_dataset_twice(root: Path, to: str) -> None:
    one, two = (open_dataset(root / to, decode="bytes") for _ in range(2))
    assert list(one[:]) == list(two[:])
    del one
    assert len(two[:]) == ROWS


@pytest.mark.parametrize("to", FORMATS)
def test_a_child_of_a_child_reads(root: Path, to: str) -> None:
    dataset = open_dataset(root / to, decode="bytes")
    expected = list(dataset[:])

    def read_in_child(depth: int) -> bool:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                fine = list(dataset[:]) == expected
                code = 0 if fine and (depth == 0 or read_in_child(depth - 1)) else 2
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    assert read_in_child(2)
    assert list(dataset[:]) == expected


@pytest.fixture
def damaged(root: Path, tmp_path: Path) -> Path:
    """A dataset of which the image in row 5 is damaged."""
    place = make(root, tmp_path / "made", "webdataset")
    dataset = open_dataset(place)
    shard = place / dataset.manifest.shards[1].name
    content = bytearray(shard.read_bytes())
    content[int(dataset._shards.rows["offset"][5]) + 9] ^= 1
    shard.write_bytes(content)
    return place


@pytest.mark.parametrize("method", METHODS)
def test_damage_found_by_a_worker_keeps_type_and_message(damaged: Path, method: str) -> None:
    dataset = open_dataset(damaged, decode="torch")
    error = first_error(dataset, method=method, num_workers=2)
    assert type(error) is CorruptRecord
    for part in (dataset.keys[5], dataset.paths[5], "row 5,", "shard-000001.tar", "checksum"):
        assert part in str(error)


def test_a_missing_shard_found_by_a_worker_keeps_its_type(damaged: Path) -> None:
    dataset = open_dataset(damaged, decode="torch")
    (damaged / "shard-000000.tar").unlink()
    error = first_error(dataset, method="fork")
    assert type(error) is CorruptShard
    assert "shard-000000.tar" in str(error)


def test_a_row_out_of_range_in_a_worker_is_an_index_error(root: Path) -> None:
    dataset = open_dataset(root / "lmdb", decode="torch")
    error = first_error(dataset, method="fork", sampler=[0, ROWS])
    assert type(error) is IndexError
    assert f"row {ROWS} " in str(error)


class Size(Dataset[int]):
    """Says in a worker how many bytes a dataset takes to pickle there, after it was read."""

    def __init__(self, dataset: ShardDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return 1

    def __getitem__(self, row: int) -> int:
        self.dataset[:]
        assert isinstance(self.dataset._shards.rows.base, np.memmap)
        return len(pickle.dumps(self.dataset))


def test_the_data_sent_to_a_worker_does_not_grow_with_the_dataset(tmp_path: Path) -> None:
    sizes = []
    for count in (4, 400):
        files: dict[str, bytes | None] = {f"a/{n:04d}.png": png(2, 2) for n in range(count)}
        make_tree(tmp_path / f"{count}/photos", files)
        place = tmp_path / f"{count}/made"
        options = ConvertOptions(to="webdataset")
        convert_scan(scan_imagefolder(tmp_path / f"{count}/photos"), place, options)
        dataset = open_dataset(place, decode="bytes")
        assert len(dataset[:]) == count
        sizes.append(len(pickle.dumps(dataset)) - len(str(place)))
    assert abs(sizes[0] - sizes[1]) < 10  # PyTorch writes the address of a tensor, in decimal
    assert sizes[0] < 1200


def test_a_worker_maps_the_index_and_stays_small(root: Path) -> None:
    loader = DataLoader(
        Size(open_dataset(root / "hdf5", decode="bytes")),
        batch_size=None,
        num_workers=1,
        multiprocessing_context="fork",
    )
    (size,) = list(loader)
    assert size < 1200
