"""HDF5 files of other programs as a source."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.contracts import (
    AttachableSource,
    Attaching,
    Entry,
    Images,
    Located,
    Range,
    Recognition,
    Source,
    SourceKind,
)
from shardkit.errors import BadImage, ConversionFailed, Problem, UsageError, setting
from shardkit.kinds.field import Field
from shardkit.kinds.packing import with_fields
from shardkit.record import Record
from shardkit.sources import hdf5_reader
from shardkit.sources.driver import FileSource, Listing, Row
from shardkit.sources.hdf5_images import SUFFIXES, Hdf5Images, Hdf5Options, datasets_of
from shardkit.sources.image_files import CHANGED
from shardkit.sources.images import (
    AS_ARRAYS,
    image_axes,
    image_record,
    is_image,
    pixel_record,
    raw_record,
    require_pixels,
)
from shardkit.sources.inputs import file_at, place, place_of, require_rows, stamp_of, stem
from shardkit.sources.kept import Kept, kind_of_bytes, parse_keep, value_of
from shardkit.sources.labels import Value, read_classes
from shardkit.sources.library_process import call
from shardkit.sources.located import located_in
from shardkit.sources.npy_files import read_array
from shardkit.sources.recognize import Overview, having
from shardkit.system.text import name_list

_CHUNK = 256
_SIGNATURE = b"\x89HDF\r\n\x1a\n"


class Hdf5(FileSource, AttachableSource):
    """HDF5 files with one dataset of images, read by ``h5py`` in a child process.

    A dataset of arrays becomes PNG files: uint8, height x width with 1, 3 or 4 channels, first or
    last. A dataset of bytes (variable length, strings or opaque) must hold encoded images; to list
    their sizes, a scan reads all of them.

    Args:
        pattern: A file, a folder, or names with ``{000..999}``, ``*`` or ``?``.
        options: The options. ``images`` names a dataset such as ``train/x``, and is required if
            there are several; kept numbers, texts and arrays keep their types.
    """

    kind = "hdf5"

    def __init__(self, pattern: str | Path, options: Hdf5Options) -> None:
        super().__init__(pattern, options, SUFFIXES)
        self.class_names = read_classes(options.classes)
        self._labels = options.labels
        self._keep = parse_keep(options.keep)
        self._others = {
            name.strip("/") for name in (self._labels or "", *(kept.source for kept in self._keep))
        }
        """Datasets other than images that are used."""
        self._images, self._shape = self._choose(options.images)
        self.exact_sizes = not self._shape
        self.settle(images=self._images)
        self.schema = self._fields()

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of an image."""
        return self._read(entry, self._record)

    def _read(self, entry: Entry, record_of: Callable[[Entry, bytes], Record]) -> Record:
        path, row = file_at(self.inputs.paths, entry.place)
        if stamp_of(path) != entry.stamp:
            raise BadImage(CHANGED)
        data = call(hdf5_reader.read, os.path.abspath(path), entry.stamp, self._images, row)
        record = record_of(entry, data)
        if not self._keep:
            return record
        kept = {field.name: self._value(field, path, entry.stamp, row) for field in self._keep}
        values = {name: value for name, value in kept.items() if value is not None}
        return with_fields(record, self.schema, values)

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
        for name, field in self.schema.items():
            if field.type.stored_apart:
                raise UsageError(
                    f"{setting('keep', name)}: a field of the kind {field.kind} {remedy}"
                )
        for path in self.inputs.paths:
            try:
                call(hdf5_reader.offsets, os.path.abspath(path), stamp_of(path), self._images, [])
            except BadImage as error:
                raise UsageError(
                    f"{path}: {self._images} {remedy}; {error.problem}", remedy=error.remedy
                ) from error
        return super().by_file(images)

    def located(self, split: str, entries: Sequence[Entry]) -> Iterator[Located | BadImage]:
        """Yield each of some images of one file, with the offset of its row."""
        if not entries:
            return iter(())
        path = os.path.abspath(self.inputs.paths[place_of(entries[0].place)[0]])

        def offsets(part: Sequence[Entry]) -> list[int | None]:
            rows = [place_of(entry.place)[1] for entry in part]
            return call(hdf5_reader.offsets, path, part[0].stamp, self._images, rows)

        return located_in(path, entries, offsets, partial(self._as_stored, split))

    def _as_stored(self, split: str, entry: Entry) -> Record:
        """Return the record of an image; of an array, with its pixels as they are."""
        return self._read(entry, self._raw_record if self._shape else self._record)

    def _raw_record(self, entry: Entry, data: bytes) -> Record:
        height, width, _ = self._shape
        return raw_record(entry, data, height, width)

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
        data = call(hdf5_reader.value, os.path.abspath(path), stamp, name, row, kept.optional)
        if not data:
            return None
        if data[:1] == b"B":
            return value_of(kept, self.schema[kept.name], data[1:])
        array = read_array(data[1:])
        return array.tolist() if self.schema[kept.name].kind == "json" else array

    def locate(self, split: str, entry: Entry) -> str:
        """Return file, dataset and row of an image."""
        number, row = place_of(entry.place)
        return f"{self.inputs.paths[number]}: {self._images} at row {row}"

    def list_images(self, listings: Mapping[str, Listing]) -> Mapping[str, str]:
        """List the rows of all files, in order.

        Raises:
            UsageError: If the datasets are missing, differ between files or cannot be images.
        """
        (listing,) = listings.values()
        listing.ignored += self.inputs.others
        for number, path in enumerate(self.inputs.paths):
            try:
                self._list(listing, number, path)
            except BadImage as error:
                raise UsageError(f"{path}: {error.problem}", remedy=error.remedy) from error
        kind = f"uint8 {'x'.join(map(str, self._shape))}" if self._shape else "encoded images"
        return {
            "files": f"{len(self.inputs.paths):,}, with {len(listing):,} rows",
            "images": f"{self._images}: {kind}",
            "label": self._labels or "no dataset",
            **{kept.name: f"{kept.source}: {self.schema[kept.name]}" for kept in self._keep},
        }

    def _choose(self, images: str | None) -> tuple[str, tuple[int, ...]]:
        """Return name and row shape of the dataset of images; no shape for encoded ones."""
        path = self.inputs.paths[0]
        try:
            datasets = datasets_of(path)
        except BadImage as error:
            raise UsageError(f"{path}: {error.problem}", remedy=error.remedy) from error
        usable = [
            name
            for name, (shape, kind) in datasets.items()
            if _is_images(shape, kind) and name not in self._others
        ]
        if images is None and len(usable) > 1:
            usable = [name for name in usable if _holds_images(path, name, *datasets[name])]
        if images is None and len(usable) == 1:
            images = usable[0]
        listed = name_list(f"{name} ({kind} {shape})" for name, (shape, kind) in datasets.items())
        if images is None or images.strip("/") not in datasets:
            what = (
                f"no dataset {images}" if images else f"{len(usable)} datasets that may be images"
            )
            remedy = "" if images or usable else f"; for arrays without images, {AS_ARRAYS}"
            if len(usable) > 1 and len(ends := {name.rpartition("/")[2] for name in usable}) == 1:
                remedy = f"; if each is one image, choose images='*/{ends.pop()}'"
            raise UsageError(
                f"{path} has {what};",
                remedy=f"choose with {setting('images')} from {listed or 'none'}{remedy}",
            )
        shape, kind = datasets[images.strip("/")]
        if not _is_images(shape, kind):
            raise UsageError(
                f"{path}: {images} is {kind} {shape}: images are uint8 with 1, 3 or 4 channels, "
                "or bytes;",
                remedy=f"keep other arrays next to images with {setting('keep')}, or {AS_ARRAYS}",
            )
        if kind != "bytes":
            try:
                require_pixels(shape[1:])
            except BadImage as error:
                raise ConversionFailed(
                    f"{path}: {images}: {error.problem}", remedy=error.remedy
                ) from error
        return images.strip("/"), tuple(shape[1:])

    def _fields(self) -> dict[str, Field]:
        """Return the fields to keep, with the types of their datasets in the first file."""
        path = self.inputs.paths[0]
        datasets = datasets_of(path) if self._keep else {}
        fields = {}
        for kept in self._keep:
            if kept.pointer is not None:
                raise UsageError(f"{setting('keep', str(kept))}: a dataset has no parts in JSON")
            name = kept.source.strip("/")
            if name not in datasets and (not kept.optional or kept.kind is None):
                names = name_list(datasets) or "none"
                raise UsageError(f"{path} has no dataset {kept.source}; it has {names}")
            shape, kind = datasets.get(name, ([0], "bytes"))
            if kind == "other" or not shape:
                raise UsageError(f"{path}: {kept.source} is not a dataset of rows of plain values")
            if kept.kind is not None:
                fields[kept.name] = kept.field(kept.kind)
            elif kind == "bytes":
                first = call(hdf5_reader.value, os.path.abspath(path), stamp_of(path), name, 0)
                fields[kept.name] = Field(kind_of_bytes(first[1:]))
            elif shape[1:]:
                fields[kept.name] = Field("array", kind, None if 0 in shape else shape[1:])
            else:
                fields[kept.name] = Field("number", kind)
        return fields

    def _list(self, listing: Listing, number: int, path: str) -> None:
        stamp = stamp_of(path)
        full = os.path.abspath(path)
        datasets = datasets_of(path)
        if self._images not in datasets:
            raise BadImage(f"there is no dataset {self._images}")
        shape, kind = datasets[self._images]
        if tuple(shape[1:]) != self._shape or not _is_images(shape, kind):
            raise BadImage(f"{self._images} is {kind} {shape}, unlike in the first file")
        require_rows(path, shape[0])
        for kept in self._keep:
            rows, _ = datasets.get(kept.source.strip("/"), ([shape[0]] * kept.optional, ""))
            if rows[:1] != shape[:1]:
                count = rows[0] if rows else "no"
                raise BadImage(f"it has {shape[0]} images, but {count} values of {kept.source}")
        listing.ignored += [
            Problem(path=f"{self.inputs.names[number]}:{name}", reason="a dataset that is not used")
            for name in datasets
            if name not in (self._images, *self._others)
        ]
        folder = stem(self.inputs.names[number], SUFFIXES)
        for start in range(0, shape[0] or 1, _CHUNK):  # also checks the labels of no images
            count = min(_CHUNK, shape[0] - start)
            sizes = [math.prod(self._shape)] * count
            if not self._shape:
                sizes = call(hdf5_reader.sizes, full, stamp, self._images, start, count)
            labels: Sequence[Value | None] = [None] * count
            if self._labels is not None:
                some = Range(start, count)
                labels = call(hdf5_reader.labels, full, stamp, self._labels, shape[0], some)
            for row, (size, label) in enumerate(zip(sizes, labels, strict=True), start):
                code = listing.code(label)
                name = f"{folder}/{row:08d}{'.png' if self._shape else ''}"
                listing.add(Row(name, code, size, stamp, place(number, row)))


def _is_images(shape: Sequence[int], kind: str) -> bool:
    if kind == "bytes":
        return len(shape) == 1
    try:
        image_axes(np.dtype(kind), shape[1:])
    except (BadImage, TypeError):
        return False
    return True


def _holds_images(path: str, name: str, shape: Sequence[int], kind: str) -> bool:
    """Return whether a dataset that may be images is no column of labels or texts."""
    if kind != "bytes":
        return math.prod(shape[1:]) > 1
    data = call(hdf5_reader.value, os.path.abspath(path), stamp_of(path), name, 0)
    return is_image(data[1:])


def _open(pattern: str | Path, options: Hdf5Options) -> Source:
    """Open a source of rows or, if each dataset is an image, of datasets."""
    is_each = Hdf5Images.fits(pattern, options)
    return Hdf5Images(pattern, options) if is_each else Hdf5(pattern, options)


def _recognize(seen: Overview) -> Iterator[Recognition]:
    """Yield what shows HDF5 files; only files of MATLAB 7.3 or later are such."""
    if seen.path.suffix.lower() != ".mat":
        yield from having(suffixes=(".h5", ".hdf5"))(seen)
    elif _SIGNATURE in seen.ends(size=1024):
        yield Recognition("a file .mat of HDF5")


SOURCE = SourceKind(
    name=Hdf5.kind,
    title="Convert HDF5 files of other programs.",
    help="""Convert a dataset of images in HDF5 files to a dataset in DST.

    SRC is a file, a folder of .h5, .hdf5 or .mat files (MATLAB 7.3), or quoted names with
    {000..999}, * or ?. The images are arrays (uint8, which become PNG files), or bytes of
    encoded images. h5py reads them, in a separate process, so that a damaged file cannot crash the
    conversion. Links to other files
    are not followed. If each dataset is one image, its group is the class; --images '*/image'
    --labels '*/label' names datasets of images and of their labels.

    \b
    Examples:
      shardkit convert hdf5 camelyon.h5 dataset --to lmdb --images x --labels y
      shardkit convert hdf5 'part-*.h5' dataset --to webdataset --images train/jpeg --dry-run
    """,
    options=Hdf5Options,
    of_files=True,
    refuses_shards=True,
    attaching=Attaching(
        title="HDF5 files with a dataset of images.",
        help="""Index the images in HDF5 files where they are, as a dataset in INDEX_DIR.

        ARCHIVES is a file, a folder of them, or quoted names with {000..999}, * or ?. Images are
        encoded, or arrays of height x width x 3 in uint8, in a dataset without compression.

        \b
        Example:
          shardkit attach hdf5 camelyon.h5 camelyon-index --images x --labels y
        """,
    ),
    recognize=_recognize,
    source=_open,
)
