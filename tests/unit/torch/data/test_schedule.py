"""Batches of an epoch as rows, the position of a run, and valid states."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pairwise import pairwise

from shardkit import BlockShuffle, Rank
from shardkit.sampling.order import Order
from shardkit.torch.data import schedule as schedule_module
from shardkit.torch.data.resume import ResumeState
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


def test_an_epoch_may_be_an_integer_of_numpy_and_its_state_is_json() -> None:
    resume = a_resume_state()
    resume.set_epoch(int(np.int64(3)))
    expected = resume.state()
    other = a_resume_state()
    other.set_epoch(np.int64(3))  # type: ignore[arg-type]
    assert json.loads(json.dumps(other.state())) == expected == state(3, 0)
