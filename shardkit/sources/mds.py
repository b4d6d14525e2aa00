"""Shards of MosaicML Streaming (MDS) as a source.

A shard is the number of samples, the offset of each and of the end (all uint32), the writer's
settings, and the samples. A sample is the size of each column without a fixed one, then the values.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from shardkit.codecs.image import encode
from shardkit.contracts import Entry, SourceKind, SourceOptions
from shardkit.errors import BadImage, UsageError
from shardkit.kinds.field import Field, check_schema
from shardkit.kinds.packing import with_fields
from shardkit.kinds.values import parse_json
from shardkit.options import option
from shardkit.record import Record
from shardkit.sources.driver import ListedSource, Listing, Row
from shardkit.sources.images import image_record, require_pixels
from shardkit.sources.inputs import (
    CHANGED,
    OpenedFile,
    file_at,
    place,
    place_of,
    reading,
    require_rows,
    scanning,
)
from shardkit.sources.labels import Value, classes_option, read_classes
from shardkit.system import safe_paths
from shardkit.system.files import read_small
from shardkit.system.text import quoted

_INDEX = "index.json"
_MOST_INDEX = 1 << 28
_MOST_COLUMNS = 1024
_NONE = "none"
_IMAGES = ("jpeg", "png", "pil", "bytes")
_LABELS = ("label", "labels", "class", "target", "y")
_NUMBERS = {
    "int": "<i8",
    **{f"int{8 * size}": f"<i{size}" for size in (1, 2, 4, 8)},
    **{f"uint{8 * size}": f"<u{size}" for size in (1, 2, 4, 8)},
    **{f"float{8 * size}": f"<f{size}" for size in (2, 4, 8)},
}
_TEXTS = ("str", "str_int")
_MODES = {"L": 1, "RGB": 3, "RGBA": 4}
"""Modes of Pillow whose pixels PNG stores as they are, and their channels."""
_DTYPES = frozenset(
    f"{kind}{8 * size}" for kind in ("uint", "int", "float") for size in (1, 2, 4, 8)
) - {"float8"}


class Column(NamedTuple):
    """A column of a dataset, as each shard states it."""

    name: str
    encoding: str
    size: int | None
    """Bytes of a value; None if each states its own."""


class Shard(NamedTuple):
    """A shard, as the index states it."""

    path: str
    split: str
    rows: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class MdsOptions(SourceOptions):
    """The options of this source."""

    image: str | None = option(
        None, help="Column of images.", metavar="NAME", stored="image_field", shown="the only one"
    )
    label: str | None = option(
        None,
        help="Column of labels, integers or text; none: no labels.",
        metavar="NAME",
        stored="label_field",
        shown="label, class or target",
    )
    keep: str | None = option(
        None,
        help="More columns to keep, by name; none: no column.",
        metavar="NAME,...",
        shown="all",
    )
    classes: str | None = classes_option()


class Mds(ListedSource):
    """A folder of MDS shards with their index, or of such folders, which are splits.

    Args:
        path: The folder.
        options: The options.
    """

    kind = "mds"

    def __init__(self, path: str | Path, options: MdsOptions) -> None:
        super().__init__(path, options)
        self.class_names = read_classes(options.classes)
        folders = _find_splits(self.path)
        self.splits = {name: name for name in folders}
        self._columns: list[Column] = []
        self._shards: list[Shard] = []
        for name, folder in folders.items():
            self._read_index(name, folder)
        if not self._shards:
            raise UsageError(f"there are no shards in {self.path}")
        by_name = {column.name: column for column in self._columns}
        self._image = _choose(by_name, "image", options.image, self.path)
        self._label = (
            "" if options.label == _NONE else _choose(by_name, "label", options.label, self.path)
        )
        used = {self._image, self._label}
        names = [name for name in by_name if name not in used]
        if options.keep is not None:
            names = [] if options.keep == _NONE else options.keep.split(",")
        for name in names:
            if name not in by_name:
                raise UsageError(
                    f"{self.path} has no column {quoted(name)}; it has {self._listed()}"
                )
        self._keep = names
        try:
            self.schema = {name: _field(by_name[name]) for name in names}
            check_schema(self.schema)
        except ValueError as error:
            raise UsageError(f"{self.path}: {error}; choose columns with keep=") from error
        self.settle(image=self._image, label=self._label or _NONE)

    def _listed(self) -> str:
        return ", ".join(f"{column.name} ({column.encoding})" for column in self._columns)

    def _read_index(self, split: str, folder: Path) -> None:
        path = folder / _INDEX
        try:
            index = json.loads(read_small(path, _MOST_INDEX))
            if index["version"] != 2:
                raise UsageError(f"{path} has version {quoted(index['version'])}, not 2")
            for stated in index["shards"]:
                columns = _columns(stated)
                if self._columns and columns != self._columns:
                    raise UsageError(f"{path}: its shards differ in columns: convert each split")
                self._columns = columns
                raw = stated["raw_data"]
                name = str(raw["basename"])
                if stated.get("zip_data") or stated.get("compression"):
                    raise UsageError(
                        f"{path}: the shard {quoted(name)} is compressed: write the dataset with "
                        "compression=None"
                    )
                safe_paths.parts_of(name)
                safe_paths.status_of(folder, name)
                shard = Shard(str(folder / name), split, int(stated["samples"]), int(raw["bytes"]))
                self._shards.append(shard)
        except UsageError:
            raise
        except OSError as error:
            raise UsageError(f"{error.filename or path}: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            raise UsageError(f"{path} is not an index of MDS: {quoted(str(error))}") from error

    def paths(self) -> Sequence[Path]:
        """Return the shards."""
        return [Path(shard.path) for shard in self._shards]

    def locate(self, split: str, entry: Entry) -> str:
        """Return the shard and the number of a sample."""
        number, row = place_of(entry.place)
        return f"{self._shards[number].path} at sample {row}"

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of an image."""
        path, row = file_at([shard.path for shard in self._shards], entry.place)
        with reading(path, entry.stamp) as view:
            (start, end) = _offsets(view, row, 1)
            values = self._values(view, start, end)
            data = {name: view.read(*values[name]) for name in (self._image, *self._keep)}
        by_name = {column.name: column for column in self._columns}
        content = data[self._image]
        if by_name[self._image].encoding == "pil":
            content = _png(content)
        record = image_record(entry, content)
        kept = {name: _value(by_name[name], data[name]) for name in self._keep}
        return with_fields(record, self.schema, kept) if kept else record

    def _values(self, view: OpenedFile, start: int, end: int) -> dict[str, tuple[int, int]]:
        """Return the offset and size of each value of a sample."""
        varying = sum(column.size is None for column in self._columns)
        head = view.read(start, 4 * varying)
        if len(head) != 4 * varying:
            raise BadImage("the file is truncated")
        sizes = iter(struct.unpack(f"<{varying}I", head))
        at = start + 4 * varying
        values = {}
        for column in self._columns:
            size = next(sizes) if column.size is None else column.size
            values[column.name] = at, size
            at += size
        if at != end:
            raise BadImage("the sizes of its columns differ from the size of the sample")
        return values

    def list_images(self, listings: Mapping[str, Listing]) -> Mapping[str, str]:
        """List the samples of all shards, in order."""
        by_name = {column.name: column for column in self._columns}
        for number, shard in enumerate(self._shards):
            require_rows(shard.path, shard.rows)
            listing = listings[shard.split]

            def scan(view: OpenedFile, number: int = number, listing: Listing = listing) -> None:
                self._list(listing, number, view)

            if reason := scanning(shard.path, scan):
                listing.blame_rest(Path(shard.path).name, reason)
        self.exact_sizes = by_name[self._image].encoding != "pil"
        labels = next(iter(listings.values())).labels
        used = {self._image, self._label, *self._keep}
        count = sum(map(len, listings.values()))
        return {
            "shards": f"{len(self._shards):,} of MDS, with {count:,} samples",
            "image": f"{self._image}: {by_name[self._image].encoding}"
            + ("" if self.exact_sizes else ", stored as PNG"),
            "label": f"{self._label or 'no column'}: {labels.describe()}",
            **{name: f"{by_name[name].encoding}: {self.schema[name]}" for name in self._keep},
            "unused": ", ".join(name for name in by_name if name not in used) or "no column",
        }

    def _list(self, listing: Listing, number: int, view: OpenedFile) -> None:
        shard = self._shards[number]
        if view.size != shard.bytes:
            raise BadImage(f"it has {view.size:,} bytes, but the index states {shard.bytes:,}")
        head = view.read(0, 4)
        if head != struct.pack("<I", shard.rows):
            raise BadImage("its number of samples differs from the index")
        by_name = {column.name: column for column in self._columns}
        stem = Path(shard.path).name.removesuffix(".mds")
        for row in range(shard.rows):
            name = f"{stem}/{row:08d}"
            try:
                start, end = _offsets(view, row, 1)
                if start < 4 * (shard.rows + 2):
                    raise BadImage("its offset is in the table of offsets")
                values = self._values(view, start, end)
                label: Value | None = None
                if self._label:
                    offset, size = values[self._label]
                    label = _label(by_name[self._label], view.read(offset, min(size, 4097)))
            except BadImage as error:
                listing.blame(name, str(error))
                continue
            size = values[self._image][1]
            listing.add(Row(name, listing.code(label), size, view.stamp, place(number, row)))


def _find_splits(path: Path) -> dict[str, Path]:
    try:
        if safe_paths.exists(path / _INDEX):
            return {"": path}
        found = {
            child.name: child
            for child in sorted(path.iterdir())
            if child.is_dir() and not child.is_symlink() and safe_paths.exists(child / _INDEX)
        }
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    if not found:
        raise UsageError(f"there is no {_INDEX} in {path} or its folders: is it a dataset of MDS?")
    return found


def _columns(stated: Any) -> list[Column]:
    if stated["format"] != "mds" or stated["version"] != 2:
        raise UsageError(f"its shards are {quoted(stated['format'])}, not mds of version 2")
    names, encodings, sizes = (stated[f"column_{part}"] for part in ("names", "encodings", "sizes"))
    columns = tuple(map(Column, map(str, names), map(str, encodings), sizes))
    if not len(names) == len(encodings) == len(sizes) <= _MOST_COLUMNS or len(set(names)) < len(
        names
    ):
        raise ValueError("its columns are not a list of names")
    for column in columns:
        fixed = _fixed_size(column.encoding)
        if (column.size or None) != fixed:
            raise ValueError(f"the size of {column.name} is {column.size}, not {fixed}")
    return [column._replace(size=column.size or None) for column in columns]


def _array_of(encoding: str) -> tuple[str | None, tuple[int, ...] | None]:
    _, *rest = encoding.split(":")
    dtype = rest[0] if rest and rest[0] else None
    shape = tuple(map(int, rest[1].split(","))) if len(rest) > 1 else None
    if len(rest) > 2 or (dtype and dtype not in _DTYPES) or (shape and min(shape) < 1):
        raise ValueError(f"the encoding {encoding} is unknown")
    return dtype, shape


def _fixed_size(encoding: str) -> int | None:
    if encoding in _NUMBERS:
        return np.dtype(_NUMBERS[encoding]).itemsize
    if encoding.partition(":")[0] == "ndarray":
        dtype, shape = _array_of(encoding)
        return np.dtype(dtype).itemsize * math.prod(shape) if dtype and shape else None
    return None


def _choose(columns: Mapping[str, Column], what: str, name: str | None, path: Path) -> str:
    """Return the column of images or labels; "" if there is no label."""
    listed = ", ".join(f"{column.name} ({column.encoding})" for column in columns.values())
    allowed = _IMAGES if what == "image" else (*_TEXTS, *_NUMBERS)
    names = [
        column.name
        for column in columns.values()
        if column.encoding in allowed and not column.encoding.startswith("float")
    ]
    if name is not None:
        if name not in names:
            raise UsageError(f"{path} has no column {quoted(name)} for {what}s; it has {listed}")
        return name
    if what == "label":
        return next((usual for usual in _LABELS if usual in names), "")
    sure = [known for known in names if columns[known].encoding != "bytes"] or names
    usual = "image" if "image" in names else None
    if len(sure) != 1 and not usual:
        raise UsageError(f"{path}: choose the column of images with image=; it has {listed}")
    return usual or sure[0]


def _field(column: Column) -> Field:
    """Return the field of a column to keep.

    Raises:
        UsageError: If the values are pickles, or of a kind without a field.
    """
    encoding = column.encoding
    if encoding in _NUMBERS:
        return Field("number", np.dtype(_NUMBERS[encoding]).name)
    if encoding.partition(":")[0] == "ndarray":
        dtype, shape = _array_of(encoding)
        return Field("array", dtype, shape) if dtype and shape else Field("array")
    kinds = {"bytes": "bytes", "str": "text", "json": "json", "jpeg": "image", "png": "image"}
    if encoding in kinds:
        return Field(kinds[encoding])
    why = "pickles, which can run code" if encoding == "pkl" else "not supported"
    raise UsageError(
        f"the column {quoted(column.name)} ({encoding}) is {why}: leave it out by naming the "
        "others with keep=, or keep='none'"
    )


def _offsets(view: OpenedFile, row: int, count: int) -> tuple[int, ...]:
    """Return the offsets of samples, and of the end of the last."""
    data = view.read(4 * (row + 1), 4 * (count + 1))
    if len(data) != 4 * (count + 1):
        raise BadImage("the file is truncated")
    offsets = struct.unpack(f"<{count + 1}I", data)
    if offsets[0] > offsets[-1] or offsets[-1] > view.size:
        raise BadImage("its offsets lead outside of the file")
    return offsets


def _label(column: Column, data: bytes) -> Value:
    if column.encoding in _NUMBERS:
        return int(np.frombuffer(data, _NUMBERS[column.encoding])[0])
    if not 0 < len(data) <= 4096:
        raise BadImage(f"its label has {len(data):,} bytes; a name has 1 to 4,096")
    return data.decode("utf-8", "surrogateescape")


def _value(column: Column, data: bytes) -> Any:
    """Return the value of a column to keep."""
    try:
        if column.encoding in _NUMBERS:
            return np.frombuffer(data, _NUMBERS[column.encoding])[0].item()
        if column.encoding.partition(":")[0] == "ndarray":
            return _array(column.encoding, data)
        if column.encoding == "json":
            return parse_json(data)
        return data.decode() if column.encoding == "str" else data
    except (ValueError, IndexError, RecursionError) as error:
        raise BadImage(f"its {column.name} is no {column.encoding}: {error}") from error


def _array(encoding: str, data: bytes) -> Any:
    """Return an array; what the encoding does not state, starts the value."""
    dtype, shape = _array_of(encoding)
    at = 0
    if dtype is None:
        codes = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32"}
        codes |= {33: "int32", 34: "float32", 64: "uint64", 65: "int64", 66: "float64"}
        if data[0] not in codes:
            raise ValueError(f"its type is {data[0]}")
        dtype, at = codes[data[0]], 1
    if shape is None:
        axes, size = data[at] >> 2, 1 << data[at] % 4
        sides = np.frombuffer(data[at + 1 : at + 1 + axes * size], f"<u{size}")
        shape, at = tuple(map(int, sides)), at + 1 + axes * size
    return np.frombuffer(data[at:], np.dtype(dtype).newbyteorder("<")).reshape(shape)


def _png(data: bytes) -> bytes:
    """Return the PNG file of an image that Pillow's pixels describe."""
    if len(data) < 12:
        raise BadImage("its image is truncated")
    width, height, length = struct.unpack_from("<3I", data)
    mode = data[12 : 12 + min(length, 16)].decode("ascii", "replace")
    if mode not in _MODES:
        raise BadImage(f"its mode is {quoted(mode)}; PNG files of {', '.join(_MODES)} are written")
    shape = (height, width, _MODES[mode])
    require_pixels(shape)
    pixels = data[12 + length :]
    if len(pixels) != math.prod(shape):
        raise BadImage(CHANGED)
    return encode(Image.frombytes(mode, (width, height), pixels), "png", 0)


SOURCE = SourceKind(
    name=Mds.kind,
    title="Convert shards of MosaicML Streaming (MDS).",
    help="""Convert a folder of MDS shards to a dataset in DST.

    SRC has index.json, or folders that do, which are splits. Streaming is not needed. JPEG and PNG
    files keep their bytes; pixels (pil) become PNG files. Numbers, text, JSON, bytes and arrays
    become fields. Compressed shards and pickles are refused.

    \b
    Examples:
      shardkit convert mds imagenet-mds dataset --to lmdb --dry-run
      shardkit convert mds imagenet-mds dataset --to lmdb --image jpg --label class
    """,
    options=MdsOptions,
    source=Mds,
)
