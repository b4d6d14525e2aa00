"""A temporary folder lasts as long as its object."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
from pathlib import Path

import pytest
from helpers import make_tree
from refusals import refused

from shardkit.errors import DiskFull
from shardkit.system.temporary import TemporaryBytes, TemporaryFolder, full_disk_named


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
