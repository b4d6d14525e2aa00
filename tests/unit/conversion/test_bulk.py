"""The compiled module reads ordinary files as the source and the recipe do."""

from __future__ import annotations

import contextlib
import os
import random
import struct
import zlib
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from helpers import encoded, exif, jpeg, make_tree, picture, png, png_chunk, png_file

from shardkit.codecs.image import inspect, sniff
from shardkit.codecs.measures import MEASURES, WAVES
from shardkit.contracts import Entry, Images
from shardkit.conversion.bulk import Prepared, read_ordinary
from shardkit.errors import BadImage
from shardkit.pipeline import convert_record
from shardkit.recipe import CHECKS, Recipe
from shardkit.record import Record
from shardkit.sources.imagefolder import ImageFolder, scan_imagefolder
from shardkit.system import native

pytestmark = pytest.mark.usefixtures("with_native")

ORDINARY = {
    "cat/0.jpg": jpeg(40, 30),
    "cat/1.jpg": jpeg(1, 1),
    "cat/2.jpeg": encoded(picture(33, 17, 2, "L")),
    "cat/3.jpg": jpeg(41, 29, subsampling=0),
    "dog/0.png": png(24, 16),
    "dog/1.png": png(5, 7, 1, "RGBA"),
    "dog/2.png": png(5, 7, 2, "L"),
    "dog/é.png": png(8, 8, 3),
    'dog/"quoted" back\\slash.png': png(8, 9, 4),
    "dog/jpeg.png": jpeg(16, 16, 5),  # the content decides
}
ROWS = b"".join(b"\0" + bytes(24) for _ in range(8))
DATA = zlib.compress(ROWS)
HEADER = png_chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0))
SIGNATURE, END = b"\x89PNG\r\n\x1a\n", png_chunk(b"IEND", b"")
PACKED = {
    "dog/palette.png": png(16, 16, 7, "P"),
    "dog/16.png": png(16, 16, 7, "I;16"),
    "dog/bilevel.png": png(17, 16, 7, "1"),
    "dog/exif.png": encoded(picture(9, 8), "PNG", exif=exif(6)),
    "dog/profile.png": encoded(picture(9, 8), "PNG", icc_profile=bytes(5000)),
    "dog/behind.png": png(9, 8)[:-12] + png_chunk(b"tIME", bytes(7)) + END,
    "dog/two.png": SIGNATURE
    + HEADER
    + png_chunk(b"IDAT", DATA[:9])
    + png_chunk(b"IDAT", DATA[9:])
    + END,
}
"""PNGs that the module reads with libdeflate."""
OTHERS = {
    "cat/cmyk.jpg": encoded(picture(16, 16, 6, "CMYK")),
    "cat/cut.jpg": jpeg(60, 60)[:-200],
    "cat/exif.jpg": jpeg(16, 16, exif=exif(6)),
    "cat/header.jpg": jpeg(60, 60)[:100],
    "cat/progressive.jpg": jpeg(32, 32, progressive=True),
    "cat/more.jpg": jpeg(16, 16) + b"more",
    "cat/profile.jpg": jpeg(16, 16, icc_profile=b"no profile"),
    "cat/text.jpg": b"not an image",
    "dog/empty.png": b"",
    "dog/checksum.png": png(24, 16)[:-30] + b"?" + png(24, 16)[-29:],
    "dog/bomb.png": encoded(picture(9, 8), "PNG", icc_profile=bytes(5_000_000)),
    "dog/bbox.png": png_file(HEADER[8:-4], ROWS, png_chunk(b"tEXt", b"bbox\0")),
    "dog/rows.png": SIGNATURE + HEADER + png_chunk(b"IDAT", zlib.compress(bytes(50))) + END,
    "dog/filter.png": SIGNATURE + HEADER + png_chunk(b"IDAT", zlib.compress(b"\5" * 200)) + END,
    "dog/end.png": SIGNATURE + HEADER + png_chunk(b"IDAT", DATA),
    "dog/picture.gif": encoded(picture(9, 9), "GIF"),
}


def expected(source: Images, row: int, recipe: Recipe) -> Prepared | None:
    """Return what Python alone makes of an image."""
    with mock.patch.object(native, "module", return_value=None):
        try:
            return convert_record(recipe, source.read([row])[0])
        except BadImage:
            return None


def folder(root: Path, files: dict[str, bytes]) -> Images:
    return scan_imagefolder(make_tree(root, files)).splits[""]


@pytest.mark.parametrize("check", CHECKS)
def test_every_record_equals_that_of_the_recipe(tmp_path: Path, check: str) -> None:
    source, recipe = folder(tmp_path, ORDINARY | PACKED | OTHERS), Recipe(check=check)
    libdeflate, read = getattr(native.module(), "LIBDEFLATE", ""), 0
    for row, found in enumerate(read_ordinary(source, recipe)):
        path = source.entries[row].path
        ordinary = path in ORDINARY or (path in PACKED and libdeflate and check == "decode")
        assert found is not None or not ordinary, path
        if found is not None:
            assert found == expected(source, row, recipe), path
            read += 1
    assert read >= len(ORDINARY)


def test_mutated_images_are_left_or_read_alike(tmp_path: Path) -> None:
    seeds = [
        jpeg(40, 30),
        jpeg(24, 24, 1, subsampling=0),
        png(20, 20),
        encoded(picture(9, 9, 1, "L")),
        jpeg(280, 260),  # measured at 1/8 of its size
    ]
    rng, files = random.Random(1), {}
    for number in range(300):
        data = bytearray(seeds[number % len(seeds)])
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(3, len(data))] = rng.choice(
                (0, 1, 0x7F, 0xD9, 0xFF, rng.randrange(256))
            )
        files[f"cat/{number}.png"] = bytes(
            data[: rng.randrange(40, len(data))] if number % 9 == 0 else data
        )
    source, recipe = folder(tmp_path, files), Recipe()
    found, measures = read_ordinary(source, recipe), np.zeros(len(files), MEASURES)
    assert read_ordinary(source, recipe, (measures, WAVES)) == found
    assert all(each or not done for each, done in zip(found, measures["done"], strict=True))
    assert 20 < sum(each is not None for each in found) < 200
    for row, each in enumerate(found):
        assert each is None or each == expected(source, row, recipe), source.entries[row].path


def test_headers_are_inspected_alike() -> None:
    for data in (ORDINARY | PACKED | OTHERS).values():
        with contextlib.suppress(BadImage):
            found = inspect(data, sniff(data) or "foreign")
            with mock.patch.object(native, "module", return_value=None):
                assert found == inspect(data, sniff(data) or "foreign")


def test_a_file_that_changed_since_the_scan_is_left(tmp_path: Path) -> None:
    source = folder(tmp_path, {f"cat/{number}.jpg": jpeg(9, 9, number) for number in range(6)})
    files = [tmp_path / "cat" / f"{number}.jpg" for number in range(6)]
    os.utime(files[0], ns=(1, 1))
    time = files[1].stat()
    files[1].write_bytes(files[1].read_bytes() + b"more")
    os.utime(files[1], ns=(time.st_atime_ns, time.st_mtime_ns))
    files[2].unlink()
    os.mkfifo(files[3].with_suffix(".pipe"))
    files[3].with_suffix(".pipe").replace(files[3])
    files[4].unlink()
    files[4].mkdir()
    found = read_ordinary(source, Recipe())
    assert [each is not None for each in found] == [False] * 5 + [True]


def test_images_that_change_and_other_sources_are_left(tmp_path: Path) -> None:
    class Other(ImageFolder):
        def read(self, split: str, entry: Entry) -> Record:
            raise NotImplementedError

    source = folder(tmp_path, {"cat/0.jpg": jpeg(9, 9)})
    assert read_ordinary(source, Recipe(resize=4)) == [None]
    assert read_ordinary(Images(Other(tmp_path), "", source.entries), Recipe()) == [None]


def test_without_the_module_all_images_are_left(tmp_path: Path, without_native: None) -> None:
    source = folder(tmp_path, {"cat/0.jpg": jpeg(9, 9)})
    assert read_ordinary(source, Recipe()) == [None]
