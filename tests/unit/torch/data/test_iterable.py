"""Iterable datasets: the loader's order, each sample once, and an exact length."""

from __future__ import annotations

import inspect
import itertools
import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import DEADLINE, FORMATS, make_dataset, make_tree, png
from loading import (
    CROP,
    ITERABLE,
    ROWS,
    SEED,
    DataLoaderDispatcher,
    Print,
    Prints,
    crc,
    prints_of,
)
from pairwise import pairwise
from refusals import refused
from torch.utils.data import DataLoader

from shardkit import (
    BlockShuffle,
    IterableLMDBDataset,
    IterableShardDataset,
    Rank,
    ShardDataset,
    make_loader,
    open_dataset,
)
from shardkit.errors import StateMismatch, UsageError

SHUFFLES: list[bool | BlockShuffle] = [False, True, BlockShuffle(rows=2, buffer=6)]

BATCH = 4


def new(path: Path, batch: int | None = BATCH, **options: Any) -> IterableShardDataset:
    order = {"shuffle": True, "seed": SEED, **options}
    return ITERABLE[path.name](path, decode=CROP, batch_size=batch, **order)


def loader_of(
    dataset: Any, num_workers: int, batch: int | None = None, **options: Any
) -> DataLoader[Any]:
    if num_workers:
        options = {"multiprocessing_context": "fork", "timeout": DEADLINE, **options}
    return DataLoader(dataset, batch_size=batch, num_workers=num_workers, **options)


def by_loader(path: Path, epoch: int, batch: int = BATCH, **options: Any) -> list[Prints]:
    """Return the batches of an epoch as `make_loader` gives them."""
    order = {"shuffle": True, "seed": SEED, **options}
    dataset = open_dataset(path, decode=CROP)
    loader = make_loader(dataset, batch, num_workers=0, **order)
    loader.set_epoch(epoch)
    return prints_of(loader)


def flat(batches: Iterable[Prints]) -> list[Print]:
    return [one for batch in batches for one in batch]


def samples(items: Iterable[Any]) -> list[Print]:
    """Return the fingerprints of single samples."""
    return [(crc(image), int(label)) for image, label in items]


@pytest.mark.parametrize(("to", "shuffle", "num_workers"), pairwise(FORMATS, SHUFFLES, [0, 1]))
def test_single_samples_come_in_the_same_order(
    root: Path, to: str, shuffle: bool | BlockShuffle, num_workers: int
) -> None:
    dataset = new(root / to, None, shuffle=shuffle)
    dataset.set_epoch(1)
    expected = by_loader(root / "hdf5", 1, shuffle=shuffle)
    assert samples(loader_of(dataset, num_workers)) == flat(expected)
    assert prints_of(loader_of(dataset, num_workers, BATCH)) == expected  # and in torch's batches


def test_many_samples_are_read_in_several_pieces(tmp_path: Path) -> None:
    files = {f"a/{n:02d}.png": png(11, 10, n) for n in range(70)}  # more than are read at once
    path = make_dataset(make_tree(tmp_path / "photos", dict(files)), tmp_path / "hdf5", to="hdf5")
    for num_workers in (0, 2):
        found = samples(loader_of(new(path, None), num_workers))
        assert sorted(found) == sorted(flat(by_loader(path, 0)))


def test_the_length_is_exact(root: Path) -> None:
    ends = [("drop", False), ("drop", True), ("pad", False), ("pad", True), ("exact", False)]
    cases = pairwise([None, 1, 3, BATCH, 23, 100], [1, 2, 3], ends)
    for batch, world_size, (remainder, drop_last) in cases:
        ends_so: dict[str, Any] = {"remainder": remainder, "drop_last": drop_last}
        last = Rank(rank=world_size - 1, world_size=world_size, **ends_so)
        if drop_last and (batch or 1) * world_size > ROWS:
            with refused(UsageError, "drop_last=True"):
                new(root / "lmdb", batch, rank=last)
            continue
        dataset = new(root / "lmdb", batch, rank=last)
        assert len(list(dataset)) == len(dataset)


@pytest.mark.parametrize(("batch", "num_workers"), [(None, 2), (BATCH, 2), (BATCH, 0)])
def test_set_epoch_reaches_persistent_workers(
    root: Path, batch: int | None, num_workers: int
) -> None:
    dataset = new(root / "lmdb", batch)
    loader = loader_of(dataset, num_workers, persistent_workers=num_workers > 0)
    for epoch in (3, 0, 0):
        dataset.set_epoch(epoch)
        found = samples(loader) if batch is None else flat(prints_of(loader))
        expected = flat(by_loader(root / "lmdb", epoch))
        assert sorted(found) == sorted(expected)
        if batch is not None:
            assert found == expected


def test_without_set_epoch_the_first_epoch_repeats(root: Path) -> None:
    dataset = new(root / "lmdb")
    expected = by_loader(root / "lmdb", 0)
    for _ in range(2):
        assert prints_of(dataset) == expected
        assert prints_of(loader_of(dataset, 2)) == expected
    assert by_loader(root / "lmdb", 1) != expected


def test_simultaneous_iterations_are_independent(root: Path) -> None:
    dataset = new(root / "lmdb")
    expected = by_loader(root / "lmdb", 0)
    pairs = list(zip(dataset, dataset, strict=True))
    assert prints_of(one for one, _ in pairs) == prints_of(other for _, other in pairs) == expected


@pytest.mark.parametrize(("to", "batch"), [("lmdb", None), *((to, BATCH) for to in FORMATS)])
def test_a_new_dataset_resumes_after_every_item(root: Path, to: str, batch: int | None) -> None:
    def read(items: Iterable[Any]) -> list[Any]:
        return list(samples(items)) if batch is None else list(prints_of(items))

    expected = read(_named(new(root / to, batch), 4))
    following = read(_named(new(root / to, batch), 5))
    for stop in sorted({*range(7), len(expected) - 1, len(expected)}):
        first = _named(new(root / to, batch), 4)
        items = iter(first)
        assert read(itertools.islice(items, stop)) == expected[:stop]
        state = json.loads(json.dumps(first.state_dict()))
        # A state knows the epoch of what was read, and naming it changes nothing.
        for named in (False, True) if stop else (True,):
            second = new(root / to, batch)
            second.load_state_dict(state)
            assert second.state_dict() == state
            assert read(_named(second, 4) if named else second) == expected[stop:]
            assert read(_named(second, 5)) == following


def _named(dataset: IterableShardDataset, epoch: int) -> IterableShardDataset:
    dataset.set_epoch(epoch)
    return dataset


def test_an_epoch_set_before_the_first_item_is_read(root: Path) -> None:
    dataset = new(root / "lmdb")
    items = iter(dataset)
    dataset.set_epoch(2)
    assert prints_of(items) == by_loader(root / "lmdb", 2)


@pytest.mark.parametrize(("num_workers", "batch"), [(1, 5), (2, None), (3, 1)])
def test_any_workers_and_batch_size_resume_the_state_of_one_process(
    root: Path, num_workers: int, batch: int | None
) -> None:
    first = _named(new(root / "lmdb"), 4)
    read = prints_of(itertools.islice(first, 2))
    second = new(root / "lmdb", batch)
    second.load_state_dict(first.state_dict())
    items = list(loader_of(second, num_workers))
    found = samples(items) if batch is None else flat(prints_of(items))
    assert sorted(flat(read) + found) == sorted(flat(by_loader(root / "lmdb", 4)))


class States(IterableLMDBDataset):
    """Returns its state with each item, as torchdata does in workers."""

    def __iter__(self) -> Any:
        yield self.state_dict()
        for _ in super().__iter__():
            yield self.state_dict()


def test_a_workers_state_counts_its_items(root: Path) -> None:
    dataset = States(root / "lmdb", decode=CROP, batch_size=BATCH)
    states = list(loader_of(dataset, 2))
    assert [(s["worker"], s["num_workers"], s["given"]) for s in states] == [
        (number % 2, 2, number // 2) for number in range(8)
    ]
    assert "worker" not in dataset.state_dict()
    assert all("worker" not in state for state in loader_of(dataset, 1))


@pytest.mark.parametrize("given", [0, 1, 3])
def test_a_workers_loaded_state_is_kept_until_it_reads(root: Path, given: int) -> None:
    # torchdata asks for it at once: a second stop before this worker's turn must not lose it.
    dataset = States(root / "lmdb", decode=CROP, batch_size=BATCH)
    dataset.load_state_dict({**dataset.state_dict(), "num_workers": 2, "given": given})
    states = list(loader_of(dataset, 2))
    assert [state["given"] for state in states[:2]] == [given, given]
    assert [state["given"] for state in states[::2]] == list(range(given, 4))


def errors_of(loader: Iterable[Any]) -> list[Exception]:
    """Return all errors of a loader; reads to the end, since workers otherwise stop late."""
    found: list[Exception] = []
    items = iter(loader)
    while True:
        try:
            next(items)
        except StopIteration:
            return found
        except Exception as error:
            found.append(error)


@pytest.mark.slow
def test_a_workers_state_requires_the_same_number_of_workers(root: Path) -> None:
    dataset = new(root / "lmdb")
    state = {**dataset.state_dict(), "worker": 1, "num_workers": 2, "given": 1}
    for num_workers in (0, 1, 3):
        dataset.load_state_dict(state)
        errors = errors_of(loader_of(dataset, num_workers))
        assert [type(error) for error in errors] == [StateMismatch] * max(1, num_workers)
        assert f"one of 2 workers, but this loader has {max(1, num_workers)}" in str(errors[0])
    dataset.load_state_dict(state)
    assert prints_of(loader_of(dataset, 2)) == by_loader(root / "lmdb", 0)[2:]


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(root: Path) -> None:
    dataset = new(root / "lmdb")
    state = dataset.state_dict()
    part = {**state, "num_workers": 2, "given": 1}
    for wrong in (
        {**state, "consumed": 99},
        {**part, "given": -1},
        {**part, "given": 1.0},
        {**part, "num_workers": 0},
        {**part, "num_workers": "2"},
        {**part, "num_workers": 2**64},
        {**part, "given": ROWS + 1},
        {**part, "given": 10**5000},
    ):
        with pytest.raises(StateMismatch):
            dataset.load_state_dict(wrong)
    assert dataset.state_dict() == state
    assert prints_of(dataset) == by_loader(root / "lmdb", 0)


@pytest.mark.parametrize("to", FORMATS)
def test_any_format_is_opened_and_each_class_opens_its_own(root: Path, to: str) -> None:
    expected = by_loader(root / to, 0, shuffle=False)
    found = IterableShardDataset(root / to, decode=CROP, seed=SEED, batch_size=BATCH)
    assert type(found.dataset) is type(open_dataset(root / to))
    assert prints_of(found) == expected
    for other in sorted({*FORMATS} - {to}):
        with refused(UsageError, "open_dataset"):
            ITERABLE[other](root / to)


def test_a_map_style_dataset_keeps_its_own_options(root: Path) -> None:
    source = open_dataset(root / "lmdb", target_transform=lambda label: label + 10, decode="numpy")
    dataset = IterableShardDataset(source)
    assert dataset.dataset is source
    for (image, label), (expected, number) in zip(dataset, source[:], strict=True):
        np.testing.assert_array_equal(image, expected)
        assert label == number >= 10
    for options in ({"transform": str}, {"decode": "torch"}, {"view": 1}, {"verify": False}):
        with refused(UsageError):
            IterableShardDataset(source, **options)


def test_map_and_iterable_datasets_take_the_same_arguments_in_the_same_order() -> None:
    shared = list(inspect.signature(ShardDataset).parameters)
    assert shared == list(inspect.signature(open_dataset).parameters)
    for kind in (IterableShardDataset, *ITERABLE.values()):
        assert list(inspect.signature(kind).parameters)[: len(shared)] == shared


def test_every_dataset_opens_a_split(root: Path) -> None:
    for opened in (
        open_dataset(root, split="lmdb"),
        ShardDataset(root, split="lmdb"),
        IterableLMDBDataset(root, split="lmdb").dataset,
    ):
        assert opened.path == root / "lmdb"


def test_a_directory_is_opened_as_by_open_dataset(root: Path) -> None:
    given: Any = {"decode": CROP, "verify": True, "view": 2}
    found = IterableShardDataset(root / "lmdb", None, str, **given).dataset
    assert repr(found) == repr(open_dataset(root / "lmdb", None, str, **given))
    assert found.target_transform is str


def test_readahead_precedes_reading(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for batch in (None, BATCH):
        dataset = new(root / "webdataset", batch, shuffle=BlockShuffle(rows=2, buffer=6))
        announced: list[int] = []
        monkeypatch.setattr(dataset.dataset, "announce", lambda rows, to=announced: to.extend(rows))
        assert len(list(dataset)) == len(dataset)
        order = dataset.order.rows(0, np.arange(ROWS)).tolist()
        assert set(announced) == set(order[6:])


def test_a_pickled_dataset_reads_the_same_and_is_small(root: Path) -> None:
    dataset = _named(new(root / "lmdb"), 2)
    assert len(list(dataset)) == 6
    packed = pickle.dumps(dataset)
    assert len(packed) < 3000
    assert prints_of(pickle.loads(packed)) == by_loader(root / "lmdb", 2)


@pytest.mark.parametrize(("num_workers", "start"), [(0, None), (1, "fork"), (1, "forkserver")])
def test_samples_of_a_rank_are_not_divided_again(
    root: Path, num_workers: int, start: str | None
) -> None:
    def prepared(world_size: int, **workers: Any) -> DataLoaderDispatcher:
        dataset = new(root / "lmdb", rank=Rank(rank=0, world_size=world_size))
        return DataLoaderDispatcher(loader_of(dataset, **workers))

    facts = "rank 0 of 2", "DataLoaderDispatcher", "Rank(rank=0, world_size=1)"
    traced = pytest.raises(UsageError, match=r"rank 0 of 2.* DataLoaderDispatcher")  # by a worker
    with traced if start == "fork" else refused(UsageError, *facts):
        list(prepared(2, num_workers=num_workers, multiprocessing_context=start))
    assert prints_of(prepared(1, num_workers=0)) == by_loader(root / "lmdb", 0)


def test_wrong_options_and_epochs_are_usage_errors(root: Path) -> None:
    with refused(UsageError, root / "nothing"):
        IterableShardDataset(root / "nothing")
    numbers: list[Any] = [0, True, 2.5]
    wrong = [*(("batch_size", number) for number in numbers), ("seed", "1"), ("decode", "jpeg")]
    for name, value in wrong:
        with refused(UsageError, f"{name}={value!r}"):
            IterableShardDataset(root / "lmdb", **{name: value})
    dataset = new(root / "lmdb")
    epochs: list[Any] = [-1, 1.5, True, None]
    for epoch in epochs:
        with refused(UsageError, f"epoch={epoch!r}"):
            dataset.set_epoch(epoch)
    assert prints_of(dataset) == by_loader(root / "lmdb", 0)
