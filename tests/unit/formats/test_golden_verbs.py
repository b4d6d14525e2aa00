"""Today's commands work on the datasets in tests/golden, which earlier versions wrote."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import jpeg, make_tree, tree
from repairing import cut, flip, healed

from shardkit import append, merge, open_dataset, repair, split, verify
from shardkit.conversion.convert import convert_scan
from shardkit.conversion.plan import ConvertOptions
from shardkit.dataset.manifest import load_manifest
from shardkit.dataset.source import DatasetSource
from shardkit.errors import UsageError
from shardkit.recipe import Recipe
from shardkit.sources.imagefolder import scan_imagefolder
from shardkit.sources.samples import SampleOptions, Samples
from shardkit.system import compiled

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


@pytest.fixture(params=SCRIPT["FORMATS"])
def storage(request: Any) -> str:
    return str(request.param)


@pytest.fixture(params=[*SOURCES, "fields"])
def kind(request: Any) -> str:
    if request.param == "planes" and not compiled.is_available():
        pytest.skip("the module reads the planes of JPEGs")
    return str(request.param)


@pytest.fixture
def golden(storage: str, kind: str) -> Path:
    return GOLDEN / storage / kind


@pytest.fixture
def copy(golden: Path, tmp_path: Path) -> Path:
    return shutil.copytree(golden, tmp_path / "copy")


def source_of(kind: str) -> Any:
    if kind == "fields":
        return SCRIPT["samples"]()
    folders = [GOLDEN / folder for folder in SOURCES[kind]]
    return folders if len(folders) > 1 else folders[0]


def images(path: Path, decode: str = "numpy") -> dict[str, Any]:
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
    assert result.source.files == result.records == load_manifest(golden).rows


def test_damage_is_repaired(copy: Path, kind: str) -> None:
    before = tree(copy)
    first, *_, last = (copy / shard.name for shard in load_manifest(copy).shards)
    flip(first)
    cut(last)
    (copy / "index" / "keys.npy").unlink()
    assert not verify(copy).ok
    assert len(healed(copy, source_of(kind), before).files) == 3


@pytest.mark.parametrize("kind", SOURCES, indirect=True)  # Python samples repeat their paths
def test_rows_are_appended(copy: Path, golden: Path, kind: str) -> None:
    expected, manifest = images(golden), load_manifest(golden)
    other = {"planes": "source", "appended": "photos"}.get(kind, "more")
    result = append(copy, GOLDEN / other)
    assert result.images >= 2
    (appended,) = result.manifests.values()
    assert appended.rows == manifest.rows + result.images
    assert appended.shards[: len(manifest.shards)] == manifest.shards
    assert verify(copy, "decode").ok
    after = images(copy)
    assert_same_images({key: after[key] for key in expected}, expected)


def test_a_dataset_of_today_is_merged_with_them(golden: Path, kind: str, tmp_path: Path) -> None:
    manifest = load_manifest(golden)
    recipe = SCRIPT["OPTIONS"].get(kind, Recipe())
    options = ConvertOptions(to=manifest.format, recipe=recipe)
    if kind == "fields":
        new = [{**sample, "key": f"new/{sample['key']}"} for sample in SCRIPT["samples"]()]
        scan = Samples(new, SampleOptions(schema=SCRIPT["SCHEMA"])).scan()
    else:
        files: dict[str, bytes | None] = {
            f"{name}/today.jpg": jpeg(20, 10) for name in manifest.classes or ()
        }
        scan = scan_imagefolder(make_tree(tmp_path / "new", files))
    convert_scan(scan, tmp_path / "today", options)
    merge([golden, tmp_path / "today"], tmp_path / "merged")
    assert verify(tmp_path / "merged", "decode").ok
    assert_same_images(images(tmp_path / "merged"), images(golden) | images(tmp_path / "today"))


def test_their_rows_are_split(golden: Path) -> None:
    rows = split(golden, val=0.5)
    assert min(len(rows["train"]), len(rows["val"])) > 0
    count = load_manifest(golden).rows
    assert sorted([*rows["train"], *rows["val"]]) == list(range(count))


def test_they_are_converted_again(golden: Path, storage: str, tmp_path: Path) -> None:
    convert_scan(DatasetSource(golden).scan(), tmp_path / "made", ConvertOptions(to=storage))
    one, other = load_manifest(golden), load_manifest(tmp_path / "made")
    assert other.content_digest == one.content_digest
    assert verify(tmp_path / "made", against=golden).ok


def test_the_attached_dataset_is_not_repaired() -> None:
    with pytest.raises(UsageError, match="is attached"):
        repair(GOLDEN / "attached" / "index", GOLDEN / "source")
