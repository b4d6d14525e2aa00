"""Rows of an index that is too large for memory are read from its file: the same rows."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from helpers import copy_dataset, make_folder

from shardkit import CorruptDataset
from shardkit.dataset import index_reader
from shardkit.dataset.index import ROWS_NAME
from shardkit.dataset.shardset import open_shards
from shardkit.errors import CorruptShard


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return copy_dataset(make_folder(tmp_path / "photos", each=20), tmp_path / "made")


@pytest.mark.parametrize("span", [1, 100], ids=["each", "at once"])
def test_rows_are_those_of_the_file(
    place: Path, monkeypatch: pytest.MonkeyPatch, span: int
) -> None:
    held = open_shards(place).entries
    monkeypatch.setattr(index_reader, "_HELD", 0)
    monkeypatch.setattr(index_reader, "_SPAN", span)
    monkeypatch.setattr(index_reader, "_AT_ONCE", 7)
    read = open_shards(place).entries
    for rows in ([], [3], [39, 0, 17, 17], list(range(40))):
        wanted = np.array(rows, np.int64)
        assert read.read(wanted).tobytes() == held.read(wanted).tobytes()
    assert read.labels().tolist() == held.labels().tolist()


@pytest.mark.parametrize(("span", "reads"), [(100, 1), (0, 4)])
def test_rows_that_lie_close_together_take_one_read(
    place: Path, monkeypatch: pytest.MonkeyPatch, span: int, reads: int
) -> None:
    monkeypatch.setattr(index_reader, "_HELD", 0)
    monkeypatch.setattr(index_reader, "_SPAN", span)
    entries = open_shards(place).entries
    monkeypatch.setattr(os, "pread", spy := Mock(wraps=os.pread))
    entries.read(np.array([3, 9, 17, 30]))
    assert spy.call_count == reads


def test_a_truncated_file_is_damage_and_a_restored_one_is_read(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_reader, "_HELD", 0)
    entries = open_shards(place).entries
    content = (place / ROWS_NAME).read_bytes()
    (place / ROWS_NAME).write_bytes(content[:-100])
    with pytest.raises(CorruptShard):
        entries.read(np.array([39]))
    (place / ROWS_NAME).write_bytes(content)
    assert len(entries.read(np.array([39]))) == 1


def test_a_large_index_is_hashed_only_on_request(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_reader, "_HASHED", 300)  # less than rows.npy has
    rows = np.load(place / ROWS_NAME)
    rows[[1, 2]] = rows[[2, 1]]
    np.save(place / ROWS_NAME, rows)
    assert len(open_shards(place).rows) == 40
    with pytest.raises(CorruptDataset, match="SHA-256"):
        open_shards(place, verify=True).rows  # noqa: B018


def test_the_index_is_mapped_lazily(place: Path) -> None:
    shards = open_shards(place)
    assert not {"rows", "keys", "paths"} & vars(shards).keys()
    assert isinstance(shards.rows.base, np.memmap)


def test_a_disk_error_while_hashing_the_index_names_the_file(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO), ROWS_NAME))
    monkeypatch.setattr(index_reader, "sha256_of", failing)
    with pytest.raises(OSError, match=f"Input/output error: '{ROWS_NAME}'"):
        _ = open_shards(place).rows
