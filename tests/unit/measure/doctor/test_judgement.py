"""Rules propose remedies where they may help; the judgement ranks them by made-up rates."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
from diagnoses import profile, setup, stage

from shardkit.cli.doctor_report import _loop
from shardkit.measure.doctor.judgement import Diagnosis, Measured, Range, diagnose, judge_loop
from shardkit.measure.doctor.pipeline import Remedy
from shardkit.measure.doctor.profile import Profile
from shardkit.measure.doctor.remedies import loop_changes, propose
from shardkit.recipe import Recipe
from shardkit.system import compiled

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
    assert "49% of the rate of the step alone; low: 1.50x (yields); no gain: more workers" in text

    assert not judge_loop(BASE, BASE).is_slower
    assert judge_loop(BASE, BASE, [Measured(low, None, BASE)]).recommended is None
    skipped = dataclasses.replace(judge_loop(alone, BASE), needed_seconds=40.0)
    assert _loop(skipped).endswith("to measure what would help, add --budget 48s")


# The rules: each proposes its remedies where they may help, and only there.

SMALLER, RAW_NAME = "smaller images with shorter side 256", "raw pixels of 256x256"
PLANES = "planes instead of JPEGs with shorter side 256"
PROCESSES, THREADS_NAME = (
    "worker processes instead of threads",
    "threads instead of worker processes",
)
ONE_THREAD = "1 PyTorch thread per operation"
OWN: dict[str, Any] = {"transform": stage(50), "held": 0.9}


@pytest.fixture(autouse=True)
def _libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the planes of JPEGs, as far as the rules know."""
    monkeypatch.setattr(compiled, "is_available", lambda: True)


def test_planes_are_not_proposed_without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "is_available", lambda: False)
    assert {remedy.name for remedy in propose(profile())} == {SMALLER, RAW_NAME}


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (profile(), {SMALLER, PLANES, RAW_NAME}),
        (profile(side=256.0), {"planes instead of JPEGs", RAW_NAME}),
        (profile(images=10**12), {SMALLER, PLANES}),
        (profile(kind="raw"), set()),
        (profile(kind="y4m"), set()),
        (profile(kind="png", side=256.0), {"JPEGs instead of PNGs", RAW_NAME}),
        (
            profile(setup=setup(converted=False, engine="process", stock=True)),
            {THREADS_NAME, "shards instead of files with make_loader", SMALLER, PLANES, RAW_NAME},
        ),
        (profile(**OWN), {PROCESSES, ONE_THREAD}),
        (profile(**OWN, setup=setup(engine="process")), set()),
        (profile(**OWN, setup=setup(engine="main", workers=0)), {"8 workers instead of 0"}),
        (profile(**OWN, setup=setup(engine="process", workers=32)), {"8 workers instead of 32"}),
        (
            profile(collate=stage(50), setup=setup(collate="copying", workers=1), cpus=1),
            {"the default collate function"},
        ),
        (profile(collate=stage(50), setup=setup(workers=1), cpus=1), set()),
    ],
)
def test_the_rules_propose(given: Profile, names: set[str]) -> None:
    assert {remedy.name for remedy in propose(given)} == names


@pytest.mark.parametrize(
    ("busy", "engine", "workers"),
    [(0.25, "thread", 8), (0.1, "thread", 20), (0.01, "thread", 32), (0.01, "process", 16)],
)
def test_waiting_workers_become_more(busy: float, engine: str, workers: int) -> None:
    none = stage(0)
    given = profile(
        read=none,
        decode=none,
        collate=none,
        transform=stage(9, busy),
        cpus=2,
        setup=setup(workers=2, engine=engine),
    )

    assert {"num_workers": workers} in [remedy.options for remedy in propose(given)]


def only(given: Profile, name: str) -> Remedy:
    (found,) = [remedy for remedy in propose(given) if remedy.name == name]
    return found


def test_images_shrink_to_what_the_crop_needs() -> None:
    smaller, raw = only(profile(), SMALLER), only(profile(), RAW_NAME)
    assert smaller.recipe is not None
    assert smaller.recipe.box == (256, 256)
    assert raw.recipe is not None
    assert raw.recipe.raw_shape == (256, 256, 3)
    assert raw.price == "cut to the center square, 2.0x the space"
    assert only(profile(), PLANES).price == "about 1.3x the space"
    assert only(profile(side=256.0), "planes instead of JPEGs").price == "about 2.8x the space"
    assert only(profile(side=240.0), "raw pixels of 240x240").recipe is not None


def test_a_dataset_that_fits_in_memory_may_be_resident() -> None:
    (remedy,) = [
        each
        for each in propose(profile(resident_bytes=3 << 30, images=9600))
        if "resident" in each.options
    ]
    assert remedy.code == 'make_loader(..., resident="cpu")'
    assert remedy.price == (
        "3.0 GiB of memory for each rank, and about 12 s to decode all images at the start"
    )


OWN_FILES: dict[str, Any] = {
    "files": ["/photos/a.jpg"],
    "stages": {"dataset": stage(8), "collate": stage(1)},
}


@pytest.mark.parametrize(
    ("changed", "decode"),
    [({}, "RandomResizedCrop(224)"), ({"setup": setup(converted=False, transform="augment")}, "")],
)
def test_the_same_images_are_read_alike(changed: dict[str, Any], decode: str) -> None:
    given = profile(**{"setup": setup(converted=False), **OWN_FILES, **changed})
    (remedy,) = [each for each in propose(given) if each.recipe is not None]
    assert (remedy.decode, remedy.default_collate) == (decode, True)


@pytest.mark.parametrize(
    ("engine", "names"),
    [
        ("main", []),
        ("process", ['priority="low"']),
        ("helper", ['priority="low"']),
        ("thread", ['priority="low"', 'engine="helper"', 'engine="helper" with priority="low"']),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has per-thread priorities")
def test_changes_for_the_training_loop_depend_on_the_engine(engine: str, names: list[str]) -> None:
    assert [remedy.name for remedy in loop_changes(profile(setup=setup(engine=engine)))] == names


def test_a_change_of_a_stock_loader_names_make_loader() -> None:
    given = profile(setup=setup(engine="process", stock=True))
    assert {remedy.name for remedy in loop_changes(given)} <= {'make_loader(priority="low")'}
