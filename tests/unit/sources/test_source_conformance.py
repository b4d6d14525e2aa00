"""Every registered source passes the conformance suite, which finds faults of sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from foreign import MAKERS, Maker
from helpers import make_tree, png

from shardkit import open_source
from shardkit.contracts import Entry, SourceKind
from shardkit.errors import UsageError
from shardkit.record import Record
from shardkit.registry import get_source, source_names
from shardkit.sources.imagefolder import ImageFolder
from shardkit.testing import SourceConformance

SECOND = (
    *("cifar", "ffcv raw", "hdf5 arrays", "huggingface saved", "litdata", "litdata raw", "mds raw"),
    *("mnist", "npz", "voc"),
)
"""Second ways to make a source, and those that share all but a parser with another: VOC with COCO,
LitData with MDS, CIFAR and MNIST with HDF5 arrays; `test_same_samples` always checks them."""


class TestRegisteredSources(SourceConformance):
    how: Maker

    @pytest.fixture(
        params=[
            pytest.param(name, marks=pytest.mark.slow if name in SECOND else ())
            for name in sorted(MAKERS)
        ]
    )
    def maker(self, request: pytest.FixtureRequest) -> Maker:
        return MAKERS[request.param]

    @pytest.fixture
    def kind(self, maker: Maker) -> SourceKind:
        self.how, self.pixels, self.labels = maker, maker.pixels, maker.labels
        self.options, self.in_place = maker.options, maker.in_place
        return get_source(maker.kind)

    @pytest.fixture
    def images(self, maker: Maker) -> dict[str, bytes]:
        return maker.images()

    def make(self, folder: Path, images: Mapping[str, bytes]) -> Path:
        return self.how.make(folder, images)

    def spoil(self, path: Path, image: str) -> None:
        self.how.spoil(path, image)


def test_every_source_is_tested() -> None:
    assert {maker.kind for maker in MAKERS.values()} == set(source_names())


# The conformance suite finds faults of sources.


class ListsTwice(ImageFolder):
    def scan(self, classes: Sequence[str] | None = None) -> Any:
        scan = super().scan(classes)
        images = scan.splits[""]
        return replace(scan, splits={"": images.of([*images.entries, images.entries[0]])})


class ForgetsClasses(ImageFolder):
    def scan(self, classes: Sequence[str] | None = None) -> Any:
        return super().scan()


class ReadsAnother(ImageFolder):
    def read(self, split: str, entry: Entry) -> Record:
        return super().read(split, self.scan().splits[""].entries[0])


class DescribesItsPlace(ImageFolder):
    def describe(self, split: str) -> Mapping[str, Any]:
        return {"name": str(self.folder)}


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
    suite.test_the_description_is_json_without_absolute_paths(source, source.paths()[0].parent)
    suite.test_a_spoiled_image_is_a_bad_image(source, source.paths()[0])


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


@pytest.mark.parametrize(
    ("kind", "name", "content", "reason"),
    [
        ("hdf5", "x.h5", b"text", "it is not an HDF5 file"),
        (
            "hdf5",
            "x.h5",
            b"\x89HDF\r\n\x1a\n" + bytes(90),
            "a damaged, truncated or unfinished HDF5 file",
        ),
        ("huggingface", "x.parquet", b"text", "it is damaged or is not a Parquet file"),
        ("table", "x.parquet", b"PAR1text", "it is damaged or is not a Parquet file"),
        ("lmdb", "data.mdb", b"text" * 5000, "it does not start like an LMDB file"),
        ("webdataset", "x.tar", b"text" * 500, "is damaged, or not a tar file, at byte 0"),
        ("npy", "x.npz", b"text", "it is not an .npz file"),
    ],
)
def test_a_file_of_another_kind_is_named_as_one(
    tmp_path: Path, kind: str, name: str, content: bytes, reason: str
) -> None:
    (tmp_path / name).write_bytes(content)
    options = {"image": "path"} if kind == "table" else {}
    try:
        scan = open_source(kind, tmp_path / name, **options).scan()
    except UsageError as error:
        message = str(error)
    else:
        ((problem,),) = scan.problems.values()
        message = f"{problem.path} {problem.reason}"
    assert name in message
    assert reason in message
    assert not any(word in message for word in ("Arrow", "synchronously", "Error", "b'"))
