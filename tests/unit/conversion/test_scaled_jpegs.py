"""Resized JPEGs have the bytes of Pillow's; images over the limit of pixels can be scaled."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import encoded, jpeg, jpeg_stating, make_dataset, make_tree, opened, picture
from PIL import Image
from refusals import refused, refuses
from table import for_each

from shardkit import convert, open_dataset, repair, verify
from shardkit.codecs import image as codec
from shardkit.errors import BadImages, ConversionFailed
from shardkit.system import compiled, native

JPEGS: Mapping[str, bytes] = {
    "a/420.jpg": jpeg(97, 65),
    "a/422.jpg": jpeg(75, 40, subsampling=1, restart_marker_blocks=3),
    "a/444.jpg": jpeg(64, 96, subsampling=0),
    "a/gray.jpg": encoded(picture(51, 70, mode="L")),
    "a/high.jpg": jpeg(9, 161),
    "a/profile.jpg": jpeg(50, 50, icc_profile=bytes(300)),
    "a/progressive.jpg": jpeg(83, 59, progressive=True),
    "a/small.jpg": jpeg(3, 5),
    "a/wide.jpg": jpeg(130, 11),
}


def stored(tmp_path: Path, files: Mapping[str, bytes], **options: Any) -> dict[str, bytes]:
    """Return the stored images by path."""
    source = make_tree(tmp_path / "in", dict(files))
    dataset = open_dataset(make_dataset(source, tmp_path / "out", **options), decode="bytes")
    return {path: dataset[row][0] for row, path in enumerate(dataset.paths)}


def by_pillow(image: Image.Image, quality: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


@for_each("name", ["bicubic", "bilinear", "lanczos", "box"])
def test_every_filter_gives_pillows_file(tmp_path: Path, name: str) -> None:
    options = {"resize": (30, 40), "resize_mode": "stretch", "enlarge": True}
    found = stored(tmp_path / name, JPEGS, filter=name, **options)

    for path, data in JPEGS.items():
        scaled = opened(data).convert("RGB").resize((40, 30), codec.FILTERS[name])
        assert found[path] == by_pillow(scaled, 90), path


@for_each("quality", [1, 40, 100])
def test_every_quality_gives_pillows_file(tmp_path: Path, quality: int) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (33, 50, 3), np.uint8)
    files = {"a/noise.png": encoded(Image.fromarray(noise), "PNG"), "a/dot.png": b""}
    files["a/dot.png"] = encoded(picture(1, 1), "PNG")

    for pixels, mode in (("rgb", "RGB"), ("gray", "L")):
        options = {"encode": "jpeg", "quality": quality, "pixels": pixels}
        found = stored(tmp_path / f"{pixels}{quality}", files, **options)
        for path, data in files.items():
            assert found[path] == by_pillow(opened(data).convert(mode), quality)


def test_a_harmless_fault_is_noted_and_a_damaged_file_is_refused(tmp_path: Path) -> None:
    whole = jpeg(64, 48)
    odd = whole[:-2] + b"\0\0" + whole[-2:]

    found = stored(tmp_path, {"a/odd.jpg": odd}, resize=16)
    assert found["a/odd.jpg"] == by_pillow(opened(whole).resize((21, 16)), 90)
    with refused(BadImages, "cut.jpg"):
        stored(tmp_path / "cut", {"a/cut.jpg": whole[:-200]}, resize=16)


def test_the_module_leaves_what_it_cannot_scale_alone() -> None:
    if native.module() is None:
        pytest.skip("no compiled module")
    whole = jpeg(64, 48)
    progressive = jpeg(64, 48, progressive=True)
    last_scan = progressive.rindex(b"\xff\xda")
    left = {
        "CMYK": encoded(picture(64, 48, mode="CMYK")),
        "cut": whole[:-50],
        "not a JPEG": b"x" * 99,
        "of another size": jpeg(64, 49),
        "without its last scan": progressive[:last_scan] + b"\xff\xd9",
    }

    for name, data in left.items():
        assert compiled.scale_jpeg(data, (64, 48), 8, (20, 20), "bicubic") is None, name
    for data in (whole, progressive):
        assert compiled.scale_jpeg(data, (64, 48), 8, (20, 20), "bicubic") is not None
    tall_first = compiled.scale_jpeg(whole, (64, 48), 8, (64, 5), "bicubic")
    assert (tall_first is None) == compiled.TALL_FIRST


def test_an_encoder_with_other_bytes_than_pillows_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image = picture(20, 30)
    monkeypatch.setattr(compiled, "encode_jpeg", lambda *_: b"of MozJPEG")
    codec._encodes_as_pillow.cache_clear()

    assert codec.encode(np.asarray(image), "jpg", 90) == by_pillow(image, 90)
    codec._encodes_as_pillow.cache_clear()


# Images over the limit of pixels, which a user may raise to scale them.

LIMIT = 178_956_970


def test_the_message_names_the_option(tmp_path: Path) -> None:
    source = make_tree(tmp_path / "src", {"a/1.jpg": jpeg_stating(20_000, 10_000)})
    words = ("convert", "imagefolder", source, tmp_path / "made", "--to", "lmdb", "--workers", "1")
    refuses(1, *words, "--resize", "8", facts=("a/1.jpg", str(LIMIT), "--max-pixels"))
    more = ("--resize", "8", "--max-pixels", "199999999")
    refuses(1, *words, *more, facts=("a/1.jpg", "199999999"))
    refuses(2, *words, "--max-pixels", "200000000", facts=("--resize",))
    refuses(2, *words, "--resize", "8", "--max-pixels", "1000", facts=("--max-pixels", str(LIMIT)))


def test_memory_is_checked_before_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with ``on_error="skip"``: the image is good. 200 megapixels take 3 GB."""
    monkeypatch.setattr("shardkit.codecs.limits.free_memory", lambda: 1 << 30)
    source = make_tree(tmp_path / "src", {"a/1.jpg": jpeg_stating(20_000, 10_000)})
    with refused(ConversionFailed, "a/1.jpg", "2.8 GiB"):
        convert(
            source,
            tmp_path / "made",
            to="lmdb",
            resize=8,
            max_pixels=200_000_000,
            on_error="skip",
            workers=1,
        )


@pytest.mark.slow
def test_large_images_are_scaled_verified_and_repaired(tmp_path: Path) -> None:
    """Half of it is black, the other half white; a box covers a half. One bit decodes fastest."""
    image = Image.new("1", (14_000, 12_800))
    image.paste(1, (7_000, 0, 14_000, 12_800))
    assert image.width * image.height > LIMIT
    source = make_tree(tmp_path / "src", {"a/1.png": encoded(image, "png", compress_level=1)})
    made = tmp_path / "made"
    convert(
        source,
        made,
        to="lmdb",
        resize="1x2",
        resize_mode="stretch",
        filter="box",
        pixels="gray",
        max_pixels=200_000_000,
        workers=1,
    )
    pixels, _ = open_dataset(made)[0]
    assert np.asarray(pixels).ravel().tolist() == [0, 255]
    recipe = json.loads((made / "shardkit.json").read_text())["recipe"]
    assert recipe["max_pixels"] == 200_000_000
    assert verify(made, against=source).findings == []
    (made / "shard-000000.lmdb").unlink()
    assert repair(made, source).findings == []
