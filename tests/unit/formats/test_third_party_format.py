"""A third-party format joins by its entry point, without changes to shardkit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import execute
from PIL import Image
from stated import done, shards_of

from shardkit import ShardDataset, convert, open_dataset
from shardkit.errors import CorruptRecord
from shardkit.testing import FormatConformance

pytestmark = pytest.mark.usefixtures("third_party")


@pytest.mark.slow
class TestZipFormat(FormatConformance):
    name = "zip"


def test_an_image_may_be_larger_than_its_compressed_shard(tmp_path: Path) -> None:
    (tmp_path / "source/a").mkdir(parents=True)
    Image.new("RGB", (200, 100), "white").save(tmp_path / "source/a/0.bmp")
    convert(tmp_path / "source", tmp_path / "zipped", to="zip", workers=1)  # type: ignore[arg-type]
    dataset = open_dataset(tmp_path / "zipped", decode="numpy")
    (shard,) = dataset.manifest.shards
    assert shard.bytes < (tmp_path / "source/a/0.bmp").stat().st_size
    assert np.array_equal(dataset[0][0], np.full((100, 200, 3), 255, np.uint8))


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    for number in range(8):
        path = tmp_path / "source" / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (8, 9, 3), np.uint8)
        Image.fromarray(pixels).save(path)
    convert(tmp_path / "source", tmp_path / "zipped", to="zip", shard_samples=3, workers=1)  # type: ignore[arg-type]
    return tmp_path / "zipped"


def shardkit(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a separate process."""
    run = [sys.executable, "-m", "shardkit", *arguments]
    return execute(*run)


def loop(dataset: ShardDataset) -> list[Any]:
    return [dataset[row] for row in range(len(dataset))]


def pixels_of(dataset: Path) -> list[Any]:
    """Return the pictures' pixels in the dataset's order, as Pillow reads the source."""
    paths = open_dataset(dataset).paths
    return [np.asarray(Image.open(dataset.parent / "source" / path)) for path in paths]


def test_the_plugin_is_listed(dataset: Path, tmp_path: Path) -> None:
    assert "[hdf5|lmdb|webdataset|zip]" in done("convert", "imagefolder", "--help")
    assert {path.suffix for path in shards_of(dataset)} == {".zip"}


@pytest.mark.slow
def test_the_command_line_offers_and_writes_the_format(dataset: Path) -> None:
    source, target = str(dataset.parent / "source"), str(dataset.parent / "made")
    assert "zip" in shardkit("convert", "imagefolder", "--help").stdout
    found = shardkit("convert", "imagefolder", source, target, "--to", "zip", "--quiet")
    assert (found.returncode, found.stderr) == (0, "")
    assert shardkit("verify", target).returncode == 0
    found = shardkit("info", target, "--json")
    assert json.loads(found.stdout)
    assert '"zip"' in found.stdout
    assert [image for image, _ in loop(open_dataset(target, decode="bytes"))] == [
        image for image, _ in loop(open_dataset(dataset, decode="bytes"))
    ]


def test_the_dataset_opens_and_gives_the_pixels(dataset: Path) -> None:
    opened = open_dataset(dataset, decode="numpy")
    assert type(opened) is ShardDataset
    assert all(map(np.array_equal, (image for image, _ in loop(opened)), pixels_of(dataset)))
    rows = [7, 0, 3, 3, -1]
    expected = [pixels_of(dataset)[row] for row in rows]
    assert all(map(np.array_equal, (image for image, _ in opened[rows]), expected))


def test_a_damaged_image_is_a_corrupt_record_and_the_others_are_read(dataset: Path) -> None:
    opened = open_dataset(dataset, decode="numpy")
    expected = pixels_of(dataset)
    path = dataset / opened.manifest.shards[0].name
    data = bytearray(path.read_bytes())
    data[data.index(b"000000001/png") + 60] ^= 1  # in the compressed image of row 1
    path.write_bytes(data)
    with pytest.raises(CorruptRecord, match="class"):
        opened[1]
    for row in (0, *range(2, 8)):
        assert np.array_equal(opened[row][0], expected[row])


@pytest.mark.slow
def test_without_its_package_the_error_lists_the_formats(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH")
    found = shardkit("verify", str(dataset))
    assert found.returncode == 2
    assert "'zip'" in found.stderr
    assert "hdf5, lmdb, webdataset" in found.stderr
    assert "Traceback" not in found.stderr
