"""The training loop with its loader: settings that change how much loading disturbs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from shardkit.errors import MeasurementFailed, UsageError
from shardkit.measure.runner.rounds import Spread, turn
from shardkit.measure.runner.spec import LoaderSpec
from shardkit.measure.tune.search import GAIN, LEAST_ROUNDS, Tried
from shardkit.system.priority import priority_problem

_MOST_ROUNDS = 15
_OTHERS = {"thread": "helper", "helper": "thread"}
"""Engines with the same threads, in this process or in another."""


def variants(setting: LoaderSpec, *, has_cuda: bool) -> list[LoaderSpec]:
    """Return settings that load about as fast, but may disturb a training loop less."""
    others = list[LoaderSpec]()
    if setting.engine in _OTHERS:
        others.append(replace(setting, engine=_OTHERS[setting.engine]))
    if priority_problem() is None:
        others += [replace(each, priority="low") for each in (setting, *others)]
    if has_cuda:
        others.append(replace(setting, pin_memory=False))
    return others


def compare_loops(
    measure: Callable[[LoaderSpec], float],
    setting: LoaderSpec,
    others: Sequence[LoaderSpec],
    *,
    end: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[Tried]:
    """Compare the rates of training loops in interleaved rounds, which may start until ``end``.

    ``measure`` returns the images/s of a loop, or raises MeasurementFailed. ``setting`` is the
    choice by loading; ``others`` that fail are left out.

    Return the settings with their speedup over ``setting``, the choice first: ``setting`` itself
    unless another is clearly faster. Empty if there was no time for a round.
    """
    rounds: list[dict[LoaderSpec, float]] = []
    left = [setting, *others]
    longest = 0.0
    while len(left) > 1 and len(rounds) < _MOST_ROUNDS and clock() + longest < end:
        start = clock()
        rates = dict[LoaderSpec, float]()
        for each in turn(left, len(rounds)):
            try:
                rates[each] = measure(each)
            except (MeasurementFailed, UsageError):
                if each == setting:
                    raise
                left.remove(each)
        rounds.append(rates)
        longest = max(longest, clock() - start)
    if not rounds:
        return []
    tried = [_tried(each, setting, [(one[each], one[setting]) for one in rounds]) for each in left]
    tried.sort(key=lambda one: -_score(one))
    best = tried[0]
    is_clear = _score(best) >= GAIN and len(rounds) >= LEAST_ROUNDS
    if best.setting != setting and not is_clear:
        tried.sort(key=lambda one: one.setting != setting)
    return tried


def _tried(each: LoaderSpec, setting: LoaderSpec, rates: Sequence[tuple[float, float]]) -> Tried:
    own, base = zip(*rates, strict=True)
    return Tried(
        setting=each,
        images_per_second=Spread.of(own),
        speedup=None if each == setting else Spread.paired(own, base),
    )


def _score(tried: Tried) -> float:
    return tried.speedup.median if tried.speedup is not None else 1.0
