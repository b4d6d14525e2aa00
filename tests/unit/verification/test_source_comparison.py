"""``verify --against``: each source file occurs once, and its record equals its converted file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import FORMATS, jpeg, make_dataset, make_folder, make_tree, png, tree
from hostile.forging import blamed, make_jpegs, make_truths, proved, restate
from refusals import refused

from shardkit import UsageError, verify

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


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A read-only source of JPEG files in two classes."""
    return make_jpegs(tmp_path_factory.mktemp("source") / "photos")


@pytest.fixture(scope="module")
def truths(jpegs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The read-only dataset of ``jpegs`` in each format."""
    return make_truths(jpegs, tmp_path_factory.mktemp("truth"))


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


def test_a_source_without_its_class_folders_is_refused(
    jpegs: Path, truths: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(jpegs, tmp_path / "photos")
    for path in [*source.rglob("*.jpg")]:
        path.rename(source / f"{path.parent.name}{path.name}")
    shutil.rmtree(source / "cat")
    shutil.rmtree(source / "dog")
    with refused(UsageError, source):
        verify(truths / "lmdb", against=source)


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
