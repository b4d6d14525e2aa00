"""Shards of samples with columns: what MDS (MosaicML Streaming) and LitData have in common.

A shard is the number of samples, the offset of each sample and of the end, all uint32, perhaps more
of the writer's, and the samples. A sample is the size of each column, uint32, then the values.
"""

from __future__ import annotations

import json
import math
import struct
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from shardkit.contracts import AttachableSource, Entry, Images, Located
from shardkit.errors import BadImage, UsageError, setting
from shardkit.kinds.packing import with_fields
from shardkit.kinds.picture import as_png
from shardkit.record import FOREIGN_FIELD, NO_LABEL, Record
from shardkit.sources.columns import NONE, PARSED, Column, ColumnOptions, Columns
from shardkit.sources.driver import ListedSource, Listing, Row, images_by_file
from shardkit.sources.images import image_record, require_pixels
from shardkit.sources.inputs import (
    OpenedFile,
    file_at,
    place,
    place_of,
    reading,
    require_rows,
    scanning,
)
from shardkit.sources.kept import Kept, value_of
from shardkit.sources.labels import Value, label_of, read_classes
from shardkit.sources.unpacking import packing_of
from shardkit.system import safe_paths
from shardkit.system.files import read_small
from shardkit.system.text import quoted

_INDEX = "index.json"
_MOST_INDEX = 1 << 27
_MOST_COLUMNS = 1024
_CHUNK = 1 << 14
"""Offsets to read at a time."""
_MOST_LABEL = 4096


class Shard(NamedTuple):
    """A shard, as the index states it."""

    folder: Path
    name: str
    """Its path below the folder."""
    rows: int
    bytes: int
    """Its size, unpacked."""
    split: str = ""

    @property
    def path(self) -> str:
        """Its whole path."""
        return str(self.folder / self.name)


class ColumnShards(ListedSource, AttachableSource):
    """A folder of shards with their index, or of such folders, which are splits.

    Args:
        path: The folder.
        options: The options.
    """

    format: str
    """Name of the format in messages."""

    def __init__(self, path: str | Path, options: ColumnOptions) -> None:
        super().__init__(path, options)
        self.class_names = read_classes(options.classes)
        folders = self._find_splits()
        self.splits = {name: name for name in folders}
        self._shards: list[Shard] = []
        self._columns: dict[str, Column] = {}
        for name, folder in folders.items():
            columns, shards = self._read_index(folder)
            by_name = {column.name: column for column in columns}
            if len(by_name) != len(columns) or not 0 < len(columns) <= _MOST_COLUMNS:
                raise UsageError(f"{folder / _INDEX} has no columns, too many, or one twice")
            if self._columns and _types(columns) != _types(self._columns.values()):
                raise UsageError(
                    f"{self.path}: its folders differ in columns", remedy="convert each alone"
                )
            self._columns = by_name
            self._shards += [shard._replace(split=name) for shard in shards]
        self._chosen = Columns(self.path, self._columns.values(), options)
        self.schema = self._chosen.schema
        self.settle(image=self._chosen.image, label=self._chosen.label or NONE)

    @abstractmethod
    def parse_index(
        self, folder: Path, index: Mapping[str, Any]
    ) -> tuple[Sequence[Column], Sequence[Shard]]:
        """Return the columns and shards that an index states.

        Raises:
            ValueError, KeyError, TypeError: If it is not an index.
            UsageError: If it asks for what is not supported.
        """

    def _find_splits(self) -> dict[str, Path]:
        try:
            if safe_paths.exists(self.path / _INDEX):
                return {"": self.path}
            found = {
                child.name: child
                for child in sorted(self.path.iterdir())
                if child.is_dir() and not child.is_symlink() and safe_paths.exists(child / _INDEX)
            }
        except OSError as error:
            raise UsageError(
                f"{self.path} cannot be read: {error.strerror or error}; {self.format} datasets "
                f"are folders with {_INDEX}"
            ) from error
        if not found:
            raise UsageError(
                f"there is no {_INDEX} in {self.path} or its folders: is it a dataset of "
                f"{self.format}?"
            )
        return found

    def _read_index(self, folder: Path) -> tuple[Sequence[Column], Sequence[Shard]]:
        path = folder / _INDEX
        try:
            index = mapping(json.loads(read_small(path, _MOST_INDEX)), "the index")
            columns, shards = self.parse_index(folder, index)
            for shard in shards:
                safe_paths.parts_of(shard.name)
                safe_paths.status_of(folder, shard.name)
        except UsageError:
            raise
        except OSError as error:
            raise UsageError(f"{error.filename or path}: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise UsageError(f"{path} is not an index of {self.format}: {reason}") from error
        if not shards:
            raise UsageError(f"{path} names no shards")
        return columns, shards

    def paths(self) -> Sequence[Path]:
        """Return the shards."""
        return [Path(shard.path) for shard in self._shards]

    def locate(self, split: str, entry: Entry) -> str:
        """Return the shard and the number of a sample."""
        number, row = place_of(entry.place)
        return f"{self._shards[number].path} at sample {row}"

    def list_images(self, listings: Mapping[str, Listing]) -> Mapping[str, str]:
        """List the samples of all shards, in order."""
        for number, shard in enumerate(self._shards):
            require_rows(shard.path, shard.rows)
            listing = listings[shard.split]

            def scan(view: OpenedFile, number: int = number, listing: Listing = listing) -> None:
                self._list(listing, number, view)

            if reason := scanning(shard.path, scan, shard.bytes):
                listing.blame_rest(shard.name, reason)
        image = self._columns[self._chosen.image]
        self.exact_sizes = not image.why
        self.notes += self._chosen.notes
        count = sum(shard.rows for shard in self._shards)
        return {
            "shards": f"{len(self._shards):,} of {self.format}, with {count:,} samples",
            **self._chosen.describe(f"{image.type}{image.why and f', {image.why}'}"),
        }

    def _list(self, listing: Listing, number: int, view: OpenedFile) -> None:
        shard = self._shards[number]
        if view.size != shard.bytes:
            raise BadImage(f"it has {view.size:,} bytes, but the index states {shard.bytes:,}")
        if view.read(0, 4) != struct.pack("<I", shard.rows):
            raise BadImage("its number of samples differs from the index")
        label = self._columns.get(self._chosen.label)
        stem = shard.name.partition(".mds")[0].removesuffix(".bin")
        for first in range(0, shard.rows, _CHUNK):
            offsets = _offsets(view, first, min(_CHUNK, shard.rows - first))
            for row, (start, end) in enumerate(pairwise(offsets), first):
                name = f"{stem}/{row:08d}"
                try:
                    places = self._places(view, shard, start, end)
                    code = NO_LABEL
                    if label:
                        code = listing.code(_label(label, view, *places[label.name]))
                except BadImage as error:
                    listing.blame(name, str(error))
                    continue
                size = places[self._chosen.image][1]
                listing.add(Row(name, code, size, view.stamp, place(number, row)))

    def _places(
        self, view: OpenedFile, shard: Shard, start: int, end: int
    ) -> dict[str, tuple[int, int]]:
        """Return the offset and size of each value of the sample between two offsets."""
        stated = sum(column.size is None for column in self._columns.values())
        if not 4 * (shard.rows + 2) <= start <= start + 4 * stated <= end <= view.size:
            raise BadImage("its offset leads outside of the samples")
        sizes = iter(struct.unpack(f"<{stated}I", view.read(start, 4 * stated)))
        at = start + 4 * stated
        places = {}
        for column in self._columns.values():
            size = next(sizes) if column.size is None else column.size
            places[column.name] = at, size
            at += size
        if at != end:
            raise BadImage("the sizes of its columns differ from the size of the sample")
        return places

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of an image."""
        path, _ = file_at([shard.path for shard in self._shards], entry.place)
        number, _ = place_of(entry.place)
        with reading(path, entry.stamp, stated=self._shards[number].bytes) as view:
            return self._locate(view, entry).record

    def by_file(self, images: Images) -> Sequence[tuple[Path, Images]]:
        """Return each shard with its images.

        Raises:
            UsageError: If there are splits, or values that the shards do not have as they are.
        """
        if "" not in self.splits:
            raise UsageError(
                f"{self.path} holds splits: attach each alone, such as {self.path}/"
                f"{next(iter(self.splits))}"
            )
        remedy = "cannot be read in place: use `shardkit convert`"
        if packed := next((shard.path for shard in self._shards if packing_of(shard.path)), None):
            raise UsageError(f"{packed} is compressed, so its images {remedy}")
        if self._columns[self._chosen.image].why:
            raise UsageError(f"the column {self._columns[self._chosen.image]} {remedy}")
        for kept in self._chosen.keep:
            column = self._columns[kept.source]
            field = self.schema[kept.name]
            stated = column.holds != "array" or field.dtype is not None
            if field.type.stored_apart and (field != column.field or column.why or not stated):
                raise UsageError(f"the column {column} {remedy}, or omit it with {setting('keep')}")
        return images_by_file(self.paths(), images)

    def located(self, split: str, entries: Sequence[Entry]) -> Iterator[Located | BadImage]:
        """Yield each of some images, with the offsets of its values."""
        if entries:
            path, _ = file_at([shard.path for shard in self._shards], entries[0].place)
            with reading(path, entries[0].stamp) as view:
                for entry in entries:
                    try:
                        yield self._locate(view, entry)
                    except BadImage as error:
                        yield error

    def _locate(self, view: OpenedFile, entry: Entry) -> Located:
        """Return the record of an image, and where its values are."""
        number, row = place_of(entry.place)
        shard = self._shards[number]
        if row >= shard.rows:
            raise BadImage("its row is not in the shard")
        start, end = _offsets(view, row, 1)
        places = self._places(view, shard, start, end)
        used = {self._chosen.image, *(kept.source for kept in self._chosen.keep)}
        stored = {name: view.read(*places[name]) for name in used}
        image = self._columns[self._chosen.image]
        record = image_record(entry, _decoded(image, stored[image.name]))
        offsets = {record.image_field or FOREIGN_FIELD: places[image.name][0]}
        if not self._chosen.keep:
            return Located(record, offsets)
        values = {kept.name: self._value(kept, stored[kept.source]) for kept in self._chosen.keep}
        record = with_fields(record, self.schema, values)
        for kept in self._chosen.keep:
            field = self.schema[kept.name]
            if field.type.stored_apart:
                name = field.type.stored_in(record.fields, kept.name) or kept.name
                offsets[name] = places[kept.source][0]
        return Located(record, offsets)

    def _value(self, kept: Kept, data: bytes) -> Any:
        """Return the value of a column to keep."""
        column = self._columns[kept.source]
        field = self.schema[kept.name]
        if column.holds in PARSED and (kept.pointer is not None or field != column.field):
            return value_of(kept, field, data)
        value = _decoded(column, data)
        return value if field == column.field else self._chosen.value(kept, value)


def whole_number(value: Any, what: str) -> int:
    """Return an integer of an index.

    Raises:
        ValueError: If it is none, or negative.
    """
    if type(value) is not int or value < 0:
        raise ValueError(f"{what} is {quoted(value)}")
    return value


def mapping(value: Any, what: str) -> dict[str, Any]:
    """Return an object of an index.

    Raises:
        ValueError: If it is none.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {quoted(value)}")
    return value


def text(value: Any, what: str) -> str:
    """Return a text of an index.

    Raises:
        ValueError: If it is none.
    """
    if not isinstance(value, str):
        raise ValueError(f"{what} is {quoted(value)}")
    return value


def number_of(dtype: str, data: bytes) -> Any:
    """Return a number of NumPy's type."""
    return np.frombuffer(data, dtype).reshape(()).item()


def array_of(dtype: str, shape: Sequence[int], data: bytes) -> npt.NDArray[Any]:
    """Return an array stored as its values; a side may be -1."""
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(shape)


_MODES = {"L": 1, "LA": 2, "I;16": 2, "RGB": 3, "RGBA": 4}
"""Modes of Pillow that PNG stores as they are, and the bytes of a pixel."""


def png_of_pil(data: bytes) -> bytes:
    """Return the PNG file of pixels that start with width, height and mode, as both formats do.

    Raises:
        BadImage: If they are not of a mode that PNG has.
    """
    width, height, length = struct.unpack_from("<3I", data)
    mode = data[12 : 12 + min(length, 16)].decode("ascii", "replace")
    if mode not in _MODES:
        raise BadImage(f"its mode is {quoted(mode)}, not {', '.join(_MODES)}")
    require_pixels((height, width))
    pixels = data[12 + length :]
    if len(pixels) != math.prod((height, width, _MODES[mode])):
        raise BadImage(f"its pixels are not {width} x {height} of {mode}")
    return as_png(Image.frombytes(mode, (width, height), pixels))


AS_PNG = "stored as PNG"


def _types(columns: Any) -> list[tuple[str, str]]:
    return [(column.name, column.type) for column in columns]


def _offsets(view: OpenedFile, row: int, count: int) -> tuple[int, ...]:
    """Return the offsets of samples, and of the end of the last."""
    data = view.read(4 * (row + 1), 4 * (count + 1))
    if len(data) != 4 * (count + 1):
        raise BadImage("the file is truncated")
    return struct.unpack(f"<{count + 1}I", data)


def _label(column: Column, view: OpenedFile, start: int, size: int) -> Value:
    if size > _MOST_LABEL:
        raise BadImage(f"its label has {size:,} bytes, over the limit of {_MOST_LABEL:,}")
    value = _decoded(column, view.read(start, size))
    return label_of(value, column.name)


def _decoded(column: Column, data: bytes) -> Any:
    try:
        return column.decode(data)
    except BadImage as error:
        raise BadImage(f"{column.name}: {error.problem}", remedy=error.remedy) from error
    except (ValueError, IndexError, TypeError, struct.error, RecursionError) as error:
        raise BadImage(f"its {column.name} is no {column.type}: {error}") from error
