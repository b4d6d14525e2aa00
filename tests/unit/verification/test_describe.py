"""Descriptions of datasets and of their conversion."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from buckets import BUCKET, Bucket
from helpers import (
    FORMATS,
    encoded,
    exif,
    jpeg,
    make_dataset,
    make_folder,
    make_tree,
    opened,
    picture,
    run_main,
)

from shardkit import CorruptDataset, UsageError, describe, open_dataset
from shardkit.recipe import Recipe
from shardkit.transfer.upload import upload
from shardkit.verification.describe import _spread


@pytest.mark.parametrize("to", FORMATS)
def test_a_dataset_is_described(folder: Path, tmp_path: Path, to: str) -> None:
    place = make_dataset(folder, tmp_path / "made", to=to)
    described = describe(place)
    assert list(described) == [""]
    found = described[""]
    manifest = open_dataset(place).manifest
    assert (found["format"], found["rows"], found["shards"]) == (to, 6, 2)
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


def test_the_spread_of_numbers_in_parts_is_that_of_all() -> None:
    random = np.random.default_rng(1)
    for most in (1, 3, 1 << 16, 1 << 17, 1 << 32):
        for count in (1, 2, 3, 10, 1001):
            values = random.integers(0, most, count, np.uint32)
            expected = [int(values.min()), int(np.median(values)), int(values.max())]
            assert _spread(partial(np.array_split, values, 3)) == expected
    assert _spread(lambda: [np.zeros(0, np.uint32)]) == []


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


def test_the_description_is_json(folder: Path, tmp_path: Path) -> None:
    described = describe(make_dataset(folder, tmp_path / "made"))
    assert json.loads(json.dumps(described))[""]["rows"] == 6


def test_an_unlabeled_dataset_has_no_classes(tmp_path: Path) -> None:
    make_tree(tmp_path / "photos", {"a.jpg": jpeg()})
    found = describe(make_dataset(tmp_path / "photos", tmp_path / "made"))[""]
    assert found["classes"] is None
    assert found["images"]["width"] == [24, 24, 24]


def test_empty_classes_are_reported(tmp_path: Path) -> None:
    make_tree(tmp_path / "photos", {"a/1.jpg": jpeg(), "b": None})
    assert describe(make_dataset(tmp_path / "photos", tmp_path / "made"))[""]["classes"] == {
        "a": 1,
        "b": 0,
    }


def test_noted_skipped_and_ignored_files_are_reported(tmp_path: Path) -> None:
    make_tree(
        tmp_path / "photos",
        {
            "a/turned.jpg": encoded(picture(), "JPEG", exif=exif(6)),
            "a/bad.jpg": b"junk",
            "a/.hidden": b"",
            "a/notes.txt": b"text",
        },
    )
    found = describe(make_dataset(tmp_path / "photos", tmp_path / "made", on_error="skip"))[""]
    assert found["notes"] == {"orientation": 1}
    assert [item["path"] for item in found["skipped"]] == ["a/bad.jpg"]
    assert found["ignored"] == {"hidden": 1, "not an image": 1}
    assert found["rows"] == 1


def test_raw_images_have_a_shape(folder: Path, tmp_path: Path) -> None:
    recipe = Recipe(resize=(8, 10), resize_mode="stretch", encode="raw")
    found = describe(make_dataset(folder, tmp_path / "made", recipe=recipe))[""]
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
    with pytest.raises(CorruptDataset, match="shardkit index"):
        describe(place)


def test_a_missing_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a shardkit dataset"):
        describe(str(tmp_path))
