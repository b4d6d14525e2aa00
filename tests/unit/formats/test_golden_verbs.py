"""Today's commands work on the datasets in tests/golden, which earlier versions wrote."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import jpeg, make_tree, tree
from refusals import refused
from repairing import cut, flip, healed
from stated import has_compiled_module, shards_of, stated

from shardkit import (
    UsageError,
    append,
    convert,
    merge,
    open_dataset,
    open_source,
    repair,
    split,
    verify,
)
from shardkit.torch.data.images import DecodeName

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "make_golden.py"))
SOURCES = {
    "labelled": ("source",),
    "raw": ("source",),
    "appended": ("source", "more"),
    "planes": ("photos",),
}
"""Folders that each kind of dataset was made from; fields are made from Python samples."""


CASES = (
    ("lmdb", "labelled"),
    ("hdf5", "raw"),
    ("webdataset", "appended"),
    ("lmdb", "planes"),
    ("hdf5", "fields"),
    ("webdataset", "labelled"),
)
"""Each kind once; `test_golden` reads, verifies and writes each in all formats."""


@pytest.fixture(params=CASES, ids="-".join)
def golden(request: pytest.FixtureRequest) -> Path:
    path = GOLDEN.joinpath(*request.param)
    if path.name == "planes" and not has_compiled_module():
        pytest.skip("the module reads the planes of JPEGs")
    return path


@pytest.fixture
def kind(golden: Path) -> str:
    return golden.name


@pytest.fixture
def copy(golden: Path, tmp_path: Path) -> Path:
    return shutil.copytree(golden, tmp_path / "copy")


def source_of(kind: str) -> Any:
    if kind == "fields":
        return SCRIPT["samples"]()
    folders = [GOLDEN / folder for folder in SOURCES[kind]]
    return folders if len(folders) > 1 else folders[0]


def images(path: Path, decode: DecodeName = "numpy") -> dict[str, Any]:
    dataset = open_dataset(path, decode=decode, fields=("image",))
    return {key: dataset[row][0] for row, key in enumerate(dataset.keys)}


def assert_same_images(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    for key, image in first.items():
        np.testing.assert_array_equal(image, second[key], key)


def test_they_equal_their_source(golden: Path, kind: str) -> None:
    result = verify(golden, against=source_of(kind))
    assert result.findings == []
    assert result.source is not None
    assert result.source.files == result.records == stated(golden).rows


def test_damage_is_repaired(copy: Path, kind: str) -> None:
    before = tree(copy)
    first, *_, last = shards_of(copy)
    flip(first)
    cut(last)
    (copy / "index" / "keys.npy").unlink()
    assert not verify(copy).ok
    assert len(healed(copy, source_of(kind), before).files) == 3


def test_rows_are_appended(copy: Path, golden: Path, kind: str) -> None:
    if kind == "fields":
        pytest.skip("Python samples repeat their paths")
    expected, manifest = images(golden), stated(golden)
    other = {"planes": "source", "appended": "photos"}.get(kind, "more")
    result = append(copy, GOLDEN / other)
    assert result.images >= 2
    (appended,) = result.manifests.values()
    assert appended.rows == manifest.rows + result.images
    kept = [shard.sha256 for shard in appended.shards[: len(manifest.shards)]]
    assert kept == [shard.sha256 for shard in manifest.shards]
    assert verify(copy, "decode").ok
    after = images(copy)
    assert_same_images({key: after[key] for key in expected}, expected)


def test_a_dataset_of_today_is_merged_with_them(golden: Path, kind: str, tmp_path: Path) -> None:
    manifest, new = stated(golden), tmp_path / "new"
    options: Any = {"to": manifest.format, "recipe": SCRIPT["OPTIONS"].get(kind)}
    if kind == "fields":
        samples = [{**sample, "key": f"new/{sample['key']}"} for sample in SCRIPT["samples"]()]
        convert(samples, tmp_path / "today", schema=SCRIPT["SCHEMA"], **options)
    else:
        make_tree(new, {f"{name}/today.jpg": jpeg(20, 10) for name in manifest.classes})
        convert(new, tmp_path / "today", **options)
    merge([golden, tmp_path / "today"], tmp_path / "merged")
    assert verify(tmp_path / "merged", "decode").ok
    assert_same_images(images(tmp_path / "merged"), images(golden) | images(tmp_path / "today"))


def test_their_rows_are_split(golden: Path) -> None:
    rows = split(golden, val=0.5)
    assert min(len(rows["train"]), len(rows["val"])) > 0
    count = stated(golden).rows
    assert sorted([*rows["train"], *rows["val"]]) == list(range(count))


def test_they_are_converted_again(golden: Path, tmp_path: Path) -> None:
    convert(open_source("dataset", golden), tmp_path / "made", to=golden.parent.name)  # type: ignore[arg-type]
    one, other = stated(golden), stated(tmp_path / "made")
    assert other.content_digest == one.content_digest
    assert verify(tmp_path / "made", against=golden).ok


def test_the_attached_dataset_is_not_repaired() -> None:
    with refused(UsageError, "index"):
        repair(GOLDEN / "attached" / "index", GOLDEN / "source")
