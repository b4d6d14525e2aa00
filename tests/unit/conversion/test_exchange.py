"""An old dataset is replaced in one step if the file system can exchange two folders."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import jpeg, make_folder, make_tree, tree
from interrupted import stopped
from refusals import refused

from shardkit import convert, open_dataset, verify
from shardkit.conversion import exchange as module
from shardkit.conversion.staging import WORK_NAME
from shardkit.errors import ConversionFailed, UsageError
from shardkit.system import files

STEPS = ("rename", "replace", "unlink", "rmdir", "mkdir", "link")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "photos", each=2)


@pytest.fixture
def out(photos: Path, tmp_path: Path) -> Path:
    """A dataset to replace."""
    into(photos, tmp_path / "out", seed=1)
    return tmp_path / "out"


@pytest.fixture
def expected(photos: Path, tmp_path: Path) -> dict[str, str]:
    into(photos, tmp_path / "expected")
    return tree(tmp_path / "expected")


@pytest.fixture(autouse=True)
def _can_exchange(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    try:
        files.exchange(tmp_path, "one", "other")
    except OSError:
        pytest.skip("this file system cannot exchange folders")
    for name in ("one", "other"):
        (tmp_path / name).rmdir()


def interrupt(photos: Path, target: Path, name: str) -> None:
    """Replace a dataset, and be interrupted instead of the call of a function of conversion."""
    with stopped(f"shardkit.conversion.{name}"), pytest.raises(KeyboardInterrupt):
        into(photos, target, force=True)


def into(photos: Path, target: Path, *, seed: int = 0, force: bool = False) -> None:
    options: dict[str, Any] = {"to": "webdataset", "shard_samples": 2, "workers": 1}
    convert(photos, target, seed=seed, force=force, **options)


@contextmanager
def at_each_step(monkeypatch: pytest.MonkeyPatch, look: Callable[[], None]) -> Iterator[list[str]]:
    """Call ``look`` before each disk operation, and at the end; yield their names."""
    seen: list[str] = []

    def watched(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            look()
            seen.append(name)
            return act(*args, **kwargs)

        return step

    with monkeypatch.context() as patch:
        for name in STEPS:
            patch.setattr(os, name, watched(name, getattr(os, name)))
        patch.setattr(module, "exchange", watched("exchange", files.exchange))
        yield seen
    look()


def test_a_folder_keeps_its_mode_and_group(photos: Path, out: Path) -> None:
    out.chmod(0o2751)
    if os.geteuid() == 0:
        os.chown(out, 64101, 64100)
    before = out.stat()
    into(photos, out, force=True)
    after = out.stat()
    assert after.st_ino != before.st_ino
    assert stat.S_IMODE(after.st_mode) == stat.S_IMODE(before.st_mode)
    assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)


def test_a_target_behind_a_link_is_exchanged_in_place(
    photos: Path, out: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    before = out.stat().st_ino
    (tmp_path / "links").mkdir()
    (tmp_path / "links/out").symlink_to(out)
    into(photos, tmp_path / "links/out", force=True)
    assert tree(out) == expected
    assert out.stat().st_ino != before
    assert os.listdir(tmp_path / "links") == ["out"]
    assert (tmp_path / "links/out").is_symlink()


# --- other files in the target ---

THEIRS = {"notes.txt": b"1", "more/deep/notes.txt": b"2", "index/notes.txt": b"3"}
"""Files of the user in the dataset's folder."""


def add_theirs(out: Path) -> Callable[[], None]:
    """Add the user's files, a link and a pipe to a dataset; return a check that all are there."""
    make_tree(out, THEIRS)
    (out / "more").chmod(0o2750)
    (out / "more/link").symlink_to("nowhere")
    os.mkfifo(out / "more/pipe")
    inodes = {name: (out / name).stat().st_ino for name in THEIRS}

    def check() -> None:
        assert {name: (out / name).read_bytes() for name in THEIRS} == THEIRS
        assert {name: (out / name).stat().st_ino for name in THEIRS} == inodes
        assert stat.S_IMODE((out / "more").stat().st_mode) == 0o2750
        assert os.readlink(out / "more/link") == "nowhere"
        assert stat.S_ISFIFO((out / "more/pipe").stat().st_mode)

    return check


def assert_only(out: Path, expected: dict[str, str]) -> None:
    """Remove the link and the pipe; check that the dataset and the other files are all there is."""
    for name in ("more/link", "more/pipe"):
        (out / name).unlink()
    assert tree(out).keys() == {*expected, *THEIRS, "more", "more/deep"}
    assert expected.items() <= tree(out).items()
    assert sorted(os.listdir(out.parent)) == ["expected", "out", "photos"]


@pytest.mark.slow
def test_a_dataset_with_other_files_is_readable_at_each_step_and_they_stay(
    photos: Path, out: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check = add_theirs(out)

    def look() -> None:
        check()
        dataset = open_dataset(out, decode="bytes")
        assert len({bytes(dataset[row][0]) for row in range(len(dataset))}) == 4

    with at_each_step(monkeypatch, look) as steps:
        into(photos, out, force=True)
    assert steps.count("exchange") == 1
    assert (out / "notes.txt").stat().st_nlink == 1
    assert_only(out, expected)


@pytest.mark.parametrize("name", ["_copy_attributes", "exchange", "remove_empty", "remove_tree"])
def test_other_files_survive_an_exchange_that_was_interrupted(
    photos: Path,
    out: Path,
    expected: dict[str, str],
    name: str,
) -> None:
    """What the user changes before the rerun stays changed."""
    check = add_theirs(out)
    interrupt(photos, out, f"exchange.{name}")
    check()
    assert verify(out).ok
    (out / "new.txt").write_bytes(b"new")
    (out / "new.txt").replace(out / "notes.txt")
    into(photos, out, force=True)
    assert (out / "notes.txt").read_bytes() == b"new"
    assert_only(out, expected)


# --- the other way ---


def test_a_target_whose_attributes_cannot_be_copied_is_not_exchanged(
    photos: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = out.stat()

    def attributes(folder: int) -> tuple[object, ...]:
        return (b"an access list",) if os.path.samestat(os.fstat(folder), status) else ()

    monkeypatch.setattr(module, "_attributes", attributes)
    into(photos, out, force=True)
    assert os.path.samestat(out.stat(), status)
    assert verify(out).ok
    assert sorted(os.listdir(out.parent)) == ["out", "photos"]


def test_the_working_directory_is_not_exchanged(
    photos: Path, out: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for target in (Path(), out):
        monkeypatch.chdir(out)
        into(photos, target, seed=int(target == out), force=True)
        assert Path.cwd().samefile(out)
        assert verify(Path()).ok


@pytest.mark.parametrize(
    "code", [errno.EINVAL, errno.ENOSYS, errno.EXDEV, errno.EBUSY, errno.EPERM, errno.EOPNOTSUPP]
)
def test_a_file_system_that_cannot_exchange_folders_replaces_file_by_file(
    photos: Path,
    out: Path,
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(module, "exchange", refuse)
    before = out.stat().st_ino
    into(photos, out, force=True)
    assert out.stat().st_ino == before
    assert tree(out) == expected
    assert sorted(os.listdir(out.parent)) == ["expected", "out", "photos"]


@pytest.mark.parametrize("name", ["exchange", "_copy_attributes"])
def test_a_disk_that_fails_is_an_error_and_the_next_run_resumes(
    photos: Path,
    out: Path,
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = (out / "shardkit.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(module, name, fail)
        with pytest.raises(ConversionFailed, match=os.strerror(errno.EIO)):
            into(photos, out, force=True)
    assert (out / "shardkit.json").read_bytes() == before
    assert verify(out).ok
    into(photos, out, force=True)
    assert tree(out) == expected
    assert sorted(os.listdir(out.parent)) == ["expected", "out", "photos"]


LEFT = f"index/.facts.npy.{'0' * 16}.tmp"
"""What a `report` leaves that is killed."""


@pytest.mark.parametrize("can_exchange", [True, False])
def test_temporary_files_of_a_killed_process_neither_prevent_the_exchange_nor_stay(
    photos: Path,
    out: Path,
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    can_exchange: bool,
) -> None:
    exchanges = list[Path]()

    def exchange(folder: Path, name: str, other: str) -> None:
        exchanges.append(folder)
        if not can_exchange:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        files.exchange(folder, name, other)

    monkeypatch.setattr(module, "exchange", exchange)
    (out / LEFT).write_bytes(b"facts")
    into(photos, out, force=True)
    assert len(exchanges) == 1
    assert tree(out) == expected


def test_files_added_at_the_last_moment_are_kept_and_replace_none_of_the_new_dataset(
    photos: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    act = files.exchange
    make_tree(photos, {"cat/more.jpg": jpeg(seed=9)})  # for a third shard

    def late(*args: Any) -> None:
        make_tree(out, {"late.txt": b"1", "index/late.txt": b"2", "new/late.txt": b"3"})
        make_tree(out, {"shard-000002.tar": b"late"})
        act(*args)

    monkeypatch.setattr(module, "exchange", late)
    into(photos, out, force=True)
    found = [(out / folder / "late.txt").read_bytes() for folder in ("", "index", "new")]
    assert found == [b"1", b"2", b"3"]
    assert (out / "shard-000002.tar").read_bytes() != b"late"
    assert verify(out).ok


def test_a_rerun_finishes_when_only_the_work_folder_is_left(
    photos: Path, out: Path, expected: dict[str, str]
) -> None:
    interrupt(photos, out, "staging.StagingDirectory.discard")
    (out / WORK_NAME / "state/sibling").write_bytes(b"photos")  # damaged, or planted
    source = tree(photos)
    with refused(UsageError):
        into(photos, out, seed=2)
    assert tree(out) == expected
    assert tree(photos) == source


@pytest.mark.parametrize("code", [errno.ENOTEMPTY, errno.EIO])
def test_a_power_cut_may_leave_the_new_dataset_in_both_places(
    photos: Path,
    out: Path,
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    interrupt(photos, out, "exchange.exchange")
    (hidden,) = out.parent.glob(".shardkit-*")
    shutil.copytree(hidden, out / WORK_NAME / "dataset")
    if code == errno.EIO:  # another error removes neither
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", fail)
            with pytest.raises(ConversionFailed, match=os.strerror(code)):
                into(photos, out, force=True)
        assert hidden.exists()
    into(photos, out, force=True)
    assert tree(out) == expected
    assert sorted(os.listdir(out.parent)) == ["expected", "out", "photos"]


def test_a_power_cut_may_leave_the_old_dataset_in_both_places(
    photos: Path, out: Path, expected: dict[str, str]
) -> None:
    interrupt(photos, out, "exchange.FolderExchange._return_others")
    (hidden,) = out.parent.glob(".shardkit-*")
    shutil.copytree(hidden, out / WORK_NAME / "old", copy_function=os.link)
    with refused(UsageError):
        into(photos, out, seed=2)
    assert tree(out) == expected
    assert sorted(os.listdir(out.parent)) == ["expected", "out", "photos"]


def test_another_command_finishes_an_exchange_that_was_interrupted(
    photos: Path, out: Path, expected: dict[str, str]
) -> None:
    for name in ("exchange", "remove_tree"):  # before it, and after it
        into(photos, out, seed=1, force=True)
        interrupt(photos, out, f"exchange.{name}")
        with refused(UsageError):
            into(photos, out, seed=2)
        assert tree(out) == expected
        assert sorted(os.listdir(out.parent)) == ["expected", "out", "photos"]


def interrupted(photos: Path, out: Path) -> Path:
    """Interrupt a conversion just before the exchange; return the hidden folder that it leaves."""
    interrupt(photos, out, "exchange.exchange")
    (hidden,) = out.parent.glob(".shardkit-*")
    return hidden


def test_a_hidden_folder_without_proof_is_left_alone(
    photos: Path, out: Path, expected: dict[str, str]
) -> None:
    """Earlier code linked the state after the move: killed between the two, it left this."""
    hidden = interrupted(photos, out)
    shutil.rmtree(hidden / WORK_NAME)
    before, old = tree(hidden), (out / "shardkit.json").read_bytes()
    with refused(UsageError, "force=True"):
        into(photos, out)
    assert (out / "shardkit.json").read_bytes() == old
    into(photos, out, force=True)  # it has no complete dataset, and must not publish an empty one
    assert tree(out) == expected
    assert tree(hidden) == before


def test_a_copy_of_an_interrupted_exchange_leaves_the_original_alone(
    photos: Path, out: Path, expected: dict[str, str]
) -> None:
    hidden = interrupted(photos, out)
    copy = Path(shutil.copytree(out, out.with_name("copy")))
    into(photos, copy, force=True)
    assert hidden.exists()
    assert tree(copy) == expected
    into(photos, out, force=True)
    assert tree(out) == expected
    assert not hidden.exists()
