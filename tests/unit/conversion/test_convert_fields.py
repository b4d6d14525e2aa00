"""Datasets of any fields: what is converted comes back, from each format, and damage is found."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hostile.forging import restate
from kinds import FIELDS, SAMPLES, SCHEMA, contents
from refusals import refused

from shardkit import convert, repair, verify
from shardkit.dataset.manifest import FieldEntry, Manifest
from shardkit.dataset.shardset import open_shards
from shardkit.errors import CorruptDataset, UsageError
from shardkit.system.files import sha256_of

FORMATS = ("hdf5", "lmdb", "webdataset")


@pytest.fixture(scope="module")
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, to = tmp_path_factory.mktemp("fields") / "out", getattr(request, "param", "lmdb")
    convert(SAMPLES, path, to=to, schema=SCHEMA, shard_samples=3, workers=1)  # type: ignore[arg-type]
    return path


@pytest.mark.slow
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


@pytest.mark.parametrize("dataset", FORMATS, indirect=True)
def test_damage_of_any_field_names_its_row(dataset: Path) -> None:
    shards = open_shards(dataset)
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


@pytest.mark.slow
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


def test_an_unknown_field_lists_the_known_ones(dataset: Path) -> None:
    shards = open_shards(dataset)
    for look in (shards.column, shards.entries_of, lambda name: shards.values(name, [0])):
        with refused(UsageError, "'depth'"):
            look("depth")
    with refused(UsageError, "'mask'"):
        shards.column("mask")
    with refused(UsageError, "'count'"):
        shards.find(np.array([0]), "count")


def test_damage_that_no_digest_shows_is_refused(dataset: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(dataset, tmp_path / "copy"))
    for name, reason in (
        ("tags", "a label is not a class"),
        ("again", "a label is not a class"),
        ("things-labels", "a label is not a class"),
        ("text-ends", "index"),
        ("text", "row . of a column"),
        ("info", "row . of a column"),
    ):
        path = place / f"index/columns/{name}.npy"
        data = path.read_bytes()
        path.write_bytes(data[:-8] + b"\xff" * 8)
        with pytest.raises(CorruptDataset, match=reason):
            open_shards(place, verify=False).column(name.partition("-")[0])
        path.write_bytes(data)


def test_a_lie_of_the_index_is_found_despite_its_digest(dataset: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(dataset, tmp_path / "copy"))
    for name in ("columns/count", "columns/text", "columns/boxes", "fields/mask", "fields/latent"):
        path = place / f"index/{name}.npy"
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        restate(place, lambda manifest: with_digests(manifest, place))
        reasons = [finding.reason for finding in verify(place).findings]
        path.write_bytes(data)
        restate(place, lambda manifest: with_digests(manifest, place))
        assert [reason for reason in reasons if name.partition("/")[2] in reason], reasons
    restate(place, lambda manifest: replace(manifest, schema=with_fewer_rows(manifest)))
    assert "declares 3 rows with text; the index has 4" in " ".join(
        each.reason for each in verify(place).findings
    )


def with_digests(manifest: Manifest, place: Path) -> Manifest:
    files = [replace(entry, sha256=sha256_of(place / entry.name)) for entry in manifest.files]
    return replace(manifest, files=tuple(files))


def with_fewer_rows(manifest: Manifest) -> tuple[FieldEntry, ...]:
    return tuple(
        replace(entry, rows=entry.rows - (entry.name == "text")) for entry in manifest.schema
    )
