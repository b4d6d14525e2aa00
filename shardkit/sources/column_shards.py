"""Shards of samples with columns: what MDS (MosaicML Streaming) and LitData have in common.

A shard is the number of samples, the offset of each sample and of the end, all uint32, perhaps more
of the writer's, and the samples. A sample is the size of each column, uint32, then the values.
"""

from __future__ import annotations

import json
import math
import re
import struct
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from shardkit.contracts import AttachableSource, Entry, Images, Located, SourceOptions
from shardkit.errors import BadImage, UsageError
from shardkit.kinds.field import Field, check_schema
from shardkit.kinds.packing import with_fields
from shardkit.kinds.picture import as_png
from shardkit.options import option
from shardkit.record import FOREIGN_FIELD, NO_LABEL, Record
from shardkit.sources.driver import ListedSource, Listing, Row, images_by_file
from shardkit.sources.images import AS_ARRAYS, image_record, require_pixels
from shardkit.sources.inputs import (
    OpenedFile,
    file_at,
    place,
    place_of,
    reading,
    require_rows,
    scanning,
)
from shardkit.sources.kept import Kept, parse_keep, value_of
from shardkit.sources.labels import Value, classes_option, label_of, read_classes
from shardkit.sources.unpacking import packing_of
from shardkit.system import safe_paths
from shardkit.system.files import read_small
from shardkit.system.text import name_list, quoted

_INDEX = "index.json"
_MOST_INDEX = 1 << 27
_MOST_COLUMNS = 1024
_NONE = "none"
_CHUNK = 1 << 14
"""Offsets to read at a time."""
_MOST_LABEL = 4096
_USUAL_IMAGES = ("image", "images", "img", "jpg", "jpeg", "png", "x")
_USUAL_LABELS = ("label", "labels", "class", "cls", "target", "targets", "y")
_LONGEST = 32
"""Characters of a field's name."""
_PARSED = ("text", "json", "bytes")
"""What columns hold whose bytes can be read as other kinds."""


class Column(NamedTuple):
    """A column: what it holds, and how."""

    name: str
    type: str
    """As the format names it, such as ``ndarray:float16:2,3``."""
    holds: str
    """``image``, ``integer``, ``float``, ``text``, ``json``, ``bytes``, ``array``, or "" if
    nothing that can be stored."""
    decode: Callable[[bytes], Any]
    """Returns a value: an image as a file, an array as NumPy has it.

    Raises:
        ValueError, IndexError, TypeError, struct.error: If the bytes are not a value.
    """
    field: Field = Field("bytes")
    """The field that stores all its values."""
    size: int | None = None
    """Bytes of each value if samples do not state them."""
    why: str = ""
    """Why it cannot be stored, or what becomes of it."""

    def __str__(self) -> str:
        return f"{self.name} ({self.type})"


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


@dataclass(frozen=True, kw_only=True)
class ColumnOptions(SourceOptions):
    """The options of these sources."""

    image: str | None = option(
        None, help="Column of images.", metavar="NAME", stored="image_field", shown="the only one"
    )
    label: str | None = option(
        None,
        help="Column of labels, integers or text; none: no labels.",
        metavar="NAME",
        stored="label_field",
        shown="label, or the only integers",
    )
    keep: str | None = option(
        None,
        help="More columns to keep, such as weight,caption=info:/caption:text; none: no column.",
        metavar="[NAME=]COLUMN[:KIND],...",
        shown="all",
    )
    classes: str | None = classes_option()


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
                raise UsageError(f"{self.path}: its folders differ in columns: convert each alone")
            self._columns = by_name
            self._shards += [shard._replace(split=name) for shard in shards]
        self._image = self._choose_image(options.image)
        self._label = "" if options.label == _NONE else self._choose_label(options.label)
        self._keep = self._kept(options.keep)
        self.schema = {kept.name: self._field(kept) for kept in self._keep}
        self.settle(image=self._image, label=self._label or _NONE)

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

    def _listed(self) -> str:
        return name_list(map(str, self._columns.values()))

    def _choose_image(self, name: str | None) -> str:
        files = [column.name for column in self._columns.values() if column.holds == "image"]
        others = [column.name for column in self._columns.values() if column.holds == "bytes"]
        if name is not None:
            if name not in files + others:
                raise UsageError(
                    f"{self.path} has no column {quoted(name)} of images; it has {self._listed()}"
                )
            return name
        usual = [known for known in _USUAL_IMAGES if known in files + others]
        names = files or others
        if len(names) > 1 and not usual:
            raise UsageError(
                f"{self.path} has {len(names)} columns that may be images: choose with image= from "
                f"{name_list(names)}"
            )
        if not names:
            raise UsageError(
                f"{self.path} has no column of images; it has {self._listed()}; for arrays without "
                f"images, {AS_ARRAYS}"
            )
        return (usual or names)[0]

    def _choose_label(self, name: str | None) -> str:
        """Return the column of labels; "" if the user named none and there is none."""
        integers = [column.name for column in self._columns.values() if column.holds == "integer"]
        texts = [column.name for column in self._columns.values() if column.holds == "text"]
        if name is None:
            usual = (known for known in _USUAL_LABELS if known in integers + texts)
            return next(usual, integers[0] if len(integers) == 1 else "")
        if name not in integers + texts:
            raise UsageError(
                f"{self.path} has no column {quoted(name)} of integers or text; it has "
                f"{self._listed()}"
            )
        return name

    def _kept(self, keep: str | None) -> list[Kept]:
        """Return the columns to keep; by default all but image and label."""
        if keep == _NONE:
            return []
        if keep is not None:
            kept = parse_keep(keep)
            for one in kept:
                if one.source not in self._columns:
                    raise UsageError(
                        f"{self.path} has no column {quoted(one.source)}; it has {self._listed()}"
                    )
            return kept
        others = [name for name in self._columns if name not in (self._image, self._label)]
        names = [_field_name(name) for name in others]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UsageError(
                f"{self.path} has several columns for a field {twice!r}; give them names with "
                f"keep='other={others[names.index(twice)]}', or leave all out with keep='none'"
            )
        return [Kept(*pair, None, None, False) for pair in zip(names, others, strict=True)]

    def _field(self, kept: Kept) -> Field:
        column = self._columns[kept.source]
        if not column.holds:
            raise UsageError(
                f"{self.path}: the column {quoted(column.name)} ({column.type}) cannot be stored: "
                f"{column.why}; name the others with keep=, or leave all out with keep='none'"
            )
        if kept.pointer is not None and column.holds not in _PARSED:
            raise UsageError(f"keep='{kept}': only JSON has parts, not {column}")
        if kept.pointer is None and kept.kind in (None, column.field.kind):
            return column.field
        field = kept.field(column.field.kind)
        numbers = column.holds in ("integer", "float") and field.kind in ("number", "json")
        if column.holds not in _PARSED and not numbers:
            raise UsageError(f"keep='{kept}': the column {column} becomes {column.field}")
        return field

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
        image = self._columns[self._image]
        self.exact_sizes = not image.why
        used = {self._image, self._label, *(kept.source for kept in self._keep)}
        unused = [str(column) for column in self._columns.values() if column.name not in used]
        count = sum(shard.rows for shard in self._shards)
        return {
            "shards": f"{len(self._shards):,} of {self.format}, with {count:,} samples",
            "image": f"{self._image}: {image.type}{image.why and f', {image.why}'}",
            "label": self._label or "no column",
            **{
                kept.name: f"{self._columns[kept.source]}: {self.schema[kept.name]}"
                for kept in self._keep
            },
            "unused": ", ".join(unused) or "no column",
        }

    def _list(self, listing: Listing, number: int, view: OpenedFile) -> None:
        shard = self._shards[number]
        if view.size != shard.bytes:
            raise BadImage(f"it has {view.size:,} bytes, but the index states {shard.bytes:,}")
        if view.read(0, 4) != struct.pack("<I", shard.rows):
            raise BadImage("its number of samples differs from the index")
        label = self._columns.get(self._label)
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
                size = places[self._image][1]
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
        if self._columns[self._image].why:
            raise UsageError(f"the column {self._columns[self._image]} {remedy}")
        for kept in self._keep:
            column = self._columns[kept.source]
            field = self.schema[kept.name]
            stated = column.holds != "array" or field.dtype is not None
            if field.type.stored_apart and (field != column.field or column.why or not stated):
                raise UsageError(f"the column {column} {remedy}, or omit it with keep=")
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
        used = {self._image, *(kept.source for kept in self._keep)}
        stored = {name: view.read(*places[name]) for name in used}
        image = self._columns[self._image]
        record = image_record(entry, _decoded(image, stored[image.name]))
        offsets = {record.image_field or FOREIGN_FIELD: places[image.name][0]}
        if not self._keep:
            return Located(record, offsets)
        values = {kept.name: self._value(kept, stored[kept.source]) for kept in self._keep}
        record = with_fields(record, self.schema, values)
        for kept in self._keep:
            field = self.schema[kept.name]
            if field.type.stored_apart:
                name = field.type.stored_in(record.fields, kept.name) or kept.name
                offsets[name] = places[kept.source][0]
        return Located(record, offsets)

    def _value(self, kept: Kept, data: bytes) -> Any:
        """Return the value of a column to keep."""
        column = self._columns[kept.source]
        field = self.schema[kept.name]
        parsed = kept.pointer is not None or field.kind != column.field.kind
        if parsed and column.holds in _PARSED:
            return value_of(kept, field, data)
        value = _decoded(column, data)
        return value.tolist() if isinstance(value, np.ndarray) and field.kind == "json" else value


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


def as_is(data: bytes) -> bytes:
    """Return the bytes of a value that is stored as it is."""
    return data


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


def _field_name(column: str) -> str:
    """Return a name that a field can have, as near as can be to that of its column."""
    name = re.sub("[^a-z0-9_]", "_", column.lower())[:_LONGEST]
    try:
        check_schema({name: Field("json")})
    except ValueError:
        return f"column_{name}"[:_LONGEST]
    return name


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
        raise BadImage(f"{column.name}: {error}") from error
    except (ValueError, IndexError, TypeError, struct.error, RecursionError) as error:
        raise BadImage(f"its {column.name} is no {column.type}: {error}") from error
