"""Attacks planted in and around a dataset's folder: nothing outside is changed or read."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from campaign import cases
from helpers import make_dataset, make_folder, make_tree, tree
from hostile.damage import edit
from refusals import refused

from shardkit import ShardkitError, append, attach, convert, open_dataset, repair, verify
from shardkit.cluster.work import commit
from shardkit.conversion.staging import DATASET, WORK_NAME
from shardkit.dataset.source import DatasetSource
from shardkit.errors import CorruptDataset, UsageError
from shardkit.system.files import write_atomically
from shardkit.system.user_files import write_result

VICTIM = {"a": b"1", "b": b"2", "state/plan.json": b"3", "dataset/x": b"4", "scratch/y": b"5"}


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder that nothing may change."""
    make_tree(tmp_path / "victim", {**VICTIM, "index/rows.npy": b"6", "shardkit.json": b"7"})
    return tmp_path / "victim"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "photos", each=2)


@pytest.fixture
def dataset(tmp_path: Path, photos: Path) -> Path:
    return make_dataset(photos, tmp_path / "out", to="webdataset")


def into(photos: Path, target: Path, *, force: bool) -> None:
    convert(photos, target, to="webdataset", force=force)


def plant_state(target: Path, retired: list[object]) -> None:
    files = {"ready": b"", "plan.json": b"{}", "retired.json": json.dumps(retired).encode()}
    make_tree(target / WORK_NAME / "state", files)
    (target / WORK_NAME / "dataset").mkdir(exist_ok=True)


def retired_above(target: Path, victim: Path) -> None:
    plant_state(target, ["../victim/a", str(victim / "b")])


def retired_through_a_link(target: Path, victim: Path) -> None:
    plant_state(target, ["sub/a", "sub/shardkit.json"])
    (target / "sub").symlink_to(victim)


def retired_nonsense(target: Path, victim: Path) -> None:
    plant_state(target, [1, None, {"a": []}])


def work_link(target: Path, victim: Path) -> None:
    (target / WORK_NAME).symlink_to(victim)


def work_that_is_a_file(target: Path, victim: Path) -> None:
    (target / WORK_NAME).write_bytes(b"")


def inner_links(target: Path, victim: Path) -> None:
    (target / WORK_NAME).mkdir()
    for name in ("state", "dataset", "scratch"):
        (target / WORK_NAME / name).symlink_to(victim)


def link_as_lock(target: Path, victim: Path) -> None:
    (target / WORK_NAME).mkdir()
    (target / WORK_NAME / "lock").symlink_to(victim / "new")


def pipe_as_lock(target: Path, victim: Path) -> None:
    (target / WORK_NAME).mkdir()
    os.mkfifo(target / WORK_NAME / "lock")


def links_to_state_files(target: Path, victim: Path) -> None:
    (target / WORK_NAME / "state").mkdir(parents=True)
    for name in ("plan.json", "bad.json", "ready", "retired.json", "files.jsonl"):
        (target / WORK_NAME / "state" / name).symlink_to(victim / "a")


def pipe_in_the_state(target: Path, victim: Path) -> None:
    (target / WORK_NAME / "state").mkdir(parents=True)
    os.mkfifo(target / WORK_NAME / "state/plan.json")


PLANTED: list[Callable[[Path, Path], None]] = [
    *(retired_above, retired_through_a_link, retired_nonsense, work_link, work_that_is_a_file),
    *(inner_links, link_as_lock, pipe_as_lock, links_to_state_files, pipe_in_the_state),
]


@pytest.mark.parametrize(
    ("plant", "force", "older"), cases(itertools.product(PLANTED, (False, True), (False, True)), 10)
)
def test_a_planted_work_folder_leads_nowhere(
    photos: Path, victim: Path, plant: Callable[[Path, Path], None], force: bool, older: bool
) -> None:
    target = photos.parent / "out"
    if older:
        make_dataset(photos, target)
    target.mkdir(exist_ok=True)
    plant(target, victim)
    before = tree(victim)
    with refused(ShardkitError):
        into(photos, target, force=force)
    if older:
        with contextlib.suppress(ShardkitError):
            repair(target, photos)
        assert verify(target).ok
    assert tree(victim) == before


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("command", ["convert", "force", "append"])
def test_a_list_of_old_files_removes_no_other_file(
    photos: Path, command: str, pinned: bool
) -> None:
    """The user's files have names that a dataset's could have."""
    target = photos.parent / "out"
    theirs = {
        "thesis.txt": b"1",
        "shard-000009.tar": b"2",
        "index/notes.npy": b"3",
        "a/b.txt": b"4",
    }
    make_tree(target, theirs)
    before = tree(target)
    plant_state(target, [[name, 12345, 1, 0] if pinned else name for name in theirs])
    with contextlib.suppress(ShardkitError):
        run(command, photos, target)
    assert {name: tree(target).get(name) for name in before} == before


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("command", ["convert", "force", "append", "commit"])
def test_a_planted_dataset_replaces_no_file_of_the_user(
    photos: Path, command: str, older: bool
) -> None:
    """A work folder that seems ready to be published has files with the names of the user's."""
    target = photos.parent / "out"
    if older:
        make_dataset(photos, target)
    theirs = {"thesis.txt": b"1", "index/notes.npy": b"2", "a/b.txt": b"3"}
    make_tree(target, theirs)
    before = tree(target)
    plant_state(target, [])
    (target / WORK_NAME / "state/retired.json").unlink()
    shutil.copytree(make_dataset(photos, photos.parent / "b"), target / DATASET, dirs_exist_ok=True)
    make_tree(target / DATASET, dict.fromkeys(theirs, b"planted"))
    with refused(UsageError):
        run(command, photos, target)
    assert {name: tree(target).get(name) for name in before} == before


def run(command: str, photos: Path, target: Path) -> None:
    if command == "append":
        append(target, photos)
    elif command == "commit":
        commit(target)
    else:
        into(photos, target, force=command == "force")


SIBLING = ".shardkit-0123456789abcdef"


def sibling(target: Path, **more: bytes) -> None:
    """Let the state of an exchange name the folder of another dataset, next to the target."""
    state = {"plan.json": b"{}", "ready": b"", "sibling": SIBLING.encode(), **more}
    make_tree(target / WORK_NAME / "state", state)


def sibling_to_move(target: Path) -> None:
    sibling(target)


def sibling_to_remove(target: Path) -> None:
    """A power cut may leave a folder under two names; it has the dataset, too."""
    sibling(target)
    make_tree(target / WORK_NAME / "dataset", {"a": b"1"})


def old_sibling(target: Path) -> None:
    """After the exchange, the folder would be the old dataset."""
    sibling(target, exchanged=b"[]")


SIBLINGS = (sibling_to_move, sibling_to_remove, old_sibling)
COMMANDS = ("convert", "force", "dataset", "attach")


@pytest.mark.parametrize(
    ("plant", "older", "command"), cases(itertools.product(SIBLINGS, (False, True), COMMANDS), 6)
)
def test_a_planted_name_of_a_sibling_leads_nowhere(
    photos: Path, plant: Callable[[Path], None], command: str, older: bool
) -> None:
    """The folder may be the only copy of a dataset, whose exchange was interrupted."""
    target, only = photos.parent / "out", photos.parent / SIBLING
    if older:
        make_dataset(photos, target)
    other = make_dataset(photos, photos.parent / "other", to="webdataset")
    shutil.copytree(other, only)
    sibling(only)
    target.mkdir(exist_ok=True)
    plant(target)
    before = tree(only)
    with contextlib.suppress(ShardkitError):
        if command == "attach":
            attach(other, target, force=True)
        elif command == "dataset":
            convert(DatasetSource(other), target, to="hdf5", force=True)
        else:
            into(photos, target, force=command == "force")
    assert tree(only) == before
    if older:
        assert verify(target).ok


def test_a_link_as_trash_is_removed_and_not_followed(
    dataset: Path, photos: Path, victim: Path
) -> None:
    before = tree(victim)
    (dataset / ".shardkit-trash").symlink_to(victim)
    into(photos, dataset, force=True)
    assert tree(victim) == before
    assert not os.path.lexists(dataset / ".shardkit-trash")


# --- links inside a dataset ---


def linked_index(dataset: Path) -> str:
    (dataset / "index").rename(dataset.parent / "elsewhere")
    (dataset / "index").symlink_to(dataset.parent / "elsewhere")
    return "index/rows.npy"


def linked_file(name: str) -> Callable[[Path], str]:
    def apply(dataset: Path) -> str:
        (dataset / name).rename(dataset.parent / "elsewhere")
        (dataset / name).symlink_to(dataset.parent / "elsewhere")
        return name

    return apply


LINKS = [linked_index, *map(linked_file, ("shard-000000.tar", "index/keys.npy", "shardkit.json"))]


@pytest.mark.parametrize("link", LINKS)
def test_links_in_a_dataset_are_reported_and_not_followed(
    tmp_path: Path, photos: Path, dataset: Path, link: Callable[[Path], str]
) -> None:
    name = link(dataset)
    outside = tree(tmp_path)
    found = {finding.file: finding.reason for finding in verify(dataset).findings}
    assert "symbolic link" in found[name]

    def read_all() -> None:
        opened = open_dataset(dataset)
        for row in range(len(opened)):
            opened[row]
        list(opened.keys)

    with pytest.raises(CorruptDataset, match="symbolic link"):
        read_all()
    with pytest.raises(ShardkitError, match="symbolic link"):
        into(photos, dataset, force=True)
    assert outside == tree(tmp_path)


def test_a_dataset_may_be_reached_through_a_link(dataset: Path) -> None:
    link = dataset.parent / "link"
    link.symlink_to(dataset)
    assert verify(link).ok
    assert len(open_dataset(link)) == 4


def test_a_split_that_is_a_link_is_refused(tmp_path: Path) -> None:
    for split in ("train", "val"):
        make_folder(tmp_path / "photos" / split, each=1)
    made = make_dataset(tmp_path / "photos", tmp_path / "out")
    (made / "train").rename(tmp_path / "victim")
    (made / "train").symlink_to(tmp_path / "victim")
    before = tree(tmp_path / "victim")
    (finding,) = verify(made).findings
    assert finding.file == "train/shardkit.json"
    assert "symbolic link" in finding.reason
    with pytest.raises(CorruptDataset, match="symbolic link"):
        into(tmp_path / "photos", made, force=True)
    with pytest.raises(CorruptDataset, match="symbolic link"):
        repair(made, tmp_path / "photos")
    assert tree(tmp_path / "victim") == before


def test_verify_mentions_links_that_no_manifest_names(dataset: Path, victim: Path) -> None:
    (dataset / "sub").symlink_to(victim)
    (dataset / "one").symlink_to(victim / "a")
    assert verify(dataset).extras == ["one", "sub"]


@pytest.mark.parametrize(
    "name", ["sub/a", "index/sub/a", ".shardkit-work", "shardkit.json", "../a"]
)
def test_a_manifest_names_no_files_in_other_folders(dataset: Path, name: str) -> None:
    def change(value: dict[str, list[dict[str, str]]]) -> None:
        value["files"][0]["name"] = name

    edit(dataset, change)
    with refused(CorruptDataset):
        open_dataset(dataset)


def test_repair_replaces_a_link_to_a_file_and_follows_no_linked_folder(
    dataset: Path, photos: Path, victim: Path
) -> None:
    before = tree(victim)
    sound = tree(dataset)
    (dataset / "shard-000000.tar").unlink()
    (dataset / "shard-000000.tar").symlink_to(victim / "a")
    assert repair(dataset, photos).ok
    assert tree(dataset) == sound
    (dataset / "skipped.jsonl").symlink_to(victim / "a")
    shutil.rmtree(dataset / "index")
    (dataset / "index").symlink_to(victim)
    repair(dataset, photos)
    assert tree(victim) == before


# --- temporary files ---


@pytest.mark.parametrize("write", [write_atomically, write_result])
def test_a_planted_temporary_file_is_not_written_to(
    tmp_path: Path, victim: Path, write: Callable[[Path, bytes], None]
) -> None:
    before = tree(victim)
    (tmp_path / ".r.json.tmp").symlink_to(victim / "a")
    (tmp_path / "r.json").symlink_to(victim / "b")
    write(tmp_path / "r.json", b"new")
    assert (tmp_path / "r.json").read_bytes() == b"new"
    assert not (tmp_path / "r.json").is_symlink()
    assert tree(victim) == before


def test_leftovers_of_killed_writers_are_removed(tmp_path: Path, victim: Path) -> None:
    left = tmp_path / f".r.json.{'0a' * 8}.tmp"
    link, other = tmp_path / f".r.json.{'0c' * 8}.tmp", tmp_path / ".r.json.tmp"
    for path in (left, other):
        path.write_bytes(b"half")
    link.symlink_to(victim / "a")
    write_result(tmp_path / "r.json", b"new")
    assert not left.exists()
    assert all(os.path.lexists(path) for path in (link, other))


def test_a_name_of_the_greatest_length_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("ä" * 127)
    write_atomically(path, b"new")
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
