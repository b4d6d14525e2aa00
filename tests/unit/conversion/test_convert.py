"""What a conversion writes, what it does with bad images, and where it may write."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import lmdb
import pytest
from helpers import FORMATS, encoded, exif, jpeg, make_folder, make_tree, picture, png, tree
from interrupted import converted, is_whole, made, stopped, without_work
from refusals import refused, refuses
from stated import WORK, being_written, stated

from shardkit import convert, open_dataset, open_source
from shardkit.errors import BadImages, UsageError

# What comes out.


def test_rows_are_stored_in_the_order_of_the_plan(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "photos", each=8)
    for shuffle in (False, True):
        out = tmp_path / f"out {shuffle}"
        made(source, out, shard_samples=5, shuffle=shuffle)
        paths = list(open_dataset(out).paths)
        assert sorted(paths) == sorted(str(p.relative_to(source)) for p in source.rglob("*.*"))
        assert (paths == sorted(paths)) is not shuffle


@pytest.mark.parametrize("to", FORMATS)
def test_one_shard_built_by_several_workers_has_the_same_bytes(
    tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkit.conversion.build._CHUNK_ROWS", 1)
    source = make_folder(tmp_path / "photos", each=9)
    trees = []
    for workers in (1, 4):
        made(source, tmp_path / f"out {workers}", to, workers=workers, quality=50)
        trees.append(tree(tmp_path / f"out {workers}"))
    assert trees[0] == trees[1]


def test_each_split_becomes_a_dataset_with_shared_classes(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos/train", ["cat", "dog"])
    make_folder(tmp_path / "photos/val", ["dog", "emu"], each=2)
    result = converted(tmp_path / "photos", tmp_path / "out")
    top = json.loads((tmp_path / "out" / "shardkit.json").read_bytes())
    assert top["kind"] == "splits"
    assert top["splits"] == {name: m.digest for name, m in result.manifests.items()}
    train, val = (stated(tmp_path / "out" / name) for name in ("train", "val"))
    assert train.classes == val.classes == ["cat", "dog", "emu"]
    assert (train.class_counts, val.class_counts) == ([3, 3, 0], [0, 2, 2])
    assert sorted(os.listdir(tmp_path / "out")) == ["shardkit.json", "train", "val"]
    assert is_whole(tmp_path / "out")


def test_images_without_classes_have_no_labels(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "photos", {"a.jpg": jpeg(), "b.png": png()})
    manifest = made(source, tmp_path / "out")
    assert (manifest.classes, manifest.class_counts) == (None, None)
    assert manifest.fields == {"jpg": 1, "json": 2, "png": 1}
    assert open_dataset(tmp_path / "out").targets.tolist() == [-1, -1]


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
    assert (manifest.recipe["encode"], manifest.recipe["resize"]) == ("keep", None)
    assert manifest.source["order"] == "shuffled"
    assert "shardkit" in manifest.software


def test_a_manifest_contains_no_path_and_no_time(tmp_path: Path) -> None:
    trees = []
    for place in ("one", "two"):
        source = make_folder(tmp_path / place / "photos")
        for path in source.rglob("*.*"):
            os.utime(path, (len(place), len(place)))
        made(source, tmp_path / place / "out")
        trees.append(tree(tmp_path / place / "out"))
    assert trees[0] == trees[1]
    assert str(tmp_path) not in (tmp_path / "one/out" / "shardkit.json").read_text()


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_adds_up(tmp_path: Path, workers: int) -> None:
    source = make_folder(tmp_path / "photos")
    (source / "cat/bad.jpg").write_bytes(b"bad")
    seen = [0, 0, 0, 0]

    def note(progress: Any) -> None:
        for place, count in enumerate(progress):
            seen[place] += count

    options: dict[str, Any] = {"shard_samples": 3, "on_error": "skip", "workers": workers}
    converted(source, tmp_path / "out", **options, on_progress=note)
    assert seen == [7, sum(path.stat().st_size for path in source.rglob("*.*")), 1, 7]


def test_shards_describe_their_dataset(folder: Path, tmp_path: Path) -> None:
    manifest = made(folder, tmp_path / "out", "lmdb", quality=70)
    shard = str(tmp_path / "out" / manifest.shards[0].name)
    with lmdb.open(shard, readonly=True, lock=False, subdir=False) as file, file.begin() as read:
        meta = json.loads(read.get(b"__shardkit__") or b"")
    assert (meta["classes"], meta["recipe"]) == (["cat", "dog"], manifest.recipe)


def test_all_files_have_the_mode_that_the_user_chose(folder: Path, tmp_path: Path) -> None:
    previous = os.umask(0o002)
    try:
        for to in FORMATS:
            converted(folder, tmp_path / to, to)
    finally:
        os.umask(previous)
    files = [path for to in FORMATS for path in (tmp_path / to).rglob("*.*")]
    assert {oct(stat.S_IMODE(path.stat().st_mode)) for path in files} == {oct(0o664)}


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
    with refused(BadImages, "5 bad files") as caught:
        made(spoilt, tmp_path / "out", shard_samples=2, workers=workers)
    assert isinstance(caught.value, BadImages)
    assert [problem.path for problem in caught.value.problems] == BAD
    assert all(problem.reason for problem in caught.value.problems)
    assert os.listdir(tmp_path / "out") == [WORK]


def test_shards_without_bad_files_are_reused_by_a_run_that_skips_them(
    spoilt: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"shard_samples": 2}
    with refused(BadImages, "2 shards"):
        made(spoilt, tmp_path / "out", **options)
    skipping = {**options, "on_error": "skip"}
    result = converted(spoilt, tmp_path / "out", **skipping)
    assert result.reused_shards == 2
    made(spoilt, tmp_path / "expected", **skipping)
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")


def test_only_shards_of_fixed_files_are_rebuilt(spoilt: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"shard_samples": 2}
    (spoilt / "dog/link.png").unlink()
    with pytest.raises(BadImages):
        made(spoilt, tmp_path / "out", **options)
    for name in BAD[:-1]:
        (spoilt / name).write_bytes(png())
    assert converted(spoilt, tmp_path / "out", **options).reused_shards == 2
    made(spoilt, tmp_path / "expected", **options)
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")


def test_only_bad_files_may_be_removed_between_runs(spoilt: Path, tmp_path: Path) -> None:
    with pytest.raises(BadImages):
        made(spoilt, tmp_path / "out", shard_samples=2)
    (spoilt / "cat/001.jpg").rename(tmp_path / "aside")
    with refused(UsageError, "(cat/001.jpg)", "force=True"):
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
    with stopped("shardkit.conversion.engine.save_observed"), pytest.raises(KeyboardInterrupt):
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


def test_reports_name_options_neither_as_in_python_nor_as_in_commands(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "photos", {"cat/a.png": png(4, 4), "cat/b.png": png(64, 64)})
    options = {"encode": "raw", "resize": "18x20", "resize_mode": "crop"}
    manifest = made(source, tmp_path / "out", on_error="skip", **options)
    (problem,) = manifest.skipped
    stored = json.loads((tmp_path / "out/skipped.jsonl").read_text())
    assert stored == {"path": "cat/a.png", "reason": problem.reason}
    assert "the option enlarge=True or the option resize_mode=pad" in problem.reason


def test_if_all_images_are_bad_nothing_is_written(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "photos", {"cat/a.jpg": b"bad", "cat/b.jpg": b""})
    for on_error in ("fail", "skip"):
        with pytest.raises(BadImages) as caught:
            made(source, tmp_path / "out", on_error=on_error)
        assert [problem.path for problem in caught.value.problems] == ["cat/a.jpg", "cat/b.jpg"]
        assert os.listdir(tmp_path) == ["photos"]


def test_an_image_too_small_for_raw_pixels_gets_a_remedy(folder: Path, tmp_path: Path) -> None:
    (folder / "cat/bad.jpg").write_bytes(b"bad")
    make_tree(folder, {"dog/tiny.png": png(4, 4), "dog/small.png": png(40, 17)})
    with refused(BadImages, "3 bad files", "2 of them", "enlarge=True"):
        made(folder, tmp_path / "out", encode="raw", resize="18x20", resize_mode="crop")


def test_numbers_of_another_type_are_refused(folder: Path, tmp_path: Path) -> None:
    for options, fact in (
        ({"workers": 0}, "workers=0"),
        ({"workers": -1}, "workers=-1"),
        ({"workers": "2"}, "workers='2'"),
        ({"workers": 1.5}, "workers=1.5"),
        ({"quality": "90", "encode": "jpeg"}, "quality='90'"),
        ({"quality": 90.5, "encode": "jpeg"}, "quality=90.5"),
        ({"seed": "x"}, "seed='x'"),
        ({"seed": None}, "seed=None"),
        ({"limit": 2.5}, "limit=2.5"),
        ({"limit": "2"}, "limit='2'"),
        ({"shard_samples": "3"}, "shard_samples='3'"),
    ):
        with refused(UsageError, fact):
            convert(folder, tmp_path / "out", **{"to": "lmdb", **options})  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


# Where it may go.


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
        words = ("convert", "imagefolder", folder, target, "--to", "lmdb", "--dry-run")
        refuses(2, *words, *(("--force",) if force else ()))
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
    with being_written(tmp_path / "out"), refused(UsageError, tmp_path / "out"):
        made(folder, tmp_path / "out")
    made(folder, tmp_path / "out")


@pytest.mark.parametrize("option", [{"class_order": "natural"}, {"splits": False}])
def test_an_open_source_takes_no_options(
    folder: Path, tmp_path: Path, option: dict[str, Any]
) -> None:
    with refused(UsageError, *option):
        convert(open_source("imagefolder", folder), tmp_path / "out", to="lmdb", **option)
    assert os.listdir(tmp_path) == ["photos"]


@pytest.mark.parametrize("name", ["a\\b", "train val", "index"])
def test_splits_of_any_name_can_be_opened(tmp_path: Path, name: str) -> None:
    make_folder(tmp_path / "photos" / name)
    converted(tmp_path / "photos", tmp_path / "out", splits=True)
    assert is_whole(tmp_path / "out")
    assert stated(tmp_path / "out" / name).rows == 6


def test_a_single_split_is_not_replaced(tmp_path: Path) -> None:
    for name in ("train", "val"):
        make_folder(tmp_path / "photos" / name)
    converted(tmp_path / "photos", tmp_path / "out")
    before = tree(tmp_path / "out")
    with refused(UsageError, tmp_path / "out/train"):
        made(tmp_path / "photos/train", tmp_path / "out/train", force=True)
    assert tree(tmp_path / "out") == before
