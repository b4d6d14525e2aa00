"""HDF5 files from other programs with one dataset for each image, as a source."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.contracts import Entry
from shardkit.errors import BadImage, UsageError, setting
from shardkit.options import same_option
from shardkit.sources import hdf5_reader
from shardkit.sources.column_source import Cells, Known, RowFile, RowSource, row_files
from shardkit.sources.columns import NONE, ColumnOptions
from shardkit.sources.driver import Listing, Row
from shardkit.sources.hdf5_datasets import SUFFIXES, datasets_of
from shardkit.sources.images import has_image_suffix, require_pixels
from shardkit.sources.inputs import (
    OpenedFile,
    find_files,
    place,
    place_of,
    refusing,
    require_rows,
    stamp_of,
)
from shardkit.sources.labels import Value, label_of, read_classes
from shardkit.sources.library_process import call
from shardkit.sources.npy_files import read_array

_ANY = "*"
_FOLDER = "folder"


def _option(name: str, **details: Any) -> Any:
    """Return an option of columns; the command also takes the plural, as files name datasets."""
    item = same_option(ColumnOptions, name, **details)
    flags = [f"--{name}s", f"--{name}"]
    return field(default=item.default, metadata={**item.metadata, "click": {"flags": flags}})


@dataclass(frozen=True, kw_only=True)
class Hdf5Options(ColumnOptions):
    """The options of this source."""

    image: str | None = _option(
        "image",
        help="Dataset of images; with *, datasets of one image each.",
        shown="the only candidate, or one with a common name",
    )
    label: str | None = _option(
        "label",
        help="Dataset of labels: integers, strings, or one-hot rows; none: no labels. "
        "FILE:DATASET is in another file of the same folder. With *, datasets of one label each; "
        "folder uses the group name.",
        shown="one with a common name, such as y",
    )
    keep: str | None = same_option(
        ColumnOptions,
        "keep",
        help="Additional datasets to keep, such as age,mask=masks:mask,boxes=train/boxes:boxes. "
        "A field with ? may be missing.",
        metavar="[NAME=]DATASET[:KIND][?],...",
        shown="none",
    )


class Hdf5Images(RowSource):
    """HDF5 files with a dataset for each image: encoded bytes, or an array with channels last.

    The option ``image`` is a pattern such as ``train/*``; without, all datasets are images.
    ``label`` is ``folder``, for the group of an image; ``none``; or a pattern of datasets with one
    label each, in which ``*`` stands for the same text as in ``image``. Without, it is ``folder``
    if there are groups.
    """

    kind = "hdf5"

    @staticmethod
    def fits(pattern: str | Path, options: Hdf5Options) -> bool:
        """Return whether files are of this kind: the user says so, or each dataset is an image."""
        if options.image is not None:
            return _ANY in options.image
        path = find_files(pattern, SUFFIXES).paths[0]
        with refusing(path):
            shapes = datasets_of(path).values()
        return (
            options.label is None and len(shapes) > 1 and all(_is_image(*shape) for shape in shapes)
        )

    def __init__(self, pattern: str | Path, options: Hdf5Options) -> None:
        inputs = find_files(pattern, SUFFIXES)
        super().__init__(pattern, options, row_files(inputs, SUFFIXES))
        self.others = inputs.others
        self.class_names = read_classes(options.classes)
        if option := "keep" if options.keep else "name" if options.name else "":
            raise UsageError(
                f"{setting(option)} needs one dataset of all images, not one dataset for each image"
            )
        self._images = images = options.image or _ANY
        if images.count(_ANY) != 1 or (options.label or _ANY).count(_ANY) > 1:
            raise UsageError(
                f"{setting('image', images)} and {setting('label')} may contain only one * each"
            )
        before, _, after = map(re.escape, images.strip("/").partition(_ANY))
        self._pattern = re.compile(f"{before}(.+){after}\\Z", re.DOTALL)
        self._labels = options.label or self._infer_labels()
        self.settle(image=images, label=self._labels)

    def _infer_labels(self) -> str:
        names = filter(self._pattern.match, datasets_of(self.inputs[0].path))
        return _FOLDER if all("/" in name for name in names) else NONE

    def row(self, file: RowFile, view: OpenedFile, entry: Entry) -> Cells:
        """Return an image; an array becomes a PNG file."""
        path = os.path.abspath(file.path)
        data = call(hdf5_reader.value_of, path, entry.stamp, entry.values)
        if data[:1] == b"B":
            return Known(0, {"": data[1:]})
        pixels = read_array(data[1:])
        require_pixels(pixels.shape)
        return Known(0, {"": np.ascontiguousarray(pixels, np.uint8)})

    def locate(self, split: str, entry: Entry) -> str:
        """Return file and dataset of an image."""
        return f"{self.inputs[place_of(entry.place)[0]].path}: {entry.values}"

    def list_images(self, listings: Mapping[str, Listing]) -> Mapping[str, str]:
        """List the datasets of all files, in the order of their names."""
        (listing,) = listings.values()
        listing.ignored += self.others
        for number, file in enumerate(self.inputs):
            with refusing(file.path):
                self._list(listing, number, file)
        return {
            "files": f"{len(self.inputs):,}, containing {len(listing):,} datasets",
            "image": f"{self._images}: one dataset for each image",
            "label": "the group" if self._labels == _FOLDER else self._labels,
        }

    def _list(self, listing: Listing, number: int, file: RowFile) -> None:
        stamp = stamp_of(file.path)
        datasets = datasets_of(file.path)
        require_rows(file.path, len(datasets))
        for row, (name, (shape, kind)) in enumerate(datasets.items()):
            match = self._pattern.match(name)
            if match is None:
                if not self._is_label(name):
                    where = f"{file.name}:{name}"
                    listing.ignore(where, "an unused dataset")
                continue
            is_png = len(shape) > 1 and not has_image_suffix(name)
            image = f"{file.folder}/{name}{'.png' * is_png}"
            try:
                if not _is_image(shape, kind):
                    raise BadImage(f"it is {kind} {shape}, but an image must be uint8 or bytes")
                label = self._label_of(match[1], file.path, stamp)
            except BadImage as error:
                listing.blame(image, error.stated)
                continue
            self.exact_sizes &= len(shape) == 1
            code = listing.code(label, is_name=self._labels == _FOLDER)
            listing.add(Row(image, code, math.prod(shape), stamp, place(number, row), name))

    def _is_label(self, name: str) -> bool:
        before, star, after = self._labels.strip("/").partition(_ANY)
        return bool(star) and name.startswith(before) and name.endswith(after)

    def _label_of(self, matched: str, path: str, stamp: int) -> Value | None:
        """Return the label of the image whose name has ``matched`` in place of the asterisk."""
        if self._labels == NONE:
            return None
        if self._labels == _FOLDER:
            if "/" not in matched:
                raise BadImage(
                    "it is not in a group;",
                    remedy=f"to convert without labels, pass {setting('label', NONE)}",
                )
            return matched.rpartition("/")[0]
        name = self._labels.strip("/").replace(_ANY, matched)
        data = call(hdf5_reader.value_of, os.path.abspath(path), stamp, name, image=False)
        if data[:1] == b"B":
            return label_of(data[1:].decode("utf-8", "surrogateescape"), name)
        values = read_array(data[1:]).reshape(-1).tolist()
        return label_of(values[0] if len(values) == 1 else values, name)


def _is_image(shape: Sequence[int], kind: str) -> bool:
    """Return whether a dataset may be one image."""
    if kind == "bytes":
        return not shape
    is_array = len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3, 4))
    return kind == "uint8" and 0 not in shape and (is_array or len(shape) == 1)
