"""Signals and several processes: messages, leftovers, and a rerun that resumes."""

from __future__ import annotations

import itertools
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from campaign import cases, draw, points
from faulty import (
    GROUP,
    MAIN,
    ONLY_MAIN,
    ONLY_OTHERS,
    SIGNAL_BEFORE,
    Bench,
    Fault,
    Outcome,
    compiler,
    session_of,
)
from helpers import FORMATS, encoded, wait_until
from oracle import NAMES, Oracle, Oracles, different
from PIL import Image

pytestmark = pytest.mark.skipif(compiler() is None, reason="it needs Linux and gcc")


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracles]:
    bench = Bench(tmp_path_factory.mktemp("processes"))
    yield Oracles(bench)
    bench.close()


def require_equal(oracle: Oracle) -> None:
    """Give the same command again, and hold what it makes against the undisturbed run."""
    assert not oracle.look()
    again = oracle.run()
    assert again.code == 0, again.story()
    assert not different(oracle.expected, oracle.found())


# --- signals, at any call ---


ENDS = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129}
"""Signals, and the exit code of a command that one of them ends."""


@pytest.mark.parametrize(
    ("name", "to", "number", "times"), cases(itertools.product(NAMES, FORMATS, ENDS, (1, 2)), 6)
)
def test_a_signal_at_any_call_ends_in_order(
    oracles: Oracles, name: str, to: str, number: signal.Signals, times: int
) -> None:
    oracle, code = oracles.of(name, to), ENDS[number]
    chosen = draw(oracle.case, number, times)
    # Not within the last steps, in which it clears up what is published already.
    for at in chosen.sample(range(1, oracle.first.calls // 2), points(2, 6)):
        oracle.reset()
        fault = Fault(action=SIGNAL_BEFORE, at=at, times=times, code=number)
        outcome = oracle.run(fault)
        assert outcome.code == code, outcome.story()
        assert "Traceback" not in outcome.stderr, outcome.story()
        assert len(outcome.stderr.strip().splitlines()) <= 1
        assert "interrupted" in outcome.stderr or number == signal.SIGTERM
        require_equal(oracle)


# --- workers ---


def with_workers(oracle: Oracle, fault: Fault, *more: object) -> Outcome:
    """Run with two worker processes, as a command of its own, until nobody of it is left."""
    oracle.reset()
    words = [*oracle.command, "--workers", 2, *more]
    with oracle.bench.start(*words, fault=fault) as running:
        outcome = running.end()
        wait_until(lambda: not session_of(outcome.session), "the end of all processes")
    return outcome


def test_workers_change_nothing_and_leave_nobody(oracles: Oracles) -> None:
    oracle = oracles.of(NAMES[0], "webdataset")
    outcome = with_workers(oracle, Fault())
    assert outcome.code == 0, outcome.story()
    assert outcome.stderr == ""
    assert not different(oracle.expected, oracle.found())


@pytest.mark.parametrize(
    ("to", "target", "whose", "at"),
    cases(
        [
            ("hdf5", MAIN, ONLY_OTHERS, 9),
            ("hdf5", GROUP, ONLY_OTHERS, 40),
            ("lmdb", MAIN, ONLY_OTHERS, 30),
            ("lmdb", GROUP, ONLY_MAIN, 25),
            ("webdataset", MAIN, ONLY_MAIN, 8),
        ],
        3,
    ),
)
def test_no_process_outlives_a_parent_that_is_killed(
    oracles: Oracles, to: str, target: int, whose: int, at: int
) -> None:
    oracle = oracles.of(NAMES[0], to)
    fault = Fault(action=SIGNAL_BEFORE, at=at, target=target, whose=whose)
    outcome = with_workers(oracle, fault)
    assert (outcome.acted, outcome.code) == (1, -signal.SIGKILL), outcome.story()
    assert "Traceback" not in outcome.stderr  # Python's resource tracker may tell of semaphores
    require_equal(oracle)


@pytest.mark.parametrize(("to", "at"), cases([("hdf5", 1), ("lmdb", 20), ("webdataset", 45)], 1))
def test_a_killed_worker_is_one_clear_message(oracles: Oracles, to: str, at: int) -> None:
    oracle = oracles.of(NAMES[0], to)
    outcome = with_workers(oracle, Fault(action=SIGNAL_BEFORE, at=at, whose=ONLY_OTHERS))
    assert (outcome.acted, outcome.code) == (1, 1), outcome.story()
    assert outcome.stderr.startswith("shardkit: error: a worker process died")
    assert "memory" in outcome.stderr
    assert outcome.stderr.count("\n") == 1, outcome.story()
    require_equal(oracle)


@pytest.mark.parametrize(
    ("number", "times"),
    cases([(signal.SIGTERM, 1), (signal.SIGINT, 1), (signal.SIGINT, 2), (signal.SIGHUP, 1)], 2),
)
def test_a_signal_to_all_processes_ends_all(
    oracles: Oracles, number: signal.Signals, times: int
) -> None:
    """As a terminal sends it; the first comes from within a worker's work."""
    oracle = oracles.of(NAMES[0], "webdataset")
    fault = Fault(
        action=SIGNAL_BEFORE, at=12, times=times, code=number, target=GROUP, whose=ONLY_OTHERS
    )
    outcome = with_workers(oracle, fault)
    assert outcome.acted >= 1
    assert outcome.code == ENDS[number], outcome.story()
    assert "Traceback" not in outcome.stderr, outcome.story()
    require_equal(oracle)


def stopped(session: int, leader: bool) -> list[int]:
    """Return the processes of a session that have been stopped."""
    return [
        process
        for process in session_of(session)
        if (process == session) == leader
        and Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()[0] == "T"
    ]


def test_a_second_conversion_into_the_same_place_is_refused(oracles: Oracles) -> None:
    oracle = oracles.of(NAMES[0], "lmdb")
    oracle.reset()
    fault = Fault(action=SIGNAL_BEFORE, at=60, code=signal.SIGSTOP)
    with oracle.bench.start(*oracle.command, fault=fault) as running:
        wait_until(lambda: stopped(running.process.pid, True), "the first one")
        for more in ([], ["--force"]):
            second = oracle.bench.run(*oracle.command, *more)
            assert second.code == 2, second.story()
            assert "another conversion is writing into" in second.stderr
            assert second.stderr.count("\n") == 1
        os.kill(running.process.pid, signal.SIGCONT)
        first = running.end()
    assert first.code == 0, first.story()
    assert not different(oracle.expected, oracle.found())


# --- memory ---


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A folder with images too large for what memory is left to a worker."""
    for number, name in enumerate(("cat", "dog")):
        (tmp_path / "large" / name).mkdir(parents=True)
        plain = Image.new("RGB", (4000, 3000), (number, 90, 200))
        (tmp_path / "large" / name / "large.png").write_bytes(encoded(plain, "PNG"))
    return tmp_path / "large"


@pytest.mark.parametrize(("on_error", "left"), cases([("fail", 24), ("skip", 24), ("fail", 4)], 1))
def test_a_worker_out_of_memory_is_one_clear_message_and_no_bad_image(
    oracles: Oracles, large: Path, on_error: str, left: int
) -> None:
    """An image of 4000 x 3000 pixels takes 34 MiB, and the stack of a thread 8: it cannot start."""
    bench = oracles.bench
    oracles.of(NAMES[0], "webdataset").reset()
    target = bench.root / "out"
    given = ["--to", "webdataset", "--workers", 2, "--shard-samples", 1, "--on-error", on_error]
    command = ["convert", "imagefolder", large, target, "--resize", 64, *given]
    fault = Fault(action=SIGNAL_BEFORE, at=1, code=signal.SIGSTOP, whose=ONLY_OTHERS)
    with bench.start(*command, fault=fault) as running:
        wait_until(lambda: stopped(running.process.pid, False), "a worker")
        (worker,) = stopped(running.process.pid, False)
        pages = int(Path(f"/proc/{worker}/statm").read_text().split()[0])
        room = pages * resource.getpagesize() + (left << 20)
        resource.prlimit(worker, resource.RLIMIT_AS, (room, room))
        os.kill(worker, signal.SIGCONT)
        outcome = running.end()
        wait_until(lambda: not session_of(outcome.session), "the end of all processes")
    assert outcome.code == 1, outcome.story()
    assert "memory" in outcome.stderr
    # Python may add a line of its own if it lacks memory for an exception.
    lines = [line for line in outcome.stderr.splitlines() if not line.startswith("SystemError: ")]
    assert len(lines) == 1, outcome.story()
    again = bench.run(*command, "--json")
    assert again.code == 0, again.story()
    assert again.json()["datasets"][""]["rows"] == 2
