from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import h5py
import numpy as np
import pytest
from refusals import refused

from shardkit.contracts import ShardSpec
from shardkit.errors import CorruptShard
from shardkit.formats.hdf5 import FORMAT, Hdf5Reader, Hdf5Writer
from shardkit.record import Record
from shardkit.testing import read_shard, write_shard

CONTENT = [
    Record("a", {"cls": b"2", "jpg": b"JPEG", "raw": bytes(range(12))}),
    Record("b", {"png": b"", "raw": bytes(12)}),
    Record("c", {"cls": b"0", "jpg": b"", "raw": bytes(range(12, 24))}),
]
SHAPE = (2, 2, 3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_shard(FORMAT, tmp_path / "s.h5", CONTENT, meta={"b": 1, "a": 2}, raw_shape=SHAPE)


def test_datasets_follow_the_documented_layout(path: Path) -> None:
    with h5py.File(path, "r") as file:
        names: list[str] = []
        file.visit(names.append)
        assert names == [
            "__key__",
            "__key__/data",
            "__key__/offsets",
            "__shardkit__",
            "cls",
            "cls/data",
            "jpg",
            "jpg/data",
            "jpg/offsets",
            "jpg/present",
            "png",
            "png/data",
            "png/offsets",
            "png/present",
            "raw",
            "raw/data",
        ]
        assert file["__shardkit__"][()].tobytes() == b'{"a":2,"b":1}'
        assert file["__key__/data"][()].tobytes() == b"abc"
        assert file["__key__/offsets"][()].tolist() == [0, 1, 2, 3]
        assert file["cls/data"][()].tolist() == [2, -1, 0]
        assert file["cls/data"].dtype == np.int64
        assert file["jpg/data"][()].tobytes() == b"JPEG"
        assert file["jpg/offsets"][()].tolist() == [0, 4, 4, 4]
        assert file["jpg/present"][()].tolist() == [1, 0, 1]
        assert file["png/data"].shape == (0,)
        assert file["raw/data"].shape == (3, 2, 2, 3)
        assert file["raw/data"][2].tobytes() == bytes(range(12, 24))


def test_raw_pixels_that_some_records_lack_are_stored_end_to_end(tmp_path: Path) -> None:
    content = [*CONTENT, Record("d", {"txt": b"no pixels"})]
    path = write_shard(FORMAT, tmp_path / "s.h5", content, raw_shape=SHAPE)
    with h5py.File(path, "r") as file:
        assert file["raw/data"].shape == (36,)
    assert read_shard(FORMAT, path) == content


def test_labels_alone_have_no_range(path: Path) -> None:
    reader = Hdf5Reader(path)
    ranges = reader.ranges()
    assert [sorted(fields) for fields in ranges] == [["jpg", "raw"], ["png", "raw"], ["jpg", "raw"]]
    assert ranges[0]["raw"].length == 12
    reader.close()


def test_a_label_that_is_not_a_number_is_refused_when_written(tmp_path: Path) -> None:
    for label in (b"", b"-1", b"01", b"cat", b"1000000000", b" 1", "٣".encode()):
        writer = Hdf5Writer(tmp_path / "s.h5", ShardSpec())
        with pytest.raises(ValueError, match="label"):
            writer.write(Record("a", {"cls": label}))
        writer.abort()


def test_an_existing_path_is_an_os_error_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "s.h5").write_bytes(b"precious")
    writer = Hdf5Writer(tmp_path / "s.h5", ShardSpec())
    with pytest.raises(OSError, match="exists"):
        writer.close()
    writer.abort()
    assert (tmp_path / "s.h5").read_bytes() == b"precious"


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_compressed_or_chunked_values_are_refused(path: Path, compression: str | None) -> None:
    with h5py.File(path, "r+") as file:
        values = file["jpg/data"][()]
        del file["jpg/data"]
        file.create_dataset("jpg/data", data=values, chunks=True, compression=compression)
    with pytest.raises(CorruptShard, match=r"(by|as) shardkit"):
        Hdf5Reader(path)


def test_values_in_another_file_are_refused(path: Path) -> None:
    outside = path.with_name("outside.bin")
    outside.write_bytes(b"JPEG")
    with h5py.File(path, "r+") as file:
        del file["jpg/data"]
        file.create_dataset("jpg/data", (4,), np.uint8, external=[(str(outside), 0, 4)])
    with pytest.raises(CorruptShard, match=r"(by|as) shardkit"):
        Hdf5Reader(path)


@pytest.mark.parametrize("link", [h5py.ExternalLink("other.h5", "/jpg"), h5py.SoftLink("/jpg")])
@pytest.mark.parametrize("name", ["txt", "jpg/more"])
def test_links_are_refused(path: Path, name: str, link: object) -> None:
    with h5py.File(path.with_name("other.h5"), "x") as other, h5py.File(path) as file:
        file.copy("jpg", other)
    with h5py.File(path, "r+") as file:
        file[name] = link
    with refused(CorruptShard):
        Hdf5Reader(path)


def test_values_that_were_never_written_are_refused(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        del file["jpg/data"]
        file.create_dataset("jpg/data", (4,), np.uint8)
    with refused(CorruptShard):
        Hdf5Reader(path)


def test_a_user_block_moves_the_ranges(path: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved.h5"
    with h5py.File(path, "r") as old, h5py.File(moved, "x", userblock_size=1024) as new:
        for name in old:
            old.copy(name, new)
    reader = Hdf5Reader(moved)
    data = moved.read_bytes()
    for record, fields in zip(CONTENT, reader.ranges(), strict=True):
        for name, (offset, length) in fields.items():
            assert data[offset : offset + length] == record.fields[name]
    assert reader.read(range(3)) == CONTENT
    reader.close()


def put(name: str, value: object) -> Callable[[h5py.File], None]:
    """Return a function that replaces the HDF5 dataset ``name``."""

    def change(file: h5py.File) -> None:
        del file[name]
        file[name] = value

    return change


def remove(name: str) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[name]

    return change


def add(name: str, value: object) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        file[name] = value

    return change


def rename_to_bytes(file: h5py.File) -> None:
    file.id.links.move(b"png", file.id, b"p\xffg")


def floats(*values: float) -> object:
    return np.array(values, np.float64)


def numbers(*values: int) -> object:
    return np.array(values, np.int64)


def octets(*values: int) -> object:
    return np.array(values, np.uint8)


@pytest.mark.parametrize(
    "change",
    [
        remove("__shardkit__"),
        put("__shardkit__", octets(*b"{")),
        put("__shardkit__", octets(*b"[1]")),
        put("__shardkit__", octets(*b'["ab"]')),
        put("__shardkit__", octets(*b"[" * 100_000)),
        put("__shardkit__", 7),
        put("__shardkit__", octets(0xFF)),
        remove("__key__"),
        remove("__key__/data"),
        remove("__key__/offsets"),
        add("__key__/present", octets(1, 0, 1)),
        put("__key__/data", octets(*b"a\xffc")),
        put("__key__/offsets", numbers(0, 1, 1, 3)),
        put("jpg", 1),
        remove("jpg/data"),
        remove("jpg/offsets"),
        put("jpg/data", octets(1, 2, 3)),
        put("jpg/data", numbers(0, 0, 0, 0)),
        put("jpg/data", floats(1, 2, 3, 4)),
        put("jpg/data", octets(7)),
        put("jpg/data", 7),
        put("jpg/data", "text"),
        put("jpg/offsets", numbers()),
        put("jpg/offsets", 4),
        put("jpg/offsets", floats(0, 4, 4, 4)),
        put("jpg/offsets", numbers(0, 4, 4)),
        put("jpg/offsets", numbers(0, 4, 2, 4)),
        put("jpg/offsets", numbers(0, 4, 4, 5)),
        put("jpg/offsets", numbers(1, 4, 4, 4)),
        put("jpg/offsets", np.zeros((4, 1), np.int64)),
        put("jpg/present", 1),
        put("jpg/present", octets(1)),
        put("jpg/present", octets(1, 0, 1, 1)),
        put("jpg/present", octets()),
        put("jpg/present", "text"),
        put("cls/data", numbers(2, -1)),
        put("cls/data", floats(2, -1, 0.5)),
        put("cls/data", 3),
        put("cls/data", "text"),
        put("raw/data", np.zeros((2, 2, 2, 3), np.uint8)),
        put("raw/data", np.zeros((3, 2, 2, 3), np.float32)),
        put("raw/data", np.zeros(36, np.uint8)),
        put("raw/data", np.zeros((3, 0), np.uint8)),
        add("JPG", 7),
        add("UPPER/data", octets()),
        rename_to_bytes,
    ],
)
def test_another_layout_is_a_corrupt_shard(change: Callable[[h5py.File], None], path: Path) -> None:
    with h5py.File(path, "r+") as file:
        change(file)
    with pytest.raises(CorruptShard):
        read_shard(FORMAT, path)


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        (put("cls/data", numbers(2, -7, 0)), "cls", b"-7"),
        (put("cls/data", numbers(2, 10**12, 0)), "cls", b"1000000000000"),
        (remove("jpg/present"), "jpg", b""),
    ],
)
def test_other_content_of_whole_records_is_left_to_checksums(
    change: Callable[[h5py.File], None], field: str, value: bytes, path: Path
) -> None:
    with h5py.File(path, "r+") as file:
        change(file)
    first, second, third = CONTENT
    changed = Record("b", {**second.fields, field: value})
    assert read_shard(FORMAT, path) == [first, changed, third]


def test_a_file_that_the_user_has_open_with_h5py_is_read(path: Path) -> None:
    with h5py.File(path, "r"):
        assert read_shard(FORMAT, path) == CONTENT


def test_values_of_several_blocks_are_copied_completely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spool is moved from its end, in blocks."""
    records = [Record(f"k{n}", {"jpg": bytes([n]) * (37 * n), "json": b"{}"}) for n in range(40)]
    write_shard(FORMAT, tmp_path / "at_once.h5", records)
    monkeypatch.setattr("shardkit.formats.hdf5._COPY_BYTES", 100)
    write_shard(FORMAT, tmp_path / "in_blocks.h5", records)
    content = (tmp_path / "at_once.h5").read_bytes()
    assert (tmp_path / "in_blocks.h5").read_bytes() == content
    assert read_shard(FORMAT, tmp_path / "in_blocks.h5") == records


@pytest.mark.parametrize(
    ("part", "at", "value"),
    [
        (b"SNOD", 4, 2),
        (b"TREE", 0, 0),
        (b"TREE", 4, 1),
        (b"HEAP", 0, 0),
        (b"HEAP", 4, 1),
        (b"HEAP", 8 + 7, 1),
        (b"HEAP", 8 + 1, 0xFF),
        (b"__key__\0", 0, 0),
        (b"__key__\0", 2, ord("/")),
    ],
)
def test_a_damaged_structure_is_a_corrupt_shard(
    path: Path, part: bytes, at: int, value: int
) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(part) + at] = value
    path.write_bytes(content)
    with refused(CorruptShard):
        read_shard(FORMAT, path)


def test_a_damaged_header_of_an_object_is_a_corrupt_shard(path: Path) -> None:
    """The superblock states where the root's header is: version, messages, their total size."""
    pristine = path.read_bytes()
    root = int.from_bytes(pristine[64:72], "little")
    for at, value, reason in (
        (0, 2, "the header at byte .* has version 2"),
        (2, 0, "is not a group written by shardkit"),
        (16 + 2, 0xFF, "the header at byte .* is damaged"),
        (16 + 4, 2, "shares a header"),
    ):
        content = bytearray(pristine)
        content[root + at] = value
        path.write_bytes(content)
        with pytest.raises(CorruptShard, match=reason):
            read_shard(FORMAT, path)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("Unable to write (file write failed: errno = 28, error message = 'No space')", 28),
        ("Unable to write", None),
    ],
)
def test_an_error_of_hdf5_keeps_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str, code: int | None
) -> None:
    """Callers tell a full disk from others by it; HDF5 mentions it only in its message."""
    writer = Hdf5Writer(tmp_path / "s.h5", ShardSpec())
    monkeypatch.setattr(h5py, "File", Mock(side_effect=OSError(message)))
    with refused(OSError, "No space" if code else message) as caught:
        writer.close()
    assert (caught.value.errno, caught.value.filename) == (code, code and str(tmp_path / "s.h5"))
    writer.abort()


def test_values_that_cannot_be_read_back_completely_are_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Short(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(size)[:-1]

    monkeypatch.setattr("shardkit.formats.hdf5.io.BytesIO", Short)
    writer = Hdf5Writer(tmp_path / "s.h5", ShardSpec(meta={"a": 1}))
    with refused(OSError, "s.h5", "6", "7"):
        writer.close()
    writer.abort()


def test_a_newer_kind_of_hdf5_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "new.h5", "x", libver="latest") as file:
        file["jpg/data"] = octets(1)
    with refused(CorruptShard, "HDF5"):
        Hdf5Reader(tmp_path / "new.h5")


def test_values_that_several_fields_share_are_refused(tmp_path: Path) -> None:
    """Many names for one large value would take more memory than the file has bytes."""
    path = write_shard(FORMAT, tmp_path / "s.h5", [Record("a", {"jpg": bytes(50_000)})])
    with h5py.File(path, "r+") as file:
        file["png"] = file["jpg"]
    with refused(CorruptShard):
        Hdf5Reader(path)
