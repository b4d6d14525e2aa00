"""Decode stored images to pixels of the size in the index."""

from __future__ import annotations

import functools
import io
import itertools
from typing import Any

import numpy as np
import pytest
from helpers import encoded, jpeg, opened, picture, pixels, png
from hypothesis import given
from hypothesis import strategies as st

from shardkit.codecs.geometry import Region
from shardkit.codecs.image import EXACT, Decoding, Pixels, WrongSizeError
from shardkit.codecs.image_type import ImageType
from shardkit.codecs.libjpeg import reduction, sufficient_eighths
from shardkit.dataset.decode import decode_region, decode_stored, enclosing
from shardkit.dataset.located import EncodedImage
from shardkit.errors import BadImage


def stored(data: bytes, field: str, width: int = 24, height: int = 16) -> EncodedImage:
    return EncodedImage(data, field, 0, width, height)


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
def test_pixels_equal_pillows(field: str, data: bytes) -> None:
    found = decode_stored(stored(data, field))
    assert found.dtype == np.uint8
    assert found.shape == (16, 24, 3)
    np.testing.assert_array_equal(found, oracle(data))
    out = np.zeros((16, 24, 3), np.uint8)
    assert np.shares_memory(decode_stored(stored(data, field), out=out), out)
    np.testing.assert_array_equal(out, found)


def test_raw_pixels_are_copied_for_the_caller() -> None:
    values = pixels()
    found = decode_stored(stored(values.tobytes(), "raw"))
    np.testing.assert_array_equal(found, values)
    found[0] = 0  # a user may write to it
    out = np.zeros((16, 24, 3), np.uint8)
    assert decode_stored(stored(values.tobytes(), "raw"), out=out) is out
    np.testing.assert_array_equal(out, values)


@pytest.mark.parametrize("field", ["raw", "npy"])
def test_other_types_keep_their_channels_and_dtype(field: str) -> None:
    values = np.arange(16 * 24 * 2, dtype="<i2").reshape(16, 24, 2) - 300
    file = io.BytesIO()
    np.save(file, values)
    data = bytearray(values.tobytes() if field == "raw" else file.getvalue())
    image = EncodedImage(memoryview(data), field, 0, 24, 16, ImageType(2, "int16"))
    found = decode_stored(image)
    out = np.zeros_like(values)
    assert decode_stored(image, out=out) is out
    data[:] = bytes(len(data))  # as the next read does
    for pixels_ in found, out:
        np.testing.assert_array_equal(pixels_, values)
        assert pixels_.dtype == np.int16


def test_another_type_than_stated_is_refused() -> None:
    gray = EncodedImage(png(mode="L"), "png", 0, 24, 16, ImageType(3, "uint16"))
    with pytest.raises(WrongSizeError):
        decode_stored(gray)


def refuses(image: EncodedImage) -> None:
    """Expect an error, whether the pixels have a place already or not."""
    for out in (None, np.zeros((image.height, image.width, 3), np.uint8)):
        with pytest.raises(BadImage):
            decode_stored(image, out=out)


def test_raw_pixels_of_another_length_are_refused() -> None:
    for length in (0, 1, 16 * 24 * 3 - 1, 16 * 24 * 3 + 1):
        refuses(stored(bytes(length), "raw"))


SIZES = [(24, 17), (23, 16), (16, 24), (0, 0), (48, 32)]


@pytest.mark.parametrize(("field", "make"), [("jpg", jpeg), ("png", png)])
def test_a_size_other_than_the_indexs_is_refused(field: str, make: Any) -> None:
    for size in SIZES:
        refuses(stored(make(), field, *size))
    for size in ((1, 1), (24, 1), (1, 16)):  # none is broadcast
        refuses(stored(make(*size), field))


# Reduced images.


@functools.cache
def black(width: int, height: int) -> bytes:
    return encoded(picture(width, height).point(lambda value: 0))


@given(st.data())
def test_the_scale_matches_simplejpegs(data: st.DataObject) -> None:
    simplejpeg = pytest.importorskip("simplejpeg")
    width, height = size = data.draw(st.tuples(*[st.integers(1, 80)] * 2))
    enough = data.draw(st.tuples(*[st.integers(1, side) for side in size]))
    options = dict(zip(("min_width", "min_height"), enough, strict=True))
    found = simplejpeg.decode_jpeg(black(*size), min_factor=2, **options)
    eighths = sufficient_eighths(size, enough)
    assert found.shape == reduced_shape(size, eighths)
    if max(size) >= 8:  # of a smaller image several scales have the same shape
        assert reduction(found.shape, (height, width)) == eighths / 8


def reduced_shape(size: tuple[int, int], eighths: int) -> tuple[int, int, int]:
    width, height = (-(-side * eighths // 8) for side in size)
    return height, width, 3


@given(st.data())
def test_the_enclosing_region_is_minimal(data: st.DataObject) -> None:
    sides = data.draw(st.tuples(*[st.integers(1, 200)] * 2))
    begin = [data.draw(st.integers(0, side - 1)) for side in sides]
    length = [data.draw(st.integers(1, side - at)) for side, at in zip(sides, begin, strict=True)]
    eighths = data.draw(st.sampled_from([1, 2, 3, 4, 8]))
    height, width, _ = reduced_shape(sides, eighths)
    found = enclosing(Region(*begin, *length), (width, height), eighths / 8)
    for first, among, at, side, most in zip(
        found[:2], found[2:], begin, length, (width, height), strict=True
    ):
        assert 0 <= first < first + among <= most
        assert first * 8 <= at * eighths < (first + 1) * 8
        assert (first + among - 1) * 8 < (at + side) * eighths <= (first + among) * 8


# Parts.


def test_a_part_of_raw_pixels_may_be_written_to() -> None:
    for data in (pixels().tobytes(), bytearray(pixels().tobytes())):
        part = decode_region(stored(bytes(data), "raw"), Region(1, 1, 2, 2), EXACT)
        assert part.pixels.flags.writeable


def test_a_part_of_an_image_of_another_size_is_refused() -> None:
    contents = {"jpg": jpeg(), "png": png(), "raw": pixels().tobytes()}
    for (field, data), size in itertools.product(contents.items(), [(24, 17), (23, 16), (48, 32)]):
        for region in (Region(1, 1, 2, 2), Region(0, 0, *size)):
            with pytest.raises(BadImage):
                decode_region(stored(data, field, *size), region, EXACT)


def test_a_part_of_an_undecodable_image_is_a_bad_image() -> None:
    contents = (b"", b"junk", jpeg()[:2], jpeg()[:200])
    for data, at_least in itertools.product(contents, ((0, 0), (5, 4))):
        with pytest.raises(BadImage):
            decode_region(stored(data, "jpg"), Region(1, 1, 2, 2), Decoding(at_least=at_least))
