"""Faults planted in pictures by a seed: the report finds them, and its lists keep a good copy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from campaign import SEED, cases
from helpers import encoded, exif, make_dataset, make_tree, opened
from PIL import Image, ImageFilter
from planted_faults import scene

from shardkit import fields, report
from shardkit.dataset.shardset import open_shards
from shardkit.reporting.findings import KINDS
from shardkit.reporting.report import DatasetReport

CASES, PLAIN, CLASSES, VALUES = 6, 40, "abc", 32
TURNS = tuple(Image.Transpose)


class Faults:
    """Files of a dataset with splits, and the faults planted in them, drawn by a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.files: dict[str, bytes] = {}
        self.pictures = (scene(number, self.size()) for number in self.seeds())
        self.planted: dict[str, set[str]] = {kind: set() for kind in KINDS}
        self.clean: dict[str, set[str]] = {}
        """For each picture with copies: the ones that have no other fault."""
        for n in range(PLAIN * len(CLASSES)):
            self.add(next(self.pictures), f"plain{n}", n)
        for plant in (self.blur, self.turn, self.copy_as_png, self.copy_faulty):
            for n in range(CASES):
                plant(n)

    def seeds(self) -> Iterator[int]:
        while True:
            yield int(self.rng.integers(1 << 30))

    def size(self) -> tuple[int, int]:
        return int(self.rng.integers(260, 420)), int(self.rng.integers(200, 330))

    def add(self, picture: Image.Image, name: str, label: int = 0, split: str = "train") -> str:
        key = f"{split}/{CLASSES[label % len(CLASSES)]}/{name}"
        self.files[f"{key}.jpg"] = encoded(picture, quality=int(self.rng.integers(60, 96)))
        return key

    def blur(self, n: int) -> None:
        soft = next(self.pictures).filter(ImageFilter.GaussianBlur(self.rng.uniform(3, 8)))
        self.planted["blurred"].add(self.add(soft, f"soft{n}", n))

    def turn(self, n: int) -> None:
        """Plant a picture and its turned copy, in one split or in two."""
        picture = next(self.pictures)
        copy = picture.transpose(TURNS[int(self.rng.integers(len(TURNS)))])
        split = ("train", "val")[n % 2]
        keys = {self.add(picture, f"upright{n}"), self.add(copy, f"turned{n}", split=split)}
        self.planted["leak" if n % 2 else "near-duplicate"] |= keys
        self.clean[f"turned{n}"] = keys

    def copy_as_png(self, n: int) -> None:
        key = self.add(next(self.pictures), f"photo{n}")
        self.files[f"{key}_copy.png"] = encoded(opened(self.files[f"{key}.jpg"]), "PNG")
        self.planted["exact-duplicate"] |= {key, f"{key}_copy"}
        self.clean[f"photo{n}"] = {key}

    def copy_faulty(self, n: int) -> None:
        """Plant a blurred copy and one that is not upright, in either split."""
        picture, split = next(self.pictures), ("train", "val")[n % 2]
        key = self.add(picture, f"sharp{n}")
        soft = picture.filter(ImageFilter.GaussianBlur(self.rng.uniform(3, 5)))
        self.planted["blurred"].add(self.add(soft, f"sharp{n}_soft", split=split))
        turned = f"train/a/sharp{n}_turned"
        self.files[f"{turned}.jpg"] = encoded(picture.rotate(90, expand=True), exif=exif(6))
        self.planted["rotated"].add(turned)
        self.clean[f"sharp{n}"] = {key}


@pytest.fixture(scope="module", params=cases(range(3), 1))
def faults(request: pytest.FixtureRequest) -> Faults:
    return Faults(SEED + 1000 * request.param)


@pytest.fixture(scope="module")
def place(faults: Faults, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset; embeddings are near a center of their class, but for planted wrong labels."""
    root = tmp_path_factory.mktemp("findings")
    place = make_dataset(make_tree(root / "photos", faults.files), root / "made")
    rng, centers = faults.rng, faults.rng.normal(size=(len(CLASSES), VALUES))
    keys = [
        f"{split}/{key}" for split in ("train", "val") for key in open_shards(place / split).keys
    ]
    labels = np.array([CLASSES.index(key.split("/")[1]) for key in keys])
    plain = np.flatnonzero([key.split("/")[2].startswith("plain") for key in keys])
    wrong = rng.choice(plain, CASES, replace=False)
    labels[wrong] = (labels[wrong] + rng.integers(1, len(CLASSES), CASES)) % len(CLASSES)
    faults.planted["label-error"] = {keys[row] for row in wrong}
    vectors = centers[labels] + rng.normal(size=(len(keys), VALUES)) * rng.uniform(0.1, 0.4)
    fields.add(place, {"embedding": vectors.astype(np.float32)})
    return place


@pytest.fixture(scope="module")
def made(place: Path) -> DatasetReport:
    return report(place, embedding="embedding")


def found(made: DatasetReport, kind: str) -> set[str]:
    """Return the keys of a finding, with their splits."""
    images = made.images
    (finding,) = (each for each in made.findings if each.kind == kind)
    rows = {row for group in finding.groups for row in group.rows}
    return {f"{images.members[images.member[row]].name}/{images.keys[row]}" for row in rows}


@pytest.mark.parametrize("kind", ["blurred", "rotated", "exact-duplicate"])
def test_planted_faults_and_no_others_are_found(
    made: DatasetReport, faults: Faults, kind: str
) -> None:
    assert found(made, kind) == faults.planted[kind]


def test_wrong_labels_are_found(made: DatasetReport, faults: Faults) -> None:
    """One may be missed: its neighbors may have wrong labels, too."""
    errors, planted = found(made, "label-error"), faults.planted["label-error"]

    assert errors <= planted
    assert len(errors) >= CASES - 1


@pytest.mark.parametrize("kind", ["near-duplicate", "leak"])
def test_turned_copies_are_found(made: DatasetReport, faults: Faults, kind: str) -> None:
    """Blurred copies are similar, too."""
    others = {key for key in found(made, kind) if "/sharp" not in key}

    assert others == faults.planted[kind]


def test_all_lists_together_keep_a_good_copy_of_each_picture(
    made: DatasetReport, faults: Faults
) -> None:
    excluded = {
        f"{part}/{key}"
        for finding in made.findings
        for part, keys in made.exclude(finding).items()
        for key in keys
    }

    for copies in faults.clean.values():
        assert len(copies - excluded) == 1
