"""Limits of images, compared with what a file states before a decoder allocates it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from PIL import Image

from shardkit.errors import BadImage
from shardkit.system.machine import free_memory
from shardkit.system.text import size as in_words
from shardkit.system.turns import in_turn

MAX_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 89_478_485)
"""Pixel limit, as in Pillow: larger images count as decompression bombs."""

_PIXEL_BYTES = 5
"""Decoded bytes for each pixel of the limit, of which decoding has three copies at most."""

_most_pixels = ContextVar("most pixels", default=MAX_PIXELS)
"""The limit in this thread: see `pixels_up_to`."""

LARGE_PIXELS = 64_000_000
"""Larger images are decoded one at a time over all workers: a WebP of 6 KB takes up to 2.7 GB."""

_LARGE_BYTES = 5 * LARGE_PIXELS
_SMALL_BYTES = 1 << 20
"""An image of fewer bytes may be packed by any ratio: sparse TIFF files leave out whole tiles."""

_DEFLATE = 1032
"""A match of 258 bytes takes at least two bits."""

LEAST_PACKED = {"png": 1 / 8 / _DEFLATE, "ppm": 1 / 8}
"""Fewest packed bytes of a pixel. Other types have no limit: arithmetic coding needs next to no
bits, and the canvas of a GIF may be larger than its images."""

TIFF_RATIOS = {
    1: 1,
    5: 2731,
    8: _DEFLATE,
    32946: _DEFLATE,
    32773: 64,
    34925: 1 << 14,
    50000: 1 << 15,
}
"""Highest number of bytes by packed byte, by compression: none, LZW (a string of 4,095 bytes takes
12 bits), deflate, PackBits, LZMA and Zstandard. Others have no limit."""


class TooManyPixels(BadImage):
    """An image that states more pixels than the limit, which a user may raise."""


@contextlib.contextmanager
def pixels_up_to(most: int | None) -> Iterator[None]:
    """Decode images of up to ``most`` pixels in this thread, if memory allows; None: `MAX_PIXELS`.

    Only for files that a user converts: datasets have no images over `MAX_PIXELS`.
    """
    token = _most_pixels.set(most or MAX_PIXELS)
    try:
        yield
    finally:
        _most_pixels.reset(token)


def check_size(
    width: int,
    height: int,
    *,
    pixel_bytes: int = 1,
    packed: int = 0,
    least_packed: float = 0,
) -> None:
    """Refuse an image that states a size over a limit, or one that its data cannot unpack to.

    ``pixel_bytes`` are those of a decoded pixel, ``packed`` those of the file. ``least_packed`` is
    the fewest packed bytes of a pixel; 0 if its compression has no limit. Raises BadImage if so.
    """
    pixels = width * height
    size = f"it declares {width} x {height} pixels"
    most = _most_pixels.get()
    if pixels > most:
        raise TooManyPixels(f"{size}, over the limit of {most}")
    if pixels * pixel_bytes > _PIXEL_BYTES * most:
        raise BadImage(
            f"{size} with {pixel_bytes} bytes each, over the limit of {_PIXEL_BYTES * most} bytes"
        )
    if pixels * pixel_bytes > _SMALL_BYTES and pixels * least_packed > packed:
        raise BadImage(f"{size}, which do not fit in its {packed} bytes: it is damaged")


def in_turn_if_large(
    width: int, height: int, pixel_bytes: int = 1
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which no other thread or process decodes an image as large as this one.

    It can be nested, so that a caller can use the pixels there, too. Entry raises MemoryError if
    the image is over `MAX_PIXELS` and needs more memory than is free.
    """
    pixels = width * height
    if MAX_PIXELS < pixels <= _most_pixels.get():
        return _in_turn_with_memory(pixels * max(_PIXEL_BYTES, pixel_bytes))
    is_large = pixels > LARGE_PIXELS or pixels * pixel_bytes > _LARGE_BYTES
    return in_turn() if is_large else contextlib.nullcontext()


@contextlib.contextmanager
def _in_turn_with_memory(size: int) -> Iterator[None]:
    """Take a turn, and require memory for three copies of some bytes."""
    with in_turn():
        if 3 * size > (free := free_memory()):
            raise MemoryError(f"it needs {in_words(3 * size)} to decode; {in_words(free)} are free")
        yield
