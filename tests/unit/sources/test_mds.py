"""Shards that MosaicML Streaming's own package wrote, and an index that lies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign import pixels_of

from shardkit import UsageError
from shardkit.sources.column_shards import ColumnOptions
from shardkit.sources.mds import SOURCE

GOLDEN = Path(__file__).parents[2] / "golden" / "mds"


def opened(path: Path, keep: str = "w,info,lat,any,cap") -> Any:
    return SOURCE.source(path, ColumnOptions(keep=keep))


def test_images_labels_and_order_are_those_given_to_streaming() -> None:
    splits = opened(GOLDEN).scan().splits
    assert [*splits] == ["train", "val"]
    rng = np.random.default_rng(0)
    for images in splits.values():
        assert len(images) == 8
        for row in range(8):
            pixels = rng.integers(0, 256, (6 + row % 2, 5, 3), np.uint8)
            rng.integers(0, 256, (6 + row % 2, 5, 3), np.uint8)  # those of the column p
            (record,) = images.read([row])
            assert pixels_of(record.fields["png"]).tolist() == pixels.tolist()
            assert record.fields["cls"] == b"%d" % (row % 3)


@pytest.mark.parametrize("name", ["../outside.mds", "/etc/hostname", "", "a//b"])
def test_an_index_cannot_name_files_outside_of_its_folder(name: str, tmp_path: Path) -> None:
    def lie(shard: dict[str, Any]) -> None:
        shard["raw_data"]["basename"] = name

    with pytest.raises(UsageError, match="plain relative path"):
        opened(changed(tmp_path, lie))


def test_a_link_is_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path, lambda shard: None)
    (folder / "shard.00000.mds").rename(tmp_path / "outside")
    (folder / "shard.00000.mds").symlink_to(tmp_path / "outside")
    with pytest.raises(UsageError, match="symbolic link"):
        opened(folder)


def test_pickles_are_refused(tmp_path: Path) -> None:
    def lie(shard: dict[str, Any]) -> None:
        shard["column_encodings"][shard["column_names"].index("cap")] = "pkl"

    with pytest.raises(UsageError, match="pickles"):
        opened(changed(tmp_path, lie))


def changed(target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Copy a split; change what its index states of each shard."""
    folder = target / "copy"
    shutil.copytree(GOLDEN / "train", folder)
    index = json.loads((folder / "index.json").read_text())
    for shard in index["shards"]:
        change(shard)
    (folder / "index.json").write_text(json.dumps(index))
    return folder
