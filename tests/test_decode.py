"""From stored images to pixels, with the size that the index promises."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import encoded, jpeg, opened, picture, pixels, png

from shardkit.codecs.image import Pixels
from shardkit.decode import Decoding, decode_stored
from shardkit.errors import BadImage
from shardkit.shardset import StoredImage


def stored(data: bytes, field: str, width: int = 24, height: int = 16) -> StoredImage:
    return StoredImage(data, field, 0, width, height)


def oracle(data: bytes) -> Pixels:
    return np.asarray(opened(data).convert("RGB"))


@pytest.mark.parametrize(
    ("field", "data"),
    [
        ("jpg", jpeg()),
        ("jpg", jpeg(subsampling=0)),
        ("jpg", jpeg(progressive=True)),
        ("jpg", encoded(picture(mode="L"))),
        ("png", png()),
        ("png", png(mode="L")),
        ("webp", encoded(kind="WEBP", lossless=True)),
        ("bmp", encoded(kind="BMP")),
        ("gif", encoded(kind="GIF")),
        ("tiff", encoded(kind="TIFF")),
        ("ppm", encoded(kind="PPM")),
    ],
)
def test_pixels_are_those_of_pillow(field: str, data: bytes) -> None:
    found = decode_stored(stored(data, field))
    assert found.dtype == np.uint8
    assert found.shape == (16, 24, 3)
    np.testing.assert_array_equal(found, oracle(data))
    out = np.zeros((16, 24, 3), np.uint8)
    assert np.shares_memory(decode_stored(stored(data, field), out=out), out)
    np.testing.assert_array_equal(out, found)


def test_raw_pixels_come_back_and_are_the_callers_own() -> None:
    values = pixels()
    found = decode_stored(stored(values.tobytes(), "raw"))
    np.testing.assert_array_equal(found, values)
    found[0] = 0  # a user may write to it
    out = np.zeros((16, 24, 3), np.uint8)
    assert decode_stored(stored(values.tobytes(), "raw"), out=out) is out
    np.testing.assert_array_equal(out, values)


@pytest.mark.parametrize("length", [0, 1, 16 * 24 * 3 - 1, 16 * 24 * 3 + 1])
def test_raw_pixels_of_another_length_are_refused(length: int) -> None:
    with pytest.raises(BadImage, match="raw bytes"):
        decode_stored(stored(bytes(length), "raw"))


@pytest.mark.parametrize(("width", "height"), [(24, 17), (23, 16), (16, 24), (0, 0), (48, 32)])
@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("field", ["jpg", "png"])
def test_another_size_than_the_index_says_is_refused(
    field: str, block: bool, width: int, height: int
) -> None:
    data = jpeg() if field == "jpg" else png()
    out = np.zeros((height, width, 3), np.uint8) if block else None
    with pytest.raises(BadImage):
        decode_stored(stored(data, field, width, height), out=out)


@pytest.mark.parametrize("field", ["jpg", "png"])
def test_a_one_pixel_image_does_not_spread_over_the_block(field: str) -> None:
    data = jpeg(1, 1) if field == "jpg" else png(1, 1)
    with pytest.raises(BadImage):
        decode_stored(stored(data, field), out=np.zeros((16, 24, 3), np.uint8))


@pytest.mark.parametrize("field", ["jpg", "png"])
def test_an_image_of_one_row_does_not_spread_over_the_block(field: str) -> None:
    data = jpeg(24, 1) if field == "jpg" else png(24, 1)
    with pytest.raises(BadImage):
        decode_stored(stored(data, field), out=np.zeros((16, 24, 3), np.uint8))


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("field", ["jpg", "png", "webp"])
def test_what_cannot_be_decoded_is_a_bad_image(field: str, block: bool) -> None:
    out = np.zeros((16, 24, 3), np.uint8) if block else None
    whole = {"jpg": jpeg(), "png": png(), "webp": encoded(kind="WEBP")}[field]
    for data in (b"", b"junk", whole[: len(whole) // 2], bytes(len(whole))):
        with pytest.raises(BadImage):
            decode_stored(stored(data, field), out=out)


def test_transparent_pixels_show_the_background() -> None:
    clear = encoded(picture(mode="RGBA").point(lambda value: 0), "PNG")
    found = decode_stored(stored(clear, "png"), Decoding(background=(1, 2, 3)))
    assert np.unique(found.reshape(-1, 3), axis=0).tolist() == [[1, 2, 3]]
