"""Records as columns are stored and summed as the same records one by one."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import pytest
from helpers import FORMATS

from shardkit.contracts import ShardSpec
from shardkit.record import Record, checksums
from shardkit.record_columns import RecordColumns, label_column, path_metas
from shardkit.registry import get_format
from shardkit.system import compiled, native

COUNT = 1100  # more than a transaction of LMDB


def make_columns(count: int = COUNT) -> RecordColumns:
    """Return records of which some lack a field, and some have a large one."""
    return RecordColumns(
        [f"a/{n:05d}" if n % 7 else f"é {n}" for n in range(count)],
        {
            "txt": [f"text {n}".encode() if n % 3 else None for n in range(count)],
            "json": [b'{"path":"%d"}' % n for n in range(count)],
            "png": [bytes([n % 256]) * (9000 if n % 100 == 0 else n % 50) for n in range(count)],
        },
    )


def make_records(count: int = COUNT) -> list[Record]:
    """Return the same records."""
    return [
        Record(
            f"a/{n:05d}" if n % 7 else f"é {n}",
            {"json": b'{"path":"%d"}' % n}
            | {"png": bytes([n % 256]) * (9000 if n % 100 == 0 else n % 50)}
            | ({"txt": f"text {n}".encode()} if n % 3 else {}),
        )
        for n in range(count)
    ]


def test_paths_become_canonical_json() -> None:
    paths = [
        "a/b.jpg",
        "",
        'a "b"',
        "\\",
        "a\nb\r",
        "é漢\U0001f600",
        "\udcff",
        '"}\n{"path":"',
        "\0",
    ]
    expected = [json.dumps({"path": path}, separators=(",", ":")).encode() for path in paths]
    assert path_metas(paths) == expected
    assert not path_metas([])


def test_columns_are_a_sequence_of_records() -> None:
    columns = make_columns(40)
    assert [*columns] == make_records(40)
    assert [*columns[7:30]] == make_records(40)[7:30]
    assert columns[-1] == make_records(40)[-1]
    assert columns.sizes() == [sum(map(len, r.fields.values())) for r in make_records(40)]
    assert columns.values("cls") == [None] * 40
    assert not [*RecordColumns([], {})]
    assert RecordColumns(["a", "b"], {}).sizes() == [0, 0]


def test_a_key_or_field_that_no_record_may_have_is_refused() -> None:
    def refuse(keys: list[str], name: str) -> None:
        with pytest.raises(ValueError, match=r"key|field name"):
            RecordColumns(keys, {name: [b""] * len(keys)})

    refuse(["a", ""], "txt")
    refuse(["a" * 20_000, "b"], "txt")
    refuse(["a"], "Txt")


def test_labels_are_decimal() -> None:
    assert label_column([3, -1, 0, 3]) == [b"3", None, b"0", b"3"]


def test_checksums_are_those_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    def crc(record: Record) -> int:
        parts = [part for name in sorted(record.fields) for part in (name, record.fields[name])]
        data = [record.key, *parts]
        return zlib.crc32(b"".join(p.encode() if isinstance(p, str) else p for p in data))

    expected = [*map(crc, make_records(40))]
    assert checksums(make_columns(40)) == expected
    monkeypatch.setattr(native, "module", lambda: None)
    assert checksums(make_columns(40)) == expected


def written(path: Path, to: str, records: Any) -> bytes:
    """Return the file of a shard, whose records are written together or one by one."""
    storage = get_format(to)
    writer = storage.write(path, ShardSpec())
    if isinstance(records, list):
        for record in records:
            writer.write(record)
    elif storage.chunks:
        storage.chunks.append(writer, storage.chunks.encode(records, ShardSpec()))
    else:
        for start, stop in ((0, 300), (300, 1050), (1050, COUNT)):
            storage.write_all(writer, records[start:stop])
    writer.close()
    return path.read_bytes()


@pytest.mark.parametrize("to", FORMATS)
def test_columns_become_the_bytes_of_records_one_by_one(
    tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = written(tmp_path / "together", to, make_columns())
    monkeypatch.setattr(native, "module", lambda: None)
    assert written(tmp_path / "alone", to, make_records()) == together
    assert written(tmp_path / "without", to, make_columns()) == together


def test_columns_of_hdf5_state_what_is_missing(tmp_path: Path) -> None:
    blank: list[bytes | None] = [None] * 3
    storage = get_format("hdf5")
    writer = storage.write(tmp_path / "a.h5", ShardSpec())
    storage.write_all(
        writer, RecordColumns(["a", "b", "é"], {"txt": [b"x", None, b""], "bin": blank})
    )
    labels: list[bytes | None] = [b"7", None]
    storage.write_all(writer, RecordColumns(["d", "e"], {"cls": labels, "late": [None, b"yz"]}))
    writer.write(Record("f", {"txt": b"end"}))
    writer.close()
    hdf5: Any = h5py.File(tmp_path / "a.h5")
    with hdf5 as file:
        assert {*file} == {"__key__", "__shardkit__", "cls", "late", "txt"}
        found = {
            name: (group["data"][:].tobytes(), group["offsets"][:].tolist(), [*group["present"]])
            for name, group in file.items()
            if name in ("late", "txt")
        }
        assert file["cls/data"][:].tolist() == [-1, -1, -1, 7, -1, -1]
        assert file["__key__/data"][:].tobytes().decode() == "abédef"
    assert found == {
        "late": (b"yz", [0, 0, 0, 0, 0, 2, 2], [0, 0, 0, 0, 1, 0]),
        "txt": (b"xend", [0, 1, 1, 1, 1, 1, 4], [1, 0, 1, 0, 0, 1]),
    }


def test_columns_of_arrays_have_the_shape_of_the_shard(tmp_path: Path) -> None:
    described = {"name": "v", "kind": "array", "dtype": "uint8", "shape": [2], "classes": None}
    storage = get_format("hdf5")
    for number, odd in enumerate((b"abc", b"")):
        path = tmp_path / f"{number}.h5"
        writer = storage.write(path, ShardSpec(meta={"schema": [described]}))
        storage.write_all(writer, RecordColumns(["a", "b"], {"v.npy": [b"ab", b"cd"]}))
        with pytest.raises(ValueError, match=r"'d'"):
            storage.write_all(writer, RecordColumns(["c", "d"], {"v.npy": [b"ef", odd]}))
        writer.close()
        hdf5: Any = h5py.File(path)
        with hdf5 as file:
            assert file["v.npy/data"][:].tolist() == [[97, 98], [99, 100]]


@pytest.mark.skipif(not compiled.is_available(), reason="the module is not built")
def test_the_module_refuses_what_are_no_columns() -> None:
    odd: Any = SimpleNamespace(keys=["a", "b"], columns=())
    assert compiled.record_checksums(odd) == [zlib.crc32(b"a"), zlib.crc32(b"b")]
    for columns, error in (
        ([], TypeError),
        ((("txt", (b"", b"")),), TypeError),
        ((("txt", [b""]),), IndexError),
        ((("txt",),), TypeError),
    ):
        odd.columns = columns
        with pytest.raises(error):
            compiled.record_checksums(odd)
    odd.columns = (("txt", [b"", "text"]),)
    assert compiled.record_checksums(odd) is None
