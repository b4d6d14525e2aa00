"""Samplers, epochs of any length, repeats, views: the same for any workers, ranks and stops."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import DEADLINE, FORMATS
from loading import BATCH, CROP, ROWS, SEED, Prints, close, make_datasets, prints, prints_of
from pairwise import pairwise
from torch.utils.data import DataLoader, RandomSampler, Subset, default_collate

from shardkit import (
    Balanced,
    BlockShuffle,
    EpochBatchSampler,
    Mixture,
    Rank,
    Weighted,
    collate,
    make_loader,
    open_dataset,
)
from shardkit.errors import StateMismatch
from shardkit.sampling.epochs import Epochs
from shardkit.torch.data.read_context import NumberedRows, ReadContext
from shardkit.torch.data.samplers import make_order

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

WEIGHTS = np.arange(ROWS) % 5

CASES: dict[str, dict[str, Any]] = {
    "weighted": {"sampler": Weighted(WEIGHTS)},
    "balanced": {"sampler": Balanced(), "samples_per_epoch": 17},
    "short": {"shuffle": True, "samples_per_epoch": 9},
    "long": {"shuffle": BlockShuffle(rows=3, buffer=9), "samples_per_epoch": 31},
    "repeated": {"shuffle": True, "aug_repeats": 3, "samples_per_epoch": ROWS},
    "views": {"shuffle": True, "views": 2},
    "all": {"sampler": Weighted(WEIGHTS), "samples_per_epoch": 14, "aug_repeats": 2, "views": 3},
    "pytorch": {"sampler": RandomSampler(range(ROWS)), "samples_per_epoch": 30},
}
CREWS = (("thread", 0), ("thread", 2), ("helper", 2), ("process", 2))
PLACES = ((0, 1), (0, 2), (1, 2), (2, 3))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_datasets(tmp_path_factory.mktemp("sampling"))


def by_hand(path: Path, case: str, epoch: int) -> list[tuple[int, list[Prints]]]:
    """Return row and prints of each sample of an epoch; one list of prints for each view.

    Each sample is read alone, with the number that docs/order.md gives it.
    """
    options = dict(CASES[case])
    dataset = open_dataset(path, decode=CROP)
    shuffle, sampler = options.pop("shuffle", False), options.pop("sampler", None)
    order, epochs = make_order(dataset, shuffle, SEED, sampler), Epochs(**options)
    rows = epochs.rows(order, epoch, np.arange(epochs.size(order))).tolist()
    found = []
    for position, row in enumerate(rows):
        numbers = [position * epochs.views + view for view in range(epochs.views)]
        contexts = [ReadContext(SEED, epoch, repeats=[number]) for number in numbers]
        read = [dataset.__getitems__(NumberedRows([row], each)) for each in contexts]
        found.append((row, [prints(collate(each)) for each in read]))
    return found


def batches_by_hand(
    epoch: list[tuple[int, list[Prints]]], case: str, place: tuple[int, int], consumed: int = 0
) -> list[list[Prints]]:
    """Return the batches of one rank: for each, the prints of each view."""
    rank, world_size = place
    strided = CASES[case].get("aug_repeats", 1) > 1
    batches = []
    for start in range(consumed, len(epoch), world_size * BATCH):
        step = epoch[start : start + world_size * BATCH]
        each = len(step) // world_size
        step = step[: each * world_size]
        own = step[rank::world_size] if strided else step[rank * each : (rank + 1) * each]
        if own:
            views = zip(*(found for _, found in own), strict=True)
            batches.append([list(itertools.chain(*view)) for view in views])
    return batches


def loader_of(path: Path, case: str, **options: Any) -> Any:
    dataset = open_dataset(path, decode=CROP)
    options = {"start_method": "fork", **options}
    endless = options.pop("endless", False)
    given: dict[str, Any] = {**options}
    return make_loader(dataset, BATCH, seed=SEED, endless=endless, **CASES[case], **given)


def views_of(case: str, batch: Any) -> list[Prints]:
    return [prints(each) for each in (batch if CASES[case].get("views", 1) > 1 else (batch,))]


@pytest.fixture(scope="module")
def reference(root: Path) -> dict[str, list[Any]]:
    """The first three epochs of each case, from one format."""
    return {case: [by_hand(root / "hdf5", case, epoch) for epoch in range(3)] for case in CASES}


@pytest.mark.parametrize(
    ("case", "crew", "to"),
    [
        pytest.param(*combined, marks=() if combined[1][0] == "thread" else pytest.mark.slow)
        for combined in pairwise(CASES, CREWS, FORMATS)
    ],
)
def test_a_run_resumes_with_the_exact_next_batch(
    root: Path, reference: dict[str, list[Any]], to: str, case: str, crew: tuple[str, int]
) -> None:
    engine, num_workers = crew
    for rank, world_size in PLACES:
        this_rank = Rank(rank=rank, world_size=world_size)
        options = {"engine": engine, "num_workers": num_workers, "rank": this_rank}
        run = [batches_by_hand(epoch, case, (rank, world_size)) for epoch in reference[case]]
        with (
            closing(loader_of(root / to, case, **options)) as first,
            closing(loader_of(root / to, case, **options)) as second,
        ):
            assert len(first) == len(run[0])
            for stop in range(1, len(first) + 1, 1 if engine == "thread" else 4):
                at = stop % 2
                first.set_epoch(at)
                batches = iter(first)
                read = [views_of(case, next(batches)) for _ in range(stop)]
                assert read == run[at][:stop], f"{first!r}, stop {stop}"
                state = json.loads(json.dumps(first.state_dict()))
                close(batches)
                second.load_state_dict(state)
                rest = [views_of(case, batch) for batch in second]
                assert rest == (run[at][stop:] or run[at + 1]), f"{first!r}, stop {stop}"


@pytest.mark.parametrize("case", CASES)
def test_other_ranks_and_batch_sizes_read_exactly_the_rest(
    root: Path, reference: dict[str, list[Any]], case: str
) -> None:
    everything = Counter(map(str, reference[case][1]))
    for before, after in (((2, 3), (3, 2)), ((3, 1), (1, 4)), ((1, 2), (2, 1))):

        def run(world_size: int, batch: int, state: Any, steps: int | None) -> list[Any]:
            found, states = [], []
            for rank in range(world_size):
                shard = Rank(rank=rank, world_size=world_size, remainder="exact")
                options: dict[str, Any] = {"rank": shard, "num_workers": 0, "with_rows": True}
                dataset = open_dataset(root / "lmdb", decode=CROP)
                given = {"seed": SEED, **CASES[case], **options}
                loader = make_loader(dataset, batch, **given)
                loader.set_epoch(1) if state is None else loader.load_state_dict(state)
                for each in itertools.islice(loader, steps):
                    views = each if CASES[case].get("views", 1) > 1 else (each,)
                    rows = views[0][2].tolist()
                    shown = zip(*map(prints, views), strict=True)
                    found += [
                        (row, [[one] for one in view])
                        for row, view in zip(rows, shown, strict=True)
                    ]
                states.append(loader.state_dict())
            assert states == states[:1] * world_size or steps is None
            return [found, states[0]]

        read, state = run(*before, None, 1)
        rest, _ = run(*after, state, None)
        assert Counter(map(str, read + rest)) == everything, (case, before, after)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_dataloader_gives_the_same_samples(
    root: Path, reference: dict[str, list[Any]], case: str, num_workers: int
) -> None:
    dataset = open_dataset(root / "webdataset", decode=CROP)
    sampler = EpochBatchSampler(dataset, BATCH, seed=SEED, endless=True, **CASES[case])
    workers: dict[str, Any] = {"multiprocessing_context": "fork", "timeout": DEADLINE}
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=collate,
        **(workers if num_workers else {}),
    )
    run = [batches_by_hand(epoch, case, (0, 1)) for epoch in reference[case]]
    expected = [list(itertools.chain(*views)) for views in itertools.chain(*run)]
    assert prints_of(itertools.islice(loader, len(expected))) == expected


@pytest.mark.parametrize("crew", CREWS)
def test_an_endless_iteration_continues_with_the_next_epoch(
    root: Path, reference: dict[str, list[Any]], crew: tuple[str, int]
) -> None:
    case, (engine, num_workers) = "short", crew
    run = [batches_by_hand(epoch, case, (0, 1)) for epoch in reference[case]]
    expected = list(itertools.chain(*run))
    options = {"engine": engine, "num_workers": num_workers, "endless": True}
    for stop in (1, len(run[0]), len(run[0]) + 2):
        with closing(loader_of(root / "lmdb", case, **options)) as loader:
            batches = iter(loader)
            assert [views_of(case, next(batches)) for _ in range(stop)] == expected[:stop]
            assert loader.epoch == (stop - 1) // len(run[0])
            state = json.loads(json.dumps(loader.state_dict()))
            close(batches)
        with closing(loader_of(root / "lmdb", case, **options)) as loader:
            loader.load_state_dict(state)
            rest = itertools.islice(loader, len(expected) - stop)
            assert [views_of(case, batch) for batch in rest] == expected[stop:]


def test_copies_of_a_sample_are_on_different_ranks(root: Path) -> None:
    found = []
    for rank in range(3):
        shard = Rank(rank=rank, world_size=3)
        loader = loader_of(root / "lmdb", "repeated", rank=shard, with_rows=True)
        found.append([(rows.tolist(), prints(batch)) for *batch, rows in loader])
    for step in zip(*found, strict=True):
        rows, samples = zip(*step, strict=True)
        if len(rows[0]) == BATCH:
            assert rows[0] == rows[1] == rows[2]
            assert len(set(rows[0])) == BATCH
            assert len(set(itertools.chain(*samples))) == 3 * BATCH  # cropped differently


def test_views_are_batches_of_the_same_rows_and_reuse_memory(root: Path) -> None:
    options = {"engine": "thread", "num_workers": 1, "with_rows": True}
    loader = loader_of(root / "lmdb", "views", **options)
    pointers, batches = set(), 0
    for one, other in itertools.chain(loader, loader):
        batches += 2
        assert one[2].tolist() == other[2].tolist()
        assert one[1].tolist() == other[1].tolist()
        assert not one[0].equal(other[0])
        pointers |= {one[0].data_ptr(), other[0].data_ptr()}
    assert len(pointers) < batches / 2


def test_a_subset_and_default_collate_work(root: Path) -> None:
    dataset = open_dataset(root / "lmdb", decode=CROP)
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
    endless = EpochBatchSampler(subset, 4, endless=True)
    plain = DataLoader(subset, batch_sampler=endless, num_workers=2, collate_fn=collate)
    batches = 2 * len(endless) + 1
    assert prints_of(itertools.islice(plain, batches)) == prints_of(
        itertools.islice(make_loader(subset, 4, endless=True), batches)
    )


def test_a_mixture_has_exact_shares(root: Path, tmp_path: Path) -> None:
    one = open_dataset(root / "lmdb", decode=CROP)
    other = open_dataset(make_datasets(tmp_path, 7, 100) / "hdf5", decode=CROP)
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
    one = open_dataset(root / "lmdb", decode=CROP)
    other = open_dataset(make_datasets(tmp_path, 7, 100) / "hdf5", decode=CROP)
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
    dataset = open_dataset(root / "lmdb", decode=CROP)

    def state_of(**options: Any) -> tuple[Any, dict[str, Any]]:
        loader = make_loader(dataset, BATCH, num_workers=0, seed=SEED, **options)
        return loader, loader.state_dict()

    states = {case: state_of(**options) for case, options in CASES.items()}
    states["other weights"] = state_of(sampler=Weighted(WEIGHTS + 1))
    states["plain"] = state_of(shuffle=True)
    for (name, (_, state)), (other, (loader, own)) in itertools.permutations(states.items(), 2):
        with pytest.raises(StateMismatch, match="its order is"):
            loader.load_state_dict(state)
        assert loader.state_dict() == own, (name, other)
    names = {name: state["order"] for name, (_, state) in states.items()}
    assert names["plain"] == "shuffle=True"
    assert names["repeated"] == "shuffle=True, samples_per_epoch=23, aug_repeats=3"
    assert names["pytorch"] == (
        "RandomSampler(replacement=False, num_samples=23, of=23), samples_per_epoch=30"
    )
    assert names["weighted"].startswith("Weighted(23 rows, digest ")
    assert names["balanced"].startswith("Balanced(3 groups, digest ")
    assert max(map(len, names.values())) < 100
