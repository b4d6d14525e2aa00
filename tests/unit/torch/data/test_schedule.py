"""Batches of an epoch as rows, the position of a run, and valid states."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from helpers import FORMATS
from hypothesis import given
from hypothesis import strategies as st
from loading import make_datasets
from pairwise import pairwise
from refusals import refused
from torch.utils.data import ConcatDataset, Subset

from shardkit import BlockShuffle, Rank, UsageError, open_dataset
from shardkit.errors import StateMismatch
from shardkit.sampling.order import Order
from shardkit.torch.data import schedule as schedule_module
from shardkit.torch.data.resume import ResumeState, fingerprint
from shardkit.torch.data.schedule import BatchSchedule, Request

SIZE = 11


def a_schedule(size: int = SIZE, batch: int = 3, **options: Any) -> BatchSchedule:
    """Return a schedule of 4 batches, unless options say otherwise."""
    this_rank = Rank(**{"rank": 0, "world_size": 1, **options.pop("rank", {})})
    return BatchSchedule(Order(size=size, **options), batch, this_rank)


def schedules(
    world_size: int, batch: int = 3, remainder: str = "drop", **options: Any
) -> list[BatchSchedule]:
    """Return the schedule of each rank."""
    ranks = [
        {"rank": rank, "world_size": world_size, "remainder": remainder}
        for rank in range(world_size)
    ]
    return [a_schedule(batch=batch, rank=this_rank, **options) for this_rank in ranks]


def plain(requests: Iterator[Request]) -> list[tuple[Any, ...]]:
    """Return requests as values that can be compared."""
    return [(*r[:2], r.rows.tolist(), *r[3:5], r.ahead.tolist()) for r in requests]


def test_an_invalid_number_of_samples_is_a_usage_error() -> None:
    batches: list[Any] = [0, -1, True, 1.5, "2", None]
    for batch in batches:
        with refused(UsageError, f"batch_size={batch!r}"):
            BatchSchedule(Order(size=5), batch, Rank(rank=0, world_size=1))


@given(
    st.integers(0, 60),
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from(["drop", "pad", "exact"]),
    st.sampled_from([False, True, BlockShuffle(rows=2, buffer=6)]),
)
def test_requests_of_all_ranks_follow_the_order_of_the_epoch(
    size: int, batch: int, world_size: int, remainder: str, shuffle: bool | BlockShuffle
) -> None:
    ranks = schedules(world_size, batch, remainder, size=size, shuffle=shuffle, seed=3)
    every = [list(schedule.requests(7)) for schedule in ranks]
    assert [len(own) for own in every] == list(map(len, ranks))
    assert [sum(len(r.rows) for r in own) for own in every] == [
        schedule.samples for schedule in ranks
    ]
    assert {(r.epoch, r.seed) for own in every for r in own} <= {(7, 3)}
    rows: list[int] = []
    padding: list[int] = []
    for one in itertools.zip_longest(*every):
        for request in one:
            if request is not None:
                real = len(request.rows) - request.padding
                rows += request.rows[:real].tolist()
                padding += request.rows[real:].tolist()
    expected = ranks[0].order.rows(7, np.arange(size)).tolist()
    left_out = size % world_size if remainder == "drop" else 0
    assert rows == expected[: size - left_out]
    added = -size % world_size if remainder == "pad" else 0
    assert padding == list(itertools.islice(itertools.cycle(expected), added))


@pytest.mark.parametrize(
    ("at_once", "consumed", "remainder"),
    pairwise([1, 2, 7, 10**6], [0, 3, 60, 61], ["drop", "pad", "exact"]),
)
def test_looking_up_rows_together_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, at_once: int, consumed: int, remainder: str
) -> None:
    for schedule in schedules(2, 3, remainder, size=61, shuffle=BlockShuffle(rows=4, buffer=8)):
        expected = plain(schedule.requests(1, consumed))
        monkeypatch.setattr(schedule_module, "_AT_ONCE", at_once)
        assert plain(schedule.requests(1, consumed)) == expected
        monkeypatch.undo()


def test_the_first_batch_costs_no_more_in_a_large_dataset() -> None:
    # All rows of this one would take 8 TB.
    request = next(a_schedule(10**12, 64, shuffle=True).requests(3, 5 * 10**11))
    assert len(request.rows) == 64
    assert request.consumed == 5 * 10**11 + 64


def test_a_request_reads_ahead_for_its_own_samples() -> None:
    for schedule in schedules(2, 4, "pad", size=63, shuffle=BlockShuffle(rows=4, buffer=16)):
        start = schedule.rank.rank * 4
        for request in schedule.requests(2):
            stop = min(start + len(request.rows), 63)
            expected = schedule.order.ahead(2, np.arange(start, stop))
            assert request.ahead.tolist() == expected.tolist()
            start += 8
            if start + 4 > 63:
                break


def test_padding_never_exceeds_a_batch() -> None:
    every = [list(schedule.requests(0)) for schedule in schedules(5, 3, "pad", size=2)]
    assert [[(r.rows.tolist(), r.padding) for r in own] for own in every] == [
        [([0], 0)],
        [([1], 0)],
        [([0], 1)],
        [([1], 1)],
        [([0], 1)],
    ]
    assert {own[0].consumed for own in every} == {2}


def test_an_empty_dataset_has_no_batches() -> None:
    for remainder in ("drop", "pad", "exact"):
        for schedule in schedules(2, 3, remainder, size=0, shuffle=True):
            assert (len(schedule), schedule.samples, list(schedule.requests(0))) == (0, 0, [])


def test_the_rank_comes_from_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "5")
    order = Order(size=12)
    assert BatchSchedule(order, 2, Rank()).rank[:2] == (0, 5)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    assert BatchSchedule(order, 2, Rank()).rank[:2] == (2, 3)
    assert BatchSchedule(order, 2, Rank(rank=0, world_size=1)).rank[:2] == (0, 1)
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert BatchSchedule(order, 2, Rank()).rank[:2] == (0, 5)


def a_resume_state(**options: Any) -> ResumeState:
    return ResumeState(range(options.get("size", SIZE)), a_schedule(**options))


def state(epoch: int, consumed: int, **changes: Any) -> dict[str, Any]:
    """Return a handwritten state of `a_resume_state`."""
    return {
        "version": 1,
        "dataset": "range of 11",
        "samples": 11,
        "seed": 0,
        "order": "shuffle=False",
        "epoch": epoch,
        "consumed": consumed,
        **changes,
    }


def begins(resume: ResumeState) -> tuple[int, int]:
    """Start an iteration; return its epoch and the number of samples already read."""
    run = resume.begin()
    return run.epoch, run.consumed


Deed = Callable[[ResumeState], object]


def sets(epoch: int) -> Deed:
    return lambda resume: resume.set_epoch(epoch)


def loads(epoch: int, consumed: int) -> Deed:
    return lambda resume: resume.load(state(epoch, consumed))


def reads(consumed: int) -> Deed:
    """Start an iteration and abandon it."""

    def read(resume: ResumeState) -> None:
        resume.advance(resume.begin(), consumed)

    return read


def reads_all(resume: ResumeState) -> None:
    run = resume.begin()
    resume.advance(run, SIZE)
    resume.finish(run)


POSITIONS: list[tuple[list[Deed], tuple[int, int]]] = [
    ([], (0, 0)),
    ([reads_all], (1, 0)),
    ([reads_all, reads_all], (2, 0)),
    # An iteration that was broken off is not gone on with unless its state is loaded.
    ([reads(3)], (1, 0)),
    ([reads(0)], (1, 0)),
    ([reads(3), reads(3)], (2, 0)),
    ([reads(SIZE)], (1, 0)),
    # set names an epoch, whatever was before.
    ([sets(5)], (5, 0)),
    ([sets(5), sets(0)], (0, 0)),
    ([sets(0)], (0, 0)),
    ([sets(5), reads_all], (6, 0)),
    ([sets(5), reads_all, sets(5)], (5, 0)),
    ([sets(5), reads(3), sets(5)], (5, 0)),
    ([reads(SIZE), sets(0)], (0, 0)),
    # A loaded state is gone on with, unless another epoch is named.
    ([loads(4, 6)], (4, 6)),
    ([loads(4, 6), sets(4)], (4, 6)),
    ([loads(4, 6), sets(4), sets(4)], (4, 6)),
    ([loads(4, 6), sets(5)], (5, 0)),
    ([loads(4, 6), sets(3)], (3, 0)),
    ([loads(4, 6), sets(5), sets(4)], (4, 0)),
    ([sets(5), loads(4, 6)], (4, 6)),
    ([sets(4), loads(4, 6)], (4, 6)),
    ([loads(7, 9), loads(4, 6)], (4, 6)),
    ([reads(3), loads(4, 6)], (4, 6)),
    ([loads(4, 6), reads(9)], (5, 0)),
    ([loads(4, 6), reads(9), sets(4)], (4, 0)),
    ([loads(4, 0)], (4, 0)),
    # Of a whole epoch nothing is left: the next follows, or nothing if that one is named.
    ([loads(4, SIZE)], (5, 0)),
    ([loads(4, SIZE), sets(5)], (5, 0)),
    ([loads(4, SIZE), sets(4)], (4, SIZE)),
    ([loads(4, SIZE), sets(9)], (9, 0)),
    ([loads(4, SIZE), reads_all], (6, 0)),
]


def test_an_iteration_starts_at_the_right_position() -> None:
    for number, (deeds, expected) in enumerate(POSITIONS):
        resume = a_resume_state()
        for deed in deeds:
            deed(resume)
        assert begins(resume) == expected, f"case {number}"


def test_restart_reads_all_of_an_epoch_even_if_it_was_loaded() -> None:
    resume = a_resume_state()
    resume.load(state(4, 6))
    resume.restart(4)
    assert begins(resume) == (4, 0)


def test_the_epoch_is_the_current_or_the_next_one() -> None:
    resume = a_resume_state()
    assert resume.epoch == 0
    run = resume.begin()
    resume.advance(run, 3)
    assert resume.epoch == 0
    resume.advance(run, SIZE)
    resume.finish(run)
    assert resume.epoch == 1
    resume.set_epoch(6)
    assert resume.epoch == 6
    resume.load(state(4, 6))
    assert resume.epoch == 4
    resume.load(state(4, SIZE))
    assert resume.epoch == 5
    resume.set_epoch(4)
    assert resume.epoch == 4


def test_a_state_moves_another_run_to_the_same_position() -> None:
    resume = a_resume_state()
    assert resume.state() == state(0, 0)
    run = resume.begin()
    assert resume.state() == state(0, 0)
    resume.advance(run, 6)
    assert resume.state() == state(0, 6)
    other = a_resume_state()
    other.load(json.loads(json.dumps(resume.state())))
    assert other.state() == state(0, 6)  # before anything is read, too
    resume.advance(run, SIZE)
    resume.finish(run)
    assert resume.state() == state(1, 0)


@pytest.mark.parametrize(
    "overtake", [ResumeState.begin, sets(0), sets(3), loads(4, 6), lambda p: p.restart(0)]
)
def test_a_superseded_iteration_changes_nothing(overtake: Deed) -> None:
    resume = a_resume_state()
    run = resume.begin()
    resume.advance(run, 3)
    overtake(resume)
    expected = resume.state(), resume.epoch
    resume.advance(run, 9)
    resume.finish(run)
    assert (resume.state(), resume.epoch) == expected


def test_an_indivisible_rest_does_not_keep_an_epoch_open() -> None:
    # 2 ranks drop the last of 11 samples, and drop_last a smaller step.
    odd = ResumeState(range(SIZE), a_schedule(batch=1, rank={"rank": 0, "world_size": 2}))
    odd.load(state(4, 10))
    assert (odd.epoch, begins(odd)) == (5, (5, 0))
    last = ResumeState(range(SIZE), a_schedule(batch=4, rank={"drop_last": True}))
    last.load(state(4, 8))
    assert (last.epoch, begins(last)) == (5, (5, 0))
    for rank in range(2):  # the other has nothing to read, but must not go ahead
        this_rank = {"rank": rank, "world_size": 2, "remainder": "exact"}
        exact = ResumeState(range(SIZE), a_schedule(batch=1, rank=this_rank))
        exact.load(state(4, 10))
        assert (exact.epoch, begins(exact)) == (4, (4, 10))


def test_epochs_of_an_empty_dataset_advance() -> None:
    resume = a_resume_state(size=0)
    for epoch in range(3):
        run = resume.begin()
        assert (run.epoch, run.consumed) == (epoch, 0)
        resume.finish(run)


def test_an_invalid_epoch_is_a_usage_error_and_changes_nothing() -> None:
    resume = a_resume_state()
    resume.load(state(4, 6))
    epochs: list[Any] = [-1, 1.0, True, "1", None, np.float64(1)]
    for epoch in epochs:
        with refused(UsageError, f"epoch={epoch!r}"):
            resume.set_epoch(epoch)
    assert begins(resume) == (4, 6)


def test_an_epoch_may_be_an_integer_of_numpy_and_its_state_is_json() -> None:
    resume = a_resume_state()
    resume.set_epoch(int(np.int64(3)))
    expected = resume.state()
    other = a_resume_state()
    other.set_epoch(np.int64(3))  # type: ignore[arg-type]
    assert json.loads(json.dumps(other.state())) == expected == state(3, 0)


def test_a_state_includes_the_shuffle_and_the_seed() -> None:
    every, few = "BlockShuffle(rows=16, buffer=16384)", "BlockShuffle(rows=2, buffer=5)"
    for options, changes in (
        ({"shuffle": True}, {"order": "shuffle=True"}),
        ({"shuffle": BlockShuffle()}, {"order": f"shuffle={every}"}),
        ({"shuffle": BlockShuffle(rows=2, buffer=5)}, {"order": f"shuffle={few}"}),
        ({"seed": -(2**63)}, {"seed": -(2**63)}),
    ):
        resume = a_resume_state(**options)
        assert resume.state() == state(0, 0, **changes)
        resume.load(json.loads(json.dumps(state(4, 6, **changes))))
        assert begins(resume) == (4, 6)
        with pytest.raises(StateMismatch):
            resume.load(state(4, 6))
        with pytest.raises(StateMismatch):
            a_resume_state().load(state(4, 6, **changes))


def test_a_state_excludes_batch_size_and_ranks() -> None:
    for other in (1, 4, SIZE):
        resume = a_resume_state(batch=other, rank={"rank": 1, "world_size": 2, "remainder": "pad"})
        resume.load({**state(4, 6), "worker": 3, "more": [1]})
        assert begins(resume) == (4, 6)


def test_the_state_of_a_worker_is_not_the_state_of_a_run() -> None:
    resume = a_resume_state()
    resume.load(state(2, 3))
    part = state(4, 6, worker=1, num_workers=2, given=1)
    with pytest.raises(StateMismatch, match="worker"):
        resume.load(part)
    assert begins(resume) == (2, 3)
    resume.load(part, of_worker=True)
    assert begins(resume) == (4, 6)


MISSING = object()

WRONG: list[tuple[str, Any, tuple[str, ...]]] = [
    ("version", 2, ("version 2", "version 1")),
    ("version", MISSING, ("version None",)),
    ("dataset", "range of 12", ("'range of 12'", "'range of 11'")),
    ("dataset", MISSING, ("dataset is None",)),
    ("samples", 12, ("samples is 12", "11")),
    ("seed", 1, ("seed is 1", "0")),
    ("seed", "0", ("seed is '0'",)),
    ("order", "shuffle=True", ("'shuffle=True'", "'shuffle=False'")),
    ("order", MISSING, ("order is None",)),
    *(("epoch", value, ()) for value in (MISSING, -1, 1.0, True, "1")),
    *(("consumed", value, ()) for value in (MISSING, -1, 2.5, None)),
    ("consumed", 12, ("12 of 11",)),
]


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    for name, value, facts in WRONG:
        resume = a_resume_state()
        resume.load(state(2, 3))
        wrong = {**state(4, 6), name: value}
        if value is MISSING:
            del wrong[name]
        with refused(StateMismatch, *facts):
            resume.load(wrong)
        assert resume.state() == state(2, 3)
        assert begins(resume) == (2, 3)


def test_garbage_is_refused_as_a_state() -> None:
    others: list[Any] = [None, 3, "state", [], {}, [("epoch", 1)], {"epoch": 1}]
    for rubbish in others:
        with refused(StateMismatch):
            a_resume_state().load(rubbish)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets of eight images in all formats, below ``one`` and others below ``other``."""
    root = tmp_path_factory.mktemp("schedule")
    make_datasets(root / "one", 8)
    make_datasets(root / "other", 8, first=1)
    return root


def test_a_dataset_is_identified_by_its_content(root: Path, tmp_path: Path) -> None:
    dataset = open_dataset(root / "one/lmdb")
    shutil.copytree(root / "one/lmdb", tmp_path / "copy")
    copy = open_dataset(tmp_path / "copy", str, str, "numpy", verify=False)
    assert fingerprint(copy) == fingerprint(dataset) == dataset.manifest.content_digest[:32]
    known = {
        fingerprint(open_dataset(root / name / to)) for name in ("one", "other") for to in FORMATS
    }
    assert len(known) == 2  # the same in each format


def test_subsets_and_chains_are_identified_by_their_parts(root: Path) -> None:
    one, other = (open_dataset(root / name / "lmdb") for name in ("one", "other"))
    every = [
        one,
        Subset(one, range(8)),
        Subset(one, [0, 1, 2]),
        Subset(one, [2, 1, 0]),
        Subset(one, [0, 1]),
        Subset(one, []),
        Subset(other, [0, 1, 2]),
        Subset(Subset(one, [0, 1, 2]), [0, 1]),
        ConcatDataset([one]),
        ConcatDataset([one, other]),
        ConcatDataset([other, one]),
        ConcatDataset([ConcatDataset([one]), other]),
        ConcatDataset([Subset(one, [0, 1, 2]), other]),
    ]
    assert len({fingerprint(dataset) for dataset in every}) == len(every)


def test_the_same_rows_are_the_same_subset_in_any_container(root: Path) -> None:
    dataset = open_dataset(root / "one/lmdb")
    kinds: list[Any] = [[1, 2, 3], (1, 2, 3), range(1, 4), np.array([1, 2, 3], np.int32)]
    kinds.append(torch.tensor([1, 2, 3]))
    assert len({fingerprint(Subset(dataset, kind)) for kind in kinds}) == 1


def test_other_datasets_are_identified_by_type_and_length() -> None:
    assert fingerprint(range(8)) == "range of 8"
    assert fingerprint([1]) == "list of 1"
    numbers: Any = [1, 2, 3]
    known = [fingerprint(Subset(numbers, rows)) for rows in ([0, 1], [0, 2], [0, 1])]
    assert known[0] == known[2] != known[1]
