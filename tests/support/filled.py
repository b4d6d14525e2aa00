"""Images that the compiled module reads from a file, and what Python makes of the same ones."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from helpers import Pixels

from shardkit.codecs.geometry import Region
from shardkit.codecs.image import EXACT, Decoding
from shardkit.dataset.decode import decode_stored
from shardkit.dataset.index import pack_row
from shardkit.dataset.located import EncodedImage, LocatedRows
from shardkit.errors import BadImage
from shardkit.system.compiled import CropTable, fill, map_file
from shardkit.torch.data.ops import Crop, ImageOp, as_crop_table


class Stored(NamedTuple):
    """An image, and what the index says of it."""

    data: bytes
    width: int
    height: int
    field: str = "jpg"

    @property
    def encoded(self) -> EncodedImage:
        return EncodedImage(self.data, self.field, 0, self.width, self.height)


DISK = "/var/tmp"
"""A folder that is not in memory, whose pages the kernel would not answer for."""


class Located:
    """Images in a temporary file, as `fill` needs `LocatedRows` to be; each is there once."""

    def __init__(
        self, images: Iterable[Stored], *, verifies: bool = True, mapped: bool = False
    ) -> None:
        packed: dict[int, bytes] = {}
        images = list(images)
        with tempfile.TemporaryFile(dir=DISK if mapped else None) as file:
            for image in images:
                if id(image) in packed:
                    continue
                offset, (data, *size, field) = file.tell(), image
                file.write(data)
                packed[id(image)] = pack_row(
                    offset=offset, image=data, label=0, size=(size[0], size[1]), field=field
                )
            file.flush()
            self.descriptor = os.dup(file.fileno())
            self.size = file.tell()
        self.entries = memoryview(bytearray(b"".join(packed[id(image)] for image in images)))
        self.array = np.arange(100, 100 + len(images))
        self.verifies = verifies
        self.survey = ()
        self.map = map_file(self.descriptor, self.size) if mapped else None

    def __del__(self) -> None:
        os.close(self.descriptor)

    def __len__(self) -> int:
        return len(self.array)

    def runs(self) -> Iterator[tuple[slice, memoryview, npt.NDArray[np.int32]]]:
        files = np.full(len(self), self.descriptor, np.int32)
        yield slice(None), self.entries, files

    def maps(self) -> list[Any] | None:
        return None if self.map is None else [self.map] * len(self)

    def as_rows(self) -> LocatedRows:
        return cast(LocatedRows, self)


def fill_pieces(
    images: Sequence[Stored], op: ImageOp, crops: list[Crop], how: Decoding = EXACT
) -> tuple[Pixels, Sequence[int]]:
    """Return the samples that the compiled module makes, and the positions that it left."""
    out = np.full((len(images), *crops[0].size, 3), 77, np.uint8)
    rows, table = Located(images).as_rows(), as_crop_table(op, crops)
    return out, fill(rows, out, table, background=how.background)


def fill_region(data: bytes, size: tuple[int, int], eighths: int, region: Region) -> Pixels | None:
    """Return a region of a JPEG as the compiled module decodes it; None if it does not."""
    if eighths != 8:
        return None
    numbers = np.array([[*region, 0, 0, 0]], np.int32)
    out = np.empty((1, region.height, region.width, 3), np.uint8)
    found = Located([Stored(data, *size)])
    left = fill(found.as_rows(), out, CropTable(numbers, bicubic=False, oversample=1.0))
    return None if left else out[0]


def python_whole(image: Stored, how: Decoding = EXACT) -> Pixels | None:
    """Return an image as Python decodes it; None if it is bad."""
    try:
        return decode_stored(image.encoded, how)
    except BadImage:
        return None


def fill_whole(image: Stored, how: Decoding = EXACT) -> Pixels | None:
    """Return an image as the compiled module decodes it; None if it does not."""
    out = np.empty((1, image.height, image.width, 3), np.uint8)
    rows = Located([image]).as_rows()
    left = fill(rows, out, background=how.background)
    return None if left else out[0]
