"""Parse headers and structure of encoded images without decoding pixels.

This bounds the time and memory that a hostile file could take, and finds damage that Pillow
ignores.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from shardkit.errors import BadImage

MAX_SCANS = 500
"""Maximum scans of a JPEG: each scan, however short, passes over all pixels. Ten are usual; 500
take 3 s at 4096 x 4096 pixels. Also in ``native/jpeg_guard.c``."""

_MARKER = re.compile(rb"\xff[\x01-\xfe]")
_LONELY = frozenset((0x01, *range(0xD0, 0xD8)))
"""Markers without content in a JPEG's header: restarts, and one without meaning."""
_BORDERS = (0xD8, 0xD9)
"""Markers of a JPEG's start and end."""
_START_OF_SCAN = 0xDA
_SCAN_END = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
_BLOCK_BYTES = 128
"""Memory of 8 x 8 coefficients."""
_METADATA = frozenset((*range(0xE0, 0xF0), 0xFE))
"""Markers of segments that no pixel depends on, except for its color space."""
_PROGRESSIVE = (0xC2, 0xC6, 0xCA, 0xCE)
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Start-of-frame markers of a JPEG, one for each coding process."""
_CODINGS = ("sequential", "sequential", "progressive", "lossless")
_SPEAKING = (b"Exif\0", b"rientation", b"MPF\0")
"""Signs of information beyond the size in a JPEG's header: EXIF, XMP, further images."""
_MAX_EXIF = 16
"""Maximum EXIF segments to pass on: Pillow joins them one by one, copying all of them each time.
Only previews need more than one, and the orientation is in the first."""

_GAP = rb"(?:[ \t\r\n\v\f]|#[^\r\n]*[\r\n])+"
_PPM_HEADER = re.compile(rb"P(?:[14]|[2356](?=(?:%b[0-9]+){3}))(?:%b[0-9]+){2}" % (_GAP, _GAP))
_PPM_HEADER_BYTES = 1 << 16

_SIGNATURE = 8
"""Bytes before the first chunk of a PNG file."""
PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Values per pixel, by color type of a PNG."""
PNG_PASSES = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)
"""Passes of an interlaced PNG: first column and row, and the steps between columns and rows."""
_INFLATED = 1 << 20
"""Bytes unpacked at a time."""
_PLAIN_HEADS = {b"\x08%c\0\0\0" % color: PNG_CHANNELS[color] for color in (0, 2, 4, 6)}
"""Channels by end of IHDR (8 bits, color type, no interlacing), for images that libraries decode
without further chunks."""
_PLAIN_CHUNKS = {b"gAMA": 4, b"sRGB": 1, b"pHYs": 9, b"cHRM": 32, b"tIME": 7}
"""Sizes of chunks that do not affect pixels."""
_PLAIN_TEXT = 4096
"""Maximum bytes of a text chunk in a plain PNG."""
_TELLING_TEXTS = (b"Raw profile type ", b"transparency", b"interlace", b"bbox")
"""Beginnings of text chunks that hold EXIF data, or that Pillow mixes with its own properties."""
_PLAIN_BYTES = 1 << 24
"""Maximum bytes of a plain PNG and of its pixels, which are unpacked at once."""


class JpegHeader(NamedTuple):
    """A JPEG up to and including the header of its first scan."""

    content: bytes
    """The segments, without bytes between them or excessive EXIF data."""
    speaks: bool
    """Whether the header may contain more than the image's size."""
    coding: str
    """Description of the coding process."""


def jpeg_header(data: bytes) -> JpegHeader:
    """Return a JPEG's header.

    Searching the pixel data for EXIF as well would take longer than copying it. Raises BadImage if
    it is truncated, or the image has more than `MAX_SCANS` scans.
    """
    at = 2
    exif = 0
    coding = "no pixels"
    segments = [data[:2]]
    while match := _MARKER.search(data, at):
        marker = match[0][1]
        start = match.start()
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
            segments.append(data[start:at])
        if marker in _FRAMES and size > 2:
            coding = _coding(marker, data[start + 4])
        elif marker == _START_OF_SCAN:
            check_scans(data)
            header = b"".join(segments)
            return JpegHeader(header, any(mark in header for mark in _SPEAKING), coding)
    raise BadImage("it is truncated or damaged in its header, before its first pixel")


def check_scans(data: bytes | memoryview) -> None:
    """Raise BadImage for a JPEG with more than `MAX_SCANS` scans."""
    several = _several_scans(data)
    if several is not None:
        scans = bytes(data[several.first_scan :]).count(b"\xff\xda")
        if scans > MAX_SCANS:
            raise BadImage(f"it has {scans} scans, more than {MAX_SCANS}")


def jpeg_coefficient_bytes(data: bytes | memoryview) -> int:
    """Return the bytes of memory that a decoder needs for the coefficients of a JPEG.

    It needs them all at once if there are several scans; 0 for one scan, or a damaged header.
    """
    several = _several_scans(data)
    if several is None:
        return 0
    start = several.frame
    header: tuple[int, int, int] = struct.unpack(">HHB", data[start + 5 : start + 10])
    height, width, components = header
    factors = data[start + 11 : start + 10 + 3 * components : 3]
    across = 8 * max((byte >> 4 for byte in factors), default=0)
    down = 8 * max((byte & 15 for byte in factors), default=0)
    if not across or not down:
        return 0
    blocks = sum((byte >> 4) * (byte & 15) for byte in factors)
    return _BLOCK_BYTES * blocks * -(-width // across) * -(-height // down)


def jpeg_segments(data: bytes) -> list[bytes]:
    """Return the segments of a JPEG that its pixels need, each scan with its data.

    Metadata, bytes between the segments and bytes after the end are left out. A sequential scan's
    unused parameters get their only valid values.
    """
    at = 2
    sequential = True
    segments = [data[:2]]
    while match := _MARKER.search(data, at):
        marker = match[0][1]
        start = match.start()
        at = match.end()
        if marker in _BORDERS:
            segments.append(match[0])
            if marker == _BORDERS[1]:
                break
        if marker in _LONELY or marker in _BORDERS:
            continue
        at += int.from_bytes(data[at : at + 2], "big")
        segment = data[start:at]
        if marker in _FRAMES:
            sequential = marker not in _PROGRESSIVE
        elif marker == _START_OF_SCAN:
            end = _SCAN_END.search(data, at)
            content = data[at : end.start() if end else len(data)]
            at += len(content)
            segment = (segment[:-3] + b"\0\x3f\0" if sequential else segment) + content
        if marker not in _METADATA:
            segments.append(segment)
    return segments


def jpeg_has_end(data: bytes) -> bool:
    """Return whether a JPEG has the marker of its end."""
    return jpeg_segments(data)[-1] == b"\xff\xd9"


def tiff_frames(data: bytes) -> int:
    """Return the number of images in a TIFF file.

    Pillow takes seconds for 20,000 images, since it searches a list for each of them.
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
        pass  # truncated: the images found so far are readable
    return max(1, len(seen))


def png_says_more(data: bytes) -> bool:
    """Return whether a PNG file may contain EXIF or XMP data."""
    return any(mark in data for mark in (b"eXIf", b"Raw profile type ", b"XML:com.adobe.xmp"))


def check_png(data: bytes | memoryview) -> None:
    """Compare the checksums of all chunks of a PNG; decoders skip those of the pixels.

    Raises BadImage if a checksum is wrong, or the last chunk is missing.
    """
    end = b""
    for at, kind, content in png_chunks(memoryview(data)):
        end = kind
        if (kind == b"IHDR") != (at == _SIGNATURE):
            raise BadImage("it is damaged: IHDR is not its first chunk, or occurs more than once")
        checksum = data[at + 8 + len(content) : at + 12 + len(content)]
        if kind == b"IEND":
            return
        if zlib.crc32(content, zlib.crc32(kind)) != int.from_bytes(checksum, "big"):
            raise BadImage(f"it is damaged: the checksum of its {_name(kind)} chunk is wrong")
    last = f" after its {_name(end)} chunk" if end else ""
    raise BadImage(f"it is damaged: it ends{last}, without an IEND chunk")


class PlainPng(NamedTuple):
    """An ordinary PNG: one 8-bit frame, not interlaced, with all chunks intact."""

    width: int
    height: int
    channels: int
    packed: bytes

    def is_whole(self) -> bool:
        """Return whether the packed data are exactly all rows, so every decoder accepts them."""
        return self.rows() is not None

    def rows(self) -> bytes | None:
        """Return the unpacked rows, each after the byte of its filter; None unless it is whole."""
        row = 1 + self.width * self.channels
        try:
            unpacker = zlib.decompressobj()
            pixels = unpacker.decompress(self.packed, row * self.height + 1)
        except zlib.error:
            return None
        complete = unpacker.eof and not unpacker.unused_data and len(pixels) == row * self.height
        return pixels if complete and max(pixels[::row]) <= 4 else None  # known filters


def plain_png(data: bytes | memoryview) -> PlainPng | None:
    """Parse a PNG if it is ordinary; None means that only Pillow can judge it.

    It accepts less than Pillow but takes a tenth of the time, which matters for small images.
    """
    width, height = struct.unpack_from(">II", data, 16) if len(data) >= 33 else (0, 0)
    channels = _PLAIN_HEADS.get(bytes(data[24:29]), 0)
    small = len(data) <= _PLAIN_BYTES and 0 < width * height * channels <= _PLAIN_BYTES
    if not small or data[:16] != b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR":
        return None
    contents: list[memoryview] = []
    for at, kind, content in png_chunks(memoryview(data)):
        size = len(content)
        if kind == b"IEND":
            return PlainPng(width, height, channels, b"".join(contents)) if contents else None
        if kind == b"IDAT" and size:
            contents.append(content)
        elif contents or not (at == _SIGNATURE or _is_plain(kind, content)):
            break
        checksum = int.from_bytes(data[at + 8 + size : at + 12 + size], "big")
        if zlib.crc32(content, zlib.crc32(kind)) != checksum:
            break
    return None


def png_is_whole(data: bytes | memoryview) -> bool:
    """Return whether a PNG's packed data contain all rows; Pillow leaves missing rows black."""
    view = memoryview(data)
    width, height, depth, color, _, _, interlaced = struct.unpack_from(">IIBBBBB", view, 16)
    bits = depth * PNG_CHANNELS.get(color, 1)
    passes = PNG_PASSES if interlaced else ((0, 0, 1, 1),)
    missing = 0
    for left, top, step_x, step_y in passes:
        columns = -(-(width - left) // step_x)
        rows = -(-(height - top) // step_y)
        if columns > 0 and rows > 0:
            missing += rows * (1 + -(-columns * bits // 8))
    unpacker = zlib.decompressobj()
    try:
        for _, kind, content in png_chunks(view):
            packed: bytes | memoryview = content if kind == b"IDAT" else b""
            while len(packed) and missing > 0:
                missing -= len(unpacker.decompress(packed, _INFLATED))
                packed = unpacker.unconsumed_tail
        while missing > 0 and (tail := unpacker.decompress(unpacker.unconsumed_tail, _INFLATED)):
            missing -= len(tail)
    except zlib.error:  # after the last row, which Pillow ignores, or before it
        pass
    return missing <= 0


def webp_size(data: bytes | memoryview) -> tuple[int, int] | None:
    """Return the width and height of a WebP file's canvas, which libwebp allocates on opening.

    None means an invalid header.
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


def webp_is_lossless(data: bytes | memoryview) -> bool:
    """Return whether the image of a WebP file, or its first frame, is coded without loss."""
    view = memoryview(data)
    start = 12
    while start + 8 <= len(view):
        kind = bytes(view[start : start + 4])
        if kind in (b"VP8L", b"VP8 "):
            return kind == b"VP8L"
        length = int.from_bytes(view[start + 4 : start + 8], "little")
        # The chunks of a frame follow its position, size and duration; lengths are even.
        start += 8 + (_WEBP_FRAME if kind == b"ANMF" else length + length % 2)
    return False


_WEBP_FRAME = 16
"""Bytes of a frame before its chunks."""


def check_ppm(data: bytes | memoryview) -> None:
    """Check the header of a Netpbm file, in which Pillow reads comments byte by byte.

    Raises BadImage if it is damaged or too long.
    """
    if _PPM_HEADER.match(data, 0, _PPM_HEADER_BYTES) is None:
        raise BadImage(f"its header is damaged, or longer than {_PPM_HEADER_BYTES} bytes")


class _SeveralScans(NamedTuple):
    """Offsets in a JPEG whose decoder needs more than one scan."""

    frame: int
    """Offset of the marker of its frame header."""
    first_scan: int
    """Offset of the marker of its first scan."""


def _several_scans(data: bytes | memoryview) -> _SeveralScans | None:
    """Return where the scans of a JPEG start; None for one scan, or a damaged header.

    Decoders read one scan of an image that is sequential and whose first scan has all components,
    so others are ignored.
    """
    at = 2
    end = len(data) - 9
    frame = 0
    while at < end:
        if data[at] != 0xFF or not 0 < data[at + 1] < 0xFF:
            match = _MARKER.search(data, at)
            if match is None:
                return None
            at = match.start()
            continue
        marker = data[at + 1]
        if marker == _START_OF_SCAN and frame:
            several = data[frame + 1] in _PROGRESSIVE or data[at + 4] < data[frame + 9]
            return _SeveralScans(frame, at) if several else None
        if marker in _BORDERS or marker == _START_OF_SCAN:
            return None
        if marker in _FRAMES:
            frame = at
        at += 2 if marker in _LONELY else 2 + (data[at + 2] << 8 | data[at + 3])
    return None


def _coding(marker: int, bits: int) -> str:
    hierarchical = "hierarchical " if marker & 4 else ""
    arithmetic = "arithmetic " if marker & 8 else ""
    return f"{bits} bits, {hierarchical}{arithmetic}{_CODINGS[marker & 3]}"


def png_chunks(view: memoryview) -> Iterator[tuple[int, bytes, memoryview]]:
    """Yield the offset, type and content of each complete chunk of a PNG file."""
    at = _SIGNATURE
    while at + 12 <= len(view):
        size = int.from_bytes(view[at : at + 4], "big")
        kind = bytes(view[at + 4 : at + 8])
        if at + 12 + size > len(view) and kind != b"IEND":
            return
        yield at, kind, view[at + 8 : at + 8 + size]
        at += 12 + size


def _is_plain(kind: bytes, content: memoryview) -> bool:
    """Return whether a chunk before the pixels affects neither them nor the orientation."""
    if kind == b"tEXt":
        return len(content) <= _PLAIN_TEXT and not bytes(content).startswith(_TELLING_TEXTS)
    return len(content) == _PLAIN_CHUNKS.get(kind)


def _name(kind: bytes) -> str:
    """Return the type of a chunk as printable text."""
    return kind.decode("ascii", "backslashreplace") if kind.isalpha() else repr(kind)[1:]
