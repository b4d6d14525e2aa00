"""HDF5 files of other programs as a source."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.contracts import Entry, Images, Located, Scan, SourceKind, SourceOption
from shardkit.errors import BadImage, Problem, UsageError
from shardkit.record import (
    LABEL_FIELD,
    META_FIELD,
    NO_LABEL,
    STORED_APART,
    Field,
    Record,
    dump_json,
)
from shardkit.sources.images import image_axes, image_record, pixel_record
from shardkit.sources.inputs import CHANGED, find_files, place, place_of, stem
from shardkit.sources.kept import Kept, kind_of_bytes, parse_keep, value_of, with_fields
from shardkit.sources.labels import Value, read_classes
from shardkit.sources.library_process import call
from shardkit.sources.listing import FileSource, Listing, scan_of
from shardkit.sources.located import located_in
from shardkit.sources.npy_files import read_array

_READER = "shardkit.sources.hdf5_reader"
_SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5")
_CHUNK_BYTES = 1 << 26
_CHUNK = 256


class Hdf5(FileSource):
    """HDF5 files with one dataset of images, read by ``h5py`` in a child process.

    A dataset of arrays becomes PNG files: uint8, height x width with 1, 3 or 4 channels, first or
    last. A dataset of bytes (variable length, strings or opaque) must hold encoded images; to list
    their sizes, a scan reads all of them.

    Args:
        pattern: A file, a folder, or names with ``{000..999}``, ``*`` or ``?``.
        images: Name of the dataset of images, such as ``train/x``; required if there are several.
        labels: Name of the dataset of labels, integers or texts, one for each image.
        keep: More datasets with a value for each image, as ``[NAME=]DATASET[:KIND][?]`` with commas
            between. Numbers, texts and arrays keep their types; ``mask=DATASET:mask`` is an image.
            Files may lack those with ``?``.
        classes: A text file with a class name in each line.
    """

    kind = "hdf5"

    def __init__(
        self,
        pattern: str | Path,
        *,
        images: str | None = None,
        labels: str | None = None,
        keep: str | None = None,
        classes: str | None = None,
        _reopened: bool = False,
    ) -> None:
        self._files = find_files(pattern, _SUFFIXES)
        self._names = read_classes(classes)
        self._reopened = _reopened
        self._labels = labels
        self._keep = parse_keep(keep)
        self._others = {
            name.strip("/") for name in (labels or "", *(kept.source for kept in self._keep))
        }
        """Datasets other than images that are used."""
        self._images, self._shape = self._choose(images)
        self._schema = self._fields()
        named = True if classes or _reopened else None
        options = {
            "image_dataset": self._images,
            "label_dataset": labels,
            "keep": keep,
            "class_names": named,
        }
        super().__init__(pattern, options)

    @classmethod
    def find(cls, path: Path, described: Mapping[str, Mapping[str, Any]]) -> Hdf5:
        """Open the files that a dataset was made from."""
        options = next(iter(described.values()))
        return cls(
            path,
            images=options.get("image_dataset"),
            labels=options.get("label_dataset"),
            keep=options.get("keep"),
            _reopened=bool(options.get("class_names")),
        )

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of an image."""
        return self._read(entry, self._record)

    def _read(self, entry: Entry, record_of: Callable[[Entry, bytes], Record]) -> Record:
        number, row = place_of(entry.place)
        path = self._files.paths[number]
        if _stamp(path) != entry.stamp:
            raise BadImage(CHANGED)
        data = call(_READER, "read", os.path.abspath(path), entry.stamp, self._images, row)
        record = record_of(entry, data)
        if not self._keep:
            return record
        kept = {each.name: self._value(each, path, entry.stamp, row) for each in self._keep}
        values = {name: value for name, value in kept.items() if value is not None}
        return with_fields(record, self._schema, values)

    @property
    def raw_shape(self) -> tuple[int, int, int] | None:
        """Height, width and channels of arrays; None for encoded images."""
        if not self._shape:
            return None
        height, width, channels = (*self._shape, 0)[:3]
        return height, width, channels

    def by_file(self, images: Images) -> Sequence[tuple[Path, Images]]:
        """Return each file with its images.

        Raises:
            UsageError: If a record has bytes that the files do not have as they are.
        """
        remedy = "cannot be read in place: use `shardkit convert`"
        if self._shape and (len(self._shape) != 3 or self._shape[2] != 3):
            raise UsageError(
                f"{self._images} has rows of {'x'.join(map(str, self._shape))}; arrays other than "
                f"height x width x 3 {remedy}"
            )
        for name, field in self._schema.items():
            if field.kind in STORED_APART:
                raise UsageError(f"--keep {name}: a field of the kind {field.kind} {remedy}")
        for path in self._files.paths:
            try:
                call(_READER, "offsets", os.path.abspath(path), _stamp(path), self._images, [])
            except BadImage as error:
                raise UsageError(f"{path}: {self._images} {remedy}; {error}") from error
        rows: list[list[int]] = [[] for _ in self._files.paths]
        for row, entry in enumerate(images.entries):
            rows[place_of(entry.place)[0]].append(row)
        return [
            (Path(path), images.take(some))
            for path, some in zip(self._files.paths, rows, strict=True)
        ]

    def located(self, split: str, entries: Sequence[Entry]) -> Iterator[Located | BadImage]:
        """Yield each of some images of one file, with the offset of its row."""
        if not entries:
            return iter(())
        path = os.path.abspath(self._files.paths[place_of(entries[0].place)[0]])

        def offsets(some: Sequence[Entry]) -> bytes:
            rows = [place_of(entry.place)[1] for entry in some]
            return call(_READER, "offsets", path, some[0].stamp, self._images, rows)

        return located_in(path, entries, offsets, partial(self._as_stored, split))

    def _as_stored(self, split: str, entry: Entry) -> Record:
        """Return the record of an image; of an array, with its pixels as they are."""
        return self._read(entry, self._raw_record if self._shape else self._record)

    def _raw_record(self, entry: Entry, data: bytes) -> Record:
        height, width, _ = self._shape
        meta = {"path": entry.path, "width": width, "height": height}
        fields = {"raw": data, META_FIELD: dump_json(meta)}
        if entry.label != NO_LABEL:
            fields[LABEL_FIELD] = b"%d" % entry.label
        return Record(entry.key, fields)

    def _record(self, entry: Entry, data: bytes) -> Record:
        if not self._shape:
            return image_record(entry, data)
        if len(data) != math.prod(self._shape):
            raise BadImage(CHANGED)
        pixels = np.frombuffer(data, np.uint8).reshape(self._shape)
        if image_axes(np.dtype(np.uint8), self._shape) == "CHW":
            pixels = pixels.transpose(1, 2, 0)
        return pixel_record(entry, np.ascontiguousarray(pixels))

    def _value(self, kept: Kept, path: str, stamp: int, row: int) -> Any:
        """Return the value of a field to keep, or None if the file lacks the dataset."""
        name = kept.source.strip("/")
        data = call(_READER, "value", os.path.abspath(path), stamp, name, row, kept.optional)
        if not data:
            return None
        if data[:1] == b"B":
            return value_of(kept, self._schema[kept.name], data[1:])
        array = read_array(data[1:])
        return array.tolist() if self._schema[kept.name].kind == "json" else array

    def locate(self, split: str, entry: Entry) -> str:
        """Return file, dataset and row of an image."""
        number, row = place_of(entry.place)
        return f"{self._files.paths[number]}: {self._images} at row {row}"

    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        """List the rows of all files, in order.

        Raises:
            UsageError: If the datasets are missing, differ between files or cannot be images.
        """
        listing = self._listing()
        for number, path in enumerate(self._files.paths):
            try:
                self._list(listing, number, path)
            except BadImage as error:
                raise UsageError(f"{path}: {error}") from error
        labels = listing.labels.assign(classes, self._names, reopened=self._reopened)
        kind = f"uint8 {'x'.join(map(str, self._shape))}" if self._shape else "encoded images"
        understood = {
            "files": f"{len(self._files.paths):,}, with {len(listing):,} rows",
            "images": f"{self._images}: {kind}",
            "label": f"{self._labels or 'no dataset'}: {listing.labels.describe()}",
            **{kept.name: f"{kept.source}: {self._schema[kept.name]}" for kept in self._keep},
        }
        exact = not self._shape
        return scan_of(
            self, {"": listing}, labels, understood, exact_sizes=exact, more=self._schema
        )

    def _choose(self, images: str | None) -> tuple[str, tuple[int, ...]]:
        """Return name and row shape of the dataset of images; no shape for encoded ones."""
        path = self._files.paths[0]
        try:
            found = _datasets(path)
        except BadImage as error:
            raise UsageError(f"{path}: {error}") from error
        usable = [
            name
            for name, (shape, kind) in found.items()
            if _is_images(shape, kind) and name not in self._others
        ]
        if images is None and len(usable) == 1:
            images = usable[0]
        listed = ", ".join(f"{name} ({kind} {shape})" for name, (shape, kind) in found.items())
        if images is None or images.strip("/") not in found:
            what = (
                f"no dataset {images}" if images else f"{len(usable)} datasets that may be images"
            )
            raise UsageError(f"{path} has {what}; choose with --images from {listed or 'none'}")
        shape, kind = found[images.strip("/")]
        if not _is_images(shape, kind):
            raise UsageError(
                f"{path}: {images} is {kind} {shape}: images are uint8 with 1, 3 or 4 channels, or "
                "bytes"
            )
        return images.strip("/"), tuple(shape[1:])

    def _fields(self) -> dict[str, Field]:
        """Return the fields to keep, with the types of their datasets in the first file."""
        path = self._files.paths[0]
        found = _datasets(path) if self._keep else {}
        fields = {}
        for kept in self._keep:
            if kept.pointer is not None:
                raise UsageError(f"--keep {kept}: a dataset has no parts in JSON")
            name = kept.source.strip("/")
            if name not in found and (not kept.optional or kept.kind is None):
                known = ", ".join(found) or "none"
                raise UsageError(f"{path} has no dataset {kept.source}; it has {known}")
            shape, kind = found.get(name, ([0], "bytes"))
            if kind == "other" or not shape:
                raise UsageError(f"{path}: {kept.source} is not a dataset of rows of plain values")
            if kept.kind is not None:
                fields[kept.name] = kept.field(kept.kind)
            elif kind == "bytes":
                first = call(_READER, "value", os.path.abspath(path), _stamp(path), name, 0)
                fields[kept.name] = Field(kind_of_bytes(first[1:]))
            elif shape[1:]:
                fields[kept.name] = Field("array", kind, None if 0 in shape else shape[1:])
            else:
                fields[kept.name] = Field("number", kind)
        return fields

    def _list(self, listing: Listing, number: int, path: str) -> None:
        stamp, full = _stamp(path), os.path.abspath(path)
        found = _datasets(path)
        if self._images not in found:
            raise BadImage(f"there is no dataset {self._images}")
        shape, kind = found[self._images]
        if tuple(shape[1:]) != self._shape or not _is_images(shape, kind):
            raise BadImage(f"{self._images} is {kind} {shape}, unlike in the first file")
        stated: list[Value] | None = None
        if self._labels is not None:
            stated = json.loads(call(_READER, "labels", full, stamp, self._labels))
            if len(stated or ()) != shape[0]:
                raise BadImage(f"it has {shape[0]} images, but {len(stated or ())} labels")
        for kept in self._keep:
            rows, _ = found.get(kept.source.strip("/"), ([shape[0]] * kept.optional, ""))
            if rows[:1] != shape[:1]:
                count = rows[0] if rows else "no"
                raise BadImage(f"it has {shape[0]} images, but {count} values of {kept.source}")
        listing.ignored += [
            Problem(path=f"{self._files.names[number]}:{name}", reason="a dataset that is not used")
            for name in found
            if name not in (self._images, *self._others)
        ]
        folder = stem(self._files.names[number], _SUFFIXES)
        for start in range(0, shape[0], _CHUNK):
            count = min(_CHUNK, shape[0] - start)
            sizes = [math.prod(self._shape)] * count
            if not self._shape:
                sizes = json.loads(call(_READER, "sizes", full, stamp, self._images, start, count))
            for row, size in enumerate(sizes, start):
                code = NO_LABEL if stated is None else listing.labels.code(stated[row])
                name = f"{folder}/{row:08d}{'.png' if self._shape else ''}"
                listing.add(name, code, size, stamp, place(number, row))


def _datasets(path: str) -> dict[str, tuple[list[int], str]]:
    found = json.loads(call(_READER, "datasets", os.path.abspath(path), _stamp(path)))
    return {name: (shape, kind) for name, shape, kind in found}


def _stamp(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError as error:
        raise BadImage(f"{path} cannot be read: {error.strerror}") from error


def _is_images(shape: Sequence[int], kind: str) -> bool:
    if kind == "bytes":
        return len(shape) == 1
    try:
        image_axes(np.dtype(kind), shape[1:])
    except (BadImage, TypeError):
        return False
    return True


SOURCE = SourceKind(
    name=Hdf5.kind,
    title="Convert HDF5 files of other programs.",
    help="""Convert a dataset of images in HDF5 files to a dataset in DST.

    SRC is a file, a folder of .h5 or .hdf5 files, or quoted names with {000..999}, * or ?. The
    images are arrays (uint8, which become PNG files), or bytes of encoded images. h5py reads them,
    in a separate process, so that a damaged file cannot crash the conversion. Links to other files
    are not followed.

    \b
    Examples:
      shardkit convert hdf5 camelyon.h5 dataset --to lmdb --images x --labels y
      shardkit convert hdf5 'part-*.h5' dataset --to webdataset --images train/jpeg --dry-run
    """,
    options=(
        SourceOption(
            flags="--images",
            metavar="NAME",
            help="Dataset of images.  [default: the only one that may be]",
        ),
        SourceOption(
            flags="--labels",
            metavar="NAME",
            help="Dataset of labels, integers or texts.  [default: no labels]",
        ),
        SourceOption(
            flags="--keep",
            metavar="[NAME=]DATASET[:KIND][?],...",
            help="More datasets to keep, such as age,mask=masks:mask,boxes=train/boxes:boxes. "
            "Files may lack those with ?.",
        ),
        SourceOption(
            flags="--classes",
            metavar="FILE",
            help="Class names, one per line: of label 0, 1, ..., or in the order of labels.",
        ),
    ),
    of_files=True,
    open=Hdf5,
    find=Hdf5.find,
)
