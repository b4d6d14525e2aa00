"""The conformance suite finds faults of sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import make_tree, png

from shardkit.contracts import Entry, Scan
from shardkit.record import Record
from shardkit.sources.imagefolder import ImageFolder
from shardkit.testing import SourceConformance


class ListsTwice(ImageFolder):
    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        scan = super().scan(classes)
        images = scan.splits[""]
        return replace(scan, splits={"": images.of([*images.entries, images.entries[0]])})


class ForgetsClasses(ImageFolder):
    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        return super().scan()


class ReadsAnother(ImageFolder):
    def read(self, split: str, entry: Entry) -> Record:
        return super().read(split, self.scan().splits[""].entries[0])


class DescribesItsPlace(ImageFolder):
    def describe(self, split: str) -> Mapping[str, Any]:
        return {"name": str(self.root)}


class ReadsAnything(ImageFolder):
    def read(self, split: str, entry: Entry) -> Record:
        data = Path(self.locate(split, entry)).read_bytes()
        fields = {"png": data, "cls": b"%d" % entry.label, "json": b'{"path":"%s"}'}
        return Record(entry.key, {**fields, "json": fields["json"] % entry.path.encode()})


class Suite(SourceConformance):
    def spoil(self, path: Path, image: str) -> None:
        (path / image).write_bytes(b"not an image")


def check(source: ImageFolder, images: dict[str, bytes]) -> None:
    """Run the part of the suite that needs no registered source."""
    suite = Suite()
    suite.test_a_scan_lists_each_image_once(source, images)
    suite.test_parts_list_what_a_scan_lists(source)
    suite.test_labels_follow_given_classes(source, images)
    suite.test_the_description_is_json_without_absolute_paths(source, source.root.parent)
    suite.test_a_spoiled_image_is_a_bad_image(source, source.root)


@pytest.fixture
def images() -> dict[str, bytes]:
    return {name: png(seed=seed) for seed, name in enumerate(("cat/1.png", "dog/2.png"))}


def test_a_correct_source_passes(tmp_path: Path, images: dict[str, bytes]) -> None:
    check(ImageFolder(make_tree(tmp_path / "photos", images)), images)


@pytest.mark.parametrize(
    "faulty", [ListsTwice, ForgetsClasses, ReadsAnother, DescribesItsPlace, ReadsAnything]
)
def test_a_fault_is_found(
    faulty: type[ImageFolder], tmp_path: Path, images: dict[str, bytes]
) -> None:
    source = faulty(make_tree(tmp_path / "photos", images))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(source, images)
