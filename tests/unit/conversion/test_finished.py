"""Rerunning a finished conversion does nothing, unless the result would differ."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import invoke, jpeg, make_folder, make_tree, tree
from refusals import refused
from stated import restate_json

from shardkit import convert
from shardkit.errors import UsageError


def run(source: Path, target: Path, **options: Any) -> Any:
    return convert(
        source, target, **{"to": "webdataset", "shard_samples": 2, "workers": 1, **options}
    )


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "photos", each=3)


@pytest.mark.parametrize(
    ("options", "splits"),
    [
        ({}, True),
        ({"to": "hdf5", "resize": "8x8", "resize_mode": "stretch", "encode": "raw"}, False),
        ({"to": "lmdb", "limit": 3, "shuffle": False}, True),
    ],
)
def test_a_finished_conversion_is_not_repeated(
    tmp_path: Path, options: dict[str, Any], splits: bool
) -> None:
    for name in ("train", "val") if splits else ("",):
        make_folder(tmp_path / "photos" / name, each=3)
    first = run(tmp_path / "photos", tmp_path / "out", **options)
    make_tree(tmp_path / "out" / ".shardkit-trash", {"left": b"by a kill in the end"})
    again = run(tmp_path / "photos", tmp_path / "out", **options)
    assert (first.unchanged, again.unchanged) == (False, True)
    assert again.manifests == first.manifests
    assert not (tmp_path / "out" / ".shardkit-trash").exists()


def test_the_command_reports_it_in_one_line(photos: Path) -> None:
    command = ["convert", "imagefolder", photos, photos.parent / "out", "--to", "lmdb"]
    assert invoke(*command).exit_code == 0
    before = tree(photos.parent / "out")
    again = invoke(*command)
    assert (again.exit_code, again.stdout.count("\n")) == (0, 1)
    assert "already contains the result" in again.stdout
    assert tree(photos.parent / "out") == before


def rename(photos: Path, out: Path) -> None:
    path = photos / "cat/000.jpg"
    path.rename(path.with_stem("other"))


CHANGES: dict[str, Callable[[Path, Path], object]] = {
    "a larger file": lambda photos, _: (photos / "cat/000.jpg").write_bytes(jpeg(40, 40)),
    "a renamed file": rename,
    "one more": lambda photos, _: make_tree(photos, {"cat/more.jpg": jpeg()}),
    "another class": lambda photos, _: make_tree(photos, {"ant/more.jpg": jpeg()}),
    "a text": lambda photos, _: make_tree(photos, {"cat/notes.txt": b"x"}),
    "damage": lambda _, out: os.truncate(out / "shard-000000.tar", 1024),
    "a missing file": lambda _, out: (out / "index/keys.npy").unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_target_with_anything_else_is_refused(photos: Path, change: str) -> None:
    out = photos.parent / "out"
    run(photos, out)
    CHANGES[change](photos, out)
    before = tree(out)
    refuse(photos, out)
    assert tree(out) == before


def refuse(source: Path, target: Path, **options: Any) -> None:
    with refused(UsageError, target, "force=True"):
        run(source, target, **options)


def test_a_target_with_other_options_is_refused(photos: Path) -> None:
    run(photos, photos.parent / "out")
    changes: list[dict[str, Any]] = [{"seed": 1}, {"shard_samples": 3}, {"quality": 80}]
    for options in (*changes, {"to": "lmdb"}):
        refuse(photos, photos.parent / "out", **options)


def test_force_converts_again(photos: Path) -> None:
    run(photos, photos.parent / "out")
    before = tree(photos.parent / "out")
    assert not run(photos, photos.parent / "out", force=True).unchanged
    assert tree(photos.parent / "out") == before


def test_skipped_files_must_still_be_bad(photos: Path) -> None:
    make_tree(photos / "cat", {"bad.jpg": jpeg()[:-60]})
    run(photos, photos.parent / "out", on_error="skip")
    assert run(photos, photos.parent / "out", on_error="skip").unchanged
    (photos / "cat/bad.jpg").write_bytes(jpeg())
    refuse(photos, photos.parent / "out", on_error="skip")


def test_a_bad_file_that_is_gone_or_no_longer_skipped_is_another_conversion(photos: Path) -> None:
    link = photos / "cat/bad.jpg"
    link.symlink_to("nowhere")
    run(photos, photos.parent / "out", on_error="skip")
    assert run(photos, photos.parent / "out", on_error="skip").unchanged
    refuse(photos, photos.parent / "out")
    link.unlink()
    refuse(photos, photos.parent / "out", on_error="skip")


def test_other_splits_are_another_conversion(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos/train")
    make_folder(tmp_path / "photos/val")
    run(tmp_path / "photos", tmp_path / "out")
    assert run(tmp_path / "photos", tmp_path / "out").unchanged
    run(tmp_path / "photos/train", tmp_path / "alone")  # with the splits below it
    for name in ("train", "val"):
        shutil.copytree(tmp_path / "out" / name, tmp_path / "alone" / name)
    refuse(tmp_path / "photos", tmp_path / "alone")
    digests = {"train": "0" * 64, "val": "0" * 64}
    restate_json(tmp_path / "out", lambda value: value.update(splits=digests))
    refuse(tmp_path / "photos", tmp_path / "out")
