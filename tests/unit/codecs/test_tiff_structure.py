"""The structure of TIFF files is read without decoding; bombs and lies are refused."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest
from PIL import Image
from refusals import refused
from table import for_each

from shardkit.codecs.tiff_structure import MAX_PAGES, TiffPage, tiff_pages
from shardkit.errors import BadImage

Tag = tuple[int, int, int]
"""Number, type and value of a tag."""


def written(mode: str = "RGB", **options: Any) -> bytes:
    """Return a TIFF file of 40 x 30 pixels as Pillow writes it."""
    file = io.BytesIO()
    Image.new(mode, (40, 30)).save(file, "TIFF", **options)
    return file.getvalue()


def page(*changes: Tag, following: int = 0) -> bytes:
    """Return a little-endian file with one gray page of 4 x 4 pixels at offset 8."""
    tags = {256: (4, 4), 257: (4, 4), 258: (3, 8), 273: (4, 0), 279: (4, 16), 278: (4, 4)}
    tags |= {tag: (kind, value) for tag, kind, value in changes}
    entries = b"".join(
        struct.pack("<HHII", tag, kind, 1, value) for tag, (kind, value) in sorted(tags.items())
    )
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + struct.pack("<I", following)


@for_each(
    ("mode", "samples", "bits"),
    [("1", 1, 1), ("L", 1, 8), ("RGB", 3, 8), ("RGBA", 4, 8), ("I;16", 1, 16), ("F", 1, 32)],
)
def test_pages_have_the_size_and_values_of_pillow(mode: str, samples: int, bits: int) -> None:
    (page,) = tiff_pages(written(mode))
    assert page[:4] == (40, 30, samples, bits)
    assert page.dtype == ("float32" if mode == "F" else f"uint{bits}")


@for_each("options", [{"big_tiff": True}, {"compression": "tiff_deflate"}])
def test_other_layouts_are_read(options: dict[str, Any]) -> None:
    compression = 8 if "compression" in options else 1
    expected = TiffPage(40, 30, 3, 8, photometric=2, compression=compression)
    assert tiff_pages(written(**options)) == [expected]


def test_all_pages_are_listed() -> None:
    more = [Image.new("L", (7, 5)), Image.new("L", (9, 2))]
    data = written("L", save_all=True, append_images=more)
    assert [entry[:2] for entry in tiff_pages(data)] == [(40, 30), (7, 5), (9, 2)]


@for_each(
    ("data", "message"),
    [
        (b"", "not a TIFF"),
        (page(following=8), "cycle"),
        (page(following=4000), "outside the file"),
        (page((256, 4, 1 << 31), (257, 4, 1 << 31)), "over the limit"),
        (page((256, 4, 0)), "0 x 4 pixels"),
        (page((273, 4, 1 << 30)), "pixels are outside the file"),
        (page((279, 4, 1 << 30)), "pixels are outside the file"),
        (page((278, 4, 1)), "needs 4"),
        (page((322, 4, 1 << 20), (323, 4, 16)), "tiles of 1048576 pixels"),
        (page((258, 3, 999)), "999 bits"),
        (page((256, 2, 4)), "not an integer"),
        (b"II*\0\x08\0\0\0\xff\xff" + bytes(99), "65535 tags"),
    ],
)
def test_bombs_and_lies_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(BadImage, match=message):
        tiff_pages(data)


def test_a_tag_larger_than_the_file_is_refused_before_it_is_read() -> None:
    data = bytearray(page())
    entry = data.index(struct.pack("<HH", 273, 4))
    struct.pack_into("<I", data, entry + 4, 0xFFFFFFFF)
    with refused(BadImage, "273"):
        tiff_pages(bytes(data))


def test_pages_that_share_a_long_tag_are_refused() -> None:
    first = page(following=len(page()))
    data = bytearray(first + page()[8:] + bytes(1 << 20))
    for start in (8, len(first)):
        entry = data.index(struct.pack("<HH", 273, 4), start)
        struct.pack_into("<HHII", data, entry, 273, 1, 1 << 20, len(data) - (1 << 20))
    with pytest.raises(BadImage, match="more than 1048576 numbers"):
        tiff_pages(bytes(data))


def test_too_many_pages_are_refused() -> None:
    size = len(page())
    data = bytearray(page())
    for number in range(MAX_PAGES):
        struct.pack_into("<I", data, len(data) - 4, size + number * (size - 8))
        data += page()[8:]
    with pytest.raises(BadImage, match=f"more than {MAX_PAGES} pages"):
        tiff_pages(bytes(data))


def test_every_truncation_is_refused_or_has_all_pixels() -> None:
    data = written("L", compression="tiff_deflate")
    expected = tiff_pages(data)
    for length in range(len(data)):
        try:
            assert tiff_pages(data[:length]) == expected
        except BadImage:
            continue


def test_random_damage_raises_only_bad_images() -> None:
    data, rng = np.frombuffer(written("L"), np.uint8), np.random.default_rng(0)
    for _ in range(300):
        damaged = data.copy()
        damaged[rng.integers(0, len(data), 3)] = rng.integers(0, 256, 3)
        try:
            tiff_pages(damaged.tobytes())
        except BadImage:
            continue
