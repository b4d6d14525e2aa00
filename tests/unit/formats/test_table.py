"""The compiled walks of tar and LMDB files find what the readers in Python find, or nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardkit.contracts import Format, ShardSpec
from shardkit.dataset.index_builder import index_shard, open_records
from shardkit.errors import CorruptShard
from shardkit.formats.ranges import RangeReader
from shardkit.kinds.field import Field, Schema, describe_schema
from shardkit.record import Record, checksums, dump_json
from shardkit.registry import get_format
from shardkit.system import native
from shardkit.system.npy import npy_header

pytestmark = pytest.mark.usefixtures("with_native")

RAW_SHAPE = (2, 3, 3)


@pytest.fixture(params=["hdf5", "lmdb", "webdataset"])
def storage(request: pytest.FixtureRequest) -> Format:
    return get_format(request.param)


def records(count: int = 40) -> list[Record]:
    """Return ordinary records, and some that only Python indexes."""
    found = []
    for number in range(count):
        meta: dict[str, Any] = {"path": f"a/{number}.png", "width": number + 1, "height": 7}
        fields = {"png": b"image %d" % number * (1 + number % 9 * 90), "cls": b"%d" % number}
        if number % 5 == 1:
            del fields["cls"]
        if number % 7 == 2:
            meta |= {"orientation": 6}
        if number % 7 == 3:
            meta["path"] = f'a/"{number}" é.png'
        if number == 30:
            fields["raw"] = bytes(18)
            del fields["png"]
        if number == 31:
            fields["note"] = b"more"
        found.append(
            Record(
                f"a/{number}é" if number == 33 else f"a/{number}",
                {**fields, "json": dump_json(meta)},
            )
        )
    return found


SCHEMA = {
    "latent": Field("array", dtype="float16", shape=(2, 3)),
    "wave": Field("array", dtype="float32"),
    "blob": Field("bytes"),
    "caption": Field("text"),
}


NUMBERED = {**SCHEMA, "age": Field("number", dtype="int64")}
METAS = (
    *(b"", b"[]", b"{", b"\xff", b'{"path":"a"}}', b'{"path":"a"} ', b'{"path":1}', b"{}"),
    *(b'{"path":"\\ud800"}', b'{"path":"\\udc80"}', b'{"age":1,"path":"a","path":"b"}'),
    *(b'{"age":%b,"path":"a"}' % age for age in (b"null", b"1.0", b"NaN", b"true", b"1e999")),
    *(b'{"age":%b,"path":"a"}' % age for age in (b"9" * 19, b"9" * 5000, b"[" * 100_000)),
    *(
        b'{"caption":null,"path":"a"}',
        b'{"caption":"b","path":"a"}',
        b'{"age":1,"path":"\xc3\xa9"}',
    ),
)
SIZED = (b'{"height":%b,"path":"a","width":1}', b'{"path":"a","height":1,"width":%b}')
SIZES = (b"-1", b"1.5", b'"2"', b"true", b"null", b"4294967295", b"4294967296", b"1" * 5000)


def values(count: int = 30, *, with_images: bool = False) -> list[Record]:
    """Return records of `SCHEMA`, some of which lack a field."""
    wave = npy_header((1,), "<f4")
    found = []
    for number in range(count):
        meta: dict[str, Any] = {"path": f"{number}"}
        fields = {
            "latent.npy": bytes([number] * 12),
            "wave.npy": wave + bytes(4),
            "blob.bin": bytes(number * 500),
            "caption.txt": "é".encode() * (number % 4),
            "cls": b"%d" % number,
        }
        if number % 5 > 1:
            del fields[[*fields][number % 5]]
        if with_images and number % 3:
            fields["png"] = b"image %d" % number
            meta |= {"height": 3, "width": 4}
        found.append(Record(f"{number}", {**fields, "json": dump_json(meta)}))
    return found


def written(
    storage: Format, path: Path, content: list[Record], schema: Schema | None = None
) -> Path:
    meta = {"schema": describe_schema(schema)} if schema else {"made": "here"}
    writer = storage.write(path, ShardSpec(meta=meta, raw_shape=RAW_SHAPE))
    for record in content:
        writer.write(record)
    writer.close()
    return path


def outcome(storage: Format, path: Path) -> Any:
    """Return all that a shard gives, or the error."""
    sums: list[int] = []
    try:
        part = index_shard(storage, path, lambda _, found: sums.extend(found))
        reader = storage.read(path)
        ranges = [dict(reader.ranges()[row]) for row in range(len(reader))]
        read = reader.read(range(len(reader)))
        reader.close()
    except CorruptShard as error:
        return str(error).partition(" in row")[0]  # the module narrows the rows
    assert sums == checksums(read)
    others = {name: entries.tobytes() for name, entries in part.apart.items()}
    rows = range(len(part.keys))
    columns = {name: [*map(column.packed, rows)] for name, column in part.columns.items()}
    index = part.rows.tobytes(), part.keys, part.paths, others, columns
    return index, sums, ranges, read, dict(reader.meta)


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Any]:
    """Return a function that calls another one without the compiled module."""

    def call(function: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(native, "module", lambda: None)
            return function()

    return call


def test_the_table_and_the_index_are_those_of_python(
    storage: Format, tmp_path: Path, in_python: Callable[[Callable[[], Any]], Any]
) -> None:
    path = written(storage, tmp_path / "shard", records())
    assert outcome(storage, path) == in_python(lambda: outcome(storage, path))
    again = in_python(lambda: written(storage, tmp_path / "again", records()))
    assert path.read_bytes() == again.read_bytes()


def test_ordinary_records_need_no_python(storage: Format, tmp_path: Path) -> None:
    ordinary = [each for each in records() if b'{"height":7,"path":"a/' in each.fields["json"]]
    ordinary = [each for each in ordinary if each.key.isascii() and each.fields["json"].isascii()]
    ordinary = [each for each in ordinary if b"\\" not in each.fields["json"]]
    ordinary = [each for each in ordinary if b"orientation" not in each.fields["json"]]
    path = written(storage, tmp_path / "shard", ordinary)
    reader = storage.read(path)
    assert isinstance(reader, RangeReader)
    assert reader.table(range(len(ordinary))) is not None
    reader.close()
    with open_records(storage, path) as opened:
        done, found = opened.index_known(range(5, len(ordinary)))
    assert done.all()
    assert found.keys == [each.key for each in ordinary[5:]]
    assert found.checksums == checksums(ordinary[5:])


@pytest.mark.parametrize("with_images", [False, True])
def test_arrays_bytes_and_texts_need_no_python(
    storage: Format,
    tmp_path: Path,
    with_images: bool,
    in_python: Callable[[Callable[[], Any]], Any],
) -> None:
    content = values(with_images=with_images)
    path = written(storage, tmp_path / "shard", content, SCHEMA)
    assert outcome(storage, path) == in_python(lambda: outcome(storage, path))
    with open_records(storage, path) as opened:
        done, found = opened.index_known(range(3, len(content)))
    assert done.all()
    assert found.checksums == checksums(content[3:])
    stated = [value and value.values for value in found.values["caption"]]
    assert stated == [each.fields.get("caption.txt") for each in content[3:]]


@pytest.mark.parametrize(
    ("schema", "changed"),
    [
        (SCHEMA, {"caption.txt": b"\xff"}),
        (NUMBERED, {"json": b'{"age":1,"path":"a"}'}),
        ({"image": Field("image")}, {}),
        (SCHEMA, {"image.npy": npy_header((1, 1, 3)) + b"rgb"}),
        (SCHEMA, {"png": b"image", "image.npy": bytes(9)}),
        (SCHEMA, {"json": b'{"height":1,"path":"a","width":2}'}),
        (SCHEMA, {"json": b'{"path":"a"} '}),
        *((NUMBERED, {"json": meta}) for meta in METAS),
        (NUMBERED, {"png": b"image", "json": b'{"path":"a"}'}),
        (NUMBERED, {"json": None}),
        *((NUMBERED, {"png": b"i", "json": meta % size}) for meta in SIZED for size in SIZES),
    ],
)
def test_odd_values_give_the_same_result_or_error(
    storage: Format,
    tmp_path: Path,
    schema: Schema,
    changed: dict[str, bytes | None],
    in_python: Callable[[Callable[[], Any]], Any],
) -> None:
    content = values(9)
    for number in (3, 4):
        fields = {**content[number].fields, **changed}
        present = {name: data for name, data in fields.items() if data is not None}
        content[number] = Record(f"{number}", present)
    path = written(storage, tmp_path / "shard", content, schema)
    found = outcome(storage, path)
    assert found == in_python(lambda: outcome(storage, path))


@pytest.mark.parametrize("name", ["lmdb", "webdataset"])
def test_a_damaged_file_gives_the_same_result_or_error(
    name: str, tmp_path: Path, in_python: Callable[[Callable[[], Any]], Any]
) -> None:
    storage = get_format(name)
    intact = written(storage, tmp_path / "intact", records(12)).read_bytes()
    path, rng, errors = tmp_path / "shard", random.Random(3), 0
    for number in range(150):
        data = bytearray(intact)
        if number % 10 == 0:
            del data[rng.randrange(len(data)) :]
        for _ in range(rng.randint(1, 4)):
            if data:
                data[rng.randrange(len(data))] = rng.choice((0, 1, 2, 0xFF, rng.randrange(256)))
        path.write_bytes(data)
        found = outcome(storage, path)
        assert found == in_python(lambda: outcome(storage, path))
        errors += isinstance(found, str)
    assert 20 < errors < 240
