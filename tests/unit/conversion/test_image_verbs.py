"""Each command works on planes and on 16-bit images as on any dataset."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import assert_same, encoded, exif, jpeg, make_dataset, make_tree, picture, png
from PIL import Image
from stated import done, has_compiled_module, shards_of, stated

from shardkit import append, diff, merge, open_dataset, repair, verify

Pixels = dict[str, Any]

TO = ("--to", "lmdb", "--workers", 1)


def wide(height: int, seed: int) -> bytes:
    """Return a PNG of gray 16-bit pixels."""
    image = np.random.default_rng(seed).integers(0, 65536, (height, 30), np.uint16)
    return encoded(Image.fromarray(image), "PNG")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of images: a source, and what a dataset of it has."""

    options: dict[str, Any]
    files: dict[str, bytes]
    more: dict[str, bytes]
    fields: dict[str, int]
    shown: str
    """A word by which `info` shows the kind."""
    damaged: Callable[[bytearray], int]
    """The place in a shard of a byte of an image."""


KINDS = {
    "planes": Kind(
        options={"encode": "planes"},
        files={
            "cat/half.jpg": jpeg(41, 33, subsampling=2),
            "cat/full.jpg": jpeg(40, 31, subsampling=0),
            "cat/progressive.jpg": jpeg(51, 35, progressive=True),
            "cat/turned.jpg": jpeg(30, 21, exif=exif(6)),
            "dog/gray.jpg": encoded(picture(45, 50, mode="L")),
            "dog/plain.png": png(44, 38),
            "dog/print.jpg": encoded(picture(40, 30).convert("CMYK")),
        },
        more={"cat/new.jpg": jpeg(20, 30), "dog/new.jpg": jpeg(21, 30)},
        fields={"cls": 7, "jpg": 1, "json": 7, "png": 1, "y4m": 5},
        shown="y4m",
        damaged=lambda shard: shard.index(b"\nFRAME") + 79,
    ),
    "16 bits": Kind(
        options={"pixels": "keep"},
        files={f"{name}/{n}.png": wide(20 + n, n) for name in ("cat", "dog") for n in range(3)},
        more={"cat/new.png": wide(20, 9), "dog/new.png": wide(21, 10)},
        fields={"cls": 6, "json": 6, "png": 6},
        shown="uint16 image, 1 channel",
        damaged=lambda shard: shard.index(b"IDAT") + 20,
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    if request.param == "planes" and not has_compiled_module():
        pytest.skip("it writes planes")
    return KINDS[str(request.param)]


@pytest.fixture(scope="module")
def source(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tree(tmp_path_factory.mktemp("source") / "photos", {**kind.files})


@pytest.fixture(scope="module")
def place(kind: Kind, source: Path) -> Path:
    """A dataset that no test changes."""
    return make_dataset(source, source.with_name("made"), **kind.options)


def pixels(*places: Path) -> Pixels:
    found: Pixels = {}
    for place in places:
        dataset = open_dataset(place, decode="numpy")
        found |= {name: dataset[row][0] for row, name in enumerate(dataset.paths)}
    return found


def test_damage_is_found_and_repaired(
    kind: Kind, source: Path, place: Path, tmp_path: Path
) -> None:
    assert stated(place).fields == kind.fields
    for level in ("quick", "full", "decode"):
        assert verify(place, level).ok
    assert verify(place, against=source).ok
    copy = shutil.copytree(place, tmp_path / "copy")
    shard = shards_of(copy)[0]
    intact = shard.read_bytes()
    damaged = bytearray(intact)
    damaged[kind.damaged(damaged)] ^= 1
    shard.write_bytes(damaged)
    assert not verify(copy).ok
    assert repair(copy, source).ok
    assert shard.read_bytes() == intact
    assert diff(place, copy).equal


def test_images_are_appended(kind: Kind, place: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(place, tmp_path / "copy")
    append(copy, make_tree(tmp_path / "more", {**kind.more}))
    assert stated(copy).rows == len(kind.files | kind.more)
    assert verify(copy, "decode").ok
    other = make_dataset(tmp_path / "more", tmp_path / "other", **kind.options)
    assert_same(pixels(copy), pixels(place, other))
    assert not diff(place, copy).equal


def test_datasets_are_merged_split_and_converted(kind: Kind, place: Path, tmp_path: Path) -> None:
    more = make_tree(tmp_path / "more", {**kind.more})
    other = make_dataset(more, tmp_path / "other", **kind.options)
    merge([place, other], tmp_path / "both")
    assert verify(tmp_path / "both", "decode").ok
    assert_same(pixels(tmp_path / "both"), pixels(place, other))

    done("split", place, "--val", "0.4", "--out", tmp_path / "parts", "--to", "lmdb")
    parts = [tmp_path / "parts" / name for name in ("train", "val")]
    assert_same(pixels(*parts), pixels(place))
    kinds = kind.fields.keys()
    counts = {name: sum(stated(part).fields.get(name, 0) for part in parts) for name in kinds}
    assert counts == kind.fields

    words = ("convert", "dataset", place, tmp_path / "again", *TO)
    done(*words, *(("--pixels", "keep") if "pixels" in kind.options else ()))
    assert stated(tmp_path / "again").fields == kind.fields
    assert_same(pixels(tmp_path / "again"), pixels(place))
    assert verify(tmp_path / "again", against=place).ok


def test_a_dataset_is_described_shown_and_indexed(kind: Kind, place: Path, tmp_path: Path) -> None:
    assert kind.shown in done("info", place)
    path = min(kind.files)
    done("show", place, path.partition(".")[0], "-o", tmp_path / "shown.png")
    with Image.open(tmp_path / "shown.png") as shown:
        assert np.asarray(shown).max() > 200
    done("report", place, "-o", tmp_path / "report.html")
    copy = shutil.copytree(place, tmp_path / "copy")
    shutil.rmtree(copy / "index")
    done("index", copy)
    assert verify(copy).ok
