"""A plan of a source listed in parts is that of the source listed at once, byte for byte."""

from __future__ import annotations

import errno
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers import make_folder, make_tree, png, tree
from refusals import refused

from shardkit import ShardkitError, convert
from shardkit.cluster.jobs import Jobs
from shardkit.cluster.ledger import Ledger
from shardkit.cluster.work import commit, plan_jobs, write_plan
from shardkit.contracts import Scan
from shardkit.conversion import build_all, parted_scan, stored_order
from shardkit.conversion.build_all import Builder
from shardkit.conversion.convert import convert_scan, plan_source
from shardkit.conversion.exclude import exclude_listed
from shardkit.conversion.plan import ConvertOptions, make_plan
from shardkit.errors import BadImages, DiskFull, UsageError
from shardkit.recipe import Recipe
from shardkit.sources.divided import divided
from shardkit.sources.imagefolder import ImageFolder


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide small sources as if they were large."""
    monkeypatch.setattr(parted_scan, "_PARTS", 3)
    monkeypatch.setattr(parted_scan, "RUN", 7)
    monkeypatch.setattr(stored_order, "_CHUNK", 5)
    monkeypatch.setattr(build_all, "_FEW", 10)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two splits with nested folders, bad and ignored files, and a class that only one has."""
    for split in ("train", "val"):
        make_folder(tmp_path / "photos" / split, each=6)
    folder = tmp_path / "photos"
    make_tree(
        folder,
        {
            "train/bird/deep/a.png": png(3, 3),
            "train/bird/deep/b.x.png": png(3, 3),
            "train/bird/a_.jpg": png(3, 3),
            "train/bird/notes.txt": b"no image",
            "train/cat/.hidden": b"",
            "val/loose.png": png(3, 3),
            "readme.md": b"",
        },
    )
    (folder / "train/dog/broken.jpg").symlink_to("nowhere")
    (folder / "val/broken.jpg").symlink_to("nowhere")
    (folder / os.fsdecode(b"train/cat/\xff.png")).write_bytes(png(3, 3))
    return folder


OPTIONS: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "in order": {"shuffle": False},
    "by size": {"shard_samples": None, "shard_size": "2000B"},
    "limited": {"limit": 9},
    "limited in order": {"limit": 9, "shuffle": False},
    "another seed": {"seed": 7},
    "resized": {"recipe": Recipe(resize=8)},
}


def plan(source: ImageFolder | Any, target: Path, builder: Builder, **given: Any) -> None:
    options = ConvertOptions(**{"to": "lmdb", "shard_samples": 4, "on_error": "skip", **given})
    if isinstance(source, Scan):
        write_plan(source.source, target, lambda _: make_plan(source, options), force=False)
    else:
        write_plan(source, target, partial(plan_source, source, options, builder), force=False)


HERE = Builder()


@pytest.mark.parametrize("name", OPTIONS)
def test_the_plan_is_that_of_the_whole_source(source: Path, tmp_path: Path, name: str) -> None:
    plan(ImageFolder(source).scan(), tmp_path / "whole", HERE, **OPTIONS[name])
    plan(ImageFolder(source), tmp_path / "parts", HERE, **OPTIONS[name])
    progress: list[int] = []
    with ThreadPoolExecutor(3) as threads:
        builder = Builder(executor=threads, on_progress=lambda done: progress.append(done.images))
        plan(ImageFolder(source), tmp_path / "else", builder, **OPTIONS[name])
    assert sum(progress) == 28
    whole = tree(tmp_path / "whole")
    assert len(whole) > 5
    assert tree(tmp_path / "parts") == whole
    assert tree(tmp_path / "else") == whole


def test_unlabeled_images_are_planned(source: Path, tmp_path: Path) -> None:
    flat = ImageFolder(source / "train" / "cat")
    plan(flat.scan(), tmp_path / "whole", HERE)
    plan(flat, tmp_path / "parts", HERE)
    assert tree(tmp_path / "parts") == tree(tmp_path / "whole")


@pytest.mark.filterwarnings("ignore:val has 1 of 16 images")  # one folder of four
@pytest.mark.parametrize("group", [None, "folder"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_divided_folder_is_planned(
    source: Path, tmp_path: Path, group: str | None, shuffle: bool
) -> None:
    options = {"val": 0.3, "test": 0.3, "stratify": False, "group": group, "seed": 5}
    folder = divided(ImageFolder(source / "train"), **options)
    assert hasattr(folder, "parts")
    plan(folder.scan(), tmp_path / "whole", HERE, shuffle=shuffle)
    plan(pickle.loads(pickle.dumps(folder)), tmp_path / "parts", HERE, shuffle=shuffle)
    assert len(list(tmp_path.glob("parts/.shardkit-work/dataset/*"))) == 3
    assert tree(tmp_path / "parts") == tree(tmp_path / "whole")


def test_divisions_that_need_all_images_are_not_listed_in_parts(source: Path) -> None:
    folder = ImageFolder(source / "train")
    for group, stratify in (("column", False), (None, True)):
        options = {"val": 0.3, "test": 0.0, "stratify": stratify, "group": group, "seed": 5}
        assert not hasattr(divided(folder, **options), "parts")


def test_a_division_with_an_empty_side_leaves_nothing(source: Path, tmp_path: Path) -> None:
    options = {"val": 1e-9, "test": 0.0, "stratify": False, "group": None, "seed": 5}
    with refused(UsageError):
        plan(divided(ImageFolder(source / "train"), **options), tmp_path / "target", HERE)
    with refused(UsageError):
        plan(divided(ImageFolder(source), **options), tmp_path / "target", HERE)
    assert not (tmp_path / "target").exists()


def test_worker_processes_list_the_same(source: Path, tmp_path: Path) -> None:
    progress: list[int] = []
    builder = Builder(workers=2, on_progress=lambda done: progress.append(done.images))
    plan(ImageFolder(source).scan(), tmp_path / "whole", HERE)
    plan(ImageFolder(source), tmp_path / "parts", builder)
    assert tree(tmp_path / "parts") == tree(tmp_path / "whole")
    assert sum(progress) == 28


@pytest.mark.parametrize("shuffle", [True, False])
def test_listed_images_are_left_out(source: Path, tmp_path: Path, shuffle: bool) -> None:
    last = ImageFolder(source).scan().splits["train"].entries[-1].path
    left_out = [last, "bird/deep/b%2Ex", "bird/a_"]
    (tmp_path / "list.txt").write_text("\n".join(left_out))
    given: dict[str, Any] = {"to": "lmdb", "shard_samples": 4, "on_error": "skip"}
    given |= {"exclude": f"train={tmp_path / 'list.txt'}", "shuffle": shuffle}
    scan = exclude_listed(ImageFolder(source).scan(), [given["exclude"]])
    options = ConvertOptions(to="lmdb", shard_samples=4, on_error="skip", shuffle=shuffle)
    convert_scan(scan, tmp_path / "whole", options)
    made = convert(source, tmp_path / "parts", **given)
    assert [manifest.rows for manifest in made.manifests.values()] == [13, 12]
    assert tree(tmp_path / "parts") == tree(tmp_path / "whole")
    assert convert(source, tmp_path / "parts", **given).unchanged
    plan_jobs(source, tmp_path / "planned", **given)
    plan(scan, tmp_path / "planned whole", HERE, shuffle=shuffle)
    assert tree(tmp_path / "planned") == tree(tmp_path / "planned whole")


def test_jobs_build_the_plan(source: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"to": "lmdb", "shard_samples": 4, "on_error": "skip"}
    made = plan_jobs(source, tmp_path / "planned", **given)
    assert made.plan is not None
    assert [len(split.source) for split in made.plan.splits] == [16, 12]
    for number in Jobs(Ledger(tmp_path / "planned")).claimed():
        Jobs(Ledger(tmp_path / "planned")).build(number)
    commit(tmp_path / "planned")
    convert(source, tmp_path / "local", **given)
    assert tree(tmp_path / "planned") == tree(tmp_path / "local")


def test_a_source_without_images_leaves_nothing(tmp_path: Path) -> None:
    make_tree(tmp_path / "photos", {"cat/notes.txt": b""})
    with refused(UsageError):
        plan(ImageFolder(tmp_path / "photos"), tmp_path / "new" / "target", HERE)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_is_an_error_that_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_: object) -> Any:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(parted_scan, "write_run", fail)
    with refused(ShardkitError) as found:
        plan(ImageFolder(source), tmp_path / "target", HERE)
    assert isinstance(found.value, DiskFull) == (code == errno.ENOSPC)
    assert not (tmp_path / "target").exists()


def test_files_of_a_killed_scan_are_removed_by_the_next_run(source: Path, tmp_path: Path) -> None:
    for target in ("planned", "converted"):
        make_tree(tmp_path / target, {".shardkit-work/scratch/0123": b"of a killed scan"})
    plan(ImageFolder(source), tmp_path / "planned", HERE)
    with pytest.raises(BadImages):  # keeps its work
        convert(source, tmp_path / "converted", to="lmdb")
    assert len(list(tmp_path.rglob("state"))) == 2
    assert not list(tmp_path.rglob("scratch"))


def test_a_cluster_never_lists_into_a_temporary_folder_of_this_machine(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = []

    def listing(task: parted_scan.ListTask) -> object:
        if threading.current_thread().name.startswith("elsewhere"):
            folders.append(task.folder)
        return list_part(task)

    list_part = parted_scan.list_part
    monkeypatch.setattr(build_all, "list_part", listing)
    with ThreadPoolExecutor(1, "elsewhere") as cluster:
        given: dict[str, Any] = {"to": "lmdb", "splits": True, "on_error": "skip"}
        for unchanged in (False, True):
            done = convert(source, tmp_path / "made", executor=cluster, **given)
            assert done.unchanged == unchanged
    assert folders
    assert all(folder.is_relative_to(tmp_path / "made") for folder in folders)
