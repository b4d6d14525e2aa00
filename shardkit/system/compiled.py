"""Operations of the optional compiled module, `shardkit._native`; no other module calls it.

Python implements the same and is the reference for every byte and every message. So an operation
returns what is left to Python: everything without the module, and all that the module does not
support or finds damaged. It answers with `None` if it did nothing, or with positions in a batch.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import PIL

from shardkit.system import native

Bytes = bytes | bytearray | memoryview
Integers = npt.NDArray[np.int64]
Pixels = npt.NDArray[np.uint8]

TALL_FIRST = int(PIL.__version__.partition(".")[0]) >= 13
"""Whether Pillow scales the height before the width if it shrinks by more than twice as many pixels
(from version 13 on, python-pillow/Pillow#9549). The order changes rounding, by up to 26 levels."""

CROP_NUMBERS = 7
"""Numbers of a crop: left, top, width, height, flip, and height and width of the scaled image."""

FILTERS = ("bilinear", "bicubic", "lanczos", "box")
"""Names of Pillow's filters that the module has, as numbered in ``native/core.h``."""

_WHITE = 255, 255, 255

_MOST_SIDE = 65535
"""Maximum side of a sample: that of a JPEG."""


def is_available() -> bool:
    """Return whether the module is installed and not disabled."""
    return native.module() is not None


def _call(name: str, *arguments: object) -> Any:
    """Return the result of a function of the module, of any type; None without the module."""
    compiled = native.module()
    return None if compiled is None else getattr(compiled, name)(*arguments)


# ---- Reading a batch ----


class CropTable(NamedTuple):
    """The crops of a batch of images, and how they are scaled."""

    numbers: npt.NDArray[np.int32]
    """One row of `CROP_NUMBERS` for each image, C-contiguous."""
    bicubic: bool
    oversample: float
    """As in `shardkit.torch.data.ops.ImageOp`."""


class View(NamedTuple):
    """The samples that one view of a batch of images makes of them."""

    out: Pixels
    """Destination, uint8 of shape (N, height, width, 3), C-contiguous. Images that are left to
    Python are undefined there."""
    table: CropTable | None
    """The crop of each image; None for full images of the size of ``out``."""


class IndexedRows(Protocol):
    """Rows of a dataset and their entries in the index: a `shardkit.dataset.located.LocatedRows`.

    Every operation checks each number of an entry, since it may be damaged.
    """

    array: Integers
    """The rows, to `mark` the one being read."""
    verifies: bool
    """Whether to compare checksums."""

    def __len__(self) -> int: ...

    def runs(self) -> Iterator[tuple[slice, memoryview, npt.NDArray[np.int32]]]:
        """Yield rows that follow one another, their entries, and the descriptors of their files.

        The files are open until the next rows.
        """

    def maps(self) -> list[Any] | None:
        """Return the map of each row's shard, from `map_file`; None to copy nothing from maps."""


def fill(
    rows: IndexedRows,
    out: Pixels,
    table: CropTable | None = None,
    *,
    background: tuple[int, int, int] = _WHITE,
    mark: Integers | None = None,
) -> Sequence[int]:
    """Read, check, decode, crop and scale images into ``out``, and return those left to Python.

    They are positions in the batch, ascending. ``out`` and ``table`` are as in `View`, and
    ``background`` is the RGB color under transparent pixels. ``mark`` receives the row being read,
    shape (1,).
    """
    return fill_views(rows, [View(out, table)], background=background, mark=mark)[0]


def fill_views(
    rows: IndexedRows,
    views: Sequence[View],
    *,
    background: tuple[int, int, int] = _WHITE,
    mark: Integers | None = None,
) -> list[Sequence[int]]:
    """Fill views of the same images as `fill` does; each image is read once, and decoded once.

    One call releases the GIL once. In Python, a batch of 64 raw images takes about 3 ms, of which
    1 ms is Python that holds the GIL, in 64 parts.

    Return positions in the batch of the images left to Python, ascending, for each view.
    """
    compiled = native.module()
    sides = [side for view in views for side in view.out.shape[1:3]]
    if compiled is None or not 0 < min(sides) <= max(sides) <= _MOST_SIDE:
        return [range(len(rows))] * len(views)
    codes = [memoryview(bytearray(len(rows.array))) for _ in views]
    for run, entries, files in rows.runs():
        array = None if mark is None else np.ascontiguousarray(rows.array[run])
        calls = []
        for (out, table), view_codes in zip(views, codes, strict=True):
            numbers, bicubic, oversample = (None, False, 1.0) if table is None else table
            crops = None if numbers is None else numbers[run]
            maps = rows.maps() if out.nbytes >= compiled.LEAST_MAPPED else None
            stored = entries, files, maps, crops, array, mark, rows.verifies, rows.verifies
            options = background, bicubic, TALL_FIRST, oversample
            calls.append((out[run], *out.shape[1:3], *stored, *options, view_codes[run]))
        if len(calls) == 1:
            compiled.fill(*calls[0])
        else:
            compiled.fill_views(*calls)
    return list(map(_unhandled, codes))


def fill_values(
    rows: IndexedRows, out: npt.NDArray[np.uint8], mark: Integers | None = None
) -> Sequence[int]:
    """Read and check arrays of one size into ``out``, and return those left to Python.

    They are positions in the batch, ascending. ``out`` is uint8 of shape (N, bytes), C-contiguous;
    ``mark`` is as for `fill`.
    """
    compiled = native.module()
    if compiled is None:
        return range(len(rows))
    codes = memoryview(bytearray(len(rows.array)))
    for run, *stored in rows.runs():
        compiled.fill_values(
            out[run],
            out.shape[1],
            *stored,
            rows.maps() if out.nbytes >= compiled.LEAST_MAPPED else None,
            None if mark is None else np.ascontiguousarray(rows.array[run]),
            mark,
            rows.verifies,
            codes[run],
        )
    return _unhandled(codes)


def read_stored(
    rows: IndexedRows, mark: Integers | None = None
) -> tuple[list[bytes | None], Sequence[int]]:
    """Return the stored bytes of a batch, and the positions left to Python, whose bytes are wrong.

    ``rows`` are images, or other fields of bytes, whose entries `survey` accepts.
    """
    compiled = native.module()
    if compiled is None:
        return [None] * len(rows), range(len(rows))
    codes = memoryview(bytearray(len(rows.array)))
    values: list[bytes | None] = []
    for run, *stored in rows.runs():
        array = None if mark is None else np.ascontiguousarray(rows.array[run])
        values += compiled.read_stored(*stored, array, mark, rows.verifies, codes[run])
    return values, _unhandled(codes)


def _unhandled(codes: memoryview) -> list[int]:
    return [position for position, code in enumerate(codes) if code] if any(codes) else []


def map_file(descriptor: int, size: int) -> Any | None:
    """Map a file, for `fill` and `fill_values`; return None if it cannot be mapped.

    Python must not touch the pages: if the file is truncated, they raise SIGBUS. The module touches
    them in a helper process (``native/copy.c``).
    """
    return _call("map_file", descriptor, size)


def survey(
    entries: memoryview, sizes: Integers, kinds: int, size: tuple[int, int], most_pixels: int
) -> tuple[int, int, int, int] | None:
    """Return the most bytes and pixels of the images of a batch, and width and height of all.

    ``entries`` are those of the index, end to end, and ``sizes`` the bytes of each row's shard. The
    first ``kinds`` of `shardkit.record.STORED_KINDS` are usual; planes always are. ``size`` is
    width and height of raw pixels. The returned width and height are 0 if they differ. None if any
    entry is damaged or unusual.
    """
    return _call("survey", entries, sizes, kinds, *size, most_pixels)


def check_entries(entries: npt.NDArray[Any], kinds: int) -> npt.NDArray[np.bool_] | None:
    """Return whether each entry of an index has a wrong check, or a kind from ``kinds`` on."""
    compiled = native.module()
    if compiled is None:
        return None
    damaged = np.empty(len(entries), np.bool_)
    compiled.check_entries(entries.tobytes(), kinds, damaged)
    return damaged


# ---- Pixels ----


def resize(
    pixels: Pixels, box: tuple[float, float, float, float], size: tuple[int, int], filter_: str
) -> Pixels | None:
    """Scale a box of an image as Pillow does, bit for bit, in a third of the time; or return None.

    Pixels are uint8 of shape (height, width, 3). The box is left, top, right and bottom, inside the
    image; ``size`` is height and width, and ``filter_`` one of `FILTERS`.
    """
    height, width = pixels.shape[:2]
    out = np.empty((*size, 3), np.uint8)
    options = FILTERS.index(filter_), TALL_FIRST
    pixels = np.ascontiguousarray(pixels)
    return out if _call("resize", pixels, width, height, box, out, *size[::-1], *options) else None


def finish_planes(
    record: Bytes, size: tuple[int, int], region: tuple[int, int, int, int], out: Pixels
) -> bool:
    """Convert a region of a record of planes to RGB in ``out``; return whether it did.

    The header of the record (see `shardkit.codecs.planes`) must state ``size``, width and height.
    The region is left, top, width and height; ``out`` is uint8 of shape (height, width, 3).
    """
    return out.flags.c_contiguous and bool(_call("finish_planes", record, *size, region, out))


def draw_crops(
    draws: tuple[int, npt.NDArray[np.uint64]],
    sizes: tuple[Integers, Integers],
    scale: tuple[float, float],
    ratio: tuple[float, float],
    flip: float,
) -> npt.NDArray[np.int32] | None:
    """Return crops as rows of `CROP_NUMBERS`; see `shardkit.torch.data.ops.RandomResizedCrop`.

    ``draws`` are the key of the random numbers, and the number of each sample; ``sizes`` are widths
    and heights of the images in pixels. ``scale`` is the range of the area, as a fraction of the
    image, ``ratio`` that of width divided by height, and ``flip`` the probability of a horizontal
    flip.
    """
    key, numbers = draws
    logs = math.log(ratio[0]), math.log(ratio[1])
    crops = np.empty((len(numbers), CROP_NUMBERS), np.int32)
    ranges = tuple(scale), tuple(ratio), logs, flip
    return crops if _call("draw_crops", key, numbers, *sizes, *ranges, crops) else None


def copy_crops(
    out: Pixels,
    images: tuple[Pixels, int, int, int, int],
    positions: Integers,
    draws: tuple[int, npt.NDArray[np.uint64]],
    flip: float,
) -> bool:
    """Copy crops that `RandomCrop` draws from RGB images in memory; return whether it did.

    ``images`` are bytes, the distance of lines in pixels, that of images in lines, and width and
    height of the margins. ``out`` is as in `View`, and ``draws`` and ``flip`` as for `draw_crops`.
    """
    return bool(_call("copy_crops", out, *out.shape[1:3], *images, positions, *draws, flip))


def decode_png(data: Bytes, background: tuple[int, int, int] | None) -> npt.NDArray[Any] | None:
    """Decode an ordinary PNG as `shardkit.codecs.image.decode` does, or as its ``decode_mask``.

    Return uint8 of shape (height, width, 3), with ``background`` under transparent pixels; if that
    is None, values as they are stored, perhaps uint16. None if it did nothing.
    """
    decoded = _call("decode_png", data, bytes(background or ()), False)
    if decoded is None:
        return None
    height, width, channels, content = decoded
    wide = len(content) > height * width * channels
    pixels = np.frombuffer(content, np.uint16 if wide else np.uint8)
    return pixels.reshape((height, width) if channels == 1 else (height, width, channels))


def decode_png16(data: Bytes) -> npt.NDArray[np.uint16] | None:
    """Decode an ordinary PNG of 16 bits per sample without reducing them, as Pillow does.

    Return uint16 of shape (height, width, channels): 1 for gray, 2 with alpha, 3 for RGB, 4 with
    alpha, and no color is transparent. None if it did nothing, as for PNGs of fewer bits.
    """
    decoded = _call("decode_png", data, b"", True)
    if decoded is None:
        return None
    height, width, channels, content = decoded
    return np.frombuffer(content, np.uint16).reshape(height, width, channels)


# ---- Images of a conversion ----
#
# In Python, a 2-KB file costs about 100 us, of which reading is 10. These handle what is common
# (plain PNGs; JPEGs without EXIF, extra frames, warnings), or exactly what shardkit writes.

Measures = npt.NDArray[Any]
"""Receives `shardkit.codecs.measures.MEASURES`."""
Waves = npt.NDArray[np.int16]
"""`shardkit.codecs.measures.WAVES`."""


def inspect_jpeg(data: bytes) -> tuple[int, int] | None:
    """Return width and height of a JPEG without EXIF data and further frames."""
    return _call("inspect_jpeg", data)


def jpeg_decodes(data: bytes) -> bool:
    """Return whether a JPEG certainly decodes without a warning; False means unknown."""
    return bool(_call("jpeg_decodes", data))


def jpeg_header(data: Bytes) -> tuple[int, int, int] | str | None:
    """Return width, height and number of components of a JPEG, or libjpeg's first warning or error.

    None without the module.
    """
    return _call("jpeg_header", data)


def decode_jpeg(data: Bytes, out: Pixels, eighths: int) -> str | None:
    """Decode a JPEG; return libjpeg's first warning or error. This requires the module.

    ``out`` is uint8 of shape (height, width, channels), C-contiguous, of exactly the scaled size;
    gray, RGB or CMYK. The scale is ``eighths``, 1 to 8.
    """
    compiled = native.module()
    assert compiled is not None, "jpeg_header returned the size of the image"
    height, width, channels = out.shape
    reason: str | None = compiled.decode_jpeg(data, out, width, height, channels, eighths)
    return reason


def scale_jpeg(
    data: bytes, size: tuple[int, int], eighths: int, to: tuple[int, int], filter_: str
) -> Pixels | None:
    """Decode a JPEG and scale it as Pillow does, strip by strip, which stays in the CPU cache.

    Its header states ``size``, width and height. It is decoded at a scale of ``eighths``, 1 to 8,
    and scaled to the width and height ``to`` by ``filter_``, one of `FILTERS`. Return uint8 of
    shape (height, width, 3); None if it has a warning or another size, is CMYK, or must be scaled
    down before it is scaled across.
    """
    box = 0.0, 0.0, size[0] * eighths / 8, size[1] * eighths / 8
    out = np.empty((to[1], to[0], 3), np.uint8)
    options = FILTERS.index(filter_), TALL_FIRST
    return out if _call("scale_jpeg", data, *size, eighths, box, out, *to, *options) else None


def encode_jpeg(pixels: Pixels, quality: int) -> bytes | None:
    """Encode pixels of shape (height, width, channels), 1 or 3, as Pillow does; or return None."""
    height, width, channels = pixels.shape
    return _call("encode_jpeg", np.ascontiguousarray(pixels), width, height, channels, quality)


def jpeg_planes(data: bytes) -> tuple[int, int, int, bytes] | None:
    """Return width, height, sampling (420, 422, 444, or 400 for gray) and the planes of a JPEG.

    None if it has a warning or no such planes, or without the module.
    """
    return _call("jpeg_planes", data)


class FileHeader(NamedTuple):
    """Header of an image file: ``sk_image`` in ``native/convert.h``."""

    width: int
    height: int
    kind: int
    """Position in `shardkit.record.STORED_KINDS`."""
    decodes: int
    """Whether the image certainly decodes."""
    channels: int
    """Channels of a PNG whose packed pixels are the range of the next two values; else 0."""
    packed: int
    packed_size: int


_HEADER = np.dtype(
    list(zip(FileHeader._fields, ("<u4", "<u4", "u1", "u1", "<u2", "<u4", "<u4"), strict=True))
)


class ImageFiles(NamedTuple):
    """Image files that the module has read: one item for each."""

    contents: list[bytes | None]
    """None for files that are left."""
    headers: list[FileHeader]
    codes: list[int]
    """0 if the file needs no other look; otherwise Python reads its metadata."""


def read_images(
    paths: Sequence[bytes],
    stats: tuple[Integers, Integers],
    *,
    decode: bool,
    measuring: tuple[Measures, Waves] | None,
) -> ImageFiles | None:
    """Read and inspect image files; check the pixels if ``decode``.

    ``stats`` are size and modification time in nanoseconds of each; other files are left.
    ``measuring`` receives the measures of images that are decoded, by its waves.
    """
    compiled = native.module()
    if compiled is None:
        return None
    headers = np.zeros(len(paths), _HEADER)
    codes = np.zeros(len(paths), np.uint8)
    measures, waves = measuring or (None, None)
    contents = compiled.read_images(
        paths,
        *stats,
        decode,
        headers.view(np.uint8),
        codes,
        waves,
        bytearray() if measures is None else measures.view(np.uint8),
    )
    return ImageFiles(contents, list(map(FileHeader._make, headers.tolist())), codes.tolist())


def read_files(
    paths: Sequence[bytes], stats: tuple[Integers, Integers], head: bytes
) -> list[bytes | None]:
    """Return what follows ``head`` in files, None for each that is left; see `read_images`."""
    codes = np.zeros(len(paths), np.uint8)
    return _call("read_files", paths, *stats, head, codes) or [None] * len(paths)


def read_heads(paths: Sequence[bytes], length: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield size, modification time and the first ``length`` bytes of files; -1 if one is left."""
    sizes, stamps = np.full((2, len(paths)), -1, np.int64)
    heads = bytearray(length * len(paths))
    _call("read_heads", paths, length, heads, sizes, stamps)
    cut = (bytes(heads[start : start + length]) for start in range(0, len(heads), length))
    return zip(sizes.tolist(), stamps.tolist(), cut, strict=True)


def measure(pixels: Pixels, extent: tuple[int, int], waves: Waves, measures: Measures) -> bool:
    """Measure pixels of shape (height, width, 3), C-contiguous; return whether it did.

    ``extent`` is width and height of the picture in 1/8 pixel.
    """
    height, width = pixels.shape[:2]
    return bool(_call("measure", pixels, width, height, extent, waves, measures.view(np.uint8)))


def measure_jpeg(data: Bytes, size: tuple[int, int], waves: Waves, measures: Measures) -> bool:
    """Measure an ordinary JPEG of that width and height; return whether it did."""
    return bool(_call("measure_jpeg", data, *size, waves, measures.view(np.uint8)))


def measure_png(rows: bytes, shape: tuple[int, int, int], waves: Waves, measures: Measures) -> bool:
    """Measure the unpacked rows of a PNG of that width, height and channels."""
    if shape[2] not in (1, 3):
        return False
    return bool(_call("measure_png", rows, *shape, waves, measures.view(np.uint8)))


# ---- Shards and records ----

WalkResult = tuple[tuple[int, int, list[bytes], bytes, bytes, bytes, bytes], bytes]
"""The result of a walk; see `shardkit.formats.table.as_walked`."""


def crc32(data: Bytes) -> int:
    """Return the CRC-32 of ``data``, as zlib does."""
    compiled = native.module()
    return zlib.crc32(data) if compiled is None else compiled.crc32(data, 0)


def crc32_contribution(data: Bytes, following: int) -> int | None:
    """Return what a range of bytes contributes to the CRC-32 of all of them.

    ``following`` is the number of the bytes that follow it.
    """
    return _call("crc32_contribution", data, following)


def record_checksums(records: Sequence[object]) -> list[int] | None:
    """Return `shardkit.record.checksums` of records."""
    return _call("record_checksums", records)


Headers = Mapping[str, tuple[bytes, int]]
"""Bytes before the stored values of fields, and the sizes that these values must have."""


def tar_members(records: Sequence[object], small: int, headers: Headers) -> list[bytes] | None:
    """Return records as tar members; those below ``small`` bytes are joined with others."""
    return _call("tar_members", records, small, dict(headers))


def lmdb_items(
    records: Sequence[object], row: int, headers: Headers
) -> list[tuple[bytes, bytes]] | None:
    """Return key and value of each field of records as LMDB stores them, from ``row`` on."""
    return _call("lmdb_items", records, row, dict(headers))


def ranges_start(descriptor: int, offsets: Integers, start: bytes) -> bool:
    """Return whether ranges of a file start with these bytes; False means unknown."""
    return bool(_call("ranges_start", descriptor, np.ascontiguousarray(offsets), start))


def walk_tar(descriptor: int, size: int, start: int, stop: int) -> WalkResult | None:
    """Find the fields of all records of a tar file between two offsets."""
    return _call("walk_tar", descriptor, size, start, stop)


def walk_lmdb(descriptor: int, size: int) -> WalkResult | None:
    """Find the fields of all records of an LMDB file."""
    return _call("walk_lmdb", descriptor, size)


def index_records(
    descriptor: int,
    kinds: Mapping[str, int],
    table: tuple[Integers, Integers, Integers | None, bytes, Integers, int],
    memory: tuple[bytes | memoryview, int],
    out: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32] | None],
) -> tuple[list[str], npt.NDArray[np.uint8]] | None:
    """Index records of a shard, reading one at a time.

    ``kinds`` are name and number of each field of `shardkit.formats.table.Table`, and ``table`` its
    offsets, lengths, labels, text, ends and start. ``memory`` is bytes of the file that are in
    memory, and their offset. ``out`` receives the index, and the checksums if they are needed.
    Return the source paths, and a code for each record: 0 if its index is valid, else it is left.
    """
    compiled = native.module()
    if compiled is None:
        return None
    codes = np.zeros(len(table[0]), np.uint8)
    numbers = bytes(kind & 0xFF for kind in kinds.values())
    names = tuple(name.encode() for name in kinds)
    paths = compiled.index_records(descriptor, names, numbers, *table, *memory, *out, codes)
    return paths, codes
