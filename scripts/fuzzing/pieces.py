"""Compare regions of mutated JPEGs with the full decode."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
from helpers import encoded
from PIL import Image

from shardkit.codecs.geometry import Region
from shardkit.codecs.image import Decoding, decode, inspect
from shardkit.codecs.libjpeg import reduced_side, sufficient_eighths
from shardkit.errors import BadImage

_MOST = 1 << 20
"""Pixels of the largest image that is compared; mutations may state larger ones."""


Decoder = Callable[[bytes, tuple[int, int], int, Region], npt.NDArray[np.uint8] | None]
"""Decodes a region of a JPEG, given its size and the scale in eighths, or returns None."""


def compare(numbers: Iterable[int], decoder: Decoder) -> Counter[str]:
    """Decode a piece of one mutated JPEG for each number, and count the outcomes."""
    return Counter(_outcome(random.Random(number), decoder) for number in numbers)


def mutated_jpeg(source: random.Random) -> bytes:
    """Return a JPEG with a few bytes changed, or as it is."""
    return _mutated(_jpeg(source), source)


def _outcome(source: random.Random, decoder: Decoder) -> str:
    data = mutated_jpeg(source)
    try:
        info = inspect(data, "jpg")
    except BadImage:
        return "refused"
    size = info.width, info.height
    if not 64 <= info.width * info.height <= _MOST or min(size) < 8:
        return "of another size"
    target = source.choice([(0, 0), (size[0] // 4, size[1] // 4)])
    eighths = sufficient_eighths(size, target)
    region = _region(source, *(reduced_side(side, eighths) for side in size))
    piece = decoder(data, size, eighths, region)
    try:
        whole = decode(data, "jpg", Decoding(at_least=target))
    except BadImage:
        return "refused" if piece is None else "different"
    if piece is None:
        return "left to the full decode"
    rows = slice(region.top, region.top + region.height)
    expected = whole[rows, region.left : region.left + region.width]
    return "equal" if np.array_equal(piece, expected) else "different"


def _jpeg(source: random.Random) -> bytes:
    width, height = source.randint(9, 120), source.randint(9, 120)
    noise = np.random.default_rng(source.randint(0, 1 << 30))
    small = Image.fromarray(noise.integers(0, 256, (5, 7, 3), np.uint8))
    image = small.resize((width, height), source.choice([Image.Resampling.BICUBIC, 0]))
    if source.random() < 0.1:
        image = image.convert("L")
    return encoded(
        image,
        "JPEG",
        quality=source.randint(5, 100),
        restart_marker_blocks=source.choice([0, 0, 1, 5]),
        optimize=source.random() < 0.5,
        **({} if image.mode == "L" else {"subsampling": source.randint(0, 2)}),
    )


def _mutated(data: bytes, source: random.Random) -> bytes:
    """Return a JPEG with a few bytes changed, inserted, removed or cut off, or as it is."""
    found = bytearray(data)
    for _ in range(source.choice([0, 1, 1, 1, 2, 3, 8])):
        # Half of the changes are in the headers, which few bytes of a file are.
        end = len(found) if source.random() < 0.5 else min(len(found), 700)
        at = source.randrange(2, max(3, end))
        kind = source.randrange(6)
        if kind < 3:
            found[at : at + 1] = bytes([source.choice([0, 1, 0x7F, 0xFF, source.randrange(256)])])
        elif kind == 3:
            found[at:at] = source.randbytes(source.randint(1, 4))
        elif kind == 4:
            del found[at : at + source.randint(1, 4)]
        elif source.random() < 0.3:
            del found[at:]
    return bytes(found)


def _region(source: random.Random, width: int, height: int) -> Region:
    left, top = source.randrange(width), source.randrange(height)
    return Region(left, top, source.randint(1, width - left), source.randint(1, height - top))
