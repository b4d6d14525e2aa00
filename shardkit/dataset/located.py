"""The images or arrays of some rows, located in the index and read one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from shardkit.codecs.decode_errors import raise_interruption
from shardkit.codecs.image_type import MOST_BYTES, RGB, ImageType
from shardkit.codecs.limits import MAX_PIXELS
from shardkit.dataset.handles import ShardFile
from shardkit.dataset.index import FIELDS, HEAD, ROW, Rows, checksum, damaged_rows
from shardkit.errors import CorruptRecord, CorruptShard
from shardkit.kinds.field import Field
from shardkit.record import ABSENT, IMAGE, STORED_KINDS
from shardkit.system import compiled

_RAW_CODE = STORED_KINDS.index("raw")
_ABSENT_CODE = STORED_KINDS.index(ABSENT)
_ARRAY_CODE = STORED_KINDS.index("npy")

_MAP = attrgetter("map")


class EncodedImage(NamedTuple):
    """One image as stored, or the values of an array, or bytes."""

    data: bytes | memoryview
    """Image bytes; the next read overwrites a memoryview."""
    field: str
    """Kind of the image: a name in `STORED_KINDS`."""
    label: int
    width: int
    height: int
    pixels: ImageType = RGB
    """Channels and dtype of the image."""


class Survey(NamedTuple):
    """The largest images of a batch, and the size of all."""

    longest: int
    """Bytes of the longest image."""
    most_pixels: int
    """Pixels of the largest image."""
    width: int
    height: int
    """Width and height of all images, or 0 and 0 if they differ."""


class Origin(Protocol):
    """The methods of a `shardkit.dataset.shardset.ShardSet` that its located rows call."""

    def verifies(self, name: str) -> bool:
        """Return whether each read of a field compares its checksum."""

    def maps(self, name: str) -> bool:
        """Return whether the compiled module may copy a field from mapped shards."""

    def read_via_format(self, row: int, name: str) -> bytes:
        """Return an image or array that its shard does not store as plain bytes."""

    def corrupt(self, row: int, offset: int, reason: str) -> CorruptRecord:
        """Return the error for a damaged record."""


@dataclass
class BatchShards:
    """The shards of the rows of a batch, all open."""

    numbers: npt.NDArray[np.int64]
    """The number of each row's shard."""
    files: Mapping[int, ShardFile]
    """The open shards, by number."""
    sizes: npt.NDArray[np.int64]
    """Bytes of each row's shard."""

    def of_rows(self) -> Sequence[ShardFile]:
        """Return the shard of each row."""
        return [self.files[shard] for shard in self.numbers.tolist()]

    def runs(self) -> Iterable[tuple[slice, npt.NDArray[np.int32]]]:
        """Return all rows as one run."""
        descriptors = np.empty(max(self.files, default=0) + 1, np.int32)
        for shard, file in self.files.items():
            descriptors[shard] = file.descriptor
        return [(slice(None), descriptors[self.numbers])]


def _column(name: str) -> cached_property[list[int]]:
    return cached_property(lambda located: located._index[name].tolist())


class LocatedRows:
    """The images of some rows, located in the index and read one by one.

    The first image that is not in the page cache triggers readahead for all later ones. So the
    caller can decode an image, still in the CPU cache, while the kernel fetches the others. The
    columns of the index are lists, which Python iterates faster than arrays; each is made on first
    use, as the compiled module needs none of them.
    """

    def __init__(
        self,
        dataset: Origin,
        rows: npt.NDArray[np.int64],
        index: Rows,
        files: BatchShards,
        name: str = IMAGE,
    ) -> None:
        self._dataset = dataset
        self._index = index
        self._opened = files
        self.name = name
        """Name of the field."""
        self.verifies = dataset.verifies(name)
        """Whether each read compares the record's checksum."""
        self.entries = memoryview(index.tobytes())
        """The entries of the rows in the index: one `ROW` each."""
        self.array = rows
        self.survey: Survey | None = None
        """From the compiled module; None if it found nothing out."""
        self._announced = len(rows) == 1
        self.pixels: ImageType = RGB
        """Channels and dtype of the images."""

    def sizes(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """Return the width and the height of each image in pixels."""
        return self._index["width"], self._index["height"]

    def targets(self) -> npt.NDArray[np.int64]:
        """Return `labels` as a new array."""
        return self._index["label"].astype(np.int64)

    def examine(
        self,
        field: Field | None,
        raw_shape: tuple[int, int, int] | None,
    ) -> None:
        """Refuse impossible lengths and sizes, before memory is allocated for them.

        This also lets each image state its type. ``raw_shape`` is the height, width and channels of
        raw pixels. Raises CorruptRecord if a row of the index is damaged, or states an impossible
        size.
        """
        sizes = self._opened.sizes
        self.pixels = RGB if field is None else field.image_type
        is_image = self.name == IMAGE or (field is not None and field.type.is_picture)
        size = field.bytes if field is not None and field.is_uniform else 0
        if (is_image and self.pixels.is_rgb) or size:
            height, width, _ = raw_shape or (0, 0, 3)
            kinds = _ARRAY_CODE + 1 if size else _ARRAY_CODE
            usual = compiled.survey(self.entries, sizes, kinds, (width, height), MAX_PIXELS)
            # Shorter arrays than stated are found when they are read.
            if usual is not None and (not size or usual[0] == size):
                self.survey = Survey(*usual)
                return
        self.require_intact()  # finds out what is unusual
        self._require_plausible(field, raw_shape)

    def _require_plausible(
        self,
        field: Field | None,
        raw_shape: tuple[int, int, int] | None,
    ) -> None:
        index = self._index
        lengths = index["length"].astype(np.int64)
        beyond = np.maximum(index["offset"], 0) > self._opened.sizes - lengths
        for number in np.flatnonzero(beyond).tolist():
            # A format that compresses may hold an image larger than its shard.
            packed = index["offset"][number] < 0
            content = self._dataset.read_via_format(self.rows[number], self.name) if packed else b""
            if len(content) != self.lengths[number]:
                raise self.corrupt(number, "it ends beyond its shard")
        height, width, _ = raw_shape or (0, 0, 3)
        bytes_per_pixel = self.pixels.bytes
        most_pixels = min(MAX_PIXELS, MOST_BYTES // bytes_per_pixel)
        pixels = index["width"].astype(np.uint64) * index["height"]  # each has 32 bits
        wrong = np.where(
            index["field"] == _RAW_CODE,
            (index["width"] != width)
            | (index["height"] != height)
            | (lengths != bytes_per_pixel * width * height),
            # 0 x 0 is an unchecked image whose header cannot be read.
            ((pixels == 0) & (index["width"] + index["height"] > 0)) | (pixels > most_pixels),
        )
        if field is not None and field.is_uniform:
            odd = (lengths != field.bytes) & (index["field"] != _ABSENT_CODE)
            if odd.any():
                raise self.corrupt(int(odd.argmax()), f"it does not have the shape {field.shape}")
        if wrong.any():
            number = int(wrong.argmax())
            size = f"{self.widths[number]} x {self.heights[number]}"
            raise self.corrupt(number, f"the index contains an impossible size, {size} pixels")

    def require_intact(self) -> None:
        """Compare the check of each row of the index; CorruptRecord if it differs."""
        for number in damaged_rows(self._index).nonzero()[0].tolist():
            raise self.corrupt(number, "its entry in the index is damaged")

    @cached_property
    def rows(self) -> list[int]:
        """The rows in the dataset."""
        values: list[int] = self.array.tolist()
        return values

    lengths = _column("length")
    """Size of each image in bytes."""
    widths = _column("width")
    """Width of each image in pixels."""
    heights = _column("height")
    """Height of each image in pixels."""
    _offsets = _column("offset")

    @cached_property
    def fields(self) -> list[str]:
        """Kind of each image, in `STORED_KINDS`: `ABSENT` where the row has none."""
        return [STORED_KINDS[code] for code in self._index["field"].tolist()]

    @property
    def longest(self) -> int:
        """Bytes of the longest image."""
        return max(self.lengths, default=0) if self.survey is None else self.survey.longest

    def __len__(self) -> int:
        return len(self.array)

    def read(self, number: int, buffer: memoryview) -> EncodedImage:
        """Read image ``number`` of the rows into ``buffer``, which has room for its length.

        The result is valid until ``buffer`` is overwritten. Raises CorruptRecord if the record is
        damaged.
        """
        start = number * ROW.itemsize
        entry = FIELDS.unpack_from(self.entries, start)
        offset, length, check, label, width, height, kind = entry
        data = buffer[:length]
        try:
            self._fill(number, offset, data)
        except (CorruptShard, OverflowError, KeyError, ValueError) as error:
            raise_interruption(error)
            raise self.corrupt(number, str(error)) from error
        if self.verifies and checksum(self.entries[start:][HEAD], data) != check:
            raise self.corrupt(number, "its checksum does not match")
        return EncodedImage(data, STORED_KINDS[kind], label, width, height, self.pixels)

    @cached_property
    def _files(self) -> Sequence[ShardFile]:
        """The file of each row."""
        return self._opened.of_rows()

    def runs(self) -> Iterator[tuple[slice, memoryview, npt.NDArray[np.int32]]]:
        """Yield rows, their entries, and descriptors that are open until the next rows."""
        for run, descriptors in self._opened.runs():
            rows = range(len(self.array))[run]
            entries = self.entries[rows.start * ROW.itemsize : rows.stop * ROW.itemsize]
            yield run, entries, descriptors

    def maps(self) -> list[Any] | None:
        """Return the map of each row's shard for raw pixels that can be copied from there."""
        return list(map(_MAP, self._files)) if self._dataset.maps(self.name) else None

    def _fill(self, number: int, offset: int, data: memoryview) -> None:
        file = self._files[number]
        if offset < 0:
            data[:] = self._dataset.read_via_format(self.rows[number], self.name)
        elif self._announced or not file.read_cached(offset, data):
            self._announce(number)
            file.read_into(offset, data)

    def _announce(self, number: int) -> None:
        """Issue readahead for all images from the given one on, once."""
        if not self._announced:
            self._announced = True
            for later in range(number, len(self.rows)):
                self._files[later].announce(self._offsets[later], self.lengths[later])

    def corrupt(self, number: int, reason: str) -> CorruptRecord:
        """Return the error for the damaged record at a position."""
        return self._dataset.corrupt(self.rows[number], self._offsets[number], reason)
