"""The rules: each proposes its remedy where it may help, and only there."""

from __future__ import annotations

from typing import Any

import pytest
from diagnoses import GB, profile, situation, stage

from shardkit.measure.doctor.remedies import RULES, Remedy, Situation, propose

OWN = profile(transform=stage(50), held=0.9)
WAITING = profile(transform=stage(90, busy=0.02))

CASES: list[tuple[Situation, set[str]]] = [
    (situation(), {'jpeg="fast"', "smaller images", "raw pixels"}),
    (situation(profile(side=256.0)), {'jpeg="fast"', "raw pixels"}),
    (situation(memory=GB), {'jpeg="fast"', "smaller images"}),
    (situation(jpeg="fast"), {"smaller images", "raw pixels"}),
    (situation(profile(kinds={"raw": 9})), set()),
    (situation(profile(kinds={"png": 9}, side=256.0)), {"JPEGs", "raw pixels"}),
    (
        situation(jpeg="", engine="process"),
        {"threads", "shards", "smaller images", "raw pixels"},
    ),
    (situation(OWN), {"processes"}),
    (situation(OWN, engine="process"), set()),
    (situation(WAITING), {"more workers"}),
    (situation(OWN, engine="main", workers=0), {"more workers"}),
    (situation(OWN, engine="process", workers=32), {"fewer workers"}),
    (situation(OWN, torch_threads=8), {"processes", "one torch thread"}),
    (situation(profile(collate=stage(50)), collate="copying"), {"default collate"}),
    (situation(profile(collate=stage(50))), set()),
]


@pytest.mark.parametrize(("given", "names"), CASES)
def test_the_rules_propose(given: Situation, names: set[str]) -> None:
    assert {remedy.name for remedy in propose(given)} == names


def test_every_rule_is_tried() -> None:
    assert len(RULES) == len(set().union(*(names for _, names in CASES)))


def only(given: Situation, name: str) -> Remedy:
    (found,) = [remedy for remedy in propose(given) if remedy.name == name]
    return found


@pytest.mark.parametrize(
    ("busy", "changed", "workers"),
    [
        (0.5, {"cpus": 2, "workers": 1}, 2),
        (0.25, {"cpus": 2, "workers": 2}, 8),
        (0.1, {"cpus": 2, "workers": 2}, 20),
        (0.01, {"cpus": 2, "workers": 2}, 32),
        (0.01, {"cpus": 2, "workers": 2, "engine": "process"}, 16),
    ],
)
def test_waiting_workers_become_more(busy: float, changed: dict[str, Any], workers: int) -> None:
    found = profile(read=stage(0), decode=stage(0), collate=stage(0), transform=stage(9, busy))

    assert only(situation(found, **changed), "more workers").variant.workers == workers


def test_images_shrink_to_what_the_crop_needs() -> None:
    smaller, raw = only(situation(), "smaller images"), only(situation(), "raw pixels")
    assert smaller.recipe is not None
    assert smaller.recipe.box == (256, 256)
    assert raw.recipe is not None
    assert raw.recipe.raw_shape == (256, 256, 3)
    assert raw.price == "center square, 2.0x the space"

    resized = only(situation(profile(side=240.0)), "raw pixels")
    assert resized.recipe is not None
    assert resized.recipe.box == (240, 240)


def test_the_price_of_a_fixed_crop_is_stated() -> None:
    fixed = situation(decode="CenterCrop(size=224, resize=None)")

    assert only(fixed, "smaller images").price == "fixed crops show more"
    assert only(situation(), "smaller images").price == ""
