"""MNIST and data sets with its files (IDX), such as Fashion-MNIST, as a source."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardkit.contracts import Entry, Scan, SourceKind, SourceOption
from shardkit.errors import BadImage, Problem, UsageError
from shardkit.record import Record
from shardkit.sources.images import pixel_record
from shardkit.sources.inputs import View, place, place_of, reading
from shardkit.sources.labels import LabelValues, read_classes
from shardkit.sources.listing import SPLIT_OPTION, ListedSource, Listing, scan_of, split_names
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


class Mnist(ListedSource):
    """A folder of IDX files, perhaps compressed; images become grayscale PNG files.

    Args:
        folder: The folder of ``train-images-idx3-ubyte`` and the others.
        split: ``train`` or ``test``; None reads both, as splits.
        classes: A text file with the class name of each label; by default, classes are numbers.
    """

    kind = "mnist"

    def __init__(
        self,
        folder: str | Path,
        *,
        split: str | None = None,
        classes: str | None = None,
        _reopened: bool = False,
    ) -> None:
        self._folder = Path(folder)
        self._splits = split_names(split, ["train", "test"])
        self._names = read_classes(classes)
        self._reopened = _reopened
        found, self._others = _find(self._folder)
        missing = [
            f"the file of {kind} of the split {part}"
            for part in self._splits.values()
            for kind in ("images", "labels")
            if (part, kind) not in found
        ]
        if missing:
            raise UsageError(
                f"{folder} lacks {', '.join(missing)} (such as t10k-images-idx3-ubyte.gz); "
                "download the data again, or choose one split with --split"
            )
        self._pairs = [
            _Pair(found[part, "images"], found[part, "labels"]) for part in self._splits.values()
        ]
        named = True if classes or _reopened else None
        super().__init__(folder, {"split": split, "class_names": named})

    @classmethod
    def find(cls, path: Path, described: Mapping[str, Mapping[str, Any]]) -> Mnist:
        """Open the folder that a dataset was made from."""
        options = next(iter(described.values()))
        return cls(path, split=options.get("split"), _reopened=bool(options.get("class_names")))

    def paths(self) -> Sequence[Path]:
        """Return the folder."""
        return [self._folder]

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of an image."""
        number, offset = place_of(entry.place)
        with reading(self._path(self._pairs[number].images), entry.stamp) as view:
            _, height, width = _header(view)
            data = view.read(offset, height * width)
        if len(data) != height * width:
            raise BadImage("the file is truncated")
        return pixel_record(entry, np.frombuffer(data, np.uint8).reshape(height, width))

    def locate(self, split: str, entry: Entry) -> str:
        """Return the file and the offset of an image."""
        number, offset = place_of(entry.place)
        return f"{self._path(self._pairs[number].images)} at byte {offset}"

    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        """List the images of each split, in order.

        Raises:
            UsageError: If a file is damaged, or labels have no name.
        """
        labels = LabelValues()
        listings = {name: Listing(labels) for name in self._splits}
        understood = {}
        for number, (name, part) in enumerate(self._splits.items()):
            shape = self._list(listings[name], number, part)
            understood[part] = f"{self._pairs[number].images}, {shape}"
        next(iter(listings.values())).ignored += self._others
        understood["label"] = labels.describe()
        assigned = labels.assign(classes, self._names, reopened=self._reopened)
        return scan_of(self, listings, assigned, understood, exact_sizes=False)

    def _list(self, listing: Listing, number: int, part: str) -> str:
        pair = self._pairs[number]
        try:
            with reading(self._path(pair.images)) as view:
                count, height, width = _header(view)
                stamp = view.stamp
            with reading(self._path(pair.labels)) as view:
                values = _labels(view)
        except BadImage as error:
            raise UsageError(f"{self._folder}: {pair.images}, {pair.labels}: {error}") from error
        if len(values) != count:
            raise UsageError(
                f"{self._path(pair.images)} has {count} images, but {pair.labels} has "
                f"{len(values)} labels"
            )
        size = height * width
        for row, value in enumerate(values):
            code = listing.labels.code(value)
            spot = place(number, _IMAGES.size + row * size)
            listing.add(f"{part}/{row:05d}.png", code, size, stamp, spot)
        return f"{count:,} images of {height} x {width} pixels, stored as PNG"

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)


def _find(folder: Path) -> tuple[dict[tuple[str, str], str], list[Problem]]:
    """Return the file of each split and kind, and the files that are not used."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise UsageError(f"the source folder {folder} cannot be read: {error.strerror}") from error
    found: dict[tuple[str, str], str] = {}
    others = []
    for name in names:  # a plain name sorts before the same name with .gz
        match = _NAME.match(name)
        if match is None:
            others.append(Problem(path=as_text(name), reason="not a file of images or labels"))
            continue
        key = (_SPLITS[match[1]], match[2])
        if key not in found:
            found[key] = name
        elif name == f"{found[key]}.gz":
            others.append(Problem(path=as_text(name), reason="the unpacked file is used"))
        else:
            raise UsageError(f"{folder} has two files of {match[2]}: {found[key]} and {name}")
    return found, others


def _header(view: View) -> tuple[int, int, int]:
    """Return number, height and width of the images of a file."""
    data = view.read(0, _IMAGES.size)
    magic, count, height, width = _IMAGES.unpack(data.ljust(_IMAGES.size, b"\0"))
    if magic != _MAGIC["images"] or not height * width:
        raise BadImage("it is not an IDX file of images")
    if _IMAGES.size + count * height * width != view.size:
        raise BadImage(
            f"it has {view.size} bytes; {count} images of {height} x {width} pixels take "
            f"{_IMAGES.size + count * height * width}"
        )
    return count, height, width


def _labels(view: View) -> bytes:
    data = view.read(0, _LABELS.size)
    magic, count = _LABELS.unpack(data.ljust(_LABELS.size, b"\0"))
    if magic != _MAGIC["labels"]:
        raise BadImage("it is not an IDX file of labels")
    if _LABELS.size + count != view.size:
        raise BadImage(f"it has {view.size} bytes; {count} labels take {_LABELS.size + count}")
    return view.read(_LABELS.size, count)


SOURCE = SourceKind(
    name=Mnist.kind,
    title="Convert MNIST or Fashion-MNIST (IDX files).",
    help="""Convert MNIST, or data with the same files, to a dataset in DST.

    SRC is the folder of train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte
    and t10k-labels-idx1-ubyte, each perhaps with the suffix .gz. Images become grayscale PNG files.

    \b
    Examples:
      shardkit convert mnist MNIST/raw dataset --to lmdb
      shardkit convert mnist FashionMNIST/raw dataset --to lmdb --classes names.txt
    """,
    options=(
        SPLIT_OPTION,
        SourceOption(
            flags="--classes",
            metavar="FILE",
            help="Class names, one per line: of label 0, 1, ...  [default: numbers]",
        ),
    ),
    open=Mnist,
    find=Mnist.find,
)
