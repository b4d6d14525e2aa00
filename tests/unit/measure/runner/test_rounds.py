"""Rounds: whose turn it is, what is warm, and what happens when a contender fails."""

from __future__ import annotations

import pytest
from staged import FakeServed, Stage

from shardkit.errors import UsageError
from shardkit.measure.runner.process import Seen
from shardkit.measure.runner.rounds import Contender, run_interleaved
from shardkit.measure.runner.spec import Subject, parse_loading


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage.put_up(monkeypatch)


def contender(
    path: str, loader: str = "thread", cache: str = "warm", limit: int | None = None
) -> Contender:
    subject = Subject(path=path, limit=limit)
    loading = parse_loading(loader, 10)
    return Contender(name=path, subject=subject, loading=loading, cache=cache)


def test_each_is_first_in_its_turn_and_the_first_round_does_not_count(stage: Stage) -> None:
    told: list[tuple[str, int, int]] = []

    outcomes = run_interleaved(
        [contender("a"), contender("b"), contender("c")],
        rounds=3,
        seconds=1,
        watch=lambda text, done, total: told.append((text, done, total)),
    )

    assert "".join(event[1] for event in stage.asked("look")) == "abcbcacababc"
    assert [len(each.seen) for each in outcomes] == [3, 3, 3]
    assert [done for _, done, _ in told] == list(range(12))
    assert {total for _, _, total in told} == {12}
    assert sorted(stage.asked("close")) == [("close", "a"), ("close", "b"), ("close", "c")]
    assert (outcomes[0].images, outcomes[0].total, outcomes[0].bytes) == (1000, 2000, 10_000)


def test_loaders_of_one_subject_share_a_process_but_for_pytorchs(stage: Stage) -> None:
    run_interleaved(
        [contender("a", "thread"), contender("a", "process"), contender("a", "plain")],
        rounds=1,
        seconds=1,
    )

    assert stage.asked("start") == [("start", "a"), ("start", "a")]


def test_one_that_fails_is_told_and_the_others_go_on(stage: Stage) -> None:
    stage.failing = {"process"}

    good, bad = run_interleaved([contender("a"), contender("a", "process")], rounds=2, seconds=1)

    assert bad.problem == "it broke"
    assert (bad.seen, bad.rate) == ([], None)
    assert len(good.seen) == 2
    assert good.rate == pytest.approx(100)
    assert stage.asked("look").count(("look", "a", "process", "warm")) == 1


def test_one_that_ends_the_process_leaves_the_others_a_new_one(stage: Stage) -> None:
    stage.failing = stage.ending = {"process"}

    bad, good = run_interleaved([contender("a", "process"), contender("a")], rounds=1, seconds=1)

    assert bad.problem == "it broke"
    assert len(good.seen) == 1
    assert len(stage.asked("start")) == 2


def test_one_that_cannot_be_opened_is_told(stage: Stage) -> None:
    stage.refusing = {"b"}

    good, bad = run_interleaved([contender("a"), contender("b")], rounds=1, seconds=1)

    assert (bad.problem, bad.seen) == ("damaged", [])
    assert len(good.seen) == 1


def test_what_cannot_be_done_as_asked_ends_all(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Seen:
        raise UsageError("no such model")

    monkeypatch.setattr(FakeServed, "look", refuse)
    with pytest.raises(UsageError, match="no such model"):
        run_interleaved([contender("a")], rounds=1, seconds=1)
    assert stage.asked("close") == [("close", "a")]


def test_files_are_dropped_before_each_cold_look(stage: Stage) -> None:
    stage.resident = 0.25

    (cold,) = run_interleaved([contender("a", cache="cold")], rounds=2, seconds=1)

    kinds = [event[0] for event in stage.events if event[0] in ("drop", "look", "warm")]
    assert kinds == ["drop", "look"] * 3
    assert cold.resident == 0.25


def test_what_is_not_known_of_cold_files_stays_unknown(stage: Stage) -> None:
    stage.resident = None

    (cold,) = run_interleaved([contender("a", cache="cold")], rounds=2, seconds=1)

    assert cold.resident is None
    assert len(cold.seen) == 2


def test_a_sample_is_read_before_it_counts_as_warm(stage: Stage) -> None:
    warm = contender("a", limit=1000)

    run_interleaved([warm, contender("a", cache="cold", limit=1000)], rounds=2, seconds=1)

    assert stage.asked("warm") == [("warm", "a")], "a cold look that read all leaves all in memory"
    first = [event[0] for event in stage.events if event[0] in ("warm", "look")]
    assert first[:2] == ["warm", "look"]


def test_after_a_cold_look_that_was_cut_it_is_read_again(stage: Stage) -> None:
    stage.images = 500  # of 1000

    run_interleaved(
        [contender("a", limit=1000), contender("a", cache="cold", limit=1000)], rounds=1, seconds=1
    )

    kinds = [event[0] for event in stage.events if event[0] in ("drop", "look", "warm")]
    assert kinds == ["warm", "look", "drop", "look", "drop", "look", "warm", "look"]
