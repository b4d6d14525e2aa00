"""Similar pictures: recall of changed copies, pairs by chance, and a million hashes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from campaign import cases
from helpers import encoded, make_dataset, make_tree, opened, python
from PIL import Image, ImageEnhance
from planted_faults import scene

from shardkit import Field, convert, report
from shardkit.dataset.manifest import FACTS_NAME
from shardkit.dataset.shardset import ShardSet, open_shards
from shardkit.reporting.image_facts import FACT, MEASURED, VERSION, Facts
from shardkit.reporting.page import page
from shardkit.system.npy import save_npy

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


@pytest.mark.parametrize("change", cases(CHANGES, 1))
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


@pytest.mark.measures
def test_a_million_hashes_are_compared_in_time_and_memory() -> None:
    done = python(
        "import json, time\n"
        "import numpy as np\n"
        "from shardkit.reporting.neighbors import near_pairs\n"
        "hashes = np.random.default_rng(0).integers(0, 1 << 64, 1_000_000, dtype=np.uint64)\n"
        "hashes[1::1000] = hashes[::1000] ^ np.uint64(7 << 30)\n"
        "found = near_pairs(hashes, 3)\n"
        "memory = int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "print(json.dumps([len(found.first), time.process_time(), memory]))\n"
    )
    pairs, seconds, kibibytes = json.loads(done.stdout)

    assert pairs >= 1000
    assert seconds < 90
    assert kibibytes < 1 << 20


ROWS, CLASSES, TWINS = 200_000, 20_000, 5_000


def planted_facts(shards: ShardSet) -> Facts:
    """Return facts of unrelated pictures, and of pairs, crowds and faults."""
    rng = np.random.default_rng(0)
    facts = np.zeros(len(shards), FACT)
    facts["checksum"], facts["version"] = shards.rows["checksum"], VERSION
    facts["state"], facts["frames"], facts["mode"] = MEASURED, 1, b"RGB"
    facts["content"] = facts["pixels"] = np.arange(ROWS)
    facts["hash"] = rng.integers(0, 1 << 64, ROWS, dtype=np.uint64)
    facts["crops"] = facts["hash"][:, None] ^ (np.uint64(1) << rng.integers(0, 64, (ROWS, 6), "u8"))
    facts["mean"] = facts["std"] = facts["brightness"][:, None] = 100
    facts["contrast"], facts["highlight"], facts["sharpness"] = 50, 200, 0.5
    rows = rng.permutation(ROWS)
    pairs, crowd = rows[: 2 * TWINS], rows[2 * TWINS : 6 * TWINS]
    facts["hash"][pairs[TWINS:]] = facts["hash"][pairs[:TWINS]] ^ np.uint64(5)
    facts["hash"][crowd] = facts["hash"][crowd[0]]
    facts["sharpness"][rows[-TWINS:]] = 0.1
    return facts


@pytest.mark.measures
def test_the_report_of_many_classes_pairs_and_similar_pictures_stays_small(tmp_path: Path) -> None:
    content = encoded(scene(0, (32, 32)))

    class Samples(Sequence[Any]):
        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, number: Any) -> Any:
            return {"key": f"some/folder/{number}", "image": content, "label": number % CLASSES}

    names = [f"class {number}" for number in range(CLASSES)]
    schema: dict[str, Field | str] = {"image": "image", "label": Field("label", classes=names)}
    place = tmp_path / "made"
    convert(Samples(), place, to="lmdb", schema=schema, check="none")
    save_npy(place / FACTS_NAME, planted_facts(open_shards(place)))
    started = time.process_time()
    made = report(place)
    text = page(made)
    found = {each.kind: each for each in made.findings}

    assert time.process_time() - started < 120  # 15 s on an idle core
    assert len(text.encode()) < 1_000_000
    assert all(each.complete for each in made.findings)
    assert found["near-duplicate-classes"].rows == 6 * TWINS
    assert max(len(group.rows) for group in found["near-duplicate-classes"].groups) == 4 * TWINS
    assert found["blurred"].rows == TWINS
