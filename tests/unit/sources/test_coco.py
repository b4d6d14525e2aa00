"""COCO files: the same annotations as pycocotools reads, and all that is wrong with them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import ORIENTATION, png
from PIL import Image
from pycocotools import mask as masks
from pycocotools.coco import COCO
from refusals import refused

from shardkit import UsageError, convert, open_dataset, open_source, repair, verify

IMAGES = [png(40, 30, seed) for seed in range(3)]
POINTS = [10, 11, 2, 12, 13, 1]


def scan(path: str | Path, **options: Any) -> Any:
    return open_source("coco", path, **options).scan()


def problems(found: Any) -> dict[str, str]:
    return {problem.path: problem.reason for problem in found.problems[""]}


def rle() -> dict[str, Any]:
    """Return a mask as pycocotools encodes it."""
    found = masks.encode(np.asfortranarray(np.eye(30, 40, dtype=np.uint8)))
    return {"size": found["size"], "counts": found["counts"].decode()}


def content() -> dict[str, Any]:
    return {
        "info": {"year": 2026},
        "annotations": [
            {
                "id": 5,
                "image_id": 90,
                "category_id": 18,
                "bbox": [1, 2, 3.5, 4],
                "iscrowd": 0,
                "segmentation": [[1, 2, 4, 2, 4, 6]],
                "keypoints": POINTS,
                "area": 14.0,
            },
            {
                "id": 6,
                "image_id": 17,
                "category_id": 3,
                "bbox": [0, 0, 40, 30],
                "iscrowd": 1,
                "segmentation": rle(),
            },
            {
                "id": 7,
                "image_id": 90,
                "category_id": 3,
                "bbox": [5, 5, 0, 0],
                "iscrowd": 0,
                "segmentation": [],
            },
        ],
        "categories": [
            {"id": 18, "name": "dog", "keypoints": ["nose", "tail"]},
            {"id": 3, "name": "größe"},
            {"id": 99, "name": "bird"},
        ],
        "images": [
            {"id": 90, "file_name": "0.png", "width": 40, "height": 30},
            {"id": 17, "file_name": "1.png", "width": 40, "height": 30},
            {"id": 4, "file_name": "a/2.png", "width": 40, "height": 30},
        ],
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "images" / "a").mkdir(parents=True)
    for name, data in zip(("0.png", "1.png", "a/2.png"), IMAGES, strict=True):
        (tmp_path / "images" / name).write_bytes(data)
    return tmp_path / "images"


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value, indent=1), "utf-8")
    return path


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools
def test_annotations_equal_those_of_pycocotools(root: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "x.json", content())
    known = COCO(str(path))
    found = scan(path, root=root)
    assert problems(found) == {}
    names = found.schema["boxes"].classes or ()
    assert names == tuple(each["name"] for each in known.loadCats(sorted(known.getCatIds())))
    convert(found.source, tmp_path / "made", to="lmdb", shuffle=False)
    dataset = open_dataset(tmp_path / "made", decode="bytes")
    assert dataset.classes == []
    for row, meta in enumerate(r.meta for r in found.splits[""].read(range(3))):
        objects = known.loadAnns(known.getAnnIds(imgIds=[meta["image_id"]]))
        boxes, labels = dataset.column("boxes")[row]
        assert known.loadImgs([meta["image_id"]])[0]["file_name"] == dataset.paths[row]
        assert meta["annotations"] == objects
        corners = [[x, y, x + w, y + h] for x, y, w, h in (each["bbox"] for each in objects)]
        assert np.asarray(boxes).tolist() == corners
        categories = [known.loadCats(each["category_id"])[0]["name"] for each in objects]
        assert [names[label] for label in labels] == categories
    first, second, third = (record.meta for record in found.splits[""].read(range(3)))
    assert first["keypoints"] == [[10, 11, 2], [12, 13, 1], [0, 0, 0], [0, 0, 0]]
    assert third["boxes"] == third["annotations"] == []
    decoded = masks.decode(second["annotations"][0]["segmentation"])
    assert np.array_equal(decoded, np.eye(30, 40))
    assert found.understood["unused"] == "info"
    assert verify(tmp_path / "made", against=f"{path}@{root}").findings == []
    (tmp_path / "made" / "shard-000000.lmdb").unlink()
    assert repair(tmp_path / "made", path).findings == []


def test_captions_and_files_without_annotations_are_read(root: Path, tmp_path: Path) -> None:
    plain = {"images": content()["images"]}
    assert scan(write(tmp_path / "x.json", plain), root=root).schema.keys() == {"image", "image_id"}
    told = [{"image_id": 17, "id": 1, "caption": "größer"}, {"image_id": 17, "caption": "b"}]
    found = scan(write(tmp_path / "x.json", {"annotations": told, **plain}), root=root)
    assert found.schema.keys() == {"image", "image_id", "annotations"}
    assert [r.meta["annotations"] for r in found.splits[""].read(range(3))] == [[], told, []]


def test_wrong_annotations_are_named(root: Path, tmp_path: Path) -> None:
    wrong = content()
    wrong["annotations"] += [
        {"image_id": 1, "category_id": 3, "bbox": [1, 1, 1, 1]},
        {"category_id": 3},
        {"image_id": 4, "category_id": 4, "bbox": [1, 1, 1, 1]},
        {"image_id": 17, "category_id": 3, "bbox": [1, 1, 1]},
        7,
    ]
    wrong["images"] += [
        {"id": 4, "file_name": "9.png"},
        {"id": 91, "file_name": "9.png"},
        {"id": 92, "file_name": "../x.png"},
        {"id": 93},
        {"file_name": "0.png"},
        [],
    ]
    (root / "extra.png").write_bytes(b"")
    found = scan(write(tmp_path / "x.json", wrong), root=root)
    assert [entry.path for entry in found.splits[""].entries] == ["0.png"]
    reasons = problems(found)
    for path, reason in {
        "x.json:annotations[3]": "there is no image 1",
        "x.json:annotations[4]": "it states no image_id",
        "a/2.png": "annotations[5]: there is no category 4 (x.json:images[2])",
        "1.png": "annotations[6]: a box is four numbers, not [1, 1, 1]",
        "x.json:annotations[7]": "it states no image_id",
        "9.png": "another image has the id 4",
        "x.json:images[4]": "'9.png': it cannot be read",
        "../x.png": "is not a plain path",
        "x.json:images[6]": "it has no file name",
        "x.json:images[7]": "it has no id",
        "x.json:images[8]": "it has no id",
    }.items():
        assert reason in reasons.pop(path), path
    assert reasons == {}
    assert {problem.path for problem in found.ignored[""]} >= {"extra.png"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", ("0",)),
        ("[]", ()),
        ("{7: 8}", ("7",)),
        ('{"images": [1', ()),
        ('{"images": [1,]}', ()),
        ('{"images": []} x', ()),
        ('{"images": ' + "[" * 100_000, ()),
        ('{"categories": [{"id": 1, "name": "a"}, {"id": 2, "name": "a"}]}', ("'a'",)),
        ('{"categories": [{"id": 1}]}', ()),
        ('{"categories": [[]]}', ()),
        ('{"categories": [{"id": [1], "name": "a"}]}', ()),
        ('{"categories": [{"id": 1, "name": {"a": 1}}]}', ()),
        ('{"categories": [{"id": 1, "name": [[1]]}]}', ()),
        ('{"categories": [{"id": 1, "name": "1"}, {"id": 2, "name": 1}]}', ("'1'",)),
        ("{}", ()),
    ],
)
def test_files_that_are_no_annotations_are_refused(
    text: str, reason: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "x.json").write_text(text)
    with refused(UsageError, *reason):
        scan(tmp_path / "x.json")


@pytest.mark.parametrize("orient", [False, True])
def test_boxes_refer_to_stored_pixels_and_turn_with_them(orient: bool, tmp_path: Path) -> None:
    """Boxes of an image whose EXIF orientation is 6 are around the same red pixels."""
    image = Image.new("RGB", (40, 30))
    image.paste((255, 0, 0), (4, 6, 14, 11))
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    (tmp_path / "images").mkdir()
    image.save(tmp_path / "images" / "x.png", exif=exif)
    stated = {
        "images": [{"id": 1, "file_name": "x.png"}],
        "categories": [{"id": 1, "name": "red"}],
        "annotations": [{"image_id": 1, "category_id": 1, "bbox": [4, 6, 10, 5]}],
    }
    source = open_source("coco", write(tmp_path / "x.json", stated), root=tmp_path / "images")
    convert(source, tmp_path / "made", to="lmdb", orient=orient)
    dataset = open_dataset(tmp_path / "made", decode="bytes")
    pixels = np.asarray(Image.open(io.BytesIO(dataset[0][0])))
    assert pixels.shape[:2] == ((40, 30) if orient else (30, 40))
    ((left, top, right, bottom),) = np.asarray(dataset.column("boxes")[0][0]).astype(int).tolist()
    red = np.zeros(pixels.shape[:2], bool)
    red[top:bottom, left:right] = True
    assert np.array_equal(pixels[..., 0] == 255, red)
