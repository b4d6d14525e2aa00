"""Classify JPEG warnings as harmless or data loss.

libjpeg and Pillow decode both kinds without an error. `shardkit.codecs.libjpeg` stops at the first
warning, which may be harmless and hide a worse one.
"""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shardkit.codecs.libjpeg import JpegError, decode_jpeg, read_header
from shardkit.codecs.structure import jpeg_segments

Pixels = npt.NDArray[np.uint8]

_EXTRA = re.compile(r"Corrupt JPEG data: (\d+) extraneous bytes before marker 0x([0-9a-f]{2})")
_HARMLESS = re.compile(
    # Bytes before a restart marker are different: a part of the scan ended early.
    r"Corrupt JPEG data: \d+ extraneous bytes before marker 0x(?!d[0-7])"
    r"|Corrupt JPEG data: bad ICC marker"
    r"|Unknown Adobe color transform code"
    r"|Warning: unknown JFIF revision"
    r"|Invalid SOS parameters for sequential JPEG"
)
"""Warnings about metadata or unused bytes: libjpeg still has data for each pixel."""
_LOSS = re.compile(r"Corrupt|Premature|Inconsistent progression")

_ARITHMETIC = (0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF)
"""Markers of frames that use arithmetic coding."""
_READ_AHEAD = 9
"""Maximum bytes that a Huffman decoder reads ahead."""
_MOST_TRIES = 64
"""Maximum decodes to locate extra bytes between scans. Files from cameras need none."""


def is_warning(reason: str) -> bool:
    """Return whether ``reason`` is a warning of libjpeg rather than an error."""
    return _HARMLESS.match(reason) is not None or _LOSS.match(reason) is not None


def jpeg_loss(data: bytes, warning: str) -> str:
    """Return the first warning of a JPEG that means lost data, or "" if all are harmless.

    A harmless warning hides later ones. So this removes its cause, which keeps all pixel data, and
    decodes again. Extra bytes after a scan are harmless only if the scan is complete: a Huffman
    decoder that meets damaged data often ends early, which also leaves bytes. ``warning`` is
    libjpeg's first one about the image.
    """
    if not _HARMLESS.match(warning):
        return warning
    segments = jpeg_segments(data)
    warning = _first_warning(segments)
    tries = 0
    while (extra := _EXTRA.match(warning)) and _HARMLESS.match(warning):
        size = int(extra[1])
        marker = int(extra[2], 16)
        for at in _scans_before(segments, marker, size):
            tries += 1
            shorter = _replaced(segments, at, segments[at][:-size])
            next_warning = _first_warning(shorter)
            if next_warning != warning:
                break
            if tries >= _MOST_TRIES:
                return warning
        else:
            return warning
        if not _is_whole(segments, at, size):
            return warning
        segments = shorter
        warning = next_warning
    return "" if _HARMLESS.match(warning) else warning


def _scans_before(segments: list[bytes], marker: int, size: int) -> list[int]:
    """Return the positions of scans of more than ``size`` bytes that precede a ``marker``."""
    return [
        at
        for at, (scan, after) in enumerate(pairwise(segments))
        if scan[1] == 0xDA and after[1] == marker and len(scan) > size
    ]


def _replaced(segments: list[bytes], at: int, segment: bytes) -> list[bytes]:
    return [*segments[:at], segment, *segments[at + 1 :]]


def _is_whole(segments: list[bytes], at: int, size: int) -> bool:
    """Return whether a scan is complete without its last ``size`` bytes.

    A Huffman encoder pads the last byte with ones, while a decoder misled by damage stops anywhere.
    """
    scan = segments[at]
    if len(set(scan[-size:])) == 1:
        return True  # plain padding
    if any(segment[1] in _ARITHMETIC for segment in segments):
        return False  # its last byte proves nothing
    end = len(scan) - size
    for _ in range(_READ_AHEAD):
        if isinstance(_decoded(_replaced(segments, at, scan[: end - 1])), str):
            break
        end -= 1
    if scan[end - 2 : end] == b"\xff\0":
        return True  # a byte of ones, stuffed
    trimmed = _decoded(_replaced(segments, at, scan[:end]))
    for bit in range(8):
        last = scan[end - 1] ^ 1 << bit
        stuffed = scan[: end - 1] + bytes((last, 0) if last == 0xFF else (last,))
        other = _decoded(_replaced(segments, at, stuffed))
        if isinstance(trimmed, str) or isinstance(other, str) or not np.array_equal(trimmed, other):
            return True  # the bit is data, and all below are ones
        if not scan[end - 1] >> bit & 1:
            return False
    return True


def _first_warning(segments: list[bytes]) -> str:
    """Return libjpeg's first warning or error about an image, or ""."""
    decoded = _decoded(segments, at_least=(1, 1))
    return decoded if isinstance(decoded, str) else ""


def _decoded(segments: list[bytes], at_least: tuple[int, int] = (0, 0)) -> Pixels | str:
    """Return the pixels of an image, or libjpeg's first warning."""
    data = b"".join(segments)
    try:
        colors = "CMYK" if read_header(data)[2] else "RGB"
        return decode_jpeg(data, colors, at_least=at_least)
    except JpegError as error:
        return str(error)
