"""HDF5 files from other programs with one dataset of all images, as a source."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.contracts import AttachableSource, Entry, Images, Located, Range
from shardkit.errors import CHANGED, BadImage, UsageError, setting
from shardkit.kinds.field import Field
from shardkit.sources import hdf5_reader
from shardkit.sources.column_source import Cells, ColumnSource, Known, RowFile, row_files
from shardkit.sources.columns import NONE, Column, usual_label
from shardkit.sources.hdf5_datasets import (
    SUFFIXES,
    columns_of,
    datasets_of,
    require_no_image_each,
)
from shardkit.sources.hdf5_images import Hdf5Options
from shardkit.sources.images import as_pixels, require_pixels
from shardkit.sources.inputs import (
    InputFiles,
    OpenedFile,
    find_files,
    located_in,
    place_of,
    refusing,
    require_rows,
    stamp_of,
    stem,
)
from shardkit.sources.labels import Value
from shardkit.sources.library_process import call
from shardkit.sources.npy_files import read_array

_CHUNK = 256


class Hdf5Rows(ColumnSource, AttachableSource):
    """HDF5 files with one dataset of images, read by ``h5py`` in a child process.

    A dataset of arrays becomes PNG files: uint8, height x width with 1, 3 or 4 channels, first or
    last. A dataset of bytes (variable length, strings or opaque) must hold encoded images; to list
    their sizes, a scan reads all of them.

    The option ``image`` names a dataset such as ``train/x``; kept numbers, texts and arrays keep
    their types. With ``split``, datasets of other splits are passed over.
    """

    kind = "hdf5"

    def __init__(self, pattern: str | Path, options: Hdf5Options, split: str = "") -> None:
        inputs = find_files(pattern, SUFFIXES)
        path = inputs.paths[0]
        with refusing(path):
            datasets = datasets_of(path)
            columns = columns_of(path, datasets, split)
            self._label_file, label = _in_sibling(options.label, inputs, datasets)
            if options.image is None:
                require_no_image_each(path, columns)
            arranged = replace(
                options,
                image=_plain(options.image),
                label=NONE if self._label_file else label,
                keep=_plain(options.keep),
            )
            super().__init__(pattern, arranged, row_files(inputs, SUFFIXES), columns)
            shape, kind = datasets[self.image.name]
            self._shape = tuple(shape[1:])
            """Sides of arrays; none for encoded images."""
            if kind != "bytes":
                require_pixels(shape[1:])
        self.others = inputs.others
        if self._label_file:
            self.label = Column(str(label), "", "")
            self.settle(label=f"{self._label_file}:{label}")
        elif not self.label.name and options.label is None:
            _refuse_sibling(inputs)
        self.exact_sizes = not self._shape

    def rows(self, file: RowFile, view: OpenedFile) -> Iterator[Cells]:
        """Yield the rows of a file with label and name; UsageError if they cannot be images."""
        with refusing(file.path):
            yield from self._rows(file, view)

    def _rows(self, file: RowFile, view: OpenedFile) -> Iterator[Cells]:
        full = os.path.abspath(file.path)
        datasets = datasets_of(file.path)
        if self.image.name not in datasets:
            raise BadImage(f"it has no dataset {self.image.name}")
        shape, kind = datasets[self.image.name]
        if tuple(shape[1:]) != self._shape or (kind == "bytes") == bool(shape[1:]):
            raise BadImage(
                f"{self.image.name} is {kind} {shape}, which differs from the first file"
            )
        require_rows(file.path, shape[0])
        for kept in self.keep:
            rows, _ = datasets.get(kept.source, ([shape[0]] * kept.optional, ""))
            if rows[:1] != shape[:1]:
                count = rows[0] if rows else "no"
                raise BadImage(f"it has {shape[0]} images but {count} values in {kept.source}")
        suffix = ".png" if self._shape else ""
        for start in range(0, shape[0] or 1, _CHUNK):  # also checks the labels of no images
            range_ = Range(start, min(_CHUNK, shape[0] - start))
            sizes = [math.prod(self._shape)] * range_.length
            if not self._shape:
                sizes = call(hdf5_reader.sizes, full, view.stamp, self.image.name, *range_)
            label_file = os.path.join(os.path.dirname(full), self._label_file or full)
            labels = self._texts(label_file, self.label.name, shape[0], range_)
            names = self._texts(full, self.name or "", shape[0], range_)
            for row, (size, label, name) in enumerate(
                zip(sizes, labels, names, strict=True), start
            ):
                values = {self.name: name, self.label.name: label}
                yield Known(row, values, size, suffix)

    def _texts(self, path: str, name: str, count: int, range_: Range) -> Sequence[Value | None]:
        """Return the labels or names of some of ``count`` rows."""
        if not name:
            return [None] * range_.length
        return call(hdf5_reader.labels, path, stamp_of(path), name, count, range_)

    def row(self, file: RowFile, view: OpenedFile, entry: Entry) -> Cells:
        """Return a row."""
        return _Row(os.path.abspath(file.path), entry, self.image, self._shape)

    def image_words(self) -> str:
        """Return what images are."""
        return f"uint8 {'x'.join(map(str, self._shape))}" if self._shape else "encoded images"

    def label_words(self) -> str:
        """Return the dataset of labels, perhaps in another file."""
        file = f"{self._label_file}:" if self._label_file else ""
        return file + super().label_words()

    @property
    def raw_shape(self) -> tuple[int, int, int] | None:
        """Height, width and channels of arrays; None for encoded images."""
        if not self._shape:
            return None
        height, width, channels = (*self._shape, 0)[:3]
        return height, width, channels

    def is_in_place(self, column: Column, field: Field) -> bool:
        """Return whether the files have the values of a dataset as a field does."""
        if column != self.image:
            return False
        return not self._shape or (len(self._shape) == 3 and self._shape[2] == 3)

    def by_file(self, images: Images) -> Sequence[tuple[Path, Images]]:
        """Return each file with its images; UsageError if it lacks a record's bytes as they are."""
        if not self.is_in_place(self.image, self.image.field):
            raise UsageError(
                f"{self.image.name} has rows of {'x'.join(map(str, self._shape))}; arrays other "
                "than height x width x 3 cannot be read in place",
                remedy="convert it with `shardkit convert`",
            )
        for path, *_ in self.inputs:
            full = os.path.abspath(path)
            with refusing(f"{path}: {self.image.name} cannot be read in place"):
                call(hdf5_reader.offsets, full, stamp_of(path), self.image.name, [])
        return super().by_file(images)

    def located(self, split: str, entries: Sequence[Entry]) -> Iterator[Located | BadImage]:
        """Yield each of some images of one file, with the offset of its row."""
        if not entries:
            return iter(())
        path = os.path.abspath(self.inputs[place_of(entries[0].place)[0]].path)

        def offsets(chunk: Sequence[Entry]) -> list[int | None]:
            rows = [place_of(entry.place)[1] for entry in chunk]
            return call(hdf5_reader.offsets, path, chunk[0].stamp, self.image.name, rows)

        return located_in(path, entries, offsets, partial(self.record, in_place=True))


class _Row(Cells):
    """A row; ``shape`` has the sides of arrays, and is empty for encoded images."""

    def __init__(self, path: str, entry: Entry, image: Column, shape: Sequence[int]) -> None:
        self.place = entry.place
        self._path = path
        self._stamp = entry.stamp
        self._image = image
        self._shape = shape

    def value(self, column: Column) -> Any:
        at = (self._path, self._stamp, column.name, self.place)
        if column != self._image:
            data = call(hdf5_reader.value, *at, True)
            if not data:
                return None
            return data[1:] if data[:1] == b"B" else read_array(data[1:])
        data = call(hdf5_reader.read, *at)
        if not self._shape:
            return data
        if len(data) != math.prod(self._shape):
            raise BadImage(CHANGED)
        return as_pixels(np.frombuffer(data, np.uint8).reshape(self._shape))


def _in_sibling(
    label: str | None, inputs: InputFiles, datasets: Mapping[str, object]
) -> tuple[str, str | None]:
    """Return the file of the labels, if it is another one, and the name of their dataset."""
    file, colon, name = (label or "").rpartition(":")
    if not colon or _plain(label) in datasets:
        return "", _plain(label)
    folder = os.path.dirname(inputs.paths[0])
    others = {"", os.path.abspath(folder)}
    if len(inputs.paths) > 1:
        raise UsageError(
            f"{setting('label', label)} is in one file, but the images are in {len(inputs.paths)} "
            "files",
            remedy="convert each file separately",
        )
    if os.path.dirname(file) and os.path.abspath(os.path.dirname(file)) not in others:
        raise UsageError(f"{file} is not in the folder of {inputs.paths[0]}")
    file = os.path.basename(file)
    if not name or not os.path.isfile(os.path.join(folder, file)):
        raise UsageError(f"{setting('label', label)} must be a dataset or FILE:DATASET")
    return file, name.strip("/")


def _refuse_sibling(inputs: InputFiles) -> None:
    """Refuse images without labels next to a file that may have these, as PCam's has."""
    path = Path(inputs.paths[0])
    names: list[str] = []
    with suppress(OSError):
        names = [name for name in os.listdir(path.parent) if name.endswith(SUFFIXES)]
    stems = {stem(name, SUFFIXES): name for name in sorted(names)}
    label_stem = usual_label(stems.keys() - {path.stem}, path.stem)
    if label_stem:
        name = "DATASET"
        with suppress(BadImage):
            datasets = [*datasets_of(str(path.parent / stems[label_stem]))]
            name = datasets[0] if len(datasets) == 1 else name
        raise UsageError(
            f"{path} has no labels, but {stems[label_stem]} next to it may contain them",
            remedy="convert each file separately, and "
            * (len(inputs.paths) > 1)
            + f"pass {setting('label', f'{stems[label_stem]}:{name}')}, or "
            f"{setting('label', NONE)} to convert without labels",
        )


def _plain(text: str | None) -> str | None:
    """Return names of datasets, perhaps of several, without a slash in front."""
    return text and re.sub(r"(^|[,=])/", r"\1", text)
