"""YOLO's folders: the layouts of Ultralytics and Roboflow, and what may be wrong with labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import exif, jpeg, make_tree, png
from PIL import Image
from refusals import refused, refuses

from shardkit import convert, open_dataset, open_source, verify
from shardkit.errors import BadImages, UsageError

JPEG = jpeg(40, 20)
ROW = b"1 0.5 0.5 0.25 0.5\n"
BOX = [15, 5, 25, 15, 1]
"""The box of `ROW` in 40 x 20 pixels, by hand."""

NAMES = {"names": ["cat", "dog"]}


def description(**values: Any) -> bytes:
    lines = (f"{name}: {json.dumps(value)}\n" for name, value in {**NAMES, **values}.items())
    return "".join(lines).encode()


def scan(path: Path, **options: Any) -> Any:
    return open_source("yolo", path, **options).scan()


def paths(scanned: Any) -> dict[str, list[str]]:
    return {name: [e.path for e in images.entries] for name, images in scanned.splits.items()}


def boxes(scanned: Any, split: str) -> list[Any]:
    images = scanned.splits[split]
    return [record.meta["boxes"] for record in images.read(range(len(images)))]


LAYOUTS: dict[str, tuple[dict[str, bytes], dict[str, list[str]]]] = {
    "ultralytics": (
        {
            "images/train/a.jpg": JPEG,
            "images/val/b.jpg": JPEG,
            "labels/train/a.txt": ROW,
            "labels/val/b.txt": ROW,
            "coco8.yaml": description(
                path="../datasets/coco8", train="images/train", val="images/val", test=None
            ),
        },
        {"train": ["images/train/a.jpg"], "val": ["images/val/b.jpg"]},
    ),
    "roboflow": (
        {
            "train/images/a_jpg.rf.0f.jpg": JPEG,
            "valid/images/b.jpg": JPEG,
            "train/labels/a_jpg.rf.0f.txt": ROW,
            "valid/labels/b.txt": ROW,
            "data.yaml": description(train="../train/images", val="../valid/images"),
        },
        {"train": ["train/images/a_jpg.rf.0f.jpg"], "val": ["valid/images/b.jpg"]},
    ),
    "lists": (
        {
            "images/a.jpg": JPEG,
            "images/b.jpg": JPEG,
            "labels/a.txt": ROW,
            "labels/b.txt": ROW,
            "train.txt": b"./images/b.jpg\r\n\n",
            "val.txt": b"/home/me/datasets/pets/images/a.jpg\n",
            "pets.yaml": description(train="train.txt", val=["val.txt"]),
        },
        {"train": ["images/b.jpg"], "val": ["images/a.jpg"]},
    ),
    "several folders": (
        {
            "one/images/a.jpg": JPEG,
            "two/images/b.jpg": JPEG,
            "one/labels/a.txt": ROW,
            "two/labels/b.txt": ROW,
            "data.yaml": description(train=["one/images", "C:\\data\\two\\images"]),
        },
        {"train": ["one/images/a.jpg", "two/images/b.jpg"]},
    ),
    "no description": (
        {
            "images/train/a.jpg": JPEG,
            "images/test/b.jpg": JPEG,
            "labels/train/a.txt": ROW,
            "labels/test/b.txt": ROW,
            "classes.txt": b"cat\ndog\n",
        },
        {"train": ["images/train/a.jpg"], "test": ["images/test/b.jpg"]},
    ),
    "Darknet, of CVAT": (
        {
            "obj.data": b"classes = 2\ntrain = data/train.txt\nnames = data/obj.names\n",
            "obj.names": b"cat\ndog\n",
            "train.txt": b"data/obj_train_data/a.jpg\n",
            "obj_train_data/a.jpg": JPEG,
            "obj_train_data/a.txt": ROW,
        },
        {"train": ["obj_train_data/a.jpg"]},
    ),
    "labels next to images": (
        {"train/a.jpg": JPEG, "train/a.txt": ROW, "train/_darknet.labels": b"cat\ndog"},
        {"train": ["train/a.jpg"]},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_read(tmp_path: Path, layout: str) -> None:
    files, expected = LAYOUTS[layout]
    make_tree(tmp_path, files)
    scanned = scan(tmp_path)
    assert paths(scanned) == expected
    assert scanned.schema["boxes"].classes == ("cat", "dog")
    assert [box for split in expected for box in boxes(scanned, split)] == [
        [BOX] for images in expected.values() for _ in images
    ]
    assert not any(scanned.problems.values())


def test_polygons_become_boxes_and_are_kept(tmp_path: Path) -> None:
    rows = b"0 0.1 0.2 0.5 0.2 0.3 0.8\n1 0.5 0.5 0.25 0.5\n"
    files = {"images/a.jpg": JPEG, "labels/a.txt": rows, "images/b.jpg": JPEG, "labels/b.txt": ROW}
    scanned = scan(make_tree(tmp_path, {**files, "data.yaml": description(train="images")}))
    first, second = (record.meta for record in scanned.splits["train"].read([0, 1]))
    assert np.allclose(first["boxes"], [[4, 4, 20, 16, 0], BOX])
    assert first["polygons"] == [[[0.1, 0.2], [0.5, 0.2], [0.3, 0.8]], []]
    assert second["polygons"] == [[]]


@pytest.mark.parametrize(
    ("shape", "row", "expected"),
    [
        ([2, 3], "0 .5 .5 .5 .5 .25 .5 2 0 0 0", [[10, 10, 2], [0, 0, 0]]),
        ([2, 2], "0 .5 .5 .5 .5 .25 .5 0 0", [[10, 10, 2], [0, 0, 0]]),
    ],
)
def test_keypoints_are_read(
    tmp_path: Path, shape: list[int], row: str, expected: list[list[int]]
) -> None:
    yaml = description(train="images", kpt_shape=shape, kpt_names={"0": ["nose", "tail"]})
    files = {"images/a.jpg": JPEG, "labels/a.txt": row.encode(), "data.yaml": yaml}
    scanned = scan(make_tree(tmp_path, files))
    assert scanned.schema["keypoints"].classes == ("nose", "tail")
    assert scanned.splits["train"].read([0])[0].meta["keypoints"] == expected


def test_labels_refer_to_the_upright_picture(tmp_path: Path) -> None:
    """As in Ultralytics, which turns images when it reads them."""
    picture = np.zeros((40, 20, 3), np.uint8)
    picture[10:30, 5:10] = 255
    turned = Image.fromarray(np.rot90(picture).copy())  # orientation 6 turns it back
    make_tree(tmp_path, {"src/labels/a.txt": b"0 0.375 0.5 0.25 0.5", "src/images/x": None})
    turned.save(tmp_path / "src/images/a.png", exif=exif(6))
    for orient in (False, True):
        source = open_source("yolo", tmp_path / "src")
        convert(source, tmp_path / f"{orient}", to="lmdb", orient=orient)
        image, found = open_dataset(tmp_path / f"{orient}", fields=["image", "boxes"])[0]
        left, top, right, bottom, _ = map(int, found[0])
        assert np.asarray(image)[top:bottom, left:right].min() == 255
        assert (right - left, bottom - top) == ((5, 20) if orient else (20, 5))
    assert found[0].tolist() == [5, 10, 10, 30, 0]


def test_images_without_labels_have_no_boxes_and_are_noted(tmp_path: Path) -> None:
    files = {"images/a.jpg": JPEG, "labels/a.txt": ROW, "images/b.jpg": JPEG}
    files |= {"images/c.jpg": JPEG, "labels/c.txt": b" \n", "labels/stray.txt": ROW}
    files |= {"data.yaml": b"names: ['0', '1']\ntrain: all.txt\n"}
    files |= {"all.txt": b"".join(b"images/%c.jpg\n" % name for name in b"abc")}
    scanned = scan(make_tree(tmp_path, files))
    assert boxes(scanned, "train") == [[BOX], [], []]
    (note,) = scanned.notes
    assert note.startswith("1 image ")
    assert "images/b.jpg" in note
    assert [problem.path for problem in scanned.ignored["train"]] == ["labels/stray.txt"]
    assert scanned.schema["boxes"].classes == ("0", "1")
    (tmp_path / "labels/a.txt").unlink()
    (tmp_path / "labels/c.txt").unlink()
    with refused(UsageError, "images/a.jpg", "labels/a.txt"):
        scan(tmp_path)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("2 0.5 0.5 0.1 0.1", "class 2 does not exist"),
        ("-1 0.5 0.5 0.1 0.1", "-1 is not a class"),
        ("0.5 0.5 0.5 0.1 0.1", "0.5 is not a class"),
        ("0 20 10 5 5", "20 is not a fraction"),
        ("0 nan 0.5 0.1 0.1", "nan is not a fraction"),
        ("0 0.5 0.5 0.1", "3 numbers"),
        ("0 0.5 0.5 0.1 0.1 0.9", "5 numbers"),
        ("cat 0.5 0.5 0.1 0.1", "cat"),
        ("1e999 0.5 0.5 0.1 0.1", "class"),
    ],
)
def test_wrong_labels_are_bad(tmp_path: Path, row: str, reason: str) -> None:
    files = {"images/a.jpg": JPEG, "labels/a.txt": ROW + row.encode(), "classes.txt": b"a\nb"}
    (problem,) = scan(make_tree(tmp_path, files)).problems[""]
    assert problem.path == "images/a.jpg"
    assert reason in problem.reason
    assert "line 2" in problem.reason


def test_boxes_outside_are_counted(tmp_path: Path) -> None:
    files = {"images/a.jpg": JPEG, "labels/a.txt": b"0 0.9 0.5 0.4 0.2\n0 0.5 0.5 1 1\n"}
    assert scan(make_tree(tmp_path, files)).notes == ["1 box extends beyond the image"]


def test_nothing_outside_of_the_folder_is_read(tmp_path: Path) -> None:
    outside = make_tree(tmp_path / "out", {"images/b.jpg": JPEG, "labels/b.txt": ROW})
    files = {"images/a.jpg": JPEG, "labels/a.txt": ROW, "list.txt": b"../out/images/b.jpg\n"}
    for entry in (f"{outside}/images", "../out/images", "/etc", "list.txt"):
        root = make_tree(tmp_path / "src", {**files, "data.yaml": description(train=entry)})
        try:
            found = [path for images in paths(scan(root)).values() for path in images]
        except UsageError:
            continue
        assert "b.jpg" not in "".join(found)
    (root / "images/link").symlink_to(outside / "images")
    (root / "labels/a.txt").unlink()
    (root / "labels/a.txt").symlink_to(outside / "labels/b.txt")
    (root / "data.yaml").unlink()
    with refused(UsageError, root, "links", "follow_links=True"):
        scan(root)


@pytest.mark.parametrize("path", ["coco8", "ABSOLUTE", "/home/me/coco8", "C:\\data\\coco8"])
def test_the_path_of_a_description_is_searched_beside_it(tmp_path: Path, path: str) -> None:
    """As Ultralytics writes it: relative, absolute, or that of another machine, which is noted."""
    files = {"coco8/images/train/a.jpg": JPEG, "coco8/labels/train/a.txt": ROW}
    files |= {"images/train/wrong.jpg": JPEG, "labels/train/wrong.txt": ROW}
    make_tree(tmp_path, files)
    stated = str(tmp_path / "coco8") if path == "ABSOLUTE" else path
    (tmp_path / "coco8.yaml").write_bytes(description(path=stated, train="images/train"))
    scanned = scan(tmp_path / "coco8.yaml")
    assert paths(scanned) == {"train": ["coco8/images/train/a.jpg"]}
    assert ["path is" in note for note in scanned.notes] == [True] * (path[0] in "/C")


def test_a_description_elsewhere_needs_its_folder(tmp_path: Path) -> None:
    make_tree(tmp_path / "data", {"images/train/a.jpg": JPEG, "labels/train/a.txt": ROW})
    make_tree(tmp_path, {"settings/coco8.yaml": description(path="../data", train="images/train")})
    file = tmp_path / "settings/coco8.yaml"
    with refused(UsageError, file, f"shardkit convert yolo {file}@{tmp_path / 'data'} DST"):
        scan(file)
    assert paths(scan(Path(f"{file}@{tmp_path / 'data'}"))) == {"train": ["images/train/a.jpg"]}


def test_links_to_folders_are_followed(tmp_path: Path) -> None:
    """Those that lead out only if the user says so; one is never left out in silence."""
    outside = make_tree(tmp_path / "out", {"images/b.jpg": JPEG, "labels/b.txt": ROW})
    root = make_tree(tmp_path / "src", {"pool/a.jpg": JPEG, "pool/a.txt": ROW, "images": None})
    (root / "images/train").symlink_to("../pool")
    (root / "labels").mkdir()
    (root / "labels/train").symlink_to("../pool")
    assert boxes(scan(root), "train") == [[BOX]]
    for name in ("images", "labels"):
        (root / name / "train").unlink()
        (root / name / "train").symlink_to(outside / name)
        (root / name / "val").mkdir()
        (root / name / "val/again").symlink_to(outside / name)
        (root / name / "val/loop").symlink_to(".")
    (root / "images/val/c.jpg").write_bytes(JPEG)
    (problem, again) = [problem for some in scan(root).problems.values() for problem in some]
    assert "follow_links=True" in problem.reason
    assert again.path == "images/val/again"
    followed = scan(root, follow_links=True)
    assert paths(followed)["train"] == ["images/train/b.jpg"]
    assert boxes(followed, "train") == [[BOX]]
    assert "images/val/again/b.jpg" in paths(followed)["val"]


def test_wrong_descriptions_are_refused(tmp_path: Path) -> None:
    make_tree(tmp_path, {"images/a.jpg": JPEG, "labels/a.txt": ROW})
    file = tmp_path / "data.yaml"
    for text in (b"names: [a\ntrain: x", b"[names, train]", b"names: 7\ntrain: images"):
        file.write_bytes(text)
        with refused(UsageError, file):
            scan(file)
    for values in ({"names": {"0": "a"}}, {"kpt_shape": [17]}, {"kpt_shape": [9**9, 2]}):
        file.write_bytes(description(train="images", **values))
        with refused(UsageError, file):
            scan(file)
    file.write_bytes(description(train="images\0"))
    with refused(UsageError, file):
        scan(file)
    bomb = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))
    file.write_text(f"a0: &a0 [x]\n{bomb}names: *a29\ntrain: images\n")
    with refused(UsageError, file):
        scan(file)
    with refused(UsageError, tmp_path / "absent"):
        scan(tmp_path / "absent")  # not the folder that it would be in
    file.write_bytes(description(train="images", val="missing/images"))
    with refused(UsageError, "val", "missing/images"):
        scan(tmp_path)
    file.write_bytes(description(train="images", test="missing/images"))
    assert "missing/images" in scan(tmp_path).notes[0]


def test_classes_may_be_given(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "src", {"images/a.jpg": JPEG, "labels/a.txt": ROW})
    names = tmp_path / "names.txt"
    names.write_text("cat\ndog\n")
    convert(open_source("yolo", source, classes=str(names)), tmp_path / "made", to="lmdb")
    dataset = open_dataset(tmp_path / "made", fields=["boxes"])
    assert dataset.schema["boxes"].classes == ("cat", "dog")
    assert verify(tmp_path / "made", against=source).findings == []
    names.write_text("cat\n")
    with refused(BadImages, "images/a.jpg"):
        convert(open_source("yolo", source, classes=str(names)), tmp_path / "bad", to="lmdb")
    refuses(2, "convert", "yolo", tmp_path / "none", tmp_path / "x", "--to", "lmdb")


def test_a_cache_of_the_hub_is_read_if_its_links_are_trusted(tmp_path: Path) -> None:
    blobs = {"1": description(train="list.txt"), "2": b"images/a.jpg\n", "3": JPEG, "4": ROW}
    make_tree(tmp_path / "blobs", blobs)
    root = tmp_path / "snapshots"
    for blob, name in enumerate(("data.yaml", "list.txt", "images/a.jpg", "labels/a.txt"), 1):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(tmp_path / "blobs" / str(blob))
    scanned = scan(root, follow_links=True)
    assert boxes(scanned, "train") == [[BOX]]
    assert scanned.schema["boxes"].classes == ("cat", "dog")
    with refused(UsageError, root / "data.yaml", "follow_links=True"):
        scan(root)


def test_a_folder_is_no_description(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "pets.data", {"images/a.jpg": JPEG, "labels/a.txt": ROW})
    (root / "voc.data").mkdir()
    assert boxes(scan(root), "") == [[BOX]]


def test_a_list_of_images_must_be_utf_8(tmp_path: Path) -> None:
    files = {"data.yaml": description(train="list.txt"), "list.txt": b"images/\xe9.jpg\n"}
    root = make_tree(tmp_path / "data", {**files, "images/a.jpg": JPEG})
    with refused(UsageError, root / "list.txt"):
        scan(root)


def test_png_images_work(tmp_path: Path) -> None:
    files = {"images/a.png": png(40, 20), "labels/a.txt": ROW}
    assert boxes(scan(make_tree(tmp_path, files)), "") == [[BOX]]


def test_folders_of_classes_are_another_source(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "src", {"train/cat/1.jpg": JPEG, "val/dog/1.jpg": JPEG})
    command = f"shardkit convert imagefolder {source} DST"
    with refused(UsageError, "train/cat/1.jpg", "folders such as cat", command):
        scan(source)


def test_splits_among_many_files_are_all_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkit.sources.recognize._MOST", 1)
    splits = ("train", "val", "test")
    images = {f"images/{name}/a.jpg": JPEG for name in splits}
    labels = {f"labels/{name}/a.txt": ROW for name in splits}
    found = paths(scan(make_tree(tmp_path, images | labels)))
    assert found == {name: [f"images/{name}/a.jpg"] for name in splits}
