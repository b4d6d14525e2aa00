"""Images over the limit of pixels, which a user may raise to scale them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import encoded, jpeg_stating, make_tree
from PIL import Image
from refusals import refused, refuses

from shardkit import convert, open_dataset, repair, verify
from shardkit.errors import BadImages, ConversionFailed

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
    """Half of it is black, the other half white; a box covers a half."""
    image = Image.new("L", (14_000, 12_800))
    image.paste(255, (7_000, 0, 14_000, 12_800))
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


@pytest.mark.slow
def test_no_image_over_the_limit_is_stored(tmp_path: Path) -> None:
    image = Image.new("L", (14_000, 12_800))
    source = make_tree(tmp_path / "src", {"a/1.png": encoded(image, "png", compress_level=1)})
    options: dict[str, Any] = {
        "resize": 14_000,
        "pixels": "gray",
        "max_pixels": 200_000_000,
        "check": "header",
    }
    with refused(BadImages, str(LIMIT)):
        convert(source, tmp_path / "made", to="lmdb", workers=1, **options)
