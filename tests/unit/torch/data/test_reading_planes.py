"""Datasets of planes give the samples of the JPEGs that they were made of."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import FORMATS, encoded, invoke, jpeg, make_dataset, make_tree, picture, png
from refusals import refused, refuses

from shardkit import CenterCrop, RandomCrop, RandomResizedCrop, Resize, make_loader, open_dataset
from shardkit.errors import CorruptRecord

DECODES = [
    "pil",
    "numpy",
    "torch",
    CenterCrop(24),
    CenterCrop(60),
    CenterCrop(20, resize=26),
    RandomResizedCrop(24, oversample=float("inf")),
    RandomResizedCrop((20, 28), filter="bicubic", oversample=float("inf")),
    Resize((30, 20), oversample=float("inf")),
    Resize(17, oversample=float("inf")),
]
"""Without reduced decoding, which JPEGs alone have."""

pytestmark = pytest.mark.usefixtures("with_native")  # it writes planes


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files: dict[str, bytes | None] = {
        f"cat/{number}.jpg": jpeg(40 + number, 33 + 2 * number, number, subsampling=number % 3)
        for number in range(7)
    }
    files["dog/gray.jpg"] = encoded(picture(45, 50, mode="L"))
    files["dog/progressive.jpg"] = jpeg(51, 35, progressive=True)
    files["dog/a.png"] = png(44, 38)
    return make_tree(tmp_path_factory.mktemp("source"), files)


def samples(path: Path, decode: Any) -> list[Any]:
    dataset = open_dataset(path, decode=decode)
    dataset.set_epoch(3)
    return [
        (np.asarray(image), label) for image, label in dataset.__getitems__(range(len(dataset)))
    ]


@pytest.fixture(scope="module")
def kept(source: Path) -> Path:
    return make_dataset(source, source.parent / "kept")


@pytest.fixture(scope="module", params=FORMATS)
def planes(request: pytest.FixtureRequest, source: Path) -> Path:
    name = f"planes-{request.param}"
    return make_dataset(source, source.parent / name, to=request.param, encode="planes")


@pytest.mark.usefixtures("implementation")
def test_samples_equal_those_of_jpegs(kept: Path, planes: Path) -> None:
    fields = open_dataset(planes).manifest.fields
    assert (fields["y4m"], fields["png"]) == (9, 1)
    for decode in DECODES:
        pairs = zip(samples(kept, decode), samples(planes, decode), strict=True)
        for (expected, label), (image, its_label) in pairs:
            assert its_label == label
            np.testing.assert_array_equal(image, expected, str(decode))


def test_planes_are_never_decoded_reduced(planes: Path) -> None:
    small = Resize((8, 8))
    full = dataclasses.replace(small, oversample=float("inf"))
    for one, two in zip(samples(planes, small), samples(planes, full), strict=True):
        np.testing.assert_array_equal(one[0], two[0])


@pytest.mark.usefixtures("implementation")
def test_each_read_compares_the_checksum(planes: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(planes, tmp_path / "copy"))
    (shard, *_) = open_dataset(path).shard_paths
    data = bytearray(shard.read_bytes())
    data[data.index(b"\nFRAME") + 79] ^= 1  # the corner, which no center crop shows
    shard.write_bytes(data)
    with refused(CorruptRecord):
        samples(path, CenterCrop(8))


SIDE = 300
"""Of images from which small crops need some bands only."""
BAND = 26
"""Rows of their bands: 2 * ceil(300 / 24)."""
CROPS = [CenterCrop(64), CenterCrop((290, 20)), CenterCrop((1, 300)), RandomResizedCrop(24)]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images with all samplings."""
    files: dict[str, bytes | None] = {
        f"a/{number}.jpg": jpeg(SIDE, SIDE, number, subsampling=number) for number in range(3)
    }
    files["a/gray.jpg"] = encoded(picture(SIDE, SIDE, mode="L"))
    return make_tree(tmp_path_factory.mktemp("large"), files)


@pytest.fixture(scope="module")
def whole(large: Path) -> Path:
    return make_dataset(large, large.parent / "png", encode="png")


@pytest.fixture(scope="module", params=FORMATS)
def bands(request: pytest.FixtureRequest, large: Path) -> Path:
    name = f"large-{request.param}"
    return make_dataset(large, large.parent / name, to=request.param, encode="planes")


@pytest.mark.usefixtures("implementation")
def test_bands_of_all_samplings_are_read(bands: Path, whole: Path) -> None:
    for crop in CROPS:
        for (image, _), (expected, _) in zip(
            samples(bands, crop), samples(whole, crop), strict=True
        ):
            np.testing.assert_array_equal(image, expected, str(crop))


def test_crops_at_the_top_are_left_to_no_other_code(
    bands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, header and luma are one range, which is all that gray images have."""
    dataset = open_dataset(bands, decode=RandomCrop(40))
    monkeypatch.setattr("shardkit.codecs.image.load", pytest.fail)
    for epoch in range(30):
        dataset.set_epoch(epoch)
        dataset.__getitems__(range(len(dataset)))


def damaged(path: Path, place: int) -> None:
    """Change a byte of the first record of planes, counted from its start."""
    (shard, *_) = open_dataset(path).shard_paths
    data = bytearray(shard.read_bytes())
    data[data.index(b"YUV4MPEG2") + place] ^= 1
    shard.write_bytes(data)


HEADER = len("YUV4MPEG2 W300 H300 F1:1 Ip A1:1 C420jpeg XCOLORRANGE=FULL\nFRAME") + 4 * 18 + 1
CHROMA = HEADER + SIDE * SIDE
TOP = (SIDE - 64) // 2 // BAND * BAND
"""First row of the bands that the crop of 64 needs."""
LEFT_OUT = {
    "first": HEADER,
    "above": HEADER + SIDE * TOP - 1,
    "below": HEADER + SIDE * (TOP + 4 * BAND),
    "last": CHROMA - 1,
    "blue": CHROMA + (TOP // 2) * SIDE // 2 - 1,
    "red": CHROMA + 2 * (SIDE // 2) ** 2 - 1,
}
NEEDED = {
    "size": 11,
    "sampling": 35,
    "range": 45,
    "checksum of a band that is read": HEADER - 40,
    "checksum of a band that is not": HEADER - 2,
    "parameter": HEADER - 19,
    "top": HEADER + SIDE * TOP,
    "bottom": HEADER + SIDE * (TOP + 4 * BAND) - 1,
    "blue": CHROMA + (TOP // 2) * SIDE // 2,
    "red": CHROMA + (SIDE // 2) ** 2 + (TOP // 2 + 2 * BAND) * SIDE // 2 - 1,
}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of one image, which tests copy."""
    folder = tmp_path_factory.mktemp("one")
    tree = make_tree(folder / "source", {"a/1.jpg": jpeg(SIDE, SIDE, subsampling=2)})
    return make_dataset(tree, folder / "planes", encode="planes")


def test_crops_need_their_bands_only(one: Path, tmp_path: Path) -> None:
    for name, place in LEFT_OUT.items():
        path = Path(shutil.copytree(one, tmp_path / name))
        damaged(path, place)
        np.testing.assert_array_equal(
            samples(path, CenterCrop(64))[0][0], samples(one, CenterCrop(64))[0][0]
        )
        with pytest.raises(CorruptRecord, match=r"row 0.*checksum"):
            samples(path, CenterCrop(SIDE))


def test_crops_check_header_and_bands(one: Path, tmp_path: Path) -> None:
    for name, place in NEEDED.items():
        path = Path(shutil.copytree(one, tmp_path / name))
        damaged(path, place)
        with pytest.raises(CorruptRecord, match=r"row 0.*checksum"):
            samples(path, CenterCrop(64))


def test_a_wrong_checksum_of_a_band_changes_no_pixels(
    large: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkit.codecs.planes._checksums", lambda *_: [7] * 12)
    path = make_dataset(large, tmp_path / "planes", encode="planes")
    monkeypatch.undo()
    for (image, _), (expected, _) in zip(
        samples(path, CenterCrop(64)), samples(whole, CenterCrop(64)), strict=True
    ):
        np.testing.assert_array_equal(image, expected)


def test_views_of_an_image_share_what_they_read(one: Path) -> None:
    crops = [CenterCrop(40), CenterCrop((110, 10)), CenterCrop((20, 30))]
    (views,) = make_loader(open_dataset(one), batch_size=1, views=crops)
    for crop, (images, _) in zip(crops, views, strict=True):
        np.testing.assert_array_equal(images[0], samples(one, crop)[0][0])


def test_the_command_counts_encodings_and_estimates_sizes(source: Path, tmp_path: Path) -> None:
    words = "convert", "imagefolder", source, tmp_path / "out", "--to", "lmdb", "--encode", "planes"
    (plan,) = json.loads(invoke(*words, "--dry-run", "--json").stdout)["plan"].values()
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    assert "1 png, 9 y4m" in result.output
    stored = sum(path.stat().st_size for path in open_dataset(tmp_path / "out").shard_paths)
    assert 0.5 < plan["estimated_bytes"] / stored < 2
    assert plan["estimated_bytes"] > 2 * sum(path.stat().st_size for path in source.rglob("*.jpg"))


@pytest.mark.usefixtures("without_native")
def test_without_the_module_nothing_is_converted(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = "convert", "imagefolder", source, out, "--to", "lmdb", "--encode", "planes"
    refuses(2, *words, facts=("--encode planes", "--version"))
    assert not out.exists()
