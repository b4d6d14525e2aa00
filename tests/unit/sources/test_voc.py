"""Folders of Pascal VOC: splits, boxes from 1, and hostile XML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import write_voc
from helpers import make_tree, png
from refusals import refused

from shardkit import convert, open_dataset, open_source, repair, verify
from shardkit.errors import BadImages, UsageError


def scan(path: str | Path, **options: Any) -> Any:
    return open_source("voc", path, **options).scan()


@pytest.fixture
def voc(tmp_path: Path) -> Path:
    """Four images; three are in splits."""
    folder = tmp_path / "VOC"
    for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (folder / name).mkdir(parents=True)
    objects: list[list[tuple[Any, ...]]] = [
        [("dog", 1, 1, 24, 16), ("cat", 2.5, 3, 4, 5)],
        [("cat", 10, 10, 20, 16)],
        [],
        [("aeroplane", 1, 2, 3, 4)],
    ]
    for number, each in enumerate(objects):
        (folder / "JPEGImages" / f"{number}.png").write_bytes(png(24, 16, number))
        write_voc(folder / "Annotations" / f"{number}.xml", f"{number}.png", each)
    for name, text in {"train": "0\n1\n", "val": " 2\n\n", "dog_train": "0 1\n1 -1\n"}.items():
        (folder / "ImageSets" / "Main" / f"{name}.txt").write_text(text)
    return folder


def test_boxes_count_from_zero_and_splits_share_classes(voc: Path, tmp_path: Path) -> None:
    found = scan(voc)
    assert {name: len(images) for name, images in found.splits.items()} == {"train": 2, "val": 1}
    assert found.schema["boxes"].classes == ("cat", "dog")
    first, second = (record.meta for record in found.splits["train"].read(range(2)))
    assert first["boxes"] == [[0, 0, 24, 16, 1], [1.5, 2, 4, 5, 0]]  # the first is all of the image
    assert second["objects"] == [
        {
            "name": "cat",
            "difficult": "0",
            "bndbox": {"xmin": "10", "ymin": "10", "xmax": "20", "ymax": "16"},
        }
    ]
    unused = {problem.path for problem in found.ignored["train"]}
    assert unused == {"JPEGImages/3.png", "Annotations/3.xml"}
    convert(found.source, tmp_path / "made", to="webdataset")
    assert verify(tmp_path / "made", against=voc).findings == []
    (tmp_path / "made" / "train" / "shard-000000.tar").unlink()
    assert repair(tmp_path / "made", voc).findings == []


def test_one_split_or_all_annotations_are_read(voc: Path, tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("dog\ncat\n")
    one = scan(voc, split="train", classes=str(tmp_path / "names.txt"))
    assert one.splits.keys() == {""}
    assert one.schema["boxes"].classes == ("dog", "cat")
    convert(one.source, tmp_path / "made", to="lmdb")
    assert verify(tmp_path / "made", against=voc).findings == []
    with refused(UsageError, "split='test'", "dog_train, train, val"):
        scan(voc, split="test")
    for path in (voc / "ImageSets" / "Main").iterdir():
        path.unlink()
    assert len(scan(voc).splits[""]) == 4


def test_wrong_annotations_are_named(voc: Path, tmp_path: Path) -> None:
    (voc / "ImageSets" / "Main" / "train.txt").write_text("0\n1\n2\n8\n../../secret\n3\n9\n0\n")
    (tmp_path / "secret.xml").write_text("<annotation/>")
    (voc / "Annotations" / "1.xml").write_text("<annotation><object>")
    (voc / "JPEGImages" / "2.png").unlink()
    write_voc(voc / "Annotations" / "2.xml", "9.png", [])
    write_voc(voc / "Annotations" / "3.xml", "3.png", [("dog", "1", "one", "2", "2")])
    write_voc(voc / "Annotations" / "9.xml", "../Annotations/9.xml", [])
    found = scan(voc)
    assert [entry.path for entry in found.splits["train"].entries] == ["0.png"]
    reasons = {problem.path: problem.reason for problem in found.problems["train"]}
    for path, reason in {
        "Annotations/1.xml": "its annotation is not XML: ",
        "9.png": "it cannot be read: No such file or directory (Annotations/2.xml)",
        "Annotations/8.xml": "it cannot be read",
        "Annotations/../../secret.xml": "is not a plain path inside the root folder",
        "3.png": "its 'dog' box is ['1', 'one', '2', '2']",
        "../Annotations/9.xml": "is not a plain path inside the root folder",
        "Annotations/0.xml": "'0.png': another row also names it; list all of its boxes, "
        "labels and captions in one row",
    }.items():
        assert reason in reasons.pop(path), path
    assert reasons == {}


def test_no_entity_is_expanded(voc: Path) -> None:
    for text, reason in (
        ('<!DOCTYPE a [<!ENTITY x "y">]><a>&x;</a>', "declares a document type"),
        ('<!DOCTYPE a SYSTEM "file:///etc/passwd"><a/>', "declares a document type"),
        ("<a>&x;</a>", "is not XML"),
        ('<?xml version="1.0" encoding="none"?><a/>', "is not XML"),
        ("", "is not XML"),
        ("<a/><b/>", "is not XML"),
    ):
        (voc / "Annotations" / "0.xml").write_text(text)
        (problem,) = scan(voc).problems["train"]
        assert problem.path == "Annotations/0.xml"
        assert reason in problem.reason


def test_deep_annotations_are_refused(voc: Path) -> None:
    deep = "<annotation><object><name>a</name>" + "<b>" * 200_000 + "</b>" * 200_000
    bounds = "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>1</xmax><ymax>1</ymax></bndbox>"
    (voc / "Annotations" / "0.xml").write_text(f"{deep}{bounds}</object></annotation>")
    (problem,) = scan(voc).problems["train"]
    assert problem.path == "0.png"
    assert "nested too deeply" in problem.reason
    for name in ("Annotations", "JPEGImages"):
        (voc / name).rename(voc / f"{name}2")
        with refused(UsageError, name):
            scan(voc)
        (voc / f"{name}2").rename(voc / name)


@pytest.mark.parametrize("stated", ["0", "0.JPG", "other/0.jpg", "5.png", ""])
def test_an_image_is_found_by_the_id_of_its_annotation(voc: Path, stated: str) -> None:
    """As torchvision's VOCDetection does, whatever the annotation calls it."""
    write_voc(voc / "Annotations" / "0.xml", stated, [("dog", 1, 2, 3, 4)])
    found = scan(voc)
    assert [entry.path for entry in found.splits["train"].entries] == ["0.png", "1.png"]
    noted = [note for note in found.notes if "Annotations/0.xml" in note]
    assert len(noted) == (stated == "5.png")


def test_several_images_of_one_id_are_not_guessed(voc: Path) -> None:
    (voc / "JPEGImages" / "0.jpg").write_bytes(png())
    write_voc(voc / "Annotations" / "0.xml", "0.gif", [])
    assert "0.jpg, 0.png" in scan(voc).problems["train"][0].reason


def test_a_stated_size_is_compared_with_the_file(voc: Path, tmp_path: Path) -> None:
    for number, width in ((0, 24), (1, 48)):
        path = voc / "Annotations" / f"{number}.xml"
        size = f"<size><width>{width}</width><height>16</height></size></annotation>"
        path.write_text(path.read_text().replace("</annotation>", size))
    with refused(BadImages, "1.png", "48 x 16", "24 x 16"):
        convert(open_source("voc", voc), tmp_path / "made", to="lmdb")


@pytest.mark.parametrize(
    ("image", "annotation", "split"),
    [
        ("images/a.png", "annotations/a.xml", ""),
        ("train/a.png", "train/a.xml", "train"),
        ("a.png", "a.xml", ""),
    ],
)
def test_annotations_may_be_elsewhere(
    tmp_path: Path, image: str, annotation: str, split: str
) -> None:
    """As Kaggle's and Roboflow's folders have them."""
    source = make_tree(tmp_path / "src", {image: png(24, 16), annotation: b""})
    write_voc(source / annotation, "a.png", [("cat", 2, 3, 10, 12)])
    convert(open_source("voc", source), tmp_path / "made", to="lmdb")
    dataset = open_dataset(tmp_path / "made" / split, fields=["boxes"])
    assert [boxes.tolist() for (boxes,) in [dataset[0]]] == [[[1, 2, 10, 12, 0]]]
    assert not any(scan(source).ignored.values())
    assert verify(tmp_path / "made", against=source).findings == []
