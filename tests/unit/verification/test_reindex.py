"""The index is derived: a lost one is rebuilt from intact shards, byte for byte."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from helpers import FORMATS, make_dataset, make_folder, make_tree, python, tree
from pairwise import pairwise

from shardkit import CorruptDataset, UsageError, open_dataset, reindex, repair, verify
from shardkit.conversion.lock import locked
from shardkit.conversion.staging import WORK_NAME
from shardkit.dataset.manifest import MANIFEST_NAME
from shardkit.errors import CorruptShard
from shardkit.recipe import Recipe
from shardkit.system.npy import NpyWriter
from shardkit.system.pool import Progress


@pytest.fixture(params=FORMATS)
def place(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Path:
    return make_dataset(folder, tmp_path / "made", to=str(request.param))


def test_a_lost_index_is_rebuilt_byte_for_byte(place: Path) -> None:
    before = tree(place)
    shutil.rmtree(place / "index")
    seen: list[Progress] = []
    assert reindex(place, on_progress=seen.append) == 6
    assert tree(place) == before
    assert sum(progress.images for progress in seen) == 6


def test_an_intact_index_is_unchanged(place: Path) -> None:
    before = tree(place)
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
    try:
        reindex(place)
    except OSError:
        assert damage == "a directory"  # to refuse is as good as to mend, to do neither is not
        return
    assert tree(place) == before
    assert verify(place).ok


def test_a_file_in_place_of_the_index_is_replaced(place: Path) -> None:
    before = tree(place)
    shutil.rmtree(place / "index")
    (place / "index").write_bytes(b"")
    reindex(place)
    assert tree(place) == before


@pytest.mark.parametrize(
    ("place", "damage", "index"),
    pairwise(FORMATS, ["flipped", "cut", "longer", "missing", "swapped"], ["whole", "lost"]),
    indirect=["place"],
)
def test_damaged_shards_are_refused_and_nothing_is_changed(
    place: Path, damage: str, index: str
) -> None:
    one, two = (place / shard.name for shard in open_dataset(place).manifest.shards)
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
    with pytest.raises(CorruptShard, match=r"missing or damaged.*shardkit verify"):
        reindex(place)
    assert tree(place) == before


def test_a_manifest_that_describes_another_index_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version might write another index; no index is better than a wrong one."""
    append = NpyWriter.append
    monkeypatch.setattr(NpyWriter, "append", lambda file, array: append(file, array[:-1]))
    before = tree(place)
    with pytest.raises(CorruptDataset, match="differs from"):
        reindex(place)
    assert tree(place) == before


def test_unlabeled_and_raw_datasets_are_reindexed(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos")
    flat = {path.name: path.read_bytes() for path in (tmp_path / "photos/cat").iterdir()}
    make_tree(tmp_path / "flat", flat)
    raw = Recipe(resize=(8, 8), resize_mode="stretch", encode="raw")
    for to in FORMATS:
        for place in (
            make_dataset(tmp_path / "flat", tmp_path / f"flat-{to}", to=to),
            make_dataset(tmp_path / "photos", tmp_path / f"raw-{to}", to=to, recipe=raw),
        ):
            before = tree(place)
            shutil.rmtree(place / "index")
            reindex(place)
            assert tree(place) == before


def test_a_dataset_without_rows_is_reindexed(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos/train")
    make_tree(tmp_path / "photos/test", {"cat": None})
    for to in FORMATS:
        place = make_dataset(tmp_path / "photos", tmp_path / to, to=to) / "test"
        before = tree(place)
        shutil.rmtree(place / "index")
        assert reindex(place) == 0
        assert tree(place) == before


def test_a_directory_of_splits_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos/train")
    make_folder(tmp_path / "photos/val")
    place = make_dataset(tmp_path / "photos", tmp_path / "made", to="lmdb")
    with pytest.raises(UsageError, match="train"):
        reindex(place)
    assert reindex(place / "train") == 6


KILL = """
import os, signal, sys
from pathlib import Path
from shardkit import reindex
Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
reindex(sys.argv[1])
"""


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
        done = python(KILL, root / split)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert any("rows.npy" in name for name in tree(root))
        run()
        assert tree(root) == before


def test_a_running_conversion_is_not_disturbed(place: Path) -> None:
    with locked(place / WORK_NAME, lambda: None):
        before = tree(place)
        with pytest.raises(UsageError, match="another conversion is writing"):
            reindex(place)
        assert tree(place) == before


def test_repair_rebuilds_the_indexes_of_several_splits(tmp_path: Path) -> None:
    for split in ("train", "val"):
        make_folder(tmp_path / "photos" / split)
    root = make_dataset(tmp_path / "photos", tmp_path / "made", to="webdataset")
    before = tree(root)
    for split in ("train", "val"):
        (root / split / "index/rows.npy").write_bytes(b"damaged")
    assert repair(root, tmp_path / "photos").ok
    assert tree(root) == before


def test_a_missing_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a shardkit dataset"):
        reindex(tmp_path / "nowhere")


def test_an_edited_manifest_is_refused(place: Path) -> None:
    text = (place / MANIFEST_NAME).read_text()
    (place / MANIFEST_NAME).write_text(text.replace('"rows": 4', '"rows": 5'))
    with pytest.raises(CorruptDataset, match="was changed"):
        reindex(place)
