"""PNG files: of every depth, truncated, damaged, and with chunks that are bombs."""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Callable, Iterator

import numpy as np
from helpers import Pixels, encoded, exif, picture, pixels, png_chunk, png_file

from hostile.cases import Case, Rejected, Stored, gray, over_white, simple
from shardkit.codecs.structure import PNG_PASSES

_simple = functools.partial(simple, "PNG", file="odd.png")

WIDTH, HEIGHT = 20, 18
VALUES = pixels(WIDTH, HEIGHT, 40)
PLANE: Pixels = np.ascontiguousarray(VALUES[:, :, 0])


def header(color: int = 2, depth: int = 8, width: int = WIDTH, height: int = HEIGHT) -> bytes:
    return struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)


def rows(values: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    """Return rows of bytes, each with filter 0."""
    flat = values.reshape(values.shape[0], -1)
    return np.concatenate([np.zeros((len(flat), 1), np.uint8), flat], axis=1).tobytes()


ROWS = rows(VALUES)
BASE = png_file(header(), ROWS)
DAMAGED = Rejected(words="it is damaged: ", kind="png", header_passes=True)
UNREADABLE = Rejected(words="it cannot be identified: ", kind="png")
GOOD = Stored(kind="png", pixels=lambda: VALUES)


def with_chunk(kind: bytes, content: bytes) -> bytes:
    return png_file(header(), ROWS, png_chunk(kind, content))


def made(name: str, content: Callable[[], bytes], shown: Callable[[], Pixels]) -> Case:
    return _simple(name, content, Stored(kind="png", pixels=shown))


def depth_cases() -> Iterator[Case]:
    wide = PLANE.astype(np.uint16) * 257 - 100
    yield made(
        "of 16 bits, gray",
        lambda: png_file(header(0, 16), rows(wide.astype(">u2").view(np.uint8))),
        lambda: gray((wide >> 8).astype(np.uint8)),
    )
    colors = VALUES.astype(np.uint16) * 257 - 100
    yield made(
        "of 16 bits, RGB",
        lambda: png_file(header(2, 16), rows(colors.astype(">u2").view(np.uint8))),
        lambda: (colors >> 8).astype(np.uint8),
    )
    for depth in (1, 2, 4):
        small = (PLANE >> (8 - depth)).astype(np.uint8)
        yield made(
            f"of {depth} bit{'s' * (depth > 1)}, gray",
            lambda d=depth, s=small: png_file(header(0, d), rows(_packed(s, d))),  # type: ignore[misc]
            lambda d=depth, s=small: gray((s * (255 // (2**d - 1))).astype(np.uint8)),  # type: ignore[misc]
        )
    palette = pixels(16, 1, 41)[0]
    index = (PLANE >> 4).astype(np.uint8)
    yield made(
        "with a palette of 16 colors",
        lambda: png_file(header(3, 4), rows(_packed(index, 4)), _palette(palette)),
        lambda: palette[index],
    )
    opacity = (np.arange(16) * 17).astype(np.uint8)
    yield _simple(
        "with a palette and transparency",
        lambda: png_file(
            header(3), rows(index), _palette(palette), png_chunk(b"tRNS", opacity.tobytes())
        ),
        Stored(
            kind="png",
            pixels=lambda: over_white(np.concatenate([palette, opacity[:, None]], 1)[index]),
            near=1,
        ),
    )
    for color, channels, name in ((4, 2, "gray with opacity"), (6, 4, "RGB with opacity")):
        values = pixels(WIDTH, HEIGHT, 42, channels)
        shown = values if channels == 4 else values[:, :, (0, 0, 0, 1)]
        yield _simple(
            name,
            lambda c=color, v=values: png_file(header(c), rows(v)),  # type: ignore[misc]
            Stored(kind="png", pixels=lambda s=shown: over_white(s), near=1),  # type: ignore[misc]
        )
    yield made("interlaced", lambda: _interlaced(VALUES), lambda: VALUES)
    yield made(
        "with gamma", lambda: with_chunk(b"gAMA", struct.pack(">I", 100_000)), GOOD.pixels or _never
    )


def _never() -> Pixels:
    raise AssertionError


def _packed(values: Pixels, depth: int) -> Pixels:
    """Return values of a few bits, several to a byte."""
    bits = np.unpackbits(values[:, :, None].astype(np.uint8), axis=2)[:, :, 8 - depth :]
    return np.packbits(bits.reshape(len(values), -1), axis=1)


def _palette(colors: Pixels) -> bytes:
    return png_chunk(b"PLTE", colors.tobytes())


def _interlaced(values: Pixels, keep: int = 7) -> bytes:
    """Return an interlaced PNG; ``keep`` is how many of its seven passes are there."""
    passes = PNG_PASSES[:keep]
    parts = [rows(values[top::down, left::right]) for left, top, right, down in passes]
    return png_file(header()[:-1] + b"\1", b"".join(parts))


def damage_cases() -> Iterator[Case]:
    text = with_chunk(b"tEXt", b"Comment\0hello")
    yield _simple(
        "with a wrong checksum in its header", lambda: _flipped(BASE, b"IHDR"), UNREADABLE
    )
    yield _simple("with a wrong checksum of its pixels", lambda: _flipped(BASE, b"IDAT"), DAMAGED)
    yield _simple("with a wrong checksum of a comment", lambda: _flipped(text, b"tEXt"), UNREADABLE)
    yield _simple(
        "without pixels",
        lambda: BASE[:33] + png_chunk(b"IEND", b""),
        Rejected(words="it cannot be ", kind="png", header_passes=True),
    )
    yield _simple("truncated in its pixels", lambda: BASE[: len(BASE) // 2], DAMAGED)
    yield _simple("truncated in its header", lambda: BASE[:20], UNREADABLE)
    yield _simple("without its last chunk", lambda: BASE[:-12], DAMAGED)
    yield _simple("without its last byte", lambda: BASE[:-1], DAMAGED)
    yield made("with data behind its end", lambda: BASE + b"more", lambda: VALUES)
    yield _simple("with width zero", lambda: png_file(header(width=0), ROWS), UNREADABLE)
    whole = len(ROWS) // HEIGHT
    yield _simple(
        "whose packed data lack the last row", lambda: png_file(header(), ROWS[:-whole]), DAMAGED
    )
    yield _simple(
        "whose packed data lack the last byte",
        lambda: png_file(header(), ROWS[:-1]),
        Rejected(words="it cannot be decoded", kind="png", header_passes=True),
    )
    yield _simple("interlaced, lacking its last pass", lambda: _interlaced(VALUES, 6), DAMAGED)
    black = VALUES.copy()
    black[-3:] = 0
    yield made("whose last rows are black", lambda: png_file(header(), rows(black)), lambda: black)
    yield made(
        "whose packed data go on for 64 MB",
        lambda: png_file(header(), ROWS + bytes(64 << 20)),
        lambda: VALUES,
    )
    yield _simple(
        "with a filter that there is not",
        lambda: png_file(header(), b"\x07" + ROWS[1:]),
        Rejected(words="it cannot be decoded", kind="png", header_passes=True),
    )
    yield _simple(
        "with a palette that is missing",
        lambda: png_file(header(3), rows(PLANE)),
        Rejected(words="it cannot be decoded", kind="png", header_passes=True),
    )
    yield _simple(
        "of two headers",
        lambda: BASE[:33] + png_chunk(b"IHDR", header(width=4, height=4)) + BASE[33:],
        DAMAGED,
    )
    yield _simple(
        "stating 65000 x 65000 pixels",
        lambda: png_file(header(width=65_000, height=65_000), b""),
        Rejected(words="65000 x 65000 pixels, over the limit", kind="png"),
    )
    yield _simple(
        "that unpacks to 16000 x 12000 pixels",
        lambda: png_file(header(0, 1, 16_000, 12_000), bytes(2001 * 12_000)),
        Rejected(words="16000 x 12000 pixels, over the limit", kind="png"),
    )


def _flipped(data: bytes, chunk: bytes) -> bytes:
    """Return a PNG with a flipped bit in the checksum of a chunk."""
    at = data.index(chunk)
    end = at + 4 + int.from_bytes(data[at - 4 : at], "big")
    return data[:end] + bytes((data[end] ^ 1,)) + data[end + 1 :]


@functools.cache
def _bomb() -> bytes:
    """Return a gigabyte of zeros, packed into a megabyte."""
    packer = zlib.compressobj(9)
    block = bytes(1 << 24)
    return b"".join(packer.compress(block) for _ in range(64)) + packer.flush()


def chunk_cases() -> Iterator[Case]:
    too_much = Rejected(words="Decompressed data too large", kind="png")
    yield _simple(
        "with a text that unpacks to 1 GB",
        lambda: with_chunk(b"zTXt", b"a\0\0" + _bomb()),
        too_much,
    )
    yield _simple(
        "with a Unicode text that unpacks to 1 GB",
        lambda: with_chunk(b"iTXt", b"a\0\1\0\0\0" + _bomb()),
        too_much,
    )
    yield _simple(
        "with a color profile that unpacks to 1 GB",
        lambda: with_chunk(b"iCCP", b"a\0\0" + _bomb()),
        too_much,
    )
    million = zlib.compress(bytes(1_000_000), 9)
    yield _simple(
        "with 100 texts that unpack to 1 MB each",
        lambda: png_file(
            header(), ROWS, *[png_chunk(b"zTXt", b"a%d\0\0" % n + million) for n in range(100)]
        ),
        Rejected(words="Too much memory used in text chunks", kind="png"),
    )
    yield made(
        "with 100,000 chunks",
        lambda: png_file(header(), ROWS, png_chunk(b"teSt", b"") * 100_000),
        lambda: VALUES,
    )
    yield made("with a chunk of no known type", lambda: with_chunk(b"ABCD", b"?"), lambda: VALUES)
    yield made("with EXIF data of rubbish", lambda: with_chunk(b"eXIf", b"rubbish"), lambda: VALUES)
    yield made(
        "with EXIF data of rubbish as text",
        lambda: with_chunk(b"tEXt", b"Raw profile type exif\0\nexif\n  zz\nno numbers"),
        lambda: VALUES,
    )
    yield _simple(
        "with EXIF orientation 6 behind its pixels",
        lambda: BASE[:-12] + png_chunk(b"eXIf", exif(6).tobytes()[6:]) + BASE[-12:],
        Stored(kind="png", pixels=lambda: VALUES, notes={"orientation": 6}),
    )
    frames = [picture(WIDTH, HEIGHT, 44), picture(WIDTH, HEIGHT, 45)]
    yield _simple(
        "animated",
        lambda: encoded(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        Stored(kind="png", pixels=lambda: pixels(WIDTH, HEIGHT, 44), notes={"frames": 2}),
    )
    yield made(
        "stating two billion frames",
        lambda: with_chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0)),
        lambda: VALUES,
    )


CASES = (*depth_cases(), *damage_cases(), *chunk_cases())
