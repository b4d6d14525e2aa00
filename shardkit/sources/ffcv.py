"""FFCV's files (.beton) as a source."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.contracts import AttachableSource, Attaching, Entry, Images, SourceKind
from shardkit.errors import CHANGED, BadImage, UsageError
from shardkit.kinds.field import Field
from shardkit.sources.beton_file import (
    JPEG,
    RAW,
    Allocations,
    Beton,
    BetonField,
    parse_beton,
    without_terminator,
)
from shardkit.sources.column_source import Cells, ColumnSource, RowFile, row_files
from shardkit.sources.columns import Column, ColumnOptions, plain_column
from shardkit.sources.driver import Listing
from shardkit.sources.images import require_pixels
from shardkit.sources.inputs import OpenedFile, find_files, reading, refusing
from shardkit.sources.recognize import having

_SUFFIXES = (".beton", ".beton.gz", ".ffcv")
_CHUNK = 1 << 14
"""Samples to list at a time."""
_CHANNELS = 3


class Ffcv(ColumnSource, AttachableSource):
    """An FFCV file, read without its package; nothing is unpickled.

    JPEGs keep their bytes, raw pixels become PNG files.
    """

    kind = "ffcv"
    images = ("image",)
    is_eager = True
    rows_are = "samples"

    def __init__(self, path: str | Path, options: ColumnOptions) -> None:
        inputs = find_files(path, _SUFFIXES)
        if len(inputs.paths) > 1:
            raise UsageError(
                f"{path} matches {len(inputs.paths)} files",
                remedy=f"convert each separately, such as {inputs.paths[0]}, and merge "
                "those of one split with `shardkit merge`",
            )
        with refusing(inputs.paths[0]), reading(inputs.paths[0]) as view:
            self._beton = parse_beton(view)
        columns = map(_column, *zip(*self._beton.fields.items(), strict=True))
        files = row_files(inputs, _SUFFIXES)
        super().__init__(path, options, files, columns)
        self.others = inputs.others
        self._modes: dict[str, Counter[tuple[int, ...]]] = {}
        """Images of each mode, by field; the mode of raw pixels has their size."""

    def list_images(self, listings: Mapping[str, Listing]) -> Mapping[str, str]:
        """List the samples, in order."""
        fields = self._beton.fields.items()
        self._modes = {name: Counter() for name, field in fields if field.holds == "image"}
        understood = super().list_images(listings)
        self.exact_sizes = all(mode == JPEG for mode, *_ in self._modes[self.image.name])
        return understood

    def image_words(self) -> str:
        """Return how images are stored: "3 JPEG, 2 raw, of 12 x 16, stored as PNG"."""
        return _in_words(self._modes[self.image.name])

    @property
    def raw_shape(self) -> tuple[int, int, int] | None:
        """Height, width and channels if a scan found only raw pixels of one size; else None."""
        modes = list(self._modes.get(self.image.name, ()))
        if len(modes) != 1 or modes[0][0] != RAW:
            return None
        _, height, width = modes[0]
        return height, width, _CHANNELS

    def by_file(self, images: Images) -> Sequence[tuple[Path, Images]]:
        """Return the file with its images; UsageError if it lacks a record's bytes as they are."""
        modes = self._modes.get(self.image.name, Counter())
        raw = sum(count for (mode, *_), count in modes.items() if mode == RAW)
        if raw and not self.raw_shape:
            raise UsageError(
                f"{raw:,} of {modes.total():,} images are raw pixels; images can be read in place "
                "only if all are JPEGs, or all are raw pixels of one size",
                remedy="convert it with `shardkit convert`",
            )
        return super().by_file(images)

    def is_in_place(self, column: Column, field: Field) -> bool:
        """Return whether the file has the values of a field as a field does."""
        if field != column.field:
            return False
        if column.holds == "array":
            return self._beton.fields[column.name].dtype == field.values
        is_main = column == self.image
        return is_main or all(mode == JPEG for mode, *_ in self._modes.get(column.name, ()))

    def rows(self, file: RowFile, view: OpenedFile) -> Iterator[Cells]:
        """Yield the samples."""
        with refusing(file.path):
            if parse_beton(view) != self._beton:
                raise BadImage(CHANGED)
            allocations = Allocations(view, self._beton)
            named = filter(None, [self.label.name, self.name])
            used = [self.image.name, *named, *(kept.source for kept in self.keep)]
            for first in range(0, self._beton.rows, _CHUNK):
                count = min(_CHUNK, self._beton.rows - first)
                samples = self._beton.samples(view, first, count)
                faults, of_images = self._check(samples, first, used, allocations)
                for row, sample in enumerate(samples):
                    sizes = {name: int(its[row]) for name, its in of_images.items()}
                    fault = faults.get(row) or _fault_of(sample[self.image.name])
                    for name in sizes if not fault else ():
                        self._modes[name][_mode_of(sample[name])] += 1
                    cells = _Sample(self._beton, view, first + row, sample, sizes)
                    cells.fault = fault
                    yield cells

    def row(self, file: RowFile, view: OpenedFile, entry: Entry) -> Cells:
        """Return a sample."""
        if entry.place >= self._beton.rows:
            raise BadImage(CHANGED)
        (sample,) = self._beton.samples(view, entry.place, 1)
        sizes = {self.image.name: entry.bytes, **json.loads(entry.values or "{}")}
        return _Sample(self._beton, view, entry.place, sample, sizes)

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
            values = samples[name]
            starts = values["start"] if values.dtype.names else values
            sizes = allocations.sizes(starts, rows)
            if field.holds == "image":
                area = values["height"].astype(np.int64) * values["width"]
                good = np.where(values["mode"] == RAW, sizes == area * _CHANNELS, sizes > 0)
                good &= (values["mode"] <= RAW) & (area > 0)
                of_images[name] = sizes
            elif field.holds == "array":
                good = sizes == field.bytes
            else:
                is_exact = (sizes >= 0) & (sizes.astype(np.uint64) == values["size"])
                good = is_exact | (values["size"] == 0)
            for row in np.flatnonzero(~good).tolist():
                faults.setdefault(row, f"its {name} is not where the allocation table lists it")
        return faults, of_images


class _Sample(Cells):
    """A sample: row ``row`` of a file.

    ``sizes`` are the bytes of its images, by field; the image comes first.
    """

    def __init__(
        self,
        beton: Beton,
        view: OpenedFile,
        row: int,
        sample: Any,
        sizes: Mapping[str, int],
    ) -> None:
        self._beton = beton
        self._view = view
        self.place = row
        self._sample = sample
        self._sizes = sizes
        self.fault = ""
        """Why it cannot be read."""
        image, *others = sizes
        self.suffix = ".jpg" if sample[image]["mode"] == JPEG else ".png"
        self.values = json.dumps({name: sizes[name] for name in others}) if others else ""

    def size(self, name: str) -> int:
        if self.fault:
            raise BadImage(self.fault)
        return self._sizes[name]

    def value(self, column: Column) -> Any:
        name = column.name
        field = self._beton.fields[name]
        where = self._sample[name]
        if not field.is_allocated:
            return where.item()
        size = field.bytes if field.holds == "array" else self._sizes.get(name)
        size = int(where["size"]) if size is None else size
        data = self._view.read(_start_of(where), size) if size else b""
        if len(data) != size:
            raise BadImage("the file is truncated")
        if field.holds == "array":
            return np.frombuffer(data, field.dtype).reshape(field.shape)
        if field.holds == "image" and where["mode"] != JPEG:
            return _pixels(where, data)
        return without_terminator(data) if field.holds == "json" else data

    def offset(self, name: str) -> int | None:
        return _start_of(self._sample[name])


_NUMBERS = {"int": "int64", "float": "float64"}


def _column(name: str, field: BetonField) -> Column:
    """Return a field as the column of a source."""
    if field.holds != "array":
        return plain_column(name, str(field), _NUMBERS.get(field.holds, field.holds))
    try:
        return Column(name, str(field), "array", field=Field("array", field.dtype, field.shape))
    except ValueError as error:
        return Column(name, str(field), "", why=str(error))


def _start_of(where: Any) -> int:
    return int(where["start"] if where.dtype.names else where)


def _mode_of(where: Any) -> tuple[int, ...]:
    """Return how an image is stored, of raw pixels with height and width."""
    return (JPEG,) if where["mode"] == JPEG else (RAW, int(where["height"]), int(where["width"]))


def _fault_of(where: Any) -> str:
    """Return why the pixels of a raw image cannot be stored, or ""."""
    try:
        if where["mode"] == RAW:
            require_pixels((*_mode_of(where)[1:], _CHANNELS))
    except BadImage as error:
        return error.stated
    return ""


def _pixels(where: Any, data: bytes) -> npt.NDArray[np.uint8]:
    _, height, width = _mode_of(where)
    if len(data) != height * width * _CHANNELS:
        raise BadImage(CHANGED)
    return np.frombuffer(data, np.uint8).reshape(height, width, _CHANNELS)


def _in_words(modes: Counter[tuple[int, ...]]) -> str:
    """Return how images are stored: "3 JPEG, 2 raw, of 12 x 16, stored as PNG"."""
    jpegs = modes[JPEG,]
    raw = {sides: count for sides, count in modes.items() if sides != (JPEG,)}
    words = [f"{jpegs:,} JPEG"] if jpegs else []
    if raw:
        sizes = (
            " x ".join(map(str, next(iter(raw))[1:])) if len(raw) == 1 else f"{len(raw):,} sizes"
        )
        words.append(f"{sum(raw.values()):,} raw, of {sizes}, stored as PNG")
    return ", ".join(words) or "none"


SOURCE = SourceKind(
    name=Ffcv.kind,
    title="Convert FFCV files (.beton).",
    help="""Convert an FFCV file to a dataset in DST.

    SRC is a .beton file of version 2, as written by FFCV 1.0. FFCV itself is not needed. JPEGs keep
    their bytes. Raw pixels become PNG files unless you use --encode raw. Numbers, JSON, bytes and
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
        title="An FFCV file (.beton).",
        help="""Index the images in an FFCV file where they are, as a dataset in INDEX_DIR.

        ARCHIVES is the .beton file. Its images must all be JPEGs, or all raw pixels of one size.

        \b
        Example:
          shardkit attach ffcv train.beton train-index --classes names.txt
        """,
    ),
    recognize=having(suffixes=(".beton",)),
    source=Ffcv,
)
