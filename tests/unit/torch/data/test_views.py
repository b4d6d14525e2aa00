"""Rows that repeat in an epoch, and views: which samples draw which random numbers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loading import CROP, ROWS, SEED, Prints, crc, make_datasets, prints_of
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
)

from shardkit import (
    EpochBatchSampler,
    IterableShardDataset,
    LoaderOptions,
    RankShard,
    StateMismatch,
    UsageError,
    collate,
    make_loader,
    open_dataset,
    with_rng,
)
from shardkit.torch.data import nested

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

ENGINES = [("thread", 0), ("thread", 2), ("process", 0), ("process", 2)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_datasets(tmp_path_factory.mktemp("views")) / "lmdb"


@with_rng
def numbers(image: Any, rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(rng.random(3))


def epoch_of(dataset: Any, batch: int = 4, engine: tuple[str, int] = ENGINES[0]) -> Prints:
    options = LoaderOptions(engine=engine[0], num_workers=engine[1])
    loader = make_loader(dataset, batch, shuffle=True, seed=SEED, options=options)
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


@pytest.mark.parametrize("view", [-1, 1.5, True, "1"])
def test_an_invalid_view_is_refused(path: Path, view: Any) -> None:
    with pytest.raises(UsageError, match="view"):
        open_dataset(path, view=view)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("transform", [None, numbers])
def test_a_repeated_row_draws_the_same_in_every_engine(
    path: Path, engine: tuple[str, int], transform: Any
) -> None:
    dataset = open_dataset(path, transform, decode=CROP)
    twice: Any = ConcatDataset([dataset, Subset(dataset, [3, 3, *range(ROWS)])])

    found = epoch_of(twice, engine=engine)

    assert len(set(found)) == len(found) == 2 * ROWS + 2
    assert found == epoch_of(twice, batch=7)  # whatever batch a row is in
    assert set(epoch_of(dataset)) < set(found)  # the first of equal rows draws as ever


def test_a_subset_without_repeats_draws_like_its_dataset(path: Path) -> None:
    dataset = open_dataset(path, decode=CROP)

    assert set(epoch_of(Subset(dataset, range(3, 9)))) < set(epoch_of(dataset))


def test_a_resumed_run_draws_the_same_for_repeated_rows(path: Path) -> None:
    rows = Subset(open_dataset(path, decode=CROP), [0, 1, 0, 2, 0, 1] * 3)
    every = list(itertools.chain(*prints_of(make_loader(rows, 4, shuffle=True, seed=1))))
    loader = make_loader(rows, 4, shuffle=True, seed=1)
    next(iter(loader))
    again = make_loader(rows, 3, shuffle=True, seed=1)
    again.load_state_dict(loader.state_dict())

    assert list(itertools.chain(*prints_of(again))) == every[4:]
    assert len(set(every)) == 18


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


def test_nested_datasets_keep_their_positions(path: Path) -> None:
    one, other = (open_dataset(path.parent / to, decode=CROP) for to in ("lmdb", "hdf5"))
    mixed: Any = ConcatDataset([Subset(one, [4, -1, 4]), Reversed(other), Subset(other, range(5))])
    loader = make_loader(mixed, len(mixed), options=LoaderOptions(with_rows=True, num_workers=0))

    ((_, labels, rows),) = loader

    assert labels.tolist() == [mixed[row][1] for row in range(len(mixed))]
    assert rows.tolist() == list(range(len(mixed)))


def test_rows_of_a_subset_are_those_of_its_dataset(path: Path) -> None:
    dataset = open_dataset(path, decode=CROP)
    inner = Subset(Subset(dataset, [9, 7, 5, 3]), [3, 1, 1])
    loader = make_loader(inner, 3, options=LoaderOptions(with_rows=True, num_workers=0))

    ((_, labels, rows),) = loader

    assert rows.tolist() == [3, 7, 7]
    assert labels.tolist() == dataset.targets[[3, 7, 7]].tolist()


def test_repeats_are_counted_by_record_and_view(path: Path) -> None:
    one, same = (open_dataset(path) for _ in range(2))
    other, view = open_dataset(path.parent / "hdf5"), open_dataset(path, view=1)

    def counted(dataset: Any) -> list[int] | None:
        counts = nested.row_repeats(dataset)
        return None if counts is None else counts.tolist()

    assert counted(one) is None
    assert counted(Subset(one, [3, 1, 2])) is None
    assert counted(Subset(one, [3, 1, 3, 3, -ROWS + 1])) == [0, 0, 1, 2, 1]
    assert counted(ConcatDataset([one, same])) == [0] * ROWS + [1] * ROWS
    assert counted(ConcatDataset([one, view, other])) is None
    assert counted(Subset(ConcatDataset([one, same]), [])) is None


def test_a_sampler_warns_of_rows_that_draw_the_same(path: Path) -> None:
    dataset = open_dataset(path, decode=CROP)
    twice: Any = ConcatDataset([dataset, dataset])

    with pytest.warns(RuntimeWarning, match=r"rows repeat.*make_loader.*view="):
        EpochBatchSampler(twice, 4)
    views: Any = ConcatDataset([dataset, open_dataset(path, decode=CROP, view=1)])
    sampler = EpochBatchSampler(views, 4, shuffle=True, seed=SEED)
    loader = DataLoader(views, batch_sampler=sampler, collate_fn=collate)
    found = list(itertools.chain(*prints_of(loader)))

    assert len(set(found)) == 2 * ROWS
    assert found == epoch_of(views)


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
    ranks = [
        prints_of(
            sampled(
                dataset, 4, options=LoaderOptions(rank_shard=RankShard(rank=rank, world_size=2))
            )
        )
        for rank in (0, 1)
    ]
    assert list(itertools.chain(*itertools.chain(*zip(*ranks, strict=True)))) == first


def test_a_run_with_a_sampler_resumes_exactly(path: Path) -> None:
    dataset = open_dataset(path, decode=CROP)
    loader = sampled(dataset)
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    again = sampled(dataset, 5)
    again.load_state_dict(state)

    assert list(itertools.chain(*prints_of(again))) == list(itertools.chain(*prints_of(batches)))
    with pytest.raises(StateMismatch, match="its order is 'WeightedRandomSampler'"):
        sampled(dataset, sampler=RandomSampler(range(40))).load_state_dict(state)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shuffle": True}, "leave one of them out"),
        (
            {"sampler": DistributedSampler(Reversed(range(9)), 2, 0)},
            "divides rows among ranks itself",
        ),
        ({"sampler": RandomSampler(range(9), generator=torch.Generator())}, "its own generator"),
        ({"sampler": 5}, "not a sampler with a length"),
        ({"sampler": iter([1])}, "not a sampler with a length"),
    ],
)
def test_samplers_that_cannot_be_divided_or_repeated_are_refused(
    path: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        sampled(open_dataset(path), **given)


@pytest.mark.parametrize("rows", [[0, 1.5], [[0, 1]], [ROWS], [-1], ["a"], [True]])
def test_invalid_rows_of_a_sampler_are_refused(path: Path, rows: list[Any]) -> None:
    with pytest.raises(UsageError, match=r"sampler= must give .* integers from 0 to 22"):
        next(iter(sampled(open_dataset(path, decode=CROP), sampler=rows)))


def test_pytorch_s_arguments_set_the_options_of_the_same_meaning(path: Path) -> None:
    loader = make_loader(
        open_dataset(path, decode=CROP),
        4,
        num_workers=3,
        prefetch_factor=5,
        drop_last=True,
        pin_memory=False,
        timeout=7,
        persistent_workers=False,
        in_order=False,
        collate_fn=list,
        options=LoaderOptions(engine="thread", num_workers=3),
    )

    assert loader.options == LoaderOptions(
        engine="thread",
        num_workers=3,
        prefetch_factor=5,
        pin_memory=False,
        timeout=7,
        persistent_workers=False,
        in_order=False,
        collate_fn=list,
    )
    assert (loader.num_workers, loader.drop_last, len(loader)) == (3, True, ROWS // 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_workers": 1}, "num_workers is 2 in options= and 1 as an argument"),
        ({"num_workers": -1}, "num_workers"),
        ({"prefetch_factor": 0}, "prefetch_factor=0"),
        ({"timeout": -1}, "timeout=-1"),
        ({"collate_fn": 3}, "collate_fn=3"),
    ],
)
def test_wrong_arguments_of_pytorch_are_refused(
    path: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        make_loader(open_dataset(path), 4, options=LoaderOptions(num_workers=2), **given)
