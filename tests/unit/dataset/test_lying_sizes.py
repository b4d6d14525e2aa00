"""Sizes in a re-signed index or manifest are compared with the data before memory is allocated."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forging import restate
from helpers import jpeg, make_dataset, make_tree, png

from shardkit import CenterCrop, CorruptDataset, RandomResizedCrop, Resize, open_dataset
from shardkit.dataset.index import HEAD, ROW, ROWS_NAME, Rows, checksum, row_check
from shardkit.dataset.manifest import Manifest, load_manifest
from shardkit.errors import CorruptRecord
from shardkit.recipe import Recipe
from shardkit.system.files import sha256_of
from shardkit.system.npy import save_npy

DECODES: list[Any] = [
    "pil",
    "numpy",
    "torch",
    Resize(20),
    Resize((20, 20)),
    CenterCrop(16),
    CenterCrop(16, resize=20),
    RandomResizedCrop(16),
    RandomResizedCrop(16, oversample=float("inf")),
]
LIES = [(0xFFFFFFFF, 0xFFFFFFFF), (1, 150_000_000), (150_000_000, 1), (12_000, 12_000), (320, 240)]
"""Sizes that no image of the tests has; the last is 8 times that of each."""

RAW = Recipe(encode="raw", resize=(30, 40), resize_mode="stretch", enlarge=True)


def resign(place: Path, change: Callable[[Rows], None]) -> Path:
    """Change the rows of an index, and correct all checksums and digests."""
    manifest = load_manifest(place)
    shards = b"".join((place / shard.name).read_bytes() for shard in manifest.shards)
    assert len(manifest.shards) == 1
    rows = np.array(np.load(place / ROWS_NAME))
    change(rows)
    for row in rows:
        start = int(row["offset"])
        image = shards[start : start + int(row["length"])]
        row["checksum"] = checksum(row.tobytes()[HEAD], image)
        row["check"] = tuple(row_check(row.tobytes()))
    save_npy(place / ROWS_NAME, rows.astype(ROW))

    def sign(manifest: Manifest) -> Manifest:
        digest, size = sha256_of(place / ROWS_NAME), (place / ROWS_NAME).stat().st_size
        return replace(
            manifest,
            files=tuple(
                replace(entry, sha256=digest, bytes=size) if entry.name == ROWS_NAME else entry
                for entry in manifest.files
            ),
        )

    restate(place, sign)
    return place


@pytest.fixture(params=["jpg", "png", "raw"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Three images of 40 x 30 pixels as JPEG, PNG or raw pixels."""
    make = png if request.param == "png" else jpeg
    files = {f"a/{n}.{make.__name__}": make(40, 30, n) for n in range(3)}
    options: dict[str, Any] = {"recipe": RAW} if request.param == "raw" else {}
    return make_dataset(make_tree(tmp_path / "s", files), tmp_path / "d", **options)


@pytest.mark.parametrize("size", LIES, ids=str)
def test_a_size_that_is_a_lie_is_a_corrupt_record(place: Path, size: tuple[int, int]) -> None:
    def lie(rows: Rows) -> None:
        rows["width"], rows["height"] = size

    resign(place, lie)
    tracemalloc.start()
    try:
        for decode in DECODES:
            dataset = open_dataset(place, decode=decode)
            for rows in ([0, 1, 2], [1]):
                with pytest.raises(CorruptRecord, match="row"):
                    list(dataset[rows])
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("decode", ["numpy", Resize(20)], ids=str)
def test_one_lie_among_true_sizes_is_found(place: Path, decode: Any) -> None:
    def lie(rows: Rows) -> None:
        rows["width"][1] = 41

    resign(place, lie)
    dataset = open_dataset(place, decode=decode)

    assert len(list(dataset[[0, 2]])) == 2
    with pytest.raises(CorruptRecord, match="row 1"):
        list(dataset[[0, 1, 2]])


@pytest.mark.parametrize("size", [(0, 0), (0, 30), (40, 0)], ids=str)
def test_a_size_of_no_pixels_is_a_corrupt_record(place: Path, size: tuple[int, int]) -> None:
    def lie(rows: Rows) -> None:
        rows["width"], rows["height"] = size

    resign(place, lie)
    # 0 x 0 is the size of an unchecked image with an unreadable header; this one decodes.
    for decode in DECODES:
        with pytest.raises(CorruptRecord, match=r"impossible size|the index states|not of the"):
            list(open_dataset(place, decode=decode)[[0, 1]])


def test_a_length_beyond_the_shard_is_a_corrupt_record(place: Path) -> None:
    def lie(rows: Rows) -> None:
        rows["length"] = 0xFFFFFFFF

    with pytest.raises(CorruptRecord, match="ends beyond its shard"):
        list(open_dataset(resign(place, lie))[[0, 1]])


def test_a_raw_shape_that_is_a_lie_is_a_corrupt_dataset(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "s", {"a/0.jpg": jpeg(40, 30, 0)})
    place = make_dataset(source, tmp_path / "d", recipe=RAW)
    restate(place, lambda manifest: replace(manifest, raw_shape=(1 << 30, 1 << 30, 3)))

    with pytest.raises(CorruptDataset):
        list(open_dataset(place, decode="numpy")[[0]])


def test_a_row_count_that_is_a_lie_is_a_corrupt_dataset(place: Path) -> None:
    def lie(manifest: Manifest) -> Manifest:
        (shard,) = manifest.shards
        return replace(manifest, rows=1 << 50, shards=(replace(shard, rows=1 << 50),))

    restate(place, lie)
    with pytest.raises(CorruptDataset, match="rows"):
        list(open_dataset(place)[[0]])
    with pytest.raises(CorruptDataset, match="rows"):
        _ = open_dataset(place).targets
