"""Division of an epoch: no duplicates, nothing missing, and equal counts for all ranks."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from shardkit import Rank
from shardkit.errors import UsageError
from shardkit.sampling.ranks import (
    REMAINDERS,
    Remainder,
    ResolvedRank,
    Step,
    count_samples,
    count_steps,
    steps,
)


class Case(NamedTuple):
    """A partly read epoch, and ranks that read the rest."""

    size: int
    batch: int
    world_size: int
    consumed: int

    @property
    def rest(self) -> int:
        return self.size - self.consumed

    def of(self, remainder: Remainder, *, drop_last: bool = False) -> list[list[Step]]:
        """Return the steps of each rank."""
        return [
            list(steps(self.size, self.batch, this_rank, self.consumed))
            for this_rank in ranks(self.world_size, remainder, drop_last=drop_last)
        ]


def ranks(world_size: int, remainder: Remainder, *, drop_last: bool = False) -> list[ResolvedRank]:
    return [ResolvedRank(rank, world_size, remainder, drop_last) for rank in range(world_size)]


def positions(every: list[list[Step]]) -> list[int]:
    """Return the samples of all ranks, by step and rank."""
    return [
        position
        for one in itertools.zip_longest(*every)
        for step in one
        if step is not None
        for position in range(step.start, step.stop)
    ]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.integers(0, 70))
    return Case(size, draw(st.integers(1, 9)), draw(st.integers(1, 6)), draw(st.integers(0, size)))


MODES = [(remainder, False) for remainder in REMAINDERS] + [("drop", True), ("pad", True)]
"""All that may be asked for together."""


@given(cases())
def test_exact_ranks_read_every_sample_once_and_in_order(case: Case) -> None:
    assert positions(case.of("exact")) == list(range(case.consumed, case.size))


@given(cases())
def test_exact_ranks_differ_by_one_sample_in_the_last_step_at_most(case: Case) -> None:
    every = case.of("exact")
    counts = [sum(step.stop - step.start for step in own) for own in every]
    assert counts == sorted(counts, reverse=True)
    assert max(counts) - min(counts) <= 1
    assert len(every[0]) - len(every[-1]) <= 1
    assert all(step.stop > step.start for own in every for step in own)


@given(cases())
def test_dropping_leaves_out_fewer_samples_than_ranks_and_only_the_last(case: Case) -> None:
    left_out = case.rest % case.world_size
    assert positions(case.of("drop")) == list(range(case.consumed, case.size - left_out))


@given(cases())
def test_padding_repeats_fewer_samples_than_ranks_and_only_at_the_end(case: Case) -> None:
    added = -case.rest % case.world_size
    assert positions(case.of("pad")) == list(range(case.consumed, case.size + added))


@given(cases(), st.sampled_from(REMAINDERS[:2]))
def test_a_smaller_step_may_be_left_out(case: Case, remainder: Any) -> None:
    every = case.of(remainder, drop_last=True)
    left_out = case.rest % (case.batch * case.world_size)
    assert positions(every) == list(range(case.consumed, case.size - left_out))
    assert {step.stop - step.start for own in every for step in own} <= {case.batch}


@given(cases(), st.sampled_from(REMAINDERS[:2]), st.booleans())
def test_ranks_have_the_same_number_of_batches_and_sizes(
    case: Case, remainder: Remainder, drop_last: bool
) -> None:
    # Otherwise a collective call of one rank waits for ever for the others.
    every = case.of(remainder, drop_last=drop_last)
    sizes = [[step.stop - step.start for step in own] for own in every]
    assert all(one == sizes[0] for one in sizes)


@given(cases(), st.sampled_from(MODES))
def test_after_each_step_a_prefix_of_the_epoch_is_read(case: Case, mode: tuple[str, bool]) -> None:
    every = case.of(mode[0], drop_last=mode[1])  # type: ignore[arg-type]
    done = case.consumed
    for one in itertools.zip_longest(*every):
        parts = [step for step in one if step is not None]
        assert [step.start for step in parts] == [done, *(step.stop for step in parts[:-1])]
        (consumed,) = {step.consumed for step in parts}  # all ranks say the same
        done = parts[-1].stop
        # What is left out at the end counts as read: nothing of the epoch comes after it.
        assert min(done, case.size) == consumed or (mode[0] == "drop" and consumed == case.size)
        assert consumed <= case.size


@given(cases(), st.sampled_from(MODES))
def test_counts_match_the_steps(case: Case, mode: tuple[str, bool]) -> None:
    for this_rank in ranks(case.world_size, mode[0], drop_last=mode[1]):  # type: ignore[arg-type]
        found = list(steps(case.size, case.batch, this_rank, case.consumed))
        assert count_steps(case.size, case.batch, this_rank, case.consumed) == len(found)
        full = list(steps(case.size, case.batch, this_rank))
        assert count_steps(case.size, case.batch, this_rank) == len(full)
        assert count_samples(case.size, case.batch, this_rank) == sum(
            s.stop - s.start for s in full
        )


@given(cases(), st.sampled_from(MODES))
def test_steps_resume_after_each_step(case: Case, mode: tuple[str, bool]) -> None:
    for this_rank in ranks(case.world_size, mode[0], drop_last=mode[1]):  # type: ignore[arg-type]
        found = list(steps(case.size, case.batch, this_rank, case.consumed))
        for number, step in enumerate(found):
            again = list(steps(case.size, case.batch, this_rank, step.consumed))
            assert again == found[number + 1 :]


@given(
    st.integers(0, 200),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(0, 4)), max_size=5),
    cases(),
)
def test_other_ranks_and_batches_read_exactly_the_rest(
    size: int, stops: list[tuple[int, int, int]], last: Case
) -> None:
    read: list[int] = []
    consumed = 0
    for batch, world_size, number in stops:
        every = [own[:number] for own in Case(size, batch, world_size, consumed).of("exact")]
        read += positions(every)
        consumed = max([consumed, *(step.consumed for own in every for step in own)])
        assert consumed == len(read)
    read += positions(Case(size, last.batch, last.world_size, consumed).of("exact"))
    assert read == list(range(size))


@given(cases(), cases(), st.integers(0, 5))
def test_changing_ranks_mid_epoch_drops_only_the_indivisible_rest(
    first: Case, second: Case, number: int
) -> None:
    whole = first.size // (first.batch * first.world_size)
    every = [own[: min(number, whole)] for own in first._replace(consumed=0).of("drop")]
    consumed = max([0, *(step.consumed for own in every for step in own)])
    rest = Case(first.size, second.batch, second.world_size, consumed).of("drop")
    odd = (first.size - consumed) % second.world_size
    assert positions(every) + positions(rest) == list(range(first.size - odd))


@pytest.mark.parametrize("remainder", REMAINDERS)
def test_a_finished_epoch_has_no_steps(remainder: Any) -> None:
    for size, this_rank in itertools.product((0, 5, 12), ranks(3, remainder)):
        assert list(steps(size, 2, this_rank, size)) == []
        assert count_steps(size, 2, this_rank, size) == 0
        assert list(steps(size, 2, this_rank, size + 4)) == []
        assert count_steps(size, 2, this_rank, size + 4) == 0


def test_the_subsets_are_frozen() -> None:
    # 17 samples for 3 ranks in batches of 2: two whole steps of 6, and 5 are left.
    found = {remainder: Case(17, 2, 3, 0).of(remainder) for remainder in REMAINDERS}
    for rank, (start, stop) in enumerate([(0, 2), (2, 4), (4, 6)]):
        for remainder in REMAINDERS:
            assert found[remainder][rank][:2] == [
                Step(start, stop, 6),
                Step(start + 6, stop + 6, 12),
            ]
    assert [own[2:] for own in found["drop"]] == [[Step(12 + r, 13 + r, 17)] for r in range(3)]
    assert [own[2] for own in found["pad"]] == [Step(12 + 2 * r, 14 + 2 * r, 17) for r in range(3)]
    assert [own[2][:2] for own in found["exact"]] == [(12, 14), (14, 16), (16, 17)]


def test_fewer_samples_than_ranks_are_none_some_or_repeated() -> None:
    assert Case(2, 4, 3, 0).of("drop") == [[], [], []]
    assert Case(2, 4, 3, 0).of("exact") == [[Step(0, 1, 2)], [Step(1, 2, 2)], []]
    assert Case(2, 4, 3, 0).of("pad") == [[Step(n, n + 1, 2)] for n in range(3)]


WRONG: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"remainder": "even"}, ("remainder='even'", "drop, pad, exact")),
    ({"remainder": None}, ("remainder=None",)),
    ({"remainder": "exact", "drop_last": True}, ("remainder='exact'", "drop_last")),
    ({"rank": 0}, ("rank", "world_size")),
    ({"world_size": 2}, ("rank", "world_size")),
    ({"rank": 2, "world_size": 2}, ("rank=2", "world_size=2")),
    ({"rank": -1, "world_size": 2}, ("rank=-1",)),
    ({"rank": "0", "world_size": 2}, ("rank='0'",)),
    ({"rank": 0, "world_size": 2.5}, ("world_size=2.5",)),
    ({"rank": 0, "world_size": 0}, ("world_size=0",)),
]


def test_options_that_contradict_each_other_are_a_usage_error() -> None:
    for options, facts in WRONG:
        with refused(UsageError, *facts):
            Rank(**options)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of rank 1 of 4."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    return monkeypatch


@pytest.mark.usefixtures("launched")
def test_the_rank_comes_from_the_option_then_the_group_then_the_environment() -> None:
    options: dict[str, Any] = {"remainder": "pad", "drop_last": True}
    given = Rank(rank=2, world_size=3, **options)
    assert given.resolved((0, 2)) == ResolvedRank(2, 3, "pad", True)
    assert Rank(**options).resolved((0, 2)) == ResolvedRank(0, 2, "pad", True)
    assert Rank(**options).resolved(None) == ResolvedRank(1, 4, "pad", True)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE"])
def test_without_a_launcher_there_is_one_rank(launched: pytest.MonkeyPatch, missing: str) -> None:
    launched.delenv(missing)
    assert Rank().resolved(None) == ResolvedRank(0, 1, "drop", False)


def test_an_invalid_environment_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, world_size, facts in (
        ("x", "2", ("RANK='x'", "WORLD_SIZE='2'")),
        ("0", "", ("RANK='0'", "WORLD_SIZE=''")),
        ("2", "2", ("rank=2",)),
        ("-1", "2", ("rank=-1",)),
        ("0", "0", ("world_size=0",)),
    ):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", world_size)
        with refused(UsageError, *facts):
            Rank().resolved(None)
        assert Rank(rank=0, world_size=1).resolved(None).world_size == 1  # it is not asked
