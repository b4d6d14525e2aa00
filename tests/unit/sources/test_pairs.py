"""Folders of images and masks, as tutorials of U-Net and data sets of segmentation have them."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import jpeg, make_tree, png, run_main
from PIL import Image
from refusals import refused

from shardkit import convert, open_dataset, open_source, repair, verify
from shardkit.errors import BadImages, UsageError

JPEG = jpeg(24, 16)
MASK = png(24, 16, mode="L")
OTHER = png(24, 16, 5, mode="L")


def scan(path: Path, **options: Any) -> Any:
    return open_source("pairs", path, **options).scan()


def pairs(scanned: Any) -> dict[str, list[tuple[str, ...]]]:
    """Return the masks of each image, by the path of the image, as the record has them."""
    return {
        split: [
            (entry.path, *sorted(name for name in record.fields if "." in name))
            for entry, record in zip(images.entries, images.read(range(len(images))), strict=True)
        ]
        for split, images in scanned.splits.items()
    }


ONE = ("mask.png",)


def test_lists_of_voc_are_the_splits_of_its_masks(tmp_path: Path) -> None:
    files = {f"JPEGImages/{name}.jpg": JPEG for name in "abcd"}
    files |= {f"SegmentationClass/{name}.png": MASK for name in "ab"}
    files["ImageSets/Segmentation/train.txt"] = b"b\n"
    files["ImageSets/Segmentation/val.txt"] = b"a\nc\nx\n"
    source = make_tree(tmp_path / "src", {**files, "Annotations/d.xml": b"<annotation/>"})
    scanned = scan(source)
    assert pairs(scanned) == {
        "train": [("JPEGImages/b.jpg", *ONE)],
        "val": [("JPEGImages/a.jpg", *ONE)],
    }
    assert [problem.path for problem in scanned.problems["val"]] == [
        "JPEGImages/c.jpg",
        "JPEGImages/x.jpg",
    ]
    convert(open_source("pairs", source), tmp_path / "out", to="lmdb", on_error="skip", workers=1)
    assert verify(tmp_path / "out", against=source).ok
    (note,) = open_source("voc", source).scan().notes
    assert f"pairs {source}" in note


LAYOUTS: dict[str, tuple[list[str], dict[str, Any], dict[str, list[tuple[str, ...]]]]] = {
    "U-Net": (
        ["imgs/a.jpg", "imgs/b.jpg", "masks/a.png", "masks/b.png"],
        {},
        {"": [("imgs/a.jpg", *ONE), ("imgs/b.jpg", *ONE)]},
    ),
    "splits outside": (
        ["train/images/a.jpg", "train/masks/a.png", "val/images/b.jpg", "val/masks/b.png"],
        {},
        {"train": [("train/images/a.jpg", *ONE)], "val": [("val/images/b.jpg", *ONE)]},
    ),
    "splits inside": (
        [
            "images/train/a.jpg",
            "annotations/train/a.png",
            "images/val/b.jpg",
            "annotations/val/b.png",
        ],
        {},
        {"train": [("images/train/a.jpg", *ONE)], "val": [("images/val/b.jpg", *ONE)]},
    ),
    "Carvana": (
        [
            "train/a_01.jpg",
            "train/a_02.jpg",
            "train_masks/a_01_mask.png",
            "train_masks/a_02_mask.png",
            "test/c_01.jpg",
        ],
        {},
        {"": [("train/a_01.jpg", *ONE), ("train/a_02.jpg", *ONE)]},
    ),
    "Cityscapes": (
        [
            "leftImg8bit/train/ulm/u_1_leftImg8bit.png",
            "gtFine/train/ulm/u_1_gtFine_labelIds.png",
            "gtFine/train/ulm/u_1_gtFine_color.png",
        ],
        {"pattern": "{}_leftImg8bit:{}_gtFine_labelIds"},
        {"train": [("leftImg8bit/train/ulm/u_1_leftImg8bit.png", *ONE)]},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_read(tmp_path: Path, layout: str) -> None:
    files, options, expected = LAYOUTS[layout]
    make_tree(tmp_path, {name: MASK if name.endswith(".png") else JPEG for name in files})
    scanned = scan(tmp_path, **options)
    assert pairs(scanned) == expected
    assert not any(scanned.problems.values())


@pytest.mark.parametrize(
    "names", ["frames segmentations", "data mask", "img lab", "a ground_truth"]
)
def test_the_folder_next_to_masks_may_have_any_name(tmp_path: Path, names: str) -> None:
    images, masks = names.split()
    make_tree(tmp_path / "src", {f"{images}/1.jpg": JPEG, f"{masks}/1.png": MASK})
    assert run_main("convert", tmp_path / "src", tmp_path / "out", "--to", "lmdb").returncode == 0
    (_, mask) = open_dataset(tmp_path / "out", fields=["image", "mask"], decode="numpy")[0]
    assert np.array_equal(mask, np.asarray(Image.open(BytesIO(MASK))))


def test_classes_called_like_masks_stay_classes(tmp_path: Path) -> None:
    for number, other in enumerate(("mask/1.jpg", "mask/2.png")):
        make_tree(tmp_path / f"src{number}", {"normal/1.jpg": JPEG, other: JPEG})
        convert(tmp_path / f"src{number}", out := tmp_path / f"out{number}", to="lmdb")
        assert open_dataset(out).classes == ["mask", "normal"]


def test_masks_may_be_called_otherwise(tmp_path: Path) -> None:
    """As in DRIVE."""
    files = ["images/21_training.jpg", "1st_manual/21_manual1.png", "mask/21_training_mask.png"]
    make_tree(tmp_path, {name: MASK if name.endswith(".png") else JPEG for name in files})
    options = {"masks": "vessels=1st_manual", "pattern": "{}_training:{}_manual1"}
    scanned = scan(tmp_path, **options)
    assert pairs(scanned) == {"": [("images/21_training.jpg", "vessels.png")]}
    where = "1st_manual/, called {}_training:{}_manual1"
    assert scanned.understood["vessels from"] == where


def test_several_folders_of_masks_are_several_fields(tmp_path: Path) -> None:
    files = {"images/a.jpg": JPEG, "left masks/a.png": MASK, "right masks/a.png": OTHER}
    source = make_tree(tmp_path / "src", files)
    assert pairs(scan(source)) == {"": [("images/a.jpg", "left_masks.png", "right_masks.png")]}
    named = open_source("pairs", source, masks="left=left masks,shown=right masks:image")
    convert(named, tmp_path / "made", to="webdataset")
    dataset = open_dataset(tmp_path / "made", fields=["left", "shown"])
    left, shown = dataset[0]
    assert np.array_equal(left, np.asarray(Image.open(source / "left masks/a.png")))
    assert np.asarray(shown).shape == (16, 24, 3)
    assert verify(tmp_path / "made", against=source).findings == []
    (tmp_path / "made/shard-000000.tar").unlink()
    assert repair(tmp_path / "made", source).findings == []


def test_missing_partners_are_named(tmp_path: Path) -> None:
    files = {"images/a.jpg": JPEG, "images/b.jpg": JPEG, "masks/a.png": MASK, "masks/c.png": MASK}
    source = make_tree(tmp_path / "src", files)
    scanned = scan(source)
    assert [entry.path for entry in scanned.splits[""].entries] == ["images/a.jpg"]
    (problem,) = scanned.problems[""]
    assert problem.path == "images/b.jpg"
    assert "'b'" in problem.reason
    assert [problem.path for problem in scanned.ignored[""]] == ["masks/c.png"]
    with refused(BadImages, "images/b.jpg", "masks"):
        convert(scanned.source, tmp_path / "made", to="lmdb")
    assert len(scan(source, masks="mask=masks?").splits[""]) == 2


BUSI = {
    "benign/b (1).png": JPEG,
    "benign/b (1)_mask.png": MASK,
    "benign/b (1)_mask_1.png": OTHER,
    "normal/n (1).png": JPEG,
    "normal/n (1)_mask.png": OTHER,
}


def test_masks_may_be_next_to_images_in_folders_of_classes(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "src", BUSI)
    made = tmp_path / "made"
    convert(open_source("pairs", source, mask_suffix="_mask,second=_mask_1?"), made, to="lmdb")
    dataset = open_dataset(made, fields=["mask", "second", "label"])
    assert list(dataset.classes) == ["benign", "normal"]
    masks = [np.asarray(Image.open(source / path)) for path in BUSI if "mask" in path]
    rows = sorted((dataset[row] for row in range(2)), key=lambda row: row[2])
    assert [row[2] for row in rows] == [0, 1]
    assert np.array_equal(rows[0][0], masks[0])
    assert np.array_equal(rows[0][1], masks[1])
    assert np.array_equal(rows[1][0], masks[2])
    assert rows[1][1] is None
    assert verify(made, against=source).findings == []
    (made / "shard-000000.lmdb").unlink()
    assert repair(made, source).findings == []


def test_masks_next_to_images_are_never_images(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "src", {**BUSI, "normal/n (2)_mask.png": MASK})
    scanned = scan(source, mask_suffix="_mask,_mask_1?")
    assert pairs(scanned) == {
        "": [
            ("benign/b (1).png", "mask.png", "mask_1.png"),
            ("normal/n (1).png", "mask.png"),
        ]
    }
    assert [problem.path for problem in scanned.ignored[""]] == ["normal/n (2)_mask.png"]
    problems = scan(source, mask_suffix="_mask").problems[""]
    assert [problem.path for problem in problems] == ["benign/b (1)_mask_1.png"]
    with refused(UsageError, "mask_suffix", "masks="):
        scan(source, mask_suffix="_mask", masks="masks")


def test_what_cannot_be_paired_is_refused(tmp_path: Path) -> None:
    source = make_tree(tmp_path, {"images/a.jpg": JPEG, "masks/b.png": MASK, "more/a.png": MASK})
    with refused(UsageError, "masks", "pattern="):
        scan(source)
    with refused(UsageError, "pattern='mask'"):
        scan(source, pattern="mask")
    with refused(UsageError, "images=", "masks="):
        scan(source, images="photos")
    make_tree(source, {"masks/a.png": MASK, "masks/a.gif": MASK})
    with refused(UsageError, "masks/a.gif", "masks/a.png"):
        scan(source)


def photo(width: int, height: int, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = BytesIO()
    Image.new("RGB", (width, height), (9, 99, 199)).save(file, "JPEG", exif=exif)
    return file.getvalue()


def mask_of(width: int, height: int) -> tuple[bytes, np.ndarray]:
    values = np.arange(width * height, dtype=np.uint8).reshape(height, width) % 7
    file = BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue(), values


def test_masks_of_upright_photos_are_stored_as_their_files_are(tmp_path: Path) -> None:
    """By one rule, also where the photo is square: a turn to the left undoes orientation 6."""
    tall, of_tall = mask_of(16, 24)
    square, of_square = mask_of(16, 16)
    files = {
        "images/a.jpg": photo(16, 16, 6),
        "masks/a.png": square,
        "images/b.jpg": photo(24, 16, 6),
        "masks/b.png": tall,
        "images/c.jpg": photo(16, 24, 1),
        "masks/c.png": tall,
    }
    source = make_tree(tmp_path / "src", files)
    made = tmp_path / "made"
    convert(open_source("pairs", source), made, to="lmdb", shuffle=False)
    masks = [row[0] for row in open_dataset(made, fields=["mask"])[:]]
    expected = [np.rot90(of_square), np.rot90(of_tall), of_tall]
    assert all(map(np.array_equal, masks, expected))
    assert verify(made, against=source).findings == []
    convert(
        open_source("pairs", source), tmp_path / "turned", to="lmdb", shuffle=False, orient=True
    )
    masks = [row[0] for row in open_dataset(tmp_path / "turned", fields=["mask"])[:]]
    assert all(map(np.array_equal, masks, [of_square, of_tall, of_tall]))
    with pytest.raises(BadImages) as caught:
        convert(open_source("pairs", source, annotated="stored"), tmp_path / "b", to="lmdb")
    assert [problem.path for problem in caught.value.problems] == ["images/b.jpg"]
    assert "16 x 24" in caught.value.problems[0].reason


@pytest.mark.parametrize("options", [{}, {"resize": "8"}])
def test_a_mask_of_another_size_is_bad(tmp_path: Path, options: dict[str, Any]) -> None:
    half, _ = mask_of(12, 8)
    files = {"images/a.jpg": JPEG, "masks/a.png": half, "images/b.jpg": JPEG, "masks/b.png": MASK}
    source = make_tree(tmp_path / "src", files)
    with pytest.raises(BadImages) as caught:
        convert(open_source("pairs", source), tmp_path / "made", to="lmdb", **options)
    (problem,) = caught.value.problems
    assert problem.path == "images/a.jpg"
    assert all(size in problem.reason for size in ("12 x 8", "24 x 16"))


def test_nothing_outside_of_the_folder_is_read(tmp_path: Path) -> None:
    files = {"images/a.jpg": JPEG, "images/b.jpg": JPEG, "masks/b.png": MASK}
    source = make_tree(tmp_path / "src", files)
    make_tree(tmp_path, {"secret.png": MASK, "out/a.png": MASK})
    (source / "masks/a.png").symlink_to(tmp_path / "secret.png")
    reason = scan(source).problems[""][0].reason
    assert "points outside" in reason
    assert "follow_links=True" in reason
    followed = scan(source, follow_links=True)
    assert pairs(followed) == {"": [("images/a.jpg", *ONE), ("images/b.jpg", *ONE)]}
    convert(open_source("pairs", source, follow_links=True), tmp_path / "made", to="lmdb")
    assert verify(tmp_path / "made", against=source).findings == []
    for masks in ("../out", "mask=/etc"):
        with refused(UsageError):
            scan(source, masks=masks)


def test_links_to_folders_are_followed_if_the_user_says_so(tmp_path: Path) -> None:
    outside = make_tree(tmp_path / "out", {"images/a.jpg": JPEG, "masks/a.png": MASK})
    source = make_tree(tmp_path / "src", {"images/b.jpg": JPEG, "masks/b.png": MASK})
    for name in ("images", "masks"):
        (source / name / "more").symlink_to(outside / name)
    scanned = scan(source)
    (problem,) = scanned.problems[""]
    assert (problem.path, "follow_links=True" in problem.reason) == ("images/more", True)
    expected = [("images/b.jpg", *ONE), ("images/more/a.jpg", *ONE)]
    assert pairs(scan(source, follow_links=True)) == {"": expected}
