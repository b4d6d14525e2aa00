from __future__ import annotations

import io
import math
import struct
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
import simplejpeg
from helpers import encoded, exif, jpeg, jpeg_of_scans, opened, picture, png, png_chunk, png_file
from hypothesis import given
from hypothesis import strategies as st
from pairwise import pairwise
from PIL import Image, PngImagePlugin
from refusals import refused
from table import for_each

from shardkit.codecs.image import decode, inspect
from shardkit.codecs.structure import (
    MAX_SCANS,
    check_png,
    check_ppm,
    check_scans,
    jpeg_header,
    jpeg_segments,
    plain_png,
    png_is_whole,
    png_says_more,
    tiff_frames,
    webp_size,
)
from shardkit.errors import BadImage


def test_the_header_of_a_jpeg_ends_before_its_pixels() -> None:
    data = jpeg(200, 150)
    header = jpeg_header(data)
    assert len(header.content) < len(data) / 4
    assert not header.speaks
    assert jpeg_header(data[:-2] + b"Exif\0MPF\0Orientation" + data[-2:]) == header


def test_a_header_with_more_than_a_size_is_recognized() -> None:
    frames = encoded(picture(), "MPO", save_all=True, append_images=[picture(seed=1)])
    turned, told = jpeg(30, 20, exif=exif(6)), jpeg(30, 20, xmp=b"<x tiff:Orientation='3'/>")
    assert all(jpeg_header(data).speaks for data in (turned, frames, told))


@given(st.binary(max_size=60), st.integers(0, 700))
def test_damage_after_a_jpegs_header_does_not_change_the_header(junk: bytes, at: int) -> None:
    """Libjpeg reads the same values from the full image and from the header."""
    data = jpeg()
    data = data[:at] + junk + data[at + len(junk) :]
    try:
        whole = simplejpeg.decode_jpeg_header(data)
    except (ValueError, KeyError):
        return
    assert simplejpeg.decode_jpeg_header(jpeg_header(data).content) == whole


@for_each("cut", [2, 3, 4, 19, 60, 300])
def test_a_jpeg_that_ends_in_its_header_is_bad(cut: int) -> None:
    with refused(BadImage):
        jpeg_header(jpeg()[:cut])


def test_excessive_exif_data_is_dropped() -> None:
    data = jpeg()
    segment = b"\xff\xe1" + (20_002).to_bytes(2, "big") + b"Exif\0\0" + bytes(19_994)
    many = data[:2] + segment * 200 + data[2:]
    header = jpeg_header(many)
    assert header.speaks
    assert 16 * len(segment) < len(header.content) < 17 * len(segment)
    assert jpeg_header(data).content[2:] == header.content[2 + 16 * len(segment) :]


@for_each(
    ("marker", "bits", "coding"),
    [
        (0xC0, 8, "8 bits, sequential"),
        (0xC1, 12, "12 bits, sequential"),
        (0xC2, 8, "8 bits, progressive"),
        (0xC3, 8, "8 bits, lossless"),
        (0xC9, 8, "8 bits, arithmetic sequential"),
        (0xCE, 8, "8 bits, hierarchical arithmetic progressive"),
    ],
)
def test_the_coding_of_a_jpeg_has_a_name(marker: int, bits: int, coding: str) -> None:
    data = bytearray(jpeg())
    start = data.index(b"\xff\xc0")
    data[start + 1], data[start + 4] = marker, bits
    assert jpeg_header(bytes(data)).coding == coding


@for_each("wrap", [bytes, memoryview])
def test_the_scans_of_a_jpeg_are_counted_if_decoders_read_them(
    wrap: Callable[[bytes], bytes | memoryview],
) -> None:
    check_scans(wrap(jpeg_of_scans(MAX_SCANS)))
    with refused(BadImage, MAX_SCANS + 1, MAX_SCANS):
        check_scans(wrap(jpeg_of_scans(MAX_SCANS + 1)))
    check_scans(wrap(jpeg() + b"\xff\xda" * (MAX_SCANS + 1)))  # one scan has all components


def test_a_jpeg_of_any_length_is_searched_for_scans() -> None:
    data = jpeg_of_scans(2)
    for length in range(len(data)):
        check_scans(data[:length])
        check_scans(data[:2] + b"\0\xff\xff" + data[2:length])


def test_a_second_start_of_a_jpeg_is_one_of_its_pieces() -> None:
    """Libjpeg refuses it, whatever else is left out."""
    data = jpeg()
    assert jpeg_segments(data[:2] + data) == [data[:2], *jpeg_segments(data)]


def directories(order: str, big: bool, count: int, last: int | None = 0) -> bytes:
    """Return a TIFF file with nothing but directories, of no entries; None lets it end with them.

    ``last`` is what the last one gives as the offset of the next.
    """
    mark = b"II" if order == "<" else b"MM"
    start, step = (16, 16) if big else (8, 6)
    number, offset = ("Q", "Q") if big else ("H", "I")
    version = struct.pack(order + "HHH", 43, 8, 0) if big else struct.pack(order + "H", 42)
    data = mark + version + struct.pack(order + offset, start)
    for place in range(1, count + 1):
        following = start + place * step if place < count or last is None else last
        data += struct.pack(order + number + offset, 0, following)
    return data


@for_each("order", "<>")
@for_each("big", [False, True])
def test_the_images_of_a_tiff_are_counted(order: str, big: bool) -> None:
    for count in (1, 2, 7):
        assert tiff_frames(directories(order, big, count)) == count
        assert tiff_frames(directories(order, big, count, last=16 if big else 8)) == count
        assert tiff_frames(directories(order, big, count, last=None)) == count
        assert tiff_frames(directories(order, big, count, last=2**31)) == count


def test_pillow_counts_the_same_images_in_a_tiff() -> None:
    pages = [picture(seed=seed) for seed in range(4)]
    for big in (False, True):
        data = encoded(pages[0], "TIFF", save_all=True, append_images=pages[1:], big_tiff=big)
        assert tiff_frames(data) == opened(data).n_frames == 4  # type: ignore[attr-defined]


def test_many_images_of_a_tiff_are_counted_in_time() -> None:
    """Pillow compares each with all before it, which takes minutes for 200,000."""
    data = b"II*\0\x08\0\0\0" + b"".join(
        struct.pack("<HI", 0, 8 + 6 * place) for place in range(1, 200_000)
    )
    assert tiff_frames(data + bytes(6)) == 200_000


def test_an_intact_png_is_not_damaged() -> None:
    for mode in ("1", "L", "P", "LA", "RGB", "RGBA", "I;16"):
        for size in ((1, 1), (7, 9), (40, 30)):
            data = png(*size, mode=mode)
            check_png(data)
            check_png(memoryview(data))
            assert png_is_whole(data)


def test_each_damaged_chunk_of_a_png_is_named() -> None:
    data = png_file(struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0), b"\0\1", png_chunk(b"teXt", b"x"))
    for name in (b"IHDR", b"teXt", b"IDAT"):
        damaged = bytearray(data)
        damaged[data.index(name) + 4] ^= 1
        with refused(BadImage, name.decode()):
            check_png(bytes(damaged))


def test_a_png_truncated_anywhere_is_damaged() -> None:
    data = png()
    for end in range(8, len(data)):
        with refused(BadImage):
            check_png(data[:end])


def test_a_png_starts_with_its_only_header() -> None:
    data = png()
    header, rest = data[8:33], data[33:]
    for chunks in (header + header + rest, png_chunk(b"teXt", b"") + header + rest):
        with refused(BadImage, "IHDR"):
            check_png(data[:8] + chunks)


ADAM7 = (
    (1, 6, 4, 6, 2, 6, 4, 6),
    (7, 7, 7, 7, 7, 7, 7, 7),
    (5, 6, 5, 6, 5, 6, 5, 6),
    (7, 7, 7, 7, 7, 7, 7, 7),
    (3, 6, 4, 6, 3, 6, 4, 6),
    (7, 7, 7, 7, 7, 7, 7, 7),
    (5, 6, 5, 6, 5, 6, 5, 6),
    (7, 7, 7, 7, 7, 7, 7, 7),
)
"""The pass in which each pixel of an interlaced PNG comes, as its specification draws it."""


def unpacked_bytes(width: int, height: int, bits: int, interlaced: int) -> int:
    """Return how many bytes a PNG's rows have, counted pixel by pixel."""
    rows: dict[tuple[int, int], int] = {}
    for y in range(height):
        for x in range(width):
            row = (ADAM7[y % 8][x % 8] if interlaced else 0, y)
            rows[row] = rows.get(row, 0) + bits
    return sum(1 + math.ceil(count / 8) for count in rows.values())


@for_each("interlaced", [0, 1])
@for_each(
    ("colour", "depth", "bits"),
    [(0, 1, 1), (0, 16, 16), (2, 8, 24), (3, 4, 4), (4, 8, 16), (6, 16, 64)],
)
@for_each("size", [(1, 1), (3, 2), (5, 8), (17, 11)])
def test_a_png_without_its_last_byte_is_damaged(
    interlaced: int, colour: int, depth: int, bits: int, size: tuple[int, int]
) -> None:
    header = struct.pack(">IIBBBBB", *size, depth, colour, 0, 0, interlaced)
    enough = unpacked_bytes(*size, bits, interlaced)
    counts = (0, enough - 1, enough, enough + 1)
    found = [png_is_whole(png_file(header, bytes(count))) for count in counts]
    assert found == [False, False, True, True]


@for_each(("interlaced", "size", "value"), pairwise([0, 1], [(3, 1), (9, 7)], [0, 0xFF]))
@for_each(
    ("colour", "depth", "bits"),
    [(0, 1, 1), (0, 8, 8), (0, 16, 16), (2, 8, 24), (3, 4, 4), (6, 8, 32)],
)
def test_a_png_that_lacks_any_of_its_bytes_is_not_decoded(  # noqa: PLR0917
    interlaced: int, colour: int, depth: int, bits: int, size: tuple[int, int], value: int
) -> None:
    header = struct.pack(">IIBBBBB", *size, depth, colour, 0, 0, interlaced)
    palette = png_chunk(b"PLTE", bytes(48))
    row = unpacked_bytes(size[0], 1, bits, 0)
    enough = unpacked_bytes(*size, bits, interlaced)
    content = (b"\0" + bytes((value,)) * (row - 1)) * size[1]
    if interlaced:
        content = bytes(enough)
    assert len(content) == enough
    decode(png_file(header, content, palette), "png")
    for count in range(enough):
        with pytest.raises(BadImage):
            decode(png_file(header, content[:count], palette), "png")


def test_the_last_rows_of_a_png_are_found_without_its_last_bytes() -> None:
    """When all bytes are given to it, zlib may still hold back rows."""
    width, height = 61_680, 17  # one byte more than is unpacked at a time
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = bytes((1 + width) * height)
    packed = zlib.compress(rows)
    for end in range(len(packed) - 8, len(packed) + 1):
        chunk = png_chunk(b"IDAT", packed[:end])
        data = png_file(header, b"").replace(png_chunk(b"IDAT", zlib.compress(b"")), chunk)
        assert png_is_whole(data) == (zlib.decompressobj().decompress(packed[:end]) == rows)


def test_a_bomb_in_the_packed_rows_of_a_png_is_not_unpacked() -> None:
    header = struct.pack(">IIBBBBB", 4, 4, 8, 0, 0, 0, 0)
    packed = zlib.compress(bytes(1 << 26), 1)
    data = b"".join(
        (png()[:8], png_chunk(b"IHDR", header), png_chunk(b"IDAT", packed), png_chunk(b"IEND", b""))
    )
    tracemalloc.start()
    assert png_is_whole(data)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 16 << 20


def test_a_png_with_metadata_is_recognized() -> None:
    assert not png_says_more(png())
    assert png_says_more(encoded(picture(), "PNG", exif=exif(3)))


@for_each("size", [(1, 1), (24, 16), (1000, 3)])
def test_the_size_of_a_webp_is_read(size: tuple[int, int]) -> None:
    image = picture(*size)
    frames = [picture(*size, seed=1)]
    assert webp_size(encoded(image, "WEBP")) == size
    assert webp_size(encoded(image, "WEBP", lossless=True)) == size
    assert webp_size(encoded(image, "WEBP", save_all=True, append_images=frames)) == size
    assert webp_size(encoded(image, "WEBP")[:20]) is None


@for_each(
    "head",
    [b"P6 3 2 255\n", b"P4\n# c\n3 #\n 2\n", b"P1 1 1", b"P5#" + b"c" * 60_000 + b"\n1 1 9 "],
)
def test_the_header_of_a_netpbm_file_may_have_comments(head: bytes) -> None:
    check_ppm(head)


@for_each(
    "head",
    [b"P6 3 2", b"P6 -3 2 255 ", b"P5 3 2 x", b"P6 #", b"P6 #" + b"c" * 70_000 + b"\n1 1 255 "],
)
def test_a_netpbm_file_without_its_numbers_is_bad(head: bytes) -> None:
    with refused(BadImage, "65536"):
        check_ppm(head)


@for_each("marker", [0xC0, 0xC2, 0xC4, 0xDA, 0xE1])
def test_a_jpeg_of_one_empty_segment_is_truncated(marker: int) -> None:
    data = b"\xff\xd8\xff" + bytes((marker,)) + b"\0\x02"
    with pytest.raises(BadImage):
        inspect(data, "jpg")
    with pytest.raises(BadImage):
        decode(data, "jpg")


@for_each("interlaced", [0, 1])
@for_each("tail", [b"", b"surplus" * 50])
@for_each("spoilt", [-1, -3, -6])
def test_a_png_with_bad_packed_data_is_a_bad_image(
    interlaced: int, tail: bytes, spoilt: int
) -> None:
    header = struct.pack(">IIBBBBB", 4, 4, 8, 0, 0, 0, interlaced)
    packed = bytearray(zlib.compress(bytes(60) + tail, 0))
    packed[spoilt] ^= 0xFF
    data = b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            png_chunk(b"IHDR", header),
            png_chunk(b"IDAT", bytes(packed)),
            png_chunk(b"IEND", b""),
        )
    )
    with pytest.raises(BadImage):
        decode(data, "png")


@for_each("mode", ["L", "LA", "RGB", "RGBA", "P", "1", "I;16"])
@for_each("text", [False, True])
def test_an_ordinary_png_is_proved_intact_without_pillow(mode: str, text: bool) -> None:
    notes = PngImagePlugin.PngInfo()
    if text:
        notes.add_text("Software", "a test")
    buffer = io.BytesIO()
    Image.effect_noise((9, 7), 50).convert(mode).save(buffer, "PNG", pnginfo=notes)
    plain = plain_png(buffer.getvalue())
    if mode in ("L", "LA", "RGB", "RGBA"):
        assert plain is not None
        assert ((plain.width, plain.height), plain.is_whole()) == ((9, 7), True)
    else:
        assert plain is None


def test_the_fast_png_check_misses_no_damage_that_decoding_finds() -> None:
    def refused(function: Callable[[bytes, str], object], data: bytes) -> bool:
        try:
            function(data, "png")
        except BadImage:
            return True
        return False

    rows = b"".join(b"\0" + bytes([10 * y] * 12) for y in range(1, 5))
    head = struct.pack(">IIBBBBB", 4, 4, 8, 2, 0, 0, 0)
    packed = zlib.compress(rows)
    packs = [packed[:cut] for cut in range(len(packed) + 1)]
    packs += [zlib.compress(rows[:-cut]) for cut in (1, 13)]
    packs += [b"not packed", packed[:5] + b"\xff\xff" + packed[7:]]
    packs += [zlib.compress(rows + b"\0"), zlib.compress(b"\x05" + rows[1:]), packed + b"x"]
    start, end = b"\x89PNG\r\n\x1a\n", png_chunk(b"IEND", b"")
    files = [start + png_chunk(b"IHDR", head) + png_chunk(b"IDAT", pack) + end for pack in packs]
    whole = files[len(packed)]
    files += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    files += [whole[:cut] for cut in range(len(whole))]
    first, note = png_chunk(b"IDAT", packed[:5]), png_chunk(b"tEXt", b"a\0b")
    files.append(
        start + png_chunk(b"IHDR", head) + first + note + png_chunk(b"IDAT", packed[5:]) + end
    )
    files.append(start + note + png_chunk(b"IHDR", head) + png_chunk(b"IDAT", packed) + end)
    assert inspect(whole, "png").surely_decodes
    for data in files:
        proven = not refused(inspect, data) and inspect(data, "png").surely_decodes
        assert not (proven and refused(decode, data))
