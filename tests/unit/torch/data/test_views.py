"""Rows that repeat in an epoch, and views: which samples draw which random numbers."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from loading import CROP, ROWS, SEED, Prints, crc, make_datasets, prints, prints_of
from pairwise import pairwise
from refusals import refused
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shardkit import (
    EpochBatchSampler,
    IterableShardDataset,
    Rank,
    Weighted,
    collate,
    make_loader,
    open_dataset,
    with_rng,
)
from shardkit.errors import StateMismatch, UsageError

ENGINES = [("thread", 0), ("thread", 2), ("helper", 2), ("process", 0), ("process", 2)]


@pytest.fixture(scope="module")
def path(root: Path) -> Path:
    return root / "lmdb"


@with_rng
def numbers(image: Any, rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(rng.random(3))


def epoch_of(dataset: Any, batch: int = 4, engine: tuple[str, int] = ENGINES[0]) -> Prints:
    options: dict[str, Any] = {"engine": engine[0], "num_workers": engine[1]}
    loader = make_loader(dataset, batch, shuffle=True, seed=SEED, **options)
    return list(itertools.chain(*prints_of(loader)))


def test_views_draw_differently_and_each_repeats(path: Path) -> None:
    one, same, other = (open_dataset(path, decode=CROP, view=view) for view in (0, 0, 1))

    assert epoch_of(one) == epoch_of(same)
    assert not set(epoch_of(one)) & set(epoch_of(other))
    assert open_dataset(path, view=1).view == 1
    assert "view=1" in repr(other)
    iterable = IterableShardDataset(other, shuffle=False, seed=SEED, batch_size=4)
    plain = make_loader(other, 4, seed=SEED)
    assert prints_of(iterable) == prints_of(plain)


def test_an_invalid_view_is_refused(path: Path) -> None:
    views: list[Any] = [-1, 1.5, True, "1"]
    for view in views:
        with refused(UsageError, f"view={view!r}"):
            open_dataset(path, view=view)


def test_equal_rows_of_one_call_draw_differently(path: Path) -> None:
    dataset = open_dataset(path, decode=CROP)
    for stated in (False, True):
        if stated:
            dataset.set_epoch(2, SEED)
        images = [crc(image) for image, _ in dataset[[5, 0, 5, 5]]]
        assert len(set(images)) == 4
    alone = crc(dataset[5][0])
    assert alone == images[0]


class Reversed(Dataset[Any]):
    """An unknown wrapper, with and without a method to read batches."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, row: int) -> Any:
        return self._dataset[len(self) - 1 - row]


def test_repeats_are_counted_by_row_and_view(path: Path, tmp_path: Path) -> None:
    """The n-th copy of a row draws as the n-th of another that repeats it so often."""
    one, same = (open_dataset(path, numbers) for _ in range(2))
    other, view = open_dataset(path.parent / "hdf5", numbers), open_dataset(path, numbers, view=1)
    fewer = open_dataset(make_datasets(tmp_path, 7, 100) / "lmdb", numbers)
    copies = [prints_of_rows(Subset(one, [row] * 3)) for row in range(ROWS)]
    views = [prints_of_rows(Subset(view, [row] * 2)) for row in range(ROWS)]

    def first(dataset: Any, rows: Iterable[int], repeat: int = 0) -> list[int]:
        return [dataset[row][repeat] for row in rows]

    every = range(ROWS)
    for dataset, expected in (
        (Subset(one, [3, 1, 2]), first(copies, [3, 1, 2])),
        (Subset(one, [3, 1, 3, 3, -ROWS + 1]), [*first(copies, [3, 1]), *copies[3][1:]]),
        (ConcatDataset([one, same]), first(copies, every) + first(copies, every, 1)),
        (ConcatDataset([one, view]), first(copies, every) + first(views, every)),
        (ConcatDataset([other.select([7, 3]), one.select([3, 9])]), first(copies, [7, 3])),
        (ConcatDataset([one, view, other]), first(copies, every) + first(views, every)),
    ):
        assert prints_of_rows(dataset)[: len(expected)] == expected
    assert prints_of_rows(Subset(one, [3, 1, 3, 3, -ROWS + 1]))[-1] == copies[1][1]
    assert prints_of_rows(ConcatDataset([one, view, other]))[-ROWS:] == first(copies, every, 1)
    mixed = prints_of_rows(ConcatDataset([other.select([7, 3]), one.select([3, 9])]))
    assert mixed[2:] == [copies[3][1], copies[9][0]]
    both = prints_of_rows(ConcatDataset([fewer, one]))
    assert both[7:14] == first(copies, range(7), 1)  # by number: the datasets are different ones
    assert both[14:] == first(copies, range(7, ROWS))
    assert prints_of_rows(Subset(Mine(one), [3, 1])) == first(copies, [3, 1])


def prints_of_rows(dataset: Any) -> list[int]:
    """Return the numbers that each row of a dataset draws in the first epoch, as fingerprints."""
    loader = make_loader(dataset, len(dataset), seed=SEED, num_workers=0)
    return [crc(image) for images, _ in loader for image in images]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_repeats_in_a_plain_dataloader_draw_as_in_make_loader(path: Path, num_workers: int) -> None:
    dataset = open_dataset(path, decode=CROP)
    twice: Any = ConcatDataset([dataset, Subset(dataset, [3, 3]), dataset])

    sampler = EpochBatchSampler(twice, 4, shuffle=True, seed=SEED)
    loader = DataLoader(twice, batch_sampler=sampler, num_workers=num_workers, collate_fn=collate)

    assert list(itertools.chain(*prints_of(loader))) == epoch_of(twice)


class Mine(Dataset[Any]):
    """A wrapper that reads single rows."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> Any:
        return self.dataset[row]


class Batched(Mine):
    """A wrapper that reads batches, and forgets where its rows came from."""

    def __getitems__(self, rows: list[int]) -> Any:
        return self.dataset.__getitems__(np.arange(len(self))[rows].tolist())


class OneByOne(Mine):
    """A wrapper that reads the rows of a batch one by one, after all are known."""

    def __getitems__(self, rows: list[int]) -> Any:
        inner = [int(row) for row in rows]
        return [self.dataset[row] for row in inner]


class Grouped(Mine):
    """A wrapper that reads the rows of a batch in two calls, and in another order."""

    def __getitems__(self, rows: list[int]) -> Any:
        places = sorted(range(len(rows)), key=rows.__getitem__)
        samples: dict[int, Any] = {}
        for some in (places[::2], places[1::2]):
            read = self.dataset.__getitems__([rows[place] for place in some])
            samples.update(zip(some, read, strict=True))
        return [samples[place] for place in range(len(rows))]


class Shifted(Subset[Any]):
    """A subclass of Subset."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, range(len(dataset)))


@pytest.mark.parametrize("wrap", [lambda dataset: dataset, Mine, Shifted])
def test_datasets_in_one_concat_dataset_draw_differently(path: Path, wrap: Any) -> None:
    """Two formats of the same records, and a wrapper that reads other rows than its own."""
    one, other = (wrap(open_dataset(path.parent / to, decode=CROP)) for to in ("lmdb", "hdf5"))
    mixed: Any = ConcatDataset([one, other, Subset(Reversed(other), [4, 2])])

    found = epoch_of(mixed)

    assert len(set(found)) == len(found) == 2 * ROWS + 2
    assert found == epoch_of(mixed, batch=7, engine=("process", 2))


WRAPPERS: dict[str, Any] = {
    "one row": Mine,
    "batches": Batched,
    "one by one": OneByOne,
    "stacked": StackDataset,
    "stacked twice": lambda dataset: StackDataset(Mine(dataset), dataset),
    "subset": Shifted,
    "nested": lambda dataset: Mine(Subset(Batched(dataset), range(len(dataset)))),
}

REPEATING: dict[str, dict[str, Any]] = {
    "views": {"views": 2},
    "aug_repeats": {"aug_repeats": 3},
    "sampler": {"sampler": Weighted([5.0] + [1.0] * (ROWS - 1)), "samples_per_epoch": 40},
    "views, aug_repeats": {"views": 2, "aug_repeats": 2},
}

READERS: list[tuple[str, int]] = [*ENGINES, ("plain", 0), ("plain", 2)]


def read_epochs(
    dataset: Any, reader: tuple[str, int], options: dict[str, Any], epochs: int = 2
) -> list[list[Prints]]:
    """Return the batches of each epoch by one of `READERS`, view after view."""
    engine, num_workers = reader
    views = options.get("views", 1)
    loader: Any
    if engine == "plain":
        batches = EpochBatchSampler(dataset, 4, seed=SEED, **options)
        loader = DataLoader(
            dataset, batch_sampler=batches, num_workers=num_workers, collate_fn=collate
        )
    else:
        engines: dict[str, Any] = {"engine": engine, "num_workers": num_workers}
        loader = make_loader(dataset, 4, seed=SEED, **engines, **options)
    found: list[list[Prints]] = []
    for _ in range(epochs):
        found.append([])
        for batch in loader:
            samples = [batch] if engine == "plain" or views == 1 else batch
            samples = [each[0] if isinstance(each[0], (list, tuple)) else each for each in samples]
            found[-1].append([one for sample in samples for one in prints(sample)])
    if engine != "plain":
        loader.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrapper", "repeating", "reader"),
    pairwise(sorted(WRAPPERS), sorted(REPEATING), [r for r in READERS if r[1] or r[0] == "plain"]),
)
def test_repeats_draw_through_any_wrapper_as_without_it(
    path: Path, wrapper: str, repeating: str, reader: tuple[str, int]
) -> None:
    dataset, options = open_dataset(path, decode=CROP), REPEATING[repeating]
    expected = read_epochs(dataset, ENGINES[0], options)

    found = read_epochs(WRAPPERS[wrapper](dataset), reader, options)

    assert found == expected
    for epoch in found:
        every = list(itertools.chain(*epoch))
        assert len(set(every)) == len(every)


@pytest.mark.parametrize(("repeating", "reader"), [*zip(REPEATING, READERS[-4:], strict=True)])
def test_a_wrapper_that_reads_in_its_own_order_draws_no_crop_twice(
    path: Path, repeating: str, reader: tuple[str, int]
) -> None:
    options = REPEATING[repeating]

    (found,) = read_epochs(Grouped(open_dataset(path, numbers)), reader, options, 1)

    every = list(itertools.chain(*found))
    assert len(set(every)) == len(every)
    assert [found] == read_epochs(Grouped(open_dataset(path, numbers)), reader, options, 1)


class Pairs(Mine):
    """A wrapper that reads two rows for each sample, perhaps equal ones."""

    def __getitem__(self, row: int) -> Any:
        images, labels = zip(*self.dataset[[row, row]], strict=True)
        return torch.stack(images), labels[0]


@pytest.mark.parametrize("reader", READERS[-3:], ids=str)
def test_rows_that_one_sample_reads_twice_draw_differently(
    path: Path, reader: tuple[str, int]
) -> None:
    pairs = Pairs(open_dataset(path, numbers))
    batches = EpochBatchSampler(pairs, 4, views=2, seed=SEED)
    plain = DataLoader(pairs, batch_sampler=batches, num_workers=reader[1])
    own = make_loader(pairs, 4, views=2, seed=SEED, num_workers=reader[1])
    views = [images for images, _ in plain] if reader[0] == "plain" else []
    views += [images for batch in own for images, _ in batch] if not views else []

    every = [crc(image) for images in views for pair in images for image in pair]

    assert len(set(every)) == len(every) == ROWS * 4


class Foreign(Mine):
    """A dataset without shardkit."""

    calls: ClassVar[list[Any]] = []

    def __getitems__(self, rows: list[int]) -> list[tuple[torch.Tensor, int]]:
        self.calls.append(list(rows))
        return [(torch.rand(2), row) for row in rows]


def test_a_dataset_without_shardkit_inside_is_left_alone() -> None:
    Foreign.calls.clear()
    loader = make_loader(Foreign(range(5)), 3, views=2, seed=1, num_workers=0)

    found = [[labels.tolist() for _, labels in views] for views in loader]

    assert Foreign.calls == [[0, 1, 2], [0, 1, 2], [3, 4], [3, 4]]
    assert found == [[[0, 1, 2]] * 2, [[3, 4]] * 2]


@pytest.mark.parametrize(
    ("wrapper", "num_workers"), [("none", 2), ("plain subset", 0), ("batches", 2)]
)
@pytest.mark.slow
def test_two_samplers_on_one_dataset_keep_their_epochs(
    path: Path, wrapper: str, num_workers: int
) -> None:
    """Validation in the middle of an epoch, as users write it."""
    wrap = {"none": lambda one: one, "plain subset": lambda one: Subset(one, range(ROWS))}
    dataset = {**wrap, **WRAPPERS}[wrapper](open_dataset(path, decode=CROP))

    def loader(seed: int) -> tuple[EpochBatchSampler, DataLoader[Any]]:
        batches = EpochBatchSampler(dataset, 2, shuffle=True, seed=seed)
        return batches, DataLoader(
            dataset, batch_sampler=batches, num_workers=num_workers, collate_fn=collate
        )

    def samples(batch: Any) -> Prints:
        return prints(batch[0] if isinstance(batch[0], (list, tuple)) else batch)

    alone: dict[str, Any] = {"shuffle": True, "num_workers": 0}
    expected = {
        seed: prints_of(make_loader(open_dataset(path, decode=CROP), 2, seed=seed, **alone))
        for seed in (1, 2)
    }
    (_, training), (batches, validation) = loader(1), loader(2)
    found = []
    for number, batch in enumerate(training):
        found.append(samples(batch))
        if number in (1, 6):
            batches.set_epoch(0)
            assert [samples(one) for one in validation] == expected[2]

    assert found == expected[1]


def test_reading_between_batches_has_nothing_of_a_samplers_batch(path: Path) -> None:
    """The rows of a batch set the context; it ends with them, also if an iteration is left."""
    dataset = open_dataset(path, decode=CROP)
    wrapped = Mine(dataset)
    alone = open_dataset(path, decode=CROP)
    alone.set_epoch(0, SEED)
    expected = crc(alone[3][0])
    loader = DataLoader(wrapped, batch_sampler=EpochBatchSampler(wrapped, 2, views=2, seed=SEED))
    for _ in loader:
        dataset.set_epoch(0, SEED)
        assert crc(dataset[3][0]) == expected
        break
    assert crc(dataset[3][0]) == expected
    rows = next(iter(EpochBatchSampler(wrapped, 2, views=2, seed=SEED)))
    every = [crc(image) for image, _ in dataset.__getitems__(rows)]
    assert [crc(wrapped[row][0]) for row in rows] == every
    assert [crc(i) for i, _ in dataset.__getitems__(pickle.loads(pickle.dumps(rows)))] == every
    del rows
    assert crc(dataset[3][0]) == expected


def weighted(rows: int = 40) -> WeightedRandomSampler:
    return WeightedRandomSampler([5.0] + [1.0] * (ROWS - 1), rows)


def sampled(dataset: Any, batch: int = 4, **given: Any) -> Any:
    given = {"sampler": weighted(), "seed": SEED, "num_workers": 0, **given}
    return make_loader(dataset, batch, **given)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_samplers_rows_repeat_with_seed_and_epoch_and_draw_separately(
    path: Path, num_workers: int
) -> None:
    dataset = open_dataset(path, decode=CROP)
    state = torch.get_rng_state()
    first, second = (
        list(itertools.chain(*prints_of(loader)))
        for loader in itertools.repeat(sampled(dataset, num_workers=num_workers), 2)
    )

    assert len(first) == 40
    assert len(set(first)) == 40  # although rows repeat
    assert not set(first) & set(second)
    assert torch.equal(torch.get_rng_state(), state)
    loader = sampled(dataset, 3)
    assert list(itertools.chain(*prints_of(loader))) == first
    ranks = [prints_of(sampled(dataset, 4, rank=Rank(rank=rank, world_size=2))) for rank in (0, 1)]
    assert list(itertools.chain(*itertools.chain(*zip(*ranks, strict=True)))) == first


HALF = [*range(ROWS // 2)]

SAMPLERS: dict[str, Any] = {
    "weighted": lambda: WeightedRandomSampler([1.0] * ROWS, ROWS),
    "other weights": lambda: WeightedRandomSampler([1.0] * (ROWS - 1) + [1.0 + 1e-9], ROWS),
    "without replacement": lambda: WeightedRandomSampler([1.0] * ROWS, ROWS, replacement=False),
    "random": lambda: RandomSampler(range(ROWS)),
    "random, replacement": lambda: RandomSampler(range(ROWS), replacement=True, num_samples=ROWS),
    "random, fewer": lambda: RandomSampler(range(ROWS - 1), num_samples=ROWS),
    "sequential": lambda: SequentialSampler(range(ROWS)),
    "list": lambda: [*range(ROWS)],
    "other list": lambda: [*range(1, ROWS), 0],
    "array": lambda: np.arange(ROWS),
    "subset": lambda: SubsetRandomSampler(HALF + HALF + [1]),
    "other subset": lambda: SubsetRandomSampler([row + ROWS // 2 for row in HALF] * 2 + [1]),
}


def test_a_state_of_a_sampler_with_other_parameters_is_refused(path: Path) -> None:
    dataset = open_dataset(path)
    states = {
        name: json.loads(json.dumps(sampled(dataset, sampler=make()).state_dict()))
        for name, make in SAMPLERS.items()
    }
    for (name, make), (saved, state) in itertools.product(SAMPLERS.items(), states.items()):
        loader = sampled(dataset, sampler=make())
        if name == saved:
            loader.load_state_dict(state)
            continue
        with pytest.raises(StateMismatch, match="order"):
            loader.load_state_dict(state)
    loader = sampled(dataset)
    old = {**loader.state_dict(), "order": "WeightedRandomSampler"}  # without its parameters
    with refused(StateMismatch, "'WeightedRandomSampler'"):
        loader.load_state_dict(old)


def test_equal_indices_of_another_type_make_the_same_state(path: Path) -> None:
    kinds: tuple[Any, ...] = (
        HALF,
        tuple(HALF),
        range(len(HALF)),
        np.array(HALF, np.int16),
        torch.tensor(HALF),
    )
    states = [
        sampled(open_dataset(path), sampler=SubsetRandomSampler(rows)).state_dict()
        for rows in kinds
    ]
    assert all(state == states[0] for state in states)


class Longer(list[int]):
    """Rows whose length is one too many."""

    def __len__(self) -> int:
        return super().__len__() + 1


def test_samplers_that_cannot_be_divided_or_repeated_are_refused(path: Path) -> None:
    own: RandomSampler = RandomSampler(range(9), generator=torch.Generator())
    wrong: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"shuffle": True}, ("shuffle=", "sampler=")),
        (
            {"sampler": DistributedSampler(Reversed(range(9)), 2, 0)},
            ("DistributedSampler", "ranks"),
        ),
        ({"sampler": own}, ("generator",)),
        ({"sampler": 5}, ("sampler=",)),
        ({"sampler": iter([1])}, ("sampler=",)),
    ]
    for given, facts in wrong:
        with refused(UsageError, *facts):
            sampled(open_dataset(path), **given)
    facts = "sampler=", "not integers"
    for rows, *said in (
        ([0, 1.5], *facts),
        ([[0, 1]], *facts),
        (["a"], *facts),
        ([True], *facts),
        ([3, ROWS], "sampler=", "row 23", "0 to 22"),
        ([-1], "sampler=", "row -1", "0 to 22"),
        (Longer([2, 3]), "sampler=", "2 rows", "3"),
    ):
        with refused(UsageError, *said):
            next(iter(sampled(open_dataset(path, decode=CROP), sampler=rows)))


def test_pytorch_s_arguments_set_the_options_of_the_same_meaning(path: Path) -> None:
    given: dict[str, Any] = {
        "engine": "thread",
        "num_workers": 3,
        "prefetch_factor": 5,
        "pin_memory": False,
        "timeout": 7,
        "persistent_workers": False,
        "collate_fn": list,
    }
    loader = make_loader(open_dataset(path, decode=CROP), 4, drop_last=True, **given)

    assert {name: getattr(loader.options, name) for name in given} == given
    assert (loader.num_workers, loader.drop_last, len(loader)) == (3, True, ROWS // 4)
