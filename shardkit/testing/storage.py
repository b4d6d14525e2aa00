"""Conformance tests: round trips, ranges and repeatable bytes."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shardkit.contracts import Format, ShardSpec
from shardkit.errors import CorruptShard
from shardkit.kinds.field import Field, describe_schema
from shardkit.record import Record
from shardkit.testing.strategies import records
from shardkit.testing.tools import (
    NEW_PROCESS,
    RAW_SHAPE,
    call_in,
    new_path,
    read_shard,
    reading,
    sample_records,
    write_sample,
    write_shard,
)

_EXAMPLES = settings(
    max_examples=20,
    deadline=None,
    database=None,
    # Several classes inherit each test, and hypothesis warns; ``storage`` has no state.
    suppress_health_check=[
        HealthCheck.differing_executors,
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
    ],
)


class StorageConformance:
    """Tests of round trips, order, ranges and repeatable bytes."""

    # --- round trips ---

    @_EXAMPLES
    @given(content=records())
    @example(content=[])
    def test_any_records_come_back(self, storage: Format, content: list[Record]) -> None:
        with new_path() as path:
            stored = read_shard(storage, write_shard(storage, path, content))
        assert stored == content
        assert {type(value) for record in stored for value in record.fields.values()} <= {bytes}

    @_EXAMPLES
    @given(content=records(raw_shape=RAW_SHAPE))
    def test_raw_pixels_of_one_shape_come_back(
        self, storage: Format, content: list[Record]
    ) -> None:
        with new_path() as path:
            write_shard(storage, path, content, raw_shape=RAW_SHAPE)
            assert read_shard(storage, path) == content

    @_EXAMPLES
    @given(data=st.data(), content=records(min_size=1))
    def test_any_rows_come_in_the_requested_order(
        self, storage: Format, data: st.DataObject, content: list[Record]
    ) -> None:
        rows = data.draw(st.lists(st.integers(0, len(content) - 1), max_size=20))
        with new_path() as path, reading(storage, write_shard(storage, path, content)) as reader:
            assert reader.read(rows) == [content[row] for row in rows]

    def test_pieces_equal_the_whole(self, storage: Format, tmp_path: Path) -> None:
        if storage.chunks is None:
            pytest.skip("the format has no chunks")
        chunks = storage.chunks
        spec = ShardSpec(raw_shape=RAW_SHAPE)
        content = sample_records()
        writer = storage.write(tmp_path / "s", spec)
        starts = [chunks.append(writer, chunks.encode(content[n : n + 3], spec)) for n in (0, 3, 6)]
        writer.close()

        expected = write_shard(storage, tmp_path / "whole", content, raw_shape=RAW_SHAPE)
        assert (tmp_path / "s").read_bytes() == expected.read_bytes()
        chunk_records = []
        for start, stop in itertools.pairwise([0, *starts[1:], None]):
            reader = chunks.read(tmp_path / "s", start or 0, stop)
            chunk_records.append(reader.read(range(len(reader))))
            reader.close()
        assert chunk_records == [content[:3], content[3:6], content[6:]]
        with pytest.raises(CorruptShard):  # a record goes across the end
            chunks.read(tmp_path / "s", 0, starts[1] - 1)

    def test_rows_come_in_the_requested_order(self, storage: Format, tmp_path: Path) -> None:
        content = sample_records()
        with reading(storage, write_sample(storage, tmp_path / "s")) as reader:
            assert reader.read([5, 0, 3]) == [content[5], content[0], content[3]]

    def test_a_repeated_row_is_returned_twice(self, storage: Format, tmp_path: Path) -> None:
        content = sample_records()
        with reading(storage, write_sample(storage, tmp_path / "s")) as reader:
            assert reader.read([2, 2, 1, 2]) == [content[2], content[2], content[1], content[2]]

    def test_no_rows_give_no_records(self, storage: Format, tmp_path: Path) -> None:
        with reading(storage, write_sample(storage, tmp_path / "s")) as reader:
            assert reader.read([]) == []

    def test_a_row_out_of_range_is_an_index_error(self, storage: Format, tmp_path: Path) -> None:
        content = sample_records()
        with reading(storage, write_sample(storage, tmp_path / "s")) as reader:
            assert len(reader) == len(content)
            for row in (len(content), len(content) + 1, 1 << 40):
                with pytest.raises(IndexError):
                    reader.read([0, row])

    def test_a_negative_row_is_an_index_error(self, storage: Format, tmp_path: Path) -> None:
        content = sample_records()
        with reading(storage, write_sample(storage, tmp_path / "s")) as reader:
            for row in (-1, -len(content), -(1 << 40)):
                with pytest.raises(IndexError):
                    reader.read([row])

    def test_an_empty_shard_has_no_rows(self, storage: Format, tmp_path: Path) -> None:
        path = write_shard(storage, tmp_path / "s", [], meta={"a": 1}, raw_shape=RAW_SHAPE)
        with reading(storage, path) as reader:
            assert len(reader) == 0
            assert dict(reader.meta) == {"a": 1}
            assert list(reader.ranges()) == []
            with pytest.raises(IndexError):
                reader.read([0])

    def test_a_missing_field_is_not_an_empty_one(self, storage: Format, tmp_path: Path) -> None:
        content = [
            Record("a", {"txt": b""}),
            Record("b", {"json": b"{}"}),
            Record("c", {"json": b"", "txt": b"c"}),
            Record("d", {"cls": b"0"}),
        ]
        assert read_shard(storage, write_shard(storage, tmp_path / "s", content)) == content

    def test_labels_come_back_unchanged(self, storage: Format, tmp_path: Path) -> None:
        labels = (b"0", b"1", b"10", b"999999999", None, b"7")
        content = [
            Record(f"r{row}", {"txt": b"x"} | ({"cls": label} if label else {}))
            for row, label in enumerate(labels)
        ]
        assert read_shard(storage, write_shard(storage, tmp_path / "s", content)) == content

    def test_long_keys_come_back(self, storage: Format, tmp_path: Path) -> None:
        content = [
            Record(prefix + "k" * length, {"txt": b"%d" % length})
            for prefix in ("", "d/" * 60)
            for length in (1, 94, 95, 96, 97, 100, 101, 155, 256, 511, 2000)
        ]
        assert read_shard(storage, write_shard(storage, tmp_path / "s", content)) == content

    def test_raw_pixels_of_another_shape_are_refused(self, storage: Format, tmp_path: Path) -> None:
        wrong = [(RAW_SHAPE, b"short"), (RAW_SHAPE, b""), (None, b"pixels"), (None, b"")]
        for number, (shape, value) in enumerate(wrong):
            content = [Record("a", {"raw": value})]
            with pytest.raises(ValueError, match="shape"):
                write_shard(storage, tmp_path / str(number), content, raw_shape=shape)

    def test_raw_pixels_of_a_stated_dtype_come_back(self, storage: Format, tmp_path: Path) -> None:
        shape = (3, 5, 2)
        schema = describe_schema({"image": Field("image", "uint16", shape[2:])})
        content = [
            Record(f"r{row}", {"json": b"{}"} | ({"raw": bytes([row]) * 60} if row != 2 else {}))
            for row in range(4)
        ]
        meta = {"schema": schema, "raw_shape": shape, "classes": None}
        path = write_shard(storage, tmp_path / "s", content, meta=meta, raw_shape=shape)
        assert read_shard(storage, path) == content
        with reading(storage, path) as reader:
            file = path.read_bytes()
            for record, ranges in zip(content, reader.ranges(), strict=True):
                if "raw" in ranges:
                    start = ranges["raw"].offset
                    assert file[start : start + ranges["raw"].length] == record.fields["raw"]

    def test_many_rows_come_back(self, storage: Format, tmp_path: Path) -> None:
        content = [
            Record(f"r{row}", {"txt": b"%d" % row, "cls": b"%d" % row}) for row in range(3000)
        ]
        path = write_shard(storage, tmp_path / "s", content)
        assert read_shard(storage, path) == content
        with reading(storage, path) as reader:
            assert reader.read([2999, 999, 1000]) == [content[2999], content[999], content[1000]]

    def test_a_value_of_five_megabytes_comes_back(self, storage: Format, tmp_path: Path) -> None:
        values = (b"before", random.Random(0).randbytes(5 << 20), b"after")
        content = [Record(f"r{row}", {"bin": value}) for row, value in enumerate(values)]
        assert read_shard(storage, write_shard(storage, tmp_path / "s", content)) == content

    def test_a_record_without_fields_is_kept_or_refused(
        self, storage: Format, tmp_path: Path
    ) -> None:
        content = [Record("a", {}), Record("b", {"txt": b"b"}), Record("c", {})]
        with contextlib.suppress(ValueError):
            assert read_shard(storage, write_shard(storage, tmp_path / "s", content)) == content

    def test_an_unusual_key_is_kept_or_refused(self, storage: Format, tmp_path: Path) -> None:
        foreign = (
            "a.b",
            "a/",
            "/a",
            "a/.b",
            ".",
            "..",
            "ü",
            "a b",
            "a\nb",
            "a\\b",
            "a\0b",
            "__x__",
        )
        for number, key in enumerate(foreign):
            content = [Record(key, {"txt": b"1"}), Record("z", {"txt": b"2"})]
            try:
                path = write_shard(storage, tmp_path / str(number), content)
            except ValueError:
                continue
            assert read_shard(storage, path) == content, f"the key {key!r}"

    def test_meta_comes_back(self, storage: Format, tmp_path: Path) -> None:
        meta = {"classes": ["ä", "★ 🎈", "\x00\n\"'"], "n": [1, 2.5, None, True, {"": {}}], "ß": -1}
        path = write_sample(storage, tmp_path / "s", meta)
        with reading(storage, path) as reader:
            assert dict(reader.meta) == meta

    def test_meta_may_be_large(self, storage: Format, tmp_path: Path) -> None:
        meta = {"classes": [f"class number {number}" for number in range(20_000)]}
        path = write_sample(storage, tmp_path / "s", meta)
        with reading(storage, path) as reader:
            assert dict(reader.meta) == meta
            assert reader.read(range(len(reader))) == sample_records()

    # --- the file ---

    @_EXAMPLES
    @given(content=records(raw_shape=RAW_SHAPE))
    @example(content=[Record("a", {"txt": b""}), Record("b", {"txt": b"b" * 9000})])
    def test_ranges_are_the_bytes_of_the_file(self, storage: Format, content: list[Record]) -> None:
        with new_path() as path:
            write_shard(storage, path, content, raw_shape=RAW_SHAPE)
            with reading(storage, path) as reader:
                ranges = list(reader.ranges())
            data = path.read_bytes()
        assert len(ranges) == len(content)
        for record, fields in zip(content, ranges, strict=True):
            assert fields.keys() <= record.fields.keys()
            for field, (offset, length) in fields.items():
                assert 0 <= offset <= offset + length <= len(data)
                assert data[offset : offset + length] == record.fields[field]

    def test_two_writes_give_the_same_bytes(self, storage: Format, tmp_path: Path) -> None:
        assert _sha256_of_sample(storage, tmp_path / "a") == _sha256_of_sample(
            storage, tmp_path / "b"
        )

    def test_another_process_writes_the_same_bytes(self, storage: Format, tmp_path: Path) -> None:
        there = call_in(NEW_PROCESS, _sha256_of_sample, storage, tmp_path / "there")
        assert there == _sha256_of_sample(storage, tmp_path / "here")

    def test_a_shard_is_one_file_and_reading_leaves_it_alone(
        self, storage: Format, tmp_path: Path
    ) -> None:
        path = write_sample(storage, tmp_path / "s")
        before = path.read_bytes()
        read_shard(storage, path)
        assert os.listdir(tmp_path) == ["s"]
        assert path.read_bytes() == before


def _sha256_of_sample(storage: Format, path: Path) -> str:
    """Write the sample, and return the file's SHA-256."""
    write_sample(storage, path, {"z": 1, "a": {"y": 2, "b": 3}})
    return hashlib.sha256(path.read_bytes()).hexdigest()
