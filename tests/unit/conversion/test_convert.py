from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import shutil
import signal
import stat
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from helpers import (
    FORMATS,
    encoded,
    exif,
    jpeg,
    make_folder,
    make_tree,
    picture,
    png,
    python,
    shardkit_command,
    tree,
    wait_until,
)

from shardkit.contracts import Entry
from shardkit.conversion import build
from shardkit.conversion import convert as module
from shardkit.conversion import disk as space_module
from shardkit.conversion import staging as staging_module
from shardkit.conversion.build_all import Builder
from shardkit.conversion.convert import Converted, convert, convert_scan, plan_scan
from shardkit.conversion.plan import ConvertOptions
from shardkit.conversion.staging import WORK_NAME
from shardkit.dataset.index import Index
from shardkit.dataset.manifest import MANIFEST_NAME, Manifest, load_any_manifest, load_manifest
from shardkit.errors import BadImages, ConversionFailed, DiskFull, ShardkitError, UsageError
from shardkit.recipe import Recipe
from shardkit.registry import get_format
from shardkit.sources.imagefolder import ImageFolder, scan_imagefolder
from shardkit.system.files import Reservation, sha256_of


def made(source: Path, target: Path, to: str = "webdataset", **options: Any) -> Manifest:
    """Convert a source without splits."""
    return converted(source, target, to, **options).manifests[""]


def converted(
    source: Path,
    target: Path,
    to: str = "webdataset",
    *,
    force: bool = False,
    workers: int = 1,
    **options: Any,
) -> Converted:
    return convert_scan(
        scan_imagefolder(source),
        target,
        ConvertOptions(to=to, **options),
        Builder(workers=workers),
        force=force,
    )


def stored_images(dataset: Path) -> dict[str, bytes]:
    """Return the stored bytes of each image, by source path, read at the index's offsets."""
    manifest = load_manifest(dataset)
    index = Index(dataset, manifest.rows)
    found: dict[str, bytes] = {}
    row = 0
    for shard in manifest.shards:
        content = (dataset / shard.name).read_bytes()
        for at in range(row, row + shard.rows):
            entry = index.rows()[at]
            start = int(entry["offset"])
            found[index.paths()[at]] = content[start : start + int(entry["length"])]
        row += shard.rows
    return found


def without_work(found: dict[str, str]) -> dict[str, str]:
    return {name: kind for name, kind in found.items() if not name.startswith(WORK_NAME)}


def is_whole(dataset: Path) -> bool:
    """Return whether a directory holds either no dataset or a complete one."""
    try:
        top = load_any_manifest(dataset)
    except UsageError:
        return True
    parts = [dataset] if isinstance(top, Manifest) else [dataset / name for name in top.splits]
    return all(
        sha256_of(part / entry.name) == entry.sha256
        for part in parts
        for entry in load_manifest(part).entries
    )


# What comes out.


@pytest.mark.parametrize("to", FORMATS)
def test_an_unchanged_image_has_the_bytes_of_its_file(tmp_path: Path, to: str) -> None:
    odd = "größe ★.JPG"
    files = {f"cat/{n}.jpg": jpeg(20 + n, 18, n) for n in range(7)}
    files |= {"dog/a.png": png(), f"dog/{odd}": jpeg(), "dog/new\nline.gif": encoded(kind="GIF")}
    source = make_tree(tmp_path / "photos", files)
    manifest = made(source, tmp_path / "out", to, shard_samples=3)
    assert stored_images(tmp_path / "out") == files
    assert manifest == load_manifest(tmp_path / "out")
    assert manifest.rows == 10
    assert [shard.rows for shard in manifest.shards] == [3, 3, 3, 1]
    assert manifest.classes == ("cat", "dog")
    assert manifest.class_counts == (7, 3)
    assert manifest.fields == {"cls": 10, "gif": 1, "jpg": 8, "json": 10, "png": 1}
    assert is_whole(tmp_path / "out")


@pytest.mark.parametrize("to", FORMATS)
def test_the_dataset_contains_only_the_files_of_the_manifest(tmp_path: Path, to: str) -> None:
    manifest = made(make_folder(tmp_path / "photos"), tmp_path / "out", to)
    names = {name for name, kind in tree(tmp_path / "out").items() if kind != "folder"}
    assert names == {MANIFEST_NAME, *(entry.name for entry in manifest.entries)}


@pytest.mark.parametrize("to", FORMATS)
def test_rows_are_stored_in_the_order_of_the_plan(tmp_path: Path, to: str) -> None:
    source = make_folder(tmp_path / "photos", each=8)
    for shuffle in (False, True):
        out = tmp_path / f"out {shuffle}"
        manifest = made(source, out, to, shard_samples=5, shuffle=shuffle)
        paths = list(Index(out, manifest.rows).paths())
        assert sorted(paths) == sorted(str(p.relative_to(source)) for p in source.rglob("*.*"))
        assert (paths == sorted(paths)) is not shuffle


@pytest.mark.slow
@pytest.mark.parametrize("to", FORMATS)
def test_the_number_of_processes_does_not_change_a_byte(tmp_path: Path, to: str) -> None:
    source = make_folder(tmp_path / "photos", each=9)
    (source / "cat/bad.jpg").write_bytes(b"bad")
    (source / "dog/also bad.jpg").write_bytes(jpeg()[:300])
    recipe = Recipe(resize=12)
    trees = []
    for workers in (1, 3):
        out = tmp_path / f"out {workers}"
        options = {"shard_samples": 4, "on_error": "skip", "recipe": recipe}
        manifest = made(source, out, to, workers=workers, **options)
        assert [problem.path for problem in manifest.skipped] == ["cat/bad.jpg", "dog/also bad.jpg"]
        trees.append(tree(out))
    assert trees[0] == trees[1]


@pytest.mark.parametrize("to", FORMATS)
def test_one_shard_built_by_several_workers_has_the_same_bytes(
    tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkit.conversion.build._CHUNK_ROWS", 1)
    source = make_folder(tmp_path / "photos", each=9)
    trees = []
    for workers in (1, 4):
        made(source, tmp_path / f"out {workers}", to, workers=workers, recipe=Recipe(quality=50))
        trees.append(tree(tmp_path / f"out {workers}"))
    assert trees[0] == trees[1]


@pytest.mark.parametrize(
    ("workers", "shares"),
    [(1, [1] * 5), (2, [1, 1, 1, 1, 2]), (3, [1, 1, 1, 2, 1]), (7, [2, 2, 1, 1, 1])],
)
def test_idle_workers_help_with_the_last_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, shares: list[int]
) -> None:
    def refuse(_: Any, tasks: list[Any], **__: Any) -> None:
        raise RuntimeError([task.workers for task in tasks])

    monkeypatch.setattr("shardkit.conversion.build_all.run_tasks", refuse)
    source = make_folder(tmp_path / "photos", ["cat"], each=5)
    with pytest.raises(RuntimeError) as found:
        converted(source, tmp_path / "out", workers=workers, shard_samples=1)
    assert found.value.args[0] == shares


def test_each_split_becomes_a_dataset_with_shared_classes(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos/train", ["cat", "dog"])
    make_folder(tmp_path / "photos/val", ["dog", "emu"], each=2)
    result = converted(tmp_path / "photos", tmp_path / "out")
    top = json.loads((tmp_path / "out" / MANIFEST_NAME).read_bytes())
    assert top["kind"] == "splits"
    assert top["splits"] == {name: m.digest for name, m in result.manifests.items()}
    train, val = (load_manifest(tmp_path / "out" / name) for name in ("train", "val"))
    assert train.classes == val.classes == ("cat", "dog", "emu")
    assert (train.class_counts, val.class_counts) == ((3, 3, 0), (0, 2, 2))
    assert sorted(os.listdir(tmp_path / "out")) == [MANIFEST_NAME, "train", "val"]
    assert is_whole(tmp_path / "out")


@pytest.mark.parametrize("to", FORMATS)
def test_a_split_without_images_is_an_empty_dataset(tmp_path: Path, to: str) -> None:
    make_folder(tmp_path / "photos/train")
    make_tree(tmp_path / "photos", {"val/cat": None, "val/dog": None})
    manifests = converted(tmp_path / "photos", tmp_path / "out", to).manifests
    assert (manifests["val"].rows, manifests["val"].class_counts) == (0, (0, 0))
    assert is_whole(tmp_path / "out")


@pytest.mark.parametrize("to", FORMATS)
def test_images_without_classes_have_no_labels(tmp_path: Path, to: str) -> None:
    source = make_tree(tmp_path / "photos", {"a.jpg": jpeg(), "b.png": png()})
    manifest = made(source, tmp_path / "out", to)
    assert (manifest.classes, manifest.class_counts) == (None, None)
    assert manifest.fields == {"jpg": 1, "json": 2, "png": 1}
    assert Index(tmp_path / "out", 2).rows()["label"].tolist() == [-1, -1]


def test_empty_classes_are_kept(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "photos")
    (source / "emu").mkdir()
    manifest = made(source, tmp_path / "out")
    assert manifest.classes == ("cat", "dog", "emu")
    assert manifest.class_counts == (3, 3, 0)


def test_noted_and_skipped_images_are_recorded(tmp_path: Path) -> None:
    source = make_tree(
        tmp_path / "photos",
        {
            "cat/turned.jpg": jpeg(exif=exif(6)),
            "cat/moving.gif": encoded(
                picture(), "GIF", save_all=True, append_images=[picture(seed=1)]
            ),
            "cat/notes.txt": b"text",
            "cat/.hidden": b"",
        },
    )
    manifest = made(source, tmp_path / "out")
    assert manifest.notes == {"frames": 1, "orientation": 1}
    assert manifest.ignored == {"hidden": 1, "not an image": 1}
    lines = (tmp_path / "out/ignored.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"path": "cat/.hidden", "reason": "hidden"},
        {"path": "cat/notes.txt", "reason": "not an image"},
    ]
    assert manifest.recipe == Recipe().describe()
    assert manifest.source["order"] == "shuffled"
    assert "shardkit" in manifest.software


@pytest.mark.parametrize("to", FORMATS)
def test_raw_images_are_stored_as_pixels(tmp_path: Path, to: str) -> None:
    source = make_folder(tmp_path / "photos")
    recipe = Recipe(encode="raw", resize=(10, 12), resize_mode="crop")
    manifest = made(source, tmp_path / "out", to, recipe=recipe)
    assert manifest.raw_shape == (10, 12, 3)
    assert manifest.fields == {"cls": 6, "json": 6, "raw": 6}
    assert {len(data) for data in stored_images(tmp_path / "out").values()} == {360}


def test_a_manifest_contains_no_path_and_no_time(tmp_path: Path) -> None:
    trees = []
    for place in ("one", "two"):
        source = make_folder(tmp_path / place / "photos")
        for path in source.rglob("*.*"):
            os.utime(path, (len(place), len(place)))
        made(source, tmp_path / place / "out")
        trees.append(tree(tmp_path / place / "out"))
    assert trees[0] == trees[1]
    assert str(tmp_path) not in (tmp_path / "one/out" / MANIFEST_NAME).read_text()


def test_a_limit_is_recorded(tmp_path: Path) -> None:
    manifest = made(make_folder(tmp_path / "photos"), tmp_path / "out", limit=4)
    assert manifest.rows == 4
    assert (manifest.source["limit"], manifest.source["images"]) == (4, 6)


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_adds_up(tmp_path: Path, workers: int) -> None:
    source = make_folder(tmp_path / "photos")
    (source / "cat/bad.jpg").write_bytes(b"bad")
    seen = [0, 0, 0, 0]

    def note(progress: Any) -> None:
        for place, count in enumerate(progress):
            seen[place] += count

    options = ConvertOptions(to="lmdb", shard_samples=3, on_error="skip")
    convert_scan(
        scan_imagefolder(source),
        tmp_path / "out",
        options,
        Builder(workers=workers, on_progress=note),
    )
    assert seen == [7, sum(path.stat().st_size for path in source.rglob("*.*")), 1, 7]


# Bad images.


@pytest.fixture
def spoilt(folder: Path) -> Path:
    """A folder with five bad files of different kinds."""
    (folder / "cat/a text.jpg").write_bytes(b"text")
    (folder / "cat/cut.jpg").write_bytes(jpeg(40, 40)[:-100])
    (folder / "cat/empty.png").write_bytes(b"")
    (folder / "dog/link.png").symlink_to("nowhere")
    (folder / "dog/headless.png").write_bytes(png()[:20])
    return folder


BAD = ["cat/a text.jpg", "cat/cut.jpg", "cat/empty.png", "dog/headless.png", "dog/link.png"]


@pytest.mark.parametrize("workers", [1, 2])
def test_all_bad_files_are_listed_and_no_dataset_is_written(
    spoilt: Path, tmp_path: Path, workers: int
) -> None:
    with pytest.raises(BadImages, match="5 bad files; no dataset was written") as caught:
        made(spoilt, tmp_path / "out", shard_samples=2, workers=workers)
    assert [problem.path for problem in caught.value.problems] == BAD
    assert all(problem.reason for problem in caught.value.problems)
    assert os.listdir(tmp_path / "out") == [WORK_NAME]


def test_if_every_shard_has_bad_files_nothing_is_left(spoilt: Path, tmp_path: Path) -> None:
    with pytest.raises(BadImages, match="5 bad files; nothing was written"):
        made(spoilt, tmp_path / "out")
    assert os.listdir(tmp_path) == ["photos"]


@pytest.mark.parametrize("to", FORMATS)
def test_shards_without_bad_files_are_reused_by_a_run_that_skips_them(
    spoilt: Path, tmp_path: Path, to: str
) -> None:
    options: dict[str, Any] = {"shard_samples": 2}
    with pytest.raises(BadImages, match="a rerun reuses 2 shards without bad files"):
        made(spoilt, tmp_path / "out", to, **options)
    skipping = {**options, "on_error": "skip"}
    result = converted(spoilt, tmp_path / "out", to, **skipping)
    assert result.reused_shards == 2
    made(spoilt, tmp_path / "expected", to, **skipping)
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")


@pytest.mark.parametrize("to", FORMATS)
def test_only_shards_of_fixed_files_are_rebuilt(spoilt: Path, tmp_path: Path, to: str) -> None:
    options: dict[str, Any] = {"shard_samples": 2}
    (spoilt / "dog/link.png").unlink()
    with pytest.raises(BadImages):
        made(spoilt, tmp_path / "out", to, **options)
    for name in BAD[:-1]:
        (spoilt / name).write_bytes(png())
    assert converted(spoilt, tmp_path / "out", to, **options).reused_shards == 2
    made(spoilt, tmp_path / "expected", to, **options)
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")


def test_only_bad_files_may_be_removed_between_runs(spoilt: Path, tmp_path: Path) -> None:
    with pytest.raises(BadImages):
        made(spoilt, tmp_path / "out", shard_samples=2)
    (spoilt / "cat/001.jpg").rename(tmp_path / "aside")
    with pytest.raises(UsageError, match=r"1 file removed \(cat/001.jpg\). force=True"):
        made(spoilt, tmp_path / "out", shard_samples=2)
    (tmp_path / "aside").rename(spoilt / "cat/001.jpg")
    for name in BAD:
        (spoilt / name).unlink()
    made(spoilt, tmp_path / "out", shard_samples=2)
    made(spoilt, tmp_path / "expected", shard_samples=2)
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")


def test_bad_files_of_an_earlier_run_are_still_bad(spoilt: Path, tmp_path: Path) -> None:
    """A run that does not skip reports bad files even in shards of a run that skipped them."""
    skipping: dict[str, Any] = {"shard_samples": 2, "on_error": "skip"}
    with stopped(module, "save_facts"), pytest.raises(KeyboardInterrupt):
        made(spoilt, tmp_path / "out", **skipping)
    with pytest.raises(BadImages) as caught:
        made(spoilt, tmp_path / "out", shard_samples=2)
    assert [problem.path for problem in caught.value.problems] == BAD
    assert converted(spoilt, tmp_path / "out", **skipping).reused_shards == 5


def test_bad_files_of_splits_are_listed_with_the_split(tmp_path: Path) -> None:
    for split in ("train", "val"):
        make_folder(tmp_path / "photos" / split)
        (tmp_path / "photos" / split / "cat/bad.jpg").write_bytes(b"bad")
    with pytest.raises(BadImages) as caught:
        converted(tmp_path / "photos", tmp_path / "out")
    assert [p.path for p in caught.value.problems] == ["train/cat/bad.jpg", "val/cat/bad.jpg"]


def test_a_failed_conversion_leaves_an_empty_directory_unchanged(
    spoilt: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(BadImages):
        made(spoilt, tmp_path / "out")
    assert tree(tmp_path / "out") == {}
    assert (tmp_path / "out").is_dir()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failed_conversion_leaves_the_old_dataset_unchanged(
    spoilt: Path, tmp_path: Path, workers: int
) -> None:
    made(make_folder(tmp_path / "old"), tmp_path / "out", "lmdb")
    before = tree(tmp_path / "out")
    with pytest.raises(BadImages):
        made(spoilt, tmp_path / "out", force=True, shard_samples=2, workers=workers)
    assert without_work(tree(tmp_path / "out")) == before
    assert is_whole(tmp_path / "out")


def test_bad_files_can_be_skipped_and_are_recorded(spoilt: Path, tmp_path: Path) -> None:
    manifest = made(spoilt, tmp_path / "out", on_error="skip", shard_samples=2)
    assert manifest.rows == 6
    assert [problem.path for problem in manifest.skipped] == BAD
    lines = (tmp_path / "out/skipped.jsonl").read_text().splitlines()
    assert [json.loads(line)["path"] for line in lines] == BAD
    assert all(json.loads(line)["reason"] for line in lines)
    assert is_whole(tmp_path / "out")


@pytest.mark.parametrize("to", FORMATS)
def test_a_shard_may_lose_all_its_images(tmp_path: Path, to: str) -> None:
    source = make_folder(tmp_path / "photos", ["cat"], each=2)
    for name in ("a.jpg", "b.jpg"):
        (source / "cat" / name).write_bytes(b"bad")
    options: dict[str, Any] = {"on_error": "skip", "shard_samples": 1, "shuffle": False}
    manifest = made(source, tmp_path / "out", to, **options)
    assert [shard.rows for shard in manifest.shards] == [1, 1, 0, 0]
    assert len(stored_images(tmp_path / "out")) == 2


def test_if_all_images_are_bad_nothing_is_written(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "photos", {"cat/a.jpg": b"bad", "cat/b.jpg": b""})
    for on_error in ("fail", "skip"):
        with pytest.raises(BadImages) as caught:
            made(source, tmp_path / "out", on_error=on_error)
        assert [problem.path for problem in caught.value.problems] == ["cat/a.jpg", "cat/b.jpg"]
        assert os.listdir(tmp_path) == ["photos"]


def test_an_orientation_of_an_odd_type_does_not_stop_the_conversion(tmp_path: Path) -> None:
    """The EXIF data of this file give the orientation as a fraction, 6/1."""
    data = bytes.fromhex("49492a0008000000010012010500010000001a0000000000000006000000 01000000")
    whole = jpeg()
    segment = b"Exif\0\0" + data
    whole = whole[:2] + b"\xff\xe1" + (len(segment) + 2).to_bytes(2, "big") + segment + whole[2:]
    source = make_tree(tmp_path / "photos", {"cat/a.jpg": whole, "cat/b.jpg": jpeg()})
    assert made(source, tmp_path / "out", on_error="skip").rows == 2


@pytest.mark.parametrize("encode", ["webp", "jpeg"])
def test_an_image_too_large_for_its_encoding_is_a_bad_image(tmp_path: Path, encode: str) -> None:
    wide = encoded(picture(2, 1).resize((65_501, 1)), "PNG")
    source = make_tree(tmp_path / "photos", {"cat/wide.png": wide, "cat/b.jpg": jpeg()})
    with pytest.raises(BadImages) as caught:
        made(source, tmp_path / "out", recipe=Recipe(encode=encode))
    assert [problem.path for problem in caught.value.problems] == ["cat/wide.png"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers=0 is not an integer from 1 on"),
        ({"workers": -1}, "workers=-1 is not an integer from 1 on"),
        ({"workers": "2"}, "workers='2' is not an integer"),
        ({"workers": 1.5}, "workers=1.5 is not an integer"),
        ({"quality": "90", "encode": "jpeg"}, "quality='90' is not an integer"),
        ({"quality": 90.5, "encode": "jpeg"}, "quality=90.5 is not an integer"),
        ({"seed": "x"}, "seed='x' is not an integer"),
        ({"seed": None}, "seed=None is not an integer"),
        ({"limit": 2.5}, "limit=2.5 is not an integer"),
        ({"limit": "2"}, "limit='2' is not an integer"),
        ({"shard_samples": "3"}, "shard_samples='3' is not an integer"),
    ],
)
def test_numbers_of_another_type_are_refused(
    folder: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        convert(folder, tmp_path / "out", **{"to": "lmdb", **options})
    assert not (tmp_path / "out").exists()


# Where it may go.


def test_an_existing_dataset_is_refused(folder: Path, tmp_path: Path) -> None:
    made(folder, tmp_path / "out")
    before = tree(tmp_path / "out")
    changes: list[dict[str, Any]] = [{"shuffle": False}, {"seed": 3}]
    for options in changes:
        with pytest.raises(UsageError, match="force=True replaces it"):
            made(folder, tmp_path / "out", **options)
    assert tree(tmp_path / "out") == before


def test_force_removes_all_of_the_old_dataset(folder: Path, tmp_path: Path) -> None:
    splits = tmp_path / "splits"
    for name in ("train", "val"):
        make_folder(splits / name)
        (splits / name / "cat/notes.txt").write_bytes(b"x")
    made(folder, tmp_path / "expected single", "lmdb")
    converted(splits, tmp_path / "expected splits", "hdf5", shard_samples=2)
    steps: list[tuple[Path, str, dict[str, Any], str | None]] = [
        (folder, "webdataset", {"shard_samples": 1}, None),
        (splits, "hdf5", {"shard_samples": 2}, "expected splits"),
        (folder, "lmdb", {}, "expected single"),
        (splits, "hdf5", {"shard_samples": 2}, "expected splits"),
    ]
    for source, to, options, expected in steps:
        converted(source, tmp_path / "out", to, force=True, **options)
        if expected is not None:
            assert tree(tmp_path / "out") == tree(tmp_path / expected)


def test_force_replaces_splits_with_fields(tmp_path: Path) -> None:
    target = tmp_path / "out"
    samples = [{"image": png(8, 8, n), "caption": f"{n}", "blob": b"x"} for n in range(20)]
    for rows in (20, 19):  # the index of each split has folders
        convert(samples[:rows], target, to="lmdb", val=0.3, force=True)
        assert sorted(os.listdir(target)) == ["shardkit.json", "train", "val"]


def test_force_replaces_an_incomplete_dataset(folder: Path, tmp_path: Path) -> None:
    for name in ("train", "val"):
        make_folder(tmp_path / "splits" / name)
    converted(tmp_path / "splits", tmp_path / "out")
    shutil.rmtree(tmp_path / "out/val")
    made(folder, tmp_path / "out", "lmdb", force=True)
    made(folder, tmp_path / "expected", "lmdb")
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")


def test_force_leaves_foreign_files_only(folder: Path, tmp_path: Path) -> None:
    made(folder, tmp_path / "out")
    (tmp_path / "out/notes.txt").write_bytes(b"mine")
    made(folder, tmp_path / "out", seed=1, force=True)
    assert (tmp_path / "out/notes.txt").read_bytes() == b"mine"


@pytest.mark.parametrize("force", [False, True])
def test_a_directory_with_other_files_is_not_touched(
    folder: Path, tmp_path: Path, force: bool
) -> None:
    make_tree(tmp_path / "out", {"a.txt": b"x", "sub/b": b"y"})
    (tmp_path / "file").write_bytes(b"x")
    before = tree(tmp_path)
    for target in (tmp_path / "out", tmp_path / "file"):
        with pytest.raises(UsageError):
            made(folder, target, force=force)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("force", [False, True])
def test_source_and_target_must_not_overlap(folder: Path, tmp_path: Path, force: bool) -> None:
    (tmp_path / "link").symlink_to(folder)
    before = tree(tmp_path)
    targets = [folder, folder / "out", folder / "cat", folder / "a" / "b", folder.parent]
    for target in [*targets, tmp_path / "link", tmp_path / "link" / "out"]:
        with pytest.raises(UsageError):
            made(folder, target, force=force)
        with pytest.raises(UsageError):
            plan_scan(scan_imagefolder(folder), target, ConvertOptions(to="lmdb"), force=force)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["out", "out/below", "train/out", "train", ""])
def test_a_source_of_splits_and_the_target_must_not_overlap(tmp_path: Path, name: str) -> None:
    for split in ("train", "val"):
        make_folder(tmp_path / "photos" / split)
    before = tree(tmp_path)
    with pytest.raises(UsageError):
        converted(tmp_path / "photos", tmp_path / "photos" / name)
    assert tree(tmp_path) == before


def test_two_conversions_at_once_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / WORK_NAME).mkdir(parents=True)
    with (tmp_path / "out" / WORK_NAME / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another conversion is writing"):
            made(folder, tmp_path / "out")
    made(folder, tmp_path / "out")


@pytest.mark.parametrize("option", [{"class_order": "natural"}, {"splits": False}])
def test_an_open_source_takes_no_options(
    folder: Path, tmp_path: Path, option: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="are options of image folders"):
        convert(ImageFolder(folder), tmp_path / "out", to="lmdb", **option)
    assert os.listdir(tmp_path) == ["photos"]


def test_a_dry_run_writes_nothing(folder: Path, tmp_path: Path) -> None:
    plan = plan_scan(scan_imagefolder(folder), tmp_path / "out", ConvertOptions(to="lmdb", limit=5))
    assert len(plan.splits[0].source) == 5
    assert os.listdir(tmp_path) == ["photos"]


@pytest.mark.parametrize("name", ["a\\b", "train val", "index"])
def test_splits_of_any_name_can_be_opened(tmp_path: Path, name: str) -> None:
    make_folder(tmp_path / "photos" / name)
    scan = scan_imagefolder(tmp_path / "photos", splits=True)
    try:
        convert_scan(scan, tmp_path / "out", ConvertOptions(to="webdataset"))
    except UsageError:
        assert os.listdir(tmp_path) == ["photos"]  # a refusal is well, a dataset lost is not
        return
    assert is_whole(tmp_path / "out")
    assert load_manifest(tmp_path / "out" / name).rows == 6


# Disks.


def test_a_disk_that_is_too_small_is_noticed_before_writing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space_module, "free_bytes", lambda _: 1000)
    with pytest.raises(DiskFull, match=r"needs about 0.0 MiB; 0.0 MiB are free. Free 1.0 MiB"):
        made(folder, tmp_path / "out")
    assert os.listdir(tmp_path) == ["photos"]


def test_a_disk_too_small_for_a_few_large_files_names_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        with (folder / f"cat/{name}.jpg").open("wb") as file:
            file.truncate(1 << 30)  # sparse, so it takes no space
    monkeypatch.setattr(space_module, "free_bytes", lambda _: 1 << 29)
    with pytest.raises(DiskFull, match=r"largest files are cat/a\.jpg \(1\.0 GiB\), cat/b\.jpg"):
        made(folder, tmp_path / "out")


@pytest.mark.parametrize(("to", "enough"), [("hdf5", False), ("lmdb", True), ("webdataset", True)])
def test_hdf5_temporarily_needs_twice_the_space_of_a_shard(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, enough: bool
) -> None:
    plan = plan_scan(scan_imagefolder(folder), tmp_path / "out", ConvertOptions(to=to))
    room = plan.splits[0].estimated_bytes * 3 // 2
    monkeypatch.setattr(space_module, "free_bytes", lambda _: room)
    with contextlib.nullcontext() if enough else pytest.raises(DiskFull, match="temporarily"):
        made(folder, tmp_path / "out", to)


def test_an_image_too_small_for_raw_pixels_gets_a_remedy(folder: Path, tmp_path: Path) -> None:
    (folder / "cat/bad.jpg").write_bytes(b"bad")
    recipe = Recipe(encode="raw", resize=(18, 20), resize_mode="crop")
    make_tree(folder, {"dog/tiny.png": png(4, 4), "dog/small.png": png(40, 17)})
    with pytest.raises(BadImages, match=r"3 bad files, 2 of them too small \(--enlarge or"):
        made(folder, tmp_path / "out", recipe=recipe)


def test_a_full_disk_reports_the_space_needed_and_a_rerun_resumes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"shard_samples": 2}
    made(folder, tmp_path / "expected", **options)
    read = ImageFolder.read

    def fail(source: ImageFolder, split: str, entry: Entry) -> Any:
        if entry == plan.splits[0].source.entries[4]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return read(source, split, entry)

    plan = plan_scan(scan_imagefolder(folder), tmp_path / "out", ConvertOptions(to="webdataset"))
    with monkeypatch.context() as patch:
        patch.setattr(ImageFolder, "read", fail)
        with pytest.raises(
            DiskFull, match=r"is full. Free some .* are kept. The conversion needs about 0.0 MiB"
        ):
            made(folder, tmp_path / "out", **options)
    assert converted(folder, tmp_path / "out", **options).reused_shards == 2
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")


def test_space_of_finished_shards_is_not_reserved_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stopped(module, "save_facts"), pytest.raises(KeyboardInterrupt):
        made(folder, tmp_path / "out", shard_samples=1)
    monkeypatch.setattr(space_module, "free_bytes", lambda _: 3000)
    made(folder, tmp_path / "out", shard_samples=1)
    assert is_whole(tmp_path / "out")


@pytest.mark.parametrize(
    ("recipe", "held"),
    [(Recipe(), True), (Recipe(quality=50), False)],
    ids=["known sizes", "guessed sizes"],
)
def test_space_is_reserved_if_sizes_are_known(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Recipe, held: bool
) -> None:
    """Six shards, one in work: space for five is reserved at first, for none in the end."""
    sizes: list[int] = []

    class Noted(Reservation):
        def __init__(self, folder: Path, size: int) -> None:
            super().__init__(folder, size)
            sizes.append(os.fstat(self._file.fileno()).st_size)

        def shrink(self, size: int) -> None:
            super().shrink(size)
            sizes.append(os.fstat(self._file.fileno()).st_size)

    monkeypatch.setattr(space_module, "Reservation", Noted)
    made(folder, tmp_path / "out", shard_samples=1, recipe=recipe)
    assert len(sizes) == (7 if held else 0)
    if held and any(sizes):  # else the file system cannot reserve
        assert sizes == [*sorted(set(sizes[:5]), reverse=True), 0, 0]
        images = sorted(path.stat().st_size for path in folder.rglob("*.*"))
        assert sizes[0] > sum(images[:5])


def test_a_failed_reservation_is_refused_at_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(space_module, "Reservation", refuse)
    with pytest.raises(DiskFull):
        made(folder, tmp_path / "out")
    assert os.listdir(tmp_path) == ["photos"]


@pytest.mark.parametrize(
    "name", ["assemble.save_index", "convert.save_manifests", "assemble._file_entry"]
)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_at_the_end_fails_the_conversion(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    made(folder, tmp_path / "expected")

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code), "some file")

    with monkeypatch.context() as patch:
        patch.setattr(f"shardkit.conversion.{name}", fail)
        with pytest.raises(ConversionFailed):
            made(folder, tmp_path / "out")
    assert not (tmp_path / "out" / MANIFEST_NAME).exists()
    made(folder, tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")


def test_a_disk_that_fails_while_publishing_fails_the_conversion(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(folder, tmp_path / "expected")

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "some folder")

    with monkeypatch.context() as patch:
        patch.setattr(staging_module, "sync", fail)
        with pytest.raises(ConversionFailed):
            made(folder, tmp_path / "out")
    made(folder, tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")


LIMITED = """
import resource, sys
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)), hard))
from shardkit.cli.main import main
main()
"""
"""The command line where the kernel refuses to write more than so many bytes into any file."""


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("size", [100, 5_000, 12_000, 20_000, 22_000])
@pytest.mark.slow
def test_a_write_that_the_kernel_refuses_fails_the_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, size: int
) -> None:
    """At any position, in spools or shards, there is one message and nothing worse."""
    source = make_folder(tmp_path / "photos", each=8)
    out = tmp_path / "out"
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)  # it could not save its data
    done = python(LIMITED, size, "convert", "imagefolder", source, out, "--to", to, "--workers", 1)
    assert done.returncode == 1, done.stderr[-500:]
    assert "Traceback" not in done.stderr
    assert is_whole(out)
    made(source, out, to)
    made(source, tmp_path / "expected", to)
    assert tree(out) == tree(tmp_path / "expected")


# Interruptions.


@contextlib.contextmanager
def stopped(where: Any, name: str, after: int = 0) -> Iterator[None]:
    """Raise KeyboardInterrupt instead of the call of a function that follows ``after`` others."""
    function = getattr(where, name)
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, call)
        yield


@contextlib.contextmanager
def stopped_at_any_step(after: int) -> Iterator[None]:
    """Raise KeyboardInterrupt at the step on the disk that follows ``after`` others."""
    steps = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps > after:
                raise KeyboardInterrupt
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "rename", "unlink", "rmdir", "mkdir"):
            patch.setattr(os, name, counted(getattr(os, name)))
        yield


@pytest.mark.parametrize("to", FORMATS)
def test_finished_shards_are_kept_and_the_result_is_the_same(tmp_path: Path, to: str) -> None:
    source = make_folder(tmp_path / "photos", each=4)
    options: dict[str, Any] = {"shard_samples": 2}
    made(source, tmp_path / "expected", to, **options)
    for after in range(1, 8):
        out = tmp_path / f"out {after}"
        with stopped(ImageFolder, "read", after), pytest.raises(KeyboardInterrupt):
            made(source, out, to, **options)
        result = converted(source, out, to, **options)
        assert result.reused_shards == after // 2
        assert tree(out) == tree(tmp_path / "expected")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources, one of them with splits."""
    root = tmp_path_factory.mktemp("scenes")
    make_folder(root / "single", ["cat"], each=2)
    make_folder(root / "splits/train", ["cat"], each=1)
    make_folder(root / "splits/val", ["dog"], each=1)
    return root


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        pytest.param(None, "single", marks=pytest.mark.slow),
        pytest.param(None, "splits", marks=pytest.mark.slow),
        ("single", "single"),
        pytest.param("splits", "single", marks=pytest.mark.slow),
    ],
)
def test_a_run_stopped_at_any_step_can_be_repeated(
    scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, older: str | None, newer: str
) -> None:
    """The result is the same; meanwhile there is the old dataset, the new one, or none."""
    refuse = Mock(side_effect=OSError(errno.ENOSYS, "not here"))  # see test_exchange.py
    monkeypatch.setattr("shardkit.conversion.exchange.exchange", refuse)
    options: dict[str, Any] = {"to": "webdataset", "force": older is not None}
    expected = tmp_path / "expected"
    if older is not None:
        converted(scenes / older, tmp_path / "older", "webdataset", seed=5)
        shutil.copytree(tmp_path / "older", expected)
    converted(scenes / newer, expected, **options)
    finished = False
    after = 0
    while not finished:
        assert after < 400
        out = tmp_path / f"out {after}"
        if older is not None:
            shutil.copytree(tmp_path / "older", out)
        with stopped_at_any_step(after):
            try:
                converted(scenes / newer, out, **options)
                finished = True
            except KeyboardInterrupt:
                pass
        if out.exists():
            assert is_whole(out), after
        if older is None and (out / MANIFEST_NAME).exists() and not finished:
            # Nothing is left to do but to clear up; the second run may say so.
            with contextlib.suppress(UsageError):
                converted(scenes / newer, out, **options)
            assert without_work(tree(out)) == tree(expected), after
        elif not finished:
            converted(scenes / newer, out, **options)
            assert tree(out) == tree(expected), after
        after += 1


@pytest.mark.parametrize("force", [False, True])
def test_any_command_finishes_an_interrupted_publication(
    folder: Path, tmp_path: Path, force: bool
) -> None:
    made(folder, tmp_path / "out", "lmdb")
    with stopped(staging_module.StagingDirectory, "_move"), pytest.raises(KeyboardInterrupt):
        made(folder, tmp_path / "out", "hdf5", force=True)
    if force:
        made(folder, tmp_path / "out", "lmdb", force=True)
    else:
        with pytest.raises(UsageError, match="now holds the dataset of an earlier run"):
            made(folder, tmp_path / "out", "lmdb")
    made(folder, tmp_path / "expected", "lmdb" if force else "hdf5")
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")


def test_an_unfinished_run_is_not_resumed_after_the_source_changed(
    folder: Path, tmp_path: Path
) -> None:
    with stopped(module, "save_facts"), pytest.raises(KeyboardInterrupt):
        made(folder, tmp_path / "out")
    (folder / "cat/000.jpg").write_bytes(jpeg(30, 30))
    with pytest.raises(UsageError, match=r"1 file changed \(cat/000.jpg\). force=True starts over"):
        made(folder, tmp_path / "out")
    with pytest.raises(UsageError, match=r"quality= was not given and is 7; resize= was not"):
        made(folder, tmp_path / "out", recipe=Recipe(quality=7, resize=(8, 9)))
    made(folder, tmp_path / "out", force=True)
    assert stored_images(tmp_path / "out")["cat/000.jpg"] == jpeg(30, 30)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.slow
def test_a_killed_run_can_be_repeated(tmp_path: Path, to: str, workers: int) -> None:
    source = make_folder(tmp_path / "photos", each=40)
    out = tmp_path / "out"
    command = shardkit_command("convert", "imagefolder", source, out, "--to", to)
    command += ["--shard-samples", "2", "--workers", str(workers), "--quiet"]
    process = subprocess.Popen(command, start_new_session=True)
    parts = out / WORK_NAME / "state" / "parts"
    try:
        wait_until(lambda: list(parts.glob("[0-9]*/result.json")), "the first shard")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert is_whole(out)
    done = len(list(parts.glob("[0-9]*/result.json")))
    result = converted(source, out, to, shard_samples=2)
    assert result.reused_shards == done < 40
    made(source, tmp_path / "expected", to, shard_samples=2)
    assert tree(out) == tree(tmp_path / "expected")


def test_a_folder_that_vanishes_is_no_list_of_bad_files(folder: Path, tmp_path: Path) -> None:
    scan = scan_imagefolder(folder)
    shutil.rmtree(folder / "cat")
    with pytest.raises(ConversionFailed, match="cat is missing or empty"):
        convert_scan(scan, tmp_path / "out", ConvertOptions(to="lmdb"))


def test_a_source_with_wrong_records_is_detected(folder: Path, tmp_path: Path) -> None:
    """Two records of one key would overwrite each other in a tar or an LMDB."""
    scan = scan_imagefolder(folder)
    images = scan.splits[""]
    scan.splits[""] = images.of([entry._replace(key="same") for entry in images.entries])
    with pytest.raises(ShardkitError):
        convert_scan(scan, tmp_path / "out", ConvertOptions(to="webdataset"))


def test_the_tar_can_be_read_without_shardkit(folder: Path, tmp_path: Path) -> None:
    manifest = made(folder, tmp_path / "out")
    content = (tmp_path / "out" / manifest.shards[0].name).read_bytes()
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        names = archive.getnames()
        data = archive.extractfile("cat/000.jpg")
        assert data is not None
        assert data.read() == (folder / "cat/000.jpg").read_bytes()
    assert len(names) == 1 + 3 * 6


@pytest.mark.parametrize("to", FORMATS)
def test_shards_describe_their_dataset(folder: Path, tmp_path: Path, to: str) -> None:
    manifest = made(folder, tmp_path / "out", to)
    reader = get_format(to).read(tmp_path / "out" / manifest.shards[0].name)
    try:
        assert reader.meta["classes"] == ["cat", "dog"]
        assert reader.meta["recipe"] == Recipe().describe()
    finally:
        reader.close()


def test_a_single_split_is_not_replaced(tmp_path: Path) -> None:
    for name in ("train", "val"):
        make_folder(tmp_path / "photos" / name)
    converted(tmp_path / "photos", tmp_path / "out")
    before = tree(tmp_path / "out")
    with pytest.raises(UsageError, match="is a split of the dataset in"):
        made(tmp_path / "photos/train", tmp_path / "out/train", force=True)
    assert tree(tmp_path / "out") == before


def test_equal_keys_are_found() -> None:
    assert not build.repeated_keys([f"{number}" for number in range(9)])
    keys = build.repeated_keys(["a", "b", "c", "a", "d", "b"])
    assert keys == ["a", "b"]
    assert "the key 'a' occurs more than once (2 keys do)" in str(build.repeated_key(keys))


@pytest.mark.parametrize("to", FORMATS)
def test_all_files_have_the_mode_that_the_user_chose(folder: Path, tmp_path: Path, to: str) -> None:
    previous = os.umask(0o002)
    try:
        convert(folder, tmp_path / "out", to=to)
    finally:
        os.umask(previous)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").rglob("*.*")
    }
    assert {name: oct(mode) for name, mode in modes.items() if mode != 0o664} == {}
