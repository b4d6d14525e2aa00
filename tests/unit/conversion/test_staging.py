from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from helpers import make_folder, make_tree, tree
from refusals import refused

from shardkit import ShardkitError, convert
from shardkit.conversion import fingerprint, staging
from shardkit.conversion.fingerprint import ConversionFingerprint
from shardkit.conversion.staging import (
    RETIRED,
    WORK_NAME,
    StagingDirectory,
    check_target,
    open_staging,
)
from shardkit.errors import ConversionFailed, CorruptDataset, UsageError
from shardkit.sources.imagefolder import ImageFolder


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """An existing dataset."""
    convert(make_folder(tmp_path / "old photos", each=1), tmp_path / "out", to="webdataset")
    return tmp_path / "out"


def terms(seed: str = "d", on_error: str = "fail", **files: str) -> ConversionFingerprint:
    """Return the fingerprint of a conversion with the given seed."""
    return ConversionFingerprint(
        settings={"--seed": seed}, images={"": len(files)}, files=files, on_error=on_error
    )


def hold(target: Path, seed: str = "d", *, force: bool = False) -> StagingDirectory:
    return resume(target, terms(seed), force=force)


def resume(target: Path, wanted: ConversionFingerprint, *, force: bool = False) -> StagingDirectory:
    with open_staging(target, force=force) as place:
        place.start(wanted, force=force)
        return place


def test_a_new_or_empty_directory_is_accepted(tmp_path: Path) -> None:
    for force in (False, True):
        check_target(tmp_path / "new" / "deeper", force=force)
        check_target(tmp_path, force=force)
    assert os.listdir(tmp_path) == []


def test_force_replaces_only_datasets(dataset: Path) -> None:
    (dataset / "shardkit.json").write_text("{}")
    before = tree(dataset)
    with pytest.raises(CorruptDataset):
        hold(dataset, force=True)
    assert tree(dataset) == before


def test_an_unwritable_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with refused(UsageError):
        hold(tmp_path / "out")


def test_broken_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("loop", "dangling"):
        with refused(UsageError, tmp_path / name):
            hold(tmp_path / name)
    for target in (tmp_path / "dangling", tmp_path / "dangling" / "deeper"):
        with refused(UsageError, tmp_path / "dangling"):
            check_target(target, force=False)


def test_a_conversion_that_ends_while_the_next_starts_is_not_overwritten(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another conversion may finish between the check of the target and the lock."""
    target = tmp_path / "contested"
    (target / WORK_NAME).mkdir(parents=True)
    flock = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        for path in sorted((target / WORK_NAME).rglob("*")):
            path.unlink()
        (target / WORK_NAME).rmdir()
        for path in dataset.rglob("*"):
            if path.is_file():
                goal = target / path.relative_to(dataset)
                goal.parent.mkdir(exist_ok=True, parents=True)
                goal.write_bytes(path.read_bytes())
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(UsageError):
        hold(target)
    assert tree(target) == tree(dataset)


FILES = {"a": "1", "b": "1", "c": "1"}


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (terms(a="1", b="2", c="1"), ("1",)),
        (terms(a="1", c="1"), ("1",)),
        (
            terms(a="2", b="2", c="2", d="1"),
            ("3", "1"),
        ),
        (terms(v="1", w="1", x="1", y="1"), ("4", "1")),
        (
            ConversionFingerprint({"--seed": [1, 2]}, {"": 3}, FILES, "fail"),
            ("seed=", "1x2"),
        ),
        (
            ConversionFingerprint({"--seed": "d", "classes": ["b", "a"]}, {"": 3}, FILES, "fail"),
            (),
        ),
        (
            ConversionFingerprint({"--seed": "d"}, {"": 4}, FILES, "fail"),
            (),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_refusal_lists_what_is_different(
    tmp_path: Path, wanted: ConversionFingerprint, said: tuple[str, ...]
) -> None:
    earlier = replace(terms(**FILES), settings={"--seed": "d", "classes": ["a", "b"]})
    place = resume(tmp_path / "out", earlier)
    (place.dataset / "shard").write_bytes(b"done")
    with refused(UsageError, *said):
        resume(tmp_path / "out", wanted)
    again = resume(tmp_path / "out", wanted, force=True)
    assert list(again.dataset.iterdir()) == []


@pytest.mark.parametrize(
    ("most", "said"),
    [
        (10, ("1", "0077", "0002")),
        (1, ()),
    ],
)
def test_long_lists_of_files_are_compared_as_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, said: tuple[str, ...]
) -> None:
    monkeypatch.setattr(fingerprint, "_FILES_A_LINE", 5)
    monkeypatch.setattr(fingerprint, "_UNMATCHED", most)
    files = {f"{number:04d}": "1" for number in range(100)}
    resume(tmp_path / "out", terms(**files))
    del files["0002"]
    files["0077"] = "2"
    with refused(UsageError, *said):
        resume(tmp_path / "out", terms(**files))


def test_a_damaged_fingerprint_is_refused(tmp_path: Path) -> None:
    place = hold(tmp_path / "out", "one")
    (place.state / "files.jsonl").write_bytes(b"{")
    hold(tmp_path / "out", "one")
    with refused(UsageError):
        hold(tmp_path / "out", "two")


def test_work_without_a_plan_is_discarded(tmp_path: Path) -> None:
    """Its removal was interrupted, so its content is unknown."""
    place = hold(tmp_path / "out", "one")
    (place.dataset / "shard").write_bytes(b"of another plan")
    (place.state / "ready").write_bytes(b"")
    (place.state / "plan.json").unlink()
    again = hold(tmp_path / "out", "two")
    assert list(again.dataset.iterdir()) == []
    assert not again.is_ready


def test_a_damaged_plan_is_not_a_traceback(tmp_path: Path) -> None:
    place = hold(tmp_path / "out", "one")
    for content in (b"", b"[]", b"{}", b"nonsense"):
        (place.state / "plan.json").write_bytes(content)
        try:
            hold(tmp_path / "out", "one", force=True)
        except ShardkitError:
            continue
        assert json.loads((place.state / "plan.json").read_bytes())["digest"] == terms("one").digest


def test_a_saved_fingerprint_lists_its_files_once(tmp_path: Path) -> None:
    files = Mock(items=Mock(side_effect=FILES.items))
    saved = replace(terms("one"), files=files)
    saved.save(tmp_path)
    assert saved.digest == replace(terms("one"), files=FILES).digest
    files.items.assert_called_once()


def test_an_interrupted_publication_is_not_discarded(tmp_path: Path) -> None:
    for force in (False, True):
        target = tmp_path / f"out-{force}"
        place = hold(target, "one")
        make_tree(place.dataset, {"a": b"1", "shardkit.json": b"2"})
        (place.state / "ready").write_bytes(b"")
        if force:
            hold(target, "two", force=True)
        else:
            with refused(UsageError):
                hold(target, "two")
        assert (target / "a").read_bytes() == b"1"


def complete(target: Path, dataset: Path) -> StagingDirectory:
    """Return a staging directory with a copy of a dataset, which remains to be published."""
    held = hold(target)
    shutil.copytree(dataset, held.dataset, dirs_exist_ok=True)
    return held


def test_manifests_are_moved_last_and_the_top_one_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split in ("train", "val"):
        make_folder(tmp_path / "splits" / split, each=1)
    convert(tmp_path / "splits", tmp_path / "made", to="webdataset")
    place = complete(tmp_path / "out", tmp_path / "made")
    moved: list[str] = []
    replace = os.replace

    def note(name: str, goal: str, **folders: int) -> None:
        above = os.readlink(f"/proc/self/fd/{folders.get('dst_dir_fd', -1)}") if folders else ""
        if WORK_NAME not in above and folders and goal != ".shardkit-trash":
            moved.append(os.path.relpath(os.path.join(above, goal), place.target))
        replace(name, goal, **folders)

    monkeypatch.setattr(os, "replace", note)
    place.publish()
    files = {name for name, kind in tree(tmp_path / "made").items() if kind != "folder"}
    splits = {"train/shardkit.json", "val/shardkit.json"}
    assert set(moved[:-3]) == files - splits - {"shardkit.json"}
    assert set(moved[-3:-1]) == splits
    assert moved[-1] == "shardkit.json"


def test_publishing_leaves_out_what_a_killed_run_was_writing(dataset: Path, tmp_path: Path) -> None:
    held = complete(tmp_path / "new", dataset)
    names = (f".shardkit.json.{'0' * 16}.tmp", f"index/.rows.npy.{'f' * 16}.tmp")
    make_tree(held.dataset, dict.fromkeys(names, b""))
    held.publish()
    assert tree(tmp_path / "new") == tree(dataset)


def test_work_that_cannot_be_removed_is_named(
    dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(root: Path, name: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(root / name))

    held = complete(tmp_path / "new", dataset)
    monkeypatch.setattr(staging, "remove_tree", fail)
    held.publish()
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"{tmp_path / 'new' / '.shardkit-trash'} cannot be removed"
    )


class _Nested(ImageFolder):
    """A source whose description is nested more deeply than manifests may be."""

    def describe(self, split: str) -> dict[str, Any]:
        return {"name": "photos", "history": json.loads("[" * 40 + "]" * 40)}


def test_a_dataset_that_readers_would_refuse_is_not_published(
    dataset: Path, tmp_path: Path
) -> None:
    before = tree(dataset)
    for _ in range(2):
        with refused(ConversionFailed, dataset, "nested"):
            convert(_Nested(tmp_path / "old photos"), dataset, to="lmdb", workers=1, force=True)
        assert {name: tree(dataset)[name] for name in before} == before


def test_discarding_removes_only_what_it_created(tmp_path: Path) -> None:
    hold(tmp_path / "a" / "b" / "out").discard()
    assert os.listdir(tmp_path) == []
    (tmp_path / "out").mkdir()
    hold(tmp_path / "out").discard()
    assert os.listdir(tmp_path) == ["out"]


def test_discarding_touches_nothing_else(dataset: Path) -> None:
    before = tree(dataset)
    hold(dataset, force=True).discard()
    assert tree(dataset) == before


@pytest.mark.parametrize("step", ["unlink", "rmdir"])
def test_interrupted_removal_of_work_does_not_harm_the_dataset(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """After each possible interruption of `discard`, `start` must not resume remainders."""
    function: Callable[..., None] = getattr(os, step)
    before = tree(dataset)
    for fatal in range(20):
        place = hold(dataset, force=True)
        (place.state / "ready").write_bytes(b"")
        (place.state / "retired.json").write_bytes(b"[]")
        calls = 0

        def interrupt(*args: object, stop: int = fatal, **kwargs: object) -> None:
            nonlocal calls
            calls += 1
            if calls > stop:
                raise KeyboardInterrupt
            function(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, step, interrupt)
            try:
                place.discard()
            except KeyboardInterrupt:
                pass
            else:
                break
        again = hold(dataset, force=True)
        if again.is_ready:
            again.publish()
        assert {n: h for n, h in tree(dataset).items() if not n.startswith(WORK_NAME)} == before
    else:
        pytest.fail("discard does not end")


# Where the file system has no locks.


@pytest.fixture
def lockless(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = itertools.cycle([errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])

    def refuse(*_: object) -> None:
        code = next(codes)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.usefixtures("lockless")
def test_without_locks_a_file_names_the_process(tmp_path: Path) -> None:
    with open_staging(tmp_path / "out", force=False) as place:
        place.start(terms(), force=False)
        with pytest.raises(UsageError, match=f"process {os.getpid()} on .*owner"):
            hold(tmp_path / "out")
    hold(tmp_path / "out").discard()
    assert tree(tmp_path / "out") == {}


@pytest.mark.usefixtures("lockless")
def test_without_locks_a_process_removes_only_its_own_file(tmp_path: Path) -> None:
    """The work folder may have been removed and created again by another process."""
    with open_staging(tmp_path / "out", force=False) as place:
        (place.folder / "owner").write_bytes(b"another")
    assert (place.folder / "owner").read_bytes() == b"another"
    assert {path.name for path in place.folder.iterdir()} == {"lock", "owner"}


@pytest.mark.usefixtures("lockless")
def test_without_locks_the_work_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    place = hold(tmp_path / "out")
    child = subprocess.Popen(["true"])
    child.wait()
    owner = {"machine": socket.gethostname(), "process": child.pid}
    (place.folder / "owner").write_text(json.dumps(owner))
    hold(tmp_path / "out")
    assert not (place.folder / "owner").exists()


@pytest.mark.usefixtures("lockless")
@pytest.mark.parametrize(
    "owner", [b'{"machine": "another", "process": 1}', b"", b"[]", b'{"process": "x"}']
)
@pytest.mark.slow
def test_without_locks_a_file_of_an_unknown_process_is_kept(tmp_path: Path, owner: bytes) -> None:
    place = hold(tmp_path / "out")
    (place.folder / "owner").write_bytes(owner)
    with refused(UsageError):
        hold(tmp_path / "out", force=True)
    (place.folder / "owner").unlink()
    hold(tmp_path / "out")


# Lists, folders and disks that are damaged.


def test_a_damaged_list_of_old_files_removes_nothing(dataset: Path) -> None:
    make_tree(dataset, {f"{WORK_NAME}/state/{name}": b"{}" for name in ("ready", "plan.json")})
    for content in (
        *(b"[", b"{}", b"[1]", b'["../a"]', b'[".shardkit-work/lock"]', b'["a/b/c/d"]'),
    ):
        make_tree(dataset, {RETIRED: content})
        before = tree(dataset)
        with refused(UsageError, "retired.json"):
            hold(dataset, force=True)
        assert {name: tree(dataset)[name] for name in before} == before


def test_a_link_in_place_of_an_old_shard_is_refused(dataset: Path, tmp_path: Path) -> None:
    shard = dataset / "shard-000000.tar"
    shard.rename(tmp_path / "aside")
    shard.symlink_to(tmp_path / "aside")
    before = tree(dataset)
    with refused(UsageError):
        hold(dataset, force=True)
    assert tree(dataset) == before


def test_force_starts_over_if_the_complete_dataset_was_removed(tmp_path: Path) -> None:
    place = hold(tmp_path / "out", "one")
    (place.state / "ready").write_bytes(b"")
    place.dataset.rmdir()
    again = hold(tmp_path / "out", "two", force=True)
    assert not again.is_ready
    assert list(again.dataset.iterdir()) == []


@pytest.mark.parametrize(("code", "matters"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_folders_need_not_support_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, matters: bool
) -> None:
    def refuse(_: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(staging, "sync", refuse)
    with pytest.raises(ConversionFailed, match=os.strerror(code)) if matters else nullcontext():
        hold(tmp_path / "out")
    assert (tmp_path / "out" / WORK_NAME / "dataset").is_dir()


def test_a_folder_beside_the_splits_of_a_dataset_is_accepted(tmp_path: Path) -> None:
    for name in ("train", "val"):
        make_folder(tmp_path / "photos" / name, each=1)
    convert(tmp_path / "photos", tmp_path / "out", to="webdataset")
    check_target(tmp_path / "out/test", force=False)
    with refused(UsageError):
        check_target(tmp_path / "out/val", force=True)
