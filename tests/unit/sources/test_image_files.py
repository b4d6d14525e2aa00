"""Files are read whole, although the system may return fewer bytes than requested."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from helpers import jpeg, make_tree

from shardkit.conversion.convert import commit, plan_jobs
from shardkit.conversion.work import work
from shardkit.errors import BadImage, ConversionFailed
from shardkit.sources.image_files import read_file


def read(path: Path, size: int | None = None) -> bytes:
    status = os.stat(path)
    return read_file(str(path), status.st_size if size is None else size, status.st_mtime_ns)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the reads, of which each returns at most 100 bytes."""
    sizes, whole = list[int](), os.read

    def read_some(descriptor: int, size: int) -> bytes:
        sizes.append(size)
        return whole(descriptor, min(size, 100))

    monkeypatch.setattr(os, "read", read_some)
    return sizes


def test_short_reads_are_continued(tmp_path: Path, pieces: list[int]) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(data := jpeg())

    assert read(path) == data
    assert pieces == [len(data) + 1 - start for start in range(0, len(data), 100)]


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_has_changed(tmp_path: Path, pieces: list[int], change: int) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(data := jpeg())

    with pytest.raises(BadImage, match="changed"):
        read(path, len(data) + change)


@pytest.mark.parametrize("gone", ["moved", "emptied"])
def test_a_source_that_is_gone_ends_a_conversion_that_skips_bad_files(
    tmp_path: Path, gone: str
) -> None:
    photos = make_tree(tmp_path / "photos", {f"a/{n}.jpg": jpeg(seed=n) for n in range(4)})
    plan_jobs(photos, tmp_path / "ready", to="lmdb", on_error="skip")
    shutil.move(photos / "a", tmp_path / "a")
    if gone == "emptied":
        (photos / "a").mkdir()
    with pytest.raises(ConversionFailed, match=r"a is missing or empty.*Mount or restore it"):
        work(tmp_path / "ready", task=0)

    shutil.rmtree(photos / "a", ignore_errors=True)
    shutil.move(tmp_path / "a", photos / "a")
    (photos / "a" / "3.jpg").unlink()  # one file may be left out
    work(tmp_path / "ready", task=0)
    assert commit(tmp_path / "ready").manifests[""].rows == 3
