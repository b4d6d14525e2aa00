"""The compiled module: what it fills equals what Python gives, or Python refuses it too."""

from __future__ import annotations

import contextlib
import os
import random
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import numpy.typing as npt
from filled import Located
from PIL import Image

from scripts.fuzzing.material import RAW_SHAPE, image_file, pictures
from scripts.fuzzing.pieces import mutated_jpeg
from scripts.fuzzing.pngs import mutated_png
from scripts.fuzzing.target import Target, broken
from shardkit.codecs.image import EXACT, Pixels, inspect
from shardkit.codecs.limits import MAX_PIXELS
from shardkit.codecs.planes import from_rgb
from shardkit.codecs.quiet import silence_libtiff
from shardkit.dataset.decode import decode_stored
from shardkit.dataset.index import HEAD, ROW, checksum, pack_row, row_check
from shardkit.dataset.located import EncodedImage
from shardkit.errors import BadImage, CorruptRecord
from shardkit.record import IMAGE_FIELDS, PLANES, STORED_KINDS
from shardkit.sampling.order import BatchDraws, Draws
from shardkit.system import native
from shardkit.system.compiled import fill, map_file, read_stored
from shardkit.torch.data.crops import CenterCrop, RandomResizedCrop, Resize
from shardkit.torch.data.ops import Crop, ImageOp, as_crop_table, select_crop_table

_VERIFIES, _MAPPED = 1, 4

_OPERATIONS: tuple[ImageOp | None, ...] = (
    None,
    CenterCrop(6),
    CenterCrop((9, 7), resize=10),
    RandomResizedCrop((6, 5), oversample=2.0),
    RandomResizedCrop(4, filter="bicubic"),
    Resize((5, 8)),
    CenterCrop(1190),  # large enough to be copied from a map
    None,
)

_MOST_IMAGES = 8
_MOST_SIDE = 1 << 11
_LARGE = 1 << 21
"""Pixels above which an image or a batch is not decoded here."""
_FILE = 6 << 20
"""Size of a file that is mapped; what the input does not fill is zeros."""


class NativeTarget(Target):
    """An input is flags, an operation, a seed, rows of an index, and the file of their images.

    Its bytes: flags, operation, seed, number of rows; 32 bytes for each row; the file.
    """

    name = "native"
    tokens = (
        *(b"\xff\xd8", b"\xff\xd9", b"\xff\xda", b"\xff\xc0\x00\x11\x08"),
        *(b"\xff" * 8, b"\0" * 8),
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        silence_libtiff()
        height, width, _ = RAW_SHAPE
        raw = bytes(range(3 * width * height))
        jpegs = [
            image_file("JPEG", quality=80),
            image_file("JPEG", "L"),
            image_file("JPEG", subsampling=0),
        ]
        photographs = [(each, (12, 9), "jpg") for each in jpegs]
        pixels = [(raw, (width, height), "raw")]
        planes = [(record, (12, 9), PLANES) for record in pictures()[PLANES]]
        for number in range(len(_OPERATIONS) - 2):
            self.seeds.append(_input(number % 2, number, photographs))
            self.seeds.append(_input(number % 2, number, [(*photographs[0][:2], "jpg"), *pixels]))
            self.seeds.append(_input(number % 2, number, planes))
        wide = Image.fromarray(np.arange(3 * 250 * 260).reshape(250, 260, 3).astype(np.uint8))
        for sampling in ("420", "444"):  # of which a crop needs some bands only
            record = from_rgb(np.asarray(wide), sampling)
            for number in range(len(_OPERATIONS) - 2):
                self.seeds.append(_input(_VERIFIES, number, [(record, wide.size, PLANES)]))
        large = [(bytes(3 * 1190 * 1190), (1190, 1190), "raw")]
        self.seeds.append(_input(_MAPPED, 6, large)[:4096])
        self.seeds.append(_input(_MAPPED, 7, large)[:4096])
        self.seeds.append(_input(_VERIFIES, 0, [(image_file("JPEG", "CMYK"), (12, 9), "jpg")]))
        for number in range(40):  # half of them keep a header
            for field, mutated in (("jpg", mutated_jpeg), ("png", mutated_png)):
                image = mutated(random.Random(number))
                with contextlib.suppress(BadImage):
                    info = inspect(image, field)
                    size = info.width, info.height
                    if info.width * info.height <= _LARGE:
                        self.seeds.append(_input(number % 2, number % 6, [(image, size, field)]))

    def check(self, data: bytes) -> str:
        flags, choice, seed, count = data[:4].ljust(4, b"\0")
        count = 1 + count % _MOST_IMAGES
        rows, content = data[4 : 4 + ROW.itemsize * count], data[4 + ROW.itemsize * count :]
        if len(rows) != ROW.itemsize * count:
            return "short"
        index = np.frombuffer(rows, ROW)
        file = _File(self.folder / "shard", content, rows, flags)
        _check_survey(index, rows, file.size)
        _check_stored(file, index)
        return _check_fill(file, index, _OPERATIONS[choice % len(_OPERATIONS)], seed)

    def mend(self, data: bytes, rng: random.Random) -> bytes:
        """Make the checks of the rows, and usually the checksums of the images, fit."""
        count = 1 + data[3] % _MOST_IMAGES if len(data) > 3 else 0
        end = 4 + ROW.itemsize * count
        found, content = bytearray(data), data[end:]
        for start in range(4, min(end, len(found)) - ROW.itemsize + 1, ROW.itemsize):
            row = found[start : start + ROW.itemsize]
            offset, length = int.from_bytes(row[:8], "little"), int.from_bytes(row[8:12], "little")
            if rng.random() < 0.8:
                image = content[offset : offset + length]
                row[12:16] = checksum(row[HEAD], image).to_bytes(4, "little")
            if rng.random() < 0.9:
                row[HEAD.stop :] = row_check(row)
            found[start : start + ROW.itemsize] = row
        return bytes(found)


Images = list[tuple[bytes, tuple[int, int], str]]


def _input(flags: int, choice: int, images: Images) -> bytes:
    rows, content = b"", b""
    for image, size, field in images:
        rows += pack_row(offset=len(content), image=image, label=1, size=size, field=field)
        content += image
    return bytes((flags, choice, 7, len(images) - 1)) + rows + content


class _File(Located):
    """A file with any content, whose rows may state anything."""

    def __init__(self, path: Path, content: bytes, rows: bytes, flags: int) -> None:
        self.entries, self.verifies = memoryview(rows), bool(flags & _VERIFIES)
        self.array = np.arange(len(rows) // ROW.itemsize)
        self.survey = ()
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.pwrite(self.descriptor, content, 0)
        self.map = None
        if flags & _MAPPED:
            os.truncate(self.descriptor, _FILE)
            self.map = map_file(self.descriptor, 2 * _FILE)  # half of it has no file
        self.size = os.fstat(self.descriptor).st_size

    def read(self, row: np.void) -> bytes:
        """Return the image of a row.

        Raises:
            CorruptRecord: If it is not in the file, or has another checksum.
        """
        offset, length = int(row["offset"]), int(row["length"])
        if not 0 <= offset <= self.size - length:
            raise CorruptRecord("it is not in the file")
        data = os.pread(self.descriptor, length, offset)
        if self.verifies and checksum(row.tobytes()[HEAD], data) != row["checksum"]:
            raise CorruptRecord("it has another checksum")
        return data


def _check_survey(index: npt.NDArray[Any], rows: bytes, size: int) -> None:
    """Compare the sum of the rows with that of Python."""
    compiled = native.module()
    if compiled is None:
        return
    height, width, _ = RAW_SHAPE
    sizes = np.full(len(index), size, np.int64)
    found = compiled.survey(rows, sizes, STORED_KINDS.index("npy"), width, height, MAX_PIXELS)
    if all(_is_usual(row, size) for row in index):
        pixels = [int(row["width"]) * int(row["height"]) for row in index]
        shapes = {(int(row["width"]), int(row["height"])) for row in index}
        same = shapes.pop() if len(shapes) == 1 else (0, 0)
        if found != (int(index["length"].max()), max(pixels), *same):
            broken("the sum of the rows is another", found)
    elif found is not None:
        broken("a damaged or impossible row is accepted", found)


def _check_stored(file: _File, index: npt.NDArray[Any]) -> None:
    if index["length"].max() > _LARGE:
        return
    values, left = read_stored(file.as_rows())
    for number, row in enumerate(index):
        try:
            expected = file.read(row)
        except CorruptRecord:
            if number not in left and row["length"]:  # the survey finds no bytes beyond the end
                broken("damaged bytes are returned", number)
        else:
            if number not in left and values[number] != expected:
                broken("other bytes are returned", number)


def _is_image(row: np.void) -> bool:
    return bool(row["field"] < len(STORED_KINDS) and STORED_KINDS[row["field"]] in IMAGE_FIELDS)


def _is_usual(row: np.void, size: int) -> bool:
    if row_check(row.tobytes()) != row["check"].tobytes() or not _is_image(row):
        return False
    offset, length, width, height = (int(row[n]) for n in ("offset", "length", "width", "height"))
    if not 0 <= offset <= size - length:
        return False
    if STORED_KINDS[row["field"]] == "raw":
        return (height, width, 3) == RAW_SHAPE and length == 3 * width * height
    return width * height <= MAX_PIXELS and (width * height > 0 or width == height == 0)


def _check_fill(file: _File, index: npt.NDArray[Any], op: ImageOp | None, seed: int) -> str:
    """Compare the images that the module fills with those of Python."""
    widths, heights = index["width"], index["height"]
    size = (int(heights[0]), int(widths[0])) if op is None else op.fixed_size
    areas = widths.astype(np.uint64) * heights
    if size is None or areas.max() > _LARGE or 0 in areas:
        return "large or empty"
    if max(size) > _MOST_SIDE or size[0] * size[1] * len(index) > _LARGE:
        return "large or empty"
    work = _Work(op, _crops(op, widths, heights, seed))
    table = None
    if op is not None:
        table = as_crop_table(op, work.crops)
        draws = partial(BatchDraws, seed, list(range(len(index))))
        at_once = select_crop_table(op, widths, heights, draws)
        if at_once is not None and not (
            table is not None and np.array_equal(at_once.numbers, table.numbers)
        ):
            broken("crops made at once are others", at_once.numbers.tolist())
    out = np.zeros((len(index), *size, 3), np.uint8)
    left = fill(file.as_rows(), out, table)
    found = {
        _compare(file, row, None if number in left else out[number], work, number)
        for number, row in enumerate(index)
    }
    return ", ".join(sorted(found))


class _Work(NamedTuple):
    """What becomes of the images."""

    op: ImageOp | None
    crops: list[Crop]

    def do(self, image: EncodedImage, number: int) -> Pixels:
        """Return the sample that Python makes of an image.

        Raises:
            BadImage: If it cannot be decoded.
        """
        if self.op is None:
            return decode_stored(image)
        return self.op.render(image, self.crops[number], EXACT)


def _crops(
    op: ImageOp | None, widths: npt.NDArray[Any], heights: npt.NDArray[Any], seed: int
) -> list[Crop]:
    if op is None:
        return []
    return op.crops(widths.tolist(), heights.tolist(), partial(Draws, seed))


def _compare(file: _File, row: np.void, found: Pixels | None, work: _Work, number: int) -> str:
    """Compare one sample, None if it was left to Python, with that of Python."""
    try:
        with mock.patch("shardkit.system.compiled.decode_png", return_value=None):
            expected = work.do(_image(file, row), number)
    except CorruptRecord:
        if found is not None and not _is_as_stored(file, row, found, work, number):
            broken("a damaged image is filled", number)
        return "refused" if found is None else "damaged elsewhere"
    except BadImage:
        if found is not None and work.op is None:
            broken("an image that cannot be decoded is filled", number)
        return "refused" if found is None else "damaged below"
    if found is None:
        return "left to Python"
    if not np.array_equal(found, expected):
        scaled = not (isinstance(work.op, CenterCrop) and work.op.resize is None)
        if work.op is None or not scaled or not _warnings(_image(file, row)):
            broken("other pixels", (number, int(row["field"])))
        return "damaged below"  # Python sees it, and decodes all pixels exactly
    return "equal"


def _is_as_stored(file: _File, row: np.void, found: Pixels, work: _Work, number: int) -> bool:
    """Return whether a sample is that of damaged planes, whose damage it need not read."""
    if STORED_KINDS[row["field"]] != PLANES:
        return False
    with mock.patch.object(file, "verifies", False):
        return np.array_equal(found, work.do(_image(file, row), number))


def _warnings(image: EncodedImage) -> list[str]:
    found: list[str] = []
    decode_stored(image, warnings=found)
    return found


def _image(file: _File, row: np.void) -> EncodedImage:
    data = file.read(row)
    if not _is_image(row):
        raise CorruptRecord("it is of no kind")
    field = STORED_KINDS[row["field"]]
    return EncodedImage(data, field, int(row["label"]), int(row["width"]), int(row["height"]))
