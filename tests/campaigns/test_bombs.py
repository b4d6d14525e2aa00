"""Small files that state huge sizes: memory stays a small multiple of the file; nothing loops."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import make_dataset
from hostile import bombs
from hostile.forging import make_jpegs, restate

from shardkit import verify
from shardkit.dataset.index import ROW
from shardkit.dataset.index_builder import index_shard, open_records
from shardkit.dataset.manifest import Manifest
from shardkit.errors import CorruptShard
from shardkit.formats import webdataset
from shardkit.formats.hdf5 import Hdf5Reader
from shardkit.record import MAX_KEY_BYTES, Record
from shardkit.registry import get_format
from shardkit.system.files import sha256_of
from shardkit.system.npy import save_npy
from shardkit.verification.shard_check import MOST_FINDINGS

Make = Callable[[Path], Path]

BOMBS: dict[str, tuple[str, Make, str]] = {
    "keys that share a page": (
        "lmdb",
        lambda path: bombs.lmdb_sharing_a_page(path, rows=3000, value=1 << 20),
        "used twice",
    ),
    "a giant key of LMDB": (
        "lmdb",
        lambda path: bombs.lmdb_sharing_a_page(path, rows=1, value=1 << 20),
        "key of 1048576 bytes",
    ),
    "images that share a page": (
        "lmdb",
        lambda path: bombs.lmdb_sharing_a_page(path, rows=3000, value=1 << 20, field="jpg"),
        "used twice",
    ),
    "nodes that overlap": ("lmdb", bombs.lmdb_overlapping_nodes, "overlap"),
    "a key of LMDB that is too long": ("lmdb", bombs.lmdb_with_a_long_key, "key of 3000 bytes"),
    "a giant PAX header": (
        "webdataset",
        lambda path: bombs.tar_of_pax_records(path, headers=1, size=1 << 20),
        "header at byte 512 has 1048575 bytes",
    ),
    "a PAX header of many records": (
        "webdataset",
        lambda path: bombs.tar_of_pax_records(path, headers=1, size=60_000),
        "over 256 records",
    ),
    "many PAX headers": (
        "webdataset",
        lambda path: bombs.tar_of_pax_records(path, headers=100, size=50),
        "more than 8 headers",
    ),
    "a giant name": (
        "webdataset",
        lambda path: bombs.tar_with_a_long_name(path, 1 << 20),
        "header at byte 512 has",
    ),
    "a key that is too long": (
        "webdataset",
        lambda path: bombs.tar_with_a_long_name(path, MAX_KEY_BYTES + 1),
        f"key of {MAX_KEY_BYTES + 1} bytes",
    ),
    "rows without a key": (
        "hdf5",
        lambda path: bombs.hdf5_of_empty_rows(path, 300_000),
        "key of 0 bytes",
    ),
    "empty rows": (
        "hdf5",
        lambda path: bombs.hdf5_of_empty_rows(path, 300_000, key=b"k"),
        "at row 0",
    ),
    "a giant key": (
        "hdf5",
        lambda path: bombs.hdf5_of_empty_rows(path, 1, key=b"\x1b" * (1 << 20)),
        "key of 1048576 bytes",
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_in_little_memory_and_few_words(name: str, tmp_path: Path) -> None:
    to, make, reason = BOMBS[name]
    storage = get_format(to)
    path = make(tmp_path / f"bomb{storage.suffix}")
    tracemalloc.start()
    try:
        with pytest.raises(CorruptShard, match=reason) as caught:
            index_shard(storage, path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 3 * path.stat().st_size + (2 << 20)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) - len(str(path)) < 400


def test_a_pax_header_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was copied behind each record, which took time that grew with its square."""
    parsed = []

    class Counting:
        pattern = re.compile(webdataset._PAX_LENGTH.pattern)

        def match(self, text: bytes, start: int = 0) -> re.Match[bytes] | None:
            parsed.append((len(text), start))
            return self.pattern.match(text, start)

    monkeypatch.setattr(webdataset, "_PAX_LENGTH", Counting())
    path = bombs.tar_of_pax_records(tmp_path / "a.tar", headers=1, size=5 * 256)

    with open_records(webdataset.FORMAT, path) as records:
        assert len(records) == 1
    assert parsed == [(5 * 256, 5 * number) for number in range(256)]


def test_opening_hdf5_of_many_rows_takes_memory_for_its_numbers_alone(tmp_path: Path) -> None:
    path = bombs.hdf5_of_empty_rows(tmp_path / "a.h5", 300_000, key=b"k")
    tracemalloc.start()
    try:
        reader = Hdf5Reader(path)
        assert len(reader) == 300_000
        assert reader.ranges()[299_999] == {"jpg": (0, 0), "json": (0, 0)}
        peak = tracemalloc.get_traced_memory()[1]
        reader.close()
    finally:
        tracemalloc.stop()

    assert peak < 3 * path.stat().st_size


def test_verify_ends_after_many_damaged_records(tmp_path: Path) -> None:
    place = make_dataset(make_jpegs(tmp_path / "s"), tmp_path / "d", to="hdf5")
    rows = MOST_FINDINGS + 500

    def state(manifest: Manifest) -> Manifest:
        shard = manifest.shards[0]
        path = place / shard.name
        path.unlink()
        bombs.hdf5_of_empty_rows(path, rows, key=b"k")
        shard = replace(shard, bytes=path.stat().st_size, sha256=sha256_of(path), rows=rows)
        return replace(manifest, rows=rows, shards=(shard,))

    restate(place, state)
    save_npy(place / "index/rows.npy", np.zeros(rows, ROW))
    found = [f for f in verify(place).findings if f.file.endswith(".h5")]

    assert len([f for f in found if f.row is not None]) == MOST_FINDINGS
    assert f"after record {MOST_FINDINGS} were not checked" in found[0].reason


def test_a_key_that_no_path_can_have_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 16384"):
        Record("k" * (MAX_KEY_BYTES + 1), {"jpg": b""})
