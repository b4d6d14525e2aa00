"""The rules: each proposes its remedies where they may help, and only there."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from diagnoses import profile, setup, stage

from shardkit.measure.doctor.pipeline import Remedy
from shardkit.measure.doctor.profile import Profile
from shardkit.measure.doctor.remedies import loop_changes, propose
from shardkit.system import compiled

SMALLER, RAW = "smaller images with shorter side 256", "raw pixels of 256x256"
PLANES = "planes instead of JPEGs with shorter side 256"
PROCESSES, THREADS = "worker processes instead of threads", "threads instead of worker processes"
ONE_THREAD = "1 PyTorch thread per operation"
OWN: dict[str, Any] = {"transform": stage(50), "held": 0.9}


@pytest.fixture(autouse=True)
def _libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the planes of JPEGs, as far as the rules know."""
    monkeypatch.setattr(compiled, "is_available", lambda: True)


def test_planes_are_not_proposed_without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "is_available", lambda: False)
    assert {remedy.name for remedy in propose(profile())} == {SMALLER, RAW}


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (profile(), {SMALLER, PLANES, RAW}),
        (profile(side=256.0), {"planes instead of JPEGs", RAW}),
        (profile(images=10**12), {SMALLER, PLANES}),
        (profile(kind="raw"), set()),
        (profile(kind="y4m"), set()),
        (profile(kind="png", side=256.0), {"JPEGs instead of PNGs", RAW}),
        (
            profile(setup=setup(converted=False, engine="process", stock=True)),
            {THREADS, "shards instead of files with make_loader", SMALLER, PLANES, RAW},
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
    smaller, raw = only(profile(), SMALLER), only(profile(), RAW)
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
        "3.0 GiB of memory for each rank, and about 12 s to decode all at the start"
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
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
def test_changes_for_the_training_loop_depend_on_the_engine(engine: str, names: list[str]) -> None:
    assert [remedy.name for remedy in loop_changes(profile(setup=setup(engine=engine)))] == names


def test_a_change_of_a_stock_loader_names_make_loader() -> None:
    given = profile(setup=setup(engine="process", stock=True))
    assert {remedy.name for remedy in loop_changes(given)} <= {'make_loader(priority="low")'}
