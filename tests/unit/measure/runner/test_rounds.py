"""Rounds: order, caches, failures, and Ctrl-C."""

from __future__ import annotations

import pytest
from refusals import refused
from staged import FakeProcess, Stage

from shardkit.errors import UsageError
from shardkit.measure.runner.rounds import Candidate, Spread, run_interleaved
from shardkit.measure.runner.spec import StopCondition, Subject, parse_loader
from shardkit.measure.runner.timing import Measurement


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage.install(monkeypatch)


def candidate(
    path: str, loader: str = "thread", cache: str = "warm", limit: int | None = None
) -> Candidate:
    subject = Subject(path=path, limit=limit)
    stop = StopCondition(seconds=1, epochs=3 if cache == "cold" else None, whole=cache == "cold")
    return Candidate(subject=subject, loader=parse_loader(loader, 10), stop=stop, cache=cache)


def test_each_is_first_in_turn_and_the_first_round_does_not_count(stage: Stage) -> None:
    told: list[tuple[str, float, float]] = []

    results, interrupted = run_interleaved(
        [candidate("a"), candidate("b"), candidate("c")],
        rounds=3,
        watch=lambda text, done, total: told.append((text, done, total)),
    )

    assert "".join(event[1] for event in stage.requests("measure")) == "abcbcacababc"
    assert [len(each.samples) for each in results] == [3, 3, 3]
    assert told[0][0] == "a thread warm"
    assert [done for _, done, _ in told] == list(range(12))
    assert {total for _, _, total in told} == {12}
    assert sorted(stage.requests("close")) == [("close", "a"), ("close", "b"), ("close", "c")]
    assert not interrupted


def test_ctrl_c_keeps_complete_rounds(stage: Stage) -> None:
    stage.interrupt_at = 2 * 3 + 2  # in the second round that counts

    results, interrupted = run_interleaved([candidate("a"), candidate("b")], rounds=5)

    assert interrupted
    assert [len(each.samples) for each in results] == [2, 2]
    assert len(stage.requests("close")) == 2


def test_ctrl_c_before_a_round_is_complete_ends_all(stage: Stage) -> None:
    stage.interrupt_at = 4

    with pytest.raises(KeyboardInterrupt):
        run_interleaved([candidate("a"), candidate("b")], rounds=5)
    assert len(stage.requests("close")) == 2


def test_loaders_of_one_subject_share_a_process_except_pytorchs(stage: Stage) -> None:
    loaders = ("thread", "process", "plain")
    run_interleaved([candidate("a", loader) for loader in loaders], rounds=1)

    assert stage.requests("start") == [("start", "a"), ("start", "a")]


def test_one_that_fails_is_reported_and_the_others_continue(stage: Stage) -> None:
    stage.failing = {"process"}
    stage.damaged = {"b"}

    (bad, good, damaged), _ = run_interleaved(
        [candidate("a", "process"), candidate("a"), candidate("b")], rounds=2
    )

    assert (bad.problem, bad.samples) == ("it broke", [])
    assert (damaged.problem, damaged.samples) == ("damaged", [])
    assert good.rates == pytest.approx([100, 100])
    assert stage.requests("measure").count(("measure", "a", "process", "warm")) == 1


def test_an_invalid_request_ends_all(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Measurement:
        raise UsageError("no such model")

    monkeypatch.setattr(FakeProcess, "measure", refuse)
    with refused(UsageError):
        run_interleaved([candidate("a")], rounds=1)
    assert stage.requests("close") == [("close", "a")]


@pytest.mark.parametrize("resident", [0.25, None])
def test_files_are_dropped_before_each_cold_measurement(
    stage: Stage, resident: float | None
) -> None:
    stage.resident = resident

    (cold,), _ = run_interleaved([candidate("a", cache="cold")], rounds=2)

    kinds = [event[0] for event in stage.events if event[0] in ("drop", "measure", "warm")]
    assert kinds == ["drop", "measure"] * 3
    assert cold.resident == resident
    assert len(cold.samples) == 2


def test_a_sample_is_read_before_it_counts_as_warm(stage: Stage) -> None:
    warm = candidate("a", limit=1000)

    run_interleaved([warm, candidate("a", cache="cold", limit=1000)], rounds=1)

    kinds = [event[0] for event in stage.events if event[0] in ("drop", "measure", "warm")]
    assert kinds == ["warm", "measure", "drop", "measure", "drop", "measure", "warm", "measure"]


def test_the_first_round_is_short(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stops: list[StopCondition] = []
    measure = FakeProcess.measure

    def noted(self: FakeProcess, loader: object, stop: StopCondition, step: object) -> Measurement:
        stops.append(stop)
        return measure(self, loader, stop, step)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeProcess, "measure", noted)
    run_interleaved([candidate("a"), candidate("a", cache="cold")], rounds=1)

    assert [(stop.seconds, stop.epochs) for stop in stops] == [
        (0.25, None),
        (0.25, 1),
        (1, 3),
        (1, None),
    ]


def test_a_speedup_compares_rounds_and_is_clear_if_they_agree() -> None:
    """The machine became four times as fast; the candidate was twice as fast all the time."""
    twice = Spread.paired([200, 400, 800], [100, 200, 400])

    assert (twice.median, twice.lowest, twice.highest, twice.rounds) == (2, 2, 2, 3)
    assert twice.clear
    assert not Spread.paired([200, 400], [100, 200]).clear
    assert not Spread.of([0.9, 2.5, 2.5]).clear
    assert Spread.of([0.5, 0.9, 0.7]).clear
    assert Spread.of([0.5, 0.9, 0.7]).describe() == "0.70x (0.50x to 0.90x in 3 rounds)"
