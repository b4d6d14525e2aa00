"""The baseline reads as ImageFolder does; the environment is stated, and cold files are cold."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import jpeg, make_folder, make_tree
from PIL import Image
from refusals import refused

import shardkit
from shardkit import CenterCrop, Resize
from shardkit.errors import BadImage, UsageError
from shardkit.measure.runner.environment import LIBRARIES, environment
from shardkit.measure.runner.folder import PlainFolder
from shardkit.measure.runner.page_cache import drop, resident
from shardkit.system.machine import filesystem, usable_cpus


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "photos", each=3)


def test_images_and_labels_match_the_files(photos: Path) -> None:
    dataset = PlainFolder(photos, "pil")

    assert len(dataset) == 6
    for row, (path, label) in enumerate(dataset.samples):
        assert dataset[row][0].tobytes() == Image.open(path).convert("RGB").tobytes()
        assert dataset[row][1] == label == ["cat", "dog"].index(Path(path).parent.name)


@pytest.mark.parametrize(
    ("operation", "box", "size"),
    [(CenterCrop(12), (4, 3, 16, 15), None), (Resize((30, 40)), None, (40, 30))],
)
def test_crops_equal_pillows(tmp_path: Path, operation: Any, box: Any, size: Any) -> None:
    make_tree(tmp_path / "one", {"a/0.jpg": jpeg(20, 18)})
    found, _ = PlainFolder(tmp_path / "one", operation)[0]
    expected = Image.open(tmp_path / "one/a/0.jpg").convert("RGB")
    expected = expected.crop(box) if box else expected
    if size:
        expected = expected.resize(size, Image.Resampling.BILINEAR)

    assert np.array_equal(found.permute(1, 2, 0).numpy(), np.array(expected))


def test_the_error_names_a_damaged_image(tmp_path: Path) -> None:
    content = jpeg(64, 64)
    make_tree(tmp_path / "bad", {"a/0.jpg": content[: len(content) // 3]})

    with refused(BadImage, "0.jpg"):
        PlainFolder(tmp_path / "bad", "pil")[0]


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no images"):
        PlainFolder(make_tree(tmp_path / "empty", {}), "pil")


# The environment in reports.


def test_machine_and_versions_are_reported() -> None:
    where = json.loads(json.dumps(environment()))

    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", where["date"])
    assert where["processors"] == usable_cpus()
    assert where["memory"] > 1 << 20
    assert where["versions"]["shardkit"] == shardkit.__version__
    assert set(where["versions"]) > {*LIBRARIES, "compiled module"}
    assert all(where["versions"].values())


# Cold files: their pages are dropped, and what stayed is seen.

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
