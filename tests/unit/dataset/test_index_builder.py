"""Build the index of any finished shard."""

from __future__ import annotations

import contextlib
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from shardkit.contracts import Format, Range, ShardSpec
from shardkit.dataset import other_fields
from shardkit.dataset.index import checksum
from shardkit.dataset.index_builder import ShardRecords, index_shard, open_records
from shardkit.errors import CorruptShard
from shardkit.formats.lmdb import LmdbReader
from shardkit.formats.ranges import RangeReader, reads_its_ranges
from shardkit.kinds.field import Field, describe_schema
from shardkit.record import Record, checksums, dump_json
from shardkit.registry import format_names, get_format
from shardkit.system import compiled
from shardkit.testing import write_shard


@pytest.fixture(params=format_names())
def storage(request: pytest.FixtureRequest) -> Format:
    return get_format(request.param)


def make_record(number: int, **changed: bytes | None) -> Record:
    fields: dict[str, bytes | None] = {
        "png": b"image %d" % number * (number + 1),
        "cls": b"%d" % number,
        "json": dump_json({"path": f"a/{number}.png", "width": number + 3, "height": 7}),
        **changed,
    }
    return Record(f"a/{number}", {name: part for name, part in fields.items() if part is not None})


def write(storage: Format, path: Path, records: list[Record]) -> Path:
    writer = storage.write(path, ShardSpec(meta={"made": "here"}))
    for record in records:
        writer.write(record)
    writer.close()
    return path


def test_the_index_locates_and_describes_each_image(storage: Format, tmp_path: Path) -> None:
    records = [make_record(number) for number in range(5)]
    path = write(storage, tmp_path / "shard", records)
    part = index_shard(storage, path)
    content = path.read_bytes()
    assert part.keys == [record.key for record in records]
    assert part.paths == [f"a/{number}.png" for number in range(5)]
    assert part.rows["label"].tolist() == list(range(5))
    assert part.rows["width"].tolist() == [3, 4, 5, 6, 7]
    assert part.rows["height"].tolist() == [7] * 5
    for row, record in zip(part.rows, records, strict=True):
        image = record.fields["png"]
        start = int(row["offset"])
        assert content[start : start + int(row["length"])] == image
        assert row["checksum"] == checksum(row.tobytes()[16:29], image)
        assert row["field"] == 1


def test_each_record_is_shown_once_in_order(storage: Format, tmp_path: Path) -> None:
    records = [make_record(number) for number in range(70)]  # more than are read at a time
    seen: list[tuple[str, int]] = []

    def see(keys: Sequence[str], sums: Sequence[int]) -> None:
        seen.extend(zip(keys, sums, strict=True))

    part = index_shard(storage, write(storage, tmp_path / "shard", records), see)
    assert [key for key, _ in seen] == part.keys == [record.key for record in records]
    assert [checksum for _, checksum in seen] == checksums(records)


def test_a_record_without_a_label_has_none_in_the_index(storage: Format, tmp_path: Path) -> None:
    path = write(storage, tmp_path / "shard", [make_record(0), make_record(1, cls=None)])
    assert index_shard(storage, path).rows["label"].tolist() == [0, -1]


METAS = (
    b'{"height":7,"mix":1,"ok":true,"path":"a.png","whole":-9,"width":3}',
    b'{"height":8,"mix":0.5,"path":"\\u00fc.png","width":4}',
    b'{"height":9,"mix":"NaN","ok":false,"path":"\xc3\xbc","whole":4,"width":5}',
    b'{"mix":-0.0,"ok":true,"path":"none","whole":7}',
)
NUMBERS = {"mix": "float64", "ok": "bool", "whole": "int16"}


@pytest.mark.parametrize("width", [b"5", b'"5"'], ids=["usual", "odd"])
def test_values_of_records_become_columns(storage: Format, tmp_path: Path, width: bytes) -> None:
    fields = {name: Field("number", kind) for name, kind in NUMBERS.items()}
    schema = {"image": Field("image"), **fields, "cap": Field("text")}
    writer = storage.write(tmp_path / "shard", ShardSpec(meta={"schema": describe_schema(schema)}))
    texts = (b"plain", "\u6f22".encode(), None, b"")
    for number, (meta, text) in enumerate(zip(METAS, texts, strict=True)):
        image = {} if number == 3 else {"png": b"png"}
        caption = {} if text is None else {"cap.txt": text}
        stated = {"json": meta.replace(b":5", b":%b" % width)}
        writer.write(Record(f"{number}", {**stated, **image, **caption}))
    writer.close()
    with open_records(storage, tmp_path / "shard") as records:
        known, _ = records.index_known(range(4))
        assert known.all() == known.any() == (width == b"5" and compiled.is_available())
    part = index_shard(storage, tmp_path / "shard")
    assert part.paths == ["a.png", "\u00fc.png", "\u00fc", "none"]
    assert part.rows["width"].tolist() == [3, 4, 5, 0]
    assert part.rows["height"].tolist() == [7, 8, 9, 0]
    assert part.rows["checksum"][:3].tolist() == [
        zlib.crc32(struct.pack("<iIIB", -1, width, height, 1) + b"png")
        for width, height in ((3, 7), (4, 8), (5, 9))
    ]
    mix, ok, whole, cap = (part.columns[name] for name in (*NUMBERS, "cap"))
    assert mix.values.tobytes() == struct.pack("<4d", 1, 0.5, math.nan, -0.0)
    assert (ok.values.tolist(), whole.values.tolist()) == ([1, 0, 0, 1], [-9, 0, 4, 7])
    assert (cap.values.tobytes(), mix.present) == (b"plain\xe6\xbc\xa2", None)
    present = [column.present.tolist() for column in (ok, whole, cap) if column.present is not None]
    assert present == [[1, 0, 1, 1], [1, 0, 1, 1], [1, 1, 0, 1]]


def test_images_next_to_small_values_are_not_held_in_memory(
    storage: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = {"image": Field("image"), "mix": Field("number", "float64"), "cap": Field("text")}
    writer = storage.write(tmp_path / "shard", ShardSpec(meta={"schema": describe_schema(schema)}))
    for number in range(4):
        fields = {"json": METAS[0], "png": bytes(1 << 20), "cap.txt": b"text"}
        writer.write(Record(f"{number}", fields))
    writer.close()
    sizes = []

    def at(records: ShardRecords, offset: int, length: int) -> bytes:
        sizes.append(length)
        return read_at(records, offset, length)

    read_at = ShardRecords.at
    monkeypatch.setattr(ShardRecords, "at", at)
    assert index_shard(storage, tmp_path / "shard").columns["mix"].values.tolist() == [1] * 4
    assert max(sizes, default=0) < 1 << 20
    monkeypatch.setattr(other_fields, "_MOST_METADATA", 4 * len(METAS[0]) - 1)
    with open_records(storage, tmp_path / "shard") as opened:
        assert not opened.index_known(range(4))[0].any()


ODD: Sequence[tuple[str, Any]] = (
    *[("int16", value) for value in ("x", 1 << 15, 1.0, None, True, [1])],
    *[("float32", 0.1), ("float64", (1 << 53) + 1), ("float64", False), ("bool", 1)],
)


def test_one_odd_value_among_many_records_is_damage(storage: Format, tmp_path: Path) -> None:
    for dtype, value in ODD:
        path = tmp_path / f"{dtype} {value}"
        spec = ShardSpec(meta={"schema": describe_schema({"whole": Field("number", dtype)})})
        writer = storage.write(path, spec)
        for number in range(3):
            usual = dtype == "bool" or 3
            meta = {"path": str(number), "whole": value if number == 1 else usual}
            writer.write(Record(str(number), {"json": dump_json(meta)}))
        writer.close()
        with refused(CorruptShard, path, "at row "):
            index_shard(storage, path)


NO_META: Mapping[str, Any] = {
    "no JSON": b"{",
    "not an object": b"[]",
    "no width": dump_json({"path": "a", "height": 7}),
    "a path of a number": dump_json({"path": 5, "width": 3, "height": 7}),
    "no path": dump_json({"width": 3, "height": 7}),
    "a width of text": dump_json({"path": "a", "width": "x", "height": 7}),
    "a null width": dump_json({"path": "a", "width": None, "height": 7}),
    "a width of a list": dump_json({"path": "a", "width": [3], "height": 7}),
    "an endless width": b'{"path":"a","width":Infinity,"height":7}',
    "a width that is no number": b'{"path":"a","width":NaN,"height":7}',
    "a width over 32 bits": dump_json({"path": "a", "width": 2**32, "height": 7}),
    "a negative height": dump_json({"path": "a", "width": 3, "height": -7}),
    "no UTF-8": b'{"path":"\xff","width":3,"height":7}',
    "deep JSON": b'{"path":"a","width":3,"height":7,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nothing": None,
}


def test_unreadable_metadata_is_damage(storage: Format, tmp_path: Path) -> None:
    for what, meta in NO_META.items():
        path = write(storage, tmp_path / what, [make_record(0), make_record(1, json=meta)])
        with refused(CorruptShard, path):
            index_shard(storage, path)


def test_records_of_arrays_need_metadata_too(storage: Format, tmp_path: Path) -> None:
    meta = {"schema": describe_schema({"latent": Field("array", "float16", (2, 3))})}
    record = Record("a", {"latent.npy": bytes(12)})
    path = write_shard(storage, tmp_path / "shard", [record], meta=meta)
    with refused(CorruptShard, path, "row 0", "path"):
        index_shard(storage, path)


def test_a_label_that_is_not_a_number_is_damage(tmp_path: Path) -> None:
    for name in ("lmdb", "webdataset"):  # HDF5 keeps labels as numbers and refuses others earlier
        storage = get_format(name)
        for label in (b"", b"-1", b"01", b"1.0", b"x", b"9999999999", b"\xb2", b" 1"):
            path = write(storage, tmp_path / f"{name}{label.hex()}", [make_record(0, cls=label)])
            with refused(CorruptShard, path, "label"):
                index_shard(storage, path)


def test_a_record_without_an_image_is_damage(storage: Format, tmp_path: Path) -> None:
    path = write(storage, tmp_path / "shard", [make_record(0), make_record(1, png=None)])
    with refused(CorruptShard, path, "a/1"):
        index_shard(storage, path)


@pytest.mark.parametrize("name", format_names())
def test_only_readers_that_use_their_ranges_skip_the_comparison(tmp_path: Path, name: str) -> None:
    class Liar(RangeReader):
        def _find(self) -> None: ...

        def read(self, rows: Sequence[int]) -> list[Record]:
            return []

    path = tmp_path / "shard"
    write_shard(get_format(name), path, [Record("a", {"jpg": b"1", "json": b"{}"})])
    with contextlib.closing(get_format(name).read(path)) as reader:
        assert reads_its_ranges(reader) == isinstance(reader, RangeReader)
    with contextlib.closing(Liar(path)) as liar:
        assert not reads_its_ranges(liar)


@pytest.mark.parametrize("shift", [0, 1])
def test_the_ranges_of_a_format_are_compared_with_its_images(tmp_path: Path, shift: int) -> None:
    class Shifted(LmdbReader):
        def ranges(self) -> Sequence[Mapping[str, Range]]:
            return [
                {name: Range(start + shift, length) for name, (start, length) in each.items()}
                for each in super().ranges()
            ]

    storage = replace(get_format("lmdb"), read=Shifted)
    path = write(storage, tmp_path / "shard", [make_record(0), make_record(1)])
    if shift:
        with refused(CorruptShard, "'a/0'"):
            index_shard(storage, path)
    else:
        assert index_shard(storage, path).keys == ["a/0", "a/1"]
