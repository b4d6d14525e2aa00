from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import re
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from unittest.mock import Mock

import pytest
from helpers import make_folder, make_tree, tree
from interrupting import interrupt_everywhere
from refusals import refused

from shardkit import ShardkitError, repair
from shardkit.errors import DiskFull, UsageError
from shardkit.system import files, safe_paths
from shardkit.system import scratch as module
from shardkit.system.files import (
    Appender,
    Reservation,
    free_bytes,
    open_regular,
    published,
    read_small,
    require_local,
    sha256_of,
    sync,
    write_all,
    write_atomically,
)
from shardkit.system.scratch import scratch
from shardkit.system.temporary import TemporaryBytes, TemporaryFolder, full_disk_named
from shardkit.system.user_files import write_result
from shardkit.verification.reindex import reindex


def test_a_file_appears_complete(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with published(path) as temporary:
        temporary.write_bytes(b"half")
        assert not path.exists()
    assert path.read_bytes() == b"half"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt(), SystemExit()])
def test_a_failure_is_raised_and_leaves_the_old_file(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def write(content: bytes | None) -> None:
        with published(path) as temporary:
            if content is not None:
                temporary.write_bytes(content)
            raise error

    for content in (None, b"new"):
        with pytest.raises(type(error)) as caught:
            write(content)
        assert caught.value is error
        assert path.read_bytes() == b"old"
        assert os.listdir(tmp_path) == ["a"]


def test_writing_replaces_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for content in (b"one", b"", b"two"):
        write_atomically(path, content)
        assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["a"]


def test_content_is_synced_before_the_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    replace, synced = Path.replace, files.sync

    def note_sync(path: Path) -> None:
        seen.append(f"sync {path.name}")
        synced(path)

    def note_replace(self: Path, target: Path) -> Path:
        seen.append(f"replace {target.name}")
        return replace(self, target)

    monkeypatch.setattr(files, "sync", note_sync)
    monkeypatch.setattr(Path, "replace", note_replace)
    write_atomically(tmp_path / "a", b"x")
    assert re.fullmatch(r"sync \.a\.[0-9a-f]{16}\.tmp", seen.pop(0))
    assert seen == ["replace a", f"sync {tmp_path.name}"]


def test_the_sha256_is_correct(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for size in (0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20):
        content = (b"0123456789abcde" * (size // 15 + 1))[:size]
        path.write_bytes(content)
        assert sha256_of(path) == hashlib.sha256(content).hexdigest()


def test_files_and_folders_can_be_synced(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    sync(tmp_path / "a")
    sync(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync(tmp_path / "missing")


def test_free_space_uses_the_nearest_existing_folder(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "not" / "yet") > 0
    assert free_bytes(Path("not/yet")) > 0


@pytest.mark.parametrize("largest", [1 << 30, 7, 1])
def test_pieces_are_appended_in_order_despite_partial_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest: int
) -> None:
    """A nearly full disk, or a signal, causes a partial write."""

    def write_some(descriptor: int, content: bytes) -> int:
        return written(descriptor, bytes(content)[:largest])

    def writev_some(descriptor: int, pieces: list[bytes]) -> int:
        return write_some(descriptor, b"".join(pieces))

    written = os.write
    monkeypatch.setattr(os, "write", write_some)
    monkeypatch.setattr(os, "writev", writev_some)
    monkeypatch.setattr(files, "_BLOCK", 100)
    monkeypatch.setattr(files, "_PIECES", 5)
    pieces = [bytes([n]) * (n % 43) for n in range(250)]
    with (tmp_path / "a").open("xb", buffering=0) as file:
        appender = Appender(file.fileno())
        appender.append(*pieces[:12])
        for piece in pieces[12:]:
            appender.append(piece)
        assert appender.size == sum(map(len, pieces))
        appender.flush()
        appender.flush()
        write_all(file.fileno(), b"end")
    assert (tmp_path / "a").read_bytes() == b"".join(pieces) + b"end"


def test_a_full_disk_is_an_error_of_appending() -> None:
    with open("/dev/full", "wb", buffering=0) as file:
        appender = Appender(file.fileno())
        appender.append(b"some")
        with refused(OSError):
            appender.flush()
        with refused(OSError):
            write_all(file.fileno(), b"some")


def test_small_regular_files_are_read_completely_and_others_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for size in (0, 1, 100):
        path.write_bytes(b"x" * size)
        assert read_small(path, 100) == b"x" * size
    path.write_bytes(b"x" * 101)
    with pytest.raises(OSError, match="100 bytes"):
        read_small(path, 100)
    os.truncate(path, 1 << 40)  # too large to be read at all
    with pytest.raises(OSError, match="larger"):
        read_small(path)
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with refused(OSError):
            read_small(other)


URLS = ("s3://bucket/x", "gs://b/x", "az://b", "https://host/x", "file:///x", "s3:/collapsed")
PATHS = ("photos", "./a:b", "/x/s3:/y", "C:/x", "a:b")


def test_urls_are_told_from_local_paths_and_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_refused(path: str) -> bool:
        with suppress(UsageError):
            require_local(path)
            return False
        return True

    assert [path for path in URLS + PATHS if is_refused(path)] == [*URLS]
    monkeypatch.chdir(tmp_path)
    photos = make_folder(tmp_path / "photos", each=1)
    before = tree(tmp_path)
    for call in (lambda: reindex("s3://b/x"), lambda: repair("s3://b/x", photos)):
        with refused(UsageError, "s3://b/x", "URL"):
            call()
    assert tree(tmp_path) == before


def test_a_requested_file_is_written_and_what_a_kill_left_is_removed(tmp_path: Path) -> None:
    left, other = (tmp_path / f".{name}.tmp" for name in ("r." + "0" * 16, "s." + "2" * 16))
    for path in (left, other):
        path.write_bytes(b"")
    with files.published_file(tmp_path / "r") as file:  # of a process that runs
        file.write(b"later")
        write_result(tmp_path / "r", b"text")
        assert (tmp_path / "r").read_bytes() == b"text"
        assert not left.exists()
    assert (tmp_path / "r").read_bytes() == b"later"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["r", other.name])


def test_without_locks_only_an_old_file_counts_as_left_by_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    old, new = (tmp_path / f".r.{digit * 16}.tmp" for digit in "01")
    for path in (old, new):
        path.write_bytes(b"")
    os.utime(old, (0, 0))
    write_result(tmp_path / "r", b"text")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["r", new.name])


def test_a_requested_file_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path) -> None:
    with refused(ShardkitError, "new/r"):
        write_result(tmp_path / "new" / "r", b"text")


def test_an_exchange_that_the_system_refuses_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="one"):
        files.exchange(tmp_path, "one", "two")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EOPNOTSUPP])
def test_a_reservation_fails_only_for_lack_of_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    made: list[IO[bytes]] = []

    def make(**options: Any) -> IO[bytes]:
        made.append(temporary(**options))
        return made[0]

    def allocate(*_: object) -> int:
        ctypes.set_errno(code)
        return -1

    temporary = tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", make)
    monkeypatch.setattr(files, "_C", Mock(fallocate64=allocate))
    if code == errno.EOPNOTSUPP:
        Reservation(tmp_path, 1 << 20).close()
    else:
        with pytest.raises(OSError, match=os.strerror(code)):
            Reservation(tmp_path, 1 << 20)
    assert made[0].closed


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # closed, as it warns
def test_an_interruption_closes_no_file_twice(tmp_path: Path) -> None:
    """A second time would fail, or close a file that another thread opened."""
    make_tree(tmp_path, {"a/file": b""})
    path = tmp_path / "a/file"
    points = interrupt_everywhere(lambda: open_regular(path, tmp_path).close(), files, safe_paths)
    assert points > 10


# A temporary folder lasts as long as its object.


def test_a_folder_is_removed_with_its_object() -> None:
    folder = TemporaryFolder()
    path = folder.path
    (path / "file").touch()
    assert path.stat().st_mode & 0o077 == 0
    del folder
    assert not path.exists()


def test_folders_of_killed_processes_are_removed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    theirs = make_tree(tmp_path, {"shardkit-training/x": b"1"}) / "shardkit-training"
    used = TemporaryFolder()
    child = os.fork()
    if not child:
        make_tree(TemporaryFolder().path, {"deep/file": b"2"})
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(os.listdir(tmp_path)) == 3
    with TemporaryFolder() as folder:
        assert set(tmp_path.iterdir()) == {theirs, used.path, folder}
    assert set(tmp_path.iterdir()) == {theirs, used.path}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def full(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", full)
    with refused(DiskFull, "TMPDIR"):
        TemporaryBytes().append(b"x")


def test_other_errors_are_not_renamed() -> None:
    with pytest.raises(PermissionError), full_disk_named():
        raise PermissionError(errno.EACCES, "no")


# Buffers are lent again, unless they are too large to keep.


def test_a_buffer_is_lent_again_unless_it_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    free: list[memoryview] = []
    monkeypatch.setattr(module, "_FREE", free)
    monkeypatch.setattr(module, "_KEEP", 1 << 16)
    with scratch(100) as small:
        assert len(small) >= 100
    assert free == [small]
    with scratch(1 << 16) as again:
        assert again is small
    with scratch((1 << 16) + 1) as large:
        assert len(large) > 1 << 16
    assert free == []
