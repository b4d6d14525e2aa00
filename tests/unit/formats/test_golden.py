"""The layout is frozen: datasets are read, and written with the same bytes.

scripts/make_golden.py made tests/golden. A test that fails here says that files which users have
would be misread, or that today's files differ from theirs.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import runpy
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import FORMATS, contents
from stated import has_compiled_module, stated

from shardkit import attach, convert, fields, open_dataset, open_source, verify
from shardkit.dataset.shardset import open_shards
from shardkit.record import Record
from shardkit.registry import get_format
from shardkit.testing import write_shard

GOLDEN = Path(__file__).parents[2] / "golden"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_bytes())
SOURCES: dict[str, dict[str, Any]] = EXPECTED["sources"] | EXPECTED["more"] | EXPECTED["photos"]
PICTURES = [
    "cat/__tabby__.png",
    "bird/größe ★ 1.v2.jpg",
    "bird/wren.jpg",
    "cat/tom.jpg",
    "cat/tom.png",
]
ORDER = {
    "labelled": PICTURES,
    "raw": PICTURES,
    "appended": [*PICTURES, "fox/red.jpg", "cat/new.png"],
    "planes": [
        "full/tall.jpg",
        "half/tall.jpg",
        "half/plain.png",
        "full/wide.jpg",
        "half/gray.jpg",
    ],
}
"""The rows of each kind of dataset of pictures: the random order of seed 1."""
DATASETS = [f"{storage}/{kind}" for storage in FORMATS for kind in ORDER]
ALL = [*DATASETS, *(f"{storage}/fields" for storage in FORMATS)]
ATTACHED = GOLDEN / "attached"
SCRIPT = runpy.run_path(str(GOLDEN.parents[1] / "scripts" / "make_golden.py"))
"""The script that made the datasets."""

needs_module = pytest.mark.skipif(not has_compiled_module(), reason="it writes planes")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("name", ALL)
def test_the_golden_files_are_unchanged(name: str) -> None:
    found = {shard: sha256((GOLDEN / name / shard).read_bytes()) for shard in EXPECTED[name]}
    assert found == EXPECTED[name]
    shards = {shard.name: shard.sha256 for shard in stated(GOLDEN / name).shards}
    assert shards == EXPECTED[name]


@pytest.mark.parametrize("name", ALL)
def test_the_golden_dataset_is_intact(name: str) -> None:
    result = verify(GOLDEN / name, "decode")
    assert (result.findings, result.extras) == ([], [])
    assert result.records == len(ORDER.get(name.split("/")[1], PICTURES))


@pytest.mark.parametrize("name", DATASETS)
def test_golden_rows_have_their_keys_labels_and_paths(name: str) -> None:
    dataset = open_dataset(GOLDEN / name)
    kind = name.split("/")[1]
    order = ORDER[kind]
    assert list(dataset.paths) == order
    assert list(dataset.keys) == [SOURCES[path]["key"] for path in order]
    assert dataset.targets.tolist() == [SOURCES[path]["label"] for path in order]
    classes = {"planes": ["full", "half"], "appended": ["bird", "cat", "fox"]}
    assert dataset.classes == classes.get(kind, ["bird", "cat"])


@pytest.mark.parametrize("kind", ["labelled", "appended"])
@pytest.mark.parametrize("storage", FORMATS)
def test_stored_bytes_equal_the_source_files(storage: str, kind: str) -> None:
    dataset = open_dataset(GOLDEN / storage / kind, decode="bytes")
    stored = [sha256(dataset[row][0]) for row in range(len(dataset))]
    assert stored == [SOURCES[path]["bytes"] for path in ORDER[kind]]


def test_the_source_files_are_unchanged() -> None:
    for path, source in SOURCES.items():
        places = [GOLDEN / folder / path for folder in ("source", "more", "photos")]
        (content,) = (place.read_bytes() for place in places if place.exists())
        assert sha256(content) == source["bytes"], path


@pytest.mark.parametrize(("kind", "exact"), [("labelled", 2), ("appended", 3), ("planes", 5)])
@pytest.mark.parametrize("storage", FORMATS)
def test_exact_images_have_their_pixels(storage: str, kind: str, exact: int) -> None:
    dataset = open_dataset(GOLDEN / storage / kind, decode="numpy")
    checked = 0
    for row, path in enumerate(ORDER[kind]):
        image, _ = dataset[row]
        assert image.shape == (SOURCES[path]["size"][1], SOURCES[path]["size"][0], 3)
        if SOURCES[path]["pixels"]:
            assert sha256(image.tobytes()) == SOURCES[path]["pixels"]
            checked += 1
    assert checked == exact


@pytest.mark.parametrize("name", ALL)
def test_todays_writer_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    manifest = stated(GOLDEN / name)
    for shard in manifest.shards:
        path = GOLDEN / name / shard.name
        assert (
            sha256(rewritten(path, manifest, tmp_path / shard.name)) == EXPECTED[name][shard.name]
        )


@pytest.mark.parametrize("storage", FORMATS)
def test_all_fields_have_their_values(storage: str) -> None:
    dataset = open_shards(GOLDEN / storage / "fields")
    samples = [SCRIPT["samples"]()[int(path)] for path in dataset.paths]
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


@pytest.mark.parametrize(
    "kind", ["labelled", "fields", "appended", pytest.param("planes", marks=needs_module)]
)
@pytest.mark.parametrize("storage", FORMATS)
def test_todays_conversion_gives_the_same_shards_and_index(
    storage: str, kind: str, tmp_path: Path
) -> None:
    SCRIPT["_makers"]()[f"{storage}/{kind}"](tmp_path / "made")
    assert_same_content(tmp_path / "made", GOLDEN / storage / kind)


def test_todays_attach_gives_the_same_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = attached_copy(tmp_path)
    shutil.rmtree(folder / "index")
    SCRIPT["attach_archive"](folder)
    assert_same_content(folder / "index", ATTACHED / "index")


def test_the_attached_dataset_reads_and_verifies(tmp_path: Path) -> None:
    folder = attached_copy(tmp_path)
    dataset = open_dataset(folder / "index", root=folder, decode="bytes", fields=("image", "txt"))
    assert list(dataset.keys) == ["bird/wren", "cat/tom"]
    for row, path in enumerate(("bird/wren.jpg", "cat/tom.png")):
        image, text = dataset[row]
        assert sha256(image) == SOURCES[path]["bytes"]
        assert text == f"größe of {path}"
    result = verify(folder / "index", "decode", root=folder)
    assert (result.findings, result.records) == ([], 2)
    archive = folder / SCRIPT["ARCHIVE"]
    content = archive.read_bytes()
    archive.write_bytes(content[:600] + b"?" + content[601:])
    assert not verify(folder / "index", root=folder).ok


def test_an_archive_is_added_to_the_attached_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = attached_copy(tmp_path)
    with tarfile.open(folder / "more.tar", "w") as archive:
        archive.add(GOLDEN / "more" / "fox" / "red.jpg", "fox/red.jpg")
        archive.add(ATTACHED / "index" / "shardkit.json", "fox/red.txt")
    monkeypatch.chdir(folder)
    made = attach("{archive,more}.tar", "index", label="folder", keep="txt")
    assert (made.kept, made.manifests[""].rows) == (1, 3)
    assert verify("index").ok


def attached_copy(target: Path) -> Path:
    """Return a copy of the attached dataset whose archive has its modification time."""
    folder = shutil.copytree(ATTACHED, target / "attached")
    os.utime(folder / SCRIPT["ARCHIVE"], (SCRIPT["ARCHIVE_TIME"],) * 2)
    return folder


def assert_same_content(made: Path, golden: Path) -> None:
    """Compare all files, except for the versions of libraries that manifests name."""
    files, expected = contents(made), contents(golden)
    assert files.keys() == expected.keys()
    for name in expected.keys() - {"shardkit.json"}:
        assert files[name] == expected[name], name
    one, other = (json.loads(each["shardkit.json"]) for each in (files, expected))
    for manifest in (one, other):
        del manifest["digest"]
        for part in (manifest, *manifest["source"].get("parts", ())):
            del part["software"]
    assert one == other


@pytest.mark.parametrize("storage", FORMATS)
def test_these_comparisons_detect_one_changed_byte(storage: str, tmp_path: Path) -> None:
    name = f"{storage}/labelled"
    manifest = stated(GOLDEN / name)

    def change(record: Record) -> Record:
        field = record.image_field or ""
        data = record.fields[field]
        return Record(record.key, {**record.fields, field: data[:-1] + bytes([data[-1] ^ 1])})

    shard = manifest.shards[0]
    changed = rewritten(GOLDEN / name / shard.name, manifest, tmp_path / shard.name, change)
    assert sha256(changed) != EXPECTED[name][shard.name]


def rewritten(
    path: Path,
    manifest: Any,
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
    shape = manifest.raw_shape and tuple(manifest.raw_shape)
    write_shard(storage, target, list(map(change, records)), meta=meta, raw_shape=shape)
    return target.read_bytes()


# Datasets whose fields were changed later: written once, they are read forever.


@pytest.mark.parametrize("storage", FORMATS)
def test_layered_fields_have_their_values(storage: str) -> None:
    fields = ("image", "label", "caption", "latent")
    dataset = open_dataset(GOLDEN / storage / "layered", fields=fields, decode="bytes", verify=True)
    latents = np.arange(30, dtype=np.float16).reshape(5, 3, 2)
    assert dataset.classes == ["bird", "cat", "fox"]
    for row, path in enumerate(dataset.paths):
        image, label, caption, latent = dataset[row]
        assert image == (GOLDEN / "source" / path).read_bytes()
        assert dataset.classes[label] == SCRIPT["LABELS"][path]
        assert caption == SCRIPT["CAPTIONS"][path]
        assert np.array_equal(latent.numpy(), latents[row])


@pytest.mark.parametrize("storage", FORMATS)
def test_a_layered_dataset_is_intact_and_can_be_copied_or_undone(
    storage: Any, tmp_path: Path
) -> None:
    golden = GOLDEN / storage / "layered"
    result = verify(golden, "decode")
    assert (result.findings, result.extras) == ([], [])
    shutil.copytree(golden, tmp_path / "two")
    convert(open_source("dataset", golden), tmp_path / "one", to=storage)
    digest = stated(golden).content_digest
    assert stated(tmp_path / "one").content_digest == digest
    fields.undo(tmp_path / "two")
    assert open_dataset(tmp_path / "two").classes == ["bird", "cat"]
    assert verify(tmp_path / "two").ok


@pytest.mark.parametrize("storage", FORMATS)
def test_the_shards_of_layers_are_those_of_the_golden_dataset_without_layers(storage: str) -> None:
    layered, before = (stated(GOLDEN / storage / name) for name in ("layered", "labelled"))
    assert layered.shards == before.shards


@pytest.mark.parametrize("storage", FORMATS)
def test_todays_commands_on_fields_give_the_same_shards_and_indexes(
    storage: str, tmp_path: Path
) -> None:
    SCRIPT["change_fields"](storage, tmp_path / "made")
    assert layered_files(tmp_path / "made") == layered_files(GOLDEN / storage / "layered")


def layered_files(folder: Path) -> dict[str, Any]:
    """Return all files but the manifests, which state versions of libraries."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "shardkit.json"
    }
