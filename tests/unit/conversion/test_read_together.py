"""Records that a source reads together become the bytes of records that it reads one by one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fields import make_fields
from helpers import FORMATS, make_dataset, make_folder

from shardkit import convert, open_dataset, open_source
from shardkit.changes.field_source import LayerSource
from shardkit.changes.field_table import TableValues
from shardkit.changes.field_values import FileValues
from shardkit.contracts import Images, Source
from shardkit.conversion import build
from shardkit.conversion.bulk import Prepared
from shardkit.dataset.opened import open_one
from shardkit.record import Record
from shardkit.system import compiled, native


def fields(place: Path) -> Source:
    return open_source("dataset", make_fields(place / "fields"))


def images(place: Path) -> Source:
    photos = make_folder(place / "photos")
    return open_source("dataset", make_dataset(photos, place / "images", to="webdataset"))


def arrays(place: Path) -> Source:
    for number in range(20):
        path = place / "arrays" / f"{number % 3}" / f"é {number}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.arange(number, number + 12, dtype=np.float16).reshape(3, 4))
    return open_source("npy", place / "arrays", arrays=True)


def table(place: Path) -> Source:
    """Return texts, numbers and arrays for rows of labels, in another order; some lack a text."""
    dataset = place / "labels"
    convert([{"label": number % 3} for number in range(20)], dataset, to="lmdb", workers=1)
    keys = [*open_dataset(dataset).keys]
    rows = [
        {"key": key, "text": f"é {n}" if n % 4 else None, "age": n, "vector": [n, 2.5]}
        for n, key in enumerate(keys)
    ]
    path = place / "table.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    np.save(place / "latent.npy", np.arange(60, dtype=np.float32).reshape(20, 3))
    opened = [open_one(dataset)]
    names = ["text?", "age", "vector:array"]
    values = (
        TableValues(path, opened, None, names),
        FileValues(place / "latent.npy", "latent", opened),
    )
    return LayerSource({"": opened[0]}, values)


SOURCES: dict[str, Callable[[Path], Source]] = {
    "fields": fields,
    "images": images,
    "arrays": arrays,
    "table": table,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    place = tmp_path_factory.mktemp("made")
    return {name: make(place) for name, make in SOURCES.items()}


def written(source: Source, target: Path, to: Any) -> dict[str, bytes]:
    """Return the files of a dataset."""
    convert(source, target, to=to, workers=1, shard_samples=7)
    return {path.name: path.read_bytes() for path in target.rglob("*") if path.is_file()}


def alone(images: Images) -> list[Record | None]:
    return [None] * len(images)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("name", SOURCES)
def test_both_ways_write_the_same_bytes(
    made: dict[str, Source], tmp_path: Path, name: str, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Images, "read_together", alone)
        patched.setattr(native, "module", lambda: None)
        expected = written(made[name], tmp_path / "alone", to)
    read = build._read

    def given(chunk: Any, row: int, record: Record | None) -> Prepared:
        assert record is not None or not compiled.is_available(), row
        return read(chunk, row, record)

    monkeypatch.setattr(build, "_read", given)
    assert written(made[name], tmp_path / "together", to) == expected


@pytest.mark.skipif(not compiled.is_available(), reason="the module is not built")
def test_arrays_that_changed_or_have_another_header_are_read_alone(tmp_path: Path) -> None:
    source = arrays(tmp_path)
    images = source.scan().splits[""]
    expected = images.read(range(len(images)))
    assert [*images.read_together()] == expected
    folder = tmp_path / "arrays"
    paths = [folder / entry.path for entry in images.entries]
    os.utime(paths[0], ns=(1, 1))
    time = paths[1].stat().st_mtime_ns
    np.save(paths[1], np.zeros((4, 3), np.float16))
    os.utime(paths[1], ns=(time, time))
    paths[2].unlink()
    assert [*images.read_together()] == [None] * 3 + expected[3:]
