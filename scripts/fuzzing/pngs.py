"""Compare PNGs of all kinds, whole and mutated, decoded by the compiled module and by Python.

Pixels that differ, or an image that only the module accepts, are a failure.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections import Counter
from collections.abc import Iterable
from itertools import starmap
from unittest import mock

import numpy as np
from helpers import png_chunk

from shardkit.codecs.image import Decoding, Pixels, decode, decode_mask
from shardkit.codecs.structure import PNG_CHANNELS, PNG_PASSES
from shardkit.errors import BadImage
from shardkit.system import compiled, native

_KINDS = tuple(
    (color, depth)
    for color, depths in {
        0: (1, 2, 4, 8, 16),
        2: (8, 16),
        3: (1, 2, 4, 8),
        4: (8, 16),
        6: (8, 16),
    }.items()
    for depth in depths
)
"""Color types and bits of each sample."""
_MOST = 1 << 18
"""Pixels of the largest image that is compared; mutations may state larger ones."""

Chunks = list[tuple[bytes, bytes]]
"""Type and content of each chunk."""


def compare(numbers: Iterable[int], mutate: bool = True) -> Counter[str]:
    """Decode one PNG for each number in both ways, and count the outcomes."""
    return Counter(outcome for number in numbers for outcome in _outcomes(number, mutate))


def random_png(source: random.Random) -> bytes:
    """Return a PNG of any kind, valid unless a chunk that no pixel depends on is wrong."""
    return _joined(_chunks(source))


def mutated_png(source: random.Random) -> bytes:
    """Return a PNG with some bytes or chunks changed, most checksums still right."""
    chunks = _chunks(source)
    for _ in range(source.choice((0, 1, 1, 2, 3))):
        number = source.randrange(len(chunks))
        kind, content = chunks[number]
        choice = source.randrange(6)
        if choice == 0:
            chunks.insert(number, source.choice(chunks))
        elif choice == 1 and number:
            del chunks[number]
            if not chunks:
                return b""
        elif kind == b"IDAT" and choice == 2:
            chunks[number] = kind, content + source.choice((b"\0", b"more", zlib.compress(b"?")))
        elif content:
            changed = bytearray(content)
            for _ in range(source.randint(1, 3)):
                changed[source.randrange(len(changed))] = source.choice(
                    (0, 1, 3, 16, 255, source.randrange(256))
                )
            chunks[number] = kind, bytes(changed)
    data = bytearray(_joined(chunks))
    if source.random() < 0.2:
        data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    return bytes(data[: source.randrange(len(data))] if source.random() < 0.05 else data)


def outcome(data: bytes, background: tuple[int, int, int] | None = None) -> str:
    """Return what becomes of a PNG over a background, or of its values."""
    width, height = struct.unpack(">II", data[16:24].ljust(8, b"\0"))
    if width * height > _MOST:
        return "too large"
    pixels = compiled.decode_png(data, background)
    try:
        with mock.patch.object(native, "module", return_value=None):
            expected: Pixels = (
                decode_mask(data, "png")
                if background is None
                else decode(data, "png", Decoding(background))
            )
    except BadImage:
        return "refused" if pixels is None else "different"
    if pixels is None:
        return "left to Python"
    same = pixels.dtype == expected.dtype and np.array_equal(pixels, expected)
    return "equal" if same else "different"


def _outcomes(number: int, mutate: bool) -> list[str]:
    source = random.Random(number)
    data = mutated_png(source) if mutate else random_png(source)
    background = source.choice(((255, 255, 255), (0, 0, 0), (3, 200, 90)))
    return [outcome(data, None), outcome(data, background)]


def _chunks(source: random.Random) -> Chunks:
    color, depth = source.choice(_KINDS)
    width, height = source.randint(1, 20), source.randint(1, 20)
    interlaced = source.random() < 0.3
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlaced)
    chunks = [(b"IHDR", header)]
    chunks += [_ancillary(source) for _ in range(source.choice((0, 0, 1, 3)))]
    colors = 0
    if color == 3 or source.random() < 0.05:
        colors = source.choice((1 << depth, source.randint(1, 256)))
        chunks.append((b"PLTE", source.randbytes(3 * min(colors, 256))))
    if source.random() < 0.3:
        size = {0: 2, 2: 6, 3: source.randint(1, max(1, colors))}.get(color, 2)
        plain = source.choice((b"\0\1", b"\0\x80", b"\xff\0", source.randbytes(2)))
        ramp = source.choice((source.randbytes(size), b"\xff" * (size - 1) + b"\0"))
        chunks.append((b"tRNS", ramp if color == 3 else plain * (size // 2)))
    packed = zlib.compress(
        _rows(source, (width, height), color, depth, interlaced), source.randint(0, 9)
    )
    count = source.choice((1, 1, 2, 5))
    step = -(-len(packed) // count)
    chunks += [(b"IDAT", packed[at : at + step]) for at in range(0, len(packed), step)]
    chunks += [_ancillary(source) for _ in range(source.choice((0, 0, 0, 1)))]
    return [*chunks, (b"IEND", b"")]


def _rows(
    source: random.Random, size: tuple[int, int], color: int, depth: int, interlaced: bool
) -> bytes:
    bits, rows = depth * PNG_CHANNELS[color], []
    few = source.choice((b"\0\1", b"\0\xff", bytes(range(16)), bytes(range(256))))
    for left, top, across, down in PNG_PASSES if interlaced else ((0, 0, 1, 1),):
        columns, lines = -(-(size[0] - left) // across), -(-(size[1] - top) // down)
        for _ in range(lines if columns > 0 else 0):
            content = bytes(source.choices(few, k=-(-columns * bits // 8)))
            rows.append(bytes((source.randrange(5),)) + content)
    return b"".join(rows)


def _ancillary(source: random.Random) -> tuple[bytes, bytes]:
    """Return a chunk that no pixel depends on, or should."""
    profile = zlib.compress(bytes(source.choice((10, 4000, 4000, 2_000_000))))
    return source.choice(
        (
            (b"gAMA", struct.pack(">I", 45_455)),
            (b"sRGB", b"\0"),
            (b"pHYs", bytes(8) + b"\1"),
            (b"cHRM", bytes(32)),
            (b"tIME", bytes(7)),
            (b"bKGD", bytes(6)),
            (b"sBIT", b"\5\5\5"),
            (b"eXIf", b"MM\0*\0\0\0\x08" + source.randbytes(20)),
            (b"iCCP", b"name\0\0" + profile),
            (b"iCCP", source.choice((b"name", b"name\0", b"name\0\1" + profile, b"name\0\0more"))),
            (b"tEXt", b"Comment\0" + source.randbytes(9)),
            (b"tEXt", source.choice((b"transparency", b"interlace", b"bbox", b"exif")) + b"\0x"),
            (b"iTXt", source.choice((b"a\0\1\0\0\0", b"bbox\0\0\0\0\0", b"a")) + b"text"),
            (b"zTXt", b"a\0\0" + zlib.compress(b"text")),
            (b"iTXt", b"a\0\0\0\0\0text"),
            (b"acTL", struct.pack(">II", source.randint(0, 2), 0)),
            (b"prVt", source.randbytes(5)),
        )
    )


def _joined(chunks: Chunks) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + b"".join(starmap(png_chunk, chunks))
