"""Similar pictures: recall of changed copies, pairs by chance, and a million hashes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import encoded, make_dataset, make_tree, opened, python
from PIL import Image, ImageEnhance
from planted_faults import scene

from shardkit import report

PICTURES = 200

CHANGES: dict[str, tuple[float, Callable[[Image.Image], Image.Image]]] = {
    "JPEG quality 50": (0.95, lambda image: opened(encoded(image, quality=50))),
    "half size": (0.95, lambda image: image.resize((image.width // 2, image.height // 2))),
    "5% crop": (0.80, lambda image: image.crop((8, 6, image.width, image.height))),
    "5% from all sides": (0.80, lambda image: image.crop((8, 6, 152, 114))),
    "brightness 130%": (0.95, lambda image: ImageEnhance.Brightness(image).enhance(1.3)),
    "brightness 70%": (0.95, lambda image: ImageEnhance.Brightness(image).enhance(0.7)),
}
"""Changes of a copy, and the fraction of copies that must be found."""


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_changed_copies_are_found(change: str, tmp_path: Path) -> None:
    least, apply = CHANGES[change]
    files = {}
    for number in range(PICTURES):
        image = scene(number)
        files[f"a/{number}.png"] = encoded(image, "PNG")
        files[f"b/{number}.png"] = encoded(apply(image), "PNG")
    made = report(make_dataset(make_tree(tmp_path / "photos", files), tmp_path / "made"), workers=2)
    groups = next(each.groups for each in made.findings if each.kind == "near-duplicate-classes")
    names = [[made.images.image(row).key.split("/")[1] for row in group.rows] for group in groups]
    right = sum(len(group) == 2 and group[0] == group[1] for group in names)

    assert right >= least * PICTURES
    assert len(names) == right  # none of 79,800 pairs is similar by chance


@pytest.mark.slow
def test_a_million_hashes_are_compared_in_time_and_memory() -> None:
    done = python(
        "import json, resource, time\n"
        "import numpy as np\n"
        "from shardkit.reporting.neighbors import near_pairs\n"
        "hashes = np.random.default_rng(0).integers(0, 1 << 64, 1_000_000, dtype=np.uint64)\n"
        "hashes[1::1000] = hashes[::1000] ^ np.uint64(7 << 30)\n"
        "found = near_pairs(hashes, 3)\n"
        "memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(json.dumps([len(found.first), time.process_time(), memory]))\n"
    )
    pairs, seconds, kibibytes = json.loads(done.stdout)

    assert pairs >= 1000
    assert seconds < 90
    assert kibibytes < 1 << 20
