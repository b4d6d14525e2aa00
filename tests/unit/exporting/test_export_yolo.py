"""Labels of YOLO, from any dataset with boxes, and back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import encoded, exif, jpeg, make_tree, picture
from refusals import refused

from shardkit import convert, export, open_dataset, open_source
from shardkit.errors import UsageError

yaml = pytest.importorskip("yaml")
JPEG = jpeg(40, 20)
FILES = {
    "train/images/a.jpg": JPEG,
    "train/labels/a.txt": b"1 0.5 0.5 0.25 0.5\n0 0.25 0.25 0.5 0.5\n",
    "train/images/more/b.jpg": jpeg(40, 20, 1),
    "valid/images/c.jpg": jpeg(40, 20, 2),
    "valid/labels/c.txt": b"0 0.1 0.2 0.5 0.2 0.3 0.8\n",
    "data.yaml": b'names: ["cat: 1", dog]\ntrain: train/images\nval: valid/images\n',
}


def test_labels_come_back(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "src", FILES)
    convert(open_source("yolo", source), tmp_path / "made", to="lmdb")
    export(tmp_path / "made", tmp_path / "out", layout="yolo")
    paths = (path for path in (tmp_path / "out").rglob("*") if path.is_file())
    files = {str(path.relative_to(tmp_path / "out")): path.read_bytes() for path in paths}
    description = yaml.safe_load(files.pop("data.yaml"))
    assert description == {
        "train": "images/train",
        "val": "images/val",
        "names": {0: "cat: 1", 1: "dog"},
    }
    assert files == {
        "images/train/a.jpg": FILES["train/images/a.jpg"],
        "labels/train/a.txt": FILES["train/labels/a.txt"],
        "images/train/more/b.jpg": FILES["train/images/more/b.jpg"],
        "labels/train/more/b.txt": b"",
        "images/val/c.jpg": FILES["valid/images/c.jpg"],
        "labels/val/c.txt": FILES["valid/labels/c.txt"],
    }
    convert(open_source("yolo", tmp_path / "out"), tmp_path / "again", to="lmdb")
    for split in ("train", "val"):
        one, other = (
            open_dataset(tmp_path / name / split, fields=["boxes"]) for name in ("made", "again")
        )
        boxes = [sorted(str(data[row]) for row in range(len(data))) for data in (one, other)]
        assert boxes[0] == boxes[1]


def test_keypoints_and_turned_photographs(tmp_path: Path) -> None:
    """Stored boxes are of the file's pixels, and labels of the upright picture."""
    labels = b"0 0.375 0.5 0.25 0.5 0.5 0.25 2 0 0 0\n"
    names = {"names": ["a"], "train": "images", "kpt_shape": [2, 3], "kpt_names": {"0": ["x", "y"]}}
    photo = encoded(picture(40, 20), "JPEG", exif=exif(6))
    text = "".join(f"{name}: {json.dumps(value)}\n" for name, value in names.items())
    files = {"images/a.jpg": photo, "labels/a.txt": labels, "data.yaml": text.encode()}
    convert(open_source("yolo", make_tree(tmp_path / "src", files)), tmp_path / "made", to="lmdb")
    stored = open_dataset(tmp_path / "made/train", fields=["boxes"])[0]
    assert np.allclose(stored, [[10, 10, 30, 15, 0]])  # upright, 20 x 40: 5, 10, 10, 30
    export(tmp_path / "made", tmp_path / "out", layout="yolo")
    assert (tmp_path / "out/labels/train/a.txt").read_bytes() == labels
    assert yaml.safe_load((tmp_path / "out/data.yaml").read_text())["kpt_shape"] == [2, 3]


@pytest.mark.parametrize("boxes", [None, [[1, 2, 50, 6]]])
def test_what_labels_cannot_hold_is_refused(boxes: list[list[int]] | None, tmp_path: Path) -> None:
    rows = {"file_name": "a.jpg", **({"boxes": [[*boxes[0], "cat"]]} if boxes else {"age": 3})}
    files = {"a.jpg": JPEG, "t.jsonl": json.dumps(rows).encode()}
    table = make_tree(tmp_path / "src", files) / "t.jsonl"
    words = {"boxes": "boxes:xyxy"} if boxes else {"keep": "age"}
    convert(open_source("table", table, **words), tmp_path / "made", to="lmdb")
    with refused(UsageError, "a.jpg" if boxes else "age", "csv"):
        export(tmp_path / "made", tmp_path / "out", layout="yolo")
    assert not (tmp_path / "out").exists()
