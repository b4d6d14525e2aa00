"""Shards that the package of MosaicML Streaming 0.13.0 wrote, and an index that lies."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign import pixels_of
from PIL import Image
from refusals import refused

from shardkit import attach, convert, open_dataset, open_source, verify
from shardkit.errors import UsageError

GOLDEN = Path(__file__).parents[2] / "golden" / "mds"


def opened(path: Path, keep: str = "w,info,lat,any,cap") -> Any:
    return open_source("mds", path, keep=keep)


def test_images_labels_and_order_are_those_given_to_streaming() -> None:
    splits = opened(GOLDEN / "splits").scan().splits
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


@pytest.mark.parametrize("in_place", [False, True])
def test_every_encoding_has_the_value_given_to_streaming(in_place: bool, tmp_path: Path) -> None:
    source = open_source("mds", GOLDEN / "encodings", label="none", **KEPT[in_place])
    target = tmp_path / "made"
    if in_place:
        attach(source, target)
    else:
        convert(source, target, to="hdf5", shuffle=False)
    assert verify(target, level="decode").ok
    names = (*open_dataset(target).schema,)
    assert len(names) == (16 if in_place else 18)
    samples = open_dataset(target, decode="bytes", fields=names, as_dict=True)
    for row in range(4):
        sample = samples[row]
        assert sample["image"] == jpeg(row)
        assert sample["blob"] == bytes([0, 255, row])
        for bits in (8, 16, 32, 64):
            assert sample[f"int{bits}"] == -(1 << bits - 1) + row
            assert sample[f"uint{bits}"] == (1 << bits) - 1 - row
            assert bits == 8 or sample[f"float{bits}"] == row / 4
        assert (sample["str_int"], sample["str_float"]) == (-row, row / 10)
        assert sample["str_decimal"] == str(Decimal(row) / 10)
        if not in_place:
            for name, expected in (
                ("of_type", np.full((1, row + 1), row, np.int16)),
                ("free", np.full((300, 1, 2), row, np.uint8)),
            ):
                array = np.asarray(sample[name])
                assert (array.dtype, array.tolist()) == (expected.dtype, expected.tolist())


KEPT: dict[bool, dict[str, Any]] = {
    False: {},
    True: {
        "keep": ",".join(
            [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
            + ["float16", "float32", "float64", "str_int", "str_float", "str_decimal", "blob"]
        )
    },
}
"""What is kept, by whether shards are read in place: there, arrays must have a stated shape."""


def jpeg(row: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (6, 5), (0, 0, 60 * row)).save(file, "JPEG")
    return file.getvalue()


PACKINGS = {"zstd": "zstandard", "gz": "gzip", "br": "brotli", "snappy": "snappy", "bz2": "bz2"}


@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_shards_are_unpacked(packing: str, tmp_path: Path) -> None:
    pytest.importorskip(PACKINGS[packing])
    source = open_source("mds", GOLDEN / packing)
    convert(source, tmp_path / "made", to="lmdb", shuffle=False)
    assert verify(tmp_path / "made", against=GOLDEN / packing, level="decode").ok
    dataset = open_dataset(tmp_path / "made", decode="bytes")
    assert [dataset[row] for row in range(4)] == [(jpeg(row), row) for row in range(4)]
    with refused(UsageError):
        attach(source, tmp_path / "attached")


@pytest.mark.parametrize("packing", PACKINGS)
def test_damaged_packed_shards_are_named(packing: str, tmp_path: Path) -> None:
    pytest.importorskip(PACKINGS[packing])
    shutil.copytree(GOLDEN / packing, tmp_path / "copy")
    shard = tmp_path / "copy" / f"shard.00001.mds.{packing}"
    whole = shard.read_bytes()
    for content in (whole[:-1], whole[: len(whole) // 2], b"", b"\0" * 100):
        shard.write_bytes(content)
        problems = open_source("mds", tmp_path / "copy").scan().problems[""]
        assert "shard.00001.mds" in problems[0].path


def test_a_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    shutil.copytree(GOLDEN / "zstd", tmp_path / "copy")  # of which nothing is unpacked yet
    with pytest.raises(UsageError, match=r"needs zstandard: pip install 'shardkit\[compressed\]'"):
        open_source("mds", tmp_path / "copy").scan()


@pytest.mark.parametrize("name", ["../outside.mds", "/etc/hostname", "", "a//b"])
def test_an_index_cannot_name_files_outside_of_its_folder(name: str, tmp_path: Path) -> None:
    def lie(shard: dict[str, Any]) -> None:
        shard["raw_data"]["basename"] = name

    with refused(UsageError):
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
    shutil.copytree(GOLDEN / "splits" / "train", folder)
    index = json.loads((folder / "index.json").read_text())
    for shard in index["shards"]:
        change(shard)
    (folder / "index.json").write_text(json.dumps(index))
    return folder
