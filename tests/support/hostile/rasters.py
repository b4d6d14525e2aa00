"""TIFF, BMP and Netpbm files: wrong headers, rare depths, decompression bombs."""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Iterator

import numpy as np
from helpers import Pixels, encoded, exif, picture, pixels
from PIL import Image

from hostile.cases import Case, Rejected, Stored, gray, pillow, simple

_tiff = functools.partial(simple, "TIFF", file="odd.tif")
_bmp = functools.partial(simple, "BMP", file="odd.bmp")
_ppm = functools.partial(simple, "Netpbm", file="odd.ppm")

WIDTH, HEIGHT = 20, 18
VALUES = pixels(WIDTH, HEIGHT, 80)
PLANE: Pixels = np.ascontiguousarray(VALUES[:, :, 0])
FLAT = PLANE.tobytes()
SHORT, LONG = 3, 4

CUT = Rejected(words="it cannot be decoded", kind="tiff", header_passes=True)
UNREADABLE = Rejected(words="it cannot be identified: ", kind="tiff")


def tiff(
    data: bytes = FLAT,
    *tags: tuple[int, int, int, int],
    size: tuple[int, int] = (WIDTH, HEIGHT),
    packing: int = 1,
    bits: int = 8,
    following: int = 0,
    leave_out: tuple[int, ...] = (),
) -> bytes:
    """Return a gray TIFF of one strip; ``tags`` (tag, type, count, value) replace those of it."""
    known = {
        256: (LONG, 1, size[0]),
        257: (LONG, 1, size[1]),
        258: (SHORT, 1, bits),
        259: (SHORT, 1, packing),
        262: (SHORT, 1, 1),
        273: (LONG, 1, 8),
        277: (SHORT, 1, 1),
        278: (LONG, 1, size[1]),
        279: (LONG, 1, len(data)),
    }
    known.update({tag: rest for tag, *rest in tags})  # type: ignore[misc]
    kept = sorted(tag for tag in known if tag not in leave_out)
    entries = b"".join(struct.pack("<HHII", tag, *known[tag]) for tag in kept)
    directory = struct.pack("<H", len(kept)) + entries + struct.pack("<I", following)
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + directory


def tiff_cases() -> Iterator[Case]:
    def good(**notes: int) -> Stored:
        return Stored(kind="tiff", pixels=lambda: gray(PLANE), notes=notes)

    packed = zlib.compress(FLAT)
    yield _tiff("of one strip", tiff, good())
    yield _tiff("packed with deflate", lambda: tiff(packed, packing=8), good())
    pages = [picture(WIDTH, HEIGHT, 81), picture(WIDTH, HEIGHT, 82)]
    yield _tiff(
        "of two pages",
        lambda: encoded(picture(WIDTH, HEIGHT, 80), "TIFF", save_all=True, append_images=pages[1:]),
        Stored(kind="tiff", pixels=lambda: VALUES, notes={"frames": 2}),
    )
    yield _tiff("whose pages go in a circle", lambda: tiff(following=8 + len(FLAT)), good())
    yield _tiff("of 50,000 pages", lambda: _pages(50_000), good(frames=50_000))
    for packing in ("tiff_lzw", "jpeg", "packbits"):
        content = functools.partial(
            encoded, picture(WIDTH, HEIGHT, 83), "TIFF", compression=packing
        )
        yield _tiff(f"packed with {packing}", content, Stored(kind="tiff", pixels=pillow(content)))
    yield _tiff(
        "CMYK",
        lambda: encoded(picture(WIDTH, HEIGHT, 84, "CMYK"), "TIFF"),
        Stored(
            kind="tiff", pixels=pillow(lambda: encoded(picture(WIDTH, HEIGHT, 84, "CMYK"), "TIFF"))
        ),
    )
    wide = PLANE.astype(np.uint16) * 256 + 255
    yield _tiff("of 16 bits", lambda: tiff(wide.tobytes(), bits=16), good())
    yield _tiff(
        "with more than 4 GB of room (BigTIFF)", _big, Stored(kind="tiff", pixels=lambda: VALUES)
    )
    yield _tiff("in tiles", lambda: _tiled(32), good())
    yield _tiff(
        "with one plane for each color", _planar, Stored(kind="tiff", pixels=lambda: VALUES)
    )
    turned = encoded(picture(WIDTH, HEIGHT, 80), "TIFF", exif=exif(6))
    yield _tiff(
        "with orientation 6, which Pillow applies",
        lambda: turned,
        Stored(kind="tiff", pixels=lambda: np.rot90(VALUES, 3)),
    )
    no_range = Rejected(words="have no defined range", kind="tiff", header_passes=True)
    yield _tiff(
        "of floating-point numbers", lambda: encoded(Image.new("F", (5, 4)), "TIFF"), no_range
    )
    yield _tiff("of 32-bit integers", lambda: encoded(Image.new("I", (5, 4)), "TIFF"), no_range)
    yield _tiff("whose strip is beyond its end", lambda: tiff(FLAT, (273, LONG, 1, 99_999)), CUT)
    yield _tiff(
        "whose packed strip is beyond its end",
        lambda: tiff(packed, (273, LONG, 1, 99_999), packing=8),
        CUT,
    )
    yield _tiff(
        "whose packed strip lacks a row", lambda: tiff(zlib.compress(FLAT[:-WIDTH]), packing=8), CUT
    )
    end = len(tiff(b""))
    yield _tiff(
        "truncated in its last row", lambda: tiff(b"", (273, LONG, 1, end)) + FLAT[:-9], CUT
    )
    yield _tiff(
        "whose strip states fewer bytes than it has",
        lambda: tiff(FLAT, (279, LONG, 1, len(FLAT) // 2)),
        good(),
    )
    yield _tiff(
        "stating a billion strips",
        lambda: tiff(FLAT, (273, LONG, 2**30, 8), (279, LONG, 2**30, 8)),
        UNREADABLE,
    )
    yield _tiff(
        "stating two billion rows in a strip",
        lambda: tiff(packed, (278, LONG, 1, 2**31 + 1), packing=8),
        CUT,
    )
    yield _tiff("without strips", lambda: tiff(leave_out=(273, 279)), UNREADABLE)
    yield _tiff("without a width", lambda: tiff(leave_out=(256,)), UNREADABLE)
    yield _tiff("with height zero", lambda: tiff(size=(2**31 - 1, 0)), UNREADABLE)
    yield _tiff("of nothing but its first eight bytes", lambda: tiff()[:8], UNREADABLE)
    yield _tiff(
        "stating 65000 x 65000 pixels",
        lambda: tiff(size=(65_000, 65_000)),
        Rejected(words="65000 x 65000 pixels, over the limit", kind="tiff"),
    )
    yield _tiff(
        "with tiles of 65536 x 65536 pixels",
        lambda: _tiled(65_536),
        Rejected(words="65536-pixel tiles for a side of 20", kind="tiff"),
    )


def _pages(count: int) -> bytes:
    """Return a TIFF of one image and pages of which nothing is known but that there are more."""
    first = tiff()
    start = len(first) + len(first) % 2
    first = tiff(following=start).ljust(start, b"\0")
    steps = [start + 6 * number for number in range(1, count - 1)]
    return first + b"".join(struct.pack("<HI", 0, following) for following in [*steps, 0])


def _big() -> bytes:
    return encoded(picture(WIDTH, HEIGHT, 80), "TIFF", big_tiff=True)


def _tiled(side: int) -> bytes:
    tile = np.zeros((32, 32), np.uint8)
    tile[:HEIGHT, :WIDTH] = PLANE
    tags = ((322, LONG, 1, side), (323, LONG, 1, side), (324, LONG, 1, 8), (325, LONG, 1, 1024))
    return tiff(tile.tobytes(), *tags, leave_out=(273, 278, 279))


def _planar() -> bytes:
    planes = b"".join(VALUES[:, :, number].tobytes() for number in range(3))
    size = len(planes) // 3
    extra = struct.pack("<9I", *(8 + size * n for n in range(3)), *[size] * 3, *[0] * 3)
    extra += struct.pack("<3H", 8, 8, 8)
    at = 8 + len(planes)
    tags = (
        (258, SHORT, 3, at + 36),
        (262, SHORT, 1, 2),
        (273, LONG, 3, at),
        (277, SHORT, 1, 3),
        (279, LONG, 3, at + 12),
        (284, SHORT, 1, 2),
    )
    return tiff(planes + extra, *tags)


def bmp(
    data: bytes,
    width: int = WIDTH,
    height: int = HEIGHT,
    *,
    bits: int = 8,
    packing: int = 0,
    colors: int = 256,
) -> bytes:
    """Return a BMP with a palette of greys."""
    palette = b"".join(bytes((n * 255 // max(1, colors - 1),) * 3 + (0,)) for n in range(colors))
    start = 54 + len(palette)
    head = b"BM" + struct.pack("<IHHI", start + len(data), 0, 0, start)
    info = struct.pack(
        "<IiiHHIIiiII", 40, width, height, 1, bits, packing, len(data), 0, 0, colors, 0
    )
    return head + info + palette + data


def bmp_cases() -> Iterator[Case]:
    def bad(words: str, *, header_passes: bool = False) -> Rejected:
        return Rejected(words=words, kind="bmp", header_passes=header_passes)

    good = Stored(kind="bmp", pixels=lambda: gray(PLANE))
    yield _bmp("with its rows from the bottom", lambda: bmp(PLANE[::-1].tobytes()), good)
    yield _bmp("with its rows from the top", lambda: bmp(FLAT, height=-HEIGHT), good)
    runs = b"".join(
        b"".join(bytes((1, value)) for value in line) + b"\0\0" for line in PLANE[::-1].tolist()
    )
    yield _bmp("of runs", lambda: bmp(runs + b"\0\1", packing=1), good)
    bits = PLANE > 127
    lines = np.pad(np.packbits(bits[::-1], axis=1), ((0, 0), (0, 1)))
    yield _bmp(
        "of one bit",
        lambda: bmp(lines.tobytes(), bits=1, colors=2),
        Stored(kind="bmp", pixels=lambda: gray((bits * 255).astype(np.uint8))),
    )
    words = (VALUES >> 3).astype("<u2")
    fives = words[:, :, 0] << 10 | words[:, :, 1] << 5 | words[:, :, 2]
    yield _bmp(
        "of 16 bits",
        lambda: bmp(fives[::-1].tobytes(), bits=16, colors=0),
        Stored(kind="bmp", pixels=lambda: ((VALUES >> 3) * (255 / 31)).astype(np.uint8), near=1),
    )
    yield _bmp(
        "truncated", lambda: bmp(FLAT)[:-30], bad("it cannot be decoded", header_passes=True)
    )
    yield _bmp("truncated in its header", lambda: bmp(FLAT)[:30], bad("it cannot be identified"))
    yield _bmp("of width zero", lambda: bmp(FLAT, width=0), bad("it cannot be identified"))
    yield _bmp("of negative width", lambda: bmp(FLAT, width=-WIDTH), bad("over the limit"))
    yield _bmp("of 99 bits", lambda: bmp(FLAT, bits=99), bad("it cannot be identified"))
    yield _bmp(
        "packed in no known way", lambda: bmp(FLAT, packing=77), bad("it cannot be identified")
    )
    yield _bmp(
        "stating 65000 x 65000 pixels", lambda: bmp(FLAT, 65_000, 65_000), bad("over the limit")
    )
    yield _bmp(
        "of runs that end early",
        lambda: bmp(runs[:99] + b"\0\1", packing=1),
        bad("it cannot be decoded", header_passes=True),
    )


def ppm_cases() -> Iterator[Case]:
    def bad(words: str, *, header_passes: bool = False) -> Rejected:
        return Rejected(words=words, kind="ppm", header_passes=header_passes)

    size = b" %d %d " % (WIDTH, HEIGHT)
    numbers = b" ".join(b"%d" % value for value in VALUES.reshape(-1).tolist())
    bits = PLANE > 127
    black = Stored(kind="ppm", pixels=lambda: gray(np.where(bits, 0, 255).astype(np.uint8)))
    colors = Stored(kind="ppm", pixels=lambda: VALUES)
    wide = (PLANE.astype(np.uint16) * 256 + 255).astype(">u2")
    yield _ppm("of bytes", lambda: b"P6" + size + b"255\n" + VALUES.tobytes(), colors)
    yield _ppm("of text", lambda: b"P3" + size + b"255\n" + numbers, colors)
    yield _ppm(
        "gray, of 16 bits",
        lambda: b"P5" + size + b"65535\n" + wide.tobytes(),
        Stored(kind="ppm", pixels=lambda: gray(PLANE)),
    )
    yield _ppm("of bits", lambda: b"P4" + size + np.packbits(bits, axis=1).tobytes(), black)
    yield _ppm(
        "of bits as text",
        lambda: b"P1" + size + b"".join(b"%d" % bit for bit in bits.reshape(-1)),
        black,
    )
    yield _ppm(
        "with comments",
        lambda: b"P6 # a\n%d # b\n%d\n# c\n255\n" % (WIDTH, HEIGHT) + VALUES.tobytes(),
        colors,
    )
    broken = bad("its header is damaged, or longer")
    yield _ppm(
        "with a comment of 4 MB", lambda: b"P6 #" + bytes(4 << 20) + b"\n1 1 255\nabc", broken
    )
    yield _ppm("of negative width", lambda: b"P6 #\n-2 3 255\n" + bytes(18), broken)
    yield _ppm("without a height", lambda: b"P6 3", broken)
    unread = bad("it cannot be identified")
    yield _ppm("of width zero", lambda: b"P6 0 3 255\n", unread)
    yield _ppm("with no brightness", lambda: b"P6 3 3 0\n" + bytes(27), unread)
    yield _ppm("with 100,000 levels", lambda: b"P6 3 3 100000\n" + bytes(54), unread)
    yield _ppm(
        "stating 65000 x 65000 pixels", lambda: b"P6 65000 65000 255\n", bad("over the limit")
    )
    cut = bad("it cannot be decoded", header_passes=True)
    yield _ppm("truncated", lambda: b"P6" + size + b"255\n" + VALUES.tobytes()[:-1], cut)
    yield _ppm("of text that is truncated", lambda: b"P3" + size + b"255\n" + numbers[:-9], cut)
    yield _ppm("of numbers above the highest", lambda: b"P3 2 1 255\n1 2 3 4 5 999", cut)
    yield _ppm("of words, not numbers", lambda: b"P3 2 1 255\none two three", cut)


CASES = (*tiff_cases(), *bmp_cases(), *ppm_cases())
