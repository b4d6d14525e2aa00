"""Files are read whole, although the system may return fewer bytes than requested."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers import invoke, jpeg, make_tree
from refusals import refuses

from shardkit import open_dataset, open_source
from shardkit.errors import BadImage


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
    data = jpeg()
    images = scanned(make_tree(tmp_path / "photos", {"a.jpg": data}))

    assert images.read([0])[0].fields["jpg"] == data
    assert len(data) > 200
    assert pieces == [len(data) + 1 - start for start in range(0, len(data), 100)]


def test_a_file_of_another_size_has_changed(tmp_path: Path, pieces: list[int]) -> None:
    data = jpeg()
    images = scanned(make_tree(tmp_path / "photos", {"a.jpg": data}))
    path = tmp_path / "photos/a.jpg"
    before = path.stat().st_mtime_ns
    for changed in (data[:-1], data + b"\0"):
        path.write_bytes(changed)
        os.utime(path, ns=(before, before))
        with pytest.raises(BadImage, match="changed"):
            images.read([0])


def scanned(photos: Path) -> Any:
    """Return the images of a folder, listed before the next reads."""
    (images,) = open_source("imagefolder", photos).scan().splits.values()
    return images


@pytest.mark.parametrize("gone", ["moved", "emptied"])
def test_a_source_that_is_gone_ends_a_conversion_that_skips_bad_files(
    tmp_path: Path, gone: str
) -> None:
    photos = make_tree(tmp_path / "photos", {f"a/{n}.jpg": jpeg(seed=n) for n in range(4)})
    ready = tmp_path / "ready"
    words = ("convert", "imagefolder", photos, ready, "--to", "lmdb", "--on-error", "skip")
    assert invoke(*words, "--plan-only").exit_code == 0
    shutil.move(photos / "a", tmp_path / "a")
    if gone == "emptied":
        (photos / "a").mkdir()
    refuses(1, "work", ready, "--task", 0, facts=("photos/a ",))

    shutil.rmtree(photos / "a", ignore_errors=True)
    shutil.move(tmp_path / "a", photos / "a")
    (photos / "a" / "3.jpg").unlink()  # one file may be left out
    assert invoke("work", ready, "--task", 0).exit_code == 0
    assert invoke("commit", ready).exit_code == 0
    assert len(open_dataset(ready)) == 3
