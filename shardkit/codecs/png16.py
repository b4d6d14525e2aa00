"""Decode PNGs of 16 bits per sample; Pillow reduces those with several channels to 8 bits.

A PNG's filters treat each byte of a pixel by itself. So a pixel of 2 to 8 bytes is divided into
groups of 2 to 4 bytes, and Pillow decodes each group as an image of 8 bits.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL.PngImagePlugin import PngImageFile

from shardkit.codecs.decode_errors import as_bad_image
from shardkit.codecs.structure import PNG_CHANNELS, PNG_PASSES, check_png, png_chunks
from shardkit.errors import BadImage
from shardkit.system import compiled

_GROUPS = {1: (2,), 2: (4,), 3: (3, 3), 4: (4, 4)}
"""Bytes of a pixel by number of channels, in groups that an 8-bit PNG has as channels."""
_COLOR_TYPES = {2: 4, 3: 2, 4: 6}
"""Color type of a PNG by number of channels."""
_HEAD = struct.Struct(">II5B")
_BAND = 1 << 22
"""Bytes of rows to decode at a time: each takes about six bytes of memory."""


class PngHeader(NamedTuple):
    """The header of a PNG, from its first chunks."""

    width: int
    height: int
    depth: int
    """Bits per sample."""
    color: int
    """Color type: see `PNG_CHANNELS`."""
    interlaced: bool
    key: bytes
    """The content of the chunk tRNS, which makes a color transparent; empty without."""

    @property
    def channels(self) -> int:
        """Channels of the decoded image; a transparent color adds one."""
        return PNG_CHANNELS[self.color] + bool(self.key)


def png_header(data: bytes | memoryview) -> PngHeader:
    """Return what the first chunks of a PNG state; BadImage if they are damaged."""
    if len(data) < 33 or bytes(data[12:16]) != b"IHDR":
        raise BadImage("it is damaged: its header is incomplete")
    width, height, depth, color, _, _, interlace = _HEAD.unpack_from(data, 16)
    if color not in PNG_CHANNELS:
        raise BadImage(f"it is damaged: its header declares the color type {color}")
    if not width * height:
        raise BadImage(f"it is damaged: its header declares {width} x {height} pixels")
    key = b""
    for _, kind, content in png_chunks(memoryview(data)):
        if kind == b"IDAT":
            break
        if kind == b"tRNS":
            key = bytes(content)
    return PngHeader(width, height, depth, color, bool(interlace), key)


def decode_png16(data: bytes | memoryview, header: PngHeader) -> npt.NDArray[np.uint16]:
    """Return the pixels of a PNG of 16 bits per sample, unchanged.

    ``header`` is of a size that may be allocated. The result is uint16 of shape
    (height, width, channels): 1 for gray, 3 for RGB, and one for alpha, which is 0 where the color
    is the transparent one and else 65535. Raises BadImage if it is damaged.
    """
    if not header.key and (pixels := compiled.decode_png16(data)) is not None:
        return pixels
    check_png(data)
    channels = PNG_CHANNELS[header.color]
    shape = header.height, header.width, channels
    pixels = np.empty(shape, np.uint16)
    unpacked = _Unpacked(data)
    for left, top, across, down in PNG_PASSES if header.interlaced else ((0, 0, 1, 1),):
        pass_pixels = pixels[top::down, left::across]
        if pass_pixels.size:
            _decode_pass(unpacked, pass_pixels)
    if not header.key:
        return pixels
    if len(header.key) != 2 * channels or channels not in (1, 3):
        raise BadImage("it is damaged: its tRNS chunk does not fit its color type")
    opaque = (pixels != np.frombuffer(header.key, ">u2")).any(axis=2, keepdims=True)
    return np.concatenate([pixels, np.where(opaque, np.uint16(65535), np.uint16(0))], axis=2)


class _Unpacked:
    """The unpacked content of the chunks IDAT, read in order."""

    def __init__(self, data: bytes | memoryview) -> None:
        chunks = png_chunks(memoryview(data))
        self._packed: Iterator[memoryview] = (body for _, kind, body in chunks if kind == b"IDAT")
        self._unpacker = zlib.decompressobj()
        self._packed_rest: bytes | memoryview = b""

    def read(self, size: int) -> bytearray:
        """Return ``size`` bytes."""
        content = bytearray()
        try:
            while len(content) < size:
                if not self._packed_rest:
                    self._packed_rest = next(self._packed, b"")
                    if not self._packed_rest:
                        raise BadImage("it is damaged: its data ends before its last row")
                content += self._unpacker.decompress(self._packed_rest, size - len(content))
                self._packed_rest = self._unpacker.unconsumed_tail
                if self._unpacker.eof and len(content) < size:
                    raise BadImage("it is damaged: its data ends before its last row")
        except zlib.error as error:
            raise BadImage(f"it is damaged: {error}") from error
        return content


def _decode_pass(unpacked: _Unpacked, out: npt.NDArray[np.uint16]) -> None:
    """Decode one pass, which is all pixels unless the PNG is interlaced, some rows at a time."""
    height, width, channels = out.shape
    row = 1 + 2 * channels * width
    above = np.zeros((1, row), np.uint8)  # with the filter None, as if it were the first
    step = max(1, _BAND // row)
    for top in range(0, height, step):
        count = min(step, height - top)
        content = np.frombuffer(unpacked.read(count * row), np.uint8).reshape(count, row)
        if content[:, 0].max() > 4:
            raise BadImage(f"it is damaged: a row has the filter {content[:, 0].max()}")
        rows = np.vstack([above, content])
        filters = rows[:, :1]
        values = rows[:, 1:].reshape(count + 1, width, 2 * channels)
        groups = []
        start = 0
        for group in _GROUPS[channels]:
            lanes = values[:, :, start : start + group].reshape(count + 1, -1)
            groups.append(_unfiltered(np.hstack([filters, lanes]), (count + 1, width, group)))
            start += group
        samples = np.concatenate(groups, axis=2)[1:]
        out[top : top + count] = np.ascontiguousarray(samples).view(">u2")
        above[0, 1:] = samples[-1].reshape(-1)


def _unfiltered(rows: npt.NDArray[np.uint8], shape: tuple[int, int, int]) -> npt.NDArray[np.uint8]:
    """Return the pixels of filtered rows with 8 bits per sample, decoded as a PNG by Pillow."""
    height, width, channels = shape
    chunks = (
        (b"IHDR", _HEAD.pack(width, height, 8, _COLOR_TYPES[channels], 0, 0, 0)),
        (b"IDAT", zlib.compress(rows.tobytes(), 0)),
        (b"IEND", b""),
    )
    file = io.BytesIO(b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks))
    with as_bad_image("it cannot be decoded", width * height), PngImageFile(file) as image:
        return np.asarray(image)


def encode_png16(pixels: npt.NDArray[np.uint16]) -> bytes:
    """Return uint16 pixels of shape (height, width, channels) as a PNG file, with 1 to 4 channels.

    Each row has the filter Sub, which suits photographs, and costs no search.
    """
    height, width, channels = pixels.shape
    values = pixels.astype(">u2").view(np.uint8).reshape(height, width, 2 * channels)
    rows = np.empty((height, 1 + width * 2 * channels), np.uint8)
    rows[:, 0] = 1
    filtered = rows[:, 1:].reshape(height, width, 2 * channels)
    filtered[:, :1] = values[:, :1]
    np.subtract(values[:, 1:], values[:, :-1], out=filtered[:, 1:])
    color = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    chunks = (
        (b"IHDR", _HEAD.pack(width, height, 16, color, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows.tobytes(), 6)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return b"%b%b%b%b" % (
        len(content).to_bytes(4, "big"),
        kind,
        content,
        zlib.crc32(content, zlib.crc32(kind)).to_bytes(4, "big"),
    )
