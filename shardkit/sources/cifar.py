"""CIFAR-10 and CIFAR-100, binary version, as a source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardkit.contracts import Entry, Recognition, SourceKind
from shardkit.errors import BadImage, UsageError, setting
from shardkit.options import option
from shardkit.record import Record
from shardkit.sources.driver import ListedSource, Listing, Row, SplitOptions, split_names
from shardkit.sources.images import as_pixels, pixel_record
from shardkit.sources.inputs import OpenedFile, file_at, place, place_of, reading, scanning
from shardkit.sources.labels import read_classes
from shardkit.sources.recognize import Overview, having

_SHAPE = (3, 32, 32)
"""Channels, rows and columns of an image, in the order of its bytes."""
_PIXELS = 3 * 32 * 32
_CHUNK = 1024
"""Images to read together while labels are listed."""


class _Layout(NamedTuple):
    """One version of the data set."""

    title: str
    splits: Mapping[str, tuple[str, ...]]
    """Files of each split."""
    names: Mapping[str, str]
    """File with the class names of each label."""


_CIFAR10 = _Layout(
    "CIFAR-10",
    {
        "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        "test": ("test_batch.bin",),
    },
    {"label": "batches.meta.txt"},
)
_CIFAR100 = _Layout(
    "CIFAR-100",
    {"train": ("train.bin",), "test": ("test.bin",)},
    {"coarse": "coarse_label_names.txt", "fine": "fine_label_names.txt"},
)


@dataclass(frozen=True, kw_only=True)
class CifarOptions(SplitOptions):
    """The options of this source."""

    label: str | None = option(
        None, help="CIFAR-100 labels to store.", metavar="fine|coarse", shown="fine"
    )


class Cifar(ListedSource):
    """The binary version of CIFAR-10 or CIFAR-100; images become PNG files.

    The folder is ``cifar-10-batches-bin`` or ``cifar-100-binary``.
    """

    kind = "cifar"

    def __init__(self, folder: str | Path, options: CifarOptions) -> None:
        super().__init__(folder, options)
        self.exact_sizes = False
        self._layout = _layout_of(self.path)
        names = list(self._layout.names)
        self._label = options.label or names[-1]
        if self._label not in names:
            raise UsageError(
                f"{setting('label', options.label)} is unknown: {self._layout.title} has "
                f"{' and '.join(names)}"
            )
        self.splits = split_names(options.split, list(self._layout.splits))
        self._files = [
            name for split in self.splits.values() for name in self._layout.splits[split]
        ]
        missing = [name for name in self._files if not (self.path / name).is_file()]
        if missing:
            raise UsageError(
                f"{folder} does not contain {', '.join(missing)};",
                remedy=f"download {self._layout.title} again, or choose one split with "
                f"{setting('split')}",
            )

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of an image."""
        name, offset = file_at(self._files, entry.place)
        with reading(str(self.path / name), entry.stamp) as view:
            data = view.read(offset, _PIXELS)
        if len(data) != _PIXELS:
            raise BadImage("the file is truncated")
        planes = np.frombuffer(data, np.uint8).reshape(_SHAPE)
        return pixel_record(entry, as_pixels(planes))

    def locate(self, split: str, entry: Entry) -> str:
        """Return the file and the offset of an image."""
        number, offset = place_of(entry.place)
        return f"{self.path / self._files[number]} at byte {offset}"

    def list_images(self, listings: Mapping[str, Listing]) -> Mapping[str, str]:
        """List the images of all files, in order."""
        for listing, split in zip(listings.values(), self.splits.values(), strict=True):
            for file in self._layout.splits[split]:
                self._list(listing, file)
        names_file = self._layout.names[self._label]
        if (self.path / names_file).is_file():
            self.class_names = read_classes(str(self.path / names_file))
        else:
            next(iter(listings.values())).ignore(names_file, "missing, so classes are numbers")
        return {
            "data": f"{self._layout.title}: 32 x 32 images, stored as PNG",
            "files": ", ".join(self._files),
            "label": f"{self._label}, named by {names_file}" if self.class_names else self._label,
        }

    def _list(self, listing: Listing, file: str) -> None:
        number = self._files.index(file)
        labels = len(self._layout.names)
        size = labels + _PIXELS
        column = list(self._layout.names).index(self._label)

        def scan(view: OpenedFile) -> None:
            if view.size % size:
                raise BadImage(
                    f"its size, {view.size} bytes, is not a multiple of {size}: it is damaged or "
                    f"is not the binary version of {self._layout.title}"
                )
            for start in range(0, view.size, size * _CHUNK):
                values = view.read(start, size * _CHUNK)[column::size]
                for row, value in enumerate(values, start // size):
                    path = f"{file.removesuffix('.bin')}/{row:05d}.png"
                    spot = place(number, row * size + labels)
                    listing.add(Row(path, listing.code(value), _PIXELS, view.stamp, spot))

        if reason := scanning(str(self.path / file), scan):
            listing.blame_rest(file, reason)


_PICKLED = {"CIFAR10": "data_batch_1", "CIFAR100": "train"}
"""A file of each Python version, by the name of torchvision's class."""


def _recognize(seen: Overview) -> Iterator[Recognition]:
    """Yield what shows one of the binary versions, or of the Python ones, which are refused."""
    yield from having("data_batch_1.bin", "test_batch.bin", "train.bin")(seen)
    for names in (("data_batch_1", "test_batch"), ("train", "test", "meta")):
        if {*names} <= {*seen.files()}:
            yield Recognition(" and ".join(names))


def _layout_of(folder: Path) -> _Layout:
    if not folder.is_dir():
        raise UsageError(f"the source folder {folder} does not exist")
    for layout in (_CIFAR10, _CIFAR100):
        files = [name for names in layout.splits.values() for name in names]
        if any((folder / name).is_file() for name in files):
            return layout
    python = [name for name, file in _PICKLED.items() if (folder / file).is_file()]
    if python:
        dataset = f"torchvision.datasets.{python[0]}({str(folder.resolve().parent)!r})"
        raise UsageError(
            f"{folder} is the Python version of CIFAR, whose pickle files could run any code",
            remedy="download the binary version; or convert it in Python with torchvision, which "
            f"checks its hash: shardkit.convert({dataset}, 'DST/train', to='lmdb'), and "
            "with train=False for DST/test",
        )
    raise UsageError(
        f"{folder} contains neither data_batch_1.bin (CIFAR-10) nor train.bin (CIFAR-100)"
    )


SOURCE = SourceKind(
    name=Cifar.kind,
    title="Convert the binary version of CIFAR-10 or CIFAR-100.",
    help="""Convert CIFAR-10 or CIFAR-100 to a dataset in DST.

    SRC is the folder of the binary version: cifar-10-batches-bin or cifar-100-binary. Images become
    PNG files, which are lossless, unless you use --resize 32x32 --encode raw.

    \b
    Examples:
      shardkit convert cifar cifar-10-batches-bin dataset --to lmdb
      shardkit convert cifar cifar-100-binary dataset --to hdf5 --label coarse --split train
    """,
    options=CifarOptions,
    recognize=_recognize,
    source=Cifar,
)
