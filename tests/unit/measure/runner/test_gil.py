"""How much of its time some work holds the interpreter's lock."""

from __future__ import annotations

import threading
import time

import pytest

from shardkit.measure.runner import gil
from shardkit.measure.runner.gil import held_fraction, late_fraction


def compute() -> None:
    total = 0
    for number in range(100_000):
        total += number


def wait() -> None:
    time.sleep(0.005)


def mixed() -> None:
    compute()
    compute()
    time.sleep(0.002)


COMPUTING, WAITING = [0.0051] * 40, [0.0001] * 200
MIXED = ([0.005, 0.005, 0.0021] + [0.0001] * 2) * 20
"""Delays of wake-ups as they are beside the functions above on an idle machine."""


@pytest.mark.parametrize(
    ("delays", "fraction"), [(COMPUTING, 1.0), (WAITING, 0.0), (MIXED, 15.1 / 17.3), ([], 0.0)]
)
def test_the_time_of_late_wake_ups_counts_not_their_number(
    delays: list[float], fraction: float
) -> None:
    assert late_fraction(delays, 0.0003) == pytest.approx(fraction)


@pytest.mark.parametrize(
    ("idle", "late"),
    [(WAITING, 0.0003), ([0.0021] * 20, 0.0021), ([1.0] * 20, 0.004), ([], 0.0003)],
    ids=["idle", "busy", "very busy", "none"],
)
def test_what_is_late_is_measured_but_less_than_the_switch_interval(
    monkeypatch: pytest.MonkeyPatch, idle: list[float], late: float
) -> None:
    monkeypatch.setattr(gil, "_probe", lambda *_: idle)
    assert gil.late_here() == pytest.approx(late)


@pytest.mark.parametrize(
    ("delays", "fraction"), [(COMPUTING, 1.0), (WAITING, 0.0), (MIXED, 21.1 / 27.3)]
)
def test_a_busy_machine_on_which_everything_wakes_late_does_not_hold_the_gil(
    monkeypatch: pytest.MonkeyPatch, delays: list[float], fraction: float
) -> None:
    """All wake-ups are 2 ms late, so later ones count."""

    def probe(work: object, seconds: float) -> list[float]:
        return [each + 0.002 for each in (WAITING if seconds == 0 else delays)]

    monkeypatch.setattr(gil, "_probe", probe)
    assert held_fraction(wait, 1.0) == pytest.approx(fraction)


def test_the_smallest_of_three_measurements_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    fractions = iter([0.9, 0.2, 0.8])
    monkeypatch.setattr(gil, "_probe", lambda *_: WAITING)
    monkeypatch.setattr(gil, "late_fraction", lambda delays, late: next(fractions))

    assert held_fraction(wait, 60.0) == 0.2


def test_long_work_runs_to_its_end() -> None:
    calls: list[float] = []

    held_fraction(lambda: calls.append(time.perf_counter()), 0.0)

    assert len(calls) == 2, "one that does not count, and one that does"


def test_an_error_leaves_no_thread_behind() -> None:
    count = iter(range(3))

    def fail() -> None:
        if next(count):
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        held_fraction(fail, 0.1)
    assert "shardkit-gil-probe" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.measures
def test_computing_holds_the_gil_and_sleeping_does_not() -> None:
    assert held_fraction(compute, 0.5) > 0.6
    assert held_fraction(wait, 0.5) < 0.2
    assert held_fraction(mixed, 0.5) > 0.65
