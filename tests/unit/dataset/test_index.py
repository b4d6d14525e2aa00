"""The index: frozen bytes, checksums of all values, also of rows that are read from its file."""

from __future__ import annotations

import errno
import io
import itertools
import os
import pickle
import zlib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from helpers import copy_dataset, make_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from shardkit import Field
from shardkit.changes.layered import relabeled
from shardkit.dataset import index_reader
from shardkit.dataset.index import (
    HEAD,
    ROW,
    ROWS_NAME,
    Index,
    IndexSegment,
    Rows,
    StringTable,
    as_rows,
    checksum,
    damaged_rows,
    join_segments,
    pack_row,
    row_check,
    save_index,
)
from shardkit.dataset.shardset import open_shards
from shardkit.errors import CorruptDataset, CorruptShard
from shardkit.kinds.column import build_column, pack_value
from shardkit.kinds.field import Packed

NAMES = [
    "index/rows.npy",
    "index/keys.npy",
    "index/keys-ends.npy",
    "index/paths.npy",
    "index/paths-ends.npy",
]


def make_segment(rows: int = 3) -> IndexSegment:
    return IndexSegment(
        as_rows(
            pack_row(offset=n, image=b"x" * n, label=n, size=(n + 1, n + 2), field="png")
            for n in range(rows)
        ),
        [f"key{n}" for n in range(rows)],
        [f"päth {n}\udcff" for n in range(rows)],
    )


def open_all(directory: Path, rows: int = 3) -> tuple[Any, list[str], list[str]]:
    index = Index(directory, rows)
    return index.rows(), list(index.keys()), list(index.paths())


def table_of(texts: list[str]) -> StringTable:
    encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
    ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
    return StringTable(np.frombuffer(b"".join(encoded), np.uint8), ends)


def test_the_layout_of_a_row_is_frozen() -> None:
    assert ROW.itemsize == 32
    assert {name: (ROW[name].str, ROW.fields[name][1]) for name in ROW.names or ()} == {  # type: ignore[index]
        "offset": ("<i8", 0),
        "length": ("<u4", 8),
        "checksum": ("<u4", 12),
        "label": ("<i4", 16),
        "width": ("<u4", 20),
        "height": ("<u4", 24),
        "field": ("|u1", 28),
        "check": ("|V3", 29),
    }
    row = pack_row(offset=0x0102, image=b"image", label=7, size=(8, 9), field="png")
    head = bytes.fromhex("07000000 08000000 09000000 01")
    crc = zlib.crc32(head + b"image").to_bytes(4, "little")
    start = bytes.fromhex("0201000000000000 05000000") + crc + head
    assert row == start + zlib.crc32(start).to_bytes(4, "little")[:3]


def test_a_row_detects_each_of_its_flipped_bits() -> None:
    row = pack_row(offset=0x0102, image=b"image", label=7, size=(8, 9), field="png")
    assert row_check(row) == row[29:]
    for bit in range(8 * 29):
        damaged = bytearray(row)
        damaged[bit // 8] ^= 1 << bit % 8
        assert row_check(damaged) != row[29:]


def test_the_checksum_covers_label_width_height_and_field() -> None:
    (row,) = as_rows([pack_row(offset=1, image=b"image", label=7, size=(8, 9), field="jpg")])
    head = row.tobytes()[HEAD]
    assert checksum(head, b"image") == row["checksum"] != checksum(head, b"imagf")
    for at in range(len(head)):
        changed = bytearray(head)
        changed[at] ^= 1
        assert checksum(bytes(changed), b"image") != row["checksum"]


def test_an_index_survives_a_round_trip(tmp_path: Path) -> None:
    segment = make_segment()
    assert save_index([segment], tmp_path) == NAMES
    rows, keys, paths = open_all(tmp_path)
    assert rows.tobytes() == segment.rows.tobytes()
    assert (keys, paths) == (segment.keys, segment.paths)


def test_parts_are_concatenated(tmp_path: Path) -> None:
    save_index([make_segment(2), make_segment(0), make_segment(3)], tmp_path)
    rows, keys, _ = open_all(tmp_path, 5)
    assert rows["label"].tolist() == [0, 1, 0, 1, 2]
    assert keys == ["key0", "key1", "key0", "key1", "key2"]


def test_columns_are_written_part_by_part(tmp_path: Path) -> None:
    """Also if only a later part shows that rows may lack a value."""
    schema: dict[str, Field] = {
        "image": Field("image"),
        "caption": Field("text"),
        "weight": Field("number", "float32"),
        "boxes": Field("boxes", classes=3),
    }
    box = pack_value(schema["boxes"], [[0, 1, 2, 3, 2]])
    values: list[list[Packed | None]] = [
        [Packed(b"one"), Packed(b"")],
        [],
        [None, Packed(b"three")],
        [Packed(b"four")],
    ]
    segments = []
    for texts in values:
        columns = {
            "caption": build_column(schema["caption"], texts),
            "weight": build_column(schema["weight"], [Packed(bytes(4))] * len(texts)),
            "boxes": build_column(schema["boxes"], [box] * len(texts)),
        }
        segments.append(make_segment(len(texts))._replace(columns=columns))
    for name, saved in (("pieces", segments), ("whole", [join_segments(segments, schema)])):
        (tmp_path / name).mkdir()
        names = save_index(saved, tmp_path / name, schema)
        assert "index/columns/caption-present.npy" in names
        assert "index/columns/weight-present.npy" not in names
    for file in names:
        assert (tmp_path / "pieces" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    found = Index(tmp_path / "pieces", 5, schema).segment()
    assert [found.columns["caption"].value(row) for row in range(5)] == [
        *("one", "", None, "three", "four"),
    ]


def test_an_index_of_no_rows_is_an_index(tmp_path: Path) -> None:
    for segments in (0, 1, 3):
        save_index([make_segment(0)] * segments, tmp_path)
        rows, keys, paths = open_all(tmp_path, 0)
        assert (len(rows), keys, paths) == (0, [], [])


def test_strings_are_found_from_either_end() -> None:
    table = table_of(["a", "", "ccc", "d"])
    assert len(table) == 4
    assert [table[n] for n in range(-4, 4)] == ["a", "", "ccc", "d"] * 2
    assert list(reversed(table)) == ["d", "ccc", "", "a"]
    assert table.index("ccc") == 2
    assert ("d" in table, "x" in table) == (True, False)
    assert (table[1:3], table[::-1], table[5:]) == (["", "ccc"], ["d", "ccc", "", "a"], [])
    assert table[np.int64(-1)] == "d"  # type: ignore[call-overload]
    for row in (4, -5, 2**40, -(2**70)):
        with pytest.raises(IndexError):
            table[row]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=6).map(lambda b: b.decode("utf-8", "surrogateescape"))))
def test_any_strings_survive_a_round_trip(texts: list[str]) -> None:
    assert list(table_of(texts)) == texts


def refuses(directory: Path, name: str = ROWS_NAME) -> None:
    """Expect an error that names a file and the remedy."""
    with pytest.raises(CorruptDataset, match=rf"{name}.*shardkit index"):
        open_all(directory)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_or_truncated_file_is_refused_with_the_remedy(tmp_path: Path, name: str) -> None:
    save_index([make_segment()], tmp_path)
    good = (tmp_path / name).read_bytes()
    for length in range(len(good)):
        (tmp_path / name).write_bytes(good[:length])
        refuses(tmp_path, "index/")
    (tmp_path / name).unlink()
    refuses(tmp_path, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_header_is_refused_or_harmless(tmp_path: Path, name: str) -> None:
    save_index([make_segment()], tmp_path)
    expected = open_all(tmp_path)
    good = (tmp_path / name).read_bytes()
    escaped = []
    header = 256 if name == ROWS_NAME else 128
    for at, flip in itertools.product(range(header), (0x01, 0x10, 0x71)):
        bad = bytearray(good)
        bad[at] ^= flip
        (tmp_path / name).write_bytes(bad)
        try:
            rows, keys, paths = open_all(tmp_path)
        except CorruptDataset:
            continue
        except Exception as error:
            escaped.append((at, flip, repr(error)))
            continue
        assert rows.tobytes() == expected[0].tobytes()
        assert (keys, paths) == expected[1:]
    assert escaped == []


def test_a_wrong_number_of_rows_is_refused(tmp_path: Path) -> None:
    save_index([make_segment()], tmp_path)
    for rows in (0, 2, 4, 10**30):
        for use in (Index.rows, Index.keys, Index.paths):
            with refused(CorruptDataset, rows):
                use(Index(tmp_path, rows))


OTHERS = [
    np.zeros(3, np.int64),
    np.zeros((3, 1), ROW),
    np.zeros((), ROW),
    np.zeros(3, ROW.newbyteorder(">")),
    np.zeros(3, "V32"),
]


def test_columns_of_another_type_or_shape_are_refused(tmp_path: Path) -> None:
    save_index([make_segment()], tmp_path)
    open_all(tmp_path)
    ends = [np.array([4, 8, 13]), np.array([4.0, 8.0, 12.0]), np.array([8, 4, 12])]
    columns = [*((ROWS_NAME, column) for column in OTHERS)]
    for name, column in [*columns, *(("index/keys-ends.npy", column) for column in ends)]:
        good = (tmp_path / name).read_bytes()
        np.save(tmp_path / name, column)
        refuses(tmp_path, "index")
        (tmp_path / name).write_bytes(good)
        open_all(tmp_path)


class Trap:
    """Leaves a trace if it is unpickled."""

    sprung: list[int] = []  # noqa: RUF012 - shared on purpose

    def __reduce__(self) -> tuple[Any, ...]:
        return Trap.sprung.append, (1,)


def test_other_files_in_place_of_a_column_are_refused_and_not_loaded(tmp_path: Path) -> None:
    save_index([make_segment()], tmp_path)
    pickled, zipped = io.BytesIO(), io.BytesIO()
    np.save(pickled, np.array([Trap()] * 3, object), allow_pickle=True)
    np.savez(zipped, rows=make_segment().rows)
    others = [
        pickled.getvalue(),
        pickle.dumps(Trap()),
        zipped.getvalue(),
        b"PK\x03\x04 and no more",
    ]
    for content in others:
        (tmp_path / ROWS_NAME).write_bytes(content)
        refuses(tmp_path)
    assert Trap.sprung == []
    (tmp_path / ROWS_NAME).unlink()
    (tmp_path / ROWS_NAME).mkdir()
    refuses(tmp_path)


def test_strings_truncated_after_opening_are_damage(tmp_path: Path) -> None:
    save_index([make_segment()], tmp_path)
    keys = Index(tmp_path, 3).keys()
    os.truncate(tmp_path / "index/keys.npy", 130)
    with pytest.raises(CorruptDataset, match="truncated"):
        keys[2]


# Entries with the labels of a layer.

LENGTHS = (0, 1, 7, 255, 256, 65537)


def entries(labels: list[int]) -> Rows:
    rng = np.random.default_rng(3)
    images = [rng.bytes(length) for length in LENGTHS]
    return as_rows(
        pack_row(offset=n * 9, image=image, label=label, size=(n + 1, 300), field="png")
        for n, (image, label) in enumerate(zip(images, labels, strict=True))
    )


@pytest.mark.parametrize("new", [[5, 0, -1, 3, 2, 1 << 19], [-1] * 6, [1, 2, 3, 1, 2, 3]])
def test_other_labels_give_the_entries_of_a_conversion_with_these_labels(new: list[int]) -> None:
    old = entries([1, 2, 3, 1, 2, 3])
    assert relabeled(old, entries(new)).tobytes() == entries(new).tobytes()
    assert old.tobytes() == entries([1, 2, 3, 1, 2, 3]).tobytes()


def test_no_labels_remove_them() -> None:
    assert relabeled(entries([1] * 6), None).tobytes() == entries([-1] * 6).tobytes()


def test_a_damaged_entry_stays_damaged() -> None:
    old, new = entries([1] * 6).copy(), entries([2] * 6).copy()
    old["width"][1] += 1
    new["label"][3] = 7
    found = damaged_rows(relabeled(old, new))
    assert np.flatnonzero(found).tolist() == [1, 3]


# Rows of an index that is too large for memory are read from its file: the same rows.


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
