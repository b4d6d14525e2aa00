"""Parse the structure of TIFF files without decoding pixels, and refuse bombs and lies.

Decoders allocate what a file states, so its numbers are compared with its bytes first.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

from shardkit.codecs.limits import TIFF_RATIOS, check_size
from shardkit.errors import BadImage

MAX_PAGES = 4096
"""Maximum pages of a file."""

_MAX_ENTRIES = 1024
"""Maximum tags of a page; real ones have 10 to 60."""
_MAX_NUMBERS = 1 << 20
"""Maximum numbers in the tags of all pages, which may share their bytes: each takes 40 bytes."""
_TILE = 4096
"""Allowed width and height of tiles in an image of any size."""
_SIZES = (0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 0, 0, 8, 8, 8)
"""Bytes of a value by type of a tag; 0 is an unknown type."""
_INTEGERS = {1: "B", 3: "H", 4: "I", 13: "I", 16: "Q", 18: "Q"}

_WIDTH = 256
_HEIGHT = 257
_BITS = 258
_SAMPLES = 277
_PLANAR = 284
_SUBFILE = 254
_COMPRESSION = 259
_PHOTOMETRIC = 262
_SAMPLE_FORMAT = 339
_STRIP_OFFSETS = 273
_ROWS = 278
_STRIP_COUNTS = 279
_TILE_WIDTH = 322
_TILE_HEIGHT = 323
_TILE_OFFSETS = 324
_TILE_COUNTS = 325
_NUMBERS = frozenset(
    {_WIDTH, _HEIGHT, _BITS, _SAMPLES, _PLANAR, _STRIP_OFFSETS, _ROWS, _STRIP_COUNTS}
    | {_TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_COUNTS}
    | {_SUBFILE, _COMPRESSION, _PHOTOMETRIC, _SAMPLE_FORMAT}
)
_FORMATS = {1: "uint", 2: "int", 3: "float", 4: "uint"}
"""Kinds of numbers by sample format; 4 is undefined."""


class TiffPage(NamedTuple):
    """The properties of one page of a TIFF file."""

    width: int
    height: int
    samples: int
    """Values per pixel."""
    bits: int
    """Most bits of a value."""
    kind: str = "uint"
    """``uint``, ``int`` or ``float``."""
    photometric: int = 0
    """The color model: 0 and 1 are gray, 2 is RGB, 3 a palette."""
    is_secondary: bool = False
    """Whether it is a reduced version of another page, or a mask."""
    compression: int = 1

    @property
    def dtype(self) -> str:
        """NumPy's name of the type of values, which may not exist: ``uint12``."""
        return f"{self.kind}{self.bits}"

    @property
    def pixel_bytes(self) -> int:
        """Bytes of a decoded pixel, with each value in whole bytes."""
        return self.samples * -(-self.bits // 8)

    @property
    def least_packed(self) -> float:
        """Fewest packed bytes of a pixel, which is 0 if its compression has no limit."""
        ratio = TIFF_RATIOS.get(self.compression)
        return self.samples * self.bits / 8 / ratio if ratio else 0.0


def tiff_pages(data: bytes | memoryview) -> list[TiffPage]:
    """Return the pages of a TIFF or BigTIFF file, whose strips and tiles are all in the file.

    Pages inside of pages (SubIFDs, such as previews) are not followed. Raises BadImage if it is
    truncated, its pages form a cycle, anything is outside the file, or it states more than
    `MAX_PAGES` pages, or a page over the limits of `check_size`.
    """
    data = memoryview(data).cast("B")
    layout = _layout(data)
    pages: list[TiffPage] = []
    seen: set[int] = set()
    numbers = 0
    at = layout.first
    while at:
        if at in seen:
            raise BadImage("its pages form a cycle")
        if len(seen) == MAX_PAGES:
            raise BadImage(f"it has more than {MAX_PAGES} pages")
        seen.add(at)
        tags, at = _read_page(data, layout, at, _MAX_NUMBERS - numbers)
        numbers += sum(map(len, tags.values()))
        pages.append(_check_page(data, tags))
    if not pages:
        raise BadImage("it has no page")
    return pages


class _Layout(NamedTuple):
    """Byte order and sizes of numbers of a file."""

    order: str
    number: str
    """Format of the number of tags of a page."""
    offset: str
    first: int
    """Offset of the first page."""


def _layout(data: memoryview) -> _Layout:
    order = {b"II": "<", b"MM": ">"}.get(bytes(data[:2]))
    if order is None or len(data) < 16:
        raise BadImage("it is not a TIFF file")
    (magic,) = struct.unpack_from(order + "H", data, 2)
    if magic == 42:
        return _Layout(order, order + "H", order + "I", *struct.unpack_from(order + "I", data, 4))
    if magic == 43 and struct.unpack_from(order + "HH", data, 4) == (8, 0):
        return _Layout(order, order + "Q", order + "Q", *struct.unpack_from(order + "Q", data, 8))
    raise BadImage("it is not a TIFF file")


Tags = dict[int, tuple[int, ...]]
"""Numbers of a page by tag."""


def _read_page(data: memoryview, layout: _Layout, at: int, most: int) -> tuple[Tags, int]:
    """Return the numbers of the page at an offset, ``most`` at most, and the next page's offset."""
    wide = layout.offset[1] == "Q"
    entry_bytes, inline = (20, 8) if wide else (12, 4)
    (entries,) = _unpack(layout.number, data, at)
    if entries > _MAX_ENTRIES:
        raise BadImage(f"a page has {entries} tags, more than {_MAX_ENTRIES}")
    at += struct.calcsize(layout.number)
    tags: Tags = {}
    for start in range(at, at + entries * entry_bytes, entry_bytes):
        tag, kind, count = _unpack(layout.order + ("HHQ" if wide else "HHI"), data, start)
        offset = start + entry_bytes - inline
        size = count * (_SIZES[kind] if kind < len(_SIZES) else 0)
        if size > inline:
            (offset,) = _unpack(layout.offset, data, offset)
        if offset + size > len(data):
            raise BadImage(f"its tag {tag} points outside the file")
        if tag in _NUMBERS:
            if kind not in _INTEGERS or not count:
                raise BadImage(f"its tag {tag} is not an integer")
            most -= count
            if most < 0:
                raise BadImage(f"its tags have more than {_MAX_NUMBERS} numbers")
            tags[tag] = struct.unpack_from(f"{layout.order}{count}{_INTEGERS[kind]}", data, offset)
    (following,) = _unpack(layout.offset, data, at + entries * entry_bytes)
    return tags, following


def _check_page(data: memoryview, tags: Tags) -> TiffPage:
    """Return a page whose size is possible, and whose strips or tiles are in the file."""
    width = _single(tags, _WIDTH)
    height = _single(tags, _HEIGHT)
    samples = _single(tags, _SAMPLES, 1)
    sample_format = max(tags.get(_SAMPLE_FORMAT, (1,)))
    page = TiffPage(
        *(width, height, samples, max(tags.get(_BITS, (1,)))),
        kind=_FORMATS.get(sample_format, f"numbers of format {sample_format}, "),
        photometric=_single(tags, _PHOTOMETRIC, 0),
        is_secondary=bool(_single(tags, _SUBFILE, 0) & 5),
        compression=_single(tags, _COMPRESSION, 1),
    )
    if not 0 < page.bits <= 64 or 0 in page[:4]:
        raise BadImage(f"it declares {width} x {height} pixels of {samples} x {page.bits} bits")
    check_tiff_size([page], len(data))
    if _TILE_WIDTH in tags or _TILE_OFFSETS in tags:
        sides = _single(tags, _TILE_WIDTH), _single(tags, _TILE_HEIGHT)
        for tile, side in zip(sides, (width, height), strict=True):
            if not 0 < tile <= max(_TILE, side + 15):
                raise BadImage(f"it declares {tile}-pixel tiles for a side of {side} pixels")
        kinds = _TILE_OFFSETS, _TILE_COUNTS
        needed = math.prod(-(-side // tile) for side, tile in zip(page[:2], sides, strict=True))
    else:
        kinds = _STRIP_OFFSETS, _STRIP_COUNTS
        needed = -(-height // max(1, min(height, _single(tags, _ROWS, height))))
    offsets, counts = (tags.get(kind, ()) for kind in kinds)
    needed *= samples if _single(tags, _PLANAR, 1) == 2 else 1
    if len(offsets) != needed or len(counts) != needed:
        raise BadImage(f"it has {len(offsets)} strips or tiles, but its size needs {needed}")
    if any(start + size > len(data) for start, size in zip(offsets, counts, strict=True)):
        raise BadImage("its pixels are outside the file: it is truncated or damaged")
    packed = -(-width * samples * page.bits // 8) * height
    if sum(counts) > len(data) + 2 * width * height * page.pixel_bytes:
        raise BadImage(f"its strips or tiles share bytes: together they declare {sum(counts)}")
    if page.compression == 1 and sum(counts) < packed:
        raise BadImage(f"it has {sum(counts)} bytes of pixels, but its size needs {packed}")
    return page


def check_tiff_size(pages: list[TiffPage], packed: int) -> None:
    """Refuse pages of one size that are together over the limits of `check_size`.

    Pages and strips may share bytes, so the file's ``packed`` bytes count for all of them. Raises
    BadImage if they are over them.
    """
    check_size(
        *pages[0][:2],
        pixel_bytes=sum(page.pixel_bytes for page in pages),
        packed=packed,
        least_packed=sum(page.least_packed for page in pages),
    )


def _single(tags: Tags, tag: int, default: int | None = None) -> int:
    """Return the only number of a tag."""
    numbers = set(tags.get(tag, () if default is None else (default,)))
    if len(numbers) != 1:
        raise BadImage(f"its tag {tag} is missing, or not one number")
    return numbers.pop()


def _unpack(form: str, data: memoryview, at: int) -> tuple[int, ...]:
    if at + struct.calcsize(form) > len(data):
        raise BadImage("a page is outside the file: it is truncated or damaged")
    return struct.unpack_from(form, data, at)
