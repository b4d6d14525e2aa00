"""Sizes in a re-signed index or manifest are compared with the data before memory is allocated."""

from __future__ import annotations

import shutil
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import jpeg, make_dataset, make_tree, png
from hostile.damage import edit, restate_files, with_checks
from refusals import refused

from shardkit import CenterCrop, RandomResizedCrop, Resize, open_dataset
from shardkit.errors import CorruptDataset, CorruptRecord

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

RAW: dict[str, Any] = {
    "encode": "raw",
    "resize": "30x40",
    "resize_mode": "stretch",
    "enlarge": True,
}
INDEX = "index/rows.npy"


def resign(place: Path, change: Callable[[Any], object]) -> None:
    """Change the rows of an index, and correct all checksums and digests."""
    (shard,) = place.glob("shard-*")
    content, rows = shard.read_bytes(), np.load(place / INDEX)
    change(rows)
    for row in rows:
        start = int(row["offset"])
        image = content[start : start + int(row["length"])]
        row["checksum"] = zlib.crc32(row.tobytes()[16:29] + image)
    np.save(place / INDEX, with_checks(rows))
    restate_files(place, INDEX)


@pytest.fixture(scope="module", params=["jpg", "png", "raw"])
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three images of 40 x 30 pixels as JPEG, PNG or raw pixels."""
    make, root = png if request.param == "png" else jpeg, tmp_path_factory.mktemp("sizes")
    files = {f"a/{n}.{make.__name__}": make(40, 30, n) for n in range(3)}
    options: dict[str, Any] = RAW if request.param == "raw" else {}
    return make_dataset(make_tree(root / "s", files), root / "d", **options)


@pytest.fixture
def place(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "d"))


@pytest.mark.parametrize("size", LIES, ids=str)
def test_a_size_that_is_a_lie_is_a_corrupt_record(place: Path, size: tuple[int, int]) -> None:
    resign(place, lambda rows: rows.__setitem__(["width", "height"], size))
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
    resign(place, lambda rows: rows["width"].__setitem__(1, 41))
    dataset = open_dataset(place, decode=decode)

    assert len(list(dataset[[0, 2]])) == 2
    with pytest.raises(CorruptRecord, match="row 1"):
        list(dataset[[0, 1, 2]])


@pytest.mark.parametrize("size", [(0, 0), (0, 30), (40, 0)], ids=str)
def test_a_size_of_no_pixels_is_a_corrupt_record(place: Path, size: tuple[int, int]) -> None:
    resign(place, lambda rows: rows.__setitem__(["width", "height"], size))
    # 0 x 0 is the size of an unchecked image with an unreadable header; this one decodes.
    for decode in DECODES:
        with refused(CorruptRecord):
            list(open_dataset(place, decode=decode)[[0, 1]])


def test_a_raw_shape_that_is_a_lie_is_a_corrupt_dataset(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "s", {"a/0.jpg": jpeg(40, 30, 0)})
    place = make_dataset(source, tmp_path / "d", **RAW)
    edit(place, lambda manifest: manifest.update(raw_shape=[1 << 30, 1 << 30, 3]))

    with pytest.raises(CorruptDataset):
        list(open_dataset(place, decode="numpy")[[0]])


def test_a_row_count_that_is_a_lie_is_a_corrupt_dataset(place: Path) -> None:
    def lie(manifest: dict[str, Any]) -> None:
        manifest["rows"] = manifest["shards"][0]["rows"] = 1 << 50

    edit(place, lie)
    with pytest.raises(CorruptDataset, match="rows"):
        list(open_dataset(place)[[0]])
    with pytest.raises(CorruptDataset, match="rows"):
        _ = open_dataset(place).targets
