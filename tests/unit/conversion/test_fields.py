"""Datasets of any fields: what is converted comes back, from each format, and damage is found."""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from shardkit import Field, convert, repair, verify
from shardkit.dataset.shardset import ShardSet
from shardkit.record import ABSENT
from shardkit.verification.reindex import reindex

FORMATS = ("hdf5", "lmdb", "webdataset")
DTYPES = ("float16", "bfloat16", "uint8", "int64", "bool", "complex64", "<M8[s]", "|S3", "<U2")


def png(seed: int, mode: str) -> bytes:
    file = io.BytesIO()
    shape = (3, 4, 3) if mode == "RGB" else (3, 4)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def array(dtype: str, shape: tuple[int, ...], seed: int) -> Any:
    """Return an array of any bytes that are values of a type."""
    kind = np.dtype("uint16" if dtype == "bfloat16" else dtype)
    rng = np.random.default_rng(seed)
    if kind.kind == "U":
        return rng.integers(65, 90, (*shape, 2)).astype("<u4").view(kind)[..., 0]
    count = int(np.prod(shape)) * kind.itemsize
    values = rng.integers(0, 2 if dtype == "bool" else 128, count).astype(np.uint8)
    return values.view(kind).reshape(shape)


FIELDS: dict[str, tuple[Field, Any]] = {
    "image": (Field("image"), lambda n: png(n, "RGB")),
    "mask": (Field("mask"), lambda n: png(n, "L")),
    "label": (Field("label", classes=3), lambda n: n % 3),
    "again": (Field("label", classes=("a", "b", "c")), lambda n: "abc"[n % 3]),
    "tags": (Field("labels", classes=4), lambda n: [*range(n % 5)]),
    "count": (Field("number", "uint16"), lambda n: n % 65536),
    "score": (Field("number", "float32"), lambda n: n / 4),
    "text": (Field("text"), lambda n: "ä\n★" * (n % 4)),
    "info": (Field("json"), lambda n: {"n": [n, None, "x"]}),
    "boxes": (Field("boxes"), lambda n: [[0, 0, n % 5, 1.5]] * (n % 3)),
    "things": (Field("boxes", classes=2), lambda n: [[0, 0, 1, 2, n % 2]] * (n % 3)),
    "bytes": (Field("bytes"), lambda n: bytes(n % 700)),
    "ragged": (Field("array"), lambda n: array("float16", (n % 3, 2), n)),
    "one": (Field("array", "int8", ()), lambda n: np.int8(n % 100)),
}


@st.composite
def datasets(draw: st.DrawFn) -> tuple[dict[str, Field], list[dict[str, Any]]]:
    """Generate a schema and samples of it, some without some fields."""
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=5, unique=True))
    known = {name: FIELDS[name] for name in names}
    for number in range(draw(st.integers(0, 2))):
        dtype = draw(st.sampled_from([each for each in DTYPES if each != "bfloat16"]))
        shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
        known[f"array_{number}"] = (
            Field("array", dtype, shape),
            lambda n, dtype=dtype, shape=shape: array(dtype, shape, n),
        )
    samples = []
    for _ in range(draw(st.integers(1, 5))):
        seed = draw(st.integers(0, 2**20))
        sample = {
            name: make(seed) if draw(st.integers(0, 5)) else None
            for name, (_, make) in known.items()
        }
        if "image" in sample and known.keys() <= {"image", "label"}:
            sample["image"] = png(seed, "RGB")
        samples.append(sample)
    return {name: field for name, (field, _) in known.items()}, samples


@settings(
    max_examples=25,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@pytest.mark.parametrize("to", FORMATS)
@given(made=datasets())
def test_any_fields_come_back(
    to: str, made: tuple[dict[str, Field], list[dict[str, Any]]], tmp_path: Path
) -> None:
    schema, samples = made
    path = tmp_path / "out"
    shutil.rmtree(path, ignore_errors=True)
    convert(samples, path, to=to, schema=schema, shard_samples=2)
    assert verify(path, "decode").findings == []
    require_equal(path, schema, samples)
    before = {each: each.read_bytes() for each in path.rglob("*") if each.is_file()}
    shutil.rmtree(path / "index")
    reindex(path)
    assert {each: each.read_bytes() for each in path.rglob("*") if each.is_file()} == before


def require_equal(path: Path, schema: Mapping[str, Field], samples: list[dict[str, Any]]) -> None:
    """Compare all values of a dataset with the samples."""
    dataset = ShardSet(path)
    order = [int(source) for source in dataset.paths]
    assert sorted(order) == list(range(len(samples)))
    assert dataset.schema == dict(schema)
    for name, field in schema.items():
        values = [samples[number][name] for number in order]
        rows = {entry.name: entry.rows for entry in dataset.manifest.schema}
        assert rows[name] == sum(value is not None for value in values)
        if field.kind in ("image", "mask", "array", "bytes"):
            found = dataset.find(np.arange(len(samples)), name)
            for row, value in enumerate(values):
                data = bytes(found.read(row, memoryview(bytearray(1 << 16))).data)
                assert (found.fields[row] == ABSENT) == (value is None)
                assert data == content(field, value)
        else:
            column = dataset.column(name)
            taken = None if name == "label" else dataset.values(name, range(len(samples)))
            for row, value in enumerate(values):
                assert same(field, column[row], value), (name, column[row], value)
                if taken is not None:
                    assert same(field, taken.value(row), value)


def content(field: Field, value: Any) -> bytes:
    """Return the bytes that the index locates for a value."""
    if value is None:
        return b""
    if field.kind != "array":
        return bytes(value)
    if field.is_uniform:
        return bytes(np.asarray(value).tobytes())
    file = io.BytesIO()
    np.save(file, value)
    return file.getvalue()


def same(field: Field, found: Any, value: Any) -> bool:
    """Return whether a value of a column is that of a sample."""
    if value is None:
        return found is None or found is np.ma.masked
    if field.kind == "label" and isinstance(value, str):
        value = (field.classes or ()).index(value)
    if isinstance(found, tuple):
        boxes, labels = (each.tolist() for each in found)
        found = [[*box, label] for box, label in zip(boxes, labels, strict=True)]
    if isinstance(found, np.ndarray | np.generic):
        found = found.tolist()
    return bool(found == value)


SAMPLES: list[dict[str, Any]] = [
    {name: make(n) for name, (_, make) in FIELDS.items() if n != 3 or name != "text"}
    | {"latent": array("float16", (2, 3), n)}
    for n in range(5)
]


@pytest.fixture(scope="module", params=FORMATS)
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fields") / "out"
    schema = {name: field for name, (field, _) in FIELDS.items()}
    convert(SAMPLES, path, to=request.param, schema=schema, shard_samples=3)
    return path


def test_damage_of_any_index_file_is_found(dataset: Path) -> None:
    files = sorted(path for path in (dataset / "index").rglob("*.npy") if path.stat().st_size > 128)
    assert len(files) > 20
    for path in files:
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        found = verify(dataset)
        path.write_bytes(data)
        assert path.relative_to(dataset).as_posix() in {each.file for each in found.findings}
    assert verify(dataset).ok


def test_damage_of_any_field_names_its_row(dataset: Path) -> None:
    shards = ShardSet(dataset)
    shard = dataset / shards.manifest.shards[0].name
    data = shard.read_bytes()
    for name in ("image", "mask", "latent", "ragged", "bytes", "one"):
        row = 0
        entry = shards.entries_of(name).read(np.array([row]))[0]
        if not entry["length"]:
            continue
        place = int(entry["offset"]) + int(entry["length"]) - 1
        shard.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        found = verify(dataset)
        assert row in {each.row for each in found.findings}, name
    shard.write_bytes(data)
    assert verify(dataset).ok


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_dataset_is_verified_against_its_samples(dataset: Path) -> None:
    result = verify(dataset, against=SAMPLES)
    assert result.findings == []
    assert result.source is not None
    assert (result.source.files, result.source.same) == (5, 5)
    for name in FIELDS.keys() | {"latent"}:
        changed = [dict(sample) for sample in SAMPLES]
        del changed[1][name]
        (finding,) = verify(dataset, against=changed).findings
        assert finding.path == "000000001"
        assert finding.source


def test_a_dataset_is_repaired_from_its_samples(dataset: Path) -> None:
    before = contents(dataset)
    shard = next(dataset.glob("shard-000000*"))
    shard.write_bytes(before[shard.name][:-1000])
    for path in (dataset / "index").rglob("*.npy"):
        path.unlink()
    assert repair(dataset, SAMPLES).findings == []
    assert contents(dataset) == before
    changed = [{**sample, "score": 7.0} for sample in SAMPLES]
    shard.unlink()
    assert not repair(dataset, changed).ok
    assert repair(dataset, SAMPLES).ok
    assert contents(dataset) == before
