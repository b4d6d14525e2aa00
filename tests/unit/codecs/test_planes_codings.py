"""Planes of JPEGs in rare codings give Pillow's pixels."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from helpers import encoded, jpeg, picture
from PIL import Image, ImageFile
from table import for_each

from shardkit.codecs import planes
from shardkit.codecs.geometry import Region
from shardkit.codecs.structure import jpeg_coefficient_bytes
from shardkit.system import compiled

ROOT = Path(__file__).parents[3]
ARITHMETIC = sorted((ROOT / "tests/support/arithmetic").glob("*.jpg"))
"""A drawing of 37 x 19 pixels, compressed with `cjpeg -arithmetic`, which Pillow cannot write."""


needs_module = pytest.mark.skipif(not compiled.is_available(), reason="the module is not built")


def pillow(data: bytes) -> npt.NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


@needs_module
@for_each("path", ARITHMETIC)
def test_arithmetic_coding_gives_pillow_s_pixels(path: Path) -> None:
    data = path.read_bytes()
    assert b"\xff\xcc" in data  # DAC: conditioning of the arithmetic coder
    record = planes.from_jpeg(data)
    assert record is not None
    np.testing.assert_array_equal(planes.decode(record), pillow(data))
    layout = planes._layout(record)
    everything = Region(0, 0, 37, 19)
    np.testing.assert_array_equal(planes._finish(record, layout, everything), pillow(data))


@pytest.mark.slow
@needs_module
def test_the_longest_sides_and_restarts_give_pillow_s_pixels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ImageFile, "MAXBLOCK", 1 << 24)
    for size in ((65500, 3), (3, 65500)):
        for subsampling in range(3):
            for coding in ({}, {"progressive": True}, {"restart_marker_blocks": 7}):
                data = jpeg(*size, subsampling=subsampling, **coding)
                record = planes.from_jpeg(data)
                assert record is not None
                np.testing.assert_array_equal(planes.decode(record), pillow(data))
        gray = encoded(picture(*size, mode="L"))
        record = planes.from_jpeg(gray)
        assert record is not None
        np.testing.assert_array_equal(planes.decode(record), pillow(gray))


@needs_module
@for_each("chroma", ["420", "444"])
def test_changed_pixels_are_converted_as_libjpeg_does(chroma: str) -> None:
    """JPEGs of quality 100 keep blocks of one color exactly."""
    colors = np.random.default_rng(0).integers(0, 256, (24, 24, 3), np.uint8)
    pixels = colors.repeat(16, 0).repeat(16, 1)
    buffer = io.BytesIO()
    sampling = {"420": "4:2:0", "444": "4:4:4"}[chroma]
    Image.fromarray(pixels).save(buffer, "JPEG", quality=100, subsampling=sampling)
    assert planes.from_rgb(pixels, chroma) == planes.from_jpeg(buffer.getvalue())


def separate_scans(data: bytes) -> bytes:
    """Return a JPEG whose first scan has one of its components."""
    start = data.index(b"\xff\xda")
    assert data[start + 4] == 3
    return data[: start + 2] + b"\0\x08\1\1\0\0\x3f\0" + data[start + 14 :]


@for_each(
    ("subsampling", "blocks"),
    [
        (0, 3 * 6 * 5),  # 41 x 33 pixels in units of 8 x 8, each of three blocks
        (1, 4 * 3 * 5),  # 16 x 8, four blocks
        (2, 6 * 3 * 3),  # 16 x 16, six blocks
    ],
)
def test_several_scans_need_memory_for_coefficients(subsampling: int, blocks: int) -> None:
    options = {"subsampling": subsampling}
    assert jpeg_coefficient_bytes(jpeg(41, 33, progressive=True, **options)) == 128 * blocks
    assert jpeg_coefficient_bytes(separate_scans(jpeg(41, 33, **options))) == 128 * blocks
    assert jpeg_coefficient_bytes(jpeg(41, 33, **options)) == 0


def test_damaged_headers_need_none() -> None:
    data = jpeg(41, 33, progressive=True)
    frame = data.index(b"\xff\xc2")
    for end in range(data.index(b"\xff\xda") + 4):
        assert jpeg_coefficient_bytes(data[:end]) == 0
    for size in range(11):
        jpeg_coefficient_bytes(data[: frame + 2] + bytes([0, size]) + data[frame + 4 :])
    for factors in (0x00, 0x10, 0xFF):
        jpeg_coefficient_bytes(data[: frame + 11] + bytes([factors]) + data[frame + 12 :])


@needs_module
def test_jpegs_that_need_more_memory_keep_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "baseline": jpeg(300, 200),
        "gray": encoded(picture(160, 160, mode="L"), progressive=True),
        "progressive": jpeg(160, 160, progressive=True),
    }
    blocks = 400  # of 160 x 160 gray pixels
    for less, kept in ((0, ["progressive"]), (1, ["gray", "progressive"])):
        monkeypatch.setattr(planes, "_MOST_COEFFICIENTS", 128 * blocks - less)
        assert [name for name, data in files.items() if planes.from_jpeg(data) is None] == kept
