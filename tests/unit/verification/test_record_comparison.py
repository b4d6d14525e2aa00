"""Wrong records in consistent datasets, found by comparing them with the source."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import (
    FORMATS,
    encoded,
    exif,
    jpeg,
    make_dataset,
    make_folder,
    make_tree,
    picture,
    png,
    tree,
)
from hostile.forging import (
    blamed,
    forge,
    make_jpegs,
    make_truths,
    proved,
    restate,
    with_image,
    with_meta,
    with_other_pillow,
)
from refusals import refused
from stated import done, stated

from shardkit import verify
from shardkit.errors import UsageError

JPEG: dict[str, Any] = {"encode": "jpeg", "resize": "12x12", "resize_mode": "crop"}
RAW: dict[str, Any] = {"encode": "raw", "resize": "8x8", "resize_mode": "stretch"}
Records = list[Any]


def swapped(records: Records, name: str) -> Records:
    """Exchange a field between the first two records that differ in it."""
    one = records[0]
    other = next(r for r in records if r.fields.get(name) != one.fields.get(name))
    fields = {one.key: other.fields, other.key: one.fields}
    return [
        replace(r, fields={**r.fields, name: fields[r.key][name]}) if r.key in fields else r
        for r in records
    ]


def twice(records: Records) -> Records:
    return [*records[:-1], records[0]]


def requality(records: Records) -> Records:
    return [with_image(r, jpeg(20, 18, seed=int(r.meta["width"]), quality=91)) for r in records]


def renamed(fields: Mapping[str, bytes], old: str, new: str) -> dict[str, bytes]:
    return {new if name == old else name: value for name, value in fields.items()}


LIES: dict[str, tuple[Callable[[Records], Records], str]] = {
    "one dropped": (lambda records: records[1:], "in the source but not in the dataset"),
    "the last dropped": (lambda records: records[:-1], "in the source but not in the dataset"),
    "one twice": (twice, "stored 2 times"),
    "rows turned round": (lambda records: records[::-1], "in the wrong order"),
    "two rows exchanged": (lambda r: [r[1], r[0], *r[2:]], "in the wrong order"),
    "labels swapped": (lambda records: swapped(records, "cls"), "its label is"),
    "images swapped": (lambda records: swapped(records, "jpg"), "its "),
    "another quality": (requality, "image differs from its file"),
    "metadata added": (lambda r: [with_meta(r[0], frames=2), *r[1:]], "its metadata differ"),
    "another size said": (lambda r: [with_meta(r[0], width=999), *r[1:]], "its size is 999 x"),
    "another key": (lambda r: [replace(r[0], key="other"), *r[1:]], "its key differs"),
    "another kind": (
        lambda r: [replace(r[0], fields=renamed(r[0].fields, "jpg", "webp")), *r[1:]],
        "it is stored as webp, but its file becomes jpg",
    ),
    "a field more": (
        lambda r: [replace(r[0], fields={**r[0].fields, "note": b"x"}), *r[1:]],
        "its metadata differ",
    ),
    "another path": (
        lambda r: [with_meta(r[0], path="cat/x.jpg"), *r[1:]],
        "does not contain its file",
    ),
}


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A read-only source of JPEG files in two classes."""
    return make_jpegs(tmp_path_factory.mktemp("source") / "photos")


@pytest.fixture(scope="module")
def truths(jpegs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The read-only dataset of ``jpegs`` in each format."""
    return make_truths(jpegs, tmp_path_factory.mktemp("truth"))


@pytest.mark.parametrize(
    ("lie", "to"), [(lie, FORMATS[number % 3]) for number, lie in enumerate(LIES)]
)
def test_a_lie_is_found(jpegs: Path, truths: Path, tmp_path: Path, lie: str, to: str) -> None:
    change, reason = LIES[lie]
    place = shutil.copytree(truths / to, tmp_path / "made")
    forge(place)
    assert tree(place) == tree(truths / to)
    forge(place, change)
    assert verify(place).findings == []

    assert reason in " ".join(blamed(place, jpegs).values())


MANIFEST_LIES: dict[str, tuple[dict[str, Any], str]] = {
    "classes permuted": ({"classes": ("dog", "cat")}, "its label is"),
    "a class renamed": ({"classes": ("cat", "cow")}, "its label is"),
    "another seed": ({"seed": 1}, "in the wrong order"),
    "not shuffled": ({"seed": None}, "in the wrong order"),
    "a limit": ({"limit": 9}, "the source does not contain its file"),
    "another recipe": (
        {"recipe": {"encode": "jpeg", "quality": 50}},
        "converted file",
    ),
    "no labels": ({"classes": None}, "has classes"),
}


@pytest.mark.parametrize("lie", MANIFEST_LIES)
def test_a_lie_of_the_manifest_is_found(
    jpegs: Path, truths: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    """Found by the shards' own metadata and, if that is wrong too, by the source."""
    entries, reason = MANIFEST_LIES[lie]
    place = shutil.copytree(truths / "webdataset", tmp_path / "made")

    def change(manifest: Any) -> Any:
        source = {**manifest.source}
        source |= {name: entries[name] for name in ("seed", "limit") if name in entries}
        other: dict[str, Any] = {
            name: entries[name] for name in ("classes", "recipe") if name in entries
        }
        if "recipe" in other:
            other["recipe"] = {**manifest.recipe, **other["recipe"]}
        if other.get("classes", ()) is None:
            other |= {"class_counts": None, "schema": manifest.schema[:1]}
        return replace(manifest, source=source, **other)

    restate(place, change)
    if stated(place) == stated(truths / "webdataset"):
        pytest.fail("the lie is none")
    assert "differs from the manifest in" in blamed(place, jpegs)["shardkit.json"]
    monkeypatch.setattr("shardkit.dataset.parts.REPEATED", ())
    assert reason in " ".join(blamed(place, jpegs).values())


def test_a_good_file_cannot_be_passed_off_as_a_bad_one(jpegs: Path, tmp_path: Path) -> None:
    hidden = make_tree(tmp_path / "copy", {})
    shutil.copytree(jpegs, hidden, dirs_exist_ok=True)
    (hidden / "cat/3.jpg").write_bytes(b"bad")
    place = make_dataset(hidden, tmp_path / "made", on_error="skip")
    assert proved(place, hidden)

    assert blamed(place, jpegs) == {"cat/3.jpg": "it was skipped as bad, but it is good"}


def test_unmatched_rows_do_not_count_as_verified(jpegs: Path, truths: Path, tmp_path: Path) -> None:
    place = shutil.copytree(truths / "webdataset", tmp_path / "made")
    forge(place, lambda records: records[:-1])
    restate(
        place,
        lambda manifest: replace(
            manifest, files=tuple(f for f in manifest.files if "paths" not in f.name)
        ),
    )
    shutil.rmtree(place / "index")
    make_tree(place, {"index": None})
    restate(place, lambda manifest: replace(manifest, files=()))

    assert "cannot be matched to rows" in " ".join(blamed(place, jpegs).values())


# --- re-encoded images, and other versions of libraries ---


def shifted(records: Records) -> Records:
    """Return the records with the first image moved by a pixel."""
    values = np.roll(np.frombuffer(records[0].fields["raw"], np.uint8).reshape(8, 8, 3), 1, axis=1)
    return [with_image(records[0], values.tobytes()), *records[1:]]


def off(records: Records) -> Records:
    """Return the records with each value of the first image off by two, of the second by one."""
    values = [np.frombuffer(record.fields["raw"], np.uint8) for record in records[:2]]
    changed = [(values[0] ^ 2).tobytes(), (values[1] ^ 1).tobytes()]
    return [*map(with_image, records[:2], changed), *records[2:]]


@pytest.fixture
def raws(jpegs: Path, tmp_path: Path) -> Path:
    return make_dataset(jpegs, tmp_path / "raw", to="hdf5", **RAW)


def test_a_value_off_by_one_is_found_but_with_other_libraries_passes_with_its_psnr(
    jpegs: Path, raws: Path
) -> None:
    forge(raws, off)
    (reason, _) = blamed(raws, jpegs).values()
    assert "although the libraries are the same" in reason
    with_other_pillow(raws)
    source = proved(raws, jpegs)
    assert (source.same, source.alike) == (8, 2)
    assert source.least_psnr == pytest.approx(42.11, abs=0.01)  # 20 log10(255 / 2)


def test_with_other_libraries_a_shift_by_a_pixel_is_found(jpegs: Path, raws: Path) -> None:
    forge(raws, shifted)
    with_other_pillow(raws)
    (reason,) = blamed(raws, jpegs).values()
    assert "PSNR" in reason
    assert reason.endswith("under 40")


@pytest.mark.parametrize("library", ["h5py", "lmdb"])
def test_another_container_library_does_not_relax_the_image_comparison(
    jpegs: Path, tmp_path: Path, library: str
) -> None:
    to = {"h5py": "hdf5", "lmdb": "lmdb"}[library]
    place = make_dataset(jpegs, tmp_path / "raw", to=to, **RAW)
    forge(place, off)
    restate(place, lambda m: replace(m, software={**m.software, library: "1.0"}))
    assert "although the libraries" in " ".join(blamed(place, jpegs).values())


def test_copied_images_are_compared_byte_for_byte_whatever_the_libraries(
    jpegs: Path, truths: Path, tmp_path: Path
) -> None:
    place = shutil.copytree(truths / "lmdb", tmp_path / "made")
    forge(place, lambda r: [with_image(r[0], r[0].fields["jpg"] + b"\0"), *r[1:]])
    with_other_pillow(place)
    assert "image differs from its file" in " ".join(blamed(place, jpegs).values())


@pytest.mark.parametrize(("quality", "passes"), [(90, True), (40, False)])
def test_with_other_libraries_another_quality_is_found_if_it_is_worse(
    jpegs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quality: int, passes: bool
) -> None:
    monkeypatch.setattr("shardkit.dataset.parts.REPEATED", ())  # the shards say otherwise
    place = make_dataset(jpegs, tmp_path / "made", **JPEG)
    other = make_dataset(jpegs, tmp_path / "other", **JPEG, quality=quality)
    with_other_pillow(other)
    restate(other, lambda m: replace(m, recipe=stated(place).recipe))
    assert verify(other, against=jpegs).ok == passes


@pytest.mark.parametrize(
    ("image", "meta", "reason"),
    [
        (encoded(picture(12, 12, seed=1)), {}, "does not resemble its converted file"),
        (
            jpeg(13, 12),
            {"width": 13},
            "its size is 13 x 12 pixels, but its file becomes 12 x 12",
        ),
        (b"\xff\xd8\xff\xe0", {}, "truncated or damaged in its header"),
    ],
    ids=["similar", "of another size", "undecodable"],
)
def test_with_other_libraries_another_image_is_found(
    jpegs: Path, tmp_path: Path, image: bytes, meta: dict[str, Any], reason: str
) -> None:
    place = make_dataset(jpegs, tmp_path / "made", to="webdataset", **JPEG)
    forge(place, lambda r: [with_meta(with_image(r[0], image), **meta), *r[1:]])
    with_other_pillow(place)
    assert verify(place).ok
    assert reason in " ".join(blamed(place, jpegs).values())


ODD_RECIPES: dict[str, dict[str, Any]] = {
    "copy": {},
    "unchecked": {"check": "none"},
    "upright": {"orient": True},
    "png": {"encode": "png", "resize": "10x10", "resize_mode": "longer"},
    "webp": {"encode": "webp", "quality": 60, "background": (1, 2, 3)},
    "padded": {"encode": "raw", "resize": "30x20", "resize_mode": "pad", "filter": "lanczos"},
    "enlarged": {"encode": "jpeg", "resize": "40x40", "resize_mode": "crop", "enlarge": True},
}


@pytest.mark.parametrize("name", ODD_RECIPES)
def test_odd_images_and_their_notes_compare_equal(tmp_path: Path, name: str) -> None:
    gif = encoded(picture(), "GIF", save_all=True, append_images=[picture(seed=1)])
    source = make_tree(
        tmp_path / "photos",
        {
            "a/turned.jpg": encoded(picture(), exif=exif(6)),
            "a/moving.gif": gif,
            "a/glass.png": png(mode="RGBA"),
            "b/print.jpg": encoded(picture(mode="CMYK")),
            "b/deep.png": png(mode="I;16"),
            "b/plain.bmp": encoded(picture(), "BMP"),
            "b/cut.jpg": jpeg()[:-40],
            "b/none.jpg": b"\xff\xd8\xff\xe0",
        },
    )
    place = make_dataset(source, tmp_path / "made", **ODD_RECIPES[name], on_error="skip")
    manifest = stated(place)
    assert proved(place, source).same == manifest.rows == 8 - len(manifest.skipped)
    assert manifest.notes or name == "png"
    assert (len(manifest.skipped) == 0) == (name == "unchecked")


# `verify --against`: each source file occurs once, and its record equals its converted file.

RECIPES: dict[str, dict[str, Any]] = {
    "copy": {},
    "jpeg": {"encode": "jpeg", "resize": "12x12", "resize_mode": "crop"},
    "raw": {"encode": "raw", "resize": "8x8", "resize_mode": "stretch"},
}


@pytest.mark.parametrize(("to", "recipe"), [*zip(FORMATS, RECIPES, strict=True)])
def test_an_intact_dataset_equals_its_source(
    folder: Path, tmp_path: Path, to: str, recipe: str
) -> None:
    place = make_dataset(folder, tmp_path / "made", to=to, **RECIPES[recipe])
    before = tree(place)

    source = proved(place, folder)

    assert (source.name, source.files, source.same, source.alike) == ("photos", 6, 6, 0)
    assert source.bytes == sum(path.stat().st_size for path in folder.rglob("*.*"))
    assert (source.least_psnr, source.left_out) == (None, 0)
    assert tree(place) == before


@pytest.mark.parametrize("level", ["full", "decode"])
def test_several_processes_report_the_same(folder: Path, tmp_path: Path, level: str) -> None:
    place = make_dataset(folder, tmp_path / "made")
    assert proved(place, folder, level=level, workers=2) == proved(place, folder, level=level)


def flip(path: Path) -> None:
    """Change a byte in the middle."""
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


def lose(path: Path) -> Path:
    """Make a broken link."""
    path.symlink_to("nowhere")
    return path


SOURCE_CHANGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a byte": (lambda s: flip(s / "cat/1.jpg"), "cat/1.jpg", "image differs from its file"),
    "saved again": (
        lambda s: (s / "cat/1.jpg").write_bytes(jpeg(20, 18, 1, quality=80)),
        "cat/1.jpg",
        "image differs from its file",
    ),
    "renamed": (
        lambda s: (s / "cat/1.jpg").rename(s / "cat/x.jpg"),
        "cat/1.jpg",
        "the source does not contain its file",
    ),
    "of another class": (
        lambda s: (s / "cat/1.jpg").rename(s / "dog/x.jpg"),
        "dog/x.jpg",
        "not in the dataset",
    ),
    "added": (
        lambda s: (s / "dog/new.jpg").write_bytes(jpeg()),
        "dog/new.jpg",
        "not in the dataset",
    ),
    "a class added": (
        lambda s: make_tree(s, {"bird/new.jpg": jpeg()}),
        "bird/new.jpg",
        "not in the dataset",
    ),
    "gone": (
        lambda s: (s / "dog/2.jpg").unlink(),
        "dog/2.jpg",
        "the source does not contain its file",
    ),
    "a twin": (lambda s: (s / "dog/2.png").write_bytes(png()), "dog/2.jpg", "its key differs"),
    "broken": (lambda s: (s / "dog/2.jpg").write_bytes(b"bad"), "dog/2.jpg", "cannot be converted"),
    "a dead link": (
        lambda s: os.replace(lose(s / "link"), s / "dog/2.jpg"),
        "dog/2.jpg",
        "the source does not contain its file",
    ),
    "a bad one more": (
        lambda s: lose(s / "dog/new.jpg"),
        "dog/new.jpg",
        "in the source, a broken link",
    ),
}


@pytest.mark.parametrize("name", SOURCE_CHANGES)
def test_a_changed_source_is_found(jpegs: Path, truths: Path, tmp_path: Path, name: str) -> None:
    change, path, reason = SOURCE_CHANGES[name]
    source = shutil.copytree(jpegs, tmp_path / "photos")
    assert proved(truths / "lmdb", source)
    change(source)

    found = blamed(truths / "lmdb", source)

    assert path in found
    assert reason in found[path]


def test_an_unreadable_file_is_found(
    jpegs: Path, truths: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> Any:
        if os.path.basename(path) == "2.jpg":
            raise PermissionError(13, "Permission denied")
        return original(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    found = blamed(truths / "hdf5", jpegs)
    assert set(found) == {"cat/2.jpg", "dog/2.jpg"}
    assert (
        "its file cannot be converted: it cannot be read: Permission denied" in found["cat/2.jpg"]
    )


# --- places that cannot be the source ---


def test_folders_that_cannot_be_the_source_are_refused(
    jpegs: Path, truths: Path, tmp_path: Path
) -> None:
    other = make_tree(tmp_path / "other", {"cat/other.jpg": jpeg()})
    (tmp_path / "file").write_bytes(jpeg())
    missing, file = tmp_path / "missing", tmp_path / "file"
    for source in (other, jpegs.parent, jpegs / "cat", missing, file, truths / "lmdb"):
        with refused(UsageError, source):
            verify(truths / "lmdb", against=source)
    with refused(UsageError, tmp_path):
        verify(tmp_path, against=jpegs)
    with refused(UsageError, "quick"):
        verify(truths / "lmdb", "quick", against=jpegs)


def test_a_folder_next_to_unlabeled_images_is_reported(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "photos", {f"{n}.jpg": jpeg(seed=n) for n in range(3)})
    place = make_dataset(source, tmp_path / "made")
    make_tree(source, {"thumbs/0.jpg": jpeg()})
    with refused(UsageError, source):
        verify(place, against=source)


def test_a_source_inside_the_dataset_is_accepted(jpegs: Path, truths: Path, tmp_path: Path) -> None:
    place = shutil.copytree(truths / "lmdb", tmp_path / "made")
    shutil.copytree(jpegs, place / "photos")
    assert proved(place, place / "photos")


def test_a_dataset_of_another_kind_is_refused(jpegs: Path, truths: Path, tmp_path: Path) -> None:
    place = shutil.copytree(truths / "lmdb", tmp_path / "made")
    restate(place, lambda m: replace(m, source={**m.source, "kind": "paper"}))
    with refused(UsageError, "'paper'"):
        verify(place, against=jpegs)


def test_splits_that_only_one_side_has_are_found(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "photos/train").parent
    make_folder(source / "val")
    place = make_dataset(source, tmp_path / "made")
    make_folder(source / "test")
    shutil.rmtree(source / "val")
    found = blamed(place, source)
    assert found["test"] == "it is a split of the source but not of the dataset"
    assert found["val"] == "the source does not have this split"
    assert found["cat/000.jpg"] == "the source does not contain its file"


def test_a_split_with_a_damaged_manifest_does_not_count_as_new(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "photos/train").parent
    make_folder(source / "val")
    place = make_dataset(source, tmp_path / "made")
    (place / "val/shardkit.json").write_bytes(b"")
    assert set(blamed(place, source)) == {"val/shardkit.json"}


@pytest.mark.parametrize("column", ["rows", "paths", "paths-ends", "keys"])
def test_a_damaged_index_is_not_blamed_on_records(
    jpegs: Path, truths: Path, tmp_path: Path, column: str
) -> None:
    place = shutil.copytree(truths / "lmdb", tmp_path / "made")
    (place / f"index/{column}.npy").write_bytes(b"")
    assert set(blamed(place, jpegs)) == {f"index/{column}.npy"} | (
        {"index/rows.npy"} if column == "rows" else set()
    )


def test_the_source_is_found_in_a_folder_that_convert_takes(tmp_path: Path) -> None:
    photos = make_folder(tmp_path / "unpacked" / "pets" / "photos")
    made = make_dataset(photos, tmp_path / "made")
    for folder in (tmp_path / "unpacked", tmp_path / "unpacked" / "pets"):
        with refused(UsageError, folder, f"try {photos}"):
            verify(made, against=folder)


def test_the_source_of_all_splits_is_not_that_of_one(tmp_path: Path) -> None:
    line = b"0 0.5 0.5 0.5 0.5"
    source = make_tree(
        tmp_path / "boxes",
        {
            "data.yaml": b"train: train/images\nval: val/images\nnames: [cat]\n",
            **{f"{split}/images/{split}.jpg": jpeg() for split in ("train", "val")},
            **{f"{split}/labels/{split}.txt": line for split in ("train", "val")},
        },
    )
    done("convert", source, tmp_path / "made", "--to", "lmdb", "--workers", 1)
    with refused(UsageError, source, f"all splits, check them together: {tmp_path / 'made'}"):
        verify(tmp_path / "made" / "train", against=source)
    assert verify(tmp_path / "made", against=source).ok
