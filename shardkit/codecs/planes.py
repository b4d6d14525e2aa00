"""Planes: what a JPEG decoder has before it upsamples chroma and converts to RGB.

The record is a Y4M file of one frame, full range. It is finished to RGB exactly as libjpeg does,
for the region that is needed. This module is the reference for that, in NumPy; the compiled module
gives the same pixels. The line of the frame has a checksum for each band of rows, so that a reader
can check a part of a record.
"""

from __future__ import annotations

import base64
import re
import zlib
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.codecs.geometry import Region
from shardkit.codecs.image import Coding
from shardkit.codecs.structure import jpeg_coefficient_bytes
from shardkit.errors import BadImage, UsageError, setting
from shardkit.system import compiled

Plane = npt.NDArray[np.uint8]
"""uint8 of shape (height, width)."""

BANDS = 12
"""Bands of rows in each record: as many checksums as fit into the line of a frame. ffmpeg reads 80
bytes of it, and mjpegtools 32 of each parameter."""

_HEADER = "YUV4MPEG2 W{} H{} F1:1 Ip A1:1 C{} XCOLORRANGE=FULL\nFRAME{}\n"
_PARAMETER = 16
"""Characters of each parameter of the frame: base64 of three checksums."""
_PATTERN = re.compile(
    _HEADER.format(
        r"([1-9][0-9]{0,8})",
        r"([1-9][0-9]{0,8})",
        r"(420jpeg|422|444|mono)",
        rf"((?: X[A-Za-z0-9+/]{{{_PARAMETER}}}){{4}})",
    ).encode()
)
_HEADER_BYTES = 160
"""No header is longer."""

_NAMES = {400: "mono", 420: "420jpeg", 422: "422", 444: "444"}
"""Y4M's name of each chroma sampling."""
_HALVES = {"420jpeg": (True, True), "422": (True, False), "444": (False, False)}
"""Whether chroma has half the width and half the height, rounded up."""

_MOST_COEFFICIENTS = 256 << 20
"""Maximum memory for the coefficients of a JPEG of several scans, in bytes; those of 45 million
pixels of 4:4:4. Larger ones keep their bytes."""

_NARROW = 2
"""Up to this width, libjpeg repeats samples of chroma instead of interpolating them."""


class _Layout(NamedTuple):
    """The header of a record."""

    width: int
    height: int
    chroma: str
    """Name of the sampling."""
    start: int
    """Bytes of the header."""
    checksums: list[int]
    """Checksum of each band."""

    @property
    def sides(self) -> list[tuple[int, int]]:
        """Height and width of each plane."""
        luma = self.height, self.width
        if self.chroma not in _HALVES:
            return [luma]
        half_width, half_height = _HALVES[self.chroma]
        chroma = (self.height + half_height) >> half_height, (self.width + half_width) >> half_width
        return [luma, chroma, chroma]


def sniff_planes(data: bytes) -> bool:
    """Return whether the bytes of a stored image are planes."""
    return data.startswith(_HEADER[:10].encode())


def stated_size(record: bytes | memoryview) -> tuple[int, int]:
    """Return width and height of a record.

    Raises BadImage if its header is not one of these records, or its length differs from it.
    """
    layout = _layout(record)
    return layout.width, layout.height


def decode(
    record: bytes | memoryview,
    region: Region | None = None,
    out: npt.NDArray[np.uint8] | None = None,
) -> npt.NDArray[np.uint8]:
    """Return a region of a record as RGB, equal to libjpeg's decode of the JPEG in every byte.

    The region is inside the image. The result is uint8 of shape (height, width, 3), exactly that of
    ``out``. Raises BadImage if the record is damaged.
    """
    layout = _layout(record)
    if region is None:
        region = Region(0, 0, layout.width, layout.height)
    if out is None:
        out = np.empty((region.height, region.width, 3), np.uint8)
    if not compiled.finish_planes(record, (layout.width, layout.height), region, out):
        out[:] = _finish(record, layout, region)
    return out


def require_jpeg_planes() -> None:
    """Refuse to store planes without the compiled module, which alone reads those of a JPEG."""
    if not compiled.is_available():
        raise UsageError(
            f"{setting('encode', 'planes')} requires the compiled module, which is missing",
            remedy="`shardkit --version` shows why",
        )


def from_jpeg(data: bytes) -> bytes | None:
    """Return the record with exactly the planes of a JPEG's decoder.

    None if libjpeg warns of the JPEG, it has no such planes (it is not 8-bit gray or YCbCr with the
    sampling 4:2:0, 4:2:2 or 4:4:4), or its scans need too much memory. Raises UsageError as
    `require_jpeg_planes`.
    """
    require_jpeg_planes()
    if jpeg_coefficient_bytes(data) > _MOST_COEFFICIENTS:
        return None
    planes = compiled.jpeg_planes(data)
    if planes is None:
        return None
    width, height, sampling, content = planes
    return _record(width, height, _NAMES[sampling], content)


def from_rgb(pixels: npt.NDArray[np.uint8], chroma: str) -> bytes:
    """Return RGB of shape (height, width, 3) as a record, subsampled with libjpeg's arithmetic.

    Gray pixels have no chroma; others have ``420`` or ``444``.
    """
    height, width, _ = pixels.shape
    red, green, blue = np.moveaxis(pixels.astype(np.int32), 2, 0)
    planes = [(19595 * red + 38470 * green + 7471 * blue + 32768) >> 16]
    name = "mono"
    if (red != green).any() or (green != blue).any():
        name = _NAMES[int(chroma)]
        middle = (128 << 16) + 32767
        planes += [
            (-11059 * red - 21709 * green + 32768 * blue + middle) >> 16,
            (32768 * red - 27439 * green - 5329 * blue + middle) >> 16,
        ]
    if name == "420jpeg":
        planes[1:] = map(_halved, planes[1:])
    content = b"".join([plane.astype(np.uint8).tobytes() for plane in planes])
    return _record(width, height, name, content)


def require_bands(record: bytes | memoryview) -> None:
    """Compare the checksum of each band with its rows; BadImage if one differs."""
    layout = _layout(record)
    for band, checksum in enumerate(_checksums(memoryview(record)[layout.start :], layout)):
        if checksum != layout.checksums[band]:
            raise BadImage(f"the checksum of its band {band + 1} of {BANDS} does not match")


def _record(width: int, height: int, chroma: str, content: bytes) -> bytes:
    """Return the record of planes."""
    checksums = _checksums(content, _Layout(width, height, chroma, 0, []))
    text = base64.b64encode(np.array(checksums, "<u4").tobytes()).decode()
    parameters = [text[start : start + _PARAMETER] for start in range(0, len(text), _PARAMETER)]
    header = _HEADER.format(width, height, chroma, "".join(f" X{item}" for item in parameters))
    return header.encode() + content


def _checksums(content: bytes | memoryview, layout: _Layout) -> list[int]:
    """Return the checksum of each band: what its bytes contribute to the CRC-32 of the planes.

    CRC-32 is linear: that of bytes is the XOR of that of as many zeros and of the contribution of
    each range of bytes, which is independent of all others.
    """
    content = memoryview(content)
    checksums = [0] * BANDS
    start = 0
    for height, width in layout.sides:
        rows = _band_rows(layout.height) // (1 + (height < layout.height))
        for band in range(BANDS):
            end = start + width * max(0, min(rows, height - band * rows))
            checksums[band] ^= _contribution(content[start:end], len(content) - end)
            start = end
    return checksums


def _band_rows(height: int) -> int:
    """Return the rows of luma in a band of an image: an even number."""
    return 2 * -(-height // (2 * BANDS))


def _contribution(data: memoryview, following: int) -> int:
    """Return what a range contributes to the CRC-32 of bytes that go on for ``following`` more."""
    value = compiled.crc32_contribution(data, following)
    if value is None:
        value = _product(zlib.crc32(data, _ONES) ^ _ONES, _power(following))
    return value


_ONES = 0xFFFFFFFF
_POLYNOMIAL = 0xEDB88320
"""The polynomial of CRC-32. Here and in the functions below, the highest bit is that of x^0."""


def _product(first: int, second: int) -> int:
    """Return the product of two polynomials modulo that of CRC-32."""
    product = 0
    for bit in range(31, -1, -1):
        product ^= second * (first >> bit & 1)
        second = second >> 1 ^ _POLYNOMIAL * (second & 1)
    return product


@lru_cache(1 << 10)
def _power(count: int) -> int:
    """Return x^(8 count): multiplication by it appends so many bytes of zeros."""
    power = 1 << 31
    square = 1 << 23
    while count:
        if count & 1:
            power = _product(power, square)
        square = _product(square, square)
        count = count >> 1
    return power


def _layout(record: bytes | memoryview) -> _Layout:
    match = _PATTERN.match(bytes(record[:_HEADER_BYTES]))
    if match is None:
        raise BadImage("it does not have the Y4M header that shardkit writes")
    text = match[4].replace(b" X", b"")
    checksums = np.frombuffer(base64.b64decode(text), "<u4").tolist()
    layout = _Layout(int(match[1]), int(match[2]), match[3].decode(), match.end(), checksums)
    size = layout.start + sum(height * width for height, width in layout.sides)
    if len(record) != size:
        raise BadImage(
            f"it has {len(record):,} bytes; its header declares {layout.width} x {layout.height} "
            f"pixels of {layout.chroma}, which take {size:,}"
        )
    return layout


def _planes(record: bytes | memoryview, layout: _Layout) -> list[Plane]:
    planes = []
    start = layout.start
    for height, width in layout.sides:
        plane = np.frombuffer(record, np.uint8, height * width, start)
        planes.append(plane.reshape(height, width))
        start += height * width
    return planes


def _finish(record: bytes | memoryview, layout: _Layout, region: Region) -> npt.NDArray[np.int32]:
    """Return RGB of shape (height, width, 3)."""
    rows = np.arange(region.top, region.top + region.height)
    columns = np.arange(region.left, region.left + region.width)
    luma, *chroma = _planes(record, layout)
    y = luma[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].astype(np.int32)
    if not chroma:
        return np.repeat(y[:, :, None], 3, 2)
    halves = _HALVES[layout.chroma]
    blue, red = (_upsampled(plane, rows, columns, halves) - 128 for plane in chroma)
    color = (
        y + ((91881 * red + 32768) >> 16),
        y + ((-22554 * blue - 46802 * red + 32768) >> 16),
        y + ((116130 * blue + 32768) >> 16),
    )
    return np.stack(color, 2).clip(0, 255)


def _upsampled(
    plane: Plane,
    rows: npt.NDArray[np.int64],
    columns: npt.NDArray[np.int64],
    halves: tuple[bool, bool],
) -> npt.NDArray[np.int32]:
    """Return chroma at some rows and columns of the image: libjpeg's triangle filter.

    Each value is three parts of its nearest sample and one part of the next nearest, in both
    directions. Where the sum is exactly between two values, it is rounded up and down by turns.
    """
    half_width, half_height = halves
    if half_width and plane.shape[1] <= _NARROW:
        return plane[rows // (1 + half_height)][:, columns // 2].astype(np.int32)
    if half_height:
        near, far = _neighbors(rows, plane.shape[0])
        sums = 3 * plane[near].astype(np.int32) + plane[far]
    else:
        sums = plane[rows].astype(np.int32)
    if not half_width:
        return sums[:, columns]
    near, far = _neighbors(columns, plane.shape[1])
    sums = 3 * sums[:, near] + sums[:, far]
    if half_height:
        return (sums + np.where(columns % 2, 7, 8)) >> 4
    return (sums + np.where(columns % 2, 2, 1)) >> 2


def _neighbors(
    positions: npt.NDArray[np.int64], count: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the nearest and the next nearest of ``count`` samples, at half the positions."""
    near = positions // 2
    return near, np.clip(near + np.where(positions % 2, 1, -1), 0, count - 1)


def _halved(plane: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return the means of 2 x 2 samples; sums between two values are rounded up and down by turns.

    The last row and column of odd sides are repeated.
    """
    height, width = plane.shape
    plane = np.pad(plane, ((0, height % 2), (0, width % 2)), "edge")
    sums = plane[::2, ::2] + plane[::2, 1::2] + plane[1::2, ::2] + plane[1::2, 1::2]
    return (sums + 1 + np.arange(sums.shape[1]) % 2) >> 2


CODING = Coding(
    stated_size=stated_size,
    decode=decode,
    check=require_bands,
    encode=lambda pixels: from_rgb(pixels, "420"),
    from_jpeg=from_jpeg,
    require=require_jpeg_planes,
)
