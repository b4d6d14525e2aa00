"""Images in .npy and .npz files as a source."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shardkit.contracts import Entry, Source, SourceKind
from shardkit.errors import CHANGED, BadImage, ConversionFailed, UsageError, setting
from shardkit.record import Record
from shardkit.sources.driver import ListedSource, Listing, Row
from shardkit.sources.images import (
    as_pixels,
    image_axes,
    pixel_record,
    require_inside,
    require_pixels,
)
from shardkit.sources.inputs import place, place_of, reading, refusing, require_rows
from shardkit.sources.labels import read_classes
from shardkit.sources.npy_arrays import PICKLE, PICKLED, NpyArrays, NpyOptions
from shardkit.sources.npy_files import (
    Array,
    labels_of,
    members,
    opened,
    parse_header,
    require_intact,
    values,
    walk,
    whole,
)
from shardkit.sources.recognize import having
from shardkit.system.files import as_name, as_text, require_local
from shardkit.system.text import name_list

_SPLIT = "train|training|val|valid|validation|test|testing"
_BY_SPLIT = (
    (re.compile(rf"({_SPLIT})_images\Z"), "{}_images", "{}_labels"),
    (re.compile(rf"x_({_SPLIT})\Z"), "x_{}", "y_{}"),
    (re.compile(rf"X_({_SPLIT})\Z"), "X_{}", "y_{}"),
)
"""Usual names of the arrays of several splits."""


class _Pair(NamedTuple):
    """The arrays of one split."""

    images: str
    labels: str | None


class Npy(ListedSource):
    """Images in NumPy's files; they become PNG files. Nothing is unpickled.

    An .npz file, or a folder with .npy files, has an array of all images and one of all labels:
    ``images`` and ``labels``; or, with splits, ``train_images`` and ``train_labels``, or
    ``x_train`` and ``y_train``. A folder of class folders has one .npy file for each image.
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
                return pixel_record(entry, as_pixels(whole(view, parse_header(view))))
        if split not in self._pairs:
            raise BadImage(CHANGED)
        with opened(*self._file(self._pairs[split].images), entry.stamp) as view:
            array = parse_header(view)
            _, row = place_of(entry.place)
            if array.fortran or row >= array.rows:
                raise BadImage(CHANGED)
            return pixel_record(entry, as_pixels(values(view, array, row, 1)[0]))

    def locate(self, split: str, entry: Entry) -> str:
        """Return the file of an image; in an array, with its row."""
        if not self._pairs:
            return os.path.join(self.path, as_name(entry.path))
        path, member = self._file(self._pairs[split].images)
        return f"{path}{f': {member}' if member else ''} at row {place_of(entry.place)[1]}"

    def list_images(self, listings: Mapping[str, Listing]) -> Mapping[str, str]:
        """List the images in the order of rows or, in class folders, of names."""
        first = next(iter(listings.values()))
        if not self._pairs:
            if self.class_names is True:
                self.class_names = None  # folders may be new
            return {
                "files": f"one image in each: {self._list_folder(first)}",
                "label": "the folder",
            }
        understood = {}
        used = set()
        for split, pair in self._pairs.items():
            understood[split or "arrays"] = self._list(listings[split], pair)
            used |= {pair.images, pair.labels}
        for name in self._arrays:
            if name not in used:
                first.ignore(name, "not used")
        labels = {pair.labels for pair in self._pairs.values() if pair.labels}
        return {**understood, "label": ", ".join(sorted(labels)) or "none"}

    def _file(self, name: str) -> tuple[str, str]:
        """Return the file of an array, and its name in that file."""
        return (str(self.path), name) if self._archive else (f"{self.path / name}.npy", "")

    def _list(self, listing: Listing, pair: _Pair) -> str:
        with refusing(f"{self.path}: {' or '.join(filter(None, pair))}"):
            with opened(*self._file(pair.images)) as view:
                array = parse_header(view)
                stamp = view.stamp
            axes = _axes(array)
            require_rows(self._file(pair.images)[0], array.rows)
            require_intact(*self._file(pair.images))
            labels = (
                itertools.repeat(None, array.rows)
                if pair.labels is None
                else labels_of(*self._file(pair.labels), pair.labels, array.rows)
            )
        with refusing(f"{self.path}: {pair.images}", ConversionFailed):
            require_pixels(array.shape[1:])
        with refusing(f"{self.path}: {pair.labels}"):
            for row, label in enumerate(labels):
                path = f"{pair.images}/{row:08d}.png"
                listing.add(Row(path, listing.code(label), array.row_bytes, stamp, place(0, row)))
        return f"{pair.images} ({array}, axes {axes}), labels {pair.labels or 'none'}"

    def _list_folder(self, listing: Listing) -> str:
        kinds: set[str] = set()
        for path, label in walk(self.path, listing, (".npy",)):
            try:
                with reading(os.path.join(self.path, as_name(path))) as view:
                    array = parse_header(view)
                    stamp = view.stamp
                    image_axes(array.dtype, array.shape)
                    require_pixels(array.shape)
            except BadImage as error:
                listing.blame(path, error.stated)
                continue
            kinds.add(str(array))
            size = array.row_bytes * array.rows
            listing.add(Row(path, listing.code(label, is_name=True), size, stamp))
        return ", ".join(sorted(kinds)[:3]) + (" ..." if len(kinds) > 3 else "")


def _arrays(path: Path) -> list[str]:
    """Return the names of the arrays in an .npz file or a folder."""
    if path.is_file():
        if path.suffix != ".npz":
            raise UsageError(
                f"{path} is not an .npz file; for .npy files, pass their folder;",
                remedy=f"for arrays that are not images, pass {setting('arrays', True)}",
            )
        with refusing(path):
            return members(str(path))
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
            f"{path} has no array {name_list(missing)};",
            remedy=f"choose with {setting('images')} and {setting('labels')} from "
            f"{name_list(arrays) or 'none'}",
        )
    return pairs


def _axes(array: Array) -> str:
    """Return the order of the axes of one image, or raise if these are no images."""
    if array.fortran:
        raise BadImage("it is in Fortran order", remedy="save np.ascontiguousarray(x)")
    return image_axes(array.dtype, array.shape[1:])


def _open(path: str | Path, options: NpyOptions) -> Source:
    """Open a source of images or, with ``arrays``, of arrays."""
    if str(path).endswith(PICKLED):
        raise UsageError(f"{path}: {PICKLE}")
    return NpyArrays(path, options) if options.arrays else Npy(path, options)


SOURCE = SourceKind(
    name=Npy.kind,
    title="Convert images or arrays in .npy or .npz files.",
    help="""Convert images in NumPy files to a dataset in DST.

    SRC is an .npz file or a folder with images.npy and labels.npy (or train_images, train_labels,
    ..., or x_train, y_train, ..., which become splits), or a folder of class folders with one .npy
    file per image. Images are uint8, height x width with 1, 3 or 4 channels, first or last. They
    become PNG files unless you use --resize HxW --encode raw. Nothing is unpickled.

    With --arrays, values of any numeric type are stored unchanged, as fields. SRC is then a folder,
    or a folder of class folders, with one .npy or .npz file per sample; or one such file with one
    sample per row. Folders named train, val and test become splits.

    \b
    Examples:
      shardkit convert npy pathmnist.npz dataset --to lmdb --dry-run
      shardkit convert npy arrays dataset --to hdf5 --images x --labels y
      shardkit convert npy latents dataset --to webdataset --arrays
    """,
    options=NpyOptions,
    recognize=having("images.npy", suffixes=(".npz", ".npy"), whole=".npz"),
    source=_open,
)
