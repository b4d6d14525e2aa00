"""What was measured of several candidates, and what can be said of two."""

from __future__ import annotations

import math
import random

import pytest

from shardkit.measure.tune.candidate import Candidate
from shardkit.measure.tune.ledger import Ledger, Rates
from shardkit.measure.tune.trials import LEAST_ROUNDS, MOST_ROUNDS

ONE = Candidate(engine="thread", workers=1, batch_size=64)
TWO = ONE.changed(workers=2)


def test_rates_are_those_from_a_round_on_or_all() -> None:
    ledger = Ledger()
    for number, rate in enumerate((10.0, 30.0, 20.0)):
        ledger.add(ONE, number, rate)

    assert ledger.rates(ONE) == Rates(median=20.0, low=10.0, high=30.0, rounds=3)
    assert ledger.rates(ONE, 1) == Rates(median=25.0, low=20.0, high=30.0, rounds=2)
    assert ledger.rates(ONE, 9).rounds == 3


def test_a_ratio_is_of_rounds_that_had_both() -> None:
    """The machine is three times as fast in each round as in the one before."""
    ledger = Ledger()
    for number in range(4):
        ledger.add(ONE, number, 100.0 * 3**number)
        ledger.add(TWO, number, 200.0 * 3**number)
    ledger.add(TWO, 99, 1.0)

    ratio = ledger.ratio(TWO, ONE)

    assert ratio is not None
    told = (ratio.low, ratio.likely, ratio.middle, ratio.high)
    assert told == pytest.approx((2.0, 2.0, 2.0, 2.0))
    assert ledger.ratio(TWO, ONE, since=50) is None
    assert ledger.ratio(ONE, ONE.changed(workers=7)) is None


@pytest.mark.parametrize(
    ("rates", "certain"),
    [([170.0], False), ([120.0, 140.0], False), ([210.0], True), ([140.0, 140.0], True)],
)
def test_few_rounds_make_great_gains_certain_and_no_small_ones(
    rates: list[float], certain: bool
) -> None:
    ledger = Ledger()
    for number, rate in enumerate(rates):
        ledger.add(ONE, number, 100.0)
        ledger.add(TWO, number, rate)

    ratio = ledger.ratio(TWO, ONE)

    assert ratio is not None
    assert (ratio.low > 1) == certain
    assert ratio.low < ratio.likely < ratio.middle < ratio.high


@pytest.mark.parametrize("noise", [0.03, 0.1, 0.3])
def test_of_equal_candidates_none_is_faster_though_one_looks_after_each_round(
    noise: float,
) -> None:
    source, series, wrong = random.Random(1), 2000, 0
    for _ in range(series):
        ledger, faster = Ledger(), False
        for number in range(MOST_ROUNDS):
            for each in (ONE, TWO):
                ledger.add(each, number, math.exp(source.gauss(0, noise)))
            ratio = ledger.ratio(TWO, ONE)
            faster |= number + 1 >= LEAST_ROUNDS and ratio is not None and ratio.low > 1
        wrong += faster

    assert 0.01 < wrong / series < 0.065


def test_noise_widens_the_interval_and_one_disturbed_round_does_not_move_the_middle() -> None:
    ledger = Ledger()
    for number, (one, two) in enumerate([(100, 110), (100, 111), (100, 30), (100, 109)]):
        ledger.add(ONE, number, one)
        ledger.add(TWO, number, two)

    ratio = ledger.ratio(TWO, ONE)

    assert ratio is not None
    assert ratio.low < 1 < ratio.middle < 1.12
    assert ledger.fastest([ONE, TWO]) == TWO
    assert ledger.candidates() == [TWO, ONE]
