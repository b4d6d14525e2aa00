"""A temporary folder lasts as long as its object."""

from __future__ import annotations

import errno
import os

import pytest
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
