"""How much of its time some work holds the interpreter's lock."""

from __future__ import annotations

import threading
import time

import pytest
from helpers import wait_until

from shardkit.measure.runner import gil
from shardkit.measure.runner.gil import held_fraction


def compute() -> None:
    total = 0
    for number in range(100_000):
        total += number


def wait() -> None:
    time.sleep(0.005)


def test_python_code_holds_the_gil() -> None:
    assert held_fraction(compute, 0.2) > 0.6


def test_sleeping_does_not_hold_the_gil() -> None:
    """Other processes make the fraction larger only, but not for ever."""
    wait_until(lambda: held_fraction(wait, 0.1) < 0.2, "a moment without other work")


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
    names = [thread.name for thread in threading.enumerate()]
    assert "shardkit-gil-probe" not in names


def test_a_gil_that_is_released_now_and_then_counts_as_held() -> None:
    """Some 12 ms of computing and 2 ms of waiting: few probes find it held, but each for long."""

    def mixed() -> None:
        compute()
        compute()
        time.sleep(0.002)

    wait_until(lambda: held_fraction(mixed, 0.3) > 0.65, "probes while it computes")


def test_a_busy_machine_on_which_everything_wakes_late_does_not_hold_the_gil(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All wake-ups are 2 ms late, so later ones count."""
    probe = gil._probe
    monkeypatch.setattr(gil, "_probe", lambda *given: [each + 0.002 for each in probe(*given)])

    wait_until(lambda: held_fraction(wait, 0.1) < 0.4, "a moment without other work")
    assert held_fraction(compute, 0.2) > 0.6


def test_late_is_less_than_the_switch_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gil, "_probe", lambda *given: [1.0] * 20)

    assert gil.late_here() == pytest.approx(0.004)


def test_the_smallest_of_three_measurements_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    fractions = iter([0.9, 0.2, 0.8])
    monkeypatch.setattr(gil, "late_fraction", lambda delays, late: next(fractions))

    assert held_fraction(wait, 0.3) == 0.2
