"""A conversion killed at any call: a rerun writes exactly the same files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from campaign import cases, draw, points
from faulty import SIGNAL_AFTER, SIGNAL_BEFORE, Bench, Fault, compiler
from helpers import FORMATS
from oracle import NAMES, Oracle, Oracles, different, kill_points

pytestmark = pytest.mark.skipif(compiler() is None, reason="it needs Linux and gcc")

ALONE = NAMES[0]
"""The simplest case."""

FEW = cases(FORMATS, 1)


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracles]:
    bench = Bench(tmp_path_factory.mktemp("crash"))
    yield Oracles(bench)
    bench.close()


def kill(oracle: Oracle, count: int) -> set[int]:
    """Kill at the first, at the last and at ``count`` other calls; return all of them."""
    calls = set()
    for fault in kill_points(oracle, count):
        point = oracle.disturb(fault)
        assert point.outcome.killed, (fault, point.outcome.story())
        assert not point.wrong, (fault, point.wrong)
        calls.add(fault.at)
    return calls


@pytest.mark.parametrize("to", FORMATS)
def test_a_killed_conversion_is_finished_by_the_same_command(oracles: Oracles, to: str) -> None:
    oracle, count = oracles.of(ALONE, to), points(6, 200)
    calls = kill(oracle, count)
    assert {1, oracle.first.calls} <= calls
    assert len(calls) >= min(count, oracle.first.calls)


@pytest.mark.parametrize("to", FEW)
def test_the_later_it_is_killed_the_more_shards_are_kept(oracles: Oracles, to: str) -> None:
    """Until it is published; what is left then is to clear up."""
    oracle, kept = oracles.of(ALONE, to), []
    for at in range(1, oracle.first.calls, oracle.first.calls // 12):
        oracle.reset()
        oracle.run(Fault(action=SIGNAL_BEFORE, at=at))
        if oracle.is_published():
            break
        again = oracle.run()
        assert again.code == 0, again.story()
        kept.append(again.json()["reused_shards"])
    assert kept == sorted(kept)
    assert kept[0] == 0
    assert kept[-1] == oracle.case.shards


@pytest.mark.parametrize(("name", "to"), cases(itertools.product(NAMES[1:], FORMATS), 4))
def test_other_conversions_can_be_killed_as_well(oracles: Oracles, to: str, name: str) -> None:
    kill(oracles.of(name, to), points(3, 30))


@pytest.mark.parametrize("to", FEW)
def test_a_conversion_that_is_killed_again_and_again_ends_the_same(
    oracles: Oracles, to: str
) -> None:
    oracle = oracles.of(ALONE, to)
    chosen = draw("again and again", oracle.case)
    oracle.reset()
    deaths = 0
    while not oracle.is_published():
        assert deaths < 200
        at = chosen.randint(1, oracle.first.calls * 2 // 3)
        outcome = oracle.run(Fault(action=SIGNAL_AFTER, at=at))
        assert not oracle.look(outcome)
        deaths += outcome.killed
    oracle.run()
    assert deaths > 1
    assert not different(oracle.expected, oracle.found())


@pytest.mark.parametrize("to", FEW)
def test_a_conversion_past_whose_end_the_fault_lies_is_not_touched(
    oracles: Oracles, to: str
) -> None:
    oracle = oracles.of(ALONE, to)
    oracle.reset()
    outcome = oracle.run(Fault(action=SIGNAL_BEFORE, at=oracle.first.calls + 1))
    assert (outcome.code, outcome.acted, outcome.calls) == (0, 0, oracle.first.calls)
    assert not different(oracle.expected, oracle.found())


# --- the oracle is able to fail ---


@pytest.mark.parametrize(
    ("mistake", "name", "message"),
    [
        ("manifest first", "one folder", "it is missing"),
        ("spoiled shards", "one folder", "other: shard-"),
        ("rubbish stays", "one folder", "too much: .shardkit-trash"),
        ("old dataset first", "replaced", "readers find neither"),
    ],
)
def test_the_oracle_finds_a_converter_with_a_mistake(
    oracles: Oracles, mistake: str, name: str, message: str
) -> None:
    oracle = oracles.of(name, "webdataset")
    found: list[str] = []
    for fault in kill_points(oracle, points(14, 40)):
        found += oracle.disturb(fault, mistake).wrong
        if any(message in wrong for wrong in found):
            return
    pytest.fail(f"{message!r} is not in {found}")


def test_the_oracle_sees_every_difference() -> None:
    expected = {"a": "1", "b": "2", "c": "3"}
    assert not different(expected, dict(expected))
    assert (
        different(expected, {"a": "1", "b": "0", "d": "4"}) == "lacking: c; too much: d; other: b"
    )
