"""The judgement on made-up rates: the verdict, the cause, the ranking, and what noise forbids."""

from __future__ import annotations

import dataclasses

import pytest
from diagnoses import profile

from shardkit.cli.doctor_report import _loop
from shardkit.measure.doctor.judgement import Diagnosis, Measured, Range, diagnose, judge_loop
from shardkit.measure.doctor.pipeline import Remedy
from shardkit.measure.doctor.profile import Profile
from shardkit.recipe import Recipe

BASE = [90.0, 100.0, 110.0]

WORKERS = Remedy(name="more workers", code="num_workers=9")
RAW = Remedy(name="raw pixels", recipe=Recipe())
THREADS = Remedy(name="one torch thread", torch_threads=1)


def judged(
    *measured: tuple[Remedy, list[float] | None],
    needed: float | None = 1000.0,
    found: Profile | None = None,
) -> Diagnosis:
    in_rounds = [Measured(*pair, BASE) for pair in measured]
    return diagnose(found or profile(), BASE, in_rounds, needed=needed, round_seconds=2.0)


@pytest.mark.parametrize(
    ("needed", "status", "waiting"),
    [
        (1000.0, "starved", (0.88, 0.91)),
        (50.0, "fed", (0.0, 0.0)),
        (105.0, "undecided", (0.0, 0.18)),
        (None, "unknown", None),
    ],
)
def test_the_range_of_rates_decides(
    needed: float | None, status: str, waiting: tuple[float, float] | None
) -> None:
    found = judged(needed=needed)

    assert found.status == status
    assert found.waiting == (None if waiting is None else pytest.approx(waiting, abs=0.01))
    assert (found.decisive_seconds is not None) == (status == "undecided")


def test_remedies_are_ranked_with_what_they_reach() -> None:
    found = judged((WORKERS, [180.0, 200.0, 220.0]), (RAW, [950.0, 1100.0, 1200.0]))

    assert [each.remedy.name for each in found.remedies] == ["raw pixels", "more workers"]
    assert [each.enough for each in found.remedies] == ["unclear", "no"]
    assert found.recommended == found.remedies[0]


def test_a_setting_that_is_enough_comes_before_a_conversion() -> None:
    rated = (WORKERS, [1100.0] * 3), (RAW, [3000.0] * 3)

    found = judged(*rated)
    assert found.remedies[0].remedy is RAW
    assert found.recommended is not None
    assert found.recommended.remedy is WORKERS
    assert judged(*rated, needed=None).recommended == judged(*rated, needed=None).remedies[0]


@pytest.mark.parametrize(
    ("rates", "verdict"),
    [
        (None, "failed"),
        ([95.0, 105.0, 115.0], "no gain"),
        ([50.0, 60.0, 70.0], "no gain"),
        ([60.0, 150.0, 400.0], "unclear"),
    ],
)
def test_what_does_not_clearly_help_is_not_recommended(
    rates: list[float] | None, verdict: str
) -> None:
    found = judged((WORKERS, rates))

    assert [each.verdict for each in found.remedies] == [verdict]
    assert found.recommended is None
    seconds = found.decisive_seconds or 0  # its rounds took 6
    assert (20 < seconds < 300) == (verdict == "unclear")


def test_a_fed_gpu_needs_no_remedy() -> None:
    found = judged((RAW, [900.0] * 3), needed=50.0)

    assert found.remedies == []
    assert found.recommended is None


def test_threads_are_the_cause_if_loading_is_much_faster_without_them() -> None:
    assert judged((THREADS, [200.0] * 3)).cause == "torch threads"
    assert judged((THREADS, [125.0] * 3)).cause == "decode"


def test_more_rounds_decide_closer_cases() -> None:
    few, many = Range.of(BASE), Range.of(BASE * 5)
    assert few.low < many.low < 100 < many.high < few.high

    rounds = [few.decisive_rounds(needed) for needed in (200.0, 110.0, 101.0, 100.0)]
    assert rounds == sorted(rounds)
    assert rounds[0] == 1
    assert rounds[2] == rounds[3] > 100


def test_the_training_loop_is_compared_with_the_step_alone() -> None:
    low, alone = Remedy(name="low", price="yields"), [200.0, 205.0, 210.0]
    found = judge_loop(
        alone,
        BASE,
        [Measured(WORKERS, [95.0, 99.0, 112.0], BASE), Measured(low, [140.0, 150.0, 160.0], BASE)],
    )
    assert found.is_slower
    assert [(rated.remedy, rated.verdict) for rated in found.remedies] == [
        (low, "gain"),
        (WORKERS, "no gain"),
    ]
    assert found.recommended == found.remedies[0]
    text = _loop(found)
    assert text.startswith("training reaches 100 (")
    assert "49% of the step alone; low: 1.50x (yields); no gain: more workers" in text

    assert not judge_loop(BASE, BASE).is_slower
    assert judge_loop(BASE, BASE, [Measured(low, None, BASE)]).recommended is None
    skipped = dataclasses.replace(judge_loop(alone, BASE), needed_seconds=40.0)
    assert _loop(skipped).endswith("to measure what would help, add --budget 48s")
