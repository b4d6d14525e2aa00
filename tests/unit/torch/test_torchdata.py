"""What is special to torchdata's StatefulDataLoader: samples of workers, states at an epoch's end.

The batches and the exact resume of samplers and of iterable datasets that give batches are laws of
`engine/test_engine_conformance.py`.
"""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers import DEADLINE, FORMATS
from loading import CROP, ITERABLE, SEED, Print, Prints, make_datasets, prints_of
from pairwise import pairwise
from refusals import refused
from torch.utils.data import Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from shardkit import (
    BlockShuffle,
    EpochBatchSampler,
    Field,
    Rank,
    collate,
    convert,
    make_loader,
    open_dataset,
)
from shardkit.errors import StateMismatch

SHUFFLES: list[bool | BlockShuffle] = [False, True, BlockShuffle(rows=2, buffer=6)]

BATCH = 4

EACH = 6
"""Batches in an epoch of 23 samples."""

EPOCHS = 3


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("torchdata")
    make_datasets(root / "others", first=1)
    return make_datasets(root)


class Way(NamedTuple):
    """A way to read a dataset."""

    kind: str
    """``sampler``, ``batches`` or ``samples``: the last two are iterable datasets."""
    num_workers: int
    shuffle: bool | BlockShuffle = True
    persistent: bool = False
    every: int = 1
    """Steps after which torchdata asks for states."""


def start(
    path: Path, way: Way, state: Any = None, this_rank: Rank | None = None
) -> tuple[Any, Any]:
    """Return a loader, and what has its ``set_epoch``; as a new process would make them."""
    options: dict[str, Any] = {"num_workers": way.num_workers, "snapshot_every_n_steps": way.every}
    if way.num_workers:
        options |= {"multiprocessing_context": "fork", "timeout": DEADLINE}
        options["persistent_workers"] = way.persistent
    order: dict[str, Any] = {"shuffle": way.shuffle, "seed": SEED, "rank": this_rank}
    named: Any
    if way.kind == "sampler":
        dataset = open_dataset(path, decode=CROP)
        named = EpochBatchSampler(dataset, BATCH, **order)
        loader = StatefulDataLoader(dataset, batch_sampler=named, collate_fn=collate, **options)
    else:
        batch = BATCH if way.kind == "batches" else None
        named = ITERABLE[path.name](path, decode=CROP, batch_size=batch, **order)
        loader = StatefulDataLoader(named, batch_size=None if batch else BATCH, **options)
    if state is not None:
        loader.load_state_dict(pickle.loads(pickle.dumps(state)))
    return loader, named


@functools.cache
def epochs(path: Path, way: Way) -> list[list[Prints]]:
    """Return the batches of some epochs of one run."""
    loader, named = start(path, way._replace(persistent=way.num_workers > 0, every=1))
    found = []
    for epoch in range(EPOCHS):
        named.set_epoch(epoch)
        found.append(prints_of(loader))
    return found


def take(batches: Iterator[Any], number: int) -> list[Prints]:
    return prints_of(itertools.islice(batches, number))


def test_batches_of_a_workers_samples_are_all_samples_of_make_loader(root: Path) -> None:
    """With one process they are its batches; of two, each is of one worker's samples."""
    dataset = open_dataset(root / "hdf5", decode=CROP)
    for shuffle in SHUFFLES:
        given: dict[str, Any] = {"num_workers": 0, "shuffle": shuffle, "seed": SEED}
        expected = make_loader(dataset, BATCH, **given)
        wanted = [prints_of(expected) for _ in range(EPOCHS)]
        assert epochs(root / "lmdb", Way("samples", 0, shuffle)) == wanted
        if shuffle is True:
            workers = epochs(root / "lmdb", Way("samples", 2, shuffle))
            assert [sorted(_flat(epoch)) for epoch in workers] == [
                sorted(_flat(epoch)) for epoch in wanted
            ]


def _flat(batches: list[Prints]) -> list[Print]:
    return [one for batch in batches for one in batch]


KINDS = ("sampler", "batches", "samples")


@pytest.mark.parametrize(
    ("num_workers", "persistent", "ended"),
    [
        (0, False, False),
        (0, False, True),
        pytest.param(1, True, True, marks=pytest.mark.slow),
        pytest.param(1, False, False, marks=pytest.mark.slow),
        pytest.param(2, True, False, marks=pytest.mark.slow),
        pytest.param(2, False, True, marks=pytest.mark.slow),
    ],
)
def test_a_sampler_resumes_with_the_next_epoch_after_the_last_batch(
    root: Path, num_workers: int, persistent: bool, ended: bool
) -> None:
    # torchdata makes two iterators of a state whose epoch ended, and reads ahead with the first.
    way = Way("sampler", num_workers, persistent=persistent)
    expected = epochs(root / "lmdb", way)
    loader, _ = start(root / "lmdb", way)
    batches = iter(loader)
    assert take(batches, EACH) == expected[0]
    if ended:
        assert next(batches, None) is None
    again, _ = start(root / "lmdb", way, loader.state_dict())
    found = [epoch for epoch in (prints_of(again) for _ in range(3)) if epoch]
    assert found[:2] == expected[1:]


@pytest.mark.parametrize(
    ("kind", "num_workers", "persistent"),
    [
        ("batches", 0, False),
        ("samples", 0, False),
        ("batches", 1, True),
        pytest.param("samples", 2, True, marks=pytest.mark.slow),
        pytest.param("batches", 2, False, marks=pytest.mark.slow),
        pytest.param("samples", 1, False, marks=pytest.mark.slow),
    ],
)
def test_an_iterable_dataset_resumes_with_the_epoch_set_after_the_end(
    root: Path, kind: str, num_workers: int, persistent: bool
) -> None:
    way = Way(kind, num_workers, persistent=persistent)
    expected = epochs(root / "lmdb", way)
    loader, named = start(root / "lmdb", way)
    named.set_epoch(0)
    batches = iter(loader)
    assert take(batches, len(expected[0])) == expected[0]
    assert next(batches, None) is None
    again, named = start(root / "lmdb", way, loader.state_dict())
    for epoch in (1, 2):
        named.set_epoch(epoch)
        assert prints_of(again) == expected[epoch]


@pytest.mark.parametrize(
    "way",
    [Way("batches", 0), pytest.param(Way("batches", 2), marks=pytest.mark.slow), Way("samples", 2)],
    ids=str,
)
def test_an_epoch_without_set_epoch_resumes(root: Path, way: Way) -> None:
    expected = epochs(root / "lmdb", way)[0]
    loader, _ = start(root / "lmdb", way)
    assert take(iter(loader), 3) == expected[:3]
    again, _ = start(root / "lmdb", way, loader.state_dict())
    assert prints_of(again) == expected[3:]


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset in each format whose labels are its rows: so an epoch has each label once."""
    root = tmp_path_factory.mktemp("numbered")
    samples = [{"image": np.full((5, 5, 3), n, np.uint8), "label": n} for n in range(NUMBERS)]
    schema = {"label": Field("label", classes=NUMBERS)}
    for to in FORMATS:
        convert(samples, root / to, to=to, pixels="rgb", schema=schema)  # type: ignore[arg-type]
    return root


NUMBERS = 29


class Stop(NamedTuple):
    """A run of one rank that stops early."""

    to: str
    way: Way
    epoch: int
    batches: int
    place: tuple[int, int] = (0, 1)
    """Rank and number of ranks."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "stop",
    [
        Stop("lmdb", Way("batches", 2), 1, 1),
        Stop("hdf5", Way("samples", 2), 2, 1, (1, 2)),
        Stop("webdataset", Way("samples", 1), 1, 0),
        Stop("lmdb", Way("batches", 2, persistent=True), 2, 0, (0, 2)),
        *(
            pytest.param(
                Stop(to, Way(kind, workers, True, persistent and workers > 0), epoch, stop, place),
                marks=pytest.mark.slow,
            )
            for to, kind, workers, persistent, epoch, stop, place in pairwise(
                FORMATS,
                ("batches", "samples"),
                [0, 1, 2],
                [False, True],
                [0, 1, 2],
                [0, 1, 2],
                [(0, 1), (0, 2), (1, 2), (2, 3)],
            )
        ),
    ],
    ids=str,
)
def test_a_state_saved_before_each_worker_has_yielded_loses_and_repeats_nothing(
    numbered: Path, stop: Stop
) -> None:
    """It resumes without ``set_epoch``; all ranks together read each label once."""
    path, epoch, (rank, world_size) = numbered / stop.to, stop.epoch, stop.place
    labels: list[int] = []
    for this in range(world_size):
        this_rank = Rank(rank=this, world_size=world_size, remainder="exact")
        loader, named = start(path, stop.way, this_rank=this_rank)
        if this != rank:
            named.set_epoch(epoch)
            labels += itertools.chain(*(batch[1].tolist() for batch in loader))
            continue
        if stop.way.persistent and epoch:  # its workers have read another epoch before
            named.set_epoch(epoch - 1)
            assert len(list(loader)) > 0
        named.set_epoch(epoch)
        batches = iter(loader)
        labels += itertools.chain(*(b[1].tolist() for b in itertools.islice(batches, stop.batches)))
        state = loader.state_dict()
        del batches, loader
        again, _ = start(path, stop.way, state, this_rank)
        labels += itertools.chain(*(batch[1].tolist() for batch in again))
    assert sorted(labels) == list(range(NUMBERS))


def test_random_operations_of_a_subset_resume(root: Path) -> None:
    def new(state: Any = None) -> Any:
        dataset = Subset(open_dataset(root / "lmdb", decode=CROP), range(20, 1, -2))
        sampler = EpochBatchSampler(dataset, BATCH, shuffle=True, seed=SEED)
        loader = StatefulDataLoader(
            dataset, batch_sampler=sampler, num_workers=1, multiprocessing_context="fork"
        )
        loader.load_state_dict(state or {})
        return loader

    dataset = Subset(open_dataset(root / "lmdb", decode=CROP), range(20, 1, -2))
    options: dict[str, Any] = {"num_workers": 0}
    whole = make_loader(dataset, BATCH, shuffle=True, seed=SEED, **options)
    expected = prints_of(whole) + prints_of(whole)
    first = new()
    prints_of(first)
    assert take(iter(first), 1) == expected[3:4]
    assert prints_of(new(first.state_dict())) == expected[4:]


def test_a_state_of_another_order_or_dataset_is_refused(root: Path) -> None:
    # Without workers: torchdata takes 5 s to end each worker that met an error at its start.
    for kind in KINDS:
        loader, _ = start(root / "lmdb", Way(kind, 0))
        assert len(take(iter(loader), 1)) == 1
        state = loader.state_dict()
        other, _ = start(root / "lmdb", Way(kind, 0, shuffle=False), state)
        with refused(StateMismatch, "order"):
            iter(other)
        other, _ = start(root / "others/lmdb", Way(kind, 0), state)
        with refused(StateMismatch, "dataset"):
            iter(other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_workers_state_is_small(root: Path, kind: str) -> None:
    loader, _ = start(root / "lmdb", Way(kind, 1))
    assert len(take(iter(loader), 2)) == 2
    assert len(pickle.dumps(loader.state_dict())) < 2000
