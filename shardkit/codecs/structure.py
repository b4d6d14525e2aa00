"""What an encoded image says of itself, read from its bytes without decoding a pixel.

It bounds the time and memory that a hostile file could take, and finds damage of which Pillow
says nothing.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from shardkit.errors import BadImage

MAX_SCANS = 500
"""Scans of a progressive JPEG: each goes over all its pixels, however few bytes it has. Usual are
ten; 500 take 8 s at the largest size."""

_MARKER = re.compile(rb"\xff[\x01-\xfe]")
_LONELY = frozenset((0x01, *range(0xD0, 0xD8)))
"""Markers without content that a JPEG's header may have: of restarts, and one of no meaning."""
_BORDERS = (0xD8, 0xD9)
"""Markers of a JPEG's beginning and end."""
_START_OF_SCAN = 0xDA
_PROGRESSIVE = (0xC2, 0xC6, 0xCA, 0xCE)
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers that begin the description of a JPEG's pixels, one for each way of coding them."""
_CODINGS = ("sequential", "sequential", "progressive", "lossless")
_SPEAKING = (b"Exif\0", b"rientation", b"MPF\0")
"""What a JPEG's header has if it may say more than its size: EXIF, XMP, further images."""
_MAX_EXIF = 16
"""Segments of EXIF data that are looked at: Pillow joins them one by one, and copies all that it
has each time. Only previews ever need more than one, and the orientation stands in the first."""

_GAP = rb"(?:[ \t\r\n\v\f]|#[^\r\n]*[\r\n])+"
_PPM_HEADER = re.compile(rb"P(?:[14]|[2356](?=(?:%b[0-9]+){3}))(?:%b[0-9]+){2}" % (_GAP, _GAP))
_PPM_HEADER_BYTES = 1 << 16

_SIGNATURE = 8
"""Bytes before the first chunk of a PNG file."""
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Colour type of a PNG to values in a pixel."""
_PASSES = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)
"""Passes of an interlaced PNG: first column and row, steps to the next ones."""
_INFLATED = 1 << 20
"""Bytes that are unpacked at a time."""


class JpegHeader(NamedTuple):
    """A JPEG up to and with the head of its first scan."""

    content: bytes
    """Without what stands between the segments, and without more EXIF data than anyone reads."""
    speaks: bool
    """Whether it may say more than the image's size."""
    coding: str
    """How its pixels are coded, in words."""


def jpeg_header(data: bytes) -> JpegHeader:
    """Return a JPEG's header.

    To look for EXIF data among its pixels as well would take longer than to copy them.

    Raises:
        BadImage: If it is cut, or the image has more than `MAX_SCANS` scans.
    """
    at, exif, coding = 2, 0, "no pixels"
    pieces = [data[:2]]
    while match := _MARKER.search(data, at):
        marker, start = match[0][1], match.start()
        at = match.end()
        if marker in _LONELY:
            continue
        size = int.from_bytes(data[at : at + 2], "big")
        at += size
        if size < 2 or at > len(data) or marker in _BORDERS:
            break
        is_exif = marker == 0xE1 and data[start + 4 : start + 9] == b"Exif\0"
        exif += is_exif
        if not is_exif or exif <= _MAX_EXIF:
            pieces.append(data[start:at])
        if marker in _FRAMES and size > 2:
            coding = _coding(marker, data[start + 4])
            if marker in _PROGRESSIVE:
                _check_scans(data, at)
        elif marker == _START_OF_SCAN:
            header = b"".join(pieces)
            return JpegHeader(header, any(mark in header for mark in _SPEAKING), coding)
    raise BadImage("it is cut or damaged in its header, before its first pixel")


def tiff_frames(data: bytes) -> int:
    """Return the number of images in a TIFF file.

    Pillow looks each up in the list of those before it: 20,000 of them take it seconds.
    """
    order = "<" if data[:2] == b"II" else ">"
    big = 0x2B in data[2:4]
    number, offset, entry, at = ("Q", "Q", 20, 8) if big else ("H", "I", 12, 4)
    seen: set[int] = set()
    try:
        (at,) = struct.unpack_from(order + offset, data, at)
        while at and at not in seen:
            (entries,) = struct.unpack_from(order + number, data, at)
            seen.add(at)
            (at,) = struct.unpack_from(
                order + offset, data, at + struct.calcsize(number) + entry * entries
            )
    except (struct.error, OverflowError, ValueError):
        pass  # cut: what was found can be read
    return max(1, len(seen))


def png_says_more(data: bytes) -> bool:
    """Tell whether a PNG file may have EXIF or XMP data."""
    return any(mark in data for mark in (b"eXIf", b"Raw profile type ", b"XML:com.adobe.xmp"))


def check_png(data: bytes | memoryview) -> None:
    """Compare the checksums of all of a PNG's chunks; decoding skips those of the pixels.

    Raises:
        BadImage: If one is wrong, or the last chunk is missing.
    """
    end = b""
    for at, kind, content in _chunks(memoryview(data)):
        end = kind
        if (kind == b"IHDR") != (at == _SIGNATURE):
            raise BadImage("it is damaged: IHDR is not its first chunk, or not the only one")
        stated = data[at + 8 + len(content) : at + 12 + len(content)]
        if kind == b"IEND":
            return
        if zlib.crc32(content, zlib.crc32(kind)) != int.from_bytes(stated, "big"):
            raise BadImage(f"it is damaged: the checksum of its chunk {_name(kind)} is wrong")
    last = f" after its chunk {_name(end)}" if end else ""
    raise BadImage(f"it is damaged: it ends{last}, without the chunk IEND")


def png_is_whole(data: bytes | memoryview) -> bool:
    """Tell whether a PNG's packed data give all its rows; Pillow leaves those missing black."""
    view = memoryview(data)
    width, height, depth, colour, _, _, interlaced = struct.unpack_from(">IIBBBBB", view, 16)
    bits = depth * _CHANNELS.get(colour, 1)
    passes = _PASSES if interlaced else ((0, 0, 1, 1),)
    missing = 0
    for left, top, step_x, step_y in passes:
        columns, rows = -(-(width - left) // step_x), -(-(height - top) // step_y)
        if columns > 0 and rows > 0:
            missing += rows * (1 + -(-columns * bits // 8))
    unpacker = zlib.decompressobj()
    try:
        for _, kind, content in _chunks(view):
            piece: bytes | memoryview = content if kind == b"IDAT" else b""
            while len(piece) and missing > 0:
                missing -= len(unpacker.decompress(piece, _INFLATED))
                piece = unpacker.unconsumed_tail
        while missing > 0 and (rest := unpacker.decompress(unpacker.unconsumed_tail, _INFLATED)):
            missing -= len(rest)
    except zlib.error:  # behind the last row, where Pillow does not look, or before it
        pass
    return missing <= 0


def webp_size(data: bytes | memoryview) -> tuple[int, int] | None:
    """Return width and height of a WebP file's canvas: libwebp makes room for it when it opens it.

    None stands for a header that is none.
    """
    head = bytes(data[12:30])
    if head[:4] == b"VP8X" and len(head) == 18:
        return int.from_bytes(head[12:15], "little") + 1, int.from_bytes(head[15:18], "little") + 1
    if head[:4] == b"VP8L" and len(head) >= 13:
        bits = int.from_bytes(head[9:13], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if head[:4] == b"VP8 " and len(head) == 18:
        width, height = struct.unpack_from("<HH", head, 14)
        return width & 0x3FFF, height & 0x3FFF
    return None


def check_ppm(data: bytes | memoryview) -> None:
    """Find the numbers in the header of a Netpbm file; Pillow reads comments byte by byte.

    Raises:
        BadImage: If they are not there, or behind too long a comment.
    """
    if _PPM_HEADER.match(data, 0, _PPM_HEADER_BYTES) is None:
        raise BadImage(f"its header is damaged, or longer than {_PPM_HEADER_BYTES} bytes")


def _coding(marker: int, bits: int) -> str:
    hierarchical = "hierarchical " if marker & 4 else ""
    arithmetic = "arithmetic " if marker & 8 else ""
    return f"{bits} bits, {hierarchical}{arithmetic}{_CODINGS[marker & 3]}"


def _check_scans(data: bytes, at: int) -> None:
    scans = data.count(b"\xff\xda", at)
    if scans > MAX_SCANS:
        raise BadImage(f"it has {scans} scans, more than {MAX_SCANS}")


def _chunks(view: memoryview) -> Iterator[tuple[int, bytes, memoryview]]:
    """Give offset, type and content of each chunk of a PNG file that is there as a whole."""
    at = _SIGNATURE
    while at + 12 <= len(view):
        size = int.from_bytes(view[at : at + 4], "big")
        kind = bytes(view[at + 4 : at + 8])
        if at + 12 + size > len(view) and kind != b"IEND":
            return
        yield at, kind, view[at + 8 : at + 8 + size]
        at += 12 + size


def _name(kind: bytes) -> str:
    """Return the type of a chunk as text, whatever it is."""
    return kind.decode("ascii", "backslashreplace") if kind.isalpha() else repr(kind)[1:]
