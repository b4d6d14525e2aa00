"""COCO files: the same annotations as pycocotools reads, and all that is wrong with them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign import problems
from helpers import ORIENTATION, exif, jpeg, make_tree, png, run_main
from PIL import Image, ImageOps
from pycocotools import mask as masks
from pycocotools.coco import COCO
from refusals import refused

from shardkit import convert, open_dataset, open_source, repair, verify
from shardkit.errors import BadImages, UsageError

IMAGES = [png(40, 30, seed) for seed in range(3)]
POINTS = [10, 11, 2, 12, 13, 1]


def scan(path: str | Path, **options: Any) -> Any:
    return open_source("coco", path, **options).scan()


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
        "x.json:annotations[3]": "no image has the id 1",
        "x.json:annotations[4]": "it has no image_id",
        "a/2.png": "annotations[5]: no category has the id 4 (x.json:images[2])",
        "1.png": "annotations[6]: a box must be four numbers, not [1, 1, 1]",
        "x.json:annotations[7]": "it has no image_id",
        "9.png": "another image has the id 4",
        "x.json:images[4]": "'9.png': it cannot be read",
        "../x.png": "is not a plain path",
        "000000000093.jpg": "it cannot be read",
        "x.json:images[7]": "its id is missing",
        "x.json:images[8]": "its id is missing",
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
        (
            '{"categories": [{"id": 1, "name": "a"}, {"id": 2, "name": "a"}], "annotations": '
            '[{"image_id": 1, "category_id": 1}, {"image_id": 1, "category_id": 2}]}',
            ("'a'",),
        ),
        ('{"categories": [{"id": 1}]}', ()),
        ('{"categories": [[]]}', ()),
        ('{"categories": [{"id": [1], "name": "a"}]}', ()),
        ('{"categories": [{"id": 1, "name": {"a": 1}}]}', ()),
        ('{"categories": [{"id": 1, "name": [[1]]}]}', ()),
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


def write_one(root: Path, *images: dict[str, Any], box: Any = (2, 3, 10, 20)) -> Path:
    """Write annotations with one box for each image."""
    boxes = [
        {"id": number, "image_id": image["id"], "category_id": 1, "bbox": box}
        for number, image in enumerate(images)
    ]
    categories = [{"id": 1, "name": "cat"}]
    return write(
        root / "a.json", {"images": images, "annotations": boxes, "categories": categories}
    )


def save_shown(path: Path, picture: Image.Image, orientation: int) -> None:
    """Save a picture that Pillow shows upright with an orientation in EXIF."""
    for turn in (None, *Image.Transpose):
        stored = picture if turn is None else picture.transpose(turn)
        stored.save(path, exif=exif(orientation))
        with Image.open(path) as saved:
            shown = ImageOps.exif_transpose(saved)
            if shown.size == picture.size and shown.tobytes() == picture.tobytes():
                return


@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_of_an_upright_picture_are_turned_once(tmp_path: Path, orientation: int) -> None:
    """The mark in the picture stays in its box, whatever way the file stores the picture."""
    folder = make_tree(tmp_path / "src", {})
    picture = np.zeros((40, 24, 3), np.uint8)
    picture[3:23, 2:12] = 255
    save_shown(folder / "1.png", Image.fromarray(picture), orientation)
    path = write_one(folder, {"id": 1, "file_name": "1.png", "width": 24, "height": 40})
    annotated = None if orientation >= 5 else "upright"  # without, the size does not show it
    for orient in (False, True):
        source = open_source("coco", path, annotated=annotated)
        convert(source, tmp_path / f"{orient}", to="lmdb", orient=orient)
        image, boxes = open_dataset(tmp_path / f"{orient}", fields=["image", "boxes"])[0]
        left, top, right, bottom, _ = map(int, boxes[0])
        assert np.asarray(image)[top:bottom, left:right].min() == 255
        assert (right - left) * (bottom - top) == 200
    assert boxes[0].tolist() == [2, 3, 12, 23, 0]
    assert verify(tmp_path / "True", against=path).findings == []


def test_one_rule_holds_for_all_pictures_of_a_dataset(tmp_path: Path) -> None:
    """A square picture is upright if another one shows that all are."""
    folder = make_tree(tmp_path / "src", {})
    for number, size in enumerate(((24, 40), (30, 30))):
        picture = Image.new("RGB", size)
        picture.paste((255, 255, 255), (2, 3, 12, 23))
        save_shown(folder / f"{number}.png", picture, 6)
    square = {"id": 1, "file_name": "1.png", "width": 30, "height": 30}
    tall = {"id": 2, "file_name": "0.png", "width": 24, "height": 40}
    path = write_one(folder, square, tall)
    convert(open_source("coco", path), tmp_path / "made", to="lmdb", orient=True)
    made = open_dataset(tmp_path / "made", fields=["boxes"])
    for row in range(2):
        assert made[row][0][0].tolist() == [2, 3, 12, 23, 0]
    write_one(folder, square, {**tall, "width": 40, "height": 24})
    convert(open_source("coco", path), tmp_path / "other", to="lmdb")
    made = open_dataset(tmp_path / "other", fields=["boxes"])
    for row in range(2):
        assert made[row][0][0].tolist() == [2, 3, 12, 23, 0]  # as stored: none is turned
    with refused(UsageError, "annotated='sideways'"):
        open_source("coco", path, annotated="sideways")


def test_sizes_that_differ_from_the_file_are_findings(tmp_path: Path) -> None:
    folder = make_tree(tmp_path / "src", {})
    save_shown(folder / "1.png", Image.new("RGB", (24, 40)), 6)
    (folder / "2.jpg").write_bytes(jpeg(24, 16))
    scaled = {"id": 2, "file_name": "2.jpg", "width": 48, "height": 32}
    path = write_one(folder, {"id": 1, "file_name": "1.png", "width": 24, "height": 40}, scaled)
    with refused(BadImages, "2.jpg", "48 x 32", "24 x 16"):
        convert(open_source("coco", path), tmp_path / "made", to="lmdb")
    convert(open_source("coco", path), tmp_path / "made", to="lmdb", on_error="skip")
    assert len(open_dataset(tmp_path / "made")) == 1
    stored = open_source("coco", path, annotated="stored")
    with refused(BadImages, "1.png", "24 x 40", "annotated='stored'"):
        convert(stored, tmp_path / "other", to="lmdb")


def test_boxes_outside_of_the_picture_are_counted(tmp_path: Path) -> None:
    folder = make_tree(tmp_path / "src", {})
    (folder / "1.jpg").write_bytes(jpeg(24, 16))
    path = write_one(
        folder, {"id": 1, "file_name": "1.jpg", "width": 24, "height": 16}, box=[20, 1, 5, 5]
    )
    assert scan(path).notes == ["1 box extends beyond the image"]
    done = run_main("convert", "coco", path, tmp_path / "made", "--to", "lmdb")
    assert "noted     1 box extends beyond the image" in done.stdout


def test_a_root_with_the_name_of_a_category_is_no_class(tmp_path: Path) -> None:
    """Roboflow writes such a category, without annotations."""
    folder = make_tree(tmp_path / "src", {})
    (folder / "1.jpg").write_bytes(jpeg())
    path = write_one(folder, {"id": 1, "file_name": "1.jpg"})
    listed = json.loads(path.read_text())
    for root in (0, 7):
        listed["categories"] = [{"id": root, "name": "cat"}, {"id": 1, "name": "cat"}]
        found = scan(write(path, listed))
        assert found.schema["boxes"].classes == ("cat",)
        assert found.splits[""].read([0])[0].meta["boxes"] == [[2, 3, 12, 23, 0]]
        assert "1 category" in found.notes[0]


@pytest.mark.parametrize(
    ("image", "file"),
    [
        ({"coco_url": "http://images.example.org/val2017/07.jpg"}, "val2017/07.jpg"),
        ({"coco_url": "http://images.example.org/val2017/07.jpg"}, "07.jpg"),
        ({}, "000000000001.jpg"),
    ],
)
def test_images_without_a_file_name_are_found(
    tmp_path: Path, image: dict[str, Any], file: str
) -> None:
    """LVIS states URLs; others have only the ID, as COCO's files are called."""
    folder = make_tree(tmp_path / "src", {file: jpeg()})
    found = scan(write_one(folder, {"id": 1, **image}))
    assert [entry.path for entry in found.splits[""].entries] == [file]


@pytest.mark.parametrize(
    "start", ["C:\\Users\\me\\photos\\", "/home/me/photos/", "..\\..\\media\\", "photos/"]
)
def test_names_of_another_machine_are_read_as_the_root(tmp_path: Path, start: str) -> None:
    images = [{"id": n, "file_name": f"{start}{n}.png"} for n in (1, 2)]
    files = {"photos/1.png": IMAGES[1], "photos/2.png": IMAGES[2]}
    stated = json.dumps({"images": images, "annotations": [], "categories": []})
    root = make_tree(tmp_path / "src", {**files, "a.json": stated.encode()}) / "photos"
    source = open_source("coco", root.parent / "a.json", root=root)
    assert [entry.path for entry in source.scan().splits[""].entries] == ["1.png", "2.png"]
    assert any(str(root) in note for note in source.scan().notes)
    (root / "1.png").unlink()
    assert [*problems(source.scan())] == ["1.png"]


def test_images_of_another_split_are_not_those_of_the_root(tmp_path: Path) -> None:
    stated = json.dumps({"images": [{"id": 1, "file_name": "val/1.png"}], "annotations": []})
    source = make_tree(tmp_path, {"train/1.png": IMAGES[0], "a.json": stated.encode()})
    assert [*problems(scan(source / "a.json", root=source / "train"))] == ["val/1.png"]


CATEGORIES = [{"id": 9, "name": "3"}, {"id": 2, "name": "oak"}, {"id": 4, "name": "elm"}]
"""By ID: oak, elm, and one whose name looks like a label."""


def classified(tmp_path: Path, *of_image: tuple[int, ...]) -> Path:
    """Write images whose annotations are categories alone, as iNaturalist has them."""
    images = [{"id": n, "file_name": f"{n}.png"} for n in range(len(of_image))]
    annotations = [
        {"id": 10 * n + category, "image_id": n, "category_id": category}
        for n, categories in enumerate(of_image)
        for category in categories
    ]
    stated = {"images": images, "annotations": annotations, "categories": CATEGORIES}
    files = {f"{n}.png": IMAGES[n] for n in range(len(of_image))}
    return make_tree(tmp_path, {"a.json": json.dumps(stated).encode(), **files})


def test_a_category_alone_is_the_label_of_its_image(tmp_path: Path) -> None:
    path = classified(tmp_path / "source", (4,), (), (9,)) / "a.json"
    made = convert(open_source("coco", path), tmp_path / "out", to="lmdb", shuffle=False)
    assert made.manifests[""].classes == ("oak", "elm", "3")
    dataset = open_dataset(tmp_path / "out")
    assert [dataset[row][1] for row in range(3)] == [1, -1, 2]
    assert verify(tmp_path / "out", against=path).ok


def test_several_categories_are_labels(tmp_path: Path) -> None:
    source = open_source("coco", classified(tmp_path / "source", (4, 9), (), (2,)))
    convert(source, tmp_path / "out", to="lmdb", shuffle=False)
    dataset = open_dataset(tmp_path / "out", fields=["image", "labels"])
    assert [dataset[row][1].tolist() for row in range(3)] == [[0, 1, 1], [0] * 3, [1, 0, 0]]


def test_an_image_of_no_category_is_bad(tmp_path: Path) -> None:
    source = open_source("coco", classified(tmp_path / "source", (4,), (7,)))
    with refused(BadImages, "1.png", "no category has the id 7"):
        convert(source, tmp_path / "out", to="lmdb")


def test_splits_of_inaturalist_are_read_by_their_lists(tmp_path: Path) -> None:
    root = tmp_path / "source"
    for split, categories in {"train": (4, 2), "val": (2, 9)}.items():
        stated = json.loads(
            (classified(tmp_path / split, *map(tuple, zip(categories))) / "a.json").read_bytes()
        )
        for image in stated["images"]:
            image["file_name"] = f"{split}/{image['id']}_of/{image['file_name']}"
        files = {image["file_name"]: IMAGES[image["id"]] for image in stated["images"]}
        make_tree(root, {f"{split}.json": json.dumps(stated).encode(), **files})
    assert run_main("convert", root, tmp_path / "out", "--to", "lmdb").returncode == 0
    for split, labels in {"train": [1, 0], "val": [0, 2]}.items():
        dataset = open_dataset(tmp_path / "out" / split)
        assert dataset.classes == ["oak", "elm", "3"]
        by_path = dict(zip(dataset.paths, dataset.targets, strict=True))
        assert [by_path[path] for path in sorted(by_path)] == labels
