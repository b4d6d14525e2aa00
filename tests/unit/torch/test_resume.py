"""States: what they hold, other ranks and batch sizes, and what is refused.

That each engine resumes exactly is a law of `engine/test_engine_conformance.py`.
"""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import LOADERS, Numbers, opened
from helpers import FORMATS
from loading import (
    BATCH,
    CROP,
    ROWS,
    SEED,
    Prints,
    Samples,
    Topology,
    close,
    epoch_by_hand,
    make_datasets,
    prints_of,
    read_epoch,
    row_order,
    rows_in,
    step,
)
from refusals import refused
from torch.utils.data import ConcatDataset, Subset

from shardkit import (
    BlockShuffle,
    EpochBatchSampler,
    IterableShardDataset,
    make_loader,
    open_dataset,
)
from shardkit.errors import StateMismatch

BLOCKS = BlockShuffle(rows=3, buffer=9)


TOPOLOGIES = (
    Topology("map", "thread", 0, 1, 5),
    Topology("iterable", "thread", 2, 3, 2),
    Topology("map", "process", 2, 2, 3),
    Topology("iterable", "process", 0, 4, 1),
    Topology("alone", "", 0, 2, 4),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shuffle", "before", "after"),
    [
        (shuffle, *topologies)
        for shuffle, topologies in zip(
            itertools.cycle((False, BLOCKS, BlockShuffle())),
            [*itertools.permutations(TOPOLOGIES, 2)][::2],
            strict=False,
        )
    ],
)
def test_another_topology_reads_exactly_the_rest(
    root: Path, shuffle: bool | BlockShuffle, before: Topology, after: Topology
) -> None:
    path = root / FORMATS[(before.world_size + after.batch) % 3]
    samples = Samples(path, shuffle)
    steps = -(-ROWS // (before.world_size * before.batch))
    saved, loaded = (t.ranks(path, shuffle, remainder="exact") for t in (before, after))
    for stop in sorted({1, steps // 2, steps - 1}):
        for one in saved:
            one.set_epoch(1)
        iterators = list(map(iter, saved))
        read = list(itertools.chain(*(step(iterators, samples.of(1)) for _ in range(stop))))
        (state, *_) = states = [one.state_dict() for one in saved]
        assert states == [state] * before.world_size
        assert read == samples.rows(1)[: state["consumed"]]
        for iterator in iterators:
            close(iterator)
        for one in loaded:
            one.load_state_dict(json.loads(json.dumps(state)))
        rest = read_epoch(loaded, samples.of(1))
        assert read + rest == samples.rows(1)
        if after.kind != "alone":  # whose epochs are counted by its user
            assert read_epoch(loaded, samples.of(2)) == samples.rows(2)
    for one in (*saved, *loaded):
        if hasattr(one, "close"):
            one.close()


def rest_of(
    path: Path, state: dict[str, Any], world_size: int, batch: int, **this_rank: Any
) -> list[list[Any]]:
    """Return the batches of each rank after ``state``, in threads and in the stored order."""
    ranks = Topology("map", "thread", 1, world_size, batch).ranks(path, False, **this_rank)
    for one in ranks:
        one.load_state_dict(state)
        one.set_epoch(state["epoch"])  # even if nothing is left of it for so many ranks
    return [list(one) for one in ranks]


@pytest.mark.parametrize(("world_size", "batch"), [(1, 4), (2, 3), (3, 2), (4, 5)])
def test_indivisible_rests_are_dropped_or_padded(root: Path, world_size: int, batch: int) -> None:
    for consumed in (1, 6, 14, 21, 22):
        check_rest(root / "lmdb", world_size, batch, consumed)


def check_rest(path: Path, world_size: int, batch: int, consumed: int) -> None:
    state = loader_of(path).state_dict() | {"consumed": consumed}
    left, known = ROWS - consumed, Samples(path, False).of(0)

    def every(ranks: list[list[Any]]) -> list[int]:
        steps = zip(*ranks, strict=True)
        return [row for batches in steps for one in batches for row in rows_in(one, known)]

    dropped = rest_of(path, state, world_size, batch, remainder="drop")
    assert every(dropped) == list(range(consumed, ROWS - left % world_size))

    padded = rest_of(path, state, world_size, batch, remainder="pad")
    stated = [r for together in zip(*padded, strict=True) for b in together for r in b[2].tolist()]
    repeats = -left % world_size
    assert stated == list(range(consumed, ROWS)) + [-1] * repeats
    assert every(padded)[left:] == list(range(repeats))  # from the epoch's beginning

    whole = rest_of(path, state, world_size, batch, remainder="drop", drop_last=True)
    assert {len(b[1]) for one in whole for b in one} <= {batch}
    assert sum(map(len, whole)) == left // (world_size * batch) * world_size

    for ranks in (dropped, padded, whole):
        sizes = [[len(b[1]) for b in one] for one in ranks]
        assert sizes == sizes[:1] * world_size


def loader_of(path: Path, **options: Any) -> Any:
    given = {"engine": "thread", "num_workers": 1, **options}
    return make_loader(open_dataset(path, decode=CROP), BATCH, seed=SEED, **given)


@pytest.fixture
def loader(root: Path) -> Any:
    """It shuffles, and has 12 batches in an epoch."""
    return loader_of(root / "lmdb", shuffle=True)


@pytest.fixture(scope="module")
def run(root: Path) -> list[list[Prints]]:
    """The batches of its first epochs, computed from another format."""
    dataset, order = (open_dataset(root / "hdf5", decode=CROP), row_order(shuffle=True, seed=SEED))
    return [epoch_by_hand(dataset, order, epoch, BATCH, (0, 1)) for epoch in range(4)]


def test_a_state_at_the_last_batch_leaves_nothing_of_its_epoch(
    loader: Any, run: list[list[Prints]]
) -> None:
    *_, state = [loader.state_dict() for _ in loader]
    for named, following in ((None, run[1]), (0, []), (1, run[1]), (2, run[2])):
        loader.load_state_dict(state)
        assert loader.epoch == 1
        if named is not None:
            loader.set_epoch(named)
        assert prints_of(loader) == following
    assert prints_of(loader) == run[3]


def test_setting_the_loaded_epoch_keeps_the_position_and_another_does_not(
    loader: Any, run: list[list[Prints]]
) -> None:
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    for named, following in ((0, run[0][1:]), (1, run[1])):
        loader.load_state_dict(state)
        loader.set_epoch(named)
        assert prints_of(loader) == following
    loader.load_state_dict(state)
    loader.set_epoch(1)
    loader.set_epoch(0)  # its place was given up with the first call
    assert prints_of(loader) == run[0]


def test_set_epoch_during_an_epoch_affects_the_next_iteration(
    loader: Any, run: list[list[Prints]]
) -> None:
    for number, _ in enumerate(loader):
        if number == 3:
            loader.set_epoch(2)
    assert prints_of(loader) == run[2]


@pytest.mark.slow
def test_a_run_may_be_stopped_repeatedly_and_change_its_engine(
    root: Path, run: list[list[Prints]]
) -> None:
    found: list[Prints] = []
    state = ""
    for engine in itertools.cycle(LOADERS):
        if len(found) >= 36:
            break
        if engine == "resident":  # it cannot draw what CROP does: test_resident
            continue
        dataset = open_dataset(root / "webdataset", decode=CROP)
        with opened(engine, dataset, shuffle=True, seed=SEED) as loader:
            if state:
                loader.load_state_dict(json.loads(state))
            found += prints_of(itertools.islice(loader, 5))
            state = json.dumps(loader.state_dict())
    assert found[:36] == list(itertools.chain(*run[:3]))


def test_a_dropped_rest_is_read_by_ranks_that_can_divide_it(root: Path) -> None:
    known = Samples(root / "lmdb", BLOCKS)
    two = Topology("map", "thread", 1, 2, 11).ranks(root / "lmdb", BLOCKS)
    for one in two:
        iterator = iter(one)
        next(iterator)  # 22 of 23, and two ranks cannot divide one
    (alone,) = Topology("map", "thread", 1, 1, 11).ranks(root / "lmdb", BLOCKS)
    alone.load_state_dict(two[0].state_dict())
    assert read_epoch([alone], known.of(0)) == known.rows(0)[22:]
    two[0].load_state_dict(two[1].state_dict())
    assert read_epoch(two[:1], known.of(1)) == known.rows(1)[:11]  # these two cannot: it is over


def test_a_state_is_a_few_plain_values(loader: Any) -> None:
    for _ in loader:
        state = loader.state_dict()
        assert {type(value) for value in state.values()} <= {int, str, bool, list}
        assert json.loads(json.dumps(state)) == state
        assert len(json.dumps(state)) < 200


MISSING = object()

CHANGES: list[tuple[str, Any, tuple[str, ...]]] = [
    ("version", 2, ("version 2", "version 1")),
    ("version", MISSING, ("version None",)),
    ("dataset", "0" * 32, (f"'{'0' * 32}'",)),
    ("dataset", MISSING, ("dataset is None",)),
    ("samples", ROWS - 1, (f"samples is {ROWS - 1}", f"{ROWS}")),
    ("seed", 6, ("seed is 6", f"{SEED}")),
    ("seed", "5", ("seed is '5'",)),
    ("order", "shuffle=False", ("'shuffle=False'", "'shuffle=True'")),
    ("order", MISSING, ("order is None",)),
    *(("epoch", value, ("state_dict",)) for value in (MISSING, -1, 1.0, True, "1")),
    *(("consumed", value, ("state_dict",)) for value in (MISSING, -1, 2.5, None)),
    ("consumed", ROWS + 1, ("damaged", f"{ROWS + 1} of {ROWS}")),
    ("num_workers", 2, ("worker",)),  # of the part of one worker
]
RUBBISH: tuple[Any, ...] = (
    None,
    [],
    {},
    "state",
    7,
    {"epoch": True, "consumed": 0},
    {"epoch": 0, "consumed": 1.5},
)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    loader: Any, run: list[list[Prints]]
) -> None:
    batches = iter(loader)
    next(batches)
    close(batches)
    state = loader.state_dict()
    for name, value, facts in CHANGES:
        wrong = {**state, name: value}
        if value is MISSING:
            del wrong[name]
        with refused(StateMismatch, *facts):
            loader.load_state_dict(wrong)
        assert loader.state_dict() == state
    for rubbish in RUBBISH:
        with refused(StateMismatch, "not the state"):
            loader.load_state_dict(rubbish)
        assert loader.state_dict() == state
    loader.load_state_dict(state)
    assert prints_of(loader) == run[0][1:]


HOSTILE: tuple[Any, ...] = (
    10**5000,  # Python does not convert as many digits
    10**400,
    [10**5000],
    np.arange(3),
    np.array([[1, 2], [3, 4]]),
    torch.ones(2, 2),
    float("nan"),
    "x" * 100_000,
    b"x" * 100_000,
    list(range(100_000)),
    "\n\x1b[31m",
)


def test_hostile_values_of_a_state_are_refused_in_a_short_line(root: Path) -> None:
    targets = [
        loader_of(root / "lmdb"),
        EpochBatchSampler(open_dataset(root / "lmdb"), BATCH),
        IterableShardDataset(root / "lmdb", batch_size=BATCH),
    ]
    for target in targets:
        state = target.state_dict()
        states = [state | {name: value} for name in state for value in HOSTILE]
        states += [state | {"epoch": 2**63}, {"x" * 100_000: 1, 10**5000: 2}, *HOSTILE]
        for hostile in states:
            with pytest.raises(StateMismatch) as caught:
                target.load_state_dict(hostile)
            assert len(str(caught.value)) < 600
            assert str(caught.value).isprintable()
        assert target.state_dict() == state


def test_states_distinguish_datasets(root: Path, tmp_path: Path) -> None:
    def with_state_of(saved: Any, loaded: Any) -> None:
        make_loader(loaded, 2).load_state_dict(make_loader(saved, 2).state_dict())

    dataset = open_dataset(root / "lmdb", decode=CROP)
    other = open_dataset(make_datasets(tmp_path / "other", first=100) / "lmdb", decode=CROP)
    moved = open_dataset(shutil.copytree(root / "lmdb", tmp_path / "moved"), decode="torch")
    with_state_of(dataset, moved)
    with_state_of(dataset, open_dataset(root / "hdf5"))  # of the same content
    kinds: list[Any] = [(1, 2), range(1, 3), np.array([1, 2], np.int32), torch.tensor([1, 2])]
    for rows in kinds:
        with_state_of(Subset(dataset, [1, 2]), Subset(moved, rows))
    with_state_of(ConcatDataset([dataset, other]), ConcatDataset([moved, other]))
    different: list[Any] = [
        dataset,
        other,
        Subset(dataset, range(ROWS)),
        Subset(dataset, [1, 2]),
        Subset(dataset, [2, 1]),
        Subset(dataset, [1]),
        Subset(dataset, []),
        Subset(Subset(dataset, [1, 2]), [0]),
        Subset(other, [1, 2]),
        ConcatDataset([dataset]),
        ConcatDataset([dataset, other]),
        ConcatDataset([other, dataset]),
        ConcatDataset([ConcatDataset([dataset]), other]),
        ConcatDataset([Subset(dataset, [1, 2]), other]),
        Numbers(3),
        Subset(Numbers(3), [0, 1, 2]),
        Subset(Numbers(3), [0, 2, 1]),
        range(3),
        [0, 1],
    ]
    for saved, loaded in itertools.permutations(different, 2):
        with pytest.raises(StateMismatch):
            with_state_of(saved, loaded)
