"""Identical pictures: facts name candidates, and only equal images count."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import copy_dataset, encoded, make_tree, png
from planted_faults import scene

from shardkit.dataset.manifest import FACTS_NAME
from shardkit.dataset.shardset import open_shards
from shardkit.recipe import Recipe
from shardkit.reporting.collection import Collection
from shardkit.reporting.facts import load_facts
from shardkit.reporting.identical import find_identical

PICTURE = encoded(scene(0))
COMMENTED = PICTURE[:2] + b"\xff\xfe\0\x06note" + PICTURE[2:]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    files = {
        "0.jpg": PICTURE,
        "1.jpg": COMMENTED,
        "2.jpg": encoded(scene(1)),
        "3.jpg": PICTURE,
        "4.png": png(9, 9)[:60],
        "5.png": png(9, 9)[:60],
        "6.png": png(9, 9, 1)[:60],
    }
    source = make_tree(tmp_path / "photos", files)
    return copy_dataset(source, tmp_path / "made", shuffle=False, recipe=Recipe(check="none"))


def test_bytes_and_pixels_are_compared(dataset: Path) -> None:
    same = find_identical(Collection([dataset]))

    assert same.bytes.tolist() == [0, 1, 2, 0, 4, 4, 6]
    assert same.pixels.tolist() == [0, 0, 2, 0, 4, 4, 6]


def test_facts_alone_make_no_picture_identical(dataset: Path) -> None:
    load_facts(open_shards(dataset))
    stored = np.load(dataset / FACTS_NAME)
    for name in ("hash", "pixels", "content"):
        stored[name] = stored[name][0]
    np.save(dataset / FACTS_NAME, stored)
    same = find_identical(Collection([dataset]))

    assert same.bytes.tolist() == [0, 1, 2, 0, 4, 4, 6]
    assert same.pixels.tolist() == [0, 0, 2, 0, 4, 4, 6]
