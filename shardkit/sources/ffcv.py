"""FFCV's files (.beton) as a source."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from shardkit.contracts import (
    AttachableSource,
    Attaching,
    Entry,
    Images,
    Located,
    SourceKind,
)
from shardkit.errors import BadImage, UsageError, setting
from shardkit.kinds.field import Field
from shardkit.kinds.packing import with_fields
from shardkit.record import FOREIGN_FIELD, NO_LABEL, Record
from shardkit.sources.beton_file import (
    JPEG,
    RAW,
    Allocations,
    BetonField,
    names_of,
    parse_beton,
    without_terminator,
)
from shardkit.sources.columns import NONE, Column, ColumnOptions, Columns
from shardkit.sources.driver import FileSource, Listing, Row
from shardkit.sources.image_files import CHANGED
from shardkit.sources.images import (
    image_record,
    pixel_record,
    raw_record,
    require_pixels,
)
from shardkit.sources.inputs import (
    OpenedFile,
    file_at,
    place,
    place_of,
    reading,
    require_rows,
    scanning,
    stem,
)
from shardkit.sources.kept import Kept, value_of
from shardkit.sources.labels import read_classes
from shardkit.sources.recognize import having
from shardkit.sources.unpacking import packing_of
from shardkit.system.text import quoted

_SUFFIXES = (".beton", ".beton.gz", ".ffcv")
_CHUNK = 1 << 14
"""Samples to list at a time."""
_CHANNELS = 3


class Ffcv(FileSource, AttachableSource):
    """A file of FFCV, read without its package; nothing is unpickled.

    JPEGs keep their bytes, raw pixels become PNG files.

    Args:
        path: The file.
        options: The options.
    """

    kind = "ffcv"

    def __init__(self, path: str | Path, options: ColumnOptions) -> None:
        super().__init__(path, options, _SUFFIXES)
        if len(self.inputs.paths) > 1:
            raise UsageError(
                f"{path} names {len(self.inputs.paths)} files",
                remedy=f"convert each by itself, such as {self.inputs.paths[0]}, and merge "
                "those of one split with `shardkit merge`",
            )
        self.class_names = read_classes(options.classes)
        (self._path,) = self.inputs.paths
        try:
            with reading(self._path) as view:
                self._beton = parse_beton(view)
        except BadImage as error:
            raise UsageError(f"{self._path}: {error.problem}", remedy=error.remedy) from error
        columns = map(_column, *zip(*self._beton.fields.items(), strict=True))
        self._chosen = Columns(self._path, columns, options, images=("image",))
        self.schema = self._chosen.schema
        self.settle(image=self._chosen.image, label=self._chosen.label or NONE)
        self._modes: dict[str, Counter[tuple[int, ...]]] = {}
        """Images of each mode, by field; the mode of raw pixels has their size."""

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of an image."""
        path, _ = file_at(self.inputs.paths, entry.place)
        with reading(path, entry.stamp) as view:
            return self._locate(view, entry).record

    @property
    def raw_shape(self) -> tuple[int, int, int] | None:
        """Height, width and channels if a scan found only raw pixels of one size; else None."""
        modes = list(self._modes.get(self._chosen.image, ()))
        if len(modes) != 1 or modes[0][0] != RAW:
            return None
        _, height, width = modes[0]
        return height, width, _CHANNELS

    def by_file(self, images: Images) -> Sequence[tuple[Path, Images]]:
        """Return the file with its images.

        Raises:
            UsageError: If a record has bytes that the file does not have as they are.
        """
        remedy = "cannot be read in place: use `shardkit convert`"
        if packing_of(self._path):
            raise UsageError(f"{self._path} is compressed, so its images {remedy}, or unpack it")
        modes = self._modes.get(self._chosen.image, Counter())
        raw = sum(count for (mode, *_), count in modes.items() if mode == RAW)
        if raw and not self.raw_shape:
            raise UsageError(
                f"{raw:,} of {modes.total():,} images are raw pixels; unless all are, of one size, "
                f"they {remedy}"
            )
        for kept in self._chosen.keep:
            field = self._beton.fields[kept.source]
            stored = self.schema[kept.name]
            whole = field.holds == stored.kind and not any(
                mode == RAW for mode, *_ in self._modes.get(kept.source, ())
            )
            whole &= field.dtype is None or field.dtype == stored.values
            if stored.type.stored_apart and not whole:
                raise UsageError(
                    f"the field {quoted(kept.source)} ({field}) {remedy}, or omit it with "
                    f"{setting('keep')}"
                )
        return super().by_file(images)

    def located(self, split: str, entries: Sequence[Entry]) -> Iterator[Located | BadImage]:
        """Yield each of some images, with the offsets of its values."""
        if entries:
            with reading(self._path, entries[0].stamp) as view:
                for entry in entries:
                    try:
                        yield self._locate(view, entry, in_place=True)
                    except BadImage as error:
                        yield error

    def _locate(self, view: OpenedFile, entry: Entry, *, in_place: bool = False) -> Located:
        """Return the record of an image, and where its values are if they are read in place."""
        _, row = place_of(entry.place)
        if row >= self._beton.rows:
            raise BadImage(CHANGED)
        sample = self._beton.samples(view, row, 1)[0]
        sizes = {self._chosen.image: entry.bytes, **json.loads(entry.values or "{}")}
        data = _bytes_of(view, sample[self._chosen.image], sizes[self._chosen.image])
        record = _record(entry, sample[self._chosen.image], data, raw=in_place)
        offsets = {record.image_field or FOREIGN_FIELD: int(sample[self._chosen.image]["start"])}
        values = {}
        apart = {}
        for kept in self._chosen.keep:
            field = self._beton.fields[kept.source]
            content = b""
            where = sample[kept.source]
            if field.is_allocated:
                content = _bytes_of(view, where, _size_of(field, where, sizes.get(kept.source)))
            values[kept.name] = self._value(kept, where, content)
            if self.schema[kept.name].type.stored_apart:
                apart[kept.name] = _start_of(where), content
        record = with_fields(record, self.schema, values)
        for name, (start, content) in apart.items() if in_place else ():
            stored = self.schema[name].type.stored_in(record.fields, name) or name
            if record.fields.get(stored) != content:
                raise BadImage(f"its {name} is not stored as it is")
            offsets[stored] = start
        return Located(record, offsets)

    def _value(self, kept: Kept, where: Any, content: bytes) -> Any:
        """Return the value of a field to keep."""
        field = self._beton.fields[kept.source]
        kind = self.schema[kept.name].kind
        if field.holds == "array":
            array = np.frombuffer(content, field.dtype).reshape(field.shape)
            return array if self.schema[kept.name].type.stored_apart else array.tolist()
        if field.holds == "image":
            # An array would not tell where its channels are.
            return content if where["mode"] == JPEG else Image.fromarray(_pixels(where, content))
        if not field.is_allocated:
            return where.item()
        if field.holds == "json":
            content = without_terminator(content)
            if kind not in ("json", "bytes") and kept.pointer is None:
                kept = kept._replace(pointer="")
        return value_of(kept, self.schema[kept.name], content)

    def locate(self, split: str, entry: Entry) -> str:
        """Return the file and the number of a sample."""
        return f"{self._path} at sample {place_of(entry.place)[1]}"

    def list_images(self, listings: Mapping[str, Listing]) -> Mapping[str, str]:
        """List the samples, in order.

        Raises:
            UsageError: If the file is damaged.
        """
        (listing,) = listings.values()
        listing.ignored += self.inputs.others
        self._modes = {name: Counter() for name in names_of(self._beton.fields, "image")}
        require_rows(self._path, self._beton.rows)
        if reason := scanning(self._path, lambda view: self._list(listing, view)):
            raise UsageError(f"{self._path}: {reason}")
        self.notes += self._chosen.notes
        modes = self._modes[self._chosen.image]
        self.exact_sizes = all(mode == JPEG for mode, *_ in modes)
        return {
            "file": f"FFCV, {self._beton.rows:,} samples of {len(self._beton.fields)} fields",
            **self._chosen.describe(_in_words(modes)),
        }

    def _list(self, listing: Listing, view: OpenedFile) -> None:
        if parse_beton(view) != self._beton:
            raise BadImage(CHANGED)
        allocations = Allocations(view, self._beton)
        used = [self._chosen.image, *(kept.source for kept in self._chosen.keep)]
        folder = stem(self.inputs.names[0], _SUFFIXES)
        for first in range(0, self._beton.rows, _CHUNK):
            count = min(_CHUNK, self._beton.rows - first)
            samples = self._beton.samples(view, first, count)
            faults, sizes = self._check(samples, first, used, allocations)
            others = {name: sizes[name] for name in used if name in sizes and name != used[0]}
            for row, sample in enumerate(samples):
                name = f"{folder}/{first + row:08d}"
                where = sample[self._chosen.image]
                label = int(sample[self._chosen.label]) if self._chosen.label else None
                fault = faults.get(row) or _fault_of(where)
                if fault:
                    listing.blame(name, fault)
                    continue
                for its in sizes:
                    self._modes[its][_mode_of(sample[its])] += 1
                values = json.dumps({other: int(its[row]) for other, its in others.items()})
                listing.add(
                    Row(
                        f"{name}.{'jpg' if where['mode'] == JPEG else 'png'}",
                        NO_LABEL if label is None else listing.code(label),
                        int(sizes[self._chosen.image][row]),
                        view.stamp,
                        place(0, first + row),
                        values if others else "",
                    )
                )

    def _check(
        self,
        samples: npt.NDArray[Any],
        first: int,
        used: Sequence[str],
        allocations: Allocations,
    ) -> tuple[dict[int, str], dict[str, npt.NDArray[np.int64]]]:
        """Compare where values are with the allocations of their samples."""
        rows = np.arange(first, first + len(samples), dtype=np.uint64)
        faults: dict[int, str] = {}
        of_images = {}
        for name in dict.fromkeys(used):
            field = self._beton.fields[name]
            if not field.is_allocated:
                continue
            stated = samples[name]
            starts = stated["start"] if stated.dtype.names else stated
            sizes = allocations.sizes(starts, rows)
            if field.holds == "image":
                area = stated["height"].astype(np.int64) * stated["width"]
                good = np.where(stated["mode"] == RAW, sizes == area * _CHANNELS, sizes > 0)
                good &= (stated["mode"] <= RAW) & (area > 0)
                of_images[name] = sizes
            elif field.holds == "array":
                good = sizes == field.bytes
            else:
                own = (sizes >= 0) & (sizes.astype(np.uint64) == stated["size"])
                good = own | (stated["size"] == 0)
            for row in np.flatnonzero(~good).tolist():
                faults.setdefault(row, f"its {name} is not where the table of allocations has it")
        return faults, of_images


_HOLDS = {"int": "integer", "float": "float"}
_FIELDS = {"bytes": Field("bytes"), "json": Field("json"), "image": Field("image")}
_FIELDS |= {"int": Field("number", "int64"), "float": Field("number", "float64")}


def _column(name: str, field: BetonField) -> Column:
    """Return a field as the column of a source."""
    holds = _HOLDS.get(field.holds, field.holds)
    if field.holds != "array":
        return Column(name, str(field), holds, field=_FIELDS[field.holds])
    try:
        return Column(name, str(field), holds, field=Field("array", field.dtype, field.shape))
    except ValueError as error:
        return Column(name, str(field), "", why=str(error))


def _start_of(where: Any) -> int:
    return int(where["start"] if where.dtype.names else where)


def _size_of(field: BetonField, where: Any, size: int | None) -> int:
    """Return the bytes of a value; ``size`` is that of an image."""
    if field.holds == "array":
        return field.bytes
    return int(where["size"]) if size is None else size


def _bytes_of(view: OpenedFile, where: Any, size: int) -> bytes:
    data = view.read(_start_of(where), size) if size else b""
    if len(data) != size:
        raise BadImage("the file is truncated")
    return data


def _mode_of(where: Any) -> tuple[int, ...]:
    """Return how an image is stored, of raw pixels with height and width."""
    return (JPEG,) if where["mode"] == JPEG else (RAW, int(where["height"]), int(where["width"]))


def _fault_of(where: Any) -> str:
    """Return why the pixels of a raw image cannot be stored, or ""."""
    try:
        if where["mode"] == RAW:
            require_pixels((*_mode_of(where)[1:], _CHANNELS))
    except BadImage as error:
        return str(error)
    return ""


def _pixels(where: Any, data: bytes) -> npt.NDArray[np.uint8]:
    _, height, width = _mode_of(where)
    if len(data) != height * width * _CHANNELS:
        raise BadImage(CHANGED)
    return np.frombuffer(data, np.uint8).reshape(height, width, _CHANNELS)


def _record(entry: Entry, where: Any, data: bytes, *, raw: bool) -> Record:
    """Return the record of an image; of pixels as they are, if ``raw``."""
    if where["mode"] == JPEG:
        return image_record(entry, data)
    pixels = _pixels(where, data)
    return raw_record(entry, data, *pixels.shape[:2]) if raw else pixel_record(entry, pixels)


def _in_words(modes: Counter[tuple[int, ...]]) -> str:
    """Return how images are stored: "3 JPEG, 2 raw, of 12 x 16, stored as PNG"."""
    jpegs = modes[JPEG,]
    raw = {sides: count for sides, count in modes.items() if sides != (JPEG,)}
    parts = [f"{jpegs:,} JPEG"] if jpegs else []
    if raw:
        sizes = (
            " x ".join(map(str, next(iter(raw))[1:])) if len(raw) == 1 else f"{len(raw):,} sizes"
        )
        parts.append(f"{sum(raw.values()):,} raw, of {sizes}, stored as PNG")
    return ", ".join(parts) or "none"


SOURCE = SourceKind(
    name=Ffcv.kind,
    title="Convert files of FFCV (.beton).",
    help="""Convert a file of FFCV to a dataset in DST.

    SRC is a .beton file of version 2, as FFCV 1.0 writes it; FFCV is not needed. JPEGs keep their
    bytes. Raw pixels become PNG files; --encode raw stores plain pixels. Numbers, JSON, bytes and
    arrays become fields. Files with custom fields are refused.

    \b
    Examples:
      shardkit convert ffcv train.beton dataset --to lmdb --dry-run
      shardkit convert ffcv train.beton dataset --to lmdb --classes names.txt
      shardkit convert ffcv train.beton dataset --to hdf5 --label class --keep box:boxes
    """,
    options=ColumnOptions,
    of_files=True,
    attaching=Attaching(
        title="A file of FFCV (.beton).",
        help="""Index the images in a file of FFCV where they are, as a dataset in INDEX_DIR.

        ARCHIVES is the .beton file. Its images must all be JPEGs, or all raw pixels of one size.

        \b
        Example:
          shardkit attach ffcv train.beton train-index --classes names.txt
        """,
    ),
    recognize=having(suffixes=(".beton",)),
    source=Ffcv,
)
