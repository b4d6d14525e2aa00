"""Descriptions of datasets and of their conversion."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from buckets import BUCKET, Bucket
from helpers import (
    jpeg,
    make_dataset,
    make_folder,
    make_tree,
    opened,
    run_main,
)
from refusals import refused
from stated import stated

from shardkit import describe, upload
from shardkit.errors import CorruptDataset, UsageError


def test_a_dataset_is_described(folder: Path, tmp_path: Path) -> None:
    place = make_dataset(folder, tmp_path / "made")
    described = describe(place)
    assert json.loads(json.dumps(described)) == described
    assert list(described) == [""]
    found = described[""]
    manifest = stated(place)
    assert (found["format"], found["rows"], found["shards"]) == ("lmdb", 6, 2)
    assert found["digest"] == manifest.digest
    assert found["bytes"] == sum((place / shard.name).stat().st_size for shard in manifest.shards)
    assert found["classes"] == {"cat": 3, "dog": 3}
    assert found["fields"] == {"cls": 6, "jpg": 4, "json": 6, "png": 2}
    assert found["recipe"]["encode"] == "keep"
    assert found["source"]["name"] == folder.name
    assert found["source"]["images"] == 6
    assert (found["skipped"], found["notes"], found["ignored"]) == ([], {}, {})
    assert found["raw_shape"] is None
    assert "shardkit" in found["software"]


@pytest.mark.parametrize("names", ["", "train/ val/"])
def test_a_dataset_at_a_url_is_described_without_its_shards(
    bucket: Bucket, tmp_path: Path, names: str
) -> None:
    source = tmp_path / "source"
    for name in names.split() or [""]:
        make_folder(source / name)
    place = make_dataset(source, tmp_path / "made")
    upload(place, f"s3://{BUCKET}/made")
    bucket.requests.clear()

    assert describe(f"s3://{BUCKET}/made") == describe(place)

    assert not any(name.endswith(".lmdb") for name in bucket.count("GET"))
    shown = run_main("info", f"s3://{BUCKET}/made").stdout
    assert shown.startswith(f"s3://{BUCKET}/made" + "/train" * bool(names) + "\n")


def test_sizes_are_smallest_median_and_largest(folder: Path, tmp_path: Path) -> None:
    files = [path.read_bytes() for path in folder.rglob("*.*")]
    images = describe(make_dataset(folder, tmp_path / "made"))[""]["images"]
    for name, values in {
        "width": [opened(data).width for data in files],
        "height": [opened(data).height for data in files],
        "bytes": [len(data) for data in files],
    }.items():
        assert images[name] == [min(values), int(median(values)), max(values)]


def test_empty_classes_are_reported(tmp_path: Path) -> None:
    make_tree(tmp_path / "photos", {"a/1.jpg": jpeg(), "b": None})
    assert describe(make_dataset(tmp_path / "photos", tmp_path / "made"))[""]["classes"] == {
        "a": 1,
        "b": 0,
    }


def test_raw_images_have_a_shape(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"resize": "8x10", "resize_mode": "stretch", "encode": "raw"}
    found = describe(make_dataset(folder, tmp_path / "made", **options))[""]
    assert list(found["raw_shape"]) == [8, 10, 3]
    assert found["images"] == {"width": [10] * 3, "height": [8] * 3, "bytes": [240] * 3}


def test_each_split_is_described(tmp_path: Path) -> None:
    make_folder(tmp_path / "photos/train", each=2)
    make_tree(tmp_path / "photos/val", {"cat": None})
    described = describe(make_dataset(tmp_path / "photos", tmp_path / "made"))
    assert {name: value["rows"] for name, value in described.items()} == {"train": 4, "val": 0}
    assert described["val"]["classes"] == {"cat": 0, "dog": 0}
    assert described["val"]["images"] == {"width": [], "height": [], "bytes": []}


def test_a_damaged_index_is_damage(folder: Path, tmp_path: Path) -> None:
    place = make_dataset(folder, tmp_path / "made")
    (place / "index/rows.npy").write_bytes(b"")
    with refused(CorruptDataset, "shardkit index"):
        describe(place)
    with refused(UsageError, tmp_path):
        describe(str(tmp_path))
