from __future__ import annotations

import contextlib
import io
import struct
import subprocess
import sys
import tracemalloc
import zlib
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from helpers import (
    Pixels,
    encoded,
    exif,
    jpeg,
    jpeg_of_scans,
    jpeg_stating,
    opened,
    picture,
    pixels,
    png,
    png_chunk,
    png_file,
)
from hostile import rasters
from pairwise import pairwise
from PIL import Image, ImageFile, ImageOps
from refusals import refused
from table import for_each

from shardkit.codecs import image as codec
from shardkit.codecs import libjpeg
from shardkit.codecs.geometry import turn
from shardkit.codecs.image import (
    Decoding,
    ImageInfo,
    decode,
    decode_mask,
    encode,
    inspect,
    sniff,
    to_rgb,
)
from shardkit.codecs.structure import MAX_SCANS
from shardkit.codecs.typed import decode_typed
from shardkit.errors import BadImage
from shardkit.system import compiled, native

MAGENTA = (255, 0, 255)


def oracle(data: bytes) -> Pixels:
    """Return the RGB pixels of an opaque 8-bit image in Pillow."""
    return np.asarray(opened(data).convert("RGB"))


def over(image: Image.Image, background: tuple[int, int, int]) -> Pixels:
    """Return an image composited over a color, without Pillow."""
    layer = np.asarray(image.convert("RGBA")).astype(np.float64)
    alpha = layer[:, :, 3:] / 255
    mixed = layer[:, :, :3] * alpha + np.array(background) * (1 - alpha)
    result: Pixels = np.rint(mixed).astype(np.uint8)
    return result


def differ(one: Pixels, other: Pixels) -> int:
    """Return the largest difference between two images of equal shape."""
    assert one.shape == other.shape
    return int(np.abs(one.astype(int) - other.astype(int)).max())


# What it is.

SAMPLES = {
    "jpg": encoded(kind="JPEG"),
    "png": encoded(kind="PNG"),
    "webp": encoded(kind="WEBP"),
    "bmp": encoded(kind="BMP"),
    "gif": encoded(kind="GIF"),
    "tiff": encoded(kind="TIFF"),
    "ppm": encoded(kind="PPM"),
}


@for_each("field", SAMPLES)
def test_each_type_is_recognized_measured_and_decoded(field: str) -> None:
    data, out = SAMPLES[field], np.zeros((16, 24, 3), np.uint8)
    assert sniff(data[: codec.SNIFF_BYTES]) == field
    assert inspect(data, field) == ImageInfo(24, 16)
    assert np.shares_memory(decode(memoryview(data), field, out=out), out)
    assert np.array_equal(out, oracle(data))


@for_each("mode", ["1", "L", "RGB"])
@for_each("plain", [False, True])
def test_every_netpbm_type_is_recognized(mode: str, plain: bool) -> None:
    image = picture(8, 6, mode=mode)
    data = encoded(image, "PPM")
    if plain:
        number = {"1": 1, "L": 2, "RGB": 3}[mode]
        top = b"P%d\n# comment\n8 6\n" % number + (b"" if mode == "1" else b"255\n")
        values = np.asarray(image).astype(int).reshape(-1)
        values = 1 - values if mode == "1" else values
        data = top + b" ".join(b"%d" % value for value in values)
    assert sniff(data[:32]) == "ppm"
    assert np.array_equal(decode(data, "ppm"), np.asarray(image.convert("RGB")))


@for_each(
    "text",
    [
        b"",
        b"BM",
        b"BM is the beginning of this text, which goes on for a while",
        b"P1 is a plan",
        b"P6",
        b"P9 1 1",
        b"GIF is a format",
        b"RIFF\0\0\0\0WAVEfmt ",
        b"II* is no TIFF",
        b"%PDF-1.7",
        b"\xff\xd8",
        b"\x89PNG\n",
        b"<svg/>",
    ],
)
def test_other_content_is_not_an_image(text: bytes) -> None:
    assert sniff(text[: codec.SNIFF_BYTES]) is None


def test_both_byte_orders_and_big_tiffs_are_recognized() -> None:
    assert sniff(b"MM\0*\0\0\0\x08") == sniff(b"II+\0\x08\0\0\0") == "tiff"
    big = encoded(kind="TIFF", big_tiff=True)
    assert sniff(big[:32]) == "tiff"
    assert np.array_equal(decode(big, "tiff"), oracle(big))


# How large, how turned, how many frames.


def with_exif(orientation: int, kind: str) -> bytes:
    return encoded(picture(24, 16), kind, exif=exif(orientation))


@for_each("kind", ["JPEG", "PNG", "WEBP"])
@for_each("orientation", [*range(10), 255])
def test_the_orientation_is_found(kind: str, orientation: int) -> None:
    field = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}[kind]
    info = inspect(with_exif(orientation, kind), field)
    orientation = orientation if 1 <= orientation <= 8 else 1
    assert info == ImageInfo(24, 16, orientation)
    assert type(info.orientation) is int
    assert info.upright == ((16, 24) if orientation > 4 else (24, 16))


@for_each("orientation", range(1, 9))
def test_a_tiff_is_rotated_exactly_once(orientation: int) -> None:
    """Pillow rotates only TIFF files on loading."""
    data = with_exif(orientation, "TIFF")
    info = inspect(data, "tiff")
    turned = turn(decode(data, "tiff"), info.orientation)
    assert turned.shape == (*info.upright[::-1], 3)
    assert np.array_equal(turned, turn(pixels(24, 16), orientation))


def jpeg_with_segments(*segments: bytes) -> bytes:
    data = jpeg(24, 16)
    made = b"".join(
        marker + (len(content) + 2).to_bytes(2, "big") + content
        for marker, content in ((segment[:2], segment[2:]) for segment in segments)
    )
    return data[:2] + made + data[2:]


def test_an_orientation_after_large_segments_is_found() -> None:
    padding = b"\xff\xed" + bytes(60_000)
    data = jpeg_with_segments(padding, padding, b"\xff\xe1" + exif(6).tobytes())
    assert inspect(data, "jpg").orientation == 6


def test_an_orientation_only_in_xmp_is_found_as_in_pillow() -> None:
    packet = (
        b'\xff\xe1http://ns.adobe.com/xap/1.0/\0<x:xmpmeta xmlns:x="adobe:ns:meta/">'
        b'<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description '
        b'xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
    )
    data = jpeg_with_segments(packet)
    assert ImageOps.exif_transpose(opened(data)).size == (16, 24)
    assert inspect(data, "jpg").upright == (16, 24)


@for_each(
    ("kind", "value", "beyond", "expected"),
    [
        (5, 26, struct.pack("<II", 6, 1), 6),  # a fraction
        (12, 26, struct.pack("<d", 6.0), 6),  # a double
        (2, 0x36, b"", 1),  # the text "6"
    ],
)
def test_an_orientation_of_the_wrong_type_is_still_a_plain_number(
    kind: int, value: int, beyond: bytes, expected: int
) -> None:
    entry = struct.pack("<HHHIII", 1, 0x0112, kind, 1, value, 0)
    data = jpeg_with_segments(b"\xff\xe1Exif\0\0II*\0\x08\0\0\0" + entry + beyond)
    info = inspect(data, "jpg")
    assert type(info.orientation) is int
    assert info.orientation == expected


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data:UserWarning")
@for_each("rest", [b"", b"garbage", b"II*\0\x08\0\0\0\xff\xff", b"MM\0*\xff\xff\xff\xff"])
def test_damaged_exif_data_do_not_make_an_image_bad(rest: bytes) -> None:
    data = jpeg_with_segments(b"\xff\xe1Exif\0\0" + rest)
    assert inspect(data, "jpg") == ImageInfo(24, 16)


@for_each("field", ["png", "webp"])
def test_exif_data_that_pillow_refuses_do_not_make_an_image_bad(field: str) -> None:
    told = encoded(picture(24, 16), field, exif=exif(6))
    start = told.index(b"MM\0*")
    data = bytearray(told)
    data[start : start + 4] = b"junk"
    if field == "png":
        kind = told.index(b"eXIf")
        size = int.from_bytes(told[kind - 4 : kind], "big")
        data[kind - 4 : kind + 8 + size] = png_chunk(b"eXIf", bytes(data[kind + 4 :][:size]))
    assert inspect(told, field).orientation == 6
    assert inspect(bytes(data), field).orientation == 1


def test_an_orientation_after_the_pixels_of_a_png_is_found() -> None:
    data = png(24, 16)
    assert inspect(data[:-12] + png_chunk(b"eXIf", exif(6).tobytes()[6:]) + data[-12:], "png") == (
        ImageInfo(24, 16, orientation=6)
    )


@pytest.mark.parametrize(
    ("field", "method"),
    [
        ("png", "PngImagePlugin.PngImageFile.getexif"),
        ("jpg", "JpegImagePlugin.JpegImageFile._getmp"),
    ],
)
def test_lack_of_memory_is_not_damaged_metadata(
    monkeypatch: pytest.MonkeyPatch, field: str, method: str
) -> None:
    data = with_exif(6, "PNG" if field == "png" else "JPEG")
    monkeypatch.setattr(f"PIL.{method}", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        inspect(data, field)


def test_a_damaged_list_of_frames_leaves_the_first() -> None:
    data = encoded(picture(), "MPO", save_all=True, append_images=[picture(seed=1)])
    start = data.index(b"MPF\0") + 4
    assert inspect(data, "jpg").frames == 2
    assert inspect(data[:start] + b"junk" + data[start + 4 :], "jpg").frames == 1


def test_tiles_much_larger_than_a_tiff_are_refused() -> None:
    data = encoded(picture(24, 16), "TIFF", tiffinfo={65_000: 60_000})
    at = data.index(struct.pack("<H", 65_000))
    large = data[:at] + struct.pack("<H", 322) + data[at + 2 :]  # the tag TileWidth
    with refused(BadImage, "60000", "24"):
        inspect(large, "tiff")


@for_each("field", ["gif", "webp", "png", "tiff"])
def test_frames_are_counted_and_the_first_is_used(field: str) -> None:
    frames = [picture(24, 16, seed) for seed in range(3)]
    options = {"lossless": True} if field == "webp" else {}
    data = encoded(frames[0], field.upper(), save_all=True, append_images=frames[1:], **options)
    assert inspect(data, field).frames == 3
    assert np.array_equal(decode(data, field), oracle(encoded(frames[0], field.upper(), **options)))


# Pixels.


@for_each(
    ("kind", "mode"),
    [
        *[("JPEG", mode) for mode in ("L", "RGB", "CMYK")],
        *[("PNG", mode) for mode in ("1", "L", "P", "RGB")],
        *[("WEBP", mode) for mode in ("L", "RGB")],
        *[("BMP", mode) for mode in ("1", "L", "P", "RGB")],
        *[("GIF", mode) for mode in ("1", "L", "P", "RGB")],
        *[("TIFF", mode) for mode in ("1", "L", "P", "RGB", "CMYK")],
        *[("PPM", mode) for mode in ("1", "L", "RGB")],
    ],
)
def test_opaque_images_become_rgb_as_in_pillow(kind: str, mode: str) -> None:
    data = encoded(picture(23, 17, mode=mode), kind)
    field = {"JPEG": "jpg"}.get(kind, kind.lower())
    got = decode(data, field)
    assert got.dtype == np.uint8
    assert np.array_equal(got, oracle(data))


@for_each(
    ("size", "subsampling", "progressive"),
    pairwise(
        [(1, 1), (7, 5), (8, 8), (17, 16), (16, 17), (33, 31), (9, 1), (1, 9)],
        [0, 1, 2],
        [False, True],
    ),
)
def test_jpegs_are_bit_equal_to_pillow(
    size: tuple[int, int], subsampling: int, progressive: bool
) -> None:
    data = jpeg(*size, subsampling=subsampling, progressive=progressive, quality=75)
    assert np.array_equal(decode(data, "jpg"), oracle(data))


@for_each("options", [{"restart_marker_rows": 1}, {"keep_rgb": True}, {"optimize": True}])
def test_unusual_jpegs_are_bit_equal_to_pillow(options: dict[str, Any]) -> None:
    data = jpeg(40, 33, **options)
    assert np.array_equal(decode(data, "jpg"), oracle(data))


def test_a_ycck_jpeg_is_bit_equal_to_pillow() -> None:
    """Pillow writes CMYK; its Adobe segment is changed to say that it is YCCK."""
    data = bytearray(encoded(picture(24, 16, mode="CMYK"), "JPEG"))
    start = data.index(b"Adobe")
    assert data[start + 11] == 0
    data[start + 11] = 2
    assert np.array_equal(decode(bytes(data), "jpg"), oracle(bytes(data)))


@for_each("mode", ["LA", "RGBA"])
@for_each("background", [(255, 255, 255), MAGENTA])
@for_each(("kind", "field"), [("PNG", "png"), ("WEBP", "webp"), ("TIFF", "tiff")])
def test_transparent_images_are_composited_over_the_background(
    mode: str, background: tuple[int, int, int], kind: str, field: str
) -> None:
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    data = encoded(picture(16, 12, mode=mode), kind, **options)
    assert differ(decode(data, field, Decoding(background)), over(opened(data), background)) <= 1


def test_fully_transparent_pixels_equal_the_background() -> None:
    data = encoded(Image.new("RGBA", (4, 4), (10, 20, 30, 0)), "PNG")
    assert (decode(data, "png", Decoding(MAGENTA)) == MAGENTA).all()
    assert (decode(data, "png") == 255).all()


def test_palette_entries_may_be_transparent() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    for transparency in (0, b"\0\xff"):
        data = encoded(image, "PNG", transparency=transparency)
        assert decode(data, "png", Decoding(MAGENTA)).tolist() == [[[*MAGENTA], [40, 50, 60]]]
    gif = encoded(image, "GIF", transparency=0)
    assert decode(gif, "gif", Decoding(MAGENTA)).tolist() == [[[*MAGENTA], [40, 50, 60]]]


@for_each("bits", [8, 16])
@for_each(
    ("kind", "key", "values", "shown"),
    [(0, [100], [100, 50], [50, 50, 50]), (2, [200, 0, 0], [200, 0, 0, 0, 200, 0], [0, 200, 0])],
)
def test_one_color_of_a_png_may_be_transparent(
    bits: int, kind: int, key: list[int], values: list[int], shown: list[int]
) -> None:
    factor, form = (1, "B") if bits == 8 else (257, "H")
    rows = b"\0" + struct.pack(f">{len(values)}{form}", *(factor * each for each in values))
    stated = struct.pack(f">{len(key)}H", *(factor * each for each in key))
    header = struct.pack(">IIBBBBB", 2, 1, bits, kind, 0, 0, 0)
    data = png_file(header, rows, png_chunk(b"tRNS", stated))
    assert decode(data, "png", Decoding(MAGENTA)).tolist() == [[[*MAGENTA], shown]]


WIDE = (np.arange(12, dtype=np.uint16) * 5461).reshape(3, 4)
"""16-bit values from 0 to 60071."""


def test_sixteen_bit_gray_keeps_its_upper_byte() -> None:
    expected = np.repeat((WIDE >> 8).astype(np.uint8)[:, :, None], 3, axis=2)
    as_png = encoded(Image.fromarray(WIDE), "PNG")
    as_tiff = encoded(Image.fromarray(WIDE), "TIFF")
    as_pgm = b"P5 4 3 65535\n" + WIDE.astype(">u2").tobytes()
    for data, field in ((as_png, "png"), (as_tiff, "tiff"), (as_pgm, "ppm")):
        assert np.array_equal(decode(data, field), expected), field


def test_sixteen_bit_big_endian_tiff_keeps_its_upper_byte() -> None:
    data = encoded(Image.fromarray(WIDE), "TIFF")
    header = struct.unpack("<4sI", data[:8])
    assert header[0] == b"II*\0"
    image = Image.frombytes("I;16B", (4, 3), WIDE.astype(">u2").tobytes())
    assert np.array_equal(np.asarray(to_rgb(image))[:, :, 0], (WIDE >> 8).astype(np.uint8))


def test_a_gray_map_of_ten_bits_uses_the_full_range() -> None:
    values = np.array([[0, 512, 1023]], ">u2")
    got = decode(b"P5 3 1 1023\n" + values.tobytes(), "ppm")
    assert got[0, :, 0].tolist() == [0, 128, 255]


def test_a_png_of_48_bits_keeps_upper_bytes() -> None:
    values = np.array([0, 0x1234, 0xFFFF, 0x80FF, 0x7F00, 0x00FF], ">u2")
    header = struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)
    got = decode(png_file(header, b"\0" + values.tobytes()), "png")
    assert got.reshape(-1).tolist() == [0, 0x12, 0xFF, 0x80, 0x7F, 0]


@for_each("mode", ["F", "I"])
def test_pixels_without_a_range_are_refused(mode: str) -> None:
    data = encoded(Image.new(mode, (4, 4), 7), "TIFF")
    with refused(BadImage):
        decode(data, "tiff")


@for_each("mode", ["RGB", "L", "CMYK"])
@for_each("at_least", [(1, 1), (20, 15), (40, 30), (41, 30), (40, 31), (160, 120), (500, 1)])
def test_a_reduced_jpeg_suffices(mode: str, at_least: tuple[int, int]) -> None:
    data = encoded(picture(160, 120, mode=mode), "JPEG")
    height, width, _ = decode(data, "jpg", Decoding(at_least=at_least)).shape
    assert width >= min(160, at_least[0])
    assert height >= min(120, at_least[1])


@pytest.mark.parametrize("has_module", [True, False])
def test_without_simplejpeg_pixels_are_the_same(
    has_module: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [jpeg(23, 17), encoded(picture(mode="L"), "JPEG"), with_exif(6, "JPEG")]
    fast = [(inspect(data, "jpg"), decode(data, "jpg")) for data in files]
    monkeypatch.setattr(libjpeg, "simplejpeg", None)
    if not has_module:
        monkeypatch.setattr(native, "module", lambda: None)
        assert not libjpeg.is_available()
    for data, (info, values) in zip(files, fast, strict=True):
        assert inspect(data, "jpg") == info
        assert np.array_equal(decode(data, "jpg"), values)


# Bad images.


@for_each("field", SAMPLES)
@for_each("part", [0.1, 0.5, 0.9])
def test_a_truncated_image_is_bad(field: str, part: float) -> None:
    data = SAMPLES[field]
    with pytest.raises(BadImage):
        decode(data[: int(len(data) * part)], field)


@for_each("field", SAMPLES)
def test_content_of_another_kind_is_bad(field: str) -> None:
    other = SAMPLES["png" if field != "png" else "gif"]
    for data in (other, b"", b"text"):
        with pytest.raises(BadImage):
            decode(data, field)
        with pytest.raises(BadImage):
            inspect(data, field)


def test_every_flipped_byte_of_a_png_is_found_or_harmless() -> None:
    """A PNG has a checksum for each of its chunks: no pixel can change unnoticed."""
    data = png(16, 12)
    good = oracle(data)
    wrong = []
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        try:
            inspect(bytes(damaged), "png")
            if not np.array_equal(decode(bytes(damaged), "png"), good):
                wrong.append(at)
        except BadImage:
            pass
    assert wrong == []


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about metadata
@pytest.mark.parametrize("field", SAMPLES)
@pytest.mark.parametrize("mask", [0x10, 0xFF])
def test_a_damaged_image_is_bad_or_has_the_size_that_it_states(field: str, mask: int) -> None:
    data = encoded(picture(12, 9), {"jpg": "JPEG"}.get(field, field))
    refused = 0
    steps = range(0, len(data), 1 if len(data) < 600 else 3)
    for at in steps:
        damaged = bytearray(data)
        damaged[at] ^= mask
        try:
            info = inspect(bytes(damaged), field)
            values = decode(bytes(damaged), field)
        except BadImage:
            refused += 1
        else:
            assert values.shape == (info.height, info.width, 3)
    assert 0 < refused < len(steps)


@pytest.mark.parametrize("field", ["gif", "png", "webp", "tiff"])
def test_a_truncated_animation_is_bad_or_has_its_first_frame(field: str) -> None:
    frames = [picture(6, 5, seed) for seed in range(3)]
    data = encoded(frames[0], field.upper(), save_all=True, append_images=frames[1:])
    first, refused = oracle(data), 0
    for end in range(32, len(data)):
        try:
            inspect(data[:end], field)
            assert np.array_equal(decode(data[:end], field), first)
        except BadImage:
            refused += 1
    assert refused


def overwritten(seed: int) -> bytes:
    """Return a JPEG with 64 bytes of garbage in the middle."""
    data = bytearray(jpeg(64, 64, seed, quality=95))
    middle = len(data) // 2
    data[middle : middle + 64] = np.random.default_rng(seed).bytes(64)
    return bytes(data)


def test_garbage_in_the_middle_of_a_jpeg_is_noticed() -> None:
    """Some garbage is valid by chance; libjpeg warns about most of it."""
    unnoticed = 0
    for seed in range(40):
        warnings: list[str] = []
        with contextlib.suppress(BadImage):
            decode(overwritten(seed), "jpg", warnings=warnings)
            unnoticed += not warnings
    assert unnoticed <= 8


def test_trailing_bytes_are_not_damage() -> None:
    data = jpeg()
    end = data + b"trailing rubbish"
    before_end = data[:-2] + b"\0\0\0" + data[-2:]
    for odd in (end, before_end):
        assert np.array_equal(decode(odd, "jpg"), oracle(data))


def bomb(kind: str, side: int = 60_000) -> bytes:
    if kind == "png":
        return png_file(struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0), b"")
    if kind == "bmp":
        data = bytearray(SAMPLES["bmp"])
        data[18:26] = struct.pack("<II", side, side)
        return bytes(data)
    if kind == "tiff":
        strip = zlib.compress(bytes(9))
        return rasters.tiff(strip, size=(side, side), packing=8)
    if kind == "gif":
        data = bytearray(SAMPLES["gif"])
        data[6:10] = struct.pack("<HH", 60_000, 60_000)
        return bytes(data)
    if kind == "ppm":
        return b"P6 %d %d 255\n" % (side, side) + bytes(100)
    return jpeg_stating(16_000, 16_000)


@for_each("kind", ["jpg", "png", "bmp", "gif", "ppm"])
@for_each("function", [inspect, decode])
def test_a_bomb_is_refused_by_its_header(kind: str, function: object) -> None:
    assert callable(function)
    data = bomb(kind)
    tracemalloc.start()
    try:
        with pytest.raises(BadImage):
            function(data, kind)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@for_each("kind", ["png", "bmp", "ppm", "tiff"])
@for_each("function", [inspect, decode, decode_mask])
def test_pixels_that_the_data_cannot_unpack_to_are_refused_by_the_header(
    kind: str, function: object
) -> None:
    assert callable(function)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(ImageFile.ImageFile, "load")
        with refused(BadImage, "13000 x 13000"):  # under the limit of pixels
            function(bomb(kind, 13_000), kind)


def test_a_sixteen_bit_png_is_refused_by_its_header() -> None:
    header = struct.pack(">IIBBBBB", 9000, 9000, 16, 6, 0, 0, 0)
    tracemalloc.start()
    try:
        with refused(BadImage, "9000 x 9000"):
            decode_typed(png_file(header, bytes(100)), "png")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("with_simplejpeg", [True, False])
def test_a_jpeg_of_too_many_scans_is_refused(
    with_simplejpeg: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_simplejpeg:
        monkeypatch.setattr(libjpeg, "simplejpeg", None)
    assert decode(jpeg_of_scans(MAX_SCANS), "jpg").shape == (8, 8, 3)
    many, reason = jpeg_of_scans(MAX_SCANS + 1), f"it has {MAX_SCANS + 1} scans, more than"
    for function in (decode, decode_mask, inspect):
        with pytest.raises(BadImage, match=reason):
            function(many, "jpg")


@pytest.mark.skipif(native.module() is None, reason="the compiled module is not used")
def test_the_compiled_module_leaves_a_jpeg_of_too_many_scans_to_python() -> None:
    assert compiled.jpeg_planes(jpeg_of_scans(MAX_SCANS)) is not None
    assert compiled.jpeg_planes(jpeg_of_scans(MAX_SCANS + 1)) is None
    assert compiled.inspect_jpeg(jpeg_of_scans(MAX_SCANS)) == (8, 8)
    assert compiled.inspect_jpeg(jpeg_of_scans(MAX_SCANS + 1)) is None


@pytest.mark.skipif(native.module() is None, reason="the compiled module is not used")
def test_a_jpeg_that_the_compiled_module_proves_decodes_without_a_warning() -> None:
    rng = np.random.default_rng(0)
    pixels = Image.fromarray(rng.integers(0, 256, (40, 30, 3), np.uint8))
    seen = set()
    for options in ({}, {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0"}, {"progressive": True}):
        file = io.BytesIO()
        pixels.save(file, "JPEG", **options)
        whole = file.getvalue()
        assert compiled.jpeg_decodes(whole) == ("progressive" not in options)
        for _ in range(300):
            data = bytearray(whole[: int(rng.integers(len(whole) // 2, len(whole) + 1))])
            data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
            proven = compiled.jpeg_decodes(bytes(data))
            seen.add(proven)
            if proven:
                warnings: list[str] = []
                decode(bytes(data), "jpg", warnings=warnings)
                assert not warnings
    assert seen == {True, False}


def test_a_progressive_bomb_does_not_take_the_memory() -> None:
    """Libjpeg would allocate all coefficients, so this runs in a process with little memory."""
    code = """
import resource, sys
import numpy, PIL.Image, simplejpeg
from shardkit.codecs.image import decode
from shardkit.errors import BadImage
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
try:
    decode(sys.stdin.buffer.read(), "jpg")
except BadImage as error:
    print("refused:", error)
"""
    data = bytearray(jpeg(32, 32, progressive=True))
    start = data.index(b"\xff\xc2")
    data[start + 5 : start + 9] = struct.pack(">HH", 60_000, 60_000)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=data, capture_output=True, timeout=240, check=False)
    assert done.stdout.startswith(b"refused:"), done.stderr[-500:]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_large_image_within_the_limit_is_accepted() -> None:
    """Above half of the limit Pillow warns."""
    width, height = 12_000, 8_000
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    data = png_file(header, bytes((1 + width // 8) * height))
    assert inspect(data, "png") == ImageInfo(width, height)


# Back to bytes.


@for_each(("field", "kind"), [("jpg", "JPEG"), ("png", "PNG"), ("webp", "WEBP")])
def test_encoded_images_have_the_requested_type(field: str, kind: str) -> None:
    data = encode(pixels(33, 21), field, 90)
    assert sniff(data[:32]) == field
    assert opened(data).format == kind
    assert decode(data, field).shape == (21, 33, 3)
    assert differ(decode(data, field), pixels(33, 21)) <= (0 if field == "png" else 60)


def test_a_jpeg_is_baseline_with_subsampled_color() -> None:
    data = encode(pixels(32, 32), "jpg", 90)
    start = data.index(b"\xff\xc0")
    assert data[start + 11] == 0x22  # two by two luma samples for each chroma sample
    assert b"\xff\xc2" not in data


def test_metadata_is_not_encoded() -> None:
    image = opened(with_exif(6, "JPEG"))
    image.load()
    for field in ("jpg", "png", "webp"):
        data = encode(np.asarray(image.convert("RGB")), field, 90)
        assert dict(opened(data).getexif()) == {}


@for_each(("field", "width"), [("webp", 16_384), ("jpg", 65_501)])
def test_an_image_too_large_for_its_encoding_is_bad(field: str, width: int) -> None:
    with pytest.raises(BadImage):
        encode(np.zeros((1, width, 3), np.uint8), field, 90)


@for_each("fill", [b"\xff", b"\xff\xff\xff"])
def test_padding_before_a_marker_is_not_a_length(fill: bytes) -> None:
    data = jpeg()
    at = data.index(b"\xff\xdb")
    assert inspect(data[:at] + fill + data[at:], "jpg") == inspect(data, "jpg")
