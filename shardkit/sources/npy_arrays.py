"""Arrays in .npy and .npz files as fields: latents, embeddings, spectrograms."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardkit.contracts import Entry, ReadTogether, Scan, SourceOptions, as_packed
from shardkit.errors import CHANGED, BadImage, UsageError, setting
from shardkit.kinds.field import Field, check_schema, default_schema
from shardkit.options import option
from shardkit.record import IMAGE, Record
from shardkit.sources.driver import ListedSource, Listing, Row
from shardkit.sources.file_labels import find_table, read_table
from shardkit.sources.images import described, require_inside
from shardkit.sources.inputs import place, place_of, refusing, require_rows
from shardkit.sources.labels import Value, classes_option, read_classes
from shardkit.sources.npy_files import (
    Array,
    labels_of,
    members,
    opened,
    opened_once,
    parse_header,
    read_records,
    require_intact,
    split_folders,
    usual_arrays,
    values,
    walk,
    whole,
)
from shardkit.system.files import as_name, as_text, require_local
from shardkit.system.text import name_list, quoted

PICKLED = (".pt", ".pth", ".pkl", ".pickle")
"""Suffixes of pickles."""

PICKLE = (
    "it is a pickle, which could run any code: if you trust it, load it and save it with "
    "numpy.save('x.npy', tensor.numpy())"
)
"""Why pickles are refused."""

_ONE = "array"
"""The field of .npy files."""

_NONE = "none"
"""Stands for no labels."""

_AT_ONCE = 4096
"""Files to list at a time."""

_Walked = tuple[str, str | None, str, tuple[Array, int] | None]
"""Path, class and file of a sample; and array and time of modification of a usual .npy file."""

_MOST_FIELDS = 64
_MOST_AXES = 32


@dataclass(frozen=True, kw_only=True)
class NpyOptions(SourceOptions):
    """The options of this source."""

    images: str | None = option(
        None, help="Array of images.", metavar="NAME", stored="image_array", shown="images"
    )
    labels: str | None = option(
        None,
        help=f"Array of labels, integers or strings; none: no labels. With {setting('arrays')} "
        "and a folder: a table in SRC (CSV, TSV, JSONL or Parquet) with the columns file_name "
        "and label.",
        metavar="NAME|FILE",
        shown="labels, if it exists",
        stored="label_array",
    )
    classes: str | None = classes_option()
    arrays: bool | None = option(
        None, help="Store arrays unchanged, as fields.", shown="treat them as images"
    )


class NpyArrays(ListedSource):
    """Arrays in NumPy's files, stored unchanged as fields. Nothing is unpickled.

    A folder has one file for each sample, perhaps in folders of classes, or with their labels in
    a table. Of a single file, each row is a sample. An .npy file gives the field ``array``, an
    .npz file one field for each of its arrays. Values become little-endian and C-contiguous.
    """

    kind = "npy"

    def __init__(self, path: str | Path, options: NpyOptions) -> None:
        require_local(path)
        super().__init__(path, options)
        if options.images is not None:
            raise UsageError(
                f"{setting('images')} selects an array of images; leave it out with "
                f"{setting('arrays', True)}"
            )
        self.exact_sizes = False
        self.class_names = read_classes(options.classes)
        self._first: dict[str, Any] = {}
        """Type and shape of each array of the first file."""
        self._rows = self.path.is_file()
        self._labels = options.labels
        self._table: str | None = None
        """The path of a table of labels."""
        if self._rows:
            if self.path.suffix not in (".npy", ".npz"):
                raise UsageError(f"{path} is neither an .npy nor an .npz file")
            return
        if self._labels not in (None, _NONE):
            self._table = str(find_table(self.path, str(self._labels)))
        self.splits = split_folders(self.path)

    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        """List the samples of each split, in order."""
        scan = super().scan(classes)
        label = {n: field for n, field in default_schema(scan.classes).items() if n != IMAGE}
        return replace(scan, fields={**self.schema, **label})

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of a sample."""
        if not self._rows:
            require_inside(entry.path)
        path = self._file(split, entry.path)
        arrays = {}
        for name in self.schema:
            open_array = opened if self._rows else opened_once
            with open_array(path, _member(path, name), entry.stamp) as view:
                array = _checked(parse_header(view))
                if not self._rows:
                    stored = whole(view, array)
                else:
                    row = place_of(entry.place)[1]
                    if array.fortran or row >= array.rows:
                        raise BadImage(CHANGED)
                    stored = values(view, array, row, 1)[0]
            arrays[name] = stored.astype(stored.dtype.newbyteorder("<"), copy=False)
        return self.complete(Record(entry.key, described(entry)), arrays)

    def read_together(self, split: str, entries: Sequence[Entry]) -> ReadTogether:
        """Return the records of .npy files as NumPy writes them, if all arrays have one shape."""
        field = self.schema.get(_ONE)
        if self._rows or len(self.schema) > 1 or field is None or not field.is_uniform:
            return super().read_together(split, entries)
        packed = as_packed(entries)
        try:
            require_inside(*packed.paths())
        except BadImage:  # `read` says which
            return super().read_together(split, entries)
        folder = os.path.join(self.path, split, "")
        kind = field.shape or (), field.values
        return read_records(folder, packed, str(field.stored_name(_ONE)), kind)

    def locate(self, split: str, entry: Entry) -> str:
        """Return the file of a sample, and its row."""
        path = self._file(split, entry.path)
        return f"{path} at row {place_of(entry.place)[1]}" if self._rows else path

    def list_images(self, listings: Mapping[str, Listing]) -> Mapping[str, str]:
        """List the samples in the order of rows or, in folders, of names."""
        if self._rows:
            (listing,) = listings.values()
            with refusing(self.path):
                self._list_rows(listing)
            label = self._labels or "none"
        else:
            if self.class_names is True:
                self.class_names = None  # folders may be new
            self.schema = {}
            self._first = {}
            labels = None if self._table is None else read_table(self._table)
            for split, listing in listings.items():
                self._list_folder(split, listing, labels)
            if labels:
                raise UsageError(
                    f"{self._table} has a label for {quoted(next(iter(labels)))}, which is not in "
                    f"{self.path}"
                )
            label = self._labels or "the folder"
        fields = {name: str(field) for name, field in self.schema.items()}
        return {**fields, "sample": "a row" if self._rows else "a file", "label": label}

    def _file(self, split: str, path: str) -> str:
        return str(self.path) if self._rows else os.path.join(self.path, split, as_name(path))

    def _list_rows(self, listing: Listing) -> None:
        path = str(self.path)
        names = members(path) if path.endswith(".npz") else [_ONE]
        if self._labels is None and path.endswith(".npz") and "labels" in names:
            self._labels = "labels"
        elif self._labels == _NONE:
            self._labels = None
        chosen = [name for name in names if name != self._labels]
        arrays, stamp = _read_headers(path, chosen)
        counts = {name: array.rows for name, array in arrays.items()}
        rows = next(iter(counts.values()))
        if len(set(counts.values())) > 1:
            raise BadImage(f"its arrays have different numbers of rows: {counts}")
        for name, array in arrays.items():
            if array.fortran:
                raise BadImage(f"{name} is in Fortran order", remedy="save np.ascontiguousarray(x)")
            if len(array.shape) == 1:
                raise BadImage(
                    f"{name} has only one number per row", remedy="save x.reshape(-1, 1)"
                )
            require_intact(path, _member(path, name))
        require_rows(path, rows)
        self.schema = _schema({n: a._replace(shape=a.shape[1:]) for n, a in arrays.items()})
        labels: Iterable[Any] = itertools.repeat(None, rows)
        if self._labels is not None:
            if path.endswith(".npy"):
                file = f"{self.path.parent / self._labels}.npy"
                member = ""
            elif self._labels in names:
                file = path
                member = self._labels
            else:
                raise BadImage(
                    f"it has no array {self._labels}; {setting('labels')} may be {name_list(names)}"
                )
            labels = labels_of(file, member, self._labels, rows)
        size = sum(array.row_bytes for array in arrays.values())
        for row, label in enumerate(labels):
            name = f"{as_text(self.path.stem)}/{row:08d}"
            listing.add(Row(name, listing.code(label), size, stamp, place(0, row)))

    def _list_folder(self, split: str, listing: Listing, labels: dict[str, Value] | None) -> None:
        """List a folder; remove its files from ``labels``."""
        before = len(listing.ignored)
        latest: Array | None = None
        for path, label, file, usual in self._walk(split, listing):
            try:
                if path.endswith(PICKLED):
                    raise BadImage(PICKLE)
                value: Value | None = label if self._labels is None else None
                if labels is not None:
                    value = labels.pop(as_text(os.path.join(split, path)), None)
                    if value is None:
                        raise BadImage(f"{self._labels} has no label for it")
                if usual is not None and usual[0] is latest:
                    stamp = usual[1]
                else:
                    if usual is None:
                        names = members(file) if path.endswith(".npz") else [_ONE]
                        arrays, stamp = _read_headers(file, names)
                    else:
                        arrays, stamp = {_ONE: _checked(usual[0])}, usual[1]
                    self._include(arrays)
                    size = sum(array.row_bytes * array.rows for array in arrays.values())
                    latest = usual and usual[0]
            except BadImage as error:
                listing.blame(path, error.stated)
                continue
            code = listing.code(value, is_name=self._labels is None)
            listing.add(Row(path, code, size, stamp))
        others = listing.ignored[before:]
        listing.ignored[before:] = [other for other in others if other.path != self._labels]

    def _walk(self, split: str, listing: Listing) -> Iterator[_Walked]:
        listed = walk(self.path / split, listing, (".npy", ".npz", *PICKLED))
        folder = os.path.join(self.path, split, "")
        while batch := [*itertools.islice(listed, _AT_ONCE)]:
            files = [folder + as_name(path) for path, _ in batch]
            for (path, label), file, usual in zip(batch, files, usual_arrays(files), strict=True):
                yield path, label, file, usual

    def _include(self, arrays: Mapping[str, Array]) -> None:
        """Extend the schema to the arrays of a sample: their shapes may vary, their types not."""
        kinds = {name: (array.dtype, array.shape) for name, array in arrays.items()}
        if kinds == self._first:
            return
        schema = _schema(arrays)
        if not self.schema:
            self.schema = schema
            self._first = kinds
        if schema.keys() != self.schema.keys():
            raise BadImage(
                f"it has the arrays {name_list(schema)}, "
                f"but the first file has {name_list(self.schema)}"
            )
        for name, field in schema.items():
            first = self.schema[name]
            if field.dtype != first.dtype:
                raise BadImage(
                    f"{name} is {field.dtype}, but it is {first.dtype} in the first file"
                )
        self.schema = {
            name: first if first.shape == schema[name].shape else Field("array", first.dtype)
            for name, first in self.schema.items()
        }


def _member(path: str, name: str) -> str:
    return name if path.endswith(".npz") else ""


def _read_headers(path: str, names: Sequence[str]) -> tuple[dict[str, Array], int]:
    """Return the arrays of a file, and its modification time."""
    if not names or len(names) > _MOST_FIELDS:
        raise BadImage(f"it has {len(names)} arrays, not 1 to {_MOST_FIELDS}")
    arrays = {}
    stamp = 0
    for name in names:
        with opened_once(path, _member(path, name), header=True) as view:
            arrays[name], stamp = _checked(parse_header(view)), view.stamp
    return arrays, stamp


def _checked(array: Array) -> Array:
    if array.dtype.kind not in "biuf":
        raise BadImage(f"its values are {array.dtype}, not numbers")
    if not 1 <= len(array.shape) <= _MOST_AXES:
        raise BadImage(f"it has {len(array.shape)} axes, not 1 to {_MOST_AXES}")
    return array


def _schema(arrays: Mapping[str, Array]) -> dict[str, Field]:
    try:
        schema = {
            name: Field("array", array.dtype.name, None if 0 in array.shape else array.shape)
            for name, array in arrays.items()
        }
        check_schema(schema)
    except ValueError as error:
        raise BadImage(str(error)) from error
    return schema
