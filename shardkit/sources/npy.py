"""Images in .npy and .npz files as a source."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.contracts import LOOSE, Entry, SourceKind, SourceOptions
from shardkit.errors import BadImage, ConversionFailed, Problem, UsageError
from shardkit.options import option
from shardkit.record import Record
from shardkit.sources.driver import ListedSource, Listing, Row
from shardkit.sources.image_files import require_inside
from shardkit.sources.images import image_axes, pixel_record, require_pixels
from shardkit.sources.inputs import CHANGED, place, place_of, reading, require_rows
from shardkit.sources.labels import Value, classes_option, read_classes
from shardkit.sources.npy_files import Array, members, opened, parse_header, values
from shardkit.system.files import as_name, as_text, require_local

_SPLIT = "train|training|val|valid|validation|test|testing"
_BY_SPLIT = (
    (re.compile(rf"({_SPLIT})_images\Z"), "{}_images", "{}_labels"),
    (re.compile(rf"x_({_SPLIT})\Z"), "x_{}", "y_{}"),
    (re.compile(rf"X_({_SPLIT})\Z"), "X_{}", "y_{}"),
)
"""Usual names of the arrays of several splits."""

_CHUNK = 1 << 16
_MOST_LABELS = 1 << 30
_LABELS = 1 << 14
"""Labels to read at a time."""


class _Pair(NamedTuple):
    """The arrays of one split."""

    images: str
    labels: str | None


@dataclass(frozen=True, kw_only=True)
class NpyOptions(SourceOptions):
    """The options of this source."""

    images: str | None = option(
        None, help="Array of images.", metavar="NAME", stored="image_array", shown="images"
    )
    labels: str | None = option(
        None,
        help="Array of labels, integers or texts; none: no labels.",
        metavar="NAME",
        shown="labels, if there are any",
        stored="label_array",
    )
    classes: str | None = classes_option()


class Npy(ListedSource):
    """Images in NumPy's files; they become PNG files. Nothing is unpickled.

    An .npz file, or a folder with .npy files, has an array of all images and one of all labels:
    ``images`` and ``labels``; or, with splits, ``train_images`` and ``train_labels``, or
    ``x_train`` and ``y_train``. A folder of class folders has one .npy file for each image.

    Args:
        path: The file or folder.
        options: The options.
    """

    kind = "npy"

    def __init__(self, path: str | Path, options: NpyOptions) -> None:
        require_local(path)
        super().__init__(path, options)
        self.exact_sizes = False
        self._archive = self.path.is_file()
        self._arrays = _arrays(self.path)
        self._pairs = _pairs(self._arrays, options.images, options.labels, str(path))
        """None for a folder of class folders."""
        self.splits = self._pairs or {"": ""}
        self.class_names = read_classes(options.classes)

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of an image."""
        if not self._pairs:
            require_inside(entry.path)
            with reading(self.locate(split, entry), entry.stamp) as view:
                array = parse_header(view)
                pixels = values(view, _as_row(array), 0, 1)[0]
            if array.fortran:
                pixels = pixels.reshape(array.shape[::-1]).T
            return pixel_record(entry, _pixels(pixels, _axes(_as_row(array))))
        if split not in self._pairs:
            raise BadImage(CHANGED)
        with opened(*self._file(self._pairs[split].images), entry.stamp) as view:
            array = parse_header(view)
            _, row = place_of(entry.place)
            if row >= array.rows:
                raise BadImage("the file is truncated")
            return pixel_record(entry, _pixels(values(view, array, row, 1)[0], _axes(array)))

    def locate(self, split: str, entry: Entry) -> str:
        """Return the file of an image; in an array, with its row."""
        if not self._pairs:
            return os.path.join(self.path, as_name(entry.path))
        path, member = self._file(self._pairs[split].images)
        return f"{path}{f': {member}' if member else ''} at row {place_of(entry.place)[1]}"

    def list_images(self, listings: Mapping[str, Listing]) -> Mapping[str, str]:
        """List the images in the order of rows or, in class folders, of names.

        Raises:
            UsageError: If an array is missing, damaged or of another shape or type.
        """
        first = next(iter(listings.values()))
        if not self._pairs:
            if self.class_names is True:
                self.class_names = None  # folders may be new
            return {"files": f"one image each: {self._list_folder(first)}", "label": "the folder"}
        understood = {}
        used = set()
        for split, pair in self._pairs.items():
            understood[split or "arrays"] = self._list(listings[split], pair)
            used |= {pair.images, pair.labels}
        first.ignored += [Problem(path=n, reason="not used") for n in self._arrays if n not in used]
        return {**understood, "label": first.labels.describe()}

    def _file(self, name: str) -> tuple[str, str]:
        """Return the file of an array, and its name in that file."""
        return (str(self.path), name) if self._archive else (f"{self.path / name}.npy", "")

    def _list(self, listing: Listing, pair: _Pair) -> str:
        try:
            with opened(*self._file(pair.images)) as view:
                array, stamp = parse_header(view), view.stamp
            axes = _axes(array)
            require_rows(self._file(pair.images)[0], array.rows)
            labels = (
                itertools.repeat(None, array.rows)
                if pair.labels is None
                else self._labels(pair.labels, array.rows)
            )
        except BadImage as error:
            raise UsageError(f"{self.path}: {' or '.join(filter(None, pair))}: {error}") from error
        try:
            require_pixels(array.shape[1:])
        except BadImage as error:
            raise ConversionFailed(f"{self.path}: {pair.images}: {error}") from error
        try:
            for row, label in enumerate(labels):
                path = f"{pair.images}/{row:08d}.png"
                listing.add(Row(path, listing.code(label), array.row_bytes, stamp, place(0, row)))
        except BadImage as error:
            raise UsageError(f"{self.path}: {pair.labels}: {error}") from error
        return f"{pair.images} ({array}, axes {axes}), labels {pair.labels or 'none'}"

    def _labels(self, name: str, images: int) -> Iterator[Value]:
        """Return the labels of all images, which are read when they are used."""
        with opened(*self._file(name)) as view:
            array = parse_header(view)
            if (
                array.shape[1:] not in ((), (1,))
                or not array.shape
                or array.dtype.kind not in "biuSU"
            ):
                raise BadImage(f"{name} is {array}, not one integer or text for each image")
            if array.rows != images:
                raise BadImage(f"there are {images} images, but {array.rows} labels")
            if array.rows * array.row_bytes > _MOST_LABELS:
                raise BadImage(f"{name} has over {_MOST_LABELS} bytes of labels")
        return itertools.chain.from_iterable(
            self._some_labels(name, array, row, min(_LABELS, images - row))
            for row in range(0, images, _LABELS)
        )

    def _some_labels(self, name: str, array: Array, row: int, count: int) -> list[Value]:
        with opened(*self._file(name)) as view:
            column: npt.NDArray[Any] = values(view, array, row, count).reshape(-1)
        if array.dtype.kind == "S":
            return [value.decode("utf-8", "surrogateescape") for value in column.tolist()]
        if array.dtype.kind == "U":  # NumPy does not check the code points
            codec = "utf-32-be" if array.dtype.str[0] == ">" else "utf-32-le"
            size = array.dtype.itemsize
            data = column.tobytes()
            try:
                texts = [data[n : n + size].decode(codec) for n in range(0, len(data), size)]
            except UnicodeDecodeError as error:
                raise BadImage(f"{name} has a text that is not Unicode: {error}") from error
            return [text.rstrip("\0") for text in texts]
        return [int(value) for value in column]

    def _list_folder(self, listing: Listing) -> str:
        kinds: set[str] = set()
        for path, label in _walk(self.path, listing):
            try:
                with reading(os.path.join(self.path, as_name(path))) as view:
                    array, stamp = parse_header(view), view.stamp
                    _axes(_as_row(array))
                    require_pixels(array.shape)
            except BadImage as error:
                listing.blame(path, str(error))
                continue
            kinds.add(str(array))
            size = array.row_bytes * array.rows
            listing.add(Row(path, listing.code(label), size, stamp))
        return ", ".join(sorted(kinds)[:3]) + (" ..." if len(kinds) > 3 else "")


def _arrays(path: Path) -> list[str]:
    """Return the names of the arrays in an .npz file or a folder."""
    if path.is_file():
        if path.suffix != ".npz":
            raise UsageError(f"{path} is not an .npz file; for .npy files, give their folder")
        try:
            return members(str(path))
        except BadImage as error:
            raise UsageError(f"{path}: {error}") from error
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise UsageError(f"the source {path} cannot be read: {error.strerror}") from error
    return [as_text(name[:-4]) for name in names if name.endswith(".npy")]


def _pairs(
    arrays: Sequence[str], images: str | None, labels: str | None, path: str
) -> dict[str, _Pair]:
    """Return the arrays of each split; none for a folder of class folders."""
    if images is None and labels is None:
        for pattern, of_images, of_labels in _BY_SPLIT:
            splits = [match[1] for name in arrays if (match := pattern.match(name))]
            if splits:
                pairs = {
                    name: _Pair(of_images.format(name), of_labels.format(name)) for name in splits
                }
                return _checked(pairs, arrays, path)
        if "images" not in arrays and not path.endswith(".npz"):
            return {}
    unlabeled = labels == "none" or (labels is None and "labels" not in arrays)
    pair = _Pair(images or "images", None if unlabeled else labels or "labels")
    return _checked({"": pair}, arrays, path)


def _checked(pairs: dict[str, _Pair], arrays: Sequence[str], path: str) -> dict[str, _Pair]:
    needed = {name for pair in pairs.values() for name in pair if name is not None}
    if missing := sorted(needed.difference(arrays)):
        raise UsageError(
            f"{path} has no array {', '.join(missing)}; choose with images= and labels= from "
            f"{', '.join(arrays) or 'none'}"
        )
    return pairs


def _axes(array: Array) -> str:
    """Return the order of the axes of one image, or raise if these are no images."""
    if array.fortran:
        raise BadImage("it is in Fortran order: save np.ascontiguousarray(x)")
    return image_axes(array.dtype, array.shape[1:])


def _as_row(array: Array) -> Array:
    """Return the array of one image as the only row of an array."""
    return array._replace(shape=(1, *array.shape), fortran=False)


def _pixels(array: npt.NDArray[Any], axes: str) -> npt.NDArray[np.uint8]:
    """Return pixels in the order height, width, channel."""
    return np.ascontiguousarray(array.transpose(1, 2, 0) if axes == "CHW" else array)


def _walk(root: Path, listing: Listing) -> Iterator[tuple[str, str | None]]:
    """Yield path and class of each .npy file in the folders of ``root``, or in ``root`` itself."""
    tops = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    for top in [name for name in tops if not name.startswith(".")] or [""]:
        for folder, inner, names in os.walk(root / top):
            inner.sort(key=as_text)
            if not top:
                inner.clear()
            for name in sorted(names, key=as_text):
                path = as_text(os.path.relpath(os.path.join(folder, name), root))
                if name.startswith(".") or not name.endswith(".npy"):
                    listing.ignore(path, "not an .npy file")
                else:
                    yield path, as_text(top) or None
    if tops:
        for entry in sorted(os.scandir(root), key=lambda item: item.name):
            if not entry.is_dir():
                listing.ignore(as_text(entry.name), LOOSE)


SOURCE = SourceKind(
    name=Npy.kind,
    title="Convert images in .npy or .npz files.",
    help="""Convert images in NumPy's files to a dataset in DST.

    SRC is an .npz file or a folder with images.npy and labels.npy (or train_images, train_labels,
    ..., or x_train, y_train, ..., which become splits), or a folder of class folders with one .npy
    file for each image. Images are uint8, height x width with 1, 3 or 4 channels, first or last.
    They become PNG files; --resize HxW --encode raw stores plain pixels. Nothing is unpickled.

    \b
    Examples:
      shardkit convert npy pathmnist.npz dataset --to lmdb --dry-run
      shardkit convert npy arrays dataset --to hdf5 --images x --labels y
    """,
    options=NpyOptions,
    source=Npy,
)
