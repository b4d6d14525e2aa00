from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from helpers import png_chunk, png_file
from parsed_png import parsed_png16
from PIL import Image
from refusals import refused
from table import for_each

from shardkit.codecs import png16
from shardkit.codecs.png16 import decode_png16, encode_png16, png_header
from shardkit.codecs.structure import PNG_PASSES
from shardkit.errors import BadImage
from shardkit.system import compiled

COLORS = {1: 0, 2: 4, 3: 2, 4: 6}
KEY = struct.pack(">3H", 1, 2, 3)


def random_png(channels: int, *, interlaced: bool = False, seed: int = 0) -> bytes:
    """Return a PNG whose rows have random filters and bytes."""
    width, height = 11, 9
    rng = np.random.default_rng(seed)
    rows = bytearray()
    for left, top, across, down in PNG_PASSES if interlaced else ((0, 0, 1, 1),):
        columns = len(range(left, width, across))
        for _ in range(top, height, down) if columns else ():
            rows += bytes([rng.integers(5)]) + rng.bytes(2 * channels * columns)
    return png_file(
        struct.pack(">II5B", width, height, 16, COLORS[channels], 0, 0, interlaced), bytes(rows)
    )


@pytest.fixture(autouse=True)
def _in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "decode_png16", lambda data: None)


@for_each("channels", COLORS)
@for_each("interlaced", [False, True])
def test_all_filters_decode_as_the_specification_states(channels: int, interlaced: bool) -> None:
    for seed in range(5):
        data = random_png(channels, interlaced=interlaced, seed=seed)
        np.testing.assert_array_equal(decode_png16(data, png_header(data)), parsed_png16(data))


@for_each("band", [1, 70, 150])
def test_rows_are_decoded_some_at_a_time(band: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of a band needs the last one of the band above."""
    monkeypatch.setattr(png16, "_BAND", band)
    for channels in COLORS:
        for seed in range(3):
            data = random_png(channels, interlaced=seed == 1, seed=seed)
            np.testing.assert_array_equal(decode_png16(data, png_header(data)), parsed_png16(data))


@for_each("channels", COLORS)
def test_encoded_pixels_decode_to_themselves(channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 65536, (6, 5, channels), np.uint16)
    data = encode_png16(pixels)
    np.testing.assert_array_equal(parsed_png16(data), pixels)
    if channels == 1:
        with Image.open(io.BytesIO(data)) as image:
            np.testing.assert_array_equal(np.asarray(image), pixels[:, :, 0])


def test_a_transparent_color_becomes_alpha() -> None:
    pixels = np.zeros((2, 2, 3), np.uint16)
    pixels[0, 1] = 1, 2, 3
    data = encode_png16(pixels)
    data = data[:33] + png_chunk(b"tRNS", KEY) + data[33:]
    header = png_header(data)
    assert header.channels == 4
    alpha = decode_png16(data, header)[:, :, 3]
    assert alpha.tolist() == [[65535, 0], [65535, 65535]]


def test_a_truncated_or_changed_png_is_damaged() -> None:
    data = random_png(3)
    with pytest.raises(BadImage, match="damaged"):
        decode_png16(data[:-20], png_header(data))
    changed = bytearray(data)
    changed[60] ^= 1
    with refused(BadImage, "IDAT"):
        decode_png16(bytes(changed), png_header(data))
    short = png_file(data[16:29], b"\0" * 10)
    with refused(BadImage):
        decode_png16(short, png_header(short))
    wrong = png_file(data[16:29], b"\7" + bytes(9 * 67))
    with pytest.raises(BadImage, match="filter 7"):
        decode_png16(wrong, png_header(wrong))


def test_a_key_of_another_color_type_is_damaged() -> None:
    data = encode_png16(np.zeros((2, 2, 1), np.uint16))
    data = data[:33] + png_chunk(b"tRNS", KEY) + data[33:]
    with pytest.raises(BadImage, match="tRNS"):
        decode_png16(data, png_header(data))


def test_a_header_without_a_known_color_type_is_damaged() -> None:
    with pytest.raises(BadImage, match="color type 5"):
        png_header(png_file(struct.pack(">II5B", 1, 1, 16, 5, 0, 0, 0), b""))
    with refused(BadImage):
        png_header(b"\x89PNG")
