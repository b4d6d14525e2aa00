"""MNIST and data sets with its files (IDX), such as Fashion-MNIST, as a source."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardkit.contracts import Entry, SourceKind
from shardkit.errors import BadImage, ConversionFailed, Problem, UsageError, setting
from shardkit.record import Record
from shardkit.sources.driver import ListedSource, Listing, Row, SplitOptions, split_names
from shardkit.sources.images import pixel_record, require_pixels
from shardkit.sources.inputs import (
    OpenedFile,
    file_at,
    place,
    place_of,
    reading,
    refusing,
    require_rows,
)
from shardkit.sources.labels import classes_option, read_classes
from shardkit.sources.recognize import having
from shardkit.system.files import as_text

_NAME = re.compile(r"(?:.*[-_])?(train|t10k|test)-(images|labels)[-.]idx[13]-ubyte(\.gz)?\Z")
_SPLITS = {"train": "train", "t10k": "test", "test": "test"}
_MAGIC = {"images": 0x803, "labels": 0x801}
"""First number of a file: unsigned bytes, with three or one dimensions."""
_IMAGES = struct.Struct(">IIII")
_LABELS = struct.Struct(">II")


class _Pair(NamedTuple):
    """The files of one split."""

    images: str
    labels: str


@dataclass(frozen=True, kw_only=True)
class MnistOptions(SplitOptions):
    """The options of this source."""

    classes: str | None = classes_option(
        "File with one class name per line, for labels 0, 1, ...", shown="numbers"
    )


class Mnist(ListedSource):
    """A folder of IDX files, perhaps compressed; images become grayscale PNG files."""

    kind = "mnist"

    def __init__(self, folder: str | Path, options: MnistOptions) -> None:
        super().__init__(folder, options)
        self.exact_sizes = False
        self.splits = split_names(options.split, ["train", "test"])
        self.class_names = read_classes(options.classes)
        files, self._others = _files_in(self.path)
        missing = [
            f"the {kind} file of the {split} split"
            for split in self.splits.values()
            for kind in ("images", "labels")
            if (split, kind) not in files
        ]
        if missing:
            raise UsageError(
                f"{folder} lacks {', '.join(missing)} (such as t10k-images-idx3-ubyte.gz);",
                remedy=f"download the data again, or choose one split with {setting('split')}",
            )
        self._pairs = [
            _Pair(files[split, "images"], files[split, "labels"]) for split in self.splits.values()
        ]

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of an image."""
        name, offset = file_at([pair.images for pair in self._pairs], entry.place)
        with reading(self._path(name), entry.stamp) as view:
            _, height, width = _header(view)
            data = view.read(offset, height * width)
        if len(data) != height * width:
            raise BadImage("the file is truncated")
        return pixel_record(entry, np.frombuffer(data, np.uint8).reshape(height, width))

    def locate(self, split: str, entry: Entry) -> str:
        """Return the file and the offset of an image."""
        number, offset = place_of(entry.place)
        return f"{self._path(self._pairs[number].images)} at byte {offset}"

    def list_images(self, listings: Mapping[str, Listing]) -> Mapping[str, str]:
        """List the images of each split, in order."""
        understood = {}
        for number, (name, split) in enumerate(self.splits.items()):
            shape = self._list(listings[name], number, split)
            understood[split] = f"{self._pairs[number].images}, {shape}"
        first = next(iter(listings.values()))
        first.ignored += self._others
        return {**understood, "label": "the label files"}

    def _list(self, listing: Listing, number: int, split: str) -> str:
        pair = self._pairs[number]
        with refusing(f"{self.path}: {pair.images}, {pair.labels}"):
            with reading(self._path(pair.images)) as view:
                count, height, width = _header(view)
                stamp = view.stamp
            require_rows(self._path(pair.images), count)
            with reading(self._path(pair.labels)) as view:
                values = _labels(view, count)
        with refusing(self._path(pair.images), ConversionFailed):
            require_pixels((height, width))
        size = height * width
        for row, value in enumerate(values):
            spot = place(number, _IMAGES.size + row * size)
            listing.add(Row(f"{split}/{row:05d}.png", listing.code(value), size, stamp, spot))
        return f"{count:,} images, {height} x {width} pixels, stored as PNG"

    def _path(self, name: str) -> str:
        return os.path.join(self.path, name)


def _files_in(folder: Path) -> tuple[dict[tuple[str, str], str], list[Problem]]:
    """Return the file of each split and kind, and the files that are not used."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise UsageError(f"the source folder {folder} cannot be read: {error.strerror}") from error
    files: dict[tuple[str, str], str] = {}
    others = []
    for name in names:  # a plain name sorts before the same name with .gz
        match = _NAME.match(name)
        if match is None:
            others.append(
                Problem(path=as_text(name), reason="neither an image file nor a label file")
            )
            continue
        key = (_SPLITS[match[1]], match[2])
        if key not in files:
            files[key] = name
        elif name == f"{files[key]}.gz":
            others.append(Problem(path=as_text(name), reason="the unpacked file is used instead"))
        else:
            raise UsageError(f"{folder} has two files of {match[2]}: {files[key]} and {name}")
    return files, others


def _header(view: OpenedFile) -> tuple[int, int, int]:
    """Return number, height and width of the images of a file."""
    data = view.read(0, _IMAGES.size)
    magic, count, height, width = _IMAGES.unpack(data.ljust(_IMAGES.size, b"\0"))
    if magic != _MAGIC["images"] or not height * width:
        raise BadImage("it is not an IDX image file")
    if _IMAGES.size + count * height * width != view.size:
        raise BadImage(
            f"it has {view.size} bytes, but {count} images, {height} x {width} pixels each, need "
            f"{_IMAGES.size + count * height * width}"
        )
    return count, height, width


def _labels(view: OpenedFile, images: int) -> bytes:
    data = view.read(0, _LABELS.size)
    magic, count = _LABELS.unpack(data.ljust(_LABELS.size, b"\0"))
    if magic != _MAGIC["labels"]:
        raise BadImage("it is not an IDX label file")
    if _LABELS.size + count != view.size:
        raise BadImage(f"it has {view.size} bytes, but {count} labels need {_LABELS.size + count}")
    if count != images:
        raise BadImage(f"there are {images} images but {count} labels")
    return view.read(_LABELS.size, count)


SOURCE = SourceKind(
    name=Mnist.kind,
    title="Convert MNIST or Fashion-MNIST (IDX files).",
    help="""Convert MNIST, or other data in its format, to a dataset in DST.

    SRC is the folder with train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte
    and t10k-labels-idx1-ubyte, each optionally with the suffix .gz. Images become grayscale PNG
    files.

    \b
    Examples:
      shardkit convert mnist MNIST/raw dataset --to lmdb
      shardkit convert mnist FashionMNIST/raw dataset --to lmdb --classes names.txt
    """,
    options=MnistOptions,
    recognize=having("*-images-idx3-ubyte*", "*-images.idx3-ubyte*"),
    source=Mnist,
)
