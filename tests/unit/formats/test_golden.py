"""The layouts of format version 1 are frozen: what was written once is read, and written, for ever.

scripts/make_golden.py made tests/golden. A test that fails here says that files which users have
would be misread, or that today's files differ from theirs.
"""

from __future__ import annotations

import hashlib
import io
import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit import open_dataset, verify
from shardkit.conversion.convert import convert_scan
from shardkit.conversion.plan import ConvertOptions
from shardkit.dataset.manifest import Manifest, load_manifest
from shardkit.dataset.shardset import open_shards
from shardkit.record import Record
from shardkit.registry import get_format
from shardkit.sources.imagefolder import scan_imagefolder
from shardkit.testing import write_shard
from shardkit.verification.reindex import reindex

GOLDEN = Path(__file__).parents[2] / "golden"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_bytes())
SOURCES: dict[str, dict[str, Any]] = EXPECTED["sources"]
FORMATS = ("hdf5", "lmdb", "webdataset")
DATASETS = [f"{storage}/{kind}" for storage in FORMATS for kind in ("labelled", "raw")]
ALL = [*DATASETS, *(f"{storage}/fields" for storage in FORMATS)]
ORDER = [
    "cat/__tabby__.png",
    "bird/größe ★ 1.v2.jpg",
    "bird/wren.jpg",
    "cat/tom.jpg",
    "cat/tom.png",
]
"""The rows of all golden datasets: the random order of seed 1."""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("name", ALL)
def test_the_golden_files_are_unchanged(name: str) -> None:
    found = {shard: sha256((GOLDEN / name / shard).read_bytes()) for shard in EXPECTED[name]}
    assert found == EXPECTED[name]
    shards = {shard.name: shard.sha256 for shard in load_manifest(GOLDEN / name).shards}
    assert shards == EXPECTED[name]


@pytest.mark.parametrize("name", ALL)
def test_the_golden_dataset_is_intact(name: str) -> None:
    result = verify(GOLDEN / name, "decode")
    assert (result.findings, result.extras, result.records) == ([], [], len(SOURCES))


@pytest.mark.parametrize("name", DATASETS)
def test_golden_rows_have_their_keys_labels_and_paths(name: str) -> None:
    dataset = open_dataset(GOLDEN / name)
    assert list(dataset.paths) == ORDER
    assert list(dataset.keys) == [SOURCES[path]["key"] for path in ORDER]
    assert dataset.targets.tolist() == [SOURCES[path]["label"] for path in ORDER]
    assert dataset.classes == ["bird", "cat"]


@pytest.mark.parametrize("storage", FORMATS)
def test_stored_bytes_equal_the_source_files(storage: str) -> None:
    dataset = open_dataset(GOLDEN / storage / "labelled", decode="bytes")
    found = [sha256(dataset[row][0]) for row in range(len(dataset))]
    assert found == [SOURCES[path]["bytes"] for path in ORDER]
    assert found == [sha256((GOLDEN / "source" / path).read_bytes()) for path in ORDER]


@pytest.mark.parametrize("storage", FORMATS)
def test_lossless_images_have_their_pixels(storage: str) -> None:
    dataset = open_dataset(GOLDEN / storage / "labelled", decode="numpy")
    checked = 0
    for row, path in enumerate(ORDER):
        image, _ = dataset[row]
        assert image.shape == (SOURCES[path]["size"][1], SOURCES[path]["size"][0], 3)
        if SOURCES[path]["pixels"]:
            assert sha256(image.tobytes()) == SOURCES[path]["pixels"]
            checked += 1
    assert checked == 2


@pytest.mark.parametrize("storage", FORMATS)
def test_raw_pixels_are_the_same_in_all_formats(storage: str) -> None:
    dataset = open_dataset(GOLDEN / storage / "raw", decode="numpy")
    first = open_dataset(GOLDEN / FORMATS[0] / "raw", decode="numpy")
    assert dataset.manifest.raw_shape == (6, 4, 3)
    kept = ORDER.index("cat/__tabby__.png")
    assert sha256(dataset[kept][0].tobytes()) == SOURCES[ORDER[kept]]["pixels"]
    for row in range(len(dataset)):
        assert np.array_equal(dataset[row][0], first[row][0])


@pytest.mark.parametrize("name", ALL)
def test_todays_writer_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    manifest = load_manifest(GOLDEN / name)
    for shard in manifest.shards:
        path = GOLDEN / name / shard.name
        assert (
            sha256(rewritten(path, manifest, tmp_path / shard.name)) == EXPECTED[name][shard.name]
        )


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """The names of the script that made the datasets."""
    return runpy.run_path(str(GOLDEN.parents[1] / "scripts" / "make_golden.py"))


@pytest.mark.parametrize("storage", FORMATS)
def test_all_fields_have_their_values(storage: str, script: dict[str, Any]) -> None:
    dataset = open_shards(GOLDEN / storage / "fields")
    samples = [script["samples"]()[int(path)] for path in dataset.paths]
    assert list(dataset.keys) == [sample["key"] for sample in samples]
    lacking = {"mask", "score", "caption", "info", "boxes", "joints", "ragged", "blob"}
    for field in dataset.manifest.schema:
        assert field.rows == 5 - (field.name in lacking), field.name
    assert [len(dataset.manifest.fields_by_name), len(dataset.manifest.files)] == [16, 32]
    for name in ("label", "count", "caption", "info", "score"):
        expected = [sample[name] for sample in samples]
        column = dataset.column(name)
        assert [None if each is np.ma.masked else each for each in column] == expected
    for row, sample in enumerate(samples):
        tags, boxes, plain = (dataset.column(name)[row] for name in ("tags", "boxes", "plain"))
        assert tags.tolist() == sample["tags"]
        assert plain.tolist() == sample["plain"]
        assert dataset.column("points")[row].tolist() == sample["points"]
        if sample["boxes"] is not None:
            assert dataset.column("joints")[row].tolist() == sample["joints"]
            corners, labels = (each.tolist() for each in boxes)
            assert [[*a, b] for a, b in zip(corners, labels, strict=True)] == sample["boxes"]
    for name in ("image", "mask", "latent", "bits", "ragged", "blob"):
        rows = dataset.find(np.arange(5), name)
        for row, sample in enumerate(samples):
            data, value = bytes(rows.read(row, memoryview(bytearray(1 << 14))).data), sample[name]
            if value is None:
                assert (data, rows.fields[row]) == (b"", "absent")
            elif name == "ragged":
                assert np.array_equal(np.load(io.BytesIO(data)), value)
            else:
                content = value.read_bytes() if isinstance(value, Path) else bytes(value)
                assert data == content


@pytest.mark.parametrize("kind", ["labelled", "fields"])
@pytest.mark.parametrize("storage", FORMATS)
def test_todays_conversion_gives_the_same_shards_and_index(
    storage: str, kind: str, tmp_path: Path, script: dict[str, Any]
) -> None:
    if kind == "fields":
        script["convert_fields"](storage, tmp_path / "made")
    else:
        shutil.copytree(GOLDEN / "source", tmp_path / "source")
        options = ConvertOptions(to=storage, shard_samples=3, seed=1)
        convert_scan(scan_imagefolder(tmp_path / "source"), tmp_path / "made", options)
    made, golden = (contents(folder) for folder in (tmp_path / "made", GOLDEN / storage / kind))
    assert made.keys() == golden.keys()
    for name in golden.keys() - {"shardkit.json"}:  # which names the versions of libraries
        assert made[name] == golden[name], name
    one, other = (json.loads(files["shardkit.json"]) for files in (made, golden))
    for manifest in (one, other):
        del manifest["software"], manifest["digest"]
    assert one == other


@pytest.mark.parametrize("name", ALL)
def test_todays_index_is_the_same(name: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / name, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "index")
    assert reindex(tmp_path / "copy") == len(ORDER)
    assert contents(tmp_path / "copy") == contents(GOLDEN / name)


@pytest.mark.parametrize("name", ALL)
def test_these_comparisons_detect_one_changed_byte(name: str, tmp_path: Path) -> None:
    manifest = load_manifest(GOLDEN / name)

    def change(record: Record) -> Record:
        field = record.image_field or ""
        data = record.fields[field]
        return Record(record.key, {**record.fields, field: data[:-1] + bytes([data[-1] ^ 1])})

    shard = manifest.shards[0]
    changed = rewritten(GOLDEN / name / shard.name, manifest, tmp_path / shard.name, change)
    assert sha256(changed) != EXPECTED[name][shard.name]


def rewritten(
    path: Path,
    manifest: Manifest,
    target: Path,
    change: Callable[[Record], Record] = lambda record: record,
) -> bytes:
    """Return the bytes of a new shard with the records of the one at ``path``."""
    storage = get_format(manifest.format)
    reader = storage.read(path)
    try:
        records, meta = reader.read(range(len(reader))), reader.meta
    finally:
        reader.close()
    write_shard(
        storage, target, list(map(change, records)), meta=meta, raw_shape=manifest.raw_shape
    )
    return target.read_bytes()


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
