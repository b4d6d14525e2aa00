"""Cold files: their pages are dropped, and what stayed is seen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardkit.measure.runner.page_cache import drop, resident
from shardkit.system.machine import filesystem

MiB = 1 << 20


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "fsync", os.fdatasync)  # pages stay until they are written back
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * MiB))
    return path


def test_a_file_that_was_read_is_cached(file: Path) -> None:
    file.read_bytes()

    assert resident([file]) == 1.0


def test_pages_are_dropped_and_come_back(file: Path) -> None:
    if filesystem(file)[0] in ("tmpfs", "ramfs"):
        pytest.skip("this file system is memory")
    drop([file])
    dropped = resident([file])
    file.read_bytes()

    assert dropped is not None
    assert dropped < 0.1
    assert resident([file]) == 1.0


def test_the_fraction_is_of_all_pages(tmp_path: Path, file: Path) -> None:
    if filesystem(file)[0] in ("tmpfs", "ramfs"):
        pytest.skip("this file system is memory")
    other = tmp_path / "other"
    other.write_bytes(bytes(4 * MiB))
    drop([file])
    other.read_bytes()

    assert resident([file, other]) == pytest.approx(0.52, abs=0.08)


def test_nothing_and_empty_files_have_no_pages(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()

    drop([tmp_path / "empty"])

    assert resident([]) == resident([tmp_path / "empty"]) == 0.0


def test_files_of_other_owners_are_unknown(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: file.stat().st_uid + 1)
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK)

    assert resident([file]) is None


def test_a_file_that_cannot_be_mapped_is_unknown(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no such device")

    monkeypatch.setattr("mmap.mmap", refuse)

    assert resident([file]) is None
