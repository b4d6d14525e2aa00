"""Training loops beside loaders, on made-up rates: what is tried, and what is chosen."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from shardkit.errors import MeasurementFailed
from shardkit.measure.runner.spec import LoaderSpec
from shardkit.measure.tune import loop
from shardkit.measure.tune.loop import compare_loops, variants

BEST = LoaderSpec(engine="thread", num_workers=2, batch_size=64)
LOW, HELPER = replace(BEST, priority="low"), replace(BEST, engine="helper")
BOTH = replace(HELPER, priority="low")


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        (BEST, [HELPER, LOW, BOTH]),
        (HELPER, [BEST, BOTH, LOW]),
        (replace(BEST, engine="process"), [replace(LOW, engine="process")]),
    ],
)
def test_the_variants_load_as_the_setting_does(
    setting: LoaderSpec, found: list[LoaderSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "priority_problem", lambda: None)
    assert variants(setting, has_cuda=False) == found
    assert variants(setting, has_cuda=True) == [*found, replace(setting, pin_memory=False)]


def test_without_priorities_only_the_engine_varies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "priority_problem", lambda: "none here")
    assert variants(BEST, has_cuda=False) == [HELPER]


def loops(
    rate: Callable[[LoaderSpec, int], float], rounds: int = 5
) -> tuple[list[LoaderSpec], list[LoaderSpec]]:
    """Return the settings in order of the result, and in that of the measurements."""
    measured: list[LoaderSpec] = []

    def measure(setting: LoaderSpec) -> float:
        measured.append(setting)
        return rate(setting, measured.count(setting))

    def clock() -> float:
        return float(len(measured))

    tried = compare_loops(measure, BEST, [LOW, HELPER], end=3.0 * rounds + 0.5, clock=clock)
    return [each.setting for each in tried], measured


@pytest.mark.parametrize("gain", [1.06, 1.5, 3.0])
def test_a_faster_loop_is_chosen(gain: float) -> None:
    noise = itertools.cycle((0.99, 1.0, 1.01))
    order, _ = loops(lambda each, _: 100.0 * next(noise) * (gain if each == LOW else 1.0))
    assert order[0] == LOW


@pytest.mark.parametrize("gain", [0.5, 1.0, 1.04])
def test_the_fastest_loader_stays_without_a_clear_gain(gain: float) -> None:
    order, _ = loops(lambda each, _: 100.0 * (gain if each == LOW else 1.0))
    assert order[0] == BEST
    assert set(order) == {BEST, LOW, HELPER}


def test_few_rounds_change_nothing() -> None:
    order, _ = loops(lambda each, _: 300.0 if each == LOW else 100.0, rounds=2)
    assert order[0] == BEST


def test_rounds_are_interleaved_within_the_time() -> None:
    _, measured = loops(lambda *_: 100.0, rounds=3)
    assert measured == [BEST, LOW, HELPER, LOW, HELPER, BEST, HELPER, BEST, LOW]


def test_a_setting_that_fails_is_left_out() -> None:
    def rate(setting: LoaderSpec, _: int) -> float:
        if setting == HELPER:
            raise MeasurementFailed("no shared memory")
        return 100.0

    order, measured = loops(rate)
    assert order == [BEST, LOW]
    assert measured.count(HELPER) == 1


def test_no_time_gives_no_result() -> None:
    assert compare_loops(lambda _: 100.0, BEST, [LOW], end=0.0, clock=lambda: 1.0) == []
