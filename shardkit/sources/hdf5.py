"""HDF5 files of other programs as a source."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
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
from shardkit.errors import BadImage, UsageError, setting
from shardkit.kinds.field import Field
from shardkit.kinds.packing import with_fields
from shardkit.record import Record
from shardkit.sources import hdf5_reader
from shardkit.sources.columns import NONE, Column, Columns, usual_label
from shardkit.sources.driver import FileSource, Listing, Row
from shardkit.sources.hdf5_images import SUFFIXES, Hdf5Images, Hdf5Options, datasets_of
from shardkit.sources.image_files import CHANGED
from shardkit.sources.images import (
    image_axes,
    image_record,
    pixel_record,
    raw_record,
    require_pixels,
)
from shardkit.sources.inputs import file_at, place, place_of, require_rows, stamp_of, stem
from shardkit.sources.kept import Kept, kind_of_bytes
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
        options: The options. ``image`` names a dataset such as ``train/x``; kept numbers, texts and
            arrays keep their types.
    """

    kind = "hdf5"

    def __init__(self, pattern: str | Path, options: Hdf5Options) -> None:
        super().__init__(pattern, options, SUFFIXES)
        self.class_names = read_classes(options.classes)
        path = self.inputs.paths[0]
        try:
            datasets = datasets_of(path)
            columns = _columns(path, datasets)
            self._label_file, label = self._in_sibling(options.label, datasets)
            if options.image is None:
                _require_no_image_each(path, columns)
            given = replace(
                options,
                image=_plain(options.image),
                label=NONE if self._label_file else label,
                keep=_plain(options.keep),
            )
            self._chosen = Columns(path, columns, given, eager=False)
            self._image = self._chosen.image
            shape, kind = datasets[self._image]
            self._shape = tuple(shape[1:])
            """Sides of arrays; none for encoded images."""
            if kind != "bytes":
                require_pixels(shape[1:])
        except BadImage as error:
            raise UsageError(f"{path}: {error.problem}", remedy=error.remedy) from error
        self._label = label if self._label_file else self._chosen.label
        if not self._label and options.label is None:
            self._refuse_sibling()
        self._keep = self._chosen.keep
        self.schema = self._chosen.schema
        self.exact_sizes = not self._shape
        where = f"{self._label_file}:" if self._label_file else ""
        self.settle(image=self._image, label=where + (self._label or NONE))

    def _in_sibling(
        self, label: str | None, datasets: Mapping[str, object]
    ) -> tuple[str, str | None]:
        """Return the file of the labels, if it is another one, and the name of their dataset."""
        file, colon, name = (label or "").rpartition(":")
        if not colon or _plain(label) in datasets:
            return "", _plain(label)
        folder = os.path.dirname(self.inputs.paths[0])
        others = {"", os.path.abspath(folder)}
        if len(self.inputs.paths) > 1:
            raise UsageError(
                f"{setting('label', label)} is in one file, but {self.path} names "
                f"{len(self.inputs.paths)} files",
                remedy="convert each by itself",
            )
        if os.path.dirname(file) and os.path.abspath(os.path.dirname(file)) not in others:
            raise UsageError(f"{file} is not in the folder of {self.inputs.paths[0]}")
        file = os.path.basename(file)
        if not name or not os.path.isfile(os.path.join(folder, file)):
            raise UsageError(f"{setting('label', label)} is neither a dataset nor FILE:DATASET")
        return file, name.strip("/")

    def _refuse_sibling(self) -> None:
        """Refuse images without labels next to a file that may have these, as PCam's has."""
        path = Path(self.inputs.paths[0])
        names: list[str] = []
        with suppress(OSError):
            names = [name for name in os.listdir(path.parent) if name.endswith(SUFFIXES)]
        stems = {stem(name, SUFFIXES): name for name in sorted(names)}
        found = usual_label(stems.keys() - {path.stem}, path.stem)
        if found:
            name = "DATASET"
            with suppress(BadImage):
                datasets = [*datasets_of(str(path.parent / stems[found]))]
                name = datasets[0] if len(datasets) == 1 else name
            raise UsageError(
                f"{path} has no labels, but {stems[found]} next to it may have them",
                remedy="convert each file by itself: "
                * (len(self.inputs.paths) > 1)
                + f"pass {setting('label', f'{stems[found]}:{name}')}, or "
                f"{setting('label', NONE)} to convert without labels",
            )

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of an image."""
        return self._read(entry, self._record)

    def _read(self, entry: Entry, record_of: Callable[[Entry, bytes], Record]) -> Record:
        path, row = file_at(self.inputs.paths, entry.place)
        if stamp_of(path) != entry.stamp:
            raise BadImage(CHANGED)
        data = call(hdf5_reader.read, os.path.abspath(path), entry.stamp, self._image, row)
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
                f"{self._image} has rows of {'x'.join(map(str, self._shape))}; arrays other than "
                f"height x width x 3 {remedy}"
            )
        for name, field in self.schema.items():
            if field.type.stored_apart:
                raise UsageError(
                    f"{setting('keep', name)}: a field of the kind {field.kind} {remedy}"
                )
        for path in self.inputs.paths:
            try:
                call(hdf5_reader.offsets, os.path.abspath(path), stamp_of(path), self._image, [])
            except BadImage as error:
                raise UsageError(
                    f"{path}: {self._image} {remedy}; {error.problem}", remedy=error.remedy
                ) from error
        return super().by_file(images)

    def located(self, split: str, entries: Sequence[Entry]) -> Iterator[Located | BadImage]:
        """Yield each of some images of one file, with the offset of its row."""
        if not entries:
            return iter(())
        path = os.path.abspath(self.inputs.paths[place_of(entries[0].place)[0]])

        def offsets(part: Sequence[Entry]) -> list[int | None]:
            rows = [place_of(entry.place)[1] for entry in part]
            return call(hdf5_reader.offsets, path, part[0].stamp, self._image, rows)

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
        name = kept.source
        data = call(hdf5_reader.value, os.path.abspath(path), stamp, name, row, kept.optional)
        if not data:
            return None
        value = data[1:] if data[:1] == b"B" else read_array(data[1:])
        return self._chosen.value(kept, value)

    def locate(self, split: str, entry: Entry) -> str:
        """Return file, dataset and row of an image."""
        number, row = place_of(entry.place)
        return f"{self.inputs.paths[number]}: {self._image} at row {row}"

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
        self.notes += self._chosen.notes
        kind = f"uint8 {'x'.join(map(str, self._shape))}" if self._shape else "encoded images"
        understood = self._chosen.describe(kind)
        if self._label_file:
            understood["label"] = f"{self._label_file}:{self._label}"
        return {"files": f"{len(self.inputs.paths):,}, with {len(listing):,} rows", **understood}

    def _list(self, listing: Listing, number: int, path: str) -> None:
        stamp = stamp_of(path)
        full = os.path.abspath(path)
        file = os.path.join(os.path.dirname(full), self._label_file) if self._label_file else full
        datasets = datasets_of(path)
        if self._image not in datasets:
            raise BadImage(f"there is no dataset {self._image}")
        shape, kind = datasets[self._image]
        if tuple(shape[1:]) != self._shape or (kind == "bytes") == bool(shape[1:]):
            raise BadImage(f"{self._image} is {kind} {shape}, unlike in the first file")
        require_rows(path, shape[0])
        for kept in self._keep:
            rows, _ = datasets.get(kept.source, ([shape[0]] * kept.optional, ""))
            if rows[:1] != shape[:1]:
                count = rows[0] if rows else "no"
                raise BadImage(f"it has {shape[0]} images, but {count} values of {kept.source}")
        folder = stem(self.inputs.names[number], SUFFIXES)
        for start in range(0, shape[0] or 1, _CHUNK):  # also checks the labels of no images
            count = min(_CHUNK, shape[0] - start)
            sizes = [math.prod(self._shape)] * count
            if not self._shape:
                sizes = call(hdf5_reader.sizes, full, stamp, self._image, start, count)
            labels: Sequence[Value | None] = [None] * count
            if self._label:
                part = Range(start, count)
                labels = call(hdf5_reader.labels, file, stamp_of(file), self._label, shape[0], part)
            for row, (size, label) in enumerate(zip(sizes, labels, strict=True), start):
                code = listing.code(label)
                name = f"{folder}/{row:08d}{'.png' if self._shape else ''}"
                listing.add(Row(name, code, size, stamp, place(number, row)))


def _plain(text: str | None) -> str | None:
    """Return names of datasets, perhaps of several, without a slash in front."""
    return text and re.sub(r"(^|[,=])/", r"\1", text)


def _columns(path: str, datasets: Mapping[str, tuple[Sequence[int], str]]) -> list[Column]:
    """Return the datasets of a file as columns."""
    found = [_column(path, name, *dataset) for name, dataset in datasets.items()]
    counts = {column.rows for column in found if column.holds == "image"}
    for number, column in enumerate(found):
        shape, _ = datasets[column.name]
        if len(shape) == 2 and shape[0] == 1 not in counts and shape[1] in counts:  # of MATLAB
            holds = "float" if "float" in column.type else "integer"
            found[number] = column._replace(holds=holds, rows=shape[1])
    return found


def _column(path: str, name: str, shape: Sequence[int], kind: str) -> Column:
    """Return a dataset as a column."""
    sides = "x".join(map(str, shape))
    column = Column(name, f"{kind} {sides}", "", rows=(*shape, 0)[0])
    if kind in hdf5_reader.OTHERS or not shape or (kind == "bytes" and shape[1:]):
        return column._replace(why="it is not a dataset of rows of plain values")
    if kind == "bytes":
        first = b" "
        if shape[0]:
            first = call(hdf5_reader.value, os.path.abspath(path), stamp_of(path), name, 0)
        kind = kind_of_bytes(first[1:])
        return column._replace(type=f"{kind} {sides}", holds=kind, field=Field(kind))
    field = Field("number", kind)
    if shape[1:]:
        field = Field("array", kind, None if 0 in shape else tuple(shape[1:]))
    holds = "image" if _is_image(shape[1:], kind) else "array"
    if math.prod(shape[1:]) == 1:
        holds = "float" if kind.startswith("float") else "integer"
    return column._replace(holds=holds, field=field)


def _is_image(shape: Sequence[int], kind: str) -> bool:
    try:
        return bool(image_axes(kind, shape))
    except (BadImage, TypeError):
        return False


def _require_no_image_each(path: str, columns: Iterable[Column]) -> None:
    """Refuse datasets of one name in many groups, which may be one image each."""
    names = [column.name for column in columns if column.holds == "image"]
    if len(names) > 1 and len(ends := {name.rpartition("/")[2] for name in names}) == 1:
        raise UsageError(
            f"{path} has {len(names)} datasets that may be images",
            remedy=f"choose with {setting('image')} from {name_list(names)}; if each is one image, "
            f"pass {setting('image', f'*/{ends.pop()}')}",
        )


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
    are not followed. If each dataset is one image, its group is the class; --image '*/image'
    --label '*/label' names datasets of images and of their labels.

    \b
    Examples:
      shardkit convert hdf5 camelyon.h5 dataset --to lmdb --image x --label y
      shardkit convert hdf5 'part-*.h5' dataset --to webdataset --image train/jpeg --dry-run
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
          shardkit attach hdf5 camelyon.h5 camelyon-index --image x --label y
        """,
    ),
    recognize=_recognize,
    source=_open,
)
