"""Records that a source reads together become the bytes of records that it reads one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fields import make_fields
from helpers import FORMATS, make_dataset, make_folder

from shardkit import convert, open_source
from shardkit.contracts import Images
from shardkit.conversion import build
from shardkit.conversion.bulk import Prepared
from shardkit.record import Record


def fields(place: Path) -> Path:
    return make_fields(place / "fields")


def images(place: Path) -> Path:
    return make_dataset(make_folder(place / "photos"), place / "images", to="webdataset")


SOURCES: dict[str, Callable[[Path], Path]] = {"fields": fields, "images": images}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("made")
    return {name: make(place) for name, make in SOURCES.items()}


def written(source: Path, target: Path, to: Any) -> dict[str, bytes]:
    """Return the shards and the index of a copy."""
    convert(open_source("dataset", source), target, to=to, workers=1, shard_samples=7)
    return {path.name: path.read_bytes() for path in target.rglob("*") if path.is_file()}


def alone(images: Images) -> list[Record | None]:
    return [None] * len(images)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("name", SOURCES)
def test_both_ways_write_the_same_bytes(
    made: dict[str, Path], tmp_path: Path, name: str, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Images, "read_together", alone)
        expected = written(made[name], tmp_path / "alone", to)
    read = build._read

    def given(chunk: Any, row: int, record: Record | None) -> Prepared:
        assert record is not None, row
        return read(chunk, row, record)

    monkeypatch.setattr(build, "_read", given)
    assert written(made[name], tmp_path / "together", to) == expected
