"""A conversion killed at any call: a rerun writes exactly the same files."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty import SIGNAL_AFTER, SIGNAL_BEFORE, Bench, Fault, compiler
from helpers import DEADLINE, FORMATS
from oracle import NAMES, Oracle, Oracles, different, kill_points

pytestmark = pytest.mark.skipif(compiler() is None, reason="it needs Linux and gcc")

SEED = 5
POINTS = 40
"""Calls at which a conversion is killed in each format, beside the first and the last one."""

ALONE = NAMES[0]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracles]:
    bench = Bench(tmp_path_factory.mktemp("crash"))
    yield Oracles(bench)
    bench.close()


@pytest.fixture(scope="module", params=FORMATS)
def oracle(oracles: Oracles, request: pytest.FixtureRequest) -> Oracle:
    """The simplest case in each format."""
    return oracles.of(ALONE, request.param)


def killed(oracle: Oracle, points: int) -> dict[int, int]:
    """Kill at that many points; return how many shards were kept after each."""
    kept: dict[int, int] = {}
    for fault in kill_points(oracle, points, SEED):
        point = oracle.disturb(fault)
        assert point.outcome.killed, (fault, point.outcome.story())
        assert not point.wrong, (fault, point.wrong)
        kept[fault.at] = point.kept
    return kept


def test_a_killed_conversion_is_finished_by_the_same_command(oracle: Oracle) -> None:
    kept = killed(oracle, POINTS)
    assert {1, oracle.first.calls} <= kept.keys()
    assert len(kept) >= POINTS


def test_the_later_it_is_killed_the_more_shards_are_kept(oracle: Oracle) -> None:
    """Until it is published; what is left then is to clear up."""
    kept = []
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


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("name", NAMES[1:])
def test_other_conversions_can_be_killed_as_well(oracles: Oracles, to: str, name: str) -> None:
    killed(oracles.of(name, to), 4)


def test_a_conversion_that_is_killed_again_and_again_ends_the_same(oracle: Oracle) -> None:
    chosen = random.Random(f"{SEED} {oracle.case}")
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


def test_a_conversion_past_whose_end_the_fault_lies_is_not_touched(oracle: Oracle) -> None:
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
    for fault in kill_points(oracle, 14, SEED):
        found += oracle.disturb(fault, mistake).wrong
    assert any(message in wrong for wrong in found), found


def test_the_oracle_sees_every_difference() -> None:
    expected = {"a": "1", "b": "2", "c": "3"}
    assert not different(expected, dict(expected))
    assert (
        different(expected, {"a": "1", "b": "0", "d": "4"}) == "lacking: c; too much: d; other: b"
    )


def test_the_script_does_the_same_for_thousands_of_points() -> None:
    script = Path(__file__).parents[2] / "scripts" / "crash.py"
    given = ["--points", "8", "--format", "webdataset", "--fault", "kill", "--case", "replaced"]
    done = subprocess.run(
        [sys.executable, str(script), *given],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    *_, row = done.stdout.splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:6] == ["webdataset", "kill", "8", "8", "8", "8"]
    assert cells[7] == "0"
