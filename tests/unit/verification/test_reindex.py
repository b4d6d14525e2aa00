"""The index is derived: a lost one is rebuilt from intact shards, byte for byte."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import FORMATS, copy_dataset, in_fork, make_dataset, make_folder, make_tree, tree
from hostile.forging import restate
from pairwise import pairwise
from refusals import refused
from stated import being_written, shards_of

from shardkit import fields, repair, verify
from shardkit.errors import CorruptDataset, CorruptShard, UsageError
from shardkit.verification.reindex import reindex


@pytest.fixture
def place(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Path:
    return copy_dataset(folder, tmp_path / "made", to=getattr(request, "param", "lmdb"))


@pytest.mark.parametrize("place", FORMATS, indirect=True)
def test_a_lost_index_is_rebuilt_byte_for_byte(place: Path) -> None:
    before = tree(place)
    shutil.rmtree(place / "index")
    seen: list[Any] = []
    assert reindex(place, on_progress=seen.append) == 6
    assert tree(place) == before
    assert sum(progress.images for progress in seen) == 6
    assert reindex(str(place)) == 6
    assert tree(place) == before


@pytest.mark.parametrize(
    ("place", "damage", "name"),
    pairwise(
        FORMATS,
        ["flipped", "cut", "missing", "a directory"],
        ["rows", "keys", "keys-ends", "paths", "paths-ends"],
    ),
    indirect=["place"],
)
def test_a_damaged_index_is_rebuilt(place: Path, name: str, damage: str) -> None:
    before = tree(place)
    path = place / f"index/{name}.npy"
    content = path.read_bytes()
    path.unlink()
    if damage == "a directory":
        path.mkdir()
    elif damage != "missing":
        bad = content[:-1] + bytes([content[-1] ^ 1]) if damage == "flipped" else content[:40]
        path.write_bytes(bad)
    assert not verify(place, "quick").ok
    reindex(place)
    assert tree(place) == before
    assert verify(place).ok


def test_other_files_in_the_folder_of_the_index_stay(place: Path) -> None:
    make_tree(place, {"index/notes.txt": b"1", "index/fields/notes.txt": b"2"})
    before = tree(place)
    (place / "index/rows.npy").write_bytes(b"")
    reindex(place)
    assert tree(place) == before


def test_a_file_or_link_in_place_of_a_folder_of_the_index_is_replaced(
    folder: Path, tmp_path: Path
) -> None:
    place = make_dataset(folder, tmp_path / "made", to="lmdb")
    fields.add(place, {"score": list(range(6))})
    before, photos = tree(place), tree(folder)
    columns = place / "layers/000001/index/columns"
    for plant in (lambda: columns.write_bytes(b""), lambda: columns.symlink_to(folder)):
        shutil.rmtree(columns)
        plant()
        reindex(place)
        assert tree(place) == before
    assert tree(folder) == photos


@pytest.mark.parametrize(
    ("place", "damage", "index"),
    pairwise(FORMATS, ["flipped", "cut", "longer", "missing", "swapped"], ["whole", "lost"]),
    indirect=["place"],
)
def test_damaged_shards_are_refused_and_nothing_is_changed(
    place: Path, damage: str, index: str
) -> None:
    one, two = shards_of(place)
    content = one.read_bytes()
    if damage == "missing":
        one.unlink()
    elif damage == "swapped":
        one.write_bytes(two.read_bytes())
        two.write_bytes(content)
    else:
        half = len(content) // 2
        changed = content[:half] + bytes([content[half] ^ 4]) + content[half + 1 :]
        one.write_bytes(
            {"flipped": changed, "cut": content[:-1], "longer": content + b"\0"}[damage]
        )
    if index == "lost":
        shutil.rmtree(place / "index")
    before = tree(place)
    with refused(CorruptShard, one.name, "shardkit verify"):
        reindex(place)
    assert tree(place) == before


def test_a_manifest_that_describes_another_index_is_refused(place: Path) -> None:
    """Another version might write another index; no index is better than a wrong one."""

    def change(manifest: Any) -> Any:
        first, *others = manifest.files
        return replace(manifest, files=(replace(first, sha256="0" * 64), *others))

    restate(place, change)
    before = tree(place)
    with refused(CorruptDataset, place):
        reindex(place)
    assert tree(place) == before


def test_unlabeled_raw_and_empty_datasets_are_reindexed(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos")
    make_folder(tmp_path / "splits/train")
    make_tree(tmp_path / "splits/test", {"cat": None})
    flat = {path.name: path.read_bytes() for path in (tmp_path / "photos/cat").iterdir()}
    make_tree(tmp_path / "flat", flat)
    raw: Any = {"resize": "8x8", "resize_mode": "stretch", "encode": "raw"}
    for to in FORMATS:
        for place in (
            make_dataset(tmp_path / "flat", tmp_path / f"flat-{to}", to=to),
            make_dataset(tmp_path / "photos", tmp_path / f"raw-{to}", to=to, **raw),
            make_dataset(tmp_path / "splits", tmp_path / f"splits-{to}", to=to) / "test",
        ):
            before = tree(place)
            shutil.rmtree(place / "index")
            reindex(place)
            assert tree(place) == before


def test_a_directory_of_splits_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos/train")
    make_folder(tmp_path / "photos/val")
    place = make_dataset(tmp_path / "photos", tmp_path / "made", to="lmdb")
    with pytest.raises(UsageError, match="train"):
        reindex(place)
    assert reindex(place / "train") == 6


def kill_in_reindex(place: Path) -> None:
    """Kill a process that is about to move a file of the index into place."""

    def killed() -> None:
        os.replace = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        reindex(place)

    assert in_fork(killed) == -signal.SIGKILL


@pytest.mark.parametrize("split", ["", "train"])
def test_the_next_run_removes_what_a_killed_run_left(tmp_path: Path, split: str) -> None:
    photos = make_folder(tmp_path / "photos" / split)
    root = make_dataset(tmp_path / "photos", tmp_path / "made", to="webdataset")
    before = tree(root)
    for run in (
        lambda: reindex(root / split),
        lambda: repair(root, tmp_path / "photos"),
        lambda: repair(root / split, photos),
    ):
        (root / split / "index/rows.npy").unlink()
        kill_in_reindex(root / split)
        assert any("rows.npy" in name for name in tree(root))
        run()
        assert tree(root) == before


def test_a_running_conversion_is_not_disturbed(place: Path) -> None:
    with being_written(place):
        before = tree(place)
        with refused(UsageError, place.name):
            reindex(place)
        assert tree(place) == before


def test_a_missing_dataset_and_an_edited_manifest_are_refused(place: Path, tmp_path: Path) -> None:
    with refused(UsageError, "nowhere"):
        reindex(tmp_path / "nowhere")
    text = (place / "shardkit.json").read_text()
    (place / "shardkit.json").write_text(text.replace('"rows": 4', '"rows": 5'))
    with refused(CorruptDataset, "shardkit.json"):
        reindex(place)
