"""JPEGs decoded by libjpeg-turbo, which reports damage that Pillow hides.

simplejpeg offers it, and where that is missing the compiled module: no wheels of simplejpeg exist
for free-threaded Python. Without both, Pillow alone decodes.

Decoding at a few eighths of the size saves most of the inverse DCT. libjpeg rounds sides up: at
3/8, 349 pixels become 131, and the image covers 130.875 of them. To scale a reduced image exactly,
resize that fractional box.

A decoder stops at the first warning, which may be harmless and hide a worse one: `jpeg_loss`.
"""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shardkit.codecs.decode_errors import raise_interruption
from shardkit.codecs.structure import jpeg_segments
from shardkit.system import compiled

try:
    import simplejpeg
except ImportError:  # pragma: no cover - tests run this branch in another process
    simplejpeg = None

Pixels = npt.NDArray[np.uint8]

_CHANNELS = {"GRAY": 1, "RGB": 3, "CMYK": 4}
_CMYK = ("CMYK", "YCCK")

LEAST_SIDE = 8
"""Smaller images are not reduced: several scales give them one size."""

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


class JpegError(ValueError):
    """The first warning or error of libjpeg about an image, or why it does not decode the image."""


def is_available() -> bool:
    """Return whether this module can decode."""
    return simplejpeg is not None or compiled.is_available()


def read_header(data: bytes | memoryview) -> tuple[int, int, bool]:
    """Return width and height of a JPEG, and whether its colors are CMYK.

    Raises JpegError if libjpeg reports damage, or cannot decode it.
    """
    if simplejpeg is not None:
        try:
            height, width, space, _ = simplejpeg.decode_jpeg_header(data)
        except (ValueError, KeyError) as error:  # KeyError: a subsampling unknown to simplejpeg
            raise_interruption(error)
            raise JpegError(str(error)) from error
        return width, height, space in _CMYK
    header = compiled.jpeg_header(data)
    if not isinstance(header, tuple):
        raise JpegError(header or "libjpeg is missing")
    width, height, components = header
    return width, height, components == _CHANNELS["CMYK"]


def decode_jpeg(
    data: bytes | memoryview,
    colors: str = "RGB",
    *,
    at_least: tuple[int, int] = (0, 0),
    out: Pixels | None = None,
) -> Pixels:
    """Decode a JPEG to uint8 of shape (height, width, channels).

    ``colors`` is ``RGB``, ``GRAY`` or ``CMYK``. ``at_least`` is the minimum width and height, as in
    `sufficient_eighths`. ``out`` is C-contiguous and has exactly the image's shape. Raises
    JpegError if libjpeg reports damage, or cannot decode it.
    """
    if simplejpeg is None:
        return _decode_compiled(data, colors, at_least, out)
    width, height = at_least
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(
            data,
            colorspace=colors,
            fastupsample=False,  # it is off by 40 levels on average at saturated edges
            min_height=height,
            min_width=width,
            min_factor=2 if height else 1,
            buffer=out,
        )
    except (ValueError, KeyError) as error:
        raise_interruption(error)
        raise JpegError(str(error)) from error
    return pixels


def _decode_compiled(
    data: bytes | memoryview,
    colors: str,
    at_least: tuple[int, int],
    out: Pixels | None,
) -> Pixels:
    width, height, _ = read_header(data)
    eighths = 8
    if min(width, height) >= LEAST_SIDE:
        eighths = sufficient_eighths((width, height), at_least)
    shape = reduced_side(height, eighths), reduced_side(width, eighths), _CHANNELS[colors]
    if out is None:
        out = np.empty(shape, np.uint8)
    elif out.shape != shape:
        raise JpegError(f"it has the shape {shape}, not {out.shape}")
    reason = compiled.decode_jpeg(data, out, eighths)
    if reason is not None:
        raise JpegError(reason)
    return out


def sufficient_eighths(size: tuple[int, int], at_least: tuple[int, int]) -> int:
    """Return the scale, in eighths, at which to decode a JPEG: 1 to 4, or 8.

    This is simplejpeg's rule, so a region has the same pixels whether or not it is decoded alone.
    Scales from five to seven eighths save nothing. ``size`` and ``at_least`` are width and height;
    (0, 0) means all pixels.
    """
    if not any(at_least) or 2 * at_least[0] > size[0] + 1:
        return 8  # the most common case
    for eighths in range(1, 5):
        if all(
            reduced_side(side, eighths) >= least for side, least in zip(size, at_least, strict=True)
        ):
            return eighths
    return 8


def same_scale(size: tuple[int, int], at_least: tuple[int, int]) -> tuple[int, int]:
    """Return values that are equal for minimum sizes at which any decoder chooses one scale.

    They are the scale of `sufficient_eighths`, and that of Pillow's ``draft`` if it is reduced.
    """
    eighths = sufficient_eighths(size, at_least)
    if eighths == 8:
        return 8, 1
    fitting = min(side // max(1, least) for side, least in zip(size, at_least, strict=True))
    return eighths, max(scale for scale in (1, 2, 4, 8) if scale <= max(1, fitting))


def reduction(decoded: tuple[int, ...], full: tuple[int, ...]) -> float | None:
    """Return the scale at which a JPEG was decoded, or None if the shapes do not fit.

    Both are height and width.
    """
    if decoded[:2] == full[:2]:
        return 1.0
    for eighths in range(7, 0, -1):
        if decoded[:2] == tuple(reduced_side(side, eighths) for side in full[:2]):
            return eighths / 8
    return None


def reduced_side(side: int, eighths: int) -> int:
    """Return a side length in pixels after libjpeg's scaling: 3/8 of 900 is 338, not 337.5."""
    return -(-side * eighths // 8)


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
